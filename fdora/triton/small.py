"""The layer for a handful of tokens (decoding): bound by reading W once, so tiles are narrow and many.

    parts of h = s x A^T             one program per slab of the rank and part of K
    out = g (x W + h B) + bias       one program per few columns, all of K, then all of r

On sm_90 and later the second kernel starts while the first one runs (programmatic dependent launch): it streams its part of
W and waits for h only before the products with B, so h costs next to nothing.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fdora.triton.kernels.small import shrink_kernel, small_kernel
from fdora.triton.runtime.builder import Builder, named
from fdora.triton.runtime.device import cdiv, is_tma_compatible
from fdora.triton.runtime.plan import Array, Scalar
from fdora.triton.tiles.configs import SmallConfig, power_of_two, small_config
from fdora.triton.tiles.few import LIMIT, takes_narrow_tiles


def is_small(tokens: int) -> bool:
    """Whether there are narrow tiles for so many. W of codes and banks take them then."""
    return tokens <= LIMIT


def narrow(plan: Builder, x: Array, w: Array, r: int) -> bool:
    """(M, K) (K, N), W dense: whether the pass of this file is predicted to be faster than the product of gemm.py."""
    (M, K), N, on = x.shape, w.shape[1], plan.device
    return takes_narrow_tiles(M, N, K, r, w.stride[1] != 1, is_tma_compatible(x), on.capability, on.num_sms)


class Out(NamedTuple):
    """Where the results of a layer's forward go."""

    y: Array
    h: Array | None
    pre_scale: Array | None
    c: Array | None = None  # the norm, where nobody gave it


class Back(NamedTuple):
    """Where those of its backward go, and what dA = (s dz B)^T x reads."""

    dx: Array
    dA: Array | None = None
    x: Array | None = None


class Ends(NamedTuple):
    """What a pass x w + h b with h = s x a reads and writes beside that, in the order of the kernels, behind the parts of h."""

    h: Array | None
    b: Array
    out: Array
    pre_scale: Array | None
    m: Array | None
    c: Array | None
    bias: Array | None
    u: Array | None  # beside dA = h^T u
    dA: Array | None
    s: Scalar

    @property
    def strides(self) -> dict[str, int]:
        """Of u; of what is not there 1, which is compiled in."""
        return named("stride_um stride_un", (1, 1) if self.u is None else self.u.stride)

    def are_empty(self, plan: Builder) -> bool:
        """Whether there is no token or no column; sums over them are 0 then."""
        if self.out.numel:
            return False
        for t in (self.h, self.dA):
            if t is not None:
                plan.zero(t)
        return True


def forward_ends(la: Any, s: Scalar, out: Out) -> Ends:
    return Ends(out.h, la.B.T, out.y, out.pre_scale, la.m, la.c, la.bias, None, None, s)


def backward_ends(la: Any, s: Scalar, out: Back) -> Ends:
    return Ends(None, la.A, out.dx, None, None, None, None, None if out.dA is None else out.x, out.dA, s)


def small_forward(
    plan: Builder, x: Array, la: Any, s: Scalar, out: Out, config: SmallConfig | None = None, accumulate: bool = False
) -> None:
    """(M, K) and a layer, W in the dtype of x -> y, pre_scale (M, N) and h = s x A^T (M, r). ``accumulate``: added to y.

    ``config`` overrides the table.
    """
    _small(plan, x, la.W.T, la.A.T, forward_ends(la, s, out), config, accumulate)


def small_backward(
    plan: Builder, dz: Array, la: Any, s: Scalar, out: Back, config: SmallConfig | None = None, accumulate: bool = False
) -> None:
    """(M, N), a layer -> dx = dz W + s dz B A (M, K) and dA. ``accumulate``: added to dx."""
    _small(plan, dz, la.W, la.B, backward_ends(la, s, out), config, accumulate)


def shrunk(plan: Builder, x: Array, a: Array) -> tuple[Array, bool]:
    """(M, K) (K, r) -> the parts of x a, (parts, M, r) float32, and whether the kernel that adds them may start early."""
    (M, K), r, rows = x.shape, a.shape[1], power_of_two(x.shape[0])
    # Few slabs of a small rank: K is split as well, so that more than one multiprocessor works and nobody loops for long.
    parts = max(1, min(8 if r <= 64 else 4 if r <= 128 else 2, K // 256))
    part = plan.temp((parts, M, r), torch.float32)
    pdl = plan.device.supports_pdl
    span = cdiv(cdiv(K, parts), 16) * 16
    wide = rows < 64 and plan.device.capability > 0  # an AMD GPU has 64 KiB of shared memory: too little for a slab in float32
    block_k = min(512 if wide else 128, power_of_two(span))
    stride_ak, stride_ar = a.stride
    plan.launch(
        shrink_kernel,
        (cdiv(r, 16), parts),
        {
            "x": x,
            "a": a,
            "part": part,
            "M": M,
            "K": K,
            "R": r,
            "span": span,
            "stride_ar": stride_ar,
            "stride_ak": stride_ak,
            "PDL": pdl,
            "BLOCK_M": rows,
            "BLOCK_R": 16,
            "BLOCK_K": block_k,
        },
    )
    return part, pdl


def _small(plan: Builder, x: Array, w: Array, a: Array, ends: Ends, config: SmallConfig | None, accumulate: bool) -> None:
    """(M, K) (K, N) (K, r) (r, N): x w + s x a b, and what comes with it."""
    (M, K), N, r = x.shape, w.shape[1], a.shape[1]
    if ends.are_empty(plan):
        return
    rows = power_of_two(M)
    part, pdl = shrunk(plan, x, a)
    on = plan.device
    config = config or small_config(rows, N, K, w.stride[1] == 1, on.capability, on.num_sms)
    given = {"x": x, "w": w, "part": part, "M": M, "N": N, "K": K, "R": r, **ends.strides, "PARTS": part.shape[0]}
    given |= {"ACCUMULATE": accumulate, "BLOCK_M": rows, "BLOCK_R": min(64, power_of_two(r))}
    plan.launch(small_kernel, (cdiv(N, config.BLOCK_N),), given, ends, config, pdl=pdl)
