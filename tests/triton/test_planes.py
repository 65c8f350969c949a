"""Compose where the channels of a convolution lie before its points: interpreted, or for real with --device cuda."""

import itertools

import pytest
import torch

from fdora.eager import compose as eager
from tests import device
from tests.checks.conv import in_full_float32, layer, ours, truth
from tests.close import rel_l2
from tests.make import grads
from tests.triton.marks import DTYPES, INTERPRETED, needs_gpu, needs_kernels  # noqa: F401

pytestmark = needs_kernels
# L, N, P: ragged, one point, strips of more than one program, nothing
SHAPES = ((2, 3, 5), (1, 7, 600), (1, 2, 4200), (0, 3, 4), (2, 3, 0), (1, 70, 16))


def case(L, N, P, dtype, lora=None):
    rand = torch.Generator().manual_seed(0)
    base, low, dy = (torch.randn(L, N, P, generator=rand).to(device.NAME) for _ in range(3))
    g, bias = torch.rand(N, generator=rand).to(device.NAME) + 0.5, torch.randn(N, generator=rand).to(device.NAME)
    return base.to(dtype), low.to(lora or dtype), dy.to(dtype), g, bias.to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_outputs_and_gradients(shape, dtype):
    from fdora.triton import compose

    limit = torch.finfo(dtype).eps
    for lora, delta in itertools.product({dtype, torch.float32}, (False, True)):
        base, low, dy, g, bias = case(*shape, dtype, lora)
        for b in (None, bias):
            got, want = (c.compose_fwd(base, low, g, b, 0.7, delta) for c in (compose, eager))
            assert got.dtype == dtype and got.shape == base.shape
            # Each side rounds its partial sums, which are as large as the terms, and then the result.
            terms = ((g[:, None] - float(delta)) * base.float()).abs() + (0.7 * g[:, None] * low.float()).abs()
            terms += 0 if b is None else b.float().abs()[:, None]
            over = (got.float() - want.float()).abs() - (2 * limit * want.float().abs() + 2 * 2**-23 * terms)
            assert not over.numel() or over.max() <= 0, over.max()
        for needs in ((True,) * 4, (False, True, True, False), (False, False, False, True)):
            got, want = (c.compose_bwd(dy, base, low, g, 0.7, delta, needs) for c in (compose, eager))
            for name, a, b in zip(("dbase", "dlora", "dg", "dbias"), got, want, strict=True):
                assert (a is None) == (b is None)
                if b is not None and b.numel():
                    assert a.dtype == b.dtype and a.shape == b.shape
                    assert (a - b).norm() <= max(2e-6, limit if name[1:] in ("base", "lora") else 0) * b.norm() + 1e-12, name


def test_the_same_bits_and_any_strides():
    from fdora.triton import compose

    base, low, dy, g, _ = case(2, 3, 4200, torch.float32)
    needs = (True,) * 4
    runs = [compose.compose_bwd(dy, base, low, g, 0.7, False, needs) for _ in range(2)]
    runs.append(compose.compose_bwd(dy.transpose(0, 1).contiguous().transpose(0, 1), base, low, g, 0.7, False, needs))
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(run, runs[0], strict=True))


@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_a_convolution(form):
    """Whole, with kernels for what follows torch's part: either memory format."""
    t, how = layer(2, torch.float32, padding=1, size=(8, 12, 4))
    leaves = {n: t[n].requires_grad_() for n in ("A", "B", "m", "bias")}
    x = t["x"].to(memory_format=form).requires_grad_()
    t, leaves = t | {"x": x}, leaves | {"x": x}

    @in_full_float32
    def check():
        y, want = ours(t, how, backend="triton"), truth(t, how)
        dy = torch.randn_like(y)
        assert rel_l2(y, want) <= 1e-6 and y.stride() == ours(t, how, backend="eager").stride()
        for (n, a), b in zip(grads(y, dy, **leaves).items(), grads(want, dy.double(), **leaves).values(), strict=True):
            assert rel_l2(a, b) <= 2e-6, n

    check()


@needs_gpu
def test_past_two_to_the_31_elements():
    from fdora.triton import compose

    L, N, P = 3, 64, 12_000_000
    base = torch.zeros(L, N, P, device=device.NAME, dtype=torch.bfloat16)
    base[-1, -1, -5:] = 2
    g = torch.full((N,), 3.0, device=device.NAME)
    y = compose.compose_fwd(base, base, g, None, 1.0, False)
    assert y[-1, -1, -5:].tolist() == [12.0] * 5 and y[-1, -1, :-5].abs().max() == 0
