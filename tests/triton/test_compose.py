"""The compose kernels against the truth: interpreted on a CPU (TRITON_INTERPRET=1), or for real with --device cuda."""

import itertools

import pytest
import torch

from fdora.functional import dora_compose, dora_delta
from tests import device
from tests.checks.compose import inputs, truth
from tests.close import assert_within, rel_l2
from tests.make import grads
from tests.triton.marks import INTERPRETED, needs_gpu, needs_kernels

pytestmark = needs_kernels
MIXES = [(torch.float32, None), (torch.float16, None), (torch.float16, torch.float32), (torch.bfloat16, torch.float32)]
MIXES += [(torch.bfloat16, None)]


@pytest.mark.parametrize("mix", MIXES, ids=str)
@pytest.mark.parametrize("shape", [((3,), 7), ((33, 4), 513), ((), 1), ((300,), 130), ((0,), 5)], ids=str)
def test_outputs_and_gradients(mix, shape):
    dtype, lora_dtype = mix
    args = [t.requires_grad_() for t in inputs(*shape, dtype, lora_dtype, spread=0.0015)]
    wide = [t.detach().double().requires_grad_() for t in args]
    dy = torch.randn(*shape[0], shape[1], device=device.NAME).to(dtype)
    for delta in (False, True):
        if delta:
            y, want, count = dora_delta(*args[:3], s=-2.0, backend="triton"), truth(*wide[:3], -2.0) - wide[0], 3
            naive = (args[2].to(dtype) - 1) * args[0] - 2.0 * args[2].to(dtype) * args[1]
        else:
            y, want, count = dora_compose(*args[:3], s=-2.0, bias=args[3], backend="triton"), truth(*wide[:3], -2.0, wide[3]), 4
            naive = args[2].to(dtype) * (args[0] - 2.0 * args[1]) + args[3]
        naive = naive.to(dtype)
        assert y.dtype == dtype
        assert_within(y, naive, want, f"delta={delta} y")
        names = ["base", "lora", "g", "bias"][:count]
        got, eager, ref = (
            grads(out, dy.to(out.dtype), **dict(zip(names, leaves, strict=False)))
            for out, leaves in ((y, args), (naive, args), (want, wide))
        )
        for n, leaf in zip(names, args, strict=False):
            assert got[n].dtype == leaf.dtype
            assert_within(got[n], eager[n].to(leaf.dtype), ref[n], f"delta={delta} d{n}")


def test_rounds_once():
    dtype, limit = (torch.float16, 2.2e-4) if INTERPRETED else (torch.bfloat16, 1.7e-3)
    base, lora, g, bias = inputs((64,), 512, dtype, spread=0.0015)
    assert rel_l2(dora_compose(base, lora, g, s=2.0, bias=bias, backend="triton"), truth(base, lora, g, 2.0, bias)) <= limit
    assert rel_l2(dora_delta(base, lora, g, s=2.0, backend="triton"), truth(base, lora, g, 2.0) - base.double()) <= limit


def test_only_what_is_needed_and_the_same_bits():
    for frozen in itertools.product((False, True), repeat=4):
        if all(frozen):
            continue
        args = [t.requires_grad_(not f) for t, f in zip(inputs((150,), 40, torch.float32), frozen, strict=True)]
        leaves = [t for t in args if t.requires_grad]
        runs = []
        for backend in ("triton", "triton", "eager"):
            y = dora_compose(*args[:3], s=0.7, bias=args[3], backend=backend)
            runs.append(torch.autograd.grad(y, leaves, torch.ones_like(y)))
        assert all(torch.equal(a, b) for a, b in zip(runs[0], runs[1], strict=True))
        for a, b in zip(runs[0], runs[2], strict=True):
            torch.testing.assert_close(a, b)


def test_strides():
    base, lora, g, bias = inputs((40,), 40, torch.float32)
    want = dora_compose(base, lora, g, s=0.7, bias=bias, backend="eager")
    odd = [torch.stack([t, torch.full_like(t, float("nan"))], -1)[..., 0] for t in (base, lora, g, bias)]
    torch.testing.assert_close(dora_compose(*odd[:3], s=0.7, bias=odd[3], backend="triton"), want)
    turned = [t.T.contiguous().T for t in (base, lora)]
    torch.testing.assert_close(dora_compose(*turned, g, s=0.7, bias=bias, backend="triton"), want)
    wide = [torch.cat([t, t], 1)[:, :40] for t in (base, lora)]
    torch.testing.assert_close(dora_compose(*wide, g, s=0.7, bias=bias, backend="triton"), want)
    row = base[:1].expand(40, 40).requires_grad_()
    y = dora_compose(row, lora, g, s=0.7, backend="triton")
    (d,) = torch.autograd.grad(y, row, torch.ones((), device=y.device).expand_as(y))
    torch.testing.assert_close(d, g.expand_as(y))


def test_transforms():
    base, lora, g, _ = inputs((6,), 40, torch.float32)

    def loss(base, lora, g):
        return dora_compose(base, lora, g, s=0.7, backend="triton").square().sum()

    def plain(base, lora, g):
        return (g * (base + 0.7 * lora)).square().sum()

    for f in (
        torch.func.grad,
        torch.func.vmap,
        lambda f: torch.func.vmap(torch.func.grad(f, argnums=(0, 1, 2)), in_dims=(0, 0, None)),
    ):
        dims = {"in_dims": (0, 0, None)} if f is torch.func.vmap else {}
        got, want = f(loss, **dims)(base, lora, g), f(plain, **dims)(base, lora, g)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_opcheck():
    from fdora.triton.compose import compose, compose_backward

    base, lora, g, bias = inputs((6,), 40, torch.float32)
    torch.library.opcheck(compose, (base, lora, g, bias, 0.7, False))
    torch.library.opcheck(compose_backward, (base, base, lora, g, 0.7, True, [True, False, True, False]))


@needs_gpu
def test_past_two_to_the_31_elements():
    M, N = 70_000, 32_768
    base = torch.zeros((M, N), device=device.NAME, dtype=torch.bfloat16)
    base[-3:] = torch.randn(3, N, device=device.NAME)
    g = torch.rand(N, device=device.NAME)
    y = dora_compose(base, base, g, s=1.0)
    torch.testing.assert_close(y[-3:], (g * 2 * base[-3:].float()).bfloat16())
