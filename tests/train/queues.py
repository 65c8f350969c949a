"""A pipeline's messages, recorded of each process and then run as NCCL runs them.

Each communicator takes the operations of a process in the order in which they were issued, one at a time, and a send ends
together with its receive. The host is the worst there can be: before it works, waits for others or makes a communicator it stops
until everything that it has issued is through. Real ones do so now and then: when a kernel is loaded, memory is given back, a
clock is read. And a communicator is made where it is used first, by both sides at once. What gets through here does so with any
host, for a host that waits less only adds ways to go on.
"""

import random
from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from fdora.jobs.loop import Job, Stage, Wire, connect, init_state, pipeline, run_pipeline, wires, works_of
from fdora.jobs.loop.watch import Watch
from fdora.jobs.schedule import Sample, depth_of, interleaved


class Message(NamedTuple):
    """Half of one: what its sender or its receiver issues."""

    group: str
    sender: int
    receiver: int


class Work(NamedTuple):
    """What blocks the host until all that it has issued is through."""

    what: object


class Meet(NamedTuple):
    """Until all processes have come by a ``Work`` that is the same."""

    what: object


def stuck(programs, whole=False):
    """{process: the step it stands at}, nothing where all get through.

    ``whole``: a group is one communicator, as with NCCL's device given at the start; else each two processes in it have one.
    """
    at, issued = [0] * len(programs), [0] * len(programs)
    queues, made, met = {}, set(), {}

    def new(m):
        return m.group, frozenset(m[1:])

    def queue(rank, m):
        return queues.setdefault((rank, *(m[:1] if whole else new(m))), deque())

    def one_step(rank):
        step = programs[rank][at[rank]]
        if isinstance(step, Message) and new(step) in made:
            queue(rank, step).append(step)
            issued[rank] += 1
        elif issued[rank]:
            return False
        elif isinstance(step, Message):  # the communicator is not made yet
            other = step.sender + step.receiver - rank
            there = programs[other][at[other]] if at[other] < len(programs[other]) else None
            if issued[other] or not isinstance(there, Message) or new(there) != new(step):
                return False
            made.add(new(step))
            return True
        elif isinstance(step, Work):
            met.setdefault(step.what, set()).add(rank)
        elif len(met.get(step.what, ())) < len(programs):
            return False
        at[rank] += 1
        return True

    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while at[rank] < len(program) and one_step(rank):
                moved = True
        for key, mine in list(queues.items()):
            if mine and mine[0].sender == key[0]:
                theirs = queue(mine[0].receiver, mine[0])
                if theirs and theirs[0] == mine[0]:
                    issued[mine[0].sender] -= 1
                    issued[mine[0].receiver] -= 1
                    mine.popleft(), theirs.popleft()
                    moved = True
    left = {rank: mine[0] for (rank, *_), mine in queues.items() if mine}
    return left | {rank: program[at[rank]] for rank, program in enumerate(programs) if at[rank] < len(program)}


class Done:
    """An operation's handle."""

    def wait(self):
        return True


class Marked(torch.autograd.Function):
    """Work in forward and in backward."""

    @staticmethod
    def forward(ctx, x, mark):
        ctx.mark = mark
        mark("forward")
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        ctx.mark("backward")
        return dy, None


def recorded(count, chunks, microbatches, empty=()):
    """[process]: what ``connect`` and ``run_pipeline`` issue there. ``empty``: microbatches that are no-ops."""
    return [program(rank, count, chunks, microbatches, empty) for rank in range(count)]


def program(rank, count, chunks, microbatches, empty):
    steps, groups = [], []
    depth = depth_of(interleaved(count, microbatches + -microbatches % count, chunks))
    draw, batches, found = random.Random(microbatches), [0] * depth, []
    for n in range(microbatches):
        a, length = n % depth, draw.randrange(1, 9)
        found.append(() if n in empty else (Sample(a, batches[a], 0, length),))
        batches[a] += len(found[-1])
    works = works_of(found)

    def group(ranks, backend=None, **options):
        groups.append(f"{backend} {len(groups)}")
        return groups[-1]

    def halves(sends):
        def issue(tensor, peer, group):
            steps.append(Message(group, *((rank, peer) if sends else (peer, rank))))
            return Done()

        return issue

    def sum_of(mine, links, watch):
        steps.append(Work(("sum", sum(isinstance(step, Work) and step.what[0] == "sum" for step in steps))))
        return lambda what=steps[-1].what: steps.append(Meet(what)) or mine

    def forward(params, kept, x, data):
        x = torch.zeros(1, requires_grad=True) if x is None else x
        return Marked.apply(x * 1, lambda way: steps.append(Work((rank, way, len(steps)))))

    fakes = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "get_world_size": lambda: count,
        "get_rank": lambda: rank,
        "new_group": group,
        "isend": halves(True),
        "irecv": halves(False),
    }
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wires, "dist", SimpleNamespace(**fakes))
        patch.setattr(wires, "on_gpus", lambda group: False)
        patch.setattr(pipeline, "watching", lambda *given: nullcontext(Watch("", None)))
        patch.setattr(pipeline, "sum_of", sum_of)
        links = connect()
        run_pipeline(
            init_state({}, jobs := [Job(str(a), 1e-3, clip=1.0) for a in range(depth)]),
            works,
            lambda n: None,
            stages={rank + count * c: Stage(forward, ()) for c in range(chunks)},
            wire=Wire(lambda work: (1,)),
            jobs=jobs,
            links=links,
        )
    return steps
