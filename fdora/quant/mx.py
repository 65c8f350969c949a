"""MXFP4 and NVFP4: e2m1 codes, low nibble first, with a scale for 32 or for 16 values of a row."""

from __future__ import annotations

import torch
from torch import Tensor

from fdora._check import fail
from fdora.quant.lut4 import Lut4
from fdora.quant.weight import QuantWeight, check_floating, made, matrix, stored

BYTES = (torch.uint8, *(d for d in [getattr(torch, "float4_e2m1fn_x2", None)] if d is not None))


def packed(fn: str, codes: Tensor, group: int) -> Tensor:
    """(N, K / 2) bytes, from that or from (N, K / group, group / 2)."""
    codes = stored(fn, "codes", codes, BYTES).view(torch.uint8)
    if codes.ndim == 3 and codes.shape[2] == group // 2:
        codes = codes.flatten(1)
    if codes.ndim != 2:
        want = f"(N, K / 2) or (N, K / {group}, {group // 2})"
        raise fail(fn, "codes", want, tuple(codes.shape), "Pass one weight; of a stack of experts, codes[e] and scales[e].")
    return codes


def from_mxfp4(codes: Tensor, scales: Tensor, *, dtype: torch.dtype = torch.bfloat16) -> QuantWeight:
    """``W[n, k] = e2m1[code(n, k)] * 2 ** (scales[n, k // 32] - 127)``; the low nibble of a byte is the first of its values.

    Args:
      codes: (N, K / 2) uint8 or float4_e2m1fn_x2, as torchao has it, or (N, K / 32, 16), as gpt-oss has one expert
        (``blocks[e]``, ``scales[e]``; transformers transposes what it decodes, this does not), or (E, N, K / 32, 16), as it
        has all of them: the weight is (E N, K) then.
      scales: (N, ceil(K / 32)) uint8 or float8_e8m0fnu, not swizzled; of experts (E, N, K / 32). 255 is NaN.
      dtype: that the weight stands for.

    Returns:
      ``QuantWeight`` of kind mxfp4. Its values are exact in float32.

    Raises:
      FdoraError: a dtype, a shape or a device is another.

    Memory: keeps the caller's tensors, and copies none.
    References: Open Compute Project, Microscaling Formats (MX) 1.0, 2023; gpt-oss, 2025, arXiv:2508.10925.
    """
    fn = "quant.from_mxfp4"
    check_floating(fn, dtype)
    if getattr(codes, "ndim", 0) == 4 and getattr(scales, "ndim", 0) == 3:
        codes, scales = codes.flatten(0, 1), scales.flatten(0, 1)
    codes = packed(fn, codes, 32)
    N, half = matrix(fn, codes.shape)
    scales = stored(fn, "scales", scales, (torch.uint8, torch.float8_e8m0fnu), (N, -(-2 * half // 32))).view(torch.uint8)
    return made(fn, "mxfp4", (codes, scales), (N, 2 * half), dtype, Lut4("e2m1", False, 32, "e8m0", "row"))


def from_nvfp4(
    codes: Tensor,
    scales: Tensor,
    global_scale: Tensor | None = None,
    divide: bool = False,
    *,
    dtype: torch.dtype = torch.bfloat16,
) -> QuantWeight:
    """``W[n, k] = e2m1[code(n, k)] * (scales[n, k // 16] * global_scale)``, or ``scales / global_scale`` with ``divide``.

    Args:
      codes: (N, K / 2) uint8 or float4_e2m1fn_x2, low nibble first.
      scales: (N, ceil(K / 16)) float8_e4m3fn, not swizzled.
      global_scale: float32 scalar; None is 1.
      divide: torchao (``per_tensor_scale``) and ModelOpt (``weight_scale_2``) multiply by it, compressed-tensors
        (``weight_global_scale``) divides by it.
      dtype: that the weight stands for.

    Returns:
      ``QuantWeight`` of kind nvfp4, which ``compute="nvfp4"`` multiplies as it is. It is decoded in float32.

    Raises:
      FdoraError: a dtype, a shape or a device is another.

    Memory: keeps the caller's tensors, and copies none.
    References: NVIDIA, Pretraining large language models with NVFP4, 2025, arXiv:2509.25149; torchao 0.18, ``NVFP4Tensor``.
    """
    fn = "quant.from_nvfp4"
    check_floating(fn, dtype)
    codes = packed(fn, codes, 16)
    N, half = matrix(fn, codes.shape)
    scales = stored(fn, "scales", scales, (torch.float8_e4m3fn,), (N, -(-2 * half // 16)))
    if global_scale is None:
        whole = torch.ones((), dtype=torch.float32, device=codes.device)
    else:
        whole = stored(fn, "global_scale", global_scale, (torch.float32,))
        if whole.numel() != 1:
            raise fail(fn, "global_scale", "one number", tuple(whole.shape), "Pass that of one weight; of experts, scale[e].")
        whole = whole.reshape(())
    form = "e4m3/global" if divide else "e4m3*global"
    return made(fn, "nvfp4", (codes, scales, whole), (N, 2 * half), dtype, Lut4("e2m1", False, 16, form, "row"))
