"""Parameters of one adapter, and their start; those of many adapters of one layer as one bank, and back."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor
from torch.nn.functional import pad

from fdora._check import FLOATS, check_device, check_dtype, check_rank, check_shapes, fail, is_sharded, name
from fdora.functional.bank import check_ranks
from fdora.functional.norm import dora_norm
from fdora.quant import QuantWeight


class DoraParams(NamedTuple):
    """The trained tensors of one adapter, in the order :func:`dora_linear` takes them: ``dora_linear(x, W, *params, s=s)``.

    A NamedTuple is a pytree for optree, torch and jax with nothing to register.
    """

    A: Tensor
    """(r, K) down-projection."""
    B: Tensor
    """(N, r) up-projection."""
    m: Tensor
    """(N,) magnitude."""


def dora_init(
    W: Tensor | QuantWeight, r: int, *, dtype: torch.dtype | None = None, generator: Generator | None = None
) -> DoraParams:
    """Start of an adapter that changes nothing: ``B = 0``, ``A`` Kaiming-uniform, ``m = ||W||``, so that ``g = 1``.

    m is computed by the code that computes c, so at the start m / c is exactly 1 and y is exactly ``x @ W.T``. Of a DTensor the
    three lie as W does, and A is the one that the mesh's first process draws.

    Args:
      W: (N, K) weight, float16, bfloat16, float32 or float64; it may still require grad. Or a
        :class:`fdora.quant.QuantWeight`: m is then the norm of what it decodes to.
      r: rank, at least 1.
      dtype: of A and B; None is float32 (float64 for a float64 W). Float32 adapters on a half-precision W train well.
      generator: for A; None uses torch's. The draw is PEFT's: ``kaiming_uniform_(A, a=sqrt(5))`` in float32.

    Returns:
      ``DoraParams(A (r, K), B (N, r), m (N,))`` on the device of W, not requiring grad. m is float32 (or float64)
      whatever ``dtype`` says: in bf16 it would be off by up to 0.35 % and the start would not be a no-op.

    Raises:
      FdoraError: W is not a floating matrix, r < 1, or dtype is no floating one.

    Memory: keeps nothing for backward.
    References: Liu et al., DoRA, 2024, arXiv:2402.09353, section 4.1; PEFT 0.21, ``LoraLayer.reset_lora_parameters``.
    """
    fn = "dora_init"
    sharded = is_sharded(W)
    N, K = W.shape if sharded and len(W.shape) == 2 else check_shapes(fn, {"W": "N K"}, {"W": W}).values()
    check_dtype(fn, "W", W, FLOATS, "Dequantise it first.")
    check_rank(fn, r)
    wide = torch.promote_types(W.dtype, torch.float32)
    dtype = wide if dtype is None else dtype
    if dtype not in FLOATS:
        have = name(dtype) if isinstance(dtype, torch.dtype) else f"a {type(dtype).__name__}"
        raise fail(
            fn, "dtype", "None or a torch.dtype of " + ", ".join(map(name, FLOATS)), have, "The default, None, trains well."
        )
    A = torch.empty((r, K), dtype=wide, device=W.device)
    torch.nn.init.kaiming_uniform_(A, a=math.sqrt(5), generator=generator)
    if sharded:
        from fdora.functional import _sharded

        return DoraParams(*_sharded.init(fn, W, A, dtype))
    B = torch.zeros((N, r), dtype=wide, device=W.device)
    m = dora_norm(W.detach(), A, B, s=1.0)
    return DoraParams(A=A.to(dtype), B=B.to(dtype), m=m)


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
        raise fail(fn, "params", "at least one adapter", "none", "A layer without adapters is torch.nn.functional.linear.")
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
