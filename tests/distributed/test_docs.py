"""The programs of docs/distributed.md, as torchrun starts them: the losses of one process."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests import device

ROOT = Path(__file__).parents[2]
PROGRAMS = {
    re.match(r"# (\w+)", p)[1]: p for p in re.findall(r"```python\n(.*?)```", (ROOT / "docs/distributed.md").read_text(), re.S)
}
ONE = """
import torch
from decoder import Decoder, loss_of
torch.manual_seed(0)
model = Decoder().to({device!r})
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
ids = torch.randint(0, 32, (4, 16), device={device!r})
for step in range(3):
    y = model(ids)
    print(step, loss_of(y, ids).item(), *(loss_of(*each).item() for each in zip(y.chunk(2), ids.chunk(2))))
    loss_of(y, ids).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("programs")
    for name, code in PROGRAMS.items():
        (folder / f"{name}.py").write_text(code)
    (folder / "one.py").write_text(ONE.format(device=device.NAME))
    return folder


def run(folder, *command):
    hidden = {} if device.NAME == "cuda" else {"CUDA_VISIBLE_DEVICES": ""}
    env = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"} | hidden
    done = subprocess.run([sys.executable, *command], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def one(folder):
    """For each step the loss, and those of the two halves of the batch."""
    return [[float(v) for v in line.split()[1:]] for line in run(folder, "one.py").splitlines()]


@pytest.mark.parametrize(("name", "count", "share"), [("fsdp", 2, 1), ("tp", 2, 0), ("both", 4, 2)])
def test_program(folder, one, name, count, share):
    """``share``: how many processes see the same half of the batch; 0 where all see the whole."""
    if device.NAME == "cuda" and torch.cuda.device_count() < count:
        pytest.skip(f"NCCL wants a GPU for each of {count} processes")
    out = run(folder, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), f"{name}.py")
    got = {(int(s), int(r)): float(v) for s, r, v in re.findall(r"step (\d) of process (\d): loss (\d+\.\d{5})", out)}
    assert len(got) == 3 * count
    for (step, rank), loss in got.items():
        want = one[step][1 + rank // share if share else 0]
        assert abs(loss - want) < 2e-4 * want, (step, rank)
    assert one[2][0] < one[0][0] - 0.1  # it learns
