"""bench.quant and bench.quant_model in small, on the CPU: what they write, and that they see a wrong result."""

import pytest

pytest.importorskip("peft", reason="the rivals need PEFT; `make test` installs it")
pytest.importorskip("bitsandbytes", reason="it packs the weights; `make test` installs it")
from bench import fp8, quant, quant_model
from tests.test_bench import doubled, run

CASE = "--shapes 128x64 --M 4 --r 4 --runs 1 "


def test_layers_and_norms(tmp_path):
    result = run(quant, tmp_path, CASE)
    assert [(row["M"], row["K"], row["N"], row["r"], row["mode"]) for row in result["rows"]] == [
        (4, 128, 64, 4, "fwd"),
        (4, 128, 64, 4, "both"),
    ]
    elsewhere = {"unsloth_qlora", "axolotl_qlora", "axolotl_qdora"}
    for row in result["rows"]:
        assert set(row["failed"]) == elsewhere and all("--rival-path" in reason for reason in row["failed"].values())
        assert set(row["ms"]) == set(quant.WAYS) - elsewhere
        assert max(row["error"]["fdora"].values()) < 5e-3 and "dm" in row["error"]["fdora"]
        assert set(row["peak_mb"]) == set(row["ms"])
    (norm,) = result["norms"]
    assert {"codes", "dense", "decode"} == set(norm["ms"]) and norm["error"] < 1e-6
    ratio = result["summary"]["mean_and_worst"]["fwd, fewer than 512 tokens"]["fdora/qlora"][1]
    ms = result["rows"][0]["ms"]
    assert ratio == pytest.approx(ms["fdora"] / ms["qlora"], rel=0.02, abs=2e-3)


def test_a_wrong_result(tmp_path, monkeypatch):
    monkeypatch.setattr(quant, "dora_linear", doubled)
    with pytest.raises(SystemExit, match=r"fdora: AssertionError: fdora is wrong: .*y by"):
        run(quant, tmp_path, CASE + "--no-norms")


def test_what_was_not_started_is_in_the_result(tmp_path):
    assert run(quant, tmp_path, CASE + "--no-norms --seconds 0")["skipped"] == [[4, 128, 64, 4]]


def test_a_decoder_layer(tmp_path):
    result = run(quant_model, tmp_path, "--model tiny --layers 1 --S 8 --r 4 --runs 1")
    assert {(row["mode"], row["way"]) for row in result["rows"]} == {
        (mode, way) for mode in ("inference", "step", "micro") for way in quant_model.WAYS
    }
    assert all(row["ms"] > 0 and (row["mode"] != "step") == ("peak_mb" not in row) for row in result["rows"])
    # 64 x 64 twice, 32 x 64 twice, 96 x 64 three times: half a byte each, a byte for 64, scales of scales and offsets
    weights = 2 * 64 * 64 + 2 * 32 * 64 + 3 * 96 * 64
    assert weights / 2 + weights / 64 < result["packed_bytes"] < 0.8 * weights
    assert all(set(each["paths"]) == {"fused"} for each in result["agreement"].values())
    assert result["whole"]["qlora"]["sum"] == pytest.approx(
        sum(v for k, v in result["whole"]["qlora"].items() if k != "sum"), abs=0.05
    )


def test_products_of_8_bits(tmp_path):
    """Faster or not, they lose ten times what bf16 loses, and the file says so beside each time."""
    result = run(fp8, tmp_path, "--shapes 256x128 --M 4 --r 4 --runs 1")
    assert [row["scales"] for row in result["rows"]] == ["row", "128 x 128"]
    for row in result["rows"]:
        error = row["error"]
        assert set(row["ms"]) == set(error) == {"linear", "dense", "decoded", "fp8"} and not row["failed"]
        assert max(error["linear"], error["dense"], error["decoded"]) < 5e-3 < 1e-2 < error["fp8"] < 5e-2
