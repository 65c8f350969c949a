"""Processes of this Python; among them cases with packages that PEFT refuses to share an environment with, from a folder of their own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def python(*arguments, cwd=ROOT, timeout=None, **env):
    """What a process of this Python ended with. Of its environment what is None is left out."""
    env = {name: value for name, value in (os.environ | env).items() if value is not None}
    command = [sys.executable, *map(str, arguments)]
    return subprocess.run(command, cwd=cwd, env=env, timeout=timeout, capture_output=True, text=True)


def torchrun(*arguments, cwd, **env):
    """What two processes print that torchrun starts."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    command = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments)
    done = python(*command, cwd=cwd, timeout=600, **{"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | env)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def run_cases(file, folder, passed, **env):
    """``pytest file``, of which at least so many must pass, with the packages that the Makefile puts into ``folder``."""
    packages = Path(sys.prefix) / folder
    if not packages.exists():
        pytest.skip(f"`make test` installs {folder} into {packages}; this environment was made otherwise")
    done = python("-m", "pytest", "-p", "no:cacheprovider", "-rA", file, PYTHONPATH=f"{packages}:{ROOT}", **env)
    assert done.returncode == 0 and done.stdout.count("PASSED") >= passed, done.stdout[-6000:] + done.stderr[-2000:]
