"""Norms of a bank, decoding and training with many adapters, in other forms: which is fastest.

    python -m bench.multi_forms --device cuda --jobs 8 --json FILE [--only norm,decode] [--shapes KxN]

``norm``: of G = 4, r = 16, beside one norm; ``lost``: where all rows of one of them cancel. ``decode``: 64 tokens of 64
adapters, r = 16, beside one adapter's call; ``cache``: whether what two kernels hand over stays there.
``train``: the forward of 8192 tokens of 32 adapters of rank 8 to 256, their bank looked through beside x A_a^T or ahead.
``tile`` and ``tile_mixed``: the same of rank 16 and of 8 to 256, tiles of the product (GemmConfig).
``pass``: decoding, tiles of the pass over W (SmallConfig). ``low``, ``look``, ``grad`` and ``strip``: forward and backward of
32 adapters of rank 8 to 256, tiles of x A_a^T and dz B_a (HConfig; ``low_4``: of 4 of rank 8 to 64, ``low_64``: of 64), how
the bank is looked through (LookConfig), tiles of dA and dB (GradConfig), of dz (ScaleConfig); on a GPU with the us of these
kernels, of forward and of forward and backward.
Every form is checked, then timed in replayed CUDA graphs, all forms of a shape in turns. :func:`fastest` reads the choice off
the file.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from bench.attempt import Failures
from bench.clock import anchor_graph, medians, timer
from bench.command import command
from bench.multi import MIXED, kernels
from bench.multi_ways import Bank, S, build
from bench.norm_forms import about
from bench.records import save
from bench.truth import rel_l2
from bench.ways import BF16
from fdora.functional import dora_norm
from fdora.triton.configs import GemmConfig, ScaleConfig, SmallConfig
from fdora.triton.multi_bwd import GradConfig
from fdora.triton.multi_gemm import HConfig
from fdora.triton.multi_norm import StripConfig
from fdora.triton.multi_rows import LookConfig
from fdora.triton.multi_small import RoomConfig
from fdora.triton.runtime import walk

STRIPS = [
    *((64, 64, stages, 4, 2) for stages in (3, 4, 5, 6)),
    *((64, 64, stages, 8, 2) for stages in (4, 6)),
    *((128, 64, stages, warps, 1) for stages in (4, 6, 8) for warps in (8, 16)),
    *((128, 128, 3, warps, 1) for warps in (8, 16)),
]
FORMS: dict[str, list[tuple[int, ...]]] = {
    "norm": STRIPS,
    "lost": [(64, 64, 6, 4, 2)],
    "decode": [
        *((1, 8192, stages, 4, w, 1) for stages in (1, 2, 3, 4, 5) for w in (4, 8)),
        *((1, *form, 8, 1) for form in ((4096, 4, 4), (4096, 6, 4), (8192, 3, 8), (16384, 2, 8), (16384, 3, 8))),
        *((n, *form, 8, 1) for n in (2, 3) for form in ((2048, 4, 4), (4096, 3, 4), (4096, 4, 4), (8192, 2, 4), (8192, 3, 4))),
    ],
    "cache": [(1, 16384, 3, 8, 8, stays) for stays in (0, 1)],
    "train": [(0,), (1,)],
}
FORMS["tile"] = FORMS["tile_mixed"] = [
    (1, *form) for form in ((128, 128, 64, 8, 1, 1, 4, 4), (128, 256, 64, 8, 1, 1, 8, 4), (256, 128, 64, 8, 1, 1, 8, 4))
]
FORMS["low"] = [
    *((64, 64, 64, 4, 4), (64, 64, 128, 8, 3), (64, 64, 128, 4, 3), (64, 32, 128, 4, 4)),
    *((128, 64, 64, 8, 8), (128, 64, 128, 8, 2), (128, 64, 128, 8, 4), (128, 128, 64, 8, 6), (128, 128, 128, 8, 3)),
]
FORMS["low_4"] = [
    *((64, 64, 64, 4, 6), (64, 64, 128, 8, 3), (64, 64, 256, 8, 3), (64, 64, 256, 4, 3), (64, 64, 128, 4, 6)),
    *((64, 32, 128, 4, 4), (64, 32, 128, 8, 4), (64, 32, 256, 4, 3), (64, 32, 256, 8, 2)),
    *((128, 64, 64, 8, 8), (128, 64, 128, 8, 4), (128, 32, 128, 8, 4)),
]
FORMS["low_64"] = [(64, 64, 64, 4, 6), (64, 64, 256, 8, 3), (64, 32, 128, 4, 4), (64, 64, 128, 4, 6)]
FORMS["grad"] = [
    *((64, 128, 32, 4, 4), (64, 128, 64, 4, 3), (64, 256, 64, 8, 3), (64, 256, 32, 8, 4), (128, 128, 64, 8, 3)),
    *(
        (128, 256, 64, 8, 3),
        (128, 256, 32, 8, 4),
        (64, 128, 64, 4, 2),
        (64, 64, 32, 4, 4),
        (64, 128, 32, 4, 5),
        (64, 128, 32, 4, 3),
    ),
]
FORMS["look"] = [
    *((area, chunks, 1) for area in (8192, 4096) for chunks in (32, 64)),
    *((8192, 32, 3), (8192, 64, 3), (4096, 64, 4), (16384, 32, 2)),
]
FORMS["strip"] = [
    *((64, 64, rows, 0, 4, 3) for rows in (128, 256, 512)),
    *((32, 64, 256, 0, 4, 4), (32, 128, 256, 0, 4, 3), (64, 128, 256, 0, 8, 3), (64, 64, 256, 0, 4, 2)),
]
FORMS["pass"] = [
    *((32, 128, 4, 5), (32, 128, 4, 4), (32, 256, 4, 3), (64, 64, 4, 4), (64, 64, 4, 6), (64, 128, 4, 3), (64, 128, 8, 3)),
    *((128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 4), (128, 64, 8, 5)),
]
SEEN = {
    "low": ("multi_h_", "bank_"),
    "low_4": ("multi_h_", "bank_"),
    "low_64": ("multi_h_", "bank_"),
    "grad": ("multi_grad_",),
    "look": ("multi_h_", "bank_"),
    "strip": ("multi_scale_", "multi_finish_"),
}
UNIFORM = {"tile": [16] * 32, "low_64": [64] * 4}
TOKENS = 8192
CHOOSERS: dict[str, tuple[Callable[..., Any], str]] = {
    "norm": (StripConfig, "multi_norm.strip_config"),
    "lost": (StripConfig, "multi_norm.strip_config"),
    "decode": (RoomConfig, "multi_small.room_config"),
    "cache": (RoomConfig, "multi_small.room_config"),
    "train": (bool, "multi.copies_beside"),
    "tile": (GemmConfig, "multi_gemm.bank_config"),
    "tile_mixed": (GemmConfig, "multi_gemm.bank_config"),
    "pass": (SmallConfig, "multi_small.small_config"),
    "low": (HConfig, "multi_gemm.h_config"),
    "low_4": (HConfig, "multi_gemm.h_config"),
    "low_64": (HConfig, "multi_gemm.h_config"),
    "look": (LookConfig, "multi_rows.look_config"),
    "grad": (GradConfig, "multi_bwd.grad_config"),
    "strip": (ScaleConfig, "multi_bwd.scale_config"),
}


@contextmanager
def formed(kind: str, form: tuple[int, ...]) -> Iterator[None]:
    config, place = CHOOSERS[kind]
    walk._plans.clear()
    with mock.patch(f"fdora.triton.{place}", lambda *_: config(*form)):
        yield
    walk._plans.clear()


Found = dict[str, Tensor]


def calls(kind: str, K: int, N: int, device: str) -> tuple[Callable[[], Found], Callable[[], Found], Found | None]:
    """One adapter's call, that of the bank, and what the latter has to be where it is known."""
    if kind in ("norm", "lost"):
        i = Bank.random(8, K, N, [16] * 4, BF16, device)
        W, A, B, c = i.W, i.A.detach(), i.B.detach(), i.norm
        if kind == "lost":
            B = B.clone()
            B[0] *= 20
            W = (W * 1e-2 - S * (B[0].float() @ A[0].float())).to(BF16)
            c = torch.stack([dora_norm(W, a, b, s=S, backend="eager") for a, b in zip(A, B, strict=True)])
        return lambda: {"c": dora_norm(W, A[0], B[0], s=S)}, lambda: {"c": dora_norm(W, A, B, s=i.s)}, {"c": c}
    M, ranks = (64, [16] * 64) if kind in ("decode", "cache", "pass") else (TOKENS, ranks_of(kind))
    i = Bank.random(M, K, N, ranks, BF16, device)
    one, multi = build("one", i), build("multi", i)
    if kind in SEEN:
        return lambda: values(one.both()), lambda: values(multi.both()), None
    return lambda: {"y": one.forward()}, lambda: {"y": multi.forward()}, None


def ranks_of(kind: str) -> list[int]:
    if kind in UNIFORM:
        return UNIFORM[kind]
    return [MIXED[g % len(MIXED)] for g in range(4 if kind == "low_4" else 32)]


def values(found: Found) -> Found:
    """Without their graph: leaves that one keeps belong to the stream it was made on, and none is captured on another."""
    return {name: t.detach() for name, t in found.items()}


def times_of_kernels(kind: str, forms: Iterable[tuple[int, ...]], shape: tuple[int, int], device: str) -> dict[str, Any]:
    """Of each form us of the kernels that it is about: of forward, and of forward and backward."""
    multi = build("multi", Bank.random(TOKENS, *shape, ranks_of(kind), BF16, device))
    found = {}
    for form in forms:
        with formed(kind, form):
            each = [kernels(multi.forward), kernels(multi.both)]
        names = sorted({name for us in each for name in us if any(part in name for part in SEEN[kind])})
        found[name_of(form)] = {name: [us.get(name, 0.0) for us in each] for name in names}
    return found


def compiled(kind: str, form: tuple[int, ...], shape: tuple[int, int], device: str) -> None:
    """In a process of its own: what a later launch finds in Triton's cache."""
    one, multi, _ = calls(kind, *shape, device)
    one()
    with formed(kind, form):
        multi()


def row_of(kind: str, forms: list[tuple[int, ...]], shape: tuple[int, int], options: Any) -> dict[str, Any]:
    one, multi, want = calls(kind, *shape, options.device)
    want = multi() if want is None else want
    anchor = None if options.device == "cpu" else anchor_graph()
    failed = Failures()

    def prepare(name: str) -> Callable[[], float]:
        with formed(kind, form_of(name)):
            error = max(rel_l2(t, want[n].double()) for n, t in multi().items())
            assert error < (1e-5 if kind in ("norm", "lost") else 5e-3), f"wrong by {error:.1e}"
            return timer(multi, options.device, anchor)

    timers = failed.attempt(map(name_of, forms), prepare)
    ms = medians({"one": timer(one, options.device, anchor), **timers}, options.runs)
    row = {"kind": kind, "K": shape[0], "N": shape[1], "ms": {n: round(v, 5) for n, v in ms.items()}, "failed": dict(failed)}
    if kind in SEEN and options.device != "cpu":
        row["us"] = times_of_kernels(kind, map(form_of, timers), shape, options.device)
    return row


def name_of(form: tuple[int, ...]) -> str:
    return " ".join(map(str, form))


def form_of(name: str) -> tuple[int, ...]:
    return tuple(map(int, name.split()))


def fastest(rows: list[Mapping[str, Any]], kind: str) -> tuple[int, ...]:
    """The form with the smallest geometric mean over the shapes, of those that ran on all of them."""
    times = [row["ms"] for row in rows if row["kind"] == kind]
    names = [name for name in times[0] if name != "one" and all(name in ms for ms in times)]
    return form_of(min(names, key=lambda name: math.prod(ms[name] for ms in times)))


def main(argv: list[str] | None = None) -> None:
    parser = command(__doc__, runs=5)
    parser.add_argument("--only", default=",".join(FORMS), type=lambda text: text.split(","))
    parser.add_argument("--shapes", default="4096x4096,4096x14336", help="K x N")
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile all kernels first")
    parser.add_argument("--most", type=int, help="no more forms of each kind than this")
    options = parser.parse_args(argv)
    facts = about(options.device, options.commit, argv)
    shapes = [(int(K), int(N)) for K, N in (text.split("x") for text in options.shapes.split(","))]
    if options.jobs:
        with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
            tasks = [(kind, form, shape) for kind in options.only for form in FORMS[kind][: options.most] for shape in shapes]
            for done in [pool.submit(compiled, *task, options.device) for task in tasks]:
                done.exception()  # which the search meets again, and records
    rows: list[dict[str, Any]] = []
    for kind in options.only:
        for shape in shapes:
            rows.append(row_of(kind, FORMS[kind][: options.most], shape, options))
            ms = rows[-1]["ms"]
            us = rows[-1].get("us", {})
            print(
                kind,
                *shape,
                *(f"\n    {v / ms['one']:7.3f} {v:9.5f} ms  {n}  {us.get(n, '')}" for n, v in ms.items()),
                flush=True,
            )
            save(options.json, {"about": facts, "runs": options.runs, "rows": rows})
        print(kind, "fastest:", fastest(rows, kind), flush=True)


if __name__ == "__main__":
    main()
