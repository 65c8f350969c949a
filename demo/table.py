"""The result as a table to read."""

from __future__ import annotations

from typing import Any

ROWS = {
    "before": "before (untrained head)",
    "linear_probe": "linear probe only",
    "fdora": "DoRA through fdora",
    "peft": "DoRA in PEFT",
}
HEADINGS = ("", "held-out accuracy", "trained parameters", "step time", "peak memory of a step")


def table(report: dict[str, Any]) -> str:
    seconds, peaks = report["step_seconds_median"], report["peak_bytes_of_a_step"]
    lines = [HEADINGS]
    for key, name in ROWS.items():
        lines.append(
            (
                name,
                f"{report['held_out_accuracy'][key]:.1%}",
                f"{report['trained_parameters'][key]:,}",
                f"{1000 * seconds[key]:.1f} ms" if key in seconds else "-",
                f"{peaks[key] / 2**20:.0f} MiB" if key in peaks else "-",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = [
        "   ".join(cell.ljust(w) if i == 0 else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths, strict=True)))
        for line in lines
    ]
    text.insert(1, "-" * len(text[0]))
    settings, weights = report["settings"], report["bytes_of_linear_weights"]
    text += ["", "weights of the linear layers: " + ", ".join(f"{n / 2**20:.1f} MiB in {kind}" for kind, n in weights.items())]
    return "\n".join(
        [
            *text,
            "",
            f"largest difference between the two loss curves: {report['largest_loss_difference']:.1e} "
            f"over {settings['steps']} steps (allowed: {report['tolerance']:.0e})",
            "step time: median. peak memory: what forward and backward hold at most beside the model, on the longest batch.",
        ]
    )
