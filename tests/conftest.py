"""Options and the seed every test starts from. Tests never name a GPU: they ask tests.device."""

import os

import pytest
import torch

from tests import device

os.environ["FDORA_TILES"] = "0"  # whatever `fdora tune` wrote on this machine

# `make test` leaves to `make test-all` what starts processes or a framework, trains or times, or builds machine code; and
# of kernels in the interpreter all but the cases of tests/cases.py, their faults, and weights of codes.
LONG = (
    *("tests/acceptance/", "tests/distributed/", "tests/integrations/", "tests/plan/", "tests/train/"),
    *("tests/test_bench", "tests/test_demo", "tests/test_examples.py", "tests/test_package.py", "tests/triton/test_compiled"),
)
INTERPRETED = ("tests/triton/test_cases.py", "tests/triton/test_mutations.py", "tests/triton/test_quant.py")


def is_long(item):
    if os.environ.get("TRITON_INTERPRET") == "1":
        return not item.nodeid.startswith(INTERPRETED)
    builds = item.nodeid.startswith("tests/triton/test_compile") and "asked" not in item.fixturenames
    return builds or item.nodeid.startswith(LONG)


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="where tensors live: cpu or cuda")


def pytest_configure(config):
    device.NAME = config.getoption("--device")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What a module makes once is made in one process: tests that share it stay together under ``--dist loadgroup``."""
    for item in items:
        if is_long(item):
            item.add_marker(pytest.mark.long)
        found = item._fixtureinfo.name2fixturedefs.values()
        if any(fixture.scope == "module" for named in found for fixture in named):
            item.add_marker(pytest.mark.xdist_group(item.nodeid.split("::")[0]))


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
