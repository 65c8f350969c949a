"""Bars as SVG text: the same numbers give the same bytes, so a test can compare the committed picture with the results."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from bench.ways import COLOURS

LABELS, WIDTH, ROW, MARGIN = 190, 215, 24, 60  # pixels: left column, longest bar, height of a row, right of the longest bar


def bars(panels: Sequence[str], groups: dict[str, dict[str, Sequence[float]]]) -> str:
    """Shares of LoRA's, ``groups[group][label]`` with one for each panel. A line marks 1; every panel has that scale."""
    scale = WIDTH / max(value for group in groups.values() for values in group.values() for value in values)
    parts, y = [], 4
    for k, panel in enumerate(panels):
        y += ROW
        parts.append(text(10, y, f"{panel}, LoRA = 1, lower is better", 'font-weight="bold"'))
        top = y + 10
        for name, group in groups.items():
            y += ROW
            parts.append(text(10, y, name, 'fill="#666"'))
            for label, values in group.items():
                y += ROW
                wide = scale * values[k]
                parts.append(text(LABELS - 8, y, label, 'text-anchor="end"'))
                parts.append(f'<rect x="{LABELS}" y="{y - 14}" width="{wide:.1f}" height="18" fill="{colour(label)}"/>')
                parts.append(text(LABELS + max(wide, scale) + 6, y, f"{values[k]:.2f}"))
        parts.append(f'<path d="M{LABELS + scale:.1f} {top}V{y + 8}" stroke="black"/>')
        y += 12
    width, height = LABELS + WIDTH + MARGIN, y + 4
    head = f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}" '
    head += 'font-family="system-ui, sans-serif" font-size="15">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


def colour(label: str) -> str:
    """That of the way whose name a label begins with."""
    ways = {"LoRA": "peft_lora", "PEFT's DoRA": "peft_dora", "fuse=False": "peft_fdora", "fdora": "peft_fdora_fused"}
    return next(COLOURS[way] for start, way in ways.items() if label.startswith(start))


def text(x: float, y: float, words: str, more: str = "") -> str:
    return f'<text x="{x:.1f}" y="{y}" {more}>{escape(words)}</text>'.replace(" >", ">")
