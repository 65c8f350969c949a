"""What a kernel must do at least, from its arguments: the flops of its products, and the bytes of what it reads and writes.

The same table serves the plan, which has arrays (plan.py), and Triton's ``launch_metadata``, which has tensors: a profiler
such as proton sees what ``explain`` says. Vectors of one number per column are left out. With many adapters on one W lengths
are not known, so each product counts once for every token.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import triton


class Cost(NamedTuple):
    """Flops of products, by the width of their operands, and bytes."""

    flops16: float = 0
    flops32: float = 0
    bytes: float = 0
    flops8: float = 0

    @property
    def flops(self) -> float:
        return self.flops8 + self.flops16 + self.flops32

    def __add__(self, other: Any) -> Cost:
        return Cost(*[a + b for a, b in zip(self, other, strict=True)])


def product(M: int, N: int, K: int, operand: Any) -> Cost:
    """(M, K) (K, N), in the dtype of this operand."""
    return flops_of(M * N * K, operand)


def flops_of(terms: int, operand: Any) -> Cost:
    """Of so many, each a product and a sum."""
    flops, t = 2.0 * terms, matrix(operand)
    if t.dtype.itemsize == 1:
        return Cost(flops8=flops)
    return Cost(flops16=flops) if t.dtype.itemsize == 2 else Cost(flops32=flops)


def moved(*arrays: Any) -> Cost:
    return Cost(bytes=float(sum([matrix(a).nbytes for a in arrays if a is not None])))


def given(*arguments: Any) -> int:
    """How many of these there are, of numbers those other than 0."""
    return sum(bool(a) if isinstance(a, int) else a is not None for a in arguments)


def matrix(a: Any) -> Any:
    """Behind a tensor descriptor, the plan's or Triton's."""
    return getattr(a, "array", None) or getattr(a, "base", a)


def rows_of(t: Any, count: int, columns: int) -> Cost:
    """Rows that are looked up in a table."""
    return Cost(bytes=float(count * columns * t.dtype.itemsize))


def decoded(a: Any) -> Cost:
    """Of the columns that are decoded the codes with their scales."""
    stored = moved(a.codes, a.scales, a.scales2).bytes
    return Cost(bytes=stored * (a.last - a.first) / max(1, a.K))


def looked_up(a: Any) -> Cost:
    """W + s B A of the rows that the tokens ask for."""
    return product(a.T, a.D, a.R, a.W) + rows_of(a.W, a.T, a.D) + rows_of(a.A, a.T, a.R)


def embedding_bwd(a: Any) -> Cost:
    return product(a.T, a.D, a.R * given(a.partial_A, a.partial_Y), a.dy) + rows_of(a.W, a.T * given(a.partial_m), a.D)


class Work(NamedTuple):
    """What a kernel does. ``moves`` are the arguments that it reads or writes whole; an ``out`` that it adds to is read too.
    ``products`` are sizes, behind them an operand whose dtype they have. An argument that is not given counts for nothing, and
    ``t?other|more`` only where one of the others is. ``rest``: what else there is, from all arguments."""

    moves: str
    products: str = ""
    rest: Callable[[Any], Cost] | None = None


GEMM = Work("x x_masked w h b out pre_scale residual", "M N K x, M N K x_masked, M N R h")
MULTI_GEMM = Work("x w h b out pre_scale g", "M N K x, M N R x")
QUANT = Work("codes scales scales2 A B partial dense", "N K R A")
BANK_NORM = Work("W A B partial", "N K R G A")
COMPOSE_FWD, COMPOSE_BWD = Work("base lora y"), Work("dy base?partial_g lora?partial_g dbase dlora partial_g partial_bias")
FP8_ROWS = Work("x other by out scale")
SMALL, GRAMS = "M N K x, M N R x, M N R u", "R R N A?parts_A, R R K A?parts_B"
COSTS = {
    "act_bwd_kernel": Work("da gate up dgate dup"),
    "act_fwd_kernel": Work("gate up a"),
    "add_parts_kernel": Work("sums part h b out pre_scale u dA", "M N R x, M N R u"),
    "bank_kernel": Work("x out"),
    "by_g_kernel": Work("t out"),
    "choose_kernel": Work("partial c out"),
    "codes_parts_kernel": Work("x codes scales scales2 out part h b", "M N K x, M N R x?b"),
    "combine_kernel": Work("rows place gates out"),
    "compose_bwd_kernel": COMPOSE_BWD,
    "compose_fwd_kernel": COMPOSE_FWD,
    "copy_kernel": Work("src0 src1 src2 src3 out"),
    "dequantize_kernel": Work("out", rest=decoded),
    "drop_kernel": Work("x out"),
    "embedding_bwd_kernel": Work("dy ids h b partial_A partial_Y partial_m", rest=embedding_bwd),
    "embedding_finish_kernel": Work("partial_Y partial_m B dB"),
    "embedding_kernel": Work("ids B y", rest=lambda a: looked_up(a) + (looked_up(a) if a.OWN_NORM else Cost())),
    "embedding_ready_kernel": Work("ids B h b", rest=lambda a: rows_of(a.A, a.T, a.R)),
    "embedding_tile_kernel": Work("ids h b y", "T D R W", lambda a: rows_of(a.W, a.T, a.D)),
    "embedding_walk_kernel": Work("ids B y", rest=looked_up),
    "epilogue_kernel": Work("v residual out"),
    "factors_kernel": Work("x dh dA dz h dB", "R K M x, R N M x"),
    "finish_kernel": Work("partial_m partial_bias partial_B dB"),
    "fp8_blocks_kernel": FP8_ROWS,
    "fp8_gemm_kernel": Work("x x_scale w w_scale h b out pre_scale", "M N K x, M N R h"),
    "fp8_rows_kernel": FP8_ROWS,
    "gated_bwd_kernel": Work("da z dz"),
    "gated_fwd_kernel": Work("z a"),
    "gates_kernel": Work("dy rows place out"),
    "gemm_pointer_kernel": GEMM,
    "gemm_tma_kernel": GEMM,
    "hash_kernel": Work("A B out"),
    "lost_kernel": Work("m c"),  # of lost rows there are few, if any
    "merge_kernel": Work("W A B out", "N K R A"),
    "multi_codes_kernel": Work("x x_scale w w_scale h b out pre_scale g", "M N K x, M N R h"),
    "multi_count_kernel": Work("ids counts"),
    "multi_drop_kernel": Work("x out"),
    "multi_epilogue_kernel": Work("v h b out pre_scale g", "M N R h"),
    "multi_expand_kernel": Work("part b m c h lora g", "M N R h"),
    "multi_finish_kernel": Work("partial_m"),
    "multi_gemm_pointer_kernel": MULTI_GEMM,
    "multi_gemm_tma_kernel": MULTI_GEMM,
    "multi_grad_kernel": Work("u v out", "M P Q u"),
    "multi_h_kernel": Work("x f h pad", "M R K x"),
    "multi_low_kernel": Work("x f b m c h lora g", "M R K x, M R N x"),
    "multi_norm_kernel": BANK_NORM,
    "multi_ranks_kernel": Work("ranks"),
    "multi_route_kernel": Work("ids counts offsets order place"),
    "multi_routes_kernel": Work("ids g"),
    "multi_scale_kernel": Work("dy saved h g dz partial_m partial_bias partial_B", "M N R dy?BLOCK_R"),
    "multi_shrink_kernel": Work("x f part", "M R K x"),
    "multi_small_kernel": Work("x w lora g out pre_scale", "M N K x"),
    "multi_sum_kernel": Work("partial out"),
    "multi_table_kernel": Work("wide b h masked owner clean g"),
    "norm_add_kernel": Work("parts_A parts_B gram_A gram_B A B onto_A onto_B dA dB", "R K R A?parts_A, R N R A?parts_B"),
    "norm_bwd_finish_kernel": Work(
        "parts G onto out",
        rest=lambda a: product(a.R, a.K if a.OF_A else a.N, a.R, a.A) + moved(a.A if a.OF_A else a.B),
    ),
    "norm_grams_add_kernel": Work("parts_A parts_B gram_A gram_B"),
    "norm_grams_kernel": Work("dz A?parts_B B?parts_A parts_A parts_B", GRAMS),
    "norm_kernel": Work("W A B partial", rest=lambda a: flops_of(a.N * prod(matrix(a.A).shape), a.A)),
    "norm_pass_kernel": Work("W A B parts_A parts_B gram_A gram_B", f"N K R W?parts_A, N K R W?parts_B, {GRAMS}"),
    "norm_products_kernel": Work(
        "dz w_left w_left gram_A a onto_A dA B gram_B onto_B dB",
        "R K N a, R K R a, N R K a, N R R a",
    ),
    "norm_terms_kernel": Work("B out"),
    "norm_tokens_kernel": Work("B?dz dz out"),
    "planes_bwd_kernel": COMPOSE_BWD,
    "planes_fwd_kernel": COMPOSE_FWD,
    "quant4_strips_kernel": QUANT,
    "quant_kernel": QUANT,
    "rest_kernel": Work("base h b out pre_scale", "M N R base"),
    "rows_kernel": Work("gates out out"),
    "scale_kernel": Work("dy dz beside partial_m partial_bias partial_B saved?dm|dc h?BLOCK_R dB?SINGLE", "M N R dy?BLOCK_R"),
    "segment_scan_kernel": Work("partial_A key order sums"),
    "segment_total_kernel": Work("sums sums key"),
    "shrink_kernel": Work("x a part", "M R K x"),
    "slots_kernel": Work("z z h b", "M N R b"),
    "small_codes_kernel": Work("x codes scales scales2 part h b out pre_scale u dA", SMALL),
    "small_kernel": Work("x w part h b out pre_scale u dA", SMALL),
    "small_norm_kernel": Work("x w a part h b out pre_scale", "M N K x, M N R x, K N R x"),
    "split_kernel": Work("x out scale"),
    "strip_norm_kernel": Work("W A B partial grams", "N K R G A, R K R G A"),
    "strip_root_kernel": Work("B partial grams c", "N R R G c"),
    "sum_kernel": Work("partial out"),
    "mx_rows_kernel": FP8_ROWS,
    "turn_kernel": Work("codes out"),
}


def cost_of(kernel: str, args: Mapping[str, Any]) -> Cost:
    """The cost of a launch, by the name of its kernel and its arguments by name."""
    work = COSTS[kernel]
    found = moved(*[_asked(each, args) for each in work.moves.split()], args["out"] if args.get("ACCUMULATE") else None)
    for each in work.products.split(",") if work.products else ():
        *sizes, of = each.split()
        operand = _asked(of, args)
        if operand is not None:
            found += flops_of(prod([args[size] for size in sizes]), operand)
    return found if work.rest is None else found + work.rest(SimpleNamespace(**args))


def _asked(what: str, args: Mapping[str, Any]) -> Any:
    name, _, others = what.partition("?")
    return args.get(name) if not others or given(*map(args.__getitem__, others.split("|"))) else None


def launched(grid: Any, metadata: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Triton's ``launch_metadata``: asked for by those who listen to launches, by nobody else. Names as proton has them."""
    cost = cost_of(metadata.name, args)
    return {"name": metadata.name} | {key: value for key, value in cost._asdict().items() if value}


kernel = triton.jit(launch_metadata=launched)  # what is launched, in the place of triton.jit
# Of one that takes many tokens: it is compiled once for numbers that 16 divides and for others, which follow the tokens.
kernel_of_any_length = triton.jit(launch_metadata=launched, do_not_specialize_on_alignment=("M", "PROGRAMS", "strips"))
