"""Hypothesis: shapes, dtypes, strides and leading axes nobody thought of."""

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fdora.functional import (
    dora_compose,
    dora_conv2d,
    dora_delta,
    dora_embedding,
    dora_linear,
    dora_merge,
    dora_norm,
    dora_scale,
)
from tests import device, reference
from tests.checks import experts
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


@given(layers(), leads, st.booleans(), st.integers(0, 10**6))
def test_embedding(t, lead, per_row, seed):
    """The table of a layer's weight, with norms of its rows or of its columns."""
    axis, s = int(per_row), t["s"]
    W, A, B = (t["W"], t["B"].T, t["A"].T) if per_row else (t["W"].T, t["A"], t["B"])
    V = W.shape[0]
    ids = torch.randint(0, V, lead, generator=torch.Generator().manual_seed(seed)).to(device.NAME)
    padding_idx = seed % V if seed % 2 else None
    leaves = {"A": A.detach().requires_grad_(), "B": B.detach().requires_grad_(), "m": t["m"].detach().requires_grad_()}
    args = (ids, W, leaves["A"], leaves["B"], leaves["m"])
    y = dora_embedding(*args, s=s, norm_axis=axis, padding_idx=padding_idx)
    want = reference.embedding(*args, s, axis, padding_idx=padding_idx)
    assert y.shape == (*lead, W.shape[1]) and y.dtype == W.dtype
    dy = torch.randn_like(y)
    got = {"y": y} | grads(y, dy, **leaves)
    ref = {"y": want} | grads(want, dy.double(), **leaves)
    # the sum of the absolute terms of each, with the norm of the signed ones
    absolute = [v.detach().double().abs().requires_grad_() for v in leaves.values()]
    c = reference.norm(t["W"], t["A"], t["B"], s)
    size = reference.embedding(ids, W.abs(), *absolute, abs(s), axis, c)
    sizes = {"y": size.detach()} | grads(size, dy.double().abs(), **dict(zip(leaves, absolute, strict=True)))
    info = torch.finfo(W.dtype)
    for n, value in got.items():
        assert n == "y" or (value.dtype == leaves[n].dtype and value.shape == leaves[n].shape)
        error = (value.double() - ref[n].double()).abs()
        # an element of dA is a sum over the columns, whose dz and s B are rounded; one of y is a product and a sum
        assert (error <= 4 * info.eps * sizes[n] + info.tiny).all(), (
            f"{n}: {(error / sizes[n]).max().item() / info.eps:.2f} eps"
        )


@given(
    st.integers(0, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 3),
    st.integers(1, 4),
    st.integers(1, 3),
    st.integers(1, 2),
    st.integers(0, 2),
    st.integers(1, 2),
    st.booleans(),
    scalings,
    layouts,
    st.integers(0, 10**6),
)
def test_conv(L, groups, c, out, r, kernel, stride, padding, dilation, transposed, s, layout, seed):
    rand = torch.Generator().manual_seed(seed)

    def make(*shape):
        return laid_out(torch.randn(*shape, generator=rand, dtype=torch.float64).to(device.NAME), layout)

    k, C, N = (kernel, 2), c * groups, out * groups
    W = make(C, out, *k) if transposed else make(N, c, *k)
    A = make(c, r, *k) if transposed else make(r, c, *k)
    x, B, m, bias = make(L, C, 7, 6), make(N, r, 1, 1), make(N), make(N)
    leaves = {n: v.requires_grad_() for n, v in {"x": x, "A": A, "B": B, "m": m, "bias": bias}.items()}
    how = {"stride": stride, "padding": padding, "dilation": dilation, "groups": groups, "transposed": transposed}
    y, want = dora_conv2d(x, W, A, B, m, s=s, bias=bias, **how), reference.conv(x, W, A, B, m, s, bias, **how)
    torch.testing.assert_close(y, want, rtol=1e-9, atol=1e-9)
    dy = torch.randn_like(y)
    for n, (a, b) in zip(
        leaves, zip(grads(y, dy, **leaves).values(), grads(want, dy, **leaves).values(), strict=True), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-8, msg=lambda text: f"d{n}: {text}")


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=5),
    st.integers(0, 3),
    st.integers(1, 6),
    st.integers(1, 6),
    st.integers(1, 3),
)
def test_experts(counts, left, N, K, r):
    """Any number of tokens for each expert, and some behind them."""
    ends = [sum(counts[: i + 1]) for i in range(len(counts))]
    t = experts.mixture(len(counts), N, K, r, ends[-1] + left)
    torch.testing.assert_close(experts.ours(t, ends), experts.truth(t, ends), rtol=1e-9, atol=1e-9)
