"""Configs are a pure function of the shape and the GPU: defined for every one of them, and inside the table where one stands."""

import itertools

import pytest

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

from fdora.triton.configs import gemm_config, nearest, scale_config, small_config
from fdora.triton.table import GEMM, SCALE, SMALL


def test_measured_shapes_get_what_was_measured():
    for trans_b, table in GEMM.items():
        assert all(tuple(gemm_config(*shape, trans_b, False, 90)) == config for shape, config in table.items())
    for shape, config in SCALE.items():
        found = scale_config(*shape, True, 90)
        assert (*found[:3], found.BLOCK_R > 0, found.num_warps) == (*config[:3], config[3] and shape[2] <= 64, config[4])
    for columns, table in SMALL.items():
        assert all(tuple(small_config(*shape, columns, 90)) == config for shape, config in table.items())


def test_any_shape_on_any_gpu():
    sizes = (0, 1, 17, 4096, 200_000)
    for M, N, K, capability in itertools.product(sizes, sizes, sizes, (0, 75, 80, 86, 90, 100, 120, 150)):
        for r in (1, 64, 1024):
            gemm = gemm_config(M, N, K, r, True, True, capability)
            assert gemm.tma == (90 <= capability < 120)
            assert scale_config(M, N, r, True, capability).ROWS % scale_config(M, N, r, True, capability).BLOCK_M == 0
        small_config(16, N, K, False, capability)


def test_the_nearest_in_factors_of_two():
    table = {(16, 16): "small", (1024, 16): "tall"}
    assert nearest(table, (100, 16), (1, 1)) == "small" and nearest(table, (200, 16), (1, 1)) == "tall"
    assert nearest(table, (128, 16), (1, 1)) == "small"  # equals: the first
    table = {(512, 16): "few tokens", (2048, 64): "large rank"}
    assert nearest(table, (600, 128), (1, 1)) == "large rank" and nearest(table, (600, 128), (1, 0.25)) == "few tokens"
