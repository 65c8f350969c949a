"""Rows and columns of quantised weights: bit for bit those of the whole, or refused."""

import io
import pickle

import pytest
import torch

from fdora import FdoraError
from fdora.functional import dora_linear, dora_norm
from fdora.quant import cut, from_gptq, quantize
from tests.close import assert_exact

N, K = 24, 256


def kinds():
    W = torch.randn(N, K, generator=torch.Generator().manual_seed(0))
    yield "nf4", quantize(W, "nf4"), 1, 64
    yield "nf4 nested", quantize(W, "nf4", nested=True), 1, 64
    yield "fp4, 128", quantize(W, "fp4", group=128), 1, 128
    yield "mxfp4", quantize(W, "mxfp4"), 1, 32
    yield "nvfp4", quantize(W, "nvfp4"), 1, 16
    yield "int8", quantize(W, "int8"), 1, 1
    yield "fp8 blocks", quantize(W, "fp8", block=(8, 64)), 8, 64
    yield "ragged mxfp4", quantize(W[:, :40], "mxfp4"), 1, 32
    yield "ragged fp8 blocks", quantize(W[:21, :100], "fp8", block=(8, 64)), 8, 64


ALL = {name: rest for name, *rest in kinds()}


@pytest.mark.parametrize("name", ALL)
def test_values_are_those_of_the_whole(name):
    W, row, column = ALL[name]
    rows, columns = W.shape
    whole = W.dequantize(torch.float32)
    for first in range(0, rows, row):
        for last in (*range(first + row, rows, 5 * row), rows):
            part = cut(W, rows=slice(first, last))
            assert part.shape == (last - first, columns) and part.kind == W.kind
            assert torch.equal(part.dequantize(torch.float32), whole[first:last])
    for first in range(0, columns, 2 * column):
        for last in (first + column, columns):
            part = cut(W, columns=slice(first, min(last, columns)))
            assert torch.equal(part.dequantize(torch.float32), whole[:, first:last])
    both = cut(W, rows=slice(row, 2 * row), columns=slice(column, None))
    assert torch.equal(both.dequantize(torch.float32), whole[row : 2 * row, column:])
    assert both.spec.weight(both.tensors).nbytes < W.nbytes
    empty = cut(W, rows=slice(row, row), columns=slice(column, None))  # a process that is left without rows
    assert empty.dequantize().shape == (0, columns - column)


@pytest.mark.parametrize("save", [torch.save, lambda part, file: pickle.dump(part, file)], ids=["torch", "pickle"])
@pytest.mark.parametrize("name", ["nf4", "int8", "mxfp4"])
def test_a_file_has_the_part_alone(name, save):
    """Rows are views, of which torch.save writes the whole storage."""
    W, sizes = quantize(torch.randn(512, 256), name), []
    for each in (cut(W, rows=slice(0, 64)), W):
        save(each, file := io.BytesIO())
        sizes.append(len(file.getvalue()))
    assert sizes[0] < sizes[1] / 4


def test_nested_scales_stay_where_their_groups_do():
    W = quantize(torch.randn(512, 128), "nf4", nested=True)
    assert cut(W, rows=slice(128, 384)).facts == W.facts  # 256 scales are 128 rows
    assert cut(W, rows=slice(64, None)).facts.scales == "fp32"


def test_parts_are_tensor_parallel():
    """Rows need nothing; columns the norm of whole rows: squares that are added up, here by hand."""
    draw = torch.Generator().manual_seed(1)
    W = quantize(torch.randn(N, K, generator=draw), "nf4", dtype=torch.float64)
    A, B, x, m = (torch.randn(size, generator=draw).double() for size in ((4, K), (N, 4), (3, K), (N,)))
    want, c = dora_linear(x, W, A, B, m, s=0.5), dora_norm(W, A, B, s=0.5)
    halves = [slice(0, N // 2), slice(N // 2, N)]
    got = [dora_linear(x, cut(W, rows=h), A, B[h], m[h], s=0.5) for h in halves]
    assert_exact(torch.cat(got, 1), want)
    halves = [slice(0, K // 2), slice(K // 2, K)]
    parts = [(cut(W, columns=h), A[:, h].contiguous()) for h in halves]
    squares = sum(dora_norm(w, a, B, s=0.5, squared=True) for w, a in parts)
    assert_exact(squares.sqrt(), c)
    got = sum(dora_linear(x[:, h], w, a, B, m, s=0.5, norm=c) for h, (w, a) in zip(halves, parts, strict=True))
    assert_exact(got, want)


def test_what_would_divide_a_group_is_refused():
    with pytest.raises(FdoraError, match=r"`columns` must be between whole groups of 64 columns.*32 to 256"):
        cut(ALL["nf4"][0], columns=slice(32, None))
    with pytest.raises(FdoraError, match=r"`rows` must be between whole groups of 8 rows.*0 to 12"):
        cut(ALL["fp8 blocks"][0], rows=slice(0, 12))
    narrow = quantize(torch.randn(8, 40), "nf4")
    with pytest.raises(FdoraError, match=r"`rows` must be between whole groups of 64 numbers"):
        cut(narrow, rows=slice(0, 2))
    assert torch.equal(cut(narrow, rows=slice(0, 8)).dequantize(), narrow.dequantize())
    with pytest.raises(FdoraError, match=r"K a multiple of 64 to be cut by columns, got 40"):
        cut(narrow, columns=slice(0, 20))
    with pytest.raises(FdoraError, match="of kind nf4, fp4, mxfp4, nvfp4, int8 or fp8, got a Tensor"):
        cut(torch.randn(4, 4), rows=slice(0, 2))
    for rows in (3, (0, 4), slice(0, 4, 2), slice(0, 1.5)):
        with pytest.raises(FdoraError, match="`columns` must be a slice with step 1, of ints, got"):
            cut(ALL["nf4"][0], columns=rows)
    with pytest.raises(FdoraError, match="of kind nf4, fp4, mxfp4, nvfp4, int8 or fp8, got gptq"):
        packed = torch.zeros(4, 16, dtype=torch.int32)
        zeros, scales = torch.zeros(1, 2, dtype=torch.int32), torch.ones(1, 16, dtype=torch.float16)
        cut(from_gptq(packed, zeros, scales, None, bits=4), rows=slice(0, 8))
