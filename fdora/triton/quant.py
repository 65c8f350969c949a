"""The row norm of W + s B A where W is codes and scales: decoded in registers, no dense W, or a dense W out of the same pass.

As in norm.py a program owns one tile and writes a partial sum per row, which a second kernel adds in a fixed order. What a
tile costs to decode, and the roofs: kernels/quant.py.

The number is that of the float32 weights w = value(code) * scale, rounded once. A nested scale is
``code256[code] * scales2 + offset``, rounded twice, as bitsandbytes has it; one in e4m3 is rounded after the global scale.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdora._torch import needs_dispatcher
from fdora.quant import Codes8, Lut4, QuantSpec
from fdora.triton.configs import quant_config
from fdora.triton.copy import in_dtype
from fdora.triton.kernels.quant import quant4_kernel, quant8_kernel
from fdora.triton.norm import GROUP_N
from fdora.triton.op import op
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import INTERPRETED, Device, cdiv
from fdora.triton.runtime.plan import Array, Like, Plan, Scalar
from fdora.triton.runtime.walk import plan_for, run
from fdora.triton.split import rows_at_a_time, split_A, split_B
from fdora.triton.sums import column_sums

SECOND = 256  # scales under one of the second level: bitsandbytes knows no other number
TABLES, SCALES, CODES, MODES = (
    ("nf4", "fp4", "e2m1"),
    ("fp32", "nested", "e8m0", "e4m3"),
    ("int8", "e4m3"),
    ("tensor", "row", "block"),
)


class Four(NamedTuple):
    """How 4-bit codes are to be read. ``flat``: a group may go on in the next row."""

    table: str
    high_first: bool
    group: int
    scales: str
    flat: bool


class Eight(NamedTuple):
    """How 8-bit codes are to be read; ``block``: of rows and columns under one scale, for the mode "block"."""

    code: str
    mode: str
    block: tuple[int, int]


Form = Four | Eight


def quant_norm(
    spec: Any, tensors: Sequence[Tensor], A: Tensor, B: Tensor, s: float, squared: bool = False,
    dense_dtype: torch.dtype | None = None,
) -> Any:  # fmt: skip
    """c (N,) float32 of W + s B A; with ``dense_dtype`` also W (N, K), each weight rounded once.

    ``spec`` has the ``shape`` (N, K) and the ``facts`` of a :class:`Four` or an :class:`Eight`. ``tensors``: (codes, scales)
    and, for nested scales, (code256, scales2, offset), for e4m3 scales (global_scale,).
    """
    c, *dense = _called(spec.shape, _form(spec.facts), tensors, A, B, s, squared, dense_dtype)
    return (c, dense[0]) if dense_dtype is not None else c


def _called(
    shape: tuple[int, int], form: Form, tensors: Sequence[Tensor], A: Tensor, B: Tensor, s: float, squared: bool,
    dense: torch.dtype | None,
) -> list[Tensor]:  # fmt: skip
    text, numbers = _flat(form)
    call = quant_row_norm if needs_dispatcher(tensors[0]) else _quant_row_norm
    return call(list(tensors), A, B, s, *shape, text, numbers, squared, dense)


def norm_of_codes(
    spec: QuantSpec, tensors: Sequence[Tensor | None], A: Tensor, B: Tensor, s: float, squared: bool
) -> Tensor | None:
    """:func:`quant_norm` of a QuantWeight; None where no kernel reads its format."""
    found = _kernel_form(spec, tensors)
    if found is None:
        return None
    form, stored = found
    return _called(spec.shape, form, stored, A, B, s, squared, None)[0]


def _kernel_form(spec: QuantSpec, tensors: Sequence[Tensor | None]) -> tuple[Form, list[Tensor]] | None:
    """How a kernel is to read it. A divisor or a unit that all scales share goes into a tensor: a rounding of c, not of W."""
    stored = [t for t in tensors if t is not None]
    facts = spec.facts
    if isinstance(facts, Lut4):
        scales, _, how = facts.scales.partition("4m3")
        if how == "/global":
            stored[2] = stored[2].reciprocal()
        return Four(facts.table, facts.hi_first, facts.group, "e4m3" if how else scales, facts.layout == "flat"), stored
    if isinstance(facts, Codes8):
        if facts.unit != 1.0:
            stored[1] = stored[1] * facts.unit
        return Eight(facts.code, facts.scale, facts.block if facts.scale == "block" else (1, 1)), stored
    return None


def dequantize_norm(
    spec: Any, tensors: Sequence[Tensor], A: Tensor, B: Tensor, s: float, dtype: torch.dtype | None = None
) -> Any:
    """(c, W): one read of the codes. W in ``dtype``, or in that of the spec."""
    return quant_norm(spec, tensors, A, B, s, dense_dtype=spec.dtype if dtype is None else dtype)


def _form(facts: Any) -> Form:
    if hasattr(facts, "table"):
        return Four(facts.table, bool(facts.high_first), int(facts.group), facts.scales, bool(facts.flat))
    return Eight(facts.code, facts.mode, (int(facts.block[0]), int(facts.block[1])))


def _flat(form: Form) -> tuple[list[str], list[int]]:
    """As an op takes it."""
    if isinstance(form, Four):
        return [form.table, form.scales], [form.high_first, form.group, form.flat]
    return [form.code, form.mode], list(form.block)


def _formed(text: Sequence[str], numbers: Sequence[int]) -> Form:
    if text[0] in TABLES:
        high_first, group, flat = numbers
        return Four(text[0], bool(high_first), group, text[1], bool(flat))
    return Eight(text[0], text[1], (numbers[0], numbers[1]))


def _quant_row_norm(
    tensors: Sequence[Tensor], A: Tensor, B: Tensor, s: float, N: int, K: int, text: Sequence[str], numbers: Sequence[int],
    squared: bool, dense: torch.dtype | None,
) -> list[Tensor]:  # fmt: skip
    return list(run(*_planned(tensors, A, B, s, N, K, text, numbers, squared, dense)))


def _planned(
    tensors: Sequence[Tensor], A: Tensor, B: Tensor, s: float, N: int, K: int, text: Sequence[str], numbers: Sequence[int],
    squared: bool, dense: torch.dtype | None,
) -> tuple[Plan, tuple, tuple]:  # fmt: skip
    every = (A, B, *tensors)
    return plan_for(plan_quant_norm, every, (N, K), _formed(text, numbers), squared, dense), every, (s,)


def plan_quant_norm(
    likes: Sequence[Like | None], device: Device, shape: tuple[int, int], form: Form, squared: bool, dense: torch.dtype | None
) -> Plan:
    """likes: A, B, then those of the weight. Pure."""
    plan = Builder("dora_norm of codes" if dense is None else "dora_norm of codes, and dense W", device)
    A, B = map(plan.matrix, likes[:2])
    W = _weight(plan, likes[2:], shape, form)
    s, c = plan.scalar("s"), plan.result("c", (shape[0],), torch.float32)
    out = None if dense is None else plan.result("W", shape, dense)
    plan.path = "one pass over the codes, " + (
        "nothing of the size of W written" if dense is None else "which writes dense W, too"
    )
    _norm(plan, W, A, B, s, c, out, squared)
    return plan.plan()


class _Weight(NamedTuple):
    """A W of codes among the arrays of a plan."""

    shape: tuple[int, int]
    form: Form
    codes: Array
    rest: tuple[Array | None, ...]  # scales, and what these need


def _weight(plan: Builder, likes: Sequence[Like | None], shape: tuple[int, int], form: Form) -> _Weight:
    """Codes of 4 bits and all scales without gaps; codes of 8 bits as they lie."""
    _check(likes, shape, form)
    if isinstance(form, Four):
        codes, scales, *rest = map(plan.flat, likes)
        if form.scales == "e8m0" or form.scales == "e4m3":
            scales = _as_bytes(scales)
        return _Weight(shape, form, _as_bytes(codes), (scales, *rest, *[None] * (3 - len(rest))))
    codes = plan.matrix(likes[0])
    return _Weight(shape, form, _as_bytes(codes) if form.code == "e4m3" else codes, (plan.flat(likes[1]),))


def _as_bytes(t: Array) -> Array:
    assert t.itemsize == 1
    return t.words(t.shape, t.stride, torch.uint8)


def _check(likes: Sequence[Like | None], shape: tuple[int, int], form: Form) -> None:
    """What a kernel would read past the end of, or read wrongly."""
    N, K = shape
    sizes = [0 if like is None else like.nbytes // like.dtype.itemsize for like in likes]
    if isinstance(form, Four):
        groups = cdiv(N * K, form.group) if form.flat else N * cdiv(K, form.group)
        more = {"nested": [256, cdiv(groups, SECOND), 1], "e4m3": [1]}.get(form.scales, [])
        wanted = [cdiv(N * K, 2), groups, *more]
        known = form.table in TABLES and form.scales in SCALES
    else:
        groups = {"tensor": 1, "row": N}.get(form.mode, cdiv(N, form.block[0]) * cdiv(K, form.block[1]))
        wanted = [N * K, groups]
        known = form.code in CODES and form.mode in MODES
    if not known:
        raise ValueError(f"no kernel reads weights of {form}")
    if sizes != wanted:
        raise ValueError(f"a weight of shape {tuple(shape)} and {form} has tensors of {wanted} elements, got {sizes}")


def _norm(plan: Builder, W: _Weight, A: Array, B: Array, s: Scalar, c: Array, dense: Array | None, squared: bool) -> None:
    (N, K), R = W.shape, A.shape[0]
    if A.dtype != B.dtype:  # products want one dtype; both hold the values exactly in the wider
        A, B = in_dtype(plan, A, torch.float32), in_dtype(plan, B, torch.float32)
    rows = 0 if A.itemsize == 2 else rows_at_a_time(N, K, R, None, 4 * max(1, cdiv(K, 64)))
    split = rows > 0
    if split:
        plan.path += "; float32 factors as float16 ones of three times the rank"
    a, by_k = split_A(plan, A) if split else (A, None)
    for i in range(0, N, rows or max(1, N)):
        j = min(N, i + (rows or N))
        b, by_n = split_B(plan, B.rows(i, j)) if split else (B.rows(i, j), None)
        _norm_of_rows(plan, W, a, b, by_n, by_k, c.rows(i, j), dense, s, i, squared)


def _norm_of_rows(
    plan: Builder, W: _Weight, A: Array, B: Array, by_n: Array | None, by_k: Array | None, c: Array, dense: Array | None,
    s: Scalar, first: int, squared: bool,
) -> None:  # fmt: skip
    N, K, R, form, capability = c.shape[0], W.shape[1], A.shape[0], W.form, plan.device.capability
    config = quant_config(R, A.itemsize == 2, capability, _in_pairs(form, K))
    block_n, block_k, block_r, precision, num_warps, num_stages, _ = config
    tiles = cdiv(K, block_k)
    partial = plan.temp((tiles, N), torch.float32)
    even = N % block_n == 0 and K % block_k == 0 and R % block_r == 0
    tile = (block_n, block_k, block_r, GROUP_N, even, precision, by_n is not None)
    common = (A, B, by_n, by_k, partial, dense, s, first, N, K, R)
    strides: tuple = (*A.stride, *B.stride)
    ptx = capability > 0 and not INTERPRETED
    kernel: Any
    how: tuple
    if isinstance(form, Four):
        groups = cdiv(K, form.group)
        pairs = _in_pairs(form, K)
        how = (form.table, form.high_first, form.group, form.scales, form.flat, pairs, ptx, dense is not None)
        kernel, args = quant4_kernel, (W.codes, *W.rest, *common, groups, *strides)
    else:
        by_bits = form.code == "e4m3" and capability < 89
        how = (form.code, by_bits, form.mode, *form.block, ptx, dense is not None)
        kernel, args = quant8_kernel, (W.codes, *W.rest, *common, cdiv(K, form.block[1]), *W.codes.stride, *strides)
    plan.launch(kernel, (cdiv(N, block_n) * tiles,), args, (*how, *tile), num_warps, num_stages)
    column_sums(plan, partial, c, sqrt=not squared)


def _in_pairs(form: Form, K: int) -> bool:
    """Whether a row of W is whole bytes and groups, and a tile whole groups or within one."""
    if isinstance(form, Eight):
        return True
    power = form.group & (form.group - 1) == 0 and form.group > 1
    return K % 2 == 0 and power and (K % form.group == 0 or not form.flat)


def _fake_quant_row_norm(tensors, A, B, s, N, K, text, numbers, squared, dense):
    c = A.new_empty(N, dtype=torch.float32)
    return [c] if dense is None else [c, A.new_empty((N, K), dtype=dense)]


quant_row_norm = op(
    "quant_row_norm", _quant_row_norm, _fake_quant_row_norm, _planned,
    "(Tensor[] tensors, Tensor A, Tensor B, float s, SymInt N, SymInt K, str[] text, int[] numbers, bool squared, "
    "ScalarType? dense) -> Tensor[]",
)  # fmt: skip
