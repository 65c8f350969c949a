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


@pytest.mark.parametrize("adapter", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(
    ("N", "K", "r"),
    [(250, 200, 16), (80, 1096, 96), (304, 152, 128), (136, 648, 384), (130, 72, 64), (256, 1152, 40), (128, 256, 160)],
)
def test_tiles_of_hopper(N, K, r, adapter, monkeypatch):
    """Also where N and K are of no whole tiles, with rows of whole 16 bytes. Rows of B and columns of A differ by orders of
    magnitude: what scales a tile of float32 A is one number. Tensor cores lose the last bits of sums of 384 (1.1e-6)."""
    from fdora.triton import tree
    from fdora.triton.runtime.device import Device
    from fdora.triton.tree_table import rows_of

    if device.NAME == "cpu":
        monkeypatch.setattr(tree, "device_of", lambda where: Device(-1, 90, 4, False))

    def draw(*shape):
        return torch.randn(shape, device=device.NAME).half()

    sizes = torch.logspace(-3, 0.5, K, device=device.NAME)[torch.randperm(K)]
    W, A = [draw(N, K), draw(N, K) / 16], [(draw(r, K) / 9 * sizes).to(adapter) for _ in range(2)]
    B = [(draw(N, r) / 9 * torch.logspace(-3, 0, N, device=device.NAME)[:, None]).to(adapter) for _ in range(2)]
    of, config = rows_of(W[:1], A[:1], B[:1], [0.7], [0], 90)[0][0].kernel
    block = {16: 16, 40: 64, 64: 64, 96: 128, 128: 128, 160: 32, 384: 32 if of.SPLIT else 64}[r]
    assert (K % 128 == 0, adapter == torch.float32, 8, block) == (of.EVEN, of.SPLIT, of.UNIT_W, config.BLOCK_R)
    near = 2e-6 if of.SPLIT and r == 384 else 1e-6
    for w, a, b, c in zip(W, A, B, F.dora_norm_tree(W, list(zip(A, B, strict=True)), s=0.7, backend="triton"), strict=True):
        torch.testing.assert_close(c.double(), reference.norm(w, a, b, 0.7), rtol=near, atol=0)
