"""Cases that want packages that PEFT refuses to share an environment with: in a process of their own, from a folder of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def run_cases(file, folder, passed, **env):
    """``pytest file``, of which at least so many must pass, with the packages that the Makefile puts into ``folder``."""
    packages = Path(sys.prefix) / folder
    if not packages.exists():
        pytest.skip(f"`make test` installs {folder} into {packages}; this environment was made otherwise")
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-rA", str(file)]
    env = os.environ | {"PYTHONPATH": f"{packages}:{ROOT}"} | env
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.count("PASSED") >= passed, done.stdout[-6000:] + done.stderr[-2000:]
