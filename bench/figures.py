"""The figures of docs/benchmarks.md, from committed results: speed-up bars, time against rank, roofline of the norm."""

from __future__ import annotations

from pathlib import Path

from bench.report import NAMES, load, over_fdora
from bench.ways import RIVALS

COLOURS = {"frozen": "0.7", "bare": "0.45", "peft_lora": "tab:orange", "peft_dora": "tab:red", "dense": "tab:red"}
COLOURS |= {"fdora": "tab:blue", "inside": "tab:cyan", "triton": "tab:blue", "tiles": "tab:cyan"}


def speedup(axes) -> None:
    """Geometric means of layer_quick: one group per rival, one bar per mode."""
    modes = load("h100/layer_quick")["summary"]["geometric_means"]
    rivals = [rival for rival in RIVALS if any(over_fdora(pairs, rival) for pairs in modes.values())]
    for i, (mode, pairs) in enumerate(modes.items()):
        values = {k + 0.2 * (i - 1.5): value for k, rival in enumerate(rivals) if (value := over_fdora(pairs, rival))}
        bars = axes.barh(list(values), list(values.values()), 0.2, label=mode)
        axes.bar_label(bars, fmt="%.2f", fontsize=6)
    axes.set_yticks(range(len(rivals)), [NAMES[rival] for rival in rivals])
    axes.invert_yaxis()
    axes.axvline(1, color="black", linewidth=0.8)
    axes.set_xlabel("time over fdora's; one layer, mean of 12 cases, bf16, H100")
    axes.legend(fontsize=7)


def rank(axes) -> None:
    """4096 x 4096, 4096 tokens, forward and backward; one run."""
    rows = [x for x in load("h100/layer_ranks")["rows"] if (x["K"], x["N"], x["mode"]) == (4096, 4096, "fwd_bwd")]
    for way in ("frozen", "bare", "peft_lora", "fdora", "inside"):
        norm, key = ("inside", "fdora") if way == "inside" else ("given", way)
        points = sorted((x["r"], x["ms"][key]) for x in rows if x["norm"] == norm)
        label = {"inside": "fdora, norm inside", "fdora": "fdora, norm given"}.get(way) or NAMES[way]
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, color=COLOURS[way], label=label)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("r")
    axes.set_ylabel("ms, 4096 tokens, 4096 x 4096, H100")
    axes.legend(fontsize=7)


def roofline(axes) -> None:
    """The product's flops over W's bytes is r in bf16; roofs are the copy and the cuBLAS product of the same run."""
    result = load("h100/norm_forms")
    per_byte, most = result["about"]["bytes_per_ms"] / 1e9, result["about"]["flops_per_ms"] / 1e9
    ranks = [8, most / per_byte, 1024]
    axes.plot(ranks, [min(per_byte * r, most) for r in ranks], color="black", label="copy, cuBLAS")
    for form in ("dense", "tiles", "triton"):
        rows = [x for x in result["rows"] if x["form"] == form and x["dtype"] == "bfloat16"]
        speeds = [2e-9 * x["N"] * x["K"] * x["r"] / x["ms"] for x in rows]
        axes.scatter([x["r"] for x in rows], speeds, s=16, color=COLOURS[form], label=form)
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.set_xlabel("flops per byte of W (= r)")
    axes.set_ylabel("TFLOP/s of the norm, bf16, H100")
    axes.legend(fontsize=7)


FIGURES = {"speedup": speedup, "rank": rank, "roofline": roofline}


def draw(folder: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    folder.mkdir(exist_ok=True)
    for name, paint in FIGURES.items():
        picture, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
        paint(axes)
        picture.savefig(folder / f"{name}.png", dpi=100, metadata={"Software": None})
        pyplot.close(picture)
