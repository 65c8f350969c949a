"""What dora_linear promises."""

import itertools

import torch

from fdora.eager.dropout import drop
from fdora.functional import (
    DoraLayer,
    dora_compose,
    dora_embedding,
    dora_linear,
    dora_linear_group,
    dora_linear_multi,
    dora_norm,
    dora_scale,
)
from tests import device, reference
from tests.close import rel_l2, rms
from tests.make import grads, tensors, tracked

P, SEED = 0.4, 11
DROPOUT = {
    "none": {},
    "lora": {"dropout_p": P, "dropout_mode": "lora", "seed": SEED},
    "peft": {"dropout_p": P, "dropout_mode": "peft", "seed": SEED},
}


def dropped(x):
    """D(x) for the seed above, on any leading axes."""
    return drop(x.reshape(-1, x.shape[-1]), torch.tensor(SEED, device=x.device), P).reshape(x.shape)


def truth(t, mode, bias, c=None):
    return reference.dora(t["x"], t["W"], t["A"], t["B"], t["m"], t["s"], bias, c, None if mode == "none" else dropped, mode)


def call(t, mode="none", **extra):
    return dora_linear(t["x"], t["W"], t["A"], t["B"], t["m"], s=t["s"], **DROPOUT[mode], **extra)


def is_at_the_rounding_floor():
    """bf16 at g near 1 (std 0.0015): one rounding of the output, as if everything before it were exact."""
    for kind_of_bias in (False, True):
        t = tensors(512, 768, 16, (256,), torch.bfloat16, spread=0.0015, s=2.0)
        t["m"] = t["m"].float()
        bias = t["bias"] if kind_of_bias else None
        got = rel_l2(call(t, bias=bias), truth(t, "none", bias))
        assert got <= 1.7e-3, got


def float32_adapters_keep_float32_gradients():
    """dA, dB, dm of float32 parameters on bf16 activations do not pass through bf16: they are no bf16 numbers."""
    t = tracked(tensors(40, 64, 8, (33,), torch.bfloat16, torch.float32), "A", "B", "m")
    for n, d in grads(call(t).float().square().sum(), None, A=t["A"], B=t["B"], m=t["m"]).items():
        assert (d.bfloat16().float() != d).float().mean() > 0.9, n


def dm_survives_a_magnitude_that_underflows():
    """Where g, or the output that it scales, is next to nothing in the dtype of y."""
    for dtype, size in ((torch.bfloat16, 1e-39), (torch.float16, 1e-6)):
        t = tensors(48, 64, 8, (128,), dtype, torch.float32)
        t["m"][::3] *= size
        t = tracked(t, "m")
        y, want = call(t), truth(t, "none", None)
        dy = torch.randn_like(y)
        (got,), (ref,) = (torch.autograd.grad(v, t["m"], dy.to(v.dtype)) for v in (y, want))
        assert rel_l2(got[::3], ref[::3]) <= 1e-3, (dtype, rel_l2(got[::3], ref[::3]))


def dm_read_beside_a_bias_loses_its_bound(backend="auto", dtypes=(torch.bfloat16, torch.float32), tokens=(40, 300)):
    """The bound of fdora/eager/linear.py, column by column, and what a kept inner would lose, by the size of the bias.

    Qwen2.5's k has a bias of about the size of the product in most columns and of hundreds in some. Columns of equal sizes
    stand side by side: 4 are read, 400 formed again, where tokens differ in size both in one column.
    """
    N, K, sizes = 96, 32, (0.0, 0.5, 2.0, 8.0, 60.0, 400.0)
    for dtype, M, uneven in itertools.product(dtypes, tokens, (False, True)):
        t = tensors(N, K, 8, (M,), dtype, torch.float32, spread=0.3)
        t["m"][5::24] = 0
        bias = (torch.tensor(sizes).repeat_interleave(N // len(sizes)) * torch.randn(N).sign()).to(t["x"])
        if uneven:
            t["x"] = t["x"] * torch.logspace(-2, 1, M).to(t["x"])[:, None]
        t = tracked(t, "m")
        want = truth(t, "none", bias)
        dy = torch.randn(M, N).to(t["x"])
        (ref,) = torch.autograd.grad(want, t["m"], dy.double())
        read, kept = (
            torch.autograd.grad(call(t, bias=bias, backend=backend, keep_inner=keep), t["m"], dy)[0].double()
            for keep in (False, True)
        )
        c = reference.norm(t["W"], t["A"], t["B"], t["s"])
        v = truth(t | {"m": c}, "none", None)
        u = torch.finfo(dtype).eps / 2
        bound = u * (dy.double() * v).abs().sum(0) / c
        # k / (1 - k u) of it, and one for h, which is rounded as well
        over = ((read - ref).abs() / (6 * bound)).max().item()
        assert over <= 1, (dtype, M, uneven, over)
        for size, a, b in zip(sizes, (read - ref).view(len(sizes), -1), (kept - ref).view(len(sizes), -1), strict=True):
            assert rms(a) <= 4 * rms(b), (dtype, M, uneven, size, rms(a) / rms(b))


def an_infinite_bias_keeps_dm():
    """-inf takes an output out of a softmax, whose gradient is 0 there: dm is 0 and not 0 times infinity."""
    for dtype, dead in itertools.product((torch.float16, torch.float32), (0.0, 1.0)):
        t = tracked(tensors(12, 24, 4, (70,), dtype, torch.float32), "m")
        bias = torch.zeros(12).to(t["x"])
        bias[3::4], bias[2] = float("-inf"), float("inf")
        dy = torch.randn(70, 12).to(t["x"]) * (dead + bias.isfinite())
        (want,) = torch.autograd.grad(truth(t, "none", torch.zeros_like(bias)), t["m"], dy.double())
        (got,) = torch.autograd.grad(call(t, bias=bias), t["m"], dy)
        assert rel_l2(got, want) <= 8 * torch.finfo(dtype).eps, (dtype, dead)


def an_empty_row_of_float16_touches_no_other(backend="auto"):
    """W = 0 and B = 0 in a row whose m is not 0: g = m / eps is beyond float16, and all but that row is as with m = 0."""
    how = {"s": 0.7, "backend": backend}
    calls = {mode: lambda t, mode=mode: call(t, mode, backend=backend) for mode in DROPOUT}
    calls["group"] = lambda t: dora_linear_group(t["x"], [DoraLayer(*(t[n] for n in "WABm"), 0.7)] * 2, backend=backend)[1]
    calls["multi"] = lambda t: dora_linear_multi(
        *(t["x"], t["W"], t["A"][None], t["B"][None], t["m"][None]),
        **(how | {"s": [0.7]}),
        offsets=torch.tensor([len(t["x"])], device=device.NAME, dtype=torch.int32),
    )
    calls["compose"] = lambda t: dora_compose(
        *(t["x"] @ t["W"].T, t["x"] @ t["A"].T @ t["B"].T, dora_scale(t["m"], dora_norm(t["W"], t["A"], t["B"], s=0.7))), **how
    )
    calls["embedding"] = lambda t: dora_embedding(
        *(torch.arange(40, device=device.NAME), t["W"].T.contiguous(), t["A"], t["B"], t["m"]), **how
    )
    for (name, function), M in itertools.product(calls.items(), (5, 90)):
        found, names = [], ("A", "B", "m") if name == "embedding" else ("x", "A", "B", "m")
        for m in (0.0, 1.0):
            t = tensors(24, 40, 8, (M,), torch.float16, torch.float16)
            t["W"][7] = t["B"][7] = 0
            t["m"][7] = m
            t = tracked(t, *names)
            y = function(t)
            dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
            found.append(grads(y, dy, **{n: t[n] for n in names}))
        for n in names:
            rows = torch.arange(len(t[n])) != (7 if n in ("B", "m") else -1)
            assert torch.equal(found[0][n][rows], found[1][n][rows]), (name, M, n)


def float16_that_overflows_is_seen():
    """By loss scaling: where g is an ordinary one, dz is inf, and so are the gradients that it reaches."""
    t = tracked(tensors(24, 40, 8, (5,), torch.float16, torch.float16), "x", "A")
    t["m"][3] = 100.0
    found = grads(call(t), torch.full((5, 24), 1e4, dtype=torch.float16, device=device.NAME), x=t["x"], A=t["A"])
    assert not any(d.isfinite().any() for d in found.values())


CHECKS = [
    is_at_the_rounding_floor,
    float32_adapters_keep_float32_gradients,
    dm_survives_a_magnitude_that_underflows,
    dm_read_beside_a_bias_loses_its_bound,
    an_infinite_bias_keeps_dm,
    an_empty_row_of_float16_touches_no_other,
    float16_that_overflows_is_seen,
]
