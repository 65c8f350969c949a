"""W of a layer as its products read it: dense, in their dtype, among the temporaries of a plan. It is gone after the call.

Codes become a dense W in one pass, bit for bit that of ``QuantWeight.dequantize``. Where the norm is formed in the same plan
it comes out of this pass (quant.py), which saves the norm's own one: of NF4 0.5 bytes a weight read beside 2 written, and half
of the instructions, which are what bounds a norm of codes.

Roof: the bytes. NF4 to bf16 moves 2.52 bytes a weight, 8192 x 8192 in 57 us on an H100.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdora.quant import Lut4, QuantSpec
from fdora.triton.codes import (
    Coded,
    Packed,
    coded_of,
    decoding,
    in_pairs,
    is_decoded,
    of_weight,
    packed,
    tensors_of,
    written,
)
from fdora.triton.copy import in_dtype
from fdora.triton.kernels.dequantize import dequantize_kernel, lost_kernel
from fdora.triton.norm import norm as norm_of_dense
from fdora.triton.op import planned
from fdora.triton.quant import norm
from fdora.triton.runtime.builder import Builder, named
from fdora.triton.runtime.device import Device, cdiv
from fdora.triton.runtime.plan import Array, Like, Plan, Scalar
from fdora.triton.scale import tiny_of
from fdora.triton.tiles.quant import dequantize_config

TOGETHER = 64  # ranks up to this have their norm out of the pass that decodes


class G(NamedTuple):
    """g = m / c of each row."""

    m: Array
    c: Array


def weight_in(plan: Builder, W: Array | Packed, dtype: torch.dtype) -> Array:
    """W itself, or dense in this dtype."""
    return dequantized(plan, W, dtype) if isinstance(W, Packed) else in_dtype(plan, W, dtype)


def weight_of(plan: Builder, la: Any, s: Scalar, dtype: torch.dtype, c: Array | None) -> Array:
    """That of a layer. ``c``: where its norm goes, if nobody gave one."""
    if c is None:
        return weight_in(plan, la.W, dtype)
    if not isinstance(la.W, Packed):
        norm_of_dense(plan, la.W, la.A, la.B, s, c, None, False)
        return weight_in(plan, la.W, dtype)
    return dequantized_with_norm(plan, la.W, la.A, la.B, s, c, dtype)


def dense_of(spec: QuantSpec, tensors: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor | None:
    """``QuantWeight.dequantize(dtype)``; None where no kernel reads the format."""
    if not is_decoded(spec):
        return None
    text, numbers = written([coded_of(spec)])
    stored = tensors_of(tensors)
    out: Tensor = _dequantize(stored, text, numbers, dtype)
    return out


def plan_dequantize(likes: Sequence[Like | None], device: Device, coded: Coded, dtype: torch.dtype) -> Plan:
    plan = Builder("a dense W of codes", device)
    W = packed(plan, likes, coded)
    decode(plan, W, plan.result("W", W.shape, dtype))
    plan.path = "one pass over the codes"
    return plan.plan()


def dequantized(plan: Builder, W: Packed, dtype: torch.dtype) -> Array:
    out = room(plan, W.shape, dtype)
    decode(plan, W, out)
    return out


def decode(plan: Builder, W: Packed, out: Array, g: G | None = None, first: int = 0) -> None:
    """Columns of W from ``first`` on, as many as ``out`` has. ``g``: each row times its g in float32, then rounded."""
    (N, K), capability, last = W.shape, plan.device.capability, first + out.shape[1]
    config = dequantize_config(in_pairs(W.form, K), out.itemsize, isinstance(W.form, Lut4))
    given = {
        **decoding(W, capability),
        **named("m c", g or (None, None)),
        **{"out": out, "N": N, "K": K, "first": first, "last": last, "pitch": out.stride[0]},
        "EVEN": N % config.BLOCK_N == 0 and (last - first) % config.BLOCK_K == 0,
    }
    plan.launch(dequantize_kernel, (cdiv(N, config.BLOCK_N) * cdiv(last - first, config.BLOCK_K),), given, config)


def redo_lost(
    plan: Builder, W: Packed, dy: Array, x: Array, h: Array, B: Array, g: G, dm: Array | None, dc: Array | None
) -> None:
    """dm and dc, where asked for, again of rows whose g is (nearly) 0: from their products, since y holds nothing of them."""
    (N, K), (M, r), capability = W.shape, h.shape, plan.device.capability
    config = dequantize_config(in_pairs(W.form, K), x.itemsize, isinstance(W.form, Lut4))
    given = {
        **decoding(W, capability),
        **{"dy": dy, "x": x, "h": h, "b": B, "dm": dm, "dc": dc, "M": M, "N": N, "K": K, "R": r, "tiny": tiny_of(dy.dtype)},
        "EVEN": N % config.BLOCK_N == 0 and K % config.BLOCK_K == 0,
    }
    plan.launch(lost_kernel, (cdiv(N, config.BLOCK_N),), given, g, config)


def dequantized_with_norm(plan: Builder, W: Packed, A: Array, B: Array, s: Scalar, c: Array, dtype: torch.dtype) -> Array:
    """The same, and the norm of W + s B A into c (N,) float32: that of dora_norm, up to the order of its sum.

    Of larger ranks a pass each: us on an H200 at 14336 x 4096, together / norm and decoding: r = 16 73 / 36 + 43, r = 64 82 /
    43 + 43, r = 384 233 / 142 + 43.
    """
    if A.shape[0] > TOGETHER:
        norm(plan, W, A, B, s, c)
        return dequantized(plan, W, dtype)
    out = room(plan, W.shape, dtype)
    norm(plan, W, A, B, s, c, out)
    return out


def room(plan: Builder, shape: tuple[int, int], dtype: torch.dtype) -> Array:
    """(N, K), rows at multiples of 16 bytes: as TMA wants them."""
    N, K = shape
    unit = 16 // dtype.itemsize
    return plan.temp((N, K), dtype, (cdiv(K, unit) * unit, 1))


dequantize, _dequantize = planned(
    "dequantize",
    "(Tensor[] tensors, str[] text, SymInt[] numbers, ScalarType dtype) -> Tensor",
    of_weight(plan_dequantize),
    lambda tensors, text, numbers, dtype: ((numbers[0], numbers[1]), dtype),
)
