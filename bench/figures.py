"""The figures of bench/RESULTS.md, from committed results, and bars as SVG text. A figure has a panel per machine that measured
it, or several."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from html import escape
from pathlib import Path
from statistics import mean
from typing import Any, NamedTuple

from bench import ways
from bench.converge import EVERY, PAIRS, TARGET, WAYS
from bench.records import grouped, names, result
from bench.schedule import KINDS, drawn
from bench.ways import NAMES

LABELS, WIDTH, ROW, MARGIN = 190, 215, 24, 60  # pixels: left column, longest bar, height of a row, right of the longest bar


def bars(panels: Sequence[str], groups: dict[str, dict[str, Sequence[float]]]) -> str:
    """Shares of LoRA's, ``groups[group][label]`` with one for each panel. A line marks 1; every panel has that scale."""
    scale = WIDTH / max(value for group in groups.values() for values in group.values() for value in values)
    parts, y = [], 4
    for k, panel in enumerate(panels):
        y += ROW
        parts.append(text(10, y, f"{panel}, LoRA = 1, lower is better", 'font-weight="bold"'))
        top = y + 10
        for name, group in groups.items():
            y += ROW
            parts.append(text(10, y, name, 'fill="#666"'))
            for label, values in group.items():
                y += ROW
                wide = scale * values[k]
                parts.append(text(LABELS - 8, y, label, 'text-anchor="end"'))
                parts.append(f'<rect x="{LABELS}" y="{y - 14}" width="{wide:.1f}" height="18" fill="{colour(label)}"/>')
                parts.append(text(LABELS + max(wide, scale) + 6, y, f"{values[k]:.2f}"))
        parts.append(f'<path d="M{LABELS + scale:.1f} {top}V{y + 8}" stroke="black"/>')
        y += 12
    width, height = LABELS + WIDTH + MARGIN, y + 4
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
    head += 'font-family="system-ui, sans-serif" font-size="15">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


def colour(label: str) -> str:
    """That of the way whose name a label begins with."""
    ways = {"LoRA": "peft_lora", "PEFT's DoRA": "peft_dora", "fuse=False": "peft_fdora", "fdora": "peft_fdora_fused"}
    return next(COLOURS[way] for start, way in ways.items() if label.startswith(start))


def text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}" {more}>{escape(words)}</text>'.replace(" >", ">")


COLOURS = ways.COLOURS | {"frozen": "0.7", "bare": "0.45", "float32": "0.8"}
COLOURS |= {"fdora - peft": "black", "peft - float32": COLOURS["peft"], "fdora - float32": COLOURS["fdora"]}
WINDOW = 5
SWEPT = ("r", "S", "width")


class Figure(NamedTuple):
    """``panels()`` says what there is to draw, ``paint(axes, panel)`` draws one of them."""

    panels: Callable[[], list]
    paint: Callable[[Any, Any], None]


def described(where: dict) -> str:
    return ", ".join(f"{key} {value}" for key, value in where.items())


def converged() -> dict[tuple[str, str], list[dict]]:
    """The rows of all ``converge*`` files by machine and settings: seeds and optimizers may come in slices."""
    found = {}
    for name in names("converge"):
        run = result(name)
        rows = found.setdefault((name.split("/")[0], described(run["settings"])), [])
        rows += run["rows"]
        if len({(row["seed"], row["optimizer"]) for row in rows}) < len(rows):
            raise SystemExit(f"{name} measures a seed that another file of this machine and these settings has, too")
        rows.sort(key=lambda row: (row["optimizer"], row["seed"]))
    return found


def on(file: str) -> list[str]:
    """This file of each machine that has a GPU."""
    return [name for name in names(file) if name.endswith(f"/{file}") and "gpu" in result(name)["about"]]


def machine(name: str) -> str:
    return name.split("/")[0].upper()


def finish(axes, x: str, y: str, x_log: float | None = None, y_log: bool = False, **legend: Any) -> None:
    """Labels, a legend, and logarithmic axes, that of x to this base."""
    axes.set_xlabel(x)
    axes.set_ylabel(y)
    if x_log:
        axes.set_xscale("log", base=x_log)
    if y_log:
        axes.set_yscale("log")
    axes.legend(**{"fontsize": 7} | legend)


def rank(axes, name: str) -> None:
    """4096 x 4096, 4096 tokens, forward and backward; one run."""
    rows = [x for x in result(name)["rows"] if (x["K"], x["N"], x["mode"]) == (4096, 4096, "fwd_bwd")]
    for way in ("frozen", "bare", "peft_lora", "fdora", "inside"):
        norm, key = ("inside", "fdora") if way == "inside" else ("given", way)
        points = sorted((x["r"], x["ms"][key]) for x in rows if x["norm"] == norm)
        label = {"inside": "fdora, norm inside", "fdora": "fdora, norm given"}.get(way) or NAMES[way]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=COLOURS[way], label=label)
    axes.set_ylim(bottom=0)
    finish(axes, "r", f"ms, 4096 tokens, 4096 x 4096, {machine(name)}", 2)


def roofline(axes, name: str) -> None:
    """The product's flops over W's bytes is r in bf16; roofs are the copy and the cuBLAS product of the same run."""
    found = result(name)
    per_byte, most = found["about"]["bytes_per_ms"] / 1e9, found["about"]["flops_per_ms"] / 1e9
    ranks = [8, most / per_byte, 1024]
    axes.plot(ranks, [min(per_byte * r, most) for r in ranks], color="black", label="copy, cuBLAS")
    for form in ("dense", "tiles", "triton"):
        rows = [x for x in found["rows"] if x["form"] == form and x["dtype"] == "bfloat16"]
        speeds = [2e-9 * x["N"] * x["K"] * x["r"] / x["ms"] for x in rows]
        axes.scatter([x["r"] for x in rows], speeds, s=16, color=COLOURS[form], label=form)
    finish(axes, "flops per byte of W (= r)", f"TFLOP/s of the norm, bf16, {machine(name)}", 2, True)


def measured(sweep: str | None) -> list[str]:
    """Files of bench.model that vary this size, or none."""
    return [name for name in names("model_") if result(name).get("sweep", {}).get("over") == sweep]


def sweep_panels(size: str) -> list[tuple[str, str]]:
    return [(name, field) for name in measured(size) for field in ("ms", "peak_mb")]


def sweep(axes, panel: tuple[str, str]) -> None:
    """Gradient as lines, inference dashed; fewer points where a way did not fit."""
    name, field = panel
    found = result(name)
    size = found["sweep"]["over"]
    for (mode, way), rows in grouped(found["rows"], "mode", "way").items():
        points = sorted((row["seq" if size == "S" else size], row[field]) for row in rows)
        style = {"linestyle": "--" if mode == "inference" else "-", "label": None if mode == "inference" else NAMES[way]}
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=COLOURS[way], **style)
    where = f"{size}; {found['model']}, {found['rows'][0]['layers']} layers, {machine(name)}"
    said = {"title": "gradient; inference dashed", "title_fontsize": 6}
    finish(axes, where, {"ms": "ms", "peak_mb": "peak memory, MB"}[field], 2, True, fontsize=6, **said)


def loss_panels() -> list[tuple]:
    """Losses, means over the seeds; and absolute differences, means over the seeds and over WINDOW of the losses kept."""
    panels = []
    for (where, settings), rows in converged().items():
        for optimizer, same in grouped(rows, "optimizer").items():
            seeds = [row["loss"] for row in same]
            label = f"{optimizer}, {settings.split(',')[0]}, seeds: {len(seeds)}, {where.upper()}"
            loss = {way: average(seed[way] for seed in seeds) for way in WAYS[::-1]}
            apart = {}
            for a, b in PAIRS:
                steps = average([abs(u - v) for u, v in zip(seed[a], seed[b], strict=True)] for seed in seeds)
                apart[f"{a} - {b}"] = [mean(steps[i : i + WINDOW]) for i in range(0, len(steps), WINDOW)]
            panels += [(label, "loss", EVERY, loss), (label, "difference", EVERY * WINDOW, apart)]
    return panels


def average(seeds: Iterable[list[float]]) -> list[float]:
    return [mean(step) for step in zip(*seeds, strict=True)]


def losses(axes, panel: tuple) -> None:
    label, what, every, curves = panel
    for name, values in curves.items():
        width = 3 if name == "float32" else 1  # the others lie on it
        axes.plot(range(0, every * len(values), every), values, color=COLOURS[name], linewidth=width, label=name)
    if what == "difference":
        axes.axhline(TARGET, color="black", linewidth=0.8, linestyle=":", label=f"target of fdora - peft, {TARGET:.1e}")
        axes.set_ylim(bottom=0)
    finish(axes, f"step; {label}", what)


def studied(study: str) -> list[str]:
    """Runs of bench.studies with rows of this one."""
    return [name for name in names("study_") if result(name)["rows"][0]["study"] == study]


def near(axes, panel: tuple[str, str]) -> None:
    """Relative error of what is added to base; what is not wrong at all is not drawn."""
    name, dtype = panel
    rows = [row for row in result(name)["rows"] if row["dtype"] == dtype and row["spread"]]
    for way in rows[0]["delta"]:
        mine = {"dora_delta": {"color": COLOURS["fdora"], "linewidth": 3}, "rounding": {"color": "black", "linestyle": ":"}}
        axes.plot([row["spread"] for row in rows], [row["delta"][way] for row in rows], label=way, **mine.get(way, {}))
    finish(axes, f"spread of g about 1, {dtype}", "relative error of what is added to base", 10, True, fontsize=6)


def spread(axes, panel: tuple[str, int]) -> None:
    """Of every layer the middle 90 %; the grey band is what bf16 makes 1 of."""
    name, steps = panel
    rows = [row for row in result(name)["rows"] if row["steps"] == steps and row["layer"] != "all"]
    at = range(len(rows))
    axes.axhspan(-(2**-9), 2**-8, color="0.85", label="1 in bf16")
    axes.vlines(at, [row["q05"] for row in rows], [row["q95"] for row in rows], color=COLOURS["fdora"], label="5 % to 95 %")
    axes.plot(at, [row["q50"] for row in rows], ".", color="black", markersize=3, label="median")
    finish(axes, f"linear layers, first to last; {steps} steps", "g - 1")


def timeline(axes, name: str) -> None:
    """Allocated, and reserved dashed."""
    for row in result(name)["rows"]:
        allocated, reserved = ([each / 1024 for each in column] for column in zip(*row["points"], strict=True))
        parts = [i / len(allocated) for i in range(len(allocated))]
        axes.plot(parts, allocated, color=COLOURS[row["way"]], label=NAMES[row["way"]])
        axes.plot(parts, reserved, color=COLOURS[row["way"]], linestyle="--", linewidth=0.8)
    axes.set_ylim(bottom=0)
    finish(axes, f"share of the operations of a step, {machine(name)}", "GiB allocated; reserved dashed")


def kernels(axes, panel: tuple[str, str]) -> None:
    """The time of one block by kind of kernel, a bar for each way."""
    name, mode = panel
    ways = {tag: found for tag, found in result(name)["kernels"].items() if tag.split(", ")[0] == mode}
    ends = dict.fromkeys(ways, 0.0)
    for kind in KERNELS:
        us = [sum(k["us"] for k in found if kind == kind_of(k["name"])) for found in ways.values()]
        axes.barh(list(ways), [each / 1e3 for each in us], left=[end / 1e3 for end in ends.values()], label=kind)
        ends = {way: end + each for (way, end), each in zip(ends.items(), us, strict=True)}
    labels = [", ".join([NAMES.get(way, way), *how]) for _, way, *how in (tag.split(", ") for tag in ways)]
    axes.set_yticks(range(len(ways)), labels, fontsize=7)
    axes.invert_yaxis()
    finish(axes, f"ms of a block, {mode}, {name}", "", loc="lower center", bbox_to_anchor=(0.5, 1), ncols=3, fontsize=6)


# A kernel is of the first kind of which its name has a part; those of torch and cuDNN have many.
KERNELS = {
    "written by Inductor": ("triton_",),
    "products": ("nvjet", "gemm", "cutlass", "rest_kernel", "factors_kernel"),
    "attention": ("sdpa", "flash", "fmha", "cudnn::fusion"),
    "torch's": ("void ", "Memset", "Memcpy"),
    "fdora's passes": ("",),
}


def kind_of(name: str) -> str:
    return next(kind for kind, parts in KERNELS.items() if any(part in name for part in parts))


def with_kernels() -> list[tuple[str, str]]:
    """Runs and modes of which kernels are known."""
    return [(n, mode) for n in names("vit") for mode in {tag.split(", ")[0]: 0 for tag in result(n)["kernels"]}]


def stages(axes, panel: tuple[str, int]) -> None:
    """Bubbles by the number of adapters."""
    for way in ("padded", "mLoRA", "side by side", "schedule", "chosen"):
        rows = [row for row in result(panel[0])["rows"] if (row["world"], row["way"]) == (panel[1], way)]
        axes.plot([str(row["adapters"]) for row in rows], [row["bubble"] for row in rows], marker="o", label=way)
    axes.set_ylim(0, 1)
    finish(axes, f"adapters; {panel[1]} stages of a 70B, simulated", "bubble")


def lengths(axes, count: int) -> None:
    """Of so many samples of each kind."""
    for kind, (samples,) in zip(KINDS, drawn([*KINDS], 1, count, 2**13, 0), strict=True):
        axes.hist(samples, range(0, 4001, 50), histtype="step", label=kind)
    finish(axes, "tokens of a sample", f"samples of {count}")


def each_of(runs: Sequence[str], key: str) -> list[tuple[str, Any]]:
    """A panel for each value of this key in a run."""
    return [(run, value) for run in runs for value in sorted({row[key] for row in result(run)["rows"]})]


FIGURES = {
    "lengths": Figure(lambda: [20000], lengths),
    "rank": Figure(partial(on, "layer_ranks"), rank),
    "roofline": Figure(partial(on, "norm_forms"), roofline),
    **{f"sweep_{size}": Figure(partial(sweep_panels, size), sweep) for size in SWEPT},
    "losses": Figure(loss_panels, losses),
    "near": Figure(lambda: each_of(studied("near"), "dtype"), near),
    "spread": Figure(lambda: each_of(studied("spread"), "steps"), spread),
    "timeline": Figure(partial(studied, "timeline"), timeline),
    "kernels": Figure(with_kernels, kernels),
    "stages": Figure(lambda: each_of(names("stages"), "world"), stages),
}


def draw(folder: Path) -> None:
    """Those that have something to draw; what an earlier run left is deleted."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.png"):
        old.unlink()
    for name, (find, paint) in FIGURES.items():
        if panels := find():
            rows, columns = math.ceil(len(panels) / 2), min(len(panels), 2)
            size = (6.4 if columns == 1 else 11, 3.6 * rows)
            picture, grid = pyplot.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
            for axes, panel in zip(grid.flat, panels, strict=False):
                paint(axes, panel)
            for axes in grid.flat[len(panels) :]:
                axes.remove()
            picture.savefig(folder / f"{name}.png", dpi=100, metadata={"Software": None})
            pyplot.close(picture)
