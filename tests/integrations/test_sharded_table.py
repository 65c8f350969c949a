"""Layouts of test_sharded.py with four processes and five steps, by the command that prints them as a table.

Those to which four are not as two: sums have an order, a mesh has two dimensions, a process has no rows. The command without names
runs the others, too, and may be asked for more steps. One start of four processes, with one reference for all layouts.
"""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("peft", reason="`make test` installs it")
NAMES = [
    *("ddp", "fsdp2 leaves", "hsdp blocks", "fsdp1 leaves", "on shards, fsdp2 blocks", "on shards, hsdp blocks"),
    *("full DoRA, fsdp over it", "lora dropout, fsdp over it", "few rows", "tp transformers", "tp fsdp over it"),
]


@pytest.mark.xdist_group("tests/integrations/test_sharded.py")  # not beside the processes of that
def test_four_processes_and_five_steps():
    command = [sys.executable, "-m", "tests.integrations.sharded_table", "--processes", "4", "--steps", "5", *NAMES]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    said = done.stdout + done.stderr[-4000:]
    assert done.returncode == 0 and done.stdout.count(" | yes | ") == len(NAMES), said
