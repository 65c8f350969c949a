"""Weights of one 8-bit code for each value: int8 and float8_e4m3fn, scaled by tensor, row or block.

W[n, k] = codes[n, k] * scales[of (n, k)] * unit                                 in float32, from left to right
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdora._check import check_dtype, check_whole, fail
from fdora.quant.weight import QuantWeight, check_floating, kind_of, made, matrix, read_as, register_kind, repeated, stored

SCALES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
E4M3 = "float8_e4m3fn"


class Codes8(NamedTuple):
    """How weights of kind int8 and fp8 are stored. Tensors: codes (N, K), scales float32, transposed codes (K, N) if kept."""

    code: str
    """int8, or e4m3 (float8_e4m3fn)."""
    scale: str
    """tensor: scales is (1,). row: (N,). block: (ceil(N / bn), ceil(K / bk)), where the last blocks may be ragged."""
    block: tuple[int, int]
    """(bn, bk) where the scale is of blocks, else (0, 0)."""
    unit: float
    """1.0, or what bitsandbytes multiplies by: its scales are absolute maxima, so 1 / 127."""
    transposed: bool = False
    """Whether the codes are kept a second time, see :func:`with_transpose`."""


def spread(t: Tensor, block: tuple[int, int], first: int, last: int, K: int) -> Tensor:
    """Rows first to last of (N, K) numbers, from one number for each block."""
    bn, bk = block
    return repeated(t, bn, first, last).repeat_interleave(bk, 1)[:, :K]


def decode(W: QuantWeight, first: int, last: int) -> Tensor:
    facts, (codes, scales) = read_as(W, Codes8, 2)
    values = codes[first:last].float()
    if facts.scale == "row":
        values = values * scales[first:last, None]
    elif facts.scale == "tensor":
        values = values * scales
    else:
        values = values * spread(scales, facts.block, first, last, W.shape[1])
    return values if facts.unit == 1.0 else values * facts.unit


def in_trees(W: object) -> bool:
    """Whether its norm is computed beside those of dense weights: kernels of many layers read it, each tile with one column of
    scales."""
    facts: Any = W.facts if isinstance(W, QuantWeight) and kind_of(W.kind).dequantize is decode else None
    if not isinstance(W, QuantWeight) or not isinstance(facts, Codes8) or W.dtype == torch.float64:
        return False
    _, scales = read_as(W, Codes8, 2)[1]
    return scales.is_contiguous() and facts.unit == 1.0 and (facts.scale != "block" or facts.block[1] % 128 == 0)


register_kind("int8", dequantize=decode, tensors=("codes", "scales"))
register_kind("fp8", dequantize=decode, tensors=("codes", "scales", "transposed"))
register_kind(
    "mxfp8", dequantize=decode, tensors=("codes", "scales")
)  # fp8 whose scales are powers of two, for 32 columns each


def with_transpose(W: QuantWeight) -> QuantWeight:
    """The same ``W[n, k] = codes[n, k] * scale``, its codes kept a second time as (K, N), for ``grad_compute="fp8"``.

    Without them each backward transposes the codes in a pass of its own, 2 bytes moved for each weight.

    Args:
      W: of kind fp8.

    Returns:
      ``QuantWeight`` of kind fp8, with a third tensor; W itself where it has one.

    Raises:
      FdoraError: another kind.

    Memory: N K bytes beside those of W, whose tensors it shares; keeps nothing else.
    References: none; tensor cores take 8-bit operands along the sum alone.
    """
    facts = W.facts if isinstance(W, QuantWeight) else None
    if not isinstance(facts, Codes8) or facts.code != "e4m3":
        have = f"of kind {W.kind}" if isinstance(W, QuantWeight) else f"a {type(W).__name__}"
        raise fail("quant.with_transpose", "W", "a QuantWeight of kind fp8", have, "Others are not multiplied as codes.")
    if facts.transposed:
        return W
    codes, scales = W.tensors
    assert codes is not None
    turned = codes.view(torch.uint8).T.contiguous().view(codes.dtype)
    return replace(W, tensors=(codes, scales, turned), facts=facts._replace(transposed=True))


def from_fp8(
    weight: Tensor, scale: Tensor, block: str | Sequence[int] | None = None, *, dtype: torch.dtype = torch.bfloat16
) -> QuantWeight:
    """``W[n, k] = weight[n, k] * scale``: float8_e4m3fn codes with a scale that is multiplied, whatever its name says.

    Of DeepSeek's and Hugging Face's fine-grained checkpoints it is ``weight_scale_inv`` with ``block=(128, 128)``; of
    compressed-tensors ``weight_scale`` with ``block="row"``; of ModelOpt ``weight_scale`` with ``block=None``.

    Args:
      weight: (N, K) float8_e4m3fn; or (E, N, K), the experts of a mixture: the weight is (E N, K) then, and ``scale`` has one
        more axis, too (of None: E numbers).
      scale: float32; bfloat16, float16 and float8_e8m0fnu are converted. One number where ``block`` is None, (N,) or (N, 1)
        where it is "row", (ceil(N / bn), ceil(K / bk)) where it is (bn, bk).
      block: what shares a scale.
      dtype: that the weight stands for.

    Returns:
      ``QuantWeight`` of kind fp8. It is decoded in float32.

    Raises:
      FdoraError: a dtype, a shape or a device is another, or ``block`` is none of these.

    Memory: keeps the caller's tensors, and copies none, except scales of another dtype.
    References: DeepSeek-V3, 2024, arXiv:2412.19437, section 3.3; transformers 5.23, ``integrations/finegrained_fp8.py``.
    """
    fn = "quant.from_fp8"
    return coded(fn, "fp8", "e4m3", stored(fn, "weight", weight, (torch.float8_e4m3fn,)), scale, block, dtype, 1.0)


def from_mxfp8(weight: Tensor, scale: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> QuantWeight:
    """``W[n, k] = weight[n, k] * scale[n, k // 32]``: float8_e4m3fn codes with a power of two for each 32 columns.

    Args:
      weight: (N, K) float8_e4m3fn, or (E, N, K) as for :func:`from_fp8`.
      scale: (N, ceil(K / 32)) float8_e8m0fnu; with one more axis beside experts.
      dtype: that the weight stands for.

    Returns:
      ``QuantWeight`` of kind mxfp8, which ``compute="mxfp8"`` multiplies as it is. It is decoded in float32.

    Raises:
      FdoraError: a dtype, a shape or a device is another.

    Memory: keeps the caller's codes, and the scales as float32.
    References: OCP Microscaling Formats (MX) Specification v1.0, 2023.
    """
    fn = "quant.from_mxfp8"
    codes = stored(fn, "weight", weight, (torch.float8_e4m3fn,))
    check_dtype(fn, "scale", scale, (torch.float8_e8m0fnu,), "Of other scales W is from_fp8(weight, scale, (1, 32)).")
    return coded(fn, "mxfp8", "e4m3", codes, scale, (1, 32), dtype, 1.0)


def from_int8(
    codes: Tensor, scale: Tensor, block: str | Sequence[int] | None = "row", *, dtype: torch.dtype = torch.bfloat16
) -> QuantWeight:
    """``W[n, k] = codes[n, k] * scale``: symmetric int8.

    Args:
      codes: (N, K) int8.
      scale: float32; other floating dtypes are converted. Shapes as in :func:`from_fp8`.
      block: what shares a scale: "row", None for the whole tensor, or (bn, bk).
      dtype: that the weight stands for.

    Returns:
      ``QuantWeight`` of kind int8. It is decoded in float32.

    Raises:
      FdoraError: a dtype, a shape or a device is another, or ``block`` is none of these.

    Memory: keeps the caller's tensors, and copies none, except scales of another dtype.
    References: torchao 0.18, ``Int8Tensor``.
    """
    fn = "quant.from_int8"
    return coded(fn, "int8", "int8", stored(fn, "codes", codes, (torch.int8,)), scale, block, dtype, 1.0)


def coded(
    fn: str, kind: str, code: str, codes: Tensor, scale: Tensor, block: object, dtype: torch.dtype, unit: float
) -> QuantWeight:
    """A weight of codes that were checked, with scales that were not."""
    check_floating(fn, dtype)
    if not isinstance(scale, Tensor):
        raise fail(fn, "scale", "a torch.Tensor", f"a {type(scale).__name__}", "Pass the tensor that the checkpoint holds.")
    check_whole(fn, {"scale": scale})
    check_dtype(fn, "scale", scale, SCALES, "Pass it as the checkpoint holds it.")
    mode, pair = mode_of(fn, block)
    if codes.ndim == 3:
        codes, scale, mode = flattened(fn, codes, scale, mode, pair)
    N, K = matrix(fn, codes.shape)
    wanted = {"tensor": [(), (1,), (1, 1)], "row": [(N,), (N, 1)]}.get(mode) or [(-(-N // pair[0]), -(-K // pair[1]))]
    if tuple(scale.shape) not in wanted:
        want = f"of shape {' or '.join(map(str, wanted))} with block={block!r}"
        raise fail(fn, "scale", want, tuple(scale.shape), "Pass the block that the checkpoint's configuration names.")
    scale = scale.detach().float().contiguous()
    scale = scale if mode == "block" else scale.reshape(-1)
    return made(fn, kind, (codes, scale), (N, K), dtype, Codes8(code, mode, pair, unit))


def mode_of(fn: str, block: object, of: str = "a fine-grained checkpoint") -> tuple[str, tuple[int, int]]:
    if block is None or block == "row":
        return "tensor" if block is None else "row", (0, 0)
    if isinstance(block, Sequence) and len(block) == 2 and all(isinstance(b, int) and b > 0 for b in block):
        return "block", (block[0], block[1])
    raise fail(fn, "block", "None, 'row' or (bn, bk)", repr(block), f"Pass (128, 128) for {of}.")


def flattened(fn: str, codes: Tensor, scale: Tensor, mode: str, pair: tuple[int, int]) -> tuple[Tensor, Tensor, str]:
    """Codes (E, N, K) of experts, and their scales, as those of one weight (E N, K)."""
    E, N, _ = codes.shape
    if mode == "tensor" and scale.numel() == E:
        scale, mode = scale.reshape(E, 1).expand(E, N).reshape(-1), "row"
    elif mode == "row" and scale.ndim > 1:
        scale = scale.reshape(-1, *scale.shape[2:])
    elif mode == "block" and scale.ndim == 3:
        if N % pair[0]:
            remedy = "Dequantise it, or call dora_linear for each expert."
            raise fail(fn, "block", f"of rows that divide the {N} of an expert", pair, remedy)
        scale = scale.flatten(0, 1)
    return codes.flatten(0, 1), scale, mode
