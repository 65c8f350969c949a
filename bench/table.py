"""Tables in Markdown, and rows turned into them: a line for each case, a column for each way."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from types import MappingProxyType
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


def over_lora(
    head: Sequence[str],
    found: Mapping[tuple, Mapping[str, dict]],
    units: Mapping[str, int],
    of_lora: str,
    more: Mapping[str, Callable[[Mapping[str, dict]], str]] = MappingProxyType({}),
) -> str:
    """What :func:`pivot` gives as a table: LoRA's values of these units, with so many digits, and those of others over
    LoRA's. ``of_lora``: the head of its column; ``more``: columns behind them."""
    ways = list(dict.fromkeys(way for cells in found.values() for way in cells))

    def cell(way: str, cells: Mapping[str, dict]) -> str:
        mine, lora = cells.get(way, {}), cells.get("peft_lora") if way != "peft_lora" else None
        mine = {key: (mine[key], digits) for key, digits in units.items() if key in mine}
        return " / ".join(f"{v / lora[key]:.2f}" if lora else f"{v:.{digits}f}" for key, (v, digits) in mine.items())

    lines = []
    for case, cells in found.items():
        lines.append([*case, *(cell(way, cells) for way in ways), *(column(cells) for column in more.values())])
    return table([*head, *(of_lora if way == "peft_lora" else way for way in ways), *more], lines)
