"""Ask which backend would run."""

from __future__ import annotations

import warnings
from functools import lru_cache

import torch
from torch import Tensor

from fdora._check import FdoraError, Weight
from fdora._dispatch import Backend, BackendChoice, choose, forced
from fdora.autograd._ops import NO_KERNELS, obstacle

QUIET = ("cpu", "meta")  # devices where eager is the normal backend
_warned: set[str] = set()
# What explain passes for backend=: to stop a call once its arguments are checked, and to have it recorded.
CHECKED, RECORDED = "checked by explain", "recorded by explain"


class Checked(Exception):
    """The arguments of a call are right; its products have this dtype."""

    def __init__(self, dtype: torch.dtype):
        self.dtype = dtype


def select_backend(
    x: Tensor | Weight | torch.device | str, dtype: torch.dtype | None = None, *, backend: Backend = "auto"
) -> BackendChoice:
    """Which backend runs for tensors like ``x``, and why. The first line that applies decides:

    1. ``backend=``, unless "auto";  2. ``with fdora.backend(name)``;  3. the environment variable ``FDORA_BACKEND``;
    4. "eager" off the GPU or for float64;  5. "eager" where Triton is missing, broken or older than 3.4, or the GPU older
    than compute capability 8.0;  6. "triton"; what it has no kernel for, such as a convolution's products, runs in torch.

    Tensors on an accelerator that get no kernels (5, or a device that is no NVIDIA or AMD GPU) raise one ``RuntimeWarning``
    per process and reason, at the first call. On a CPU eager is the normal backend: no warning there, nor for a bare device.

    Args:
      x: a tensor like the one you would pass, a quantised weight, or a device.
      dtype: needed with a device only.
      backend: "auto", "eager" or "triton".

    Returns:
      ``BackendChoice(name, reason)``.

    Raises:
      FdoraError: the backend asked for is unknown, not available here, or "triton" for float64.
    """
    if isinstance(x, (Tensor, Weight)):
        return _for_tensor(x.device, x.dtype, backend, forced())
    if dtype is None:
        raise FdoraError("fdora.select_backend: `dtype` must be a torch.dtype when `x` is a device, got None. Pass dtype=.")
    return _choose(torch.device(x), dtype, backend, forced())


def _for_tensor(device: torch.device, dtype: torch.dtype, requested: str, forced: str) -> BackendChoice:
    return _remembered(device, dtype, requested, forced)


# Dynamo calls it while it traces and keeps the answer; guards hold the arguments. torch.compiler.assume_constant_result does
# no more than this line, but imports all of Dynamo (1 s).
_for_tensor._dynamo_marked_constant = True  # type: ignore[attr-defined]


@lru_cache
def _remembered(device: torch.device, dtype: torch.dtype, requested: str, forced: str) -> BackendChoice:
    choice = _choose(device, dtype, requested, forced)
    wanted = choice.name == "eager" and requested == forced == "auto" and dtype != torch.float64
    if wanted and device.type not in QUIET and choice.reason not in _warned:
        _warned.add(choice.reason)
        warnings.warn(f"fdora: the eager backend runs, not the kernels: {choice.reason}.", RuntimeWarning, stacklevel=5)
    return choice


def _choose(device: torch.device, dtype: torch.dtype, requested: str, forced: str) -> BackendChoice:
    if requested == CHECKED:
        raise Checked(dtype)
    if requested == RECORDED:
        return BackendChoice("triton", "it is recorded")
    available = ("eager",) if NO_KERNELS else ("eager", "triton")
    return choose(device.type, dtype, requested, forced, available, obstacle(device) if device.type == "cuda" else NO_KERNELS)
