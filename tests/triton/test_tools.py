"""The commands of bench that write plans themselves: the search for tiles, and what is fitted to it."""

import importlib
import math

import pytest

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

from bench import clock, records, tune, ways
from fdora.triton.multi_bwd import grad_config
from fdora.triton.multi_norm import strip_config
from fdora.triton.multi_small import room_config
from fdora.triton.tiles.configs import GemmConfig
from tests import device
from tests.triton.marks import HALF, INTERPRETED, needs_kernels  # noqa: F401 (read by the mark)

pytestmark = needs_kernels


TINY = {"norm": (64, 128, 16), "norm_strips": (64, 128, 16), "bank_norm": (96, 64, 32)}
TINY |= dict.fromkeys(("few", "small", "product", "product_back"), (5, 64, 128, 16))


@pytest.mark.parametrize("name", tune.OPS)
def test_every_chooser_is_where_plans_look_it_up(name):
    op = tune.OPS[name]
    module, _, chooser = op.chooser.rpartition(".")
    assert callable(getattr(importlib.import_module(module), chooser)) and op.space(TINY.get(name, (8, 64, 64, 16)))


@pytest.mark.parametrize("name", TINY)
def test_plans_take_a_candidate_which_is_checked(name, monkeypatch):
    """On this device, in float16, one beside what plans choose: a chooser that nobody asks is none."""
    monkeypatch.setattr(tune, "DTYPE", HALF[0])
    monkeypatch.setattr(ways, "BF16", HALF[0])
    monkeypatch.setattr(clock, "launches_of", lambda *_: 1)
    op, asked = tune.OPS[name], []
    module, _, chooser = op.chooser.rpartition(".")
    right = getattr(importlib.import_module(module), chooser)
    few = dict(list(op.space(TINY[name]).items())[:1])
    monkeypatch.setattr(f"{module}.{chooser}", lambda *a, **k: asked.append(a) or right(*a, **k))
    row = tune.searched(op._replace(space=lambda _: few), TINY[name], device.NAME, 1)
    assert len(asked) == 1, "plans ask it for what is chosen, and no more"
    assert {*row["ms"]} == {"chosen", *few, *(["bare"] if op.bare else [])} and row["failed"] == {}


def test_a_wrong_candidate_is_an_error(monkeypatch):
    monkeypatch.setattr(tune, "DTYPE", HALF[0])
    monkeypatch.setattr(ways, "BF16", HALF[0])
    op, shape = tune.OPS["norm"], TINY["norm"]
    call = op.call(shape, device.NAME)
    monkeypatch.setattr(clock, "launches_of", lambda *_: 1)
    with pytest.raises(SystemExit, match="wrong by"):
        tune.searched(op._replace(call=lambda *_: call._replace(want=call.want + 1)), shape, device.NAME, 1)


def test_the_fastest_of_those_that_ran_on_every_shape():
    times = [{"one": 1, "1 2": 2, "3 4": 3, "5 6": 1}, {"one": 1, "1 2": 3, "3 4": 1}]
    assert tune.fastest(times) == "3 4"


def test_plans_take_what_was_fastest_on_an_h200():
    def fastest(run, kind):
        return tuple(
            map(int, tune.fastest(x["ms"] for x in records.result(f"h200/{run}")["rows"] if x["kind"] == kind).split())
        )

    assert room_config()[:5] == fastest("multi_forms", "decode")
    assert fastest("multi_norms", "train") == (1,)  # which every GPU does that can: copies_beside


def test_strips_of_a_banks_norms_are_within_a_hundredth_of_the_fastest():
    rows = [row["ms"] for row in records.result("h200/multi_strips_tiles")["rows"] if row["kind"] == "norm"]
    took = {form: math.prod(ms[form] for ms in rows) for form in rows[0] if form != "one"}
    shipped = " ".join(map(str, strip_config(90)[:5]))
    assert took[shipped] < 1.01**2 * min(took.values())


def test_gradients_take_the_tile_whose_kernels_were_fastest():
    """By their own time: of the whole call it is a tenth."""
    rows = [row["us"] for row in records.result("h200/multi_tiles")["rows"] if row["kind"] == "grad"]
    took = {name: sum(sum(us[name][kernel][1] for kernel in us[name]) for us in rows) for name in rows[0]}
    assert grad_config(256, True) == tuple(map(int, min(took, key=took.get).split()))


def test_what_was_timed_again_is_as_in_the_first_run():
    """A fused product in proportion to the bare one of its run, a pass as what it took beyond it; unless the bare one was
    another kernel."""
    pytest.importorskip("scipy", reason="the fit needs scipy; `make test` installs it")
    from bench.fit import merged

    def result(**ms):
        return {"rows": [{"shape": (64, 128, 256, 8), "forward": True, "ms": ms}]}

    (row,) = merged([result(bare=10.0, after=13.0), result(bare=9.0, after=11.0, **{"fused 1": 18.0})])
    assert row["ms"] == {"bare": 10.0, "after": 12.0, "fused 1": 20.0}
    (row,) = merged([result(bare=10.0), result(bare=16.0, **{"fused 1": 12.0})])
    assert row["ms"] == {"bare": 10.0, "fused 1": 12.0}


def test_the_fit_finds_what_made_the_times():
    """Times from the model itself, with numbers of its own: they are found again, and the model chooses the fastest way."""
    pytest.importorskip("scipy", reason="the fit needs scipy; `make test` installs it")
    from bench import fit
    from bench.shapes import draw
    from fdora.triton.tiles.product import together
    from fdora.triton.tiles.waves import CublasFit, Fit, PassFit, Tile, cublas_us, fused_us, pass_us

    config, made = (128, 128, 64, 8, False, True, 4, 6), Fit(0.7, 0.2, 2.0, 1.5, 0.8)
    name, cublas = "fused 128 128 64 8 False True 4 6", CublasFit(0.8, 9.0, 2.0, 2.0, 0.85, 0.1, 2.0, 0.5)
    rows = []
    for M, K, N, r in draw(3, 30):
        tile = Tile(*config[:3], together(GemmConfig(True, *config)))
        bare = cublas_us(M, N, K, cublas, fit.GPU)
        us = {name: fused_us(M, N, K, r, tile, made, fit.GPU), "bare": bare}
        us["after"] = bare + pass_us(M, N, r, PassFit(3.0, 0.5, 1.0, 0.2), fit.GPU)
        rows.append({"shape": (M, K, N, r), "forward": True, "ms": {key: t / 1e3 for key, t in us.items()}})
    model = fit.fitted(rows)
    assert model["after"] == pytest.approx((3.0, 0.5, 1.0, 0.2), rel=0.05)
    said = fit.summary(fit.judged(model, rows, {name, "after"}))
    assert said["median error"] < 0.01 and said["mean regret"] < 1.01, said
    forward = fit.written({True: model}, rows, "a GPU")["forward"]
    (best,) = forward["fused"]
    assert GemmConfig(True, **best["tile"]) == (True, *config) and Fit(**best["fit"]) == model["fused"][config]
    assert PassFit(**forward["after"]) == model["after"] and CublasFit(**forward["cublas"]) == model["cublas"]


def test_what_was_timed_again_counts():
    from bench import fit

    def row(M, **ms):
        return {"shape": [M, 64, 64, 8], "forward": True, "ms": ms}

    first = {"rows": [row(100, bare=2.0, after=3.0, fused=2.5), row(200, bare=4.0, after=9.0), {"shape": [1], "scale": {}}]}
    rows = fit.merged([first, {"rows": [row(100, bare=3.0, after=3.5), row(300, bare=1.0, after=1.5)]}])
    ms = [each["ms"] for each in rows]
    assert ms == [{"bare": 2.0, "after": 2.5, "fused": 2.5}, {"bare": 4.0, "after": 9.0}, {"bare": 1.0, "after": 1.5}]
    assert {*fit.names_of(rows)} == {"bare", "fused", "after"}
