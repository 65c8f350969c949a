"""The two files that the demo leaves behind. Each appears whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")  # a picture in a file: no window, no display needed
from matplotlib import pyplot as plt

from demo import stop


def write(report: dict[str, Any], folder: Path) -> None:
    """Write report.json and loss.png, or, if anything stops it, leave what was there."""
    folder.mkdir(parents=True, exist_ok=True)
    with replacing(folder / "report.json") as numbers, replacing(folder / "loss.png") as picture:
        numbers.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        draw(report, picture)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A file beside ``path`` to write to, which takes its place when the block ends well and is deleted when not."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        yield part
        stop.check()
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def draw(report: dict[str, Any], path: Path) -> None:
    """Both loss curves above, their difference below."""
    ours, theirs = report["loss"]["fdora"], report["loss"]["peft"]
    steps = range(1, len(ours) + 1)
    figure, (top, bottom) = plt.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=(2, 1), layout="constrained")
    top.plot(steps, theirs, color="tab:orange", linewidth=4, alpha=0.6, label="PEFT")
    top.plot(steps, ours, color="tab:blue", linewidth=1.2, label="fdora")
    top.set(
        ylabel="training loss (cross-entropy)",
        title=f"DoRA on {report['model']['name'].split('/')[-1]}: same batches, same start",
    )
    top.legend()
    differences = [abs(a - b) for a, b in zip(ours, theirs, strict=True)]
    floor = 1e-9  # a difference of 0 has no place on a logarithmic axis
    bottom.semilogy(
        steps, [max(d, floor) for d in differences], ".", color="tab:gray", label=f"difference (0 drawn at {floor:.0e})"
    )
    bottom.axhline(report["tolerance"], color="tab:red", linestyle="--", label=f"allowed: {report['tolerance']:.0e}")
    bottom.set(xlabel="step", ylabel="|fdora - PEFT|", ylim=(floor / 3, 100 * report["tolerance"]))
    bottom.legend(loc="upper right", ncols=2)
    for axis in (top, bottom):
        axis.grid(alpha=0.3)
    figure.savefig(path, format="png", dpi=120)
    plt.close(figure)
