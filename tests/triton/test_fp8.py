"""The kernels behind compute="fp8" against plain torch: the same codes bit for bit, the same layer; and that they compile."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

from fdora.eager.fp8 import quantised
from fdora.functional import dora_linear
from fdora.triton.fp8 import _quantised, plan_fp8_linear
from tests import device
from tests.close import rel_l2
from tests.functional.test_fp8 import S, layer, x_of
from tests.triton.marks import INTERPRETED, needs_kernels  # noqa: F401
from tests.triton.test_compile import SHARED, assert_fits, build
from tests.triton.test_compile import device as gpu
from tests.triton.written import BF16, FP32, alike, launches, results_of

HALF = torch.float16  # the interpreter of Triton 3.6 multiplies bf16 wrongly


def x_of_every_size(M, K, dtype):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(M, K, generator=g) * torch.exp2(torch.randint(-24, 4, (M, K), generator=g).float())
    x[0], x[-1, 0] = 0, -0.0
    x[1, :16] = torch.arange(16) / 16 + 7  # values at the middle of two codes, where the largest is 448 / 2^5
    x[1, 16] = 14
    return x.to(device.NAME, dtype)


@needs_kernels
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
@pytest.mark.parametrize("M, K", [(5, 300), (33, 128), (2, 5000)])
def test_the_same_codes(M, K, dtype, blocks):
    x = x_of_every_size(M, K, dtype)

    def write(plan, like):
        given = plan.tokens(like)
        out = plan.result("codes", (M, K), torch.float8_e4m3fn), plan.result("scale", (-(-K // 128) if blocks else 1, M), FP32)
        plan.temp = lambda shape, dtype=None: next(rest)
        rest = iter(out)
        assert _quantised(plan, given, blocks) == out

    codes, scale = results_of(write, x)
    want, each = quantised(x, 128 if blocks else K)
    assert torch.equal(scale.T, each) and torch.equal(codes.view(torch.uint8), want.view(torch.uint8))
    assert len(codes.view(torch.uint8).unique()) > 100


@needs_kernels
@pytest.mark.parametrize("kind", ["tensor", "row", "block", "tall block"])
@pytest.mark.parametrize("M, bias", [(5, True), (130, False)])
def test_the_same_layer(kind, M, bias):
    t = layer(kind, N=150, K=300, r=20, dtype=HALF)
    x = x_of(M, dtype=HALF)
    b = torch.randn(150, device=device.NAME, dtype=HALF).requires_grad_() if bias else None
    dy = torch.randn(M, 150, device=device.NAME, dtype=HALF)
    leaves = [x, *t[1:], *([b] if bias else [])]
    results = []
    for backend in ("triton", "eager"):
        y = dora_linear(x, *t, s=S, bias=b, compute="fp8", backend=backend)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype and rel_l2(got, want) < 2e-3
    with torch.no_grad():
        assert torch.equal(dora_linear(x, *t, s=S, bias=b, compute="fp8", backend="triton"), results[0][0])


@needs_kernels
def test_strides_dropout_and_compiled_code():
    t = layer("block", dtype=HALF)
    x = x_of(3, 4, K=600, dtype=HALF).detach()[..., ::2]
    for options in ({}, {"dropout_p": 0.4, "seed": 5}):
        y, want = (dora_linear(x, *t, s=S, compute="fp8", backend=b, **options) for b in ("triton", "eager"))
        assert rel_l2(y.detach(), want.detach()) < 2e-3

    def f(x, W, A, B, m):
        return dora_linear(x, W, A, B, m, s=S, compute="fp8", backend="triton")

    torch._dynamo.reset()
    results = []
    for call in (torch.compile(f, backend="aot_eager", fullgraph=True), f):
        y = call(x, *t)
        results.append([y.detach(), *torch.autograd.grad(y.float().square().sum(), t[1:])])
    for got, want in zip(*results, strict=True):
        assert rel_l2(got, want) < 1e-3


SHAPES = [  # tokens, N, K, scales, their blocks
    (4096, 4096, 4096, "block", (128, 128)),
    (8, 4096, 4096, "block", (128, 128)),
    (300, 137, 75, "tensor", (0, 0)),
]


@pytest.mark.skipif("INTERPRETED", reason="the interpreter compiles nothing; runs without TRITON_INTERPRET")
@pytest.mark.parametrize("target", [89, 90, 100, 120])
def test_it_compiles(target, tmp_path, monkeypatch):
    monkeypatch.setitem(SHARED, 89, SHARED[120])
    for M, N, K, mode, block in SHAPES:
        scales = alike({"row": N, "tensor": 1}.get(mode, (N // 128) * (K // 128)), dtype=FP32)
        codes, vector = alike(N, K, dtype=torch.float8_e4m3fn), alike(N, dtype=FP32)
        likes = [
            alike(M, K, dtype=BF16),
            codes,
            scales,
            alike(16, K, dtype=BF16),
            alike(N, 16, dtype=BF16),
            vector,
            vector,
            vector,
        ]
        plan = plan_fp8_linear([*likes, None], gpu(target), "pre_scale", 0.0, mode, block)
        for step in launches(plan, "fp8"):
            made = build(step, target)
            assert_fits(made, target, tmp_path)
            if step.kernel.__name__ == "fp8_gemm_kernel" and M > 16:  # of fewer tokens Triton makes halves on some GPUs
                ptx = made.asm["ptx"]
                assert ("f32.e4m3.e4m3" in ptx or "kind::f8f6f4" in ptx) and "cvt.rn.f16x2.e4m3x2" not in ptx  # none of halves
