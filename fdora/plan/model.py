"""What a planner must know of a decoder: its sizes and its parts, read from a config.json of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

from fdora._check import fail
from fdora.explain_model import CONFIG, load

ATTENTION, MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")
EVERY = 6  # gemma3: each sixth layer sees all tokens
WINDOW = 4096  # of all that have one, where the config leaves it out
FULL, SLIDING = "full_attention", "sliding_attention"


class Family(NamedTuple):
    """What the code of a model type does and its config does not say."""

    head_dim: int | None = None  # where the config leaves it out; None: hidden_size / heads
    biases: frozenset[str] = frozenset()  # always there
    head_norms: bool = False  # of q and k
    sandwich: bool = False  # a norm behind attention and MLP, too
    tied: bool = False  # the default of tie_word_embeddings


FAMILIES = {
    "llama": Family(),
    "mistral": Family(),
    "qwen2": Family(biases=frozenset(ATTENTION)),
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
    """A decoder. ``linears``: (N, K) and whether it has a bias, by the name that PEFT targets."""

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
    biases: frozenset[str]

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {"q_proj": (q, self.hidden), "k_proj": (kv, self.hidden), "v_proj": (kv, self.hidden)}
        shapes |= {"o_proj": (self.hidden, q), "gate_proj": (self.inner, self.hidden), "up_proj": (self.inner, self.hidden)}
        return shapes | {"down_proj": (self.hidden, self.inner)}

    def windowed(self, layer: int) -> bool:
        return self.window > 0 and (self.kind != "gemma3_text" or (layer + 1) % EVERY != 0)


def read_model(source: str | Path | dict[str, Any], layers: int | None = None) -> Model:
    """The decoder of a config.json, of a folder with one, or of its content.

    Args:
      layers: others than the config has.

    Raises:
      FdoraError: no such file; a model type or a field that the planner does not know.
    """
    config = source if isinstance(source, dict) else load(_file(Path(source)), "plan")
    kind = config.get("model_type")
    if isinstance(kind, str) and kind in REFUSED:
        raise fail("plan", "model", f"of a model type among {', '.join(FAMILIES)}", repr(kind), REFUSED[kind])
    if not isinstance(kind, str) or kind not in FAMILIES:
        hint = f"Pass the text part of the {kind!r} model." if "text_config" in config else "Others keep other tensors."
        raise fail("plan", "model", f"of a model type among {', '.join(FAMILIES)}", repr(kind), hint)
    family = FAMILIES[kind]

    def size(field: str, default: int | None = None) -> int:
        value = config.get(field)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise fail("plan", "model", f"a config with a positive integer {field!r}", repr(value), "Look into the file.")
        return value

    hidden, heads = size("hidden_size"), size("num_attention_heads")
    biases = set(family.biases)
    if config.get("attention_bias"):
        biases |= {*ATTENTION, "o_proj"}
    if config.get("mlp_bias"):
        biases |= {*MLP, "down_proj"}
    tied = config.get("tie_word_embeddings")
    own = size("num_hidden_layers")
    return Model(
        kind,
        own if layers is None else layers,
        hidden,
        size("intermediate_size"),
        heads,
        size("num_key_value_heads", heads),
        size("head_dim", family.head_dim or hidden // heads),
        size("vocab_size"),
        family.tied if tied is None else bool(tied),
        family.head_norms,
        family.sandwich,
        size("sliding_window", WINDOW) if has_windows(config, own) else 0,
        frozenset(biases),
    )


def has_windows(config: dict[str, Any], layers: int) -> bool:
    """Whether layers see a sliding window, by the rules of transformers' configs: all of them, or of gemma3 all but each sixth.

    Raises:
      FdoraError: some others do: the planner would take all for windowed, or none.
    """
    kind, given = config["model_type"], config.get("sliding_window", WINDOW) is not None
    if kind == "mistral":
        return given
    gemma = kind == "gemma3_text"
    if not gemma and not (kind in ("qwen2", "qwen3") and config.get("use_sliding_window") and given):
        return False
    names = config.get("layer_types")
    if names is None:
        every = config.get("sliding_window_pattern", config.get("_sliding_window_pattern", EVERY))
        first = config.get("max_window_layers", 28)
        names = [SLIDING if ((n + 1) % every if gemma else n >= first) else FULL for n in range(layers)]
    if names == [FULL] * layers:
        return False
    if names != [FULL if gemma and (n + 1) % EVERY == 0 else SLIDING for n in range(layers)]:
        want = f"a config with sliding windows in all layers{' but each sixth' if gemma else ''}, or in none"
        raise fail("plan", "model", want, "another pattern", "Plan a model of the same sizes with one of these.")
    return True


def _file(path: Path) -> Path:
    file = path / CONFIG if path.is_dir() else path
    if not file.is_file():
        raise fail("plan", "model", f"a {CONFIG}, or a folder with one", repr(str(path)), "Nothing is downloaded.")
    return file
