"""Backward with g W in the place of g dy: where a dense W is small beside the tokens."""

import pytest
import torch

from fdora.triton import scaled_weight
from fdora.triton.linear import plan_backward
from tests.triton.marks import HALF, INTERPRETED, needs_kernels  # noqa: F401 (read by the mark)
from tests.triton.written import HOPPER, alike, kernels, layer

SAYS = "; W is scaled by g, and dy is not"


# what needs no kernels


def backward_of(M, K, N, r=16, dtype=torch.bfloat16, by_columns=False, mode="lora", seed=False):
    la = layer(N, K, r, dtype, dtype, seed=seed)
    if by_columns:
        la[0] = la[0]._replace(stride=(1, N))
    x, dy, h = (alike(M, n, dtype=dtype) for n in (K, N, r))
    needs = (True, True, True, False, False)
    return plan_backward((x, h, dy, dy, *la), HOPPER, 0.1 if seed else 0.0, mode, (dtype == torch.float32,), True, needs)


def test_where_w_is_small_beside_the_tokens():
    """2 N (M - 2 K) bytes are what it saves: 8 us of them at least."""
    assert scaled_weight.moves_less(7225, 24448, 768, HOPPER) and not scaled_weight.moves_less(935, 19968, 896, HOPPER)
    assert not scaled_weight.moves_less(8192, 14336, 4096, HOPPER) and scaled_weight.moves_less(16384, 4096, 4096, HOPPER)
    for plan in (backward_of(4096, 4096, 4096), backward_of(7225, 768, 2048)):
        assert SAYS not in plan.path and "dz and the sums" in plan.path


@pytest.mark.parametrize("r", [16, 192])
def test_nothing_as_large_as_y_is_written(r):
    """Beside g W its workspace has what is of the size of B and of h, and partial sums over tokens."""
    M, K, N = 7232, 768, 24448
    plan = backward_of(M, K, N, r)
    assert SAYS in plan.path and "for dz" not in plan.path
    assert 2 * N * K <= plan.workspace < 2 * N * K + 2 * M * N / 4
    assert kernels(plan)["by_g_kernel"] == 3 - (r == 16)  # W, B and, where a product of its own forms it, dB


def test_who_keeps_dz():
    """float32, columns of W that lie row by row, and the dropout that needs dy beside it."""
    for more in (dict(dtype=torch.float32), dict(by_columns=True), dict(mode="peft", seed=True)):
        assert SAYS not in backward_of(7232, 768, 24448, **more).path
    assert SAYS in backward_of(7232, 768, 24448, seed=True).path
