"""What two processes train as one pipeline: fdora.jobs.train with stages."""

import os
import shutil
from functools import partial
from pathlib import Path

import pytest
import torch.distributed as dist
from torch import nn

from fdora import FdoraError
from fdora.jobs import TrainJob, train
from fdora.jobs.loop import Job
from tests.distributed.world import run
from tests.train.test_train import (
    CONFIGS,
    Stop,
    Until,
    as_alone,
    diverging,
    jobs_of,
    joining,
    left,
    model_of,
    same,
    with_dropout,
)


def halved(model, cut):
    """The frozen weights of the other process's stages are nowhere."""
    rank, inner = dist.get_rank(), model.get_base_model()
    mine = inner.model.layers[cut:] if rank else inner.model.layers[:cut]
    rest = [block for block in inner.model.layers if block not in [*mine]]
    for part in [*rest, inner.model.embed_tokens if rank else inner.lm_head]:
        for module in part.modules():
            for name, p in [*module.named_parameters(recurse=False)]:
                if not any("lora_" in path and p is q for path, q in part.named_parameters()):
                    setattr(module, name, nn.Parameter(p.to("meta"), requires_grad=False))
    return model


def case_each_adapter_trains_as_alone():
    """Each process without the frozen weights of the other; the first saves what both trained."""
    for n, family in enumerate(CONFIGS):
        model, jobs, seen = halved(model_of(family), 1), jobs_of(), []
        trained = train(model, jobs, capacity=40, stages=2, on_step=seen.append)
        if dist.get_rank() == n % 2:
            as_alone(trained, jobs, model, partial(model_of, family))
        assert len(seen) == (0 if dist.get_rank() else sum(map(len, trained.losses.values())))
        assert sum(step.evaluation is not None for step in seen) in (0, sum(map(len, trained.evaluations.values())))


def stopped(model, jobs, reads, **given):
    """By one of the processes; the other says so, or comes to the same place."""
    data = Until(jobs[0].data)
    data.left = len(data) + reads
    with pytest.raises((Stop, FdoraError), match=r"failed: Stop|^$"):
        train(model, [jobs[0]._replace(data=data), *jobs[1:]], stages=2, **given)


def case_resumed_to_the_bit():
    """In two processes, or in one; with dropout and checkpointing of activations."""
    folder = Path(os.environ["FOLDER"])
    for number, (make, stops) in enumerate([(model_of, (0, 2, 3)), (with_dropout, (3,))]):
        jobs, whole, model = jobs_of(), make().train(), make().train()
        whole.gradient_checkpointing_enable()
        wanted = train(whole, jobs, capacity=16, stages=2)
        given = {"capacity": 16, "folder": folder / f"run{number}", "every": 1}
        for reads in stops:
            stopped(model, jobs, reads, **given)
            same(model, make())
            dist.barrier()
            if dist.get_rank() == 0:
                shutil.copytree(given["folder"], folder / f"run{number} {reads}")
        assert train(model, jobs, stages=2, **given) == wanted
        same(model, whole)
        for reads in stops:
            again, own = make(), folder / f"process {dist.get_rank()} {number} {reads}"
            shutil.copytree(folder / f"run{number} {reads}", own)
            assert train(again, jobs, capacity=16, folder=own) == wanted
            same(again, whole)


def case_interleaved():
    """Four stages of which each process has two; the bits of one process that goes on with it."""
    jobs, folder = jobs_of(), Path(os.environ["FOLDER"]) / "interleaved"
    make = lambda: model_of(num_hidden_layers=5).train()  # noqa: E731
    model, other = make(), make()
    model.gradient_checkpointing_enable()
    found = train(model, jobs, capacity=16, stages=4, folder=folder)
    data = Until(jobs[0].data)
    own = folder.with_name(f"own {dist.get_rank()}")
    data.left = len(data)
    with pytest.raises((Stop, FdoraError), match=r"failed: Stop|^$"):
        train(make(), [jobs[0]._replace(data=data), *jobs[1:]], capacity=16, stages=4, folder=folder.with_name("begun"))
    dist.barrier()
    shutil.copytree(folder.with_name("begun"), own)
    assert train(other, jobs, capacity=16, folder=own) == found
    same(other, model)


def case_what_diverges_leaves():
    jobs, model = diverging(), model_of()
    left(model, train(model, jobs, capacity=40, stages=2), jobs)


def case_jobs_join():
    (law, med, code), asked = jobs_of(), []
    model, join = joining([(code, 4), (law, 2)], asked)
    given = {"capacity": 40, "stages": 2, "folder": Path(os.environ["FOLDER"]) / "join"}
    as_alone(train(model, [med], join=lambda: asked.append(0) or join(), **given), (law, med, code), model)


def case_one_that_fails_ends_both():
    def broken(step):
        raise ArithmeticError("no room")

    with pytest.raises((ArithmeticError, FdoraError), match="no room"):
        train(model_of(), jobs_of(), capacity=40, stages=2, on_step=broken)


def case_stages_that_processes_cannot_share():
    with pytest.raises(FdoraError, match="`stages` must be a multiple of the 2 processes, got 3"):
        train(model_of(), [TrainJob(Job("law", 1e-3), jobs_of()[0].data)], stages=3)


if __name__ == "__main__":
    run(globals())
