"""What dora_merge and dora_unmerge promise."""

import itertools

import torch
from torch.nn.functional import linear

from fdora.functional import dora_linear, dora_merge, dora_norm, dora_unmerge
from tests.close import assert_exact, rel_l2
from tests.make import tensors

NAMES = ("A", "B", "m")


def merged_weight_does_what_the_layer_does():
    for kind, shape in itertools.product(("plain", "zero_rows", "zero_m", "cancelling"), ((6, 5, 2), (70, 33, 8), (1, 1, 1))):
        t = tensors(*shape, kind=kind)
        p = [t[n] for n in NAMES]
        merged = dora_merge(t["W"], *p, s=t["s"])
        want = dora_linear(t["x"], t["W"], *p, s=t["s"], bias=t["bias"])
        assert_exact(linear(t["x"], merged, t["bias"]), want, f"{kind} {shape}")
        c = dora_norm(t["W"], *p[:2], s=t["s"])
        assert torch.equal(dora_merge(t["W"], *p, s=t["s"], norm=c), merged)


def gamma_is_in_the_merged_weight():
    t = tensors(70, 33, 8)
    p, gamma = [t[n] for n in NAMES], torch.linspace(-1, 2, 70).to(t["x"])
    merged = dora_merge(t["W"], *p, s=t["s"], gamma=gamma)
    want = dora_linear(t["x"], t["W"], *p, s=t["s"], bias=t["bias"], gamma=gamma)
    assert_exact(linear(t["x"], merged, gamma * t["bias"]), want)
    half = tensors(70, 33, 8, dtype=torch.bfloat16, adapter=torch.float32)  # rounded once, not for g and again for gamma
    got = dora_merge(half["W"], *(half[n] for n in NAMES), s=t["s"], gamma=gamma.bfloat16())
    V = half["W"].double() + t["s"] * half["B"].double() @ half["A"].double()
    exact = (gamma.bfloat16().double() * half["m"].double() / V.norm(dim=1))[:, None] * V
    assert ((got.double() - exact).abs() <= 2**-8 * exact.abs() * 1.001).all()


def round_trip():
    limits = {torch.float64: 1e-12, torch.float32: 1e-6, torch.bfloat16: 4e-3, torch.float16: 6e-4}
    for dtype, kind in itertools.product(limits, ("plain", "zero_rows", "cancelling", "negative_m")):
        t = tensors(40, 33, 8, dtype=dtype, adapter=torch.promote_types(dtype, torch.float32), kind=kind)
        p = [t[n] for n in NAMES]
        c = dora_norm(t["W"], *p[:2], s=t["s"])
        merged = dora_merge(t["W"], *p, s=t["s"], norm=c)
        back = dora_unmerge(merged, *p, s=t["s"], norm=c)
        assert merged.dtype == back.dtype == dtype
        assert rel_l2(back, t["W"]) <= limits[dtype], (dtype, kind, rel_l2(back, t["W"]))


def zero_rows_come_back():
    """At the start of training a zero row has m = 0 and c = 0: nothing was lost."""
    t = tensors()
    W, (A, B, m) = t["W"], (t[n] for n in NAMES)
    W[1] = B[1] = m[1] = 0
    c = dora_norm(W, A, B, s=t["s"])
    assert_exact(dora_unmerge(dora_merge(W, A, B, m, s=t["s"], norm=c), A, B, m, s=t["s"], norm=c), W)


def leaves_its_input_alone():
    t = tensors(kind="zero_m")
    before = {n: t[n].clone() for n in ("W", *NAMES)}
    merged = dora_merge(t["W"], *(t[n] for n in NAMES), s=t["s"])
    assert not merged.requires_grad and merged.data_ptr() != t["W"].data_ptr()
    assert all(torch.equal(t[n], v) for n, v in before.items())


def has_shapes_on_meta():
    t = tensors(dtype=torch.bfloat16, adapter=torch.float32)
    W, *p = (t[n].to("meta") for n in ("W", *NAMES))
    merged = dora_merge(W, *p, s=t["s"])
    back = dora_unmerge(merged, *p, s=t["s"], norm=dora_norm(W, *p[:2], s=t["s"]))
    for made in (merged, back):
        assert made.is_meta and made.shape == W.shape and made.dtype == W.dtype


CHECKS = [
    merged_weight_does_what_the_layer_does,
    gamma_is_in_the_merged_weight,
    round_trip,
    zero_rows_come_back,
    leaves_its_input_alone,
    has_shapes_on_meta,
]
