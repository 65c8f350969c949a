"""DoraParams and dora_init: a start that changes nothing, a pytree everywhere."""

import math

import jax
import optree
import pytest
import torch
from torch.nn.functional import linear

from fdora.functional import DoraParams, dora_init, dora_linear, dora_norm, dora_scale
from tests import device
from tests.make import tensors

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("N", "K", "r"), [(6, 5, 2), (384, 1536, 16), (1, 3, 1), (65, 64, 100)])
def test_start_is_an_exact_no_op(dtype, N, K, r):
    t = tensors(N, K, dtype=dtype)
    p = dora_init(t["W"], r)
    assert (dora_scale(p.m, dora_norm(t["W"], p.A, p.B, s=2.0)) == 1).all()
    y, want = dora_linear(t["x"], t["W"], *p, s=2.0, bias=t["bias"]), linear(t["x"], t["W"], t["bias"])
    if dtype in (torch.float32, torch.float64):
        # bias may be fused into the product by F.linear: compare the same two steps
        want = linear(t["x"], t["W"]) + t["bias"]
        assert torch.equal(y, want)
    torch.testing.assert_close(y, want)


def test_zero_rows_start_finite():
    W = tensors()["W"]
    W[2] = 0
    p = dora_init(W, 2)
    assert p.m[2] == 0 and dora_linear(tensors()["x"], W, *p, s=1.0).isfinite().all()


def test_the_draw_is_pefts():
    W = torch.nn.Parameter(torch.randn(6, 50, device=device.NAME))
    torch.manual_seed(3)
    p = dora_init(W, 4)
    assert not any(t.requires_grad for t in p)
    torch.manual_seed(3)
    want = torch.nn.init.kaiming_uniform_(torch.empty(4, 50, device=device.NAME), a=math.sqrt(5))
    assert torch.equal(p.A, want) and (p.B == 0).all()
    assert p.A.abs().max() <= 50**-0.5


def test_pytree_everywhere():
    p = dora_init(torch.randn(6, 5), 2)
    for tree_map in (optree.tree_map, torch.utils._pytree.tree_map, jax.tree_util.tree_map):
        twice = tree_map(lambda t: 2 * t, p)
        assert type(twice) is DoraParams and torch.equal(twice.m, 2 * p.m)
    assert DoraParams._fields == ("A", "B", "m")
