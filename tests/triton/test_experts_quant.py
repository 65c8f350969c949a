"""Experts of codes by kernels: decoded in one pass, then the grouped product; norms from the codes."""

import torch

from fdora.functional import dora_experts
from fdora.quant import quantize
from tests import device  # noqa: F401
from tests.checks.experts import S, mixture
from tests.triton.marks import HALF, INTERPRETED, needs_kernels  # noqa: F401
from tests.triton.written import kernels

pytestmark = needs_kernels
E, N, K = 3, 32, 64


def test_nothing_is_decoded_by_torch(chosen_anew, monkeypatch):
    """One pass for W, two launches for the norm of an expert."""
    t = mixture(E, N, K, 2, 7, HALF[0])
    q = quantize(t["W"].flatten(0, 1), "nf4").to(HALF[0])
    monkeypatch.setattr(type(q), "dequantize", None)
    offsets = torch.tensor([1, 2, 7], device=t["x"].device)
    y = dora_experts(t["x"].requires_grad_(), q, t["A"], t["B"], t["m"], s=S, offsets=offsets, backend="triton")
    y.sum().backward()
    found = {name: n for plan in chosen_anew.values() for name, n in kernels(plan).items()}
    assert found["dequantize_kernel"] == 1
    assert sum(n for name, n in found.items() if name.startswith("quant")) == E  # along strips on Hopper
