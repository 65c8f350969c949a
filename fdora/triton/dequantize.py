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
from fdora.triton.codes import Ints, Packed, decoding, facts_of, group_of, in_pairs, packed, tensors_of, weights_of
from fdora.triton.copy import in_dtype
from fdora.triton.kernels.dequantize import dequantize_kernel, lost_kernel
from fdora.triton.norm import norm
from fdora.triton.op import Likes, planned
from fdora.triton.runtime import Array, Builder, Scalar, cdiv, named
from fdora.triton.scale import tiny_of
from fdora.triton.tiles.quant import DequantizeConfig, dequantize_config

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
        norm(plan, la.W, la.A, la.B, s, c)
        return weight_in(plan, la.W, dtype)
    return dequantized_with_norm(plan, la.W, la.A, la.B, s, c, dtype)


def dense_of(spec: QuantSpec, tensors: Sequence[Tensor | None], dtype: torch.dtype) -> Tensor | None:
    """``QuantWeight.dequantize(dtype)``; None where no kernel reads the format."""
    if (facts := facts_of(spec)) is None:
        return None
    out: Tensor = plan_dequantize.call(tensors_of(tensors), *facts, dtype)
    return out


@planned(
    "dequantize(Tensor[] tensors, str[] text, SymInt[] numbers, ScalarType dtype) -> Tensor",
    "a dense W of codes",
    "rest",
    lambda tensors, text, numbers, dtype: {"W": ((numbers[0], numbers[1]), dtype)},
    "one pass over the codes",
)
def plan_dequantize(plan: Builder, likes: Likes, text: Sequence[str], numbers: Sequence[int], dtype: torch.dtype) -> None:
    decode(plan, packed(plan, likes, *weights_of(text, numbers)), *plan.wanted())


def dequantized(plan: Builder, W: Packed, dtype: torch.dtype) -> Array:
    out = room(plan, W.shape, dtype)
    decode(plan, W, out)
    return out


def decode(plan: Builder, W: Packed, out: Array, g: G | None = None, first: int = 0) -> None:
    """Columns of W from ``first`` on, as many as ``out`` has. ``g``: each row times its g in float32, then rounded."""
    (N, columns), last = out.shape, first + out.shape[1]
    given, config = _tile_of(plan, W, columns, out.itemsize)
    given |= {"out": out, "first": first, "last": last, "pitch": out.stride[0], **named("m c", g or (None, None))}
    given |= {"PAIRED": isinstance(W.form, Ints) and W.form.per == 2 and N // 2 % config.BLOCK_N == 0}
    plan.launch(dequantize_kernel, (cdiv(N, config.BLOCK_N) * cdiv(columns, config.BLOCK_K),), given, config)


def _tile_of(
    plan: Builder, W: Packed, columns: int, itemsize: int, lost: bool = False
) -> tuple[dict[str, Any], DequantizeConfig]:
    """What kernels that decode so many columns are given, to numbers of so many bytes."""
    N, K = W.shape
    config = dequantize_config(in_pairs(W.form, K), itemsize, isinstance(W.form, Lut4), group_of(W))
    if lost and isinstance(W.form, Ints):  # beside sums over tokens 64 rows would spill
        config = config._replace(BLOCK_N=32)
    even = N % config.BLOCK_N == 0 and columns % config.BLOCK_K == 0
    return decoding(W, plan.device.capability) | {"N": N, "K": K, "EVEN": even}, config


def redo_lost(
    plan: Builder,
    W: Packed,
    dy: Array,
    x: Array,
    h: Array | None,
    B: Array,
    g: G,
    dm: Array | None,
    dc: Array | None,
    offsets: Array | None = None,
    experts: bool = False,
) -> None:
    """dm and dc, where asked for, again of rows whose g is (nearly) 0: from their products, since y holds nothing of them.
    With ``offsets`` m, c and B are of many adapters; ``experts``: so is W, of 8-bit codes."""
    if dm is None and dc is None:
        return
    assert h is not None
    N, count = dy.shape[1], 1 if offsets is None else offsets.shape[0]
    given, config = _tile_of(plan, W, W.shape[1], x.itemsize, lost=True)
    given["EVEN"] = given["EVEN"] and N % config.BLOCK_N == 0
    given |= {"dy": dy, "x": x, "h": h, "b": B, "dm": dm, "dc": dc, "tiny": tiny_of(dy.dtype), **named("M R", h.shape)}
    given |= {"offsets": offsets, "G": count, "N": N, "apart": N if experts else 0}
    plan.launch(lost_kernel, (cdiv(N, config.BLOCK_N), count), given, g, config)


def dequantized_with_norm(plan: Builder, W: Packed, A: Array, B: Array, s: Scalar, c: Array, dtype: torch.dtype) -> Array:
    """The same, and the norm of W + s B A into c (N,) float32: that of dora_norm, up to the order of its sum.

    Of larger ranks a pass each: us on an H200 at 14336 x 4096, together / norm and decoding: r = 16 73 / 36 + 43, r = 64 82 /
    43 + 43, r = 384 233 / 142 + 43.
    """
    if A.shape[0] > TOGETHER:
        norm(plan, W, A, B, s, c)
        return dequantized(plan, W, dtype)
    out = room(plan, W.shape, dtype)
    norm(plan, W, A, B, s, c, dense=out)
    return out


def room(plan: Builder, shape: tuple[int, int], dtype: torch.dtype) -> Array:
    """(N, K), rows at multiples of 16 bytes: as TMA wants them."""
    N, K = shape
    unit = 16 // dtype.itemsize
    return plan.temp((N, K), dtype, (cdiv(K, unit) * unit, 1))
