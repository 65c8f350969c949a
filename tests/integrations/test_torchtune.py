"""torchtune_cases.py in a process of its own: PEFT refuses to share one with the torchao that torchtune needs."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_torchtune():
    folder = Path(sys.prefix) / "torchtune"
    if not folder.exists():
        pytest.skip(f"`make test` installs torchtune into {folder}; this environment was made otherwise")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "no:cacheprovider",
        "-rA",
        str(Path(__file__).with_name("torchtune_cases.py")),
    ]
    env = os.environ | {"PYTHONPATH": f"{folder}:{ROOT}"}
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("PASSED") >= 20, done.stdout[-6000:] + done.stderr[-2000:]
