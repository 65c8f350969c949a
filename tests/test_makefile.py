"""The commands of the Makefile, with a Python that only writes down what it was asked."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHON = """#!/bin/sh
echo "$@" >> '{log}'
if [ "$2" = venv ]; then mkdir -p "$3/bin" && cp "$0" "$3/bin/python"; fi
if [ "$2" = sphinx ]; then mkdir -p build/site && echo site > build/site/README.html; fi
"""
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make; runs on any machine that has it")


@pytest.fixture(params=["venv", "a folder with spaces"])
def venv(request, tmp_path):
    return tmp_path / request.param


@pytest.fixture
def make(venv, tmp_path):
    """``make target`` in a clone that holds nothing but the Makefile; the lines that Python was asked."""
    log, python, clone = tmp_path / "log", tmp_path / "python", tmp_path / "clone"
    python.write_text(PYTHON.format(log=log))
    python.chmod(0o755)
    clone.mkdir()
    for file in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / file, clone)

    def run(target):
        log.write_text("")
        settings = [f"VENV={venv}", f"PYTHON={python}", "VENV_FLAGS="]
        done = subprocess.run(["make", target, *settings], cwd=clone, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return log.read_text().splitlines()

    run.clone = clone
    return run


def test_any_folder_can_hold_the_environment(make, venv):
    first = make("lint")
    assert first[0] == f"-m venv {venv}" and first[-1] == "-m mypy"
    assert sum("pip install" in line for line in first) == 10
    assert make("lint") == ["-m ruff check .", "-m ruff format --check .", "-m mypy"]  # nothing is made twice
    assert make("demo") == ["-m demo.run"] and make("demo-multi") == ["-m demo.multi"]
    first, second = make("test")
    assert "-m not long" in first and second.endswith("-m not long tests/triton")
    assert make("test-all") == [line.replace(" -m not long", "") for line in (first, second)]


def test_the_site_too(make, venv):
    site = "-m sphinx -q -W -c docs . build/site"
    first = make("docs")
    assert first[0] == f"-m venv {venv}" and first[-1] == site and sum("pip install" in line for line in first) == 2
    assert make("docs") == [site]
    assert (make.clone / "build/site/index.html").read_text() == "site\n"


def test_clean_leaves_what_is_in_the_repository(make, venv):
    """Everything that .gitignore names goes, and the environments beside the first."""
    make("docs")
    kept = {"Makefile", "pyproject.toml", "demo", "demo/run.py"}
    ignored = [line.strip() for line in (ROOT / ".gitignore").read_text().split() if line[0] not in "_*"]
    for name in (*ignored, "fdora.egg-info/", "demo/run.py"):
        path = make.clone / name.replace("*", "")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.mkdir(exist_ok=True) if name.endswith("/") else path.touch()
    beside = [venv, *(venv.with_name(venv.name + ending) for ending in ("-peft", "-frameworks", "-serving"))]
    for path in beside:
        path.mkdir(exist_ok=True)
    assert make("clean") == []
    assert {path.relative_to(make.clone).as_posix() for path in make.clone.rglob("*")} == kept | {".venv"}  # VENV is another
    assert not any(path.exists() for path in beside)
