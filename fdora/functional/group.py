"""Several layers in one call: those that read the same input, and a gated MLP."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

from torch import Tensor

from fdora._check import FLOATS, check_device, check_dtype, check_frozen, check_left_out, check_shapes, check_tensor, fail, once
from fdora._dispatch import Backend
from fdora._records import Dropout, Operands, Options
from fdora.autograd import node
from fdora.autograd._ops import autocast_on
from fdora.autograd.node import ACTS
from fdora.functional._seed import check_origin, drawn, placed, seed_tensor
from fdora.functional.backend import select_backend
from fdora.functional.layer import DoraLayer, labelled
from fdora.functional.linear import (
    cast_x,
    check_computes,
    check_dropout,
    check_layer,
    dropout_of,
    dtype_of_products,
    norm_for,
    on_gpu,
    save_for_dm,
)


def dora_linear_group(
    x: Tensor,
    layers: Sequence[DoraLayer],
    *,
    dropout_p: float = 0.0,
    dropout_mode: Literal["lora", "peft"] = "lora",
    seed: Sequence[int | Tensor] | None = None,
    mask_origin: tuple[int, int] | None = None,
    keep_inner: bool = False,
    detach: bool = True,
    compute: Literal["fp8", "mxfp8", "nvfp4"] | None = None,
    grad_compute: Literal["fp8", "mxfp8"] | None = None,
    backend: Backend = "auto",
) -> tuple[Tensor, ...]:
    """DoRA layers on the same x (q, k and v; gate and up): ``y_i = g_i * (x @ W_i.T + s_i * (x @ A_i.T) @ B_i.T) + bias_i``.

    Equivalent to one :func:`dora_linear` for each layer, as one node of the graph: all ``x @ A_i.T`` are one product, x is
    kept once, and each layer adds its part of dx in place to that of the layer before. N, r, s, bias, norm and dtypes of the
    adapters may differ from layer to layer; some may have no adapter. DTensors must lie alike in all layers.

        q, k, v = dora_linear_group(x, [DoraLayer(W, *p, s=2.0) for W, p in zip(Ws, params)])

    Args:
      x: (..., K), as for :func:`dora_linear`.
      layers: at least one :class:`DoraLayer`, every W with the same K.
      dropout_p: probability in [0, 1) that an element of x is dropped, in each adapted layer with a mask of its own.
      dropout_mode: "lora" or "peft", as for :func:`dora_linear`.
      seed: one int or int64 tensor without axes for each layer; each alone decides the mask of its layer. None draws them.
      mask_origin: as for :func:`dora_linear`, for every layer.
      keep_inner: as for :func:`dora_linear`, for every layer.
      detach: as for :func:`dora_linear`, for every layer.
      compute: as for :func:`dora_linear`, for every layer with an adapter; x is rounded once for all whose scales are alike.
      grad_compute: as for :func:`dora_linear`, for every layer with an adapter.
      backend: "auto", "eager" or "triton"; :func:`select_backend` tells what "auto" picks.

    Returns:
      One (..., N_i) for each layer, dtype and device of x. Gradients as for :func:`dora_linear`; an output that nobody uses
      costs nothing in backward.

    Raises:
      FdoraError: as for :func:`dora_linear`, with the number of the layer; an adapter is incomplete; no layer or not one seed
        for each.
      NotImplementedError: a second derivative is asked for.

    Memory: keeps x, all x @ A_i.T in one (M, sum of r) tensor and, for each m, y_i or one more (M, N_i) tensor, by the rules of
    :func:`dora_linear`. dx is rounded once for each layer. Derivation: ``fdora/eager/linear.py``.
    References: Liu et al., DoRA, 2024, arXiv:2402.09353, eq. 5 and section 4.3.
    """
    fn = "dora_linear_group"
    sharded, of = check_group(fn, x, layers), labelled(fn, layers)
    check_dropout(fn, dropout_p, dropout_mode)
    if sharded:
        from fdora.functional import _sharded

        check_left_out(fn, {"detach": not detach})
        options: dict[str, Any] = {"dropout_mode": dropout_mode, "keep_inner": keep_inner, "backend": backend}
        options |= {"compute": compute, "grad_compute": grad_compute}
        return _sharded.group(dora_linear_group, fn, x, of, dropout_p, seed, mask_origin, **options)
    origins, drop = [check_origin(fn, mask_origin)] * len(layers), dropout_of(dropout_p, dropout_mode)
    return tuple(run(fn, x, of, seed, origins, keep_inner, drop, backend, detach, (compute, grad_compute)))


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
    t0, f0 = check_origin(fn, mask_origin, "(t0, f0)") or (0, 0)
    origins, drop = [None if mask_origin is None else (t0, k0) for k0 in (0, 0, f0)], dropout_of(dropout_p, dropout_mode)
    return run(fn, x, layers, seed, origins, keep_inner, drop, backend, detach, (compute, grad_compute), act=act)[0]


def check_group(fn: str, x: Tensor, layers: Sequence[DoraLayer]) -> bool:
    """Whether there are DTensors among them."""
    if not isinstance(layers, Sequence):
        raise fail(fn, "layers", "a sequence of DoraLayers", f"a {type(layers).__name__}", "Write list(layers).")
    if not layers:
        raise fail(fn, "layers", "at least one DoraLayer", "none", "Pass the layers that read x.")
    return check_members(fn, x, labelled(fn, layers))


def check_members(fn: str, x: Tensor, layers: dict[str, DoraLayer], other_x: Callable[[], dict[str, Tensor]] = dict) -> bool:
    """Every layer beside the x it reads. ``other_x`` checks what they have to do with each other, and may know another x.

    Returns whether there are DTensors among them, whose parts are checked in their turn.
    """
    check_tensor(fn, "x", x)
    for label, layer in layers.items():
        if not isinstance(layer, DoraLayer):
            raise fail(label, "layer", "a DoraLayer", f"a {type(layer).__name__}", "Write DoraLayer(W, A, B, m, s=s).")

    def check() -> None:
        xs = other_x()
        for label, layer in layers.items():
            check_member(label, xs.get(label, x), layer)

    tensors = tuple(t for W, A, B, m, _, bias, norm in layers.values() for t in (W, A, B, m, bias, norm))
    allowed = f"{fn} under autocast" if autocast_on(x) else fn  # which takes layers of several dtypes
    sharded = once(allowed, (x, *tensors), [layer.s for layer in layers.values() if layer.A is not None], check)
    for label, layer in layers.items():
        if layer.W.requires_grad and not sharded:
            check_frozen(label, "W", layer.W)
    return sharded


def check_member(fn: str, x: Tensor, layer: DoraLayer) -> None:
    W, A, B, m, _, bias, norm = layer
    if not (A is None or B is None or m is None):
        check_layer(fn, x, layer)
    elif not (A is B is m is norm is None):
        arg = "A" if A is None else "B" if B is None else "m"
        raise fail(
            fn,
            arg,
            "a Tensor, as other parts of the adapter are given",
            "None",
            "Give A, B, m and s, or none of them and no norm.",
        )
    else:
        tensors = {"W": W, "bias": bias, "x": x}
        check_shapes(fn, {"W": "N K", "bias": "N", "x": "... K"}, tensors)
        check_device(fn, "W", tensors)
        for arg, t in tensors.items():
            check_dtype(fn, arg, t, FLOATS)
        check_frozen(fn, "W", W)
    dtype_of_products(fn, x, W)  # may raise


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


def run(
    fn: str,
    x: Tensor,
    layers: dict[str, DoraLayer],
    seed: Sequence[int | Tensor] | None,
    origins: Sequence[tuple[int, int] | None],
    keep_inner: bool,
    drop: Dropout,
    backend: Backend,
    detach: bool = True,
    computes: tuple[Any, Any] = (None, None),
    **call: Any,
) -> Sequence[Tensor]:
    """One node of layers that passed the checks, by the names that errors have. ``seed``: one for each, whose mask begins at
    its origin. ``computes``: of forward and of gradients. ``call``: fields of a node's Call; with its ``seen`` the forward asks
    for the norms; with ``act`` keep_inner is for the last layer."""
    weights = {label: layer.W for label, layer in layers.items()}
    first, count = next(iter(weights)), len(layers)
    x = cast_x(fn, x, weights[first])
    name = select_backend(x, backend=backend).name
    seeds: list[Tensor | None] = [None] * count
    if drop.p:
        if seed is not None and (not isinstance(seed, (list, tuple)) or len(seed) != count):
            have = f"{len(seed)}" if isinstance(seed, (list, tuple)) else f"a {type(seed).__name__}"
            remedy = "Layers that share a mask share a seed."
            raise fail(fn, "seed", f"a list of {count} seeds, one for each layer", have, remedy)
        found = drawn(count, x.device) if seed is None else [seed_tensor(fn, s, x.device) for s in seed]
        seeds = [placed(s, origin) for s, origin in zip(found, origins, strict=True)]
    if computes != (None, None):
        check_computes(computes, x, weights, drop.mode)
    operands, options, (fp8, fp8_grad) = [], [], on_gpu(first, computes, x, name)
    for (label, layer), mask_seed in zip(layers.items(), seeds, strict=True):
        W, A, B, m, s, bias, _ = layer
        if A is None or s is None:
            operands.append(Operands(W, None, None, None, None, bias, None))
            options.append(Options(1.0, "nothing"))
            continue
        c = None if call.get("seen") else norm_for(label, x, layer, name, detach, formed=not fp8)
        inner = keep_inner and (call.get("act") is None or len(operands) == len(layers) - 1)
        operands.append(Operands(W, A, B, m, c, bias, mask_seed))
        options.append(Options(s, save_for_dm(m, c, inner)))
    return node.layers(x, operands, node.Call(tuple(options), drop, name, fp8=fp8, fp8_grad=fp8_grad, **call))
