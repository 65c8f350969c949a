"""The whole layer: which kernels run, in which order. Signatures of :mod:`fdora.eager.linear`.

Half precision. Forward: h = s x A^T, then one product with the low-rank term, g and bias inside (gemm.py; small.py for up to 64
tokens). Backward: one pass for dz and the sums over tokens (scale.py), dh = s dz B, one product for dx; dA = dh^T x and
dB = dz^T h. s is applied where h and dh are rounded, so no other factor is scaled or rounded again.

"peft" dropout, y = x W^T + (g - 1) inner + s x' A^T B^T + bias with inner = D(x) W^T + s D(x) A^T B^T: two such products, the
first writes inner, the second adds (g - 1) inner. Its backward is one product: (dz - dy) W and dh A masked, then dy W.

Layers that share x share the product for h (``down``), and each adds its dx to that of the one before where it is stored
(``onto``).

float32: products by cuBLAS in the precision that torch.set_float32_matmul_precision asks for; g and bias in one pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from fdora.triton._launch import cdiv, launch, rows_of, traced
from fdora.triton._op import op
from fdora.triton.dropout import drop
from fdora.triton.gemm import Dropped, Epilogue, gemm
from fdora.triton.scale import scale_backward, scale_tile
from fdora.triton.small import is_small, small_backward, small_forward

BLOCK_M, BLOCK_N = 4, 512


def linear_fwd(
    x: Tensor, W: Tensor, A: Tensor, B: Tensor, m: Tensor, c: Tensor, bias: Tensor | None, seed: Tensor | None,
    s: float, p: float, mode: str, keep: str, h: Tensor | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """x (M, K) -> y (M, N), s x A^T (M, r) and, with a bias or "peft" dropout, inner (M, N)."""
    y, *rest = (linear if traced(x) else _linear)(x, W, A, B, m, c, bias, seed, s, p, mode, keep, h)
    return (y, *rest) if h is None else (y, h, *rest)


def linear_bwd(
    dy: Tensor, x: Tensor, W: Tensor, A: Tensor, B: Tensor, m: Tensor, c: Tensor, h: Tensor, kept: Tensor | None,
    seed: Tensor | None, s: float, p: float, mode: str, kept_inner: bool, needs: tuple[bool, ...], onto: Tensor | None = None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    """dx, dA, dB, dm, dc, dbias (float32); each only when ``needs``, in that order, asks for it. dx is added to ``onto``."""
    args = (dy, x, W, A, B, m, c, h, kept, seed, s, p, mode, kept_inner)
    if not traced(dy):
        return _backward(*args, needs, onto)
    found = iter(linear_backward(*args, list(needs)))
    dx, *grads = (next(found) if need else None for need in needs)
    return (dx if dx is None or onto is None else onto + dx, *grads)


def down(x: Tensor, As: Sequence[Tensor], s: Sequence[float]) -> Tensor | None:
    """s x A^T of several layers side by side, (M, sum of r): one product reads x once. None where each layer does better
    alone: another s for each would have to be folded into A, and round it; few tokens are cheap to read, and the product
    hides behind that with W (a compiler should not have to ask for their number)."""
    t, compiled = x.dtype, traced(x)
    if any(each != s[0] for each in s) or (not compiled and is_small(x) and t != torch.float32):
        return None
    return (down_projection if compiled else _down)(x, torch.cat([A.to(t) for A in As]), s[0])


def _down(x: Tensor, A: Tensor, s: float) -> Tensor:
    return _product(x, A.t(), s)


def _linear(
    x: Tensor, W: Tensor, A: Tensor, B: Tensor, m: Tensor, c: Tensor, bias: Tensor | None, seed: Tensor | None,
    s: float, p: float, mode: str, keep: str, h: Tensor | None = None,
) -> list[Tensor]:  # fmt: skip
    """y; h, if none was given; inner, where it is kept."""
    t, given = x.dtype, h is not None
    W, m, c = _in(t, W), m.contiguous(), c.contiguous()
    inner: Tensor | None
    bias = None if bias is None else bias.contiguous()
    inner_kept = _keeps_inner(t, bias, seed, mode, keep)
    if t == torch.float32:
        out = _linear_float32(x, W, A, B, m, c, bias, seed, s, p, mode, inner_kept, h)
    elif seed is None and is_small(x):  # it forms h in passing, faster than it could read one
        out = small_forward(x, W, A, B, m, c, bias, s, inner_kept)
    else:
        xd = drop(x, seed, p)
        h = _product(xd, _in(t, A).t(), s) if h is None else h
        B = _in(t, B)
        if seed is not None and mode == "peft":
            inner = gemm(xd, W, h, B, turned=True)[0]
            y, _ = gemm(x, W, h, B, Epilogue("add", m, c, bias, inner), turned=True)
            out = (y, inner if inner_kept else None, h)
        else:
            out = (*gemm(x, W, h, B, Epilogue("scale", m, c, bias), keep_inner=inner_kept, turned=True), h)
    y, inner, h = out
    return [y, *([] if given else [h]), *([] if inner is None else [inner])]


def _keeps_inner(dtype: torch.dtype, bias: Tensor | None, seed: Tensor | None, mode: str, keep: str) -> bool:
    """Whether y cannot stand in for inner. Rows with g near 0 can, in half precision: backward forms their products again."""
    exact = bias is None and (seed is None or mode != "peft") and dtype != torch.float32
    return keep == "inner" or (keep == "output" and not exact)


def _linear_backward(
    dy: Tensor, x: Tensor, W: Tensor, A: Tensor, B: Tensor, m: Tensor, c: Tensor, h: Tensor, kept: Tensor | None,
    seed: Tensor | None, s: float, p: float, mode: str, kept_inner: bool, needs: list[bool],
) -> list[Tensor]:  # fmt: skip
    grads = _backward(dy, x, W, A, B, m, c, h, kept, seed, s, p, mode, kept_inner, needs, None)
    return [d for d in grads if d is not None]


def _backward(
    dy: Tensor, x: Tensor, W: Tensor, A: Tensor, B: Tensor, m: Tensor, c: Tensor, h: Tensor, kept: Tensor | None,
    seed: Tensor | None, s: float, p: float, mode: str, kept_inner: bool, needs: Sequence[bool], onto: Tensor | None,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    need_x, need_A, need_B, need_m, need_c, need_bias = needs
    t = x.dtype
    dy, W, m, c = rows_of(dy), _in(t, W), m.contiguous(), c.contiguous()
    peft = seed is not None and mode == "peft"
    dz, dz_less, dm, dc, dbias, dB = scale_backward(
        dy, kept, x, W, h, B, m, c, kept_inner, need_x or need_A, peft and need_x, need_m, need_c, need_bias, need_B
    )
    dx = dA = None
    if need_x and seed is None and is_small(x) and t != torch.float32:
        assert dz is not None
        dx, dA = small_backward(dz, W, A, B, x, s, need_A)
        dx = dx if onto is None else onto.add_(dx)
    elif need_x or need_A:
        assert dz is not None
        dh = _product(dz, _in(t, B), s)
        if need_x:
            if t == torch.float32:
                dx = _dx_float32(dy, dz, dz_less, W, A, dh, seed, p, onto)
            elif peft:
                dx, _ = gemm(dy, W, dh, _in(t, A), drop=Dropped(seed, p, dz_less), onto=onto)
            else:
                dx, _ = gemm(dz, W, dh, _in(t, A), drop=Dropped(seed, p), onto=onto)
        if need_A:
            dA = _gradient(dh.t(), drop(x, seed, p), A.dtype)
    if need_B and dB is None:
        assert dz is not None
        dB = _gradient(dz.t(), h, B.dtype)
    return dx, dA, dB, dm, dc, dbias


def _in(dtype: torch.dtype, t: Tensor) -> Tensor:
    return t if t.dtype == dtype else t.to(dtype)  # a .to that does nothing takes 0.8 us


def _product(a: Tensor, b: Tensor, s: float) -> Tensor:
    """s a b, rounded once. (alpha is safe here: a compiler sees the whole op or nothing.)"""
    return torch.addmm(a.new_empty(()), a, b, beta=0, alpha=s)


def _gradient(a: Tensor, b: Tensor, dtype: torch.dtype) -> Tensor:
    """a b in ``dtype``, straight from the accumulator."""
    if dtype == a.dtype:
        return a @ b
    return torch.mm(a, b, out_dtype=dtype) if a.is_cuda else a.to(dtype) @ b.to(dtype)


@triton.jit
def _epilogue_kernel(
    v, inner, out, m, c, bias, M, N, ADD: tl.constexpr, HAS_BIAS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    mask = (t < M)[:, None] & (n < N)[None, :]
    at = t[:, None].to(tl.int64) * N + n[None, :]
    g = scale_tile(m, c, n, N)[None, :]
    y = tl.load(v + at, mask=mask)
    y = y + (g - 1) * tl.load(inner + at, mask=mask) if ADD else g * y
    if HAS_BIAS:
        y += tl.load(bias + n, mask=n < N).to(tl.float32)[None, :]
    tl.store(out + at, y, mask=mask)


def _linear_float32(
    x: Tensor, W: Tensor, A: Tensor, B: Tensor, m: Tensor, c: Tensor, bias: Tensor | None, seed: Tensor | None,
    s: float, p: float, mode: str, keep_inner: bool, h: Tensor | None,
) -> tuple[Tensor, Tensor | None, Tensor]:  # fmt: skip
    xd = drop(x, seed, p)
    h, B = _product(xd, A.to(x.dtype).T, s) if h is None else h, B.to(x.dtype)
    v = (x @ W.T).addmm_(h, B.T)
    peft = seed is not None and mode == "peft"
    inner = (xd @ W.T).addmm_(h, B.T) if peft else v
    y = torch.empty_like(v) if keep_inner and not peft else v
    M, N = v.shape
    if M and N:
        with torch.cuda.device_of(x):
            launch(
                _epilogue_kernel, (cdiv(M, BLOCK_M), cdiv(N, BLOCK_N)), (v, inner, y, m, c, bias, M, N),
                (peft, bias is not None, BLOCK_M, BLOCK_N), 4,
            )  # fmt: skip
    return y, inner if keep_inner else None, h


def _dx_float32(
    dy: Tensor, dz: Tensor, dz_less: Tensor | None, W: Tensor, A: Tensor, dh: Tensor, seed: Tensor | None, p: float,
    onto: Tensor | None,
) -> Tensor:  # fmt: skip
    A, d = A.to(dy.dtype), dz if dz_less is None else dy
    dx = d @ W if onto is None else onto.addmm_(d, W)
    if seed is None:
        return dx.addmm_(dh, A)
    return dx.add_(drop(dh @ A if dz_less is None else (dz_less @ W).addmm_(dh, A), seed, p))


def _fake_down_projection(x, A, s):
    return x.new_empty((x.shape[0], A.shape[0]))


def _fake_linear(x, W, A, B, m, c, bias, seed, s, p, mode, keep, h=None):
    shape = (x.shape[0], W.shape[0])
    made = [x.new_empty(shape)] if h is not None else [x.new_empty(shape), x.new_empty((x.shape[0], A.shape[0]))]
    return [*made, x.new_empty(shape)] if _keeps_inner(x.dtype, bias, seed, mode, keep) else made


def _fake_linear_backward(dy, x, W, A, B, m, c, h, kept, seed, s, p, mode, kept_inner, needs):
    wide = torch.float32
    like = ((x, x.dtype), (A, A.dtype), (B, B.dtype), (m, m.dtype), (m, wide), (m, wide))
    return [torch.empty(t.shape, device=x.device, dtype=d) for (t, d), need in zip(like, needs, strict=True) if need]


linear = op("linear", _linear, _fake_linear)
linear_backward = op("linear_backward", _linear_backward, _fake_linear_backward)
down_projection = op("down_projection", _down, _fake_down_projection)
