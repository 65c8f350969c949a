"""The arguments of a plan: a decoder and its parts, read from a config.json of transformers; what is trained, and how."""

from __future__ import annotations

from collections.abc import Collection
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


E = 2  # bytes of an activation
LINEARS = (*ATTENTION, "o_proj", *MLP)
# what fdora.quant makes of a weight
WEIGHTS: dict[str, dict[str, Any]] = {"bf16": {}}
WEIGHTS |= {kind: {"kind": kind} for kind in ("nf4", "fp4", "mxfp4", "nvfp4", "int8", "fp8")}
WEIGHTS |= {"nf4_nested": {"kind": "nf4", "nested": True}, "fp8_blocks": {"kind": "fp8", "block": (128, 128)}}
OPTIMIZERS = {"adamw": 2, "sgd": 0, "momentum": 1}  # states of the size and dtype of the parameter


class Adapter(NamedTuple):
    """The name and rank of an adapter to be trained."""

    name: str
    r: int


class Setup(NamedTuple):
    """What is trained, and how. ``length``: tokens of a sequence. ``fuse``: q, k, v and the MLP in one call each,
    as ``use_fdora(model)`` runs them where it can. ``loss_tokens``: of each sequence that reach the head; None: all of them.
    ``packed``: the sequences of a microbatch are one row, with a mask that parts them. ``dropout``: adapters drop their inputs,
    as ``fdora.jobs.train`` does it."""

    length: int
    adapters: tuple[Adapter, ...]
    fuse: bool = False
    checkpointing: bool = False
    loss_tokens: int | None = None
    weights: str = "bf16"
    adapter_bytes: int = 4
    optimizer: str = "adamw"
    microbatches: int = 1
    targets: frozenset[str] = frozenset(LINEARS)
    packed: bool = False
    dropout: bool = False

    def row(self, tokens: int) -> int:
        """Tokens that attention is given as one sequence."""
        return tokens if self.packed else self.length

    @property
    def has_banks(self) -> bool:
        """Several adapters are a bank. So is one in ``fdora.jobs.train``, which alone drops."""
        return self.dropout or len(self.adapters) > 1

    @property
    def width(self) -> int:
        """Rows of A that a layer has: those of the largest rank, for a bank is as wide as that."""
        return max(adapter.r for adapter in self.adapters)

    def adapter_elements(self, N: int, K: int) -> int:
        """Of A, B and m of all adapters on one layer."""
        return len(self.adapters) * (self.width * (N + K) + N)

    def loss_of(self, tokens: int) -> int:
        return tokens if self.loss_tokens is None else tokens * min(self.loss_tokens, self.length) // self.length


def check_setup(setup: Setup) -> Setup:
    positive = {"length": setup.length, "microbatches": setup.microbatches}
    positive |= {f"adapters[{i}]": each.r for i, each in enumerate(setup.adapters)}
    if setup.loss_tokens is not None:
        positive["loss_tokens"] = setup.loss_tokens
    for arg, value in positive.items():
        check_positive("jobs.plan", arg, value, "It is a number of tokens, microbatches or a rank.")
    if not setup.adapters:
        raise fail("jobs.plan", "adapters", "at least one", "none", "Without an adapter nothing is trained.")
    known: dict[str, Collection] = {"weights": WEIGHTS, "optimizer": OPTIMIZERS, "adapter_bytes": (2, 4)}
    for arg, among in known.items():
        if getattr(setup, arg) not in among:
            raise fail("jobs.plan", arg, f"one of {', '.join(map(str, among))}", repr(getattr(setup, arg)), "Take the nearest.")
    if not setup.targets or (unknown := setup.targets.difference(LINEARS)):
        have = ", ".join(sorted(unknown)) if setup.targets else "none"
        raise fail("jobs.plan", "targets", f"some of {', '.join(LINEARS)}", have, "Others are not planned.")
    if setup.fuse and len(setup.adapters) > 1:
        raise fail("jobs.plan", "fuse", "False for several adapters", "True", "dora_linear_multi is a call for each layer.")
    return setup
