"""The norm straight from codes against a float64 decoder of its own; interpreted, or for real with --device cuda."""

import re
import struct
from itertools import cycle, product

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

from fdora.quant import TABLES, Codes8, Lut4, QuantWeight
from fdora.quant.bnb import UNIT
from fdora.triton.codes import Coded, Ints, is_decoded, weights_of, written
from fdora.triton.quant import plan_quant_norm, stack_norms_of_codes
from fdora.triton.runtime import walk
from fdora.triton.runtime.describe import describe
from fdora.triton.runtime.lookup import LANE_VALUE, OF_WORDS, PTX, SHUFFLED
from fdora.triton.tiles.quant import run_of, strip_config
from tests import device
from tests.quant.make import gptq, hqq
from tests.triton.coded import E4M3, Case, case_of, of_weight, weight_of
from tests.triton.marks import INTERPRETED, needs_kernels
from tests.triton.written import (
    FP32,
    HOPPER,
    arguments,
    by_tma,
    forms_of_codes,
    ints_of_codes,
    launches,
    likes_of_norm,
    plan_dense,
    plan_dense_norm,
)

HALF = torch.float16  # the interpreter of Triton 3.6 multiplies bf16 wrongly
SCALES = ("fp32", "nested", "e8m0", "e4m3*global", "e4m3/global")
BF16 = HALF if INTERPRETED else torch.bfloat16  # and cuts what it should round


def four(table, scales, N, K, group=64, flat=True, high_first=True):
    return case_of(Lut4(table, high_first, group, scales, "flat" if flat or scales == "nested" else "row"), N, K)


def eight(code, mode, N, K, block=(128, 128), unit=1.0):
    return case_of(Codes8(code, mode, block if mode == "block" else (0, 0), unit), N, K)


def adapter(case, r, dtype=HALF):
    """A and B whose product is as large as W."""
    (N, K), size = case.coded.shape, case.W.square().mean().sqrt().nan_to_num().item() or 1.0
    return (torch.randn(r, K).to(device.NAME, dtype), (torch.randn(N, r) * size * r**-0.5).to(device.NAME, dtype))


def truth(W, A, B, s):
    return (W.double() + s * B.double() @ A.double()).square().sum(1).sqrt()


def assert_norm(c, W, A, B, s, limit=1e-6):
    want = truth(W, A, B, s)
    assert c.dtype == FP32 and c.shape == want.shape
    worst = max(((c.double() - want).abs() / want.clamp_min(1e-30)).tolist(), default=0.0)
    assert worst <= limit, f"{worst:.2g}"


def run(case, A, B, s=0.7, squared=False, dense=None):
    if dense is None:
        return plan_quant_norm.call(A, B, [*case.tensors], s, *written([case.coded]), squared)
    tensors = (A, B, *case.tensors)
    return walk.run(walk.plan_for(plan_dense_norm, tensors, case.coded, dense), tensors, (s,))


def dense_of(case, dtype):
    return walk.run(walk.plan_for(plan_dense, case.tensors, case.coded, dtype), case.tensors)[0]


# N, K, r, group, flat: whole tiles; ragged ones; groups that go on in the next row; odd K; one element
SHAPES = (
    (128, 256, 16, 64, True),
    (130, 264, 24, 8, True),
    (33, 130, 5, 64, True),
    (7, 35, 1, 32, True),
    (37, 100, 100, 32, False),
    (5, 34, 16, 16, False),
    (3, 1000, 16, 4096, True),
    (2, 512, 8, 256, True),
    (1, 1, 1, 32, True),
)


def assert_right(r, *cases):
    """The norm, and W to the last bit, with adapters of both widths, s = 0 and a negative one. ``cases``: by turns."""
    ways = ((HALF, 0.7, HALF), (FP32, -2.0, FP32), (HALF, 0.0, BF16), (FP32, 0.7, None))
    for case, (dtype, s, dense) in zip(cycle(cases), ways, strict=False):
        A, B = adapter(case, r, dtype)
        c = run(case, A, B, s, dense=dense)
        if dense is not None:
            c, W = c
            assert W.dtype == dense and torch.equal(W, case.W.to(dense)), f"{dtype} {s} {dense}"
            assert torch.equal(dense_of(case, dense), W)
        assert_norm(c, case.W, A, B, s)
    holes = [t if t.ndim == 0 else torch.stack([t, t], -1)[..., 0] for t in case.tensors]
    shifted = [t if t.ndim == 0 else torch.cat([t.flatten()[:1], t.flatten()])[1:].view(t.shape) for t in case.tensors]
    for tensors, (a, b) in ((holes, (A, B)), (shifted, (A.T.contiguous().T, B.T.contiguous().T))):  # not where a whole one lies
        c, W = run(case._replace(tensors=tensors), a, b, s, dense=HALF)
        assert torch.equal(W, case.W.to(HALF))
        assert_norm(c, case.W, A, B, s)


def every_pair(tables, *others):
    """Each combination of the others with one of the tables, by turns: every pair of any two of them is there."""
    places = product(*map(enumerate, others))
    return [(tables[sum(i for i, _ in each) % len(tables)], *(value for _, value in each)) for each in places]


@needs_kernels
@pytest.mark.parametrize(("table", "scales", "shape"), every_pair([*TABLES], SCALES, SHAPES), ids=str)
def test_four_bits(table, scales, shape):
    """With both orders of nibbles."""
    N, K, r, group, flat = shape
    assert_right(r, *(four(table, scales, N, K, group, flat, high_first) for high_first in (True, False)))


# whole tiles; ragged ones; groups of a tile, shorter and longer ones; a last group that is shorter; one word
INTS = [
    (Ints("hqq torch.float16", 4, 64), 128, 128),
    (Ints("hqq torch.float16", 4, 8), 70, 120),
    (Ints("hqq torch.float32", 4, 64), 34, 192),
    (Ints("hqq torch.float16", 8, 32), 37, 160),
    (Ints("gptq+1", 4, 128), 128, 128),
    (Ints("gptq", 4, 40), 77, 200),
    (Ints("gptq+1", 4, 8), 1, 8),
    (Ints("gptq+1", 4, 8, True), 67, 136),
    (Ints("gptq+1", 8, 64), 69, 192),
    (Ints("gptq", 8, 20, True), 33, 100),
    (Ints("awq", 4, 128), 128, 128),
    (Ints("awq", 4, 32), 72, 100),
]


@needs_kernels
@pytest.mark.parametrize("r", [5, 100])
@pytest.mark.parametrize("weight", INTS, ids=str)
def test_packed_integers(weight, r):
    assert_right(r, case_of(*weight))


@needs_kernels
def test_every_tile_of_rows_that_share_bytes_is_written():
    """Where nothing is left of an earlier call."""
    case = case_of(*INTS[0])
    junk = [torch.full((128 * 128 * n,), float("nan"), device=device.NAME) for n in range(1, 9) for _ in range(3)]
    del junk
    assert torch.equal(dense_of(case, FP32), case.W)


@needs_kernels
def test_groups_by_an_index():
    """In order a tile asks for one scale a row; of no group, NaN in that column."""
    case = case_of(Ints("gptq+1", 4, 64), 40, 192)
    tensors = case.tensors[:3]
    form = case.coded.form._replace(indexed=True)
    index = torch.arange(192, device=device.NAME) // 64
    for each in (index, index.int()):
        assert torch.equal(dense_of(Case(Coded((40, 192), form), (*tensors, each), case.W), FP32), case.W)
    index[70], index[191] = 3, -1
    got = dense_of(Case(Coded((40, 192), form), (*tensors, index), case.W), FP32)
    assert got.isnan().all(0).nonzero().flatten().tolist() == got.isnan().any(0).nonzero().flatten().tolist() == [70, 191]


@needs_kernels
@pytest.mark.parametrize("N", [8, 12])
def test_experts_of_packed_integers(N):
    """One behind the other: of AWQ where each begins with a word, else the answer is None."""
    for form in (Ints("awq", 4, 32), Ints("gptq+1", 4, 8, True), Ints("hqq torch.float16", 4, 8)):
        W = weight_of(form, 2 * N, 64)
        A, B = torch.randn(2, 4, 64).to(device.NAME, HALF), torch.randn(2, N, 4).to(device.NAME, HALF)
        c = stack_norms_of_codes(W.spec, W.tensors, A, B, 0.7)
        if form.code == "awq" and N == 12:
            assert c is None
            continue
        for e, part in enumerate(W.dequantize(FP32).split(N)):
            assert_norm(c[e], part, A[e], B[e], 0.7)


@needs_kernels
def test_packed_integers_that_kernels_do_not_read():
    """Said by the plan, or left to torch: other bits, another axis, groups that go on in the next row, half a row."""
    for W, _ in (
        hqq(2, 1),
        hqq(4, 0),
        hqq(4, 1, N=3, K=20, group=6),
        hqq(4, 1, N=5),
        hqq(4, 1, dtype=torch.float64),
        gptq(bits=2),
    ):
        assert not is_decoded(W.spec)
    case = case_of(Ints("awq", 4, 8), 24, 20)
    with pytest.raises(ValueError, match=r"has tensors of \[60, 9, 72\] elements, got \[60, 9, 48\]"):
        dense_of(case._replace(tensors=(*case.tensors[:2], case.tensors[2][:2])), FP32)


MODES = (("tensor", (1, 1)), ("row", (1, 1)), ("block", (128, 128)), ("block", (16, 48)))
SHAPES_OF_8 = ((128, 256, 16), (130, 264, 24), (33, 35, 5), (7, 130, 100), (1, 1, 1))


@needs_kernels
@pytest.mark.parametrize(
    ("code", "mode", "shape"), [*every_pair(("int8", "e4m3"), MODES, SHAPES_OF_8), (UNIT, MODES[1], SHAPES_OF_8[1])], ids=str
)
def test_eight_bits(code, mode, shape):
    """``UNIT``: int8 as bitsandbytes counts it."""
    (N, K, r), (mode, block) = shape, mode
    code, unit = ("int8", code) if code == UNIT else (code, 1.0)
    assert_right(r, eight(code, mode, N, K, block, unit))


@needs_kernels
def test_every_e4m3_and_every_exponent():
    """By bits, subnormal numbers and NaN among them."""
    each, ones = torch.arange(256, dtype=torch.uint8), torch.full((256, 16), 0x22, dtype=torch.uint8)
    for W in (
        QuantWeight(
            "fp8", (each.view(2, 128).view(E4M3), torch.ones(1)), (2, 128), FP32, Codes8("e4m3", "tensor", (0, 0), 1.0)
        ),
        QuantWeight("mxfp4", (ones, each[:, None]), (256, 32), FP32, Lut4("e2m1", False, 32, "e8m0", "row")),
    ):
        case, (N, K) = of_weight(W), W.shape
        A, B = (torch.zeros(shape, dtype=HALF, device=device.NAME) for shape in ((1, K), (N, 1)))
        for got in (run(case, A, B, 1.0, dense=FP32)[1], dense_of(case, FP32)):
            torch.testing.assert_close(got, case.W, rtol=0, atol=0, equal_nan=True)


@needs_kernels
def test_float8_as_the_hardware_has_it(as_hopper):
    """The conversion of sm_89, where it is interpreted."""
    if device.NAME == "cpu":
        plans = as_hopper()
    for mode in ("row", "block"):
        case = eight("e4m3", mode, 130, 264)
        A, B = adapter(case, 24)
        c, W = run(case, A, B, dense=FP32)
        assert torch.equal(W, case.W) and torch.equal(dense_of(case, FP32), W)
        assert_norm(c, case.W, A, B, 0.7)
    if device.NAME == "cpu":
        found = [step for plan in plans.values() for name in ("quant", "dequantize") for step in launches(plan, name)]
        assert len(found) == 4 and not any(arguments(step)["HOW"].BY_BITS for step in found)


def some():
    """A weight of each path."""
    return [
        four("nf4", "nested", 130, 264, 8),
        four("fp4", "fp32", 33, 130),
        four("e2m1", "e4m3*global", 37, 96, 16, False, False),
        eight("int8", "row", 130, 70),
        eight("e4m3", "block", 140, 300),
    ]


@needs_kernels
def test_rows_of_nan_stay_alone():
    """Of the last scale, and of one number of B."""
    for at, case in enumerate(some()):
        A, B = adapter(case, 8)
        N, K = case.coded.shape
        tensors = [t.clone() for t in case.tensors]
        broken = tensors[3 if at == 0 else 1].flatten()
        broken[-1] = 0x7F if broken.dtype == torch.uint8 else float("nan")
        c = run(case._replace(tensors=tuple(tensors)), A, B)
        first = {0: (len(broken) - 1) * 256 * 8 // K, 1: N - 1 - (N * K % 64 > K), 2: N - 1, 3: N - 1, 4: 128}[at]
        assert c.isnan().nonzero().flatten().tolist() == list(range(first, N)), at
        B[5, 1] = float("nan")
        assert run(case, A, B).isnan().nonzero().flatten().tolist() == [5]


@needs_kernels
@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize(("N", "K", "r"), [(0, 64, 3), (5, 0, 3), (40, 64, 0)])
def test_nothing_of_something(N, K, r, hopper, as_hopper):
    """A driver makes no tensor map of a matrix without rows or columns: seen on an H200 at r = 0."""
    plans = as_hopper() if hopper and device.NAME == "cpu" else {}
    for case in (four("nf4", "fp32", N, K), four("nf4", "nested", N, K), eight("int8", "tensor", N, K)):
        A, B = (torch.zeros(*shape, dtype=HALF, device=device.NAME) for shape in ((r, K), (N, r)))
        c, W = run(case, A, B, dense=HALF)
        assert torch.equal(W, case.W.to(HALF)) and torch.equal(dense_of(case, HALF), W)
        for norm in (c, run(case, A, B)):
            assert_norm(norm, case.W, A, B, 0.7)
    assert not any(map(by_tma, (step for plan in plans.values() for step in launches(plan))))


# what needs no kernels


NESTED = Lut4("nf4", True, 64, "nested", "flat")


def test_facts_come_back_from_what_an_op_takes():
    weights = [None, *(Coded((96, 64), form) for form in forms_of_codes() + ints_of_codes()), None]
    text, numbers = written(weights)
    assert (
        weights_of(text, numbers) == tuple(weights) and {type(v) for v in text} == {str} and {type(v) for v in numbers} == {int}
    )
    assert written([None, None]) == ([], []) and weights_of([], []) == ()
    assert all(W.tensors == len(likes_of_norm(W, 8)) - 2 for W in weights if W is not None)


def test_a_plan_says_what_it_costs():
    N, K, r = 1024, 2048, 64
    coded, groups = Coded((N, K), NESTED), N * K // 64
    stored = N * K // 2 + groups + 4 * groups // 256
    strip, run = strip_config(r, K, 90).SPAN, 64 * run_of(N // 64, K // 64, HOPPER.num_sms)
    for dense, columns in ((None, strip), (torch.bfloat16, run)):
        likes, made = likes_of_norm(coded, r), 2 * N * K if dense else 0
        plan = (
            plan_dense_norm(likes, HOPPER, coded, dense) if dense else plan_quant_norm(likes, HOPPER, *written([coded]), False)
        )
        first, second = plan.steps
        assert columns > 64 and first.cost.flops16 == 2 * N * K * r
        assert first.cost.bytes == stored + 2 * r * (N + K) + 4 * (K // columns) * N + made
        assert second.kernel.__name__ == "sum_kernel" and "HIGH_FIRST" in str(describe(plan))
    (alone, _) = plan_dense(likes[2:], HOPPER, coded, torch.bfloat16).steps
    assert alone.cost == (0, 0, stored + 2 * N * K, 0)


def test_what_does_not_fit_is_refused():
    bytes_ = Codes8("int8", "row", (0, 0), 1.0)
    for have, form, shape in (
        (NESTED, NESTED, (64, 62)),
        (bytes_, bytes_, (63, 64)),
        (NESTED, NESTED._replace(table="nf3"), (64, 64)),
        (NESTED, NESTED._replace(scales="fp16"), (64, 64)),
        (NESTED, NESTED._replace(layout="column"), (64, 64)),
        (bytes_, bytes_._replace(scale="column", block=(1, 1)), (64, 64)),
        (bytes_, bytes_._replace(unit=0.5), (64, 64)),
    ):
        with pytest.raises(ValueError, match=r"elements|no kernel"):
            plan_quant_norm(likes_of_norm(Coded((64, 64), have), 8), HOPPER, *written([Coded(shape, form)]), False)


def executed(ptx, given, held=(), lane=0):
    """The registers after this PTX: an interpreter of the few instructions that it is made of. ``held``: what the lanes of the
    warp have in $9."""
    at, full = {"%laneid": lane, **given}, 0xFFFFFFFF

    def value(name):
        if name.startswith("0f"):
            return struct.unpack(">f", bytes.fromhex(name[2:]))[0]
        return at[name] if name in at else int(name, 0)

    def prmt(a, b, sel):
        both = (a | b << 32).to_bytes(8, "little")
        picked = [(sel >> 4 * i) & 15 for i in range(4)]
        assert all(p < 8 for p in picked)
        return int.from_bytes(bytes(both[p] for p in picked), "little")

    def lop3(a, b, c, table):
        return sum(((table >> (4 * (a >> i & 1) + 2 * (b >> i & 1) + (c >> i & 1))) & 1) << i for i in range(32))

    def shfl(_, index, clamp, members):
        segment, last = clamp >> 8, clamp & 31
        source = (lane & segment) | (index & 31 & ~segment)
        assert members == full and source <= (lane & segment) | (last & ~segment)
        return held[source]

    def pair(dtype):
        def both(high, low):
            low, high = (v & 0xFFFF for v in torch.tensor([low, high]).to(dtype).view(torch.int16).tolist())
            return low | high << 16

        return both

    steps = {
        "mov": lambda a: a,
        "and": lambda a, b: a & b,
        "shr": lambda a, n: a >> n,
        "shl": lambda a, n: a << n & full,
        "prmt": prmt,
        "lop3": lop3,
        "setp.ne": lambda a, b: a != b,
        "selp": lambda a, b, first: a if first else b,
        "shfl.sync.idx": shfl,
        "mul.rn.f32": lambda a, b: (torch.tensor(a) * torch.tensor(b)).item(),
        "cvt.rn.bf16x2.f32": pair(torch.bfloat16),
        "cvt.rn.f16x2.f32": pair(torch.float16),
    }
    for line in ptx.strip("{}\n").splitlines():
        name, out, *rest = re.split(r"[ ,]+", line.rstrip(";").replace("{", "").replace("}", ""))
        name = name.removesuffix(".b32").removesuffix(".u32")
        if name == "mov" and len(rest) == 2:  # the halves of a word
            at[out], at[rest[0]] = at[rest[1]] & 0xFFFF, at[rest[1]] >> 16
        elif name != ".reg":
            at[out] = steps[name](*map(value, rest))
    return at


def outputs(ptx, word, held=(), lane=0, more=()):
    """Of the PTX for one 32-bit word. ``more``: of what holds other words."""
    at = executed(ptx, {"$8": word, "$9": None, **dict(more)}, held, lane)
    return [at[f"${i}"] for i in range(8) if f"${i}" in at]


@pytest.mark.parametrize("table", TABLES)
def test_permutes_and_shuffles_find_each_nibble(table):
    """What no machine here can run: each code in each of the eight places, among random others."""
    bits = [b & 0xFFFFFFFF for b in torch.tensor(TABLES[table]).view(torch.int32).tolist()]
    rand = torch.Generator().manual_seed(0)
    held = [outputs(LANE_VALUE[table], 0, lane=lane)[0] for lane in range(32)]
    assert held == 2 * bits
    for code, place in product(range(16), range(8)):
        codes = torch.randint(16, (8,), generator=rand).tolist()
        codes[place] = code
        word, want = sum(c << 4 * i for i, c in enumerate(codes)), [bits[c] for c in (*codes[::2], *codes[1::2])]
        assert outputs(PTX[table], word) == want
        assert outputs(SHUFFLED, word, held, lane=2 * code + place % 2) == want
        # of four words one byte each: the first's
        byte, others = place // 2, torch.randint(2**32, (3,), generator=rand).tolist()
        words = {"$9": others[0], "$10": others[1], "$11": others[2], "$12": byte + 16 * (4 + byte), "$16": None}
        want = [bits[w >> 8 * byte + at & 15] for at in (0, 4) for w in (word, *others)]
        assert outputs(OF_WORDS, word, held, 2 * code + place % 2, words) == want
        assert bits[code] in (want[0], want[4])


@needs_kernels
def test_runs_of_tiles(chosen_anew, monkeypatch):
    """A program walks several tiles of K, fewer in the last run of a row; its codes and scales come ahead."""
    nf4, mxfp4 = four("nf4", "nested", 70, 392, 8), four("e2m1", "e8m0", 64, 640, 32, False)
    e4m3 = eight("e4m3", "block", 70, 650)
    for case, r, dtype, tiles in ((nf4, 8, HALF, 2), (nf4, 24, FP32, 8), (mxfp4, 80, HALF, 2), (e4m3, 8, HALF, 4)):
        chosen_anew.clear()
        monkeypatch.setattr("fdora.triton.norm_codes.run_of", lambda *_, tiles=tiles: tiles)
        A, B = adapter(case, r, dtype)
        c, W = run(case, A, B, dense=FP32)
        assert torch.equal(W, case.W)
        assert_norm(c, case.W, A, B, 0.7)
