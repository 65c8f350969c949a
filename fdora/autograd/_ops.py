"""The table of backends, and what every Function here shares."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from fdora import eager
from fdora._torch import apply, no_graph
from fdora._torch import autocast_on as autocast_on

OLDEST = (8, 0)  # the first NVIDIA GPU whose tensor cores multiply bfloat16
Op = Callable[..., Any]
"""Arguments and results are those of the function of that name in fdora/eager, or in fdora/triton where eager has none."""


@dataclass(frozen=True)
class Backend:
    """What a backend implements. Every op is listed below, so one that is missing fails at import."""

    norm_fwd: Op
    sqnorm_fwd: Op
    norm_guarded: Op
    norm_bwd: Op
    """Gives None where a backend leaves it to plain torch; so does embedding_bwd."""
    base_sqnorm: Op
    compose_fwd: Op
    compose_bwd: Op
    scale_slots: Op
    layers_fwd: Op
    layers_bwd: Op
    layers_bound: Op
    """layers_fwd of plain tensors like these where nothing traces: x and the operands one behind the other, W dense, A and c
    given."""
    act_fwd: Op
    act_bwd: Op
    mlp_fwd: Op
    mlp_bwd: Op
    mlp_bound: Op
    """mlp_fwd in the same case."""
    multi_fwd: Op
    multi_bwd: Op
    bank_norm: Op
    route: Op
    spread: Op
    combine: Op
    gates_bwd: Op
    gated_fwd: Op
    gated_bwd: Op
    embedding_fwd: Op
    embedding_bwd: Op
    merge_fwd: Op
    unmerge_fwd: Op
    TreeLayers: Op
    """What norms of many layers are made with."""
    is_decoded: Op | None = None
    """Whether a W of this QuantSpec may come as it is to layers_fwd, layers_bwd, mlp_fwd and mlp_bwd."""
    norm_inside: Op | None = None
    """Whether a layer of x and a dense W may come to layers_fwd and mlp_fwd without its norm."""
    any_order: Op | None = None
    """Whether the forward of a bank wants tokens like these as they come, with ids."""
    multi_gated_bwd: Op | None = None
    """Of two banks and the gated activation behind them: dz, dm and dc of both in one pass."""
    norm_of_codes: Op | None = None
    norm_of_codes_guarded: Op | None = None
    stack_norms_of_codes: Op | None = None
    dense_of: Op | None = None
    """A W of this QuantSpec; None where only plain torch decodes it."""
    norms_of_kept: Op | None = None
    norms_kept: Op | None = None
    """Of all layers of a model, in compiled code."""


# file of a backend -> the ops that it has, by their names there
BOTH = {
    "norm": "norm_fwd sqnorm_fwd norm_guarded",
    "compose": "compose_fwd compose_bwd scale_slots",
    "linear": "layers_fwd layers_bwd layers_bound",
    "act": "act_fwd act_bwd",
    "mlp": "mlp_fwd mlp_bwd mlp_bound",
    "multi": "multi_fwd multi_bwd bank_norm route",
    "experts": "spread combine gates_bwd gated_fwd gated_bwd",
    "embedding": "embedding_fwd",
    "merge": "merge_fwd unmerge_fwd",
    "tree": "TreeLayers",
}
OF_EAGER = {"norm": "norm_bwd base_sqnorm", "embedding": "embedding_bwd"}
OF_TRITON = {
    "norm_bwd": "norm_bwd",
    "embedding_bwd": "embedding_bwd",
    "codes": "is_decoded",
    "small_norm": "norm_inside",
    "multi": "any_order multi_gated_bwd",
    "quant": "norm_of_codes norm_of_codes_guarded stack_norms_of_codes",
    "dequantize": "dense_of",
    "norm_kept": "norms_of_kept",
    "tree": "norms_kept",
}


def ops_of(package: Any, own: dict[str, str]) -> dict[str, Any]:
    """What a backend implements. One that is missing fails here, so at import."""
    every = [(file, op) for files in (BOTH, own) for file, ops in files.items() for op in ops.split()]
    return {op: getattr(getattr(package, file), op) for file, op in every}


# Filled at import: a lazy import inside a forward breaks torch.compile(fullgraph=True).
OPS: dict[str, Backend] = {"eager": Backend(**ops_of(eager, OF_EAGER))}


def kernels(triton: Any) -> Backend:
    """The Triton backend. What it has no kernel for, plain torch computes on the GPU."""
    return Backend(base_sqnorm=eager.norm.base_sqnorm, **ops_of(triton, OF_TRITON))


def _import_triton() -> tuple[Any, str]:
    """fdora.triton, or why there are no kernels. Whatever Triton raises at import is a reason, not a crash."""
    try:
        if find_spec("triton") is None:
            return None, "Triton is not installed"
        from fdora import triton
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        return None, f"Triton cannot be used ({type(error).__name__}{': ' if text else ''}{text})"
    return triton, ""


# A torch without CUDA or HIP has no use for kernels, except to interpret them in tests.
USELESS = not (torch.version.cuda or torch.version.hip or os.environ.get("TRITON_INTERPRET") == "1")
_triton, NO_KERNELS = (None, "this torch was built without CUDA and HIP") if USELESS else _import_triton()
if _triton is not None:
    OPS["triton"] = kernels(_triton)


def load_kernels() -> tuple[Any, str]:
    """fdora.triton, whose plans need no GPU, or why not; from then on OPS has it."""
    triton, missing = _import_triton() if _triton is None else (_triton, "")
    if triton is not None:
        OPS.setdefault("triton", kernels(triton))
    return triton, missing


def obstacle(device: torch.device) -> str:
    """Why Triton kernels cannot run on this GPU; empty where they can. Asks the driver: for a GPU that exists only."""
    if NO_KERNELS or torch.version.hip:
        return NO_KERNELS
    if not torch.cuda.is_available():
        return "this machine has no GPU"
    have = torch.cuda.get_device_capability(device)
    if have < OLDEST:
        need, has = (".".join(map(str, c)) for c in (OLDEST, have))
        return f"{torch.cuda.get_device_name(device)} has compute capability {has}, Triton kernels need {need}"
    return ""


NOTHING = nullcontext()


def autocast_off(t: Tensor) -> AbstractContextManager[None]:
    """Ops choose their own precision; an active autocast would round their float32 products to half."""
    return torch.autocast(t.device.type, enabled=False) if autocast_on(t) else NOTHING


class Derivative(torch.autograd.Function):
    """The gradients of a function, as an op of its own for transforms and compilers: ``compute(first, *rest)`` gives them.

    ``fn`` names the function in the error that a second derivative gives; ``first`` is a tensor, and all others are arguments
    of this Function too, never inside of one.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(fn: str, compute: Any, first: Tensor, *rest: Any) -> Any:
        with autocast_off(first):
            return tuple([d for d in compute(first, *rest) if d is not None])  # vmap carries no None out of a Function

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.fn = inputs[0]

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise NotImplementedError(
            f"fdora: second derivatives of {ctx.fn} are not implemented. "
            "Take them through the plain formula: g * (x @ W.T + s * (x @ A.T) @ B.T) + bias."
        )


def gradients_of(fn: str, needs: Iterable[bool], compute: Any, first: Tensor, *rest: Any) -> list[Tensor | None]:
    """What ``compute(first, *rest)`` gives where ``needs`` asks for it, as a :class:`Derivative` where a graph is built."""
    if no_graph() and not autocast_on(first):
        return list(compute(first, *rest))
    found = iter(apply(Derivative, fn, compute, first, *rest))
    return [next(found) if need else None for need in needs]


KEEP_INNER = "Pass keep_inner=True (in PEFT: use_fdora(model, keep_inner=True)), or write `y = c * y`."


def reread(ctx: Any, op: str, remedy: str = KEEP_INNER) -> Any:
    """What the Function saved. Where its output was changed in place since, the error says what to do."""
    try:
        return ctx.saved_tensors
    except RuntimeError as error:
        if "inplace operation" not in str(error) or f" of {type(ctx).__name__.removesuffix('Backward')}" not in str(error):
            raise
        raise RuntimeError(
            f"fdora.{op}: `y` must be left as it is until backward, got a tensor that was changed in place. "
            f"{remedy} (torch: {error})"
        ) from error
