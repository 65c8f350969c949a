"""What a kernel must do at least, from its arguments: the flops of its products, and the bytes of what it reads and writes.

The same functions serve the plan, which has arrays (plan.py), and Triton's ``launch_metadata``, which has tensors: a profiler
such as proton sees what ``explain`` says. Vectors of one number per column are left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple


class Cost(NamedTuple):
    """Flops of products, by the width of their operands, and bytes."""

    flops16: float = 0
    flops32: float = 0
    bytes: float = 0
    flops8: float = 0

    @property
    def flops(self) -> float:
        return self.flops8 + self.flops16 + self.flops32

    def __add__(self, other: Any) -> Cost:
        return Cost(*(a + b for a, b in zip(self, other, strict=True)))


def product(M: int, N: int, K: int, operand: Any) -> Cost:
    """(M, K) (K, N), in the dtype of this operand."""
    flops, t = 2.0 * M * N * K, _matrix(operand)
    if t.dtype.itemsize == 1:
        return Cost(flops8=flops)
    return Cost(flops16=flops) if t.dtype.itemsize == 2 else Cost(flops32=flops)


def moved(*arrays: Any) -> Cost:
    return Cost(bytes=float(sum(_matrix(a).nbytes for a in arrays if a is not None)))


def _matrix(a: Any) -> Any:
    """Behind a tensor descriptor, the plan's or Triton's."""
    return getattr(a, "array", None) or getattr(a, "base", a)


# one function for each kernel, of its arguments by name


def _gemm(*, x, x_masked, w, h, b, out, pre_scale, residual, M, N, K, R, **_: Any) -> Cost:
    wide = K if x_masked is None else 2 * K
    return product(M, N, wide + R, x) + moved(x, x_masked, w, h, b, out, pre_scale, residual)


def _shrink(*, x, a, part, M, K, R, **_: Any) -> Cost:
    return product(M, R, K, x) + moved(x, a, part)


def _small(*, x, w, part, h, b, out, pre_scale, u, dA, M, N, K, R, ACCUMULATE, **_: Any) -> Cost:
    wide = K + R if u is None else K + 2 * R
    return product(M, N, wide, x) + moved(x, w, part, h, b, out, pre_scale, u, dA, out if ACCUMULATE else None)


def _small_codes(
    *, x, codes, scales, scales2, part, h, b, out, pre_scale, u, dA, M, N, K, R, ACCUMULATE, **_: Any
) -> Cost:  # fmt: skip
    wide = K + R if u is None else K + 2 * R
    what = moved(x, codes, scales, scales2, part, h, b, out, pre_scale, u, dA, out if ACCUMULATE else None)
    return product(M, N, wide, x) + what


def _codes_parts(*, x, codes, scales, scales2, out, M, N, K, **_: Any) -> Cost:
    return product(M, N, K, x) + moved(x, codes, scales, scales2, out)


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


def _again(*, lost, count, **_: Any) -> Cost:
    """What it asks; the products that it may form are of few columns."""
    return moved(lost, count)


def _lost(*, partial_m, lost, count, **_: Any) -> Cost:
    return moved(partial_m, lost, count)


def _finish(*, partial_m, partial_bias, partial_B, dB, **_: Any) -> Cost:
    return moved(partial_m, partial_bias, partial_B, dB)


def _norm(*, W, A, B, partial, N, K, R, **_: Any) -> Cost:
    return product(N, K, R, A) + moved(W, A, B, partial)


def _quant4(*, codes, scales, scales2, A, B, partial, dense, N, K, R, **_: Any) -> Cost:
    return product(N, K, R, A) + moved(codes, scales, scales2, A, B, partial, dense)


def _quant8(*, codes, scales, A, B, partial, dense, N, K, R, **_: Any) -> Cost:
    return product(N, K, R, A) + moved(codes, scales, A, B, partial, dense)


def _dequantize4(*, codes, scales, scales2, out, **_: Any) -> Cost:
    return moved(codes, scales, scales2, out)


def _dequantize8(*, codes, scales, out, **_: Any) -> Cost:
    return moved(codes, scales, out)


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


def _multi_expand(*, part, b, h, lora, M, N, R, **_: Any) -> Cost:
    return product(M, N, R, h) + moved(part, b, h, lora)


def _multi_small(*, x, w, lora, m, c, out, pre_scale, M, N, K, **_: Any) -> Cost:
    return product(M, N, K, x) + moved(x, w, lora, m, c, out, pre_scale)


def _multi_norm(*, W, A, B, partial, N, K, R, G, **_: Any) -> Cost:
    return product(N, K, R * G, A) + moved(W, A, B, partial)


def _multi_route(*, ids, offsets, order, **_: Any) -> Cost:
    return moved(ids, offsets, order)


def _multi_routes(*, ids, g, **_: Any) -> Cost:
    return moved(ids, g)


def _multi_root(*, partial, c, **_: Any) -> Cost:
    return moved(partial, c)


def _multi_ranks(*, ranks, **_: Any) -> Cost:
    return Cost(bytes=4.0 * ranks.shape[0])


def _rows(*, x, out, **_: Any) -> Cost:
    return moved(x, out)


COSTS: dict[str, Callable[..., Cost]] = {
    "act_bwd_kernel": _act_bwd,
    "act_fwd_kernel": _act_fwd,
    "bank_kernel": _rows,
    "add_parts_kernel": _add_parts,
    "again_kernel": _again,
    "choose_kernel": _choose,
    "codes_parts_kernel": _codes_parts,
    "compose_bwd_kernel": _compose_bwd,
    "compose_fwd_kernel": _compose_fwd,
    "copy_kernel": _copy,
    "dequantize4_kernel": _dequantize4,
    "dequantize8_kernel": _dequantize8,
    "drop_kernel": _drop,
    "embedding_kernel": _embedding,
    "epilogue_kernel": _epilogue,
    "finish_kernel": _finish,
    "fp8_blocks_kernel": _fp8_rows,
    "fp8_gemm_kernel": _fp8_gemm,
    "fp8_rows_kernel": _fp8_rows,
    "gemm_pointer_kernel": _gemm,
    "gemm_tma_kernel": _gemm,
    "hash_kernel": _hash,
    "lost_kernel": _lost,
    "merge_kernel": _merge,
    "multi_drop_kernel": _rows,
    "multi_epilogue_kernel": _multi_epilogue,
    "multi_expand_kernel": _multi_expand,
    "multi_finish_kernel": _multi_finish,
    "multi_gemm_pointer_kernel": _multi_gemm,
    "multi_gemm_tma_kernel": _multi_gemm,
    "multi_grad_kernel": _multi_grad,
    "multi_h_kernel": _multi_h,
    "multi_norm_kernel": _multi_norm,
    "multi_ranks_kernel": _multi_ranks,
    "multi_root_kernel": _multi_root,
    "multi_route_kernel": _multi_route,
    "multi_routes_kernel": _multi_routes,
    "multi_scale_kernel": _multi_scale,
    "multi_shrink_kernel": _multi_shrink,
    "multi_small_kernel": _multi_small,
    "multi_sum_kernel": _sum,
    "norm_kernel": _norm,
    "planes_bwd_kernel": _compose_bwd,
    "planes_fwd_kernel": _compose_fwd,
    "quant4_kernel": _quant4,
    "quant8_kernel": _quant8,
    "rest_kernel": _rest,
    "rows_kernel": _rows,
    "scale_kernel": _scale,
    "shrink_kernel": _shrink,
    "small_codes_kernel": _small_codes,
    "small_kernel": _small,
    "split_kernel": _split,
    "sum_kernel": _sum,
}


def launched(grid: Any, metadata: Any, args: dict[str, Any]) -> dict[str, Any]:
    """Triton's ``launch_metadata``: asked for by those who listen to launches, by nobody else. Names as proton has them."""
    cost = COSTS[metadata.name](**args)
    return {"name": metadata.name} | {key: value for key, value in cost._asdict().items() if value}
