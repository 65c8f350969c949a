"""Search the configurations of an op on this GPU: ``python -m bench tune OP``.

    python -m bench tune norm --device cuda --jobs 8 --json FILE
    python -m bench tune product --device cuda --draw 120 --seconds 500 --json bench/results/tune.jsonl:h200/product
    python -m bench tune few --device cuda --shape 64,4096,14336,16 --json FILE
    python -m bench tune small --device cuda --write fdora/triton/tiles/small.json

Plans ask a pure function for each configuration. The search answers in its place, one candidate after the other, and times the
call that asked: GPU time of replayed CUDA graphs, all candidates of a shape in turns, medians; weights in turn from a set
larger than the cache. The first result of each candidate is compared with what float32 makes of the same inputs. A candidate
that does not fit the GPU is left out with its reason. ``chosen`` is what plans take. Nothing is timed outside of commands:
what they find is data that a pure function reads. `python -m bench fit` and `fit_few` read the rows of ``product`` and ``few``.
``--device cpu``: each candidate once, interpreted.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor

import fdora
from bench import clock, ways
from bench.attempt import Failures
from bench.multi_ways import Bank, build
from bench.norm_model import linears
from bench.save import save as save_json
from bench.shapes import CACHE, copied, draw
from bench.suite import Run, Suite, numbers
from bench.truth import norm_of, rel_l2
from bench.ways import Inputs, S
from fdora.functional import dora_linear, dora_norm, dora_norm_tree
from fdora.quant import quantize
from fdora.triton.gemm import Epilogue
from fdora.triton.multi_bwd import GradConfig
from fdora.triton.multi_gemm import HConfig
from fdora.triton.multi_norm import StripConfig as BankStripConfig
from fdora.triton.multi_rows import LookConfig
from fdora.triton.multi_small import RoomConfig
from fdora.triton.product import scaled_product, summed_product
from fdora.triton.runtime import walk
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import device_of
from fdora.triton.tiles import measured
from fdora.triton.tiles.codes import CodesConfig
from fdora.triton.tiles.configs import GemmConfig, NormConfig, ScaleConfig, SmallConfig, TreeConfig, power_of_two
from fdora.triton.tiles.product import SHARED, Way
from fdora.triton.tiles.quant import QuantConfig, StripConfig

DTYPE = torch.bfloat16
Shape = tuple[int, ...]
Candidates = dict[str, Any]
# BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, EPILOGUE_SUBTILE, persistent, num_warps, num_stages: those that the model knows
TILES = [
    GemmConfig(True, *tile)
    for tile in (
        *((128, 256, 64, 8, True, True, 8, 4), (256, 128, 64, 8, True, True, 8, 4), (64, 256, 64, 8, True, True, 4, 4)),
        *((64, 128, 64, 8, False, False, 4, 4), (64, 64, 128, 8, False, False, 4, 6), (64, 128, 128, 8, False, True, 4, 4)),
        (128, 128, 64, 8, False, True, 4, 6),
    )
]
WEIGHTS = ((4096, 4096), (4096, 14336), (14336, 4096), (2304, 22144), (1024, 10112))  # K, N
BANKS = tuple((M, K, N) for M in (8192,) for K, N in ((4096, 4096), (4096, 14336)))
MIXED = [8, 16, 64, 256]


class Call(NamedTuple):
    """What is timed: ``make`` plans it as the search answers, and gives a function for each set of inputs."""

    make: Callable[[], Sequence[Callable[[], Any]]]
    want: Tensor | None  # of the first; None: as the first that ran
    most: float = 5e-3  # relative L2


class Op(NamedTuple):
    """``chooser``: the function that plans ask, where they look it up; ``space``: its candidates by name."""

    chooser: str
    shapes: Sequence[Shape]
    space: Callable[[Shape], Candidates]
    call: Callable[[Shape, str], Call]
    fixed: Mapping[str, Any] = {}
    bare: Callable[[Shape, str], Call] | None = None
    """The same by torch alone."""


def randn(device: str, *shape: int, std: float = 1.0) -> Tensor:
    return torch.randn(*shape, device=device).mul_(std).to(DTYPE)


def sets_of(size: int, device: str) -> range:
    """So many that none stays in the cache."""
    return range(1 if device == "cpu" else max(2, min(16, CACHE // (2 * size))))


def named(config: type, *tiles: tuple) -> Candidates:
    return {" ".join(map(str, tile)): config(*tile) for tile in tiles}


# Layers


def linear(shape: Shape, device: str, both: bool = False, codes: bool = False, bare: bool = False) -> Call:
    """One layer of any number of tokens, its norm given: forward, or forward and backward (its dx is compared). ``bare``: its
    matrix products."""
    i = Inputs.random(*shape[:4], DTYPE, device)
    layers = [i, *(copied(i) for _ in sets_of(i.W.numel(), device)[1:])]

    def one(each: Inputs) -> Callable[[], Any]:
        W = quantize(each.W, "nf4", nested=True) if codes else each.W
        leaves = {"A": each.A, "B": each.B, "m": each.m}
        way = ways.trained(lambda x: dora_linear(x, W, each.A, each.B, each.m, s=S, norm=each.norm), each, leaves, "dora")
        way = ways.bare(each) if bare else way
        return (way.both if bare else lambda: way.both()["dx"]) if both else way.forward

    x, A, B, m, dy = (t.detach().float() for t in (i.x, i.A, i.B, i.m, i.dy))
    W = quantize(i.W, "nf4", nested=True).dequantize(torch.float32) if codes else i.W.float()
    scaled = (m / i.norm)[:, None] * (W + S * B @ A)
    return Call(lambda: [one(each) for each in layers], None if bare else dy @ scaled if both else x @ scaled.T)


def product(shape: Shape, device: str, forward: bool, way: str = "") -> Call:
    """x W^T and dz W with their low-rank terms, planned alone; ``bare`` without them."""
    M, K, N, r = shape
    M_, K_, N_ = (M, K, N) if forward else (M, N, K)  # x is (M_, K_), y (M_, N_)
    sets = []
    for _ in sets_of(M * K + K * N + M * N, device):
        W, b = ((N_, K_), (N_, r)) if forward else ((K_, N_), (r, N_))
        m = torch.rand(N_, device=device) + 1
        sets.append((randn(device, M_, K_), randn(device, M_, r), randn(device, *W, std=K_**-0.5), randn(device, *b), m))
    x, h, W, b, m = sets[0]
    w, low = (W.T, b.T) if forward else (W, b)
    want = None if way else (x.float() @ w.float() + h.float() @ low.float()) * (m if forward else 1)

    def make() -> list[Callable[[], Any]]:
        plan = Builder("product", device_of(x.device))
        X, H, W_, B = (plan.matrix(walk.like(t)) for t in sets[0][:4])
        scale = plan.vector(walk.like(m))
        ones = torch.ones_like(m)
        c = plan.vector(walk.like(ones))
        y = plan.result("y", (M_, N_), x.dtype)
        if way == "bare":
            plan.product(y, X, W_.T if forward else W_)
        elif forward:
            scaled_product(plan, y, X, H, W_, B, Epilogue("scale", scale, c), None)
        else:
            summed_product(plan, y, X, H, W_, B, False)
        done = plan.plan()
        return [lambda each=each: walk.run(done, (*each, ones), (1.0,) * len(done.scalars))[0] for each in sets]

    return Call(make, want)


def ways_of_product(shape: Shape, forward: bool) -> Candidates:
    ways: Candidates = {" ".join(["fused", *map(str, tile[1:])]): Way("fused", tile, 0.0) for tile in TILES}
    return ways | {way: Way(way, None, 0.0) for way in (("after",) if forward else ("after", "first"))}


def every_tile(shape: Shape) -> Candidates:
    """What fits on Hopper, with its deepest pipeline, and where programs do not walk with one that leaves room for a second."""
    found: Candidates = {}
    sides = [(m, n) for m in (64, 128, 256) for n in (64, 128, 256) if m * n <= 32768]
    for (m, n), k, persistent in itertools.product(sides, (64, 128), (True, False)):
        if k == 128 and m * n > 8192:
            continue
        subtile = m * n > 16384
        out = 2 * m * n // (2 if subtile else 1)  # on its way from registers to memory
        deepest, shared = ((room - out) // (2 * k * (m + n)) for room in (SHARED, SHARED // 2))
        depths = {min(8, deepest)} if persistent or subtile else {min(8, deepest), min(8, shared)}
        for stages, warps in itertools.product(sorted(depths), (4, 8) if m * n == 16384 else (8 if subtile else 4,)):
            if stages >= 2:
                tile = GemmConfig(True, m, n, k, 8, subtile, persistent, warps, stages)
                found[" ".join(["fused", *map(str, tile[1:])])] = Way("fused", tile, 0.0)
    return found


# Norms


def norm(shape: Shape, device: str, codes: bool = False) -> Call:
    N, K, r = shape
    i = Inputs.random(1, K, N, r, DTYPE, device)
    A, B = i.A.detach(), i.B.detach()
    Ws: list[Any] = [i.W.clone() for _ in sets_of(N * K, device)]
    if codes:
        Ws = [quantize(W, "nf4", nested=True) for W in Ws]
    want = norm_of(Ws[0].dequantize(torch.float32) if codes else i.W, A, B, S)
    return Call(lambda: [lambda W=W: dora_norm(W, A, B, s=S) for W in Ws], want, 1e-6)


def tiles_of_norm(shape: Shape) -> Candidates:
    """Single tiles, and strips with W's tiles ahead up to the rank that one slab holds."""
    r = shape[2]
    wide = power_of_two(r)
    sides = [(128, 256, 64, 8, 3, 1), (128, 256, 128, 8, 2, 1), (256, 128, 64, 8, 3, 1), (128, 128, 64, 4, 3, 2)]
    sides += [(128, 128, 64, 8, 3, 2), (128, 128, 128, 4, 2, 2), (64, 256, 64, 4, 3, 2), (64, 128, 64, 4, 4, 3)]
    found = [(128, 128, min(32, wide), "ieee", 4, 3)]
    found += [(n, k, slab, "ieee", *how, True, 0, 0, on) for n, k, slab, *how, on in sides[: 8 if r > 64 else 1]]
    strips = [(64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2)]
    spans = (256, 512, 1024, 2048) if r <= 256 else ()
    found += [(n, k, wide, "ieee", *how, False, how[1], span) for n, k, *how in strips for span in spans]
    return named(NormConfig, *found)


def tiles_of_codes(shape: Shape) -> Candidates:
    by_pointers = [(128, 128, 32, 8, 3), (128, 128, 64, 8, 3), (128, 256, 64, 8, 3)]
    by_tma = [(128, 256, 64, 8, 3), (128, 256, 32, 8, 4), (128, 256, 128, 8, 2), (256, 128, 64, 8, 3), (128, 128, 64, 8, 4)]
    found = [(n, k, r, "ieee", *how, run) for n, k, r, *how in by_pointers for run in (0, 1)]
    return named(QuantConfig, *found, *((n, k, r, "ieee", *how, run, True) for n, k, r, *how in by_tma for run in (1, 4)))


def strips_of_codes(shape: Shape) -> Candidates:
    sides = [(64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 4, 3), (128, 64, 8, 3), (64, 128, 4, 3)]
    wide = power_of_two(shape[2])
    return named(StripConfig, *((n, k, wide, *how, span) for n, k, *how in sides for span in (512, 1024, 2048)))


def tree(shape: Shape, device: str) -> Call:
    """The norms of one decoder layer: width, width of the MLP, width of k and v, rank."""
    Ws, pairs = linears(shape[:3], 1, shape[3], device)
    c = torch.cat([norm_of(W, *pair, S) for W, pair in zip(Ws, pairs, strict=True)])
    return Call(lambda: [lambda: torch.cat(list(dora_norm_tree(Ws, pairs, s=S)))], c, 1e-6)


def tiles_of_tree(shape: Shape) -> Candidates:
    wide = power_of_two(shape[3])
    slabs = [(64, 64, wide, 4, 3, 3, 4), (64, 64, wide, 4, 3, 2, 8), (128, 64, wide, 8, 3, 3, 2), (64, 128, wide, 8, 3, 3, 2)]
    parts = [(n, k, 64, *how) for n, k, *how in ((64, 128, 4, 3, 0, 4), (128, 64, 4, 3, 0, 4), (128, 128, 8, 3, 0, 2))]
    return named(TreeConfig, *(slabs if wide <= 128 else []), *(parts if wide > 64 else [(128, 128, 16, 4, 3, 0, 2)]))


# Few tokens, backward's pass


def tiles_of_small(shape: Shape) -> Candidates:
    sides = ((16, 256), (16, 512), (32, 128), (32, 256), (32, 512), (64, 64), (64, 128), (64, 256), (128, 64), (128, 128))
    return named(SmallConfig, *((*side, *how) for side in sides for how in ((4, 3), (4, 5), (8, 3), (2, 5))))


def tiles_of_few_codes(shape: Shape) -> Candidates:
    full = [(64, 128, 1, 4, 4, p) for p in (1, 2, 4, 8, 16)] + [(64, 256, 1, 4, 3, p) for p in (1, 2, 4)]
    sliced = [(32, 128, 4, 4, 3, 1), (32, 128, 4, 4, 3, 2)] if shape[0] <= 16 else []
    return named(CodesConfig, *full, (128, 128, 1, 8, 3, 2), (128, 128, 1, 8, 3, 4), *sliced)


def tiles_of_pass(shape: Shape) -> Candidates:
    """With and without dB, which a tile forms while it has dz."""
    r = shape[3]
    sides = ((32, 64, 4, 1), (32, 64, 4, 3), (64, 64, 4, 1), (64, 64, 4, 3), (32, 128, 4, 1), (32, 128, 4, 3), (16, 256, 4, 1))
    each = itertools.product(sides, (64, 128, 256, 512), (0, power_of_two(r)) if r <= 64 else (0,))
    return named(ScaleConfig, *((m, n, rows, slab, *how) for (m, n, *how), rows, slab in each if rows >= m))


# Banks of adapters


def bank(shape: Shape, device: str, ranks: Sequence[int], both: bool) -> Call:
    way = build("multi", Bank.random(*shape, list(ranks), DTYPE, device))
    return Call(lambda: [(lambda: way.both()["dx"].detach()) if both else way.forward], None)


def bank_norm(shape: Shape, device: str) -> Call:
    i = Bank.random(*shape, [16] * 4, DTYPE, device)
    return Call(lambda: [lambda: dora_norm(i.W, i.A.detach(), i.B.detach(), s=i.s)], i.norm, 1e-5)


def space(config: type, *tiles: tuple) -> Callable[[Shape], Candidates]:
    return lambda shape: named(config, *tiles)


DECODE = [(1, 8192, stages, 4, w) for stages in (2, 3, 4) for w in (4, 8)] + [(1, 4096, 4, 4, 8), (2, 4096, 4, 4, 8)]
LOW = [
    (64, 64, 64, 4, 4),
    (64, 64, 64, 4, 6),
    (64, 64, 128, 8, 3),
    (64, 64, 256, 8, 3),
    (64, 32, 128, 4, 4),
    (128, 64, 64, 8, 8),
]
LOW += [(128, 64, 128, 8, 4), (128, 128, 64, 8, 6)]
GRAD = [(64, 128, 32, 4, 4), (64, 128, 64, 4, 3), (64, 256, 64, 8, 3), (128, 128, 64, 8, 3), (64, 128, 32, 4, 5)]
LOOK = [(area, chunks, 1) for area in (8192, 4096) for chunks in (32, 64)] + [(8192, 32, 3), (8192, 64, 3), (4096, 64, 4)]
STRIPS = [(64, 64, stages, 4, 2) for stages in (3, 4, 5, 6)] + [(128, 64, stages, 8, 1) for stages in (4, 6, 8)]
SCALES = [(64, 64, rows, 0, 4, 3) for rows in (128, 256, 512)] + [(32, 64, 256, 0, 4, 4), (64, 128, 256, 0, 8, 3)]

FACADES = "fdora.triton"
LAYERS = [(M, K, N, 16) for M in (64, 32, 16, 1) for K, N in WEIGHTS] + [
    (M, K, N, 64) for M in (64, 16) for K, N in WEIGHTS[:3]
]
SMALLS = [
    (M, K, N, 16)
    for M in (16, 64)
    for N, K in ((1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (512, 512))
]
NORMS = [(24832, 8832, 8), (4096, 14336, 16), (4096, 14336, 64), (3840, 15360, 96), (4096, 14336, 192), (4096, 4096, 384)]
ALL_NARROW = {f"{FACADES}.small.takes_narrow_tiles": True}
PASSES = [
    (4964, 896, 8064, 384),
    (2354, 3072, 8192, 192),
    (512, 768, 16000, 16),
    (3779, 4096, 12288, 128),
    (576, 4096, 2560, 16),
]
mixed = partial(bank, ranks=MIXED * 8, both=True)
OPS: dict[str, Op] = {
    "norm": Op(f"{FACADES}.norm.norm_config", NORMS, tiles_of_norm, norm),
    "norm_codes": Op(
        f"{FACADES}.norm_codes.quant_config", [(4096, 14336, r) for r in (128, 384)], tiles_of_codes, partial(norm, codes=True)
    ),
    "norm_strips": Op(
        f"{FACADES}.norm_codes.strip_config", [(4096, 14336, r) for r in (16, 64)], strips_of_codes, partial(norm, codes=True)
    ),
    "tree": Op(f"{FACADES}.tree_table.tree_config", [(4096, 14336, 1024, r) for r in (16, 64, 128, 384)], tiles_of_tree, tree),
    "few": Op(
        f"{FACADES}.small.takes_narrow_tiles",
        LAYERS,
        lambda _: {"small": True, "general": False},
        linear,
        bare=partial(linear, bare=True),
    ),
    "small": Op(f"{FACADES}.small.small_config", SMALLS, tiles_of_small, linear, ALL_NARROW, partial(linear, bare=True)),
    "codes": Op(f"{FACADES}.small.small_codes_config", LAYERS, tiles_of_few_codes, partial(linear, codes=True)),
    "pass": Op(
        f"{FACADES}.scale.scale_config",
        PASSES,
        tiles_of_pass,
        partial(linear, both=True),
        bare=partial(linear, both=True, bare=True),
    ),
    "bank_norm": Op(f"{FACADES}.multi_norm.strip_config", BANKS, space(BankStripConfig, *STRIPS), bank_norm),
    "bank_decode": Op(
        f"{FACADES}.multi_small.room_config",
        [(64, K, N) for _, K, N in BANKS],
        space(RoomConfig, *DECODE),
        partial(bank, ranks=[16] * 64, both=False),
    ),
    "bank_low": Op(f"{FACADES}.multi_gemm.h_config", BANKS, space(HConfig, *LOW), mixed),
    "bank_look": Op(f"{FACADES}.multi_rows.look_config", BANKS, space(LookConfig, *LOOK), mixed),
    "bank_grad": Op(f"{FACADES}.multi_bwd.grad_config", BANKS, space(GradConfig, *GRAD), mixed),
    "bank_scale": Op(f"{FACADES}.multi_bwd.scale_config", BANKS, space(ScaleConfig, *SCALES), mixed),
    "bank_tile": Op(
        f"{FACADES}.multi_gemm.bank_config",
        BANKS,
        lambda _: named(GemmConfig, *TILES),
        partial(bank, ranks=[16] * 32, both=False),
    ),
}
BACKWARD = ("few", "small", "codes")  # which have a search for each direction
for _name in BACKWARD:
    _op = OPS[_name]
    _of = {"call": partial(_op.call, both=True)} | ({"bare": partial(_op.bare, both=True)} if _op.bare else {})
    OPS[f"{_name}_both"] = _op._replace(**_of)
for _forward in (True, False):
    OPS["product" if _forward else "product_back"] = Op(
        f"{FACADES}.product.product_way",
        (),
        partial(ways_of_product, forward=_forward),
        partial(product, forward=_forward),
        bare=partial(product, forward=_forward, way="bare"),
    )
OPS["product_every"] = OPS["product"]._replace(space=every_tile)


# The search


@contextmanager
def answering(op: Op, value: Any) -> Iterator[None]:
    """Plans that are written meanwhile get this value from the chooser; None: what it says itself."""
    answers = dict(op.fixed) | ({} if value is None else {op.chooser: value})
    with ExitStack() as stack:
        stack.enter_context(fdora.backend("triton"))
        for place, answer in answers.items():
            stack.enter_context(mock.patch(place, lambda *_, answer=answer, **__: answer))
        stack.enter_context(mock.patch.dict(walk._plans, clear=True))
        stack.enter_context(mock.patch("fdora.functional._tree._plans", []))
        yield


def search(op: Op, shape: Shape, device: str, runs: int) -> dict[str, Any]:
    """A row: ms of every candidate that runs and is right. One that is wrong is an error."""
    call, failed, held = op.call(shape, device), Failures(), []
    want, candidates = call.want, {"chosen": None} | op.space(shape)
    where = () if device == "cpu" else (clock.anchor_graph(), torch.cuda.Stream())

    def timer(each: Call, value: Any, check: bool) -> clock.Timer:
        nonlocal want
        with answering(op, value):
            turns = each.make()
            got = turns[0]()
            if check:
                want = got.double() if want is None else want
                if (error := rel_l2(got.detach(), want)) > each.most:
                    raise SystemExit(f"{shape}, {value}: wrong by {error:.1e}")
            if not where:
                ms = clock.once(turns[0], device)
                return lambda: ms
            held.append((turns, list(walk._plans.values())))  # graphs read what they hold
            about_ms = clock.once(turns[0], device)
            cycle = itertools.cycle(turns)
            return clock.quick_timer(lambda: next(cycle)(), clock.launches_of(about_ms, len(turns)), *where)

    timers = failed.attempt(candidates, lambda name: timer(call, candidates[name], True))
    if op.bare:
        timers["bare"] = timer(op.bare(shape, device), None, False)
    ms = {name: round(t, 5) for name, t in clock.medians(timers, runs).items()}
    return {"shape": list(shape), "ms": ms, "failed": dict(failed)}


def fastest(times: Iterable[Mapping[str, float]], beside: Sequence[str] = ("chosen", "bare", "one")) -> str:
    """The candidate with the smallest geometric mean over the shapes, of those that ran on all of them."""
    rows = list(times)
    names = [name for name in rows[0] if name not in beside and all(name in ms for ms in rows)]
    return min(names, key=lambda name: math.prod(ms[name] for ms in rows))


def compiled(name: str, shape: Shape, candidate: str) -> None:
    """In a process of its own: what a later launch finds in Triton's cache."""
    op = OPS[name]
    with answering(op, ({"chosen": None} | op.space(shape))[candidate]):
        op.call(shape, "cuda").make()[0]()
    torch.cuda.synchronize()


def written(rows: Sequence[dict], columns: bool) -> dict[str, Any]:
    """The table of tiles for few tokens, with this side of it new."""
    side = []
    for row in rows:
        M, K, N, _ = row["shape"]
        tile = SmallConfig(*map(int, fastest([row["ms"]]).split()))
        N, K = (K, N) if columns else (N, K)
        side.append({"tokens": M, "N": N, "K": K, "tile": tile._asdict()})
    return measured("small") | {"columns" if columns else "rows": side}


def measure(run: Run) -> None:
    options = run.options
    for shape in run.cases(options.shapes):
        run.add({"op": options.op} | search(OPS[options.op], shape, options.device, options.runs))
    print(f"{options.op}, fastest over all shapes: {fastest(row['ms'] for row in run.result['rows'])}")
    if options.write:
        save_json(options.write, written(run.result["rows"], options.op == "small_both"))


OPTIONS = {
    "op": dict(choices=OPS),
    "--shape": dict(type=numbers, action="append", help="in the place of the op's own: M,K,N,r of a layer"),
    "--draw": (0, "so many shapes drawn at random"),
    "--seed": 1,
    "--write": (Path, "of small and small_both: the table of tiles"),
}


def check(parser, options) -> None:
    drawn = draw(options.seed, options.draw) if options.draw else OPS[options.op].shapes
    options.shapes = [tuple(shape) for shape in options.shape or drawn]
    if not options.shapes:
        parser.error(f"{options.op} wants --shape or --draw")


def ahead(options):
    return compiled, [(options.op, shape, name) for shape in options.shapes for name in OPS[options.op].space(shape)]


main = Suite(__doc__, measure, OPTIONS, runs=5, seconds=math.inf, kernels=True, check=check, ahead=ahead)


if __name__ == "__main__":
    main()
