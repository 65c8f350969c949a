"""What two processes run as replicas, each with the whole model."""

import os
from pathlib import Path

import optree
import pytest
import torch
import torch.distributed as dist

from fdora import FdoraError
from fdora.jobs.loop import load, replica_step, save, works_of
from fdora.jobs.schedule import Spec, schedule
from tests.distributed.world import run
from tests.train import make
from tests.train.test_step import start, together


def works():
    found = works_of(schedule(make.LENGTHS, Spec(16, depth=2, seconds=0)))
    return found if len(found) % 2 else (*found, found[0]._replace(samples=(), weights=(), due=()))


def replicated(plan, state, model, group, stop=None, dtype=torch.float32, **options):
    """All rounds of two; the losses of this replica by microbatch."""
    losses, rank = {}, dist.get_rank(group)
    for n in range(state.position, len(plan) if stop is None else stop, 2):
        mine = plan[n + rank] if n + rank < len(plan) else None
        data = make.data_of(mine.samples, dtype) if mine and mine.samples else None
        state, found = replica_step(state, plan[n : n + 2], data, model=model, jobs=make.JOBS, group=group, **options)
        if data is not None:
            losses[n + rank] = found
    return state, losses


def near(one, other, rtol, atol):
    for part in ("params", "grads", "mean", "square"):
        trees = (optree.tree_leaves(getattr(state, part)) for state in (one, other))
        for t, want in zip(*trees, strict=True):
            torch.testing.assert_close(t, want, rtol=rtol, atol=atol)
    assert (one.steps, one.position) == (other.steps, other.position)


def equal_on_all(state, group):
    for t in optree.tree_leaves((state.params, state.grads, state.mean, state.square)):
        each = [torch.empty_like(t) for _ in range(2)]
        dist.all_gather(each, t.contiguous(), group=group)
        assert torch.equal(*each)


def case_two_replicas_are_one_process_but_for_the_order_of_sums():
    """Odd numbers of microbatches, no-ops, batches spread over rounds and replicas, clipped and not."""
    group, plan = dist.new_group(), works()
    assert len(plan) % 2
    spread = {batch: {n for n, work in enumerate(plan) for s in work.samples if s[:2] == batch} for batch in [(0, 0), (1, 1)]}
    assert any(len({n % 2 for n in at}) > 1 for at in spread.values())  # one batch lies on both replicas
    for dtype, rtol, atol in ((torch.float32, 2e-4, 2e-6), (torch.float64, 1e-9, 1e-12)):
        base = make.frozen(dtype)
        wanted, losses = together(plan, start(base), make.whole(base), dtype=dtype)
        for donate in (False, True):
            state, mine = replicated(plan, start(base), make.whole(base), group, dtype=dtype, donate=donate)
            near(state, wanted, rtol, atol)
            equal_on_all(state, group)
            assert set(mine) == {n for n in losses if n % 2 == dist.get_rank(group)}
            for n, each in mine.items():
                torch.testing.assert_close(each, losses[n], rtol=rtol, atol=atol)


def case_saved_after_a_round_and_gone_on_with_in_one_process():
    group, plan, base = dist.new_group(), works(), make.frozen(torch.float64)
    model, folder = make.whole(base), Path(os.environ["FOLDER"]) / "replicas"
    wanted, _ = together(plan, start(base), model, dtype=torch.float64)
    half, _ = replicated(plan, start(base), model, group, stop=4, dtype=torch.float64)
    assert half.position == 4 and any(t.any() for t in optree.tree_leaves(half.grads))  # in the middle of a batch
    if dist.get_rank(group) == 0:
        save(folder, half, make.JOBS)
    dist.barrier(group)
    read = load(folder, start(base), make.JOBS, model.keep)
    near(together(plan, read, model, dtype=torch.float64)[0], wanted, 1e-9, 1e-12)
    near(replicated(plan, read, model, group, dtype=torch.float64)[0], wanted, 1e-9, 1e-12)


def case_what_replicas_refuse():
    """Also where only one of them is given that."""
    base = make.frozen()
    model, plan = make.whole(base), works_of(schedule(make.LENGTHS[:1], Spec(24, depth=1, seconds=0)))
    with pytest.raises(FdoraError, match=r"Make the schedule with Spec\(depth=2\), and give its rounds in order"):
        replicated(plan, start(base), model, dist.new_group())
    for of in ((0, 1), (0,), (1,)):
        group = dist.new_group()
        given = works()[: 3 if dist.get_rank(group) in of else 2]
        mine = given[dist.get_rank(group)]
        with pytest.raises(FdoraError, match=r"`works` must be at most 2 microbatches, one for each replica, got 3"):
            replica_step(start(base), given, make.data_of(mine.samples), model=model, jobs=make.JOBS, group=group)


def case_a_replica_that_raises_ends_all():
    base, plan = make.frozen(), works()
    model = make.whole(base)

    def forward(*given):
        raise ArithmeticError("all of it is lost")

    for of in (0, 1):
        group = dist.new_group()
        own = model._replace(forward=forward) if dist.get_rank(group) == of else model
        with pytest.raises((ArithmeticError, FdoraError), match="all of it is lost") as caught:
            replicated(plan, start(base), own, group)
        assert (caught.type is ArithmeticError) == (dist.get_rank(group) == of)


if __name__ == "__main__":
    run(globals())
