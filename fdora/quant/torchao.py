"""torchao's tensors, known by the exact name of their class and by their attributes; torchao is never imported."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdora._check import FLOATS, fail
from fdora.quant.codes8 import from_fp8, from_int8, spread
from fdora.quant.lut4 import flat_rows, groups_of
from fdora.quant.mx import from_mxfp4, from_nvfp4
from fdora.quant.weight import QuantWeight, made, matrix, read_as, register_kind, repeated, stored


class TorchaoNf4(NamedTuple):
    """How weights of kind torchao_nf4 are stored: flat groups, high nibble first, and every step in the dtype of the weight.

    Tensors: codes uint8 (N K / 2,), scalers int8 (N K / group,), factor (N K / group / outer,), mean (), table (16,).
    """

    group: int
    outer: int
    """How many scalers share a factor."""


class Affine(NamedTuple):
    """How weights of kind affine are stored: W = (codes - zeros) * scales in float32.

    Tensors: codes int8 (N, K), scales, zeros: one a block.
    """

    block: tuple[int, int]


def decode_nf4(W: QuantWeight, first: int, last: int) -> Tensor:
    facts, (codes, scalers, factor, mean, table) = read_as(W, TorchaoNf4, 5)
    b0, b1 = groups_of(W, facts.group, first, last)
    scale = scalers[b0:b1] / repeated(factor, facts.outer, b0, b1) + mean
    byte = torch.arange(256, dtype=torch.int32, device=codes.device)
    pairs = torch.stack([table.index_select(0, byte >> 4), table.index_select(0, byte & 15)], 1)
    return flat_rows(W, pairs, codes, scale, facts.group, first, last)


def decode_affine(W: QuantWeight, first: int, last: int) -> Tensor:
    facts, (codes, *rest) = read_as(W, Affine, 3)
    scales, zeros = (spread(t, facts.block, first, last, W.shape[1]).float() for t in rest)
    return (codes[first:last].float() - zeros) * scales


register_kind("torchao_nf4", dequantize=decode_nf4, tensors=("codes", "scalers", "factor", "mean", "table"))
register_kind("affine", dequantize=decode_affine, tensors=("codes", "scales", "zeros"))

FN = "quant.from_torchao"
ELSE = "Dequantise it, or use fdora.quant.opaque with a function that does."


def of_nf4(t: Any) -> QuantWeight:
    N, K = matrix(FN, t.shape)
    group, outer = t.block_size, t.scaler_block_size
    blocks = N * K // group
    if N * K % (group * outer):
        raise fail(
            FN, "tensor", f"of a size that {group} * {outer} divides", (N, K), "Quantise the weight with torchao's to_nf4."
        )
    dtype = (t.dtype,)
    tensors = (
        stored(FN, "quantized_data", t.quantized_data, (torch.uint8,), (N * K // 2,)),
        stored(FN, "quantized_scalers", t.quantized_scalers, (torch.int8,), (blocks,)),
        stored(FN, "quantization_factor", t.quantization_factor, dtype, (blocks // outer,)),
        stored(FN, "scaler_mean", t.scaler_mean, dtype, ()),
        stored(FN, "nf4", t.nf4, dtype, (16,)),
    )
    return made(FN, "torchao_nf4", tensors, (N, K), t.dtype, TorchaoNf4(group, outer))


def scaled(t: Any) -> tuple[Tensor, Tensor, str | tuple[int, int] | None]:
    """Codes, scales, and what shares one."""
    N, K = matrix(FN, t.qdata.shape)
    bn, bk = tuple(t.block_size) or (N, K)
    if bn in (1, N) and bk == K:
        return t.qdata, t.scale.reshape(-1), None if bn == N else "row"
    return t.qdata, t.scale.reshape(-(-N // bn), -(-K // bk)), (bn, bk)


def of_int8(t: Any) -> QuantWeight:
    if t.act_pre_scale is not None:
        raise fail(FN, "tensor", "a weight alone", "an Int8Tensor that scales its input too (act_pre_scale)", ELSE)
    matrix(FN, t.qdata.shape)
    if t.zero_point is not None and (torch.compiler.is_compiling() or bool(t.zero_point.any())):  # a trace cannot look
        return affine(t)
    return from_int8(*scaled(t), dtype=t.dtype)


def affine(t: Any) -> QuantWeight:
    N, K = matrix(FN, t.qdata.shape)
    bn, bk = t.block_size
    size = (-(-N // bn), -(-K // bk))
    codes = stored(FN, "qdata", t.qdata, (torch.int8,))
    scales = stored(FN, "scale", t.scale.reshape(size), FLOATS)
    zeros = stored(FN, "zero_point", t.zero_point.reshape(size), (torch.int8, torch.int32, torch.int64, *FLOATS))
    return made(FN, "affine", (codes, scales, zeros), (N, K), t.dtype, Affine((bn, bk)))


def of_fp8(t: Any) -> QuantWeight:
    return from_fp8(*scaled(t), dtype=t.dtype)


def unswizzled(t: Any) -> None:
    # The attribute has this name since 0.16; before 0.15 the high nibble was the first, and nothing in the tensor says so.
    if getattr(t, "is_swizzled_scales", None) is not False:
        raise fail(FN, "tensor", "one with scales in the order of rows", f"a {type(t).__name__} with swizzled scales", ELSE)


def of_mx(t: Any) -> QuantWeight:
    unswizzled(t)
    if t.elem_dtype != getattr(torch, "float4_e2m1fn_x2", None) or t.block_size != 32:
        raise fail(FN, "tensor", "of 4-bit elements in groups of 32", f"a MXTensor of {t.elem_dtype} in {t.block_size}", ELSE)
    return from_mxfp4(t.qdata, t.scale, dtype=t.orig_dtype)


def of_nvfp4(t: Any) -> QuantWeight:
    unswizzled(t)
    return from_nvfp4(t.qdata, t.scale, t.per_tensor_scale, dtype=t.orig_dtype)


KNOWN: dict[str, tuple[tuple[str, ...], Callable[[Any], QuantWeight]]] = {
    "NF4Tensor": (("quantized_data", "quantized_scalers", "quantization_factor", "scaler_mean", "nf4"), of_nf4),
    "Int8Tensor": (("qdata", "scale", "zero_point", "block_size", "act_pre_scale"), of_int8),
    "IntxUnpackedToInt8Tensor": (("qdata", "scale", "zero_point", "block_size", "target_dtype"), affine),
    "Float8Tensor": (("qdata", "scale", "block_size"), of_fp8),
    "MXTensor": (("qdata", "scale", "elem_dtype", "block_size", "orig_dtype"), of_mx),
    "NVFP4Tensor": (("qdata", "scale", "per_tensor_scale", "block_size", "orig_dtype"), of_nvfp4),
}


def from_torchao(tensor: Tensor) -> QuantWeight:
    """``W = tensor.dequantize()`` (for NF4Tensor ``tensor.get_original_weight()``), from what the tensor holds.

    Args:
      tensor: (N, K) ``Int8Tensor``, ``IntxUnpackedToInt8Tensor``, ``Float8Tensor`` (e4m3; by tensor, row or block),
        ``NF4Tensor``, or ``MXTensor`` of 4 bits or ``NVFP4Tensor`` whose scales are not swizzled.

    Returns:
      ``QuantWeight`` of kind int8 (affine where it has zero points: to know, one look at them waits for the device, and in
      compiled code zero points of 0 are zero points), fp8, torchao_nf4, mxfp4 or nvfp4, of the tensor's dtype, bit for bit
      what torchao dequantises. torchao_nf4 is decoded in its own dtype, the others in float32.

    Raises:
      FdoraError: another class, or a MXTensor or NVFP4Tensor of torchao before 0.16. torchao's Int4 tensors keep an order
        of bits that torchao itself does not dequantise.

    Memory: keeps the tensor's inner tensors, and copies none.
    References: torchao 0.14 and 0.18, ``quantization/quantize_/workflows``, ``prototype/mx_formats``.
    """
    kind = type(tensor)
    names, handler = KNOWN.get(kind.__name__, ((), None))
    if kind.__module__.partition(".")[0] != "torchao" or handler is None or not all(hasattr(tensor, n) for n in names):
        raise fail(FN, "tensor", f"of torchao, a {', '.join(KNOWN)}", f"a {kind.__module__}.{kind.__qualname__}", ELSE)
    return handler(tensor)
