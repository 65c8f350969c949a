"""Options and the seed every test starts from. Tests never name a GPU: they ask tests.device."""

import pytest
import torch

from tests import device


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="where tensors live: cpu or cuda")


def pytest_configure(config):
    device.NAME = config.getoption("--device")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What a module makes once is made in one process: tests that share it stay together under ``--dist loadgroup``."""
    for item in items:
        found = item._fixtureinfo.name2fixturedefs.values()
        if any(fixture.scope == "module" for named in found for fixture in named):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.split("::")[0]))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
