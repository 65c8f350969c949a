"""The gradient through a row norm, ``c = ||W + s B A||``, in its form of low rank; formulas: fdora/eager/norm.py. bfloat16 W.

With q = dc / c:    dA = s ((q B)^T W + s ((q B)^T B) A)    dB = s q (W A^T + s B (A A^T))
Up to r = 64, 32 where an adapter is float32: one launch whose programs take part of W for dA or for dB, or of a factor for
the r x r matrices, and one that adds the parts in their order. Above, both are what the layer's product makes (gemm.py): dA is
dx of r more tokens, with dz = s (q B)^T and dh = s dz B, and dB has rows of W for tokens, A^T for a weight and B (s A A^T) for
the low-rank term. Both run in one launch where neither has enough large tiles for the GPU (sm_90). With a float32 adapter above
that: two products with W by cuBLAS, two small ones, and a pass before and one behind for each gradient. What the layer has for
the gradient of a factor is added where this one is stored.

float32 adapters go through the products as two terms of bfloat16, as in plain torch, and up to r = 32 so does q B of any:
rounded once, dA would be 2.3e-3 of its size away where its own rounding leaves 1.7e-3. q B needs no scale then, whose largest
element another launch would have to find: float16 is left to plain torch for that.

Roof: W twice. 4096 x 4096, r = 16: 67 MB, 16 us; 18 are taken (H200), where plain torch took 160 in some 40 launches.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdora._records import Onto
from fdora.triton.copy import dense
from fdora.triton.gemm import NO_EPILOGUE, Epilogue, Operand, gemm
from fdora.triton.kernels.norm_bwd import (
    norm_bwd_finish_kernel,
    norm_grams_add_kernel,
    norm_grams_kernel,
    norm_products_kernel,
    norm_terms_kernel,
    norm_tokens_kernel,
)
from fdora.triton.kernels.norm_pass import norm_add_kernel, norm_pass_kernel
from fdora.triton.op import planned
from fdora.triton.runtime import Array, Builder, Scalar, Tile, asked, cdiv, is_tma_compatible, named
from fdora.triton.runtime.private import NOT_AHEAD
from fdora.triton.tiles.configs import power_of_two

BLOCK_N, BLOCK_J = 64, 128
WHOLE = 64  # up to this rank one launch forms all sums
PASS, GRAMS = (64, 128), 4  # rows and columns of a tile of W; parts of the sums of r x r matrices
LARGE, PASS_OF_LARGE = 50 << 20, (128, 128)  # bytes of W, beyond any L2, and its tile: 4096 x 14336, r = 16 57.6 us for 66
TALL, WIDE, DEEP = 128, 256, 64  # of a tile of both products at once: along the rank, across it, and of a step
GRAM, GRAM_PARTS = 64, 8  # of large ones: rows and columns of a tile, as many as a step of its sum takes, and its parts
SERVED = (torch.bfloat16,)  # of W


class Given(NamedTuple):
    """What a plan has, where the gradients go, what they are added to, and the sizes, by the kernels' names of them."""

    dc: Array
    W: Array
    A: Array
    B: Array
    c: Array
    s: Scalar
    dA: Array | None
    dB: Array | None
    onto_A: Array | None
    onto_B: Array | None
    N: int
    K: int
    R: int

    @property
    def needs(self) -> tuple[bool, bool]:
        return self.dA is not None, self.dB is not None


def norm_bwd(
    dc: Tensor, W: Tensor, A: Tensor, B: Tensor, c: Tensor, s: float, needs: tuple[bool, bool], onto: Onto = (None, None)
) -> tuple[Tensor | None, Tensor | None] | None:
    """dA, dB, each only when needed and added to its part of ``onto``. None for what plain torch must do."""
    if not serves(W):
        return None
    found = iter(plan_norm_bwd.call(dc, W, A, B, c, s, list(needs), *onto))
    return next(found) if needs[0] else None, next(found) if needs[1] else None


def serves(W: Tensor) -> bool:
    return W.dtype in SERVED and W.numel() > 0


@planned(
    "norm_backward(Tensor dc, Tensor W, Tensor A, Tensor B, Tensor c, float s, bool[] needs, Tensor? onto_A=None, "
    "Tensor? onto_B=None) -> Tensor[]",
    "gradient through the norm",
    "vector operand operand operand vector s operand operand",
    lambda dc, W, A, B, c, *rest: asked({"dA": (A.shape, A.dtype), "dB": (B.shape, B.dtype)}, rest[-1]),
    asks=(1, 0),
)
def plan_norm_bwd(
    plan: Builder,
    dc: Array,
    W: Array,
    A: Array,
    B: Array,
    c: Array,
    s: Scalar,
    onto_A: Array | None,
    onto_B: Array | None,
    needs: tuple[bool, bool],
) -> None:
    dA, dB = plan.wanted()
    onto_A, onto_B = (None if t is None else dense(plan, t) for t in (onto_A, onto_B))
    t, half = W.dtype, A.dtype == B.dtype == W.dtype
    (N, K), R = W.shape, A.shape[0]
    of = Given(dc, W, A, B, c, s, dA, dB, onto_A, onto_B, N, K, R)
    if (WHOLE if half else WHOLE // 2) >= R:  # of three tf32 products sm_80 spills above
        plan.path = "all products with W in one pass, nothing of its size written"
        return _pass(plan, of)
    plan.path = "two products with W, nothing of its size written"
    if half:
        return _as_tokens(plan, of)
    if of.dA is not None:
        terms = 1 if B.dtype == t else 2
        slopes, wide = _terms(plan, B, t, terms, dc, c)
        parts, gram = plan.temp((terms * R, K)), plan.temp((R, R))
        plan.product(parts, slopes.T, W)
        plan.product(gram, (slopes if wide is None else wide).T, B)
        _finish(plan, parts, gram, of, True, terms)
    if of.dB is not None:
        terms = 1 if A.dtype == t else 2
        a = A if terms == 1 else _terms(plan, A.T, t, terms)[0].T
        parts, gram = plan.temp((N, terms * R)), plan.temp((R, R))
        plan.product(parts, W, a.T)
        plan.product(gram, A, A.T)
        _finish(plan, parts, gram, of, False, terms)


def _as_tokens(plan: Builder, of: Given) -> None:
    """By the layer's own product (gemm.py): dA is dx of r tokens whose dz is s (q B)^T; dB has the rows of W for tokens, and A
    for a weight."""
    W, A, N, R = of.W, of.A, of.N, of.R
    needs, t = of.needs, W.dtype
    dz = plan.temp((R, N), t, (cdiv(N, 8) * 8, 1)) if needs[0] else None  # rows that begin at 16 bytes, for TMA
    slopes = plan.temp((N,)) if needs[1] else None
    given = {"dz": dz, "out": slopes, "BLOCK_N": BLOCK_N, "BLOCK_R": 64}
    plan.launch(norm_tokens_kernel, "N R", given, of)
    parts = [plan.temp((GRAM_PARTS, R, R)) if need else None for need in needs]
    grams = [plan.temp((R, R), t) if need else None for need in needs]
    given = {**named("parts_A parts_B", parts), "PARTS": GRAM_PARTS}
    tile = {"dz": dz, "BLOCK": GRAM, "BLOCK_N": GRAM}
    plan.launch(norm_grams_kernel, (cdiv(R, GRAM) ** 2, GRAM_PARTS * sum(needs)), given | tile, of)
    given |= {**named("gram_A gram_B", grams), "size": R * R, "BLOCK": 1024}
    plan.launch(norm_grams_add_kernel, (cdiv(R * R, 1024), sum(needs)), given, of)
    if _both_at_once(plan, of, dz, grams, slopes):
        return
    if of.dA is not None:
        assert dz is not None and grams[0] is not None
        onto = NO_EPILOGUE if of.onto_A is None else Epilogue("accumulate", residual=of.onto_A)
        gemm(plan, of.dA, dz, grams[0], Operand(W, A, trans=False), onto)
    if of.dB is not None:
        assert grams[1] is not None
        gemm(plan, of.dB, W, of.B, Operand(A, grams[1], trans=True), Epilogue("rows", m=slopes, residual=of.onto_B))


def _both_at_once(plan: Builder, of: Given, dz: Any, grams: Sequence[Any], slopes: Array | None) -> bool:
    """One launch for both, where large tiles of one leave multiprocessors idle and those of both find room."""
    if of.dA is None or of.dB is None:
        return False
    programs, on = cdiv(of.R, TALL) * (cdiv(of.K, WIDE) + cdiv(of.N, WIDE)), plan.device
    left, right, tall, wide, deep = (TALL, DEEP), (DEEP, WIDE), (TALL, WIDE // 2), (WIDE, TALL // 2), (WIDE, DEEP)
    of_A = {"dz": (dz, left), "w_right": (of.W, right), "gram_A": (grams[0], left), "a_right": (of.A, right)}
    of_B = {"w_left": (of.W, deep), "a": (of.A, left), "B": (of.B, deep), "gram_B": (grams[1], left)}
    ends = {"onto_A": (of.onto_A, tall), "dA": (of.dA, tall), "onto_B": (of.onto_B, wide), "dB": (of.dB, wide)}
    tiles = {name: None if t is None else Tile(t, block) for name, (t, block) in (of_A | of_B | ends).items()}
    fits = all(tile is None or is_tma_compatible(tile.array) for tile in tiles.values())
    if not (on.capability == 90 and fits and programs <= on.num_sms < 2 * programs):
        return False
    given = tiles | {"slopes": slopes, "TALL": TALL, "WIDE": WIDE, "BLOCK_K": DEEP}
    plan.launch(norm_products_kernel, (programs,), given, of, num_warps=8, num_stages=4)
    return True


def _pass(plan: Builder, of: Given) -> None:
    """Two launches: all sums, in parts, and what adds them up."""
    W, N, K, R = of.W, of.N, of.K, of.R
    block_r, ms = power_of_two(R), plan.device.num_sms
    wgmma = 90 <= plan.device.capability < 120  # elsewhere operands live in registers, and large tiles spill
    block_n, block_k = PASS_OF_LARGE if W.nbytes > LARGE and block_r <= 16 and wgmma else PASS
    rows = _span(N, block_n, 3 * ms // 2 // cdiv(K, block_k))
    columns = _span(K, block_k, 3 * ms // 2 // cdiv(N, block_n))
    parts, shapes = (cdiv(N, rows), cdiv(K, columns)), ((R, K), (R, N))
    needs = of.needs
    sums = [plan.temp((n, *shape)) if need else None for n, shape, need in zip(parts, shapes, needs, strict=True)]
    grams = [plan.temp((GRAMS, R, R)) if need else None for need in needs]
    programs = GRAMS * sum(needs) + needs[0] * cdiv(K, block_k) * parts[0] + needs[1] * cdiv(N, block_n) * parts[1]
    wide = [f.dtype != W.dtype for f in (of.A, of.B)]
    terms = [2 if wide[1] or block_r <= WHOLE // 2 else 1, 1 + wide[0]]  # of q B and of A; sm_80 spills with more at r = 64
    precision = [_precision(plan) if w else None for w in wide]
    given = named("parts_A parts_B gram_A gram_B PRECISION_A PRECISION_B", (*sums, *grams, *precision))
    given |= {"GRAMS": GRAMS, "BLOCK_R": block_r}
    tile = {"rows_of_part": rows, "columns_of_part": columns, "BLOCK_N": block_n, "BLOCK_K": block_k}
    tile |= {"GRAM_BLOCK": 32 if any(wide) else min(256, 4096 // block_r), **named("TERMS_A TERMS_B", terms)}
    plan.launch(norm_pass_kernel, (programs,), given | tile, of)
    block_i, block_j = min(32, block_r), 64
    tiles = needs[0] * cdiv(K, block_j) + needs[1] * cdiv(N, block_j)
    given |= {**named("PARTS_A PARTS_B", parts), "BLOCK_J": block_j, "BLOCK_I": block_i}
    plan.launch(norm_add_kernel, (tiles, cdiv(R, block_i)), given, of, num_stages=2)


def _precision(plan: Builder) -> str:
    """Of products of float32: digits of float32."""
    return "tf32x3" if plan.device.capability else "ieee"


def _span(length: int, block: int, parts: int) -> int:
    """Of so many parts of a sum, whole blocks."""
    return cdiv(cdiv(length, block), max(1, min(8, parts))) * block


def _terms(
    plan: Builder, B: Array, t: torch.dtype, terms: int, dc: Array | None = None, c: Array | None = None
) -> tuple[Array, Array | None]:
    """(N, r) -> (N, terms r); of two terms with dc also (N, r) in float32."""
    (N, R), with_q = B.shape, dc is not None
    out, wide = plan.temp((N, terms * R), t), plan.temp((N, R)) if with_q and terms == 2 else None
    given = {"dc": dc, "c": c, "B": B, "out": out, "wide": wide, "N": N, "R": R, "WITH_Q": with_q, "TERMS": terms}
    plan.launch(norm_terms_kernel, "N R", given | {"BLOCK_N": BLOCK_N, "BLOCK_R": block_of(R)})
    return out, wide


def _finish(plan: Builder, parts: Array, gram: Array, of: Given, of_A: bool, terms: int) -> None:
    R, half, length = of.R, (of.A if of_A else of.B).itemsize == 2, of.K if of_A else of.N
    # float32 digits: three tf32 products, and registers to split the operands
    block, block_j = (block_of(R), BLOCK_J) if half else (min(32, block_of(R)), BLOCK_J // 2)
    given = {"parts": parts, "G": gram, **named("onto out", (of.onto_A, of.dA) if of_A else (of.onto_B, of.dB))}
    given |= {"OF_A": of_A, "TERMS": terms, "BLOCK_I": block, "BLOCK_J": block_j, "BLOCK_R": block}
    given |= {"PRECISION": None if half else _precision(plan)}
    plan.launch(norm_bwd_finish_kernel, (cdiv(R, block), cdiv(length, block_j)), given, of, num_stages=NOT_AHEAD if half else 2)


def block_of(R: int) -> int:
    return max(16, min(64, power_of_two(R)))
