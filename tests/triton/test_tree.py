"""Every promise of tests/checks/tree.py of the kernels: interpreted (TRITON_INTERPRET=1), or for real with --device cuda."""

import pytest
import torch

import fdora.functional as F
from tests import device, reference
from tests.checks.tree import CHECKS
from tests.triton.marks import DTYPES, INTERPRETED, needs_kernels  # noqa: F401

pytestmark = needs_kernels


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_tree(check, dtype):
    check("triton", dtype)


@pytest.mark.parametrize(("N", "K", "r"), [(250, 200, 16), (80, 1096, 96), (304, 152, 128), (136, 648, 384)])
def test_masked_tiles_of_hopper(N, K, r, monkeypatch):
    """N and K of no whole tiles, rows of whole 16 bytes."""
    from fdora.triton import tree
    from fdora.triton.runtime.device import Device
    from fdora.triton.tree_table import rows_of

    if device.NAME == "cpu":
        monkeypatch.setattr(tree, "device_of", lambda where: Device(-1, 90, 4, False))

    def draw(*shape):
        return torch.randn(shape, device=device.NAME).half()

    W, params = [draw(N, K), draw(N, K) / 16], [F.DoraParams(draw(r, K) / 9, draw(N, r) / 9, None) for _ in range(2)]
    of, config = rows_of(W[:1], [params[0].A], [params[0].B], [0.7], [0], 90)[0][0].kernel
    assert {16: 16, 96: 128, 128: 128, 384: 64}[r] == config.BLOCK_R and not of.EVEN and of.UNIT_W == 8
    for w, p, c in zip(W, params, F.dora_norm_tree(W, params, s=0.7, backend="triton"), strict=True):
        torch.testing.assert_close(c.double(), reference.norm(w, p.A, p.B, 0.7), rtol=1e-6, atol=0)
