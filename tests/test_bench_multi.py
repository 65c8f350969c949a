"""bench.multi in small, on the CPU: what it writes, and that it sees a wrong result."""

import sys

import pytest

from bench import checkouts, multi, multi_ways, records
from fdora.functional import dora_linear_multi

SMALL = "--shapes 48x32 --M 24 --decode 6 --runs 1 --loop-ms 0 "


def run(tmp_path, options):
    path = tmp_path / "result.json"
    multi.main([*(SMALL + options).split(), "--json", str(path), "--commit", "abc"])
    result = records.load(path)
    assert result["about"]["commit"] == "abc" and result["skipped"] == []
    return result["rows"]


def test_every_case(tmp_path, capsys):
    rows = run(tmp_path, "--G 2,3")
    kinds = [(row["kind"], row["G"], row["r"], row["mode"]) for row in rows]
    trained = [("train", G, r, mode) for r in ("16", "mixed") for G in (2, 3) for mode in ("fwd", "fwd_bwd")]
    assert kinds == [*(("decode", 6, "16", mode) for mode in ("fwd", "fwd_cold")), ("norm", 4, "16", "norm"), *trained]
    for row in rows:
        ways = {"one", "loop", "multi"} if row["kind"] == "norm" else {*multi.WAYS} - set(row["failed"])
        assert set(row["ms"]) == set(row["wall"]) == ways and not {"one", "loop", "multi", "multi_ids"} & set(row["failed"])
        assert row["target"] == multi.TARGETS[row["kind"]]
        assert row["ratio"]["multi/one"] == pytest.approx(row["ms"]["multi"] / row["ms"]["one"], rel=0.05, abs=2e-3)
        assert max(row["error"]["multi"].values()) < 5e-3
        if row["kind"] != "norm":
            assert set(row["error"]["multi"]) == {"y", "dx", "dA", "dB", "dm"}
            assert all(max(row["error"][way].values()) < 0.02 for way in ("loop", "peft_loop"))
    assert "| decode 48x32, fwd |" in capsys.readouterr().out


def test_kernels_are_compiled_ahead(monkeypatch):
    """What a process does that compiles: everything of fdora, there and back."""
    called = []
    monkeypatch.setattr(
        multi_ways, "dora_linear_multi", lambda *args, **given: called.append(1) or dora_linear_multi(*args, **given)
    )
    for case in multi.cases(multi.parse([*SMALL.split(), "--G", "2", "--r", "16"])):
        multi.compile_case(case, "bf16", "cpu")
    assert len(called) == 2 + 4  # by offsets and by ids: decode forward, train there and back


LORAFUSION = {
    "lorafusion/__init__.py": "raise ImportError",
    "lorafusion/ops/multi_lora.py": """
import torch
from types import SimpleNamespace
from loguru import logger
from megatron.core import parallel_state
from lorafusion.ops.triton_ops.blocked_dropout import blocked_seeded_dropout
from lorafusion.ops.triton_ops.dropout import seeded_dropout
FACTOR = 1
def prepare_multi_lora_batch_info(lengths, which, ranks, dropout, alpha, rows, dtype):
    assert set(dropout) == {0.0} and which == list(range(len(ranks)))
    return SimpleNamespace(
        seq_len_list=lengths, padded_seq_len_list=[-(-n // rows) * rows for n in lengths], block_to_lookup_table=None,
        block_to_dropout_p=None, block_to_alpha=alpha, enable_dropout=False, same_dropout_p_value=0.0, max_r=max(ranks),
    )
def fused_linear_multi_lora(x, W, *, lora_a_list, lora_b_list, seq_len_list, padded_seq_len_list, block_to_alpha, **others):
    lora_a_list.append(None)
    parts = zip(x[0].split(padded_seq_len_list), lora_a_list, lora_b_list, block_to_alpha)
    return torch.cat([x @ W.mT + FACTOR * s * (x @ a.mT) @ b.mT for x, a, b, s in parts])[None]
""",
}


@pytest.fixture
def rival(tmp_path, monkeypatch):
    for name, text in LORAFUSION.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(checkouts, "find_spec", lambda name: None)
    yield f"--rival-path {tmp_path} "
    for name in [name for name in sys.modules if name.split(".")[0] in ("lorafusion", "megatron")]:
        del sys.modules[name]


def test_lorafusion_from_a_folder(tmp_path, rival):
    """Its tokens lie padded; it is judged by the same rows. What it does not take is said."""
    rows = [row for row in run(tmp_path, rival + "--G 3,5 --r 16,mixed --ways one,lorafusion,multi") if row["kind"] == "train"]
    for row in rows:
        if (row["G"], row["r"]) == (3, "16"):
            assert "lorafusion/multi" in row["ratio"] and set(row["error"]["lorafusion"]) == {"y", "dx", "dA", "dB"}
            assert 0 < max(row["error"]["lorafusion"].values()) < 0.02
        else:
            assert "ValueError: LoRAFusion's" in row["failed"]["lorafusion"] and "lorafusion" not in row["ms"]
    module = checkouts.load("lorafusion.ops.multi_lora", [])
    module.FACTOR = 2
    (row, _) = [row for row in run(tmp_path, rival + "--G 3 --r 16 --ways one,lorafusion") if row["kind"] == "train"]
    assert row["error"]["lorafusion"]["dA"] == pytest.approx(1, rel=0.1)


def test_lengths_are_all_tokens_in_uneven_segments():
    for M, G in ((8192, 32), (8192, 1), (64, 64), (24, 3)):
        lengths = multi_ways.lengths_of(M, G)
        assert len(lengths) == G and sum(lengths) == M and min(lengths) > 0
    assert len(set(multi_ways.lengths_of(8192, 32))) > 3


def test_a_wrong_result_is_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(multi_ways, "dora_linear_multi", lambda *args, s, **given: dora_linear_multi(*args, s=2 * s, **given))
    with pytest.raises(SystemExit, match=r"multi is wrong: .*dA by 1"):
        run(tmp_path, "--G 2 --r 16 --ways one,multi")
    rows = records.load(tmp_path / "result.json")["rows"]
    assert all("multi" not in row["ms"] for row in rows if row["kind"] != "norm")  # no time for a wrong result
