"""One adapter of one layer, and what it makes of the weight."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fdora._check import FLOATS, check_dtype, check_tensor, fail
from fdora.functional import dora_merge, dora_norm, dora_scale


class Adapter(NamedTuple):
    """DoRA, or plain LoRA where m is None, of a linear layer or a convolution."""

    A: Tensor
    """(r, K) down-projection; (r, K, kh, kw) of a convolution."""
    B: Tensor
    """(N, r) up-projection; (N, r, 1, 1) of a convolution."""
    m: Tensor | None
    """(N,) magnitude; (K,) where norm_axis is 0."""
    s: float
    """LoRA scaling: alpha / r, or alpha / sqrt(r) for rsLoRA."""
    norm_axis: int = 1
    """1: m is over the norm of each output row, DoRA. 0: of each input column, LyCORIS with ``wd_on_output=False``."""
    fan_in_fan_out: bool = False
    """True: W is stored (K, N), as in the Conv1D of GPT-2. A, B and m are as for (N, K)."""


@torch.no_grad()
def adapter_scale(W: Tensor, p: Adapter) -> Tensor:
    """What the adapter multiplies each row by: ``g = m / ||W + s * B @ A||``; ones for LoRA.

    A server that keeps W unmerged needs g beside A and B, ``y = g * (x @ W.T + s * (x @ A.T) @ B.T) + bias``, and no norm.
    torchtune multiplies the bias by g too: to move a biased layer out of torchtune, multiply its bias by g, once.

    Args:
      W: (N, K) weight, (K, N) with fan_in_fan_out, or (N, K, kh, kw); float16, bfloat16, float32 or float64.
      p: the adapter.

    Returns:
      (N,), for norm_axis=0 (K,), float32 (float64 for a float64 W).

    Raises:
      FdoraError: shapes or devices disagree.

    Memory: one block of rows, see :func:`fdora.functional.dora_norm`.
    References: Liu et al., DoRA, 2024, arXiv:2402.09353, eq. 5.
    """
    c = _norm(W, p)
    return torch.ones_like(c) if p.m is None else dora_scale(p.m.flatten(), c)


@torch.no_grad()
def merge(W: Tensor, p: Adapter) -> Tensor:
    """One weight that does what the adapted layer does: ``W' = diag(g) (W + s B A)``; ``(W + s B A) diag(g)`` for norm_axis=0.

    Args:
      W: (N, K) weight, (K, N) with fan_in_fan_out, or (N, K, kh, kw); float16, bfloat16, float32 or float64.
      p: the adapter.

    Returns:
      The shape and dtype of W; a new tensor.

    Raises:
      FdoraError: shapes or devices disagree.

    Memory: the result and one block of rows.
    References: Liu et al., DoRA, 2024, arXiv:2402.09353, eq. 5; LyCORIS, ``LoConModule`` (norm_axis=0).
    """
    c = _norm(W, p)
    V, A, B = to_rows(W, p)
    m = c if p.m is None else p.m.detach().flatten().to(c.dtype)
    merged = dora_merge(V, A, B, m, s=p.s, norm=c)
    turned = p.fan_in_fan_out == (p.norm_axis == 1)  # V is W.T
    return (merged.T if turned else merged).reshape(W.shape).contiguous()


@torch.no_grad()
def for_comfyui(W: Tensor, p: Adapter) -> Adapter:
    """The adapter that a kohya file must hold for ComfyUI to apply this one.

    ComfyUI divides each output row by the norm of W, not of W + s B A as PEFT and LyCORIS do: ``m`` becomes
    ``g * ||W||``. Plain LoRA, and DoRA over input columns, stay as they are.

    Args:
      W: (N, K) weight, or (N, K, kh, kw); float16, bfloat16, float32 or float64.
      p: the adapter.

    Returns:
      p with another m, float32 (float64 for a float64 W). Nothing but ComfyUI reads it right.

    Raises:
      FdoraError: shapes or devices disagree.

    Memory: one block of rows, see :func:`fdora.functional.dora_norm`.
    References: ComfyUI, ``comfy/weight_adapter/base.py``, ``weight_decompose``.
    """
    if p.m is None or p.norm_axis == 0:
        return p
    return p._replace(m=adapter_scale(W, p) * _norm(W, p._replace(s=0.0)))


def to_rows(W: Tensor, p: Adapter) -> tuple[Tensor, Tensor, Tensor]:
    """W, A and B as matrices whose rows are what m is about (norm_axis=0: transposed); A and B at least float32."""
    for arg, t in (("W", W), ("A", p.A), ("B", p.B)):
        if t.dim() < 2:
            raise fail("convert", arg, "a matrix, or a kernel of a convolution", tuple(t.shape), "Pass one layer's tensors.")
        check_dtype("convert", arg, t, FLOATS, "Dequantise or cast it first.")
    wide = torch.promote_types(W.dtype, torch.float32)
    V, A, B = W.detach().flatten(1), p.A.detach().flatten(1).to(wide), p.B.detach().flatten(1).to(wide)
    V = V.T if p.fan_in_fan_out else V
    return (V, A, B) if p.norm_axis else (V.T, B.T, A.T)


def from_rows(A: Tensor, B: Tensor, like: Adapter) -> tuple[Tensor, Tensor]:
    """The way back, for an A (r, K) and B (N, r) of another rank: the axes of ``like``."""
    if like.norm_axis == 0:
        A, B = B.T, A.T
    return A.reshape(-1, *like.A.shape[1:]).contiguous(), B.reshape(len(B), -1, *like.B.shape[2:]).contiguous()


def _norm(W: Tensor, p: Adapter) -> Tensor:
    check_tensor("convert", "W", W)
    if p.norm_axis == 0 and W.dim() > 2:
        raise fail("convert", "norm_axis", "1 for a convolution", 0, "Its input columns are no rows of a matrix product.")
    stored = (p.A.shape[1], len(p.B)) if p.fan_in_fan_out else (len(p.B), p.A.shape[1])
    if W.dim() == 2 and W.shape != stored and W.shape == stored[::-1]:
        remedy = f"The model stores this weight the other way: pass p._replace(fan_in_fan_out={not p.fan_in_fan_out})."
        raise fail("convert", "W", f"{stored} with fan_in_fan_out={p.fan_in_fan_out}", tuple(W.shape), remedy)
    V, A, B = to_rows(W, p._replace(norm_axis=1))
    return dora_norm(V, A, B, s=p.s, norm_axis=p.norm_axis)
