"""What dora_merge and dora_unmerge promise."""

import torch

from fdora.functional import dora_merge, dora_norm, dora_unmerge
from tests.close import assert_exact
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


def zero_rows_come_back():
    """At the start of training a zero row has m = 0 and c = 0: nothing was lost."""
    t = tensors()
    W, (A, B, m) = t["W"], (t[n] for n in NAMES)
    W[1] = B[1] = m[1] = 0
    c = dora_norm(W, A, B, s=t["s"])
    assert_exact(dora_unmerge(dora_merge(W, A, B, m, s=t["s"], norm=c), A, B, m, s=t["s"], norm=c), W)


def has_shapes_on_meta():
    t = tensors(dtype=torch.bfloat16, adapter=torch.float32)
    W, *p = (t[n].to("meta") for n in ("W", *NAMES))
    merged = dora_merge(W, *p, s=t["s"])
    back = dora_unmerge(merged, *p, s=t["s"], norm=dora_norm(W, *p[:2], s=t["s"]))
    for made in (merged, back):
        assert made.is_meta and made.shape == W.shape and made.dtype == W.dtype


CHECKS = [
    gamma_is_rounded_with_g,
    zero_rows_come_back,
    has_shapes_on_meta,
]
