"""Fixtures of the kernel tests."""

import os

import pytest

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests.triton.interpreter import speed_up

    speed_up()


@pytest.fixture
def chosen_anew():
    """For tests that exchange what plans are made by: none is found from before, none is left behind. Yields the plans."""
    from fdora.triton.runtime import walk

    walk._plans.clear()
    yield walk._plans
    walk._plans.clear()


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
