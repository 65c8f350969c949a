"""The same numbers as stock PEFT, layer by layer, and no worse ones where it rounds."""

import copy

import pytest
import torch
from torch import nn

from fdora.integrations._peft import calls
from fdora.integrations.peft import init_magnitude, report, use_fdora
from tests.close import assert_exact, assert_within
from tests.integrations import models
from tests.integrations.models import FUSED, KINDS, MORE, build, inputs, layer, path, run, same
from tests.memory import saved


def both(model, x, train=True):
    model.train(train)
    stock = run(model, x)
    return stock, run(use_fdora(model), x)


@pytest.mark.parametrize("kind", [*KINDS, *MORE])
@pytest.mark.parametrize("how", ["train", "dropout", "eval"])
def test_output_and_every_gradient(kind, how):
    dropout = 0.4 if how == "dropout" and inputs(kind).is_floating_point() else 0.0
    model, x = build(kind, dropout=dropout), inputs(kind)
    stock, ours = both(model, x, how != "eval")
    same(ours, stock)
    plain = layer(model).base_layer(x)
    assert not torch.allclose(ours["y"], plain)
    assert path(model) == ("fused" if kind in (*FUSED, *MORE) and not dropout else "composed")
    assert not report(model)[0].fallbacks


ANY = [
    {"use_rslora": True},
    {"rank_pattern": {"0": 2}, "alpha_pattern": {"0": 5}},
    {"bias": "all"},
    {"init_lora_weights": False},
]
CONFIGS = [
    (kind, config) for kind in ("linear", "embedding", "conv1d same", "conv2d of one point", "conv3d padded") for config in ANY
]
CONFIGS += [("linear", {"init_lora_weights": init}) for init in ("pissa", "olora", "gaussian", "orthogonal")]


@pytest.mark.parametrize(("kind", "config"), CONFIGS, ids=str)
def test_configurations(kind, config):
    """To the last digits in float64; in float32, in which it is trained, the dtypes and nearly so."""
    for dtype in (torch.float32, torch.float64):
        model, x = build(kind, dtype=torch.float32, **config).to(dtype), inputs(kind, dtype)
        stock, ours = both(model, x)
        if dtype == torch.float64:
            same(ours, stock)
        for n in stock:
            assert ours[n].dtype == stock[n].dtype
            torch.testing.assert_close(ours[n], stock[n], rtol=1e-5, atol=1e-5, msg=lambda text, n=n: f"{n}: {text}")
        assert path(model) == "fused" or (kind == "linear" and dtype == torch.float32)  # PEFT's own sum with a bias


@pytest.mark.parametrize("second", [True, False], ids=["dora", "plain"])
@pytest.mark.parametrize("how", ["train", "dropout", "eval"])
@pytest.mark.parametrize("kind", ["linear", "Conv1D", "quantised", "embedding", "conv2d"])
def test_several_active_adapters_as_peft_means_them(kind, second, how):
    p = 0.4 if how == "dropout" and kind != "embedding" else 0.0
    model, x = build(kind, dropout=p), inputs(kind)
    config = copy.deepcopy(model.peft_config["default"])
    config.use_dora, config.r = second, 2
    model.add_adapter("other", config)
    models.perturb(model, 0.5)
    for names in (["default", "other"], ["other", "default"], ["other"]):
        model.base_model.set_adapter(names)
        stock, ours = both(model, x, how != "eval")
        same(ours, stock, names)
    assert report(model)[0].composed >= 2


DTYPES = {
    "bf16, fp32 adapters": (torch.bfloat16, torch.float32, None),
    "bf16, fp32 adapters, autocast": (torch.bfloat16, torch.float32, torch.bfloat16),
    "bf16": (torch.bfloat16, torch.bfloat16, None),
    "bf16, autocast": (torch.bfloat16, torch.bfloat16, torch.bfloat16),
    "fp16, fp32 adapters": (torch.float16, torch.float32, None),
    "fp32, autocast": (torch.float32, torch.float32, torch.bfloat16),
    "fp32": (torch.float32, torch.float32, None),
}


@pytest.mark.parametrize("case", DTYPES)
@pytest.mark.parametrize("kind", ["linear", "no_bias", "Conv1D", "quantised", "embedding", "conv2d", "dropout"])
def test_dtypes(kind, case):
    base, adapter, autocast = DTYPES[case]
    p, kind = (0.4, "linear") if kind == "dropout" else (0.0, kind)
    model = build(kind, dtype=torch.float32, dropout=p).to(base)
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data = param.data.to(adapter)
    exact, rounded, x = models.twin(model).double(), models.twin(model), inputs(kind, base)
    wide = x.detach().double().requires_grad_() if x.is_floating_point() else x
    truth = run(exact, wide)
    with torch.autocast("cpu", dtype=autocast, enabled=autocast is not None):
        stock, ours = both(model, x)
    added = case == "fp32" and kind == "linear"
    assert path(model) == ("fused" if kind in FUSED and not p and not added else "composed")
    if base != adapter and autocast is None and kind in FUSED:  # ours multiplies in the base's dtype, as autocast does
        with torch.autocast("cpu", dtype=base):
            naive = run(rounded, x)
    else:
        naive = stock
    for name in stock:
        assert ours[name].dtype == stock[name].dtype, name
        if not p:  # the mask is drawn in another dtype for the truth
            assert_within(ours[name], naive[name], truth[name], f"{kind}, {case}: {name}")
        else:
            torch.testing.assert_close(ours[name].float(), stock[name].float(), rtol=0.05, atol=0.05)


def test_no_float32_copy_of_the_input():
    model, x = build("no_bias", dtype=torch.float32).to(torch.bfloat16), inputs("no_bias", torch.bfloat16)
    for name, param in model.named_parameters():
        if "lora_" in name:
            param.data = param.data.float()

    def kept():
        return [(t.dtype, t.shape) for t in saved(lambda: model(x))[1]]

    assert (torch.float32, x.shape) in kept()
    use_fdora(model)
    assert (torch.float32, x.shape) not in kept()


def test_a_quantised_base_gives_back_its_own_dtype_under_autocast():
    """PEFT's bitsandbytes layers return float32 there; the same variant, called as they call it."""
    model, x = use_fdora(build("quantised", dtype=torch.float32)), torch.randn(3, models.K).bfloat16()
    variant, module = layer(model).lora_variant["default"], layer(model)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        result = module.base_layer(x)
        stock = variant.stock.forward(module, active_adapter="default", x=x, result=result)
        ours = variant.forward(module, active_adapter="default", x=x, result=result)
        variant.weights = lambda *_: "the test says so"
        fallen = variant.forward(module, active_adapter="default", x=x, result=result)
    assert (stock.dtype, ours.dtype, fallen.dtype) == (torch.float32, torch.bfloat16, torch.bfloat16)


@pytest.mark.parametrize("m", [0.0, 0.5], ids=["m0", "moved"])
@pytest.mark.parametrize("kind", [k for k in KINDS if k != "quantised"])
def test_rows_of_zeros(kind, m):
    """0 / 0 in stock PEFT: forward, merge and unmerge."""
    model, x = build(kind), inputs(kind)
    base, dora = layer(model).base_layer, layer(model)
    column = kind in ("embedding", "scaled", "Conv1D")
    with torch.no_grad():
        (base.weight[:, 1] if column else base.weight[1]).zero_()
        B = dora.lora_B["default"].weight if "default" in dora.lora_B else dora.lora_embedding_B["default"]
        B[1] = 0
        dora.lora_magnitude_vector["default"].weight.view(-1)[1] = m
    before = base.weight.detach().clone()
    with torch.no_grad():
        assert model(x).isnan().any()
        y = use_fdora(model)(x)
        assert y.isfinite().all()
        line = y.select(1 if kind.startswith("conv") else -1, 1)
        bias = getattr(base, "bias", None)
        assert_exact(line, torch.zeros_like(line) if bias is None else bias[1].expand_as(line))
        model.merge_adapter(safe_merge=True)
        assert_exact(model(x), y)
        if kind == "Conv1D" and models.old_peft():
            return
        model.unmerge_adapter()
        assert_exact(base.weight, before)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "quantised"])
def test_merges_are_pefts(kind):
    model, x = build(kind).eval(), inputs(kind)
    theirs = models.twin(model)
    want = theirs(x)
    use_fdora(model)
    with model.disable_adapter():
        assert_exact(model(x), layer(model).base_layer(x))
    for m in (model, theirs):
        m.merge_adapter()
    assert torch.equal(layer(model).base_layer.weight, layer(theirs).base_layer.weight)
    assert_exact(model(x), want)
    if kind == "Conv1D" and models.old_peft():
        return
    with model.disable_adapter():
        assert_exact(model(x), layer(model).base_layer(x))
    for m in (model, theirs):
        if m.base_model.model[0].merged:
            m.unmerge_adapter()
    assert_exact(model(x), want)
    assert_exact(model.merge_and_unload()(x), want)


@pytest.mark.parametrize("kind", ["embedding", "conv2d", "quantised", "Conv1D"])
def test_init_magnitude_of_every_kind(kind):
    model = use_fdora(build(kind))
    with torch.no_grad():
        init_magnitude(model)
        m = layer(model).lora_magnitude_vector["default"].weight.clone()
        stock = layer(model).lora_variant["default"].stock
        stock.init(layer(model), "default", config=model.peft_config["default"])
    assert_exact(m, layer(model).lora_magnitude_vector["default"].weight)


@pytest.mark.parametrize("kind", [k for k in KINDS if k != "quantised"])
@pytest.mark.parametrize("dropout", [0.0, 0.4])
def test_full_dora_is_stock_without_its_detach(kind, dropout, monkeypatch):
    """Gradients through the norm; in PEFT it is what a detach takes away."""
    dropout = dropout if inputs(kind).is_floating_point() else 0.0
    model, x = build(kind, dropout=dropout), inputs(kind)
    model.train()
    with monkeypatch.context() as patched:
        patched.setattr(torch.Tensor, "detach", lambda self: self)
        stock = run(model, x)
    use_fdora(model, detach=False)
    same(run(model, x), stock)
    same(run(copy.deepcopy(model), x), stock)
    with pytest.raises(AssertionError):
        same(run(use_fdora(model), x), stock)


def test_full_dora_is_one_node_of_every_call():
    """The short way of later calls, too."""
    model, x = use_fdora(build("linear"), detach=False), inputs("linear")
    first, second = model(x), model(x)
    for y in (first, second):
        behind = {type(f).__name__ for f, _ in y.grad_fn.next_functions if f is not None}
        assert behind == {"AccumulateGrad"}
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(map(torch.equal, *(torch.autograd.grad(y.sum(), trained) for y in (first, second))))


def test_a_transposed_weight_in_a_plain_linear():
    """PEFT corrects the flag for nn.Linear; a layer made by hand may have it."""
    model, x = build("linear"), inputs("linear")
    dora = layer(model)
    weight = dora.base_layer.weight
    dora.base_layer.weight = nn.Parameter(weight.detach().T.contiguous(), requires_grad=False)
    dora.base_layer.forward = lambda x: nn.functional.linear(x, dora.base_layer.weight.T, dora.base_layer.bias)
    dora.fan_in_fan_out = dora.lora_magnitude_vector["default"].fan_in_fan_out = True
    stock, ours = both(model, x)
    same(ours, stock)
    del dora.base_layer.forward
    assert calls.call_of(dora, x, "default", dora.lora_variant["default"]) == "a transposed base weight"


def test_a_wrong_input_is_the_base_layers_error():
    model, x = build("no_bias"), inputs("no_bias", torch.float32)
    with pytest.raises(RuntimeError) as stock:
        model(x)
    with pytest.raises(RuntimeError) as ours:
        use_fdora(model)(x)
    assert str(ours.value) == str(stock.value)
