"""Every measurement in one format: JSON lines, a file for each suite, read and written here and nowhere else.

A line with ``run`` says who measured: its name (``h200/layer_all``), the GPU, the commit, versions, arguments, settings. The
lines after it, up to the next such line, are what that run found, a record each:

    {"case": {"M": 4096, "K": 4096, "N": 4096, "r": 16, "mode": "fwd"}, "way": "fdora", "values": {"ms": 0.208}}

``case`` is what was measured, ``way`` by which code (left out where there is one), ``values`` the metrics. What a run found
beside its rows has the name of its ``part`` and, where it is a tree, the path ``at`` which its values hang.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

from bench.save import replace

RESULTS = Path(__file__).parent / "results"
# What says which case a row is of. All else in a row was measured.
_CASE = (
    "op form kind part bias cut cache M K N r G E T V d S seq tokens length sequences batch shape forward layers model config "
    "which direction C L O space channels attention checkpointing dtype adapter dropout optimizer seed mask mode norm compiled "
    "backend scales held tile loss_tokens adapters samples solver_s workers run experts top width world base target way"
)
CASE = frozenset(_CASE.split())
# Metrics that a row has for each of its ways.
_OF_WAYS = (
    "ms wall wall_ms us ratio error errors peak_mb kept kept_mb failed held_out held_out_before seconds loss difference scale "
    "kernels excess forward both end gradient_norm"
)
OF_WAYS = frozenset(_OF_WAYS.split())
# How metrics end of which less is better; those beside them are no way's own, or parts of others.
UNITS, BESIDE = ("ms", "us", "peak_mb"), ("first_ms", "issue_ms", "least_ms", "roof_ms")


def where(row: dict) -> str:
    """The case of a row."""
    case = {key: value for key, value in row.items() if key in CASE and key not in ("way", "form") and value != ""}
    return ", ".join(f"{key} {value}" for key, value in case.items())


def grouped(rows: Iterable[dict], *keys: str) -> dict[Any, list[dict]]:
    """Rows by what these keys say, in the order in which it comes first."""
    found: dict[Any, list[dict]] = {}
    for row in rows:
        found.setdefault(itemgetter(*keys)(row), []).append(row)
    return found


def measured(rows: Sequence[dict]) -> Iterator[tuple[dict, dict[str, dict[str, float]]]]:
    """A row of each case, and its values by what was measured and by way."""
    cases: dict[tuple, tuple[dict, dict]] = {}
    for i, row in enumerate(rows):
        own = row.get("way") or row.get("form")
        _, fields = cases.setdefault((where(row), None if own else i), (row, {}))
        for key in (key for key in row if key.endswith(UNITS) and key not in BESIDE):
            of_ways = {own: row[key]} if own else row[key] if isinstance(row[key], dict) else {}
            for way, value in of_ways.items():
                for part, each in (value if isinstance(value, dict) else {"": value}).items():
                    fields.setdefault(f"{part} {key}".strip(), {})[way] = each
    yield from cases.values()


def lines_of(name: str, result: dict[str, Any]) -> Iterator[dict]:
    """A result as lines: that of its run, then its records."""
    lists = {key: value for key, value in result.items() if is_rows(value)}
    trees = {key: value for key, value in result.items() if isinstance(value, dict) and key != "about"}
    plain = {key: value for key, value in result.items() if key not in lists and key not in trees and key != "about"}
    shapes = {key: "cases" if by_way(rows) else "rows" for key, rows in lists.items()} | dict.fromkeys(trees, "tree")
    yield {"run": name, "about": result.get("about", {}), "settings": plain, "parts": shapes}
    for part, rows in lists.items():
        head = {} if part == "rows" else {"part": part}
        for row in rows:
            yield from (head | line for line in row_lines(row, shapes[part] == "cases"))
    for part, tree in trees.items():
        yield from tree_lines(part, [], tree)


def is_rows(value: object) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(row, dict) for row in value)


def by_way(rows: list[dict]) -> bool:
    return any(isinstance(row.get(key), dict) for row in rows for key in OF_WAYS) and not any("way" in row for row in rows)


def row_lines(row: dict[str, Any], split: bool) -> Iterator[dict]:
    case = {key: value for key, value in row.items() if key in CASE and key != "way" and not isinstance(value, dict)}
    of_ways = {key: value for key, value in row.items() if split and key in OF_WAYS and isinstance(value, dict) and value}
    values = {key: value for key, value in row.items() if key not in case and key not in of_ways and key != "way"}
    way = {"way": row["way"]} if "way" in row else {}
    if values or not of_ways:
        yield {"case": case, **way, "values": values}
    for name in dict.fromkeys(name for each in of_ways.values() for name in each):
        yield {"case": case, "way": name, "values": {key: each[name] for key, each in of_ways.items() if name in each}}


def tree_lines(part: str, at: list[str], tree: dict[str, Any]) -> Iterator[dict]:
    values = {key: value for key, value in tree.items() if not isinstance(value, dict) or not value}
    if values or not tree:
        yield {"part": part, "at": at, "values": values}
    for key, value in tree.items():
        if key not in values:
            yield from tree_lines(part, [*at, key], value)


def result_of(lines: list[dict]) -> dict[str, Any]:
    """What `lines_of` made them of; the order of the keys may be another."""
    head, *records = lines
    result = {"about": head["about"]} if head["about"] else {}
    result |= head["settings"]
    for part, shape in head["parts"].items():
        mine = [each for each in records if each.get("part", "rows") == part]
        result[part] = {"rows": rows_of, "cases": cases_of, "tree": tree_of}[shape](mine)
    return result


def rows_of(records: Iterable[dict]) -> list[dict]:
    return [x["case"] | ({"way": x["way"]} if "way" in x else {}) | x["values"] for x in records]


def cases_of(records: Iterable[dict]) -> list[dict]:
    """A row for each case; a metric of its ways is by way."""
    rows = []
    for case, same in groupby(records, key=lambda x: x["case"]):
        for x in same:
            if "way" not in x or not rows or rows[-1].keys() < case.keys() or any(rows[-1][k] != v for k, v in case.items()):
                rows.append(dict(case))
            if "way" not in x:
                rows[-1] |= x["values"]
                continue
            for metric, value in x["values"].items():
                rows[-1].setdefault(metric, {})[x["way"]] = value
    return rows


def tree_of(records: Iterable[dict]) -> dict[str, Any]:
    tree = {}
    for x in records:
        branch = tree
        for key in x["at"]:
            branch = branch.setdefault(key, {})
        branch |= x["values"]
    return tree


def read(path: Path) -> dict[str, list[dict]]:
    """The lines of each run of a file, by its name."""
    runs = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        if "run" in line:
            mine = runs.setdefault(line["run"], [])
        mine.append(line)
    return runs


def write(path: Path, runs: dict[str, list[dict]]) -> None:
    replace(path, "".join(json.dumps(line, separators=(",", ":")) + "\n" for lines in runs.values() for line in lines))


def save(path: Path | None, result: dict[str, Any]) -> None:
    """Into FILE, or FILE:RUN of a file with other runs; a run of this name is written anew."""
    if path is None:
        return
    file, _, run = str(path).partition(":")
    known = read(Path(file)) if Path(file).exists() else {}
    name = run or Path(file).stem
    write(Path(file), known | {name: list(lines_of(name, json.loads(json.dumps(result))))})


def load(path: Path, run: str | None = None) -> dict[str, Any]:
    """A run of a file; the one that it is called after if none is named."""
    return result_of(read(path)[run or path.stem])


@cache
def _known(files: tuple[tuple[Path, int], ...]) -> dict[str, list[dict]]:
    return {name: lines for path, _ in files for name, lines in read(path).items()}


def runs() -> dict[str, list[dict]]:
    """The lines of every committed run, by machine and name: ``h100/layer_all``, ..."""
    found = _known(tuple((path, path.stat().st_mtime_ns) for path in sorted(RESULTS.glob("*.jsonl"))))
    return dict(sorted(found.items()))


def names(prefix: str = "") -> list[str]:
    """Committed runs by machine and name, those whose name begins so."""
    return [name for name in runs() if name.split("/")[1].startswith(prefix)]


def result(name: str) -> dict[str, Any]:
    return result_of(runs()[name])
