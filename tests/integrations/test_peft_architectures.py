"""use_fdora(fuse=True) on the architectures of transformers: tiny, random, float64; logits and all gradients as stock PEFT's."""

import copy
import pickle

import pytest
import torch
import transformers
from peft import LoraConfig, get_peft_model

from fdora import FdoraError
from fdora.integrations._peft.blocks import Mlp
from fdora.integrations.peft import report, restore, use_fdora
from tests.integrations.models import perturb, same

SIZES = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, vocab_size=50, num_attention_heads=4)
SIZES |= dict(num_key_value_heads=2, head_dim=8, pad_token_id=0, bos_token_id=1, eos_token_id=2)
IDS = torch.arange(24).view(2, 12) % 47 + 3
BOTH, NO_MLP, NEITHER = (2, 2), (0, 2), (0, 0)  # in two layers: MLPs, groups of q, k, v

# name: what is fused, then what the config needs beside SIZES. keep_inner: the model writes over outputs of its layers.
CASES = {
    "Llama": (BOTH, {"mlp_bias": True, "attention_bias": True}),
    "Mistral": (BOTH, {}),
    "Ministral": (BOTH, {}),
    "Qwen2": (BOTH, {}),
    "Qwen3": (BOTH, {}),
    "Gemma": (BOTH, {}),
    "Gemma2": (BOTH, {}),
    "Gemma3": (BOTH, {"config": "Gemma3TextConfig"}),
    "VaultGemma": (BOTH, {}),
    "Phi": (NO_MLP, {"resid_pdrop": 0.3}),
    "Phi3": (NEITHER, {"resid_pdrop": 0.3}),
    "Olmo": (BOTH, {"clip_qkv": 0.5, "keep_inner": True}),
    "Olmo2": (BOTH, {}),
    "Olmo3": (BOTH, {}),
    "Granite": (BOTH, {"residual_multiplier": 0.5}),
    "Cohere": (BOTH, {"use_qk_norm": True}),
    "Cohere2": (BOTH, {}),
    "StableLm": (BOTH, {"hidden_dropout": 0.3}),
    "Starcoder2": (NO_MLP, {"residual_dropout": 0.3}),
    "SeedOss": (NO_MLP, {"residual_dropout": 0.3}),
    "SmolLM3": (BOTH, {}),
    "Glm": (NO_MLP, {}),
    "Glm4": (NO_MLP, {}),
    "Ernie4_5": (BOTH, {}),
    "Exaone4": (BOTH, {}),
    "Helium": (BOTH, {}),
    "Nemotron": (NO_MLP, {}),
    "Persimmon": (NEITHER, {}),
    "HunYuanDenseV1": (BOTH, {}),
    "Arcee": (NO_MLP, {}),
    "Apertus": (NO_MLP, {}),
    "BitNet": (NO_MLP, {}),
    "DiffLlama": (BOTH, {}),
    "Doge": (BOTH, {"hidden_dropout": 0.3}),
    "FalconH1": (
        NO_MLP,
        {
            "mamba_d_ssm": 32,
            "mamba_n_heads": 4,
            "mamba_d_head": 8,
            "mamba_d_state": 8,
            "targets": ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "down_proj"],
        },
    ),
    "RecurrentGemma": ((0, 1), {"lru_width": 32, "attention_window_size": 8, "block_types": ["recurrent", "attention"]}),
    "OPT": (NO_MLP, {"ffn_dim": 48, "word_embed_proj_dim": 32, "dropout": 0.3}),
    "Doge, experts": (NO_MLP, {"is_moe": True, "num_experts": 4, "num_experts_per_tok": 2}),
    "Gemma3n": (
        NEITHER,
        {
            "config": "Gemma3nTextConfig",
            "vocab_size_per_layer_input": 50,
            "hidden_size_per_layer_input": 8,
            "laurel_rank": 4,
            "altup_num_inputs": 2,
            "num_kv_shared_layers": 0,
            "layer_types": ["sliding_attention", "full_attention"],
            "activation_sparsity_pattern": [0.5, 0.0],
            "keep_inner": True,
        },
    ),
}


COPIED = ("Llama", "Qwen3", "Gemma", "Olmo")


def made(name, config="", targets="all-linear", keep_inner=False, **settings):
    name = name.partition(",")[0]
    model, config = (getattr(transformers, n, None) for n in (f"{name}ForCausalLM", config or f"{name}Config"))
    if model is None:
        pytest.skip(f"transformers {transformers.__version__} has no {name}; runs with 5.23, as in `make test`")
    torch.manual_seed(0)
    adapters = LoraConfig(r=2, use_dora=True, target_modules=targets)
    return perturb(get_peft_model(model(config(**SIZES | settings)).double(), adapters).double()).train()


def step(model):
    model.zero_grad()
    torch.manual_seed(1)  # the model's own dropout
    out = model(input_ids=IDS, labels=IDS)
    out.loss.backward()
    return {"logits": out.logits.detach()} | {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", CASES)
def test_the_model_stays_the_same(name):
    fused, settings = CASES[name]
    model = made(name, **settings)
    classes, want = [type(m) for m in model.modules()], step(model)
    keep_inner = settings.get("keep_inner", False)
    if fused == NEITHER:
        with pytest.raises(FdoraError, match="`fuse` must be None or False"):
            use_fdora(model, fuse=True, keep_inner=keep_inner)
    else:
        use_fdora(model, fuse=True, keep_inner=keep_inner)
    groups = {v.shared for m in model.modules() for v in getattr(m, "lora_variant", {}).values()} - {None}
    assert (sum(isinstance(m, Mlp) for m in model.modules()), len(groups)) == fused
    same(step(model), want)
    assert not any(row.composed or row.fallbacks for row in report(model))
    assert all(group.waiting is None for group in groups)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))) if name in COPIED else ():
        same(step(twin), want)
    restore(model)
    assert [type(m) for m in model.modules()] == classes
    assert all(torch.equal(a, want[n]) for n, a in step(model).items())


def test_a_model_that_writes_over_its_outputs_hears_of_keep_inner():
    model = use_fdora(made("Gemma3n", **CASES["Gemma3n"][1]))
    with pytest.raises(RuntimeError, match=r"changed in place.*use_fdora\(model, keep_inner=True\)"):
        step(model)
