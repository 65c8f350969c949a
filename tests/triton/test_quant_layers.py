"""Layers of quantised weights whose plans read the codes: the same bits as with the dense weight, which nobody makes before."""

from dataclasses import replace
from itertools import product

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

from fdora import _dispatch
from fdora.autograd.weight import forms_norm
from fdora.functional import DoraLayer, dora_linear, dora_linear_group, dora_mlp, dora_norm
from fdora.quant import Codes8, Lut4, QuantWeight, lut4
from fdora.quant import weight as formats
from fdora.triton.codes import Coded, coded_of, is_decoded, packed, tensors_of, written
from fdora.triton.dequantize import dequantized
from fdora.triton.linear import plan_backward, plan_forward
from fdora.triton.runtime import walk
from fdora.triton.small import LIMIT
from tests import device
from tests.close import rel_l2
from tests.functional import test_quant as of_functions
from tests.quant.make import CASES, QUANTISED, awq, gptq, hqq
from tests.triton.marks import INTERPRETED, needs_kernels
from tests.triton.written import HOPPER, alike, kernels, layer, likes_of_codes, plan_dense

HALF, FP32 = torch.float16, torch.float32
S = 0.7
EPS = torch.finfo(HALF).eps
FEW, MANY = 5, LIMIT + 3


@pytest.fixture(autouse=True)
def by_kernels(monkeypatch):
    monkeypatch.setattr(_dispatch, "_forced", "triton")


@pytest.fixture
def undecoded(monkeypatch):
    """Decoding in torch is an error."""

    def refuse(*_, **__):
        raise AssertionError("decoded in torch")

    monkeypatch.setattr(QuantWeight, "dequantize", refuse)


PACKED = {
    "hqq": lambda n, k: hqq(4, 1, n, k, 32, HALF)[0],
    "gptq": lambda n, k: gptq(act_order=False, N=n, K=k, group=32)[0],
    "gptq reordered": lambda n, k: gptq(N=n, K=k, group=32)[0],
    "awq": lambda n, k: awq(n, k, 32)[0],
}


def weight(name, n=48, k=96, dtype=HALF, seed=0):
    if name in PACKED:
        W = PACKED[name](n, k)
        small = [t / 64 if key in ("scales", "scale") else t for key, t in W.named().items()]
        return replace(W, tensors=tuple(small), dtype=dtype)
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


def gradients(ys, leaves):
    """Of a loss that every output enters."""
    ys = ys if isinstance(ys, tuple) else (ys,)
    loss = sum((i * y.float()).square().sum() for i, y in enumerate(ys, 1))
    return [*(y.detach() for y in ys), *torch.autograd.grad(loss, [t for t in leaves if t.requires_grad])]


def both(call, weights, leaves, refused):
    """Results and gradients with the codes, which only kernels may decode, and with the dense weights."""
    # in rows: a product of GPTQ's columns would be another sum
    dense = [W.dequantize(leaves[0].dtype).contiguous() if isinstance(W, QuantWeight) else W for W in weights]
    with pytest.MonkeyPatch.context() as patch:
        if refused:
            patch.setattr(QuantWeight, "dequantize", lambda *_, **__: pytest.fail("decoded in torch"))
        got = gradients(call(*weights), leaves)
    return got, gradients(call(*dense), leaves)


def assert_equal(results):
    got, want = results
    assert len(got) == len(want) and all(map(torch.equal, got, want))
    assert all(t.abs().sum() > 0 for t in got)


def assert_outputs_equal(results, outputs=1):
    """To the bit what comes first; the gradients as rounded, of g W where a dense weight's are of g dy."""
    got, want = results
    assert_equal((got[:outputs], want[:outputs]))
    assert_rounded(results)


def assert_same_norm(got, want):
    """To the bit where tiles with and without the dense W are the same, as interpreted; on Hopper they are others.

    There c is apart by the order of a float32 sum, 1e-6 at most, so that one number in 500 is rounded to its other neighbour: sqrt(1 / 500)
    of eps is 4e-5, and gradients round a few times.
    """
    assert all(torch.equal(a, b) if INTERPRETED else rel_l2(a, b) < 2e-4 for a, b in zip(got, want, strict=True))


def assert_rounded(results):
    """Each side rounds two or three times, by 0.29 eps on average: sqrt(5) of that is 0.65 eps, 4.8e-4 here at most."""
    got, want = results
    assert len(got) == len(want) and all(rel_l2(a, b) < EPS for a, b in zip(got, want, strict=True))


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
@pytest.mark.parametrize("tokens", [FEW, MANY])
@pytest.mark.parametrize("name", [*QUANTISED, *PACKED])
def test_a_layer(name, tokens):
    W, x = weight(name), x_of(tokens)
    A, B, m = adapter(W)
    c, bias = dora_norm(W, A, B, s=S), (torch.randn(48, device=device.NAME) if name == "fp8" else None)
    # few tokens of codes keep the value before g; a dense weight would keep the output
    results = both(lambda w: dora_linear(x, w, A, B, m, s=S, norm=c, bias=bias, keep_inner=True), [W], [x, A, B, m], True)
    # few tokens read the codes themselves, in sums of another order
    (assert_outputs_equal if tokens == MANY else assert_rounded)(results)
    agree = assert_equal if tokens == MANY else assert_rounded
    with torch.no_grad():
        dense = W.dequantize().contiguous()
        agree(([dora_linear(x, W, A, B, m, s=S, norm=c)], [dora_linear(x, dense, A, B, m, s=S, norm=c)]))


@needs_kernels
def test_autocast():
    W = weight("nf4 nested", n=45, dtype=FP32)
    x, (A, B, m) = x_of(MANY, dtype=FP32), adapter(W)
    c = dora_norm(W, A, B, s=S)
    with torch.autocast(x.device.type, HALF):
        assert_outputs_equal(both(lambda w: dora_linear(x, w, A, B, m, s=S, norm=c), [W], [x, A, B, m], True))


@needs_kernels
@pytest.mark.parametrize("tokens", [FEW, MANY])
@pytest.mark.parametrize(("name", "need_x"), [("nf4 nested", False), ("nf4 nested", True), ("awq", False), ("awq", True)])
def test_rows_with_no_magnitude_have_their_gradient(name, need_x, tokens, undecoded):
    """y is 0 there: their products are formed again, from the codes."""
    W, x = weight(name), x_of(tokens).detach().requires_grad_(need_x)
    A, B, m = adapter(W)
    m = m.detach()
    m[3] = m[7] = 0
    m.requires_grad_()
    y = dora_linear(x, W, A, B, m, s=S)
    dy = torch.randn(y.shape, device=y.device).to(HALF)
    (dm,) = torch.autograd.grad(y, m, dy)
    V = x.detach().double() @ (formats.kind_of(W.kind).dequantize(W, 0, 48).double() + S * B.double() @ A.double()).detach().T
    want = (dy.double() * V).sum(0) / dora_norm(W, A, B, s=S).double()
    assert rel_l2(dm[[3, 7]], want[[3, 7]]) < EPS and rel_l2(dm, want) < EPS


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


@pytest.fixture
def ran(monkeypatch):
    """The plans that run, of any facade."""
    from fdora.triton import linear, mlp, norm_kept
    from fdora.triton.runtime import walk

    found = []
    for module in (linear, mlp, norm_kept, walk):
        run = module.run
        monkeypatch.setattr(module, "run", lambda plan, *args, run=run: found.append(plan) or run(plan, *args))
    return found


@needs_kernels
@pytest.mark.parametrize("tokens", [FEW, MANY])
@pytest.mark.parametrize("name", QUANTISED)
def test_the_norm_comes_with_the_dense_weight(name, tokens, ran):
    """That of dora_norm, out of the pass that decodes W: one plan for each direction."""
    W, x = weight(name), x_of(tokens)
    A, B, m = adapter(W)
    if name == "int8":
        A, B = (t.detach().half().requires_grad_() for t in (A, B))
    ran.clear()
    got = gradients(dora_linear(x, W, A, B, m, s=S), [x, A, B, m])
    forward, backward = ran
    assert forward.name == "dora_linear forward" and backward.name == "dora_linear backward"
    assert forward.results[-1][:2] == ("c0", (48,)) and "dequantize" not in str(kernels(forward))
    c = dora_norm(W, A, B, s=S)
    want = gradients(dora_linear(x, W, A, B, m, s=S, norm=c), [x, A, B, m])
    assert_same_norm(got, want)
    with torch.no_grad():
        assert torch.equal(dora_linear(x, W, A, B, m, s=S), got[0])


@needs_kernels
def test_compiled_whole(undecoded):
    """A group and an MLP; of other shapes the second time, which a compiler takes for variables."""
    torch._dynamo.reset()

    def f(x, q, v, p, gate, up, down, of_mlp):
        y, z = dora_linear_group(x, [DoraLayer(q, *p, S), DoraLayer(v)])
        return y, z, dora_mlp(y, *(DoraLayer(W, *each, S) for W, each in zip((gate, up, down), of_mlp, strict=True)))

    compiled = torch.compile(f, backend="aot_eager", fullgraph=True)
    for n, name in ((48, "nf4 nested"), (64, "fp8 row")):
        q, v = weight(name, n), weight("int8", 32)
        gate, up, down = weight(name, 32, n), weight("mxfp4", 32, 64) if n == 64 else weight("nf4", 32, n), weight(name, n, 32)
        p, of_mlp, x = adapter(q), [adapter(W) for W in (gate, up, down)], x_of(MANY)
        leaves = [x, *p, *(t for each in of_mlp for t in each)]
        results = [gradients(call(x, q, v, p, gate, up, down, of_mlp), leaves) for call in (compiled, f)]
        assert all(rel_l2(got, want) < 2e-3 for got, want in zip(*results, strict=True))


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


def test_a_norm_costs_no_pass_of_its_own():
    la, codes, coded = of_codes()
    la[4] = None
    x = alike(512, K, dtype=BF16)
    plan = plan_forward([x, *la, *codes], HOPPER, 0.0, "lora", ("output",), True, *facts(coded))
    first, second, *_ = plan.steps
    assert (first.kernel.__name__, second.kernel.__name__) == ("quant_kernel", "sum_kernel")
    assert STORED + DENSE < first.cost.bytes < 1.04 * (STORED + DENSE) and "dequantize_kernel" not in kernels(plan)
    assert plan.results[-1][:3] == ("c0", (N,), (1,))


def test_rows_begin_where_tensor_descriptors_want_them():
    from fdora.triton.runtime.builder import Builder

    form = Codes8("int8", "row", (0, 0), 1.0)
    for k, dtype in product((70, 72), (BF16, FP32)):
        plan = Builder("a test", HOPPER)
        coded = Coded((16, k), form)
        out = dequantized(plan, packed(plan, likes_of_codes(coded), coded), dtype)
        assert out.shape == (16, k) and out.stride[0] * out.itemsize % 16 == 0 and out.stride[0] < k + 8
