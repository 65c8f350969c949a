"""Reference quantisers in plain torch: round to the nearest code, with the scales that each format usually has."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from fdora._check import FLOATS, check_dtype, fail
from fdora.quant.codes8 import from_fp8, from_int8
from fdora.quant.lut4 import NESTED, Lut4, exponent, table
from fdora.quant.mx import from_mxfp4, from_nvfp4
from fdora.quant.weight import QuantWeight, matrix

FN = "quant.quantize"
TINY = 1e-38  # bitsandbytes' floor of an absolute maximum
E4M3_MAX, E2M1_MAX = 448.0, 6.0


def grouped(W: Tensor, group: int) -> Tensor:
    """(..., groups, group), with zeros behind the last values."""
    missing = -W.shape[-1] % group
    return (pad(W, (0, missing)) if missing else W).unflatten(-1, (-1, group))


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


def bitsandbytes4(W: Tensor, kind: str, group: int, nested: bool, dtype: torch.dtype) -> QuantWeight:
    blocks = grouped(W.flatten(), group)
    absmax = blocks.abs().amax(1)
    x = (blocks * (1 / absmax.clamp(min=TINY))[:, None]).clamp(-1, 1).flatten()[: W.numel()]
    values = table(kind, W.device)
    ascending, order = values.sort(stable=True)
    codes = order[by_map(x, ascending)].to(torch.uint8)
    codes = pad(codes, (0, 1)) if codes.shape[0] % 2 else codes
    packed = codes[::2] << 4 | codes[1::2]
    N, K = W.shape
    if not nested:
        return QuantWeight(kind, (packed, absmax), (N, K), dtype, Lut4(kind, True, group, "fp32", "flat"))
    offset, code256 = absmax.mean(), dynamic_map(W.device)
    rest = absmax - offset
    outer = grouped(rest, NESTED)
    scales2 = outer.abs().amax(1)
    x = (outer * (1 / scales2.clamp(min=TINY))[:, None]).clamp(-1, 1).flatten()[: rest.shape[0]]
    tensors = (packed, by_map(x, code256).to(torch.uint8), code256, scales2, offset)
    return QuantWeight(kind, tensors, (N, K), dtype, Lut4(kind, True, group, "nested", "flat"))


def to_e2m1(x: Tensor) -> Tensor:
    """Codes 0 to 15, to nearest, ties to the even code, beyond 6 to 6."""
    ends = table("e2m1", x.device)[:8]
    middles, size = (ends[:-1] + ends[1:]) / 2, x.abs()
    low, high = torch.bucketize(size, middles), torch.bucketize(size, middles, right=True)  # they differ at a tie
    return torch.where(low % 2 == 0, low, high) + 8 * torch.signbit(x)


def packed_rows(codes: Tensor, K: int) -> Tensor:
    codes = codes.flatten(1)[:, :K].to(torch.uint8)
    return codes[:, ::2] | codes[:, 1::2] << 4


def mxfp4(W: Tensor, dtype: torch.dtype) -> QuantWeight:
    blocks = grouped(W, 32)
    # frexp: amax = f * 2 ** e with f in [0.5, 1), so floor(log2(amax)) = e - 1; the largest e2m1 is 1.5 * 2 ** 2
    absmax = blocks.abs().amax(2)
    e = torch.where(absmax == 0, -127, torch.frexp(absmax).exponent - 3)
    scales = (e.clamp(-127, 127) + 127).to(torch.uint8)
    codes = to_e2m1(blocks / exponent(scales)[..., None])
    return from_mxfp4(packed_rows(codes, W.shape[1]), scales, dtype=dtype)


def nvfp4(W: Tensor, dtype: torch.dtype) -> QuantWeight:
    blocks = grouped(W, 16)
    absmax = blocks.abs().amax(2)
    whole = absmax.amax() / (E4M3_MAX * E2M1_MAX) if absmax.numel() else absmax.new_ones(())
    whole = torch.where(whole == 0, 1.0, whole)
    scales = (absmax / E2M1_MAX / whole).clamp(max=E4M3_MAX).to(torch.float8_e4m3fn)
    total = scales.float() * whole
    codes = to_e2m1(torch.where(total[..., None] == 0, 0.0, blocks / total[..., None]))
    return from_nvfp4(packed_rows(codes, W.shape[1]), scales, whole, dtype=dtype)


def eight(W: Tensor, kind: str, block: object, dtype: torch.dtype) -> QuantWeight:
    largest = 127.0 if kind == "int8" else E4M3_MAX
    N, K = W.shape
    if block is None:
        bn, bk = max(1, N), max(1, K)
    elif block == "row":
        bn, bk = 1, max(1, K)
    elif isinstance(block, Sequence) and len(block) == 2 and all(isinstance(b, int) and b > 0 for b in block):
        bn, bk = block
    else:
        raise fail(FN, "block", "None, 'row' or (bn, bk)", repr(block), "Pass (128, 128) for fine-grained scales.")
    tiles = pad(W, (0, -K % bk, 0, -N % bn)).unflatten(1, (-1, bk)).unflatten(0, (-1, bn))
    scales = tiles.abs().amax((1, 3)) / largest
    scales = torch.where(scales == 0, 1.0, scales)
    x = (tiles / scales[:, None, :, None]).flatten(2).flatten(0, 1)[:N, :K].contiguous()
    if kind == "int8":
        return from_int8(x.round().clamp(-127, 127).to(torch.int8), scales, block, dtype=dtype)
    return from_fp8(x.clamp(-largest, largest).to(torch.float8_e4m3fn), scales, block, dtype=dtype)


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
      W: (N, K) finite weight, float16, bfloat16, float32 or float64; computed in float32.
      kind: nf4, fp4 (as bitsandbytes has them), mxfp4, nvfp4, int8 (symmetric) or fp8 (e4m3).
      group: values that share a scale, for nf4 and fp4: even, 64 where None.
      nested: for nf4 and fp4, quantise their scales too.
      block: what shares a scale, for int8 and fp8: "row", None for the whole tensor, or (bn, bk).
      dtype: that the result stands for; None is that of W.

    Returns:
      ``QuantWeight`` on the device of W. A group of zeros stays zeros.

    Raises:
      FdoraError: another kind; K is odd, for mxfp4 and nvfp4; group, nested or block do not fit the kind.

    Memory: some float32 copies of W while it runs; keeps nothing of it.
    References: those of :func:`from_bnb`, :func:`from_mxfp4`, :func:`from_nvfp4` and :func:`from_fp8`.
    """
    check_dtype(FN, "W", W, FLOATS)
    N, K = matrix(FN, W.shape)
    dtype = W.dtype if dtype is None else dtype
    lut, coded = kind in ("nf4", "fp4"), kind in ("int8", "fp8")
    if not lut and (nested or group is not None):
        raise fail(
            FN, "group", "None, and nested False,", f"{group} and {nested} for {kind!r}", "Only nf4 and fp4 have a choice."
        )
    if not coded and block != "row":
        raise fail(FN, "block", "left out", f"{block!r} for {kind!r}", "Only int8 and fp8 have a choice.")
    if group is not None and (group < 2 or group % 2):
        raise fail(FN, "group", "even and at least 2", group, "Pass 64.")
    if kind in ("mxfp4", "nvfp4") and K % 2:
        raise fail(FN, "W", "of even K", (N, K), "Two values of a row share a byte: pad W with a column of zeros.")
    with torch.no_grad():
        wide = W.detach().float()
        if lut:
            return bitsandbytes4(wide, kind, 64 if group is None else group, nested, dtype)
        if coded:
            return eight(wide, kind, block, dtype)
        makers: dict[str, Callable[[Tensor, torch.dtype], QuantWeight]] = {"mxfp4": mxfp4, "nvfp4": nvfp4}
        if kind in makers:
            return makers[kind](wide, dtype)
    raise fail(FN, "kind", "nf4, fp4, mxfp4, nvfp4, int8 or fp8", repr(kind), "Other formats are made by their own libraries.")
