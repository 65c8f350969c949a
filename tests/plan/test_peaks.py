"""What the planner says against what a GPU's allocator counted: bench/results/h200, written by bench.peaks and bench.model."""

import re

import pytest

from bench import planned, records
from bench.model import ARCHITECTURES
from bench.planned import setup_of
from fdora.jobs.plan import Adapter, Setup, card, memory, read_model, record

for package in ("transformers", "triton"):
    pytest.importorskip(package, reason="a plan records with it; `make test` installs it")
PEAKS = records.result("h200/peaks")["rows"]
TYPES = {"LlamaConfig": "llama", "Gemma3TextConfig": "gemma3_text", "Qwen2Config": "qwen2", "MistralConfig": "mistral"}
OTHERS = ("llama-3.1-8b", "gemma-3-12b", "qwen2.5-32b", "mistral-small-24b")
PROMISED = 0.08  # of the whole
WITHIN = 0.02  # what is beyond parameters and states: far from the promise a formula is wrong


def name(row):
    ways = f"{row['way']}{' checkpointing' if row['checkpointing'] else ''}"
    return f"{row['model']} {ways} {row['adapter']} {row['sequences']}x{row['length']} {row['loss_tokens']}"


@pytest.mark.parametrize("row", PEAKS, ids=name)
def test_measured_peaks(row):
    model, setup, tokens = read_model(row["config"]), setup_of(row), row["sequences"] * row["length"]
    measured, said = row["bytes"], memory(model, setup, tokens)
    assert said.linears + said.embeddings == row["weights"]
    assert (said.adapters, said.optimizer) == (row["adapters"], row["optimizer"])
    assert said.peak == pytest.approx(measured["before"] + measured["peak"], rel=PROMISED)
    assert said.activations == pytest.approx(measured["kept"], rel=WITHIN)
    assert said.peak - said.resident == pytest.approx(measured["peak"], rel=WITHIN)


def test_the_comparison(capsys):
    planned.main([])
    out = capsys.readouterr().out
    low, high = map(float, re.findall(r"^peaks: ([\d.]+) to ([\d.]+) of", out, re.M)[0])
    assert 1 - PROMISED < low <= high < 1 + PROMISED and out.count("| llama-3.1-8b |") == 16


def test_times():
    """By the rates of h200/profiles. 4096 tokens with adapters in 16 bits hold the promise; float32 ones and few tokens at once,
    where torch's own elementwise kernels weigh more, come out up to 0.17 short."""
    gpu = card("h200")
    assert gpu.measured
    for row in PEAKS:
        ratio = planned.compared(row, gpu)["of them"]
        close = row["adapter"] == "bf16" and row["length"] == 4096
        assert 1 - (PROMISED if close else 0.18) < ratio < 1 + PROMISED, (name(row), ratio)


def test_three_models_were_measured_in_every_way():
    ways = {(row["model"], row["way"], row["checkpointing"]) for row in PEAKS}
    assert len({model for model, _, _ in ways}) == 3 and len(ways) == 12


@pytest.mark.parametrize("model", OTHERS)
def test_models_of_another_command(model):
    """These were there before the planner; the peak is that beyond parameters and states."""
    result = records.result(f"h200/model_{model}")
    kind, sizes = ARCHITECTURES[model]
    rows = [row for row in result["rows"] if "fdora" in row["way"] and row["mode"] != "inference"]
    assert len(rows) == 6
    for row in rows:
        found = read_model(sizes | {"model_type": TYPES[kind], "tie_word_embeddings": False}, row["layers"])
        fuse, again = row["way"] == "peft_fdora_fused", row["mode"].endswith("checkpointing")
        count = 8 if row["mode"] == "step_8" else 1
        setup = Setup(
            row["seq"], (Adapter("", row["r"]),), fuse, again, result["loss_tokens"], adapter_bytes=2, microbatches=count
        )
        said = memory(found, setup, row["seq"])
        assert said.peak - said.resident == pytest.approx(row["peak_mb"] * 2**20, rel=WITHIN)


def test_a_wrong_recording_would_be_seen(monkeypatch):
    """The float32 copies that RMSNorm keeps in each layer, forgotten."""
    row = next(row for row in PEAKS if row["way"] == "plain" and not row["checkpointing"] and row["loss_tokens"] == 128)
    hold = record.Counter.hold
    monkeypatch.setattr(record.Counter, "hold", lambda self, made, more, at: at != "_to_copy" and hold(self, made, more, at))
    record.layer.cache_clear()
    said = memory(read_model(row["config"]), setup_of(row), row["sequences"] * row["length"])
    record.layer.cache_clear()
    assert said.peak - said.resident != pytest.approx(row["bytes"]["peak"], rel=WITHIN)
