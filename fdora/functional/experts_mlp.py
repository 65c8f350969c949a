"""The MLP of each expert of a mixture in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from fdora._check import check_tensor, check_whole, fail
from fdora._dispatch import Backend
from fdora._torch import no_graph
from fdora.autograd.act import gated
from fdora.autograd.experts import ACTS, Call, experts_mlp, spread
from fdora.functional.backend import select_backend
from fdora.functional.bank import check_kernels
from fdora.functional.experts import (
    check_codes,
    check_experts,
    check_route,
    count_of,
    ends_on,
    joined,
    route_of,
    scaled,
    sorted_rows,
)
from fdora.functional.layer import DoraLayer, tensors_of
from fdora.functional.linear import cast_x, save_for_dm
from fdora.quant import QuantWeight


def dora_experts_mlp(
    x: Tensor,
    gate_up: DoraLayer,
    down: DoraLayer,
    *,
    act: Literal["silu", "gelu", "gelu_tanh", "gpt_oss"] = "silu",
    offsets: Tensor | Sequence[int] | None = None,
    ids: Tensor | None = None,
    gates: Tensor | None = None,
    compute: Literal["fp8"] | None = None,
    grad_compute: Literal["fp8"] | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """The gated MLP of each expert: ``y[t] = down[e](f(gate) * up)`` with ``gate, up = gate_up[e](x[t])``, e: its expert.

    Each layer as in :func:`dora_experts`. The weights of gate and up are one, as models keep them; so are their adapters. With
    kernels one node of the graph: f(gate) * up, and the sorted copy of x, are formed again in backward.

        experts = model.model.layers[0].mlp.experts  # Mixtral, Qwen3-MoE, DeepSeek-V3 of transformers
        y = dora_experts_mlp(x, DoraLayer(experts.gate_up_proj, *first, s=s), DoraLayer(experts.down_proj, *second, s=s),
                             ids=top_k, gates=weights)

    Args:
      x: (T, K), as for :func:`dora_experts`.
      gate_up: :class:`DoraLayer` with W (E, 2 F, K), or a :class:`fdora.quant.QuantWeight` of (E 2 F, K), A (E, r, K),
        B (E, 2 F, r), m (E, 2 F), bias (E, 2 F) or None and norm (E, 2 F) or None; its s is required. Rows of gate come first,
        or, for "gpt_oss", rows of gate and up in turns.
      down: the same with W (E, N, F).
      act: "silu", "gelu" (exact), "gelu_tanh", or "gpt_oss": ``(u + 1) * v * sigmoid(1.702 * v)`` with
        ``v = min(gate, 7)`` and ``u = clamp(up, -7, 7)``. gpt-oss keeps (E, K, 2 F) and (E, F, N): pass ``.mT`` of both.
      offsets: as for :func:`dora_experts`.
      ids: as for :func:`dora_experts`.
      gates: as for :func:`dora_experts`; they weigh y.
      compute: as for :func:`dora_experts`, of both layers.
      grad_compute: the same.
      backend: "auto", "eager" or "triton"; :func:`select_backend` tells what "auto" picks.

    Returns:
      (T, N), or (T, k, N) by ids without gates, as :func:`dora_experts`. Rows of no expert are zero.

    Raises:
      FdoraError: as for :func:`dora_experts`, with the name of the layer; a layer has no adapter or no s, sizes do not fit each
        other, or act is unknown.
      NotImplementedError: a second derivative is asked for.

    Memory: with kernels x as it came, the output of gate_up (T k, 2 F), each x @ A.T and, for the m of down or for gates, y of
    each row; a layer with a bias, and float32, also the value before g. Plain torch keeps the sorted rows and f(gate) * up too.
    Derivation: ``fdora/eager/experts.py``.
    References: Liu et al., DoRA, 2024, arXiv:2402.09353, eq. 5; Shazeer, GLU Variants, 2020, arXiv:2002.05202; OpenAI, gpt-oss
    model card, 2025, arXiv:2508.10925, for its activation.
    """
    fn = "dora_experts_mlp"
    check_layers(fn, x, gate_up, down, act)
    E = count_of(gate_up)
    check_route(fn, x, E, offsets, ids, gates)
    name = select_backend(x, backend=backend).name
    for arg, la in (("gate_up.A", gate_up), ("down.A", down)):
        check_kernels(fn, la.A, name, arg=arg)  # type: ignore[arg-type]  # checked
    to = None if ids is None else route_of(fn, ids, E, name)
    x = cast_x(fn, x, gate_up.W)
    asked = compute, grad_compute
    if any(asked):
        check_codes(fn, asked, x, {f"{fn}: gate_up": gate_up.W, f"{fn}: down": down.W}, E, name)
    if name == "triton":
        ends = ends_on(fn, offsets, x, E) if to is None else to.offsets
        (s1, first), (s2, second) = scaled(x, gate_up, name), scaled(x, down, name)
        kept = [save_for_dm(la.m, la.c, False) != "nothing" for la in (first, second)]
        saves = (False, False) if no_graph() else (kept[0], kept[1])
        y = experts_mlp(x, (first, second), (s1, s2), ends, to, Call(act, saves, name, *map(bool, asked)))
    else:
        rows, of_each = (x, offsets) if to is None else (spread(x, to, name), to.offsets)
        a = gated(sorted_rows(fn, rows, gate_up, of_each, name, asked), act)
        y = sorted_rows(fn, a, down, of_each, name, asked)
    return y if to is None else joined(y, ids, gates, to, name)


def check_layers(fn: str, x: Tensor, gate_up: DoraLayer, down: DoraLayer, act: str) -> None:
    check_tensor(fn, "x", x)
    if act not in ACTS:
        raise fail(fn, "act", f"one of {', '.join(ACTS)}", repr(act), "Other activations need dora_experts for each layer.")
    for label, la in (("gate_up", gate_up), ("down", down)):
        if la.A is None or la.B is None or la.m is None or la.s is None:
            remedy = "A layer without one: A and B of zeros, and m = dora_norm(W, A, B, s=s)."
            raise fail(fn, label, "with an adapter, m and s", "a layer without", remedy)
    first, second = _stack_of(gate_up), _stack_of(down)
    if len(first) == len(second) == 3 and first[:2] != (second[0], 2 * second[2]):
        have = f"{first} beside down.W {second}"
        raise fail(fn, "gate_up.W", "(E, 2 F, K) beside down.W (E, N, F)", have, "gate and up are one weight.")
    inner = torch.empty((0, second[-1] if second else 0), dtype=x.dtype, device=x.device)
    for label, t, la in (("gate_up", x, gate_up), ("down", inner, down)):
        if check_experts(f"{fn}: {label}", t, la):
            check_whole(f"{fn}: {label}", tensors_of(la, x=t))


def _stack_of(la: DoraLayer) -> tuple[int, ...]:
    """(E, N, K), or something else of what check_experts refuses."""
    shape = tuple(la.W.shape) if isinstance(la.W, (Tensor, QuantWeight)) else ()
    return (*la.m.shape, shape[-1]) if isinstance(la.W, QuantWeight) and isinstance(la.m, Tensor) else shape
