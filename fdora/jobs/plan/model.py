"""What a planner must know of a decoder: its sizes and its parts, read from a config.json of transformers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fdora._check import FdoraError, check_positive, fail
from fdora.explain_model import config_file, linears_of, load, positive

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj")
SIZES = ("hidden_size", "intermediate_size", "num_attention_heads", "num_hidden_layers", "vocab_size")
FAMILIES = ("llama", "mistral", "qwen2", "qwen3", "gemma", "gemma3_text")  # whose decoder layers are recorded
FULL, SLIDING = "full_attention", "sliding_attention"
REFUSED = {
    "gemma2": "Its attention has a soft cap and runs in plain torch, with memory that grows with the square of the length.",
    **dict.fromkeys(
        ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text"),
        "What its experts keep hangs on where the router sends the tokens. Plan a dense model of its active size.",
    ),
}


class Model(NamedTuple):
    """The sizes of a decoder. ``linears``: (N, K) by the name that PEFT targets."""

    kind: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    window: int  # tokens that a layer with a sliding window sees; 0: none has one
    sliding: tuple[int, ...]  # these layers
    attention_bias: bool
    mlp_bias: bool

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        return linears_of(self.hidden, self.inner, self.heads * self.head_dim, self.kv_heads * self.head_dim)


class Part(NamedTuple):
    """The part of a model on one GPU: ``layers`` of its layers from ``start`` on, and whether embedding and head are there."""

    layers: int
    first: bool = True
    last: bool = True
    start: int = 0

    @property
    def held(self) -> range:
        return range(self.start, self.start + self.layers)


def read_model(source: str | Path | dict[str, Any], layers: int | None = None) -> Model:
    """The decoder of a config.json, of a folder with one, or of its content.

    Args:
      layers: others than the config has.

    Raises:
      FdoraError: no such file; a model type or a field that the planner does not know, or sizes that no model has.
    """
    config = source if isinstance(source, dict) else load(config_file(Path(source), "jobs.plan"), "jobs.plan")
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        hint = f"Pass the text part of the {kind!r} model." if "text_config" in config else "Others keep other tensors."
        hint = REFUSED.get(str(kind), hint)
        raise fail("jobs.plan", "model", f"of a model type among {', '.join(FAMILIES)}", repr(kind), hint)
    size = partial(positive, config)
    hidden, inner, heads, own, vocab = map(size, SIZES)
    kv_heads, names = size("num_key_value_heads", heads), config.get("layer_types")
    if heads % kv_heads:
        raise wrong(f"whose 'num_key_value_heads' divides its {heads} 'num_attention_heads'", kv_heads)
    count = own if layers is None else layers
    check_positive("jobs.plan", "layers", count, "It stands for the config's own number.")
    if names is not None:
        if not isinstance(names, list) or len(names) != own or any(name not in (FULL, SLIDING) for name in names):
            raise wrong(f"whose 'layer_types' has {FULL!r} or {SLIDING!r} for each of its {own} layers", names)
        if count > own:
            raise fail("jobs.plan", "layers", f"at most the {own} of 'layer_types'", repr(count), "Name more there, or none.")
        config = config | {"layer_types": names[:count]}
    known = config_of(config | {"num_hidden_layers": count})
    head_dim = getattr(known, "head_dim", None) or hidden // heads
    if head_dim % 2:  # RoPE turns pairs
        raise wrong("with an even 'head_dim'", head_dim)
    window = getattr(known, "sliding_window", None)
    every = [SLIDING if kind == "mistral" and window else ""] * count
    sliding = tuple(n for n, each in enumerate(getattr(known, "layer_types", None) or every) if each == SLIDING)
    if sliding and not window:  # no mask can be made
        raise wrong("that has a window for its sliding layers", window)
    return Model(
        kind,
        count,
        hidden,
        inner,
        heads,
        kv_heads,
        head_dim,
        vocab,
        known.tie_word_embeddings,
        size("sliding_window", window) if sliding else 0,
        sliding,
        getattr(known, "attention_bias", False),
        getattr(known, "mlp_bias", False),
    )


def config_of(given: dict[str, Any]) -> Any:
    """transformers' config of a ``model_type``, which knows what is left out.

    Raises:
      FdoraError: transformers is missing, or reads no such config.
    """
    try:
        from transformers import AutoConfig
    except ImportError as error:
        raise FdoraError("fdora.jobs.plan: a plan is a recording of transformers' models. Install transformers.") from error
    try:
        return AutoConfig.for_model(**given)
    except Exception as error:
        raise wrong("that transformers reads", f"{type(error).__name__}: {error}") from error


def wrong(what: str, have: object) -> FdoraError:
    return fail("jobs.plan", "model", f"a config {what}", repr(have), "Look into the file.")
