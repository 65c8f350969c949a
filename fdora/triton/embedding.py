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

from typing import NamedTuple

from torch import Tensor

from fdora._records import Lookup
from fdora.triton.kernels.embedding import (
    embedding_kernel,
    embedding_ready_kernel,
    embedding_tile_kernel,
    embedding_walk_kernel,
)
from fdora.triton.op import Likes, planned
from fdora.triton.runtime import Array, Builder, Scalar, cdiv
from fdora.triton.tiles.configs import power_of_two

WHOLE = 64  # up to this rank a program keeps its columns of A
WALKS = 16  # up to this rank programs keep B, of a half-precision W
MANY = 2048  # tokens, from which on two launches serve other ranks, and programs that walk ask for rows ahead
FEW, SOME = 128, 1024  # tokens, up to which a program asks for all at once, and up to which it has 8 warps
READY_T = 32  # tokens, or columns, of a program of the first


class Config(NamedTuple):
    """Tokens, columns and ranks of a program's step, of a ``SPAN`` of columns or with ``STAGES`` blocks of tokens under way, in
    ``per_sm`` programs of a multiprocessor."""

    BLOCK_T: int
    BLOCK_D: int
    BLOCK_R: int
    num_warps: int
    num_stages: int = 3
    SPAN: int = 0
    STAGES: int = 0
    per_sm: int = 0


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
    return Config(block_t, block_d, block_r, 4, SPAN=span)


def tile_config(R: int, half: bool) -> Config:
    """Of the second of two launches. 8192 tokens, d 4096, r 16, H200 (1fd0804), us of both: 32 x 128 51, 16 x 256 52,
    64 x 128 56."""
    return Config(32, 128 if half else 64, min(64, power_of_two(R)), 4, 2)


def walk_config(T: int, R: int) -> Config:
    """Of the one launch. d 4096, r 16, H200 (1fd0804), us: 8192 tokens 41.8, four programs a multiprocessor 46 to 47,
    256 columns 49 to 54, the gather alone 38.3. Fewer, in one run: 2047 tokens 11.7 (7.4), by 8 warps 15, by 512
    columns 13.1; 1024 6.5 (4.0), by 512 columns 7.3; 512 4.22 (2.74), by 512 columns 4.29; 128 2.59 (1.83), not all asked for
    at once 2.71."""
    if T >= MANY:
        return Config(16, 512, power_of_two(R), 8, STAGES=5, per_sm=2)
    return Config(16, 256, power_of_two(R), 4 if T > SOME else 8, STAGES=0 if T <= FEW else 1, per_sm=4)


def is_many(T: int, per_row: bool) -> bool:
    return T >= MANY and not per_row


def embedding_fwd(ids: Tensor, W: Tensor, A: Tensor, B: Tensor, m: Tensor, c: Tensor | None, how: Lookup) -> Tensor:
    """ids (...) -> y (..., d) in the dtype of W. c of None: of each row that is read. No max_norm."""
    assert how.max_norm is None
    y: Tensor = plan_embedding.call(ids, W, A, B, m, c, how.s, how.per_row)
    return y


class Call(NamedTuple):
    """What kernels read, by their names of it."""

    ids: Array
    W: Array
    A: Array
    B: Array
    m: Array
    c: Array
    s: Scalar
    T: int
    V: int
    D: int
    R: int


def call_of(plan: Builder, ids: Array, likes: Likes) -> Call:
    """``likes``: W, A, B, m and c. T tokens, V rows of the table, each of D numbers."""
    (W, A, B), (m, c) = map(plan.matrix, likes[:3]), map(plan.vector, likes[3:5])
    return Call._make((ids, W, A, B, m, c, plan.scalar("s"), *ids.shape, *W.shape, A.shape[0]))


@planned(
    "embedding(Tensor ids, Tensor W, Tensor A, Tensor B, Tensor m, Tensor? c, float s, bool per_row) -> Tensor",
    "dora_embedding",
    "flat rest",
    lambda ids, table, _: {"y": ((*ids.shape, table[0].shape[1]), table[0].dtype)},
    asks=(1,),
)
def plan_embedding(plan: Builder, ids: Array, likes: Likes, per_row: bool) -> None:
    call = call_of(plan, ids, likes)
    T, D, R, half = call.T, call.D, call.R, call.W.itemsize == 2
    (y,) = plan.wanted()
    if half and R <= WALKS and not per_row:
        in_one(plan, call, y)
    elif is_many(T, per_row):
        in_two(plan, call, y)
    else:
        own_norm = per_row and call.c is None
        config = config_of(T, D, R, half, plan.device.num_sms)
        span = max(D, 1) if own_norm else config.SPAN
        plan.path = "gather, low-rank product and g in one pass" + (", after one for the norms of the rows" if own_norm else "")
        given = {"y": y, "PER_ROW": per_row, "OWN_NORM": own_norm, "SPAN": span}
        given |= {"SINGLE": config.BLOCK_R >= R, "KEPT": own_norm or span > config.BLOCK_D}
        plan.launch(embedding_kernel, (cdiv(T, config.BLOCK_T), cdiv(D, span)), given, call, config)


def in_one(plan: Builder, call: Call, y: Array) -> None:
    plan.path = "gather, low-rank product and g in one pass, of programs that keep B and g"
    config = walk_config(call.T, call.R)
    strips, blocks, stages = cdiv(call.D, config.BLOCK_D), cdiv(call.T, config.BLOCK_T), config.STAGES
    parts = min(blocks, max(1, config.per_sm * plan.device.num_sms // strips))
    if stages == 0 and parts < blocks:
        stages = 1
    even = call.D % config.BLOCK_D == 0 and config.BLOCK_R == call.R
    plan.launch(embedding_walk_kernel, (strips, parts), {"y": y, "STAGES": stages, "EVEN": even}, call, config)


def in_two(plan: Builder, call: Call, y: Array) -> None:
    plan.path = "columns of A, s B and g made ready; then gather, low-rank product and g in one pass"
    given = ready(plan, call, False) | {"y": y}
    plan.launch(embedding_tile_kernel, "DT", given, call, tile_config(call.R, call.W.itemsize == 2), pdl=plan.pdl)


def ready(plan: Builder, call: Call, with_g: bool) -> dict[str, Array]:
    """h = A^T[ids] (T, r), s B or s g B (d, r) as b, and g (d,)."""
    (T, _, D, R), dtype = call[-4:], call.W.dtype
    found = {"h": plan.temp((T, R), dtype), "b": plan.temp((D, R), dtype), "g": plan.temp((D,))}
    block_r = min(64, power_of_two(R))
    given = {"WITH_G": with_g, "PDL": plan.pdl and not with_g, "BLOCK_T": READY_T, "BLOCK_R": block_r}
    plan.launch(embedding_ready_kernel, (cdiv(max(T, D), READY_T), cdiv(R, block_r)), found | given, call)
    return found
