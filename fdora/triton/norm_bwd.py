"""The gradient through a row norm, ``c = ||W + s B A||``, in its form of low rank; formulas: fdora/eager/norm.py. bfloat16 W.

With q = dc / c:    dA = s ((q B)^T W + s ((q B)^T B) A)    dB = s q (W A^T + s B (A A^T))
Up to r = 64, 32 where an adapter is float32: one launch whose programs take part of W for dA or for dB, or of a factor for
the r x r matrices, and one that adds the parts in their order. Above: two products with W by cuBLAS, each of which reads it
once, two small ones, and a pass before and one behind for each gradient. float32 adapters go through the products as two terms
of bfloat16, as in plain torch, and up to r = 32 so does q B of any: rounded once, dA would be 2.3e-3 of its size away where its
own rounding leaves 1.7e-3. q B needs no scale then, whose largest element another launch would have to find: float16 is left
to plain torch for that.

Roof: W twice. 4096 x 4096, r = 16: 67 MB, 16 us; 19 are taken (H200), where plain torch took 160 in some 40 launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fdora._torch import needs_dispatcher
from fdora.triton.configs import power_of_two
from fdora.triton.kernels.norm_bwd import norm_bwd_finish_kernel, norm_terms_kernel
from fdora.triton.kernels.norm_pass import norm_add_kernel, norm_pass_kernel
from fdora.triton.op import op
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import Device, cdiv
from fdora.triton.runtime.plan import Array, Like, Plan, Scalar
from fdora.triton.runtime.walk import plan_for, run

BLOCK_N, BLOCK_J = 64, 128
WHOLE = 64  # up to this rank one launch forms all sums
PASS, GRAMS = (64, 128), 4  # rows and columns of a tile of W; parts of the sums of r x r matrices
SERVED = (torch.bfloat16,)  # of W


def norm_bwd(
    dc: Tensor, W: Tensor, A: Tensor, B: Tensor, c: Tensor, s: float, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None] | None:
    """dA, dB; each only when needed. None for what plain torch must do."""
    if not serves(W):
        return None
    run_it: Any = norm_backward if needs_dispatcher(W) or needs_dispatcher(dc) else _norm_bwd
    found = iter(run_it(dc, W, A, B, c, s, list(needs)))
    return next(found) if needs[0] else None, next(found) if needs[1] else None


def serves(W: Tensor) -> bool:
    return W.dtype in SERVED and W.numel() > 0


def _norm_bwd(dc: Tensor, W: Tensor, A: Tensor, B: Tensor, c: Tensor, s: float, needs: Sequence[bool]) -> tuple[Tensor, ...]:
    return run(*_planned(dc, W, A, B, c, s, needs))


def _planned(
    dc: Tensor, W: Tensor, A: Tensor, B: Tensor, c: Tensor, s: float, needs: Sequence[bool]
) -> tuple[Plan, tuple, tuple]:
    tensors = (dc, W, A, B, c)
    return plan_for(plan_norm_bwd, tensors, tuple(needs)), tensors, (s,)


def plan_norm_bwd(likes: Sequence[Like | None], device: Device, needs: tuple[bool, bool]) -> Plan:
    plan = Builder("gradient through the norm", device)
    dc, W, A, B, c = plan.vector(likes[0]), *map(plan.operand, likes[1:4]), plan.vector(likes[4])
    s, (N, K), R = plan.scalar("s"), W.shape, A.shape[0]
    dA = plan.result("dA", (R, K), A.dtype) if needs[0] else None
    dB = plan.result("dB", (N, R), B.dtype) if needs[1] else None
    t, f32 = W.dtype, torch.float32
    whole = WHOLE if A.dtype == B.dtype == t else WHOLE // 2  # of three tf32 products sm_80 spills above
    if A.shape[0] <= whole:
        plan.path = "all products with W in one pass, nothing of its size written"
        _pass(plan, dc, W, A, B, c, s, dA, dB)
        return plan.plan()
    of_grams = t if A.dtype == B.dtype == t else f32  # rounded there, which they are as an operand of the products that finish
    if dA is not None:
        terms = 1 if B.dtype == t else 2
        slopes, wide = _terms(plan, B, t, terms, dc, c)
        parts, gram = plan.temp((terms * R, K), f32), plan.temp((R, R), of_grams)
        plan.product(parts, slopes.T, W)
        plan.product(gram, (slopes if wide is None else wide).T, B)
        _finish(plan, parts, gram, (A, B, dc, c, dA), s, (N, K, R), True, terms)
    if dB is not None:
        terms = 1 if A.dtype == t else 2
        a = A if terms == 1 else _terms(plan, A.T, t, terms)[0].T
        parts, gram = plan.temp((N, terms * R), f32), plan.temp((R, R), of_grams)
        plan.product(parts, W, a.T)
        plan.product(gram, A, A.T)
        _finish(plan, parts, gram, (A, B, dc, c, dB), s, (N, K, R), False, terms)
    plan.path = "two products with W, nothing of its size written"
    return plan.plan()


def _pass(
    plan: Builder, dc: Array, W: Array, A: Array, B: Array, c: Array, s: Scalar, dA: Array | None, dB: Array | None
) -> None:
    """Two launches: all sums, in parts, and what adds them up."""
    (N, K), R, f32 = W.shape, A.shape[0], torch.float32
    block_n, block_k = PASS
    block_r, ms = power_of_two(R), plan.device.num_sms
    warps, stages = 4, 3
    rows = _span(N, block_n, 3 * ms // 2 // cdiv(K, block_k))
    columns = _span(K, block_k, 3 * ms // 2 // cdiv(N, block_n))
    parts = {"A": cdiv(N, rows), "B": cdiv(K, columns)}
    each = {"A": (dA, (parts["A"], R, K)), "B": (dB, (parts["B"], R, N))}
    sums = [None if d is None else plan.temp(shape, f32) for d, shape in each.values()]
    grams = [None if d is None else plan.temp((GRAMS, R, R), f32) for d in (dA, dB)]
    strides = (*A.stride, *B.stride)
    programs = GRAMS * ((dA is not None) + (dB is not None))
    programs += 0 if dA is None else cdiv(K, block_k) * parts["A"]
    programs += 0 if dB is None else cdiv(N, block_n) * parts["B"]
    wide = [f.dtype != W.dtype for f in (A, B)]
    terms = [2 if wide[1] or block_r <= WHOLE // 2 else 1, 1 + wide[0]]  # of q B and of A; sm_80 spills with more at r = 64
    gram_block = 32 if any(wide) else min(256, 4096 // block_r)
    precision = [("tf32x3" if plan.device.capability else "ieee") if w else None for w in wide]
    needs = (dA is not None, dB is not None)
    plan.launch(
        norm_pass_kernel,
        (programs,),
        (dc, c, W, A, B, *sums, *grams, N, K, R, *W.stride, *strides, rows, columns),
        (*needs, GRAMS, *terms, *precision, gram_block, block_n, block_k, block_r),
        warps,
        stages,
    )
    block_i, block_j = min(32, block_r), 64
    tiles = (0 if dA is None else cdiv(K, block_j)) + (0 if dB is None else cdiv(N, block_j))
    plan.launch(
        norm_add_kernel,
        (tiles, cdiv(R, block_i)),
        (*sums, *grams, A, B, dc, c, dA, dB, s, N, K, R, *strides),
        (*needs, *parts.values(), GRAMS, *precision, block_j, block_i, block_r),
        4,
        2,
    )


def _span(length: int, block: int, parts: int) -> int:
    """Of so many parts of a sum, whole blocks."""
    return cdiv(cdiv(length, block), max(1, min(8, parts))) * block


def _terms(
    plan: Builder, B: Array, t: torch.dtype, terms: int, dc: Array | None = None, c: Array | None = None
) -> tuple[Array, Array | None]:
    """(N, r) -> (N, terms r); of two terms with dc also (N, r) in float32."""
    (N, R), with_q = B.shape, dc is not None
    out, block_r = plan.temp((N, terms * R), t), block_of(R)
    wide = plan.temp((N, R), torch.float32) if with_q and terms == 2 else None
    grid, facts = (cdiv(N, BLOCK_N), cdiv(R, block_r)), (with_q, terms, BLOCK_N, block_r)
    plan.launch(norm_terms_kernel, grid, (dc, c, B, out, wide, N, R, *B.stride), facts, 4)
    return out, wide


def _finish(
    plan: Builder,
    parts: Array,
    gram: Array,
    arrays: tuple[Array, ...],
    s: Any,
    sizes: tuple[int, int, int],
    of_A: bool,
    terms: int,
) -> None:
    A, B, (N, K, R) = *arrays[:2], sizes
    half = (A if of_A else B).itemsize == 2
    # float32 digits: three tf32 products, and registers to split the operands
    block, block_j = (block_of(R), BLOCK_J) if half else (min(32, block_of(R)), BLOCK_J // 2)
    precision = None if half else "tf32x3" if plan.device.capability else "ieee"
    grid, facts = (cdiv(R, block), cdiv(K if of_A else N, block_j)), (of_A, terms, precision, block, block_j, block)
    plan.launch(
        norm_bwd_finish_kernel, grid, (parts, gram, *arrays, s, *sizes, *A.stride, *B.stride), facts, 4, 3 if half else 2
    )


def block_of(R: int) -> int:
    return max(16, min(64, power_of_two(R)))


def _fake(dc: Any, W: Any, A: Any, B: Any, c: Any, s: Any, needs: Any) -> list[Any]:
    return [like.new_empty(like.shape) for like, need in zip((A, B), needs, strict=True) if need]


norm_backward = op(
    "norm_backward",
    _norm_bwd,
    _fake,
    _planned,
    "(Tensor dc, Tensor W, Tensor A, Tensor B, Tensor c, float s, bool[] needs) -> Tensor[]",
)
