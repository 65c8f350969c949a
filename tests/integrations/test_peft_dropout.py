"""use_fdora(dropout_mode="lora"): dropout of the adapter's input alone, on every path a layer can take."""

import copy
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from fdora import FdoraError
from fdora.eager.dropout import drop
from fdora.functional import group
from fdora.functional._seed import seed_tensor
from fdora.integrations._peft import calls
from fdora.integrations._peft import layer as layers
from fdora.integrations.peft import disable, enable, enabled, report, restore, use_fdora
from tests import reference
from tests.close import assert_exact
from tests.integrations import test_peft_vit as vit
from tests.integrations.models import KINDS, K, N, build, inputs, layer, path, run, same
from tests.integrations.test_peft_blocks import made, step

DROPPING = [kind for kind in KINDS if kind not in ("embedding", "scaled")]
P = 0.4


def without_B(model):
    """With B = 0 and g away from 1 only PEFT's meaning is random."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.zero_()
    return model


@pytest.fixture
def kernels_draw(monkeypatch):
    """As where kernels run, here on the eager backend: a layer with dropout is one call, whose mask follows a seed. Layers of
    one call draw theirs one by one, as they do alone."""
    monkeypatch.setattr(calls, "draws", lambda *_: True)
    monkeypatch.setattr(group, "drawn", lambda count, device: [seed_tensor("", None, device) for _ in range(count)])


def dense(module, kind):
    """W of one layer as a matrix, each output channel one row; and B A."""
    base, A, B = module.base_layer, module.lora_A["default"].weight, module.lora_B["default"].weight
    if kind.startswith("conv"):
        return base.weight.flatten(1), B.flatten(1) @ A.flatten(1)
    zero = base(torch.zeros(1, K, dtype=A.dtype))
    return (base(torch.eye(K, dtype=A.dtype)) - zero).T, B @ A


def truth(model, x, kind, dropped):
    """y = g (x W^T + s D(x) A^T B^T) + bias, from the parts of the layer, all in float64."""
    module = layer(model)
    s, m = module.scaling["default"], module.lora_magnitude_vector["default"].weight
    W, BA = dense(module, kind)
    along = (1, -1, *[1] * (x.dim() - 2)) if kind.startswith("conv") else (-1,)
    g = (m.flatten() / (W + s * BA).norm(dim=1).detach()).view(along)
    bias = 0 if module.base_layer.bias is None else module.base_layer.bias.view(along)
    lora = module.lora_B["default"](module.lora_A["default"](dropped))
    return g * (module.base_layer(x) - bias + s * lora) + bias


@pytest.mark.parametrize("kind", DROPPING)
def test_output_and_every_gradient_with_torchs_mask(kind):
    model, x = use_fdora(build(kind, dropout=P), dropout_mode="lora"), inputs(kind)
    got = run(model, x)
    same(got, run(model, x, f=lambda x: truth(model, x, kind, nn.functional.dropout(x, P))))
    assert path(model) == "composed" and not report(model)[0].fallbacks
    assert not torch.allclose(got["y"], run(use_fdora(model), x)["y"])  # as PEFT means it


@pytest.mark.parametrize("mode", ["lora", "peft"])
@pytest.mark.parametrize("detach", [True, False])
def test_output_and_every_gradient_in_one_call(detach, mode, kernels_draw):
    model, x = use_fdora(build("linear", dropout=P), dropout_mode=mode, detach=detach), inputs("linear")
    got = run(model, x, seed=3)
    assert path(model) == "fused"
    torch.manual_seed(3)
    seed, module = torch.randint(2**62, ()), layer(model)
    A, B, m = (part["default"].weight for part in (module.lora_A, module.lora_B, module.lora_magnitude_vector))
    W, bias = module.base_layer.weight, module.base_layer.bias

    def dropped(x):
        return drop(x.reshape(-1, x.shape[-1]), seed, P).reshape(x.shape)

    def formula(x, **how):
        c = None if detach else reference.norm(W, A, B, 1.5)
        return reference.dora(x, W, A, B, m, 1.5, bias, c=c, **how)

    same(got, run(model, x, f=lambda x: formula(x, dropped=dropped, mode=mode)))
    module.training = False  # its dropout still drops; PEFT asks the layer
    assert_exact(model(x), formula(x))


@pytest.mark.parametrize("kind", KINDS)
def test_evaluation_is_pefts(kind):
    model = build(kind, dtype=torch.float64, dropout=P).eval()
    x = inputs(kind)
    want = run(model, x)
    same(run(use_fdora(model, dropout_mode="lora"), x), want)


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("one_call", [False, True], ids=["torch's mask", "kernels' mask"])
def test_blocks_in_one_call_are_layer_by_layer(one_call, checkpointing, monkeypatch):
    """The same masks fused, unfused and when a checkpoint computes a block again."""
    monkeypatch.setattr(calls, "draws", lambda *_: one_call)
    model, runs = made(dropout=P).train(), []
    for fuse, again in ((False, False), (True, checkpointing)):
        use_fdora(model, fuse=fuse, dropout_mode="lora")
        if again:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        torch.manual_seed(5)
        runs.append(step(model))
    for a, b in zip(*runs, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=3e-6 * b.abs().max().item())
    torch.manual_seed(6)
    assert not torch.allclose(step(model)[0], runs[0][0], rtol=1e-3)


def other_meaning(variant, dropout):
    variant.dropout_mode = "peft"


def other_p(variant, dropout):
    dropout.p = P / 2


@pytest.mark.parametrize("change", [other_meaning, other_p])
def test_layers_of_two_dropouts_share_no_call(change, kernels_draw):
    model = use_fdora(made(dropout=P).train(), fuse=True, dropout_mode="lora")
    attention, x = model.base_model.model.model.layers[0].self_attn, torch.randn(5, 64)
    attention.q_proj(x)
    assert attention.q_proj.lora_variant["default"].shared.waiting is not None
    change(attention.v_proj.lora_variant["default"], attention.v_proj.lora_dropout["default"])
    attention.q_proj(x)
    assert attention.q_proj.lora_variant["default"].shared.waiting is None


@pytest.mark.parametrize("family", ["dinov2_swiglu", "timm"])
def test_the_ends_of_vision_transformers_stay_in_the_call(family, kernels_draw, monkeypatch):
    taken, stock = [], vit.Tail.taken
    monkeypatch.setattr(vit.Tail, "taken", lambda self: taken.append(self) or stock(self))
    model, runs = vit.made(family, lora_dropout=P).train(), []
    for fuse, mode in ((False, "lora"), (True, "lora"), (True, "peft")):
        use_fdora(model, fuse=fuse, dropout_mode=mode)
        torch.manual_seed(5)
        runs.append(vit.step(model))
        assert len(taken) == (2 * vit.LAYERS if fuse else 0)  # PEFT's dropout reaches what the scale is of
    vit.close(runs[1], runs[0])


def test_several_active_adapters():
    """Composed one after the other, each on the base layer's output; without B nothing is random."""
    model, x = build("linear", dropout=P), inputs("linear")
    config = copy.deepcopy(model.peft_config["default"])
    config.r = 2
    model.add_adapter("other", config)
    model.base_model.set_adapter(["default", "other"])
    want = use_fdora(without_B(model), dropout_mode="lora").eval()(x)
    assert_exact(model.train()(x).detach(), want.detach())


def test_where_pefts_code_runs_the_report_says_so():
    model, x = use_fdora(build("linear", dropout=P), dropout_mode="lora"), inputs("linear")
    layer(model).scaling["default"] = torch.tensor(1.5)
    model(x)
    model.eval()(x)
    why = "a scaling that is a tensor (prepare_model_for_compiled_hotswap)"
    (row,) = report(model)
    assert row.fallbacks == {f"{why}, and so with dropout as PEFT means it": 1, why: 1}


def test_the_report_names_it():
    model, x = use_fdora(build("linear", dropout=P), dropout_mode="lora"), inputs("linear")
    model(x)
    (row,) = report(model)
    assert (row.p, row.dropout_mode) == (P, "lora")
    ours = "dropout 0.4 in 1 of 1 layers, of the adapter's input alone (dropout_mode='lora'): one product with W"
    assert ours in str(report(model)) and ours in report(model).explain()
    use_fdora(model)
    theirs = "dropout 0.4 in 1 of 1 layers, as PEFT means it: a second product with W. dropout_mode='lora' has one"
    assert theirs in str(report(model)) and theirs in report(model).explain()
    assert "dropout" not in str(report(use_fdora(build("linear")))) and "dropout" not in str(report(restore(model)))
    assert report(use_fdora(build("embedding", dropout=P)))[0].p == 0


def test_explain_plans_one_product():
    pytest.importorskip("triton", reason="plans need Triton; `make test` installs it")
    model = use_fdora(build("linear", dtype=torch.bfloat16, dropout=P), dropout_mode="lora").train()
    one = report(model).explain(tokens=512, gpu="h200")
    two = report(use_fdora(model)).explain(tokens=512, gpu="h200")
    flops = [float(text.splitlines()[-1].split(": ")[1].split(" GFLOP")[0]) for text in (one, two)]
    assert flops[1] - flops[0] == pytest.approx(2 * 2 * 512 * N * K / 1e9, rel=0.1)  # in forward, and in backward for x


def test_it_lasts_until_the_next_use_fdora():
    model, x = use_fdora(build("linear", dropout=P), dropout_mode="lora"), inputs("linear")
    want = run(model, x)["y"]
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert_exact(run(twin, x)["y"], want)
    stock = run(restore(model), x)["y"]
    assert not torch.allclose(stock, want)
    assert_exact(run(use_fdora(model), x)["y"], stock)


def test_for_models_to_come():
    def new():
        torch.manual_seed(0)
        config = LoraConfig(r=4, lora_alpha=6, target_modules=["0"], use_dora=True, lora_dropout=P)
        return get_peft_model(nn.Sequential(nn.Linear(K, N)), config)

    def mode(model):
        return layer(model).lora_variant["default"].dropout_mode

    with enabled(dropout_mode="lora"):
        first = new()
        with enabled():
            assert mode(new()) == "peft"
        assert mode(new()) == mode(first) == "lora"
    try:
        enable("lora")
        second = new()
    finally:
        disable()
    with enabled():
        assert (mode(first), mode(second), mode(new())) == ("lora", "lora", "peft")


def test_another_word():
    model = build("linear", dropout=P)
    message = (
        r"fdora.{}: `dropout_mode` must be 'peft' or 'lora', got 'both'. "
        r"'peft' is PEFT's lora_dropout; 'lora' drops the adapter's input alone."
    )
    with pytest.raises(FdoraError) as error:
        use_fdora(model, dropout_mode="both")
    assert str(error.value) == message.format("use_fdora")
    assert not isinstance(layer(model), layers.Layer)  # nothing was changed
    with pytest.raises(FdoraError) as error:
        enable("both")
    assert str(error.value) == message.format("enable")
