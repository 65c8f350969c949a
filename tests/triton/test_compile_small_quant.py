"""The kernel for few tokens of a W of codes builds for every GPU we name: it fits, spills nothing, moves no weight."""

import re
from itertools import product
from math import prod

import pytest

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")
from fdora._records import Operands
from fdora.quant import Codes8, Lut4
from fdora.triton.codes import Coded, Ints, packed
from fdora.triton.small import Back, Out, small_backward, small_forward
from tests.triton.test_compile import TARGETS, WORDS, assert_fits, build, device, pytestmark  # noqa: F401
from tests.triton.written import BF16, FP32, alike, launches, likes_of_codes, plan_of

NF4 = Lut4("nf4", True, 64, "nested", "flat")
FORMS = {
    "nf4": NF4,
    "nvfp4": Lut4("e2m1", False, 16, "e4m3*global", "row"),
    "int8": Codes8("int8", "row", (0, 0), 1.0),
    "fp8": Codes8("e4m3", "block", (128, 128), 1.0),
    "hqq": Ints("hqq torch.bfloat16", 4, 64),
    "gptq": Ints("gptq+1", 4, 128),
    "awq": Ints("awq", 4, 128),
    "hqq8": Ints("hqq torch.float16", 8, 64),
    "gptq8": Ints("gptq+1", 8, 128),
}


def steps_of(form, target, M, columns, N=4096, K=4096, r=16):
    """What a layer launches forward, with all that forward can store, or backward."""

    def write(plan, x, dz, A, B, m, *likes):
        x, dz, A, B = (plan.matrix(like) for like in (x, dz, A, B))
        m, W, s = plan.vector(m), packed(plan, likes, Coded((N, K), form)), plan.scalar("s")
        if columns:
            out = Back(plan.result("dx", (M, K), BF16), plan.result("dA", (r, K), BF16), x)
            small_backward(plan, dz, Operands(W, A, B, None, None, None, None), s, out, accumulate=True)
        else:
            out = Out(*(plan.result(name, (M, n), BF16) for name, n in (("y", N), ("h", r), ("pre", N))))
            small_forward(plan, x, Operands(W, A, B, m, m, m, None), s, out)

    matrices = (alike(*shape, dtype=BF16) for shape in ((M, K), (M, N), (r, K), (N, r)))
    likes = (*matrices, alike(N, dtype=FP32), *likes_of_codes(Coded((N, K), form)))
    _, *steps = launches(plan_of(write, *likes, device=device(target)))
    return steps


def builds(steps, target, tmp_path, spill=0):
    made = [build(step, target) for step in steps]
    for each in made:
        assert_fits(each, target, tmp_path, spill)
    return made


TOKENS = {80: (16, 64), 90: (1, 16, 64)}  # elsewhere 16: the tiles are those of sm_80


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_nf4(target, tmp_path):
    for M, columns in product(TOKENS.get(target, (16,)), (False, True)):
        made = builds(steps_of(NF4, target, M, columns), target, tmp_path)
        if target == 90 and M <= 16 and not columns:
            assert len(made) == 2  # K is split
            assert_moves_no_weight(made[0])


def test_a_large_rank_takes_no_more_shared_memory(tmp_path):
    """Its part is in the kernel of x W: programs of both share multiprocessors."""
    for M in (1, 64):
        (small, _), (large, last) = (builds(steps_of(NF4, 90, M, False, r=r), 90, tmp_path) for r in (64, 384))
        assert large.metadata.shared <= 1.25 * small.metadata.shared and last.metadata.shared <= small.metadata.shared
        if M == 1:
            assert_moves_no_weight(large)


def assert_moves_no_weight(made, by="cvt.rn.bf16x2.f32"):
    """``by``: what makes weights of codes. What changes registers, or goes through shared memory, is not as large as a tile of weights: x is, and comes from there."""
    moved = [line for line in made.asm["ttgir"].splitlines() if "ttg.convert_layout" in line or "ttg.local_alloc %" in line]
    sizes = [prod(map(int, found[1].split("x"))) for line in moved if (found := re.search(r"tensor<([\dx]+)xbf16", line))]
    assert max(sizes, default=0) < 16 * 128 * 4
    assert made.asm["ptx"].count(by) > 8 and "cp.async" in made.asm["ptx"]


@pytest.mark.parametrize(
    ("name", "target"),
    [("nvfp4", 80), *product(("int8", "fp8", "hqq8", "gptq8"), (90,)), *product(("hqq", "gptq", "awq"), (80, 90, 100))],
)
def test_other_formats(name, target, tmp_path):
    for M, columns in ((1, False), (32, True), *[(64, False)] * (target == 90)):
        made = builds(steps_of(FORMS[name], target, M, columns), target, tmp_path)
        if target == 90 and M == 1 and name in ("hqq", "gptq", "awq"):
            assert_moves_no_weight(made[0], "mul.bf16" if name == "hqq" else "fma.rn.bf16")


@pytest.mark.parametrize("columns", [False, True])
def test_ragged_tiles(columns, tmp_path):
    """A mask for each load, and three slabs of the rank; in parts of K, and at once."""
    for N, K in ((1000, 4160), (17000, 17024))[: 2 - columns]:
        builds(steps_of(NF4, 90, 16, columns, N, K, 130), 90, tmp_path, spill=WORDS)
