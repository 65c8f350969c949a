"""Options and the seed every test starts from. Tests never name a GPU: they ask tests.device."""

import pytest
import torch

from tests import device


def pytest_addoption(parser):
    parser.addoption("--device", default="cpu", help="where tensors live: cpu or cuda")


def pytest_configure(config):
    device.NAME = config.getoption("--device")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
