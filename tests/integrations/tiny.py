"""What the frameworks train in these tests: two layers of a Llama with random weights, a tokenizer of bytes, text from here."""

from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

TEXT = (Path(__file__).parents[2] / "README.md").read_text()
LORA = {
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
}
LAYERS = 2 * len(LORA["target_modules"])


def tokenizer():
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = {t: i for i, t in enumerate(["<pad>", "<s>", "</s>", *letters])}
    bytes_ = Tokenizer(models.BPE(tokens, []))
    bytes_.pre_tokenizer, bytes_.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made = PreTrainedTokenizerFast(tokenizer_object=bytes_, pad_token="<pad>", bos_token="<s>", eos_token="</s>")
    made.chat_template = "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + eos_token }}{% endfor %}"
    return made


def llama(**config):
    """The same weights on every call."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "max_position_embeddings": 512}
    ids = {"vocab_size": 260, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return LlamaForCausalLM(LlamaConfig(**(sizes | ids | config)))


def checkpoint(folder, **config):
    """Model and tokenizer as files, for frameworks that load by name."""
    llama(**config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return str(folder)


def same_adapter(got, want):
    """What two trainings of all layers came to, by name."""
    assert got.keys() == want.keys() and len(want) == 3 * LAYERS
    for name, p in want.items():
        torch.testing.assert_close(got[name], p, rtol=0, atol=1e-4, msg=lambda m, name=name: f"{name}: {m}")


def lines(count, length=96):
    """Pieces of the README."""
    return [TEXT[i * length : (i + 1) * length] for i in range(count)]
