"""Few tokens straight from codes, against float64 products of the weights rounded once; interpreted, or with --device cuda."""

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
from fdora.triton.runtime.lookup import PICKED, SCALED
from fdora.triton.small import Out, reads, small_forward
from fdora.triton.tiles.codes import CodesConfig, small_codes_config
from tests import device
from tests.triton.coded import weight_of
from tests.triton.marks import INTERPRETED, needs_kernels  # noqa: F401
from tests.triton.test_quant_norm import HALF, INTS, MODES, SCALES, every_pair, executed
from tests.triton.written import FP32, HOPPER, alike, launches, likes_of_codes, plan_of

# tiles: one slice and several; a table for each word, for each group and for several; K in parts, the last one shorter;
# those of words on Hopper
ROWS = [CodesConfig(16, 128, 2, 2, 2), CodesConfig(32, 256, 1, 4, 2), CodesConfig(16, 128, 1, 2, 2, 2)]
ROWS += [CodesConfig(64, 128, 1, 4, 2), CodesConfig(128, 64, 1, 4, 2, 2)]
COLUMNS = [CodesConfig(64, 16, 2, 2, 2), CodesConfig(256, 16, 1, 4, 2), CodesConfig(64, 16, 1, 2, 2, 2)]
COLUMNS += [CodesConfig(512, 16, 1, 4, 2, 2), CodesConfig(64, 32, 1, 4, 2)]
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


def one_hot(n):
    """64 rows that are 1 in one of n places each, the last among them."""
    places = torch.randint(n, (64,))
    places[5] = n - 1
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

    def assert_same(rows, columns):
        chosen_anew.clear()
        monkeypatch.setattr(small, "small_codes_config", lambda *of: columns if of[4] else rows)
        dense = W.dequantize(HALF).double()
        x, dy = one_hot(K).requires_grad_(), one_hot(N)
        y = dora_linear(x, W, A, B, g, s=1.0, norm=g, backend="triton")
        assert_equal(y, x.double() @ dense.T)
        assert_equal(torch.autograd.grad(y, x, dy)[0], dy.double() @ dense)

    for rows, columns in zip(ROWS, COLUMNS, strict=True):
        assert_same(rows, columns)
    if W.tensors[1].dtype == FP32:
        W.tensors[1].view(-1)[-1] = float("nan")
        assert_same(ROWS[0], COLUMNS[0])


# what needs no kernels


def plan_for(coded, aligned=True):
    """A forward on an H100; or None where no kernel takes W."""
    codes, *rest = likes_of_codes(coded)
    (N, K), read = coded.shape, []

    def write(plan, x, A, B, *likes):
        x, A, B, W = plan.matrix(x), plan.matrix(A), plan.matrix(B), packed(plan, likes, coded)
        read.append(reads(W))
        if read[0]:
            out = Out(plan.result("y", (16, N), torch.bfloat16), None, None)
            small_forward(plan, x, Operands(W, A, B, None, None, None, None), plan.scalar("s"), out)

    plan = plan_of(
        write, *(alike(*s, dtype=torch.bfloat16) for s in ((16, K), (16, K), (N, 16))), codes._replace(aligned=aligned), *rest
    )
    return plan if read[0] else None


def test_what_no_kernel_takes():
    """Groups that are no words or no powers of two, that go on in the next row, rows that are no words, codes anywhere."""
    form = Lut4("nf4", True, 64, "nested", "flat")
    assert plan_for(Coded((64, 128), form))
    for shape, change in (
        ((64, 96), {}),
        ((64, 132), {"layout": "row"}),
        ((64, 192), {"group": 96}),
        ((64, 128), {"group": 4}),
    ):
        assert plan_for(Coded(shape, form._replace(**change))) is None
    assert plan_for(Coded((64, 96), form._replace(layout="row"))) and plan_for(Coded((64, 128), form), aligned=False) is None
    hqq = Ints("hqq torch.bfloat16", 4, 2)
    assert plan_for(Coded((64, 128), hqq)) and plan_for(Coded((64, 128), hqq), aligned=False) is None
    assert plan_for(Coded((64, 126), hqq)) is None


def test_a_plan_says_what_it_costs():
    """W once, as codes."""
    N, K = 4096, 2048
    shrink, (step,) = (
        launches(plan := plan_for(Coded((N, K), Lut4("nf4", True, 64, "nested", "flat"))), "shrink"),
        launches(plan, "small"),
    )
    groups, parts = N * K // 64, 8
    assert step.cost.flops16 == 2 * 16 * N * (K + 16) and len(shrink) == 1
    assert step.cost.bytes == N * K // 2 + groups + 4 * groups // 256 + 2 * 16 * (K + N + N) + 4 * parts * 16 * 16
    assert plan.device == HOPPER and step.pdl == HOPPER.supports_pdl


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
