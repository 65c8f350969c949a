"""Rows of an adapted table, gathered, updated and scaled in one pass; see fdora/triton/embedding.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.g import floored, g_tile
from fdora.triton.kernels.tile import Matrix, addresses, block_on, both, loaded, put, store, vector, within, zeros
from fdora.triton.runtime.cost import Cost, gathered, kernel, looked_up
from fdora.triton.runtime.private import gdc_launch_dependents, gdc_wait


@triton.jit
def rows_of(t, v, known, j, J):
    """Rows v of a Matrix of which so many are ``known``, at columns j of J."""
    at = t.p + v[:, None] * t.row + j[None, :].to(tl.int64) * t.col
    return tl.load(at, mask=both(known, j < J), other=0.0)


@triton.jit
def _tile(W, A, B, a, v, known, d, s, D, R, BLOCK_R: tl.constexpr, SINGLE: tl.constexpr, KEPT: tl.constexpr):
    """W + s A^T B^T at rows v and columns d, in float32. SINGLE: one slab of the rank is all of it; KEPT: a is that."""
    w = rows_of(W, v, known, d, D)
    acc = zeros(v.shape[0], d.shape[0])
    for r0 in range(0, BLOCK_R if SINGLE else R, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        b = s * loaded(B, r, d, R, D).to(tl.float32)
        slab = a if KEPT else rows_of(A, v, known, r, R)
        acc = tl.dot(slab.to(w.dtype), b.to(w.dtype), acc, input_precision="ieee")
    return w.to(tl.float32) + acc


@kernel("ids B y", rest=lambda a: looked_up(a) + (looked_up(a) if a.OWN_NORM else Cost()))
def embedding_kernel(
    ids,  # (T,)
    W, A, B,  # (V, D), (R, V), (D, R)
    m, c,  # (D,), or (V,) of PER_ROW; c None of OWN_NORM
    y,  # (T, D)
    s, T, V, D, R, stride_wv, stride_wd, stride_ar, stride_av, stride_bd, stride_br,
    PER_ROW: tl.constexpr, OWN_NORM: tl.constexpr, SINGLE: tl.constexpr, KEPT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr, SPAN: tl.constexpr,
):
    """y of BLOCK_T tokens and SPAN columns. A number that is no row of W gives NaN, and reads nothing."""
    W, A, B = Matrix(W, stride_wv, stride_wd), Matrix(A, stride_av, stride_ar), Matrix(B, stride_br, stride_bd)
    t, v = _numbers(ids, tl.program_id(0), T, BLOCK_T)
    known = (t < T) & (v >= 0) & (v < V)
    a = 0.0
    if SINGLE and KEPT:
        a = rows_of(A, v, known, tl.arange(0, BLOCK_R), R)
    g = tl.full((BLOCK_T, 1), 1.0, tl.float32)
    if PER_ROW:
        if OWN_NORM:
            squares = zeros(BLOCK_T)
            for d0 in range(0, D, BLOCK_D):
                d = d0 + tl.arange(0, BLOCK_D)
                u = _tile(W, A, B, a, v, known, d, s, D, R, BLOCK_R, SINGLE, SINGLE and KEPT)
                squares += tl.sum(u * u, axis=1)
            cv = tl.sqrt_rn(squares)
        else:
            cv = tl.load(c + v, mask=known, other=1.0)
        mv = tl.load(m + v, mask=known, other=0.0).to(tl.float32)
        g = tl.div_rn(mv, floored(cv))[:, None]
    first = tl.program_id(1) * SPAN
    for d0 in range(first, min(first + SPAN, D), BLOCK_D):
        d = d0 + tl.arange(0, BLOCK_D)
        if not PER_ROW:  # asked for before the product, which waits
            cd, md = vector(c, d, D, 1.0), vector(m, d, D)
        u = _tile(W, A, B, a, v, known, d, s, D, R, BLOCK_R, SINGLE, SINGLE and KEPT)
        out = g * u if PER_ROW else tl.div_rn(md.to(tl.float32), floored(cd))[None, :] * u
        out = tl.where(known[:, None], out, float("nan"))
        at = y + t[:, None].to(tl.int64) * D + d[None, :]
        tl.store(at, out.to(y.dtype.element_ty), mask=within(t, d, T, D))


@kernel("ids B h b", rest=lambda a: gathered(a.A, a.T, a.R))
def embedding_ready_kernel(
    ids,  # (T,)
    A, B,  # (R, V), (D, R)
    m, c,  # (D,)
    h, b, g,  # (T, R), (D, R), (D,)
    s, T, V, D, R, stride_ar, stride_av, stride_bd, stride_br,
    WITH_G: tl.constexpr, PDL: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """h = A^T[ids], b = s B, or s g B of WITH_G, in the dtype of products, and g: what the tiles read over and over.

    The columns of A are as many sectors of 32 bytes as there are numbers in them; rows of h are a few.
    """
    if PDL:
        gdc_launch_dependents()
    at, r = block_on(0, BLOCK_T), block_on(1, BLOCK_R)
    v = vector(ids, at, T).to(tl.int64)
    a = rows_of(Matrix(A, stride_av, stride_ar), v, (at < T) & (v >= 0) & (v < V), r, R)
    out = at[:, None].to(tl.int64) * R + r[None, :]
    tl.store(h + out, a.to(h.dtype.element_ty), mask=within(at, r, T, R))
    gd = g_tile(m, c, at, D)
    part = s * loaded(Matrix(B, stride_bd, stride_br), at, r, D, R).to(tl.float32)
    part = part * gd[:, None] if WITH_G else part
    tl.store(b + out, part.to(b.dtype.element_ty), mask=within(at, r, D, R))
    put(gd, g, at, D)  # every slab of the rank writes the same


@kernel("ids h b y", "T D R W", lambda a: gathered(a.W, a.T, a.D))
def embedding_tile_kernel(
    ids,  # (T,)
    W,  # (V, D)
    h, b, g,  # (T, R), (D, R), (D,)
    y,  # (T, D)
    T, V, D, R, stride_wv, stride_wd,
    PDL: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """One tile of y = g (W[ids] + h b^T). The rows of W are on their way before anything else is."""
    strips = tl.cdiv(D, BLOCK_D)  # those of the same rows run together
    tile_t, tile_d = tl.program_id(0) // strips, tl.program_id(0) % strips
    t, d = tile_t * BLOCK_T + tl.arange(0, BLOCK_T), tile_d * BLOCK_D + tl.arange(0, BLOCK_D)
    in_t, in_d = t < T, d < D
    v = tl.load(ids + t, mask=in_t, other=0).to(tl.int64)
    known = in_t & (v >= 0) & (v < V)
    at_w = addresses(Matrix(W, stride_wv, stride_wd), v, d)
    w = tl.load(at_w, mask=both(known, in_d), other=0.0, eviction_policy="evict_first")
    if PDL:
        gdc_wait()
    gd = tl.load(g + d, mask=in_d, other=0.0)
    acc = zeros(BLOCK_T, BLOCK_D)
    for r0 in range(0, R, BLOCK_R):
        r = r0 + tl.arange(0, BLOCK_R)
        at_h = addresses(Matrix(h, R, None), t, r)
        ht = tl.load(at_h, mask=within(t, r, T, R), other=0.0, eviction_policy="evict_last")
        at_b = b + d[None, :].to(tl.int64) * R + r[:, None]
        bt = tl.load(at_b, mask=within(r, d, R, D), other=0.0, eviction_policy="evict_last")
        acc = tl.dot(ht, bt, acc, input_precision="ieee")
    out = tl.where(known[:, None], gd[None, :] * (w.to(tl.float32) + acc), float("nan"))
    store(out, Matrix(y, D, None), t, d, T, D)


@triton.jit
def _numbers(ids, i, T, BLOCK_T: tl.constexpr):
    t = i * BLOCK_T + tl.arange(0, BLOCK_T)
    return t, vector(ids, t, T).to(tl.int64)


@triton.jit
def _asked(W, A, t, v, d, r, T, V, D, R, EVEN: tl.constexpr):
    """Rows of W and columns of A of the tokens t, whose numbers are v, at columns d. EVEN: all of d and of r are there."""
    known = (t < T) & (v >= 0) & (v < V)
    mask_w, mask_a = known[:, None], known[:, None]
    if not EVEN:
        mask_w, mask_a = mask_w & (d < D)[None, :], mask_a & (r < R)[None, :]
    w = tl.load(addresses(W, v, d), mask=mask_w, other=float("nan"))
    return w, tl.load(addresses(A, v, r), mask=mask_a, other=0.0)


@triton.jit
def _answered(w, a, bt, gd, y, s, t, d, T, D, EVEN: tl.constexpr):
    """Their y."""
    mask_y = (t < T)[:, None]
    if not EVEN:
        mask_y = mask_y & (d < D)[None, :]
    acc = tl.dot((s * a.to(tl.float32)).to(w.dtype), bt, input_precision="ieee")
    out = gd[None, :] * (w.to(tl.float32) + acc)
    tl.store(addresses(Matrix(y, D, None), t, d), out.to(y.dtype.element_ty), mask=mask_y)


@kernel("ids B y", rest=looked_up)
def embedding_walk_kernel(
    ids,  # (T,)
    W, A, B,  # (V, D), (R, V), (D, R)
    m, c,  # (D,)
    y,  # (T, D)
    s, T, V, D, R, stride_wv, stride_wd, stride_ar, stride_av, stride_bd, stride_br,
    STAGES: tl.constexpr, EVEN: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):
    """y = g (W[ids] + s A^T[ids] B^T) of one strip of columns and every so many blocks of tokens. B and g of the strip stay;
    rows of W and columns of A are asked for STAGES / 2 blocks ahead. Of one stage numbers alone are, and before B is. Of no
    stage there is one block: it asks for all there is before it uses any."""
    W, A = Matrix(W, stride_wv, stride_wd), Matrix(A, stride_av, stride_ar)
    d, r = block_on(0, BLOCK_D), tl.arange(0, BLOCK_R)
    first, blocks, step = tl.program_id(1), tl.cdiv(T, BLOCK_T), tl.num_programs(1)
    if STAGES <= 1:
        t, v = _numbers(ids, first, T, BLOCK_T)
    b = loaded(Matrix(B, stride_br, stride_bd), r, d, R, D, EVEN)
    if STAGES == 0:
        column = d[:, None]
        cd = vector(c, column, D, 1.0).to(tl.float32)
        md = vector(m, column, D).to(tl.float32)
        w, a = _asked(W, A, t, v, d, r, T, V, D, R, EVEN)
        # a sum over one, which the compiler does not repeat in each thread that needs its columns: 16 divisions, not 2
        gd = tl.sum(tl.div_rn(md, floored(cd)), axis=1)
        _answered(w, a, b.to(W.p.dtype.element_ty), gd, y, s, t, d, T, D, EVEN)
    else:
        bt = b.to(W.p.dtype.element_ty)
        gd = g_tile(m, c, d, D)
        for i in tl.range(first, blocks, step, num_stages=STAGES):
            if STAGES > 1:
                t, v = _numbers(ids, i, T, BLOCK_T)
            w, a = _asked(W, A, t, v, d, r, T, V, D, R, EVEN)
            _answered(w, a, bt, gd, y, s, t, d, T, D, EVEN)
            if STAGES == 1:
                t, v = _numbers(ids, i + step, T, BLOCK_T)
