"""The norms of many layers in three launches: hashes of all A and B, tiles of all W that changed, sums of all rows. For float32
factors another one looks for what scales A.

One int64 table describes the layers: a row for each field (F_ below, by name in fdora/triton/tree.py), a column for each layer.
Pointers lie in it as integers, so a launch takes the same arguments however many layers there are.

A layer has WORDS words. Each is hashed by one program, which also says whether it differs from the word of before: plain
stores, no atomics, nothing to clear. What follows reads the WORDS answers of a layer and skips it where none differs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from fdora.triton.kernels.decode import beside, byte_weights
from fdora.triton.kernels.hash import hashed_between, mixed
from fdora.triton.kernels.split import scaling
from fdora.triton.kernels.tile import put, vector, zeros
from fdora.triton.runtime.private import gdc_launch_dependents, gdc_wait

(
    F_W, F_A, F_B, F_N, F_K, F_R, F_WN, F_WK, F_AR, F_AK, F_BN, F_BR,
    F_S, F_ITEMS, F_PARTIAL, F_C, F_FORM_A, F_COUNT_A, F_FORM_B, F_COUNT_B, F_KIND, F_LEAF, F_SCALES, F_ROWS, F_COLUMNS, F_TOPS,
) = map(tl.constexpr, range(26))
WORDS64, WORDS32, WORDS16 = map(tl.constexpr, range(3))  # a form: packed words of 64 bits, or elements with their strides


class Of(NamedTuple):
    """What the layers of a launch have in common. A ``DTYPE`` is Triton's name of it; a ``UNIT``: see _unit in
    fdora/triton/tree_table.py; ``EVEN``, ``EVEN_R``: N and K, and the rank, are of whole tiles; ``ONE_SLAB`` holds the rank;
    ``SPLIT``: a factor is float32; ``HOW`` codes lie, or None; ``AHEAD``: see TreeConfig."""

    DTYPE_W: Any
    DTYPE_A: Any
    DTYPE_B: Any
    UNIT_W: Any
    UNIT_A: Any
    UNIT_B: Any
    EVEN: Any
    EVEN_R: Any
    ONE_SLAB: Any
    SPLIT: Any
    HOW: Any
    BLOCK_N: Any
    BLOCK_K: Any
    BLOCK_R: Any
    CHUNK: Any
    AHEAD: Any


@triton.jit
def _hash_any(p, form, count, cols, strides, first, part, parts, EACH: tl.constexpr, BLOCK: tl.constexpr):
    """One of so many shares. EACH: of as many words, whatever their count; else of blocks."""
    share = tl.cdiv(count, parts)
    begin, end, step = part * BLOCK, count, parts * BLOCK
    if EACH:
        begin, end, step = part * share, tl.minimum(count, part * share + share), BLOCK
    row, col = strides
    if form == WORDS64:
        word = hashed_between(p.to(tl.pointer_type(tl.int64)), begin, end, step, 1, 1, 1, first, True, BLOCK)
    elif form == WORDS32:
        word = hashed_between(p.to(tl.pointer_type(tl.int32)), begin, end, step, cols, row, col, first, False, BLOCK)
    else:
        word = hashed_between(p.to(tl.pointer_type(tl.int16)), begin, end, step, cols, row, col, first, False, BLOCK)
    return word


@triton.jit
def hashed_fields(t, L):
    """What a word is of, of the layer whose column t is."""
    a = tl.load(t + F_A * L), tl.load(t + F_FORM_A * L), tl.load(t + F_COUNT_A * L), tl.load(t + F_K * L)
    b = tl.load(t + F_B * L), tl.load(t + F_FORM_B * L), tl.load(t + F_COUNT_B * L), tl.load(t + F_R * L)
    strides_a, strides_b = (tl.load(t + F_AR * L), tl.load(t + F_AK * L)), (tl.load(t + F_BN * L), tl.load(t + F_BR * L))
    return a, strides_a, b, strides_b, tl.load(t + F_S * L), tl.load(t + F_KIND * L)


@triton.jit
def word_of(fields, part, parts, EACH: tl.constexpr, BLOCK: tl.constexpr):
    """One of so many words of a layer."""
    a, strides_a, b, strides_b, s, kind = fields
    word = _hash_any(a[0], a[1], a[2], a[3], strides_a, 0, part, parts, EACH, BLOCK)
    word += _hash_any(b[0], b[1], b[2], b[3], strides_b, 1 << 40, part, parts, EACH, BLOCK)
    # In every word, so that one without elements is not the 0 that it starts with.
    return (word + mixed(s, kind)).to(tl.int64, bitcast=True)


@triton.jit
def fingerprints_kernel(
    table,  # (FIELDS, L) int64
    old, new,  # (L, WORDS) int64, by the layer's field leaf; new may be old
    differs,  # (L, WORDS) int32, by the layer's column
    L, WORDS: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    i = tl.program_id(0)
    part, t = i % WORDS, table + i // WORDS
    word = word_of(hashed_fields(t, L), part, WORDS, False, BLOCK)
    at = tl.load(t + F_LEAF * L) * WORDS + part
    tl.store(differs + i, (word != tl.load(old + at)).to(tl.int32))
    tl.store(new + at, word)


@triton.jit
def _pitch(stride, UNIT: tl.constexpr):
    """The distance of two rows: the compiler is to see that they begin at multiples of UNIT elements, 16 bytes. (Not
    ``tl.multiple_of``: up to Triton 3.6 it refuses a number out of a tuple.)"""
    return (stride // UNIT) * UNIT if UNIT else stride


@triton.jit
def _tile(p, stride_i, stride_j, I: tl.constexpr, J: tl.constexpr, UNIT: tl.constexpr):
    """Pointers of the tile that begins at p, whose columns are adjacent if UNIT is not 0."""
    i, j = tl.arange(0, I)[:, None], tl.arange(0, J)[None, :]
    if UNIT:
        return p + (i * stride_i.to(tl.int32) + j)
    return p + (i * stride_i + j * stride_j)


@triton.jit
def _load(at, in_i, in_j, EVEN_I: tl.constexpr, EVEN_J: tl.constexpr):
    """A tile; zeros where it is ragged. Without a mask it comes 16 bytes at a time."""
    if EVEN_I and EVEN_J:
        return tl.load(at)
    if EVEN_I:
        return tl.load(at, mask=in_j, other=0.0)
    if EVEN_J:
        return tl.load(at, mask=in_i, other=0.0)
    return tl.load(at, mask=in_i & in_j, other=0.0)


@triton.jit
def _terms(x, factor, SPLIT: tl.constexpr):
    """A slab as products take it. float32 x * factor = hi + lo to 2^-22 of what factor brings near 2^15: both float16."""
    if SPLIT:
        x = x.to(tl.float32) * factor
        hi = x.to(tl.float16)
        terms = hi, (x - hi.to(tl.float32)).to(tl.float16)
    else:
        terms = x, x
    return terms


@triton.jit
def _product(b, a, acc, SPLIT: tl.constexpr):
    """acc + b a, of the terms of both: of float32 factors three float16 products."""
    acc = tl.dot(b[0], a[0], acc)
    if SPLIT:
        acc = tl.dot(b[0], a[1], acc)
        acc = tl.dot(b[1], a[0], acc)
    return acc


@triton.jit
def _top_of_rows(p, stride_i, stride_j, in_i, J, OF: tl.constexpr):
    """The largest |b| of each row, over the whole rank."""
    top, j = zeros(OF.BLOCK_N), tl.arange(0, OF.BLOCK_R)
    for j0 in range(0, J, OF.BLOCK_R):
        at = _tile(p + j0 * stride_j, stride_i, stride_j, OF.BLOCK_N, OF.BLOCK_R, OF.UNIT_B)
        x = _load(at, in_i, (j < J - j0)[None, :], OF.EVEN, OF.EVEN_R)
        top = tl.maximum(top, tl.max(tl.abs(x.to(tl.float32)), axis=1))
    return top


@triton.jit
def _top_of_tile(p, stride_i, stride_j, I, k0, K, OF: tl.constexpr):
    """The largest |a| of BLOCK_K columns, over the whole rank."""
    top, i = zeros(OF.BLOCK_K), tl.arange(0, OF.BLOCK_R)
    in_k = (k0 + tl.arange(0, OF.BLOCK_K) < K)[None, :]
    for i0 in range(0, I, OF.BLOCK_R):
        at = _tile(p + (i0 * stride_i + k0 * stride_j), stride_i, stride_j, OF.BLOCK_R, OF.BLOCK_K, OF.UNIT_A)
        x = _load(at, (i < I - i0)[:, None], in_k, OF.EVEN_R, OF.EVEN)
        top = tl.maximum(top, tl.max(tl.abs(x.to(tl.float32)), axis=0))
    return tl.max(top, axis=0)


@triton.jit
def layer_of(t, L, OF: tl.constexpr):
    """W, A and B of the layer whose column t is, each with its strides; its sizes."""
    W = tl.load(t + F_W * L).to(tl.pointer_type(tl.dtype(OF.DTYPE_W)))
    W = tl.multiple_of(W, 16) if OF.UNIT_W else W
    A = tl.load(t + F_A * L).to(tl.pointer_type(tl.dtype(OF.DTYPE_A)))
    A = tl.multiple_of(A, 16) if OF.UNIT_A else A
    B = tl.load(t + F_B * L).to(tl.pointer_type(tl.dtype(OF.DTYPE_B)))
    B = tl.multiple_of(B, 16) if OF.UNIT_B else B
    N, K, R = tl.load(t + F_N * L).to(tl.int32), tl.load(t + F_K * L).to(tl.int32), tl.load(t + F_R * L).to(tl.int32)
    if OF.UNIT_W and OF.UNIT_A:  # as many columns as that divides: a mask is the same for 16 bytes
        K = _pitch(K, OF.UNIT_W)
    W = W, _pitch(tl.load(t + F_WN * L), OF.UNIT_W), tl.load(t + F_WK * L)
    A = A, _pitch(tl.load(t + F_AR * L), OF.UNIT_A), tl.load(t + F_AK * L)
    B = B, _pitch(tl.load(t + F_BN * L), OF.UNIT_B), tl.load(t + F_BR * L)
    return W, A, B, (N, K, R)


@triton.jit
def squares_of_item(t, L, i, partial, tops, OF: tl.constexpr):
    """Item i of the layer whose column t is: the partial sums of BLOCK_N rows and CHUNK columns. With HOW W is of 8 bits,
    and so many rows and columns share a scale: a tile lies in one of these columns. ``tops``: where tops_kernel wrote, or
    None: looked for here."""
    of_w, of_a, of_b, sizes = layer_of(t, L, OF)
    W, stride_wn, stride_wk = of_w
    A, stride_ar, stride_ak = of_a
    B, stride_bn, stride_br = of_b
    N, K, R = sizes
    s = tl.load(t + F_S * L).to(tl.int32).to(tl.float32, bitcast=True)

    chunks = tl.cdiv(K, OF.CHUNK)
    first_n, first_k = (i // chunks) * OF.BLOCK_N, (i % chunks) * OF.CHUNK
    n, r = first_n + tl.arange(0, OF.BLOCK_N), tl.arange(0, OF.BLOCK_R)
    W += first_n.to(tl.int64) * stride_wn
    B += first_n.to(tl.int64) * stride_bn
    by_n, by_k, undo_n, undo_k = 1.0, 1.0, 1.0, 1.0
    if OF.SPLIT:
        by_n, undo_n = scaling(_top_of_rows(B, stride_bn, stride_br, (n < N)[:, None], R, OF)[:, None])
        if tops is None:
            top = 0.0
            for k0 in range(first_k, min(K, first_k + OF.CHUNK), OF.BLOCK_K):
                top = tl.maximum(top, _top_of_tile(A, stride_ar, stride_ak, R, k0, K, OF))
        else:
            tile = first_k // OF.BLOCK_K + tl.arange(0, OF.CHUNK // OF.BLOCK_K)
            top = tl.max(vector(tops + tl.load(t + F_TOPS * L), tile, tl.cdiv(K, OF.BLOCK_K)), axis=0)
        by_k, undo_k = scaling(top)  # one number, so that splitting a tile of A takes no reduction
    if OF.ONE_SLAB:
        at_b = _tile(B, stride_bn, stride_br, OF.BLOCK_N, OF.BLOCK_R, OF.UNIT_B)
        b = _terms(_load(at_b, (n < N)[:, None], (r < R)[None, :], OF.EVEN, OF.EVEN_R), by_n, OF.SPLIT)
    if OF.HOW is not None:
        columns = tl.load(t + F_COLUMNS * L).to(tl.int32)
        at_scale = tl.load(t + F_SCALES * L).to(tl.pointer_type(tl.float32))
        at_scale += (n // tl.load(t + F_ROWS * L).to(tl.int32)).to(tl.int64) * tl.cdiv(K, columns)
    squares = zeros(OF.BLOCK_N)
    HOW: tl.constexpr = OF.HOW
    AHEAD: tl.constexpr = OF.AHEAD if OF.ONE_SLAB and OF.AHEAD else None
    for k0 in tl.range(first_k, min(K, first_k + OF.CHUNK), OF.BLOCK_K, num_stages=AHEAD):
        in_k = (k0 + tl.arange(0, OF.BLOCK_K) < K)[None, :]
        at_w = _tile(W + k0 * stride_wk, stride_wn, stride_wk, OF.BLOCK_N, OF.BLOCK_K, OF.UNIT_W)
        w = _load(at_w, (n < N)[:, None], in_k, OF.EVEN, OF.EVEN)
        acc = zeros(OF.BLOCK_N, OF.BLOCK_K)
        if OF.ONE_SLAB:
            at_a = _tile(A + k0 * stride_ak, stride_ar, stride_ak, OF.BLOCK_R, OF.BLOCK_K, OF.UNIT_A)
            a = _load(at_a, (r < R)[:, None], in_k, OF.EVEN_R, OF.EVEN)
            acc = _product(b, _terms(a, by_k, OF.SPLIT), acc, OF.SPLIT)
        else:
            for r0 in range(0, R, OF.BLOCK_R):
                at_b = _tile(B + r0 * stride_br, stride_bn, stride_br, OF.BLOCK_N, OF.BLOCK_R, OF.UNIT_B)
                at_a = _tile(A + (r0 * stride_ar + k0 * stride_ak), stride_ar, stride_ak, OF.BLOCK_R, OF.BLOCK_K, OF.UNIT_A)
                b = _load(at_b, (n < N)[:, None], (r < R - r0)[None, :], OF.EVEN, OF.EVEN_R)
                a = _load(at_a, (r < R - r0)[:, None], in_k, OF.EVEN_R, OF.EVEN)
                acc = _product(_terms(b, by_n, OF.SPLIT), _terms(a, by_k, OF.SPLIT), acc, OF.SPLIT)
        if OF.SPLIT:
            acc = acc * undo_n * undo_k
        if OF.HOW is not None:
            scale = tl.load(at_scale + k0 // columns, mask=n < N, other=0.0)[:, None]
            w = byte_weights(beside(w, acc, HOW), scale, HOW)
            w = w if OF.EVEN else tl.where(in_k, w, 0.0)
        v = w.to(tl.float32) + s * acc
        squares += tl.sum(v * v, axis=1)
    at = partial + tl.load(t + F_PARTIAL * L) + (i % chunks).to(tl.int64) * N + n
    tl.store(at, squares, mask=n < N)


@triton.jit
def tops_kernel(
    table,  # (FIELDS, L) int64
    differs,  # (L, WORDS) int32, or None
    partial,  # float32: of each layer, at its field tops, a number for each BLOCK_K columns
    L, first,  # the first column of the table that this launch is for
    OF: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):
    """What scales A's tiles where factors are split, of all layers that changed."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    layer = first + tl.program_id(0)
    t = table + layer
    _, of_a, _, sizes = layer_of(t, L, OF)
    A, stride_ar, stride_ak = of_a
    _, K, R = sizes
    if differs is not None:
        K = tl.where(tl.max(tl.load(differs + layer * WORDS + tl.arange(0, WORDS)), axis=0) > 0, K, 0)
    for k0 in range(tl.program_id(1) * OF.BLOCK_K, K, tl.num_programs(1) * OF.BLOCK_K):
        top = _top_of_tile(A, stride_ar, stride_ak, R, k0, K, OF)
        tl.store(partial + tl.load(t + F_TOPS * L) + k0 // OF.BLOCK_K, top)


@triton.jit
def norms_kernel(
    table,  # (FIELDS, L) int64
    differs,  # (L, WORDS) int32, or None
    partial,  # float32, one layer after the other: what tops_kernel left, if factors are split, and (chunks of K, N) sums
    L, first, count,  # the columns of the table that this launch is for
    OF: tl.constexpr, BLOCK_L: tl.constexpr, WORDS: tl.constexpr, PDL: tl.constexpr,
):
    """An item is BLOCK_N rows and CHUNK columns of one layer. The items of all layers that changed are dealt out in turn."""
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    l = tl.arange(0, BLOCK_L)
    items = vector(table + F_ITEMS * L + first, l, count).to(tl.int32)
    if differs is not None:
        answers = differs + (first + l)[:, None] * WORDS + tl.arange(0, WORDS)[None, :]
        items = tl.where(tl.max(tl.load(answers, mask=(l < count)[:, None], other=0), axis=1) > 0, items, 0)
    ends = tl.cumsum(items, axis=0)
    for item in range(tl.program_id(0), tl.sum(items, axis=0), tl.num_programs(0)):
        before = ends <= item
        t = table + first + tl.sum(before.to(tl.int32), axis=0)
        squares_of_item(t, L, item - tl.max(tl.where(before, ends, 0), axis=0), partial, partial, OF)


@triton.jit
def roots_kernel(
    table, differs, partial, old, new,  # old, new: float32, each layer at its field c; new may be old
    L, WORDS: tl.constexpr, CHUNK: tl.constexpr, BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):
    """The root of each row's partial sums, added in their order; or the norm of before."""
    if PDL:
        gdc_wait()
    layer = tl.program_id(0)
    t = table + layer
    N, chunks = tl.load(t + F_N * L).to(tl.int32), tl.cdiv(tl.load(t + F_K * L), CHUNK).to(tl.int32)
    at_partial, at_c = partial + tl.load(t + F_PARTIAL * L), tl.load(t + F_C * L)
    changed = layer >= 0
    if differs is not None:
        changed = tl.max(tl.load(differs + layer * WORDS + tl.arange(0, WORDS)), axis=0) > 0
    for n0 in range(tl.program_id(1) * BLOCK_N, N, tl.num_programs(1) * BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        if changed:
            acc = zeros(BLOCK_N)
            at = at_partial + n
            for _ in range(0, chunks):
                acc += tl.load(at, mask=n < N, other=0.0)
                at += N
            put(tl.sqrt_rn(acc), new + at_c, n, N)
        else:
            put(tl.load(old + at_c + n, mask=n < N), new + at_c, n, N)
