"""What fdora.jobs.plan says of the steps that bench.peaks measured: peak and time beside each other.

    python -m bench.planned h200/peaks --gpu h200

Peaks are of the whole GPU, with parameters and work spaces. Times are of one step; by published rates they are floors.
"""

from __future__ import annotations

import argparse

from bench import records
from bench.table import table
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


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("run", nargs="?", default="h200/peaks", help="of bench.peaks; the default is %(default)s")
    parser.add_argument("--gpu", default="h200", help="whose rates; the default is %(default)s")
    options = parser.parse_args(argv)
    gpu, lines, ratios = card(options.gpu), [], []
    for row in records.result(options.run)["rows"]:
        found = compared(row, gpu)
        ratios.append((found["of it"], found["of them"]))
        way = f"{row['way']}{', checkpointing' if row['checkpointing'] else ''}, {row['adapter']}"
        shape = f"{row['sequences']}x{row['length']}, loss {row['loss_tokens']}"
        mib = [f"{found[name] / 2**20:.0f}" for name in ("peak", "said peak")]
        ms = [f"{found[name]:.1f}" for name in ("ms", "said ms")]
        lines.append([row["model"], way, shape, *mib, f"{found['of it']:.3f}", *ms, f"{found['of them']:.2f}"])
    print(table(["model", "way", "tokens", "MiB", "said", "ratio", "ms", "said", "ratio"], lines))
    for name, all_ in zip(("peaks", "times" if gpu.measured else "floors"), zip(*ratios, strict=True), strict=True):
        print(f"\n{name}: {min(all_):.3f} to {max(all_):.3f} of what was measured")


if __name__ == "__main__":
    main()
