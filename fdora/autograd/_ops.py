"""The table of backends, and what every Function here shares."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from importlib.util import find_spec
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from fdora import eager

# name -> package with the modules norm, compose, linear, act and merge. Filled at import: a lazy import inside a forward
# breaks torch.compile(fullgraph=True).
OPS: dict[str, Any] = {"eager": eager}
OLDEST = (8, 0)  # the first NVIDIA GPU whose tensor cores multiply bfloat16


def _with_kernels(kernels: ModuleType) -> SimpleNamespace:
    """The eager package with each function replaced that has a kernel."""
    merged = SimpleNamespace()
    for name in ("norm", "compose", "linear", "act", "merge"):
        functions = vars(getattr(eager, name)) | vars(getattr(kernels, name, SimpleNamespace()))
        setattr(merged, name, SimpleNamespace(**{n: f for n, f in functions.items() if callable(f) and n[0] != "_"}))
    return merged


def _load() -> str:
    """Add the kernels to the table, or say why there are none. Whatever Triton raises at import is a reason, not a crash."""
    # A torch without CUDA or HIP has no use for kernels, except to interpret them in tests.
    if not (torch.version.cuda or torch.version.hip or os.environ.get("TRITON_INTERPRET") == "1"):
        return "this torch was built without CUDA and HIP"
    try:
        if find_spec("triton") is None:
            return "Triton is not installed"
        from fdora import triton

        OPS["triton"] = _with_kernels(triton)
    except Exception as error:
        text = str(error).strip().partition("\n")[0]
        return f"Triton cannot be used ({type(error).__name__}{': ' if text else ''}{text})"
    return ""


NO_KERNELS = _load()


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


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)``, past what ``Function.apply`` does for the sake of torch.func and of default arguments.

    For a Function with setup_context that is to ask inspect for the signature of ``forward`` and bind by name, on every
    apply: half of the host time of a small layer. Ours are all positional, with no defaults.
    """
    if torch.compiler.is_compiling():
        # Without a graph to build Dynamo would hand a forward that takes *args its ctx as well (torch 2.13): do without apply.
        wanted = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)
        return function.apply(*args) if wanted else function.forward(*args)
    if torch._C._are_functorch_transforms_active():
        return function.apply(*args)
    return super(torch.autograd.Function, function).apply(*args)  # type: ignore[misc]


def no_graph() -> bool:
    """Whether code runs for its values only: then the Function, which refuses what it cannot differentiate, can be left out."""
    watched = torch.is_grad_enabled() or torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active()
    return not watched and forward_ad._current_level < 0


def autocast_on(t: Tensor) -> bool:
    device = t.device.type
    return device != "meta" and torch.is_autocast_enabled(device)


def autocast_off(t: Tensor) -> AbstractContextManager[None]:
    """Ops choose their own precision; an active autocast would round their float32 products to half."""
    return torch.autocast(t.device.type, enabled=False) if autocast_on(t) else nullcontext()


def no_second_derivative(op: str) -> NotImplementedError:
    return NotImplementedError(
        f"fdora: second derivatives of {op} are not implemented. "
        "Take them through the plain formula: g * (x @ W.T + s * (x @ A.T) @ B.T) + bias."
    )


def only(grads: tuple[Tensor | None, ...]) -> tuple[Tensor, ...]:
    """The gradients that were asked for: vmap cannot carry a None out of a Function."""
    return tuple(d for d in grads if d is not None)


def spread(grads: tuple[Tensor, ...], needs: tuple[bool, ...]) -> list[Tensor | None]:
    """Undo :func:`only`."""
    rest = iter(grads)
    return [next(rest) if need else None for need in needs]
