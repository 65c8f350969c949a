"""What a kernel must do at least, from its arguments: the flops of its products, and the bytes of what it reads and writes.

The same functions serve the plan, which has arrays (plan.py), and Triton's ``launch_metadata``, which has tensors: a profiler
such as proton sees what ``explain`` says. Vectors of one number per column are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fdora.triton.runtime.amount import Cost as Cost
from fdora.triton.runtime.amount import moved, product
from fdora.triton.runtime.cost_multi import MULTI
from fdora.triton.runtime.cost_norm_bwd import NORM_BWD


def _gemm(*, x, x_masked, w, h, b, out, pre_scale, residual, M, N, K, R, **_: Any) -> Cost:
    wide = K if x_masked is None else 2 * K
    return product(M, N, wide + R, x) + moved(x, x_masked, w, h, b, out, pre_scale, residual)


def _shrink(*, x, a, part, M, K, R, **_: Any) -> Cost:
    return product(M, R, K, x) + moved(x, a, part)


def _small(*, x, w, part, h, b, out, pre_scale, u, dA, M, N, K, R, ACCUMULATE, **_: Any) -> Cost:
    wide = K + R if u is None else K + 2 * R
    return product(M, N, wide, x) + moved(x, w, part, h, b, out, pre_scale, u, dA, out if ACCUMULATE else None)


def _small_norm(*, x, w, a, part, h, b, out, pre_scale, M, N, K, R, ACCUMULATE, **_: Any) -> Cost:
    products = product(M, N, K + R, x) + product(K, N, R, x)
    return products + moved(x, w, a, part, h, b, out, pre_scale, out if ACCUMULATE else None)


def _small_codes(*, x, codes, scales, scales2, part, h, b, out, pre_scale, u, dA, M, N, K, R, ACCUMULATE, **_: Any) -> Cost:
    wide = K + R if u is None else K + 2 * R
    what = moved(x, codes, scales, scales2, part, h, b, out, pre_scale, u, dA, out if ACCUMULATE else None)
    return product(M, N, wide, x) + what


def _codes_parts(*, x, codes, scales, scales2, out, part, h, b, M, N, K, R, **_: Any) -> Cost:
    return product(M, N, K if b is None else K + R, x) + moved(x, codes, scales, scales2, out, part, h, b)


def _add_parts(*, sums, x, part, h, b, out, pre_scale, u, dA, M, N, R, ACCUMULATE, **_: Any) -> Cost:
    what = moved(sums, part, h, b, out, pre_scale, u, dA, out if ACCUMULATE else None)
    return product(M, N, R if u is None else 2 * R, x) + what


def _rest(*, base, h, b, out, pre_scale, M, N, R, **_: Any) -> Cost:
    return product(M, N, R, base) + moved(base, h, b, out, pre_scale)


def _scale(
    *, dy, saved, h, dz, dz_minus_dy, partial_m, partial_bias, partial_B, dB, M, N, R, NEED_M, NEED_C, BLOCK_R, SINGLE, **_: Any
) -> Cost:
    what = moved(dy, saved if NEED_M or NEED_C else None, dz, dz_minus_dy, partial_m, partial_bias, partial_B)
    if BLOCK_R:
        what += product(M, N, R, dy) + moved(h, dB if SINGLE else None)
    return what


def _finish(*, partial_m, partial_bias, partial_B, dB, **_: Any) -> Cost:
    return moved(partial_m, partial_bias, partial_B, dB)


def _factors(*, x, dh, dA, dz, h, dB, M, K, N, R, **_: Any) -> Cost:
    return product(R, K + N, M, x) + moved(x, dh, dA, dz, h, dB)


def _norm(*, W, A, B, partial, N, K, R, **_: Any) -> Cost:
    return product(N, K, R, A) + moved(W, A, B, partial)


def _quant4(*, codes, scales, scales2, A, B, partial, N, K, R, dense=None, **_: Any) -> Cost:
    return product(N, K, R, A) + moved(codes, scales, scales2, A, B, partial, dense)


def _quant8(*, codes, scales, A, B, partial, dense, N, K, R, **_: Any) -> Cost:
    return product(N, K, R, A) + moved(codes, scales, A, B, partial, dense)


def _dequantize4(*, codes, scales, scales2, out, K, first, last, **_: Any) -> Cost:
    return Cost(bytes=moved(codes, scales, scales2).bytes * (last - first) / max(1, K)) + moved(out)


def _dequantize8(*, codes, scales, out, K, first, last, **_: Any) -> Cost:
    return Cost(bytes=moved(codes, scales).bytes * (last - first) / max(1, K)) + moved(out)


def _lost_rows(*, m, c, **_: Any) -> Cost:
    """What it asks; there are few such rows, if any."""
    return moved(m, c)


def _by_g(*, t, out, **_: Any) -> Cost:
    return moved(t, out)


def _choose(*, partial, c, out, **_: Any) -> Cost:
    return moved(partial, c, out)


def _sum(*, partial, out, **_: Any) -> Cost:
    return moved(partial, out)


def _merge(*, W, A, B, out, N, K, R, **_: Any) -> Cost:
    return product(N, K, R, A) + moved(W, A, B, out)


def _compose_fwd(*, base, lora, y, **_: Any) -> Cost:
    return moved(base, lora, y)


def _compose_bwd(*, dy, base, lora, dbase, dlora, partial_g, partial_bias, NEED_G, **_: Any) -> Cost:
    return moved(dy, *((base, lora) if NEED_G else ()), dbase, dlora, partial_g, partial_bias)


def _embedding(*, ids, W, A, B, y, T, D, R, OWN_NORM, **_: Any) -> Cost:
    flops, read = product(T, D, R, W), Cost(bytes=float(T * D * W.dtype.itemsize + T * R * A.dtype.itemsize))
    return flops + read + moved(ids, B, y) + (flops + read if OWN_NORM else Cost())


def _embedding_walk(*, ids, W, A, B, y, T, D, R, **_: Any) -> Cost:
    return _embedding(ids=ids, W=W, A=A, B=B, y=y, T=T, D=D, R=R, OWN_NORM=False)


def _embedding_ready(*, ids, A, B, h, b, T, R, **_: Any) -> Cost:
    return moved(ids, B, h, b) + Cost(bytes=float(T * R * A.dtype.itemsize))


def _embedding_tile(*, ids, W, h, b, y, T, D, R, **_: Any) -> Cost:
    return product(T, D, R, W) + moved(ids, h, b, y) + Cost(bytes=float(T * D * W.dtype.itemsize))


def _embedding_bwd(*, dy, ids, W, h, b, partial_A, partial_Y, partial_m, T, D, R, NEED_A, NEED_Y, NEED_M, **_: Any) -> Cost:
    read = Cost(bytes=float(T * D * W.dtype.itemsize)) if NEED_M else Cost()
    return product(T, D, R * (NEED_A + NEED_Y), dy) + read + moved(dy, ids, h, b, partial_A, partial_Y, partial_m)


def _embedding_finish(*, partial_Y, partial_m, B, dB, **_: Any) -> Cost:
    return moved(partial_Y, partial_m, B, dB)


def _segment_scan(*, partial_A, key, order, sums, **_: Any) -> Cost:
    return moved(partial_A, key, order, sums)


def _segment_total(*, sums, key, **_: Any) -> Cost:
    return moved(sums, sums, key)


def _act_fwd(*, gate, up, a, **_: Any) -> Cost:
    return moved(gate, up, a)


def _act_bwd(*, da, gate, up, dgate, dup, **_: Any) -> Cost:
    return moved(da, gate, up, dgate, dup)


def _copy(*, src0, src1, src2, src3, out, **_: Any) -> Cost:
    return moved(src0, src1, src2, src3, out)


def _drop(*, x, out, ACCUMULATE, **_: Any) -> Cost:
    return moved(x, out, out if ACCUMULATE else None)


def _epilogue(*, v, residual, out, **_: Any) -> Cost:
    return moved(v, residual, out)


def _fp8_rows(*, x, out, scale, **_: Any) -> Cost:
    return moved(x, out, scale)


def _fp8_gemm(*, x, x_scale, w, w_scale, h, b, out, pre_scale, M, N, K, R, **_: Any) -> Cost:
    return product(M, N, K, x) + product(M, N, R, h) + moved(x, x_scale, w, w_scale, h, b, out, pre_scale)


def _hash(*, A, B, out, **_: Any) -> Cost:
    return moved(A, B, out)


def _split(*, x, out, scale, **_: Any) -> Cost:
    return moved(x, out, scale)


# many adapters on one W: lengths are not known, so each product counts once for every token


def _rows(*, x, out, **_: Any) -> Cost:
    return moved(x, out)


COSTS: dict[str, Callable[..., Cost]] = {
    **MULTI,
    **NORM_BWD,
    "act_bwd_kernel": _act_bwd,
    "act_fwd_kernel": _act_fwd,
    "bank_kernel": _rows,
    "by_g_kernel": _by_g,
    "add_parts_kernel": _add_parts,
    "choose_kernel": _choose,
    "codes_parts_kernel": _codes_parts,
    "compose_bwd_kernel": _compose_bwd,
    "compose_fwd_kernel": _compose_fwd,
    "copy_kernel": _copy,
    "dequantize4_kernel": _dequantize4,
    "dequantize8_kernel": _dequantize8,
    "drop_kernel": _drop,
    "embedding_bwd_kernel": _embedding_bwd,
    "embedding_finish_kernel": _embedding_finish,
    "embedding_kernel": _embedding,
    "embedding_ready_kernel": _embedding_ready,
    "embedding_tile_kernel": _embedding_tile,
    "embedding_walk_kernel": _embedding_walk,
    "epilogue_kernel": _epilogue,
    "factors_kernel": _factors,
    "finish_kernel": _finish,
    "fp8_blocks_kernel": _fp8_rows,
    "fp8_gemm_kernel": _fp8_gemm,
    "fp8_rows_kernel": _fp8_rows,
    "gemm_pointer_kernel": _gemm,
    "gemm_tma_kernel": _gemm,
    "hash_kernel": _hash,
    "lost4_kernel": _lost_rows,
    "lost8_kernel": _lost_rows,
    "merge_kernel": _merge,
    "multi_drop_kernel": _rows,
    "multi_sum_kernel": _sum,
    "norm_kernel": _norm,
    "planes_bwd_kernel": _compose_bwd,
    "planes_fwd_kernel": _compose_fwd,
    "quant4_kernel": _quant4,
    "quant4_strips_kernel": _quant4,
    "quant8_kernel": _quant8,
    "rest_kernel": _rest,
    "rows_kernel": _rows,
    "scale_kernel": _scale,
    "segment_scan_kernel": _segment_scan,
    "segment_total_kernel": _segment_total,
    "shrink_kernel": _shrink,
    "small_codes_kernel": _small_codes,
    "small_kernel": _small,
    "small_norm_kernel": _small_norm,
    "split_kernel": _split,
    "sum_kernel": _sum,
}


def launched(grid: Any, metadata: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Triton's ``launch_metadata``: asked for by those who listen to launches, by nobody else. Names as proton has them."""
    cost = COSTS[metadata.name](**args)
    return {"name": metadata.name} | {key: value for key, value in cost._asdict().items() if value}
