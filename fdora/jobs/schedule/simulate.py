"""A pipeline in time: which stage works on which microbatch from when to when, and how long it waits.

Each device runs its actions in a fixed order. An action starts when its device is free and what it needs has arrived: the
forward of stage v needs that of stage v - 1, the backward that of stage v + 1 (the last stage's its own forward). With
busy times of P devices until the last is done at T,

    bubble = 1 - sum of busy times / (P T)

Backward through a frozen W multiplies as much as forward: its default time is forward's.

A timeline as a picture. Needs matplotlib, which is imported when a picture is asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any, NamedTuple

from fdora._check import FdoraError, check_positive, fail
from fdora.jobs.schedule.records import Microbatch, Schedule, tokens_of

Time = Callable[[Microbatch, int], float]  # of a microbatch on a stage


class Action(NamedTuple):
    """One forward or backward of one stage, which a device runs next."""

    stage: int
    microbatch: int
    backward: bool


Orders = tuple[tuple[Action, ...], ...]  # of each device


class Task(NamedTuple):
    """An :class:`Action` with its device, start and end."""

    device: int
    action: Action
    start: float
    end: float


class Timeline(NamedTuple):
    """What a simulated pipeline did, task by task."""

    devices: int
    microbatches: tuple[Microbatch, ...]
    tasks: tuple[Task, ...]
    last: float = 0.0
    """What follows the last of them, on all devices at once."""

    @property
    def time(self) -> float:
        return max((task.end for task in self.tasks), default=0.0) + self.last

    @property
    def bubble(self) -> float:
        """The share of the devices' time in which they wait; 0 where nothing takes any time."""
        busy = sum(task.end - task.start for task in self.tasks)
        return 1 - busy / (self.devices * self.time) if self.time else 0.0

    @property
    def throughput(self) -> float:
        """Tokens per unit of time, padding not counted."""
        tokens = sum(sample.length for each in self.microbatches for sample in each)
        return tokens / self.time if self.time else 0.0


def one_f_one_b(stages: int, microbatches: int) -> Orders:
    """1F1B: stage s starts with ``stages - 1 - s`` forwards, then a forward and a backward by turns."""
    return interleaved(stages, microbatches, 1)


def interleaved(devices: int, microbatches: int, chunks: int) -> Orders:
    """Interleaved 1F1B: device d has stages d, d + devices, d + 2 devices... With one chunk it is 1F1B.

    Raises:
      FdoraError: a number is less than 1, or there are several chunks and the microbatches are no multiple of the devices.
    """
    for arg, value in {"devices": devices, "chunks": chunks}.items():
        check_positive("jobs.schedule.interleaved", arg, value, "1F1B has one chunk.")
    if chunks > 1 and microbatches % devices:
        want = f"a multiple of the {devices} devices"
        raise fail("jobs.schedule.interleaved", "microbatches", want, microbatches, "Add no-ops at the end.")
    total = microbatches * chunks

    def nth(n: int, device: int, backward: bool) -> Action:
        turn, rest = divmod(n, devices * chunks)
        chunk = rest // devices
        chunk = chunks - 1 - chunk if backward else chunk
        return Action(chunk * devices + device, turn * devices + rest % devices, backward)

    orders = []
    for device in range(devices):
        ahead = devices - 1 - device if chunks == 1 else (chunks - 1) * devices + 2 * (devices - 1 - device)
        ahead = min(ahead, total)
        order = [nth(n, device, False) for n in range(ahead)]
        for n in range(total - ahead):
            order += [nth(ahead + n, device, False), nth(n, device, True)]
        order += [nth(n, device, True) for n in range(total - ahead, total)]
        orders.append(tuple(order))
    return tuple(orders)


def depth_of(orders: Orders) -> int:
    """The least ``Spec.depth`` for these orders: on every stage the forward of t + depth comes after the backward of t."""
    depth = 1
    for order in orders:
        latest: dict[int, int] = {}  # the last microbatch that went forward on a stage
        for stage, microbatch, backward in order:
            if backward:
                depth = max(depth, latest[stage] - microbatch + 1)
            else:
                latest[stage] = max(microbatch, latest.get(stage, microbatch))
    return depth


def tokens(microbatch: Microbatch, stage: int) -> float:
    """The default time: what every matrix product is proportional to."""
    return sum(sample.length for sample in microbatch)


def simulate(
    schedule: Schedule | Sequence[Microbatch],
    stages: int,
    *,
    chunks: int = 1,
    forward: Time = tokens,
    backward: Time | None = None,
    transfer: float = 0.0,
    last: float = 0.0,
) -> Timeline:
    """1F1B over any microbatches, even or not; interleaved with several chunks of the model on each device.

    Args:
      schedule: what ``schedule`` returns, or microbatches.
      stages: devices in the pipeline. With chunks there are ``stages * chunks`` stages of the model, and no-ops fill up the
        microbatches to a multiple of the devices.
      forward: ``forward(microbatch, stage)``, the time it takes there, in any unit; its tokens by default.
      backward: likewise; the time of forward by default.
      transfer: from one stage to the next, in which no device works.
      last: after the last action, as the last optimizer steps are: clipped, they wait for the gradients of all stages. No
        action, so that it counts as waiting.

    Raises:
      FdoraError: stages or chunks are less than 1, or a time is negative.
    """
    found = tuple(schedule.microbatches if isinstance(schedule, Schedule) else schedule)
    check_positive("jobs.schedule.simulate", "stages", stages, "One device is a pipeline of one stage.")
    if chunks != 1:
        found += ((),) * (-len(found) % stages)
    orders = interleaved(stages, len(found), chunks)
    for arg, value in {"transfer": transfer, "last": last}.items():
        if not value >= 0:
            raise fail("jobs.schedule.simulate", arg, "0 or more", value, "It is a time.")
    timeline = run(orders, found, forward, forward if backward is None else backward, transfer)
    return timeline._replace(last=float(last))


def run(orders: Orders, microbatches: tuple[Microbatch, ...], forward: Time, backward: Time, transfer: float) -> Timeline:
    """The actions of each device, each as early as it can be."""
    last = max((action.stage for order in orders for action in order), default=0)
    ends: dict[Action, float] = {}
    clocks, left = [0.0] * len(orders), list(map(deque, orders))
    tasks: list[Task] = []
    moved = True
    while moved:
        moved = False
        for device, order in enumerate(left):
            while order:
                stage, n, back = action = order[0]
                needs = (
                    Action(stage, n, False) if back and stage == last else action._replace(stage=stage + (1 if back else -1))
                )
                if needs.stage < 0:
                    ready = 0.0
                elif needs in ends:
                    ready = ends[needs] + (transfer if needs.stage != stage else 0.0)
                else:
                    break
                takes = (backward if back else forward)(microbatches[n], stage)
                if not takes >= 0:
                    arg = "backward" if back else "forward"
                    raise fail("jobs.schedule.simulate", arg, "a function that gives 0 or more", takes, "It is a time.")
                start = max(clocks[device], ready)
                clocks[device] = ends[action] = start + takes
                tasks.append(Task(device, action, start, start + takes))
                order.popleft()
                moved = True
    assert not any(left), "the orders wait for each other"
    return Timeline(len(orders), microbatches, tuple(tasks))


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
