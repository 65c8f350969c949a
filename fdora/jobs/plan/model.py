"""What a planner must know of a decoder: its sizes and its parts, read from a config.json of transformers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from fdora._check import FdoraError, check_positive, fail
from fdora.explain_model import CONFIG, is_file, linears_of, load, positive

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
EVERY = 6  # gemma3: each sixth layer sees all tokens
FIRST = 28  # qwen: so many layers see all tokens, where the config leaves it out
WINDOW = 4096  # of all that have one, where the config leaves it out
FULL, SLIDING = "full_attention", "sliding_attention"


class Family(NamedTuple):
    """What the code of a model type does and its config does not say."""

    head_dim: int | None = None  # where the config leaves it out; None: hidden_size / heads
    biases: frozenset[str] = frozenset()  # always there
    asked: tuple[str, ...] = ("attention_bias",)  # fields of the config that its code reads: biases of these parts
    head_norms: bool = False  # of q and k
    sandwich: bool = False  # a norm behind attention and MLP, too
    tied: bool = False  # the default of tie_word_embeddings


FAMILIES = {
    "llama": Family(asked=("attention_bias", "mlp_bias")),
    "mistral": Family(asked=()),
    "qwen2": Family(biases=frozenset(ATTENTION), asked=()),
    "qwen3": Family(head_dim=128, head_norms=True),
    "gemma": Family(head_dim=256, tied=True),
    "gemma3_text": Family(head_dim=256, head_norms=True, sandwich=True, tied=True),
}
REFUSED = {
    "gemma2": "Its attention has a soft cap and runs in plain torch, with memory that grows with the square of the length.",
    **dict.fromkeys(
        ("mixtral", "qwen2_moe", "qwen3_moe", "deepseek_v3", "gpt_oss", "llama4_text"),
        "What its experts keep hangs on where the router sends the tokens. Plan a dense model of its active size.",
    ),
}


class Model(NamedTuple):
    """The sizes of a decoder. ``linears``: (N, K) and whether it has a bias, by the name that PEFT targets."""

    kind: str
    layers: int
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    tied: bool
    head_norms: bool
    sandwich: bool
    window: int  # tokens that a layer with a sliding window sees; 0: none has one
    sliding: tuple[int, ...]  # these layers
    biases: frozenset[str]

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
    config = source if isinstance(source, dict) else load(_file(Path(source)), "jobs.plan")
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in FAMILIES:
        hint = f"Pass the text part of the {kind!r} model." if "text_config" in config else "Others keep other tensors."
        hint = REFUSED.get(str(kind), hint)
        raise fail("jobs.plan", "model", f"of a model type among {', '.join(FAMILIES)}", repr(kind), hint)
    family = FAMILIES[kind]
    size = partial(positive, config)
    hidden, heads = size("hidden_size"), size("num_attention_heads")
    parts = {"attention_bias": (*ATTENTION, "o_proj"), "mlp_bias": (*MLP, "down_proj")}
    biases = family.biases.union(*(parts[field] for field in family.asked if config.get(field)))
    tied = config.get("tie_word_embeddings")
    own, kv_heads = size("num_hidden_layers"), size("num_key_value_heads", heads)
    if heads % kv_heads:
        raise wrong(f"whose 'num_key_value_heads' divides its {heads} 'num_attention_heads'", kv_heads)
    head_dim = size("head_dim", family.head_dim or hidden // heads)
    if head_dim % 2:  # RoPE turns pairs
        raise wrong("with an even 'head_dim'", head_dim)
    count = own if layers is None else layers
    check_positive("jobs.plan", "layers", count, "It stands for the config's own number.")
    window, sliding = windows(config, own, count)
    return Model(
        kind,
        count,
        hidden,
        size("intermediate_size"),
        heads,
        kv_heads,
        head_dim,
        size("vocab_size"),
        family.tied if tied is None else bool(tied),
        family.head_norms,
        family.sandwich,
        window,
        sliding,
        biases,
    )


def wrong(what: str, have: object) -> FdoraError:
    return fail("jobs.plan", "model", f"a config {what}", repr(have), "Look into the file.")


def windows(config: dict[str, Any], own: int, layers: int) -> tuple[int, tuple[int, ...]]:
    """Tokens of the sliding window, and which of so many layers have it, by the rules of transformers' configs. The config has
    ``own`` layers.

    Raises:
      FdoraError: kinds of layers, or a window, that no model of this type has.
    """
    kind, given = config["model_type"], config.get("sliding_window", WINDOW) is not None
    given = given and (kind not in ("qwen2", "qwen3") or bool(config.get("use_sliding_window")))
    slides, names = [kind == "mistral" and given] * layers, config.get("layer_types")
    if kind not in ("qwen2", "qwen3", "gemma3_text"):
        pass
    elif names is not None:
        if not isinstance(names, list) or len(names) != own or any(name not in (FULL, SLIDING) for name in names):
            raise wrong(f"whose 'layer_types' has {FULL!r} or {SLIDING!r} for each of its {own} layers", names)
        if layers > own:
            raise fail("jobs.plan", "layers", f"at most the {own} of 'layer_types'", repr(layers), "Name more there, or none.")
        slides = [name == SLIDING for name in names[:layers]]
    elif kind == "gemma3_text":
        every = positive(config, "sliding_window_pattern", config.get("_sliding_window_pattern", EVERY))
        slides = [(n + 1) % every != 0 for n in range(layers)]
    else:
        first = config.get("max_window_layers", FIRST)
        if type(first) is not int:
            raise wrong("with an integer 'max_window_layers'", first)
        slides = [given and n >= first for n in range(layers)]
    if any(slides) and not given:  # no mask can be made
        want = "a config that has a window for its sliding layers"
        raise fail("jobs.plan", "model", want, "none", "Look at 'sliding_window' and 'use_sliding_window'.")
    sliding = tuple(n for n, each in enumerate(slides) if each)
    return (positive(config, "sliding_window", WINDOW), sliding) if sliding else (0, ())


def _file(path: Path) -> Path:
    file = next(filter(is_file, (path / CONFIG, path)), None)
    if file is None:
        raise fail("jobs.plan", "model", f"a {CONFIG}, or a folder with one", repr(str(path)), "Nothing is downloaded.")
    return file
