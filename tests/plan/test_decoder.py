"""What the tape says of a decoder against what torch keeps of transformers' own, through use_fdora, on a CPU."""

import warnings

import pytest
import torch

from fdora.jobs.plan import Adapter, Setup, memory, read_model
from tests.memory import held_bytes

peft = pytest.importorskip("peft", reason="compares with PEFT's models; `make test` installs it")
transformers = pytest.importorskip("transformers", reason="compares with its models; `make test` installs it")

SIZES = dict(hidden_size=128, intermediate_size=320, num_attention_heads=4, num_key_value_heads=2, num_hidden_layers=2)
SIZES |= dict(vocab_size=512, tie_word_embeddings=False, head_dim=32)
CASES = {
    "llama": ("LlamaConfig", {}),
    "mistral": ("MistralConfig", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", {}),
    "qwen3": ("Qwen3Config", {}),
    "gemma": ("GemmaConfig", {}),
    "gemma3_text": ("Gemma3TextConfig", {"sliding_window": 512}),
    "gemma3_text with windows": (
        "Gemma3TextConfig",
        {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]},
    ),
    "qwen2 with windows": ("Qwen2Config", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}),
    "mistral with windows as long as a sequence": ("MistralConfig", {"sliding_window": 128}),
    "mistral with longer windows": ("MistralConfig", {"sliding_window": 129}),
    "llama with biases": ("LlamaConfig", {"attention_bias": True, "mlp_bias": True}),
}
LENGTH, SEQUENCES, R = 128, 2, 8


def model_of(case):
    name, more = CASES[case]
    config = getattr(transformers, name)(**SIZES | more, pad_token_id=0)
    config._attn_implementation = "sdpa"
    base = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return base, read_model(config.to_dict())


def adapted(base, fuse):
    from fdora.integrations.peft import use_fdora

    config = peft.LoraConfig(r=R, use_dora=True, target_modules="all-linear")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(base, config, autocast_adapter_dtype=False)
    use_fdora(model, fuse=fuse)
    return model.train()


def kept(model, base, last):
    ids = torch.randint(1, 500, (SEQUENCES, LENGTH))

    def loss():
        logits = model(input_ids=ids, logits_to_keep=last, use_cache=False).logits
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, -last:].flatten())

    loss()  # norms, and whatever is made once
    return held_bytes(loss)


@pytest.mark.parametrize("fuse", [False, True], ids=["plain", "fuse"])
@pytest.mark.parametrize("case", CASES)
def test_forward_keeps_what_is_said(case, fuse):
    """Within 2 %: c, roots of norms' means and the like are left out."""
    base, found = model_of(case)
    frozen = sum(p.numel() for p in base.parameters())
    model = adapted(base, fuse)
    setup = Setup(LENGTH, (Adapter("", R),), fuse=fuse, adapter_bytes=2)
    held, trained = memory(found, setup, LENGTH), sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert (held.linears + held.embeddings, held.adapters) == (2 * frozen, 2 * trained)
    for last in (LENGTH, 4):
        said = memory(found, setup._replace(loss_tokens=last), SEQUENCES * LENGTH).activations
        assert said == pytest.approx(kept(model, base, last), rel=0.02)
