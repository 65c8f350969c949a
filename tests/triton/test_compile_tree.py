"""The kernels for many layers build for every GPU we name; no spills, and whole tiles are read 16 bytes at a time."""

import re

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs Triton; `make test` installs it")
from fdora.quant import from_fp8, from_int8  # noqa: E402
from fdora.triton import tree, tree_kept  # noqa: E402
from fdora.triton.runtime.cost import Cost  # noqa: E402
from fdora.triton.tiles.configs import tree_config  # noqa: E402
from fdora.triton.tree_table import launches_of, rows_of  # noqa: E402
from tests.triton.test_compile import TARGETS, assert_fits, build, device, on_targets, pytestmark  # noqa: E402, F401

BF16, FP32, E4M3 = torch.bfloat16, torch.float32, torch.float8_e4m3fn
LAYERS = 200
SIZES = {True: (256, 256), False: (250, 201), "aligned": (250, 200)}
# W, A and B, rank, and whether N and K are multiples of 128 and rows begin at 16 bytes; or only that
ALIGNED = "aligned"
CASES = [(BF16, BF16, BF16, r, whole) for r in (16, 24, 64, 96, 128, 384) for whole in (ALIGNED, True)]
CASES += [(BF16, FP32, FP32, 64, ALIGNED), *((BF16, FP32, FP32, r, True) for r in (8, 24, 64, 128, 384))]
CASES += [(BF16, FP32, BF16, 70, True), (FP32, FP32, FP32, 64, True), *((t, t, t, 70, False) for t in (BF16, FP32))]
CODED = [(E4M3, t, t, r, True) for t in (BF16, FP32) for r in (8, 64, 128, 384)]
CODED += [(torch.int8, BF16, BF16, 64, True), *((E4M3, t, t, 70, False) for t in (BF16, FP32))]
ON_TARGETS = on_targets(CASES, lambda weight, a, b, r, whole: r == 384 or (weight, r) == (FP32, 70))
CODED_ON_TARGETS = on_targets(CODED, lambda weight, a, b, r, whole: r in (70, 384))


def weight_of(N, K, dtype):
    """Codes with scales of blocks, of a dtype that has them."""
    W = torch.empty(N, K, dtype=dtype)
    scales = torch.empty(-(-N // 128), -(-K // 128))
    return {E4M3: from_fp8, torch.int8: from_int8}[dtype](W, scales, (128, 128)) if W.itemsize == 1 else W


def steps(target, W, A, B):
    """What a plan of many such layers launches: by name."""
    gpu = device(target)
    rows, partials = rows_of([W] * LAYERS, [A] * LAYERS, [B] * LAYERS, [1.0] * LAYERS, [0] * LAYERS, gpu.capability)
    plan = tree._plan(gpu, launches_of(rows), LAYERS, partials, LAYERS * W.shape[0], Cost(), True)
    found = {step.kernel.__name__: step for step in plan.steps}
    assert len(found) == len(plan.steps) == 3 + (torch.float32 in (A.dtype, B.dtype))
    return found


@pytest.mark.parametrize(("target", "weight", "a", "b", "r", "whole"), ON_TARGETS + CODED_ON_TARGETS)
def test_norms(target, weight, a, b, r, whole, tmp_path):
    N, K = SIZES[whole]
    W, A, B = weight_of(N, K, weight), torch.empty(r, K, dtype=a), torch.empty(N, r + (not whole), dtype=b)[:, :r]
    step = steps(target, W, A, B)["norms_kernel"]
    made = build(step, target)
    assert_fits(made, target, tmp_path)
    if (whole is True or (whole and a == BF16 and target == 90)) and isinstance(target, int):
        block_n, block_k, *_ = tree_config(r, a == b == BF16, weight.itemsize < 4, whole, target)
        tile_loads = re.findall(r"ld\.global\S*v4\.b32|cp\.async\.cg", made.asm["ptx"])
        assert len(tile_loads) >= block_n * block_k * weight.itemsize // 16 // (32 * step.num_warps)


@pytest.mark.parametrize(("target", "weight", "a", "b", "r", "whole"), ON_TARGETS)
def test_kept_of_a_call(target, weight, a, b, r, whole, tmp_path):
    """With copies, which are more to store; and without them where the tile is the largest."""
    N, K, gpu = *SIZES[whole], device(target)
    W, A, B = torch.empty(N, K, dtype=weight), torch.empty(r, K, dtype=a), torch.empty(N, r + (not whole), dtype=b)[:, :r]
    if not tree_kept.in_one_launch([W], [A], [B]):
        assert whole is not True and FP32 in (a, b)
        return
    rows, partials = rows_of([W] * 3, [A] * 3, [B] * 3, [1.0] * 3, [0, 256, 512], gpu.capability)
    for fresh in (True, False)[: 1 + (r == 384)]:
        (step,) = tree_kept.plan_kept(gpu, launches_of(rows), [N] * 3, 32, partials, 768, fresh, Cost()).steps
        # beside a float32 W, what scales A is looked for in place; Triton 3.6 spills nothing there
        assert_fits(build(step, target), target, tmp_path, spill=48 if (weight, target) == (FP32, 90) else 0)


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("name", ["fingerprints_kernel", "roots_kernel"])
def test_fingerprints_and_roots(target, name, tmp_path):
    W, A, B = torch.empty(256, 256), torch.empty(8, 256), torch.empty(256, 8)
    assert_fits(build(steps(target, W, A, B)[name], target), target, tmp_path)
