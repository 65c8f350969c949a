"""Tables in Markdown, and rows turned into them: a line for each case, a column for each way."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

Case = TypeVar("Case", bound=Hashable)


def line(cells: Iterable[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def table(head: Sequence[str], lines: Iterable[Iterable[object]]) -> str:
    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, lines)])


def columns(rows: Iterable[dict], said: Mapping[str, str]) -> str:
    """A line for each row, a column for each template; empty where the row has not its values."""

    def cell(row: dict, template: str) -> str:
        try:
            return template.format_map(row)
        except KeyError:
            return ""

    return table(list(said), [[cell(row, each) for each in said.values()] for row in rows])


def pivot(
    rows: Iterable[dict], case: Callable[[dict], Case], cell: Callable[[dict], Any] = dict, by: str = "way"
) -> dict[Case, dict[str, Any]]:
    """The cells of each case, by way."""
    found = {}
    for row in rows:
        found.setdefault(case(row), {})[row[by]] = cell(row)
    return found


def side_by_side(
    head: Sequence[str], found: Mapping[tuple, Mapping[str, Any]], column: str = "{}", ways: Sequence[str] = ()
) -> str:
    """What :func:`pivot` gives as a table: the parts of a case under ``head``, then its cells, of these ways or of all."""
    ways = ways or list(dict.fromkeys(way for cells in found.values() for way in cells))
    lines = [[*case, *(cells.get(way, "") for way in ways)] for case, cells in found.items()]
    return table([*head, *map(column.format, ways)], lines)
