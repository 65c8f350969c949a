"""bench.trainer in small, on the CPU: every way trains on the same data in the same order, and a wrong fdora is seen."""

import pytest

pytest.importorskip("peft", reason="the rivals need PEFT; `make test` installs it")
pytest.importorskip("accelerate", reason="transformers' Trainer wants it; `make test` installs it")
from bench import trainer
from tests.test_bench import run

SMALL = "--tiny --layers 1 --r 4 --steps 3 --dropout 0 --ways peft_dora,peft_fdora_fused"


def test_fdora_trains_as_pefts_dora(tmp_path):
    result = run(trainer, tmp_path, SMALL)
    dora, fdora = result["rows"]
    assert result["failed"] == {} and result["paths"] == {"peft_fdora_fused": {"fused": fdora_calls(result)}}
    lengths = [each["input_ids"].numel() for each in trainer.samples(128, trainer.main.parse(SMALL.split()))]
    assert dora["tokens"] == fdora["tokens"] == sum(lengths) and len(set(lengths)) > 10
    assert len({*dora["loss"]}) == len({*dora["grad_norm"]}) == 3 and 0 < fdora["apart"] < 0.02
    assert (dora["way"], fdora["ms_ratio"]) == ("peft_dora", 1.0)  # no LoRA beside it


def test_the_recipe_of_pefts_comparison(tmp_path):
    """Two linears of a layer, once forward in every step; padded rows of like lengths, of which the padding is no label."""
    options = "--recipe metamath --tiny --layers 1 --r 4 --steps 24 --dropout 0"
    result = run(trainer, tmp_path, f"{options} --ways peft_dora,peft_fdora")
    assert result["failed"] == {} and result["paths"] == {"peft_fdora": {"fused": 2 * 24}} and result["recipe"] == "metamath"
    data = trainer.samples(128, trainer.main.parse(options.replace("--tiny", "").split()))
    assert all(len(each["input_ids"]) == 4 for each in data) and len(data) == 24
    rows = [each["attention_mask"].sum(1).tolist() for each in data]
    assert all(row == sorted(row)[::-1] for row in rows) and rows[19][0] < rows[0][0] and 150 < sum(map(sum, rows)) / 96 < 270
    assert all(((each["labels"] == -100) == (each["attention_mask"] == 0)).all() for each in data)


def fdora_calls(result):
    """Seven layers, forward and again for backward, in every micro-batch."""
    return 7 * 2 * result["micro_batches"] * result["steps"]


def test_a_wrong_fdora_fails_the_command(monkeypatch):
    stock = trainer.adapted

    def spoilt(way, *args):
        model, leaves = stock(way, *args)
        for name, p in leaves.items():
            p.data.mul_(2 if "fdora" in way and name[0] == "m" else 1)
        return model, leaves

    monkeypatch.setattr(trainer, "adapted", spoilt)
    with pytest.raises(SystemExit, match=r"fdora parts from PEFT's DoRA in \['log of peft_fdora_fused'\]"):
        trainer.main(SMALL.split())
    with pytest.raises(SystemExit, match="2"):
        trainer.main.parse(["--steps", "2"])
