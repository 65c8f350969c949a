"""The product of a layer with its low-rank term, in one of two ways; which one is a function of the shape (tiles/product.py).

    forward   y = g (x W^T + h B^T) + bias
    backward  dx = dz W + dh A

Fused: everything in one product (gemm.py); nothing of size (M, N) but the result is written. Beside cuBLAS: its product of x
alone, tuned for any number of tiles, and one pass over the result for the rest ("after"); or, in backward, cuBLAS adds its
product to dh A ("first"). Two more passes over the result, which few tokens leave in the cache. "after" rounds the product
of x to the dtype of x before the rest is added in float32, "first" dh A.
"""

from __future__ import annotations

from fdora._tuned import place
from fdora.triton.copy import operand
from fdora.triton.gemm import NO_EPILOGUE, Epilogue, Operand, by_tma, gemm
from fdora.triton.kernels.product import rest_kernel
from fdora.triton.runtime import Array, Builder
from fdora.triton.tiles.configs import rest_config
from fdora.triton.tiles.product import Ask, Way, product_way


def scaled_product(
    plan: Builder,
    y: Array,
    x: Array,
    h: Array,
    W: Array,
    B: Array,
    epilogue: Epilogue,
    pre: Array | None,
    way: Way | None = None,
) -> str:
    """(M, K) (M, r) (N, K) (N, r) -> y and, where given, pre, both (M, N). Returns what it does, in words."""
    right = Operand(W, B, trans=True)
    way = way or way_of(plan, x, h, right, y, pre, epilogue.kind == "table")
    if way.kind == "fused":
        gemm(plan, y, x, h, right, epilogue, pre_scale=pre, config=way.tile)
        return "one fused product; g inside" + decided(way)
    base = y if pre is None else pre
    plan.product(base, x, operand(plan, W).T)
    rest(plan, y, base, h, B.T, epilogue, pre)
    return "x W^T by cuBLAS, then one pass for the rest" + decided(way)


def summed_product(
    plan: Builder, dx: Array, dz: Array, dh: Array, W: Array, A: Array, accumulate: bool, way: Way | None = None
) -> str:
    """(M, N) (M, r) (N, K) (r, K) -> dx (M, K). ``accumulate``: added to it. Returns what it does, in words."""
    right = Operand(W, A, trans=False)
    way = way or way_of(plan, dz, dh, right, dx, dx if accumulate else None)
    if dx.stride[0] != dx.shape[1] and not (way.tile is not None and way.tile.tma):
        way = Way("first", None, way.us)  # of some columns: kernels without descriptors write rows that have no gaps
    if way.kind == "fused":
        gemm(plan, dx, dz, dh, right, Epilogue("accumulate", residual=dx) if accumulate else NO_EPILOGUE, config=way.tile)
        return "one fused product for dx" + decided(way)
    if way.kind == "first":
        plan.product(dx, dh, operand(plan, A), accumulate=accumulate)
        plan.product(dx, dz, operand(plan, W), accumulate=True)
        return "dh A and dz W by cuBLAS" + decided(way)
    plan.product(dx, dz, operand(plan, W), accumulate=accumulate)
    rest(plan, dx, dx, dh, A)
    return "dz W by cuBLAS, then one pass for dh A" + decided(way)


def decided(way: Way) -> str:
    """In words, where a file of `fdora tune` did."""
    return f", which {place()} says is faster" if way.tuned else ""


def way_of(plan: Builder, x: Array, h: Array, right: Operand, out: Array, beside: Array | None, table: bool = False) -> Way:
    (M, K), N, r, on = x.shape, out.shape[1], h.shape[1], plan.device
    trans_b, tma = by_tma(x, right, out, beside)
    return product_way(Ask(int(M), N, K, r, trans_b, beside is not None, tma, on.capability, on.num_sms, table))


def rest(
    plan: Builder,
    out: Array,
    base: Array,
    h: Array,
    b: Array,
    epilogue: Epilogue = NO_EPILOGUE,
    pre_scale: Array | None = None,
) -> None:
    """(M, N) base, (M, r) h, (r, N) b -> out and pre_scale = base + h b; either may be ``base``."""
    (M, N), r = base.shape, h.shape[1]
    if base.numel == 0:
        return
    given = {
        "base": base,
        "h": h,
        "b": b,
        "out": out,
        "pre_scale": pre_scale,
        "M": M,
        "N": N,
        "R": r,
        "GROUP_M": 8,
        "EPILOGUE": epilogue.kind,
    }
    plan.launch(rest_kernel, "MN", given, rest_config(r), epilogue)
