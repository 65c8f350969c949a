"""Norms and merges of a quantised W: from its codes where the backend has a kernel, else some rows at a time.

c is the norm of the weight as its format decodes it, in float32 (float64 where the weight stands for that), before anything is
rounded to the dtype of products: bfloat16 would move it by up to 4e-4.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from fdora._recording import active
from fdora._records import NormOf
from fdora.autograd._ops import OPS
from fdora.eager import norm as eager
from fdora.eager._matmul import acc_dtype
from fdora.eager.norm import blocks, default_bytes
from fdora.eager.norm import smallest_bytes as dense_bytes
from fdora.quant import QuantWeight
from fdora.quant.part import experts_of
from fdora.quant.quantize import Rows, bounds_of, quantize_rows
from fdora.quant.weight import kind_of


def norm_fwd(of: NormOf, backend: str, squared: bool = False) -> Tensor:
    """c (N,), or its square."""
    (W, A, B, s, _, max_bytes), ops = of, OPS[backend]
    if ops.norm_of_codes is not None and max_bytes is None and W.dtype != torch.float64:
        c = ops.norm_of_codes(W.spec, W.tensors, A, B, s, squared)
        if c is not None:
            return c
    return _by_rows(of, rows_of(W), norm_parts(W, max_bytes), ops.sqnorm_fwd if squared else ops.norm_fwd)


sqnorm_fwd = partial(norm_fwd, squared=True)


def _by_rows(of: NormOf, rows: Rows, parts: Sequence[tuple[int, int, int]], forward: Callable[[NormOf], Tensor]) -> Tensor:
    """Of W, some ``rows`` of it decoded at a time."""
    _, A, B, s, base, _ = of
    return torch.cat(
        [forward(NormOf(rows(i, j), A, B[i:j], s, None if base is None else base[i:j], budget)) for i, j, budget in parts]
    )


def norm_guarded(of: NormOf, c: Tensor, seen: Tensor, backend: str) -> tuple[Tensor, Tensor]:
    """c and the fingerprint of A, B, s: the c given where the fingerprint given is theirs.

    From codes the kernels decide, as of a dense W. Of a format that no kernel reads c is computed as the eager backend does.
    """
    (W, A, B, s, _, max_bytes), ops = of, OPS[backend]
    if ops.norm_of_codes_guarded is not None and max_bytes is None and W.dtype != torch.float64:
        found = ops.norm_of_codes_guarded(W.spec, W.tensors, A, B, s, c, seen)
        if found is not None:
            return found
    return eager.norm_guarded(of, c, seen, partial(norm_fwd, backend=backend))


def stack_norms(W: QuantWeight, A: Tensor, B: Tensor, s: float, backend: str, wanted: Sequence[bool] = ()) -> Tensor:
    """c (E, N) of a W (E N, K) of experts, one behind the other; A (E, r, K), B (E, N, r). ``wanted``: of which experts, the
    others may get ones; of all where it is empty."""
    of_codes = OPS[backend].stack_norms_of_codes
    found = None if of_codes is None or W.dtype == torch.float64 else of_codes(W.spec, W.tensors, A, B, s)
    if found is not None:
        return found
    (E, N, _), rows = B.shape, rows_of(W)
    parts = norm_parts(experts_of(W, E)[0], None)

    def of(e: int) -> Tensor:
        if wanted and not wanted[e]:
            return A.new_ones(N, dtype=acc_dtype(W.dtype))
        return _by_rows(NormOf(W, A[e], B[e], s), lambda i, j: rows(e * N + i, e * N + j), parts, OPS[backend].norm_fwd)

    return torch.stack([of(e) for e in range(E)])


def base_sqnorm(W: QuantWeight, max_bytes: int | None, backend: str) -> Tensor:
    rows = rows_of(W)
    return torch.cat([OPS[backend].base_sqnorm(rows(i, j), budget) for i, j, budget in norm_parts(W, max_bytes)])


def merge(W: QuantWeight, A: Tensor, B: Tensor, m: Tensor, c: Tensor, s: float, backend: str) -> tuple[QuantWeight, Tensor]:
    """g (W + s B A) in the format of W, and what that loses: ||result - g (W + s B A)|| / ||g (W + s B A)||, float32.

    The merged rows are float32 until they are codes, never rounded to W.dtype between. They are formed again for the error,
    and once more where all rows share a scale: little beside what quantising them costs.
    """
    a, b, m = A.float(), B.float(), m.float()

    def rows(i: int, j: int) -> Tensor:
        part = W.dequantize(torch.float32, rows=slice(i, j))
        return OPS[backend].merge_fwd(part, a, b[i:j], m[i:j], c[i:j], s)

    merged = quantize_rows(rows, W.spec, W.device)
    lost, whole = [], []
    for i, j in bounds_of(W.spec):
        exact = rows(i, j)
        whole.append(torch.linalg.vector_norm(exact))
        lost.append(torch.linalg.vector_norm(merged.dequantize(torch.float32, rows=slice(i, j)) - exact))
    size = torch.linalg.vector_norm(torch.stack(whole))
    return merged, torch.linalg.vector_norm(torch.stack(lost)) / size.clamp_min(torch.finfo(torch.float32).tiny)


def smallest_bytes(W: QuantWeight, A: Tensor, B: Tensor, factored: bool) -> int:
    """One decoded row, or the least tile of the norm, and as much again for the other. Decoding takes its own beside that."""
    row = A.new_empty((1, W.shape[1]), dtype=acc_dtype(W.dtype), device="meta").expand(W.shape)
    return 2 * max(row.shape[1] * row.itemsize, dense_bytes(row, A, B, factored))


def norm_parts(W: QuantWeight, max_bytes: int | None) -> list[tuple[int, int, int]]:
    """Runs of rows that are decoded together, and the bytes that the norm of each may take: half of all. The other half is the
    decoded rows."""
    budget, (N, K) = default_bytes(W.device) if max_bytes is None else max_bytes, W.shape
    rows = max(1, budget // (2 * acc_dtype(W.dtype).itemsize * max(1, K)))
    return [(i, j, budget // 2) for i, j in blocks(N, rows)]


def rows_of(W: QuantWeight) -> Rows:
    """Decodes rows i to j in the dtype of norms. A kind of which some rows cost as much as all is decoded once, as a whole."""
    acc = acc_dtype(W.dtype)
    if not is_whole(W):
        return lambda i, j: W.dequantize(acc, rows=slice(i, j))
    whole = decoded(W)
    return lambda i, j: whole[i:j].to(acc)


def is_whole(W: object) -> bool:
    """Whether some rows cost as much as all."""
    return isinstance(W, QuantWeight) and not kind_of(W.kind).by_rows and 0 not in W.shape


def decoded(W: QuantWeight) -> Tensor:
    """All of it, in the dtype in which it is decoded: what a kind that is_whole holds anyway while some rows are read."""
    if W.device.type == "meta" and (noted := active()) is not None:
        return noted.decode(W, 0, W.shape[0], torch.float32)
    with torch.no_grad():
        return kind_of(W.kind).dequantize(W, 0, W.shape[0])
