"""What torchtune says of its DoRA models, asked of each family it can build; nothing here knows fdora.

The wheel of torchtune has no tests in it, and there is no source archive: these stand in for them, on its own builders, its
own layer's documented start, its merge, its adapter_params and its disable_adapter.
"""

import importlib
import inspect

import pytest
import torch
from torchtune.modules import peft

FAMILIES = ("gemma", "gemma2", "llama2", "llama3", "llama3_1", "llama3_2", "mistral", "phi3", "qwen2")
SIZES = dict(
    vocab_size=40, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, embed_dim=32, intermediate_dim=48, max_seq_len=16
)
LORA = dict(
    lora_attn_modules=["q_proj", "k_proj", "v_proj", "output_proj"], apply_lora_to_mlp=True, lora_rank=4, lora_alpha=8.0
)


def build(family, dora=True, **more):
    builders = importlib.import_module(f"torchtune.models.{family}._component_builders")
    builder = getattr(builders, ("lora_" if dora else "") + family)
    wanted = SIZES | (LORA | {"use_dora": True} if dora else {}) | more
    torch.manual_seed(0)
    return builder(**{k: v for k, v in wanted.items() if k in inspect.signature(builder).parameters})


def trained(family, **more):
    model = build(family, **more)
    peft.set_trainable_params(model, peft.get_adapter_params(model))
    for name, p in model.named_parameters():
        if "lora_b" in name or "bias" in name:
            torch.nn.init.normal_(p, std=0.1)
    layers = [m for m in model.modules() if isinstance(m, peft.DoRALinear)]
    for layer in layers:
        layer.initialize_dora_magnitude()
        layer.magnitude.data *= 1 + 0.1 * torch.randn_like(layer.magnitude)
    return model, layers


def tokens(n=9):
    return torch.randint(40, (2, n), generator=torch.Generator().manual_seed(1))


def formula(layer, x):
    """docs of DoRALinear, with its bias inside g and the norm detached."""
    V = layer.weight + layer.scaling * layer.lora_b.weight @ layer.lora_a.weight
    inner = x @ layer.weight.T + layer.scaling * x @ layer.lora_a.weight.T @ layer.lora_b.weight.T
    inner = inner if layer.bias is None else inner + layer.bias
    return layer.magnitude / V.detach().norm(dim=1) * inner


@pytest.fixture(params=FAMILIES)
def family(request):
    return request.param


def test_it_starts_as_the_base_model(family):
    model, base = build(family), build(family, dora=False)
    peft.set_trainable_params(model, peft.get_adapter_params(model))
    for layer in (m for m in model.modules() if isinstance(m, peft.DoRALinear)):
        layer.initialize_dora_magnitude()
    own = {k: v for k, v in model.state_dict().items() if "lora" not in k and "magnitude" not in k}
    base.load_state_dict(own)
    torch.testing.assert_close(model(tokens()), base(tokens()), rtol=1e-4, atol=1e-4)


def test_each_layer_is_its_formula_with_every_gradient(family):
    _, layers = trained(family)
    assert len(layers) == 14
    for layer in layers[:7]:
        x = torch.randn(2, 5, layer.in_dim, requires_grad=True)
        leaves = [x, *(p for p in layer.parameters() if p.requires_grad)]
        dy = torch.randn(2, 5, layer.out_dim)
        y, want = layer(x), formula(layer, x)
        torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-5)
        for a, b in zip(torch.autograd.grad(y, leaves, dy), torch.autograd.grad(want, leaves, dy), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_the_merged_checkpoint_is_the_model(family):
    """Of layers without bias: torchtune's merge leaves the bias as it is, its forward multiplies it by g."""
    model, _ = trained(family)
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            p.data.zero_()
    merged = peft.get_merged_lora_ckpt({k: v.clone() for k, v in model.state_dict().items()}, rank=4, alpha=8.0)
    base = build(family, dora=False)
    base.load_state_dict(merged)
    torch.testing.assert_close(model(tokens()), base(tokens()), rtol=1e-4, atol=1e-4)


def test_disabled_is_the_base_model(family):
    model, _ = trained(family)
    base = build(family, dora=False)
    base.load_state_dict({k: v for k, v in model.state_dict().items() if "lora" not in k and "magnitude" not in k})
    adapted = model(tokens())
    with peft.disable_adapter(model):
        assert torch.equal(model(tokens()), base(tokens()))
    assert torch.equal(model(tokens()), adapted) and (adapted - base(tokens())).abs().max() > 1e-3


def test_the_adapter_is_saved_and_loaded(family):
    model, _ = trained(family)
    adapter = peft.get_adapter_state_dict(model.state_dict())
    assert len(adapter) == 14 * 3 == len(peft.get_adapter_params(model))
    fresh = build(family)
    found = fresh.load_state_dict({k: v for k, v in model.state_dict().items() if k not in adapter}, strict=False)
    loaded = fresh.load_state_dict(adapter, strict=False)
    peft.validate_missing_and_unexpected_for_lora(
        lora_attn_modules=LORA["lora_attn_modules"],
        apply_lora_to_mlp=True,
        apply_lora_to_output=False,
        base_missing=found.missing_keys,
        base_unexpected=found.unexpected_keys,
        lora_missing=loaded.missing_keys,
        lora_unexpected=loaded.unexpected_keys,
    )
    peft.set_trainable_params(fresh, peft.get_adapter_params(fresh))
    torch.testing.assert_close(fresh(tokens()), model(tokens()))


@pytest.mark.parametrize("dropout", [0.0, 0.2])
def test_it_trains(family, dropout):
    """A sequence by heart, with checkpointing, dropout and fused AdamW."""
    model, _ = trained(family, lora_dropout=dropout)
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer, data, losses = torch.optim.AdamW(params, lr=2e-2, fused=True), tokens(), []
    for _ in range(15):
        logits = torch.utils.checkpoint.checkpoint(model, data[:, :-1], use_reentrant=False)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), data[:, 1:].flatten())
        loss.backward()
        assert all(p.grad is not None and p.grad.isfinite().all() for p in params)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < 0.7 * losses[0]


def test_a_quantised_base():
    model, layers = trained("llama3", quantize_base=True, embed_dim=128, intermediate_dim=256, num_kv_heads=4)
    assert all(layer.weight.__class__.__name__ == "NF4Tensor" for layer in layers)
    model(tokens()).square().mean().backward()
    assert all(p.grad is not None and p.grad.norm() > 0 for layer in layers for p in (layer.magnitude, layer.lora_b.weight))
