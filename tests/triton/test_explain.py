"""explain() shows the plans that a real call runs, and what it keeps; nothing runs for it."""

from dataclasses import replace

import optree
import pytest
import torch

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

import fdora.functional as F
from fdora import FdoraError
from fdora._recording import active
from fdora.functional import explain
from fdora.predict import GPUS
from fdora.quant import opaque, quantize
from fdora.triton import describe as explaining
from fdora.triton.runtime import walk
from fdora.triton.runtime.device import device_of
from fdora.triton.runtime.plan import Plan
from tests import device
from tests.make import tensors
from tests.triton.marks import HALF, INTERPRETED, needs_kernels  # noqa: F401

H = torch.float16
NEEDS = ("x", "A", "B", "m")


def draw(*shape, dtype=H, grad=False, std=0.1):
    return (torch.randn(shape, device=device.NAME) * std).to(dtype).requires_grad_(grad)


def layer(N=40, K=48, r=4, dtype=H, adapter=None, needs=NEEDS, bias=False, norm=False, s=2.0):
    adapter = adapter or dtype
    W, A, B = (
        draw(N, K, dtype=dtype),
        draw(r, K, dtype=adapter, grad="A" in needs),
        draw(N, r, dtype=adapter, grad="B" in needs),
    )
    m = draw(N, dtype=adapter, grad="m" in needs)
    return F.DoraLayer(W, A, B, m, s, draw(N, dtype=dtype, grad=True) if bias else None, norm_of(W, A, B) if norm else None)


def norm_of(W, A, B):
    return (W.float() + 2 * B.detach().float() @ A.detach().float()).norm(dim=1)


def coded(N=40, K=48, norm=False, needs=NEEDS):
    la = layer(N, K, adapter=torch.float32, needs=needs, norm=norm)
    return la._replace(W=quantize(la.W, "nf4" if K == 48 else "mxfp4"))


def twice():
    return opaque(lambda t: 2 * t, (40, 48), H, device.NAME, (draw(40, 48),))


def one(M=80, lead=(), x=None, needs=NEEDS, dtype=H, of=None, **options):
    la = of or layer(needs=needs, dtype=dtype, **options.pop("layer", {}))
    x = draw(*lead, M, la.W.shape[1], dtype=dtype, grad="x" in needs) if x is None else x
    options |= {"bias": la.bias, "norm": la.norm}
    return F.dora_linear, (x, *la[:4]), {"s": la.s, **options}


def transposed():
    la = layer()
    return one(of=la._replace(W=la.W.T.contiguous().T))


def unaligned():
    return one(x=draw(80, 49)[:, 1:].requires_grad_())


def scattered():
    return one(x=draw(80, 96)[:, ::2].requires_grad_())


def group(*layers, M=80, **options):
    return F.dora_linear_group, (draw(M, 48, grad=True), list(layers)), options


def mlp(M=80, needs=NEEDS, grad=True, bias=True, **options):
    layers = (layer(32, 48, needs=needs), layer(32, 48, needs=needs, bias=bias), layer(24, 32, needs=needs))
    return F.dora_mlp, (draw(2, M // 2, 48, grad=grad), *layers), options


def weights(dtype=H, adapter=None, N=40, K=48):
    la = layer(N, K, dtype=dtype, adapter=adapter, needs=())
    return la.W, la.A, la.B


def composed(fn, lead=(5,), needs=(True, True, True, True)):
    base, lora, g, bias = (
        draw(*shape, grad=need) for shape, need in zip(((*lead, 7, 48), (*lead, 7, 48), (48,), (48,)), needs, strict=True)
    )
    g = g.detach().float().requires_grad_(needs[2])
    return fn, (base, lora, g), {"s": 2.0} | ({"bias": bias} if fn is F.dora_compose else {})


def merged(fn, norm):
    W, A, B = weights()
    return fn, (W, A, B, draw(40) + 1), {"s": 2.0, "norm": norm_of(W, A, B) if norm else None}


def embedded(axis=0, given=False, **more):
    """A table whose rows are those of a layer's weight, or its columns."""
    t = tensors(40, 48, 8, dtype=torch.float16, adapter=torch.float32)
    W, A, B = (t["W"].T.contiguous(), t["A"], t["B"]) if axis == 0 else (t["W"], t["B"].T, t["A"].T)
    leaves = [v.detach().requires_grad_() for v in (A, B, t["m"])]
    c = {"norm": torch.ones(40, device=device.NAME)} if given else {}
    return (
        F.dora_embedding,
        (torch.arange(12, device=device.NAME).view(3, 4), W, *leaves),
        {"s": 2.0, "norm_axis": axis} | c | more,
    )


def bank(M=80, G=3, needs=NEEDS, bias=False, norm=False, ids=False, ranks=None, plain=False, **options):
    x, W, A, B = (
        draw(M, 48, grad="x" in needs),
        draw(40, 48),
        draw(G, 4, 48, grad="A" in needs),
        draw(G, 40, 4, grad="B" in needs),
    )
    m = None if plain else draw(G, 40, grad="m" in needs)
    ends = torch.tensor([M // 4, M // 2, M - 1][:G], dtype=torch.int32, device=device.NAME)
    whose = {"ids": torch.arange(M, device=device.NAME) % (G + 1) - 1} if ids else {"offsets": ends}
    c = torch.rand(G, 40, device=device.NAME) + 1 if norm else None
    given = {"bias": draw(40, grad=True) if bias else None, "norm": c, "ranks": ranks, "s": [2.0] * G}
    return F.dora_linear_multi, (x, W, A, B, m), whose | given | options


def convolved(fn=F.dora_conv2d, x=(2, 8, 9, 7), W=(12, 8, 3, 3), r=4, last=False, bias=False, norm=False, adapter=H, **how):
    n, transposed, groups = len(W) - 2, how.get("transposed", False), how.get("groups", 1)
    out = W[1] * groups if transposed else W[0]
    A = (W[0] // groups, r, *W[2:]) if transposed else (r, *W[1:])
    x = draw(*x, grad=True)
    x = x.detach().to(memory_format=torch.channels_last).requires_grad_() if last else x
    given = {"bias": draw(out, grad=True) if bias else None, "norm": torch.rand(out, device=device.NAME) + 1 if norm else None}
    leaves = (draw(*shape, dtype=adapter, grad=True) for shape in (A, (out, r, *[1] * n), (out,)))
    return fn, (x, draw(*W), *leaves), {"s": 2.0, **given, **how}


def expert_layer(N, K, E=3, bias=False, norm=False, needs=NEEDS):
    drawn = [draw(E, N, K), *(draw(E, *shape, grad=n in needs) for n, shape in (("A", (4, K)), ("B", (N, 4)), ("m", (N,))))]
    return F.DoraLayer(
        *drawn, 2.0, draw(E, N, grad=True) if bias else None, torch.rand(E, N, device=device.NAME) if norm else None
    )


def whose(T, k=None, gates=False, E=3):
    if k is None:
        return {"offsets": torch.tensor([T // 4, T // 2, T - 1], dtype=torch.int32, device=device.NAME)}
    ids = (torch.arange(T * k, device=device.NAME) % (E + 1) - 1).view(T, k)
    return {"ids": ids, "gates": torch.rand(T, k, device=device.NAME, requires_grad=gates == "trained") if gates else None}


def mixture(T=40, k=None, gates=False, needs=NEEDS, **options):
    la = expert_layer(40, 48, needs=needs, **options)
    return (
        F.dora_experts,
        (draw(T, 48, grad="x" in needs), *la[:4]),
        {"s": 2.0, "bias": la.bias, "norm": la.norm} | whose(T, k, gates),
    )


def mixture_mlp(T=40, k=None, gates=False, needs=NEEDS, grad=True, **options):
    layers = expert_layer(64, 48, needs=needs, **options), expert_layer(48, 32, needs=needs)
    return F.dora_experts_mlp, (draw(T, 48, grad=grad), *layers), whose(T, k, gates)


CALLS = {
    "a convolution": convolved,
    "a convolution, channels last": lambda: convolved(last=True, bias=True),
    "a convolution with groups, norm given": lambda: convolved(W=(12, 4, 3, 3), groups=2, norm=True, padding=1),
    "a convolution of one axis": lambda: convolved(F.dora_conv1d, (2, 8, 9), (12, 8, 3)),
    "a transposed convolution": lambda: convolved(W=(8, 12, 3, 3), transposed=True, stride=2),
    "a transposed convolution with groups": lambda: convolved(W=(8, 6, 3, 3), transposed=True, groups=2),
    "a convolution of float32 adapters": lambda: convolved(adapter=torch.float32),
    "a convolution of one image": lambda: convolved(F.dora_conv3d, (8, 5, 6, 7), (12, 8, 3, 3, 3)),
    "experts": mixture,
    "experts, norm given": lambda: mixture(norm=True, bias=True),
    "experts, no gradient": lambda: mixture(needs=(), k=2, gates=True),
    "experts by ids": lambda: mixture(k=2),
    "experts by gates": lambda: mixture(k=2, gates="trained"),
    "experts, only m": lambda: mixture(k=2, gates=True, needs=("m",)),
    "an MLP of experts": mixture_mlp,
    "an MLP of experts by ids": lambda: mixture_mlp(k=2),
    "an MLP of experts by gates": lambda: mixture_mlp(k=2, gates="trained", bias=True),
    "an MLP of experts, no gradient": lambda: mixture_mlp(k=2, gates=True, needs=(), grad=False),
    "many adapters": bank,
    "many adapters, few tokens": lambda: bank(M=8, norm=True),
    "many adapters, tokens in any order": lambda: bank(ids=True, bias=True, ranks=[4, 2, 1]),
    "many adapters, dropout": lambda: bank(dropout_p=0.2, seed=[1, 2, 3]),
    "many adapters, no gradient": lambda: bank(needs=()),
    "many adapters without m": lambda: bank(plain=True, needs=("x", "A")),
    "norms of a bank": lambda: (F.dora_norm, (draw(40, 48), draw(3, 4, 48), draw(3, 40, 4)), {"s": [1.0, 2.0, 3.0]}),
    "many tokens": one,
    "few tokens": lambda: one(M=3, lead=(2, 5)),
    "one token": lambda: one(M=1),
    "float32": lambda: one(dtype=torch.float32),
    "float32 adapter": lambda: one(layer=dict(adapter=torch.float32)),
    "a bias": lambda: one(layer=dict(bias=True)),
    "norm given": lambda: one(layer=dict(norm=True)),
    "keep_inner": lambda: one(keep_inner=True),
    "full": lambda: one(detach=False),
    "full, float32 adapter": lambda: one(layer=dict(adapter=torch.float32), dtype=HALF[0], detach=False),
    "a residual": lambda: one(residual=draw(80, 40)),
    "a residual, few tokens": lambda: one(M=3, residual=draw(3, 40)),
    "full, norm given": lambda: one(layer=dict(norm=True), detach=False),
    "an MLP, full": lambda: mlp(detach=False),
    "lora dropout": lambda: one(dropout_p=0.2, seed=1),
    "peft dropout": lambda: one(dropout_p=0.2, seed=1, dropout_mode="peft"),
    "no gradient": lambda: one(needs=()),
    "only m": lambda: one(needs=("m",)),
    "only x": lambda: one(needs=("x",)),
    "no m": lambda: one(needs=("x", "A", "B")),
    "transposed W": transposed,
    "unaligned x": unaligned,
    "x with gaps": scattered,
    "a group": lambda: group(layer(), layer(16, bias=True, norm=True), F.DoraLayer(draw(24, 48)), layer(8)),
    "a group with other s": lambda: group(layer(), layer(s=1.0)),
    "a group, few tokens": lambda: group(layer(), layer(8), M=4),
    "a group, dropout": lambda: group(layer(), layer(8), dropout_p=0.2, seed=[1, 2]),
    "frozen layers": lambda: group(F.DoraLayer(draw(24, 48), bias=draw(24, grad=True)), F.DoraLayer(draw(8, 48))),
    "an MLP": mlp,
    "an MLP, few tokens": lambda: mlp(M=4, act="gelu"),
    "an MLP, no gradient": lambda: mlp(needs=(), grad=False, bias=False),
    "an MLP, peft dropout": lambda: mlp(dropout_p=0.2, dropout_mode="peft", seed=[1, 2, 3]),
    "codes": lambda: one(of=coded()),
    "codes, few tokens": lambda: one(of=coded(), M=3),
    "codes, norm given": lambda: one(of=coded(norm=True), needs=("A", "B", "m")),
    "codes, no gradient": lambda: one(of=coded(needs=()), needs=()),
    "a group with codes": lambda: group(coded(), layer(), F.DoraLayer(coded().W)),
    "an MLP of codes": lambda: (F.dora_mlp, (draw(80, 48, grad=True), coded(32), layer(32, bias=True), coded(48, 32)), {}),
    "a norm of codes": lambda: (F.dora_norm, coded(needs=())[:3], {"s": 2.0, "squared": True}),
    "codes that plain torch decodes": lambda: one(of=coded()._replace(W=twice())),
    "a norm of codes with a state": lambda: (lambda w: (F.dora_norm, w, {"s": 2.0, "state": F.dora_norm_state(w[0])}))(
        coded(needs=())[:3]
    ),
    "a norm of codes in little memory": lambda: (F.dora_norm, coded(needs=())[:3], {"s": 2.0, "max_bytes": 2**14}),
    "a merge of codes": lambda: (F.dora_merge, coded(needs=())[:4], {"s": 2.0}),
    "8-bit products": lambda: one(of=coded()._replace(W=quantize(draw(40, 48), "fp8")), compute="fp8"),
    "8-bit products, few tokens": lambda: one(
        of=coded(norm=True)._replace(W=quantize(draw(40, 48), "fp8")), compute="fp8", M=3
    ),
    "an embedding": lambda: embedded(),
    "an embedding, norm given": lambda: embedded(given=True),
    "an embedding of a table of rows": lambda: embedded(axis=1),
    "an embedding, a sparse gradient": lambda: embedded(sparse=True),
    "a norm": lambda: (F.dora_norm, weights(), {"s": 2.0}),
    "a norm of float32": lambda: (F.dora_norm, weights(torch.float32), {"s": 2.0}),
    "a norm of mixed": lambda: (F.dora_norm, weights(adapter=torch.float32), {"s": 2.0}),
    "a norm of columns": lambda: (F.dora_norm, weights(), {"s": 2.0, "norm_axis": 0}),
    "a squared norm": lambda: (F.dora_norm, weights(), {"s": 2.0, "squared": True}),
    "a norm in little memory": lambda: (F.dora_norm, weights(N=300), {"s": 2.0, "max_bytes": 2**13}),
    "a norm with a state": lambda: (lambda w: (F.dora_norm, w, {"s": 2.0, "state": F.dora_norm_state(w[0])}))(weights()),
    "compose": lambda: composed(F.dora_compose),
    "compose of a vector": lambda: composed(F.dora_compose, lead=()),
    "compose for g alone": lambda: composed(F.dora_compose, needs=(False, False, True, False)),
    "delta": lambda: composed(F.dora_delta),
    "merge": lambda: merged(F.dora_merge, False),
    "merge, norm given": lambda: merged(F.dora_merge, True),
    "unmerge": lambda: merged(F.dora_unmerge, True),
}


def facts(plan):
    return {k: v for k, v in vars(plan).items() if k != "native"}


def distinct(plans):
    found = []
    for each in map(facts, plans):
        if each not in found:
            found.append(each)
    return found


def backward_of(out):
    ys = [t for t in (out if isinstance(out, tuple) else (out,)) if t.requires_grad]
    if ys:
        torch.autograd.backward(ys, [torch.randn_like(y) for y in ys])


@needs_kernels
@pytest.mark.parametrize("what", CALLS)
def test_it_says_what_the_real_call_does(what, monkeypatch):
    """The plans that run, and the tensors that autograd keeps: other arguments than the first are parameters."""
    fn, args, kwargs = CALLS[what]()
    monkeypatch.setattr(walk, "_plans", {})
    with monkeypatch.context() as patch:
        patch.setattr(explaining, "describe", lambda plan, rates: plan)
        said = explain(fn, *args, backend="triton", **kwargs)
    assert not walk._plans and said.plans
    saved = {}

    def pack(t):
        if t.shape not in ((), (0,)):
            saved.setdefault(t.untyped_storage().data_ptr(), t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = fn(*args, backend="triton", **kwargs)
    backward_of(y)
    plans = [plan for plan in said.plans if isinstance(plan, Plan)]  # no decoding by plain torch
    assert distinct(plans) == distinct(walk._plans.values())  # the first call's key is Python's, later ones the C walk's
    parameters = () if fn in (F.dora_compose, F.dora_delta) else (args[1:], kwargs)
    own = {t.untyped_storage().data_ptr() for t in optree.tree_leaves(parameters) if isinstance(t, torch.Tensor)}
    found = sorted((tuple(t.shape), str(t.dtype)) for at, t in saved.items() if at not in own)
    assert sorted((t.shape, str(t.dtype)) for t in said.kept) == found
    assert all(t.nbytes == torch.Size(t.shape).numel() * t.dtype.itemsize for t in said.kept)


@needs_kernels
def test_under_autocast(monkeypatch):
    fn, args, kwargs = one(dtype=torch.float32)
    monkeypatch.setattr(walk, "_plans", {})
    monkeypatch.setattr(explaining, "describe", lambda plan, rates: plan)
    with torch.autocast(device.NAME, dtype=H):
        said = explain(fn, *args, backend="triton", **kwargs)
        y = fn(*args, backend="triton", **kwargs)
    backward_of(y)
    assert y.dtype == H and [facts(plan) for plan in said.plans] == [facts(plan) for plan in walk._plans.values()]


def meta(N=4096, K=4096, r=16, M=4096, dtype=torch.bfloat16):
    x, W, A, B, m = (torch.empty(s, dtype=dtype, device="meta") for s in ((M, K), (N, K), (r, K), (N, r), (N,)))
    return [x.requires_grad_(), W, A.requires_grad_(), B.requires_grad_(), m.requires_grad_()]


def test_what_it_says_of_codes():
    """The bytes of what is stored, the decoding, and nothing dense among what is kept."""
    x, W, A, B, m = meta()
    W = quantize(torch.randn(64, 64, dtype=torch.bfloat16), "nf4", nested=True)
    groups = 4096 * 4096 // 64
    tensors = [
        torch.empty(n, dtype=t.dtype, device="meta")
        for n, t in zip((2**23, groups, 256, groups // 256), W.tensors, strict=False)
    ]
    W = replace(W, tensors=(*tensors, W.tensors[4].to("meta")), shape=(4096, 4096))
    said = explain(F.dora_linear, x, W, A, B, m, s=2.0, gpu="h200")
    assert W.nbytes == 2**23 + groups + 4 * (256 + groups // 256 + 1)
    assert said.notes == ("W: nf4, (4096, 4096): 8.25 MiB stored, 0.516 bytes a weight; 32.00 MiB in bfloat16",)
    backward = said.plans[1]
    assert "; W is decoded first, its norm with it" in str(said) and backward.workspace >= 2 * 4096 * 4096
    (row,) = [row for row in backward.steps if row.what == "dequantize_kernel"]
    assert row.bytes == pytest.approx(W.nbytes + 2 * 4096 * 4096, rel=1e-3)
    assert not any(t.shape == (4096, 4096) and t.name not in "xy" for t in said.kept)
    assert explain(F.dora_linear, x, W, A, B, m, s=2.0).notes[1:] == said.notes  # where the tensors are: plain torch


def test_decoding_by_plain_torch_is_a_step_without_a_plan():
    la = coded(needs=())
    said = explain(F.dora_linear, draw(8, 48, grad=True), twice(), *coded()[1:4], s=2.0, gpu="h200")
    assert [plan.name for plan in said.plans] == [
        "decoding of W",
        "dora_norm",
        "decoding of W",
        "dora_linear forward",
        "decoding of W",
        "dora_linear backward",
    ]
    first, _, second, *_ = said.plans
    assert first.bytes == 40 * 48 * (2 + 4) and second.bytes == 40 * 48 * (2 + 2) == 2 * second.workspace
    assert first.seconds == first.bytes / 4.80e12 and "opaque (40, 48) to float32; no kernel reads it" in str(said)
    for fn, more, names in (
        (F.dora_merge, {}, ["dora_norm of codes", "decoding of W", "dora_merge"]),
        (F.dora_norm, {"max_bytes": 2**20}, ["decoding of W", "dora_norm"]),
        (F.dora_norm, {"state": F.dora_norm_state(la.W)}, ["dora_norm of codes where A, B or s changed"]),
        (F.dora_norm, {"state": F.dora_norm_state(la.W), "max_bytes": 2**20}, ["decoding of W", "dora_norm"]),
    ):
        args = la[:4] if fn is F.dora_merge else la[:3]
        assert [plan.name for plan in explain(fn, *args, s=2.0, gpu="h200", **more).plans] == names
    with pytest.raises(
        FdoraError, match=r"`W` must be a tensor, got a QuantWeight\. Quantising the merged weight was for good"
    ):
        explain(F.dora_unmerge, *la[:4], s=2.0, norm=torch.ones(40, device=device.NAME))


def test_products_of_8_bits():
    x, W, A, B, m = meta(128, 64)
    W = quantize(torch.randn(128, 64, dtype=torch.bfloat16), "fp8", block=(128, 128)).to("meta")
    said = explain(F.dora_linear, x, W, A, B, m, s=2.0, compute="fp8", gpu="h200")
    norm, forward, _ = said.plans
    assert norm.name == "dora_norm of codes" and [row.what for row in forward.steps][-2:] == [
        "fp8_blocks_kernel",
        "gemm_tma_kernel",
    ]
    product = forward.steps[-1]
    assert product.flops == 2 * 4096 * 128 * (64 + 16)
    assert product.seconds == pytest.approx(max(2 * 4096 * 128 * (64 / 2 + 16) / 989e12, product.bytes / 4.80e12))
    with pytest.raises(FdoraError, match="`compute` must be None on this GPU"):
        explain(F.dora_linear, x, W, A, B, m, s=2.0, compute="fp8", gpu="a100")


def test_a_gpu_that_is_not_there():
    """By hand: what a layer of 4096 x 4096 costs on an H200, in bfloat16 throughout."""
    M = N = K = 4096
    r, e = 16, 2
    said = explain(F.dora_linear, *meta(), s=2.0, gpu="h200")
    norm, forward, backward = said.plans
    assert norm.flops == 2 * N * K * r and forward.flops == 2 * M * (N * K + K * r + N * r)
    assert backward.flops == 2 * M * (N * K + 2 * K * r + 2 * N * r)
    assert said.flops == norm.flops + forward.flops + backward.flops
    product = forward.steps[-1]
    assert product.what == "gemm_tma_kernel" and "TMA" in product.how and "grid 132," in product.how
    assert product.bytes == e * (M * K + N * K + M * N + M * r + N * r)
    assert product.seconds == product.flops / 989e12 > product.bytes / 4.80e12
    scale = backward.steps[0]
    assert scale.what == "scale_kernel" and scale.seconds == scale.bytes / 4.80e12 > scale.flops / 989e12
    assert said.seconds == pytest.approx(sum(row.seconds for plan in said.plans for row in plan.steps))
    assert {t.name: (t.shape, t.nbytes, t.whose) for t in said.kept} == {
        "x": ((M, K), e * M * K, "argument"),
        "h": ((M, r), e * M * r, "new"),
        "y": ((M, N), e * M * N, "output"),
        "c": ((N,), 4 * N, "new"),
    }
    assert said.new_bytes == e * M * r + 4 * N and said.workspace == backward.workspace >= e * M * N
    text = str(said)
    for words in (
        "triton (bfloat16 on the H200 SXM)",
        "floors, not measurements",
        "more than 64 tokens",
        "(4096, 4096) x (4096, 16)",
        "BLOCK_M 128",
        "8 warps",
        "workspace",
        "kept for backward",
        "new",
        "us",
    ):
        assert words in text, words


def test_nothing_of_a_gpu_that_is_not_there_stays():
    """Few tokens, whose norm asks for the device as well; and a call that fails."""
    x, *rest = meta(M=4)
    assert explain(F.dora_linear, x, *rest, s=2.0, gpu="h200").plans[0].name == "dora_linear forward"
    with pytest.raises(FdoraError):
        explain(F.dora_linear, x[:, :8], *rest, s=2.0, gpu="h200")
    assert device_of(torch.device("meta")).capability == 0 and active() is None
    assert not any(plan.device.capability == 90 for plan in walk._plans.values())


@pytest.mark.parametrize("gpu", GPUS)
def test_every_gpu_of_the_table_is_explained_by_its_own_rates(gpu):
    said = explain(F.dora_linear, *meta(), s=2.0, gpu=gpu)
    rate = GPUS[gpu]
    assert said.gpu is rate and said.backend == "triton"
    assert said.flops / rate.flops <= said.seconds < 1 and rate.gib > 20 and rate.tf32 < rate.flops


def test_gpus_differ():
    first = {gpu: explain(F.dora_linear, *meta(), s=2.0, gpu=gpu).plans[1].steps[-1].what for gpu in ("a100", "h200", "4090")}
    assert first == {"a100": "rest_kernel", "h200": "gemm_tma_kernel", "4090": "rest_kernel"}


def test_backward_can_be_left_out():
    assert len(explain(F.dora_linear, *meta(), s=2.0, gpu="h200", backward=False).plans) == 2


def test_float32_obeys_the_setting():
    def product():
        return explain(F.dora_linear, *meta(dtype=torch.float32), s=2.0, gpu="h100").plans[1].steps[1]

    exact = product()
    try:
        torch.set_float32_matmul_precision("high")
        tf32 = product()
    finally:
        torch.set_float32_matmul_precision("highest")
    assert exact.what == tf32.what == "cuBLAS" and exact.seconds / tf32.seconds == pytest.approx(494 / 67)


def test_a_copy_is_a_step():
    _, *rest = meta()
    gaps = torch.empty(4096, 8192, dtype=torch.bfloat16, device="meta")[:, ::2]
    forward = explain(F.dora_linear, gaps, *rest, s=2.0, gpu="h200").plans[1]
    assert forward.steps[0].what == "copy of argument 0" and forward.steps[0].bytes == 2 * 2 * 4096 * 4096


@needs_kernels
@pytest.mark.parametrize("guarded", [False, True])
def test_norms_of_a_tree(guarded, monkeypatch):
    """The plan of a tree is made with its table; the same likes give the same."""
    from fdora.triton import tree

    weights_of = {"one": [draw(40, 48), draw(24, 48)], "two": draw(40, 48, dtype=torch.float32)}
    params = optree.tree_map(lambda W: F.DoraParams(draw(4, W.shape[1]), draw(W.shape[0], 4), None), weights_of)
    params["two"] = F.DoraParams(draw(4, 48, dtype=torch.float32), draw(40, 4, dtype=torch.float32), None)
    state = F.dora_norm_tree_state(weights_of) if guarded else None
    made, make = [], tree._plan
    monkeypatch.setattr(tree, "_plan", lambda *args: made.append(make(*args)) or made[-1])
    F.dora_norm_tree(weights_of, params, s=2.0, state=state, backend="triton")
    monkeypatch.setattr(explaining, "describe", lambda plan, rates: plan)
    said = explain(F.dora_norm_tree, weights_of, params, s=2.0, state=state, backend="triton")
    (real, again) = made
    assert facts(real) == facts(again) == facts(said.plans[0])
    assert real.cost.flops == 2 * 4 * 48 * (40 + 24 + 3 * 40)
    assert bool(said.notes) == guarded
    meta = optree.tree_map(lambda t: t.to("meta"), weights_of), optree.tree_map(lambda t: t.to("meta"), params)
    there = explain(F.dora_norm_tree, *meta, s=2.0, gpu="h200")
    assert [step.kernel.__name__ for step in there.plans[0].steps][-1] == "roots_kernel"


def test_a_tree_without_weights():
    with pytest.raises(FdoraError, match="a nesting with a weight"):
        explain(F.dora_norm_tree, {}, {}, s=2.0)


def test_a_tensor_of_ratios_is_not_asked_for_its_values():
    la = layer()
    bank = [torch.stack([t.detach()] * 2).requires_grad_() for t in (la.A, la.B, la.m)]
    how = {"offsets": torch.tensor([3, 80], dtype=torch.int32, device=device.NAME), "seed": 1}
    how["dropout_p"] = torch.tensor([0.1, 0.2], device=device.NAME)
    plan = explain(F.dora_linear_multi, draw(80, 48), la.W, *bank, s=[2.0, 2.0], gpu="h200", **how)
    assert "seed" in [kept.name for kept in plan.kept]
