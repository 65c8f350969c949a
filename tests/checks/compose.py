"""What dora_compose and dora_delta promise."""

import itertools

import torch
from torch.autograd import gradcheck

from fdora.functional import dora_compose, dora_delta
from tests import device
from tests.close import assert_exact, assert_within, rel_l2
from tests.make import grads


def inputs(lead=(4,), N=6, dtype=torch.float64, lora_dtype=None, spread=0.05):
    g = 1 + spread * torch.randn(N, dtype=torch.float64)
    base, lora, bias = torch.randn(*lead, N), 0.05 * torch.randn(*lead, N), torch.randn(N)
    wide = torch.promote_types(dtype, torch.float32)
    made = (base.to(dtype), lora.to(lora_dtype or dtype), g.to(wide), bias.to(dtype))
    return tuple(t.to(device.NAME) for t in made)


def truth(base, lora, g, s, bias=None):
    y = g.double() * (base.double() + s * lora.double())
    return y if bias is None else y + bias.double()


def matches_the_truth():
    for lead, s in itertools.product(((4,), (), (0,), (2, 1, 3)), (0.7, 0.0, -2.0)):
        base, lora, g, bias = inputs(lead)
        assert_exact(dora_compose(base, lora, g, s=s), truth(base, lora, g, s))
        assert_exact(dora_compose(base, lora, g, s=s, bias=bias), truth(base, lora, g, s, bias))
        assert_exact(dora_delta(base, lora, g, s=s), truth(base, lora, g, s) - base)


def any_shape():
    for lead, N, bias_too in itertools.product(((), (0,), (4,), (2, 0, 3), (2, 3)), (6, 0), (False, True)):
        base, lora, g, bias = (t.requires_grad_() for t in inputs(lead, N))
        leaves = dict(base=base, lora=lora, g=g) | (dict(bias=bias) if bias_too else {})
        y, want = dora_compose(base, lora, g, s=0.7, bias=leaves.get("bias")), truth(base, lora, g, 0.7, leaves.get("bias"))
        assert_exact(y, want, f"{lead} N={N}")
        ones = torch.ones_like(y)
        for d, ref in zip(*(grads(v, ones, **leaves).values() for v in (y, want)), strict=True):
            assert_exact(d, ref, f"{lead} N={N}")


def rounds_once():
    """At g near 1 (std 0.0015) half-precision results sit at the rounding floor, whatever mix of dtypes comes in."""
    for dtype, lora_dtype in ((torch.bfloat16, None), (torch.bfloat16, torch.float32), (torch.float16, None)):
        base, lora, g, bias = inputs((64,), 512, dtype, lora_dtype, spread=0.0015)
        limit = 1.7e-3 if dtype == torch.bfloat16 else 2.2e-4
        y, delta = dora_compose(base, lora, g, s=2.0, bias=bias), dora_delta(base, lora, g, s=2.0)
        assert y.dtype == delta.dtype == dtype
        assert rel_l2(y, truth(base, lora, g, 2.0, bias)) <= limit
        assert rel_l2(delta, truth(base, lora, g, 2.0) - base.double()) <= limit


def gradients_are_right():
    for bias_too, frozen in itertools.product((False, True), ((), (0,), (1,), (2,), (0, 1), (0, 2), (1, 2))):
        args = list(inputs())
        args = args if bias_too else args[:3]
        for i, t in enumerate(args):
            t.requires_grad_(i not in frozen)
        gradcheck(lambda base, lora, g, bias=None: dora_compose(base, lora, g, s=0.7, bias=bias), args)
        gradcheck(lambda base, lora, g: dora_delta(base, lora, g, s=0.7), args[:3])


def half_precision_gradients_are_within_budget():
    for dtype, lora_dtype in ((torch.bfloat16, torch.float32), (torch.float16, None), (torch.float32, None)):
        args = [t.requires_grad_() for t in inputs((33, 3), 40, dtype, lora_dtype, spread=0.0015)]
        wide = [t.detach().double().requires_grad_() for t in args]
        dy = torch.randn(33, 3, 40, device=device.NAME).to(dtype)
        for delta in (False, True):
            names = dict(zip(["base", "lora", "g", "bias"], args, strict=True))
            if delta:
                names.pop("bias")
                y, yt = dora_delta(*args[:3], s=2.0), truth(*wide[:3], 2.0) - wide[0]
                naive = (args[2].to(dtype) - 1) * args[0] + 2.0 * args[2].to(dtype) * args[1]
            else:
                y, yt = dora_compose(*args[:3], s=2.0, bias=args[3]), truth(*wide[:3], 2.0, wide[3])
                naive = args[2].to(dtype) * (args[0] + 2.0 * args[1]) + args[3]
            got, eager = grads(y, dy, **names), grads(naive.to(dtype), dy, **names)
            want = grads(yt, dy.double(), **dict(zip(names, wide, strict=False)))
            for n, t in names.items():
                assert got[n].dtype == t.dtype
                assert_within(got[n], eager[n], want[n], f"{dtype} delta={delta} d{n}")


def takes_any_strides():
    base, lora, g, _ = inputs((6,), 6)
    want = dora_compose(base, lora, g, s=0.7)
    assert_exact(dora_compose(base.T.contiguous().T, lora.T.contiguous().T, g, s=0.7), want)
    row = base[:1].expand(6, 6).requires_grad_()
    y = dora_compose(row, lora, g, s=0.7)
    dy = torch.ones((), dtype=y.dtype, device=y.device).expand_as(y)
    assert_exact(torch.autograd.grad(y, row, dy)[0], g.expand_as(y))


CHECKS = [
    matches_the_truth,
    any_shape,
    rounds_once,
    gradients_are_right,
    half_precision_gradients_are_within_budget,
    takes_any_strides,
]
