"""bench.multi_forms in small, on the CPU, and what is read off its results."""

import math
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="it chooses among kernels; `make test` installs it")
from bench import multi_forms, records
from fdora.triton.multi_bwd import grad_config
from fdora.triton.multi_gemm import h_config
from fdora.triton.multi_norm import strip_config
from fdora.triton.multi_small import room_config
from fdora.triton.runtime.device import of_gpu

FILES = ("multi_norms", "multi_forms", "multi_low")
RESULTS = Path(__file__).parents[1] / "bench/results/h200"


def test_every_kind(tmp_path, monkeypatch):
    monkeypatch.setattr(multi_forms, "TOKENS", 40)
    path = tmp_path / "forms.json"
    multi_forms.main(["--shapes", "48x32,32x48", "--runs", "1", "--most", "2", "--json", str(path)])
    rows = records.load(path)["rows"]
    assert [(row["kind"], row["K"]) for row in rows] == [(kind, K) for kind in multi_forms.FORMS for K in (48, 32)]
    assert all(len(row["ms"]) == 1 + min(2, len(multi_forms.FORMS[row["kind"]])) and not row["failed"] for row in rows)


def test_the_fastest_of_those_that_ran_on_every_shape():
    times = [{"one": 1, "1 2": 2, "3 4": 3, "5 6": 1}, {"one": 1, "1 2": 3, "3 4": 1}]
    assert multi_forms.fastest([{"kind": "norm", "ms": ms} for ms in times], "norm") == (3, 4)


def test_plans_take_what_was_fastest_on_an_h200():
    norms, forms, low = (records.result(f"h200/{name}")["rows"] for name in FILES)
    assert room_config()[:5] == multi_forms.fastest(forms, "decode")
    assert multi_forms.fastest(norms, "train") == (1,)  # which every GPU does that can: copies_beside
    of_4, of_32 = (h_config(8192, 4096, R, G, True, False, False, of_gpu(0, 90, 132)) for R, G in ((64, 4), (256, 32)))
    assert (of_4, of_32) == (multi_forms.fastest(low, "low_4"), multi_forms.fastest(low, "low"))


def test_strips_of_a_banks_norms_are_within_a_hundredth_of_the_fastest():
    rows = [row["ms"] for row in records.result("h200/multi_strips_tiles")["rows"] if row["kind"] == "norm"]
    took = {form: math.prod(ms[form] for ms in rows) for form in rows[0] if form != "one"}
    shipped = " ".join(map(str, strip_config(90)[:5]))
    assert took[shipped] < 1.01**2 * min(took.values())


def test_gradients_take_the_tile_whose_kernels_were_fastest():
    """By their own time: of the whole call it is a tenth."""
    rows = [row["us"] for row in records.result("h200/multi_tiles")["rows"] if row["kind"] == "grad"]
    took = {name: sum(sum(us[name][kernel][1] for kernel in us[name]) for us in rows) for name in rows[0]}
    assert grad_config(256, True) == multi_forms.form_of(min(took, key=took.get))
