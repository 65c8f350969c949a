"""The commands of the Makefile, with a Python that only writes down what it was asked."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = """#!/bin/sh
echo "$@" >> '{log}'
if [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi
"""


@pytest.mark.skipif(shutil.which("make") is None, reason="needs make")
@pytest.mark.parametrize("name", ["venv", "a folder with spaces"])
def test_any_folder_can_hold_the_environment(name, tmp_path):
    log, python = tmp_path / "log", tmp_path / "python"
    python.write_text(PYTHON.format(log=log))
    python.chmod(0o755)

    def make(target):
        log.write_text("")
        settings = [f"VENV={tmp_path / name}", f"PYTHON={python}", "VENV_FLAGS="]
        done = subprocess.run(["make", target, *settings], cwd=ROOT, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return log.read_text().splitlines()

    first = make("lint")
    assert first[0] == f"-m venv {tmp_path / name}" and first[-1] == "-m mypy"
    assert sum("pip install" in line for line in first) == 5
    assert make("lint") == ["-m ruff check .", "-m ruff format --check .", "-m mypy"]  # nothing is made twice
    assert make("demo") == ["-m demo.run"]
    assert len(make("test")) == 2
