"""GPTQ and AWQ: integers packed in int32 words with groups along in_features, and out_features the fast axis."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fdora._check import FLOATS, fail
from fdora.quant.weight import QuantWeight, check_floating, made, matrix, read_as, register_kind, stored

WORD = (torch.int32,)


class Gptq(NamedTuple):
    """How weights of kind gptq and awq are stored.

    gptq: qweight int32 (K bits / 32, N), qzeros int32 (groups, ceil(N bits / 32)), scales (groups, N), g_idx (K,) or None;
    low bits first. awq: qweight int32 (K, N / 8), qzeros int32 (groups, N / 8), scales (groups, N). In a
    word, counted from the low end, out_feature 8 j + i stands at i // 2 + 4 (i % 2): 0, 4, 1, 5, 2, 6, 3, 7.
    """

    bits: int
    group: int
    """k // group is the group where there is no g_idx."""
    plus: int
    """What is added to a stored zero: 1 in version 1 of GPTQ. It is added to whole words, as gptqmodel took it from them: a
    zero of 0 borrowed from what stands above it."""


def decode_gptq(W: QuantWeight, first: int, last: int) -> Tensor:
    facts, (qweight, qzeros, scales) = read_as(W, Gptq, 3)
    g_idx = W.tensors[3] if len(W.tensors) > 3 else None
    bits, mask = facts.bits, (1 << facts.bits) - 1
    per = 32 // bits
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=qweight.device)
    q = (qweight[:, None, first:last] >> shifts[:, None] & mask).flatten(0, 1)  # (K, rows)
    w0 = first // per
    words = qzeros[:, w0 : -(-last // per), None] + facts.plus * sum(1 << i for i in range(0, 32, bits))
    z = (words >> shifts & mask).flatten(1)[:, first - w0 * per : last - w0 * per]
    return grouped(q, z, scales[:, first:last], g_idx, facts.group)


def decode_awq(W: QuantWeight, first: int, last: int) -> Tensor:
    facts, (qweight, qzeros, scales) = read_as(W, Gptq, 3)
    w0, w1 = first // 8, -(-last // 8)
    i = torch.arange(8, dtype=torch.int32, device=qweight.device)
    shifts = 4 * (i // 2 + i % 2 * 4)  # with no copy from the host
    q, z = ((t[:, w0:w1, None] >> shifts & 15).flatten(1)[:, first - 8 * w0 : last - 8 * w0] for t in (qweight, qzeros))
    return grouped(q, z, scales[:, first:last], None, facts.group)


def grouped(q: Tensor, z: Tensor, scales: Tensor, g_idx: Tensor | None, group: int) -> Tensor:
    """(rows, K) of (K, rows) codes: exact in float32 for half-precision scales."""
    s, K = scales.float(), q.shape[0]
    if g_idx is None:
        s, z = (t.repeat_interleave(group, 0)[:K] for t in (s, z))
    else:
        s, z = (t.index_select(0, g_idx) for t in (s, z))
    return ((q - z) * s).T


register_kind("gptq", dequantize=decode_gptq, tensors=("qweight", "qzeros", "scales", "g_idx"))
register_kind("awq", dequantize=decode_awq, tensors=("qweight", "qzeros", "scales"))


def from_gptq(
    qweight: Tensor,
    qzeros: Tensor,
    scales: Tensor,
    g_idx: Tensor | None = None,
    *,
    bits: int = 4,
    version: int = 1,
    dtype: torch.dtype | None = None,
) -> QuantWeight:
    """``W[n, k] = scales[g, n] * (q[k, n] - z[g, n])`` with ``g = g_idx[k]``.

    Args:
      qweight: (K bits / 32, N) int32; a word holds consecutive in_features, low bits first.
      qzeros: (groups, ceil(N bits / 32)) int32; a word holds consecutive out_features.
      scales: (groups, N), floating.
      g_idx: (K,) int32 or int64 group of each in_feature, in any order (``desc_act``); None is k // (K / groups), where groups
        divide K.
      bits: 2, 4 or 8.
      version: 1 for checkpoints, which store z - 1; 2 for z itself, as gptqmodel has it once it has loaded a layer.
      dtype: that the weight stands for; None is that of the scales.

    Returns:
      ``QuantWeight`` of kind gptq. It is decoded in float32, exactly where scales are half-precision.

    Raises:
      FdoraError: a dtype, a shape or a device is another, the version is neither, or groups of unequal length come without
        ``g_idx``. Weights that Marlin or ExLlama have repacked have other shapes or another order: pass what the checkpoint
        holds.

    Memory: keeps the caller's tensors, and copies none.
    References: Frantar et al., GPTQ, 2022, arXiv:2210.17323; gptqmodel 7.7, ``nn_modules/qlinear/torch.py``.
    """
    fn = "quant.from_gptq"
    if bits not in (2, 4, 8):
        raise fail(fn, "bits", "2, 4 or 8", bits, "Use fdora.quant.opaque with the layer's own dequantisation.")
    if version not in (1, 2):
        raise fail(fn, "version", "1 or 2", version, "Pass 1 for tensors of a checkpoint.")
    qweight = stored(fn, "qweight", qweight, WORD)
    words, N = matrix(fn, qweight.shape)
    K = words * 32 // bits
    scales = stored(fn, "scales", scales, FLOATS)
    groups, _ = matrix(fn, scales.shape)
    stored(fn, "scales", scales, FLOATS, (groups, N))
    qzeros = stored(fn, "qzeros", qzeros, WORD, (groups, -(-N * bits // 32)))
    if g_idx is not None:
        g_idx = stored(fn, "g_idx", g_idx, (torch.int32, torch.int64), (K,))
        if K and g_idx.device.type == "cpu" and not torch.compiler.is_compiling():  # elsewhere a look would wait for the device
            low, high = map(int, g_idx.aminmax())
            if low < 0 or high >= groups:
                want, have = f"groups from 0 to {groups - 1}, the rows of scales", f"values from {low} to {high}"
                raise fail(fn, "g_idx", want, have, "Pass the tensors of one layer, as the checkpoint holds them.")
    elif K % max(1, groups):
        raise fail(fn, "g_idx", f"given where {groups} groups do not divide K={K}", None, "Pass that of the checkpoint.")
    return finish(fn, "gptq", (qweight, qzeros, scales, g_idx), (N, K), Gptq(bits, -(-K // max(1, groups)), 2 - version), dtype)


def from_awq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, group: int | None = None, *, dtype: torch.dtype | None = None
) -> QuantWeight:
    """``W[n, k] = scales[k // group, n] * (q[k, n] - z[k // group, n])``: AWQ's GEMM format, 4 bits.

    Args:
      qweight: (K, N / 8) int32; a word holds 8 consecutive out_features, from the low end 0, 2, 4, 6, 1, 3, 5, 7.
      qzeros: (K / group, N / 8) int32, in the same order.
      scales: (K / group, N), floating.
      group: how many in_features share a scale; None is what the shapes say, where it divides K.
      dtype: that the weight stands for; None is that of the scales.

    Returns:
      ``QuantWeight`` of kind awq. It is decoded in float32, exactly where scales are half-precision.

    Raises:
      FdoraError: a dtype or a shape is another, as in the GEMV and Marlin formats; a device is; or the last group is shorter
        and ``group`` is left out.

    Memory: keeps the caller's tensors, and copies none.
    References: Lin et al., AWQ, 2023, arXiv:2306.00978; AutoAWQ 0.2.9, ``utils/packing_utils.py``.
    """
    fn = "quant.from_awq"
    qweight = stored(fn, "qweight", qweight, WORD)
    K, words = matrix(fn, qweight.shape)
    N = 8 * words
    scales = stored(fn, "scales", scales, FLOATS)
    groups, _ = matrix(fn, scales.shape)
    if group is None and K % max(1, groups):
        raise fail(
            fn, "group", f"given where {groups} groups do not divide K={K}", None, "Pass the group size of the checkpoint."
        )
    group = max(1, K // max(1, groups)) if group is None else group
    if not isinstance(group, int) or group < 1:
        raise fail(fn, "group", "an int of at least 1", group, f"For one group of all in_features pass {K}.")
    scales = stored(fn, "scales", scales, FLOATS, (-(-K // group), N))
    qzeros = stored(fn, "qzeros", qzeros, WORD, (-(-K // group), words))
    return finish(fn, "awq", (qweight, qzeros, scales), (N, K), Gptq(4, group, 0), dtype)


def finish(fn: str, kind: str, tensors: tuple, shape: tuple[int, int], facts: Gptq, dtype: torch.dtype | None) -> QuantWeight:
    dtype = tensors[2].dtype if dtype is None else dtype
    check_floating(fn, dtype)
    return made(fn, kind, tensors if tensors[-1] is not None else tensors[:-1], shape, dtype, facts)
