"""The functions of one weight for all weights of a model, in any nesting of dicts, lists, tuples and NamedTuples."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import optree
import torch
from torch import Generator, Tensor

from fdora._check import Weight, check_weight, fail, is_sharded, name
from fdora._dispatch import Backend
from fdora._records import Norms
from fdora._torch import dispatch_modes, is_traced
from fdora.autograd._ops import autocast_off
from fdora.functional._tree import ALIGN, Leaf, Leaves, no_words, parts_of, plan, tree_of
from fdora.functional.merge import dora_merge
from fdora.functional.norm import dora_norm
from fdora.functional.params import dora_init
from fdora.quant import QuantWeight

PLAIN = {Tensor, torch.nn.Parameter}


class NormTreeState(NamedTuple):
    """Norms and what they were computed from: the value that ``dora_norm_tree(state=)`` takes and returns."""

    c: Any
    """The structure of weights, (N,) at each leaf; views of buffers."""
    buffers: tuple[Tensor, ...]
    """All c of one device and dtype behind each other, those of other codes than 8-bit ones apart."""
    fingerprint: tuple[Tensor, ...]
    """(weights, 16) int64 for each buffer, (weights, 256) of these codes."""


def dora_norm_tree_state(weights: Any) -> NormTreeState:
    """The state to start with: it matches nothing, so that the first ``dora_norm_tree(..., state=state)`` computes.

    Args:
      weights: as for :func:`dora_norm_tree`. Their values are not read; the state belongs to them alone.

    Returns:
      ``NormTreeState(c, buffers, fingerprint)``; c is all zeros.

    Raises:
      FdoraError: a leaf is not a floating matrix; the message names its path.

    Memory: N numbers and 128 bytes for each weight, 2 KB for one of other codes than 8-bit ones; keeps nothing for backward.
    References: none; it is bookkeeping of this library.
    """
    fn = "dora_norm_tree_state"
    W, spec = _weights_of(fn, weights)
    W = [w.to_local() if is_sharded(w) else w for w in W]
    for i, w in enumerate(W):
        with Leaf(spec, i):
            check_weight(fn, w)
    parts = parts_of(W)
    buffers = tuple(torch.zeros(part.size, device=part.device, dtype=part.dtype) for part in parts)
    return NormTreeState(tree_of(spec, parts, buffers), buffers, tuple(map(no_words, parts)))


def dora_norm_tree(
    weights: Any,
    params: Any,
    *,
    s: Any,
    state: NormTreeState | None = None,
    gather: bool | str = False,
    backend: Backend = "auto",
) -> Any:
    """Row norms of all adapted weights of a model: ``c = ||W + s * B @ A||`` at each leaf, as :func:`dora_norm` has it.

    On a GPU all weights of one device take three launches together, however many they are and whatever their shapes, ranks
    and dtypes; float32 A or B take one more, as 8-bit codes do, and other quantised weights a few each. Where nothing changed
    since ``state``, the bits of A and B are read, and no weight.

        state = dora_norm_tree_state(weights)
        state = dora_norm_tree(weights, params, s=s, state=state)  # in every forward
        y = dora_linear(x, weights["q"], *params["q"], s=s, norm=state.c["q"])

    Args:
      weights: any nesting of dicts, lists, tuples and NamedTuples with (N, K) weights at its leaves.
      params: the same nesting with :class:`DoraParams` in the place of each weight, or any tuple that begins with A and B.
      s: LoRA scaling: a number, or the same nesting of numbers. Not differentiated.
      state: None, or what the call before returned for these weights; :func:`dora_norm_tree_state` starts. It means what it
        means in :func:`dora_norm`: the bits of A, B and s decide, on the device, and nothing waits or is mutated. The weights
        are not looked at: others, or changed ones, need a new state. A captured CUDA graph must copy buffers and
        fingerprint of the result over those of the state; make one call before the capture.
      gather: of DTensors, which may lie as FSDP keeps them. False gives c as a DTensor that lies like the rows of W; True
        whole, as a plain tensor in every process; the name of a mesh dimension, such as "dp", as a forward has it where FSDP
        gathered over that dimension. No weight is sent: one all-gather of all A, one all-reduce of squares where rows are cut,
        and with ``gather`` one all-gather of all c. For a call outside of forward, once per step.
      backend: "auto", "eager" or "triton"; :func:`select_backend` tells what "auto" picks for each weight.

    Returns:
      The nesting of weights with c (N,) float32 (float64 for a float64 W) at its leaves, detached.
      With a state: ``NormTreeState(c, buffers, fingerprint)``, c the same bit for bit.

    Raises:
      FdoraError: as :func:`dora_norm`, with the path of the leaf; the structures disagree; the state is of other weights; or
        gather names no dimension that can be gathered alone.

    Memory: c, and for each 1024 columns one number per row while it runs; keeps nothing for backward. In compiled code, under
    torch.func and for tensor subclasses it is a loop of :func:`dora_norm`, which computes whatever the state says.
    References: Liu et al., DoRA, 2024, arXiv:2402.09353, eq. 5 and section 4.3.
    """
    fn = "dora_norm_tree"
    spec, W, A, B, _ = leaves = leaves_of(fn, weights, params, s)
    plain = set(map(type, W)) <= {*PLAIN, QuantWeight} and set(map(type, (*A, *B))) <= PLAIN
    # A mode sees each norm as an op, with its flops; but what a state keeps is of one launch, or of one by one.
    if not plain or is_traced() or (state is None and dispatch_modes()):
        if is_sharded(*W, *A, *B) and not is_traced():
            from fdora.functional._sharded_tree import norms, plan_of

            rows = plan_of(fn, leaves, backend) if gather is True else None
            if rows is not None:
                if state is not None:
                    check_tree_state(fn, [rows.part], state)
                each, buffer, now = rows.norms(W, A, B, state)
                c = optree.tree_unflatten(spec, each)
                return c if state is None else NormTreeState(c, (buffer,), (now,))
            return norms(dora_norm_tree, fn, leaves, state, gather, backend)
        return _one_by_one(fn, leaves, state, gather, backend)
    parts = plan(fn, leaves, backend)
    if state is not None:
        check_tree_state(fn, parts, state)
    buffers, words = [], []
    with torch.no_grad():
        for i, part in enumerate(parts):
            w, a, b = (part.of(each) for each in (W, A, B))
            make = torch.empty if part.full else torch.zeros  # nothing undefined between the leaves
            buffers.append(make(part.size, device=part.device, dtype=part.dtype))
            with autocast_off(buffers[i]):
                if state is None:
                    part.layers.norms(w, a, b, buffers[i])
                else:
                    words.append(torch.empty_like(state.fingerprint[i]))
                    old = Norms(state.buffers[i].contiguous(), state.fingerprint[i].contiguous())
                    part.layers.guarded(w, a, b, old, Norms(buffers[i], words[i]))
        c = tree_of(spec, parts, buffers)
    return c if state is None else NormTreeState(c, tuple(buffers), tuple(words))


def leaves_of(fn: str, weights: Any, params: Any, s: Any) -> Leaves:
    W, spec = _weights_of(fn, weights)
    pairs = _up_to(fn, "params", spec, params)
    try:
        A, B = [p[0] for p in pairs], [p[1] for p in pairs]
    except (TypeError, IndexError, KeyError):
        i = next(i for i, p in enumerate(pairs) if not isinstance(p, (tuple, list)) or len(p) < 2)
        with Leaf(spec, i):
            have = f"a {type(pairs[i]).__name__}"
            raise fail(fn, "params", "DoraParams or (A, B)", have, "Make it with dora_init_tree.") from None
    return Leaves(spec, W, A, B, _for_each(fn, "s", spec, s, NUMBER))


def dora_init_tree(weights: Any, r: Any, *, dtype: torch.dtype | None = None, generator: Generator | None = None) -> Any:
    """Start of an adapter for each weight that changes nothing: ``B = 0``, ``m = ||W||``; :func:`dora_init` for each leaf.

    Args:
      weights: any nesting with (N, K) weights at its leaves.
      r: rank, or the same nesting of ranks.
      dtype: of A and B; None is float32 (float64 for a float64 W).
      generator: for A, drawn leaf by leaf in optree's order; None uses torch's.

    Returns:
      The same nesting with ``DoraParams(A, B, m)`` at its leaves.

    Raises:
      FdoraError: as :func:`dora_init`, with the path of the leaf; or the structures disagree.

    Memory: keeps nothing for backward.
    References: Liu et al., DoRA, 2024, arXiv:2402.09353, section 4.1.
    """
    fn = "dora_init_tree"
    W, spec = _weights_of(fn, weights)
    ranks = _for_each(fn, "r", spec, r, (int, Tensor))
    return _each(fn, spec, lambda i: dora_init(W[i], ranks[i], dtype=dtype, generator=generator))


@torch.no_grad()
def dora_merge_tree(weights: Any, params: Any, *, s: Any, norm: Any = None, backend: Backend = "auto") -> Any:
    """Weights that do what the adapted layers do: ``W' = g * (W + s * B @ A)``; :func:`dora_merge` for each leaf.

    Args:
      weights: any nesting with (N, K) weights at its leaves.
      params: the same nesting with :class:`DoraParams`, or tuples (A, B, m).
      s: LoRA scaling: a number, or the same nesting of numbers.
      norm: from :func:`dora_norm_tree`; None computes it.
      backend: "auto", "eager" or "triton".

    Returns:
      The same nesting of (N, K), dtype and device of each W; new tensors, detached.

    Raises:
      FdoraError: as :func:`dora_merge`, with the path of the leaf; or the structures disagree.

    Memory: the results and one block of rows; keeps nothing for backward.
    References: Liu et al., DoRA, 2024, arXiv:2402.09353, eq. 5.
    """
    fn = "dora_merge_tree"
    W, spec = _weights_of(fn, weights)
    each = _up_to(fn, "params", spec, params)
    scales = _for_each(fn, "s", spec, s, NUMBER)
    for i, p in enumerate(each):
        if not isinstance(p, tuple) or len(p) != 3:
            with Leaf(spec, i):
                have = f"a {type(p).__name__} of {len(p)}" if isinstance(p, tuple) else f"a {type(p).__name__}"
                raise fail(fn, "params", "DoraParams(A, B, m)", have, "Make it with dora_init_tree.")
    c = dora_norm_tree(weights, params, s=s, backend=backend) if norm is None else norm
    norms = _up_to(fn, "norm", spec, c)
    return _each(fn, spec, lambda i: dora_merge(W[i], *each[i], s=scales[i], norm=norms[i], backend=backend))


def _one_by_one(fn: str, leaves: Leaves, state: Any, gather: bool | str, backend: Backend) -> Any:
    spec, W, A, B, scales = leaves
    c = _each(fn, spec, lambda i: dora_norm(W[i], A[i], B[i], s=scales[i], backend=backend))
    if is_sharded(*W, *A, *B) and (gather or state is not None):
        remedy = "Call it outside of what is compiled."
        raise fail(fn, "gather" if gather else "state", "left out for DTensors in compiled code", "one", remedy)
    if state is None:
        return c
    parts, norms = parts_of(W), optree.tree_leaves(c)
    check_tree_state(fn, parts, state)
    buffers = tuple(torch.cat([torch.nn.functional.pad(v, (0, -len(v) % ALIGN)) for v in part.of(norms)]) for part in parts)
    return NormTreeState(c, buffers, tuple(map(no_words, parts)))


def _each(fn: str, spec: Any, one: Callable[[int], Any]) -> Any:
    results = []
    for i in range(spec.num_leaves):
        with Leaf(spec, i, fn):
            results.append(one(i))
    return optree.tree_unflatten(spec, results)


def is_weight(node: Any) -> bool:
    return isinstance(node, Weight)


def _weights_of(fn: str, weights: Any) -> tuple[list, Any]:
    if weights is None:  # to optree a nesting of nothing
        raise fail(fn, "weights", "a nesting with (N, K) weights at its leaves", "None", "Pass, for example, a dict of them.")
    return optree.tree_flatten(weights, is_leaf=is_weight)


NUMBER = (int, float, torch.SymFloat, Tensor)  # check_s says why a tensor is none


def _for_each(fn: str, arg: str, spec: Any, value: Any, kinds: tuple[type, ...]) -> list:
    """One value for all leaves, or one for each."""
    return [value] * spec.num_leaves if isinstance(value, kinds) else _up_to(fn, arg, spec, value)


def _up_to(fn: str, arg: str, spec: Any, tree: Any) -> list:
    try:
        return spec.flatten_up_to(tree)
    except ValueError as error:
        raise fail(fn, arg, "of the structure of weights", "another one", f"{str(error).rstrip('.')}.") from None


def check_tree_state(fn: str, parts: list, state: NormTreeState) -> None:
    start = "Start with dora_norm_tree_state(weights)."
    if not isinstance(state, NormTreeState):
        raise fail(fn, "state", "a NormTreeState", f"a {type(state).__name__}", start)
    have = [(tuple(t.shape), t.dtype, t.device) for t in (*state.buffers, *state.fingerprint)]
    want: list[tuple[tuple[int, ...], torch.dtype, torch.device]]
    want = [((part.size,), part.dtype, part.device) for part in parts]
    want += [((len(part.places), part.words), torch.int64, part.device) for part in parts]
    if have != want:
        first = next((pair for pair in zip(want, have, strict=False) if pair[0] != pair[1]), (len(want), len(have)))
        raise fail(fn, "state", f"of these weights ({_looks(first[0])})", _looks(first[1]), start)


def _looks(t: Any) -> str:
    return f"{tuple(t[0])} {name(t[1])} on {t[2]}" if isinstance(t, tuple) else f"{t} tensors"
