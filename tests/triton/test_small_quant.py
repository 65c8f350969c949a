"""Few tokens straight from codes, against float64 products of the weights rounded once; interpreted, or with --device cuda."""

import re
from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

from fdora._records import Operands
from fdora.functional import dora_linear
from fdora.quant import TABLES, Codes8, Lut4
from fdora.quant.bnb import UNIT
from fdora.triton import small
from fdora.triton.codes import Coded, Ints, packed
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.lookup import PICKED, SCALED
from fdora.triton.small import Out, reads, small_forward
from fdora.triton.tiles.codes import CodesConfig, small_codes_config
from tests import device
from tests.triton.coded import case_of, weight_of
from tests.triton.marks import INTERPRETED, needs_kernels  # noqa: F401
from tests.triton.test_quant_norm import HALF, INTS, MODES, SCALES, every_pair, executed
from tests.triton.written import FP32, HOPPER, likes_of_codes, results_of

# tokens and tiles: one slice and several; a table for each word, for each group and for several; K in parts, the last one shorter
ROWS = CodesConfig(16, 128, 2, 2, 2), CodesConfig(32, 256, 1, 4, 2), CodesConfig(16, 128, 1, 2, 2, 2)
COLUMNS = CodesConfig(64, 16, 2, 2, 2), CodesConfig(256, 16, 1, 4, 2), CodesConfig(64, 16, 1, 2, 2, 2)
FOURS = [*zip((64, 17, 5), ROWS, COLUMNS, strict=True), (40, ROWS[1], CodesConfig(512, 16, 1, 4, 2, 2))]
OTHERS = [(64, ROWS[0], COLUMNS[0]), (17, ROWS[2], COLUMNS[2])]
WORDS = {  # those of Hopper
    "hqq": [CodesConfig(64, 128, 1, 4, 2), CodesConfig(32, 64, 1, 4, 2, 2)],  # two groups, and columns of both halves
    "gptq": [CodesConfig(128, 64, 1, 4, 2, 2)],
    "awq": [CodesConfig(256, 32, 1, 4, 2, 2)],
}
# N, K and a group: of several words, of one, of a row that ends within one, as wide as several tiles
SHAPES = ((32, 256, 64, "flat"), (40, 136, 8, "flat"), (24, 360, 32, "row"), (24, 512, 512, "flat"))
EIGHT = (("int8", 1.0), ("int8", UNIT), ("e4m3", 1.0))
WEIGHTS = [
    (Lut4(table, N != 40, group, scales, layout), N, K)
    for table, scales, (N, K, group, layout) in every_pair([*TABLES], SCALES, SHAPES)
    if (scales, layout) != ("nested", "row")
]
WEIGHTS += [
    (Codes8(code, mode, block if mode == "block" else (0, 0), unit), N, K)
    for (code, unit), (mode, block), (N, K) in every_pair(EIGHT, MODES, ((32, 256), (133, 75)))
]


def tiles_for(form):
    if isinstance(form, Lut4):
        return FOURS
    words = WORDS[re.split(r"\W", form.code)[0]] if isinstance(form, Ints) and form.bits == 4 else []
    return [*OTHERS, *((3, rows, COLUMNS[2]) for rows in words)]


def one_hot(M, n):
    """M rows that are 1 in one of n places each, the last among them."""
    places = torch.randint(n, (M,))
    places[2] = n - 1
    return torch.eye(n, device=device.NAME, dtype=HALF)[places]


def assert_equal(got, want):
    torch.testing.assert_close(got.double(), want, rtol=0, atol=0, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("weight", WEIGHTS + INTS, ids=str)
def test_every_weight_is_that_of_a_dense_w(weight, chosen_anew, monkeypatch):
    """To the bit, rounded once, forward and backward; and NaN where a scale is NaN."""
    W = weight_of(*weight, HALF)
    N, K = W.shape
    A, B, g = (torch.zeros(shape, device=device.NAME) for shape in ((8, K), (N, 8), (N,)))
    g += 1

    def assert_same(M, rows, columns):
        chosen_anew.clear()
        monkeypatch.setattr(small, "small_codes_config", lambda *of: columns if of[4] else rows)
        dense = W.dequantize(HALF).double()
        x, dy = one_hot(M, K).requires_grad_(), one_hot(M, N)
        y = dora_linear(x, W, A, B, g, s=1.0, norm=g, backend="triton")
        assert_equal(y, x.double() @ dense.T)
        assert_equal(torch.autograd.grad(y, x, dy)[0], dy.double() @ dense)

    for tiles in tiles_for(weight[0]):
        assert_same(*tiles)
    if W.tensors[1].dtype == FP32:
        W.tensors[1].view(-1)[-1] = float("nan")
        assert_same(64, ROWS[0], COLUMNS[0])


# what needs no kernels


NF4 = Lut4("nf4", True, 64, "nested", "flat"), 40, 256
# tokens and ranks: h B^T is a part of its own, or all of B is asked for at once by the kernel that adds the parts
LOW = [(NF4, M, r, adapter, ROWS[2]) for M, r, adapter in ((1, 384, HALF), (16, 70, FP32), (3, 600, HALF), (5, 40, FP32))]
LOW += [(INTS[i], 3, 70, HALF, rows) for i, name in ((0, "hqq"), (4, "gptq"), (10, "awq")) for rows in WORDS[name]]
LOW += [(NF4, 1, 16, HALF, None), ((Codes8("e4m3", "row", (0, 0), 1.0), 133, 75), 17, 5, FP32, ROWS[0])]  # as the plan chooses


@needs_kernels
@pytest.mark.parametrize(("weight", "M", "r", "adapter", "rows"), LOW, ids=str)
def test_the_low_rank_term_is_added_in_float32(weight, M, r, adapter, rows):
    """Before anything is rounded: only the order of sums lies between float64 and a y in float32."""
    case, (_, N, K) = case_of(*weight), weight
    shapes = (M, K), (r, K), (N, r), (N,), (N,), (N,)
    x, A, B, m, c, bias = (torch.randn(shape, device=device.NAME) for shape in shapes)
    m, c, (A, B) = m.abs() + 0.5, c.abs() + 0.5, ((t * by).to(adapter) for t, by in ((A, K**-0.5), (B, 0.05)))
    given = [x.to(HALF), A, B, m, c, bias.to(HALF)]

    def write(plan, *likes):
        x, A, B = (plan.matrix(like) for like in likes[:3])
        m, c, bias = (plan.vector(like) for like in likes[3:6])
        operands = Operands(packed(plan, likes[6:], case.coded), A, B, m, c, bias, None)
        out = Out(plan.result("y", (M, N), FP32), plan.result("h", (M, r), HALF), plan.result("pre", (M, N), FP32))
        small_forward(plan, x, operands, plan.scalar("s"), out, rows)

    y, h, pre = results_of(write, *given, *case.tensors, scalars=(0.7,))
    x, A, B, m, c, bias = (t.double() for t in given)
    want = x @ case.W.to(HALF).double().T + h.double() @ B.to(HALF).double().T
    near(h, 0.7 * x @ A.T, 1e-3)
    near(pre, want, 2e-6)
    near(y, want * (m / c) + bias, 2e-6)


def near(got, want, limit):
    error = ((got.double() - want).norm() / want.norm()).item()
    assert error <= limit, f"{error:.1e}"


def is_read(shape, form, aligned=True):
    codes, *rest = likes_of_codes(Coded(shape, form))
    return reads(packed(Builder("a test", HOPPER), [codes._replace(aligned=aligned), *rest], Coded(shape, form)))


def test_what_no_kernel_takes():
    """Groups that are no words or no powers of two, that go on in the next row, rows that are no words, codes anywhere."""
    form, hqq = Lut4("nf4", True, 64, "nested", "flat"), Ints("hqq torch.bfloat16", 4, 2)
    assert is_read((64, 128), form) and not is_read((64, 128), form, aligned=False)
    assert not is_read((64, 96), form) and is_read((64, 96), form._replace(layout="row"))
    assert not is_read((64, 132), form._replace(layout="row")) and not is_read((64, 192), form._replace(group=96))
    assert not is_read((64, 128), form._replace(group=4))
    assert is_read((64, 128), hqq) and not is_read((64, 128), hqq, aligned=False) and not is_read((64, 126), hqq)


FORMATS = (4, ""), (8, ""), (8, "hqq torch.bfloat16"), (8, "gptq"), (8, "awq")


def test_tiles_for_any_shape():
    for rows, N, K, (bits, words), columns, capability in product(
        (8, 16, 32, 64), (1, 1000, 200_000), (1, 4096), FORMATS, (False, True), (0, 80, 86, 90, 100, 120)
    ):
        config = small_codes_config(rows, N, K, bits, columns, capability, 132, words)
        along_n = columns != (words == "awq")
        assert config.BLOCK_N % (64 if along_n else 16) == 0
        assert config.BLOCK_K % (16 if along_n else 64 if words == "gptq" else 128) == 0
        assert config.SLICES in (1, config.num_warps)
        assert 1 <= config.SPLITS <= max(1, K // (config.BLOCK_K * config.SLICES))


@pytest.mark.parametrize("half", ["bf16", "f16"])
@pytest.mark.parametrize("table", TABLES)
def test_the_permutes_find_each_rounded_weight(table, half):
    """What no machine here can run: each code at each place of a word, in both orders of nibbles."""
    dtype, scale = {"bf16": torch.bfloat16, "f16": torch.float16}[half], torch.tensor(-0.0371)
    want = [v & 0xFFFF for v in (torch.tensor(TABLES[table]) * scale).to(dtype).view(torch.int16).tolist()]
    at = executed(SCALED[half][table], {"$8": scale.item()})
    given = {f"${9 + i}": at[f"${i}"] for i in range(8)}
    for code, first, high_first in product(range(16), (0, 5), (True, False)):
        codes = [(code + (first + 2) * i) % 16 for i in range(8)]
        pairs = zip(codes[::2], codes[1::2], strict=True)
        word = bytes(a << 4 | b if high_first else b << 4 | a for a, b in pairs)
        at = executed(PICKED[high_first], {"$8": int.from_bytes(word, "little")} | given)
        assert [at[f"${i}"] for i in range(8)] == [want[c] for c in codes]
