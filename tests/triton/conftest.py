"""Fixtures of the kernel tests."""

import os
from pathlib import Path

import pytest

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
if INTERPRETED:
    from tests.triton.interpreter import speed_up

    speed_up()


def pytest_collection_modifyitems(items):
    """Interpreted: what no kernel runs in was seen without the interpreter."""
    for item in [i for i in items if INTERPRETED and Path(__file__).parent in i.path.parents]:
        of = vars(item.module)
        told = any("INTERPRETED" in str(mark.args) for mark in item.iter_markers("skipif"))
        if not told and ("needs_kernels" in of or "INTERPRETED" not in of):
            item.add_marker(
                pytest.mark.skip(reason="no kernel runs; runs without TRITON_INTERPRET, in the first half of `make test`")
            )


@pytest.fixture
def chosen_anew(monkeypatch):
    """For tests that exchange what plans are made by: none is found from before, none is left behind. Yields the plans; whoever
    clears them clears what they are filled in from."""
    from fdora.triton.runtime import family, walk

    class Plans(dict):
        def clear(self):
            super().clear()
            family._families.clear()

    plans = Plans()
    plans.clear()
    monkeypatch.setattr(walk, "_plans", plans)
    yield plans
    plans.clear()


@pytest.fixture
def as_hopper(chosen_anew, monkeypatch):
    """On a CPU: a call makes the plans anew as for an sm_90 whose kernels are interpreted. Yields the plans."""
    from fdora.triton.runtime import walk
    from tests.triton.written import HOPPER

    def pretend():
        chosen_anew.clear()
        monkeypatch.setattr(walk, "device_of", lambda device: HOPPER)
        return chosen_anew

    return pretend


@pytest.fixture
def kernels_everywhere(monkeypatch):
    """For models: every layer takes kernels, and keeps its norm, however small it is; nothing was compiled before."""
    pytest.importorskip("peft", reason="needs PEFT; `make test` installs it")
    pytest.importorskip("transformers", reason="needs transformers; `make test` installs it")
    import torch

    from fdora import _dispatch
    from fdora.integrations import _norm

    monkeypatch.setattr(_norm, "SMALL", 0)
    monkeypatch.setattr(_dispatch, "_forced", "triton")
    torch._dynamo.reset()


@pytest.fixture
def norms(monkeypatch):
    """Which norms are compared and computed, by whatever keeps them."""
    from tests.norms import Recorder

    return Recorder(monkeypatch)


@pytest.fixture
def mesh(tmp_path):
    """Of this process alone."""
    import torch.distributed as dist

    from tests import device

    backend = "nccl" if device.NAME == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield dist.init_device_mesh(device.NAME, (1,))
    dist.destroy_process_group()
