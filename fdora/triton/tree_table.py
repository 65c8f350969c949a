"""The table of layers that the kernels of kernels/tree.py read: where each layer lies, and which of them one launch serves."""

from __future__ import annotations

from collections.abc import Sequence
from struct import pack, unpack
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdora.quant import QuantWeight
from fdora.triton.codes import block_of, code_of, coded_of, has_ptx
from fdora.triton.kernels.decode import How
from fdora.triton.kernels.tree import WORDS16, WORDS32, WORDS64, Of
from fdora.triton.runtime.device import cdiv
from fdora.triton.tiles.configs import TreeConfig, tree_config

Tensors = Sequence[Tensor]  # of layers: W, A or B of each; a W may be a QuantWeight of 8-bit codes
Scales = Sequence[float]  # s of each
FIELDS = (  # the rows of the table, in the order of F_ in kernels/tree.py
    "W",
    "A",
    "B",
    "N",
    "K",
    "R",
    "stride_wn",
    "stride_wk",
    "stride_ar",
    "stride_ak",
    "stride_bn",
    "stride_br",
    "s",
    "items",
    "partial",
    "c",
    "form_a",
    "count_a",
    "form_b",
    "count_b",
    "kind",
    "leaf",
    "scales",
    "rows",
    "columns",
    "tops",
)
CHUNK = 1024  # columns of an item: a few tiles, so that the sums in between are a thousandth of W
MOST = 1024  # layers of a launch, whose item counts a program holds in registers
KIND = 3  # the eager backend has another: its words never match these
_DTYPES = {
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float32: "fp32",
    torch.float8_e4m3fn: "uint8",
    torch.int8: "int8",
}
ALL = 1 << 30  # rows or columns


def rows_of(W: Tensors, A: Tensors, B: Tensors, s: Scales, at: Sequence[int], capability: int) -> tuple[list[Row], int]:
    """The columns of the table, those of one kernel side by side, and how many partial sums and tops."""
    rows = [_row(i, *layer, capability) for i, layer in enumerate(zip(W, A, B, s, at, strict=True))]
    rows.sort(key=lambda row: row.order)
    partials = 0
    for row in rows:
        row.fields["tops"] = partials
        partials += cdiv(row.fields["K"], row.kernel[1].BLOCK_K) if row.split else 0
        row.fields["partial"] = partials
        partials += row.fields["N"] * cdiv(row.fields["K"], CHUNK)
    return rows, partials


class Row(NamedTuple):
    """A layer's column of the table, what its kernel is compiled for, and that as words, to sort by."""

    order: tuple[str, ...]
    kernel: tuple[Of, TreeConfig]
    fields: dict[str, int]
    split: bool


def _row(i: int, W: Any, A: Tensor, B: Tensor, s: float, at: int, capability: int) -> Row:
    (N, K), R, how, shared = W.shape, A.shape[0], None, (0, ALL, ALL)
    if isinstance(W, QuantWeight):
        form: Any = coded_of(W).form
        stored: Any = W.tensors
        W, scales, *_ = stored
        by_bits = code_of(form) == "e4m3" and capability < 89
        how = How(8, code_of(form), False, 1, "block", False, True, by_bits, 1, 1, has_ptx(capability))
        shared = _address(scales), *{"tensor": (ALL, ALL), "row": (1, ALL)}.get(form.scale, block_of(form))
    units = tuple(map(_unit, (W, A, B)))
    even = N % 128 == 0 and K % 128 == 0
    half = A.element_size() == B.element_size() == 2
    # Hopper's tiles bear masks beside a W of half precision: nothing spills. A vision tower's 4304 x 1152 has them.
    whole = all(units) and (even or (W.element_size() == 2 and 90 <= capability < 100))
    config = tree_config(R, half, W.element_size() <= 2, whole, capability)
    if how is not None and not (even and all(units)):  # masks of every element beside codes and split factors would spill
        config = config._replace(BLOCK_N=32)
    dtypes = tuple(_DTYPES[t.dtype] for t in (W, A, B))
    split = torch.float32 in (A.dtype, B.dtype)
    tile, whole = (config.BLOCK_N, config.BLOCK_K, config.BLOCK_R, CHUNK, config.AHEAD), R % config.BLOCK_R == 0
    of = Of._make((*dtypes, *units, even, whole, R <= config.BLOCK_R, split, how, *tile))
    sizes, strides = (*map(_address, (W, A, B)), N, K, R), (*W.stride(), *A.stride(), *B.stride())
    items, bits = cdiv(N, config.BLOCK_N) * cdiv(K, CHUNK), unpack("i", pack("f", s))[0]
    named_by = KIND + 16 * A.element_size() + 256 * B.element_size()
    # 0: rows_of knows where partials and tops begin
    values = (*sizes, *strides, bits, items, 0, at, *_form(A), *_form(B), named_by, i, *shared, 0)
    fields = dict(zip(FIELDS, values, strict=True))
    return Row(tuple(map(str, (*of, *config))), (of, config), fields, split)


def flops_of(row: Row) -> int:
    """Of B A; three products of float16 terms stand for one of float32."""
    return 2 * row.fields["N"] * row.fields["K"] * row.fields["R"] * (3 if row.split else 1)


def launches_of(rows: list[Row]) -> list[tuple]:
    """(first column, columns, items, constants, config) for each run of columns with one kernel."""
    found, first = [], 0
    while first < len(rows):
        last = first
        while last < len(rows) and last - first < MOST and rows[last].order == rows[first].order:
            last += 1
        items = sum(row.fields["items"] for row in rows[first:last])
        if items:
            found.append((first, last - first, items, *rows[first].kernel))
        first = last
    return found


def _address(t: Tensor) -> int:
    """Of a tensor without data, as much of it as decides between kernels."""
    return int(t.storage_offset()) * t.itemsize if t.is_meta else t.data_ptr()


def _unit(t: Tensor) -> int:
    """Elements in 16 bytes, where every row begins and ends at a multiple of those and its columns are adjacent; else 0."""
    unit = 16 // t.element_size()
    whole = t.shape[1] % unit == 0 and t.stride(0) % unit == 0
    return unit if t.stride(1) == 1 and whole and _address(t) % 16 == 0 else 0


def _form(t: Tensor) -> tuple[int, int]:
    """How its bits are read, and in how many words."""
    if t.is_contiguous() and t.nbytes % 8 == 0 and _address(t) % 8 == 0:
        return WORDS64.value, t.nbytes // 8
    return (WORDS32 if t.element_size() == 4 else WORDS16).value, t.numel()
