"""Some rows or columns of a quantised weight, still quantised: what each process of tensor parallelism keeps of one.

A cut is exact or refused. It may pass only between the groups of values that share a scale, and between bytes: where it would
divide one, there is no such weight in the same format.

    rows       n K values follow each other in flat groups (nf4, fp4), so that n K must be whole groups; other rows are free,
               but for blocks of several (int8, fp8)
    columns    must be whole groups of every row; a flat group of rows that are no whole groups belongs to two of them
"""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from fdora._check import fail
from fdora.quant.codes8 import Codes8, with_transpose
from fdora.quant.lut4 import NESTED, Lut4, scales_of
from fdora.quant.weight import QuantWeight, bounds, read_as

FN = "quant.cut"


def cut(W: QuantWeight, *, rows: slice | None = None, columns: slice | None = None) -> QuantWeight:
    """``W[rows, columns]``, whose values are those of W bit for bit.

        mine = cut(W, rows=slice(i * N // world, (i + 1) * N // world))          # q, k, v, gate, up
        y = dora_linear(x, mine, A, B_of_these_rows, m_of_these_rows, s=s)
        mine = cut(W, columns=slice(i * K // world, (i + 1) * K // world))       # o, down: the norm is of whole rows
        c = dora_norm(mine, A_of_these_columns, B, s=s, group=group)

    Args:
      W: of kind nf4, fp4, mxfp4, nvfp4, int8 or fp8.
      rows: a slice with step 1; None is all. Of nf4 and fp4 the numbers before it must be whole groups (with K a multiple of
        the group any row is); of blocks, whole blocks.
      columns: the same. Both ends must be ends of a group in every row, or K; of nf4 and fp4 K must be a multiple of the group.

    Returns:
      ``QuantWeight`` of the same kind and dtype. Rows are views, columns copies. Scales that are quantised themselves (double
      quantisation) are kept so where the cut leaves their groups whole, else decoded to float32: one number for each group.

    Raises:
      FdoraError: another kind; a cut that would divide a group, a block or a byte.

    Memory: rows share that of W, but for such scales; keeps nothing.
    References: none; where the groups lie is said by the constructor of each kind.
    """
    facts = W.facts if isinstance(W, QuantWeight) else None
    if not isinstance(facts, (Lut4, Codes8)):
        have = f"{W.kind}, whose layout no cut is known of" if isinstance(W, QuantWeight) else f"a {type(W).__name__}"
        raise fail(FN, "W", "of kind nf4, fp4, mxfp4, nvfp4, int8 or fp8", have, "Cut the weight, then quantise each part.")
    one = _codes8 if isinstance(facts, Codes8) else _flat if facts.layout == "flat" else _row
    if rows is not None:
        W = one(W, *bounds(FN, "rows", rows, W.shape[0]), 0)
    if columns is not None:
        W = one(W, *bounds(FN, "columns", columns, W.shape[1]), 1)
    return W


def _codes8(W: QuantWeight, first: int, last: int, axis: int) -> QuantWeight:
    facts, (codes, scales) = read_as(W, Codes8, 2)
    if facts.scale == "block":
        size = facts.block[axis]
        _whole(W, first, last, axis, size)
        scales = scales.narrow(axis, first // size, -(-last // size) - first // size).contiguous()
    elif facts.scale == "row" and axis == 0:
        scales = scales[first:last]
    one = replace(W, facts=facts._replace(transposed=False))
    part = _made(one, (codes.narrow(axis, first, last - first).contiguous(), scales), first, last, axis)
    return with_transpose(part) if facts.transposed else part


def _row(W: QuantWeight, first: int, last: int, axis: int) -> QuantWeight:
    facts, (codes, scales) = read_as(W, Lut4, 2)
    rest = W.tensors[2:]
    if axis == 0:
        return _made(W, (codes[first:last], scales[first:last], *rest), first, last, axis)
    _whole(W, first, last, axis, facts.group)
    codes = codes[:, first // 2 : -(-last // 2)].contiguous()
    scales = scales[:, first // facts.group : -(-last // facts.group)].contiguous()
    return _made(W, (codes, scales, *rest), first, last, axis)


def _flat(W: QuantWeight, first: int, last: int, axis: int) -> QuantWeight:
    facts, (codes,) = read_as(W, Lut4, 1)
    N, K = W.shape
    group = facts.group
    if axis == 0:
        _whole(W, first, last, axis, group, K)
        b0, b1 = first * K // group, -(-last * K // group)
        codes, many = codes[first * K // 2 : -(-last * K // 2)], b0 % NESTED == 0
        if facts.scales == "nested" and many:  # whole groups of scales
            _, (_, scales, code256, outer, offset) = read_as(W, Lut4, 5)
            outer = outer[b0 // NESTED : -(-b1 // NESTED)]
            return _made(W, (codes, scales[b0:b1], code256, outer, offset), first, last, axis)
        return _made(_plain(W), (codes, scales_of(W, b0, b1)), first, last, axis)
    if K % group:
        have = f"{K}, so that groups of {group} reach over rows"
        raise fail(
            FN, "W", f"with K a multiple of {group} to be cut by columns", have, "Cut the weight, then quantise each part."
        )
    _whole(W, first, last, axis, group)
    scales = scales_of(W, 0, N * K // group).view(N, K // group)[:, first // group : -(-last // group)]
    codes = codes.view(N, K // 2)[:, first // 2 : -(-last // 2)]
    return _made(_plain(W), (codes.reshape(-1), scales.reshape(-1)), first, last, axis)


def _plain(W: QuantWeight) -> QuantWeight:
    facts, _ = read_as(W, Lut4, 0)
    return replace(W, facts=facts._replace(scales="fp32"))


def _made(W: QuantWeight, tensors: tuple[Tensor | None, ...], first: int, last: int, axis: int) -> QuantWeight:
    N, K = W.shape
    return replace(W, tensors=tensors, shape=(last - first, K) if axis == 0 else (N, last - first))


def _whole(W: QuantWeight, first: int, last: int, axis: int, group: int, each: int = 1) -> None:
    """Whether both ends are ends of a group; ``each``: how many numbers of a group a step along the axis passes."""
    length = W.shape[axis]
    if first * each % group == 0 and (last * each % group == 0 or last == length):
        return
    arg = ("rows", "columns")[axis]
    what = f"{group} numbers" if each > 1 else f"{group} {arg}"
    want = f"between whole groups of {what}, which share a scale in this {W.kind} weight of {W.shape}"
    raise fail(FN, arg, want, f"{first} to {last}", "Cut elsewhere, or cut the weight and quantise each part.")
