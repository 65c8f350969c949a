"""What stands around the products of experts: rows to their experts and back, and the gated activation; see ../experts.py."""

from __future__ import annotations

import triton
import triton.language as tl

from fdora.triton.kernels.act import share_of, slope_of
from fdora.triton.kernels.tile import Matrix, addresses, block_on, loaded, put, store, vector, within, zeros
from fdora.triton.runtime.cost import kernel

SHARPNESS, LIMIT = map(tl.constexpr, (1.702, 7.0))  # as fdora/eager/experts.py


@kernel("rows place gates out")
def combine_kernel(
    rows, place, gates, out, T, N, k, stride_rows, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """out[t] = sum over j, in their order, of gates[t, j] rows[place[t, j]]."""
    t, n = block_on(0, BLOCK_M), block_on(1, BLOCK_N)
    acc = zeros(BLOCK_M, BLOCK_N)
    for j in range(0, k):
        at = tl.load(place + t * k + j, mask=t < T, other=0)
        v = tl.load(addresses(Matrix(rows, stride_rows, None), at, n), mask=within(t, n, T, N), other=0.0).to(tl.float32)
        if gates is not None:
            v = v * tl.load(gates + t * k + j, mask=t < T, other=0.0).to(tl.float32)[:, None]
        acc += v
    store(acc, Matrix(out, N, None), t, n, T, N)


@kernel("dy rows place out")
def gates_kernel(
    dy, rows, place, out, M, N, k, stride_dy, stride_rows, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):
    """out[t, j] = dy[t] . rows[place[t, j]]; M pairs (t, j)."""
    i = block_on(0, BLOCK_M)
    at = vector(place, i, M)
    acc = zeros(BLOCK_M)
    for n0 in range(0, N, BLOCK_N):
        n = n0 + tl.arange(0, BLOCK_N)
        mask = within(i, n, M, N)
        d = tl.load(addresses(Matrix(dy, stride_dy, None), i // k, n), mask=mask, other=0.0).to(tl.float32)
        v = tl.load(addresses(Matrix(rows, stride_rows, None), at, n), mask=mask, other=0.0).to(tl.float32)
        acc += tl.sum(d * v, axis=1)
    put(acc, out, i, M)


@triton.jit
def _pair(z, t, f, M, F, ACT: tl.constexpr):
    """Where gate and up of these elements lie in z (M, 2 F), and both in float32."""
    row = t[:, None].to(tl.int64) * (2 * F)
    if ACT == "gpt_oss":
        gate_at, up_at = row + 2 * f[None, :], row + 2 * f[None, :] + 1
    else:
        gate_at, up_at = row + f[None, :], row + F + f[None, :]
    mask = within(t, f, M, F)
    gate = tl.load(z + gate_at, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(z + up_at, mask=mask, other=0.0).to(tl.float32)
    return gate_at, up_at, gate, up, mask


@triton.jit
def _limited(up):
    """1 more than up within the limits. tl.minimum alone would make a number of a NaN."""
    return tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1


@kernel("z a")
def gated_fwd_kernel(z, a, M, F, ACT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    t, f = block_on(0, BLOCK_M), block_on(1, BLOCK_N)
    _, _, gate, up, _ = _pair(z, t, f, M, F, ACT)
    if ACT == "gpt_oss":
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        out = gate * tl.sigmoid(gate * SHARPNESS) * _limited(up)
    else:
        out = gate * share_of(gate, ACT) * up
    store(out, Matrix(a, F, None), t, f, M, F)


@kernel("da z dz")
def gated_bwd_kernel(da, z, dz, M, F, ACT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    t, f = block_on(0, BLOCK_M), block_on(1, BLOCK_N)
    gate_at, up_at, gate, up, mask = _pair(z, t, f, M, F, ACT)
    d = loaded(Matrix(da, F, None), t, f, M, F).to(tl.float32)
    if ACT == "gpt_oss":
        moves_gate, moves_up = ~(gate > LIMIT), ~((up > LIMIT) | (up < -LIMIT))
        gate = tl.where(moves_gate, gate, LIMIT)
        up = _limited(up)
        share = tl.sigmoid(gate * SHARPNESS)
        value = gate * share
        dgate = tl.where(moves_gate, d * up * (share + SHARPNESS * value * (1 - share)), 0.0)
        dup = tl.where(moves_up, d * value, 0.0)
    else:
        share = share_of(gate, ACT)
        dgate, dup = d * up * slope_of(gate, share, ACT), d * gate * share
    tl.store(dz + gate_at, dgate.to(dz.dtype.element_ty), mask=mask)
    tl.store(dz + up_at, dup.to(dz.dtype.element_ty), mask=mask)
