"""explain() shows the plans that a real call runs, and what it keeps; nothing runs for it."""

from dataclasses import fields, replace

import optree
import pytest
import torch

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

import fdora.functional as F
from fdora import FdoraError
from fdora._recording import active, recording
from fdora.functional import explain
from fdora.functional.explain import held_by_nodes
from fdora.predict import GPUS
from fdora.quant import opaque, quantize
from fdora.triton import describe as explaining
from fdora.triton.multi_dropped import CODES
from fdora.triton.runtime import walk
from fdora.triton.runtime.device import Device, device_of
from fdora.triton.runtime.plan import Plan
from tests import device
from tests.triton.drawn import NAMES, backward_of, calls
from tests.triton.marks import HALF, INTERPRETED, needs_kernels  # noqa: F401

H = torch.float16


def draw(*shape, dtype=H, grad=False, std=0.1):
    return (torch.randn(shape, device=device.NAME) * std).to(dtype).requires_grad_(grad)


def layer(adapter=H, grad=True, dtype=H):
    W, A, B, m = (
        draw(*shape, dtype=dtype if shape == (40, 48) else adapter, grad=grad and shape != (40, 48))
        for shape in ((40, 48), (4, 48), (40, 4), (40,))
    )
    return F.DoraLayer(W, A, B, m, 2.0)


def coded(grad=True):
    la = layer(torch.float32, grad)
    return la._replace(W=quantize(la.W, "nf4"))


def twice():
    return opaque(lambda t: 2 * t, (40, 48), H, device.NAME, (draw(40, 48),))


def one(la, M=80, **options):
    return F.dora_linear, (draw(M, 48, dtype=la.W.dtype, grad=True), *la[:4]), {"s": 2.0, **options}


def eight_bits(M):
    return one(coded()._replace(W=quantize(draw(40, 48), "fp8")), M, compute="fp8")


OTHERS = {  # what tests/cases.py does not draw
    "8-bit products": lambda: eight_bits(80),
    "8-bit products, few tokens": lambda: eight_bits(3),
    "codes that plain torch decodes": lambda: one(coded()._replace(W=twice())),
}


def facts(plan):
    """All that a plan says; one of a family says it when it is asked."""
    return {each.name: getattr(plan, each.name) for each in fields(Plan) if each.name not in ("native", "family", "count")}


def distinct(plans):
    found = []
    for each in map(facts, plans):
        if each not in found:
            found.append(each)
    return found


@needs_kernels
@pytest.mark.parametrize("what", [*NAMES, *OTHERS])
def test_it_says_what_the_real_call_does(what, monkeypatch):
    """The plans that run, and the tensors that autograd keeps: other arguments than the first are parameters."""
    monkeypatch.setattr(explaining, "describe", lambda plan, rates: plan)
    for fn, args, kwargs in [OTHERS[what]()] if what in OTHERS else calls(what, 8):
        monkeypatch.setattr(walk, "_plans", {})
        said = explain(fn, *args, backend="triton", **kwargs)
        assert not walk._plans
        saved = {}

        def pack(t, saved=saved):
            if t.dim() and t.numel():
                saved.setdefault(t.untyped_storage().data_ptr(), t)
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = fn(*args, backend="triton", **kwargs)
        for t in held_by_nodes([each for each in optree.tree_leaves(y) if each.requires_grad]):
            pack(t)
        backward_of(y)
        plans = [plan for plan in said.plans if isinstance(plan, Plan)]  # no decoding by plain torch
        assert distinct(plans) == distinct(walk._plans.values())  # the first call's key is Python's, later ones the C walk's
        parameters = () if fn in (F.dora_norm, F.dora_compose, F.dora_delta) else (args[1:], kwargs)
        own = {t.untyped_storage().data_ptr() for t in optree.tree_leaves(parameters) if isinstance(t, torch.Tensor)}
        found = sorted((tuple(t.shape), str(t.dtype)) for at, t in saved.items() if at not in own)
        assert sorted((t.shape, str(t.dtype)) for t in said.kept if t.nbytes) == found
        assert all(t.nbytes == torch.Size(t.shape).numel() * t.dtype.itemsize for t in said.kept)


@needs_kernels
def test_under_autocast(monkeypatch):
    fn, args, kwargs = one(layer(torch.float32, dtype=torch.float32))
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
    la = coded(grad=False)
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
    assert said.new_bytes == e * M * r + 4 * N and said.workspace == backward.workspace
    assert forward.workspace == 0 and e * M * N <= backward.workspace < 1.1 * e * M * N  # dz
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


def test_the_memory_of_an_mlp():
    """Kept: gate, up and what is of rank r. Forward needs their product beside them, backward the gradients of both."""
    M, K, width, r = 8192, 512, 4096, 16
    three = (F.DoraLayer(*meta(N, of, r)[1:], 2.0) for N, of in ((width, K), (width, K), (K, width)))
    said, wide = explain(F.dora_mlp, meta(K=K, M=M)[0], *three, gpu="h200"), 2 * M * width
    *_, forward, backward = said.plans
    assert said.new_bytes < 2.1 * wide and forward.workspace < 1.1 * wide and backward.workspace < 2.2 * wide


@pytest.mark.parametrize("M", [5, 80])
def test_flops_by_hand(M):
    """Of few tokens too: an MLP, a norm with a state, a merge, and two adapters multiplied out: W A^T, A A^T, b A A^T of each row."""
    r, shapes = 4, ((32, 48), (32, 48), (48, 32))
    said = explain(F.dora_mlp, meta(K=48, M=M)[0], *(F.DoraLayer(*meta(N, K, r)[1:], 2.0) for N, K in shapes), gpu="h200")
    norms = [2 * N * K * r for N, K in shapes]
    products = [2 * M * (2 * N * K + 3 * (N + K) * r) for N, K in shapes]  # forward, dx, and four of low rank more
    assert said.flops == sum(norms) + sum(products)
    W, A, B, m = (t.detach() for t in meta(40, 48, r)[1:])
    *_, backward = explain(F.dora_linear, meta(40, 48, r, M)[0].detach(), W, A, B, m.requires_grad_(), s=2.0, gpu="h200").plans
    assert backward.flops == 0  # a pass over dy and y
    one = 2 * 40 * 48 * r
    assert explain(F.dora_norm, W, A, B, s=2.0, state=F.dora_norm_state(W), gpu="h200").flops == one
    assert explain(F.dora_merge, W, A, B, m, s=2.0, gpu="h200").flops == 2 * one
    bank = [torch.stack([t, t]) for t in (A, B)]
    assert explain(F.dora_norm, W, *bank, s=[1.0, 2.0], gpu="h200").flops == 2 * (one + 2 * r * r * (48 + 40))


def test_nothing_of_a_gpu_that_is_not_there_stays(monkeypatch):
    """Few tokens, whose norm asks for the device as well; and a call that fails."""
    monkeypatch.setattr(walk, "_plans", {})
    x, *rest = meta(M=4)
    assert explain(F.dora_linear, x, *rest, s=2.0, gpu="h200").plans[0].name == "dora_linear forward"
    with pytest.raises(FdoraError):
        explain(F.dora_linear, x[:, :8], *rest, s=2.0, gpu="h200")
    assert device_of(torch.device("meta")).capability == 0 and active() is None and not walk._plans
    with recording(Device(0, 90, 132, True)):  # though it was asked for before, where nobody recorded
        assert device_of(torch.device("meta")).capability == 90


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


@pytest.mark.parametrize("mode", ["peft", "lora"])
def test_what_dropout_of_a_bank_means_is_said(mode):
    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=len(shape) == 3)

    where = {"offsets": meta(4, dtype=torch.int32), "dropout_p": 0.05, "seed": 1, "dropout_mode": mode}
    bank = meta(4096, 4096), meta(4, 16, 4096), meta(4, 4096, 16), meta(4, 4096).requires_grad_()
    x = meta(4096, 4096).requires_grad_()
    said = explain(F.dora_linear_multi, x, *bank, s=meta(4, dtype=torch.float32), gpu="h200", **where)
    passes = [plan for plan in said.plans if "norms" not in plan.name]
    assert [CODES in plan.path for plan in passes] == [mode == "peft"] * 2
    assert next(kept for kept in said.kept if kept.name == "x").whose == "argument"
    assert ("pre_scale" in [kept.name for kept in said.kept]) == (mode == "peft")
