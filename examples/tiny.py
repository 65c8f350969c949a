"""What ``--tiny`` trains in the programs beside this one: a Llama of two layers with random weights, and sums in words."""

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

LINES = [f"{a} and {b} make {a + b}" for a in range(10) for b in range(10)]


def checkpoint(folder):
    """Writes model and tokenizer as files, to be loaded by name like any other; returns the name and the text."""
    words = ["<pad>", "<s>", "</s>", *sorted({word for line in LINES for word in line.split()})]
    split = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, unk_token="<pad>"))
    split.pre_tokenizer = pre_tokenizers.Whitespace()
    tokens = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    PreTrainedTokenizerFast(tokenizer_object=split, **tokens).save_pretrained(folder)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    ids = {"vocab_size": len(words), "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    LlamaForCausalLM(LlamaConfig(**sizes, **ids)).save_pretrained(folder)
    return str(folder), Dataset.from_dict({"text": LINES})
