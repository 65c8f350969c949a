"""The command: ``python -m demo.multi`` trains four adapters of the demo's encoder, each alone, together, and as a pipeline.

Other ranks, rates, batch sizes and texts: docstrings, comments, signatures and messages of the standard library. Nothing is
downloaded; ``--random`` takes a small encoder that nobody trained. It writes multi.json and schedule.png, and prints a table.
Exit status: 0 when the loss curves of all three agree to 1e-5, 1 when they do not or something is missing, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import io
import json
import sys
from pathlib import Path
from typing import Any

from demo.run import HERE, fail, positive, status_of

TOLERANCE = 1e-5
"""How far two loss curves may be apart, in float32."""


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    needs = "`make demo-multi` installs what it needs; --random does without the encoder's package."
    return status_of(lambda: compare(options), needs)


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo.multi", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=positive, default=12, help="optimizer steps of each adapter (default: %(default)s)")
    parser.add_argument("--random", action="store_true", help="with a small random encoder, which needs no package")
    parser.add_argument("--seed", type=int, default=0, help="of the heads and the adapters (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for multi.json and schedule.png (default: demo/)")
    return parser.parse_args(argv)


def compare(options: argparse.Namespace) -> int:
    """Train all three ways, print the table, write the files; the exit status."""
    import torch

    from demo import stop, together
    from demo.data import DataError
    from demo.output import replacing
    from fdora.jobs.schedule import draw, simulate

    torch.set_float32_matmul_precision("highest")
    setting = together.Setting(options.steps, options.random, options.seed)
    try:
        world = together.world_of(setting)
    except DataError as error:
        return fail(str(error))
    stop.check()
    plan = together.planned(setting, world)
    names = [job.name for job in world.jobs]
    each = [together.alone(setting, world, a) for a in range(len(names))]
    mixed, mixed_seconds = together.together(setting, world, plan)
    piped, piped_seconds = together.pipelined(setting, world, plan)
    single = [losses for losses, _ in each]
    report: dict[str, Any] = {
        "encoder": "random" if options.random else "all-MiniLM-L6-v2",
        "jobs": {
            name: recipe._asdict() | {"tokens": sum(map(sum, lengths)), "seconds_alone": seconds}
            for (name, recipe), lengths, (_, seconds) in zip(together.RECIPES.items(), world.lengths(), each, strict=True)
        },
        "seconds": {"alone": sum(s for _, s in each), "together": mixed_seconds, "pipeline": piped_seconds},
        "microbatches": len(plan.microbatches),
        "fill": plan.fill,
        "bubble_of_two_stages": simulate(plan, 2).bubble,
        "apart": {"together": apart(single, mixed), "pipeline": apart(single, piped)},
        "tolerance": TOLERANCE,
        "loss": {"alone": single, "together": mixed, "pipeline": piped},
        "threads": torch.get_num_threads(),
        "cores": together.cores(),
        "torch": torch.__version__,
    }
    print(table(report))
    options.out.mkdir(parents=True, exist_ok=True)
    with replacing(options.out / "multi.json") as numbers, replacing(options.out / "schedule.png") as picture:
        numbers.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        draw(simulate(plan, 2), buffer := io.BytesIO(), names=names)
        picture.write_bytes(buffer.getvalue())
    worst = max(report["apart"].values())
    if not worst <= TOLERANCE:  # so written, NaN fails too
        return fail(f"The loss curves are {worst:.1e} apart, more than {TOLERANCE:.0e}.")
    return 0


def apart(one: list[list[float]], other: list[list[float]]) -> float:
    """The largest difference; NaN where there is one."""
    pairs = [abs(a - b) for x, y in zip(one, other, strict=True) for a, b in zip(x, y, strict=True)]
    return max(pairs) if all(d == d for d in pairs) else float("nan")


def table(report: dict[str, Any]) -> str:
    rows = [("", "rank", "rate", "batch", "tokens", "first loss", "last loss", "alone")]
    for (name, job), losses in zip(report["jobs"].items(), report["loss"]["alone"], strict=True):
        numbers = (str(job["r"]), f"{job['lr']:.0e}", str(job["batch_size"]), f"{job['tokens']:,}")
        rows.append((name, *numbers, f"{losses[0]:.4f}", f"{losses[-1]:.4f}", f"{job['seconds_alone']:.1f} s"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "   ".join(c.rjust(w) if i else c.ljust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))) for row in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    seconds, far = report["seconds"], report["apart"]
    ways = {
        "one after the other": (seconds["alone"], "transformers' model, padded batches"),
        "together": (seconds["together"], f"one process, {report['microbatches']} microbatches; {far['together']:.1e} apart"),
        "pipeline of two": (seconds["pipeline"], f"two processes, half the threads each; {far['pipeline']:.1e} apart"),
    }
    lines.append("")
    lines += [f"{way:<20} {time:6.1f} s   {note}" for way, (time, note) in ways.items()]
    lines.append(
        f"\nmicrobatches {report['fill']:.0%} full; bubble of two equal stages, simulated: {report['bubble_of_two_stages']:.0%}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    if not __package__:
        sys.path[0] = str(HERE.parent)
    sys.exit(main())
