"""What dora_norm, dora_base_sqnorm and dora_scale promise. Each check raises when the promise is broken."""

import itertools

import torch

from fdora.functional import dora_base_sqnorm, dora_norm
from tests import device, reference
from tests.close import rel_l2
from tests.make import grads, tensors, tracked


def holds_its_budget_in_any_tile():
    """Small budgets cut rows and columns; the number stays."""
    t = tensors(130, 300, 24, dtype=torch.float32)
    truth = reference.norm(t["W"], t["A"], t["B"], t["s"])
    for extra, budget in itertools.product(({}, {"base_sqnorm": dora_base_sqnorm(t["W"])}), (24_000, 60_000, 10**6)):
        c = dora_norm(t["W"], t["A"], t["B"], s=t["s"], max_bytes=budget, **extra)
        torch.testing.assert_close(c.double(), truth, rtol=1e-6, atol=0)
    for dtype in (torch.float32, torch.bfloat16):
        W = t["W"].to(dtype)
        torch.testing.assert_close(dora_base_sqnorm(W, max_bytes=5000), W.float().square().sum(1), rtol=1e-6, atol=0)


def zero_rows_have_no_gradient():
    t = tracked(tensors(kind="zero_rows"), "A", "B")
    c = dora_norm(t["W"], t["A"], t["B"], s=0.7, detach=False)
    d = grads(c, torch.ones_like(c), A=t["A"], B=t["B"])
    assert (d["B"][::2] == 0).all() and d["A"].isfinite().all() and (d["B"][1::2] != 0).any()


def gradients_on_half_weights_are_those_of_float32():
    """No copy of W is made in float32, and a float32 factor is no half-precision one: dc of any size, adapters in either."""
    for dtype, adapter, size in itertools.product((torch.bfloat16, torch.float16), (None, torch.float32), (1e-7, 1.0, 1e5)):
        t = tracked(tensors(40, 64, 8, (1,), dtype, adapter), "A", "B")
        dc = size * torch.randn(40).to(t["x"].device)
        c = dora_norm(t["W"], t["A"], t["B"], s=0.7, detach=False)
        want = reference.norm(t["W"], t["A"], t["B"], 0.7)
        for got, ref in zip(*(torch.autograd.grad(v, (t["A"], t["B"]), dc.to(v)) for v in (c, want)), strict=True):
            if got.dtype != torch.float16:  # whose own gradient may be too large or too small for it
                limit = 1.7e-5 if got.dtype == torch.float32 else 2e-3
                assert rel_l2(got, ref) <= limit, (dtype, adapter, size, rel_l2(got, ref))


def is_float32_accurate():
    """1e-6 relative for half and float32 weights and adapters, in both forms, near-cancelling rows included.

    On a GPU float32 adapters run as float16 terms, 2^-22 of each product: 4e-8 of ||W||, a hundred times that of c where the
    rows cancel to 1 %.
    """
    for dtype, adapter, kind in itertools.product(
        (torch.float32, torch.bfloat16, torch.float16), (torch.float32, None), ("plain", "cancelling")
    ):
        t = tensors(64, 768, 24, dtype=dtype, adapter=adapter, kind=kind)
        truth = reference.norm(t["W"], t["A"], t["B"], t["s"])
        for extra in ({}, {"base_sqnorm": dora_base_sqnorm(t["W"])}):
            c = dora_norm(t["W"], t["A"], t["B"], s=t["s"], **extra)
            assert c.dtype == torch.float32
            worst = ((c.double() - truth) / truth).abs().max().item()
            terms = device.NAME != "cpu" and kind == "cancelling" and t["A"].dtype == torch.float32
            assert worst <= (4e-6 if terms else 1e-6), f"{dtype} {adapter} {kind} {list(extra)}: {worst:.2g}"


CHECKS = [
    is_float32_accurate,
    gradients_on_half_weights_are_those_of_float32,
    holds_its_budget_in_any_tile,
    zero_rows_have_no_gradient,
]
