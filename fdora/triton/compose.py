"""Compose and delta, ``y = h base + g s lora (+ bias)`` with h = g or g - 1: two reads and one write, in one pass.

Backward reads dy (and base, lora where dg is asked for) once and writes what is needed; the sums over tokens go through one
row of partials per strip of tokens, which :func:`column_sums` adds in a fixed order. Roof: the bytes, at copy speed.

A server's pass, by the slot of each token, reads and writes z of DoRA's tokens once, and of all others reads the slot.

Of a convolution whose channels lie before its points, (L, N, P), a row is one channel: planes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fdora.triton.kernels.compose import (
    compose_bwd_kernel,
    compose_fwd_kernel,
    planes_bwd_kernel,
    planes_fwd_kernel,
    slots_kernel,
)
from fdora.triton.op import planned
from fdora.triton.runtime import Array, Builder, Scalar, asked, cdiv, grid_of, named
from fdora.triton.runtime.private import NOT_AHEAD
from fdora.triton.runtime.walk import plan_for, run
from fdora.triton.sums import column_sums
from fdora.triton.tiles.configs import power_of_two

TILE = {"BLOCK_M": 4, "BLOCK_N": 512}
BWD = {"BLOCK_M": 32, "BLOCK_N": 128, "ROWS": 128}
SLOTS = {"BLOCK_N": 128}
POINTS, STRIP = 512, 4096  # of a plane: in a block, and in what one program of backward sums


def compose_bwd(
    dy: Tensor, base: Tensor, lora: Tensor, g: Tensor, s: float, delta: bool, needs: tuple[bool, bool, bool, bool]
) -> tuple[Tensor | None, ...]:
    """dbase, dlora, dg, dbias (the last in float32); each only when needed."""
    grads = iter(plan_compose_backward.call(dy, base, lora, g, s, delta, list(needs)))
    return tuple(next(grads) if need else None for need in needs)


@planned(
    "compose(Tensor base, Tensor lora, Tensor g, Tensor? bias, float s, bool delta) -> Tensor",
    "dora_compose",
    "planes planes vector vector s",
    lambda base, *_: {"y": (base.shape, base.dtype)},
)
def plan_compose(plan: Builder, base: Array, lora: Array, g: Array, bias: Array | None, s: Scalar, delta: bool) -> None:
    """(M, N), (M, N), (N,), (N,) or None -> (M, N) in the dtype of base; or (L, N, P)"""
    (y,), shape = plan.wanted(), plan.inputs[0].shape
    given = {"base": base, "lora": lora, "g": g, "bias": bias, "y": y, "s": s, "DELTA": delta}
    plan.name, plan.path = "dora_delta" if delta else plan.name, "one pass over base and lora"
    if len(shape) == 3:
        plan.path += ", a row for each channel"
        sizes, rows, points = _planes(shape)
        grid, flat = grid_of(cdiv(sizes["rows"], rows), cdiv(shape[2], points))
        plan.launch(planes_fwd_kernel, grid, {**given, **sizes, "FLAT": flat})
    else:
        plan.launch(compose_fwd_kernel, "M N", given | named("M N", shape), TILE)


compose_fwd = plan_compose.call


def _gradients(dy: Any, base: Any, lora: Any, g: Any, delta: bool, needs: Sequence[bool]) -> dict[str, Any]:
    """The form of each gradient that is asked for."""
    of_g = g.shape, torch.float32
    forms = {"dbase": (base.shape, base.dtype), "dlora": (base.shape, lora.dtype), "dg": of_g, "dbias": of_g}
    return asked(forms, needs)


@planned(
    "compose_backward(Tensor dy, Tensor base, Tensor lora, Tensor g, float s, bool delta, bool[] needs) -> Tensor[]",
    "dora_compose backward",
    "planes planes planes vector s",
    _gradients,
)
def plan_compose_backward(
    plan: Builder, dy: Array, base: Array, lora: Array, g: Array, s: Scalar, delta: bool, needs: tuple[bool, ...]
) -> None:
    shape = plan.inputs[1].shape
    out = plan.wanted()
    plan.name = "dora_delta backward" if delta else plan.name
    plan.path = "one pass over what the wanted gradients need"
    if len(shape) == 3:
        plan.path += ", a row for each channel; sums over points, then over rows"
        (L, N, P), (sizes, rows, points) = shape, _planes(shape)
        strip = points if points >= P else STRIP
        strips, grid = L * cdiv(P, strip), (cdiv(L * N, rows), cdiv(P, strip))
        kernel, sizes = planes_bwd_kernel, {**sizes, "STRIP": strip}
    else:
        plan.path += "; sums over tokens in two stages"
        M, N = shape
        strips = cdiv(M, BWD["ROWS"])
        kernel, grid = compose_bwd_kernel, (cdiv(N, BWD["BLOCK_N"]), strips)
        sizes = {"M": M, "N": N, **BWD}
    partials = [total and plan.temp((strips, N)) for total in out[2:]]
    blocks, flat = grid_of(*grid)
    given = {"dy": dy, "base": base, "lora": lora, "g": g, "s": s, "DELTA": delta, "FLAT": flat}
    given |= named("dbase dlora partial_g partial_bias", (*out[:2], *partials))
    plan.launch(kernel, blocks, given | sizes)
    for partial, total in zip(partials, out[2:], strict=True):
        if partial is not None and total is not None:
            column_sums(plan, partial, total)


@planned("", "scale_slots", "matrix flat vector vector vector vector vector vector stack stack vector", lambda *_: {})
def plan_slots(plan: Builder, z: Array, *given: Array | None) -> None:
    plan.path = "h B^T and g by slots in one pass, in place"
    tensors: dict[str, Any] = named("g holds bias order counts starts ids h b ends", given)
    (P, M, R), N, segments = tensors["h"].shape, z.shape[1], tensors["ids"].shape[0]
    rows = rows_of_slots(M, R)
    tile = SLOTS | {"BLOCK_M": rows, "BLOCK_S": power_of_two(segments), "BLOCK_R": min(64, max(16, power_of_two(R)))}
    grid = min(M, cdiv(M, rows) + segments), cdiv(N, SLOTS["BLOCK_N"]), P
    tensors |= {"z": z, "M": M, "N": N, "R": R, "SEGMENTS": segments}
    plan.launch(slots_kernel, grid, tensors | tile, num_stages=NOT_AHEAD, pdl=plan.pdl)


def rows_of_slots(M: int, R: int) -> int:
    """Tokens of a program. Which slots they are of nobody knows: few of each want short tiles, many of one want B read once.

    us on an H200 of x W^T, a shrink and this pass, 4096 -> 4096, for tokens, adapters and rank, and with vLLM's own kernel,
    which takes 64: 64, 64, 16: 40 by 16, 52 by 64 (50); 512, 64, 64: 83 by 32, 94 by 64 (94); 8192, 1, 64: 520, 514 (490).
    """
    if M <= 64:
        return 16
    return (16 if R <= 32 else 32) * (1 if M <= 512 else 2)


def scale_slots(z: Tensor, *given: Any) -> None:
    """In place, the elements of a row of z next to each other; the tables say whose each token is."""
    g, holds, bias, _, low, tables = given
    tensors = (z, g, holds, bias, *tables, *low)
    run(plan_for(plan_slots, tensors), tensors)


def _planes(shape: tuple[int, ...]) -> tuple[dict[str, int], int, int]:
    """Sizes, and rows and points of a block of 2048 elements: as many points as there are, in a power of two."""
    L, N, P = shape
    points = min(POINTS, max(16, 1 << (P - 1).bit_length())) if P else 16
    rows = 4 * POINTS // points
    return {"rows": L * N, "N": N, "P": P, "BLOCK_M": rows, "BLOCK_P": points}, rows, points
