"""Which backend runs, and why: a pure rule, one context and one environment variable."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch

from fdora._check import FdoraError, fail

Backend = Literal["auto", "eager", "triton"]
NAMES = ("auto", "eager", "triton")
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# Triton's interpreter multiplies bfloat16 wrongly.
TRITON_DTYPES = (torch.float16, torch.float32) if INTERPRETED else (torch.float16, torch.bfloat16, torch.float32)


class BackendChoice(NamedTuple):
    """What runs and the reason, in words."""

    name: str
    reason: str


def _named(name: str, where: str) -> str:
    if name not in NAMES:
        raise FdoraError(
            f"fdora.backend: `{where}` must be one of {', '.join(NAMES)}, got {name!r}. Use 'auto' unless you compare backends."
        )
    return name


# One process-wide name. A ContextVar would be per thread, but Dynamo cannot trace it and does not guard threading.local
# (both tried on torch 2.13): a compiled function would keep the backend it was traced with.
_forced = _named(os.environ.get("FDORA_BACKEND") or "auto", "FDORA_BACKEND")


@contextmanager
def backend(name: Backend) -> Iterator[None]:
    """Run the block with one backend: ``with fdora.backend("eager"): ...``. Process-wide, for tests and comparisons.

    Raises:
      FdoraError: the name is not "auto", "eager" or "triton".
    """
    global _forced
    previous, _forced = _forced, _named(name, "name")
    try:
        yield
    finally:
        _forced = previous


def forced() -> str:
    """The name that the context or the environment variable asks for."""
    return _forced


def choose(
    device: str, dtype: torch.dtype, requested: str, forced: str, available: tuple[str, ...], obstacle: str = ""
) -> BackendChoice:
    """The ladder of :func:`fdora.functional.select_backend`, on plain values. ``obstacle``: why kernels cannot run there."""
    _named(requested, "backend")
    wish, origin = (requested, "the backend= argument") if requested != "auto" else (forced, "fdora.backend or FDORA_BACKEND")
    if wish != "auto":
        if wish not in available:
            raise FdoraError(
                f"fdora.select_backend: `backend` must be one of {', '.join(available)} here, got {wish!r} "
                f"(from {origin}). {obstacle[:1].upper()}{obstacle[1:]}{'. ' if obstacle else ''}Ask for 'auto' there."
            )
        if wish == "triton" and device != "cuda" and not INTERPRETED:
            raise FdoraError(
                f"fdora.select_backend: `backend` must be eager for tensors on {device}, got 'triton' (from {origin}). "
                "Move them to a GPU, or ask for 'auto' there."
            )
        if wish == "triton" and dtype not in TRITON_DTYPES:
            remedy = "The kernels compute in float32: cast the tensors, or ask for 'auto' there."
            raise fail("select_backend", "backend", f"eager for {dtype} tensors", f"'triton' (from {origin})", remedy)
        return BackendChoice(wish, f"asked for by {origin}")
    if device != "cuda":
        return BackendChoice("eager", f"the tensors are on {device}, Triton kernels need an NVIDIA or AMD GPU")
    if dtype not in (*TRITON_DTYPES, torch.bfloat16):  # on a GPU nothing is interpreted, nor where explain asks for one
        return BackendChoice("eager", f"{dtype} has no Triton kernel")
    if obstacle or "triton" not in available:
        return BackendChoice("eager", obstacle or "this installation has no Triton kernels")
    return BackendChoice("triton", f"{dtype} on {device}; what has no kernel yet runs eager")
