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

from fdora.triton.kernels.compose import compose_bwd_kernel, compose_fwd_kernel, planes_bwd_kernel, planes_fwd_kernel
from fdora.triton.op import planned
from fdora.triton.runtime.builder import Builder, named
from fdora.triton.runtime.device import Device, cdiv, grid_of
from fdora.triton.runtime.plan import Plan
from fdora.triton.sums import column_sums

BLOCK_M, BLOCK_N = 4, 512
BWD_M, BWD_N, ROWS = 32, 128, 128
POINTS, STRIP = 512, 4096  # of a plane: in a block, and in what one program of backward sums


def compose_bwd(
    dy: Tensor, base: Tensor, lora: Tensor, g: Tensor, s: float, delta: bool, needs: tuple[bool, bool, bool, bool]
) -> tuple[Tensor | None, ...]:
    """dbase, dlora, dg, dbias (the last in float32); each only when needed."""
    grads = iter(_compose_backward(dy, base, lora, g, s, delta, list(needs)))
    return tuple(next(grads) if need else None for need in needs)


def plan_compose(likes: Sequence[Any], device: Device, delta: bool) -> Plan:
    plan, shape = Builder("dora_delta" if delta else "dora_compose", device), likes[0].shape
    given = _read(plan, likes, "base lora") | {"g": plan.vector(likes[2]), "bias": plan.vector(likes[3])}
    given |= {"y": plan.result("y", shape, likes[0].dtype), "s": plan.scalar("s"), "DELTA": delta}
    plan.path = "one pass over base and lora"
    if len(shape) == 3:
        plan.path += ", a row for each channel"
        sizes, rows, points = _planes(shape)
        grid, flat = grid_of(cdiv(sizes["rows"], rows), cdiv(shape[2], points))
        plan.launch(planes_fwd_kernel, grid, {**given, **sizes, "FLAT": flat})
        return plan.plan()
    M, N = shape
    tile = {"BLOCK_M": BLOCK_M, "BLOCK_N": BLOCK_N}
    plan.launch(compose_fwd_kernel, (cdiv(M, BLOCK_M), cdiv(N, BLOCK_N)), {**given, "M": M, "N": N, **tile})
    return plan.plan()


def plan_compose_backward(likes: Sequence[Any], device: Device, delta: bool, needs: tuple[bool, ...]) -> Plan:
    plan, (dy, base, lora, g), f32 = (
        Builder("dora_delta backward" if delta else "dora_compose backward", device),
        likes,
        torch.float32,
    )
    given = _read(plan, likes, "dy base lora") | {"g": plan.vector(g), "s": plan.scalar("s"), "DELTA": delta}
    forms = _gradients(dy, base, lora, g, 0.0, delta, needs)
    names = ("dbase", "dlora", "dg", "dbias")
    out = [None if form is None else plan.result(name, *form) for name, form in zip(names, forms, strict=True)]
    plan.path = "one pass over what the wanted gradients need"
    if len(base.shape) == 3:
        plan.path += ", a row for each channel; sums over points, then over rows"
        (L, N, P), (sizes, rows, points) = base.shape, _planes(base.shape)
        strip = points if points >= P else STRIP
        strips, grid = L * cdiv(P, strip), (cdiv(L * N, rows), cdiv(P, strip))
        kernel, sizes = planes_bwd_kernel, {**sizes, "STRIP": strip}
    else:
        plan.path += "; sums over tokens in two stages"
        M, N = base.shape
        strips = cdiv(M, ROWS)
        kernel, grid = compose_bwd_kernel, (cdiv(N, BWD_N), strips)
        sizes = {"M": M, "N": N, "BLOCK_M": BWD_M, "BLOCK_N": BWD_N, "ROWS": ROWS}
    partials = [None if total is None else plan.temp((strips, N), f32) for total in out[2:]]
    blocks, flat = grid_of(*grid)
    given |= named("dbase dlora", out[:2]) | named("partial_g partial_bias", partials)
    plan.launch(kernel, blocks, {**given, **sizes, "FLAT": flat})
    for partial, total in zip(partials, out[2:], strict=True):
        if partial is not None and total is not None:
            column_sums(plan, partial, total)
    return plan.plan()


def _read(plan: Builder, likes: Sequence[Any], names: str) -> dict[str, Any]:
    """The first arguments: (M, N), or planes without gaps."""
    return {
        name: (plan.flat if len(like.shape) == 3 else plan.tokens)(like)
        for name, like in zip(names.split(), likes, strict=False)
    }


def _planes(shape: tuple[int, ...]) -> tuple[dict[str, int], int, int]:
    """Sizes, and rows and points of a block of 2048 elements: as many points as there are, in a power of two."""
    L, N, P = shape
    points = min(POINTS, max(16, 1 << (P - 1).bit_length())) if P else 16
    rows = 4 * POINTS // points
    return {"rows": L * N, "N": N, "P": P, "BLOCK_M": rows, "BLOCK_P": points}, rows, points


def _gradients(
    dy: Any, base: Any, lora: Any, g: Any, s: float, delta: bool, needs: Sequence[bool]
) -> list[tuple[Any, torch.dtype] | None]:
    """The form of each gradient that is asked for."""
    like = ((base.shape, base.dtype), (base.shape, lora.dtype), (g.shape, torch.float32), (g.shape, torch.float32))
    return [form if need else None for form, need in zip(like, needs, strict=True)]


# (M, N), (M, N), (N,), (N,) or None -> (M, N) in the dtype of base; or (L, N, P)
compose, compose_fwd = planned(
    "compose",
    "(Tensor base, Tensor lora, Tensor g, Tensor? bias, float s, bool delta) -> Tensor",
    plan_compose,
    lambda base, *_: (base.shape, base.dtype),
)
compose_backward, _compose_backward = planned(
    "compose_backward",
    "(Tensor dy, Tensor base, Tensor lora, Tensor g, float s, bool delta, bool[] needs) -> Tensor[]",
    plan_compose_backward,
    _gradients,
)
