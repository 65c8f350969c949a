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
from fdora.functional.norm import NormHow, check_norm
from fdora.functional.norm_state import NormState, ShardNormState, dora_norm_state


def norm(fn: str, W: Any, A: Any, B: Any, s: Any, how: NormHow, backend: Any) -> Any:
    if how.group is not None:
        raise fail(fn, "group", "None for DTensors", f"a {type(how.group).__name__}", "They know what they are cut over.")
    if how.norm_axis == 0:
        W, A, B, how = W.T, B.T, A.T, how._replace(norm_axis=1)
    base, seen = how.base_sqnorm, how.state
    lay = layer_layout(fn, mesh_of(fn, {"W": W, "A": A, "B": B, "base_sqnorm": base}), W)
    w, a, b = part(W), local(fn, lay, "A", A, True), local(fn, lay, "B", B, True)
    base = None if base is None else local(fn, lay, "c", base)
    seen = None if seen is None else NormState(getattr(seen, "part", part(seen.c)), seen.fingerprint)
    of = check_norm(fn, w, a, b, s, how._replace(base_sqnorm=base, state=seen))
    over, choice = sums_over(lay), select_backend(w, backend=backend).name
    pending = placements(lay, "c", 1)
    lies = summed(pending)
    if how.squared:
        return whole(row_sqnorm(of, choice), lay.mesh, pending, W.shape[:1])
    if seen is not None:
        c, now, mine = sharded_guarded_norm(of, *seen, over, choice)
        return ShardNormState(whole(c, lay.mesh, lies, W.shape[:1]), now, mine)
    c = sharded_norm(of, over, choice, how.detach) if over else row_norm(of, choice, how.detach)
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
    m = norm(fn, W.detach(), a, b, 1.0, NormHow(), "auto")
    return a.to(dtype), b.to(dtype), m
