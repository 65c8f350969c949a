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
from bench.clock import Failures
from bench.multi import Bank, build
from bench.save import save as save_json
from bench.shapes import copied, draw
from bench.suite import Run, Suite, numbers, shapes
from bench.truth import norm_of, rel_l2
from bench.ways import Inputs, S
from fdora.functional import dora_norm, dora_norm_tree
from fdora.functional.multi import multi_together
from fdora.quant import quantize
from fdora.triton import search
from fdora.triton.multi_bwd import GradConfig
from fdora.triton.multi_gemm import HConfig
from fdora.triton.multi_norm import StripConfig as BankStripConfig
from fdora.triton.multi_rows import LookConfig
from fdora.triton.multi_small import RoomConfig
from fdora.triton.runtime import family, walk
from fdora.triton.search import sets_of
from fdora.triton.tiles import measured
from fdora.triton.tiles.codes import CodesConfig
from fdora.triton.tiles.configs import GemmConfig, NormConfig, ScaleConfig, SmallConfig, TreeConfig, power_of_two
from fdora.triton.tiles.product import SHARED, Way
from fdora.triton.tiles.quant import QuantConfig, StripConfig

DTYPE = torch.bfloat16
Shape = tuple[int, ...]
Candidates = dict[str, Any]


def value(word: str) -> Any:
    return int(word) if word.isdigit() else {"True": True, "False": False}.get(word, word)


def tiles(config: type, text: str, shape: Shape = (1,)) -> Candidates:
    """Candidates by their names, which are their fields. A semicolon ends one; ``3|4`` are two, ``4,3|8,2`` two of two fields;
    ``r`` is the rank, ``wide`` the power of two that holds it, ``slab`` at most 32 of that."""
    wide = power_of_two(shape[-1])
    sizes, found = {"r": shape[-1], "wide": wide, "slab": min(32, wide)}, {}
    for line in filter(None, text.split(";")):
        for parts in itertools.product(*(part.split("|") for part in line.split())):
            name = " ".join(str(sizes.get(word, word)) for part in parts for word in part.split(","))
            found[name] = config(*map(value, name.split()))
    return found


# tma, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, EPILOGUE_SUBTILE, persistent, num_warps, num_stages: those that the model knows
TILES = list(
    tiles(
        GemmConfig,
        "True 128,256|256,128 64 8 True True 8 4; True 64 256 64 8 True True 4 4; True 64 128 64 8 False False 4 4;"
        "True 64 64 128 8 False False 4 6; True 64 128 128 8 False True 4 4; True 128 128 64 8 False True 4 6",
    ).values()
)
BANKS = [(8192, 4096, 4096), (8192, 4096, 14336)]


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


# Layers


def linear(shape: Shape, device: str, both: bool = False, codes: bool = False, bare: bool = False) -> Call:
    """One layer of any number of tokens, its norm given: forward, or forward and backward (its dx is compared). ``bare``: its
    matrix products."""
    i = Inputs.random(*shape[:4], DTYPE, device)
    layers = [i, *(copied(i) for _ in sets_of(i.W.numel(), device)[1:])]

    def one(each: Inputs) -> Callable[[], Any]:
        coded = each._replace(W=quantize(each.W, "nf4", nested=True)) if codes else each
        way = ways.bare(each) if bare else ways.fdora(coded, each.norm, False)
        return (way.both if bare else lambda: way.both()["dx"]) if both else way.forward

    x, A, B, m, dy = (t.detach().float() for t in (i.x, i.A, i.B, i.m, i.dy))
    W = quantize(i.W, "nf4", nested=True).dequantize(torch.float32) if codes else i.W.float()
    scaled = (m / i.norm)[:, None] * (W + S * B @ A)
    return Call(lambda: [one(each) for each in layers], None if bare else dy @ scaled if both else x @ scaled.T)


def product(shape: Shape, device: str, forward: bool, bare: bool = False) -> Call:
    """x W^T and dz W with their low-rank terms, planned alone; ``bare`` without them."""
    sets = search.operands(shape, forward, device, DTYPE)
    want = None if bare else search.exact(sets[0], forward)
    return Call(lambda: search.calls(sets, search.planned(sets[0], forward, bare=bare)), want)


def fused(*tiles: GemmConfig) -> Candidates:
    return {" ".join(["fused", *map(str, tile[1:])]): Way("fused", tile, 0.0) for tile in tiles}


def ways_of_product(shape: Shape, forward: bool) -> Candidates:
    return fused(*TILES) | {way: Way(way, None, 0.0) for way in (("after",) if forward else ("after", "first"))}


def every_tile(shape: Shape) -> Candidates:
    """What fits on Hopper, with its deepest pipeline, and where programs do not walk with one that leaves room for a second."""
    found = {}
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
                found |= fused(GemmConfig(True, m, n, k, 8, subtile, persistent, warps, stages))
    return found


# Norms


def norm(shape: Shape, device: str, codes: bool = False) -> Call:
    N, K, r = shape
    i = Inputs.random(1, K, N, r, DTYPE, device)
    A, B = i.A.detach(), i.B.detach()
    Ws = [i.W.clone() for _ in sets_of(N * K, device)]
    if codes:
        Ws = [quantize(W, "nf4", nested=True) for W in Ws]
    want = norm_of(Ws[0].dequantize(torch.float32) if codes else i.W, A, B, S)
    return Call(lambda: [lambda W=W: dora_norm(W, A, B, s=S) for W in Ws], want, 1e-6)


def tiles_of_norm(shape: Shape) -> Candidates:
    """Single tiles, and strips with W's tiles ahead up to the rank that one slab holds."""
    text = "128 128 slab ieee 4 3; 128 256 64 ieee 8 3 True 0 0 1"
    if shape[2] > 64:
        text += ";128 256 128 ieee 8 2 True 0 0 1;256 128 64 ieee 8 3 True 0 0 1;128 128 64 ieee 4,3|8,3 True 0 0 2"
        text += ";128 128 128 ieee 4 2 True 0 0 2;64 256 64 ieee 4 3 True 0 0 2;64 128 64 ieee 4 4 True 0 0 3"
    if shape[2] <= 256:
        text += ";64 64 wide ieee 4,3,False,3|4,2,False,2 256|512|1024|2048;64 128 wide ieee 4 3 False 3 256|512|1024|2048"
        text += ";128 64 wide ieee 4|8 3 False 3 256|512|1024|2048;128 128 wide ieee 8 2 False 2 256|512|1024|2048"
    return tiles(NormConfig, text, shape)


def tree(shape: Shape, device: str) -> Call:
    """The norms of one decoder layer: width, width of the MLP, width of k and v, rank."""
    width, mlp, kv, r = shape
    shapes = [(width, width), (kv, width), (kv, width), (width, width), (mlp, width), (mlp, width), (width, mlp)]
    Ws = [torch.randn(n, k, device=device).mul_(k**-0.5).bfloat16() for n, k in shapes]
    pairs = [tuple(torch.randn(size, device=device).to(DTYPE) for size in ((r, k), (n, r))) for n, k in shapes]
    c = torch.cat([norm_of(W, *pair, S) for W, pair in zip(Ws, pairs, strict=True)])
    return Call(lambda: [lambda: torch.cat(list(dora_norm_tree(Ws, pairs, s=S)))], c, 1e-6)


def tiles_of_tree(shape: Shape) -> Candidates:
    text, wide = "", power_of_two(shape[3])
    if wide <= 128:
        text = "64 64 wide 4 3 3,4|2,8; 128,64|64,128 wide 8 3 3 2;"
    text += "64,128|128,64 64 4 3 0 4; 128 128 64 8 3 0 2" if wide > 64 else "128 128 16 4 3 0 2"
    return tiles(TreeConfig, text, shape)


# Few tokens, backward's pass


def tiles_of_few_codes(shape: Shape) -> Candidates:
    sliced = ";32 128 4 4 3 1|2" if shape[0] <= 16 else ""
    return tiles(CodesConfig, "64 128 1 4 4 1|2|4|8|16; 64 256 1 4 3 1|2|4; 128 128 1 8 3 2|4" + sliced)


def tiles_of_pass(shape: Shape) -> Candidates:
    """With and without dB, which a tile forms while it has dz."""
    rest = f"64|128|256|512 {'0|wide' if shape[3] <= 64 else '0'} 4"
    sides = "32 64 * 1; 32 64 * 3; 64 64 * 1; 64 64 * 3; 32 128 * 1; 32 128 * 3; 16 256 * 1"
    return tiles(ScaleConfig, sides.replace("*", rest), shape)


# Banks of adapters


def bank(shape: Shape, device: str, ranks: Sequence[int], both: bool) -> Call:
    way = build("multi", Bank.random(*shape, list(ranks), DTYPE, device))
    return Call(lambda: [(lambda: way.both()["dx"].detach()) if both else way.forward], None)


def bank_pair(shape: Shape, device: str) -> Call:
    """Two layers and the activation behind them, forward and backward."""
    i = Bank.random(*shape, [16] * 4, DTYPE, device)
    layers = [{"W": i.W, "A": i.A, "B": i.B, "m": i.m, "s": i.s, "norm": i.norm}] * 2

    def dx() -> Tensor:
        return torch.autograd.grad(multi_together(i.x, layers, i.offsets, "silu"), i.x, i.dy)[0]

    return Call(lambda: [dx], None)


def bank_norm(shape: Shape, device: str) -> Call:
    i = Bank.random(*shape, [16] * 4, DTYPE, device)
    return Call(lambda: [lambda: dora_norm(i.W, i.A.detach(), i.B.detach(), s=i.s)], i.norm, 1e-5)


def facade(place: str, shapes: Sequence[Shape], space: Any, call: Callable, **more: Any) -> Op:
    """``space``: a function of the shape, or a config and the text of its tiles."""
    return Op(f"fdora.triton.{place}", shapes, space if callable(space) else partial(tiles, *space), call, **more)


WEIGHTS = shapes("4096x4096,4096x14336,14336x4096,2304x22144,1024x10112")  # K, N
LAYERS = [(M, *W, 16) for M in (64, 32, 16, 1) for W in WEIGHTS] + [(M, *W, 64) for M in (64, 16) for W in WEIGHTS[:3]]
SMALLS = [(M, *W, 16) for M in (16, 64) for W in shapes("4096x1024,4096x4096,4096x14336,14336x4096,8192x8192,512x512")]
NORMS = shapes("24832x8832x8,4096x14336x16,4096x14336x64,3840x15360x96,4096x14336x192,4096x4096x384")
PASSES = shapes("4964x896x8064x384,2354x3072x8192x192,512x768x16000x16,3779x4096x12288x128,576x4096x2560x16")
CODES = "128 128 32 ieee 8 3 0|1; 128 128 64 ieee 8 3 0|1; 128 256 64 ieee 8 3 0|1; 128 256 64 ieee 8 3 1|4 True;"
CODES += "128 256 32,ieee,8,4|128,ieee,8,2 1|4 True; 256 128 64 ieee 8 3 1|4 True; 128 128 64 ieee 8 4 1|4 True"
STRIPS = "64,64,wide,4,3|64,64,wide,4,4|128,64,wide,4,3|128,64,wide,8,3|64,128,wide,4,3 512|1024|2048"
SIDES = "16,256|16,512|32,128|32,256|32,512|64,64|64,128|64,256|128,64|128,128 4,3|4,5|8,3|2,5"
of_codes, mixed = partial(norm, codes=True), partial(bank, ranks=[8, 16, 64, 256] * 8, both=True)
products = partial(linear, bare=True)
NARROW = "fdora.triton.small.takes_narrow_tiles"
OPS = {
    "norm": facade("norm.norm_config", NORMS, tiles_of_norm, norm),
    "norm_codes": facade("norm_codes.quant_config", shapes("4096x14336x128,4096x14336x384"), (QuantConfig, CODES), of_codes),
    "norm_strips": facade("norm_codes.strip_config", shapes("4096x14336x16,4096x14336x64"), (StripConfig, STRIPS), of_codes),
    "tree": facade("tree_table.tree_config", [(4096, 14336, 1024, r) for r in (16, 64, 128, 384)], tiles_of_tree, tree),
    "few": Op(NARROW, LAYERS, lambda _: {"small": True, "general": False}, linear, bare=products),
    "small": facade("small.small_config", SMALLS, (SmallConfig, SIDES), linear, fixed={NARROW: True}, bare=products),
    "codes": facade("small.small_codes_config", LAYERS, tiles_of_few_codes, partial(linear, codes=True)),
    "pass": facade("scale.scale_config", PASSES, tiles_of_pass, partial(linear, both=True), bare=partial(products, both=True)),
    "bank_norm": facade("multi_norm.strip_config", BANKS, (BankStripConfig, "64 64 3|4|5|6 4 2; 128 64 4|6|8 8 1"), bank_norm),
    "bank_decode": facade(
        "multi_small.room_config",
        [(64, *W) for _, *W in BANKS],
        (RoomConfig, "1 8192 2|3|4 4 4|8; 1|2 4096 4 4 8"),
        partial(bank, ranks=[16] * 64, both=False),
    ),
    "bank_low": facade(
        "multi_gemm.h_config",
        [(M, K, N) for M in (2048, 8192) for _, K, N in BANKS],
        (HConfig, "64 64 64 4 6 1|2|3|4|6; 64 64 128 4 4 1|3|6; 64 64 128|256 8 3 1"),
        partial(bank, ranks=[8, 16, 32, 64], both=True),
    ),
    "bank_look": facade("multi_rows.look_config", BANKS, (LookConfig, "8192|4096 32|64 1; 8192 32|64 3; 4096 64 4"), mixed),
    "bank_grad": facade(
        "multi_bwd.grad_config", BANKS, (GradConfig, "64 128 32,4,4|64,4,3; 64,256|128,128 64 8 3; 64 128 32 4 5"), mixed
    ),
    "bank_scale": facade(
        "multi_bwd.scale_config",
        BANKS,
        (ScaleConfig, "64 64 128|256|512 0 4 3; 32 64 256 0 4 4; 64 128 256 0 8 3"),
        mixed,
    ),
    "bank_gated": facade(
        "multi_bwd.gated_config",
        BANKS[1:],
        (ScaleConfig, "32 64 128|256|512 0 4 3; 32 64 256 0 4 2; 64 64 256 0 4 3; 16 128 256 0 4 3"),
        bank_pair,
    ),
    "bank_tile": facade(
        "multi_gemm.bank_config",
        BANKS,
        lambda _: {" ".join(map(str, tile)): tile for tile in TILES},
        partial(bank, ranks=[16] * 32, both=False),
    ),
}
for _name in ("few", "small", "codes"):  # which have a search for each direction
    _op = OPS[_name]
    _bare = {"bare": partial(_op.bare, both=True)} if _op.bare else {}
    OPS[f"{_name}_both"] = _op._replace(call=partial(_op.call, both=True), **_bare)
for _name, _forward in (("product", True), ("product_back", False)):
    _space, _call = (partial(each, forward=_forward) for each in (ways_of_product, product))
    OPS[_name] = facade("product.product_way", (), _space, _call, bare=partial(_call, bare=True))
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
        stack.enter_context(mock.patch.dict(family._families, clear=True))
        stack.enter_context(mock.patch("fdora.functional._tree._plans", []))
        yield


def searched(op: Op, shape: Shape, device: str, runs: int) -> dict[str, Any]:
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
        run.add({"op": options.op} | searched(OPS[options.op], shape, options.device, options.runs))
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


main = Suite(measure, OPTIONS, runs=5, seconds=math.inf, kernels=True, check=check, ahead=ahead)
