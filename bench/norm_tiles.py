"""Tiles of the norm of a W of NF4 codes where the rank is large: which is fastest, beside the norm of a dense bf16 W.

    python -m bench.norm_tiles --device cuda [--ranks 128,384] [--json FILE]

Every tile is checked against float64, then timed in replayed CUDA graphs, all of a shape in turns; weights take turns from a
set larger than the GPU's cache. ``--device cpu`` runs one small shape, interpreted or not at all: for the tests.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
from pathlib import Path
from unittest import mock

import torch

from bench.norm_forms import about
from bench.quant_forms import NESTED, SOME, S, Timed, dense, layer, line, searched, weights
from bench.save import save
from fdora.functional import dora_norm
from fdora.triton.codes import packed
from fdora.triton.configs import QuantConfig, quant_config
from fdora.triton.quant import norm
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import device_of
from fdora.triton.runtime.plan import Plan
from fdora.triton.runtime.walk import like, run

# rows, columns, slab of the rank, precision, warps, stages; runs of tiles: 0 for as many as the shape wants
TILES = [
    QuantConfig(n, k, r, "ieee", warps, stages, tiles)
    for n, k, r, warps, stages in (
        *((128, 128, 32, 8, 3), (128, 128, 64, 8, 3), (128, 128, 64, 8, 4), (128, 128, 128, 8, 2), (128, 128, 64, 4, 3)),
        *((128, 256, 64, 8, 3), (128, 256, 32, 8, 4), (256, 128, 64, 8, 3), (256, 128, 32, 8, 4), (64, 256, 64, 4, 3)),
    )
    for tiles in (0, 1)
]
RANKS = (128, 384)


def plan_with(config: QuantConfig, W, A: torch.Tensor, B: torch.Tensor) -> Plan:
    plan = Builder("norm of codes", device_of(A.device))
    a, b = plan.matrix(like(A)), plan.matrix(like(B))
    codes = packed(plan, [like(t) for t in W.tensors], W.coded)
    s, c = plan.scalar("s"), plan.result("c", W.coded.shape[:1], torch.float32)
    with mock.patch("fdora.triton.quant.quant_config", lambda *_: config):
        norm(plan, codes, a, b, s, c)
    return plan.plan()


def turns(plan: Plan, Ws, A: torch.Tensor, B: torch.Tensor):
    """Of one weight after the other."""
    at = iter(range(10**9))
    return lambda: run(plan, (A, B, *Ws[next(at) % len(Ws)].tensors), (S,))[0]


def compiled(case: tuple[QuantConfig, int]) -> str | None:
    """In a process of its own: what a later launch finds in Triton's cache."""
    config, r = case
    try:
        W, la = weights(NESTED, 4096, 4096, "cuda", 1), layer(1, 4096, 4096, r, "cuda")
        turns(plan_with(config, W[0], la.A, la.B), W, la.A, la.B)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{case}: {type(error).__name__}"
    return None


def row_of(N: int, K: int, r: int, device: str) -> dict:
    Ws, la = weights(NESTED, N, K, device), layer(1, N, K, r, device)
    A, B = (t if device != "cpu" else t.half() for t in (la.A, la.B))  # Triton's interpreter multiplies the bits of bfloat16
    timed, W = Timed(device, len(Ws)), dense(Ws[0], la)
    want = torch.cat(
        [(w.double() + S * b.double() @ A.double()).norm(dim=1) for w, b in zip(W.split(512), B.split(512), strict=True)]
    )
    tiles = TILES if device != "cpu" else TILES[:1]
    found = searched(timed, lambda config: turns(plan_with(config, Ws[0], A, B), Ws, A, B), tiles, want.float())
    now = quant_config(r, True, device_of(A.device).capability)
    ways = {"now": turns(plan_with(now, Ws[0], A, B), Ws, A, B), "dense": lambda: dora_norm(W.to(A.dtype), A, B, s=S)}
    row = {"N": N, "K": K, "r": r} | {name: round(ms, 5) for name, ms in timed.medians(ways).items()}
    line(row | {"best": found[:4]})
    return row | {"tiles": [[list(config), round(ms, 5)] for config, ms in found]}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--device", default="cpu")
    options.add_argument("--ranks", type=lambda s: [int(r) for r in s.split(",")], default=RANKS)
    options.add_argument("--json", type=Path)
    options.add_argument("--commit", help="recorded in the JSON")
    options = options.parse_args()
    torch.manual_seed(0)
    shapes, ranks = (SOME, options.ranks) if options.device != "cpu" else (((128, 512),), (128,))
    if options.device != "cpu":
        with multiprocessing.get_context("spawn").Pool(min(14, os.cpu_count() or 1)) as pool:
            cases = [(config, r) for config in TILES for r in ranks]
            print(*filter(None, pool.imap_unordered(compiled, cases)), sep="\n", flush=True)
    rows = []
    for N, K in shapes:
        for r in ranks:
            rows.append(row_of(N, K, r, options.device))
            save(options.json, {"about": about(options.device, options.commit), "rows": rows})


if __name__ == "__main__":
    main()
