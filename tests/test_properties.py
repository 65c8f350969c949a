"""Hypothesis: shapes, dtypes, strides and leading axes nobody thought of."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fdora.functional import dora_compose, dora_delta, dora_linear, dora_merge, dora_norm, dora_scale
from tests import device, reference
from tests.close import assert_within
from tests.make import grads

settings.register_profile(
    "fdora", max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fdora")

sizes = st.integers(1, 40)
leads = st.lists(st.integers(0, 4), max_size=3).map(tuple)
halves = st.sampled_from((torch.bfloat16, torch.float16, torch.float32, torch.float64))
scalings = st.floats(-4, 4, allow_nan=False).map(lambda s: round(s, 3))
layouts = st.sampled_from(("plain", "turned", "strided", "offset"))


def laid_out(t, layout):
    """The same values behind other strides."""
    if layout == "turned" and t.ndim >= 2:
        return t.transpose(-1, -2).contiguous().transpose(-1, -2)
    if layout == "strided":
        return torch.stack([t, torch.full_like(t, float("nan"))], -1)[..., 0]
    if layout == "offset":
        return torch.cat([torch.full_like(t.reshape(-1)[:1], float("nan")), t.reshape(-1)])[t.numel() > 0 :].view(t.shape)
    return t


@st.composite
def layers(draw):
    N, K, r, lead = draw(sizes), draw(sizes), draw(sizes), draw(leads)
    dtype = draw(halves)
    adapter = draw(st.sampled_from((dtype, torch.float32)))
    s = draw(scalings)
    rand = torch.Generator().manual_seed(draw(st.integers(0, 10**6)))

    def make(*shape, std, dtype):
        t = (torch.randn(*shape, generator=rand, dtype=torch.float64) * std).to(dtype).to(device.NAME)
        return laid_out(t, draw(layouts))

    t = {
        "x": make(*lead, K, std=1, dtype=dtype),
        "W": make(N, K, std=K**-0.5, dtype=dtype),
        "A": make(r, K, std=K**-0.5, dtype=adapter),
        "B": make(N, r, std=0.1 * r**-0.5, dtype=adapter),
    }
    if lead and lead[0] and draw(st.booleans()):
        t["x"] = t["x"][:1].expand(*lead, K)  # one axis of many copies
    c = reference.norm(t["W"], t["A"], t["B"], s)
    t["m"] = (c * (1 + 0.01 * torch.randn(N, generator=rand).to(device.NAME))).to(
        draw(st.sampled_from((adapter, torch.float32)))
    )
    if t["m"].dtype not in (dtype, torch.float32):
        t["m"] = t["m"].float()
    return t | {"s": s, "bias": draw(st.one_of(st.none(), st.just(make(N, std=1, dtype=dtype))))}


@given(layers())
def test_norm_and_merge(t):
    c = dora_norm(t["W"], t["A"], t["B"], s=t["s"])
    truth = reference.norm(t["W"], t["A"], t["B"], t["s"])
    size = reference.norm(t["W"], t["A"], t["B"], 0.0) + reference.norm(torch.zeros_like(t["W"]), t["A"], t["B"], t["s"])
    assert ((c.double() - truth).abs() <= 1e-6 * size).all()
    merged = dora_merge(t["W"], t["A"], t["B"], t["m"], s=t["s"], norm=c)
    g = dora_scale(t["m"], c).double()[:, None]
    want = g * (t["W"].double() + t["s"] * t["B"].double() @ t["A"].double())
    assert_within(merged, want.to(merged.dtype), want, "merged")


def magnitude(t, names, dy):
    """Sum of the absolute terms of y and of each gradient: what an error is measured against, element by element."""
    c = reference.norm(t["W"], t["A"], t["B"], t["s"])
    absolute = {n: v.detach().double().abs() for n, v in t.items() if isinstance(v, torch.Tensor)}
    leaves = {n: absolute[n].requires_grad_() for n in names}
    args = [absolute.get(n) for n in ("x", "W", "A", "B", "m")]
    y = reference.dora(*args, abs(t["s"]), absolute.get("bias"), c)
    return {"y": y.detach()} | grads(y, dy.double().abs(), **leaves)


@given(layers())
def test_linear(t):
    torch.manual_seed(0)
    names = [n for n in ("x", "A", "B", "m", "bias") if t[n] is not None]
    leaves = {n: t[n].detach().requires_grad_() for n in names}
    t = t | leaves
    args = [t[n] for n in ("x", "W", "A", "B", "m", "s", "bias")]
    y, want = dora_linear(*args[:5], s=t["s"], bias=t["bias"]), reference.dora(*args)
    assert y.shape == (*t["x"].shape[:-1], t["W"].shape[0]) and y.dtype == t["x"].dtype
    dy = torch.randn_like(y)
    got = {"y": y} | grads(y, dy, **leaves)
    ref = {"y": want} | grads(want, dy.double(), **leaves)
    size = magnitude(t, names, dy)
    # Four values may be rounded to the dtype of x on the way to a gradient: an adapter, h or dz, dz B, and the result.
    info = torch.finfo(t["x"].dtype)
    for n, value in got.items():
        assert n == "y" or (value.dtype == leaves[n].dtype and value.shape == leaves[n].shape)
        error = (value.double() - ref[n].double()).abs()
        assert (error <= 4 * info.eps * size[n] + info.tiny).all(), f"d{n}: {(error / size[n]).max().item() / info.eps:.2f} eps"


@given(leads, sizes, halves, halves, scalings, layouts, st.integers(0, 10**6))
def test_compose_and_delta(lead, N, dtype, lora_dtype, s, layout, seed):
    torch.manual_seed(seed)
    base, lora = torch.randn(*lead, N).to(dtype), (0.1 * torch.randn(*lead, N)).to(lora_dtype)
    g = (1 + 0.002 * torch.randn(N)).to(torch.promote_types(dtype, torch.float32))
    base, lora, g = (laid_out(t.to(device.NAME), layout) for t in (base, lora, g))
    y = g.double() * (base.double() + s * lora.double())
    assert_within(dora_compose(base, lora, g, s=s), y.to(dtype), y, "y")
    delta = (g.double() - 1) * base.double() + g.double() * s * lora.double()
    assert_within(dora_delta(base, lora, g, s=s), delta.to(dtype), delta, "delta")
