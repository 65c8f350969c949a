"""One result of several runs of one command, each with a part of its cells: on two GPUs at once, or in the time that there was.

    python -m bench.steps --device cuda --cells 2048 --json a.json
    python -m bench.steps --device cuda --cells 8b --json b.json
    python -m bench.join a.json b.json --json steps.json

The parts must be of one commit, one kind of GPU and one version of everything that a result names, with the same settings,
and no row may be in two of them: else nothing is written. Ratios are within a row's own run still. What each was asked is kept.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.save import save

OF_A_RUN = ("arguments", "bytes_per_ms", "flops_per_ms")  # what runs of one command may differ in
MEASURED = ("ms", "gpu_ms", "turns", "gpu_by", "peak_mb")


def join(results: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The first, with the rows and the records by cell of all."""
    first, *others = results
    for each in others:
        for name in sorted({*first["about"], *each["about"]} - set(OF_A_RUN)):
            same(f"about.{name}", first["about"].get(name), each["about"].get(name))
        for name in sorted({*first, *each} - {"about", "rows", "agreement", "failed", "skipped", "seconds"}):
            same(name, first.get(name), each.get(name))
    rows = [row for each in results for row in each["rows"]]
    cases = [json.dumps({k: v for k, v in row.items() if k not in MEASURED}, sort_keys=True) for row in rows]
    if twice := [case for case in dict.fromkeys(cases) if cases.count(case) > 1]:
        raise SystemExit(f"bench.join: {len(twice)} rows are in several parts, the first: {twice[0]}; give each cell once")
    joined = first | {name: {k: v for each in results for k, v in each[name].items()} for name in ("agreement", "failed")}
    joined |= {"rows": rows, "skipped": [cell for each in results for cell in each["skipped"]]}
    joined["about"] = {k: v for k, v in first["about"].items() if k not in OF_A_RUN}
    joined["about"]["parts"] = [{k: each["about"][k] for k in OF_A_RUN if k in each["about"]} for each in results]
    if all("seconds" in each for each in results):
        joined["seconds"] = round(sum(each["seconds"] for each in results), 1)
    return joined


def same(name: str, one: object, other: object) -> None:
    if one != other:
        raise SystemExit(f"bench.join: {name} is {one!r} in one part and {other!r} in another; parts are runs of one command")


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="+", type=Path)
    parser.add_argument("--json", required=True, type=Path)
    options = parser.parse_args(argv)
    save(options.json, join([json.loads(path.read_text()) for path in options.parts]))


if __name__ == "__main__":
    main()
