"""Sums of the rows that share a number, always in the same order, as one op.

An op, because what a compiler would make of torch's own formula adds with atomics: another order in every run.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fdora._torch import library_of, needs_dispatcher


def segment_sum(values: Tensor, ids: Tensor, count: int) -> Tensor:
    """(T, r) and (T,) numbers in [0, count) -> (count, r): row v is the sum of the values whose number is v."""
    run: Any = torch.ops.fdora.segment_sum.default if needs_dispatcher(values) else _segment_sum
    return run(values, ids, count)


def sums_by_number(values: Tensor, ids: Tensor, skip: int | None) -> tuple[Tensor, Tensor]:
    """The numbers that occur, but for ``skip``, ascending (n,), and their sums (n, r). The host waits to hear how many."""
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


def _fake(values: Tensor, ids: Tensor, count: int) -> Tensor:
    return values.new_empty((count, values.shape[1]))


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
torch.library.register_fake("fdora::segment_sum", _fake, lib=_library)
torch.library.register_vmap("fdora::segment_sum", _mapped, lib=_library)
