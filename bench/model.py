"""A whole causal language model with PEFT's LoRA, its DoRA, and that after ``use_fdora`` (``fuse=True`` too): time, memory.

    python -m bench.model --model qwen3-8b --layers 4 --device cuda --json FILE
    python -m bench.model --sweep r --device cuda --json FILE

The architecture is transformers' own with random weights, as many of its layers as fit; all linears but the head are adapted,
away from their start (B is not 0, g is spread by 0.0015), and the ways share weights, adapters and optimizer. One sequence,
loss on its last tokens; what can see sees one image (Gemma four), a quarter of the tokens, and its vision tower is adapted,
too. Modes:
inference; gradient of all adapters; an optimizer step (fused AdamW) after 1 or 8 micro-batches; each of these but the first
also with gradient checkpointing. Eager, then torch.compile per decoder layer (a vision tower stays eager: its attention reads
the image's size on the host). float32 adapters run under bf16 autocast, as trainers run them. Wall time until the GPU is done,
median of turns; peak memory above weights, adapters and optimizer. Before it is timed, fdora's logits and gradients are
compared with those of PEFT's DoRA and of its own eager way, for one layer all with a float32 run, and compiled with eager (with
``--dropout`` while nothing is dropped: every way draws masks of its own). ``--sweep``
varies one size, eager, and fits the exponent of its growth. There the vocabulary is small: the
head, which has no adapter, would be most of a narrow or a short model.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from contextlib import nullcontext
from operator import itemgetter
from statistics import linear_regression

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fdora
from bench import decoder, records
from bench.clock import free
from bench.decoder import MOST_APART, adapters, apart, by_part, compile_each, in_float32, judge, nothing_dropped, wall_and_peak
from bench.rivals import COMPOSED, adapted, paths
from bench.suite import COMPILED, One, Run, Some, Suite, beside_lora, compilations, numbers, stack
from bench.suite import shown as tables
from bench.ways import DTYPES, S

ARCHITECTURES, VISION = decoder.SIZES["causal"], decoder.SIZES["vision"]
WAYS = ("peft_lora", "peft_dora", "peft_fdora", "peft_fdora_fused")
KINDS = ("gradient", "step", "step_8")
MODES = ("inference", *KINDS, *(f"{kind}_checkpointing" for kind in KINDS))
QUICK = ("inference", "gradient", "step_8", "step_checkpointing")
SWEEPS = {
    "r": (8, 16, 32, 64, 128, 256, 384, 512, 768),
    "S": (512, 1024, 2048, 4096, 8192, 16384, 32768),
    "width": (1024, 2048, 4096, 8192, 16384, 28672),
}
SWEEP_VOCABULARY = 1024
OWN, EXACT = "against_its_own_eager_way", "one_layer_against_float32"


def network(options, layers: int, width: int | None = None, vocabulary: int | None = None) -> nn.Module:
    """The base model, frozen, with biases (where it has any) that are not 0. Of the options its model, dtype and device, and
    whether it is tiny."""
    import transformers

    kind, sizes = ARCHITECTURES[options.model]
    sizes = sizes | dict(num_hidden_layers=layers, tie_word_embeddings=False)
    if options.tiny:
        sizes |= decoder.SIZES["tiny"]["causal"]
    if vocabulary:
        sizes |= dict(vocab_size=vocabulary)
    if width:
        head = sizes.get("head_dim") or sizes["hidden_size"] // sizes["num_attention_heads"]
        heads = max(1, width // head)
        wide = round(width * sizes["intermediate_size"] / sizes["hidden_size"])
        sizes |= dict(hidden_size=width, num_attention_heads=heads, intermediate_size=wide, num_key_value_heads=-(-heads // 4))
    family = transformers.AutoModelForCausalLM
    if kind in VISION:
        family, sizes = transformers.AutoModelForImageTextToText, with_vision(VISION[kind], sizes, options)
    config = getattr(transformers, kind)(**sizes)
    config._attn_implementation = "sdpa"
    with torch.device(options.device):
        model = family.from_config(config, dtype=DTYPES[options.dtype])
    for name, p in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(p)
    return model.requires_grad_(False)


def with_vision(vision: dict, text: dict, options) -> dict:
    """A tower around this text model, cut like the text; what it hands over on the way stays at its share."""
    share = text["num_hidden_layers"] / ARCHITECTURES[options.model][1]["num_hidden_layers"]
    (name,) = {"depth", "num_hidden_layers"} & {*vision}
    depth = max(1, round(share * vision[name]))
    taps = {key: sorted({i * depth // vision[name] for i in at}) for key, at in vision.items() if isinstance(at, list)}
    vision = vision | taps | {name: depth, "out_hidden_size": text["hidden_size"]}
    own = dict(image_token_id=text["vocab_size"] - 1, tie_word_embeddings=False)
    if options.tiny:
        vision, own["mm_tokens_per_image"] = vision | VISION["tiny"], 4
        text |= {"rope_parameters": text["rope_parameters"] | {"mrope_section": [2, 3, 3]}} if "rope_parameters" in text else {}
    return dict(text_config=text, vision_config=vision) | own


def inputs_for(base: nn.Module, seq: int) -> dict[str, Tensor]:
    """Random tokens; a square image takes the first quarter of them, if the model can see."""
    device, last = base.lm_head.weight.device, base.lm_head.out_features - 1
    ids = torch.randint(last, (1, seq), device=device)  # the last is Qwen3-VL's token of an image
    vision = getattr(base.config, "vision_config", None)
    if vision is None:
        return {"input_ids": ids}
    merge = getattr(vision, "spatial_merge_size", None) or getattr(base.config, "spatial_merge_size", None)
    side = math.isqrt(seq // 4)
    many = side * side if merge else base.config.mm_tokens_per_image  # of an image; Gemma's are of one size
    images = 1 if merge else seq // 4 // many
    ids[:, : images * many] = base.config.image_token_id
    kinds = (ids == base.config.image_token_id).int()
    if hasattr(vision, "temporal_patch_size"):
        pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
        found = {"mm_token_type_ids": kinds, "image_grid_thw": torch.tensor([[1, side * merge, side * merge]], device=device)}
        shape = (many * merge**2, pixels)
    else:
        size = side * merge * vision.patch_size if merge else vision.image_size
        found = {"image_sizes": torch.tensor([[size, size]], device=device)} if merge else {"token_type_ids": kinds}
        shape = (images, vision.num_channels, size, size)
    return found | {"input_ids": ids, "pixel_values": torch.randn(*shape, device=device).to(base.dtype)}


class Trained:
    """One way's model; ``of(mode)`` is what is timed."""

    def __init__(
        self,
        way: str,
        base: nn.Module,
        values: dict,
        inputs: dict[str, Tensor],
        loss_tokens: int,
        *,
        dropout: float = 0.0,
        context=nullcontext,
        optimizer: torch.optim.Optimizer | None = None,
    ):
        self.way, self.inputs, self.tokens, self.context = way, inputs, inputs["input_ids"].numel(), context
        self.model, self.leaves = adapted(way, base, values, "all-linear", S, "CAUSAL_LM", dropout)
        self.target = inputs["input_ids"].roll(-1, 1)[:, -loss_tokens:]
        self.optimizer = optimizer or adamw(self.leaves.values())

    def compile(self) -> None:
        compile_each(self.way, self.model.get_base_model().get_decoder().layers)

    def logits(self) -> Tensor:
        with self.context():
            return self.model(**self.inputs, logits_to_keep=self.target.shape[1], use_cache=False).logits

    def loss(self) -> Tensor:
        return F.cross_entropy(self.logits().flatten(0, 1).float(), self.target.flatten())

    def gradients(self) -> tuple[Tensor, ...]:
        return torch.autograd.grad(self.loss(), list(self.leaves.values()))

    def step(self, micro_batches: int) -> None:
        for _ in range(micro_batches):
            self.backward(self.loss() / micro_batches)
        self.update()

    def backward(self, loss: Tensor) -> None:
        loss.backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def of(self, mode: str):
        if mode.endswith("checkpointing"):
            self.model.gradient_checkpointing_enable({"use_reentrant": False})
        else:
            self.model.gradient_checkpointing_disable()
        kind = mode.removesuffix("_checkpointing")
        if kind == "gradient":
            return self.gradients
        return torch.no_grad()(self.logits) if kind == "inference" else lambda: self.step(micro_batches(mode))


def adamw(leaves: Iterable[Tensor]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(leaves, lr=1e-5, fused=True)


def micro_batches(mode: str) -> int:
    return 8 if mode.startswith("step_8") else 1


def results(run: Trained, trained: bool = True) -> dict[str, Tensor]:
    """Logits, and the gradients of all A, all B, all m."""
    with nothing_dropped(run.model):
        gradients = dict(zip(run.leaves, run.of("gradient")(), strict=True)) if trained else {}
        return {"logits": run.of("inference")()} | (by_part(gradients) if trained else {})


def compare(run: Trained, truth: dict[str, Tensor]) -> dict[str, dict[str, float]]:
    return {name: apart(t, truth[name]) for name, t in results(run, len(truth) > 1).items()}


def eagerly(run: Trained, trained: bool) -> dict[str, Tensor]:
    with fdora.backend("eager"):
        return results(run, trained)


def one_layer(options, adapter: str, seq: int) -> dict[str, dict]:
    """The ways of DoRA in their dtype against PEFT's in float32, in a model of one layer."""
    base = network(options, 1)
    values = adapters(base, options.r, DTYPES[adapter])
    inputs, last = inputs_for(base, seq), options.loss_tokens
    truth = results(Trained("peft_dora", *in_float32(base, values), inputs, last))
    arguments, how = (base, values, inputs, last), decoder.adapted_as(options, adapter)
    return {way: compare(Trained(way, *arguments, **how), truth) for way in options.ways if "dora" in way}


def at(where: dict) -> str:
    """The label of a way that fails there."""
    return ", ".join(["{}", *(f"{key} {value}" for key, value in where.items())])


def prepare(run: Run, adapter: str, r: int, seq: int, layers: int, width: int | None = None) -> dict[str, Trained]:
    options, where = run.options, {"r": r, "seq": seq, "width": width, "adapter": adapter}
    torch.manual_seed(0)
    base = network(options, layers, width, SWEEP_VOCABULARY if options.sweep else None)
    values = {name: tuple(map(nn.Parameter, parts)) for name, parts in adapters(base, r, DTYPES[adapter]).items()}
    arguments, how = (base, values, inputs_for(base, seq)), decoder.adapted_as(options, adapter)
    how["optimizer"] = adamw([p for parts in values.values() for p in parts])
    last = min(options.loss_tokens, seq)
    return run.failed.attempt(options.ways, lambda way: Trained(way, *arguments, last, **how), at(where))


def timed(run: Run, ways: dict[str, Trained], mode: str, where: dict) -> None:
    """One row per way. What comes before the time limit is measured, what comes after is listed as skipped."""
    where = where | {"dropout": run.options.dropout, "mode": mode}
    if run.late(where):
        return
    fns = {name: way.of(mode) for name, way in ways.items()}
    with decoder.timed_as(mode, run.options.dropout, [way.model for way in ways.values()]):
        found = wall_and_peak(fns, run.options, run.failed, at(where))
    for name, each in found.items():
        speed = round(1e3 * ways[name].tokens * micro_batches(mode) / each["ms"])
        run.add(where | {"way": name} | each | {"tokens_per_s": speed})


def agree(run: Run, ways: dict[str, Trained], adapter: str) -> None:
    """Before any optimizer step: the adapters are equal."""
    options, mine = run.options, [name for name in ways if "fdora" in name]
    if "peft_dora" in ways and mine:
        fits = any(mode in KINDS for mode in options.modes)  # without checkpointing; or logits alone are compared
        truth, first = results(ways["peft_dora"], fits), ways[mine[0]]
        found = {against(name): compare(ways[name], truth) for name in mine}
        for own in run.failed.attempt([OWN], lambda _: eagerly(first, fits), at({"adapter": adapter})).values():
            found[OWN] = compare(first, own)
        found[EXACT] = one_layer(options, adapter, first.tokens)
        first.of("step_8" if fits else "step_8_checkpointing")()  # as it will be timed: the paths of its calls are counted, too
        made = {"agreement": found, "paths": paths(first.model)}
        for part, each in made.items():
            run.result[part][adapter] = each
        print(json.dumps(made), flush=True)
    free(options.device)


def compile_all(run: Run, ways: dict[str, Trained], adapter: str) -> None:
    """From here on, for good. Steps have moved each way's adapters by now: fdora is compared with itself, eager."""
    where, mine = {"adapter": adapter, "compiled": True}, [name for name in ways if "fdora" in name]
    eager = run.failed.attempt(mine, lambda name: results(ways[name]), at(where | {"compiled": False}))
    torch._dynamo.reset()
    for way in ways.values():
        way.compile()
    found = run.failed.attempt(eager, lambda name: compare(ways[name], eager[name]), at(where))
    run.result["agreement"].setdefault(adapter, {})["compiled_against_eager"] = found


def all_modes(run: Run, adapter: str) -> None:
    options, where = run.options, {"adapter": adapter}
    sizes = {size: getattr(run.options, size) for size in ("layers", "seq", "r")}
    ways = prepare(run, adapter, **sizes)
    run.failed.attempt(["agreement"], lambda _: agree(run, ways, adapter), at(where))
    for compiled in compilations(options):
        if compiled:
            compile_all(run, ways, adapter)
        for mode in options.modes:
            timed(run, ways, mode, sizes | where | {"compiled": compiled})


def of_size(run: Run, value: int) -> None:
    """Of a sweep."""
    options = run.options
    over, adapter, label = {"S": "seq"}.get(options.sweep, options.sweep), options.adapter[0], f"{options.sweep} {value}"
    sizes = {size: getattr(options, size) for size in ("layers", "seq", "r")} | {over: value}
    built = run.failed.attempt([label], lambda _: prepare(run, adapter, **sizes))
    for mode in options.modes:
        timed(run, built.get(label, {}), mode, sizes | {"adapter": adapter, "compiled": False})
    run.set(sweep={"over": options.sweep, "exponents": exponents(run.result["rows"], over)})


def against(way: str) -> str:
    """Where the agreement of a way with PEFT's DoRA is kept."""
    return "_".join(filter(None, (way.removeprefix("peft_fdora").strip("_"), "against_peft_dora")))


def exponents(rows: list[dict], over: str) -> dict[str, dict]:
    """p in value ~ size^p, least squares of logarithms, by mode and way, and from which size to which.

    ``upper`` is the same of the larger half of the sizes: at small ones the launches weigh, and what does not grow.
    """
    found = {}
    for (mode, way), mine in records.grouped(rows, "mode", "way").items():
        points = sorted(mine, key=itemgetter(over))
        if len(points) > 1:
            upper = points[-max(2, math.ceil(len(points) / 2)) :]
            found[f"{mode}, {way}"] = fit(points, over) | {"upper": fit(upper, over)}
    return found


def fit(points: list[dict], over: str) -> dict:
    sizes = [row[over] for row in points]
    x, found = list(map(math.log, sizes)), {"from": sizes[0], "to": sizes[-1]}
    for field in ("ms", "peak_mb"):
        found[field] = round(linear_regression(x, [math.log(row[field]) for row in points]).slope, 3)
    return found


OPTIONS = {
    **stack(4, WAYS, many=True, more=COMPOSED),
    "--model": One(ARCHITECTURES, "qwen3-8b"),
    "--modes": Some(MODES, ()),
    "--sweep": One(SWEEPS),
    "--values": (numbers, "of the sweep"),
    **COMPILED,
    "--tiny": False,
}


def check(parser, options):
    options.adapter = options.adapter or (["bf16"] if options.quick else ["bf16", "fp32"])
    usual = ("inference", "gradient") if options.sweep else QUICK if options.quick else MODES
    options.modes = options.modes or list(usual)
    options.values = options.values or SWEEPS.get(options.sweep)


def measure(run: Run) -> None:
    options = run.options
    torch._dynamo.config.recompile_limit = 64
    run.set("model", "tiny", "dtype", "loss_tokens", agreement={}, paths={}, failed=run.failed)
    for each in run.cases(options.values) if options.sweep else options.adapter:
        (of_size if options.sweep else all_modes)(run, each)
        free(options.device)


def shown(result: dict) -> str:
    trees = (tables(result[part]) for part in ("agreement", "norms", "sweep") if result.get(part))
    return "\n\n".join([beside_lora(result), *trees])


def judged(run: Run) -> None:
    """The float32 run says how much bf16 loses, which is nobody's failure."""
    apart: dict[str, dict[str, float]] = {}
    for each in records.tree_lines("", [], run.result["agreement"]):
        *where, part = each["at"] or [""]
        if "relative" in each["values"] and EXACT not in where:
            apart.setdefault(", ".join(where), {})[part] = each["values"]["relative"]
    judge(apart, MOST_APART[run.options.dtype], run.failed, decoder.left(run.result["paths"], run.options))


main = Suite(measure, OPTIONS, runs=7, seconds=math.inf, check=check, quick={"runs": 3}, show=shown, judge=judged)
