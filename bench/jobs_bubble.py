"""The bubble of bench.jobs' pipeline as the simulator has it, from what was measured of one run.

    python -m bench.jobs_bubble h200/jobs_pipeline

Three times go in, one after the other: what each action took (with the optimizer steps before it), a message (median time from
the end of an action to the start on the other device of what waits for it alone), and what follows the last action, which
are the last optimizer steps. What is left is the host: it issues the next action once the one before it is seen to be done.
"""

from __future__ import annotations

from collections.abc import Sequence

from bench import jobs, records
from bench.jobs import bubbles
from bench.jobs_model import lengths_of, plan_of
from bench.suite import Run, Suite
from fdora.jobs.schedule.simulate import Action, Task


def tasks_of(actions: Sequence[str]) -> list[Task]:
    """Of a result file's ``actions``: process, microbatch, direction, and from when to when, in ms."""
    each = (action.split() for action in actions)
    return [Task(int(d), Action(int(d), int(n), way == "backward"), float(s) / 1e3, float(e) / 1e3) for d, n, way, s, e in each]


def of_run(name: str) -> dict[str, float]:
    result = records.result(name)
    options = jobs.main.parse(result["about"]["arguments"].split())
    bubble = result["bubble"]
    return bubbles(
        plan_of(lengths_of(options), options), tasks_of(bubble["actions"]), bubble["measured_seconds"], result["world"]
    )


def measure(run: Run) -> None:
    run.add(*({"what": name, "value": f"{value:.4f}"} for name, value in of_run(run.options.run).items()))


OPTIONS = {"run": dict(nargs="?", default="h200/jobs_pipeline", help="of bench.jobs --world (default: %(default)s)")}


main = Suite(measure, OPTIONS, device=None)
