"""A product with its low-rank term, in every way that the model may choose, against float64."""

from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

from fdora.triton.gemm import Epilogue
from fdora.triton.product import scaled_product, summed_product
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import device_of
from fdora.triton.runtime.walk import like, run
from fdora.triton.tiles.configs import GemmConfig
from fdora.triton.tiles.product import Ask, Way, fused_config
from tests import device
from tests.close import assert_within
from tests.triton.marks import INTERPRETED, needs_kernels  # noqa: F401 (read by the mark)

pytestmark = needs_kernels

HALF = torch.float16  # the interpreter multiplies bf16 wrongly
WAYS = ("fused", "after", "first")
TALL = GemmConfig(True, 64, 64, 64, 8, False, False, 4, 3)


def random(*shape, dtype=HALF):
    return torch.randn(*shape, dtype=torch.float32, device=device.NAME).to(dtype)


def way_of(kind, M, N, K, r, trans_b):
    on = device_of(torch.device(device.NAME))
    tile = fused_config(Ask(M, N, K, r, trans_b, False, False, on.capability, on.num_sms)) if kind == "fused" else None
    return Way(kind, tile, 0.0)


def planned(write, *tensors):
    plan = Builder("test", device_of(tensors[0].device))
    words = write(plan, *(plan.vector(like(t)) if t.dim() == 1 else plan.matrix(like(t)) for t in tensors))
    return words, run(plan.plan(), tensors)


@pytest.mark.parametrize(("kind", "pre", "bias"), [*product(WAYS[:2], (False, True), (False, True))])
@pytest.mark.parametrize(("M", "N", "K", "r"), [(130, 72, 40, 12), (65, 264, 96, 80)])
def test_forward(M, N, K, r, kind, pre, bias):
    """Ragged in every axis, a rank of several slabs and one that begins at no 16 bytes; with the value before g, and without."""
    torch.manual_seed(0)
    x, h, W, B = random(M, K), random(M, r), random(N, K), random(N, r)
    vectors = [torch.rand(N, device=device.NAME) + 0.5 for _ in range(2)] + [random(N, dtype=torch.float32)] * bias

    def write(plan, x, h, W, B, m, c, bias=None):
        y = plan.result("y", (M, N), HALF)
        before = plan.result("pre", (M, N), HALF) if pre else None
        return scaled_product(plan, y, x, h, W, B, Epilogue("scale", m, c, bias), before, way_of(kind, M, N, K, r, True))

    words, got = planned(write, x, h, W, B, *vectors)
    x64, h64, W64, B64, m, c, *b = (t.double() for t in (x, h, W, B, *vectors))
    v = x64 @ W64.T + h64 @ B64.T
    naive = (x @ W.T).add_(h @ B.T)
    g = vectors[0] / vectors[1]
    assert_within(got[0], (g * naive + sum(vectors[2:])).to(HALF), m / c * v + sum(b), kind)
    if pre:
        assert_within(got[1], naive, v, "before g")
    assert ("fused" in words) == (kind == "fused")


def assert_backward(way, accumulate, r, trans=False):
    """Onto nothing, and onto the dx of the layer before."""
    torch.manual_seed(0)
    M, N, K = 97, 56, 136
    dz, dh, A, onto = random(M, N), random(M, r), random(r, K), random(M, K)
    W = random(K, N).T if trans else random(N, K)
    unit = torch.eye(K, dtype=HALF, device=device.NAME)

    def write(plan, dz, dh, W, A, onto, unit):
        dx = plan.result("dx", (M, K), HALF)
        if accumulate:  # a plan has no plain copy
            plan.product(dx, onto, unit)
        return summed_product(plan, dx, dz, dh, W, A, accumulate, way or way_of("fused", M, K, N, r, trans))

    _, (got,) = planned(write, dz, dh, W, A, onto, unit)
    start = onto if accumulate else torch.zeros_like(onto)
    truth = dz.double() @ W.double() + dh.double() @ A.double() + start.double()
    assert_within(got, (dz @ W).add_(dh @ A).add_(start), truth, way)


@pytest.mark.parametrize(("kind", "accumulate", "trans"), [*product(WAYS, (False, True), (False, True))])
def test_backward(kind, accumulate, trans):
    """W row by row, and column by column."""
    assert_backward(None if kind == "fused" else Way(kind, None, 0.0), accumulate, 20, trans)


@pytest.mark.parametrize("accumulate", [False, True])
def test_odd_rows_in_tiles_by_tma(accumulate):
    """97 rows in tiles of 64: the second begins at row 33, over rows of the first, but not where both would add to them."""
    on = device_of(torch.device(device.NAME))
    if device.NAME != "cpu" and not 90 <= on.capability < 120:
        pytest.skip("tiles come by pointers here; runs with --device cpu, and on a Hopper or data-centre Blackwell GPU")
    assert_backward(Way("fused", TALL, 0.0), accumulate, 24)


def test_no_tokens():
    x, h, W, B, m = random(0, 40), random(0, 16), random(24, 40), random(24, 16), torch.rand(24, device=device.NAME)

    def write(plan, x, h, W, B, m, c):
        y = plan.result("y", (0, 24), HALF)
        return scaled_product(plan, y, x, h, W, B, Epilogue("scale", m, c), None, Way("after", None, 0.0))

    assert planned(write, x, h, W, B, m, m)[1][0].shape == (0, 24)
