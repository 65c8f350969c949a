"""The commands of bench that write plans themselves: the search for tiles, and the cost of a launch."""

import math

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

from fdora.triton.configs import GemmConfig, RestConfig, SmallConfig
from tests import device
from tests.triton.marks import HALF, INTERPRETED, needs_kernels

pytestmark = needs_kernels


@pytest.fixture
def products(monkeypatch):
    """bench.products on this device, in float16, with few tiles and no clock."""
    from bench import products

    def quick_timer(fn, *_):
        fn()
        return lambda: 1.0

    tiles = [GemmConfig(False, bm, 64, 32, 8, False, False, 4, 3) for bm in (64, 128)]
    for name, value in (("DEVICE", device.NAME), ("DTYPE", HALF[0]), ("CACHE", 1), ("TILES", tiles)):
        monkeypatch.setattr(products, name, value)
    monkeypatch.setattr(products.clock, "quick_timer", quick_timer)
    monkeypatch.setattr(products.clock, "anchor_graph", lambda: None)
    if device.NAME == "cpu":
        monkeypatch.setattr(products.torch.cuda, "Stream", lambda: None)
    return products


def test_every_way_of_a_product_is_checked_and_timed(products):
    forward, backward = products.time_products([(130, 64, 128, 16)], math.inf, products.Which())
    assert set(forward["ms"]) == {*products.ways_of(True)} and len(forward["ms"]) == 4
    assert set(backward["ms"]) == set(forward["ms"]) | {"first"} and (forward["forward"], backward["forward"]) == (True, False)


def test_some_ways_alone(products, monkeypatch):
    which = products.Which(kinds=("after", "bare"))
    forward, backward = products.time_products([(130, 64, 128, 16)], math.inf, which)
    assert set(forward["ms"]) == set(backward["ms"]) == {"after", "bare"}
    monkeypatch.setattr(products, "RESTS", [RestConfig(32, 64, 64, 4, 2)])
    forward, _ = products.time_products([(130, 64, 128, 16)], math.inf, which._replace(rests=True))
    assert set(forward["ms"]) == {"after", "bare", "rest 32 64 64 4 2"}


def test_few_tokens_both_ways(products, monkeypatch):
    from bench import few

    monkeypatch.setattr(few, "CACHE", 1)
    monkeypatch.setattr(few, "INSIDE", [SmallConfig(16, 64, 4, 2)])
    row = few.case((5, 64, 128, 16), (None, None), 1)
    assert {"bare", "small", "general", "small_both", "general_both"} <= {*row["ms"]}
    assert "inside 16 64 4 2" in row["ms"]
    plain = few.case((5, 64, 128, 16), (None, None), 1, norms=False)["ms"]
    assert {*plain} == {name + both for name in ("bare", "small", "general") for both in ("", "_both")}
    drawn = few.Drawn(5, 64, 128, 16)
    drawn.want = drawn.want + 1
    with pytest.raises(AssertionError, match="is wrong"):
        drawn.timer(drawn.ways()["small"])


def test_a_wrong_way_is_an_error(products, monkeypatch):
    monkeypatch.setattr(
        products, "planned", lambda write, *tensors: lambda *given: (torch.zeros(130, 128, device=device.NAME),)
    )
    with pytest.raises(AssertionError, match="is wrong"):
        list(products.time_products([(130, 64, 128, 16)], math.inf, products.Which()))


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
    from fdora.triton.choice import together
    from fdora.triton.waves import CublasFit, Fit, PassFit, Tile, cublas_us, fused_us, pass_us

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
    text = fit.written({True: model}, rows, "a GPU")
    written: dict = {}
    exec(text, written)
    assert written["FUSED"] == {True: {config: tuple(model["fused"][config])}} and set(written["AFTER"]) == {True}


def test_what_was_timed_again_counts():
    from bench import fit

    def row(M, **ms):
        return {"shape": [M, 64, 64, 8], "forward": True, "ms": ms}

    first = {"rows": [row(100, bare=2.0, after=3.0, fused=2.5), row(200, bare=4.0, after=9.0), {"shape": [1], "scale": {}}]}
    rows = fit.merged([first, {"rows": [row(100, bare=3.0, after=3.5), row(300, bare=1.0, after=1.5)]}])
    ms = [each["ms"] for each in rows]
    assert ms == [{"bare": 2.0, "after": 2.5, "fused": 2.5}, {"bare": 4.0, "after": 9.0}, {"bare": 1.0, "after": 1.5}]
    assert {*fit.names_of(rows)} == {"bare", "fused", "after"}


SMALLS = [SmallConfig(16, 64, 4, 2), SmallConfig(32, 64, 4, 2)]


def test_every_candidate_is_checked_and_timed(products, monkeypatch):
    from bench import tune

    def medians(runs, *_):
        for fn in runs.values():
            fn()
        return {name: float(i) for i, name in enumerate(runs)}

    for name, value in (("DEVICE", device.NAME), ("CACHE", 50_000), ("medians", medians), ("SMALL_CANDIDATES", SMALLS)):
        monkeypatch.setattr(tune, name, value)
    found = list(tune.tune_small([(8, 64, 128)], {}))
    assert [row[0] for row in found] == [False, True] and all(len(results) == 2 for _, _, results, _ in found)


def test_every_piece_of_a_launch_runs(monkeypatch):
    from bench import launches

    if INTERPRETED:  # what no interpreter can do
        monkeypatch.setattr(launches, "by_triton_op", lambda partial, out: None)
    pieces = launches.pieces(device.NAME)
    partial = torch.randn(8, 512, device=device.NAME)
    torch.testing.assert_close(launches.by_plan(launches.plan_sums, partial), partial.sum(0))
    torch.testing.assert_close(launches.custom(partial), partial.sum(0))
    for piece in pieces.values():
        piece()


def test_products_from_codes_are_checked_and_timed(monkeypatch, capsys):
    from bench import quant_forms

    monkeypatch.setattr(quant_forms, "DTYPE", HALF[0])
    monkeypatch.setattr(quant_forms, "CACHE", 1)
    monkeypatch.setattr(quant_forms, "vendor", lambda: None)
    monkeypatch.setattr(quant_forms, "FORMS", {"fp8": quant_forms.FORMS["fp8 block"]})
    monkeypatch.setattr(quant_forms, "FORWARD", {8: [(16, 128, 2, 2, 2, 1)]})
    monkeypatch.setattr(quant_forms, "COLUMNS", {8: [(64, 16, 2, 2, 2, 2)]})
    monkeypatch.setattr(quant_forms, "GEMMS", [(64, 64, 128, 4, 2)])
    shape, name = [(64, 128)], device.NAME
    rows = [*quant_forms.few_rows(name, shape, (3,), (8,)), *quant_forms.back_rows(name, shape, (3,), (8,))]
    rows += quant_forms.many_rows(name, shape, (70,), (8,))
    assert all(len(row["tiles"]) == 1 for row in rows)
    assert all(row["right"] == [True, True] for row in quant_forms.format_rows(name, shape, (3,)))
    assert "WRONG" not in capsys.readouterr().out
    wrong = quant_forms.searched(quant_forms.Timed("cpu", 1), lambda tile: lambda: torch.ones(2), [(1,)], torch.zeros(2) + 2)
    assert not wrong and "WRONG" in capsys.readouterr().out


@pytest.mark.parametrize("store", [False, True])
def test_tiles_of_a_norm_are_checked_and_timed(store, monkeypatch, capsys):
    from bench import norm_tiles

    monkeypatch.setattr(norm_tiles, "DTYPE", HALF[0])
    monkeypatch.setattr(norm_tiles, "vendor", lambda: None)
    for name in ("TILES", "STORING"):
        monkeypatch.setattr(norm_tiles, name, getattr(norm_tiles, name)[:1])
    row = norm_tiles.row_of(128, 256, 96, device.NAME, store)
    assert len(row["tiles"]) == 1 and row["now"] > 0 and row["dense"] > 0
    assert "WRONG" not in capsys.readouterr().out


def test_tiles_of_a_dense_norm_are_checked_and_timed(capsys):
    from bench import norm_dense

    row = norm_dense.row_of(
        128, 512, 72, device.NAME, norm_dense.tiles_of(72)[1:4], {"bytes_per_ms": 4e9, "flops_per_ms": 7e11}
    )
    assert len(row["tiles"]) == 3 and row["now"] > 0 and row["guarded"] > 0
    assert "WRONG" not in capsys.readouterr().out
