"""A gated activation in one pass, ``a = f(gate) up``: two reads and one write; backward three reads and two writes.

Formulas: :mod:`fdora.eager.act`. Roof: the bytes, at copy speed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from fdora.triton._launch import cdiv, launch, traced
from fdora.triton._op import op

BLOCK = 2048
CUBIC = tl.constexpr(0.044715)
ROOT_HALF = tl.constexpr(0.7071067811865476)
TWICE_ROOT_2_OVER_PI = tl.constexpr(1.5957691216057308)
DENSITY_0 = tl.constexpr(0.3989422804014327)  # of the normal law


@triton.jit
def _share(z, ACT: tl.constexpr):
    """f(z) / z."""
    if ACT == "silu":
        return tl.sigmoid(z)
    elif ACT == "gelu":
        return 0.5 + 0.5 * tl.erf(z * ROOT_HALF)
    else:
        return tl.sigmoid((z + z * z * z * CUBIC) * TWICE_ROOT_2_OVER_PI)


@triton.jit
def _act_fwd_kernel(gate, up, a, count, ACT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(gate + at, mask=at < count).to(tl.float32)
    u = tl.load(up + at, mask=at < count).to(tl.float32)
    tl.store(a + at, (z * _share(z, ACT) * u).to(a.dtype.element_ty), mask=at < count)


@triton.jit
def _act_bwd_kernel(da, gate, up, dgate, dup, count, ACT: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    z = tl.load(gate + at, mask=at < count).to(tl.float32)
    u = tl.load(up + at, mask=at < count).to(tl.float32)
    d = tl.load(da + at, mask=at < count).to(tl.float32)
    share = _share(z, ACT)
    f = z * share
    if ACT == "silu":
        slope = share + f * (1 - share)
    elif ACT == "gelu":
        slope = share + z * tl.exp(-0.5 * z * z) * DENSITY_0
    else:
        slope = share + f * (1 - share) * (1 + z * z * CUBIC * 3) * TWICE_ROOT_2_OVER_PI
    tl.store(dgate + at, (d * u * slope).to(dgate.dtype.element_ty), mask=at < count)
    tl.store(dup + at, (d * f).to(dup.dtype.element_ty), mask=at < count)


def act_fwd(gate: Tensor, up: Tensor, act: str) -> Tensor:
    """(M, N), (M, N) -> (M, N) in their dtype."""
    return (activation if traced(gate) else _act)(gate, up, act)


def act_bwd(da: Tensor, gate: Tensor, up: Tensor, act: str) -> tuple[Tensor, Tensor]:
    """d gate, d up; the second in the place of ``da``, where no compiler and no torch.func looks on."""
    if traced(da):
        dgate, dup = activation_backward(da, gate, up, act)
        return dgate, dup
    da = da.contiguous()
    return _backward(da, gate, up, da, act)


def _act(gate: Tensor, up: Tensor, act: str) -> Tensor:
    gate, up = gate.contiguous(), up.contiguous()
    a = torch.empty_like(gate)
    count = a.numel()
    if count:
        with torch.cuda.device_of(a):
            launch(_act_fwd_kernel, (cdiv(count, BLOCK),), (gate, up, a, count), (act, BLOCK), 4)
    return a


def _act_backward(da: Tensor, gate: Tensor, up: Tensor, act: str) -> list[Tensor]:
    da = da.contiguous()
    return list(_backward(da, gate, up, torch.empty_like(da), act))


def _backward(da: Tensor, gate: Tensor, up: Tensor, dup: Tensor, act: str) -> tuple[Tensor, Tensor]:
    gate, up = gate.contiguous(), up.contiguous()
    dgate = torch.empty_like(gate)
    count = dgate.numel()
    if count:
        with torch.cuda.device_of(da):
            launch(_act_bwd_kernel, (cdiv(count, BLOCK),), (da, gate, up, dgate, dup, count), (act, BLOCK), 4)
    return dgate, dup


def _fake_activation(gate, up, act):
    return torch.empty(gate.shape, device=gate.device, dtype=gate.dtype)


def _fake_activation_backward(da, gate, up, act):
    return [torch.empty(gate.shape, device=gate.device, dtype=gate.dtype) for _ in range(2)]


activation = op("activation", _act, _fake_activation)
activation_backward = op("activation_backward", _act_backward, _fake_activation_backward)
