"""A gated MLP in one call."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from fdora._check import check_left_out, check_shapes, fail
from fdora._dispatch import Backend
from fdora.autograd.node import ACTS
from fdora.functional._seed import check_origin
from fdora.functional.backend import select_backend
from fdora.functional.group import check_members, run, seeds_for
from fdora.functional.layer import DoraLayer
from fdora.functional.linear import cast_x, check_dropout, dropout_of


def dora_mlp(
    x: Tensor,
    gate: DoraLayer,
    up: DoraLayer,
    down: DoraLayer,
    *,
    act: Literal["silu", "gelu", "gelu_tanh"] = "silu",
    dropout_p: float = 0.0,
    dropout_mode: Literal["lora", "peft"] = "lora",
    seed: Sequence[int | Tensor] | None = None,
    mask_origin: tuple[int, int] | None = None,
    keep_inner: bool = False,
    detach: bool = True,
    compute: Literal["fp8", "mxfp8", "nvfp4"] | None = None,
    grad_compute: Literal["fp8", "mxfp8"] | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """A gated MLP of DoRA layers: ``y = down(f(gate(x)) * up(x))``, each layer as in :func:`dora_linear`.

    SwiGLU for ``f(z) = z * sigmoid(z)``, GeGLU for ``f(z) = z * P(Z <= z)`` of the normal law or its tanh form. f and the
    product with up run in float32 (float64 for float64), rounded once. One node of the graph. DTensors: F is what tensor
    parallelism cuts, ``docs/distributed.md``.

        y = dora_mlp(x, *(DoraLayer(W[n], *params[n], s=2.0) for n in ("gate", "up", "down")))

    Args:
      x: (..., K), as for :func:`dora_linear`.
      gate: :class:`DoraLayer` with W (F, K); it may have no adapter, as the others may.
      up: :class:`DoraLayer` with W (F, K).
      down: :class:`DoraLayer` with W (N, F).
      act: "silu", "gelu" (exact) or "gelu_tanh".
      dropout_p: probability in [0, 1) that an element of a layer's input is dropped, each layer with a mask of its own.
      dropout_mode: "lora" or "peft", as for :func:`dora_linear`.
      seed: three ints or int64 tensors without axes, of gate, up and down. None draws them.
      mask_origin: None, or (t0, f0): x begins at token t0 of a larger input, and these rows of gate and up, these columns of
        down, at f0 of larger ones; the masks are those of the larger layers there.
      keep_inner: as for :func:`dora_linear`, for down.
      detach: as for :func:`dora_linear`, for all three.
      compute: as for :func:`dora_linear_group`; f(gate) * up is rounded for down.
      grad_compute: as for :func:`dora_linear_group`.
      backend: "auto", "eager" or "triton"; :func:`select_backend` tells what "auto" picks.

    Returns:
      (..., N), dtype and device of x. Gradients as for :func:`dora_linear`.

    Raises:
      FdoraError: as for :func:`dora_linear`, with the name of the layer; sizes do not fit each other, act is unknown, not three
        seeds.
      NotImplementedError: a second derivative is asked for.

    Memory: keeps x, one (M, F) tensor for each of gate and up (two under "peft" dropout), x @ A.T of each layer and, for the m
    of down, y itself or one more (M, N) tensor, by the rules of :func:`dora_linear`. f(gate) * up is formed again in backward.
    Derivation: ``fdora/eager/act.py`` and ``fdora/eager/linear.py``.
    References: Liu et al., DoRA, 2024, arXiv:2402.09353, eq. 5; Shazeer, GLU Variants, 2020, arXiv:2002.05202.
    """
    fn = "dora_mlp"
    layers = {f"{fn}: gate": gate, f"{fn}: up": up, f"{fn}: down": down}
    sharded = check_mlp(fn, x, layers, act)
    check_dropout(fn, dropout_p, dropout_mode)
    if sharded:
        from fdora.functional import _sharded

        check_left_out(fn, {"detach": not detach})
        options: dict[str, Any] = {"dropout_mode": dropout_mode, "keep_inner": keep_inner, "backend": backend}
        options |= {"act": act, "compute": compute, "grad_compute": grad_compute}
        return _sharded.mlp(dora_mlp, x, (gate, up, down), dropout_p, seed, mask_origin, **options)
    x, drop, computes = cast_x(fn, x, gate.W), dropout_of(dropout_p, dropout_mode), (compute, grad_compute)
    name = select_backend(x, backend=backend).name
    t0, f0 = check_origin(fn, mask_origin, "(t0, f0)") or (0, 0)
    origins = [None if mask_origin is None else (t0, k0) for k0 in (0, 0, f0)]
    seeds = seeds_for(fn, seed, origins, dropout_p, x)
    return run(x, layers, seeds, keep_inner, drop, name, detach, computes, act=act)[0]


def check_mlp(fn: str, x: Tensor, layers: dict[str, DoraLayer], act: str) -> bool:
    """gate, up and down beside each other, and each beside the x it reads. Returns whether there are DTensors among them."""

    def other_x() -> dict[str, Tensor]:
        tensors = {f"{label.removeprefix(f'{fn}: ')}.W": layer.W for label, layer in layers.items()}
        sizes = check_shapes(fn, {"gate.W": "F K", "up.W": "F K", "down.W": "N F"}, tensors)
        return {f"{fn}: down": x.new_empty((0, sizes["F"]))}

    sharded = check_members(fn, x, layers, other_x)
    if act not in ACTS:
        raise fail(fn, "act", f"one of {', '.join(ACTS)}", repr(act), "Other activations need dora_linear for each layer.")
    return sharded
