"""Microbatches for many adapters that are trained together, from the lengths of their samples alone.

    fdora schedule lengths.json --capacity 6144 --stages 4 --out schedule.json --picture schedule.png

lengths.json holds the tokens of every sample, batch by batch: {"law": [[664, 299], [431]], "code": [[709], [661]]}, or a list
without the names. The command prints the number of microbatches and the fewest that are possible, no-ops (microbatches without
samples), how full they are, the idle share of a 1F1B pipeline, and how batches were packed.

Exit status: 0; 2 for a mistake in arguments or files, with one sentence on stderr.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

from fdora._check import fail
from fdora._command import WRITTEN, mistakes, parser_of, using
from fdora.jobs.schedule.records import Schedule, Spec, to_json
from fdora.jobs.schedule.simulate import draw, parts, simulate
from fdora.jobs.schedule.whole import schedule


def read(path: str) -> tuple[list[str], list[list[list[int]]]]:
    """Names of adapters, and their lengths."""
    with using("jobs.schedule", "lengths", "a JSON file"):
        found = json.loads(Path(path).read_text(), object_pairs_hook=_once)
    if isinstance(found, list):
        found = {f"adapter {a}": batches for a, batches in enumerate(found)}
    lists = isinstance(found, dict) and all(
        isinstance(batches, list) and all(isinstance(batch, list) for batch in batches) for batches in found.values()
    )
    if not lists:
        want = "lists of batches, which are lists of tokens, for each adapter"
        raise fail("jobs.schedule", "lengths", want, repr(found)[:60], 'Write {"name": [[512, 300], [401, 77]]}.')
    return [*found], [*found.values()]


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """JSON would keep the last of two adapters with one name."""
    for name, n in Counter(name for name, _ in pairs).items():
        if n > 1:
            raise fail("jobs.schedule", "lengths", "of adapters with a name each", f"{n} named {name!r}", "Rename them.")
        name.encode()  # half of a surrogate pair is no text
    return dict(pairs)


def summary(found: Schedule, names: list[str], stages: int) -> list[str]:
    groups = " | ".join(", ".join(names[a] for a in group) for group in found.groups)
    timeline = simulate(found, stages)
    counts = Counter(f"{each.method}: {each.why}" for each in found.packings)
    return [
        f"groups: {groups}",
        f"{len(found.microbatches)} microbatches, {found.noops} of them no-ops; none has fewer than {found.bound}",
        f"fill {found.fill:.1%}, bubble of 1F1B {timeline.bubble:.1%} in {stages} stages",
        *(f"{n} packings, {what}" for what, n in counts.most_common()),
    ]


OPTIONS: dict[str, tuple[Any, ...]] = {
    "lengths": (str, "JSON file with the tokens of every sample"),
    "--capacity": (int, "most tokens in a microbatch", {"required": True}),
    "--stages": (1, "stages of the pipeline"),
    "--multiple": (1, "pad each adapter's tokens to a multiple of this"),
    "--seconds": (Spec(1).seconds, "time for exact packing; 0 for none"),
    "--workers": (1, "processes for exact packing"),
    "--out": (str, "JSON file for the schedule"),
    "--picture": (str, "picture of the stages over time; needs matplotlib"),
}


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("schedule", __doc__, OPTIONS)
    a = parser.parse_args(argv)
    remedy = "Check the path and its suffix."
    with mistakes(parser):
        if a.picture:
            parts()  # that matplotlib is missing is said before the work
        names, lengths = read(a.lengths)
        found = schedule(lengths, Spec(a.capacity, a.stages, a.multiple, a.seconds, a.workers))
        lines = summary(found, names, a.stages)
        if a.out:
            with using("jobs.schedule", "out", WRITTEN, remedy):
                Path(a.out).write_text(to_json(found))
        if a.picture:
            with using("jobs.schedule", "picture", WRITTEN, remedy):
                draw(simulate(found, a.stages), a.picture, names=names, title="; ".join(lines[1:3]))
        print("\n".join(lines))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
