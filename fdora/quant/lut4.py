"""Weights of 4-bit codes that a table of 16 values decodes, with one scale for each group: NF4, FP4, MXFP4, NVFP4.

    W[n, k] = table[code(n, k)] * scale(group of (n, k))                             in float32

One description serves the four, so that one kernel can. Tensors, in this order (named CODES):

    codes    uint8, N K / 2 bytes: (ceil(N K / 2),) where groups are flat, (N, K / 2) where they belong to rows
    scales   of the groups: float32, or uint8 (nested; the exponents of e8m0), or float8_e4m3fn
    then, nested:  code256 float32 (256,), scales2 float32 (ceil(groups / 256),), offset float32 ()
    or, nvfp4:     global float32 ()
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from fdora.quant.weight import QuantWeight, read_as, register_kind, repeated

# bitsandbytes: quantiles of a normal distribution (Dettmers et al., QLoRA, 2023, arXiv:2305.14314, appendix E).
# fmt: off
NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453,
    -0.28444138169288635, -0.18477343022823334, -0.09105003625154495, 0.0,
    0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)
# fmt: on
_FP4 = (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0)  # bitsandbytes', whose largest becomes 1
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)  # of the Open Compute Project: MXFP4 and NVFP4
TABLES: dict[str, tuple[float, ...]] = {
    "nf4": NF4,
    "fp4": tuple(sign * v / 12 for sign in (1, -1) for v in _FP4),
    "e2m1": tuple(sign * v for sign in (1, -1) for v in _E2M1),
}
CODES = ("codes", "scales")
NESTED = 256  # scales that share one scale of theirs


class Lut4(NamedTuple):
    """How weights of kind nf4, fp4, mxfp4 and nvfp4 are stored: which table of 4-bit values, and how codes and scales lie."""

    table: str
    """A key of TABLES."""
    hi_first: bool
    """Whether the high nibble of a byte is the first of its two values (bitsandbytes) or the second (MX)."""
    group: int
    """How many values share a scale; even."""
    scales: str
    """fp32: as stored. nested: ``code256[scales[b]] * scales2[b // 256] + offset``. e8m0: ``2 ** (scales[b] - 127)``, 255=NaN.
    e4m3*global: ``scales[b] * global``. e4m3/global: ``scales[b] / global``."""
    layout: str
    """flat: b = (n K + k) // group, so that groups cross rows. row: b = (n, k // group), and scales is (N, ceil(K / group))."""


def table(name: str, device: torch.device) -> Tensor:
    """The 16 values, float32."""
    return torch.tensor(TABLES[name], dtype=torch.float32, device=device)


def make_pairs(name: str, hi_first: bool, device: torch.device) -> Tensor:
    """(256, 2): what a byte means. One look-up gives both of its values, side by side."""
    values = TABLES[name]
    pairs = [(values[b >> 4], values[b & 15]) if hi_first else (values[b & 15], values[b >> 4]) for b in range(256)]
    return torch.tensor(pairs, dtype=torch.float32, device=device)


@cache
def _kept_pairs(name: str, hi_first: bool, device: torch.device) -> list[Tensor]:
    """At most one. It is kept on its device, because a copy from the host waits for it and is forbidden in a CUDA graph."""
    return []


def pairs(name: str, hi_first: bool, device: torch.device) -> Tensor:
    if torch.compiler.is_compiling():
        return make_pairs(name, hi_first, device)
    kept = _kept_pairs(name, hi_first, device)
    if kept:
        return kept[0]
    made = make_pairs(name, hi_first, device)
    if type(made) is Tensor:  # not the fake one of a tracer
        kept.append(made)
    return made


def exponent(codes: Tensor) -> Tensor:
    """``2 ** (code - 127)`` of e8m0, exact; 255 is NaN. The code is the exponent of a float32 but at its two ends."""
    code = codes.to(torch.int32)
    bits = code << 23
    bits = torch.where(code == 0, 1 << 22, bits)  # 2 ** -127 has no float32 exponent: it is denormal
    bits = torch.where(code == 255, 0x7FC00000, bits)
    return bits.view(torch.float32)


def scales_of(W: QuantWeight, first: int, last: int) -> Tensor:
    """Float32 scales first to last: of groups where they are flat, of rows where they belong to rows."""
    counts = {"fp32": 2, "e8m0": 2, "nested": 5}
    facts, (_, stored, *rest) = read_as(W, Lut4, counts.get(getattr(W.facts, "scales", ""), 3))
    s = stored[first:last]
    if facts.scales == "fp32":
        return s
    if facts.scales == "e8m0":
        return exponent(s)
    if facts.scales == "nested":
        code256, scales2, offset = rest
        return code256.index_select(0, s.to(torch.int32)) * repeated(scales2, NESTED, first, last) + offset
    (whole,) = rest
    return s.float() * whole if facts.scales == "e4m3*global" else s.float() / whole


def groups_of(W: QuantWeight, group: int, first: int, last: int) -> tuple[int, int]:
    """The flat groups that these rows touch, whole."""
    K = W.shape[1]
    return first * K // group, -(-last * K // group)


def flat_rows(W: QuantWeight, lut: Tensor, codes: Tensor, scales: Tensor, group: int, first: int, last: int) -> Tensor:
    """Rows of values in flat groups; ``scales``: those of the groups that the rows touch."""
    K, (b0, b1) = W.shape[1], groups_of(W, group, first, last)
    part = codes[b0 * group // 2 : b1 * group // 2]  # the last group may be shorter
    values = lut.index_select(0, part.to(torch.int32)).flatten()
    missing = (b1 - b0) * group - 2 * part.shape[0]
    values = pad(values, (0, missing)) if missing else values
    values = (values.view(-1, group) * scales[:, None]).flatten()
    return values[first * K - b0 * group : last * K - b0 * group].view(last - first, K)


def decode(W: QuantWeight, first: int, last: int) -> Tensor:
    facts, (codes,) = read_as(W, Lut4, 1)
    K = W.shape[1]
    group, lut = facts.group, pairs(facts.table, facts.hi_first, codes.device)
    if facts.layout == "row":
        scales = scales_of(W, first, last)
        values = lut.index_select(0, codes[first:last].to(torch.int32).flatten()).view(last - first, K)
        whole = scales.shape[1] * group
        values = values if whole == K else pad(values, (0, whole - K))
        return (values.view(last - first, -1, group) * scales[..., None]).flatten(1)[:, :K]
    return flat_rows(W, lut, codes, scales_of(W, *groups_of(W, group, first, last)), group, first, last)


for _name in ("nf4", "fp4"):
    register_kind(_name, dequantize=decode, tensors=(*CODES, "code256", "scales2", "offset"))
register_kind("mxfp4", dequantize=decode, tensors=CODES)
register_kind("nvfp4", dequantize=decode, tensors=(*CODES, "global"))
