"""The ways of one product with its low-rank term, planned and timed: for `fdora tune` and the benchmarks.

GPU time of replayed CUDA graphs, all ways in turns, medians; operands in turn from a set larger than the cache. The first
result of each way is compared with what float32 makes of the same operands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from fdora._clock import Timer, anchor_graph, launches_of, medians, quick_timer
from fdora.triton.gemm import Epilogue
from fdora.triton.product import scaled_product, summed_product
from fdora.triton.runtime import Builder, Plan, device_of, native, walk
from fdora.triton.tiles.product import Ask, Way, ways_of

CACHE = 2**28  # bytes: several times what any GPU keeps
MOST = 5e-3  # error, relative L2
Shape = tuple[int, int, int, int]  # M, K, N, r of a layer
Operands = tuple[Tensor, ...]  # x, h, W, B, m, c; backward's x is dz, and its B is A


def sets_of(size: int, device: str) -> range:
    """So many that none stays in the cache."""
    return range(1 if device == "cpu" else max(2, min(16, CACHE // (2 * size))))


def randn(device: str, *shape: int, std: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device=device).mul_(std).to(dtype)


def operands(shape: Shape, forward: bool, device: str, dtype: torch.dtype = torch.bfloat16) -> list[Operands]:
    M, K, N, r = shape
    M, K, N = (M, K, N) if forward else (M, N, K)  # x is (M, K), y (M, N)
    W, B = ((N, K), (N, r)) if forward else ((K, N), (r, N))
    sizes = ((M, K), 1.0), ((M, r), 1.0), (W, K**-0.5), (B, 1.0)

    def one() -> Operands:
        vectors = (torch.rand(N, device=device) + 1 for _ in "mc")
        return (*(randn(device, *size, std=std, dtype=dtype) for size, std in sizes), *vectors)

    return [one() for _ in sets_of(M * K + K * N + M * N, device)]


def exact(of: Operands, forward: bool) -> Tensor:
    x, h, W, B, m, c = (t.float() for t in of)
    return (x @ W.T + h @ B.T) * (m / c) if forward else x @ W + h @ B


def planned(of: Operands, forward: bool, way: Way | None = None, bare: bool = False) -> Plan:
    """x W^T or dz W with its low-rank term, in the way that is given or chosen; ``bare`` without it."""
    plan = Builder("product", device_of(torch.device("cuda") if of[0].is_meta else of[0].device))
    x, h, W, B = (plan.matrix(walk.like(t)) for t in of[:4])
    m, c = (plan.vector(walk.like(t)) for t in of[4:])
    y = plan.result("y", (x.shape[0], W.shape[0 if forward else 1]), x.dtype)
    if bare:
        plan.product(y, x, W.T if forward else W)
    elif forward:
        scaled_product(plan, y, x, h, W, B, Epilogue("scale", m, c), None, way)
    else:
        summed_product(plan, y, x, h, W, B, False, way)
    return plan.plan()


def calls(sets: list[Operands], plan: Plan) -> list[Callable[[], Tensor]]:
    return [partial(lambda of: walk.run(plan, of, (1.0,) * len(plan.scalars))[0], of) for of in sets]


def candidates(shape: Shape, forward: bool) -> list[Way]:
    """All ways on the current GPU."""
    M, K, N, r = shape
    on = device_of(torch.device("cuda"))
    return ways_of(Ask(M, *((N, K) if forward else (K, N)), r, forward, False, True, on.capability, on.num_sms))


def compile_ahead(cases: Iterable[tuple[Shape, bool]]) -> None:
    """What these take, in threads where Triton does so."""
    found: dict[Any, Any] = {}
    for case in cases:
        for way in candidates(*case):
            plan = planned(operands(*case, "meta")[0], case[1], way)
            found |= dict(zip(native.keys_of(plan), native.launches_of(plan), strict=True))
    walk.compile_launches(found.values())


def timed(
    sets: list[Operands], forward: bool, ways: Iterable[Way], timer: Callable[[Callable[[], Any], int], Timer]
) -> dict[str, float]:
    """us of each way that runs here, by its name. One that is wrong is an error."""
    want, timers, held = exact(sets[0], forward), {}, []
    for way in ways:
        try:
            each = calls(sets, planned(sets[0], forward, way))
            error = (each[0]().float() - want).norm() / want.norm()
            timers[way.name] = timer(partial(lambda turns: next(turns)(), cycle(each)), launches_of(way.us / 1e3, len(sets)))
        except torch.cuda.OutOfMemoryError:  # of the shape, not of the way
            raise
        except Exception:  # whatever a compiler or a driver says: this GPU has no such way
            continue
        if not error <= MOST:
            raise ArithmeticError(f"{way.name} is wrong by {error:.1e}")
        held.append(each)  # graphs read what they hold
    return {name: 1e3 * ms for name, ms in medians(timers, 5).items()}


def on_gpu() -> Callable[[Callable[[], Any], int], Timer]:
    anchor, stream = anchor_graph(), torch.cuda.Stream()
    return lambda fn, launches: quick_timer(fn, launches, anchor, stream)
