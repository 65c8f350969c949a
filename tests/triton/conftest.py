"""Fixtures of the kernel tests."""

import pytest


@pytest.fixture
def chosen_anew():
    """For tests that exchange what an op chooses its launches by: none is read off from before, none is left behind."""
    from fdora.triton import _repeat

    _repeat._programs.clear()
    yield
    _repeat._programs.clear()
