"""A process that fails ends the test that started it, with what it said; so does one that never ends."""

import subprocess
import sys

import pytest

from tests.distributed import world


def test_one_that_fails_and_one_that_waits_for_it(monkeypatch):
    monkeypatch.setattr(world, "GRACE", 0)
    started = [
        subprocess.Popen([sys.executable, "-c", code]) for code in ("import signal; signal.pause()", "raise SystemExit(3)")
    ]
    try:
        assert world.wait(started, 600) == "process 1 ended with 3. "
        assert world.wait(started[1:], 0) == "process 0 ended with 3. "  # though nobody waits for it any more
    finally:
        started[0].kill()
        started[0].wait()


def test_one_that_does_not_end_says_where_it_stands(tmp_path):
    code = "import faulthandler, signal; faulthandler.enable(); print(1, flush=True); signal.pause()"
    with (tmp_path / "log").open("w") as log:
        waiting = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=log)
    try:
        waiting.stdout.readline()
        assert world.wait([waiting], 0) == "1 of 1 processes still ran after 0 s. "
        assert 'File "<string>", line 1' in (tmp_path / "log").read_text()
    finally:
        waiting.kill()
        waiting.communicate()


def test_what_they_said_is_in_the_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "false")
    with pytest.raises(AssertionError, match=r"--- process 0:\n[\s\S]*--- process 1:\n"):
        world.found("nothing", 2)
