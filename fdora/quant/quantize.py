"""Reference quantisers in plain torch: round to the nearest code, with the scales that each format usually has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import gcd

import torch
from torch import Tensor
from torch.nn.functional import pad

from fdora._check import FLOATS, check_dtype, check_whole, fail
from fdora.quant.codes8 import Codes8, mode_of
from fdora.quant.lut4 import NESTED, Lut4, exponent, table
from fdora.quant.weight import CHUNK, QuantSpec, QuantWeight, check_floating, matrix

FN = "quant.quantize"
Rows = Callable[[int, int], Tensor]  # rows i to j of what is quantised, float32
Coded = tuple[Tensor, Tensor]  # codes and scales
NAMES = "nf4, fp4, mxfp4, nvfp4, int8 or fp8"
TINY = 1e-38  # bitsandbytes' floor of an absolute maximum
E4M3_MAX, E2M1_MAX = 448.0, 6.0


def grouped(W: Tensor, group: int) -> Tensor:
    """(..., groups, group), with zeros behind the last values."""
    missing = -W.shape[-1] % group
    return (pad(W, (0, missing)) if missing else W).unflatten(-1, (-1, group))


def within_one(flat: Tensor, group: int) -> Coded:
    """Numbers over the largest of their group, and these absolute maxima."""
    blocks = grouped(flat, group)
    absmax = blocks.abs().amax(1)
    return (blocks * (1 / absmax.clamp(min=TINY))[:, None]).clamp(-1, 1).flatten()[: flat.shape[0]], absmax


def by_map(x: Tensor, values: Tensor) -> Tensor:
    """Index of the nearest of ``values``, which ascend; at the middle of two the lower one."""
    return torch.bucketize(x, (values[:-1] + values[1:]) / 2)


def dynamic_map(device: torch.device) -> Tensor:
    """The 256 signed values with which bitsandbytes quantises scales: 7 decades, in each of which the number of steps doubles.

    Dettmers, 8-bit approximations for parallelism in deep learning, 2015, arXiv:1511.04561.
    """
    values = [torch.zeros(1), torch.ones(1)]
    for i in range(7):
        bounds = torch.linspace(0.1, 1, 2**i + 1)
        steps = 10.0 ** (i - 6) * ((bounds[:-1] + bounds[1:]) / 2)
        values += [steps, -steps]
    return torch.cat(values).sort().values.to(device)


def bitsandbytes4(W: Tensor, facts: Lut4) -> Coded:
    """Codes and absolute maxima of whole groups; the last of all may be shorter."""
    x, absmax = within_one(W.flatten(), facts.group)
    ascending, order = table(facts.table, W.device).sort(stable=True)
    codes = order[by_map(x, ascending)].to(torch.uint8)
    codes = pad(codes, (0, 1)) if codes.shape[0] % 2 else codes
    return codes[::2] << 4 | codes[1::2], absmax


def nest(absmax: Tensor) -> tuple[Tensor, ...]:
    """Their scales quantised, too: codes, code256, scales2, offset."""
    offset, code256 = absmax.mean(), dynamic_map(absmax.device)
    x, scales2 = within_one(absmax - offset, NESTED)
    return by_map(x, code256).to(torch.uint8), code256, scales2, offset


def to_e2m1(x: Tensor) -> Tensor:
    """Codes 0 to 15, to nearest, ties to the even code, beyond 6 to 6."""
    ends = table("e2m1", x.device)[:8]
    middles, size = (ends[:-1] + ends[1:]) / 2, x.abs()
    low, high = torch.bucketize(size, middles), torch.bucketize(size, middles, right=True)  # they differ at a tie
    return torch.where(low % 2 == 0, low, high) + 8 * torch.signbit(x)


def packed_rows(codes: Tensor, K: int) -> Tensor:
    codes = codes.flatten(1)[:, :K].to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4


def mxfp4(W: Tensor) -> Coded:
    blocks = grouped(W, 32)
    # frexp: amax = f * 2 ** e with f in [0.5, 1), so floor(log2(amax)) = e - 1; the largest e2m1 is 1.5 * 2 ** 2
    absmax = blocks.abs().amax(2)
    e = torch.where(absmax == 0, -127, torch.frexp(absmax).exponent - 3)
    scales = torch.where(absmax.isfinite(), e.clamp(-127, 127) + 127, 255).to(torch.uint8)  # 255: e2m1 has no NaN
    codes = to_e2m1(blocks / exponent(scales)[..., None])
    return packed_rows(codes, W.shape[1]), scales


def nvfp4(W: Tensor, whole: Tensor) -> Coded:
    """``whole``: the scale of all scales."""
    blocks = grouped(W, 16)
    scales = (blocks.abs().amax(2) / E2M1_MAX / whole).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    total = scales.float() * whole
    codes = to_e2m1(torch.where(total[..., None] == 0, 0.0, blocks / total[..., None]))
    return packed_rows(codes, W.shape[1]), scales


def eight(W: Tensor, facts: Codes8, whole: Tensor | None) -> Coded:
    """``whole``: the scale of the tensor, where it has one."""
    N, K = W.shape
    bn, bk = facts.block if facts.scale == "block" else (1, max(1, K))
    more = -K % bk if facts.scale == "block" else bk - K  # a row without columns has its scale, too
    padded = pad(W, (0, more, 0, -N % bn)) if N else W.new_zeros(0, K + more)  # torch 2.8 pads no tensor without rows
    tiles = padded.unflatten(1, (-1, bk)).unflatten(0, (-1, bn))
    scales = above_zero(tiles.abs().amax((1, 3)) / largest_of(facts)) if whole is None else whole.reshape(1, 1)
    x = (tiles / scales[:, None, :, None]).flatten(2).flatten(0, 1)[:N, :K].contiguous()
    if facts.code == "int8":
        codes = x.round().clamp(-127, 127).to(torch.int8)
    else:
        codes = x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return codes, scales if facts.scale == "block" else scales.flatten()


def largest_of(facts: Codes8) -> float:
    return 127.0 if facts.code == "int8" else E4M3_MAX


def above_zero(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, 1.0, scale)


def facts_of(kind: str, group: int, nested: bool, block: object) -> Lut4 | Codes8 | None:
    if kind in ("nf4", "fp4"):
        return Lut4(kind, True, group, "nested" if nested else "fp32", "flat")
    if kind in ("mxfp4", "nvfp4"):
        return Lut4("e2m1", False, *((32, "e8m0") if kind == "mxfp4" else (16, "e4m3*global")), "row")
    if kind not in ("int8", "fp8"):
        return None
    code = "int8" if kind == "int8" else "e4m3"
    return Codes8(code, *mode_of(FN, block, "fine-grained scales"), 1.0)


def quantizes(spec: QuantSpec) -> bool:
    """Whether :func:`quantize_rows` makes weights of this format."""
    facts = spec.facts
    if isinstance(facts, Codes8):
        return spec.kind in ("int8", "fp8")
    if not isinstance(facts, Lut4) or spec.kind not in ("nf4", "fp4", "mxfp4", "nvfp4"):
        return False
    like = facts._replace(scales="e4m3*global") if facts.scales == "e4m3/global" else facts
    return like == facts_of(spec.kind, facts.group, facts.scales == "nested", None)


def quantize_rows(rows: Rows, spec: QuantSpec, device: torch.device) -> QuantWeight:
    """A weight of this format. Rows are asked for in order, few at a time; twice where all of them share a scale."""
    facts, bounds = spec.facts, bounds_of(spec)
    assert isinstance(facts, Lut4 | Codes8)
    whole = None
    if isinstance(facts, Lut4) and facts.scales.startswith("e4m3"):
        whole = above_zero(_largest(rows, bounds, device) / (E4M3_MAX * E2M1_MAX))
    elif isinstance(facts, Codes8) and facts.scale == "tensor":
        whole = above_zero(_largest(rows, bounds, device) / largest_of(facts))
    parts = [_encoded(rows(i, j), facts, whole) for i, j in bounds]
    codes, scales = (_joined(column) for column in zip(*parts, strict=True))
    more: tuple[Tensor, ...] = ()
    if isinstance(facts, Codes8):
        scales = scales[:1] if facts.scale == "tensor" else scales
        scales = scales if facts.unit == 1.0 else scales / facts.unit
    elif facts.scales == "nested":
        scales, *more = nest(scales)  # type: ignore[assignment]
    elif whole is not None:
        more = (whole if facts.scales == "e4m3*global" else 1 / whole,)
    return QuantWeight(spec.kind, (codes, scales, *more), spec.shape, spec.dtype, facts)


def _encoded(W: Tensor, facts: Lut4 | Codes8, whole: Tensor | None) -> Coded:
    """Codes and scales of some rows."""
    if isinstance(facts, Codes8):
        return eight(W, facts, whole)
    if facts.table != "e2m1":
        return bitsandbytes4(W, facts)
    return mxfp4(W) if whole is None else nvfp4(W, whole)


def _largest(rows: Rows, bounds: Sequence[tuple[int, int]], device: torch.device) -> Tensor:
    largest = torch.zeros((), device=device)
    for i, j in bounds:
        part = rows(i, j)
        largest = torch.maximum(largest, part.abs().amax()) if part.numel() else largest
    return largest


def bounds_of(spec: QuantSpec) -> list[tuple[int, int]]:
    """Runs of rows that hold whole groups: CHUNK numbers in each, or as few as that needs."""
    facts, (N, K) = spec.facts, spec.shape
    if isinstance(facts, Codes8):
        unit = facts.block[0] if facts.scale == "block" else 1
    elif isinstance(facts, Lut4) and facts.layout == "flat":
        unit = facts.group // gcd(K, facts.group)
    else:
        unit = 1
    step = max(1, CHUNK // max(1, K * unit)) * unit
    return [(i, min(N, i + step)) for i in range(0, max(1, N), step)]


def _joined(parts: Sequence[Tensor]) -> Tensor:
    if len(parts) == 1:
        return parts[0]
    if parts[0].dtype == torch.float8_e4m3fn:
        return torch.cat([t.view(torch.uint8) for t in parts]).view(torch.float8_e4m3fn)
    return torch.cat(list(parts))


def quantize(
    W: Tensor,
    kind: str,
    *,
    group: int | None = None,
    nested: bool = False,
    block: str | Sequence[int] | None = "row",
    dtype: torch.dtype | None = None,
) -> QuantWeight:
    """``quantize(W, kind).dequantize() ~ W``: each value becomes the nearest code, scaled by the largest of its group.

    Args:
      W: (N, K) finite weight, float16, bfloat16, float32 or float64; computed in float32. What is not finite comes back
        so, with all that shares its scale.
      kind: nf4, fp4 (as bitsandbytes has them), mxfp4, nvfp4, int8 (symmetric) or fp8 (e4m3).
      group: values that share a scale, for nf4 and fp4: even, 64 where None.
      nested: for nf4 and fp4, quantise their scales too.
      block: what shares a scale, for int8 and fp8: "row", None for the whole tensor, or (bn, bk).
      dtype: that the result stands for; None is that of W.

    Returns:
      ``QuantWeight`` on the device of W. A group of zeros stays zeros.

    Raises:
      FdoraError: another kind; W is no tensor, or a dtype not floating; K is odd, for mxfp4 and nvfp4; group, nested or block
        do not fit the kind.

    Memory: some float32 copies of 64 MB of W at a time while it runs; keeps nothing of it.
    References: those of :func:`from_bnb`, :func:`from_mxfp4`, :func:`from_nvfp4` and :func:`from_fp8`.
    """
    if not isinstance(W, Tensor):
        raise fail(FN, "W", "a dense torch.Tensor", f"a {type(W).__name__}", "Pass, of a QuantWeight, W.dequantize().")
    check_whole(FN, {"W": W})
    check_dtype(FN, "W", W, FLOATS)
    check_floating(FN, W.dtype if dtype is None else dtype)
    N, K = matrix(FN, W.shape)
    lut, coded = kind in ("nf4", "fp4"), kind in ("int8", "fp8")
    if not lut and (nested or group is not None):
        raise fail(
            FN, "group", "None, and nested False,", f"{group} and {nested} for {kind!r}", "Only nf4 and fp4 have a choice."
        )
    if not coded and block != "row":
        raise fail(FN, "block", "left out", f"{block!r} for {kind!r}", "Only int8 and fp8 have a choice.")
    if group is not None and (not isinstance(group, int) or group < 2 or group % 2):
        raise fail(FN, "group", "an even int of at least 2", group, "Pass 64.")
    if kind in ("mxfp4", "nvfp4") and K % 2:
        raise fail(FN, "W", "of even K", (N, K), "Two values of a row share a byte: pad W with a column of zeros.")
    facts = facts_of(kind, 64 if group is None else group, nested, block)
    if facts is None:
        raise fail(FN, "kind", NAMES, repr(kind), "Other formats are made by their own libraries.")
    spec = QuantSpec(kind, (N, K), W.dtype if dtype is None else dtype, facts, 0)
    with torch.no_grad():
        return quantize_rows(lambda i, j: W[i:j].detach().float(), spec, W.device)
