"""What dora_merge and dora_unmerge promise."""

import torch

from fdora.functional import dora_merge, dora_norm, dora_unmerge
from tests.make import tensors

NAMES = ("A", "B", "m")


def gamma_is_rounded_with_g():
    """Rounded once, not for g and again for gamma."""
    half = tensors(70, 33, 8, dtype=torch.bfloat16, adapter=torch.float32)
    gamma = torch.linspace(-1, 2, 70).to(half["x"])
    got = dora_merge(half["W"], *(half[n] for n in NAMES), s=half["s"], gamma=gamma)
    V = half["W"].double() + half["s"] * half["B"].double() @ half["A"].double()
    exact = (gamma.double() * half["m"].double() / V.norm(dim=1))[:, None] * V
    assert ((got.double() - exact).abs() <= 2**-8 * exact.abs() * 1.001).all()


def has_shapes_on_meta():
    t = tensors(dtype=torch.bfloat16, adapter=torch.float32)
    W, *p = (t[n].to("meta") for n in ("W", *NAMES))
    merged = dora_merge(W, *p, s=t["s"])
    back = dora_unmerge(merged, *p, s=t["s"], norm=dora_norm(W, *p[:2], s=t["s"]))
    for made in (merged, back):
        assert made.is_meta and made.shape == W.shape and made.dtype == W.dtype


CHECKS = [
    gamma_is_rounded_with_g,
    has_shapes_on_meta,
]
