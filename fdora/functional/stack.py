"""The parameters of many adapters of one layer as one bank, and back."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn.functional import pad

from fdora._check import check_device, check_dtype, check_shapes, fail
from fdora.functional.bank import check_ranks
from fdora.functional.params import DoraParams


def dora_stack(params: Sequence[DoraParams]) -> DoraParams:
    """One bank from the adapters of one layer: ``A_bank[g, :r_g] = A_g``, and so for B and m, for :func:`dora_linear_multi`.

    Smaller ranks are filled up with zeros, which changes no number: ``dora_unstack(bank, ranks)`` gives the same bits back.

    Args:
      params: G tuples (A (r_g, K), B (N, r_g), m (N,)), in one dtype each of A, B and m; ranks may differ. m may be None in
        all of them: plain LoRA.

    Returns:
      ``DoraParams(A (G, r, K), B (G, N, r), m (G, N))`` with r the largest rank. Differentiable: gradients reach each adapter.

    Raises:
      FdoraError: there is no adapter, one is no (A, B, m), shapes, dtypes or devices disagree, or m is None in some.

    Memory: a copy of all of them; keeps nothing for backward.
    References: none; it is bookkeeping of this library.
    """
    fn = "dora_stack"
    if len(params) == 0:
        raise fail(fn, "params", "at least one adapter", "none", "A layer without is torch.nn.functional.linear.")
    for i, each in enumerate(params):
        if not isinstance(each, (tuple, list)) or len(each) != 3:
            remedy = "The layer without an adapter needs no row: its ids are -1, its tokens behind the last end."
            raise fail(fn, f"params[{i}]", "a DoraParams (A, B, m)", f"a {type(each).__name__}", remedy)
    lacking = [i for i, each in enumerate(params) if each[2] is None]
    if 0 < len(lacking) < len(params):
        remedy = "Plain LoRA beside DoRA is m = torch.ones(N), and a row of ones in norm."
        raise fail(fn, f"params[{lacking[0]}].m", "a Tensor, as in others", "None", remedy)
    tensors, axes = {}, {}
    for i, each in enumerate(params):
        for part, t, its in zip("ABm", each, (f"r{i} K", f"N r{i}", "N"), strict=True):
            if part != "m" or not lacking:
                tensors[f"params[{i}].{part}"], axes[f"params[{i}].{part}"] = t, its
    check_shapes(fn, axes, tensors)
    check_device(fn, "params[0].A", tensors)
    for arg, t in tensors.items():
        check_dtype(fn, arg, t, (tensors[f"params[0].{arg[-1]}"].dtype,), "A bank has one dtype: cast it.")
    r = max(each[0].shape[0] for each in params)
    A = torch.stack([pad(A, (0, 0, 0, r - A.shape[0])) for A, _, _ in params])
    B = torch.stack([pad(B, (0, r - B.shape[1])) for _, B, _ in params])
    m: Any = None if lacking else torch.stack([m for _, _, m in params])
    return DoraParams(A, B, m)


def dora_unstack(bank: DoraParams, ranks: Sequence[int] | None = None) -> list[DoraParams]:
    """The adapters of a bank, the inverse of :func:`dora_stack`: ``A_g = A_bank[g, :ranks[g]]``, and so for B and m.

    Args:
      bank: ``(A (G, r, K), B (G, N, r), m (G, N))``; m may be None.
      ranks: each adapter's own rank; None is r for all.

    Returns:
      G :class:`DoraParams`, views of the bank.

    Raises:
      FdoraError: shapes disagree, or there is not one rank for each adapter, from 1 to r.

    Memory: views; keeps nothing for backward.
    References: none; it is bookkeeping of this library.
    """
    fn = "dora_unstack"
    A, B, m = bank
    given = {"A": A, "B": B} | ({} if m is None else {"m": m})
    sizes = check_shapes(fn, {arg: {"A": "G r K", "B": "G N r", "m": "G N"}[arg] for arg in given}, given)
    each = check_ranks(fn, ranks, sizes["G"], sizes["r"]) or (sizes["r"],) * sizes["G"]
    rows: Any = [None] * sizes["G"] if m is None else m.unbind()
    return [DoraParams(a[:r], b[:, :r], row) for a, b, row, r in zip(A.unbind(), B.unbind(), rows, each, strict=True)]
