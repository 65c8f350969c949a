"""A layer's call is one op to Dynamo: guards hold what may change about the layer, and nothing of how fdora computes."""

import pytest
import torch
from torch import nn

from tests import device
from tests.triton.changes import adapted, moved
from tests.triton.marks import HALF, INTERPRETED, needs_kernels  # noqa: F401

pytestmark = [needs_kernels, pytest.mark.usefixtures("kernels_everywhere")]


@pytest.fixture
def model():
    """One layer with two DoRA adapters of PEFT, away from their start."""
    from fdora.integrations.peft import use_fdora

    torch.manual_seed(0)
    made = adapted(nn.Sequential(nn.Linear(32, 48)), ["0"], lora_dropout=0.5)
    made.add_adapter("other", made.peft_config["default"])
    return use_fdora(moved(made)).eval()


def compiled(model):
    def run(x):
        return model(x)

    return run, torch.compile(run, backend="aot_eager", fullgraph=True)


def sources(manager):
    """What is guarded, by name."""
    return [manager.get_source(), *(each for child in manager.get_child_managers() for each in sources(child))]


def test_guards_are_of_the_layer_alone(model):
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    run, fast = compiled(model.base_model.model[0])
    fast(torch.randn(5, 32, device=device.NAME, dtype=HALF[0], requires_grad=True))
    (entry,) = _debug_get_cache_entry_list(run.__code__)
    found = sources(entry.guard_manager.root)
    assert any("lora_variant" in source for source in found)
    inner = ("_check", "autograd", "autograd_dot_linear", "functional_dot_linear", "functional_dot_group", "triton")
    assert not [source for source in found if any(f"__import_fdora_dot_{name}" in source for name in inner)]


def test_torchs_caches_know_which_fdora_it_was(model):
    """They know such an op by its arguments; what it is made of is code."""
    from fdora.functional.opaque import digest

    found = []

    def backend(graph, inputs):
        found.extend(node.args[-1] for node in graph.graph.nodes if "fdora.linears" in str(node.target))
        return graph.forward

    torch.compile(model.base_model.model[0], backend=backend)(torch.randn(5, 32, device=device.NAME, dtype=HALF[0]))
    assert found == [digest()]


CHANGES = {  # no hooks: Dynamo does not look for later ones, unless torch._dynamo.config.skip_nnmodule_hook_guards is False
    "another adapter": lambda model, layer: model.set_adapter("other"),
    "both adapters": lambda model, layer: model.base_model.set_adapter(["default", "other"]),
    "none": lambda model, layer: layer.enable_adapters(False),
    "merged": lambda model, layer: (layer.merge(), layer.base_layer.weight.mul_(2)),
    "scaling": lambda model, layer: layer.scaling.update(default=0.25),
    "a bias": lambda model, layer: setattr(layer.base_layer, "bias", None),
    "another weight": lambda model, layer: setattr(
        layer.base_layer, "weight", nn.Parameter(2 * layer.base_layer.weight, False)
    ),
    "a weight in place": lambda model, layer: layer.base_layer.weight.mul_(2),
    "A in place": lambda model, layer: layer.lora_A["default"].weight.data.mul_(2),
    "another B": lambda model, layer: setattr(
        layer.lora_B["default"], "weight", nn.Parameter(2 * layer.lora_B["default"].weight)
    ),
    "m in place": lambda model, layer: layer.lora_magnitude_vector["default"].weight.data.mul_(2),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_is_seen(model, name):
    run, fast = compiled(model)
    layer = model.base_model.model[0]
    x = torch.randn(5, 32, device=device.NAME, dtype=HALF[0])
    before = run(x)
    torch.testing.assert_close(fast(x), before, rtol=1e-2, atol=1e-2)
    with torch.no_grad():
        CHANGES[name](model, layer)
    want = run(x)
    assert not torch.allclose(want, before, rtol=2e-2, atol=2e-2)
    torch.testing.assert_close(fast(x), want, rtol=1e-2, atol=1e-2)


def test_dropout_is_seen(model):
    _, fast = compiled(model)
    x = torch.randn(5, 32, device=device.NAME, dtype=HALF[0])
    before = fast(x)
    model.train()
    first, second = fast(x), fast(x)
    assert not torch.allclose(first, before, atol=1e-2) and not torch.allclose(first, second, atol=1e-2)
    model.base_model.model[0].lora_dropout["default"].p = 0.0
    torch.testing.assert_close(fast(x), before, rtol=1e-2, atol=1e-2)


def test_another_backend_is_seen(model, monkeypatch):
    from fdora import _dispatch
    from fdora.triton import linear

    _, fast = compiled(model)
    x = torch.randn(5, 32, device=device.NAME, dtype=HALF[0])
    before, calls = fast(x), []
    monkeypatch.setattr(linear, "plan_for", lambda *args: calls.append(args))
    monkeypatch.setattr(_dispatch, "_forced", "eager")
    torch.testing.assert_close(fast(x), before, rtol=1e-2, atol=1e-2)
    assert not calls
