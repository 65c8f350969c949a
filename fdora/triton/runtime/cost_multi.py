"""What the kernels for many adapters must do at least; see cost.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fdora.triton.runtime.amount import Cost, moved, product


def _multi_h(*, x, f, h, pad, M, K, R, **_: Any) -> Cost:
    return product(M, R, K, x) + moved(x, f, h, pad)


def _multi_gemm(*, x, w, h, b, out, pre_scale, g, M, N, K, R, **_: Any) -> Cost:
    return product(M, N, K + R, x) + moved(x, w, h, b, out, pre_scale, g)


def _multi_epilogue(*, v, h, b, out, pre_scale, g, M, N, R, **_: Any) -> Cost:
    return product(M, N, R, h) + moved(v, h, b, out, pre_scale, g)


def _multi_scale(*, dy, saved, h, g, dz, partial_m, partial_bias, partial_B, M, N, R, BLOCK_R, **_: Any) -> Cost:
    what = moved(dy, saved, h, g, dz, partial_m, partial_bias, partial_B)
    return product(M, N, R, dy) + what if BLOCK_R else what


def _multi_finish(*, partial_m, **_: Any) -> Cost:
    return moved(partial_m)


def _multi_grad(*, u, v, out, M, P, Q, **_: Any) -> Cost:
    return product(M, P, Q, u) + moved(u, v, out)


def _multi_shrink(*, x, f, part, M, K, R, **_: Any) -> Cost:
    return product(M, R, K, x) + moved(x, f, part)


def _multi_expand(*, part, b, m, c, h, lora, g, M, N, R, **_: Any) -> Cost:
    return product(M, N, R, h) + moved(part, b, m, c, h, lora, g)


def _multi_low(*, x, f, b, m, c, h, lora, g, M, K, N, R, **_: Any) -> Cost:
    return product(M, R, K + N, x) + moved(x, f, b, m, c, h, lora, g)


def _multi_small(*, x, w, lora, g, out, pre_scale, M, N, K, **_: Any) -> Cost:
    return product(M, N, K, x) + moved(x, w, lora, g, out, pre_scale)


def _multi_norm(*, W, A, B, partial, N, K, R, G, **_: Any) -> Cost:
    return product(N, K, R * G, A) + moved(W, A, B, partial)


def _strip_norm(*, W, A, B, partial, grams, N, K, R, G, **_: Any) -> Cost:
    return product(N + R, K, R * G, A) + moved(W, A, B, partial, grams)


def _strip_root(*, B, partial, grams, c, N, R, G, **_: Any) -> Cost:
    return product(N, R, R * G, c) + moved(B, partial, grams, c)


def _multi_route(*, ids, offsets, order, place, **_: Any) -> Cost:
    return moved(ids, offsets, order, place)


def _multi_routes(*, ids, g, **_: Any) -> Cost:
    return moved(ids, g)


def _multi_root(*, partial, c, **_: Any) -> Cost:
    return moved(partial, c)


def _multi_ranks(*, ranks, **_: Any) -> Cost:
    return Cost(bytes=4.0 * ranks.shape[0])


def _spread(*, order, gates, out, **_: Any) -> Cost:
    return moved(order, gates, out, out)


def _combine(*, rows, place, gates, out, **_: Any) -> Cost:
    return moved(rows, place, gates, out)


def _gates(*, dy, rows, place, out, **_: Any) -> Cost:
    return moved(dy, rows, place, out)


def _gated_fwd(*, z, a, **_: Any) -> Cost:
    return moved(z, a)


def _gated_bwd(*, da, z, dz, **_: Any) -> Cost:
    return moved(da, z, dz)


MULTI: dict[str, Callable[..., Cost]] = {
    "combine_kernel": _combine,
    "experts_norm_kernel": _multi_norm,
    "gated_bwd_kernel": _gated_bwd,
    "gated_fwd_kernel": _gated_fwd,
    "gates_kernel": _gates,
    "spread_kernel": _spread,
    "multi_epilogue_kernel": _multi_epilogue,
    "multi_expand_kernel": _multi_expand,
    "multi_finish_kernel": _multi_finish,
    "multi_gemm_pointer_kernel": _multi_gemm,
    "multi_gemm_tma_kernel": _multi_gemm,
    "multi_grad_kernel": _multi_grad,
    "multi_h_kernel": _multi_h,
    "multi_low_kernel": _multi_low,
    "multi_norm_kernel": _multi_norm,
    "strip_norm_kernel": _strip_norm,
    "strip_root_kernel": _strip_root,
    "multi_ranks_kernel": _multi_ranks,
    "multi_root_kernel": _multi_root,
    "multi_route_kernel": _multi_route,
    "multi_routes_kernel": _multi_routes,
    "multi_scale_kernel": _multi_scale,
    "multi_shrink_kernel": _multi_shrink,
    "multi_small_kernel": _multi_small,
}
