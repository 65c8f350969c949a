"""Compose the output from its two halves: ``y = g (base + s lora) + bias``, or the part a framework adds to base.

With h = g for the whole output and h = g - 1 for the delta, both are ``out = h base + g s lora (+ bias)``, in acc_dtype,
rounded once. g - 1 is formed in acc_dtype: in bf16 it would be 0 for most rows of a real adapter (|g - 1| ~ 0.0015).

base and lora are (M, N), or (L, N, P) where the channels of a convolution lie before its P points; g and bias are (N,).

A server composes last, and in place: it has z = base + s lora + bias, and g in slots, one for each adapter that is loaded. Each
token takes ``z <- g (z - bias) + bias``, g that of its slot. Where g is 1, and for tokens of slots without DoRA or of none, z
stays as it is, bit for bit. Where z lacks the low-rank term of its slot, the same pass adds it: ``z <- g (z + h B^T - bias) +
bias``, rounded once; without DoRA h B^T is rounded before, as a server for LoRA does it.

Backward:   d base = h dout     d lora = g s dout     dg = sum_t dout (base + s lora)     dbias = sum_t dout
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fdora.eager._matmul import acc_dtype, cast, times_g


def compose_fwd(base: Tensor, lora: Tensor, g: Tensor, bias: Tensor | None, s: float, delta: bool) -> Tensor:
    """(M, N), (M, N), (N,), (N,) or None -> (M, N) in the dtype of base; or (L, N, P)."""
    acc = acc_dtype(base.dtype)
    if base.dim() == 3:
        g, bias = g[:, None], None if bias is None else bias[:, None]
    wide_base, wide_lora = base.to(acc), s * lora.to(acc)
    out = (g - 1) * wide_base + g * wide_lora if delta else g * (wide_base + wide_lora)
    return cast(out if bias is None else out + bias.to(acc), base.dtype)


def compose_bwd(
    dy: Tensor, base: Tensor, lora: Tensor, g: Tensor, s: float, delta: bool, needs: tuple[bool, bool, bool, bool]
) -> tuple[Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
    """dbase, dlora, dg, dbias (the last in acc_dtype); each only when needed."""
    acc = acc_dtype(base.dtype)
    wide = dy.to(acc)
    if base.dim() == 3:
        g = g[:, None]
    dbase = times_g(wide, g - 1 if delta else g, base.dtype) if needs[0] else None
    dlora = times_g(wide, s * g, lora.dtype) if needs[1] else None
    dg = (wide * (base.to(acc) + s * lora.to(acc))).sum(0) if needs[2] else None
    dbias = wide.sum(0) if needs[3] else None
    if base.dim() == 3:
        dg, dbias = (None if d is None else d.sum(1) for d in (dg, dbias))
    return dbase, dlora, dg, dbias


def scale_slots(z: Tensor, g: Tensor, holds: Tensor, bias: Tensor | None, slots: Tensor, low: Sequence[Tensor] = ()) -> None:
    """z (M, N), changed in place; g (S, N), holds (S,) int32, bias (N,), slots (M,) int64. Slots but 0 ... S - 1 are none.
    ``low``: h (P, M, R), B (S, N, R) and where the columns of P parts begin and end, (P + 1,) in sixteens."""
    known = (slots >= 0) & (slots < g.shape[0])
    at = slots.where(known, 0)
    gt, wide, others = g[at], z.to(acc_dtype(z.dtype)), z
    if low:
        h, B, ends = low
        part = torch.searchsorted(16 * ends, torch.arange(z.shape[1], device=z.device), right=True) - 1
        lora = torch.einsum("nmr,mnr->mn", cast(h, B.dtype).to(wide.dtype)[part], B[at].to(wide.dtype)).where(known[:, None], 0)
        wide, others = wide + lora, z + cast(lora, z.dtype)
    b = 0 if bias is None else bias.to(wide.dtype)
    changes = (known & (holds[at] != 0))[:, None] & (gt != 1)
    z.copy_(others.where(~changes, cast(gt * (wide - b) + b, z.dtype)))
