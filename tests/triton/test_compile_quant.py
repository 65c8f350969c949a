"""The kernels for weights of codes build for every GPU we name, without one: they fit, spill nothing, and decode as they say."""

import re
from itertools import product
from math import prod

import pytest

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")
from fdora.quant import Codes8, Lut4
from fdora.quant.bnb import UNIT
from fdora.triton.codes import Coded, Ints, written
from fdora.triton.quant import plan_guarded_quant_norm, plan_quant_norm
from tests.triton.test_compile import LAST, TARGETS, assert_fits, build, device, pytestmark  # noqa: F401
from tests.triton.written import (
    BF16,
    FP16,
    FP32,
    arguments,
    launches,
    likes_of_codes,
    likes_of_norm,
    plan_dense,
    plan_dense_by_g,
    plan_dense_norm,
    with_state,
)

FORMS = {
    "nf4 nested": Lut4("nf4", True, 64, "nested", "flat"),
    "nf4": Lut4("nf4", True, 64, "fp32", "flat"),
    "nf4 4096": Lut4("nf4", True, 4096, "nested", "flat"),
    "fp4": Lut4("fp4", True, 128, "fp32", "flat"),
    "mxfp4": Lut4("e2m1", False, 32, "e8m0", "row"),
    "nvfp4": Lut4("e2m1", False, 16, "e4m3*global", "row"),
    "nvfp4 divided": Lut4("e2m1", False, 16, "e4m3/global", "row"),
    "int8": Codes8("int8", "row", (0, 0), 1.0),
    "int8 of bitsandbytes": Codes8("int8", "row", (0, 0), UNIT),
    "fp8 tensor": Codes8("e4m3", "tensor", (0, 0), 1.0),
    "fp8 block": Codes8("e4m3", "block", (128, 128), 1.0),
    "fp8 narrow": Codes8("e4m3", "block", (64, 32), 1.0),
}
INTS = {
    "hqq": Ints("hqq torch.bfloat16", 4, 64),
    "gptq": Ints("gptq+1", 4, 128),
    "gptq by an index": Ints("gptq+1", 4, 128, True),
    "gptq 8": Ints("gptq", 8, 128),
    "awq": Ints("awq", 4, 128),
}
NARROW = "fp8 narrow"  # more than one block to a tile: a scale for each element
SOME = ("nf4 nested", "mxfp4", "fp8 block")  # of these everywhere, of all on sm_90
CASES = [
    (name, target) for name, target in product(FORMS, TARGETS) if name in SOME or target == 90 or (name, target) == (NARROW, 80)
]
# N, K, r, the adapter, and W of which dtype is stored; more rank is more turns of one loop
WHOLE = [
    (1024, 4096, 16, BF16, None),
    (1024, 4096, 384, FP32, None),
    (1024, 4096, 384, BF16, None),
    (1024, 4096, 64, BF16, BF16),
    (1024, 4096, 64, FP32, FP16),
]
# Bytes of a thread, where r = 384 takes the largest tiles, which measured fastest on an H200 with what Triton 3.6 spills.
SPILLS = {("mxfp4", 100): 16, ("nf4 4096", 90): 16}
LARGEST = (WHOLE[1], WHOLE[3])  # of formats that decode as one of SOME does, or as int8
RAGGED = [(1000, 4160, 70, BF16, BF16), (1000, 4160, 70, FP32, None)]
CROSSING = [(1000, 4098, 70, FP32, None), (999, 4097, 70, BF16, BF16)]


def step_of(form, target, N, K, r, dtype, dense, guarded=False):
    coded = Coded((N, K), form)
    likes = likes_of_norm(coded, r, dtype)
    if guarded:
        plan = plan_guarded_quant_norm(with_state(likes, N), device(target), *written([coded]))
    elif dense is None:
        plan = plan_quant_norm(likes, device(target), *written([coded]), False)
    else:
        plan = plan_dense_norm(likes, device(target), coded, dense)
    (step,) = launches(plan, "quant")
    return step


@pytest.mark.parametrize(("name", "target"), CASES)
def test_whole_tiles(name, target, tmp_path):
    for case in WHOLE if name in SOME and target not in LAST else LARGEST:
        made = build(step_of(FORMS[name], target, *case), target)
        assert_fits(made, target, tmp_path, spill=SPILLS.get((name, target), 0))
        if isinstance(target, int):
            assert_reads_wide_and_moves_bytes(made, FORMS[name], name != NARROW)
            if case[-1] == BF16:
                assert "cvt.rn.bf16" in made.asm["ptx"]  # the interpreter cuts


@pytest.mark.parametrize(("name", "target"), [case for case in CASES if case[0] in SOME])
def test_guarded_ones(name, target, tmp_path):
    for case in (WHOLE[0], WHOLE[1])[target in LAST :]:  # of e4m3, whose bits sm_80 decodes, one register goes to memory
        assert_fits(build(step_of(FORMS[name], target, *case, guarded=True), target), target, tmp_path, spill=8)


def assert_reads_wide_and_moves_bytes(made, form, bytes_only):
    """Codes do not come byte by byte; what changes registers is codes, scales of groups and what is stored, nothing in float32
    that is as large as a tile."""
    ptx = made.asm["ptx"]
    # A thread has 16 bytes of codes and those of the next tile at least, and asks for the scales of three steps.
    assert len(re.findall(r"ld\.global\S*\.[bus]8\b", ptx)) <= 24
    if isinstance(form, Lut4):  # 32 codes to a thread
        assert ptx.count("shfl.sync.idx.b32") >= 32
    moved = [line for line in made.asm["ttgir"].splitlines() if "ttg.convert_layout" in line]
    shapes = [tuple(map(int, found[1].split("x"))) for line in moved if (found := re.search(r"tensor<([\dx]+)xf32", line))]
    assert not bytes_only or max(map(prod, shapes), default=0) <= 128 * 8


@pytest.mark.parametrize(("name", "target"), CASES)
def test_ragged_ones(name, target, tmp_path):
    """Groups that go on in the next row, and odd rows, too: an address for each code."""
    cases = RAGGED + (CROSSING if isinstance(FORMS[name], Lut4) else [])
    for case in cases if name in SOME and target not in LAST else cases[-1:]:
        assert_fits(build(step_of(FORMS[name], target, *case), target), target, tmp_path)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("name", INTS)
def test_packed_integers(name, target, tmp_path):
    """What changes registers is words, or bytes, or what is stored: a code of four bytes would be as large as four or eight of them."""
    for case in (*WHOLE[:2], *WHOLE[3:], RAGGED[0]):
        made = build(step_of(INTS[name], target, *case), target)
        assert_fits(made, target, tmp_path, spill=8)
        if isinstance(target, int) and not INTS[name].indexed and case[3] == BF16:
            moved = [line for line in made.asm["ttgir"].splitlines() if "ttg.convert_layout" in line]
            assert not any(re.search(r"tensor<\d+x\d+x(\d+x)*(i32|f32)", line) and len_of(line) > 128 * 32 for line in moved)


def len_of(line):
    return prod(map(int, re.findall(r"(\d+)x", re.search(r"tensor<([\dx]+)x", line)[0])))


ALONE = [(name, 90) for name in ("nf4 nested", "nf4 4096", "nvfp4", "int8 of bitsandbytes", "fp8 block", *INTS)]
ALONE += [("nf4 4096", 80), ("fp8 block", 80), ("nvfp4", 100), *product(("hqq", "gptq", "awq"), (80, 100))]


@pytest.mark.parametrize(("name", "target"), ALONE)
def test_dense_alone(name, target, tmp_path):
    """A thread writes the weights of the codes that it has read: 16 bytes at once, none through shared memory."""
    form, odd = (FORMS | INTS)[name], 4160 if name in INTS else 4098
    most = 16384 if name == "gptq by an index" else 4096 if name in INTS else 1024  # words and, by an index, scales; of groups
    for dtype, (N, K) in ((BF16, (1024, 4096)), (FP32, (1024, 4096)), (BF16, (1000, odd))):
        coded = Coded((N, K), form)
        (step,) = launches(plan_dense(likes_of_codes(coded), device(target), coded, dtype), "dequantize")
        made = build(step, target)
        assert_fits(made, target, tmp_path)
        if K == 4096:
            ptx = made.asm["ptx"]
            assert set(re.findall(r"st\.global\S*", ptx)) == {"st.global.v4.b32"}
            assert made.metadata.shared <= most
            assert ("cvt.rn.bf16" in ptx) == (dtype == BF16 or name == "hqq")  # which rounds as the library does
    if name == "nf4 4096":  # groups that go on in the next row
        coded = Coded((999, 4097), FORMS[name])
        (step,) = launches(plan_dense(likes_of_codes(coded), device(target), coded, BF16), "dequantize")
        assert_fits(build(step, target), target, tmp_path)


@pytest.mark.parametrize(("name", "target"), ALONE)
def test_dense_times_g(name, target, tmp_path):
    """That of backward, and the pass over rows without a magnitude, which ends at once where there are none."""
    coded = Coded((1024, 4096), (FORMS | INTS)[name])
    lost, of_three, columns = launches(plan_dense_by_g(likes_of_codes(coded), device(target), coded, BF16))
    assert {each.kernel.fn.__name__ for each in (lost, of_three)} == {"lost_kernel"} and lost.grid < columns.grid
    for step in (lost, of_three, columns):
        assert_fits(build(step, target), target, tmp_path)
    assert set(re.findall(r"st\.global\S*", build(columns, target).asm["ptx"])) == {"st.global.v4.b32"}


@pytest.mark.parametrize(("target", "by_bits"), [(80, True), (90, False), (100, False), ("gfx942", True)], ids=str)
def test_float8_where_there_is_one(target, by_bits):
    step = step_of(FORMS["fp8 block"], target, *WHOLE[0])
    assert by_bits == arguments(step)["HOW"].BY_BITS
    if isinstance(target, int):
        assert ("cvt.rn.f16x2.e4m3x2" in build(step, target).asm["ptx"]) != by_bits


def test_no_scale_is_rounded_once_where_it_should_be_twice():
    """code256 * scales2 + offset: the product is an fma of its own, so that none fuses it with the sum."""
    ptx = build(step_of(FORMS["nf4 nested"], 90, *WHOLE[0]), 90).asm["ptx"]
    lone = re.search(r"fma\.rn\.f32\s+(%r\d+), (%r\d+), (%r\d+), (0f00000000|%r\d+);", ptx)
    assert lone and re.search(rf"add\S*\.f32\s+%r\d+, ({lone[1]}, %r\d+|%r\d+, {lone[1]});", ptx)


def test_strips_wait_for_no_copy_before_a_product(tmp_path):
    """Codes come 16 bytes at once to shared memory, A by the copy engine: what other copies wrote a fence would have to pass
    on to wgmma, ahead of each product."""
    step = step_of(FORMS["nf4 nested"], 90, 1024, 4096, 64, BF16, None)
    assert step.kernel.__name__ == "quant4_strips_kernel"
    ptx = build(step, 90).asm["ptx"]
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx and "fence.proxy.async" not in ptx
    assert set(re.findall(r"cp\.async\.c[ag]\S* \[.*?\], \[.*?\], (\w+)", ptx)) == {"0x10"}
