"""What fdora.jobs.plan says of the steps that bench.peaks measured: peak and time beside each other.

    python -m bench.planned h200/peaks --gpu h200

Peaks are of the whole GPU, with parameters and work spaces. Times are of one step; by published rates they are floors.
"""

from __future__ import annotations

from bench import records
from bench.suite import Suite, shown
from fdora.jobs.plan import Adapter, Card, Setup, card, memory, read_model, times


def setup_of(row: dict) -> Setup:
    size = {"bf16": 2, "fp32": 4}[row["adapter"]]
    ways = {"fuse": row["way"] == "fuse", "checkpointing": row["checkpointing"], "loss_tokens": row["loss_tokens"]}
    return Setup(row["length"], (Adapter("", row["r"]),), adapter_bytes=size, **ways)


def compared(row: dict, gpu: Card) -> dict[str, float]:
    """Measured, said and their ratio, of bytes and of ms."""
    model, setup, tokens = read_model(row["config"]), setup_of(row), row["sequences"] * row["length"]
    peak = row["bytes"]["before"] + row["bytes"]["peak"]
    said, ms = memory(model, setup, tokens).peak, 1e3 * times(model, setup, tokens, gpu.profile).step(1)
    return {"peak": peak, "said peak": said, "of it": said / peak, "ms": row["ms"], "said ms": ms, "of them": ms / row["ms"]}


def measure(run):
    gpu = card(run.options.gpu)
    for row in records.result(run.options.run)["rows"]:
        case = {name: row[name] for name in ("model", "way", "checkpointing", "adapter", "sequences", "length", "loss_tokens")}
        run.add(case | {name: round(value, 3) for name, value in compared(row, gpu).items()})


def show(result):
    lines = [shown(result["rows"])]
    for name in ("of it", "of them"):
        ratios = [row[name] for row in result["rows"]]
        what = "peaks" if name == "of it" else "times, floors by published rates"
        lines.append(f"{what}: {min(ratios):.3f} to {max(ratios):.3f} of what was measured")
    return "\n\n".join(lines)


OPTIONS = {
    "run": dict(nargs="?", default="h200/peaks", help="of bench.peaks; the default is %(default)s"),
    "--gpu": ("h200", "whose rates; the default is %(default)s"),
}


main = Suite(measure, OPTIONS, device=None, show=show)
