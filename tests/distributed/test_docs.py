"""A program of examples/distributed as torchrun starts it: the losses of one process. The other two run among the cases."""

import pytest
import torch

from tests import device
from tests.distributed.programs import PROGRAMS, check, inside
from tests.process import torchrun


def test_fsdp_by_torchrun(tmp_path):
    if device.NAME == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL wants a GPU for each of 2 processes; runs with --device cpu, or on a machine with two")
    for name, code in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(code)
    hidden = {} if device.NAME == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    check(torchrun("fsdp.py", cwd=tmp_path, **hidden), inside("one"), 2, 1)
