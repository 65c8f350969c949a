"""Calls of public functions with the arguments that tests/cases.py draws, which are not made."""

import random

import pytest
import torch
from torch.utils._pytree import tree_leaves

from fdora.functional import dora_embedding, dora_experts, dora_experts_mlp
from fdora.functional.explain import CALLS
from fdora.quant import QuantWeight
from tests import cases, device

NAMES = [name for name in cases.FUNCTIONS if name not in ("base_sqnorm", "scale", "init", "norm_tree")]


class Asked(Exception):
    """In the place of a call."""


def refused(fn, args, kwargs):
    """By explain(): experts of codes. What plain torch alone has is no plan."""
    weights = [la.W for la in args[1:]] if fn is dora_experts_mlp else args[1:2] if fn is dora_experts else ()
    return any(isinstance(W, QuantWeight) for W in weights) or (fn is dora_embedding and "max_norm" in kwargs)


def call(name, k, options):
    """The first call of a case that explain() knows: the function, arguments, keywords. Some leaves want a gradient."""
    drawn = cases.usual(device.NAME)._replace(**{"dtypes": ["fp16", "fp32"], "largest": 80} | options)
    fresh, e = cases.FUNCTIONS[name](cases.Draw(random.Random(f"{name} {k}"), drawn)), cases.Draw(random.Random(k), drawn)
    problem = fresh(e)
    leaves = {n: problem.tensors[n].detach().requires_grad_() for n in problem.trainable if e.chance(0.7)}

    def ask(fn):
        def asked(*args, **kwargs):
            raise Asked(fn, args, {n: v for n, v in kwargs.items() if n != "backend"})

        return asked

    with pytest.MonkeyPatch.context() as patch, pytest.raises(Asked) as found:
        for fn in CALLS:
            if hasattr(cases, fn.__name__):
                patch.setattr(cases, fn.__name__, ask(fn))
        problem.call(problem.tensors | leaves)
    if not refused(*found.value.args) and not any(t.isnan().any() for t in problem.tensors.values()):
        return found.value.args


def calls(name, count, **options):
    """Those of so many cases, without NaN."""
    return filter(None, (call(name, k, options) for k in range(count)))


def backward_of(out):
    ys = [t for t in (out if isinstance(out, tuple) else (out,)) if t.requires_grad]
    if ys:
        torch.autograd.backward(ys, [torch.randn_like(y) for y in ys])


def results(name, count, **options):
    """What kernels make of them: outputs and gradients."""
    torch.manual_seed(1)
    for fn, args, kwargs in calls(name, count, **options):
        out = fn(*args, backend="triton", **kwargs)
        backward_of(out)
        leaves = [t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor) and t.is_leaf]
        yield from [t.detach() for t in (*tree_leaves(out), *(t.grad for t in leaves)) if t is not None]


def assert_same_bits(one, other):
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
