"""Rows of an adapted table, ``y = g (W[ids] + s A^T[ids] B^T)``: a gather, a thin product on tensor cores and g.

Roof: a read and a write of the rows, 4 d bytes a token in 16 bits. What is read beside them comes out of L2, which must not
have as much to do. A tile of t tokens and k columns reads 2 t k bytes of W and writes as many; columns of A, (r, V) as PEFT has
it, are r sectors of 32 bytes a token, 32 t r; B in float32 is 4 k r, g and its division 8 k. Up to r = 16 a program owns a
strip of columns, keeps its B and g, and walks over blocks of tokens, of many some blocks ahead: 32 t r is a quarter of 4 t k
at r = 16 and k = 512.

At a larger r strips are narrower, and 32 t r is as much as the rows: of many tokens a first launch forms h = A^T[ids], s B in
16 bits and g, once. Tiles then read 2 r (t + k), have no loop, and ask for their rows of W before they wait for the first
launch (sm_90), which takes 6 us of 8192 tokens (H200).

Else one launch, whose programs own some tokens and a span of columns. With a norm of each row that nobody gave, a program owns
whole rows and walks them twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdora._records import Lookup
from fdora._torch import needs_dispatcher
from fdora.triton.configs import power_of_two
from fdora.triton.kernels.embedding import (
    embedding_kernel,
    embedding_ready_kernel,
    embedding_tile_kernel,
    embedding_walk_kernel,
)
from fdora.triton.op import op
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import Device, cdiv
from fdora.triton.runtime.plan import Array, Like, Plan, Scalar
from fdora.triton.runtime.walk import plan_for, run

WHOLE = 64  # up to this rank a program keeps its columns of A
WALKS = 16  # up to this rank programs keep B, of a half-precision W
MANY = 2048  # tokens, from which on two launches serve other ranks, and programs that walk ask for rows ahead
FEW, SOME = 128, 1024  # tokens, up to which a program asks for all at once, and up to which it has 8 warps
READY_T = 32  # tokens, or columns, of a program of the first


class Config(NamedTuple):
    BLOCK_T: int
    BLOCK_D: int
    BLOCK_R: int
    SPAN: int
    num_warps: int
    num_stages: int


def config_of(T: int, D: int, R: int, half: bool, num_sms: int) -> Config:
    """As wide a span as leaves enough programs to fill the GPU twice over: some three of them share a multiprocessor.

    Reasoned, not measured. float32 is multiplied in registers.
    """
    if half:
        many = T >= 2048 and R <= WHOLE
        block_t, block_d, block_r = (64 if many else 16), 128, (power_of_two(R) if R <= WHOLE else 32)
    else:
        block_t, block_d, block_r = 16, 64, 16
    span = block_d
    while 2 * span <= 1024 and cdiv(T, block_t) * cdiv(D, 2 * span) >= 6 * num_sms:
        span *= 2
    return Config(block_t, block_d, block_r, span, 4, 3)


class TileConfig(NamedTuple):
    BLOCK_T: int
    BLOCK_D: int
    num_warps: int


def tile_config(half: bool) -> TileConfig:
    """Of the second of two launches. 8192 tokens, d 4096, r 16, H200 (1fd0804), us of both: 32 x 128 51, 16 x 256 52,
    64 x 128 56."""
    return TileConfig(32, 128, 4) if half else TileConfig(32, 64, 4)


class WalkConfig(NamedTuple):
    BLOCK_T: int
    BLOCK_D: int
    num_warps: int
    STAGES: int
    per_sm: int


def walk_config(T: int) -> WalkConfig:
    """Of the one launch. d 4096, r 16, H200 (1fd0804), us: 8192 tokens 41.8, four programs a multiprocessor 46 to 47,
    256 columns 49 to 54, the gather alone 38.3. Fewer, in one run: 2047 tokens 11.7 (7.4), by 8 warps 15, by 512
    columns 13.1; 1024 6.5 (4.0), by 512 columns 7.3; 512 4.22 (2.74), by 512 columns 4.29; 128 2.59 (1.83), not all asked for
    at once 2.71."""
    if T >= MANY:
        return WalkConfig(16, 512, 8, 5, 2)
    return WalkConfig(16, 256, 4 if T > SOME else 8, 0 if T <= FEW else 1, 4)


def is_many(T: int, per_row: bool) -> bool:
    return T >= MANY and not per_row


def embedding_fwd(ids: Tensor, W: Tensor, A: Tensor, B: Tensor, m: Tensor, c: Tensor | None, how: Lookup) -> Tensor:
    """ids (...) -> y (..., d) in the dtype of W. c of None: of each row that is read. No max_norm."""
    assert how.max_norm is None
    return (embedding if needs_dispatcher(W) else _embedding)(ids, W, A, B, m, c, how.s, how.per_row)


def _embedding(ids: Tensor, W: Tensor, A: Tensor, B: Tensor, m: Tensor, c: Tensor | None, s: float, per_row: bool) -> Tensor:
    return run(*_planned(ids, W, A, B, m, c, s, per_row))[0]


def _planned(
    ids: Tensor, W: Tensor, A: Tensor, B: Tensor, m: Tensor, c: Tensor | None, s: float, per_row: bool
) -> tuple[Plan, tuple, tuple]:
    tensors = (ids, W, A, B, m, c)
    return plan_for(plan_embedding, tensors, per_row), tensors, (s,)


def plan_embedding(likes: Sequence[Like | None], device: Device, per_row: bool) -> Plan:
    plan = Builder("dora_embedding", device)
    shape = likes[0].shape  # type: ignore[union-attr]
    ids, (W, A, B) = plan.flat(likes[0]), map(plan.matrix, likes[1:4])
    m, c, s = plan.vector(likes[4]), plan.vector(likes[5]), plan.scalar("s")
    (T,), (V, D), R = ids.shape, W.shape, A.shape[0]
    y = plan.result("y", (*shape, D), W.dtype)
    walks = W.itemsize == 2 and R <= WALKS and not per_row
    if walks or is_many(T, per_row):
        (in_one if walks else in_two)(plan, ids, W, A, B, m, c, y, s)
        return plan.plan()
    own_norm = per_row and c is None
    block_t, block_d, block_r, span, num_warps, num_stages = config_of(T, D, R, W.itemsize == 2, device.num_sms)
    span = max(D, 1) if own_norm else span
    plan.path = "gather, low-rank product and g in one pass" + (", after one for the norms of the rows" if own_norm else "")
    plan.launch(
        embedding_kernel,
        (cdiv(T, block_t), cdiv(D, span)),
        {
            "ids": ids,
            "W": W,
            "A": A,
            "B": B,
            "m": m,
            "c": c,
            "y": y,
            "s": s,
            "T": T,
            "V": V,
            "D": D,
            "R": R,
            "PER_ROW": per_row,
            "OWN_NORM": own_norm,
            "SINGLE": block_r >= R,
            "KEPT": own_norm or span > block_d,
            "BLOCK_T": block_t,
            "BLOCK_D": block_d,
            "BLOCK_R": block_r,
            "SPAN": span,
        },
        num_warps,
        num_stages,
    )
    return plan.plan()


def in_one(plan: Builder, ids: Array, W: Array, A: Array, B: Array, m: Array, c: Array, y: Array, s: Scalar) -> None:
    plan.path = "gather, low-rank product and g in one pass, of programs that keep B and g"
    (T,), (V, D), R = ids.shape, W.shape, A.shape[0]
    block_t, block_d, num_warps, stages, per_sm = walk_config(T)
    strips = cdiv(D, block_d)
    blocks = cdiv(T, block_t)
    parts = min(blocks, max(1, per_sm * plan.device.num_sms // strips))
    if stages == 0 and parts < blocks:
        stages = 1
    plan.launch(
        embedding_walk_kernel,
        (strips, parts),
        {
            "ids": ids,
            "W": W,
            "A": A,
            "B": B,
            "m": m,
            "c": c,
            "y": y,
            "s": s,
            "T": T,
            "V": V,
            "D": D,
            "R": R,
            "STAGES": stages,
            "EVEN": D % block_d == 0 and power_of_two(R) == R,
            "BLOCK_T": block_t,
            "BLOCK_D": block_d,
            "BLOCK_R": power_of_two(R),
        },
        num_warps,
    )


def in_two(plan: Builder, ids: Array, W: Array, A: Array, B: Array, m: Array, c: Array, y: Array, s: Scalar) -> None:
    plan.path = "columns of A, s B and g made ready; then gather, low-rank product and g in one pass"
    (T,), (V, D), R = ids.shape, W.shape, A.shape[0]
    h, b, g = ready(plan, ids, A, B, m, c, s, W.dtype, False)
    block_t, block_d, num_warps = tile_config(W.itemsize == 2)
    pdl = plan.device.supports_pdl
    plan.launch(
        embedding_tile_kernel,
        (cdiv(D, block_d) * cdiv(T, block_t),),
        {
            "ids": ids,
            "W": W,
            "h": h,
            "b": b,
            "g": g,
            "y": y,
            "T": T,
            "V": V,
            "D": D,
            "R": R,
            "PDL": pdl,
            "BLOCK_T": block_t,
            "BLOCK_D": block_d,
            "BLOCK_R": min(64, power_of_two(R)),
        },
        num_warps,
        2,
        pdl,
    )


def ready(
    plan: Builder, ids: Array, A: Array, B: Array, m: Array, c: Array, s: Scalar, dtype: torch.dtype, with_g: bool
) -> tuple[Array, Array, Array]:
    """h = A^T[ids] (T, r), s B or s g B (d, r), and g (d,)."""
    (T,), (R, V), D = ids.shape, A.shape, B.shape[0]
    h, b, g = plan.temp((T, R), dtype), plan.temp((D, R), dtype), plan.temp((D,), torch.float32)
    block_r = min(64, power_of_two(R))
    plan.launch(
        embedding_ready_kernel,
        (cdiv(max(T, D), READY_T), cdiv(R, block_r)),
        {
            "ids": ids,
            "A": A,
            "B": B,
            "m": m,
            "c": c,
            "h": h,
            "b": b,
            "g": g,
            "s": s,
            "T": T,
            "V": V,
            "D": D,
            "R": R,
            "WITH_G": with_g,
            "PDL": plan.device.supports_pdl and not with_g,
            "BLOCK_T": READY_T,
            "BLOCK_R": block_r,
        },
        4,
    )
    return h, b, g


def _fake(ids: Any, W: Any, A: Any, B: Any, m: Any, c: Any, s: float, per_row: bool) -> Any:
    return torch.empty((*ids.shape, W.shape[1]), device=W.device, dtype=W.dtype)


embedding = op("embedding", _embedding, _fake, _planned)
