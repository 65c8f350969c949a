"""What a call would do: its backend, its plans, their cost. Nothing runs, and no value of a tensor is read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import signature
from math import prod
from types import SimpleNamespace
from typing import Any

import optree
import torch

from fdora._check import fail, is_sharded, name
from fdora._dispatch import BackendChoice, choose, forced
from fdora._records import Dropout
from fdora.autograd._ops import import_explain
from fdora.autograd.quant import norm_parts
from fdora.functional._ends import check_ends, check_gamma, folded, loses_inner
from fdora.functional._explain_layers import conv, embedding, experts, experts_mlp
from fdora.functional._explain_many import multi, norm_of_bank, norm_tree
from fdora.functional._explanation import Call, Parts, decoding, kept_of, stand_in, stored
from fdora.functional._explanation import Explanation as Explanation
from fdora.functional.backend import select_backend
from fdora.functional.compose import as_matrix, check_compose, dora_compose, dora_delta
from fdora.functional.conv import dora_conv1d, dora_conv2d, dora_conv3d
from fdora.functional.embedding import dora_embedding
from fdora.functional.experts import dora_experts
from fdora.functional.experts_mlp import dora_experts_mlp
from fdora.functional.group import DoraLayer, check_group, dora_linear_group, prepared
from fdora.functional.linear import check_compute, check_detach, check_dropout, check_layer, dora_linear, dtype_of_products
from fdora.functional.merge import check_merge, dora_merge, dora_unmerge
from fdora.functional.mlp import check_mlp, dora_mlp
from fdora.functional.multi import dora_linear_multi
from fdora.functional.norm import NormHow, check_norm, dora_norm
from fdora.functional.tree import dora_norm_tree
from fdora.predict import GPUS, Gpu, gpu_of
from fdora.quant import QuantWeight


def explain(fn: Callable, /, *args: Any, gpu: str | None = None, backward: bool = True, **kwargs: Any) -> Explanation:
    """What ``fn(*args, **kwargs)`` would do: ``print(explain(dora_linear, x, W, A, B, m, s=2.0, gpu="h200"))``.

    The backend and why; for each plan (norm, forward, backward) the way that was chosen and why, its kernels in order with
    their grids and constants, its cuBLAS products, flops, bytes, workspace; what stays until backward. The least time of a
    step is ``max(flops / rate, bytes / bandwidth)`` at the GPU's published rates. Made by the code that makes the plans of a
    real call from the same facts: shapes, strides, dtypes, alignment, and which arguments require grad. An incoming gradient
    is taken to lie like the output.

    Args:
      fn: dora_linear, dora_linear_group, dora_linear_multi, dora_mlp, dora_embedding, dora_conv1d, dora_conv2d, dora_conv3d,
        dora_experts, dora_experts_mlp, dora_norm, dora_norm_tree, dora_compose, dora_delta, dora_merge or dora_unmerge.
      args: as for ``fn``; tensors may be on any device, also "meta". Their values are not read.
      gpu: a key of ``fdora.predict.GPUS`` ("h200", "h100", "a100", "l40s", "b200", "4090"), or a GPU of this machine, such as
        "cuda". None: where the tensors are.
      backward: False leaves the plan of backward out.
      kwargs: as for ``fn``.

    Returns:
      :class:`Explanation`. The eager backend has no plan: it says so, and why it would run.

    Raises:
      FdoraError: whatever ``fn`` would raise for such arguments, but of a seed and of where a mask begins, which no plan looks
        at; another function; an unknown GPU.

    Memory: none on the device.
    References: none; it reads this library's own plans.
    """
    if fn not in CALLS:
        names = ", ".join(known.__name__ for known in CALLS)
        raise fail("explain", "fn", f"one of {names}", getattr(fn, "__name__", repr(fn)), "Ask about one of these.")
    bound = signature(fn).bind(*args, **kwargs)
    bound.apply_defaults()
    a = SimpleNamespace(fn=fn.__name__, **bound.arguments)
    given: Any = list(bound.arguments.values())
    if is_sharded(*optree.tree_leaves(given)):
        raise fail("explain", "args", "plain tensors", "a DTensor", "Ask for one process: pass .to_local() of each.")
    device, dtype, planner = CALLS[fn](a)
    triton, missing = import_explain()
    choice, rates, where = _target(device, dtype, gpu, a.backend, missing)
    weights = tuple([f"{label}: {W.kind}, {stored(W)}" for label, W in _coded(a).items()])
    if choice.name == "eager":
        note = "Plain torch runs: it has no plan." + (f" {decoding(a.fn, getattr(a, 'W', None))}" if weights else "")
        return Explanation(a.fn, *choice, rates, (), (), (note, *weights))
    on = triton.device(where) if where is not None else triton.device(None, rates.capability, rates.num_sms)  # type: ignore
    parts = planner(triton, on)
    plans = (*parts.forward, *(parts.backward if backward else ()))
    described = tuple(triton.describe(plan, rates) for plan in plans)
    return Explanation(a.fn, *choice, rates, described, tuple(parts.kept), (*parts.notes, *weights))


PLAIN_BACKWARD = "Backward through the norm is plain torch: it has no plan."


def _coded(a: Any) -> dict[str, QuantWeight]:
    """The quantised weights of a call, by name."""
    layers = {"W": a} | {f"layers[{i}].W": la for i, la in enumerate(getattr(a, "layers", ()))}
    layers |= {f"{part}.W": getattr(a, part) for part in ("gate", "up", "down") if hasattr(a, part)}
    found = {label: getattr(each, "W", None) for label, each in layers.items()}
    return {label: W for label, W in found.items() if isinstance(W, QuantWeight)}


def _target(
    device: torch.device, dtype: torch.dtype, gpu: str | None, backend: Any, missing: str
) -> tuple[BackendChoice, Gpu | None, torch.device | None]:
    """The backend there, the rates, and the device if it is one of this machine."""
    if gpu in GPUS:
        available = ("eager",) if missing else ("eager", "triton")
        choice = choose("cuda", dtype, backend, forced(), available, missing)
        if choice.name == "triton" and "asked for" not in choice.reason:
            choice = choice._replace(reason=f"{name(dtype)} on the {GPUS[gpu].name}")
        return choice, GPUS[gpu], None
    if gpu is not None and not str(gpu).startswith("cuda"):
        want = f"one of {', '.join(GPUS)}, or a GPU of this machine"
        raise fail("explain", "gpu", want, repr(gpu), "Take the nearest; the ratios say most.")
    if gpu is not None and not torch.cuda.is_available():
        raise fail("explain", "gpu", f"one of {', '.join(GPUS)} here", repr(gpu), "This machine has no GPU.")
    try:
        where = device if gpu is None else torch.device(gpu)
        rates = gpu_of(torch.cuda.get_device_name(where)) if where.type == "cuda" else None
    except (RuntimeError, AssertionError) as error:  # no such index; a name that torch does not read
        want, has = f"one of {', '.join(GPUS)}, or a GPU of this machine", torch.cuda.device_count()
        raise fail("explain", "gpu", want, repr(gpu), f"They are cuda:0 to cuda:{has - 1}.") from error
    return select_backend(where, dtype, backend=backend), rates, where


# each checks the arguments as the function does


def _linear(a: Any) -> Call:
    check_layer(a.fn, a.x, a.W, a.A, a.B, a.m, a.s, a.bias, a.norm)
    x = stand_in(a.x).to(dtype_of_products(a.fn, a.x, a.W))
    mode = a.dropout_mode if a.dropout_p else "lora"
    if a.compute is not None:
        check_compute(a.fn, a.compute, x, a.W, mode, "eager")
    if a.gamma is not None or a.residual is not None:
        check_ends(a.fn, x, a.W, a.gamma, a.residual, mode, a.compute)
    a.keep_inner = a.keep_inner or loses_inner(x.dtype, a.gamma, a.residual)
    m, bias = folded(x.dtype, *map(stand_in, (a.gamma, a.m, a.bias)))
    return _layers(a, [DoraLayer(a.W, a.A, a.B, m, a.s, bias, a.norm)])


def _group(a: Any) -> Call:
    check_group(a.fn, a.x, a.layers)
    return _layers(a, a.layers)


def _mlp(a: Any) -> Call:
    layers = {"gate": a.gate, "up": a.up, "down": a.down}
    check_mlp(a.fn, a.x, layers, a.act)
    return _layers(a, list(layers.values()))


def _layers(a: Any, layers: Sequence[DoraLayer]) -> Call:
    check_dropout(a.fn, a.dropout_p, a.dropout_mode)
    x = stand_in(a.x).to(dtype_of_products(a.fn, a.x, layers[0].W))
    mlp, fp8 = a.fn == "dora_mlp", getattr(a, "compute", None) is not None
    drop = Dropout(a.dropout_p, a.dropout_mode if a.dropout_p else "lora")

    def plans(triton: Any, on: Any) -> Parts:
        if fp8 and on.gpu >= 0 and on.capability < 89:
            raise fail(a.fn, "compute", "None on this GPU", "'fp8'", "Products of e4m3 want sm_89 or later of NVIDIA.")
        norms, decoded, ready, new = [], [], [], {}
        notes: tuple[str, ...] = ()
        after: list[Any] = []  # the gradients through the norms, that of the last one first
        for i, layer in enumerate(layers):
            la = DoraLayer._make(map(stand_in, layer))
            read = isinstance(la.W, QuantWeight) and triton.is_decoded(la.W.spec)
            inside = la.A is not None and la.norm is None and not fp8
            inside = inside and (read or (a.detach and _rides(triton, on, x, la)))
            if la.A is not None and la.norm is None:
                c = torch.empty(la.W.shape[0], dtype=torch.float32, device="meta")
                if not inside:
                    norms += _norms(triton, on, la.W, la.A, la.B, None, False)
                    new[f"c{i}"] = c
                la = la._replace(norm=c)
            if isinstance(la.W, QuantWeight) and not read:
                decoded.append(triton.Decoding(la.W.kind, la.W.nbytes, *la.W.shape, x.dtype))
                la = la._replace(W=torch.empty(la.W.shape, dtype=x.dtype, device="meta"))
            if la.norm is not None and not a.detach:
                check_detach(a.fn, layer.W)
                trained = any(t is not None and t.requires_grad for t in (layer.A, layer.B))
                c = la.norm.detach().requires_grad_(trained)
                la = la._replace(norm=c)
                if layer.norm is None:
                    new[f"c{i}"] = c
                if torch.is_grad_enabled() and trained:
                    joined = a.fn == "dora_linear" and a.residual is None
                    through = triton.norm_backward(on, la.W, la.A, la.B, joined)
                    after, notes = [*through, *after], notes if through else (PLAIN_BACKWARD,)
            seed = torch.empty(() if a.mask_origin is None else (3,), dtype=torch.int64, device="meta") if a.dropout_p else None
            operand, option = prepared(a.fn, x, la, seed, a.keep_inner and (not mlp or i == 2), True, "triton")
            ready.append((operand._replace(c=None) if inside else operand, option))
        operands, options = [la for la, _ in ready], [o for _, o in ready]
        if mlp:
            (forward, *backward), kept = triton.mlp(on, x, operands, options, drop, a.act)
        else:
            (forward, *backward), kept = triton.linear(
                on, x, operands, options, drop, fp8, stand_in(getattr(a, "residual", None))
            )
        kept = kept | new if backward else {}
        norms += decoded
        backward = [*decoded, *backward, *after] if backward else []
        single = len(layers) == 1
        return Parts([*norms, forward], backward, [kept_of(n.rstrip("0") if single else n, t) for n, t in kept.items()], notes)

    return a.x.device, x.dtype, plans


def _rides(triton: Any, on: Any, x: Any, la: DoraLayer) -> bool:
    """Whether the pass over a dense W forms its norm."""
    dense = not isinstance(la.W, QuantWeight)
    return dense and triton.fits(on, prod(x.shape[:-1]), x.dtype, la.W, la.A, la.B)


def _norms(triton: Any, on: Any, W: Any, A: Any, B: Any, max_bytes: int | None, squared: bool) -> list[Any]:
    """One plan; of codes that no kernel reads, or in little memory, one for each run of rows that plain torch decodes."""
    if not isinstance(W, QuantWeight) or (max_bytes is None and triton.is_decoded(W.spec)):
        return [triton.norm(on, W, A, B, max_bytes, squared)]
    plans: list[Any] = [triton.Decoding(W.kind, W.nbytes, *W.shape, torch.float32)]
    for i, j, budget in norm_parts(W, max_bytes):
        rows = torch.empty((j - i, W.shape[1]), dtype=torch.float32, device="meta")
        plans.append(triton.norm(on, rows, A, B[i:j], budget, squared))
    return plans


def _norm(a: Any) -> Call:
    if isinstance(a.A, torch.Tensor) and a.A.dim() == 3:
        return norm_of_bank(a)
    how = NormHow(a.norm_axis, a.base_sqnorm, a.detach, a.max_bytes, a.state, a.squared, a.group)
    W, A, B, *_ = check_norm(a.fn, a.W, a.A, a.B, a.s, how)

    def plans(triton: Any, on: Any) -> Parts:
        w, down, up = stand_in(W), stand_in(A), stand_in(B)
        coded = isinstance(w, QuantWeight)
        if a.state is not None and not (coded and (a.max_bytes is not None or not triton.is_decoded(w.spec))):
            return Parts([triton.guarded_norm(on, w, down, up, a.max_bytes, *map(stand_in, a.state))])
        forward = _norms(triton, on, w, down, up, a.max_bytes, a.squared)
        if a.state is not None:
            return Parts(forward, notes=("The fingerprint and the choice by it are plain torch; no plan saves any work.",))
        if a.detach or not torch.is_grad_enabled() or not (A.requires_grad or B.requires_grad):
            return Parts(forward)
        c = torch.empty(w.shape[0], dtype=torch.float32, device="meta")
        kept = {"W": w, "A": down, "B": up}
        known = [*(kept_of(n, t, "argument") for n, t in kept.items()), kept_of("c", c, "output")]
        backward = triton.norm_backward(on, w, down, up)
        return Parts(forward, backward, known, () if backward else (PLAIN_BACKWARD,))

    return W.device, W.dtype, plans


def _compose(a: Any) -> Call:
    delta, bias = a.fn == "dora_delta", getattr(a, "bias", None)
    check_compose(a.fn, a.base, a.lora, a.g, a.s, bias)

    def plans(triton: Any, on: Any) -> Parts:
        base, lora = as_matrix(stand_in(a.base)), as_matrix(stand_in(a.lora))
        (forward, *backward), kept = triton.compose(on, base, lora, stand_in(a.g), stand_in(bias), delta)
        return Parts([forward], backward, [kept_of(n, t, "argument") for n, t in kept.items()])

    return a.base.device, a.base.dtype, plans


@torch.no_grad()
def _merge(a: Any) -> Call:
    check_merge(a.fn, a.W, a.A, a.B, a.m, a.s, a.norm)
    check_gamma(a.fn, a.W, getattr(a, "gamma", None))

    def plans(triton: Any, on: Any) -> Parts:
        W, A, B, m, c = map(stand_in, (a.W, a.A, a.B, a.m, a.norm))
        norms = [] if c is not None else _norms(triton, on, W, A, B, None, False)
        if isinstance(W, QuantWeight):
            norms.append(triton.Decoding(W.kind, W.nbytes, *W.shape, W.dtype))
            W = torch.empty(W.shape, dtype=W.dtype, device="meta")
        c = torch.empty(W.shape[0], dtype=torch.float32, device="meta") if c is None else c
        return Parts([*norms, triton.merge(on, W, A, B, m, c, a.fn == "dora_unmerge")])

    return a.W.device, a.W.dtype, plans


CALLS: dict[Callable, Callable[[Any], Call]] = {
    dora_linear: _linear,
    dora_linear_group: _group,
    dora_mlp: _mlp,
    dora_embedding: embedding,
    **dict.fromkeys((dora_conv1d, dora_conv2d, dora_conv3d), conv),
    dora_experts: experts,
    dora_experts_mlp: experts_mlp,
    dora_linear_multi: multi,
    dora_norm: _norm,
    dora_norm_tree: norm_tree,
    dora_compose: _compose,
    dora_delta: _compose,
    dora_merge: _merge,
    dora_unmerge: _merge,
}
