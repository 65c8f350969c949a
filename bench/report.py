"""Tables and figures from the committed results, and from nothing else.

    python -m bench.report            # docs/benchmarks.md and docs/benchmarks/*.png
    python -m bench.report --readme   # the same, what is marked in README.md, and its picture, docs/step.svg

Every number in them is read from ``bench/results/*.jsonl``. In README a number stands between ``<!-- name -->`` and
``<!-- /name -->``; the functions below that are called ``readme_<name>`` write what is between. What fdora loses is
computed too: every time and every peak of every file is compared with every rival's.
"""

from __future__ import annotations

import argparse
import re
import statistics
import textwrap
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from typing import NamedTuple

from bench import records
from bench.bars import bars
from bench.table import table
from bench.ways import RIVALS, opponent

ROOT = Path(__file__).parent.parent
RESULTS = records.RESULTS
PAGE = ROOT / "docs/benchmarks.md"
PICTURE = ROOT / "docs/step.svg"
WIDTH = 128
MODES12 = ("inference", "gradient", "gradient_checkpointing")
NAMES = {
    "frozen": "frozen",
    "bare": "products",
    "peft_lora": "PEFT LoRA",
    "peft_lora_compiled": "PEFT LoRA, compiled",
    "addmm_lora": "addmm LoRA",
    "axolotl_lora": "Axolotl LoRA",
    "unsloth_lora": "Unsloth LoRA",
    "lorafusion": "LoRAFusion",
    "peft_dora": "PEFT DoRA",
    "peft_dora_compiled": "PEFT DoRA, compiled",
    "peft_dora_cached": "PEFT DoRA, cached",
    "dense_compiled": "dense, compiled",
    "factored": "factored",
    "dorafactors": "paper",
    "axolotl_dora": "Axolotl DoRA",
    "separate": "fdora, separate calls",
    "fdora": "fdora",
    "fdora_inside": "fdora, norm inside",
    "fdora_compiled": "fdora, compiled",
    "peft_fdora": "PEFT with use_fdora",
    "peft_fdora_fused": "PEFT with use_fdora(fuse=True)",
    "use_fdora": "use_fdora",
    "use_fdora_fused": "use_fdora(fuse=True)",
}


def load(name: str) -> dict:
    return records.result(name, RESULTS)


def names(prefix: str = "") -> list[str]:
    """Committed results by machine and run: ``h100/layer_all``, ..."""
    return [name for name in records.runs(RESULTS) if name.split("/")[1].startswith(prefix)]


def pick(rows: list[dict], **wanted) -> dict:
    (row,) = (row for row in rows if all(row.get(key) == value for key, value in wanted.items()))
    return row


# Where fdora loses


class Duel(NamedTuple):
    """One measurement of fdora and of a rival; the smaller is the better."""

    file: str
    what: str
    rival: str
    case: str
    theirs: float
    mine: float


def duels() -> Iterator[Duel]:
    for name in names():
        family = name.split("/")[1].split("_")[0]
        if family in DUELS:
            yield from (Duel(name, *each) for each in DUELS[family](load(name)))


def layer_duels(result: dict) -> Iterator[tuple]:
    for row in result["rows"]:
        case = "{M}, {K} x {N}, {r}".format(**row)
        fields = [("ms", f"{row['mode']}, norm {row['norm']}")]
        if row["mode"] == "fwd_bwd":
            fields.append(("peak_mb", f"peak memory, norm {row['norm']}"))
        for field, what in fields:
            values = row[field]
            for rival in RIVALS:
                mine = opponent(rival)
                if rival in values and mine in values and (field == "ms" or values[rival] >= gradients_mb(row)):
                    yield what, rival, case, values[rival], values[mine]


def gradients_mb(row: dict) -> float:
    """What dx, dA and dB take: a peak below it hid what an earlier call freed late (one rival, 1 token, r = 384).

    `peak_bytes` refuses such a peak; results that are older than that may hold one.
    """
    M, K, N, r = (row[size] for size in ("M", "K", "N", "r"))
    return 2 * (M * K + r * K + N * r) / 2**20 - 0.005


def ways_duels(rows: list[dict], fields: dict[str, str], case, group) -> Iterator[tuple]:
    """Rows of one way each: those of PEFT against those of fdora with the same ``group``."""
    for row in rows:
        for other in rows:
            if "fdora" in row["way"] and other["way"] in ("peft_lora", "peft_dora") and group(row) == group(other):
                for field, what in fields.items():
                    if field in row and field in other:
                        yield f"{what}: {NAMES[row['way']]}", other["way"], case(row), other[field], row[field]


def layers12_duels(result: dict) -> Iterator[tuple]:
    fields = {f"{mode}_{unit}": mode.replace("_", " ") + extra for mode in MODES12 for unit, extra in UNITS.items()}
    case = "r {r}, {how}".format
    yield from ways_duels(
        result["rows"], fields, lambda row: case(r=row["r"], how=how(row)), lambda row: (row["r"], row["compiled"])
    )


UNITS = {"ms": "", "peak_mb": ", peak memory"}


def how(row: dict) -> str:
    return "compiled" if row["compiled"] else "eager"


MEASURED = ("ms", "peak_mb", "tokens_per_s", "gpu_ms", "gpu_by", "turns")


def where(row: dict) -> str:
    """The case of a row: all that was neither measured nor is its way."""
    return ", ".join(f"{k} {v}" for k, v in row.items() if k not in ("way", *MEASURED) and v != "")


def model_duels(result: dict) -> Iterator[tuple]:
    yield from ways_duels(result["rows"], {unit: f"model{extra}" for unit, extra in UNITS.items()}, where, where)


def steps_duels(result: dict) -> Iterator[tuple]:
    yield from ways_duels(result["rows"], {"ms": "training step, wall time", "gpu_ms": "training step, GPU time"}, where, where)


def issue_duels(result: dict) -> Iterator[tuple]:
    rows = [{"run": i, "way": way} | ms for i, run in enumerate(result["runs"]) for way, ms in run["ms"].items()]
    fields = {part: f"time to issue a {part}" for part in ("forward", "backward")}
    yield from ways_duels(rows, fields, lambda row: f"run {row['run']}", lambda row: row["run"])


def host_duels(result: dict) -> Iterator[tuple]:
    M, K, N, r = result["sizes"]
    fields = {"fwd_us": "host, fwd", "fwd_bwd_us": "host, fwd_bwd"}
    yield from ways_duels(result["rows"], fields, lambda row: f"{M}, {K} x {N}, {r}", lambda row: 0)


def norm_duels(result: dict) -> Iterator[tuple]:
    forms = [row for row in result["rows"] if "form" in row]  # bench.norm_model compares with nobody
    cases = dict.fromkeys((row["N"], row["K"], row["r"], row["dtype"]) for row in forms)
    for N, K, r, dtype in cases:
        rows = {x["form"]: x for x in forms if (x["N"], x["K"], x["r"], x["dtype"]) == (N, K, r, dtype)}
        mine = rows.get("triton", rows["tiles"])
        for field, what in {"ms": "norm", "peak_mb": "norm, peak memory"}.items():
            yield what, "dense", f"{N} x {K}, {r}, {dtype}", rows["dense"][field], mine[field]


def compose_duels(result: dict) -> Iterator[tuple]:
    for row in result["rows"]:
        for mode in ("fwd", "fwd_bwd"):
            if f"{mode}_triton_ms" in row:
                case = "{M} x {N}".format(**row)
                yield f"{row['op']}, {mode}", "plain torch", case, row[f"{mode}_plain_ms"], row[f"{mode}_triton_ms"]


def group_duels(result: dict) -> Iterator[tuple]:
    from bench.group import RIVALS

    for row in result["rows"]:
        case = "{part} of {model}, {M}, r {r}".format(**row)
        for field, what in {"ms": f"shared input, {row['mode']}", "peak_mb": "shared input, peak memory"}.items():
            for rival in RIVALS if (field, row["mode"]) != ("peak_mb", "fwd") else ():
                if rival in row[field] and "fdora" in row[field]:
                    yield what, rival, case, row[field][rival], row[field]["fdora"]


def converge_duels(result: dict) -> Iterator[tuple]:
    """Not a time: how far the loss of a step is from PEFT's, against the target, and from float32, against PEFT's."""
    from bench.converge import TARGET

    for row in result["rows"]:
        case = "{optimizer}, seed {seed}".format(**row)
        mean = {pair: found["mean"] for pair, found in row["difference"].items()}
        yield "loss of a step, distance from PEFT's", "the target", case, TARGET, mean["fdora, peft"]
        yield "loss of a step, distance from float32", "peft_dora", case, mean["peft, float32"], mean["fdora, float32"]


def demo_duels(result: dict) -> Iterator[tuple]:
    for field, what in {"step_seconds_median": "demo, step", "peak_bytes_of_a_step": "demo, peak memory"}.items():
        yield what, "peft_dora", f"{result['adapted_layers']} layers", result[field]["peft"], result[field]["fdora"]


def quant_duels(result: dict) -> Iterator[tuple]:
    """Of bench.quant and bench.quant_model; searches compare tiles."""
    for row in result["rows"] if "norms" in result else []:
        case = "{M}, {K} x {N}, {r}".format(**row)
        for rival in ("linear4bit", "qlora", "qdora", "unsloth_qlora", "axolotl_qlora", "axolotl_qdora"):
            if {rival, "fdora"} <= row["ms"].keys():
                yield f"NF4 layer, {row['mode']}", rival, case, row["ms"][rival], row["ms"]["fdora"]
    for row in result.get("norms", []):
        for rival, mine in (("dense", "codes"), ("decode", "dequantize"), ("decode", "dequantize_norm")):
            if {rival, mine} <= row["ms"].keys():
                yield f"norm of NF4 codes: {mine}", rival, "{N} x {K}, {r}".format(**row), row["ms"][rival], row["ms"][mine]
    for row in result["rows"] if "whole" in result else []:
        theirs = {each["way"]: each for each in result["rows"] if each["mode"] == row["mode"]}
        for rival, field in product(("qlora", "qdora"), ("ms", "gpu_ms", "peak_mb")):
            if row["way"].startswith("use_fdora") and field in row and field in theirs.get(rival, {}):
                yield f"NF4 decoder layer, {field}: {NAMES[row['way']]}", rival, row["mode"], theirs[rival][field], row[field]


def vit_duels(result: dict) -> Iterator[tuple]:
    yield from ways_duels(result["rows"], {unit: f"ViT-g/14{extra}" for unit, extra in UNITS.items()}, where_vit, where_vit)


def where_vit(row: dict) -> str:
    return f"{row['mode']} of {row['batch']}, {how(row)}"


def full_duels(result: dict) -> Iterator[tuple]:
    from bench.full import GOAL

    for row in result["rows"]:
        if "ratio" in row:
            case = "{M}, {K} x {N}, {r}, norm {norm}".format(**row)
            yield "gradients through the norm, over without", "the goal", case, GOAL, row["ratio"]


DUELS = {"layer": layer_duels, "layers12": layers12_duels, "model": model_duels, "host": host_duels}
DUELS |= {"vit": vit_duels, "full": full_duels}
DUELS |= {"steps": steps_duels, "issue": issue_duels, "quant": quant_duels}
DUELS |= {"norm": norm_duels, "compose": compose_duels, "demo": demo_duels, "group": group_duels, "converge": converge_duels}


def losses() -> str:
    groups: dict[tuple, list[Duel]] = {}
    for duel in duels():
        groups.setdefault((duel.file, duel.what, duel.rival), []).append(duel)
    lines = []
    for (file, what, rival), each in groups.items():
        lost = [duel for duel in each if duel.theirs < duel.mine]
        if lost:
            worst = max(lost, key=lambda duel: duel.mine / duel.theirs)
            lines.append(
                [file, what, NAMES.get(rival, rival), f"{len(lost)} of {len(each)}", f"{worst.mine / worst.theirs:.2f}"]
            )
            lines[-1].append(worst.case)
    total = sum(map(len, groups.values()))
    lost = total - sum(duel.theirs >= duel.mine for each in groups.values() for duel in each)
    head = ["results", "what", "against", "lost", "worst, times the rival's", "there: tokens, K x N, r"]
    return f"fdora loses {lost} of {total} comparisons of a time, a peak or an error with another's:\n\n{table(head, lines)}"


# README

# group, label, way and whether it is compiled; what is not compiled is compared with what is not
STEP = (
    ("eager", "LoRA", "peft_lora", False),
    ("eager", "PEFT DoRA", "peft_dora", False),
    ("eager", "use_fdora", "peft_fdora", False),
    ("eager", "use_fdora(fuse=True)", "peft_fdora_fused", False),
    ("torch.compile", "LoRA, compiled", "peft_lora", True),
    ("torch.compile", "PEFT DoRA, compiled", "peft_dora", True),
    ("torch.compile", "use_fdora, compiled", "peft_fdora", True),
)
STEP_FILES = [(machine, model) for machine in ("h200", "h100") for model in ("qwen3-8b", "llama-3.1-8b")]


class Step(NamedTuple):
    """A training step of one model: ms of a micro-batch and peak GiB of each row of `STEP`, by its label."""

    values: dict[str, tuple[float, float]]
    about: str
    gpu: str
    commit: str


def step() -> Step:
    """From the first model of `STEP_FILES` that was measured in every way of `STEP`."""
    for machine, model in STEP_FILES:
        files = [f"{machine}/model_{model}{part}" for part in ("", "_compiled")]
        results = [load(name) for name in files if name in names()]
        wanted = {"mode": "step_8", "adapter": "bf16"}
        rows = {(x["way"], x["compiled"]): x for each in results for x in each["rows"] if wanted.items() <= x.items()}
        if all((way, compiled) in rows for _, _, way, compiled in STEP):
            found = {label: rows[way, compiled] for _, label, way, compiled in STEP}
            x = found["LoRA"]
            gpu, commit = machine.upper(), commits(results)
            about = "{layers} layers of {name}, {seq} tokens, r = {r}, bf16, one {gpu}, commit {commit}".format(
                **x, name=MODELS[model], gpu=gpu, commit=commit
            )
            return Step({label: (x["ms"] / 8, x["peak_mb"] / 1024) for label, x in found.items()}, about, gpu, commit)
    raise SystemExit(f"no model of {STEP_FILES} was measured in every way of the picture")


UNRECORDED = "not recorded"


def commit_of(result: dict) -> str:
    return result.get("about", {}).get("commit") or UNRECORDED


def commits(results: list[dict]) -> str:
    return " and ".join(dict.fromkeys(map(commit_of, results)))


def picture() -> str:
    values, about, *_ = step()
    groups: dict[str, dict] = {}
    for group, label, *_ in STEP:
        groups.setdefault(group, {})[label] = values[label]
    return bars(f"Training step: {about}", ("time of a micro-batch, ms", "peak memory above the weights, GiB"), groups)


def over_lora(label: str, field: int = 0) -> float:
    """Time (0) or memory (1) of a training step over LoRA's, compiled over compiled."""
    values = step().values
    return values[label][field] / values["LoRA, compiled" if "compiled" in label else "LoRA"][field]


def readme_headline() -> str:
    return (
        f"with fdora a training step of a PEFT model takes {over_lora('use_fdora'):.2f} times LoRA's time on an {step().gpu}, "
        f"with PEFT's own DoRA {over_lora('PEFT DoRA'):.2f} times (commit {step().commit})"
    )


def readme_picture() -> str:
    ways = ("PEFT DoRA", "use_fdora", "use_fdora(fuse=True)", "PEFT DoRA, compiled", "use_fdora, compiled")
    parts = [f"{way} {over_lora(way):.2f} times LoRA's time and {over_lora(way, 1):.2f} times its memory" for way in ways]
    alt = f"Time and memory of a training step, {step().about}: {'; '.join(parts)}."
    return f"![{alt}]({PICTURE.relative_to(ROOT)})"


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
    from bench.model import WAYS

    found = {}
    for model in MODELS:
        name = f"h200/model_{model}"
        rows = load(name)["rows"] if name in names() else []
        wanted = {"mode": "step_8", "adapter": "bf16", "compiled": False}
        ways = {row["way"]: row for row in rows if wanted.items() <= row.items()}
        if ways.keys() >= set(WAYS):
            found[model] = {way: ways[way] for way in WAYS}
    return found


def readme_models() -> str:
    lines = []
    for model, rows in eight_steps().items():
        cells = [f"{x['ms'] / 8:.1f} / {x['peak_mb'] / 1024:.2f}" for x in rows.values()]
        lines.append([f"{MODELS[model]}, {rows['peft_lora']['layers']} layers", *cells])
    by_commit: dict[str, list[str]] = {}
    for model in eight_steps():
        by_commit.setdefault(commit_of(load(f"h200/model_{model}")), []).append(MODELS[model])
    parts = [f"commit {each} ({', '.join(found)})" for each, found in by_commit.items()]
    measured = parts if len(parts) > 1 else [f"commit {each}" for each in by_commit]
    said = textwrap.fill(f"Measured at {' and '.join(measured)}.", WIDTH, break_on_hyphens=False)
    return f"{table(['', *(NAMES[way] for way in rows)], lines)}\n\n{said}"


def steps_rows() -> list[dict]:
    return [row for row in load("h200/steps")["rows"] if not row["compiled"]]


def readme_steps() -> str:
    """Of how many cells, of which commits and of how many calls the shares below are."""
    from bench.all import TABLE
    from bench.steps import parse

    _, *given = TABLE["steps"].command.split()
    cells = [tuple(cell) for cell in parse(given).cells]
    rows = steps_rows()
    measured = {(row["model"], row["S"], row["r"]) for row in rows} & set(cells)
    turns = sorted({row["turns"] for row in rows})
    some = f"{len(measured)} of the" if len(measured) < len(cells) else "all"
    return (
        f"{some} {len(cells)} cells of `python -m bench.steps --device cuda`, "
        f"{' to '.join(map(str, dict.fromkeys((turns[0], turns[-1]))))} calls each, "
        f"commit {commit_of(load('h200/steps'))}"
    )


def readme_many() -> str:
    return shares(lambda S: S >= 2048, "2048 and 4096 tokens")


def readme_few() -> str:
    return shares(lambda S: S <= 512, "128 and 512 tokens")


SHARES = {"use_fdora": "`use_fdora`", "use_fdora_fused": "with `fuse=True`", "peft_dora": "PEFT's DoRA"}


def shares(wanted: Callable[[int], bool], tokens: str) -> str:
    """Wall and GPU time as shares of LoRA's, over all cells and modes of bench.steps with such a number of tokens."""
    rows = [row for row in steps_rows() if wanted(row["S"])]
    wall = [f"{name} {span(over(rows, way, 'ms'))}" for way, name in SHARES.items()]
    gpu = [span(over(rows, way, "gpu_ms")) for way in SHARES]
    return f"{tokens}: {', '.join(wall)}; GPU time, in this order, {', '.join(gpu)}"


def over(rows: list[dict], way: str, field: str) -> list[float]:
    """Of each case its time over LoRA's."""
    lora = {where(row): row[field] for row in rows if row["way"] == "peft_lora"}
    return [row[field] / lora[where(row)] for row in rows if row["way"] == way]


def span(values: list[float]) -> str:
    """Median and range."""
    middle = f"{statistics.median(values):.2f}"
    return f"{middle} ({min(values):.2f} to {max(values):.2f})" if len(values) > 1 else middle


def readme_compiled() -> str:
    """Layers that are compiled one by one, in torch's default mode."""
    from bench.steps import SIZES

    results = [load(f"h200/steps_compiled{part}") for part in ("_512", "")]  # few tokens were measured again, and stand first
    again = {row["S"] for row in results[0]["rows"]}
    rows = [*results[0]["rows"], *(row for row in results[1]["rows"] if row["S"] not in again)]
    rows = [row for row in rows if row["compiled"] == "default"]
    cells = dict.fromkeys(f"width {SIZES[row['model']]['hidden_size']}, {row['S']} tokens, r = {row['r']}" for row in rows)
    parts = [
        f"{SHARES[way]} {span(over(rows, way, 'ms'))} times compiled LoRA's wall time, {span(over(rows, way, 'gpu_ms'))} times "
        "its GPU time"
        for way in ("use_fdora", "use_fdora_fused")
    ]
    return f"{'; '.join(cells)}, {results[0]['layers']} layers: {'; '.join(parts)} (commit {commits(results)})"


def readme_memory() -> str:
    spans = []
    for way in ("peft_fdora", "peft_fdora_fused", "peft_dora"):
        times = [rows[way]["peak_mb"] / rows["peft_lora"]["peak_mb"] for rows in eight_steps().values()]
        spans.append(f"{min(times):.2f} to {max(times):.2f}")
    return f"{spans[0]} times LoRA's peak in the models below, {spans[1]} with `fuse=True`; PEFT's DoRA {spans[2]}"


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


# docs/benchmarks.md


def norm_cpu() -> str:
    cases = [(4096, 384, "float32"), (4096, 16, "float32"), (14336, 64, "float32"), (4096, 384, "bfloat16")]
    head = ["N x K, r, dtype", "dense `B A`: ms / MB / error", "`dora_norm`", "`dora_norm(base_sqnorm=)`"]
    return norm_table(load("cpu/norm_forms")["rows"], cases, ("dense", "tiles", "factored"), head, 1)


def norm_gpu() -> str:
    cases = [(8192, 384, "bfloat16"), (4096, 16, "bfloat16"), (14336, 64, "bfloat16"), (4096, 384, "bfloat16")]
    head = ["N x K, r, dtype", "dense `B A`: ms / MB / error", "`dora_norm`", "roof, ms"]
    return norm_table(load("h100/norm_forms")["rows"], [*cases, (4096, 384, "float32")], ("dense", "triton"), head, 3)


def norm_table(rows: list[dict], cases: list[tuple], forms: tuple, head: list[str], digits: int) -> str:
    lines = []
    for N, r, dtype in cases:
        found = [pick(rows, N=N, r=r, dtype=dtype, form=form) for form in forms]
        cells = [f"{x['ms']:.{digits}f} / {x['peak_mb']:.0f} / {x['error']:.0e}" for x in found]
        roof = [found[0].get("roof_ms", "")] if len(head) > len(forms) + 1 else []
        lines.append([f"{N} x {found[0]['K']}, {r}, {dtype}", *cells, *roof])
    return table(head, lines)


def compose_line() -> str:
    x = pick(load("h100/compose")["rows"], op="dora_compose", M=4096, N=14336)
    fused, plain, copy = (
        [f"{x[f'{mode}_{way}_ms']:.3f}" for mode in ("fwd", "fwd_bwd")] for way in ("triton", "plain", "copy")
    )
    return (
        f"`dora_compose` on the same H100 (4096 x 14336, bf16), in ms: {fused[0]} forward, {fused[1]} with backward; "
        f"the formula in plain torch {plain[0]} and {plain[1]}; a copy of the same bytes {copy[0]} and {copy[1]}."
    )


LAYER_WAYS = ("frozen", "bare", "peft_lora", "peft_dora", "peft_dora_compiled", "dorafactors", "fdora")


def one_layer() -> str:
    cases = [(4096, 4096, 4096, 16), (4096, 4096, 4096, 384), (4096, 4096, 14336, 64), (4096, 14336, 4096, 64)]
    cases += [(4096, 8192, 8192, 384), (4096, 5120, 27648, 16), (16384, 4096, 4096, 16)]
    rows, lines = load("h100/layer_quick")["rows"], []
    for M, K, N, r in cases:
        given, inside = (pick(rows, M=M, K=K, N=N, r=r, mode="fwd_bwd", norm=n)["ms"] for n in ("given", "inside"))
        lines.append([f"{M}, {K} x {N}, {r}", *(f"{ms:.3f}" for ms in [*(inside[w] for w in LAYER_WAYS), given["fdora"]])])
    ways = ["frozen", "products", "PEFT LoRA", "PEFT DoRA", "compiled", "paper", "`dora_linear`", "`norm=` given"]
    return table(["tokens, K x N, r", *ways], lines)


def layers12_summary() -> str:
    ways, lines = ("frozen", "peft_lora", "peft_dora", "peft_fdora", "fdora"), []
    cases = (("h100", 384, "eager"), ("h100", 384, "compiled"), ("h200", 384, "eager"), ("h200", 16, "eager"))
    for machine, r, kind in (*cases, ("h200", 384, "compiled")):
        rows = load(f"{machine}/layers12_r{r}_{kind}")["rows"]
        cells = [" / ".join(f"{pick(rows, way=way)[f'{mode}_ms']:.1f}" for mode in MODES12) for way in ways]
        lines.append([f"{machine.upper()}, {r}{', compiled' if kind == 'compiled' else ''}", *cells])
    return table(["GPU, r", *(NAMES[way] for way in ways)], lines)


HOST_WAYS = ("fdora", "peft_lora", "peft_dora")


def host_lines() -> str:
    return f"H100: {host('h100')}; H200: {host('h200')}"


def host(machine: str) -> str:
    rows = load(f"{machine}/host")["rows"]
    us = {way: {f: f"{pick(rows, way=way)[f'{f}_us']:.0f}" for f in ("fwd", "fwd_bwd")} for way in HOST_WAYS}
    return (
        f"forward {us['fdora']['fwd']} us against LoRA's {us['peft_lora']['fwd']}, with backward "
        f"{us['fdora']['fwd_bwd']} against {us['peft_lora']['fwd_bwd']}, DoRA's {us['peft_dora']['fwd_bwd']}"
    )


def over_fdora(pairs: dict[str, float], way: str) -> float | None:
    """The way's time over fdora's, where it was compared."""
    floor = pairs.get(f"fdora/{way}")
    return 1 / floor if floor else pairs.get(f"{way}/fdora")


def means() -> str:
    """Geometric means over the cases of each file: the rival's time over fdora's."""
    lines, ways = [], means_ways()
    for name in names("layer_"):
        result = load(name)
        for mode, pairs in result["summary"]["geometric_means"].items():
            values = {way: f"{value:.2f}" for way in ways if (value := over_fdora(pairs, way))}
            if values:
                lines.append([name, result["summary"]["cases"], mode, *(values.get(way, "") for way in ways)])
    return table(["results", "cases", "mode", *(NAMES[way] for way in ways)], lines)


def means_ways() -> list[str]:
    """The ways that a committed result knows: a column each."""
    known = {way for name in names("layer_") for row in load(name)["rows"] for way in row["ms"]}
    return [way for way in ("frozen", "bare", *RIVALS) if way in known]


def layers12() -> str:
    lines = []
    for name in names("layers12_"):
        for row in load(name)["rows"]:
            cells = [f"{row.get(f'{mode}_ms', '')} / {row.get(f'{mode}_peak_mb', '')}" for mode in MODES12]
            lines.append([name.split("/")[0], row["r"], how(row), NAMES[row["way"]], *cells])
    return table(["machine", "r", "", "way", *(f"{mode.replace('_', ', ')}: ms / MB" for mode in MODES12)], lines)


def models() -> str:
    from bench.model import fdoras, markdown

    parts = [figure("models", "PEFT's time over fdora's")]
    parts += [figure(f"sweep_{size}", f"Time and memory against {size}") for size in SIZES]
    for name in names("model_"):
        result = load(name)
        parts += [f"### {name}: {result['model']}", markdown(result)]
        parts += [f"Did not run: {where} ({why})." for where, why in result.get("failed", {}).items()]
        if skipped := result.get("skipped"):
            parts.append(f"Out of time: {len(skipped)} cases, from {described(skipped[0])} on.")
        for adapter, found in result["agreement"].items():
            exact = found.get("one_layer_against_float32", {})
            against = fdoras(found) | {f"float32, {NAMES[way]}": each for way, each in exact.items()}
            lines = [
                [label, part, f"{v['relative']:.1e}", f"{v['cosine']:.6f}", f"{v['max_difference']:.2e}", f"{v['max']:.2e}"]
                for label, each in against.items()
                for part, v in each.items()
            ]
            parts += [f"Agreement, {adapter} adapters:", table(AGREEMENT, lines)]
        for adapter, norms in result.get("norms", {}).items():
            parts.append(
                "Norms of an optimizer step of 8 micro-batches, {} adapters: {asked} asked for, {computed} computed, of "
                "{layers} layers.".format(adapter, **norms)
            )
        if fits := result.get("sweep"):
            lines = [[name, *growth(fit), *growth(fit["upper"])] for name, fit in fits["exponents"].items()]
            parts += [f"Growth with {fits['over']}, exponents, of all sizes and of the larger half:", table(GROWTH, lines)]
    return "\n\n".join(filter(None, parts))


SIZES = ("r", "S", "width")
GROWTH = ["mode, way", *(2 * ["sizes", "time", "peak memory"])]


def described(where: dict) -> str:
    return ", ".join(f"{key} {value}" for key, value in where.items())


def growth(fit: dict) -> list[str]:
    return [f"{fit['from']} to {fit['to']}", f"{fit['ms']:.2f}", f"{fit['peak_mb']:.2f}"]


def converged() -> dict[tuple[str, str], list[dict]]:
    """The rows of all ``converge*`` files by machine and settings: seeds and optimizers may come in slices."""
    found: dict[tuple[str, str], list[dict]] = {}
    for name in names("converge"):
        result = load(name)
        rows = found.setdefault((name.split("/")[0], described(result["settings"])), [])
        rows += result["rows"]
        if len({(row["seed"], row["optimizer"]) for row in rows}) < len(rows):
            raise SystemExit(f"{name} measures a seed that another file of this machine and these settings has, too")
        rows.sort(key=lambda row: (row["optimizer"], row["seed"]))
    return found


def distances(rows: list[dict]) -> dict[str, dict[str, float]]:
    """By optimizer, the mean over its seeds of each pair's mean difference."""
    found: dict[str, dict[str, float]] = {}
    for optimizer in dict.fromkeys(row["optimizer"] for row in rows):
        mine = [row["difference"] for row in rows if row["optimizer"] == optimizer]
        found[optimizer] = {pair: sum(each[pair]["mean"] for each in mine) / len(mine) for pair in mine[0]}
    return found


def convergence() -> str:
    from bench.converge import TARGET, markdown

    parts = [figure("losses", "Loss of a step, and differences")]
    for (machine, settings), rows in converged().items():
        parts += [f"### {machine}", f"{settings}.", markdown(rows)]
        for optimizer, mean in distances(rows).items():
            mine = [row["difference"] for row in rows if row["optimizer"] == optimizer]
            apart, worst = mean["fdora, peft"], max(each["fdora, peft"]["worst"] for each in mine)
            fdora, peft = mean["fdora, float32"], mean["peft, float32"]
            parts.append(
                f"{optimizer}, {len(mine)} of 3 seeds: a step's loss through fdora is {apart:.1e} from PEFT's in the mean "
                f"(target {TARGET:.1e}: {'met' if apart <= TARGET else 'missed'}), {worst:.1e} at worst. From the float32 run "
                f"fdora is {fdora:.1e} away, PEFT {peft:.1e}: the larger error is {'fdora' if fdora > peft else 'PEFT'}'s."
            )
    return "\n\n".join(filter(None, parts))


def groups() -> str:
    lines, ways = [], ("bare", "peft_lora", "unsloth_lora", "axolotl_lora", "axolotl_dora", "separate", "fdora")
    missing: set[str] = set()
    for name in names("group"):
        for row in load(name)["rows"]:
            cells = [f"{row['ms'][way]:.2f} / {row['peak_mb'][way]:.0f}" if way in row["ms"] else "" for way in ways]
            lines.append([name.split("/")[0], row["model"], row["part"], row["r"], row["mode"], *cells])
            missing |= {f"Did not run, {name}: {NAMES[way]} ({why})." for way, why in row["failed"].items()}
    head = ["machine", "model", "layers", "r", "mode", *(f"{NAMES[way]}: ms / MB" for way in ways)]
    return "\n\n".join([table(head, lines), *sorted(missing)])


def suites() -> str:
    """One launch out of a cold cache; bf16 throughout."""
    parts = []
    for name in names("suite"):
        cases: dict[tuple, dict] = {}
        for row in load(name)["rows"]:
            if {row["dtype"], row.get("adapter", row["dtype"])} == {"bfloat16"}:
                case = (row["op"], *(row.get(key, "") for key in SUITE), row["mode"])
                cell = f"{row['ms']:.3f} / {row['wall_ms']:.3f} / {row.get('of_roof', '')}"
                cases.setdefault(case, {})[row["backend"]] = cell
        head = ["op", *SUITE, "mode", *(f"{backend}: GPU ms / wall ms / of the roof" for backend in BACKENDS)]
        lines = [[*case, *(cells.get(backend, "") for backend in BACKENDS)] for case, cells in cases.items()]
        parts += [f"### {name}", table(head, lines)]
    return "\n\n".join(parts)


SUITE = ("M", "K", "N", "r", "norm")
BACKENDS = ("eager", "triton")
AGREEMENT = ["against", "of", "relative L2", "cosine", "largest difference", "largest value"]


def sources() -> str:
    lines = []
    for name in names():
        result = load(name)
        about = result.get("versions", {}) | result.get("about", {})
        machine = about.get("gpu") or about.get("cpu") or result.get("device", "")
        lines.append([name, machine, *(about.get(key) or "" for key in ("driver", "torch", "triton")), commit_of(result)])
        if "problem" in result:  # bench.all's word for what did not end well
            lines[-1][-1] += f", {result['problem']}"
    return table(["results", "machine", "driver", "torch", "triton", "commit"], lines)


def figure(name: str, title: str) -> str:
    """Empty where there is nothing to draw."""
    from bench.figures import FIGURES

    return f"![{title}](benchmarks/{name}.png)" if FIGURES[name].panels() else ""


def since() -> str:
    unknown = [name for name in names() if commit_of(load(name)) == UNRECORDED]
    but = f" ({', '.join(unknown)}: {UNRECORDED})" if unknown else ""
    return (
        f"Each figure is of the commit that stands beside its file under Sources{but}. `fdora/triton` may have changed since: "
        "[bench/NOTES.md](../bench/NOTES.md#changes-since-the-measurements) says what did, and was not measured again."
    )


INTRO = (
    "Written by `python -m bench.report` from `bench/results`. [bench/NOTES.md](../bench/NOTES.md) says what was counted, "
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
    "Qwen3-8B-shaped layers, 4096 tokens, every linear layer adapted (`python -m bench.layers12 --device cuda`). "
    '`use_fdora` checks on the GPU, in every call, whether its norms still hold; "fdora" is given them, computed once per '
    "optimizer step. In ms, inference / gradient / gradient with checkpointing:"
)


STEPS = (
    "Layers of Qwen3 through PEFT, an optimizer step each time (`python -m bench.steps --device cuda`, which says what the "
    "modes are). A model called 8b is 4096 wide, one called 2048 so wide."
)
ISSUE = (
    "How long the host takes to issue a forward and a backward, the GPU never waited for in between "
    "(`python -m bench.issue_time --device cuda`). Hosts differ, and one host from run to run: the last column is the time of "
    "two million additions in Python."
)


def training_steps() -> str:
    from bench import issue_time, steps

    parts = [STEPS]
    for name in names("steps"):
        result = load(name)
        parts += [f"### {name}: {result['layers']} layers", steps.markdown(result["rows"])]
        parts += [f"Did not run: {case} ({why})." for case, why in result.get("failed", {}).items()]
    for name in names("issue"):
        result = load(name)
        what = "{layers} layers, width {model}, {S} tokens, r {r}".format(**result)
        parts += [f"### {name}: {what}", ISSUE, issue_time.markdown(result["runs"], list(result["runs"][0]["ms"]))]
    return "\n\n".join(parts)


SCHEDULES = (
    "Simulated, not measured: `python -m bench.schedule`, which says what the ways are. Time is counted in tokens of one "
    "stage, forward and backward alike. The paper's bubbles are LoRAFusion's own measurements, on other texts."
)


def schedules() -> str:
    from bench import schedule

    return "\n\n".join([SCHEDULES, *(schedule.markdown(load(name)) for name in names("schedule"))])


QUANTISED = (
    "NF4 with nested scales as bitsandbytes packs it, GPU time; the ways are those of `python -m bench.quant`, and of "
    "`python -m bench.quant_model` for a decoder layer through PEFT. A mean is geometric; below 1 the first is faster."
)


def quantised() -> str:
    from bench import quant, quant_model

    parts = [QUANTISED]
    for name in names("quant"):
        result = load(name)
        if "norms" in result:
            parts += [f"### {name}", quant.markdown(result)]
        elif "whole" in result:
            parts += [f"### {name}: {{model}}, S {{S}}, r {{r}}".format(**result["cell"]), quant_model.markdown(result)]
    return "\n\n".join(parts)


VISION = (
    "DINOv2's ViT-g/14, 224 x 224, half precision, random weights, every linear of its blocks adapted (`python -m bench.vit`, "
    "which says what the ways are)."
)


def vision() -> str:
    from bench.vit import markdown, summary

    parts = [VISION]
    for name in names("vit"):
        result = load(name)
        head = f"### {name}: {result['layers']} layers, r {result['r']}"
        parts += [head, markdown(result), "; ".join(summary(result["rows"])) + "."]
    return "\n\n".join(parts)


def full() -> str:
    """Gradients through the norm: what they cost, and whether they train better."""
    from bench import converge

    parts = []
    for name in names("full"):
        rows = load(name)["rows"]
        body = table(list(rows[0]), [row.values() for row in rows]) if "ratio" in rows[0] else converge.markdown(rows)
        parts += [f"### {name}", f"`{command_of(name)}`, commit {commit_of(load(name))}", body]
    return "\n\n".join(parts)


def command_of(name: str) -> str:
    from bench.all import TABLE

    module = TABLE[name.split("/")[1]].command.split()[0]
    return f"python -m {module} {load(name)['about']['arguments']}".strip()


LAUNCHES = "What it costs the host to reach a kernel, in us per call (`python -m bench.launches`):"


def launches() -> str:
    found = {name: load(name) for name in names("launches")}
    pieces = dict.fromkeys(piece for result in found.values() for piece in result["us"])
    head = ["piece", *(f"{name}, commit {commit_of(result)}" for name, result in found.items())]
    return table(head, [[piece, *(result["us"].get(piece, "") for result in found.values())] for piece in pieces])


def unseen() -> str:
    from bench import report_shapes

    kinds = {"shapes": report_shapes.shapes, "few": report_shapes.few, "passes": report_shapes.passes, "fit": report_shapes.fit}
    parts = []
    for kind, write in kinds.items():
        for name in names(kind):
            parts += [f"### {name}", write(load(name))]
            if kind == "fit":
                parts.append("![Predicted against measured times](waves.png)")
    return "\n\n".join(parts)


def document() -> str:
    parts = ["# Benchmarks", INTRO, "## Where fdora loses", losses()]
    parts += ["## One layer", "The other's time over fdora's, geometric means (above 1: fdora is faster)."]
    parts += [figure("speedup", "The rivals' time over fdora's"), means(), figure("rank", "Time against the rank")]
    parts += [LAYER, one_layer()]
    parts += ["## The norm", figure("roofline", "Roofline of the norm"), NORM, norm_gpu(), NORM_CPU, norm_cpu()]
    parts += ["## Compose", compose_line()]
    if names("shapes"):
        parts += ["## Shapes that nobody tuned for", unseen()]
    if names("suite"):
        parts += ["## One launch out of a cold cache", suites()]
    parts += ["## Layers that share their input", "4096 tokens, norms given.", groups()]
    parts += ["## Twelve decoder layers", LAYERS12, layers12_summary(), "The same with peak memory:", layers12()]
    if names("steps") or names("issue"):
        parts += ["## Training steps, few tokens and many", training_steps()]
    if names("model_"):
        parts += ["## Whole models", models()]
    if names("converge"):
        parts += ["## Fine-tuning, step by step", convergence()]
    if names("quant"):
        parts += ["## Quantised base weights", quantised()]
    if names("vit"):
        parts += ["## A vision transformer", vision()]
    if names("full"):
        parts += ["## Gradients through the norm", full()]
    if names("schedule"):
        parts += ["## Many adapters in a pipeline", schedules()]
    parts += ["## The host", f"16 tokens, 512 x 512: {host_lines()}."]
    if names("launches"):
        parts += [LAUNCHES, launches()]
    parts += ["## Sources", since(), sources()]
    return "\n\n".join(parts) + "\n"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--readme", action="store_true", help="also README.md, where it is marked, and its picture")
    options = parser.parse_args(argv)
    from bench.figures import draw

    PAGE.parent.mkdir(exist_ok=True)
    PAGE.write_text(document())
    draw(PAGE.with_suffix(""))
    if options.readme:
        path = ROOT / "README.md"
        path.write_text(readme(path.read_text()))
        PICTURE.write_text(picture())


if __name__ == "__main__":
    main()
