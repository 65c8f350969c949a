"""Configs are a pure function of the shape and the GPU: defined for every one of them, and inside the table where one stands."""

import itertools
import math

import pytest

from bench import records

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

from fdora.triton.tiles import measured, waves
from fdora.triton.tiles.configs import SMALL, long_strip, nearest, rest_config, scale_config, small_config
from fdora.triton.tiles.few import takes_narrow_tiles
from fdora.triton.tiles.fp8 import fp8_config
from fdora.triton.tiles.product import CUBLAS, FUSED, PASSES, POINTERS, Ask, fused_config, product_way, tiles
from fdora.triton.tiles.waves import Tile, cublas_us, fused_us, gpu_of, pass_us

H200 = gpu_of(90, 132)
LARGE = next(config for config in FUSED[True] if config[1:3] == (128, 256))


def fused(M, N, K, r=16, config=LARGE, gpu=H200, trans_b=True):
    return fused_us(M, N, K, r, Tile(*config[1:4], 1), FUSED[trans_b][config], gpu)


def test_measured_shapes_get_what_was_measured():
    for columns, table in SMALL.items():
        assert all(tuple(small_config(*shape, columns, 90, 132)) == config for shape, config in table.items())


def test_no_second_wave_that_is_almost_empty():
    """64 tokens, 9344 columns: 64 of them a program would be 146 programs for 132 multiprocessors."""
    assert small_config(64, 8192, 8192, False, 90, 132).BLOCK_N == 64
    assert -(-9344 // small_config(64, 9344, 9344, False, 90, 132).BLOCK_N) <= 132
    assert small_config(64, 9344, 9344, False, 90, 148).BLOCK_N == 64


def test_few_tokens_are_one_strip():
    """Whose sums need no second kernel; many tokens are strips that fill the GPU."""
    assert all(scale_config(M, N, 384, True, 90).ROWS >= M for M, N in ((65, 1024), (203, 14720), (256, 1024), (512, 16000)))
    for M, N in ((512, 1024), (700, 4096), (4964, 8064), (8192, 1024)):
        rows = scale_config(M, N, 384, True, 90).ROWS
        assert rows < M and (-(-M // rows) * -(-N // 64) >= 130 or rows == 128)
    assert scale_config(1000, 1024, 16, True, 90).BLOCK_R == 16 and not scale_config(1000, 1024, 16, True, 90, False).BLOCK_R


def test_strips_that_form_dB_are_as_long_as_fill_the_gpu():
    """Twice its multiprocessors, two strips at least; not above r = 64, whose sums would fill the registers."""
    for M, N in ((8192, 8192), (4096, 4096), (7225, 24448), (1500, 8192), (1024, 65536), (512, 65536)):
        rows = long_strip(M, N, 64, True, 90)
        assert rows == {8192: 2048, 4096: 1024, 7225: 2048, 1500: 1024}.get(M, 0)
        assert not rows or (rows < M and -(-M // rows) * -(-N // 64) >= 256)
        for r, half, capability in ((96, True, 90), (64, False, 90), (64, True, 80), (64, True, 100)):
            assert not long_strip(M, N, r, half, capability)


def test_any_shape_on_any_gpu():
    sizes = (0, 17, 200_000)
    for M, N, K, capability in itertools.product(sizes, sizes, sizes, (0, 75, 80, 86, 89, 90, 100, 103, 120, 150)):
        for r, (trans_b, extra) in itertools.product((1, 64), itertools.product((True, False), repeat=2)):
            on = (trans_b, extra, True, capability, 132)
            tile = fused_config(Ask(M, N, K, r, *on))
            assert tile.tma == (90 <= capability < 120) and tile in tiles(trans_b, extra, tile.tma, capability)
            way = product_way(Ask(M, N, K, r, *on))
            assert (
                way.kind in ("fused", "after", "first") and way.us > 0 and way == product_way.__wrapped__(Ask(M, N, K, r, *on))
            )
            assert (way.tile is not None) == (way.kind == "fused")
            config = scale_config(M, N, r, True, capability)
            assert config.ROWS % config.BLOCK_M == 0 and rest_config(r).BLOCK_R <= 64
        small_config(16, N, K, False, capability, 132)


def test_a_wave_more_takes_its_time():
    """One tile for each multiprocessor, and one more. Where a part of them has none, the others have what those leave."""
    one, more, two = (fused(128 * rows, 256 * 11, 8192) for rows in (12, 13, 24))
    assert 1.75 < more / one < 2.1 and math.isclose(two / one, 2, rel_tol=0.05)
    assert 1 - waves.ALONE < more / two < 1
    assert fused(128 * 13, 256 * 11, 8192, gpu=gpu_of(90, 143)) < 1.1 * one


def test_few_tiles_are_split_by_cublas_alone():
    fit = CUBLAS[True]
    assert cublas_us(256, 1024, 16384, fit, H200) < 0.6 * fused(256, 1024, 16384)
    assert cublas_us(4096, 4096, 4096, fit, H200) > 0.85 * fused(
        4096, 4096, 4096, config=LARGE._replace(BLOCK_M=256, BLOCK_N=128)
    )


def test_more_of_anything_takes_longer():
    sizes, fit, rest = (128, 1000, 3000, 8192), CUBLAS[False], PASSES[False]["after"]
    for M, N, K in itertools.product(sizes, repeat=3):
        for more in ((M + 700, N, K), (M, N + 700, K), (M, N, K + 700)):
            assert fused(*more) >= fused(M, N, K) and pass_us(*more[:2], 16, rest, H200) >= pass_us(M, N, 16, rest, H200)
            assert cublas_us(*more, fit, H200) >= 0.999 * cublas_us(M, N, K, fit, H200)
    b200, a100 = gpu_of(100, 148), gpu_of(80, 108)
    assert fused(8192, 8192, 8192, gpu=b200) < fused(8192, 8192, 8192) < fused(8192, 8192, 8192, gpu=a100)


def test_shapes_of_the_issue():
    """128 x 256 tiles of dx would be 160 for 132 multiprocessors; from 3000 tokens on the fused product measured fastest."""
    assert product_way(Ask(2048, 2560, 9728, 24, False, False, True, 90, 132)).kind != "fused"
    assert product_way(Ask(16384, 4096, 4096, 64, True, False, True, 90, 132)).kind == "fused"
    assert product_way(Ask(300, 1024, 16384, 64, True, False, True, 90, 132)).kind != "fused"
    # 85 tiles for 132 multiprocessors, each of which has more of L2 (14.8 us), and cuBLAS chooses badly (22.4)
    assert product_way(Ask(320, 2176, 4480, 64, False, False, True, 90, 132)).kind == "fused"


def test_rows_that_end_inside_a_tile_cost_what_adds_to_another_dx():
    """There the last tile cannot be moved up: cuBLAS takes 140 rows, the fused product 128."""
    fit, tile = FUSED[False][True, 128, 128, 64, 8, False, True, 4, 6], Tile(128, 128, 64, 1)
    odd, whole = (fused_us(M, 8192, 3072, 384, tile, fit, H200, moved=False) for M in (140, 256))
    assert odd > 1.2 * whole > fused_us(140, 8192, 3072, 384, tile, fit, H200)
    ways = [product_way(Ask(M, 8192, 3072, 384, False, adds, True, 90, 132)).kind for M, adds in ((140, True), (128, True))]
    assert ways == ["first", "fused"]


def test_an_unknown_gpu_counts_as_the_one_before_it():
    assert waves.gpu_of(150, 100)._replace(num_sms=170) == waves.gpu_of(120, 170)
    assert waves.gpu_of(87, 10).flops == waves.gpu_of(86, 10).flops and waves.gpu_of(0, 304).flops == 1307e6 / 304
    assert all(0 < fit[0] < 1 for side in (*FUSED.values(), POINTERS) for fit in side.values())


def test_the_nearest_in_factors_of_two():
    table = {(16, 16): "small", (1024, 16): "tall"}
    assert nearest(table, (100, 16)) == "small" and nearest(table, (200, 16)) == "tall"
    assert nearest(table, (128, 16)) == "small"  # equals: the first


BARS = {"few": 1.1, "few_1": 1.1, "few_ranks": 1.25}  # the last: ranks of 64 and 256, sides of 1024 to 22144


@pytest.mark.parametrize("run", BARS)
def test_few_tokens_take_what_was_faster(run):
    """Both ways of both directions, timed: 16 to 64 tokens, and 1 to 32 at an earlier commit; larger ranks."""
    rows = records.result(f"h200/{run}")["rows"]
    assert rows
    for row in rows:
        (M, K, N, r), ms = row["shape"], row["ms"]
        for trans_b, small, general in (
            (True, ms["small"], ms["general"]),
            (False, ms["small_both"] - ms["small"], ms["general_both"] - ms["general"]),
        ):
            sizes = (M, N, K) if trans_b else (M, K, N)
            took = small if takes_narrow_tiles(*sizes, r, trans_b, True, 90, 132) else general
            assert took <= BARS[run] * min(small, general), (row["shape"], trans_b)


def test_the_choice_of_few_tokens_is_fitted_to_all_of_them():
    """And to the model of the other way as it stands: what bench.fit_few finds is what is written."""
    pytest.importorskip("scipy", reason="the fit needs scipy; `make test` installs it")
    from bench import fit_few

    found = list(fit_few.pairs([records.result(f"h200/{run}") for run in BARS]))
    written = fit_few.written(fit_few.fitted(found), found)
    assert measured("few").pop("about") == written.pop("about")
    for name, fit in written.items():
        assert measured("few")[name] == pytest.approx(fit, rel=0.02), name


def test_narrow_tiles_end_at_64_tokens_and_where_columns_are_few():
    assert takes_narrow_tiles(1, 4096, 4096, 16, True, True, 90, 132) and not takes_narrow_tiles(
        65, 4096, 4096, 16, True, True, 90, 132
    )
    assert not takes_narrow_tiles(64, 22144, 2304, 16, True, True, 90, 132)
    assert not takes_narrow_tiles(16, 2304, 22144, 16, False, True, 90, 132)
    for sizes in ((0, 64), (64, 0)):  # a part of a layer may be empty
        assert takes_narrow_tiles(4, *sizes, 8, True, True, 90, 132)
    for capability, sms in ((80, 108), (86, 82), (89, 128), (100, 148), (120, 170)):
        assert takes_narrow_tiles(8, 4096, 4096, 16, True, True, capability, sms)


def test_products_of_codes_where_there_is_a_tile():
    """Not of few tokens, nor on Hopper of what TMA does not take, nor of a tile with two scales of W in a step."""
    for M, capability, tma, (rows, columns) in itertools.product((1, 64, 65, 4096), (89, 90, 100, 120), (True, False), BLOCKS):
        config = fp8_config(Ask(M, 4096, 14336, 64, True, False, tma, capability, 132), rows, columns)
        on_tma = 90 <= capability < 120
        assert (config is None) == (M <= 64 or (on_tma and (not tma or rows == 64)))
        assert config is None or (config.tma == on_tma and (not (columns and on_tma) or rows % config.BLOCK_N == 0))
    large = fp8_config(Ask(4096, 4096, 4096, 64, True, False, True, 90, 132), 1, 0)
    assert large is not None and large.BLOCK_N == 256


BLOCKS = ((1, 0), (1 << 30, 0), (128, 128), (256, 384), (64, 256))  # rows and columns of W under one scale, 0 for all
