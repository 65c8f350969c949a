"""Tables and figures from the committed results, and from nothing else.

    python -m bench.report            # bench/RESULTS.md and docs/benchmarks/*.png
    python -m bench.report --readme   # the same, what is marked in README.md and docs/benchmarks.md, docs/step.svg, models.svg

Every number in them is read from ``bench/results/*.jsonl``. In README a number stands between ``<!-- name -->`` and
``<!-- /name -->``; the functions below that are called ``readme_<name>`` write what is between. What fdora loses is
computed too, in bench/duels.py: every time and every peak of every file is compared with every rival's.
"""

from __future__ import annotations

import argparse
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from bench import (
    converge,
    diffusion,
    jobs,
    model,
    profile,
    schedule,
    serve,
    steps,
    studies,
    vit,
)
from bench.all import TABLE
from bench.duels import MODES12, how, losses, where
from bench.figures import FIGURES, SWEPT, bars, converged, described, draw
from bench.records import names, result
from bench.suite import shown
from bench.table import columns, pivot, side_by_side, table
from bench.ways import NAMES, RIVALS

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "bench/RESULTS.md"
ANSWERS, ASKED = ROOT / "bench/answers.txt", ROOT / "docs/benchmarks.md"
FIGURE_FOLDER = ROOT / "docs/benchmarks"
PICTURE = ROOT / "docs/step.svg"
MODELS_PICTURE = ROOT / "docs/models.svg"
WIDTH = 128


def pick(rows: list[dict], **wanted) -> dict:
    (row,) = (row for row in rows if wanted.items() <= row.items())
    return row


# README

# group, label, way and whether it is compiled; what is not compiled is compared with what is not
STEP = (
    ("eager", "LoRA", "peft_lora", False),
    ("eager", "PEFT's DoRA", "peft_dora", False),
    ("eager", "fdora", "peft_fdora_fused", False),
    ("eager", "fuse=False", "peft_fdora", False),
    ("torch.compile", "LoRA, compiled", "peft_lora", True),
    ("torch.compile", "PEFT's DoRA, compiled", "peft_dora", True),
    ("torch.compile", "fdora, compiled", "peft_fdora_fused", True),
)
STEP_8 = {"mode": "step_8", "adapter": "bf16"}
STEP_FILES = [(machine, model) for machine in ("h200", "h100") for model in ("qwen3-8b", "llama-3.1-8b")]


class Step(NamedTuple):
    """A training step of one model: ms of a micro-batch and peak GiB of each row of `STEP`, by its label."""

    values: dict[str, tuple[float, float]]
    about: str
    gpu: str


def step() -> Step:
    """From the first model of `STEP_FILES` that was measured in every way of `STEP`."""
    for machine, base in STEP_FILES:
        files = [f"{machine}/model_{base}{part}" for part in ("", "_compiled")]
        results = [result(name) for name in files if name in names()]
        rows = {(x["way"], x["compiled"]): x for each in results for x in each["rows"] if STEP_8.items() <= x.items()}
        if all((way, compiled) in rows for _, _, way, compiled in STEP):
            found = {label: rows[way, compiled] for _, label, way, compiled in STEP}
            x = found["LoRA"]
            gpu = machine.upper()
            about = "{layers} layers of {name}, {seq} tokens, r = {r}, bf16, one {gpu}".format(**x, name=MODELS[base], gpu=gpu)
            return Step({label: (x["ms"] / 8, x["peak_mb"] / 1024) for label, x in found.items()}, about, gpu)
    raise SystemExit(f"no model of {STEP_FILES} was measured in every way of the picture")


UNRECORDED = "not recorded"


def commit_of(found: dict) -> str:
    return found.get("about", {}).get("commit") or UNRECORDED


def picture() -> str:
    groups = {}
    for group, label, *_ in STEP:
        if not label.startswith("LoRA"):
            groups.setdefault(group, {})[label] = [over_lora(label, field) for field in (0, 1)]
    return bars(("time of a training step", "memory of a training step"), groups)


def over_lora(label: str, field: int = 0) -> float:
    """Time (0) or memory (1) of a training step over LoRA's, compiled over compiled."""
    values = step().values
    return values[label][field] / values["LoRA, compiled" if "compiled" in label else "LoRA"][field]


HEADLINE, LONGER = "h200/trainer", "h200/steps_dropout"


def readme_headline() -> str:
    """The recipe in a trainer; beside it the lengths of the same recipe at which it loses."""
    found = result(HEADLINE)
    ways = {row["way"]: row for row in found["rows"]}
    share = lambda way, field="ms": f"{ways[way][field] / ways['peft_lora'][field]:.2f}"  # noqa: E731
    longer = {S: of for S, of in longer_rows().items() if of["use_fdora_fused"] > of["peft_lora"]}
    shares = {
        way: [f"{of[way] / of['peft_lora']:.2f}" for of in longer.values()]
        for way in ("use_fdora_fused", "use_fdora_fused_lora_dropout")
    }
    exact, alone = shares.values()
    lost = (
        "It loses where sequences are so long that LoRA does not wait for the host: with "
        f"{listed([*map(str, longer)])} tokens a step takes {listed(exact)}. "
    )
    also = f", and the longer ones take {listed(alone)}"
    return (
        f"With transformers' Trainer on the whole of {MODELS[found['model']]}, one H200, a step takes "
        f"{share('peft_fdora_fused')} of LoRA's wall time and {share('peft_fdora_fused', 'peak_mb')} of its peak memory, where "
        f"PEFT's own DoRA takes {share('peft_dora')} of the time, and computes the same function. That is the usual recipe: "
        f"`lora_dropout={found['dropout']}`, float32 adapters under bf16 autocast, gradient checkpointing and "
        f'{found["micro_batches"]} unpadded sequences a step. {lost if longer else ""}With `dropout_mode="lora"`, which is a '
        f"different function, a step of the Trainer takes {share('peft_fdora_fused_lora_dropout')}{also if longer else ''}."
    )


def longer_rows() -> dict[int, dict[str, float]]:
    """ms of each way, by tokens of a micro-batch."""
    found: dict[int, dict[str, float]] = {}
    for row in result(LONGER)["rows"]:
        if (row["model"], row["mode"]) == ("8b", "checkpointing"):
            found.setdefault(row["S"], {})[row["way"]] = row["ms"]
    return found


def listed(words: Sequence[str]) -> str:
    *rest, last = words or [""]
    return f"{', '.join(rest)} and {last}" if rest else last


def readme_picture() -> str:
    parts = [
        f"{label} {over_lora(label):.2f} of LoRA's time and {over_lora(label, 1):.2f} of its memory"
        for _, label, *_ in STEP
        if not label.startswith("LoRA")
    ]
    alt = f"Time and memory of a training step as shares of LoRA's, lower is better: {'; '.join(parts)}."
    return f"![{alt}]({PICTURE.relative_to(ROOT)})"


def readme_setting() -> str:
    return step().about


MODELS = {
    "qwen3-8b": "Qwen3-8B",
    "llama-3.1-8b": "Llama-3.1-8B",
    "gemma-3-12b": "Gemma-3-12B",
    "qwen2.5-32b": "Qwen2.5-32B",
    "mistral-small-24b": "Mistral-Small-24B",
    "qwen3-vl-8b": "Qwen3-VL-8B",
}


def eight_steps() -> dict[str, dict[str, dict]]:
    """The rows of each way, eager, of the models for which an H200 has all of them."""
    found = {}
    for name in MODELS:
        run, wanted = f"h200/model_{name}", STEP_8 | {"compiled": False}
        rows = result(run)["rows"] if run in names() else []
        ways = {row["way"]: row for row in rows if wanted.items() <= row.items()}
        if ways.keys() >= set(model.WAYS):
            found[name] = {way: ways[way] for way in model.WAYS}
    return found


def models_picture() -> str:
    """A panel for each model: the time of eight micro-batches and an optimizer step, over LoRA's."""
    labels = {"PEFT's DoRA": "peft_dora", "fdora": "peft_fdora_fused", "fuse=False": "peft_fdora"}
    found = eight_steps()
    shares = {label: [rows[way]["ms"] / rows["peft_lora"]["ms"] for rows in found.values()] for label, way in labels.items()}
    return bars([MODELS[name] for name in found], {"time of a training step": shares})


def readme_models() -> str:
    lines = []
    for name, rows in eight_steps().items():
        lora, dora, fdora = (rows[way] for way in ("peft_lora", "peft_dora", "peft_fdora_fused"))
        saved = (dora["peak_mb"] - fdora["peak_mb"]) / 1024
        shares = f"{dora['ms'] / fdora['ms']:.2f} x", f"{fdora['ms'] / lora['ms']:.2f}", f"{saved:.1f} GiB"
        lines.append([f"{MODELS[name]}, {lora['layers']} layers", *shares])
    return table(["one GPU", "faster than PEFT's DoRA", "share of LoRA's time", "memory saved over PEFT's DoRA"], lines)


SHARES = {"use_fdora_fused": "fdora", "use_fdora": "`fuse=False`", "peft_dora": "PEFT's DoRA"}


def compiled_rows(S: int, way: str) -> list[dict]:
    """In torch's default mode. Few tokens were measured again, in a file that lacks PEFT's DoRA."""
    again = S == 512 and way != "peft_dora"
    rows = result(f"h200/steps_compiled{'_512' if again else ''}")["rows"]
    return [row for row in rows if row["S"] == S and row["compiled"] == "default"]


def readme_tokens() -> str:
    """Medians over all cells and modes of bench.steps."""
    lines, eager = [], [row for row in result("h200/steps")["rows"] if not row["compiled"]]
    for tokens in ((128, 512), (2048, 4096)):
        rows = [row for row in eager if row["S"] in tokens]
        lines.append([f"{tokens[0]} and {tokens[1]} tokens", *(middle(rows, way) for way in SHARES)])
    for S in (512, 4096):
        lines.append([f"{S} tokens, compiled", *(middle(compiled_rows(S, way), way) for way in SHARES)])
    return table(["share of LoRA's time", *SHARES.values()], lines)


def middle(rows: list[dict], way: str) -> str:
    return f"{statistics.median(over(rows, way, 'ms')):.2f}"


def over(rows: list[dict], way: str, field: str) -> list[float]:
    """Of each case its time over LoRA's."""
    lora = {where(row): row[field] for row in rows if row["way"] == "peft_lora"}
    return [row[field] / lora[where(row)] for row in rows if row["way"] == way]


def readme_sharded() -> str:
    """Time and memory of a step under FSDP2 on two GPUs."""
    lines = []
    for name in ("sharded_12", "sharded_r384"):
        found = result(f"h200/{name}")
        ways = {x["way"]: x for x in found["rows"] if x["mode"] == "step"}
        lora, cells = ways["peft_lora"], []
        for way in ("peft_fdora_fused", "peft_fdora", "peft_dora"):
            of = [f"{ways[way][field] / lora[field]:.2f}" for field in ("ms", "peak_mb")] if way in ways else ["not measured"]
            cells.append(" of the time, ".join(of) + (" of the memory" if way in ways else ""))
        lines.append([f"{MODELS[found['model']]}, {found['layers']} layers, r = {found['r']}", *cells])
    return table(["two GPUs, FSDP2", *SHARES.values()], lines)


def readme_losses() -> str:
    """What is lost to LoRA, with the figures that are measured."""
    empty, warm = ({x["cache"]: x for x in result("h200/host")["first_call"]}[cache] for cache in ("empty", "warm"))
    first = [f"{x['first_call_ms'] / 1000:.1f} s" for x in (empty, warm)]
    replayed = [row for row in result("h200/steps_compiled_replay")["rows"] if row["mode"] == "step"]
    whole = [x for x in result("h200/steps_whole")["rows"] if x["compiled"] == "whole-reduce-overhead" and x["S"] == 400]
    graphs, whole_graphs = (f"{max(over(rows, 'use_fdora_fused', 'ms')):.2f}" for rows in (replayed, whole))
    sweep = [x for x in result("h200/model_qwen3-8b_sweep_S")["rows"] if x["mode"] == "gradient"]
    short = [f"{over([x for x in sweep if x['seq'] == S], 'peft_fdora_fused', 'ms')[0]:.2f}" for S in (512, 1024)]
    dropped = [row for row in result("h200/model_qwen3-8b_dropout")["rows"] if row["mode"] == "step_8"]
    ways = ("peft_fdora_fused", "peft_dora", "peft_fdora_fused_lora_dropout")
    exact, peft, alone = (f"{over(dropped, way, 'ms')[0]:.2f}" for way in ways)
    trained = {x["way"]: x for x in result(HEADLINE)["rows"]}
    before, begin, loras = (
        trained["peft_fdora_fused"]["warmup_s"],
        *(trained[w]["first_s"] for w in ("peft_fdora_fused", "peft_lora")),
    )
    points = (
        "**Dropout.** `lora_dropout` above 0 costs a second product with the base weight, in fdora as in PEFT's DoRA. With "
        f"0.05 and float32 adapters under autocast a step takes {exact} of LoRA's time, and {peft} with PEFT's DoRA. With "
        f'`dropout_mode="lora"`, which computes a different function in training, it takes {alone}. All other figures are '
        "without dropout.",
        f"**The first call.** Forward and backward of one small layer took {first[0]} in a new process with an empty Triton "
        f"cache, and {first[1]} with a warm one. In the training at the top `fdora.warmup` took {before:.1f} s, and the first "
        f"step {begin:.1f} s for LoRA's {loras:.1f} s.",
        f'**CUDA graphs of short sequences.** With `torch.compile(mode="reduce-overhead")` and few tokens a training step '
        f"takes {graphs} of LoRA's time where layers are compiled one by one, up to {whole_graphs} as one graph.",
        f"**Short sequences, in an older measurement.** There forward and backward took {short[0]} of LoRA's time with 512 "
        f"tokens and {short[1]} with 1024. It has not been repeated; the newer table above does not show it.",
        "**Memory of a single layer.** Kernels that overwrite their inputs (LoRAFusion, and the LoRA kernels of Axolotl and "
        "Unsloth) need less of it. Also, a layer that computes its norm in every call is slow with few tokens: keep the norm.",
    )
    return "\n".join(textwrap.fill(f"- {each}", WIDTH, subsequent_indent="  ", break_on_hyphens=False) for each in points)


def readme(text: str) -> str:
    """README with what these functions write today between its marks. Each stands there once."""
    blocks = {name.removeprefix("readme_"): write for name, write in globals().items() if name.startswith("readme_")}
    marked = re.findall(r"<!-- /(\w+) -->", text)
    if sorted(marked) != sorted(blocks):
        raise SystemExit(f"README marks {sorted(marked)}, and there is {sorted(blocks)} to write")
    for name, write in blocks.items():
        before, after = text.split(f"<!-- {name} -->")[0], text.split(f"<!-- /{name} -->")[1]
        body = wrapped(
            write(), f"{before.splitlines()[-1] if before[-1:] != chr(10) else ''}<!-- {name} -->", f"<!-- /{name} -->{after}"
        )
        text = f"{before}<!-- {name} -->{body}<!-- /{name} -->{after}"
    return text


def wrapped(body: str, before: str, after: str) -> str:
    """In lines of `WIDTH`, between what is before it in its line and after it. A table or a picture gets lines of its own:
    a line that begins with a mark is not read as Markdown."""
    if "\n" in body:
        return f"\n{body}\n"
    words = {"width": WIDTH, "break_long_words": False, "break_on_hyphens": False}
    if body.startswith("!["):
        return "\n" + textwrap.fill(body, **words) + "\n"
    tail = "x" * len(re.match(r"<!-- /\w+ -->\S*", after)[0])
    lines = textwrap.wrap(body + tail, initial_indent="x" * len(before), subsequent_indent=indent(before), **words)
    return "\n".join(lines)[len(before) :].removesuffix(tail)


def indent(line: str) -> str:
    """Of the lines after it in the same paragraph or item of a list."""
    return " " * len(re.match(r" *(- )?", line)[0])


# bench/RESULTS.md


def norm_table(run: str, forms: Iterable[str], cases: Iterable[tuple], head: list[str], digits: int) -> str:
    """Of each form ms, MB and error; the roof where the head has room for it."""
    rows, lines = result(run)["rows"], []
    for N, r, dtype in cases:
        found = [pick(rows, N=N, r=r, dtype=dtype, form=form) for form in forms]
        cells = [f"{x['ms']:.{digits}f} / {x['peak_mb']:.0f} / {x['error']:.0e}" for x in found]
        roof = [found[0].get("roof_ms", "")] if "roof, ms" in head else []
        lines.append([f"{N} x {found[0]['K']}, {r}, {dtype}", *cells, *roof])
    return table(["N x K, r, dtype", "dense `B A`: ms / MB / error", "`dora_norm`", *head], lines)


NORM_COLUMNS = {name: f"{{{name}}}" for name in ("form", "N", "K", "r", "dtype", "ms", "roof_ms", "peak_mb", "error")}
TRAINED = {name: f"{{{name}}}" for name in ("way", "ms", "ms_ratio", "peak_mb", "tokens_per_s", "first_s")}


def norms() -> list[str]:
    on_gpu = [(8192, 384, "bfloat16"), (4096, 16, "bfloat16"), (14336, 64, "bfloat16")]
    on_gpu += [(4096, 384, "bfloat16"), (4096, 384, "float32")]
    on_cpu = [(4096, 384, "float32"), (4096, 16, "float32"), (14336, 64, "float32"), (4096, 384, "bfloat16")]
    gpu = norm_table("h100/norm_forms", ("dense", "triton"), on_gpu, ["roof, ms"], 3)
    cpu = norm_table("cpu/norm_forms", ("dense", "tiles", "factored"), on_cpu, ["`dora_norm(base_sqnorm=)`"], 1)
    others = [name for kind in ("norm_experts", "norm_many") for name in names(kind)]
    tables = runs(others, lambda found: [columns(found["rows"], NORM_COLUMNS)])
    return [figure("roofline", "Roofline of the norm"), NORM, gpu, NORM_CPU, cpu, *tables]


COMPOSED = (
    "`dora_compose` on the same H100 (4096 x 14336, bf16), in ms: {fwd_triton_ms:.3f} forward, {fwd_bwd_triton_ms:.3f} "
    "with backward; the formula in plain torch {fwd_plain_ms:.3f} and {fwd_bwd_plain_ms:.3f}; a copy of the same bytes "
    "{fwd_copy_ms:.3f} and {fwd_bwd_copy_ms:.3f}."
)


def composed(found: dict) -> list[str]:
    """Times over the kernel's."""
    others, lines = ("eager", "plain", "copy"), []
    for x in found["rows"]:
        over = [x[f"{mode}_{way}_ms"] / x[f"{mode}_triton_ms"] for mode in ("fwd", "fwd_bwd") for way in others]
        lines.append([x["op"], f"{x['M']} x {x['N']}", *(f"{each:.2f}" for each in over)])
    head = ["op", "tokens x width", "eager", "plain torch", "copy", "with backward: eager", "plain torch", "copy"]
    return [table(head, lines)]


def compositions() -> list[str]:
    """And of the run with many shapes, where there is one."""
    usual = COMPOSED.format_map(pick(result("h100/compose")["rows"], op="dora_compose", M=4096, N=14336))
    of_embedding = runs("compose_embedding", lambda found: [shown(found["rows"])])
    return [usual, *runs("compose_20", composed, ": the other's time over the kernel's"), *of_embedding]


# The columns of one layer: way, and whether its norm is given
LAYER_WAYS = {
    "frozen": ("frozen", "inside"),
    "products": ("bare", "inside"),
    "PEFT LoRA": ("peft_lora", "inside"),
    "PEFT DoRA": ("peft_dora", "inside"),
    "compiled": ("peft_dora_compiled", "inside"),
    "paper": ("dorafactors", "inside"),
    "`dora_linear`": ("fdora", "inside"),
    "`norm=` given": ("fdora", "given"),
}
LAYER_CASES = (
    *((4096, 4096, 4096, 16), (4096, 4096, 4096, 384), (4096, 4096, 14336, 64), (4096, 14336, 4096, 64)),
    *((4096, 8192, 8192, 384), (4096, 5120, 27648, 16), (16384, 4096, 4096, 16)),
)


def one_layer() -> str:
    rows, found = result("h100/layer_quick")["rows"], {}
    for M, K, N, r in LAYER_CASES:
        ms = {norm: pick(rows, M=M, K=K, N=N, r=r, mode="fwd_bwd", norm=norm)["ms"] for norm in ("given", "inside")}
        found[f"{M}, {K} x {N}, {r}",] = {name: f"{ms[norm][way]:.3f}" for name, (way, norm) in LAYER_WAYS.items()}
    return side_by_side(["tokens, K x N, r"], found)


def layers12_summary() -> str:
    runs = (("h100", 384, "eager"), ("h100", 384, "compiled"), ("h200", 384, "eager"), ("h200", 16, "eager"))
    found = {}
    for machine, r, kind in (*runs, ("h200", 384, "compiled")):
        rows = result(f"{machine}/layers12_r{r}_{kind}")["rows"]
        found[f"{machine.upper()}, {r}{', compiled' if kind == 'compiled' else ''}",] = {
            NAMES[way]: " / ".join(f"{pick(rows, way=way)[f'{mode}_ms']:.1f}" for mode in MODES12)
            for way in ("frozen", "peft_lora", "peft_dora", "peft_fdora", "fdora")
        }
    return side_by_side(["GPU, r"], found)


def layers12() -> str:
    head = ["machine", "r", "", "way", *(f"{mode.replace('_', ', ')}: ms / MB" for mode in MODES12)]
    lines = [
        [name.split("/")[0], row["r"], how(row), NAMES[row["way"]]]
        + [f"{row.get(f'{mode}_ms', '')} / {row.get(f'{mode}_peak_mb', '')}" for mode in MODES12]
        for name in names("layers12_")
        for row in result(name)["rows"]
    ]
    return table(head, lines)


def host(machine: str) -> str:
    return (
        "forward {fdora[fwd_us]:.0f} us against LoRA's {peft_lora[fwd_us]:.0f}, with backward {fdora[fwd_bwd_us]:.0f} against "
        "{peft_lora[fwd_bwd_us]:.0f}, DoRA's {peft_dora[fwd_bwd_us]:.0f}"
    ).format_map({row["way"]: row for row in result(f"{machine}/host")["rows"]})


def over_fdora(pairs: dict[str, float], way: str) -> float | None:
    """The way's time over fdora's, where it was compared."""
    floor = pairs.get(f"fdora/{way}")
    return 1 / floor if floor else pairs.get(f"{way}/fdora")


def means() -> str:
    """Geometric means over the cases of each file: the rival's time over fdora's. A column for each way that one knows."""
    known = {way for name in names("layer_") for row in result(name)["rows"] for way in row["ms"]}
    ways, lines = [way for way in ("frozen", "bare", *RIVALS) if way in known], []
    for name in names("layer_"):
        summary = result(name)["summary"]
        for mode, pairs in summary["geometric_means"].items():
            values = [f"{value:.2f}" if (value := over_fdora(pairs, way)) else "" for way in ways]
            if any(values):
                lines.append([name, summary["cases"], mode, *values])
    return table(["results", "cases", "mode", *(NAMES[way] for way in ways)], lines)


def runs(wanted: str | Iterable[str], write: Callable[[dict], Iterable[str]], title: str = "") -> list[str]:
    """Of each run whose name begins so, or of these: its name, a title of what it says of itself, and what is written of it."""
    parts = []
    for name in names(wanted) if isinstance(wanted, str) else wanted:
        found = {"run": name, "dropout": 0} | result(name)
        parts += [f"### {name}{title.format_map(found)}", *write(found)]
    return parts


def not_run(found: dict) -> list[str]:
    return [f"Did not run: {case} ({why})." for case, why in found.get("failed", {}).items()]


def models() -> list[str]:
    return [
        *(figure(f"sweep_{size}", f"Time and memory against {size}") for size in SWEPT),
        *runs("model_", a_model, ": {model}"),
    ]


def a_model(found: dict) -> list[str]:
    parts = [model.markdown(found), *not_run(found)]
    if skipped := found.get("skipped"):
        parts.append(f"Out of time: {len(skipped)} cases, from {described(skipped[0])} on.")
    for adapter, agreement in found["agreement"].items():
        exact = agreement.get("one_layer_against_float32", {})
        against = model.fdoras(agreement) | {f"float32, {NAMES[way]}": each for way, each in exact.items()}
        rows = [{"label": label, "part": part} | v for label, each in against.items() for part, v in each.items()]
        parts += [f"Agreement, {adapter} adapters:", columns(rows, AGREEMENT)]
    for adapter, norms in found.get("norms", {}).items():
        parts.append(
            "Norms of an optimizer step of 8 micro-batches, {} adapters: {asked} asked for, {computed} computed, of "
            "{layers} layers.".format(adapter, **norms)
        )
    if fits := found.get("sweep"):
        lines = [[name, *growth(fit), *growth(fit["upper"])] for name, fit in fits["exponents"].items()]
        parts += [f"Growth with {fits['over']}, exponents, of all sizes and of the larger half:", table(GROWTH, lines)]
    return parts


GROWTH = ["mode, way", *(2 * ["sizes", "time", "peak memory"])]
AGREEMENT = {"against": "{label}", "of": "{part}", "relative L2": "{relative:.1e}", "cosine": "{cosine:.6f}"}
AGREEMENT |= {"largest difference": "{max_difference:.2e}", "largest value": "{max:.2e}"}


def growth(fit: dict) -> list[str]:
    return [f"{fit['from']} to {fit['to']}", f"{fit['ms']:.2f}", f"{fit['peak_mb']:.2f}"]


def convergence() -> list[str]:
    parts, target = [figure("losses", "Loss of a step, and differences")], converge.TARGET
    for (machine, settings), rows in converged().items():
        parts += [f"### {machine}", f"{settings}.", converge.markdown(rows)]
        for optimizer in dict.fromkeys(row["optimizer"] for row in rows):
            mine = [row["difference"] for row in rows if row["optimizer"] == optimizer]
            apart, fdora, peft = (
                sum(each[pair]["mean"] for each in mine) / len(mine)
                for pair in ("fdora, peft", "fdora, float32", "peft, float32")
            )
            worst = max(each["fdora, peft"]["worst"] for each in mine)
            parts.append(
                f"{optimizer}, {len(mine)} of 3 seeds: a step's loss through fdora is {apart:.1e} from PEFT's in the mean "
                f"(target {target:.1e}: {'met' if apart <= target else 'missed'}), {worst:.1e} at worst. From the float32 run "
                f"fdora is {fdora:.1e} away, PEFT {peft:.1e}: the larger error is {'fdora' if fdora > peft else 'PEFT'}'s."
            )
    return parts + runs("train_", told)


def groups() -> list[str]:
    lines, missing = [], set()
    ways = ("bare", "peft_lora", "unsloth_lora", "axolotl_lora", "axolotl_dora", "separate", "fdora")
    for name in names("group"):
        for row in result(name)["rows"]:
            cells = [f"{row['ms'][way]:.2f} / {row['peak_mb'][way]:.0f}" if way in row["ms"] else "" for way in ways]
            lines.append([name.split("/")[0], row["model"], row["part"], row["r"], row["mode"], *cells])
            missing |= {f"Did not run, {name}: {NAMES[way]} ({why})." for way, why in row["failed"].items()}
    head = ["machine", "model", "layers", "r", "mode", *(f"{NAMES[way]}: ms / MB" for way in ways)]
    return ["4096 tokens, norms given.", table(head, lines), *sorted(missing)]


SUITE = ("M", "K", "N", "r", "norm")


def cold(found: dict) -> list[str]:
    """One launch out of a cold cache; bf16 throughout."""
    rows = [x for x in found["rows"] if {x["dtype"], x.get("adapter", x["dtype"])} == {"bfloat16"}]
    cells = pivot(
        rows,
        lambda row: (row["op"], *(row.get(key, "") for key in SUITE), row["mode"]),
        lambda row: f"{row['ms']:.3f} / {row['wall_ms']:.3f} / {row.get('of_roof', '')}",
        by="backend",
    )
    return [side_by_side(["op", *SUITE, "mode"], cells, "{}: GPU ms / wall ms / of the roof", ("eager", "triton"))]


def sources() -> str:
    lines = []
    for name in names():
        found = result(name)
        about = found.get("versions", {}) | found.get("about", {})
        machine = about.get("gpu") or about.get("cpu") or found.get("device", "")
        problem = f", {found['problem']}" if "problem" in found else ""  # bench.all's word for what did not end well
        lines.append([name, machine, *(about.get(key) or "" for key in ("driver", "torch", "triton"))])
        lines[-1].append(commit_of(found) + problem)
    return table(["results", "machine", "driver", "torch", "triton", "commit"], lines)


def figure(name: str, title: str) -> str:
    """Empty where there is nothing to draw."""
    return f"![{title}](../docs/benchmarks/{name}.png)" if FIGURES[name].panels() else ""


def since() -> str:
    unknown = [name for name in names() if commit_of(result(name)) == UNRECORDED]
    but = f" ({', '.join(unknown)}: {UNRECORDED})" if unknown else ""
    return (
        f"Each figure is of the commit that stands beside its file under Sources{but}. `fdora/triton` may have changed since: "
        "[bench/NOTES.md](NOTES.md#changes-since-the-measurements) says what did, and was not measured again."
    )


INTRO = (
    "Written by `python -m bench.report` from `bench/results`. [bench/NOTES.md](NOTES.md) says what was counted, "
    "expected and tried."
)
NORM = (
    "Time in ms, peak memory and the worst relative error. `python -m bench.norm_forms` and `python -m bench.compose`, with "
    "`--device cuda` on a GPU, print it for your machine. One H100, GPU time; the roof is the larger of reading W and of the "
    "product, both at the speed measured in the same run. Launches follow each other: a W of 32 MiB (4096 x 4096 in bf16) is "
    "still in the cache, which the roof does not assume. `make bench` times one launch out of a cold one."
)
NORM_CPU = (
    "Two cores of an AVX-512 CPU. The last line is a loss: with bf16 instructions the dense product in bf16 is faster, and "
    "wrong by 0.4 %."
)
LAYER = (
    'Forward and backward on an H100, bf16, GPU time in ms (`python -m bench.layer --device cuda --quick`). "products" are '
    'the eight bare matrix products by cuBLAS and nothing else, "compiled" is PEFT\'s DoRA under `torch.compile`, "paper" is '
    "the code of [Scaling DoRA](https://arxiv.org/abs/2603.22276). `dora_linear` computes its norm in the call; in the last "
    "column the norm was computed before:"
)
LAYERS12 = (
    "Qwen3-8B-shaped layers, 4096 tokens, every linear layer adapted (bench.layers12, until 4b97a39f). "
    '`use_fdora` checks on the GPU, in every call, whether its norms still hold; "fdora" is given them, computed once per '
    "optimizer step. In ms, inference / gradient / gradient with checkpointing:"
)
STEPS = (
    "Layers of Qwen3 through PEFT, an optimizer step each time (`python -m bench.steps --device cuda`, which says what the "
    "modes are). A model called 8b is 4096 wide, one called 2048 so wide."
)
ISSUE = (
    "How long the host takes to issue a forward and a backward, the GPU never waited for in between "
    "(bench.issue_time, until 4b97a39f). Hosts differ, and one host from run to run: the last column is the time of "
    "two million additions in Python."
)
SCHEDULES = (
    "Simulated, not measured: `python -m bench.schedule`, which says what the ways are. Time is counted in tokens of one "
    "stage, forward and backward alike. The paper's bubbles are LoRAFusion's own measurements, on other texts."
)
STAGES = (
    "Simulated from layers that were measured: bench.jobs_bubble, until 4b97a39f, says how, and what the ways are. Bubble, "
    "and tokens per second. Two stages on two H200 ({run}): {predicted:.1%} of {predicted_seconds:.3f} s in the same way, "
    "{measured:.1%} of {measured_seconds:.3f} s measured."
)
QUANTISED = (
    "NF4 with nested scales as bitsandbytes packs it, GPU time; the ways are those of bench.quant (until 4b97a39f; today "
    "`python -m bench.layer --base nf4`), and of "
    "bench.quant_model (until 4b97a39f; today `python -m bench.steps --cells 70b-nf4:4096:64`) for a decoder layer through "
    "PEFT. A mean is geometric; below 1 the first is faster."
)
VISION = (
    "DINOv2's ViT-g/14, 224 x 224, half precision, random weights, every linear of its blocks adapted (`python -m bench.vit`, "
    "which says what the ways are)."
)
SERVING = (
    "One layer of a server, GPU time over that of vLLM's kernels for LoRA, lowest to highest of all shapes and ranks "
    "(`python -m bench.serve`, which says what the ways are). g of an adapter of all linears of Llama-3.1-8B, r 64: {loads}."
)
NEAR = (
    "What six ways to compose lose where g is near 1: relative error of what is added to base, and in brackets of the output "
    "where that is over twice what rounding it costs (`python -m bench.studies near`, which says what is composed)."
)
SPREAD = (
    "g of all 36 linears of the demo's model, pretrained and then really trained (`python -m bench.studies spread`): what 16 "
    "bits lose of it. Below, the layers after the last step."
)
TIMELINE = (
    "Memory through one training step of {layers} layers of {model}, {seq} tokens, r {r} (`python -m bench.studies timeline`)."
)
ADVICE = (
    "Which way to take, from the measurements above of Qwen3's layers on an H200: time over LoRA's in the same run. The advice "
    'follows from its row by rule: the fastest way that computes PEFT\'s function, and `dropout_mode="lora"`, which computes '
    "another in training, where that is a tenth faster."
)
TOGETHER = "Four jobs of AdamW steps on one base (`python -m bench.jobs`, which says what the ways are)."
DIFFUSION = (
    "A training step of diffusers' models at their published sizes, random weights (`python -m bench.diffusion`, which says "
    "what the models and ways are)."
)


def training_steps() -> list[str]:
    taken = runs("steps", lambda found: [steps.markdown(found["rows"]), *not_run(found)], ": {layers} layers")
    issued = runs("issue", issue, ": {layers} layers, width {model}, {S} tokens, r {r}")
    return [STEPS, *taken, *issued]


ISSUED = {"run": "{run}", "way": "{way}", "issue ms, forward / backward": "{ms[forward]:.2f} / {ms[backward]:.2f}"}
ISSUED |= {"beyond frozen": "{excess[forward]:.2f} / {excess[backward]:.2f}"}
ISSUED |= {"of LoRA's": "{excess[forward_ratio]:.2f} / {excess[backward_ratio]:.2f}", "2M additions, ms": "{python_ms}"}


def issue(found: dict) -> list[str]:
    ways = found["runs"][0]["ms"]
    rows = [run | {"run": i, "way": way} for i, run in enumerate(found["runs"]) for way in ways]
    return [ISSUE, columns([row | {key: row[key].get(row["way"], {}) for key in ("ms", "excess")} for row in rows], ISSUED)]


def coded_layers(found: dict) -> str:
    """Of bench.quant, until 4b97a39f: of layers a mean and the worst case by tokens, and times; of norms every case."""
    spread, few = found["summary"]["mean_and_worst"], [row for row in found["rows"] if row["M"] in (1, 16, 4096)]
    pairs, ways = (
        dict.fromkeys(pair for of in spread.values() for pair in of),
        dict.fromkeys(w for row in few for w in row["ms"]),
    )
    means = {"mean / worst": "{what}"} | {pair: f"{{{pair}[0]:.2f}} / {{{pair}[1]:.2f}}" for pair in pairs}
    times = {"M, K x N, r = 64, ms": "{M}, {K} x {N}, {r}, {mode}"} | {way: f"{{ms[{way}]:.3f}}" for way in ways}
    norms = {"N x K, r": "{N} x {K}, {r}"}
    norms |= {f"{way}, us": f"{{us[{way}]:.1f}}" for way in dict.fromkeys(way for row in found["norms"] for way in row["ms"])}
    norms |= {"roof, us": "{roof:.1f}", "error": "{error:.0e}"}
    coded = [row | {"us": {way: 1e3 * ms for way, ms in row["ms"].items()}} for row in found["norms"]]
    parts = [
        (means, [{"what": what} | values for what, values in spread.items()]),
        (times, [row for row in few if row["r"] == 64]),
        (norms, [row | {"roof": 1e3 * max(row["roof_ms"].values())} for row in coded]),
    ]
    return "\n\n".join(columns(rows, said) for said, rows in parts if rows)


NF4_COLUMNS = {"mode": "{mode}", "way": "{way}", "wall ms": "{ms}", "GPU ms": "{gpu_ms}", "peak MB": "{peak_mb}"}


def quantised_layers(found: dict) -> str:
    parts = list(next(iter(found["whole"].values())))
    sums = table(["a whole model, GB", *parts], [[way, *each.values()] for way, each in found["whole"].items()])
    return f"{columns(found['rows'], NF4_COLUMNS)}\n\n{sums}"


def quantised() -> list[str]:
    parts = [QUANTISED]
    for name in names("quant"):
        if "norms" in (found := result(name)):
            parts += runs([name], lambda found: [coded_layers(found)])
        elif "whole" in found:
            parts += runs([name], lambda found: [quantised_layers(found)], ": {cell[model]}, S {cell[S]}, r {cell[r]}")
    return parts


def vision(found: dict) -> list[str]:
    return [vit.markdown(found), "; ".join(vit.summary(found["rows"])) + "."]


def serving() -> list[str]:
    rows = [row for name in names("serve") for row in result(name)["rows"]]
    loads = [f"{row['ms']['model']:.1f} ms" for row in rows if row["kind"] == "load"]
    return [SERVING.format(loads=" and ".join(loads)), serve.markdown([row for row in rows if row["kind"] == "serve"])]


JOBS = ": {layers} layers, r {r}, {microbatches[capacity]} tokens a microbatch, {world} GPU(s), dropout {dropout}"


def stages(found: dict) -> str:
    """Bubbles and tokens per second."""
    cells = pivot(found["rows"], lambda row: (row["world"], row["adapters"]), "{bubble:.1%}, {throughput:.0f}".format_map)
    return side_by_side(["stages", "adapters"], cells)


def studied(study: str) -> dict[str, list[dict]]:
    """The rows of this study by run."""
    found = {name: [row for row in result(name)["rows"] if row["study"] == study] for name in names("study_")}
    return {name: rows for name, rows in found.items() if rows}


def near_one() -> list[str]:
    tables = [studies.near_table(rows, dtype) for rows in studied("near").values() for dtype in studies.HALVES]
    return [figure("near", "Error of six ways to compose, by the spread of g"), NEAR, *tables]


def spreads() -> list[str]:
    tables = [studies.spread_table(rows, layers) for rows in studied("spread").values() for layers in (False, True)]
    return [figure("spread", "g - 1 by layer"), SPREAD, *tables]


def timelines() -> list[str]:
    parts = [figure("timeline", "Memory through a training step")]
    for name, rows in studied("timeline").items():
        parts += [TIMELINE.format_map(result(name)), studies.timeline_table(rows)]
    return parts


# What people choose by: a run of bench.model or bench.steps, and which of its rows.
SWEEP = "h200/model_qwen3-8b_sweep_{}"
SETTINGS = {
    **{f"rank {r}": (SWEEP.format("r"), {"mode": "gradient", "r": r}) for r in (8, 64, 384, 768)},
    **{f"width {w}": (SWEEP.format("width"), {"mode": "gradient", "width": w}) for w in (1024, 4096, 16384)},
    **{f"{S} tokens": (SWEEP.format("S"), {"mode": "gradient", "seq": S}) for S in (512, 2048, 8192, 32768)},
    "128 tokens, a step": ("h200/steps", {"mode": "step", "model": "8b", "S": 128, "r": 16}),
    "128 tokens, inference": ("h200/steps", {"mode": "inference", "model": "8b", "S": 128, "r": 16}),
    "512 tokens, compiled": ("h200/steps_compiled", {"mode": "step", "S": 512, "compiled": "default"}),
    "4096 tokens, compiled": ("h200/steps_compiled", {"mode": "step", "S": 4096, "compiled": "default"}),
    "dropout 0.05": ("h200/model_qwen3-8b_dropout", {"mode": "step_8"}),
    "dropout 0.05, checkpointing": ("h200/model_qwen3-8b_dropout", {"mode": "step_checkpointing"}),
}
EXACT = {"": "`fuse=False`", "fuse": "`fuse=True`"}


def advice_rows() -> list[list[str]]:
    lines = []
    for setting, (run, wanted) in SETTINGS.items():
        rows = {row["way"]: row for row in (result(run)["rows"] if run in names() else ()) if wanted.items() <= row.items()}
        if "peft_lora" not in rows:
            continue
        over = {way.removeprefix("peft_").replace("use_", ""): row["ms"] / rows["peft_lora"]["ms"] for way, row in rows.items()}
        shown = {"dora": "dora", "fdora": "", "fdora_fused": "fuse", "fdora_fused_lora_dropout": "lora"}
        times = {shown[way]: v for way, v in over.items() if way in shown}
        best = min(EXACT.keys() & times.keys(), key=lambda way: (round(times[way], 2), way == ""))
        said = EXACT[best] + (
            " is not dearer than LoRA" if times[best] < 1.005 else f" costs {times[best] - 1:.0%} more than LoRA"
        )
        if times.get("lora", 9) < 0.9 * times[best]:
            said += f'; `dropout_mode="lora"` {times["lora"] / times[best] - 1:.0%}'
        cells = (f"{times[way]:.2f}" if way in times else "" for way in ("dora", "", "fuse", "lora"))
        lines.append([setting, *cells, said, commit_of(result(run))])
    return lines


def advice() -> list[str]:
    head = ["setting", "PEFT DoRA", *EXACT.values(), '`dropout_mode="lora"`', "advice", "commit"]
    return [ADVICE, table(head, advice_rows())]


def told(found: dict) -> list[str]:
    """Of a run of bench.converge, and of bench.full, until 4b97a39f."""
    rows, (_, name) = found["rows"], found["run"].split("/")
    module = f"python -m {TABLE[name].command.split()[0]}" if name in TABLE else f"bench.{name}"
    command = f"{module} {found['about']['arguments']}".strip()
    body = table(list(rows[0]), [row.values() for row in rows]) if "ratio" in rows[0] else converge.markdown(rows)
    return [f"`{command}`, commit {commit_of(found)}", body]


def answered(page: str) -> str:
    """docs/benchmarks.md with bench/answers.txt as tables, one for each work."""
    parts = []
    for block in ANSWERS.read_text().split("\n## ")[1:]:
        work, *lines = block.strip().splitlines()
        parts += [f"### {work}", table(["they show", "here", "where, or why not"], [each.split(" | ") for each in lines])]
    begin, end = "<!-- generated by bench.report -->\n", "\n<!-- end -->"
    return re.sub(f"{begin}.*{end}", lambda _: begin + "\n\n".join(parts) + end, page, flags=re.S)


def the_host() -> list[str]:
    parts = [f"16 tokens, 512 x 512: H100: {host('h100')}; H200: {host('h200')}."]
    found = {name: result(name) for name in names("launches")}
    pieces = {}
    for name, each in found.items():
        for piece, us in each["us"].items():
            pieces.setdefault((piece,), {})[f"{name}, commit {commit_of(each)}"] = us
    said = "What it costs the host to reach a kernel, in us per call (bench.launches, until 4b97a39f):"
    return [*parts, *([said, side_by_side(["piece"], pieces)] if found else [])]


UNSEEN = (
    "Shapes drawn at random (bench.shapes, until 4b97a39f; today `python -m bench.layer --draw 64`), the norm given: the "
    "first way's GPU time over the "
    'second\'s. "bare" is the matrix products alone, "micro_batches" computes its norm in one of 8.'
)
PASSES = (
    "us on the GPU of backward's elementwise pass, in its best tile, beside torch's sum of two tensors, which moves as many "
    "bytes; of the pass with the two products that read what it writes, beside those two products of dy alone; and of both "
    "factors' gradients, as two products and in one launch (bench/passes.py, until 1fd0804). The shapes are those "
    "where backward was furthest from its bare products."
)
FIT = (
    "The model of waves that chooses a product's way and tile (`python -m bench.fit`): its predictions beside measured times, "
    "and the time of what it chooses over that of the fastest way measured (regret)."
)


FEW = (
    "us on the GPU of one layer and few tokens (bench/few.py, until 1fd0804): bare products; one pass over W by narrow "
    "tiles, and what more tokens take, forward and with backward; forward with the norm apart, and out of the same pass over W "
    "by the fastest of its tiles."
)
FEW_COLUMNS = {"bare": "bare", "one pass": "small", "general": "general", "bare, both": "bare_both"}
FEW_COLUMNS |= {"one pass, both": "small_both", "general, both": "general_both"}
FEW_COLUMNS |= {"norm, one pass": "norm_small", "norm inside": "inside*"}
PASSES_COLUMNS = {"sum of two": "add", "pass": "pass *", "dy B, dy^T h": "bare", "pass, dz B, dz^T h": "chain *"}
PASSES_COLUMNS |= {"dh^T x, dz^T h": "factors", "in one launch": "factors *"}


def in_us(said: str, columns: dict[str, str], found: dict) -> list[str]:
    """A column for each time; one that ends in a star is the fastest of those that begin so."""

    def cell(ms: dict[str, float], key: str) -> str:
        start, star, _ = key.partition("*")
        mine = [each for name, each in ms.items() if name == key or (star and name.startswith(start))]
        return f"{1e3 * min(mine):.1f}" if mine else ""

    lines = [[", ".join(map(str, row["shape"])), *(cell(row["ms"], key) for key in columns.values())] for row in found["rows"]]
    return [said, table(["M, K, N, r", *columns], lines)]


RATIOS = {"ratio": "{ratio}", "mean": "{mean}", "worst": "{worst}", "at M, K, N, r": "{at}", "shapes": "{cases}"}


def shapes(found: dict) -> list[str]:
    return [UNSEEN, columns([{"ratio": ratio} | each for ratio, each in found["summary"].items()], RATIOS)]


def fit(found: dict) -> list[str]:
    lines = [[*each.values()] for each in found["summary"]]
    return [FIT, table([*found["summary"][0]], lines), "![Predicted against measured times](../docs/waves.png)"]


# By how the names of runs begin
SHAPES = {
    "shapes": shapes,
    "few": partial(in_us, FEW, FEW_COLUMNS),
    "passes": partial(in_us, PASSES, PASSES_COLUMNS),
    "fit": fit,
}


def layer_section() -> list[str]:
    said = "The other's time over fdora's, geometric means (above 1: fdora is faster)."
    return [said, means(), figure("rank", "Time against the rank"), LAYER, one_layer()]


# A section: how the names of its runs begin (it stands where there are some), and what writes it.
SECTIONS = {
    "Where fdora loses": (("",), lambda: [losses()]),
    "One layer": (("layer_",), layer_section),
    "The norm": (("norm",), norms),
    "Compose": (("compose",), compositions),
    "Shapes that nobody tuned for": (
        ("shapes",),
        lambda: [part for kind, write in SHAPES.items() for part in runs(kind, write)],
    ),
    "One launch out of a cold cache": (("suite",), lambda: runs("suite", cold)),
    "Layers that share their input": (("group",), groups),
    "Twelve decoder layers": (
        ("layers12",),
        lambda: [LAYERS12, layers12_summary(), "The same with peak memory:", layers12()],
    ),
    "Training steps, few tokens and many": (("steps", "issue"), training_steps),
    "transformers' Trainer": (
        ("trainer",),
        lambda: runs(
            "trainer", lambda found: [columns(found["rows"], TRAINED)], ": {model}, {layers} layers, dropout {dropout}"
        ),
    ),
    "Whole models": (("model_",), models),
    "Fine-tuning, step by step": (("converge",), convergence),
    "Quantised base weights": (("quant",), quantised),
    "A vision transformer": (("vit",), lambda: [VISION, *runs("vit", vision, ": {layers} layers, r {r}")]),
    "Diffusion models": (
        ("diffusion",),
        lambda: [DIFFUSION, *runs("diffusion", lambda found: [diffusion.markdown(found["rows"]), *not_run(found)])],
    ),
    "Serving": (("serve",), serving),
    "Gradients through the norm": (("full",), lambda: runs("full", told)),
    "Where a layer's time goes": (
        ("profile_",),
        lambda: runs("profile_", lambda found: [f"`{found['about']['arguments']}`", profile.markdown(found["rows"])]),
    ),
    "Which way to take": (("model_", "steps"), advice),
    "Near g = 1": (("study_near",), near_one),
    "g in an adapter that was trained": (("study_spread",), spreads),
    "Memory through a step": (("study_timeline",), timelines),
    "Many adapters in a pipeline": (
        ("schedule",),
        lambda: [
            SCHEDULES,
            figure("lengths", "Lengths of the samples"),
            *(schedule.markdown(result(name)) for name in names("schedule")),
        ],
    ),
    "A model of 70B in a pipeline": (
        ("stages",),
        lambda: [
            *(
                part
                for name in names("stages")
                for part in (STAGES.format_map(result(name)["checks"][0]), stages(result(name)))
            ),
            figure("stages", "Bubbles of 4 and 8 stages"),
        ],
    ),
    "Many adapters end to end": (("jobs",), lambda: [TOGETHER, *runs("jobs", lambda found: [jobs.markdown(found)], JOBS)]),
    "The host": (("host",), the_host),
    "Sources": (("",), lambda: [since(), sources()]),
}


def document() -> str:
    parts = ["# All results", INTRO]
    for title, (prefixes, write) in SECTIONS.items():
        if any(map(names, prefixes)):
            parts += [f"## {title}", *filter(None, write())]
    return "\n\n".join(parts) + "\n"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--readme", action="store_true", help="also what is marked in README.md and docs/, and its pictures")
    options = parser.parse_args(argv)
    PAGE.write_text(document())
    draw(FIGURE_FOLDER)
    if options.readme:
        path = ROOT / "README.md"
        path.write_text(readme(path.read_text()))
        ASKED.write_text(answered(ASKED.read_text()))
        PICTURE.write_text(picture())
        MODELS_PICTURE.write_text(models_picture())


if __name__ == "__main__":
    main()
