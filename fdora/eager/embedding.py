"""The rows of an adapted table: ``y_t = g (W_v + s A_v B^T)`` with v the number of token t and A_v = A[:, v].

W is (V, d), A (r, V), B (d, r). g = m / c has one value for each column, c_k = ||(W + s (B A)^T)_k|| along V, or one for each
row of the table, c_v = ||W_v + s A_v B^T||, which is known as soon as the row is.

Backward, with dz = g dy and u_t = W_v + s A_v B^T, which is made again: a gather and a thin product, nothing of it is kept.
    dA_v = s sum dz_t B over the tokens of v        dB = s sum_t dz_t A_v^T
    columns: dm_k = sum_t (dy u)_tk / c_k           rows: dm_v = sum <dy_t, u_t> / c_v over the tokens of v
and dc = -dm g (0 where c is at its floor). The tokens of the padding row count in none of the sums.
Sums over the tokens of a row are always in the same order: :func:`segment_sum`. Nothing here has the size of W, and with
``sparse`` nothing that of A: dA then is a coalesced COO tensor (r, V), whose entries are the columns that were read, and dm of
rows one (V,).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fdora._records import Lookup, Needs, eps
from fdora._torch import library_of, needs_dispatcher
from fdora.eager._matmul import acc_dtype, cast, matmul, times_g
from fdora.eager.linear import own, scaled
from fdora.eager.norm import scale

TINY = 1e-7  # torch's embedding_renorm_ divides by the norm plus this


def embedding_fwd(ids: Tensor, W: Tensor, A: Tensor, B: Tensor, m: Tensor, c: Tensor | None, how: Lookup) -> Tensor:
    """ids (...) -> y (..., d) in the dtype of W. c of None: of each row that is read."""
    flat = ids.reshape(-1)
    u = _rows(flat, W, A, B, how)
    y = cast(u * _scale(flat, u, m, c, how)[0], W.dtype)
    return y if ids.dim() == 1 else own(y, (*ids.shape, W.shape[1]))


def embedding_bwd(
    dy: Tensor, ids: Tensor, W: Tensor, A: Tensor, B: Tensor, m: Tensor, c: Tensor | None, how: Lookup, needs: Needs
) -> tuple[Tensor | None, ...]:
    """dA, dB, dm, dc; each only when needed."""
    t, acc, flat, V = W.dtype, acc_dtype(W.dtype), ids.reshape(-1), W.shape[0]
    wide = dy.reshape(flat.shape[0], W.shape[1]).to(acc)
    if how.padding_idx is not None:
        wide = torch.where((flat == how.padding_idx)[:, None], 0, wide)
    u = _rows(flat, W, A, B, how) if needs.m or needs.c or (how.per_row and c is None) else None
    g, floored = _scale(flat, u, m, c, how)
    dz = times_g(wide, g, t)
    dA = dB = dm = dc = None
    if needs.A:
        dA = _by_row(matmul(dz, scaled(B, how.s, t)), flat, V, how, A.dtype)
    if needs.B:
        dB = cast(how.s * matmul(dz.T, _columns(flat, A).to(t)), B.dtype)
    if needs.m or needs.c:
        assert u is not None
        each = wide * u
        of_rows = each.sum(1) / floored[:, 0] if how.per_row else None
        dm = each.sum(0) / floored if of_rows is None else _by_row(of_rows, flat, V, how, acc)
        if needs.c:
            assert c is not None
            total = segment_sum(of_rows[:, None], flat, V)[:, 0] if of_rows is not None and how.sparse else dm
            dc = torch.where(c > eps(), -total * scale(m, c), 0)
        dm = (dm.to(m.dtype).coalesce() if dm.is_sparse else cast(dm, m.dtype)) if needs.m else None
    return dA, dB, dm, dc


def _by_row(each: Tensor, flat: Tensor, V: int, how: Lookup, dtype: torch.dtype) -> Tensor:
    """Of values (T, r) for each token: (r, V), the sums over the tokens of each row of the table; of (T,) (V,)."""
    shape, columns = (*each.shape[1:], V), each if each.dim() == 2 else each[:, None]
    if not how.sparse:
        return cast(segment_sum(columns, flat, V).T, dtype).reshape(shape)
    rows, sums = sums_by_number(columns, flat, how.padding_idx)
    r, n = columns.shape[1], rows.shape[0]
    at = torch.stack([torch.arange(r, device=rows.device).repeat_interleave(n), rows.repeat(r)])[-len(shape) :]
    return torch.sparse_coo_tensor(at, cast(sums.T, dtype).reshape(-1), shape, is_coalesced=True, check_invariants=False)


def _rows(flat: Tensor, W: Tensor, A: Tensor, B: Tensor, how: Lookup) -> Tensor:
    """u (T, d) in acc_dtype."""
    t, base = W.dtype, F.embedding(flat, W).to(acc_dtype(W.dtype))
    if how.max_norm is not None:
        size = torch.linalg.vector_norm(base, dim=1, keepdim=True)
        base = base * torch.where(size > how.max_norm, how.max_norm / (size + TINY), 1)
    return base + matmul(_columns(flat, A).to(t), scaled(B, how.s, t).T)


def _columns(flat: Tensor, A: Tensor) -> Tensor:
    """(T, r)."""
    return F.embedding(flat, A.T)


def _scale(flat: Tensor, u: Tensor | None, m: Tensor, c: Tensor | None, how: Lookup) -> tuple[Tensor, Tensor]:
    """g and max(c, eps), to be broadcast against (T, d)."""
    if not how.per_row:
        assert c is not None
        return scale(m, c), c.clamp_min(eps())
    if c is None:
        assert u is not None
        size = torch.linalg.vector_norm(u, dim=1, keepdim=True)
    else:
        size = F.embedding(flat, c[:, None])
    return scale(F.embedding(flat, m[:, None]), size), size.clamp_min(eps())


def segment_sum(values: Tensor, ids: Tensor, count: int) -> Tensor:
    """(T, r) and (T,) numbers in [0, count) -> (count, r): row v is the sum of the values whose number is v.

    An op, because what a compiler would make of torch's own formula adds with atomics: another order in every run.
    """
    run: Any = torch.ops.fdora.segment_sum.default if needs_dispatcher(values) else _segment_sum
    return run(values, ids, count)


def sums_by_number(values: Tensor, ids: Tensor, skip: int | None) -> tuple[Tensor, Tensor]:
    """The numbers that occur, but for ``skip``, ascending (n,), and their sums (n, r). The host waits to hear how many."""
    if ids.is_meta:  # explain's tensors have no numbers: as if all tokens differed
        return ids, values
    if skip is not None:
        kept = ids != skip
        values, ids = values[kept], ids[kept]
    rows, place = torch.unique(ids, return_inverse=True)
    return rows, segment_sum(values, place, rows.shape[0])


def _segment_sum(values: Tensor, ids: Tensor, count: int) -> Tensor:
    """On a CPU each thread owns some of the numbers, and takes their rows in order."""
    if values.device.type == "cpu":
        return torch.ops.aten.embedding_dense_backward(values, ids, count, -1, False)
    return _by_sorting(values, ids, count)


def _by_sorting(values: Tensor, ids: Tensor, count: int) -> Tensor:
    """Where threads race: rows of one number side by side, then sums along them in doubling steps.

    torch's own gradient of an embedding gave other bits in another run on an H200 (torch 2.11), and so does index_add.
    """
    key, order = torch.sort(ids, stable=True)
    sums, step = values[order], 1
    while step < key.shape[0]:
        same = (key[step:] == key[:-step])[:, None]
        sums = torch.cat([sums[:step], sums[step:] + torch.where(same, sums[:-step], 0)])
        step *= 2
    last = torch.cat([key[1:] != key[:-1], key.new_ones(min(1, key.shape[0]), dtype=torch.bool)])
    out = values.new_zeros((count + 1, values.shape[1]))  # what is no whole sum goes to a row of its own
    out[torch.where(last, key, count)] = sums
    return out[:count]


def _mapped(info: Any, in_dims: tuple, values: Tensor, ids: Tensor, count: int) -> tuple[Tensor, int]:
    """All elements of the batch at once, each with numbers of its own."""
    n = info.batch_size
    values = values.expand(n, *values.shape) if in_dims[0] is None else values.movedim(in_dims[0], 0)
    ids = ids.expand(n, *ids.shape) if in_dims[1] is None else ids.movedim(in_dims[1], 0)
    own = ids + count * torch.arange(n, device=ids.device)[:, None]
    return segment_sum(values.flatten(0, 1), own.flatten(), n * count).unflatten(0, (n, count)), 0


_library = library_of("segment_sum")
_library.define("segment_sum(Tensor values, Tensor ids, SymInt count) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
_library.impl("segment_sum", _segment_sum, "CompositeExplicitAutograd")
torch.library.register_fake("fdora::segment_sum", lambda t, _, count: t.new_empty((count, t.shape[1])), lib=_library)
torch.library.register_vmap("fdora::segment_sum", _mapped, lib=_library)
