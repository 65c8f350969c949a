"""Tiles of the norm of a W of NF4 codes: which is fastest, beside the norm of a dense bf16 W.

    python -m bench.norm_tiles --device cuda [--ranks 128,384] [--shapes 4096x4096] [--json FILE]
    python -m bench.norm_tiles --device cuda --store [--ranks 16,64]    # with the dense W out of the same pass

Every tile is checked against float64, then timed in replayed CUDA graphs, all of a shape in turns; weights take turns from a
set larger than the GPU's cache. ``--device cpu`` runs one small shape, interpreted or not at all: for the tests.
"""

from __future__ import annotations

import multiprocessing
import os
from contextlib import ExitStack
from unittest import mock

import torch

from bench.command import command
from bench.norm_forms import about
from bench.quant_forms import (
    CACHE,
    DTYPE,
    NESTED,
    SOME,
    S,
    Timed,
    close,
    dense,
    layer,
    line,
    searched,
    state_of,
    vendor,
    weights,
)
from bench.records import save
from fdora.functional import dora_norm
from fdora.triton.codes import packed
from fdora.triton.configs import power_of_two
from fdora.triton.configs_quant import QuantConfig, StripConfig
from fdora.triton.quant import norm
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import device_of
from fdora.triton.runtime.plan import Plan
from fdora.triton.runtime.walk import like, run

# rows, columns, slab of the rank, warps, stages; by TMA as runs of one tile or more
POINTERS = [(128, 128, 32, 8, 3), (128, 128, 64, 8, 3), (128, 256, 64, 8, 3)]
BY_TMA = [
    *((128, 256, 64, 8, 3), (128, 256, 64, 8, 2), (128, 256, 32, 8, 4), (128, 256, 128, 8, 2), (256, 128, 64, 8, 3)),
    *((128, 128, 64, 8, 4), (128, 128, 64, 8, 3), (128, 128, 128, 8, 3)),
]
WITH_W = [
    *((64, 128, 64, 4, 3), (64, 128, 64, 8, 3), (32, 128, 64, 4, 3), (32, 256, 64, 4, 3), (64, 64, 64, 4, 3)),
    *((128, 128, 64, 8, 3), (64, 256, 64, 8, 3)),
]
TILES = [QuantConfig(n, k, r, "ieee", *how, run) for n, k, r, *how in POINTERS for run in (0, 1)]
TILES += [QuantConfig(n, k, r, "ieee", *how, run, True) for n, k, r, *how in BY_TMA for run in (1, 4)]
STORING = [QuantConfig(n, k, r, "ieee", *how, run) for n, k, r, *how in WITH_W for run in (1, 2, 4, 8)]
# rows, columns, warps, tiles ahead; columns of a strip
ALONG = [(64, 64, 4, 3), (64, 64, 4, 4), (128, 64, 4, 3), (128, 64, 8, 3), (64, 128, 4, 3)]
SPANS = (512, 1024, 2048)
RANKS = (128, 384)
EXACT = 1e-6


def tiles_of(r: int, store: bool) -> list[QuantConfig | StripConfig]:
    if store or r > 64:
        return STORING if store else TILES
    runs = [QuantConfig(64, 128, power_of_two(r), "ieee", 4, 3), QuantConfig(64, 64, power_of_two(r), "ieee", 4, 3, 4)]
    return runs + [StripConfig(n, k, power_of_two(r), *how, span) for n, k, *how in ALONG for span in SPANS]


def plan_with(config: QuantConfig | StripConfig | None, W, A: torch.Tensor, B: torch.Tensor, store: bool) -> Plan:
    """None: as plans choose."""
    plan = Builder("norm of codes", device_of(A.device))
    a, b = plan.matrix(like(A)), plan.matrix(like(B))
    codes = packed(plan, [like(t) for t in W.tensors], W.coded)
    s, c = plan.scalar("s"), plan.result("c", W.coded.shape[:1], torch.float32)
    with ExitStack() as stack:
        if config is not None:
            strip = config if isinstance(config, StripConfig) else None
            stack.enter_context(mock.patch("fdora.triton.quant_strips.strip_config", lambda *_: strip))
        if isinstance(config, QuantConfig):
            stack.enter_context(mock.patch("fdora.triton.quant.quant_config", lambda *_: config))
        norm(plan, codes, a, b, s, c, plan.temp(W.coded.shape, DTYPE) if store else None)
    return plan.plan()


def turns(plan: Plan, Ws, A: torch.Tensor, B: torch.Tensor):
    """Of one weight after the other."""
    at = iter(range(10**9))
    return lambda: run(plan, (A, B, *Ws[next(at) % len(Ws)].tensors), (S,))[0]


def compiled(case: tuple[QuantConfig | StripConfig, int, bool]) -> str | None:
    """In a process of its own: what a later launch finds in Triton's cache."""
    config, r, store = case
    try:
        W, la = weights(NESTED, 4096, 4096, "cuda", 1), layer(1, 4096, 4096, r, "cuda")
        turns(plan_with(config, W[0], la.A, la.B, store), W, la.A, la.B)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{case}: {type(error).__name__}"
    return None


def row_of(N: int, K: int, r: int, device: str, store: bool, others: bool = True) -> dict:
    Ws, la = weights(NESTED, N, K, device), layer(1, N, K, r, device)
    A, B = (t if device != "cpu" else t.half() for t in (la.A, la.B))  # Triton's interpreter multiplies the bits of bfloat16
    timed, W = Timed(device, len(Ws)), dense(Ws[0], la._replace(x=la.x.float()))
    want = torch.cat(
        [(w.double() + S * b.double() @ A.double()).norm(dim=1) for w, b in zip(W.split(512), B.split(512), strict=True)]
    )
    tiles = tiles_of(r, store) if others else []
    tiles = tiles if device != "cpu" else tiles[:1]
    make = lambda config: turns(plan_with(config, Ws[0], A, B, store), Ws, A, B)  # noqa: E731
    found = searched(timed, make, tiles, want.float(), EXACT)
    ways = {"now": make(None)}
    close(make(None)(), want.float(), "now", EXACT)
    copies = [W.to(A.dtype) for _ in range(max(1, min(8, CACHE // (2 * N * K))))]
    at = iter(range(10**9))
    ways["dense"] = lambda: dora_norm(copies[next(at) % len(copies)], A, B, s=S)
    if store and (bnb := vendor()) is not None:
        ways["decode"] = decoding([state_of(bnb, w) for w in Ws], bnb)
    row = {"N": N, "K": K, "r": r} | {name: round(ms, 5) for name, ms in timed.medians(ways).items()}
    line(row | {"best": found[:4]})
    return row | {"tiles": [[list(config), round(ms, 5)] for config, ms in found]}


def shapes_of(text: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, shape.split("x"))) for shape in text.split(",")]


def decoding(states, bnb):
    """bitsandbytes' dequantisation alone."""
    at = iter(range(10**9))
    return lambda: bnb.functional.dequantize_4bit(*states[next(at) % len(states)])


def main(argv: list[str] | None = None) -> None:
    options = command(__doc__, kernels=True)
    options.add_argument("--ranks", type=lambda s: [int(r) for r in s.split(",")], default=RANKS)
    options.add_argument("--shapes", type=shapes_of, default=SOME, help="NxK, comma separated")
    options.add_argument("--store", action="store_true", help="with the dense W")
    options.add_argument("--now", action="store_true", help="those that the plans choose, and no others")
    options = options.parse_args(argv)
    torch.manual_seed(0)
    shapes, ranks = (options.shapes, options.ranks) if options.device != "cpu" else (((128, 512),), (128,))
    if options.device != "cpu" and not options.now:
        with multiprocessing.get_context("spawn").Pool(min(14, os.cpu_count() or 1)) as pool:
            cases = [
                (config, r, options.store)
                for r in ranks
                for config in tiles_of(r, options.store)
                if getattr(config, "SPAN", SPANS[0]) == SPANS[0]
            ]
            print(*filter(None, pool.imap_unordered(compiled, cases)), sep="\n", flush=True)
    rows = []
    for N, K in shapes:
        for r in ranks:
            rows.append(row_of(N, K, r, options.device, options.store, not options.now))
            save(options.json, {"about": about(options.device, options.commit, argv), "rows": rows})


if __name__ == "__main__":
    main()
