"""Tables and figures from the committed results, and from nothing else.

    python -m bench.report            # bench/RESULTS.md and docs/benchmarks/*.png
    python -m bench.report --readme   # the same, what is marked in README.md and docs/benchmarks.md, docs/step.svg, models.svg

Every number in them is read from ``bench/results/*.jsonl``. In README a number stands between ``<!-- name -->`` and
``<!-- /name -->``; the functions below that are called ``readme_<name>`` write what is between. What fdora loses is
computed too, in bench/duels.py: every time and every peak of every file is compared with every rival's.
"""

from __future__ import annotations

import argparse
import importlib
import re
import statistics
import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

from bench import converge, model
from bench.all import TABLE
from bench.duels import losses
from bench.figures import FIGURES, SWEPT, bars, converged, described, draw
from bench.records import grouped, names, result, where
from bench.suite import shown, summed
from bench.table import table

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "bench/RESULTS.md"
ANSWERS = ROOT / "bench/answers.txt"
WRITTEN = {"readme": ROOT / "README.md", "benchmarks": ROOT / "docs/benchmarks.md"}
FIGURE_FOLDER = ROOT / "docs/benchmarks"
PICTURE = ROOT / "docs/step.svg"
MODELS_PICTURE = ROOT / "docs/models.svg"
WIDTH = 128


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
    run: str


def rows_of(run: str, **wanted: object) -> list[dict]:
    """Its rows that have these values; none of a run that is not there."""
    return [row for row in (result(run)["rows"] if run in names() else ()) if wanted.items() <= row.items()]


def by_way(rows: Iterable[dict]) -> dict[str, dict]:
    return {row["way"]: row for row in rows}


def step() -> Step:
    """From the first model of `STEP_FILES` that was measured in every way of `STEP`."""
    for machine, base in STEP_FILES:
        found = chain(*(rows_of(f"{machine}/model_{base}{part}", **STEP_8) for part in ("", "_compiled")))
        rows = {(row["way"], row["compiled"]): row for row in found}
        if all((way, compiled) in rows for _, _, way, compiled in STEP):
            found = {label: rows[way, compiled] for _, label, way, compiled in STEP}
            x = found["LoRA"]
            gpu = machine.upper()
            about = "{layers} layers of {name}, {seq} tokens, r = {r}, bf16, one {gpu}".format(**x, name=MODELS[base], gpu=gpu)
            return Step(
                {label: (x["ms"] / 8, x["peak_mb"] / 1024) for label, x in found.items()}, about, gpu, f"{machine}/model_{base}"
            )
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
    ways = by_way(found["rows"])
    share = lambda way, field="ms": f"{ways[way][field] / ways['peft_lora'][field]:.2f}"  # noqa: E731
    longer = longer_that_lose()
    exact, alone = (
        [f"{of[way] / of['peft_lora']:.2f}" for of in longer.values()]
        for way in ("use_fdora_fused", "use_fdora_fused_lora_dropout")
    )
    lost = (
        "It loses where sequences are so long that LoRA does not wait for the host: with "
        f"{listed([*map(str, longer)])} tokens a step takes {listed(exact)}. "
    )
    also = f", and the longer {'ones take' if len(longer) > 1 else 'one takes'} {listed(alone)}"
    return (
        f"With transformers' Trainer on the whole of {MODELS[found['model']]}, one H200, a step takes "
        f"{share('peft_fdora_fused')} of LoRA's wall time and {share('peft_fdora_fused', 'peak_mb')} of its peak memory, where "
        f"PEFT's own DoRA takes {share('peft_dora')} of the time, and computes the same function. That is the usual recipe: "
        f"`lora_dropout={found['dropout']}`, float32 adapters under bf16 autocast, gradient checkpointing and "
        f'{found["micro_batches"]} unpadded sequences a step. {lost if longer else ""}With `dropout_mode="lora"`, which is a '
        f"different function, a step of the Trainer takes {share('peft_fdora_fused_lora_dropout')}{also if longer else ''}."
    )


def longer_rows(field: str = "ms") -> dict[int, dict[str, float]]:
    """ms of each way, by tokens of a micro-batch."""
    found: dict[int, dict[str, float]] = {}
    for row in rows_of(LONGER, model="8b", mode="checkpointing"):
        found.setdefault(row["S"], {})[row["way"]] = row[field]
    return found


def longer_that_lose() -> dict[int, dict[str, float]]:
    return {S: of for S, of in longer_rows().items() if of["use_fdora_fused"] > of["peft_lora"]}


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
        ways = by_way(rows_of(f"h200/model_{name}", **STEP_8, compiled=False))
        if ways.keys() >= set(model.WAYS):
            found[name] = {way: ways[way] for way in model.WAYS}
    return found


def models_picture() -> str:
    """A panel for each model: the time of eight micro-batches and an optimizer step, over LoRA's."""
    labels = {"PEFT's DoRA": "peft_dora", "fdora": "peft_fdora_fused", "fuse=False": "peft_fdora"}
    found = eight_steps()
    shares = {label: [rows[way]["ms"] / rows["peft_lora"]["ms"] for rows in found.values()] for label, way in labels.items()}
    return bars([MODELS[name] for name in found], {"time of a training step": shares})


def benchmarks_models() -> str:
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
    return rows_of(f"h200/steps_compiled{'_512' if again else ''}", S=S, compiled="default")


def benchmarks_tokens() -> str:
    """Medians over all cells and modes of bench.steps."""
    lines, eager = [], rows_of("h200/steps", compiled="")
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


def benchmarks_sharded() -> str:
    """Time and memory of a step under FSDP2 on two GPUs."""
    lines = []
    for name in ("sharded_12", "sharded_r384"):
        found = result(f"h200/{name}")
        ways = by_way(rows_of(f"h200/{name}", mode="step"))
        lora, cells = ways["peft_lora"], []
        for way in ("peft_fdora_fused", "peft_fdora", "peft_dora"):
            of = [f"{ways[way][field] / lora[field]:.2f}" for field in ("ms", "peak_mb")] if way in ways else ["not measured"]
            cells.append(" of the time, ".join(of) + (" of the memory" if way in ways else ""))
        lines.append([f"{MODELS[found['model']]}, {found['layers']} layers, r = {found['r']}", *cells])
    return table(["two GPUs, FSDP2", *SHARES.values()], lines)


def readme_losses() -> str:
    """What is lost to LoRA in the runs of this page."""
    trained, lost = by_way(rows_of(HEADLINE)), longer_that_lose()
    exact, peft = (
        listed([f"{of[way] / of['peft_lora']:.2f}" for of in lost.values()]) for way in ("use_fdora_fused", "peft_dora")
    )
    by_gpu = longer_rows("gpu_ms")
    on_gpu = listed([f"{of['use_fdora_fused'] / of['peft_lora']:.2f}" for of in by_gpu.values()])
    warmup = trained["peft_fdora_fused"]["warmup_s"]
    first, loras = (trained[way]["first_s"] for way in ("peft_fdora_fused", "peft_lora"))
    compiled, unfused = over_lora("fdora, compiled"), over_lora("fuse=False", 1)
    points = {
        "**Dropout.** `lora_dropout` above 0 costs a second product with the base weight, in fdora as in PEFT's DoRA. With "
        f"{listed([*map(str, lost)])} tokens a step takes {exact} of LoRA's time, and {peft} with PEFT's DoRA. The "
        f"GPU alone, without waiting for the host, takes {on_gpu} with {listed([*map(str, by_gpu)])} tokens.": lost,
        f"**The first step.** In the training at the top `fdora.warmup` took {warmup:.1f} s, and the first step {first:.1f} s "
        f"for LoRA's {loras:.1f} s.": warmup + first > loras,
        f"**Layers compiled one by one.** A step takes {compiled:.2f} of compiled LoRA's time.": compiled > 1,
        f"**Memory with `fuse=False`.** It is {unfused:.2f} of LoRA's.": unfused > 1,
        "**Memory of a single layer.** Kernels that overwrite their inputs (LoRAFusion, and the LoRA kernels of Axolotl and "
        "Unsloth) need less of it. Also, a layer that computes its norm in every call is slow with few tokens: keep the "
        "norm.": True,
    }
    points = [each for each, loses in points.items() if loses]
    return "\n".join(textwrap.fill(f"- {each}", WIDTH, subsequent_indent="  ", break_on_hyphens=False) for each in points)


def cited() -> tuple[str, ...]:
    """The runs whose figures are in README: of one commit."""
    return HEADLINE, LONGER, step().run


def written(page: str, text: str) -> str:
    """The page with what the functions of its name write today between its marks. Each stands there once."""
    blocks = {name.removeprefix(f"{page}_"): write for name, write in globals().items() if name.startswith(f"{page}_")}
    marked = re.findall(r"<!-- /(\w+) -->", text)
    if sorted(marked) != sorted(blocks):
        raise SystemExit(f"{page} marks {sorted(marked)}, and there is {sorted(blocks)} to write")
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


class Section(NamedTuple):
    """How the names of its runs begin (none: it always stands), what is before them, and how they are shown."""

    runs: tuple[str, ...]
    said: tuple[str | Callable[[], str], ...] = ()
    show: Callable[[dict], str] | None = None


def block(name: str, show: Callable[[dict], str] | None) -> list[str]:
    """A run: what it says of itself, and its tables, as its command shows them if that is there and nobody says otherwise."""
    found, run = result(name), name.partition("/")[2]
    module = TABLE[run].command.split()[0] if run in TABLE else ""
    if module.startswith("bench."):
        show = show or importlib.import_module(module).main.show
    facts = {key: value for key, value in found.items() if not isinstance(value, dict | list)}
    given = found.get("about", {}).get("arguments")
    body = show(found) if show else "\n\n".join(shown(found[key]) for key in GONE if found.get(key) and key not in facts)
    return [f"### {name}", described(facts | ({"arguments": f"`{given}`"} if given else {})), body, *not_run(found)]


# What is shown of a run whose command is gone.
GONE = ("rows", "runs", "norms", "us", "whole", "checks", "summary")


def not_run(found: dict) -> list[str]:
    late = [f"Out of time: {len(found['skipped'])} cases."] if found.get("skipped") else []
    return [*(f"Did not run: {case} ({why})." for case, why in found.get("failed", {}).items()), *late]


def fastest(found: dict) -> str:
    """Of the tiles of a way, which stand behind its name, the fastest."""
    rows = []
    for row in found["rows"]:
        ms = {}
        for way, t in row["ms"].items():
            ms[way.split()[0]] = min(t, ms.get(way.split()[0], t))
        rows.append(row | {"ms": ms})
    return shown(rows)


def one_layer() -> str:
    sizes = ("M", "K", "N", "r", "mode", "norm", "ms")
    return shown([{key: row[key] for key in sizes} for row in rows_of("h100/layer_quick")])


def convergence() -> str:
    parts, target = [], converge.TARGET
    for (machine, settings), rows in converged().items():
        parts += [f"### {machine}", f"{settings}.", shown(rows)]
        for optimizer, same in grouped(rows, "optimizer").items():
            mine = [row["difference"] for row in same]
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
    return "\n\n".join(parts)


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


def figure(name: str, title: str) -> Callable[[], str]:
    """Empty where there is nothing to draw."""
    return lambda: f"![{title}](../docs/benchmarks/{name}.png)" if FIGURES[name].panels() else ""


def since() -> str:
    unknown = [name for name in names() if commit_of(result(name)) == UNRECORDED]
    but = f" ({', '.join(unknown)}: {UNRECORDED})" if unknown else ""
    return (
        f"Each figure is of the commit that stands beside its file under Sources{but}. `fdora/triton` may have changed since: "
        "[bench/NOTES.md](NOTES.md#changes-since-the-measurements) says what did, and was not measured again."
    )


INTRO = (
    "Written by `python -m bench.report` from `bench/results`. [bench/NOTES.md](NOTES.md) says what was counted, expected and "
    "tried, the head of each module what its ways are."
)
NORM = (
    "Time in ms, peak memory and the worst relative error; the roof is the larger of reading W and of the product, both at the "
    "speed measured in the same run. Launches follow each other: a W of 32 MiB (4096 x 4096 in bf16) is still in the cache, "
    "which the roof does not assume. `make bench` times one launch out of a cold one. On the CPU the dense product in bf16 is "
    "faster, with bf16 instructions, and wrong by 0.4 %."
)
LAYER = (
    "bf16, GPU time in ms, with the norm given and computed in the call. `bare` are the eight matrix products by cuBLAS and "
    "nothing else, `dorafactors` is the code of [Scaling DoRA](https://arxiv.org/abs/2603.22276). Of each run geometric means: "
    "fdora's time over that of what has less to do, a rival's over fdora's."
)
LAYERS12 = (
    "Qwen3-8B-shaped layers, 4096 tokens, every linear layer adapted (bench.layers12, until 4b97a39f). `peft_fdora` checks on "
    "the GPU, in every call, whether its norms still hold; `fdora` is given them, computed once per optimizer step."
)
STEPS = (
    "Layers of Qwen3 through PEFT, an optimizer step each time. A model called 8b is 4096 wide, one called 2048 so wide. "
    "issue_time is how long the host takes to issue a forward and a backward, the GPU never waited for in between "
    "(bench.issue_time, until 4b97a39f); its last column is the time of two million additions in Python."
)
SCHEDULES = "Simulated. Time is counted in tokens of one stage, forward and backward alike."
STAGES = (
    "Simulated from layers that were measured: bench.jobs_bubble, until 4b97a39f, says how, and what the ways are. The last "
    "table has two stages that were measured beside what was predicted of them in the same way."
)
QUANTISED = (
    "NF4 with nested scales as bitsandbytes packs it, GPU time: bench.quant (until 4b97a39f; today `python -m bench.layer "
    "--base nf4`), and bench.quant_model (until 4b97a39f; today `python -m bench.steps --cells 70b-nf4:4096:64`) for a decoder "
    "layer through PEFT. A mean is geometric; below 1 the first is faster."
)
VISION = "DINOv2's ViT-g/14, 224 x 224, half precision, random weights, every linear of its blocks adapted."
SERVING = "One layer of a server: GPU time in ms, and its ratio to that of vLLM's kernels for LoRA."
NEAR = (
    "What six ways to compose lose where g is near 1: relative error of what is added to base, and of the output, beside "
    "what rounding them costs."
)
SPREAD = "g of all 36 linears of the demo's model, pretrained and then really trained: what 16 bits lose of it."
ADVICE = (
    "From the measurements above of Qwen3's layers on an H200: time over LoRA's in the same run. The advice follows from its "
    'row by rule: the fastest way that computes PEFT\'s function, and `dropout_mode="lora"`, which computes another in '
    "training, where that is a tenth faster."
)
DIFFUSION = "A training step of diffusers' models at their published sizes, random weights."
UNSEEN = (
    "Shapes drawn at random (bench.shapes, until 4b97a39f; today `python -m bench.layer --draw 64`), the norm given: the first "
    "way's GPU time over the second's. `micro_batches` computes its norm in one of 8. And the model of waves that chooses a "
    "product's way and tile (`python -m bench.fit`): its predictions beside measured times, and the time of what it chooses "
    "over that of the fastest way measured (regret)."
)
SEARCHES = (
    "GPU time in ms, the fastest of the tiles of each way. few (bench/few.py, until 1fd0804): a layer and few tokens, by bare "
    "products, in one pass over W by narrow tiles (`small`) and by what more tokens take, with the norm apart or out of the "
    "same pass (`inside`). passes (bench/passes.py, until 1fd0804): backward's elementwise pass beside torch's sum of two "
    "tensors, which moves as many bytes (`add`); that with the two products that read what it writes (`chain`) beside those "
    "two of dy alone (`bare`); and both factors' gradients. Of these shapes backward was furthest from its bare products."
)


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
        rows = by_way(rows_of(run, **wanted))
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


def advice() -> str:
    head = ["setting", "PEFT DoRA", *EXACT.values(), '`dropout_mode="lora"`', "advice", "commit"]
    return table(head, advice_rows())


def benchmarks_answers() -> str:
    """bench/answers.txt as tables, one for each work."""
    parts = []
    for block in ANSWERS.read_text().split("\n## ")[1:]:
        work, *lines = block.strip().splitlines()
        parts += [f"### {work}", table(["they show", "here", "where, or why not"], [each.split(" | ") for each in lines])]
    return "\n\n".join(parts)


SECTIONS = {
    "Where fdora loses": Section((), (losses,)),
    "One layer": Section(("layer_",), (LAYER, figure("rank", "Time against the rank"), one_layer)),
    "The norm": Section(("norm_",), (figure("roofline", "Roofline of the norm"), NORM)),
    "Compose": Section(("compose",)),
    "Shapes that nobody tuned for": Section(
        ("shapes", "fit"), (UNSEEN, "![Predicted against measured times](../docs/waves.png)"), summed
    ),
    "Searches of tiles": Section(("few", "passes"), (SEARCHES,), fastest),
    "One launch out of a cold cache": Section(("suite",)),
    "Layers that share their input": Section(("group",), ("4096 tokens, norms given.",)),
    "Twelve decoder layers": Section(("layers12",), (LAYERS12,)),
    "Training steps, few tokens and many": Section(("steps", "issue"), (STEPS,)),
    "transformers' Trainer": Section(("trainer",)),
    "Whole models": Section(("model_",), tuple(figure(f"sweep_{size}", f"Time and memory against {size}") for size in SWEPT)),
    "Fine-tuning, step by step": Section(("train_",), (figure("losses", "Loss of a step, and differences"), convergence)),
    "Quantised base weights": Section(("quant",), (QUANTISED,)),
    "A vision transformer": Section(("vit",), (figure("kernels", "Kernels of a block, eager and compiled"), VISION)),
    "Diffusion models": Section(("diffusion",), (DIFFUSION,)),
    "Serving": Section(("serve",), (SERVING,)),
    "Gradients through the norm": Section(("full",)),
    "Where a layer's time goes": Section(("profile_",)),
    "Which way to take": Section((), (ADVICE, advice)),
    "Near g = 1": Section(("study_near",), (figure("near", "Error of six ways to compose, by the spread of g"), NEAR)),
    "g in an adapter that was trained": Section(("study_spread",), (figure("spread", "g - 1 by layer"), SPREAD)),
    "Memory through a step": Section(("study_timeline",), (figure("timeline", "Memory through a training step"),)),
    "Many adapters in a pipeline": Section(("schedule",), (SCHEDULES, figure("lengths", "Lengths of the samples"))),
    "A model of 70B in a pipeline": Section(("stages",), (STAGES, figure("stages", "Bubbles of 4 and 8 stages"))),
    "Many adapters end to end": Section(("jobs",), ("Four jobs of AdamW steps on one base.",)),
    "The host": Section(("host", "launches")),
    "Sources": Section((), (since, sources)),
}


def document() -> str:
    parts = ["# All results", INTRO]
    for title, section in SECTIONS.items():
        mine = [name for prefix in section.runs for name in names(prefix)]
        if mine or not section.runs:
            said = [each if isinstance(each, str) else each() for each in section.said]
            blocks = (block(name, section.show) for name in mine)
            parts += filter(None, [f"## {title}", *said, *chain.from_iterable(blocks)])
    return "\n\n".join(parts) + "\n"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--readme", action="store_true", help="also what is marked in README.md and docs/, and its pictures")
    options = parser.parse_args(argv)
    PAGE.write_text(document())
    draw(FIGURE_FOLDER)
    if options.readme:
        for page, path in WRITTEN.items():
            path.write_text(written(page, path.read_text()))
        PICTURE.write_text(picture())
        MODELS_PICTURE.write_text(models_picture())


if __name__ == "__main__":
    main()
