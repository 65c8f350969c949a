"""Compose and delta, ``y = h base + g s lora (+ bias)`` with h = g or g - 1: two reads and one write, in one pass.

Backward reads dy (and base, lora where dg is asked for) once and writes what is needed; the sums over tokens go through one
row of partials per strip of tokens, which :func:`column_sums` adds in a fixed order. Roof: the bytes, at copy speed.

Of a convolution whose channels lie before its points, (L, N, P), a row is one channel: planes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fdora._torch import needs_dispatcher
from fdora.triton.kernels.compose import compose_bwd_kernel, compose_fwd_kernel, planes_bwd_kernel, planes_fwd_kernel
from fdora.triton.op import op
from fdora.triton.runtime.builder import Builder, named
from fdora.triton.runtime.device import Device, cdiv, grid_of
from fdora.triton.runtime.plan import Array, Like, Plan
from fdora.triton.runtime.walk import plan_for, run
from fdora.triton.sums import column_sums

BLOCK_M, BLOCK_N = 4, 512
BWD_M, BWD_N, ROWS = 32, 128, 128
POINTS, STRIP = 512, 4096  # of a plane: in a block, and in what one program of backward sums


def compose_fwd(base: Tensor, lora: Tensor, g: Tensor, bias: Tensor | None, s: float, delta: bool) -> Tensor:
    """(M, N), (M, N), (N,), (N,) or None -> (M, N) in the dtype of base; or (L, N, P)."""
    return (compose if needs_dispatcher(base) else _compose)(base, lora, g, bias, s, delta)


def compose_bwd(
    dy: Tensor, base: Tensor, lora: Tensor, g: Tensor, s: float, delta: bool, needs: tuple[bool, bool, bool, bool]
) -> tuple[Tensor | None, ...]:
    """dbase, dlora, dg, dbias (the last in float32); each only when needed."""
    run_it: Any = compose_backward if needs_dispatcher(dy) else _compose_backward
    grads = iter(run_it(dy, base, lora, g, s, delta, list(needs)))
    return tuple(next(grads) if need else None for need in needs)


def _compose(base: Tensor, lora: Tensor, g: Tensor, bias: Tensor | None, s: float, delta: bool) -> Tensor:
    return run(*_planned(base, lora, g, bias, s, delta))[0]


def _planned(base: Tensor, lora: Tensor, g: Tensor, bias: Tensor | None, s: float, delta: bool) -> tuple[Plan, tuple, tuple]:
    tensors = (base, lora, g, bias)
    return plan_for(plan_compose, tensors, delta), tensors, (s,)


def plan_compose(likes: Sequence[Like | None], device: Device, delta: bool) -> Plan:
    plan = Builder("dora_delta" if delta else "dora_compose", device)
    if len(likes[0].shape) == 3:  # type: ignore[union-attr]
        return _planes(plan, likes, delta)
    base, lora = plan.tokens(likes[0]), plan.tokens(likes[1])
    g, bias = plan.vector(likes[2]), plan.vector(likes[3])
    y = plan.result("y", base.shape, base.dtype)
    (M, N), s = base.shape, plan.scalar("s")
    plan.path = "one pass over base and lora"
    plan.launch(
        compose_fwd_kernel,
        (cdiv(M, BLOCK_M), cdiv(N, BLOCK_N)),
        {
            "base": base,
            "lora": lora,
            "g": g,
            "bias": bias,
            "y": y,
            "s": s,
            "M": M,
            "N": N,
            "DELTA": delta,
            "HAS_BIAS": bias is not None,
            "BLOCK_M": BLOCK_M,
            "BLOCK_N": BLOCK_N,
        },
        4,
    )
    return plan.plan()


def _compose_backward(*args: Any) -> list[Tensor]:
    return list(run(*_planned_backward(*args)))


def _planned_backward(
    dy: Tensor, base: Tensor, lora: Tensor, g: Tensor, s: float, delta: bool, needs: Sequence[bool]
) -> tuple[Plan, tuple, tuple]:
    tensors = (dy, base, lora, g)
    return plan_for(plan_compose_backward, tensors, delta, tuple(needs)), tensors, (s,)


def plan_compose_backward(likes: Sequence[Like | None], device: Device, delta: bool, needs: tuple[bool, ...]) -> Plan:
    plan = Builder("dora_delta backward" if delta else "dora_compose backward", device)
    if len(likes[0].shape) == 3:  # type: ignore[union-attr]
        return _planes_backward(plan, likes, delta, needs)
    dy, base, lora = (plan.tokens(like) for like in likes[:3])
    g, s = plan.vector(likes[3]), plan.scalar("s")
    (M, N), strips = base.shape, cdiv(base.shape[0], ROWS)
    plan.path = "one pass over what the wanted gradients need; sums over tokens in two stages"
    out, partials = _wanted(plan, base.shape, base.dtype, lora.dtype, N, strips, needs)
    grid, flat = grid_of(cdiv(N, BWD_N), strips)
    plan.launch(
        compose_bwd_kernel,
        grid,
        {
            "dy": dy,
            "base": base,
            "lora": lora,
            "g": g,
            **named("dbase dlora", out[:2]),
            **named("partial_g partial_bias", partials),
            "s": s,
            "M": M,
            "N": N,
            "DELTA": delta,
            **named("NEED_BASE NEED_LORA NEED_G NEED_BIAS", needs),
            "BLOCK_M": BWD_M,
            "BLOCK_N": BWD_N,
            "ROWS": ROWS,
            "FLAT": flat,
        },
        4,
    )
    return _summed(plan, out, partials)


def _wanted(
    plan: Builder, shape: Sequence[int], base: torch.dtype, lora: torch.dtype, N: int, strips: int, needs: Sequence[bool]
) -> tuple[list[Array | None], list[Array | None]]:
    """The results that are asked for, and the partials of those that are sums."""
    like = ((shape, base), (shape, lora), ((N,), torch.float32), ((N,), torch.float32))
    names = ("dbase", "dlora", "dg", "dbias")
    out = [plan.result(n, *form) if need else None for n, form, need in zip(names, like, needs, strict=True)]
    return out, [None if t is None else plan.temp((strips, N), torch.float32) for t in out[2:]]


def _summed(plan: Builder, out: Sequence[Array | None], partials: Sequence[Array | None]) -> Plan:
    for partial, total in zip(partials, out[2:], strict=True):
        if partial is not None and total is not None:
            column_sums(plan, partial, total)
    return plan.plan()


def _planes(plan: Builder, likes: Sequence[Any], delta: bool) -> Plan:
    L, N, P = likes[0].shape
    base, lora = plan.flat(likes[0]), plan.flat(likes[1])
    g, bias = plan.vector(likes[2]), plan.vector(likes[3])
    y, s = plan.result("y", (L, N, P), base.dtype), plan.scalar("s")
    rows, points = _blocks(P)
    plan.path = "one pass over base and lora, a row for each channel"
    grid, flat = grid_of(cdiv(L * N, rows), cdiv(P, points))
    plan.launch(
        planes_fwd_kernel,
        grid,
        {
            "base": base,
            "lora": lora,
            "g": g,
            "bias": bias,
            "y": y,
            "s": s,
            "rows": L * N,
            "N": N,
            "P": P,
            "DELTA": delta,
            "HAS_BIAS": bias is not None,
            "BLOCK_M": rows,
            "BLOCK_P": points,
            "FLAT": flat,
        },
        4,
    )
    return plan.plan()


def _planes_backward(plan: Builder, likes: Sequence[Any], delta: bool, needs: tuple[bool, ...]) -> Plan:
    L, N, P = likes[1].shape
    dy, base, lora = (plan.flat(like) for like in likes[:3])
    g, s = plan.vector(likes[3]), plan.scalar("s")
    rows, points = _blocks(P)
    strip = points if points >= P else STRIP
    plan.path = "one pass over what the wanted gradients need, a row for each channel; sums over points, then over rows"
    out, partials = _wanted(plan, (L, N, P), base.dtype, lora.dtype, N, L * cdiv(P, strip), needs)
    grid, flat = grid_of(cdiv(L * N, rows), cdiv(P, strip))
    plan.launch(
        planes_bwd_kernel,
        grid,
        {
            "dy": dy,
            "base": base,
            "lora": lora,
            "g": g,
            **named("dbase dlora", out[:2]),
            **named("partial_g partial_bias", partials),
            "s": s,
            "rows": L * N,
            "N": N,
            "P": P,
            "DELTA": delta,
            **named("NEED_BASE NEED_LORA NEED_G NEED_BIAS", needs),
            "BLOCK_M": rows,
            "BLOCK_P": points,
            "STRIP": strip,
            "FLAT": flat,
        },
        4,
    )
    return _summed(plan, out, partials)


def _blocks(P: int) -> tuple[int, int]:
    """Rows and points of a block of 2048 elements: as many points as there are, in a power of two."""
    points = min(POINTS, max(16, 1 << (P - 1).bit_length())) if P else 16
    return 4 * POINTS // points, points


def _fake_compose(base, lora, g, bias, s, delta):
    return torch.empty(base.shape, device=base.device, dtype=base.dtype)


def _fake_compose_backward(dy, base, lora, g, s, delta, needs):
    shapes = ((base.shape, base.dtype), (base.shape, lora.dtype), (g.shape, torch.float32), (g.shape, torch.float32))
    return [torch.empty(sh, device=base.device, dtype=t) for (sh, t), need in zip(shapes, needs, strict=True) if need]


_SCHEMA = "(Tensor dy, Tensor base, Tensor lora, Tensor g, float s, bool delta, bool[] needs) -> Tensor[]"
compose = op("compose", _compose, _fake_compose, _planned)
compose_backward = op("compose_backward", _compose_backward, _fake_compose_backward, _planned_backward, _SCHEMA)
