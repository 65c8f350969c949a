"""The layouts of test_sharded.py with four processes and ten steps, by the command that prints them as a table.

All but the compiled ones, which every process compiles for itself: the command without names runs them, too. One start of four
processes, with one reference for all layouts: five minutes of CPU time.
"""

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("peft", reason="`make test` installs it")
from tests.integrations.sharded_cases import CASES

NAMES = [name for name in CASES if not name.startswith("compiled")]


@pytest.mark.xdist_group("tests/integrations/test_sharded.py")  # not beside the processes of that
def test_four_processes_and_ten_steps():
    command = [sys.executable, "-m", "tests.integrations.sharded_table", "--processes", "4", "--steps", "10", *NAMES]
    done = subprocess.run(command, cwd=Path(__file__).parents[2], capture_output=True, text=True)
    said = done.stdout + done.stderr[-4000:]
    assert done.returncode == 0 and done.stdout.count(" | yes | ") == len(NAMES), said
