"""A pipeline of stages gives what one process gives, and so do replicas."""

import pytest
import torch
from torch.nn.functional import pad

from fdora import FdoraError
from fdora.jobs.loop import Model, Stage, connect, run_pipeline, select_state, works_of
from fdora.jobs.loop.records import TREES
from fdora.jobs.loop.step import square_sum
from fdora.jobs.schedule import Spec, schedule
from tests import device
from tests.distributed.world import names, results
from tests.train import make
from tests.train.test_step import start, together

FILES = {"tests.train.pipeline_cases": 2, "tests.train.three_cases": 3, "tests.train.replica_cases": 2}
CASES = [(module, case) for module in FILES for case in names(module.replace(".", "/") + ".py")]


@pytest.fixture(scope="module")
def said():
    if device.NAME == "cuda":
        pytest.skip("its tensors lie on a CPU; test_on_two_gpus goes through NCCL; runs with --device cpu")
    return {module: results(module, world) for module, world in FILES.items()}


@pytest.mark.parametrize(("module", "case"), CASES, ids=[case for _, case in CASES])
def test_case(said, module, case):
    assert said[module].get(case, "it never ran: a case before it failed") == "ok"


GPU_CASES = names("tests/train/gpu_cases.py")


@pytest.fixture(scope="module")
def said_on_gpus():
    if device.NAME != "cuda" or torch.cuda.device_count() < 2:
        pytest.skip("NCCL wants a GPU for each of two processes; pytest --device cuda on a machine with two runs it")
    return results("tests.train.gpu_cases", 2)


@pytest.mark.parametrize("case", GPU_CASES)
def test_on_two_gpus(said_on_gpus, case):
    assert said_on_gpus.get(case, "it never ran: a case before it failed") == "ok"


@pytest.mark.parametrize("stages", [lambda base: [make.first(base), make.second(base)], make.four])
def test_all_stages_in_one_process(stages):
    base, links = make.frozen(), connect()
    works = works_of(schedule(make.LENGTHS, Spec(16, depth=4, seconds=0)))
    wanted, losses = together(works, start(base), make.whole(base))
    ran = make.piped(works, start(base), stages(base), links)
    make.same(ran.state, wanted._replace(params=ran.state.params | wanted.params))
    assert ran.losses.keys() == losses.keys() and all(torch.equal(ran.losses[n], losses[n]) for n in losses)


def test_stages_of_another_process_are_refused():
    base, links = make.frozen(), connect()
    works = works_of(schedule(make.LENGTHS, Spec(40, depth=2, seconds=0)))
    given = {"works": works, "data": None, "wire": make.WIRE, "jobs": make.JOBS, "links": links}
    with pytest.raises(FdoraError, match=r"`stages` must be numbered 0, 1, ... on process 0 of 1, got \[1\]"):
        run_pipeline(start(base), stages={1: make.second(base)}, **given)
    given |= {"data": lambda n: make.data_of(works[n].samples), "wire": make.WIRE._replace(shape=lambda work: (1, make.H))}
    with pytest.raises(FdoraError, match=r"`wire` must be \(\d+, 16\) torch.float32, what forward gave, got \(1, 16\)"):
        run_pipeline(start(base), stages={0: make.first(base), 1: make.second(base)}, **given)
    with pytest.raises(FdoraError, match=r"None or \[0\] in one process, got \[0, 1\]"):
        connect([0, 1])


def test_stages_that_train_nothing():
    """The first and the last of three, clipping all the same."""
    base, links = make.frozen(), connect()
    works = works_of(schedule(make.LENGTHS, Spec(16, depth=3, seconds=0)))
    layer = make.layer_of(base, "one")

    def losses_of(params, kept, x, data):
        return torch.zeros(len(data.labels)).index_add(0, data.owners, x.square().mean(1))

    stages = [
        Stage(lambda params, kept, x, data: pad(data.x, (0, make.H - make.K)), ()),
        Stage(lambda params, kept, x, data: layer(params, kept, x[:, : make.K], data), ("one",), make.keep_of(base)),
        Stage(losses_of, ()),
    ]
    model = Model(lambda p, kept, data: losses_of(p, kept, layer(p, kept, None, data), data), make.keep_of(base))
    begin = start(base)
    wanted, _ = together(works, begin._replace(**{t: {"one": getattr(begin, t)["one"]} for t in TREES}), model)
    ran = run_pipeline(
        select_state(begin, ["one"]),
        works,
        lambda n: make.data_of(works[n].samples),
        stages=dict(enumerate(stages)),
        wire=make.WIRE,
        jobs=make.JOBS,
        links=links,
    )
    make.same(ran.state, wanted)
    assert square_sum({}, 0) == 0
