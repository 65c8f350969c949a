"""A layer that has run the short way, and is another by the next call: it does what one does that was so from the start."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from fdora.integrations.peft import report, use_fdora
from tests import device
from tests.close import rel_l2


def made():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32, bias=False))  # float32 beside a bias is PEFT's own on a CPU
    model = model.to(device.NAME)
    model = get_peft_model(model, LoraConfig(r=4, target_modules=["0"], use_dora=True, init_lora_weights=False))
    return model.train()


def layer_of(model):
    return model.base_model.model[0]


def doubled(module, args, output):
    return 2 * output


def swapped(model):
    layer = layer_of(model)
    layer.lora_A["default"] = nn.Linear(24, 4, bias=False, device=device.NAME)
    torch.nn.init.constant_(layer.lora_A["default"].weight, 0.1)


def dropping(model):
    layer_of(model).lora_dropout["default"] = nn.Dropout(0.5)


CHANGES = {
    "a hook on A": lambda model: layer_of(model).lora_A["default"].register_forward_hook(doubled),
    "a hook on the base": lambda model: layer_of(model).base_layer.register_forward_hook(doubled),
    "an A of its own forward": lambda model: setattr(layer_of(model).lora_A["default"], "forward", lambda x: x[..., :4]),
    "another A": swapped,
    "switched off": lambda model: layer_of(model).enable_adapters(False),
    "merged": lambda model: layer_of(model).merge(),
    "another scale": lambda model: layer_of(model).set_scale("default", 3),
    "a scale that is whole": lambda model: layer_of(model).scaling.update(default=5),
    "another base weight": lambda model: layer_of(model).base_layer.weight.detach().mul_(1.5),
    "a bias": lambda model: setattr(layer_of(model).base_layer, "bias", nn.Parameter(torch.ones(32, device=device.NAME))),
    "a base that is trained": lambda model: layer_of(model).base_layer.weight.requires_grad_(),
    "dropout in eval": lambda model: (dropping(model), model.eval()),
    "dropout": dropping,
    "a transposed weight": lambda model: (
        setattr(layer_of(model).base_layer, "weight", nn.Parameter(layer_of(model).base_layer.weight.detach().T.contiguous())),
        setattr(layer_of(model), "fan_in_fan_out", True),
    ),
}


# PEFT's norm is of an identity matrix sent through A and its hooks, ours of the weights (docs/peft.md).
OF_A = ("a hook on A", "an A of its own forward")


def run(model, x):
    torch.manual_seed(1)
    try:
        y = model(x)
        W = layer_of(model).base_layer.weight
        return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, W] if W.requires_grad else [x])]
    except RuntimeError:  # a transposed weight under nn.Linear: as PEFT's
        return None


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_between_two_calls_is_seen(change):
    one = made()
    stock = copy.deepcopy(one)
    fresh, steady = use_fdora(copy.deepcopy(one)), use_fdora(one)
    x = torch.randn(5, 24, device=device.NAME, requires_grad=True)
    before = [run(steady, x) for _ in range(3)][-1]
    assert report(steady)[0].fused == 3  # else this test is of another way
    for model in (stock, fresh, steady):
        CHANGES[change](model)
    wanted, got = run(fresh, x), run(steady, x)
    # On a GPU dropout's mask is drawn inside of the kernels, another one than torch's (docs/semantics.md).
    if change not in OF_A and (change != "dropout" or device.NAME == "cpu"):
        for a, b in zip(run(stock, x) or (), got or (), strict=True):  # what both of ours might get wrong together
            assert rel_l2(b, a) < 2e-5
    assert (wanted is None) == (got is None) == (change == "a transposed weight")
    for a, b in zip(wanted or (), got or (), strict=True):
        # On a GPU the one has its norm from the model's launch, the other its own, which adds up in another order.
        assert torch.equal(a, b) if device.NAME == "cpu" else rel_l2(a, b) < 1e-6
    if change not in ("a base that is trained", "dropout in eval", "a transposed weight"):
        assert not torch.equal(got[0], before[0])


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
def test_under_autocast_and_after_it(half):
    stock = made()
    mine = use_fdora(copy.deepcopy(stock))
    x = torch.randn(5, 24, device=device.NAME, requires_grad=True)
    for enabled in (False, True, False):
        with torch.autocast(device.NAME, half, enabled=enabled):
            wanted, got, fresh = run(stock, x), run(mine, x), run(use_fdora(copy.deepcopy(stock)), x)
        assert got[0].dtype == wanted[0].dtype
        # On a GPU norms are the model's launch's in the one, and a layer's own in the other.
        assert all(map(torch.equal, got, fresh)) or device.NAME != "cpu"
        assert rel_l2(got[0], wanted[0]) < (2e-2 if enabled else 2e-5)


def test_a_scale_of_another_adapter_that_is_a_tensor():
    stock = made()
    layer_of(stock).scaling["other"] = torch.ones(2)
    mine = use_fdora(copy.deepcopy(stock))
    x = torch.randn(5, 24, device=device.NAME, requires_grad=True)
    for _ in range(3):
        for a, b in zip(run(stock, x), run(mine, x), strict=True):
            assert rel_l2(b, a) < 2e-5
    variant = layer_of(mine).lora_variant["default"]
    assert variant.route is None and report(mine)[0].fused == 3


def test_two_active_adapters_of_which_a_layer_has_the_second():
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(24, 24, bias=False), nn.Linear(24, 32, bias=False)).to(device.NAME)
    how = {"r": 4, "use_dora": True, "init_lora_weights": False}
    stock = get_peft_model(base, LoraConfig(target_modules=["0"], **how))
    stock.add_adapter("other", LoraConfig(target_modules=["1"], **how))
    stock.base_model.set_adapter(["default", "other"])
    mine = use_fdora(copy.deepcopy(stock))
    x = torch.randn(5, 24, device=device.NAME)
    for _ in range(2):
        assert rel_l2(mine(x), stock(x)) < 2e-5
    assert [row.fused for row in report(mine)] == [2, 2]
