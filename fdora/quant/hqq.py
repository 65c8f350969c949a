"""HQQ: W = (q - zero) * scale in the library's compute dtype, after W was reshaped to groups along either axis."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdora._check import FLOATS, fail
from fdora.quant.weight import QuantWeight, made, matrix, read_as, register_kind, stored

BITS = {"8bit_u8": 8, "4bit_u8": 4, "2bit_u8": 2, "1bit_u8": 1}  # what a byte holds, by the library's word for it
STORAGE = (torch.uint8, torch.bfloat16, torch.float16, torch.float32)


class Hqq(NamedTuple):
    """How weights of kind hqq are stored. Tensors: codes uint8 (R bits / 8, C), scales, zeros.

    W is (R, C) row by row: axis 1 is (groups, group) with scales (R, 1); axis 0 is (group, groups) with scales (1, C). A byte
    holds rows of that which are far apart, the first in its highest bits: with 4 bits byte-row j holds rows j and j + R / 2.
    """

    bits: int
    """Of a code as it is packed: 8, 4, 2 or 1."""
    axis: int
    group: int
    compute: torch.dtype
    """In which codes, zeros and scales meet, each step rounded, as the library does it."""


def decode(W: QuantWeight, first: int, last: int) -> Tensor:
    facts, (codes, scales, zeros) = read_as(W, Hqq, 3)
    K = W.shape[1]
    held, C = codes.shape
    begin, end = first * K, last * K
    r0, r1 = begin // C, -(-end // C)  # the rows of (R, C) that these rows touch
    parts = []
    for p in range(8 // facts.bits):
        i, j = max(r0, p * held), min(r1, (p + 1) * held)
        if i < j:
            part = codes[i - p * held : j - p * held]
            parts.append(part >> (8 - facts.bits * (p + 1)) & ((1 << facts.bits) - 1))
    q = (parts[0] if len(parts) == 1 else torch.cat(parts)).to(facts.compute)
    if facts.axis == 1:
        scales, zeros = scales[r0:r1], zeros[r0:r1]
    values = (q - zeros) * scales
    return values.flatten()[begin - r0 * C : end - r0 * C].view(last - first, K)


register_kind("hqq", dequantize=decode, tensors=("codes", "scales", "zeros"))


def from_hqq(W_q: Any, meta: Mapping[str, Any] | None = None) -> QuantWeight:
    """``W = ((q - zero) * scale).reshape(N, K)``, each step rounded to the library's compute dtype.

    Args:
      W_q: packed codes of 8, 4, 2 or 1 bits, or an ``HQQLinear``, which has both. Bytes that ``view_as_float`` keeps in a
        floating dtype are read as bytes.
      meta: the dictionary beside it: shape, axis, group_size, packing, scale, zero, and compute_dtype (float16 without).

    Returns:
      ``QuantWeight`` of kind hqq, of the dtype in which the library computes, bit for bit what its ``dequantize()`` gives.

    Raises:
      FdoraError: 3 bits, quantised scales or zeros, scales of the whole tensor, or shapes or devices that do not fit.

    Memory: keeps the library's tensors, and copies none. Rows of axis 0 are decoded with those beside them, as they are
    interleaved: a slice costs up to two more rows of groups.
    References: Badri and Shaji, Half-Quadratic Quantization, 2023; hqq 0.2.8, ``core/quantize.py`` and ``core/bitpack.py``.
    """
    fn = "quant.from_hqq"
    if meta is None and not isinstance(W_q, Tensor):
        W_q, meta = getattr(W_q, "W_q", None), getattr(W_q, "meta", None)
    if not isinstance(W_q, Tensor) or not isinstance(meta, Mapping):
        have = f"a {type(W_q).__name__} and a {type(meta).__name__}"
        raise fail(fn, "W_q", "a tensor with its `meta`, or a quantised HQQLinear", have, "Pass layer.W_q and layer.meta.")
    lost = [key for key in ("shape", "axis", "packing", "scale", "zero") if key not in meta]
    if lost:
        remedy = "Quantise the layer with quant_zero=False and quant_scale=False." if lost[0] in ("scale", "zero") else ""
        raise fail(fn, "meta", f"a dictionary with {lost[0]}", f"{sorted(meta)}", remedy or "Pass layer.meta.")
    if meta["packing"] not in BITS:
        raise fail(fn, "meta['packing']", f"one of {', '.join(BITS)}", repr(meta["packing"]), "Quantise to 4 or 8 bits.")
    if meta["axis"] not in (0, 1):
        raise fail(fn, "meta['axis']", "0 or 1", meta["axis"], "Pass layer.meta.")
    bits, axis = BITS[meta["packing"]], int(meta["axis"])
    N, K = matrix(fn, tuple(meta["shape"]))
    group = meta.get("group_size") or (K if axis == 1 else N)
    compute = meta.get("compute_dtype", torch.float16)
    R, C = (N * K // group, group) if axis == 1 else (group, N * K // group)
    wide = W_q.data.element_size()  # a floating view has fewer columns
    codes = stored(fn, "W_q", W_q.data, STORAGE, (R * bits // 8, C // wide)).view(torch.uint8)
    size = (R, 1) if axis == 1 else (1, C)
    scales = stored(fn, "meta['scale']", meta["scale"], FLOATS, size)
    zeros = stored(fn, "meta['zero']", meta["zero"], FLOATS, size)
    if codes.shape[0] * 8 != R * bits or R * C != N * K:
        raise fail(fn, "W_q", f"{R} rows of {bits} bits", tuple(codes.shape), "Pass layer.W_q and layer.meta of one layer.")
    dtype = torch.promote_types(torch.promote_types(compute, zeros.dtype), scales.dtype)
    return made(fn, "hqq", (codes, scales, zeros), (N, K), dtype, Hqq(bits, axis, group, compute))
