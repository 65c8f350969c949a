"""What each kind of layer of a model would cost, from shapes alone. No weight is read.

    fdora explain --model config.json --r 16
    fdora explain --model ADAPTER_FOLDER --gpu a100

Exit status: 0; 2 for a mistake in arguments or files, with one sentence on stderr.
"""

from __future__ import annotations

import json
from collections import Counter
from contextlib import suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from fdora._check import fail
from fdora._command import align, mistakes, parser_of
from fdora.predict import GPUS, Method, Prediction, predict

CONFIG, ADAPTER, TENSORS = "config.json", "adapter_config.json", "adapter_model.safetensors"
# model types of transformers whose decoder layer has exactly q, k, v, o, gate, up and down; True: head_dim must be in the file
KNOWN = {
    "gemma": True,
    "gemma2": True,
    "gemma3_text": True,
    "granite": False,
    "llama": False,
    "ministral": True,
    "mistral": False,
    "olmo2": False,
    "olmo3": False,
    "qwen2": False,
    "qwen3": True,
    "seed_oss": True,
    "smollm3": False,
}
SHARED = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))  # layers that read one x, which is kept once
MOST = 1 << 31  # sizes of a model, ranks and tokens are below it
METHODS: dict[Method, str] = {"fdora": "fdora", "lora": "LoRA", "peft_dora": "PEFT DoRA"}


class Kind(NamedTuple):
    """Layers of one name and one shape."""

    name: str
    N: int
    K: int
    r: int
    layers: int


class Model(NamedTuple):
    title: str
    kinds: list[Kind]
    notes: list[str]


def explain(model: str | Path, *, tokens: int = 4096, r: int | None = None, gpu: str = "h200") -> str:
    """A table: for each kind of layer its shape, how many there are, what runs, and the least time of a forward and backward
    and the bytes kept until backward through fdora, as LoRA and as PEFT's DoRA. fdora by the plans of its kernels, where
    Triton is installed; :mod:`fdora.predict` has the formulas of the rest.

    Args:
      model: a config.json of transformers (Llama-like), a folder with one, or the folder of a PEFT adapter.
      tokens: of the whole batch.
      r: rank, 16 by default; an adapter has its own.
      gpu: a key of ``fdora.predict.GPUS``.

    Raises:
      FdoraError: the file is not there or not such a file, or an argument is out of range.
    """
    if not 1 <= tokens < MOST:
        raise fail("explain", "tokens", _range(tokens), tokens, "It is sequences times their length.")
    if gpu not in GPUS:
        raise fail("explain", "gpu", f"one of {', '.join(GPUS)}", repr(gpu), "Take the most similar one, and look at ratios.")
    title, kinds, notes = read(Path(model), r)
    if find_spec("triton") is None:
        notes = [*notes, "Without Triton fdora's numbers are of formulas: some percent below those of its plans."]
    rows = [("layer", "(N, K)", "count", "r", "what runs", *METHODS.values(), *METHODS.values())]
    costs = [[cost(tokens, kind, gpu, m) for m in METHODS] for kind in kinds]
    for kind, of in zip(kinds, costs, strict=True):
        ms = [f"{1e3 * (p.forward + p.backward):.3f}" for p in of]
        mib = [memory(p.kept, p.output, 1) for p in of]
        rows.append((kind.name, f"({kind.N}, {kind.K})", f"{kind.layers}", f"{kind.r}", of[0].path, *ms, *mib))
    again = sum(2 * tokens * K * count for K, count in read_again(kinds))
    every = [[p for kind, p in zip(kinds, of, strict=True) for _ in range(kind.layers)] for of in zip(*costs, strict=True)]
    ms = [f"{1e3 * sum(p.forward + p.backward for p in of):.1f}" for of in every]
    mib = [memory(sum(p.kept for p in of) - again, sum(p.output for p in of), 0) for of in every]
    rows.append(("all", "", f"{len(every[0])}", "", "an x that several layers read is kept once" if again else "", *ms, *mib))
    rate = GPUS[gpu]
    head = [
        f"{title}, {tokens} tokens, bfloat16",
        f"{rate.name}, by its published rates: {rate.flops / 1e12:.0f} TFLOP/s, {rate.bytes / 1e12:.2f} TB/s. Least times, "
        "not measurements.",
        "The first three numbers: ms of a forward and backward. The last three: MiB kept for backward; what follows + is the",
        "layer's output, which costs nothing where the next operation keeps it anyway.",
    ]
    return "\n".join([*head, *notes, "", *align(rows, (0, 1, 4))])


def _range(value: int) -> str:
    return "at least 1" if value < 1 else "below 2^31"


OPTIONS: dict[str, tuple[Any, ...]] = {
    "--model": (str, "config.json of transformers, or the folder of a PEFT adapter", {"required": True}),
    "--tokens": (4096, "tokens of the whole batch"),
    "--r": (int, "rank, for a config.json (default: 16); an adapter has its own"),
    "--gpu": ("h200", "whose published rates to use", {"choices": GPUS}),
}


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("explain", __doc__, OPTIONS)
    a = parser.parse_args(argv)
    with mistakes(parser):
        print(explain(a.model, tokens=a.tokens, r=a.r, gpu=a.gpu))
    return 0


def cost(tokens: int, kind: Kind, gpu: str, method: Method) -> Prediction:
    """fdora by its plans; the others, and fdora where Triton is missing, by formulas."""
    planned = by_plans(tokens, kind, gpu) if method == "fdora" else None
    return planned or predict(tokens, kind.N, kind.K, kind.r, gpu=gpu, method=method)


def by_plans(M: int, kind: Kind, gpu: str) -> Prediction | None:
    import torch

    from fdora.functional import dora_linear  # here: reading a model needs neither
    from fdora.functional import explain as explain_call

    shapes = (M, kind.K), (kind.N, kind.K), (kind.r, kind.K), (kind.N, kind.r), (kind.N,)
    x, W, A, B, m = (torch.empty(shape, dtype=torch.bfloat16, device="meta") for shape in shapes)
    trained = [t.requires_grad_() for t in (A, B, m)]
    said = explain_call(dora_linear, x.requires_grad_(), W, *trained, s=1.0, gpu=gpu)
    if not said.plans:
        return None
    *forward, backward = said.plans
    output = sum(t.nbytes for t in said.kept if t.whose == "output")
    path = forward[-1].path.partition(";")[0]
    kept = sum(t.nbytes for t in said.kept) - output
    return Prediction(path, sum(plan.seconds for plan in forward), backward.seconds, kept, output)


def memory(kept: int, output: int, digits: int) -> str:
    return " + ".join(f"{b / 2**20:.{digits}f}" for b in (kept, output) if b)


def read_again(kinds: list[Kind]) -> list[tuple[int, int]]:
    """(K, count) of every x that is counted though another layer keeps the same tensor."""
    counts: dict[tuple[int, int], Counter[str]] = {}
    for kind in kinds:
        for at, group in enumerate(SHARED):
            if kind.name in group:
                counts.setdefault((kind.K, at), Counter())[kind.name] += kind.layers
    return [(K, found.total() - max(found.values())) for (K, _), found in counts.items()]


def is_file(path: Path) -> bool:
    with suppress(OSError, ValueError):  # a name that none can have
        return path.is_file()
    return False


def read(path: Path, r: int | None) -> Model:
    """The layers of a config.json, or of an adapter's folder."""
    if is_file(path / ADAPTER):
        if r is not None:
            raise fail("explain", "r", "left out for an adapter", r, "The adapter has its own ranks.")
        return from_adapter(path)
    return from_config(config_file(path, "explain", ", or the folder of a PEFT adapter"), 16 if r is None else r)


def config_file(path: Path, fn: str, other: str = "") -> Path:
    """The config.json that a path means."""
    file = next(filter(is_file, (path / CONFIG, path)), None)
    if file is None:
        want, remedy = f"a {CONFIG}, a folder with one{other}", "Check the path. Nothing is downloaded."
        raise fail(fn, "model", want, repr(str(path)), remedy)
    return file


def from_config(file: Path, r: int) -> Model:
    config = load(file)
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in KNOWN:
        hint = f"Pass the {kind!r} model's text part as a file of its own." if "text_config" in config else ""
        raise fail(
            "explain", "model", f"of a model type among {', '.join(KNOWN)}", repr(kind), hint or "Pass an adapter's folder."
        )
    if not 1 <= r < MOST:
        raise fail("explain", "r", _range(r), r, "A model without an adapter needs no fdora.")

    size = partial(positive, config, fn="explain", where=file)
    H, heads, layers = size("hidden_size"), size("num_attention_heads"), size("num_hidden_layers")
    head = size("head_dim", None if KNOWN[kind] else H // heads)
    q, kv, inner = heads * head, size("num_key_value_heads", heads) * head, size("intermediate_size")
    kinds = [Kind(name, *shape, r, layers) for name, shape in linears_of(H, inner, q, kv).items()]
    return Model(f"{kind}, {layers} layers, all linear layers adapted", kinds, [])


def positive(
    config: dict[str, Any], field: str, default: int | None = None, *, fn: str = "jobs.plan", where: object = "the file"
) -> int:
    """A size of a config.json, which may leave out what has a default."""
    value = config.get(field)
    value = default if value is None else value
    if type(value) is not int or not 1 <= value < MOST:
        small = " below 2^31 as" if type(value) is int and value > 0 else ""
        raise fail(fn, "model", f"a config with a positive integer{small} {field!r}", repr(value), f"Look into {where}.")
    return value


def linears_of(hidden: int, inner: int, q: int, kv: int) -> dict[str, tuple[int, int]]:
    """(N, K) of each linear layer of a block; ``q``, ``kv``: the widths of queries and of keys."""
    shapes = {"q_proj": (q, hidden), "k_proj": (kv, hidden), "v_proj": (kv, hidden), "o_proj": (hidden, q)}
    return shapes | {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}


def from_adapter(folder: Path) -> Model:
    config = load(folder / ADAPTER)
    if config.get("peft_type") != "LORA":
        raise fail("explain", "model", "an adapter of peft_type LORA", repr(config.get("peft_type")), "DoRA is one of these.")
    if config.get("target_parameters"):
        have = repr(config["target_parameters"])
        raise fail("explain", "model", "an adapter of layers", f"target_parameters={have}", "DoRA is defined for layers only.")
    shapes = header(folder / TENSORS)
    found: Counter[tuple[str, int, int, int]] = Counter()
    other, plain = 0, 0
    with_m = {key.partition(".lora_magnitude_vector")[0] for key in shapes if ".lora_magnitude_vector" in key}
    for key, A in shapes.items():
        if ".lora_embedding_A" in key:
            other += 1
        if ".lora_A." not in key:
            continue
        layer = key.partition(".lora_A.")[0]
        B = shapes.get(key.replace(".lora_A.", ".lora_B."))
        if B is None or len(A) != len(B) or A[:1] != B[1:2]:
            want = "an adapter with A (r, K) and B (N, r) for each layer"
            raise fail("explain", "model", want, f"{A} and {B} for {layer}", "Save it again with save_pretrained.")
        if len(A) != 2:
            other += 1
            continue
        plain += layer not in with_m
        found[layer.rpartition(".")[2], B[0], A[1], A[0]] += 1
    if not found:
        raise fail(
            "explain", "model", "an adapter with linear layers", f"{other} layers of other kinds", "Others have no prediction."
        )
    notes = [f"{plain} of {found.total()} layers have no magnitude: they are plain LoRA today."] if plain else []
    notes += [f"Left out: {other} embeddings and convolutions."] if other else []
    return Model(f"adapter {folder.name}", [Kind(*key, count) for key, count in found.items()], notes)


def load(file: Path, fn: str = "explain", arg: str = "model") -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise fail(fn, arg, "a JSON file", f"{type(error).__name__} for {file}", "Check the file.") from error
    if not isinstance(found, dict):
        raise fail(fn, arg, "a JSON object", f"a {type(found).__name__} in {file}", "Check the file.")
    return found


def header(file: Path) -> dict[str, tuple[int, ...]]:
    """The shape of each tensor of a safetensors file: eight bytes with the length of a JSON header, then that header."""
    try:
        with file.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            if length > file.stat().st_size - 8:
                raise ValueError
            found = json.loads(f.read(length))
        shapes = {key: tuple(entry["shape"]) for key, entry in found.items() if key != "__metadata__"}
        if not all(type(n) is int and 0 <= n < MOST for shape in shapes.values() for n in shape):
            raise ValueError
        return shapes
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        have = f"{type(error).__name__} for {file}"
        raise fail(
            "explain", "model", f"a folder with a whole {TENSORS}", have, "Save the adapter with save_pretrained."
        ) from error
