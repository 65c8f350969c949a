"""The door for DTensors of the functions of the weight alone; W may lie as FSDP keeps it, for rows need no other rows.

A and B are brought to where W lies: of FSDP's storage A is gathered (4 r K bytes), B lies there already. Of W nothing is sent.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.tensor import distribute_tensor

from fdora._check import fail
from fdora.autograd.norm import base_sqnorm, row_norm, row_sqnorm
from fdora.autograd.sharded import sharded_guarded_norm, sharded_norm
from fdora.functional._layout import Layout, layer_layout, local, mesh_of, part, placements, summed, sums_over, whole
from fdora.functional.backend import select_backend
from fdora.functional.norm import check_norm
from fdora.functional.norm_state import NormState, ShardNormState, dora_norm_state


def norm(
    fn: str,
    W: Any,
    A: Any,
    B: Any,
    s: Any,
    norm_axis: int,
    base: Any,
    detach: bool,
    max_bytes: int | None,
    state: Any,
    squared: bool,
    group: Any,
    backend: Any,
) -> Any:
    if group is not None:
        raise fail(fn, "group", "None for DTensors", f"a {type(group).__name__}", "They know what they are cut over.")
    if norm_axis == 0:
        W, A, B = W.T, B.T, A.T
    lay = layer_layout(fn, mesh_of(fn, {"W": W, "A": A, "B": B, "base_sqnorm": base}), W)
    w, a, b = part(W), local(fn, lay, "A", A, True), local(fn, lay, "B", B, True)
    base = None if base is None else local(fn, lay, "c", base)
    seen = state if state is None else NormState(getattr(state, "part", part(state.c)), state.fingerprint)
    w, a, b = check_norm(fn, w, a, b, s, 1 if norm_axis == 0 else norm_axis, base, detach, max_bytes, seen, squared, None)
    over, choice = sums_over(lay), select_backend(w, backend=backend).name
    pending = placements(lay, "c", 1)
    lies = summed(pending)
    if squared:
        return whole(row_sqnorm(w, a, b, base, s, max_bytes, choice), lay.mesh, pending, W.shape[:1])
    if seen is not None:
        c, now, mine = sharded_guarded_norm(w, a, b, base, s, max_bytes, *seen, over, choice)
        return ShardNormState(whole(c, lay.mesh, lies, W.shape[:1]), now, mine)
    if over:
        c = sharded_norm(w, a, b, base, s, max_bytes, detach, over, False, choice)
    else:
        c = row_norm(w, a, b, base, s, max_bytes, detach, choice)
    return whole(c, lay.mesh, lies, W.shape[:1])


def norm_state(W: Any) -> ShardNormState:
    c, fingerprint = dora_norm_state(part(W))[:2]
    lay = layer_layout("dora_norm_state", W.device_mesh, W)
    return ShardNormState(whole(c, lay.mesh, summed(placements(lay, "c", 1)), W.shape[:1]), fingerprint, c)


def base(fn: str, W: Any, max_bytes: int | None, backend: Any) -> Any:
    lay, w = layer_layout(fn, W.device_mesh, W), part(W)
    found = base_sqnorm(w, max_bytes, select_backend(w, backend=backend).name)
    return whole(found, lay.mesh, placements(lay, "c", 1), W.shape[:1])


def init(fn: str, W: Any, A: Any, dtype: torch.dtype) -> tuple[Any, Any, Any]:
    """``A``: the whole one, of which that of the mesh's first process is taken everywhere."""
    lay: Layout = layer_layout(fn, W.device_mesh, W)
    w = part(W.detach())
    a = distribute_tensor(A, lay.mesh, placements(lay, "A", 2))
    zeros = torch.zeros((w.shape[0], A.shape[0]), dtype=A.dtype, device=w.device)
    b = whole(zeros, lay.mesh, placements(lay, "B", 2), (W.shape[0], A.shape[0]))
    m = norm(fn, W.detach(), a, b, 1.0, 1, None, True, None, None, False, None, "auto")
    return a.to(dtype), b.to(dtype), m
