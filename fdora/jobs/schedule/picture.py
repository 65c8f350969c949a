"""A timeline as a picture. Needs matplotlib, which is imported when a picture is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from fdora._check import FdoraError
from fdora.jobs.schedule.records import tokens_of
from fdora.jobs.schedule.simulate import Timeline

Bar = tuple[float, float, float, float]  # left, bottom, width, height
FAINT = 0.45  # of the colour of a backward


def bars(timeline: Timeline) -> dict[tuple[int, bool], list[Bar]]:
    """Of each (adapter, backward): its rectangles, devices from above. A microbatch's adapters share its height by tokens."""
    found: dict[tuple[int, bool], list[Bar]] = {}
    for device, action, start, end in timeline.tasks:
        tokens = tokens_of(timeline.microbatches[action.microbatch])
        bottom = -device - 0.45
        for adapter in sorted(tokens):
            height = 0.9 * tokens[adapter] / sum(tokens.values())
            found.setdefault((adapter, action.backward), []).append((start, bottom, end - start, height))
            bottom += height
    return found


def parts() -> tuple[Any, Any, Any]:
    """Of matplotlib, or the error that it is missing."""
    try:
        from matplotlib import colormaps
        from matplotlib.figure import Figure
        from matplotlib.patches import Patch
    except ImportError:
        raise FdoraError('fdora.jobs.schedule.draw needs matplotlib. Install it with pip install "fdora[schedule]".') from None
    return colormaps, Figure, Patch


def draw(timeline: Timeline, path: str | Path | IO[bytes], *, names: Sequence[str] = (), title: str = "") -> Any:
    """Stages by time, coloured by adapter, backward fainter than forward; returns matplotlib's figure, too.

    Args:
      path: of the file to write; its suffix is its format. Or an open one, which becomes a PNG.
      names: of the adapters, in order; their numbers where it is too short.

    Raises:
      FdoraError: matplotlib is not installed.
    """
    colormaps, Figure, Patch = parts()
    colours = colormaps["tab10"]
    figure = Figure(figsize=(12, 0.9 + 0.5 * timeline.devices), layout="constrained")
    axes = figure.subplots()
    found = bars(timeline)
    for (adapter, backward), rectangles in sorted(found.items()):
        left, bottom, width, height = zip(*rectangles, strict=True)
        centre = [low + high / 2 for low, high in zip(bottom, height, strict=True)]
        alpha = FAINT if backward else 1.0
        axes.barh(centre, width, height, left, color=colours(adapter % 10), alpha=alpha, edgecolor="white", linewidth=0.3)
    axes.set_yticks([-d for d in range(timeline.devices)], [f"stage {d}" for d in range(timeline.devices)])
    axes.set_xlabel("time")
    axes.set_title(title or f"bubble {timeline.bubble:.1%}", fontsize=10)
    adapters = sorted({adapter for adapter, _ in found})
    labels = [names[a] if a < len(names) else f"adapter {a}" for a in adapters]
    handles = [Patch(color=colours(a % 10), label=label) for a, label in zip(adapters, labels, strict=True)]
    if handles:
        axes.legend(handles=handles, loc="center left", bbox_to_anchor=(1, 0.5), fontsize=8)
    figure.savefig(path)
    return figure
