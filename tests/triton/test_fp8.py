"""The kernels behind compute="fp8" against plain torch: the same codes bit for bit, the same layer; and that they compile."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

from fdora.eager.fp8 import quantised
from fdora.functional import (
    DoraLayer,
    dora_experts,
    dora_experts_mlp,
    dora_linear,
    dora_linear_group,
    dora_linear_multi,
    dora_mlp,
    dora_norm,
    explain,
)
from fdora.quant import Codes8, QuantWeight, with_transpose
from fdora.triton import fp8, multi
from fdora.triton.codes import Coded, written
from fdora.triton.linear import plan_backward, plan_forward
from fdora.triton.tiles.few import LIMIT
from fdora.triton.tiles.fp8 import POINTERS, tiles
from tests import device
from tests.close import rel_l2
from tests.functional.test_fp8 import S, bank, experts, layer, members, mx_layer, rounded, x_of
from tests.triton.marks import INTERPRETED, needs_kernels  # noqa: F401
from tests.triton.test_compile import SHARED, assert_fits, build, kind
from tests.triton.test_compile import device as gpu
from tests.triton.written import BF16, FP32, alike, launches, results_of
from tests.triton.written import bank as many

HALF = torch.float16  # the interpreter of Triton 3.6 multiplies bf16 wrongly


def x_of_every_size(M, K, dtype):
    g = torch.Generator().manual_seed(3)
    x = torch.randn(M, K, generator=g) * torch.exp2(torch.randint(-24, 4, (M, K), generator=g).float())
    x[0], x[-1, 0] = 0, -0.0
    x[1, :16] = torch.arange(16) / 16 + 7  # values at the middle of two codes, where the largest is 448 / 2^5
    x[1, 16] = 14
    x[2 % M] = (x[2 % M] > 0) * 2.0**-120  # the reciprocal of a scale that is no normal number would be infinite
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
        assert fp8.quantised(plan, given, blocks) == out

    codes, scale = results_of(write, x)
    want, each = quantised(x, 128 if blocks else K)
    assert torch.equal(scale.T, each) and torch.equal(codes.view(torch.uint8), want.view(torch.uint8))
    assert len(codes.view(torch.uint8).unique()) > 100


@pytest.fixture(params=["tma", "pointers"])
def by(request, as_hopper, monkeypatch):
    """How tiles come: on a CPU as on an sm_90, whose kernels are interpreted; or as on a GPU without TMA."""
    if request.param == "pointers":
        monkeypatch.setattr(fp8, "fp8_config", lambda of, *_: POINTERS if of.M > LIMIT else None)
        monkeypatch.setattr(fp8, "grouped_fp8", lambda *_: None)
    elif device.NAME == "cpu":
        as_hopper()
    return request.param


@needs_kernels
@pytest.mark.parametrize("kind", ["tensor", "row", "block", "tall block"])
@pytest.mark.parametrize("M, N, K, r", [(5, 152, 304, 20), (130, 152, 304, 20), (300, 264, 400, 80)])
def test_the_same_layer(kind, M, N, K, r, by):
    """Few tokens are multiplied by the decoded W, and on sm_90 those by a W of blocks that no tile has to itself."""
    t = layer(kind, N, K, r, dtype=HALF)
    x, bias = x_of(M, K=K, dtype=HALF), N > 152
    b = torch.randn(N, device=device.NAME, dtype=HALF).requires_grad_() if bias else None
    dy = torch.randn(M, N, device=device.NAME, dtype=HALF)
    leaves = [x, *t[1:], *([b] if bias else [])]
    want_fp8 = None if M <= LIMIT or (by == "tma" and kind == "tall block") else "fp8"
    results = []
    for backend, compute in (("triton", "fp8"), ("eager", want_fp8)):
        y = dora_linear(x, *t, s=S, bias=b, compute=compute, backend=backend)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype and rel_l2(got, want) < 2e-3
    with torch.no_grad():
        assert torch.equal(dora_linear(x, *t, s=S, bias=b, compute="fp8", backend="triton"), results[0][0])


@needs_kernels
@pytest.mark.parametrize("kind", ["tensor", "row", "block", "tall block"])
@pytest.mark.parametrize(
    "M, N, K, r, p", [(5, 160, 304, 20, 0), (130, 160, 304, 20, 0), (300, 256, 400, 80, 0), (90, 272, 128, 20, 0.4)]
)
def test_the_same_dx(kind, M, N, K, r, p, by):
    """Few tokens, and scales of blocks that no step has to itself, are multiplied by the decoded W; and all without TMA."""
    t = layer(kind, N, K, r, dtype=HALF)
    x, dy = x_of(M, K=K, dtype=HALF), torch.randn(M, N, device=device.NAME, dtype=HALF)
    on_codes = M > LIMIT and by == "tma" and kind != "tall block"
    results = []
    both = with_transpose(t[0])
    for W, backend, how in ((t[0], "triton", "fp8"), (both, "triton", "fp8"), (t[0], "eager", "fp8" if on_codes else None)):
        y = dora_linear(x, W, *t[1:], s=S, dropout_p=p, seed=7, grad_compute=how, backend=backend)
        results.append(torch.autograd.grad(y, [x, *t[1:]], dy))
    for got, again, want in zip(*results, strict=True):
        assert got.dtype == want.dtype and rel_l2(got, want) < 2e-3 and torch.equal(again, got)


@needs_kernels
@pytest.mark.parametrize("kinds", [("row",), ("block", "row", "block")])
@pytest.mark.parametrize("M, p", [(5, 0.0), (130, 0.0), (130, 0.3)])
def test_the_same_group_and_mlp(M, p, kinds, by):
    """h is one product or three. Where a kernel rounds an activation to the number beside eager's, its code may be the next one."""
    group, of_group = members((160, 304), (32, 304), (96, 304), dtype=HALF, kinds=kinds)
    group[1] = group[1]._replace(s=S if p else 0.3)
    mlp, of_mlp = members((256, 304), (256, 304), (304, 256), dtype=HALF, kinds=kinds)
    x, codes = x_of(M, K=304, dtype=HALF), {"compute": "fp8", "grad_compute": "fp8"}
    for call, leaves, bound in (
        (lambda **how: dora_linear_group(x, group, dropout_p=p, seed=[1, 2, 3] if p else None, **how), of_group, 3e-3),
        (lambda **how: (dora_mlp(x, *mlp, dropout_p=p, seed=[1, 2, 3] if p else None, **how),), of_mlp, 1e-2),
    ):
        results = []
        for backend, how in (("triton", codes), ("eager", want_of(codes, M, by))):
            ys = call(backend=backend, **how)
            dys = [torch.full_like(y, 0.1).cumsum(0) % 1 - 0.5 for y in ys]
            results.append([*ys, *torch.autograd.grad(ys, [x, *leaves], dys)])
        for got, want in zip(*results, strict=True):
            assert got.dtype == want.dtype and rel_l2(got.detach(), want.detach()) < bound


@needs_kernels
@pytest.mark.parametrize("kind", ["tensor", "row", "block"])
@pytest.mark.parametrize("route", ["offsets", "ids"])
@pytest.mark.parametrize(
    "M, ranks, p", [(5, (20, 3, 16), 0.0), (130, (20, 3, 16), 0.0), (130, (20, 3, 16), 0.4), (300, (100, 3, 120), 0.0)]
)
def test_the_same_bank(kind, route, M, ranks, p, by):
    """With few ranks in all, and with many behind the product; dropped, which the product does not see."""
    run, leaves, _ = bank(kind, M, 272, 304, ranks, route, HALF, bias=p > 0)
    codes, dy, results = {"compute": "fp8", "grad_compute": "fp8"}, torch.randn(M, 272, device=device.NAME, dtype=HALF), []
    for backend, how in (("triton", codes), ("eager", want_of(codes, M, by))):
        y = run(dropout_p=p, seed=[3, 4, 5], backend=backend, **how)
        results.append([y.detach(), *torch.autograd.grad(y, leaves, dy)])
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype and (rel_l2(got, want) < 2e-3 if want.any() else not got.any())
    with torch.no_grad():
        assert torch.equal(run(dropout_p=p, seed=[3, 4, 5], backend="triton", **codes), results[0][0])


@needs_kernels
@pytest.mark.parametrize("kind", ["tensor", "row", "block"])
@pytest.mark.parametrize("M, N, K, r", [(7, 256, 304, 20), (260, 256, 304, 20), (150, 384, 128, 70)])
def test_the_same_experts(kind, M, N, K, r, by):
    """However few tokens there are; without TMA W is decoded."""
    of, _, ends, leaves = experts(kind, M, 3, N, K, r, HALF, bias=r == 20)
    x, dy = x_of(M, K=K, dtype=HALF), torch.randn(M, N, device=device.NAME, dtype=HALF)
    codes = {"compute": "fp8", "grad_compute": "fp8"}
    results, ends = [], torch.tensor(ends, device=device.NAME)
    for backend, how in (("triton", codes), ("eager", codes if by == "tma" else {})):
        y = dora_experts(x, *of[:4], s=S, bias=of.bias, norm=of.norm, offsets=ends, backend=backend, **how)
        results.append([y.detach(), *torch.autograd.grad(y, [x, *leaves], dy)])
    for got, want in zip(*results, strict=True):
        assert got.dtype == want.dtype and rel_l2(got, want) < 2e-3


@needs_kernels
@pytest.mark.parametrize("M", [3, 130])
def test_the_same_mlps_of_experts(M, by):
    (up, _, _, first), (down, _, _, second) = (
        experts("row", M, 3, 256, 128, dtype=HALF),
        experts("row", M, 3, 128, 128, dtype=HALF),
    )
    x, dy = x_of(M, K=128, dtype=HALF), torch.randn(M, 128, device=device.NAME, dtype=HALF)
    ids, codes, results = torch.arange(M, device=device.NAME) % 3, {"compute": "fp8", "grad_compute": "fp8"}, []
    for backend, how in (("triton", codes), ("eager", codes if by == "tma" else {})):
        y = dora_experts_mlp(x, up, down, ids=ids, backend=backend, **how)
        results.append([y.detach(), *torch.autograd.grad(y, [x, *first, *second], dy)])
    assert all(rel_l2(got, want) < 1e-2 for got, want in zip(*results, strict=True))


def want_of(codes, M, by):
    """What eager is asked for to compute as kernels do, which decode W for few tokens, and for gradients without TMA."""
    return {} if M <= LIMIT else codes if by == "tma" else {"compute": "fp8"}


def test_x_is_rounded_once_for_the_layers_that_read_it():
    def counts(fn, *layers):
        plans = explain(
            fn, torch.empty(2048, 512, dtype=BF16, device="meta", requires_grad=True), *layers, **codes, gpu="h200"
        ).plans
        each = [[row.what for row in plan.steps] for plan in plans]
        return [(names.count("fp8_rows_kernel"), names.count("turn_kernel")) for names in each]

    codes = {"compute": "fp8", "grad_compute": "fp8"}
    layers, _ = members((512, 512), (512, 512), (512, 512))
    assert counts(dora_linear_group, layers) == [(1, 0), (3, 3)]
    layers[1] = layers[1]._replace(W=with_transpose(layers[1].W))
    assert counts(dora_mlp, *layers) == [(2, 0), (3, 2)]


@pytest.mark.parametrize("ranks, inside", [((16,) * 4, True), ((64,) * 8, False)])
def test_x_is_rounded_once_for_all_adapters(ranks, inside):
    """With few ranks in all their terms are in the product; with many they come behind it."""
    (W, *_), (G, r) = layer("row", 512, 512), (len(ranks), ranks[0])
    x, A, B = (torch.empty(shape, dtype=BF16, device="meta") for shape in ((2048, 512), (G, r, 512), (G, 512, r)))
    ends = torch.empty(G, dtype=torch.int32, device="meta")
    leaves = x.requires_grad_(), W.to("meta"), A, B, torch.empty(G, 512, device="meta")
    codes = {"compute": "fp8", "grad_compute": "fp8", "norm": leaves[-1], "s": [S] * G, "offsets": ends}
    forward, backward = explain(dora_linear_multi, *leaves, **codes, gpu="h200").plans
    assert ("few ranks" in forward.path) == inside and "product of codes for dx" in backward.path
    for plan in (forward, backward):
        names = [row.what for row in plan.steps]
        assert names.count("fp8_rows_kernel") == names.count("gemm_tma_kernel") == 1
        assert ("multi_epilogue_kernel" in names) == (plan is backward or not inside)


@needs_kernels
@pytest.mark.parametrize("w_scale, x_size", [(0.0, 1.0), (1e-24, 6e-8)])
def test_a_block_of_next_to_nothing(w_scale, x_size, by):
    """Beside large ones, with others like it behind it and before it."""
    W, A, B, m = layer("block", 128, 640, dtype=HALF)
    scales = W.tensors[1].view(5)
    scales.mul_(2**16)
    scales[[0, 2, 3]] = w_scale
    x = x_of(LIMIT + 3, K=640, dtype=HALF).detach().abs() + 1
    x[:, 128:256] = 6e4
    x[:, 256:512] *= x_size
    c = dora_norm(W, A / 1024, B, s=S)
    y = dora_linear(x, W, A / 1024, B, m / 2**8, s=S, norm=c, compute="fp8", backend="triton").detach()
    base = rounded(x, 128) @ W.dequantize(torch.float64).T
    want = (m / 2**8 / c).detach() * (base + S * x.double() @ (A / 1024).detach().double().T @ B.detach().double().T)
    assert rel_l2(y, want) < 2e-3


@needs_kernels
def test_strides_dropout_and_compiled_code():
    t = layer("block", K=320, dtype=HALF)
    x = x_of(10, 8, K=640, dtype=HALF).detach()[..., ::2]
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


@needs_kernels
def test_banks_and_experts_in_compiled_code(by):
    """As an op that a compiler sees by its fake."""
    run, leaves, _ = bank("row", 130, 272, 304, (20, 3, 16), "offsets", HALF)
    of, _, ends, of_experts = experts("row", 40, 3, 256, 304, dtype=HALF)
    ends, codes = torch.tensor(ends, device=device.NAME), {"compute": "fp8", "grad_compute": "fp8", "backend": "triton"}
    x = x_of(40, K=304, dtype=HALF)
    for call, inputs in (
        (lambda: run(**codes), leaves),
        (lambda: dora_experts(x, *of[:4], s=S, bias=of.bias, norm=of.norm, offsets=ends, **codes), [x, *of_experts]),
    ):
        torch._dynamo.reset()
        results = []
        for each in (torch.compile(call, backend="aot_eager", fullgraph=True), call):
            y = each()
            results.append([y.detach(), *torch.autograd.grad(y.float().square().sum(), inputs)])
        for got, want in zip(*results, strict=True):
            assert (got - want).norm() <= 1e-3 * want.norm()  # an adapter has no tokens


@pytest.mark.skipif(
    "device.NAME == 'cuda' and torch.cuda.get_device_capability() < (10, 0)", reason="Blackwell has the products"
)
@needs_kernels
@pytest.mark.parametrize("M, N, K, r", [(5, 72, 320, 20), (130, 72, 320, 20), (300, 200, 75, 80)])
def test_the_same_scales_of_powers_of_two(M, N, K, r):
    """Of one layer, of two on one x, and of two adapters; a K that is no multiple of 32 leaves a shorter run."""
    t = mx_layer(N, -(-K // 32) * 32, r, HALF)
    W = QuantWeight("mxfp8", (t[0].tensors[0][:, :K].contiguous(), t[0].tensors[1]), (N, K), HALF, t[0].facts)
    A, B, m = t[1].detach()[:, :K].contiguous().requires_grad_(), *t[2:]
    x, c, dy = x_of(M, K=K, dtype=HALF), dora_norm(W, A, B, s=S), torch.randn(M, N, device=device.NAME, dtype=HALF)
    ends = torch.tensor([M // 2, M - 2], dtype=torch.int32, device=device.NAME)
    two = {"s": [S, -S], "norm": torch.stack([c, c]), "offsets": ends}
    la = DoraLayer(W, A, B, m, S, norm=c)
    for call in (
        lambda **how: dora_linear(x, W, A, B, m, s=S, norm=c, **how),
        lambda **how: sum(dora_linear_group(x, [la, la], **how)),
        lambda **how: dora_linear_multi(x, W, *(torch.stack([v, v]) for v in (A, B, m)), **two, **how),
    ):
        results = []
        for backend, how in (("triton", "mxfp8"), ("eager", "mxfp8" if M > LIMIT else None)):
            y = call(backend=backend, compute=how)
            results.append([y.detach(), *torch.autograd.grad(y, [x, A, B, m], dy)])
        assert all(rel_l2(got, want) < 3e-3 for got, want in zip(*results, strict=True))


@pytest.mark.skipif("INTERPRETED", reason="the interpreter compiles nothing; runs without TRITON_INTERPRET")
@pytest.mark.parametrize("target", [100, 120])
def test_scales_of_powers_of_two_compile(target, tmp_path):
    """By the tensor cores' own products with scales; on sm_90 W is decoded."""
    N = K = 4096
    W, vector = Coded((N, K), Codes8("e4m3", "block", (1, 32), 1.0)), alike(N, dtype=FP32)
    x, codes, scales = alike(4096, K, dtype=BF16), alike(N, K, dtype=torch.float8_e4m3fn), alike(N * K // 32, dtype=FP32)
    likes = [x, None, alike(64, K, dtype=BF16), alike(N, 64, dtype=BF16), vector, vector, None, None, codes, scales]
    plan, hopper = (
        plan_forward(likes, gpu(d), 0.0, "lora", ("output",), True, *written([W]), False, True) for d in (target, 90)
    )
    assert not launches(hopper, "mx") and len(launches(plan, "mx")) == 2 and plan.path.startswith(fp8.FORWARD)
    for step in launches(plan, "mx"):
        made = build(step, target)
        assert_fits(made, target, tmp_path)
        assert ("block_scale" in made.asm["ptx"]) == (step.kernel.__name__ == "mx_gemm_kernel")


SHAPES = [  # tokens, N, K, r, scales, their blocks
    (4096, 4096, 4096, 16, "row", (0, 0)),
    (4096, 4096, 4096, 384, "row", (0, 0)),
    (4096, 4096, 4096, 64, "block", (128, 128)),
    (300, 137, 75, 16, "tensor", (0, 0)),
]


@pytest.mark.skipif("INTERPRETED", reason="the interpreter compiles nothing; runs without TRITON_INTERPRET")
@pytest.mark.parametrize("target", [89, 90, 100, 120])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_it_compiles(target, shape, tmp_path, monkeypatch):
    """By every tile that there is: nothing spills, and codes are multiplied as such."""
    monkeypatch.setitem(SHARED, 89, SHARED[120])
    M, N, K, r, mode, block = shape
    scales = alike({"row": N, "tensor": 1}.get(mode, (N // 128) * (K // 128)), dtype=FP32)
    codes, vector = alike(N, K, dtype=torch.float8_e4m3fn), alike(N, dtype=FP32)
    likes = [alike(M, K, dtype=BF16), codes, scales, alike(r, K, dtype=BF16), alike(N, r, dtype=BF16), *[vector] * 3, None]
    by_tma, found = 90 <= target < 120, {}
    choose, W = fp8.fp8_config, Coded((N, K), Codes8("e4m3", mode, block, 1.0))
    saved = [likes[0], alike(M, 2 * r, dtype=BF16), *[alike(M, N, dtype=BF16)] * 4]
    of_forward = [likes[0], None, *likes[3:], *likes[1:3]], gpu(target), 0.0, "lora", ("pre_scale",), True
    two = [*saved, *[None, *likes[3:]] * 2, *likes[1:3] * 2]  # the second layer adds its dx to that of the first
    needs = (True, True, True, False, True) * 2
    of_backward = two, gpu(target), 0.0, "lora", (True, True), True, needs
    for config in tiles(r, mode == "block", target) if by_tma else [None]:
        one = lambda of, *to, config=config: choose(of, *to) and (config or choose(of, *to))  # noqa: E731
        monkeypatch.setattr(fp8, "fp8_config", one)
        plans = [plan_forward(*of_forward, *written([W]), False, True), plan_backward(*of_backward, *written([W, W]), True)]
        assert (fp8.FORWARD in plans[0].path) == (not by_tma or N > 137)
        assert (fp8.BACKWARD in plans[1].path) == (by_tma and N > 137)
        if r != 384:  # of many adapters: with all ranks inside, and alone
            for G in (2, 64):
                of_bank = [None, *many(M, N, K, r, G, BF16, BF16)[1:], *likes[1:3]]
                plans.append(multi.plan_forward([likes[0], *of_bank], gpu(target), (), 0.0, True, *written([W])))
            given = [alike(M, N, dtype=BF16), likes[0], alike(M, r, dtype=BF16), alike(M, N, dtype=BF16)]
            wanted = (*(True,) * 5, False)
            plans.append(multi.plan_backward([*given, *of_bank], gpu(target), False, (), 0.0, wanted, *written([W])))
        found |= {kind(step): step for name in ("fp8", "gemm_tma", "turn") for plan in plans for step in launches(plan, name)}
    for step in found.values():
        made = build(step, target)
        assert_fits(made, target, tmp_path)
        if step.kernel.__name__ == "turn_kernel":
            assert "ld.global.v4.b32" in made.asm["ptx"] and "st.global.v4.b32" in made.asm["ptx"]
        if step.kernel.__name__ in ("fp8_gemm_kernel", "gemm_tma_kernel") and N > 137:
            ptx = made.asm["ptx"]
            assert ("f32.e4m3.e4m3" in ptx or "kind::f8f6f4" in ptx) and "cvt.rn.f16x2.e4m3x2" not in ptx  # none of halves
            assert ("cp.async.bulk.tensor" in ptx) == by_tma
