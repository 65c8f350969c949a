"""What two processes run as one pipeline."""

import os
import re
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from fdora import FdoraError
from fdora.functional import dora_linear_multi
from fdora.jobs.loop import Stage, connect, gather_state, load, save, works_of
from fdora.jobs.loop.wires import Mail
from fdora.jobs.schedule import Spec, schedule
from tests.distributed.world import run
from tests.train import make
from tests.train.test_step import start, together

FRAMES = {"1F1B": (2, lambda base: [make.first(base), make.second(base)]), "interleaved": (4, make.four)}


def works(depth):
    found = schedule(make.LENGTHS, Spec(16, depth=depth, seconds=0))
    assert depth < 4 or found.noops, "no-ops are to be walked over"
    return works_of(found)


def agree(depth, stages):
    base, plan, links = make.frozen(), works(depth), connect()
    wanted, losses = together(plan, start(base), make.whole(base))
    ran = make.piped(plan, start(base), stages(base), links)
    assert set(ran.losses) == (set(losses) if links.rank == len(links.ranks) - 1 else set())
    assert all(torch.equal(ran.losses[n], losses[n]) for n in ran.losses)
    make.same(gather_state(ran.state, links), wanted)


def case_one_f_one_b_gives_the_bits_of_one_process():
    agree(*FRAMES["1F1B"])


def case_interleaved_stages_give_the_bits_of_one_process():
    agree(*FRAMES["interleaved"])


def case_resumed_in_the_middle_with_one_process_more():
    """Begun in one process, saved in the middle of batches, gone on in two, saved again, ended in two: the same bits."""
    base, plan, links = make.frozen(), works(2), connect()
    model, stages = make.whole(base), FRAMES["1F1B"][1](base)
    wanted, _ = together(plan, start(base), model)
    folder = Path(os.environ["FOLDER"])
    half, _ = together(plan[:1], start(base), model)
    open_ = [n for n, w in enumerate(plan) if {s[:2] for s in w.samples} - set(w.due)]  # they leave a batch unfinished
    for stop, name in ((open_[-1] + 1, "two"), (len(plan), "end")):
        if links.rank == 0:
            save(folder / name, half, make.JOBS)
        torch.distributed.barrier()
        ran = make.piped(plan[:stop], load(folder / name, start(base), make.JOBS), stages, links)
        half = gather_state(ran.state, links)
        assert stop == len(plan) or half.grads["one"].A.any()
    make.same(half, wanted)


def case_a_schedule_of_another_depth_is_refused_by_all():
    base = make.frozen()
    found = {depth: works_of(schedule(make.LENGTHS[:1], Spec(16, depth=depth, seconds=0))) for depth in (1, 2)}
    with pytest.raises(FdoraError, match=r"each batch 2 microbatches after .* Make the schedule with Spec\(depth=2\)"):
        make.piped(found[1], start(base), FRAMES["1F1B"][1](base), connect())
    with pytest.raises(FdoraError, match=r"each batch 4 microbatches after"):
        make.piped(found[2], start(base), make.four(base), connect())


def case_one_process_that_is_refused_ends_all():
    """Only one of them was given what it cannot run, so only it can say so."""
    base, plan = make.frozen(), works(2)
    stages = FRAMES["1F1B"][1](base)
    for of in (0, 1):
        links = connect()
        with pytest.raises(FdoraError, match="each batch 2 microbatches after") as caught:
            given = [work._replace(due=()) for work in plan] if links.rank == of else plan
            make.piped(given, start(base), stages, links)
        assert (f"process {of} of 2, which failed" in str(caught.value)) == (links.rank != of)


def case_it_keeps_what_is_in_flight_alone():
    """On the first process at most two microbatches lie between their forward and their backward."""
    base, plan, links = make.frozen(), works(2), connect()
    times = iter(range(10**6))
    ran = make.piped(plan, start(base), FRAMES["1F1B"][1](base), links, clock=lambda: float(next(times)))
    flying, most = 0, 0
    for task in ran.tasks:
        flying += -1 if task.action.backward else 1
        most = max(most, flying)
    assert most == 2 - links.rank and len(ran.tasks) == 2 * sum(bool(w.samples) for w in plan)


def broken(of, stages, at):
    """The stages, of which one on process ``of`` raises at the microbatch ``at``, forward or backward."""
    calls = []

    def forward(params, kept, x, data):
        calls.append(1)
        if len(calls) == at + 1:
            raise ArithmeticError("all of it is lost")
        return stages[of].forward(params, kept, x, data)

    return [stages[of]._replace(forward=forward) if n == of else stage for n, stage in enumerate(stages)]


def case_one_process_that_raises_ends_all():
    """With what it said, not after the 30 minutes that are the limit of these groups; and new groups work again."""
    base, plan = make.frozen(), works(2)
    stages = FRAMES["1F1B"][1](base)
    for of in (0, 1):
        for at in (0, 2):
            links = connect()
            with pytest.raises((ArithmeticError, FdoraError)) as caught:
                make.piped(plan, start(base), broken(of, stages, at), links)
            if links.rank == of:
                assert caught.type is ArithmeticError
            else:
                said = (
                    rf"processes that all go on, got process {of} of 2, which failed: ArithmeticError: all of it is lost. Mend"
                )
                assert re.search(said, str(caught.value)), caught.value
            with pytest.raises(FdoraError, match="all of it is lost"):
                make.piped(plan, start(base), stages, links)
    agree(*FRAMES["1F1B"])


def case_what_was_sent_is_let_go():
    """Not kept until the end of a run: at most two messages are under way."""
    base, plan, links = make.frozen(), works(2), connect()
    most, send = [], Mail.send

    def counted(mail, *given):
        if len(mail.sent) > 1:  # the other side has had it by now: its gradient is here
            mail.sent[0][1].exception()  # waits
        send(mail, *given)
        most.append(len(mail.sent))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Mail, "send", counted)
        make.piped(plan, start(base), FRAMES["1F1B"][1](base), links)
    assert len(most) > 4 and max(most) <= 2


class Sharded(torch.nn.Module):
    """A frozen layer whose W FSDP2 shards; whole inside forward, where its norms are computed, too."""

    def __init__(self, W):
        super().__init__()
        self.weight = torch.nn.Parameter(W.clone(), requires_grad=False)

    def forward(self, x, bank, data):
        return dora_linear_multi(x, self.weight, *bank, s=make.S, offsets=data.ends, ranks=make.RANKS)


def case_fsdp2_around_the_stages_of_jobs_of_ones_own():
    """Every process trains adapters of its own on a base that all of them shard, two microbatches in flight: the bits of one."""
    base, plan, links = make.frozen(), works(2), connect([torch.distributed.get_rank()])
    mine = start(base)
    for t in (mine.params["one"].B, mine.params["two"].B):
        t.add_(0.01 * torch.distributed.get_rank())
    mine = mine._replace(kept=make.keep_of(base)(mine.params))
    wanted, losses = together(plan, mine, make.whole(base))
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    one, two = (fully_shard(Sharded(W), mesh=mesh) for W in base)
    stages = [
        Stage(lambda params, kept, x, data: torch.tanh(one(data.x, params["one"], data)), ("one",)),
        Stage(
            lambda params, kept, x, data: make.losses_of(params["head"]["weight"], two(x, params["two"], data), data),
            ("two", "head"),
        ),
    ]
    ran = make.piped(plan, mine, stages, links)
    assert type(one.weight).__name__ == "DTensor" and one.weight.to_local().shape[0] == make.H // 2
    assert all(torch.equal(ran.losses[n], losses[n]) for n in losses)
    make.same(ran.state, wanted)


if __name__ == "__main__":
    run(globals())
