"""Few tokens straight from codes, against float64 products of the weights rounded once; interpreted, or with --device cuda."""

from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

from fdora._records import Operands
from fdora.quant import TABLES, Lut4
from fdora.quant.bnb import UNIT
from fdora.triton.codes import Coded, Ints, packed
from fdora.triton.runtime.lookup import PICKED, SCALED
from fdora.triton.small import Back, Out, reads, small_backward, small_forward
from fdora.triton.tiles.codes import CodesConfig, parts_config, small_codes_config
from tests import device
from tests.triton.marks import INTERPRETED, needs_kernels  # noqa: F401
from tests.triton.test_quant_norm import HALF, INTS, SCALES, eight, executed, four
from tests.triton.written import HOPPER, alike, launches, likes_of_codes, plan_of, results_of

S = 0.7
FP32 = torch.float32
# tiles: one slice and several; a table for each word, for each group and for several; K in parts, the last one shorter
ROWS = CodesConfig(16, 128, 2, 2, 2), CodesConfig(32, 256, 1, 4, 2), CodesConfig(16, 128, 1, 2, 2, 2)
COLUMNS = CodesConfig(64, 16, 2, 2, 2), CodesConfig(256, 16, 1, 4, 2), CodesConfig(64, 16, 1, 2, 2, 2)


def operands(case, M, r, adapter=HALF):
    """x, dz, A, B, m, c and a bias, on the device under test."""
    N, K = case.coded.shape
    shapes = ((M, K), HALF), ((M, N), HALF), ((r, K), adapter), ((N, r), adapter), ((N,), FP32), ((N,), FP32), ((N,), HALF)
    x, dz, A, B, m, c, bias = (torch.randn(*shape).to(device.NAME, dtype) for shape, dtype in shapes)
    return x, dz, A * K**-0.5, B * 0.05, m.abs() + 0.5, c.abs() + 0.5, bias


def forward(case, x, A, B, m, c, bias, config=None, s=S):
    """y, h and the value before the scale, y and that in float32: nothing but the order of a sum lies between them and W."""

    def write(plan, *likes):
        x, A, B = (plan.matrix(like) for like in likes[:3])
        m, c, bias = (plan.vector(like) for like in likes[3:6])
        W, M, (N, r) = packed(plan, likes[6:], case.coded), x.shape[0], B.shape
        out = Out(plan.result("y", (M, N), FP32), plan.result("h", (M, r), HALF), plan.result("pre", (M, N), FP32))
        small_forward(plan, x, Operands(W, A, B, m, c, bias, None), plan.scalar("s"), out, config)

    return results_of(write, x, A, B, m, c, bias, *case.tensors, scalars=(s,))


def backward(case, dz, x, A, B, config=None, s=S, onto=None, need_A=True):
    """dx in float32, and dA."""

    def write(plan, *likes):
        dz, x, A, B = (plan.matrix(like) for like in likes[:4])
        la, s = Operands(packed(plan, likes[4:], case.coded), A, B, None, None, None, None), plan.scalar("s")
        dx, dA = plan.result("dx", x.shape, FP32), plan.result("dA", A.shape, A.dtype) if need_A else None
        if onto:
            small_backward(plan, dz, la, s, Back(dx), config)
        small_backward(plan, dz, la, s, Back(dx, dA, x), config, bool(onto))

    return results_of(write, dz, x, A, B, *case.tensors, scalars=(s,))


def near(got, want, limit):
    error = ((got.double() - want).norm() / want.norm().clamp_min(1e-30)).item()
    assert error <= limit, f"{error:.1e}"


def assert_right(case, M, r, rows, columns, adapter=HALF):
    x, dz, A, B, m, c, bias = operands(case, M, r, adapter)
    W = case.W.to(HALF).double()  # rounded once, as a dense W is
    y, h, pre = forward(case, x, A, B, m, c, bias, rows)
    near(h, S * x.double() @ A.double().T, 1e-3)
    want = x.double() @ W.T + h.double() @ B.to(HALF).double().T
    near(pre, want, 2e-6)
    near(y, want * (m / c).double() + bias.double(), 2e-6)
    dx, dA = backward(case, dz, x, A, B, columns)
    dh = S * dz.double() @ B.to(HALF).double()
    near(dA, dh.T @ x.double(), 2e-3)
    near(dx, dz.double() @ W + dh @ A.to(HALF).double(), 1e-3)
    near(backward(case, dz, x, A, B, columns, s=0.0, need_A=False)[0], dz.double() @ W, 2e-6)


@needs_kernels
@pytest.mark.parametrize(
    ("table", "scales"), [("nf4", "nested"), ("fp4", "fp32"), *(("e2m1", scales) for scales in SCALES[2:])]
)
def test_four_bits(table, scales):
    """Whole tiles and ragged ones; groups of a word, of several tiles, and of a row that ends within one."""
    for i, (M, N, K, r, group, flat) in enumerate(
        ((3, 32, 256, 5, 64, True), (17, 40, 136, 20, 8, True), (2, 24, 352 if scales == "nested" else 360, 8, 32, False))
    ):
        case = four(table, scales, N, K, group, flat, high_first=i != 1)
        assert_right(case, M, r, ROWS[i], COLUMNS[i], FP32 if i else HALF)


@needs_kernels
def test_wide_groups_and_many_tokens():
    assert_right(four("nf4", "nested", 24, 1024, 512), 64, 70, ROWS[0], COLUMNS[0])
    assert_right(four("fp4", "fp32", 48, 640, 128), 40, 16, ROWS[1], CodesConfig(512, 16, 1, 4, 2, 2))


@needs_kernels
@pytest.mark.parametrize(
    ("code", "unit", "mode", "block"),
    [
        ("int8", 1.0, "tensor", (1, 1)),
        ("int8", UNIT, "row", (1, 1)),
        ("e4m3", 1.0, "row", (1, 1)),
        ("e4m3", 1.0, "block", (16, 128)),
        ("int8", 1.0, "block", (16, 48)),
    ],
)
def test_eight_bits(code, unit, mode, block):
    for i, (M, N, K, r) in enumerate(((3, 32, 256, 16), (17, 133, 75, 5))):
        assert_right(eight(code, mode, N, K, block, unit), M, r, ROWS[2 - 2 * i], COLUMNS[2 * i])


@needs_kernels
@pytest.mark.parametrize("name", INTS)
def test_packed_integers(name):
    for i, (M, r) in enumerate(((3, 5), (17, 16))):
        assert_right(INTS[name](), M, r, ROWS[2 * i], COLUMNS[2 * i], FP32 if i else HALF)


@needs_kernels
@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("hqq", CodesConfig(64, 128, 1, 4, 2)),  # two groups, and columns of both halves
        ("hqq", CodesConfig(32, 64, 1, 4, 2, 2)),
        ("gptq", CodesConfig(128, 64, 1, 4, 2, 2)),
        ("awq", CodesConfig(256, 32, 1, 4, 2, 2)),
    ],
)
def test_tiles_of_words(name, config):
    """Those of Hopper, K at once and in parts; h B beside them."""
    assert_right(INTS[name](), 3, 70, config, COLUMNS[2])


@needs_kernels
@pytest.mark.parametrize(("M", "r", "adapter"), [(1, 384, HALF), (16, 70, FP32), (3, 600, HALF), (5, 40, FP32)])
def test_large_ranks_with_k_in_parts(M, r, adapter):
    """h B is a part of its own forward, or all of B is asked for at once by the kernel that adds the parts; slab by slab backward."""
    ahead, back = (parts_config(M, r, columns).AHEAD for columns in (False, True))
    assert ahead is (r <= 64) and not back
    assert_right(four("nf4", "nested", 40, 256), M, r, ROWS[2], COLUMNS[2], adapter)


@needs_kernels
def test_as_the_plan_chooses():
    """One token, the tiles of the table, and onto what is there."""
    case = four("nf4", "nested", 48, 128)
    x, dz, A, B = operands(case, 1, 16)[:4]
    assert_right(case, 1, 16, None, None)
    for config in (None, COLUMNS[2]):
        once, twice = backward(case, dz, x, A, B, config)[0], backward(case, dz, x, A, B, config, onto=True)[0]
        near(twice, 2 * once.double(), 1e-6)


@needs_kernels
def test_nan_stays_in_its_rows():
    case = four("nf4", "fp32", 40, 256)
    x, dz, A, B, m, c, bias = operands(case, 5, 16)
    codes, scales = case.tensors
    broken = scales.clone()
    broken[4 * 39] = float("nan")  # the last row's first group
    y = forward(case._replace(tensors=(codes, broken)), x, A, B, m, c, bias)[0]
    assert y.isnan().any(0).nonzero().flatten().tolist() == [39]
    dx = backward(case._replace(tensors=(codes, broken)), dz, x, A, B)[0]
    assert dx.isnan().any(0).nonzero().flatten().tolist() == list(range(64))


@needs_kernels
def test_no_tokens():
    case = four("nf4", "fp32", 32, 64)
    x, dz, A, B, m, c, bias = operands(case, 0, 8)
    assert forward(case, x, A, B, m, c, bias)[0].shape == (0, 32)
    dx, dA = backward(case, dz, x, A, B)
    assert dx.shape == (0, 64) and not dA.any()


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
