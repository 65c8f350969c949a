"""The public functions on tensors that several processes hold together."""

import pytest
import torch

from tests import device
from tests.distributed.world import names, results

FILES = {"tests.distributed.function_cases": 2, "tests.distributed.layer_cases": 2, "tests.distributed.mesh_cases": 4}
CASES = [(module, case) for module in FILES for case in names(module.replace(".", "/") + ".py")]


@pytest.fixture(scope="module")
def said():
    found = {}

    def of(module):
        if module not in found:
            found[module] = results(module, FILES[module])
        return found[module]

    return of


@pytest.mark.parametrize(("module", "case"), CASES, ids=[case for _, case in CASES])
def test_case(said, module, case):
    if device.NAME == "cuda" and torch.cuda.device_count() < FILES[module]:
        pytest.skip(
            f"NCCL wants a GPU for each of {FILES[module]} processes; runs with --device cpu, or on a machine with as many GPUs"
        )
    assert said(module).get(case, "it never ran: a case before it failed") == "ok"
