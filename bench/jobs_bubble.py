"""The bubble of bench.jobs' pipeline as the simulator has it, from what was measured of one run.

    python -m bench.jobs_bubble h200/jobs_pipeline

Three times go in, one after the other: what each action took (with the optimizer steps before it), a message (median time from
the end of an action to the start on the other device of what waits for it alone), and what follows the last action, which
are the last optimizer steps. What is left is the host: it issues the next action once the one before it is seen to be done.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence

from bench import records
from fdora.jobs.schedule import Schedule, simulate
from fdora.jobs.schedule.simulate import Action, Task


def message_of(tasks: Sequence[Task]) -> float:
    """From the end of an action to the start of what waited for it, on a device that had nothing else to do."""
    ends = {task.action: task.end for task in tasks}
    waits = []
    free: dict[int, float] = {}
    for device, action, start, end in sorted(tasks, key=lambda task: task.start):
        sender = ends.get(action._replace(stage=action.stage + (1 if action.backward else -1)))
        if sender is not None and sender > free.get(device, 0.0):
            waits.append(start - sender)
        free[device] = end
    return statistics.median(waits) if waits else 0.0


def bubbles(plan: Schedule, tasks: Sequence[Task], took: float, world: int) -> dict[str, float]:
    """``tasks``: of all devices, in seconds since the run began, which took ``took``."""
    spent = {(plan.microbatches[task.action.microbatch], *task.action[::2]): task.end - task.start for task in tasks}
    busy, last = sum(spent.values()), max(0.0, took - max(task.end for task in tasks))
    message = max(0.0, message_of(tasks))

    def told(transfer: float, last: float):
        return simulate(
            plan,
            world,
            forward=lambda samples, stage: spent.get((samples, stage, False), 0.0),
            backward=lambda samples, stage: spent.get((samples, stage, True), 0.0),
            transfer=transfer,
            last=last,
        )

    alone, whole = told(0.0, 0.0), told(message, last)
    return {
        "measured": 1 - busy / (world * took),
        "measured_seconds": took,
        "simulated_from_times": alone.bubble,
        "simulated_seconds": alone.time,
        "simulated_with_last": told(0.0, last).bubble,
        "simulated_with_messages": whole.bubble,
        "simulated_with_messages_seconds": whole.time,
        "message_seconds": message,
        "last_seconds": last,
        "simulated_from_tokens": simulate(plan, world).bubble,
    }


def tasks_of(actions: Sequence[str]) -> list[Task]:
    """Of a result file's ``actions``: process, microbatch, direction, and from when to when, in ms."""
    each = (action.split() for action in actions)
    return [Task(int(d), Action(int(d), int(n), way == "backward"), float(s) / 1e3, float(e) / 1e3) for d, n, way, s, e in each]


def of_run(name: str) -> dict[str, float]:
    from bench.jobs import lengths_of, parse, plan_of

    result = records.result(name)
    options = parse(result["about"]["arguments"].split())
    bubble = result["bubble"]
    return bubbles(
        plan_of(lengths_of(options), options), tasks_of(bubble["actions"]), bubble["measured_seconds"], result["world"]
    )


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", nargs="?", default="h200/jobs_pipeline", help="of bench.jobs --world (default: %(default)s)")
    for name, value in of_run(parser.parse_args(argv).run).items():
        print(f"{name:32} {value:.4f}")


if __name__ == "__main__":
    main()
