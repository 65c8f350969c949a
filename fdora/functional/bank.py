"""What functions of banks share: the parameters of G adapters of one layer, each with one more axis in front."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fdora._check import BANK, EXPERTS, Weight, check_device, check_dtype, check_s, check_weights, check_whole, fail
from fdora._records import acc_dtype
from fdora.autograd.multi import bank_norm
from fdora.autograd.norm import root_of_sum
from fdora.functional.backend import select_backend
from fdora.quant import QuantWeight

# Kernels of banks and of experts have one program, or some, for each adapter on the second axis of a grid (multi_sum_kernel,
# multi_finish_kernel, sum_kernel, strip_root_kernel, norm_kernel) or the third (multi_grad_kernel); CUDA starts
# 65,535 there. Tokens of nobody, segment G, have programs on flat grids only. The table of routes, adapter * 32768 + slab in
# int32, has room for one adapter more.
MOST_ADAPTERS = 65_535
# A slab has 14 of those bits and is 64 numbers of the rank or more (choice.FUSED): that is room for 1,048,576. What ends before
# it is the second axis of multi_shrink_kernel, by 16 numbers.
MOST_RANK = 65_535 * 16
MOST_OF_EACH = 32_767  # beside ``ranks``, which reach the device in 15 bits each (multi_ranks_kernel)
Ranks = tuple[int, ...] | None


def check_bank(fn: str, tensors: dict[str, Any]) -> int:
    """W, A, B and perhaps more of one bank; how many adapters it has."""
    check_whole(fn, tensors)
    adapters = check_weights(fn, tensors, 1.0, axes=BANK)["G"]  # each has an s of its own
    if adapters < 1:
        have = tuple(tensors["A"].shape)
        raise fail(fn, "A", "a bank of at least one adapter", have, "A layer without adapters is torch.nn.functional.linear.")
    return adapters


def check_one(fn: str, offsets: Any, ids: Any, which: str) -> None:
    """``which``: what one of them says of each token."""
    if (offsets is None) == (ids is None):
        have = "neither" if ids is None else "both"
        raise fail(fn, "offsets", "given, or ids, not both", have, f"One of them says which {which} each token has.")


def check_sequence(fn: str, ranks: Sequence[int] | None) -> Ranks:
    if ranks is not None and not isinstance(ranks, Sequence):
        raise fail(fn, "ranks", "a sequence of ints", f"a {type(ranks).__name__}", "One for each adapter, at most the r of A.")
    return None if ranks is None else tuple(ranks)


def check_ranks(fn: str, ranks: Sequence[int] | None, adapters: int, r: int) -> Ranks:
    if ranks is None:
        return None
    each = tuple(ranks)
    if len(each) != adapters or not all([isinstance(n, int) and 1 <= n <= r for n in each]):
        raise fail(fn, "ranks", f"{adapters} of 1 to {r}", list(each), "One for each adapter, at most the r of A.")
    return each


def check_kernels(fn: str, A: Tensor, name: str, ranks: Ranks = None, arg: str = "A") -> None:
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
    dtype = acc_dtype(like.dtype)
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


def check_stacks(fn: str, tensors: dict[str, Any], s: float, *texts: str) -> dict[str, int]:
    """W, A, B and perhaps more of the experts of a mixture, and their sizes; ``texts``: as of check_shapes."""
    W = tensors["W"]
    check_whole(fn, tensors)
    coded = isinstance(W, QuantWeight)
    sizes = check_weights(fn, tensors, s, axes=EXPERTS | {"W": ""} if coded else EXPERTS, texts=texts)
    E, N, K = (sizes[axis] for axis in "ENK")
    if coded and tuple(W.shape) != (E * N, K):  # one behind the other
        remedy = "Flatten the first two axes of the stack before its constructor in fdora.quant, or call dora_linear for each."
        raise fail(fn, "W", f"a QuantWeight of {(E * N, K)}, {E} experts of {N} rows", tuple(W.shape), remedy)
    return sizes


def is_stack(W: object, B: Tensor, s: Any) -> bool:
    """Whether W is the experts of a mixture, dense or of codes. Experts share one s, a bank has one for each adapter."""
    if isinstance(W, QuantWeight):
        one = isinstance(s, (int, float, torch.SymFloat))
        return one and isinstance(B, Tensor) and B.dim() == 3 and W.shape[0] == B.shape[0] * B.shape[1]
    return isinstance(W, Tensor) and W.dim() == 3


def scaling_of(s: float, experts: int, like: Tensor) -> Tensor:
    """(E,) in the dtype of sums: one for all."""
    return torch.full((experts,), s, dtype=acc_dtype(like.dtype), device=like.device)


def norm_over(
    fn: str, weights: tuple[Any, Tensor, Tensor], s: Any, ranks: Ranks, groups: Sequence[Any], backend: Any
) -> Tensor:
    """c of a bank W, A, B, whose columns may be spread over groups."""
    W, A, B = weights
    adapters = check_bank(fn, {"W": W, "A": A, "B": B})
    name = select_backend(W, backend=backend).name
    check_kernels(fn, A, name, ranks)
    c = bank_norm(W, A, B, scalings(fn, s, adapters, W), ranks, name)
    return root_of_sum(c.square(), groups) if groups else c
