"""use_fdora(fuse=True): q, k, v and the gated MLP of transformers' blocks in one call each."""

import copy
import pickle

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import GemmaConfig, GemmaForCausalLM, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from fdora import FdoraError
from fdora.integrations._peft import linear
from fdora.integrations._peft.blocks import MLP, Mlp
from fdora.integrations.peft import report, restore, use_fdora

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", *MLP]
FAMILIES = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen3": (Qwen3ForCausalLM, Qwen3Config)}
FAMILIES["gemma"] = (GemmaForCausalLM, GemmaConfig)
IDS = torch.arange(24).view(2, 12) % 50


def made(family="llama", targets=TARGETS, dropout=0.0, **config):
    """Two layers with adapters that have moved."""
    torch.manual_seed(0)
    model, settings = FAMILIES[family]
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=2, vocab_size=50, head_dim=16)
    heads = dict(num_attention_heads=4, num_key_value_heads=2)
    model = model(settings(**sizes, **heads, **config))
    model = get_peft_model(model, LoraConfig(r=4, use_dora=True, target_modules=targets, lora_dropout=dropout))
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
            if "magnitude" in name:
                p.mul_(1 + 0.05 * torch.randn_like(p))
    return model


def step(model):
    model.zero_grad()
    out = model(input_ids=IDS, labels=IDS)
    out.loss.backward()
    return [out.logits.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def close(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=3e-6 * b.abs().max().item())


def kept(model):
    """Bytes that autograd keeps for backward, each piece of memory once."""
    found = {}

    def keep(t):
        found[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        out = model(input_ids=IDS.repeat(8, 1)).logits
    del out
    return sum(found.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_stays_the_same(family):
    model = made(family)
    stock, classes = step(model), [type(m) for m in model.modules()]
    use_fdora(model, fuse=True)
    assert sum(isinstance(m, Mlp) for m in model.modules()) == 2
    close(step(model), stock)
    assert [(row.fused, row.composed, row.fallbacks) for row in report(model)] == [(1, 0, {})] * 14
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        close(step(twin), stock)
    restore(model)
    assert [type(m) for m in model.modules()] == classes
    assert all(torch.equal(a, b) for a, b in zip(step(model), stock, strict=True))


def test_an_mlp_keeps_half():
    model = made()
    apart = kept(use_fdora(model))
    assert kept(use_fdora(model, fuse=True)) <= apart - 2 * 2 * 192 * 96 * 4  # of each layer act(gate) and its product with up
    parts = [*use_fdora(model).modules()]  # fuse=False takes it back
    assert not any(isinstance(m, Mlp) for m in parts)
    assert not any(v.shared for m in parts for v in getattr(m, "lora_variant", {}).values())


def test_with_checkpointing():
    model = made()
    stock = step(model)
    use_fdora(model, fuse=True)
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    close(step(model), stock)


def test_under_a_compiler():
    model = made()
    stock = step(model)
    use_fdora(model, fuse=True)
    torch._dynamo.reset()
    close(step(torch.compile(model, backend="aot_eager", fullgraph=True)), stock)


def test_what_is_not_served_runs_one_by_one():
    model = made()
    want = step(model)
    use_fdora(model, fuse=True)
    layer = model.base_model.model.model.layers[0]
    seen = []
    handle = layer.mlp.up_proj.register_forward_hook(lambda *_: seen.append("up"))
    handle_k = layer.self_attn.k_proj.register_forward_hook(lambda *_: seen.append("k"))
    close(step(model), want)
    assert seen == ["k", "up"]
    handle.remove(), handle_k.remove()
    with model.disable_adapter():
        base = model(input_ids=IDS).logits
    plain = made(targets=["q_proj"])
    with plain.disable_adapter():
        torch.testing.assert_close(base, plain(input_ids=IDS).logits)
    model.merge_adapter()
    torch.testing.assert_close(model(input_ids=IDS).logits, want[0], rtol=1e-4, atol=1e-5)
    model.unmerge_adapter()
    close(step(model), want)


def test_a_value_that_waits_belongs_to_one_x():
    """k and v called on another x, twice, or out of order, and with gradients switched in between."""
    model = use_fdora(made(), fuse=True)
    q, k, v = (getattr(model.base_model.model.model.layers[0].self_attn, n) for n in ("q_proj", "k_proj", "v_proj"))
    x, other = torch.randn(3, 64), torch.randn(3, 64)
    want = {name: [layer(t).detach() for t in (other.clone(), x.clone())] for name, layer in (("k", k), ("v", v))}
    q(x)
    torch.testing.assert_close(k(other), want["k"][0])
    torch.testing.assert_close(v(x), want["v"][1])
    q(x)
    torch.testing.assert_close(k(x), want["k"][1])
    torch.testing.assert_close(k(x), want["k"][1])
    with torch.no_grad():
        q(x)
    assert k(x).requires_grad
    q(x), k(x), v(x)
    assert all(layer.lora_variant["default"].shared.waiting is None for layer in (q, k, v))
    replica = k._replicate_for_data_parallel()  # it shares the variant, and is none of the three
    replica._modules = dict(k._modules)
    torch.testing.assert_close(replica(x), want["k"][1])


def test_dropout_draws_one_mask_for_each_layer_from_torchs_generator():
    model = made(dropout=0.5).train()
    use_fdora(model, fuse=True)
    runs = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        runs.append(step(model)[0])
    assert torch.equal(runs[0], runs[1]) and not torch.equal(runs[0], runs[2])


def test_dropout_that_kernels_draw_is_pefts(monkeypatch):
    """With B = 0 and g away from 1 only PEFT's meaning is random. Layers with another p run alone."""
    monkeypatch.setattr(linear, "draws", lambda *_: True)
    model = made(dropout=0.5).train()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B" in name:
                p.zero_()
    use_fdora(model, fuse=True)
    block = model.base_model.model.model.layers[0]
    x = torch.randn(5, 64)
    for f in (block.mlp, block.self_attn.q_proj):
        assert not torch.equal(f(x), f(x))
    assert block.self_attn.q_proj.lora_variant["default"].shared.waiting is not None
    block.self_attn.v_proj.lora_dropout["default"].p = 0.25
    block.self_attn.q_proj(x)
    assert block.self_attn.q_proj.lora_variant["default"].shared.waiting is None


class Cross(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x, memory):
        return self.q_proj(x) @ self.k_proj(memory).T @ self.v_proj(memory)


def test_another_forward_is_left_alone(monkeypatch):
    model = made()
    mlp = type(model.base_model.model.model.layers[0].mlp)

    def patched(self, x):
        return 2 * self.down_proj(self.act_fn(self.gate_proj(x)) + self.up_proj(x))

    monkeypatch.setattr(mlp, "forward", patched)
    want = step(model)
    use_fdora(model, fuse=True)  # q, k, v are there
    assert not any(isinstance(m, Mlp) for m in model.modules())
    close(step(model), want)


def test_no_block_is_an_error():
    model = get_peft_model(nn.Sequential(nn.Linear(4, 4)), LoraConfig(r=2, use_dora=True, target_modules=["0"]))
    with pytest.raises(FdoraError, match="`fuse` must be False for a model without blocks it knows"):
        use_fdora(model, fuse=True)
    model = get_peft_model(Cross(), LoraConfig(r=2, use_dora=True, target_modules=["q_proj", "k_proj", "v_proj"]))
    with pytest.raises(FdoraError, match="`fuse` must be False"):
        use_fdora(model, fuse=True)
    assert sum(isinstance(m, Mlp) for m in use_fdora(made(targets=["q_proj", *MLP]), fuse=True).modules()) == 2
