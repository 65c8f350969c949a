"""A program of examples/distributed as torchrun starts it: the losses of one process. The other two run among the cases."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import device
from tests.distributed.programs import PROGRAMS, check, inside

ROOT = Path(__file__).parents[2]


def test_fsdp_by_torchrun(tmp_path):
    if device.NAME == "cuda" and torch.cuda.device_count() < 2:
        pytest.skip("NCCL wants a GPU for each of 2 processes; runs with --device cpu, or on a machine with two")
    for name, code in PROGRAMS.items():
        (tmp_path / f"{name}.py").write_text(code)
    hidden = {} if device.NAME == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    env = (
        os.environ
        | {"PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH")))), "OMP_NUM_THREADS": "1"}
        | hidden
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "fsdp.py"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    check(done.stdout, inside("one"), 2, 1)
