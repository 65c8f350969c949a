"""Ask which backend would run."""

from __future__ import annotations

import torch
from torch import Tensor

from fdora._check import FdoraError
from fdora._dispatch import Backend, BackendChoice, choose
from fdora.autograd._ops import OPS


def select_backend(
    x: Tensor | torch.device | str, dtype: torch.dtype | None = None, *, backend: Backend = "auto"
) -> BackendChoice:
    """Which backend runs for tensors like ``x``, and why. The first line that applies decides:

    1. ``backend=``, unless "auto";  2. ``with fdora.backend(name)``;  3. the environment variable ``FDORA_BACKEND``;
    4. "eager" without Triton kernels, off the GPU, or for float64;  5. "triton", whose ops without a kernel run eager:
    so far norm, merge, compose and delta have kernels.

    Args:
      x: a tensor like the one you would pass, or a device.
      dtype: needed with a device only.
      backend: "auto", "eager" or "triton".

    Returns:
      ``BackendChoice(name, reason)``.

    Raises:
      FdoraError: the backend asked for is unknown or not available here.
    """
    if isinstance(x, Tensor):
        return choose(x.device.type, x.dtype, backend, tuple(OPS))
    if dtype is None:
        raise FdoraError("fdora.select_backend: `dtype` must be a torch.dtype when `x` is a device, got None. Pass dtype=.")
    return choose(torch.device(x).type, dtype, backend, tuple(OPS))
