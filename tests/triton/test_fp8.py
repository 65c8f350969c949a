"""The kernels behind compute="fp8" against plain torch: the same codes bit for bit, the same layer; and that they compile."""

import random
from functools import partial

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

from fdora import FdoraError
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
from fdora.quant import Codes8, Lut4, QuantWeight, from_nvfp4, with_transpose
from fdora.quant.quantize import nvfp4
from fdora.triton import fp8, multi, multi_bwd
from fdora.triton.codes import Coded, written
from fdora.triton.linear import plan_backward, plan_forward
from fdora.triton.tiles.few import LIMIT
from fdora.triton.tiles.fp8 import POINTERS, tiles
from tests import device
from tests.cases import FUNCTIONS, Draw, usual
from tests.close import assert_compiles, assert_near, outputs_and_gradients, rel_l2
from tests.functional.test_fp8 import ON_BLACKWELL, S, experts, layer, members, mx_layer, x_of
from tests.reference import rounded
from tests.triton.marks import INTERPRETED, needs_kernels  # noqa: F401
from tests.triton.test_compile import SHARED, assert_fits, build, kind
from tests.triton.test_compile import device as gpu
from tests.triton.test_ways import OF_CODES
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


@needs_kernels
@pytest.mark.parametrize("dtype", [HALF, torch.bfloat16], ids=str)
@pytest.mark.parametrize("M, K", [(5, 300), (33, 128), (4, 5000)])
def test_the_same_codes_of_nvfp4(M, K, dtype):
    """And what is not finite reaches its token's scale, not another's."""
    x, W = x_of_every_size(M, K, dtype), Coded((8, K), Lut4("e2m1", False, 16, "e4m3*global", "row"))
    x[3, 16:32] *= 2.0**-16
    x[-2, 5], x[-1, -1] = float("nan"), float("inf")

    def write(plan, like):
        given = plan.tokens(like)
        forms = (M, K // 2), torch.uint8, (M, -(-K // 16)), torch.uint8, (M,), FP32
        rest = [plan.result(name, *form) for name, form in zip("abc", zip(forms[::2], forms[1::2], strict=True), strict=True)]
        out = tuple(rest)
        plan.temp = lambda shape, dtype=None: rest.pop(0)
        assert fp8.x_of(plan, given, W) == out

    codes, scale, whole = results_of(write, x)
    codes, scale, whole, x = codes.cpu(), scale.cpu(), whole.cpu(), x.cpu()  # torch on a GPU divides by a product
    want = x.float().abs().amax(1, keepdim=True).div(2688).clamp_min(2.0**-126)
    assert torch.equal(whole[:-2], want[:-2, 0]) and whole[-2].isnan() and whole[-1].isinf()
    of, scales = nvfp4(x[:-2].float(), want[:-2])
    assert torch.equal(codes[:-2], of) and torch.equal(scale[:-2], scales.view(torch.uint8)) and len(codes.unique()) > 30


@pytest.fixture(params=["tma", "pointers"])
def by(request, as_hopper, monkeypatch):
    """How tiles come: on a CPU as on an sm_90, whose kernels are interpreted; or as on a GPU without TMA."""
    if request.param == "pointers":
        monkeypatch.setattr(fp8, "fp8_config", lambda of, *_: POINTERS if of.M > LIMIT else None)
        monkeypatch.setattr(fp8, "grouped_fp8", lambda *_: None)
    elif device.NAME == "cpu":
        as_hopper()
    return request.param


CODES = {"compute": "fp8", "grad_compute": "fp8"}


def assert_same(call, leaves, how, wanted, limit=2e-3):
    """A step of kernels is that of eager, which is asked for ``wanted``; the output too where there is no graph."""
    got = outputs_and_gradients(partial(call, backend="triton", **how), leaves)
    assert_near(got, outputs_and_gradients(partial(call, backend="eager", **wanted), leaves), limit)
    with torch.no_grad():
        y = call(backend="triton", **how)
    assert torch.equal(y[0] if isinstance(y, tuple) else y, got[0])
    return got


@needs_kernels
@pytest.mark.parametrize("kind", ["row", "block"])
def test_codes_kept_transposed_have_the_same_bits(kind, by):
    x, (W, *t) = x_of(130, K=304, dtype=HALF), layer(kind, 160, 304, 20, dtype=HALF)
    calls = [partial(dora_linear, x, each, *t, s=S, backend="triton", **CODES) for each in (W, with_transpose(W))]
    assert all(map(torch.equal, *(outputs_and_gradients(call, [x, *t]) for call in calls)))


@needs_kernels
@pytest.mark.parametrize("kind", ["row", "block"])
@pytest.mark.parametrize("M, p", [(5, 0.0), (130, 0.0), (130, 0.3)])
def test_the_same_mlp(M, p, kind, by):
    """Where a kernel rounds an activation to the number beside eager's, its code may be the next one."""
    mlp, leaves = members((256, 304), (256, 304), (304, 256), dtype=HALF, kinds=(kind, "row", kind))
    x, how = x_of(M, K=304, dtype=HALF), {"dropout_p": p, "seed": [1, 2, 3] if p else None}
    wanted = {} if M <= LIMIT else CODES if by == "tma" else {"compute": "fp8"}  # few tokens are multiplied by the decoded W
    assert_same(partial(dora_mlp, x, *mlp, **how), [x, *leaves], CODES, wanted, 1e-2)


@needs_kernels
def test_the_same_mlp_of_some_tokens(by):
    """Enough for a product of codes in forward, and few in backward."""
    mlp, leaves = members((256, 304), (256, 304), (304, 256), dtype=HALF)
    x = x_of(40, K=304, dtype=HALF)
    assert_same(partial(dora_mlp, x, *mlp), [x, *leaves], CODES, {"compute": "fp8"} if by == "tma" else {}, 1e-2)


@needs_kernels
@pytest.mark.parametrize("M", [3, 130])
def test_the_same_mlps_of_experts(M, by):
    x, (up, first), (down, second) = (
        x_of(M, K=128, dtype=HALF),
        experts(3, 256, 128, dtype=HALF),
        experts(3, 128, 128, dtype=HALF),
    )
    call = partial(dora_experts_mlp, x, up, down, ids=torch.arange(M, device=device.NAME) % 3)
    assert_same(call, [x, *first, *second], CODES, CODES if by == "tma" else {}, 1e-2)


@needs_kernels
@pytest.mark.parametrize("kind", ["bank", "experts"])
def test_rows_without_a_magnitude_of_many(kind, by, monkeypatch):
    """Their dm comes from W's codes, which no dense W is made for."""
    decoded, stack_in = [], multi_bwd.stack_in
    monkeypatch.setattr(multi_bwd, "stack_in", lambda *args: decoded.append(args) or stack_in(*args))
    x, ends = x_of(150, K=256, dtype=HALF), torch.tensor([40, 40, 150], device=device.NAME, dtype=torch.int32)
    if kind == "experts":
        la, (A, B, m, _) = experts(3, 128, 256, dtype=HALF)
        call = partial(dora_experts, x, la.W, s=S, offsets=ends, norm=la.norm)
    else:
        W, *one = layer("block", 128, 256, dtype=HALF)
        A, B, m = (torch.stack([t.detach() * (1 + a) for a in range(3)]).requires_grad_() for t in one)
        call = partial(dora_linear_multi, x, W, s=[S] * 3, offsets=ends, norm=dora_norm(W, A.detach(), B.detach(), s=[S] * 3))
    m = m.detach().clone().requires_grad_()
    with torch.no_grad():
        m[0, 5], m[1, 6], m[2, 7], m[2, 127] = 0, 0, 1e-30, 0
    lost, call = m.detach().abs() < 1e-20, partial(call, A=A, B=B, m=m)
    got, want = (
        outputs_and_gradients(partial(call, backend=backend, **how), [x, m])[2]
        for backend, how in (("triton", CODES), ("eager", {}))
    )
    assert rel_l2(got[lost], want[lost]) < 2e-3 and rel_l2(got[~lost], want[~lost]) < 5e-2 and want[lost].count_nonzero() == 3
    assert bool(decoded) == (by == "pointers")


def test_x_is_rounded_once_for_the_layers_that_read_it():
    def counts(fn, *layers):
        plans = explain(
            fn, torch.empty(2048, 512, dtype=BF16, device="meta", requires_grad=True), *layers, **CODES, gpu="h200"
        ).plans
        each = [[row.what for row in plan.steps] for plan in plans]
        return [(names.count("fp8_rows_kernel"), names.count("turn_kernel")) for names in each]

    layers, _ = members((512, 512), (512, 512), (512, 512))
    assert counts(dora_linear_group, layers) == [(1, 0), (3, 3)]
    layers[1] = layers[1]._replace(W=with_transpose(layers[1].W))
    assert counts(dora_mlp, *layers) == [(2, 0), (3, 2)]


@pytest.mark.parametrize("kind, M, rounded", [("row", 32, 0), ("row", 33, 1), ("block", 64, 0), ("block", 65, 1)])
def test_few_tokens_are_multiplied_by_the_codes_as_they_are(kind, M, rounded):
    x = torch.empty(M, 512, dtype=BF16, device="meta")
    with torch.no_grad():
        (plan,) = explain(dora_linear, x, *layer(kind, 512, 512), s=S, compute="fp8", gpu="h200").plans[-1:]
    assert [step.what.startswith("fp8_") for step in plan.steps].count(True) == rounded


@pytest.mark.parametrize("ranks, inside", [((16,) * 4, True), ((64,) * 8, False)])
def test_x_is_rounded_once_for_all_adapters(ranks, inside):
    """With few ranks in all their terms are in the product; with many they come behind it."""
    (W, *_), (G, r) = layer("row", 512, 512), (len(ranks), ranks[0])
    x, A, B = (torch.empty(shape, dtype=BF16, device="meta") for shape in ((2048, 512), (G, r, 512), (G, 512, r)))
    ends = torch.empty(G, dtype=torch.int32, device="meta")
    leaves = x.requires_grad_(), W.to("meta"), A, B, torch.empty(G, 512, device="meta")
    how = CODES | {"norm": leaves[-1], "s": [S] * G, "offsets": ends}
    forward, backward = explain(dora_linear_multi, *leaves, **how, gpu="h200").plans
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
@pytest.mark.parametrize("name", ["linear", "multi", "experts"])
def test_compiled_code(name, by):
    """As an op that a compiler sees by its fake."""
    drawn = usual(device.NAME, "triton")._replace(**OF_CODES["of experts"])
    problem = FUNCTIONS[name](Draw(random.Random(name), drawn))(Draw(random.Random(1), drawn))
    leaves = [problem.tensors[n].requires_grad_() for n in problem.trainable]
    assert_compiles(lambda: problem.call(problem.tensors), leaves, 1e-3)


@ON_BLACKWELL
@needs_kernels
@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
@pytest.mark.parametrize("M, N, K, r", [(5, 72, 320, 20), (130, 72, 320, 20), (300, 200, 75, 80)])
def test_the_same_scaled_products(M, N, K, r, kind):
    """Of one layer, of two on one x, and of two adapters; a K that is no multiple of 32 leaves a shorter run."""
    K -= kind == "nvfp4" and K % 2
    t = mx_layer(N, -(-K // 32) * 32, r, HALF, kind)
    if kind == "mxfp8":
        W = QuantWeight("mxfp8", (t[0].tensors[0][:, :K].contiguous(), t[0].tensors[1]), (N, K), HALF, t[0].facts)
    else:
        codes, scales, whole = t[0].tensors
        codes, scales = codes[:, : K // 2].contiguous(), scales[:, : -(-K // 16)].contiguous()
        W = from_nvfp4(codes, scales, whole if r == 20 else 1 / whole, r != 20, dtype=HALF)
    A, B, m = t[1].detach()[:, :K].contiguous().requires_grad_(), *t[2:]
    x, c = x_of(M, K=K, dtype=HALF), dora_norm(W, A, B, s=S)
    ends = torch.tensor([M // 2, M - 2], dtype=torch.int32, device=device.NAME)
    two = {"s": [S, -S], "norm": torch.stack([c, c]), "offsets": ends}
    la, how = DoraLayer(W, A, B, m, S, norm=c), {"compute": kind} | ({"grad_compute": kind} if kind == "mxfp8" else {})
    drops = partial(dora_linear, x, W, A, B, m, s=S, norm=c, dropout_p=0.3, seed=1)  # under dropout backward decodes W
    assert_same(drops, [x, A, B, m], how, {"compute": kind} if M > LIMIT else {}, 3e-3)
    for call in (
        partial(dora_linear, x, W, A, B, m, s=S, norm=c),
        partial(dora_linear_group, x, [la, la]),
        lambda **how: dora_linear_multi(x, W, *(torch.stack([v, v]) for v in (A, B, m)), **two, **how),
    ):
        assert_same(call, [x, A, B, m], how, how if M > LIMIT else {}, 3e-3)


def test_explain_refuses_what_a_call_would():
    """Scaled products on a Hopper."""
    W, A, B, m = mx_layer(64, 64, 4)
    for which in ("compute", "grad_compute"):
        with pytest.raises(
            FdoraError, match=f"`{which}` must be None on this GPU, got 'mxfp8'. It needs an NVIDIA GPU of sm_100"
        ):
            explain(dora_linear, x_of(70, K=64), W, A, B, m, s=S, gpu="h200", **{which: "mxfp8"})


@pytest.mark.skipif("INTERPRETED", reason="the interpreter compiles nothing; runs without TRITON_INTERPRET")
@pytest.mark.parametrize("target", [100, 120])
@pytest.mark.parametrize("kind", ["mxfp8", "nvfp4"])
def test_scaled_products_compile(target, kind, tmp_path):
    """By the tensor cores' own products with scales; on sm_90 W is decoded."""
    N = K = 4096
    x, vector, E4M3 = alike(4096, K, dtype=BF16), alike(N, dtype=FP32), torch.float8_e4m3fn
    if kind == "mxfp8":
        form, path = Codes8("e4m3", "block", (1, 32), 1.0), fp8.FORWARD
        packed = [alike(N, K, dtype=E4M3), alike(N * K // 32, dtype=FP32)]
    else:
        form, path = Lut4("e2m1", False, 16, "e4m3*global", "row"), fp8.FORWARD4
        packed = [alike(N, K // 2, dtype=torch.uint8), alike(N, K // 16, dtype=E4M3), alike(dtype=FP32)]
    layer = [None, alike(64, K, dtype=BF16), alike(N, 64, dtype=BF16), vector, vector, None, None]
    W, likes, wide = written([Coded((N, K), form)]), [x, *layer, *packed], alike(4096, N, dtype=BF16)
    plan, hopper = (plan_forward(likes, gpu(d), 0.0, "lora", ("output",), True, *W, False, True) for d in (target, 90))
    saved = [x, alike(4096, 64, dtype=BF16), wide, wide, *likes[1:]]
    rest = 0.0, "lora", (True,), True, (True, True, True, False, False), *W, kind == "mxfp8"
    back, on_hopper = (plan_backward(saved, gpu(d), *rest) for d in (target, 90))
    steps = [step for of in (plan, back) for name in ("mx_rows", "nv_rows", "fp8_gemm") for step in launches(of, name)]
    assert not any(launches(of, name) for of in (hopper, on_hopper) for name in ("mx", "nv", "fp8_gemm"))
    assert plan.path.startswith(path) and (fp8.BACKWARD in back.path) == (kind == "mxfp8")
    assert len(steps) == (5 if kind == "mxfp8" else 2)
    for step in steps:
        made = build(step, target)
        assert_fits(made, target, tmp_path)
        assert ("block_scale" in made.asm["ptx"]) == (step.kernel.__name__ == "fp8_gemm_kernel")
        assert "mxf4nvf4" in made.asm["ptx"] or kind == "mxfp8" or step.kernel.__name__ != "fp8_gemm_kernel"


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
    layers = [None, *likes[3:]]
    two = [*saved, *layers * 2, *likes[1:3] * 2]  # the second layer adds its dx to that of the first
    masked = [*saved, *[*layers[:-1], alike(dtype=torch.int64)] * 2, *likes[1:3] * 2]
    needs = (True, True, True, False, True) * 2
    of_backward = gpu(target), 0.1, "lora", (True, True), True, needs
    for config in tiles(r, mode == "block", target) if by_tma else [None]:
        one = lambda of, *to, config=config: choose(of, *to) and (config or choose(of, *to))  # noqa: E731
        monkeypatch.setattr(fp8, "fp8_config", one)
        plans = [plan_forward(*of_forward, *written([W]), False, True)]
        plans += [plan_backward(given, *of_backward, *written([W, W]), True) for given in (two, masked)]
        assert (fp8.FORWARD in plans[0].path) == (not by_tma or N > 137)
        assert (fp8.BACKWARD in plans[1].path) == (by_tma and N > 137)
        if r != 384:  # of many adapters: with all ranks inside, and alone
            for G in (2, 64):
                of_bank = [None, *many(M, N, K, r, G, BF16, BF16)[1:], *likes[1:3]]
                plans.append(multi.plan_forward([likes[0], *of_bank], gpu(target), (), 0.0, "lora", True, *written([W])))
            given = [alike(M, N, dtype=BF16), likes[0], alike(M, r, dtype=BF16), alike(M, N, dtype=BF16), None]
            wanted = (*(True,) * 5, False)
            plans.append(
                multi.plan_backward([*given, *of_bank], gpu(target), False, False, (), 0.0, "lora", wanted, *written([W]))
            )
        found |= {kind(step): step for name in ("fp8", "gemm_tma", "turn") for plan in plans for step in launches(plan, name)}
    for step in found.values():
        made, args = build(step, target), dict(zip(step.kernel.arg_names, step.args, strict=False))
        masked_spills = args.get("seed") and (mode == "block" or target >= 100)  # 112 bytes, once before the loop over codes
        assert_fits(made, target, tmp_path, 112 if masked_spills else 0)
        if step.kernel.__name__ == "turn_kernel":
            assert "ld.global.v4.b32" in made.asm["ptx"] and "st.global.v4.b32" in made.asm["ptx"]
        if step.kernel.__name__ in ("fp8_gemm_kernel", "gemm_tma_kernel") and N > 137:
            ptx = made.asm["ptx"]
            assert ("f32.e4m3.e4m3" in ptx or "kind::f8f6f4" in ptx) and "cvt.rn.f16x2.e4m3x2" not in ptx  # none of halves
            assert ("cp.async.bulk.tensor" in ptx) == by_tma
