"""What two processes with a GPU each run, through NCCL: a pipeline, replicas, and a process that fails. (On a CPU through gloo.)"""

import os
import re

import optree
import pytest
import torch
import torch.distributed as dist

from fdora import FdoraError
from fdora.jobs.loop import Wire, connect, gather_state, replica_step, run_pipeline, select_state, works_of
from fdora.jobs.schedule import Spec, schedule
from tests.distributed.world import run
from tests.train import make
from tests.train.replica_cases import equal_on_all
from tests.train.test_step import start, together

DEVICE = os.environ["DEVICE"]
PLAN = works_of(schedule(make.LENGTHS, Spec(16, depth=2, seconds=0)))


def here(tree):
    return optree.tree_map(lambda t: t.to(DEVICE) if isinstance(t, torch.Tensor) else t, tree)


def near(state, wanted):
    for one, other in zip(optree.tree_leaves(state.params), optree.tree_leaves(wanted.params), strict=True):
        torch.testing.assert_close(one.cpu(), other, rtol=2e-4, atol=2e-5)
    assert state.steps == wanted.steps


def piped(base, stages, links):
    stage = stages[links.rank]
    wire = Wire(lambda work: (sum(s.length for s in work.samples), make.H), device=DEVICE)
    mine, data = here(select_state(start(base), stage.names)), lambda n: here(make.data_of(PLAN[n].samples))
    return run_pipeline(mine, PLAN, data, stages={links.rank: stage}, wire=wire, jobs=make.JOBS, links=links)


def case_a_pipeline():
    base, links = make.frozen(), connect()
    wanted, losses = together(PLAN, start(base), make.whole(base))
    there = make.Frozen(*map(here, base))
    ran = piped(base, [make.first(there), make.second(there)], links)
    near(gather_state(ran.state, links), wanted)
    for n, each in ran.losses.items():
        torch.testing.assert_close(each.cpu(), losses[n], rtol=2e-4, atol=2e-5)


def case_replicas():
    base, group = make.frozen(), dist.new_group()
    wanted, _ = together(PLAN, start(base), make.whole(base))
    model, state = make.whole(make.Frozen(*map(here, base))), here(start(base))
    for n in range(0, len(PLAN), 2):
        mine = PLAN[n + dist.get_rank(group)] if n + dist.get_rank(group) < len(PLAN) else None
        data = here(make.data_of(mine.samples)) if mine and mine.samples else None
        state, _ = replica_step(state, PLAN[n : n + 2], data, model=model, jobs=make.JOBS, group=group)
    near(state, wanted)
    equal_on_all(state, group)


def case_one_process_that_raises_ends_all():
    """The last case, for what was called off on a GPU may not come back in every version of NCCL."""
    base, links = make.frozen(), connect()
    there = make.Frozen(*map(here, base))
    stages = [make.first(there), make.second(there)]

    def lost(*given):
        raise ArithmeticError("all of it is lost")

    with pytest.raises((ArithmeticError, FdoraError)) as caught:
        piped(base, [stages[0], stages[1]._replace(forward=lost)], links)
    said = r"got process 1 of 2, which failed: ArithmeticError: all of it is lost. Mend"
    assert caught.type is ArithmeticError if links.rank else re.search(said, str(caught.value)), caught.value


if __name__ == "__main__":
    run(globals())
