"""What ``explain`` says of calls with many adapters or many weights; each checks the arguments as the function does."""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import Tensor

from fdora._check import fail
from fdora._records import Bank
from fdora.autograd.multi import COUNTED
from fdora.autograd.quant import norm_parts
from fdora.functional._explanation import Call, Parts, kept_of, stand_in
from fdora.functional._tree import check_leaves, parts_of
from fdora.functional.bank import check_bank, check_kernels, scalings
from fdora.functional.linear import check_dropout, dtype_of_products, save_for_dm
from fdora.functional.multi import check_multi
from fdora.functional.tree import check_tree_state, leaves_of
from fdora.quant import QuantWeight

SORTED = f"Above {COUNTED} tokens torch sorts them by adapter: that has no plan."


def bare(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def multi(a: Any) -> Call:
    ranks = None if a.ranks is None else tuple(a.ranks)
    check_multi(a.fn, a.x, a.W, a.A, a.B, a.m, a.offsets, a.ids, a.norm, a.bias, ranks)
    check_dropout(a.fn, a.dropout_p, "lora")
    dtype, (G, _, K) = dtype_of_products(a.fn, a.x, a.W), a.A.shape
    scalings(a.fn, a.s, G, a.x)
    x = stand_in(a.x).to(dtype)
    x = (x if x.dim() == 2 else x.reshape(-1, K)).detach().requires_grad_(a.x.requires_grad)
    tokens = prod(a.x.shape[:-1])

    def plans(triton: Any, on: Any) -> Parts:
        check_kernels(a.fn, a.A, "triton", ranks if ranks and min(ranks) < a.A.shape[1] else None)
        W, A, B, m, c, bias = map(stand_in, (a.W, a.A, a.B, a.m, a.norm, a.bias))
        first: list[Any] = []
        kept: dict[str, Tensor] = {}
        notes: tuple[str, ...] = ()
        if m is not None and c is None:
            first += bank_norms(triton, on, W, A, B, ranks)
            c = kept["c"] = bare(G, B.shape[1])
        if not isinstance(a.s, Tensor):
            kept["s"] = bare(G)
        if a.ids is None:
            offsets, order = stand_in(a.offsets), None
        else:
            offsets, order = kept["offsets"], kept["order"] = bare(G, dtype=torch.int32), bare(tokens, dtype=torch.int64)
            notes = () if tokens <= COUNTED else (SORTED,)
            first += [triton.route(on, stand_in(a.ids.reshape(-1)), G)] if tokens <= COUNTED else []
        decoded = []
        if isinstance(W, QuantWeight):
            decoded = [triton.Decoding(W.kind, W.nbytes, *W.shape, dtype)]
            W = bare(*W.shape, dtype=dtype)
        seed = bare(G, dtype=torch.int64) if a.dropout_p else None
        if seed is not None and seed_is_new(a.seed):
            kept["seed"] = seed
        W = W if W.dtype == dtype else bare(*W.shape, dtype=dtype)
        bank = Bank(W, A, B, m, c, bias, bare(G), offsets, order, seed, ranks, float(a.dropout_p))
        saves = save_for_dm(m, c, False) != "nothing"
        (forward, *backward), new = triton.multi(on, x, bank, saves)
        held = [kept_of(n, t) for n, t in {**new, **kept}.items()] if backward else []
        return Parts([*first, *decoded, forward], [*decoded, *backward] if backward else [], held, notes)

    return a.x.device, a.x.dtype, plans


def seed_is_new(seed: Any) -> bool:
    """Not a tensor of the caller with one for each adapter."""
    return not (isinstance(seed, Tensor) and seed.dim() == 1)


def norm_of_bank(a: Any) -> Call:
    check_bank(a.fn, {"W": a.W, "A": a.A, "B": a.B})
    scalings(a.fn, a.s, a.A.shape[0], a.W)

    def plans(triton: Any, on: Any) -> Parts:
        check_kernels(a.fn, a.A, "triton")
        return Parts(bank_norms(triton, on, stand_in(a.W), stand_in(a.A), stand_in(a.B), None))

    return a.W.device, a.W.dtype, plans


def bank_norms(triton: Any, on: Any, W: Any, A: Tensor, B: Tensor, ranks: tuple[int, ...] | None) -> list[Any]:
    """One plan; of codes one for each run of rows that plain torch decodes."""
    if not isinstance(W, QuantWeight):
        return [triton.bank_norm(on, W, A, B, ranks, None)]
    plans: list[Any] = [triton.Decoding(W.kind, W.nbytes, *W.shape, torch.float32)]
    for i, j, budget in norm_parts(W, None):
        plans.append(triton.bank_norm(on, bare(j - i, W.shape[1]), A, B[:, i:j], ranks, budget))
    return plans


def norm_tree(a: Any) -> Call:
    spec, W, A, B, scales = leaves_of(a.fn, a.weights, a.params, a.s)
    if not W:
        raise fail(a.fn, "weights", "a nesting with a weight in it", "none", "There is nothing to compute.")
    check_leaves(a.fn, spec, W, A, B, scales)
    if a.state is not None:
        check_tree_state(a.fn, parts_of(W), a.state)
    coded = sum(isinstance(w, QuantWeight) for w in W)

    def plans(triton: Any, on: Any) -> Parts:
        made = []
        for part in parts_of(W):
            w, down, up = (list(map(stand_in, part.of(each))) for each in (W, A, B))
            if not part.coded:
                made.append(triton.norm_tree(on, w, down, up, a.state is not None))
            elif a.state is None:
                made += [triton.norm(on, *each, None, False) for each in zip(w, down, up, strict=True)]
        notes = ("With a state the kernels find out which norms changed: of those figures as much is done at most.",)
        left = (f"{coded} quantised weights are compared and decoded one by one: not shown.",) if coded and a.state else ()
        return Parts(made, (), (), (*(notes if a.state is not None else ()), *left))

    tensors = [w for w in W if not isinstance(w, QuantWeight)] or W
    return tensors[0].device, tensors[0].dtype, plans
