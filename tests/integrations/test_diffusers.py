"""``use_fdora`` on models of diffusers, tiny and with random weights, against PEFT's own DoRA on them."""

import copy

import pytest
import torch

pytest.importorskip("diffusers", reason="its models; `make test` installs it")

from fdora.integrations.peft import report, restore, use_fdora
from tests.integrations.diffusion import MODELS, inputs, made, step


def close(got, want):
    assert got.keys() == want.keys()
    for name, truth in want.items():
        size = truth.abs().max().item()
        torch.testing.assert_close(got[name], truth, rtol=1e-9, atol=1e-9 * size, msg=lambda m, name=name: f"{name}: {m}")


def state_of(model):
    return {name: t.clone() for name, t in model.state_dict().items()}


@pytest.mark.parametrize("name", MODELS)
def test_the_model_stays_the_same(name):
    model = made(name)
    stock, classes, before = step(model), [type(m) for m in model.modules()], state_of(model)
    assert len(stock) > 24 and use_fdora(model) is model
    close(step(model), stock)
    assert all((row.fused, row.composed, row.fallbacks) == (1, 0, {}) for row in report(model))
    close(step(copy.deepcopy(model)), stock)
    after = model.state_dict()
    assert list(after) == list(before) and all(torch.equal(after[key], t) for key, t in before.items())
    restore(model)
    assert [type(m) for m in model.modules()] == classes
    assert all(torch.equal(t, stock[key]) for key, t in step(model).items())


def forward(model, **more):
    with torch.no_grad():
        return {"y": model(**inputs(model), **more).sample}


def test_what_diffusers_does_with_an_adapter(tmp_path):
    """Its scale, weights, switches, merge, and files, with fdora as without."""
    model, other = made("flux2"), use_fdora(made("flux2"))

    def both(do=lambda model: None, run=step, **more):
        want, got = ((do(m), run(m, **more))[1] for m in (model, other))
        close(got, want)
        return want["y"]

    whole = both()
    halved = both(joint_attention_kwargs={"scale": 0.5})
    assert torch.equal(both(lambda m: m.set_adapters("default", 0.5)), halved)
    both(lambda m: m.set_adapters("default", 1.0))
    without = both(lambda m: m.disable_adapters(), forward)
    both(lambda m: m.enable_adapters())
    merged = both(lambda m: m.fuse_lora(), forward)
    torch.testing.assert_close(merged, whole)
    assert min((y - whole).norm() for y in (halved, without)) > 0.001 * whole.norm()
    both(lambda m: m.unfuse_lora())
    other.save_lora_adapter(tmp_path)
    for m in (model, other):
        m.delete_adapters("default")
    torch.testing.assert_close(both(lambda m: m.load_lora_adapter(tmp_path, prefix=None, use_safetensors=True), forward), whole)
    use_fdora(other)
    both(run=forward)
    assert all((row.fused, row.fallbacks) == (1, {}) for row in report(other))
