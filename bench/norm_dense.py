"""Tiles of the norm of a dense bf16 W: which is fastest, beside the time of W's bytes and of the product's flops.

    python -m bench.norm_dense --device cuda [--shapes 24832x8832x8,3840x15360x96] [--now] [--json FILE]

Shapes are N x K x r. Every tile is checked against float64, then timed in replayed CUDA graphs, all of a shape in turns;
weights take turns from a set larger than the GPU's cache. ``now`` is what plans choose, ``guarded`` the same beside a
fingerprint that differs, with the kernel that takes it; ``--now``: no other tiles. ``--device cpu`` runs one small shape,
interpreted or not at all: for the tests.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
from unittest import mock

import torch

from bench.command import command
from bench.norm_forms import about
from bench.quant_forms import CACHE, DTYPE, S, Timed, line, searched
from bench.records import save
from fdora.triton.configs import NormConfig, power_of_two
from fdora.triton.hash import WORDS
from fdora.triton.norm import plan_guarded_norm, plan_norm
from fdora.triton.runtime.device import device_of
from fdora.triton.runtime.plan import Plan
from fdora.triton.runtime.walk import like, run

SHAPES = [
    *((24832, 8832, 8), (3840, 15360, 96), (768, 19072, 256), (4096, 14336, 192)),
    *((4096, 4096, 16), (4096, 4096, 64), (4096, 4096, 384), (4096, 14336, 16), (4096, 14336, 64), (4096, 14336, 384)),
]
ONE_SLAB = 256  # the highest rank of strips
# rows, columns, warps, tiles of W ahead; columns of a strip
STRIPS = [(64, 64, 4, 3), (64, 64, 4, 4), (64, 128, 4, 3), (128, 64, 4, 3), (128, 64, 4, 4)]
HIGH = [(64, 64, 4, 3), (64, 64, 4, 2), (64, 128, 4, 2), (128, 64, 4, 3), (128, 64, 8, 3), (64, 128, 8, 3)]
HIGHER = [(64, 64, 4, 2), (128, 64, 8, 2), (64, 128, 8, 2), (128, 128, 8, 2)]
SPANS = (256, 512, 1024, 2048)
# rows, columns, slab of the rank, warps, stages, programs on a multiprocessor; by TMA
SINGLE = [
    *((128, 256, 64, 8, 3, 1), (128, 256, 128, 8, 2, 1), (256, 128, 64, 8, 3, 1), (128, 128, 64, 4, 3, 2)),
    *((128, 128, 64, 8, 3, 2), (128, 128, 128, 4, 2, 2), (64, 256, 64, 4, 3, 2), (64, 128, 64, 4, 4, 3)),
]


def tiles_of(r: int) -> list[NormConfig]:
    block_r = power_of_two(r)
    single = [
        NormConfig(128, 128, min(32, block_r), "ieee", 4, 3),
        *(
            NormConfig(n, k, slab, "ieee", *how, TMA=True, PROGRAMS=beside)
            for n, k, slab, *how, beside in SINGLE[: 8 if r > 64 else 1]
        ),
    ]
    some = HIGHER if r > 128 else HIGH if r > 64 else STRIPS
    strips = [NormConfig(n, k, block_r, "ieee", *how, False, how[1], span) for n, k, *how in some for span in SPANS]
    return single + (strips if r <= ONE_SLAB else [])


def plan_with(config: NormConfig | None, W: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> Plan:
    likes, device = tuple(map(like, (W, A, B))), device_of(W.device)
    if config is None:
        return plan_norm(likes, device, None, False)
    with mock.patch("fdora.triton.norm.norm_config", lambda *_: config):
        return plan_norm(likes, device, None, False)


def inputs(
    N: int, K: int, r: int, device: str, dtype: torch.dtype = DTYPE
) -> tuple[list[torch.Tensor], torch.Tensor, torch.Tensor]:
    Ws = [torch.randn(N, K, device=device).mul_(K**-0.5).to(dtype) for _ in range(max(1, min(8, CACHE // (2 * N * K))))]
    A, B = (torch.randn(*shape, device=device).mul_(std).to(dtype) for shape, std in (((r, K), K**-0.5), ((N, r), 0.1)))
    return Ws, A, B


def turns(plan: Plan, Ws: list[torch.Tensor], *rest: torch.Tensor):
    """Of one weight after the other."""
    weights = itertools.cycle(Ws)
    return lambda: run(plan, (next(weights), *rest), (S,))[0]


def compiled(case: tuple[NormConfig, int]) -> str | None:
    """In a process of its own: what a later launch finds in Triton's cache."""
    config, r = case
    try:
        (W, *_), A, B = inputs(4096, 4096, r, "cuda")
        turns(plan_with(config, W, A, B), [W], A, B)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{case}: {type(error).__name__}"
    return None


def row_of(N: int, K: int, r: int, device: str, tiles: list[NormConfig], facts: dict) -> dict:
    # Triton's interpreter multiplies the bits of bfloat16
    Ws, A, B = inputs(N, K, r, device, DTYPE if device != "cpu" else torch.float16)
    timed = Timed(device, 2 * len(Ws))
    blocks = zip(Ws[0].split(512), B.split(512), strict=True)
    want = torch.cat([(w.double() + S * b.double() @ A.double()).norm(dim=1) for w, b in blocks]).float()
    found = searched(timed, lambda config: turns(plan_with(config, Ws[0], A, B), Ws, A, B), tiles, want)
    seen = (torch.zeros(N, device=device), torch.zeros(WORDS, device=device, dtype=torch.int64))
    guarded = plan_guarded_norm(tuple(map(like, (Ws[0], A, B, *seen))), device_of(A.device), None, False)
    now = plan_with(None, Ws[0], A, B)
    assert torch.equal(turns(now, Ws, A, B)(), turns(guarded, Ws, A, B, *seen)()), "a guarded norm has other bits"
    ways = {"now": turns(now, Ws, A, B), "guarded": turns(guarded, Ws, A, B, *seen)}
    row = {"N": N, "K": K, "r": r} | {name: round(ms, 5) for name, ms in timed.medians(ways).items()}
    if device != "cpu":
        row |= {
            "bytes": round(Ws[0].nbytes / facts["bytes_per_ms"], 5),
            "flops": round(2 * N * K * r / facts["flops_per_ms"], 5),
        }
    line(row | {"best": [(*config[:3], *config[4:], round(ms, 4)) for config, ms in found[:6]]})
    return row | {"tiles": [[list(config), round(ms, 5)] for config, ms in found]}


def shapes_of(text: str) -> list[tuple[int, ...]]:
    return [tuple(map(int, shape.split("x"))) for shape in text.split(",")]


def main(argv: list[str] | None = None) -> None:
    options = command(__doc__, kernels=True)
    options.add_argument("--shapes", type=shapes_of, default=SHAPES, help="NxKxr, comma separated")
    options.add_argument("--now", action="store_true", help="those that the plans choose, and no others")
    options = options.parse_args(argv)
    torch.manual_seed(0)
    facts, rows = about(options.device, options.commit, argv), []
    shapes = options.shapes if options.device != "cpu" else [(128, 512, 72)]
    ranks = {r for _, _, r in shapes if not options.now}
    if options.device != "cpu" and ranks:  # a span is no constant of the kernel
        cases = [(config, r) for r in ranks for config in tiles_of(r) if config.SPAN in (0, SPANS[0])]
        with multiprocessing.get_context("spawn").Pool(min(14, os.cpu_count() or 1)) as pool:
            print(*filter(None, pool.imap_unordered(compiled, cases)), sep="\n", flush=True)
    for N, K, r in shapes:
        rows.append(row_of(N, K, r, options.device, [] if options.now else tiles_of(r), facts))
        save(options.json, {"about": facts, "rows": rows})


if __name__ == "__main__":
    main()
