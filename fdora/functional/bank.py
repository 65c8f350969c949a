"""What functions of banks share: the parameters of G adapters of one layer, each with one more axis in front."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fdora._check import (
    Weight,
    check_device,
    check_dtype,
    check_operands,
    check_rank,
    check_s,
    check_shapes,
    check_whole,
    fail,
    is_sharded,
)
from fdora._dispatch import Backend
from fdora.autograd.multi import bank_norm, experts_norm
from fdora.autograd.sharded import root_of_sum
from fdora.functional.backend import select_backend
from fdora.quant import QuantWeight

# Kernels of banks and of experts have one program, or some, for each adapter on the second axis of a grid (multi_sum_kernel,
# multi_finish_kernel, multi_root_kernel, strip_root_kernel, experts_norm_kernel) or the third (multi_grad_kernel); CUDA starts
# 65,535 there. Tokens of nobody, segment G, have programs on flat grids only. The table of routes, adapter * 32768 + slab in
# int32, has room for one adapter more.
MOST_ADAPTERS = 65_535
# A slab has 14 of those bits and is 64 numbers of the rank or more (choice.FUSED): that is room for 1,048,576. What ends before
# it is the second axis of multi_shrink_kernel, by 16 numbers.
MOST_RANK = 65_535 * 16
MOST_OF_EACH = 32_767  # beside ``ranks``, which reach the device in 15 bits each (multi_ranks_kernel)


def check_bank(fn: str, tensors: dict[str, Any]) -> int:
    """W, A, B and perhaps more of one bank; how many adapters it has."""
    axes = {"W": "N K", "A": "G r K", "B": "G N r", "m": "G N", "norm": "G N", "bias": "N", "x": "... K"}
    check_whole(fn, tensors)
    sizes = check_shapes(fn, {arg: axes[arg] for arg in tensors}, tensors)
    check_rank(fn, sizes["r"])
    if sizes["G"] < 1:
        have = tuple(tensors["A"].shape)
        raise fail(fn, "A", "a bank of at least one adapter", have, "A layer without is torch.nn.functional.linear.")
    check_operands(fn, tensors)
    return sizes["G"]


def check_sequence(fn: str, ranks: Sequence[int] | None) -> tuple[int, ...] | None:
    if ranks is not None and not isinstance(ranks, Sequence):
        raise fail(fn, "ranks", "a sequence of ints", f"a {type(ranks).__name__}", "One for each adapter, at most the r of A.")
    return None if ranks is None else tuple(ranks)


def check_ranks(fn: str, ranks: Sequence[int] | None, adapters: int, r: int) -> tuple[int, ...] | None:
    if ranks is None:
        return None
    each = tuple(ranks)
    if len(each) != adapters or not all([isinstance(n, int) and 1 <= n <= r for n in each]):
        raise fail(fn, "ranks", f"{adapters} of 1 to {r}", list(each), "One for each adapter, at most the r of A.")
    return each


def check_kernels(fn: str, A: Tensor, name: str, ranks: tuple[int, ...] | None = None, arg: str = "A") -> None:
    """What the kernels of banks and of experts cannot count; ``name``: of the backend. Plain torch has no such ends."""
    if name != "triton":
        return
    G, r = A.shape[:2]
    if G > MOST_ADAPTERS:
        want = f"of at most {MOST_ADAPTERS} adapters for kernels"
        raise fail(fn, arg, want, G, "Split them into several calls, or pass backend='eager'.")
    most, beside = (MOST_RANK, "") if ranks is None else (MOST_OF_EACH, " beside `ranks`")
    if r > most:
        raise fail(fn, arg, f"of a rank of at most {most}{beside} for kernels", r, "Pass backend='eager'.")


def scalings(fn: str, s: Any, adapters: int, like: Tensor | Weight) -> Tensor:
    """(G,) in the dtype of sums. Numbers reach a GPU by fills, which do not wait for it."""
    dtype = torch.promote_types(like.dtype, torch.float32)
    if isinstance(s, Tensor):
        if tuple(s.shape) != (adapters,):
            raise fail(fn, "s", f"({adapters},), one for each adapter", tuple(s.shape), "Pass the alpha / r of each.")
        check_dtype(fn, "s", s, (torch.float32, torch.float64))
        check_device(fn, "W", {"W": like, "s": s})
        if s.requires_grad:
            raise fail(fn, "s", "without a gradient", "requires_grad=True", "Pass s.detach().")
        return s.to(dtype)
    if not isinstance(s, (list, tuple)) or len(s) != adapters:
        have = f"{len(s)}" if isinstance(s, (list, tuple)) else f"a {type(s).__name__}"
        raise fail(fn, "s", f"{adapters} numbers, one for each adapter", have, "Pass the alpha / r of each.")
    for each in s:
        check_s(fn, each)
    return torch.stack([torch.full((), each, dtype=dtype, device=like.device) for each in s])


def check_stack(fn: str, W: QuantWeight, sizes: dict[str, int]) -> None:
    """Experts of codes, one behind the other."""
    E, N, K = (sizes[axis] for axis in "ENK")
    if tuple(W.shape) != (E * N, K):
        remedy = "Flatten the first two axes of the stack before its constructor in fdora.quant, or call dora_linear for each."
        raise fail(fn, "W", f"a QuantWeight of {(E * N, K)}, {E} experts of {N} rows", tuple(W.shape), remedy)


def is_stack(W: object, B: Tensor, s: Any) -> bool:
    """Whether W is the experts of a mixture, dense or of codes. Experts share one s, a bank has one for each adapter."""
    if isinstance(W, QuantWeight):
        one = isinstance(s, (int, float, torch.SymFloat))
        return one and isinstance(B, Tensor) and B.dim() == 3 and W.shape[0] == B.shape[0] * B.shape[1]
    return isinstance(W, Tensor) and W.dim() == 3


def norm_of_experts(
    W: Tensor | QuantWeight, A: Tensor, B: Tensor, s: Any, refused: dict[str, bool], backend: Backend
) -> Tensor:
    """:func:`dora_norm` of a stack of experts, W (E, N, K)."""
    fn = "dora_norm"
    _refuse(fn, refused, "a stack of experts", "Ask for the norm of one expert at a time.")
    tensors = {"W": W, "A": A, "B": B}
    check_whole(fn, tensors)
    if isinstance(W, QuantWeight):
        sizes = check_shapes(fn, {"A": "E r K", "B": "E N r"}, tensors)
        check_stack(fn, W, sizes)
    else:
        sizes = check_shapes(fn, {"W": "E N K", "A": "E r K", "B": "E N r"}, tensors)
    check_rank(fn, sizes["r"])
    check_operands(fn, tensors)
    check_s(fn, s)
    like = A if isinstance(W, QuantWeight) else W
    name = select_backend(like, backend=backend).name
    if not isinstance(W, QuantWeight):  # of codes each expert has launches of its own
        check_kernels(fn, A, name)
    return experts_norm(W, A, B, s, scaling_of(s, sizes["E"], like), name)


def scaling_of(s: float, experts: int, like: Tensor) -> Tensor:
    """(E,) in the dtype of sums: one for all."""
    return torch.full((experts,), s, dtype=torch.promote_types(like.dtype, torch.float32), device=like.device)


def _refuse(fn: str, refused: dict[str, bool], what: str, remedy: str) -> None:
    for arg, given in refused.items():
        if given:
            raise fail(fn, arg, f"left out for {what}", "a value", remedy)


def norm_of_bank(
    W: Tensor | QuantWeight,
    A: Tensor,
    B: Tensor,
    s: Tensor | Sequence[float],
    refused: dict[str, bool],
    group: Any,
    backend: Backend,
) -> Tensor:
    """:func:`dora_norm` of a bank. ``refused``: arguments that have no meaning there, and whether they are given."""
    fn = "dora_norm"
    _refuse(fn, refused, "a bank of adapters", "Ask for the norm of one adapter at a time.")
    if is_sharded(W, A, B):
        from fdora.functional import _sharded_layers

        c: Tensor = _sharded_layers.norm_of_bank(fn, W, A, B, s, group, backend)
        return c
    adapters = check_bank(fn, {"W": W, "A": A, "B": B})
    name = select_backend(W, backend=backend).name
    check_kernels(fn, A, name)
    c = bank_norm(W, A, B, scalings(fn, s, adapters, W), None, name)
    return c if group is None else root_of_sum(c.square(), (group,))
