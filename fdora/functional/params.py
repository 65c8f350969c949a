"""Parameters of one adapter, and their start."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from fdora._check import FLOATS, check_dtype, check_rank, check_shapes, fail, is_sharded, name
from fdora.functional.norm import dora_norm
from fdora.quant import QuantWeight


class DoraParams(NamedTuple):
    """The trained tensors of one adapter, in the order :func:`dora_linear` takes them: ``dora_linear(x, W, *params, s=s)``.

    A NamedTuple is a pytree for optree, torch and jax with nothing to register.
    """

    A: Tensor
    """(r, K) down-projection."""
    B: Tensor
    """(N, r) up-projection."""
    m: Tensor
    """(N,) magnitude."""


def dora_init(
    W: Tensor | QuantWeight, r: int, *, dtype: torch.dtype | None = None, generator: Generator | None = None
) -> DoraParams:
    """Start of an adapter that changes nothing: ``B = 0``, ``A`` Kaiming-uniform, ``m = ||W||``, so that ``g = 1``.

    m is computed by the code that computes c, so at the start m / c is exactly 1 and y is exactly ``x @ W.T``. Of a DTensor the
    three lie as W does, and A is the one that the mesh's first process draws.

    Args:
      W: (N, K) weight, float16, bfloat16, float32 or float64; it may still require grad. Or a
        :class:`fdora.quant.QuantWeight`: m is then the norm of what it decodes to.
      r: rank, at least 1.
      dtype: of A and B; None is float32 (float64 for a float64 W). Float32 adapters on a half-precision W train well.
      generator: for A; None uses torch's. The draw is PEFT's: ``kaiming_uniform_(A, a=sqrt(5))`` in float32.

    Returns:
      ``DoraParams(A (r, K), B (N, r), m (N,))`` on the device of W, not requiring grad. m is float32 (or float64)
      whatever ``dtype`` says: in bf16 it would be off by up to 0.35 % and the start would not be a no-op.

    Raises:
      FdoraError: W is not a floating matrix, r < 1, or dtype is no floating one.

    Memory: keeps nothing for backward.
    References: Liu et al., DoRA, 2024, arXiv:2402.09353, section 4.1; PEFT 0.21, ``LoraLayer.reset_lora_parameters``.
    """
    fn = "dora_init"
    sharded = is_sharded(W)
    N, K = W.shape if sharded and len(W.shape) == 2 else check_shapes(fn, {"W": "N K"}, {"W": W}).values()
    check_dtype(fn, "W", W, FLOATS, "Dequantise it first.")
    check_rank(fn, r)
    wide = torch.promote_types(W.dtype, torch.float32)
    dtype = wide if dtype is None else dtype
    if dtype not in FLOATS:
        have = name(dtype) if isinstance(dtype, torch.dtype) else f"a {type(dtype).__name__}"
        raise fail(fn, "dtype", "None or a torch.dtype of " + ", ".join(map(name, FLOATS)), have, "None is what trains well.")
    A = torch.empty((r, K), dtype=wide, device=W.device)
    torch.nn.init.kaiming_uniform_(A, a=math.sqrt(5), generator=generator)
    if sharded:
        from fdora.functional import _sharded_norm

        return DoraParams(*_sharded_norm.init(fn, W, A, dtype))
    B = torch.zeros((N, r), dtype=wide, device=W.device)
    m = dora_norm(W.detach(), A, B, s=1.0)
    return DoraParams(A=A.to(dtype), B=B.to(dtype), m=m)
