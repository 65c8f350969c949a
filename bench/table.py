"""A table in Markdown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def line(cells: Iterable[object]) -> str:
    return "| " + " | ".join(map(str, cells)) + " |"


def table(head: Sequence[str], lines: Iterable[Iterable[object]]) -> str:
    return "\n".join([line(head), "|" + "---|" * len(head), *map(line, lines)])
