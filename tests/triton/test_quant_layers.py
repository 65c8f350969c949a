"""Layers of quantised weights whose plans read the codes: the same bits as with the dense weight, which nobody makes before."""

from dataclasses import replace
from functools import partial
from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

from fdora import _dispatch
from fdora.autograd.weight import forms_norm
from fdora.functional import dora_linear, dora_norm
from fdora.quant import Codes8, Lut4, lut4
from fdora.quant import weight as formats
from fdora.triton.codes import Coded, coded_of, is_decoded, packed, tensors_of, written
from fdora.triton.dequantize import dequantized
from fdora.triton.linear import plan_backward, plan_forward
from fdora.triton.runtime import walk
from fdora.triton.small import LIMIT
from tests import device
from tests.cases import run_case, usual
from tests.close import rel_l2
from tests.functional import test_quant as of_functions
from tests.quant.make import CASES
from tests.triton.coded import weight_of
from tests.triton.marks import INTERPRETED, needs_kernels
from tests.triton.written import HOPPER, alike, ints_of_codes, kernels, layer, likes_of_codes, plan_dense

HALF, FP32 = torch.float16, torch.float32
S = 0.7
FEW, MANY = 5, LIMIT + 3


@pytest.fixture(autouse=True)
def by_kernels(monkeypatch):
    monkeypatch.setattr(_dispatch, "_forced", "triton")


def weight(name, n=48, k=96, dtype=HALF, seed=0):
    return of_functions.weight(name, n, k, dtype, seed).to(device.NAME)


def adapter(W, r=4, seed=1):
    """A, B, m: float32, away from a start."""
    g = torch.Generator().manual_seed(seed)
    n, k = W.shape
    A, B = (torch.randn(shape, generator=g).to(device.NAME) / 8 for shape in ((r, k), (n, r)))
    m = dora_norm(W, A, B, s=S) * (1 + 0.1 * torch.rand(n, generator=g)).to(device.NAME)
    return [t.requires_grad_() for t in (A, B, m)]


def x_of(M, k=96, dtype=HALF):
    g = torch.Generator().manual_seed(2)
    return torch.randn(M, k, generator=g).to(device.NAME, dtype).requires_grad_()


@needs_kernels
@pytest.mark.parametrize("name", CASES)
def test_dense_to_the_bit(name):
    """Every awkward weight of the reference decoder's tests, of the kinds that kernels read."""
    W = CASES[name]()[0].to(device.NAME)
    others = {f"hqq {bits} bits axis {axis}" for bits in (8, 4, 2, 1) for axis in (0, 1)} - {"hqq 8 bits axis 1"}
    others |= {"hqq across rows", "hqq of float", "gptq 2 bits", "opaque"}  # half a row, of 4 bits in an odd number of rows
    assert is_decoded(W.spec) == (name not in others)
    if not is_decoded(W.spec):
        return
    tensors = tuple(tensors_of(W.tensors))
    for dtype in (HALF, FP32) if INTERPRETED else (HALF, FP32, torch.bfloat16):
        got = walk.run(walk.plan_for(plan_dense, tensors, coded_of(W), dtype), tensors)[0]
        torch.testing.assert_close(got, W.dequantize(dtype), rtol=0, atol=0, equal_nan=True)


@needs_kernels
@pytest.mark.parametrize("form", ints_of_codes(), ids=str)
def test_layers_of_packed_integers(form):
    """On one x, few tokens and many. Of rows without a magnitude products are formed again, from the codes."""
    form = form._replace(group=8, code=form.code.replace("bfloat16", "float16"))
    drawn = usual(device.NAME, "triton")._replace(dtypes=["fp16"], whole=8, largest=48, codes=True, kinds=("zero_m",))
    for tokens in (FEW, MANY):
        run_case("group", f"{form} {tokens}", drawn._replace(tokens=tokens, weight=partial(weight_of, form)))


@needs_kernels
@pytest.mark.parametrize("name", ["nf4 nested", "fp8 row"])
def test_gradients_are_no_further_from_the_truth_than_those_of_the_dense_weight(name):
    """g is rounded with W, once, in the place of g dy beside a rounded W. g far from 1, each row another.

    dx rounds g W and itself, where a dense weight rounds W, g dy and dx; dA (g B, dh) and dB (A, h) likewise two instead of three:
    sqrt(2 / 3) of the error, 0.77 to 0.84 here. dm is the same sums.
    """
    W, x = weight(name, 192, 256), x_of(MANY, 256)
    A, B, m = adapter(W, 8)
    m = (m.detach() * torch.linspace(0.3, 3, 192, device=m.device)).requires_grad_()
    c, dy = dora_norm(W, A, B, s=S), torch.randn(MANY, 192, generator=torch.Generator().manual_seed(3)).to(device.NAME, HALF)
    exact = [t.detach().double().requires_grad_() for t in (x, A, B, m)]
    X, a, b, n = exact
    truth = torch.autograd.grad(n / c.double() * (X @ (W.dequantize(FP32).double() + S * b @ a).T), exact, dy.double())
    got, naive = (
        torch.autograd.grad(dora_linear(x, w, A, B, m, s=S, norm=c), (x, A, B, m), dy) for w in (W, W.dequantize(HALF))
    )
    for name, ours, dense, want in zip("xABm", got, naive, truth, strict=True):
        assert rel_l2(ours, want) <= (1.01 if name == "m" else 0.9) * rel_l2(dense, want), f"d{name}"


@needs_kernels
def test_what_kernels_may_read(monkeypatch):
    """Not a kind of somebody's own that borrows the facts, nor a norm in float64."""
    monkeypatch.setattr(formats, "KINDS", dict(formats.KINDS))
    W = weight("nf4")
    formats.register_kind("mine", dequantize=lambda W, i, j: 2 * lut4.decode(W, i, j))
    assert is_decoded(W.spec) and not is_decoded(replace(W, kind="mine").spec)
    assert not is_decoded(replace(weight("int8"), facts=Codes8("int8", "row", (0, 0), 0.5)).spec)
    assert forms_norm(W, "triton") and not forms_norm(W, "eager") and not forms_norm(W.to(torch.float64), "triton")
    assert not forms_norm(W.dequantize(), "triton")


# what needs no kernels

NESTED = Lut4("nf4", True, 64, "nested", "flat")
N, K, R = 1024, 2048, 16
DENSE, STORED = 2 * N * K, N * K // 2 + N * K // 64 + N * K // 64 // 256 * 4
BF16 = torch.bfloat16


def of_codes(form=NESTED, n=N, k=K, frozen=False, **more):
    """The likes of a layer's operands, those of its codes, and its facts."""
    coded = Coded((n, k), form)
    return [None, *layer(n, k, R, BF16, BF16, frozen=frozen, **more)[1:]], likes_of_codes(coded), coded


def facts(*coded):
    return tuple(map(tuple, written(coded)))


@pytest.mark.parametrize("tokens", [16, 512])
def test_a_dense_weight_is_there_once_at_a_time(tokens):
    """Three layers on one x: what they decode takes its place after the other, and it is all that their plan takes. Of few
    tokens only the layer without an adapter has a dense weight."""
    la, codes, coded = of_codes()
    frozen, *_ = of_codes(frozen=True)
    likes = [alike(tokens, K, dtype=BF16), *la, *la, *frozen, *codes * 3]
    plan = plan_forward(likes, HOPPER, 0.0, "lora", ("output", "output", "nothing"), True, *facts(coded, coded, coded))
    times = 1 if tokens == 16 else 3
    assert kernels(plan)["dequantize_kernel"] == times
    assert DENSE <= plan.workspace < DENSE + 2**21
    kept = {a.name for a in plan.results if a.name.startswith("pre_scale")}
    assert kept == ({"pre_scale0", "pre_scale1"} if tokens == 16 else set())  # for the gradient of m, without W
    moved = [step.cost.bytes for step in plan.steps if step.cost.flops == 0 and "dequantize" in step.kernel.__name__]
    assert moved == [STORED + DENSE] * times


def test_a_backward_decodes_once_and_only_where_it_reads():
    la, codes, coded = of_codes()
    M = 512
    x, y, h = alike(M, K, dtype=BF16), alike(M, N, dtype=BF16), alike(M, R, dtype=BF16)
    counts = {}
    for pre_scale, need_x in product((False, True), (False, True)):
        likes = (x, h, y, y, *la, *codes)
        plan = plan_backward(likes, HOPPER, 0.0, "lora", (pre_scale,), need_x, (True,) * 3 + (False,) * 2, *facts(coded))
        counts[pre_scale, need_x] = (kernels(plan)["dequantize_kernel"], kernels(plan)["lost_kernel"])
        assert need_x or plan.workspace < 2 * M * (N + K) * 2
    # the gradient of m may want rows of W, those that are lost, unless it has the values before g
    assert counts == {(False, False): (0, 1), (False, True): (1, 1), (True, False): (0, 0), (True, True): (1, 0)}


@pytest.mark.parametrize("n", [N, 4 * N])
def test_a_backward_writes_nothing_as_large_as_y(n):
    """Beside the dense W its workspace has what is of the size of B and of h, and partial sums over tokens."""
    la, codes, coded = of_codes(n=n)
    M = 2048
    x, y, h = alike(M, K, dtype=BF16), alike(M, n, dtype=BF16), alike(M, R, dtype=BF16)
    needs = (True, True, True, False, False)
    plan = plan_backward((x, h, y, y, *la, *codes), HOPPER, 0.0, "lora", (False,), True, needs, *facts(coded))
    assert 2 * n * K <= plan.workspace < 2 * n * K + 2 * M * n / 4 and "for dz" not in plan.path


@pytest.mark.parametrize(("tokens", "dense"), [(16, 0), (512, DENSE)])
def test_a_norm_costs_no_pass_of_its_own(tokens, dense):
    """Of many tokens it comes with the dense W; of few there is none."""
    la, codes, coded = of_codes()
    la[4] = None
    x = alike(tokens, K, dtype=BF16)
    plan = plan_forward([x, *la, *codes], HOPPER, 0.0, "lora", ("output",), True, *facts(coded))
    first, second, *_ = plan.steps
    assert (first.kernel.__name__[:5], second.kernel.__name__) == ("quant", "sum_kernel")
    assert 0 < first.cost.bytes - STORED - dense < 0.04 * (STORED + DENSE) and "dequantize_kernel" not in kernels(plan)
    assert plan.results[-1][:3] == ("c0", (N,), (1,))


def test_few_tokens_cost_one_pass_over_the_codes():
    la, codes, coded = of_codes()
    plan = plan_forward([alike(16, K, dtype=BF16), *la, *codes], HOPPER, 0.0, "lora", ("nothing",), True, *facts(coded))
    shrink, step = plan.steps
    assert (shrink.kernel.__name__, step.kernel.__name__) == ("shrink_kernel", "small_codes_kernel")
    assert step.cost.flops16 == 2 * 16 * N * (K + R)
    assert step.cost.bytes == STORED + 2 * 16 * (K + N + R) + 2 * N * R + 8 * 4 * 16 * R  # h comes in 8 parts
    assert step.pdl == HOPPER.supports_pdl


def test_rows_begin_where_tensor_descriptors_want_them():
    from fdora.triton.runtime.builder import Builder

    form = Codes8("int8", "row", (0, 0), 1.0)
    for k, dtype in product((70, 72), (BF16, FP32)):
        plan = Builder("a test", HOPPER)
        coded = Coded((16, k), form)
        out = dequantized(plan, packed(plan, likes_of_codes(coded), coded), dtype)
        assert out.shape == (16, k) and out.stride[0] * out.itemsize % 16 == 0 and out.stride[0] < k + 8
