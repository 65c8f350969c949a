"""fdora.jobs.train over stages of a model."""

import pytest

pytest.importorskip("peft", reason="its adapters are PEFT's; `make test` installs it")

from transformers import GPTNeoXConfig, GraniteConfig

from fdora import FdoraError
from fdora.jobs import TrainJob, train
from fdora.jobs.loop import Job
from tests import device
from tests.distributed.world import names, results
from tests.train import test_train
from tests.train.test_train import SIZES, data_of, jobs_of, model_of, with_adapter

CASES = names("tests/train/causal_cases.py")


@pytest.fixture(scope="module")
def said():
    if device.NAME == "cuda":
        pytest.skip("its tensors lie on a CPU; runs with --device cpu")
    return results("tests.train.causal_cases", 2)


@pytest.mark.parametrize("case", CASES)
def test_case(said, case):
    assert said.get(case, "it never ran: a case before it failed") == "ok"


def test_all_stages_in_one_process():
    jobs = jobs_of()
    wanted, found = train(model_of(), jobs, capacity=40), train(model_of(), jobs, capacity=40, stages=2)
    for name, losses in wanted.losses.items():
        assert found.losses[name] == pytest.approx(losses, rel=2e-5)


def test_models_that_cannot_be_cut(monkeypatch, tmp_path):
    monkeypatch.setitem(test_train.CONFIGS, "granite", lambda: GraniteConfig(**SIZES, embedding_multiplier=2.0))
    monkeypatch.setitem(test_train.CONFIGS, "neox", lambda: GPTNeoXConfig(**SIZES))
    adapter = {"law": test_train.LoraConfig(r=2, target_modules=["q_proj", "query_key_value"])}
    job = [TrainJob(Job("law", 1e-3), data_of(0, 2))]
    said = {
        "granite": "changes elsewhere than in its layers",
        "neox": "lacks the layers, or the norm",
        "llama": "`stages` must be at most 2, the layers of the model, got 3",
    }
    for family, words in said.items():
        with pytest.raises(FdoraError, match=words):
            train(model_of(family, adapter), job, stages=3 if family == "llama" else 2)
    train(with_adapter()(), job, capacity=40, folder=tmp_path)
    with pytest.raises(FdoraError, match="`folder` must be of this training, or new, got another schedule"):
        train(with_adapter()(), job, capacity=40, folder=tmp_path, stages=2)
