"""The kernels for many adapters on one W build for every GPU we name, without one: they fit, and spill nothing or little."""

from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")
from fdora.quant import Codes8
from fdora.triton import multi
from fdora.triton.codes import Coded, written
from fdora.triton.multi_dropped import CODES, TWO
from tests.triton.test_compile import assert_builds, build, device, kind, pytestmark  # noqa: F401
from tests.triton.written import BF16, FP32, alike, bank, by_tma, launches

GPUS = (80, 90, 100)
# Bytes of stack: masks and addresses of single elements, where a norm of float32 factors or float32 tokens are multiplied.
# Backward's pass in float32 on sm_100: ptxas puts two words aside although it uses 72 registers, and frees none by it.
SPILL = {
    "multi_scale_kernel": 8,
    "multi_epilogue_kernel": 32,
    "multi_h_kernel": 16,
    "multi_gemm_tma_kernel": 8,
    "gemm_tma_kernel": 56,  # g out of a table beside a value before g, on sm_100
}


def plans(target, M, N, K, r, G, dtype=BF16, adapter=BF16, mode="lora", **beside):
    d, likes = device(target), bank(M, N, K, r, G, dtype, adapter, **beside)
    x, dy, h, bias = alike(M, K, dtype=dtype), alike(M, N, dtype=dtype), alike(M, r, dtype=dtype), "bias" in beside
    p = 0.1 if "seed" in beside else 0.0
    yield multi.plan_forward((x, *likes), d, (), p, mode, True)
    options = (dtype == FP32 or bias or mode == "peft", False, (), p, mode, (*(True,) * 5, bias))
    yield multi.plan_backward((dy, x, h, dy, None, *likes), d, *options)


SHAPES = {
    80: [(8192, 4096, 4096, 16, 32)],
    90: [(8192, 4096, 4096, 16, 32), (8192, 4096, 14336, 256, 4), (2048, 4096, 4096, 64, 4)],  # the last in parts of K
}
SHAPES[100] = SHAPES[80]


@pytest.mark.parametrize(("target", "shape"), [(target, shape) for target in GPUS for shape in SHAPES[target]], ids=str)
def test_tiles(target, shape, tmp_path):
    made = [*plans(target, *shape, bias=True), *plans(target, *shape, seed="apart")]
    M, N, K, r, G = shape
    x, dy, h = (alike(M, n, dtype=BF16) for n in (K, N, r))
    needs = (True, True, True, False, False, False)  # onto the dx of another layer
    made.append(
        multi.plan_backward(
            (dy, x, h, None, x, *bank(M, N, K, r, G, BF16, BF16, m=False)), device(target), False, True, (), 0.0, "lora", needs
        )
    )
    products = [step for plan in made for step in launches(plan, "multi_gemm")]
    assert len(products) == 5 and all(by_tma(step) == (target >= 90) for step in products)
    assert_builds(made, target, tmp_path, "multi", SPILL)
    assert_builds(made, target, tmp_path, "bank") if target >= 90 else None


@pytest.mark.parametrize("target", [*GPUS, 120])
def test_float32_factors_of_many_ranks(target, tmp_path):
    """Beside half precision, in the deepest pipelines and with masks: an sm_86 and an sm_120 have room for fewer tiles."""
    for M, K, beside in ((1100, 4096, {}), (1100, 4096, {"experts": True}), (16384, 14336, {"seed": "apart"})):
        assert_builds(plans(target, M, 4096, K, 128, 4, adapter=FP32, **beside), target, tmp_path, "multi_h")


@pytest.mark.parametrize("target", [*GPUS, 120])
@pytest.mark.parametrize("r", [1, 16, 32, 64])
def test_float32_factors_of_few_tokens(target, r, tmp_path):
    made = [next(plans(target, 32, 4096, 4096, r, 4, adapter=FP32))]
    assert_builds(made, target, tmp_path, "multi", {"multi_expand_kernel": 8})


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("act", ["silu", "gelu"])
def test_gate_and_up_in_one_pass(target, act, tmp_path):
    (M, N, K, r), likes = (8192, 14336, 4096, 16), bank(8192, 14336, 4096, 16, 4, BF16, BF16)
    wide, h = alike(M, N, dtype=BF16), alike(M, r, dtype=BF16)
    given = (wide, wide, wide, alike(M, K, dtype=BF16), h, h, *likes, *likes)
    made = [multi.plan_gated(given, device(target), act, (True,) * 4)]
    assert [step.kernel.__name__ for step in launches(made[0])][-3:] == ["multi_gated_kernel", *["multi_finish_kernel"] * 2]
    assert_builds(made, target, tmp_path, "multi", SPILL)


@pytest.mark.parametrize("r", [16, 256])
def test_the_look_at_the_bank_runs_beside_the_product_of_low_rank(r):
    """Only behind it, which lets the next kernel in, and the look ends after it; nothing else starts early."""
    for plan in plans(90, 8192, 4096, 4096, r, 32):
        steps = launches(plan)
        early = [i for i, step in enumerate(steps) if step.pdl]
        lets_in = [i for i, step in enumerate(steps) if step.kernel.__name__ == "multi_h_kernel" and step.constexprs[-1]]
        assert early == [i + 1 for i in lets_in] and all(steps[i].kernel.__name__ == "bank_kernel" for i in early)
        assert len(early) == plan.name.endswith("forward")


@pytest.mark.parametrize(("target", "M"), [(80, 700), *product((90, 100), (200, 700, 4096))])
def test_one_product_for_a_few_ranks(target, M, tmp_path):
    """g of each row out of a table, in every form that a product of one layer has."""
    made = [next(plans(target, M, 4096, 4096, 16, 6, bias=bias, ids=M == 4096)) for bias in (False, True)]
    for name in ("multi_table", "rest" if "by cuBLAS" in made[0].path else "gemm"):
        assert_builds(made, target, tmp_path, name, SPILL)


@pytest.mark.parametrize("target", GPUS)
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("seed", [True, "apart"])
def test_dropout_in_pefts_meaning(target, dtype, seed, tmp_path):
    """The pass behind both products and backward's, with one ratio and with one for each adapter; the codes from sm_90 on."""
    made = [*plans(target, 8192, 4096, 4096, 16, 4, dtype, FP32, mode="peft", seed=seed, bias=True)]
    eight = dtype == BF16 and target >= 90
    assert all((CODES if eight else TWO) in plan.path for plan in made)
    for name in ("multi_epilogue", "multi_scale", *(["gemm", "fp8_rows"] if eight else [])):
        assert_builds(made, target, tmp_path, name, SPILL)


EXPERTS = [(16384, 1536, 2048, 16, 128), (32768, 4096, 14336, 64, 8), (64, 2880, 2880, 16, 32)]


@pytest.mark.parametrize(("target", "shape"), [(80, EXPERTS[0]), *product((90, 100), EXPERTS)], ids=str)
def test_experts(target, shape, tmp_path):
    """As models have them: each with a W of its own, which one grouped product reads."""
    r = shape[3]
    made = [plan for bias in (False, True) for plan in plans(target, *shape, experts=True, **({"bias": True} if bias else {}))]
    products = [step for plan in made for step in launches(plan, "multi_gemm")]
    assert len(products) == 4 and all(by_tma(step) == (target >= 90) for step in products)
    (M, K, N, _, G), d = shape, device(target)
    x, dy, h = alike(M, K, dtype=BF16), alike(M, N, dtype=BF16), alike(M, r, dtype=BF16)
    likes, no_dx = bank(M, N, K, r, G, BF16, BF16, experts=True), (False, *(True,) * 4, False)
    made.append(multi.plan_backward((dy, x, h, dy, None, *likes), d, False, False, (), 0.0, "lora", no_dx))
    for name in ("multi_gemm", "multi_routes") if r > 16 or target == 80 else ("multi_gemm",):
        assert_builds(made, target, tmp_path, name, SPILL)


@pytest.mark.parametrize(("target", "shape"), [*product((90, 100), EXPERTS[:2])], ids=str)
@pytest.mark.parametrize("mode", ["row", "block"])
def test_experts_of_codes(target, shape, mode, tmp_path):
    """Multiplied as codes, in both directions."""
    M, N, K, r, E = shape
    form = Codes8("e4m3", mode, (128, 128) if mode == "block" else (0, 0), 1.0)
    facts, x, dy = written([Coded((E * N, K), form)]), alike(M, K, dtype=BF16), alike(M, N, dtype=BF16)
    scales, made = alike(E * N if mode == "row" else E * N // 128 * (K // 128), dtype=FP32), []
    for bias in (False, True):
        likes = [None, *bank(M, N, K, r, E, BF16, BF16, bias, experts=True)[1:]]
        likes += [alike(E * N, K, dtype=torch.float8_e4m3fn), scales]
        made.append(multi.plan_forward((x, *likes), device(target), (), 0.0, "lora", bias, *facts, True))
    saved, needs = (dy, x, alike(M, r, dtype=BF16), dy, None), (*(True,) * 5, True)
    made.append(multi.plan_backward((*saved, *likes), device(target), True, False, (), 0.0, "lora", needs, *facts, True))
    assert all("grouped product of codes" in plan.path or "product of codes for dx" in plan.path for plan in made)
    assert_builds(made, target, tmp_path, "multi_codes")
    assert_builds(made, target, tmp_path, "fp8")
    for step in {kind(step): step for plan in made for step in launches(plan, "multi_codes")}.values():
        ptx = build(step, target).asm["ptx"]
        assert ("f32.e4m3.e4m3" in ptx or "kind::f8f6f4" in ptx) and "cvt.rn.f16x2.e4m3x2" not in ptx
