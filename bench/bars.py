"""Bars as SVG text: the same numbers give the same bytes, so a test can compare the committed picture with the results."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

LABELS, WIDTH, GAP, ROW = 190, 215, 75, 22  # pixels: left column, longest bar, beside it for its number, height of a row
COLOURS = {"LoRA": "#f2994a", "PEFT DoRA": "#d64541"}  # by how a label begins; the rest is fdora


def bars(title: str, panels: Sequence[str], groups: dict[str, dict[str, Sequence[float]]]) -> str:
    """``groups[group][label]`` has one value for each panel; every panel has a scale of its own that starts at 0."""
    rows = [values for group in groups.values() for values in group.values()]
    most = [max(values[k] for values in rows) for k in range(len(panels))]
    lefts = [LABELS + k * (WIDTH + GAP) for k in range(len(panels))]
    parts = [text(10, 22, title, 'font-weight="bold"')]
    parts += [text(left, 46, panel) for left, panel in zip(lefts, panels, strict=True)]
    y = 46
    for name, group in groups.items():
        y += ROW + 4
        parts.append(text(10, y, name, 'fill="#666"'))
        for label, values in group.items():
            y += ROW
            parts.append(text(LABELS - 8, y, label, 'text-anchor="end"'))
            colour = next((colour for start, colour in COLOURS.items() if label.startswith(start)), "#2f6fbb")
            for left, value, top in zip(lefts, values, most, strict=True):
                wide = WIDTH * value / top
                parts.append(f'<rect x="{left}" y="{y - 13}" width="{wide:.1f}" height="17" fill="{colour}"/>')
                parts.append(text(left + wide + 5, y, f"{value:#.3g}".rstrip(".")))
    width, height = lefts[-1] + WIDTH + GAP, y + 16
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
    head += 'font-family="system-ui, sans-serif" font-size="13">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}" {more}>{escape(words)}</text>'.replace(" >", ">")
