"""``a @ b`` with half-precision operands and the float32 accumulator as result.

Rounding the base product to bf16 before g is applied costs a second rounding: 2.3e-3 relative L2 against 1.66e-3 for
one. A plain bf16 matmul only hands back the rounded product, so each device gets the cheapest way around that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fdora._records import acc_dtype as acc_dtype
from fdora._torch import PLAIN, cpu_has_bf16, is_batched, is_wrapped

UPCAST_BYTES = 64 << 20  # largest float32 copy of an operand that a product may make at a time

_CPU_HAS_BF16 = cpu_has_bf16()


def cast(t: Tensor, dtype: torch.dtype) -> Tensor:
    """``t.to(dtype)`` for a result: no node in a traced graph where there is nothing to cast.

    torch 2.11 compiles a Function whose output is also the input of a no-op ``.to`` into gradients of zero, silently
    (pytorch issue 180642: the alias becomes a second output and takes over the gradient edge).
    """
    return t if t.dtype == dtype else t.to(dtype)


def times_g(dy: Tensor, g: Tensor, dtype: torch.dtype) -> Tensor:
    """g dy of dy in acc_dtype, rounded once.

    float16 cannot hold the g = m / eps of a row without weights: g dy would be inf, and inf times the zeros of W and B would be
    NaN in dx and dA of every row. There a finite dy gives the largest number. Any other overflow stays: loss scaling sees it.
    """
    dz = dy * g
    if dtype == torch.float16:
        most = torch.finfo(dtype).max
        dz = torch.where((g.abs() > most) & (dy.abs() <= most), dz.clamp(-most, most), dz)
    return cast(dz, dtype)


def is_real(t: Tensor) -> bool:
    """Whether ``t`` has values Python may read: not on meta, not traced by a compiler, not wrapped by torch.func."""
    if torch.compiler.is_compiling() or t.is_meta:
        return False
    return type(t) in PLAIN and not is_wrapped(t)


def is_plain(t: Tensor) -> bool:
    """Whether reading them is free: on a GPU it would wait for the device."""
    return t.device.type == "cpu" and is_real(t)


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """(M, K) @ (K, N) in the operands' dtype, returned in ``acc_dtype``."""
    acc = acc_dtype(a.dtype)
    if a.dtype == acc:
        return a @ b
    if a.device.type == "cuda" and not _mapped(a, b):
        return torch.mm(a, b, out_dtype=acc)
    if a.device.type == "cpu" and a.dtype == torch.bfloat16 and _CPU_HAS_BF16:
        # Two bf16 products are 2.6x faster than one float32 product on a CPU with bf16 instructions (512 x 4096 x 4096,
        # 2 cores: 40 against 106 ms). The second subtracts the rounded first before it rounds, so it returns what the
        # first one lost: hi + lo is good to 2.5e-6.
        hi = a @ b
        return hi.to(acc) + torch.addmm(-hi, a, b)
    cols = max(1, UPCAST_BYTES // (4 * max(1, b.shape[0])))
    wide = a.to(acc)
    if b.shape[1] <= cols:
        return wide @ b.to(acc)
    return torch.cat([wide @ b[:, j : j + cols].to(acc) for j in range(0, b.shape[1], cols)], dim=1)


def _mapped(a: Tensor, b: Tensor) -> bool:
    """Inside torch.func.vmap, for which mm with an output dtype has no batching rule."""
    return is_batched(a) or is_batched(b)
