"""dora_linear(compute="fp8"): x as 8-bit numbers, and nothing else rounded; backward that of the decoded weight."""

import dataclasses
import importlib

import pytest
import torch

from fdora import FdoraError
from fdora.eager.fp8 import through_base
from fdora.functional import (
    DoraLayer,
    DoraParams,
    dora_experts,
    dora_experts_mlp,
    dora_linear,
    dora_linear_group,
    dora_linear_multi,
    dora_mlp,
    dora_norm,
    dora_stack,
)
from fdora.quant import cut, from_mxfp8, quantize, with_transpose
from tests import device
from tests.cases import MULTIPLIED, run_case, usual
from tests.close import assert_compiles, outputs_and_gradients, rel_l2
from tests.memory import saved

S = 0.7
BLOCKS = {"tensor": None, "row": "row", "block": (128, 128), "tall block": (64, 256)}
BF16 = torch.bfloat16


def layer(kind="row", N=72, K=300, r=4, dtype=BF16, adapters=torch.float32):
    g = torch.Generator().manual_seed(0)
    W = quantize(torch.randn(N, K, generator=g) / 8, "fp8", block=BLOCKS[kind], dtype=dtype).to(device.NAME)
    A, B = ((torch.randn(shape, generator=g) / 8).to(device.NAME, adapters) for shape in ((r, K), (N, r)))
    m = (dora_norm(W, A, B, s=S) * (1 + 0.05 * torch.randn(N, generator=g).to(device.NAME))).to(adapters)
    return W, *(t.requires_grad_() for t in (A, B, m))


def x_of(*shape, K=300, dtype=BF16):
    g = torch.Generator().manual_seed(1)
    x = torch.randn(*shape, K, generator=g) * torch.rand(*shape, 1, generator=g).add(0.01) * torch.rand(K, generator=g).exp2()
    return x.to(device.NAME, dtype).requires_grad_()


def same(got, want):
    """On a GPU few tokens form x A^T another way, whose last bits differ."""
    return torch.equal(got, want) if device.NAME == "cpu" else rel_l2(got, want) < 5e-3


def slice_of_cases(name):
    """Layers of codes: x, and dz for dx alone, in 3 bits of fraction, and nothing else; dm is the derivative of what forward computed."""
    drawn = usual(device.NAME, "eager")._replace(
        dtypes=["fp16", "bf16"], largest=300, rounds=lambda *_: (True, True), kinds=MULTIPLIED
    )
    for k in range(24):
        run_case(name, f"{name} {k}", drawn)


@pytest.mark.parametrize("name", ["linear", "group", "multi", "experts"])
def test_a_slice(name):
    slice_of_cases(name)


@pytest.mark.skipif("device.NAME != 'cpu'", reason="elsewhere there is one way; runs with --device cpu")
def test_without_a_look_at_whose(monkeypatch):
    monkeypatch.setattr("fdora.eager.multi._readable", lambda bank: False)
    slice_of_cases("multi")


def members(*sizes, dtype=BF16, kinds=("row",)):
    """Layers of these (N, K), whose scales are of these kinds by turns; and their leaves."""
    found = [layer(kinds[i % len(kinds)], N, K, dtype=dtype) for i, (N, K) in enumerate(sizes)]
    return [DoraLayer(*t, S, norm=dora_norm(*t[:3], s=S)) for t in found], [leaf for t in found for leaf in t[1:]]


def alone(x, la, **how):
    return dora_linear(x, la.W, la.A, la.B, la.m, s=la.s, norm=la.norm, **how)


HOW = {"compute": "fp8", "grad_compute": "fp8"}


def experts(E, N, K, r=20, dtype=BF16):
    """A stack, and its leaves."""
    W, A, B, _ = layer("row", E * N, K, r, dtype)
    A, B = torch.stack([A.detach() * (1 + e) for e in range(E)]), B.detach().unflatten(0, (E, N))
    c = dora_norm(W, A, B, s=S)
    leaves = [t.requires_grad_() for t in (A, B, c * 1.05, torch.randn(E, N, device=device.NAME, dtype=dtype))]
    return DoraLayer(W, *leaves[:3], S, leaves[3], c), leaves


def test_mlps_of_experts():
    """As two layers with the activation between them, by ids with gates."""
    (up, first), (down, second) = experts(3, 256, 128), experts(3, 128, 128)
    x, g = x_of(130, K=128), torch.Generator().manual_seed(4)
    ids = torch.stack([torch.randperm(3, generator=g)[:2] for _ in range(130)]).to(device.NAME)
    gates = torch.rand(130, 2, generator=g).to(device.NAME)
    y, plain = (dora_experts_mlp(x, up, down, ids=ids, gates=gates, **how) for how in (HOW, {}))
    z = dora_experts(x, *up[:4], s=S, bias=up.bias, norm=up.norm, ids=ids, **HOW).flatten(0, 1)
    a = (torch.nn.functional.silu(z[:, :128].float()) * z[:, 128:].float()).to(BF16)
    each = dora_experts(a, *down[:4], s=S, bias=down.bias, norm=down.norm, ids=ids.flatten(), **HOW)
    want = (each.unflatten(0, (130, 2)) * gates[..., None]).sum(1)
    assert rel_l2(y.detach(), want.detach()) < 1e-2 < rel_l2(y.detach(), plain.detach())
    dy = torch.randn(130, 128, device=device.NAME, dtype=BF16)
    grads = [torch.autograd.grad(t, [x, *first, *second], dy.to(t.dtype)) for t in (y, want, plain)]
    assert all(rel_l2(got, as_apart) < 2e-2 for got, as_apart in zip(*grads[:2], strict=True))
    assert rel_l2(grads[0][0], grads[2][0]) > 1e-2


@pytest.mark.parametrize("kind", BLOCKS)
def test_codes_kept_transposed(kind):
    """The same numbers, and nothing is decoded from them; a cut has its part of them; other weights have none."""
    W, A, B, m = layer(kind, N=512, K=512)
    both = with_transpose(W)
    assert both.nbytes == W.nbytes + 512 * 512 and with_transpose(both) is both and list(both.named())[2] == "transposed"
    for part in (both, cut(both, rows=slice(128, 384)), cut(both, columns=slice(256, 512))):
        assert torch.equal(part.tensors[2].view(torch.uint8), part.tensors[0].view(torch.uint8).T)
        assert part.tensors[2].is_contiguous()
    x = x_of(90, K=512)
    found = [outputs_and_gradients(lambda W=W: dora_linear(x, W, A, B, m, s=S, **HOW), [x, A, B, m]) for W in (both, W)]
    assert all(map(torch.equal, *found))
    for other, have in ((quantize(W.dequantize(), "int8"), "of kind int8"), (W.dequantize(), "a Tensor")):
        with pytest.raises(FdoraError, match=f"`W` must be a QuantWeight of kind fp8, got {have}"):
            with_transpose(other)


@pytest.mark.parametrize("p", [0.0, 0.3])
def test_a_gated_mlp_rounds_what_each_layer_reads(p):
    layers, leaves = members((128, 256), (128, 256), (256, 128))
    x, dy, seeds = x_of(70, K=256), torch.randn(70, 256, device=device.NAME, dtype=BF16), [3, 4, 5]
    ys = [dora_mlp(x, *layers, dropout_p=p, seed=seeds, **how) for how in (HOW, {})]
    gate, up = (alone(x, la, dropout_p=p, seed=seed, **HOW) for la, seed in zip(layers[:2], seeds, strict=False))
    a = (torch.nn.functional.silu(gate.float()) * up.float()).to(BF16)
    ys.insert(1, alone(a, layers[2], dropout_p=p, seed=5, **HOW))
    assert rel_l2(ys[0], ys[1]) < 5e-3 < rel_l2(ys[0], ys[2])
    of = [torch.autograd.grad(y, [x, *leaves], dy) for y in ys]
    for got, want in zip(of[0], of[1], strict=True):
        assert rel_l2(got, want) < 1.5e-2
    assert rel_l2(of[0][0], of[2][0]) > 0.01


def of_powers(W):
    """W as MXFP8: e4m3 codes, and e8m0 scales of 32 columns."""
    wide = W.float().unflatten(1, (-1, 32))
    scale = torch.exp2((wide.abs().amax(2) / 448).log2().ceil())
    codes = (wide / scale[..., None]).flatten(1).to(torch.float8_e4m3fn)
    return from_mxfp8(codes, scale.to(torch.float8_e8m0fnu), dtype=W.dtype)


def rounded_to_powers(x):
    parts = []
    for part in x.double().split(32, -1):
        largest = part.abs().amax(-1, keepdim=True)
        a = torch.exp2((largest / 448).log2().ceil())
        v = part / a.where(largest > 0, 1.0)
        step = torch.exp2(v.abs().clamp_min(2.0**-6).log2().floor() - 3)
        parts.append((v / step).round() * step * a.where(largest > 0, 0.0))
    return torch.cat(parts, -1)


def rounded_to_nvfp4(x):
    """Sixteen columns share an e4m3 number, and a token has one for those."""
    whole = (x.float().abs().amax(-1, keepdim=True) / 2688).clamp_min(2.0**-126)
    parts = []
    for part in x.split(16, -1):
        a = (part.float().abs().amax(-1, keepdim=True) / 6 / whole).to(torch.float8_e4m3fn).float() * whole
        v = torch.where(a > 0, part.float() / a, 0.0)  # whose float32 may be at the middle of two codes
        step = torch.exp2(v.abs().clamp_min(1).log2().floor() - 1)
        parts.append(((v / step).round() * step).clamp(-6, 6).double() * a)
    return torch.cat(parts, -1)


def mx_layer(N, K, r, dtype=BF16, kind="mxfp8"):
    W, A, B, m = layer("row", N, K, r, dtype)
    W = W.dequantize()
    return of_powers(W) if kind == "mxfp8" else quantize(W, kind), A, B, m


# how x is rounded, and what that loses of the base product: half of it, and one and a half times
SCALED = {"mxfp8": (rounded_to_powers, 0.027), "nvfp4": (rounded_to_nvfp4, 0.095)}
ON_BLACKWELL = pytest.mark.skipif(
    "device.NAME == 'cuda' and torch.cuda.get_device_capability() < (10, 0)", reason="Blackwell has the products"
)


@ON_BLACKWELL
@pytest.mark.parametrize("kind", SCALED)
def test_scaled_products(kind):
    """They round x alone; backward is that of the decoded weight; other weights and gradients are refused."""
    W, A, B, m = mx_layer(72, 320, 4, kind=kind)
    x, c, dy = x_of(90, K=320), dora_norm(W, A, B, s=S), torch.randn(90, 72, device=device.NAME, dtype=BF16)
    with torch.no_grad():
        x[0], x[1, :64], x[2] = 0, 448 * 2.0**-9, x[2] * 2.0**-120
        x[3, 16:32] *= 2.0**-18  # an e4m3 scale of 0
    y, plain = (dora_linear(x, W, A, B, m, s=S, norm=c, compute=how) for how in (kind, None))
    of, lost = SCALED[kind]
    base = of(x.detach()) @ W.dequantize(torch.float64).T
    want = (m.double() / c.double()) * (base + S * x.double() @ A.double().T @ B.double().T)
    assert rel_l2(y.detach(), want.detach()) < 3e-3 and lost / 2 < rel_l2(y.detach(), plain.detach()) < 1.5 * lost
    assert y.isfinite().all() and (y[0] == 0).all() and rel_l2(y[2].detach(), want[2].detach()) < 1e-2
    grads = [torch.autograd.grad(t, [x, A, B], dy) for t in (y, plain)]
    assert all(map(same, *grads))
    with torch.no_grad():
        x[4, 7], x[5, 9] = float("nan"), float("inf")
    broken = dora_linear(x, W, A, B, m, s=S, norm=c, compute=kind)
    assert not broken[4:6].isfinite().any() and torch.equal(broken[6:], y[6:])
    for other in (layer("row", 72, 320)[0], quantize(W.dequantize(), "fp8", block=(1, 32))):
        with pytest.raises(
            FdoraError, match=f"`compute` must be None for a W that is not {kind.upper()}, got '{kind}' with one of kind fp8"
        ):
            dora_linear(x, other, A, B, m, s=S, compute=kind)
    with pytest.raises(FdoraError, match="`grad_compute` must be None, 'fp8' or 'mxfp8', got 'nvfp4'"):
        dora_linear(x, W, A, B, m, s=S, grad_compute="nvfp4")


@ON_BLACKWELL
def test_dx_by_scales_of_powers_of_two(monkeypatch):
    """grad_compute="mxfp8" rounds dz, and W to scales of 32 rows, which changes only what is small beside others there."""
    W, A, B, m = mx_layer(200, 320, 4)
    x, c, dy = x_of(90, K=320), dora_norm(W, A, B, s=S), torch.randn(90, 200, device=device.NAME, dtype=BF16)
    calls = [{"grad_compute": "mxfp8"}, {}]
    (dx, *rest), (plain, *others) = (
        torch.autograd.grad(dora_linear(x, W, A, B, m, s=S, norm=c, **how), [x, A, B, m], dy) for how in calls
    )
    assert all(map(same, rest, others)) and 0.01 < rel_l2(dx, plain) < 0.04
    dense, dz = W.dequantize(torch.float64), ((m / c).detach() * dy.float()).to(BF16)
    want = rounded_to_powers(dz) @ dense + S * dz.double() @ B.detach().double() @ A.detach().double()
    assert rel_l2(rounded_to_powers(dense.T).T, dense) < 1e-4 and rel_l2(dx, want) < 3e-3

    size = torch.where(torch.arange(200, device=device.NAME) % 32 == 5, 2.0**-16, 1.0)
    dense, dz = (dense * size[:, None]).to(BF16), (dz / size).to(BF16)
    want, other = (rounded_to_powers(dz) @ each for each in (rounded_to_powers(dense.T).T, dense.double()))
    monkeypatch.setattr("fdora.eager.fp8.default_bytes", lambda device: 4 * 320 * 70)  # 64 rows at a time
    assert rel_l2(through_base(dz, of_powers(dense)), want) < 1e-5 < 0.02 < rel_l2(other, want)


def test_a_row_of_zeros_a_nan_and_numbers_that_are_hardly_there():
    W, A, B, m = layer()
    x = x_of(4).detach()
    x[1], x[2, 7] = 0, float("nan")
    x[3] *= 2.0**-122  # its scale has no reciprocal, and some of it is 0
    x[3, :9] = 0
    y = dora_linear(x, W, A, B, m, s=S, compute="fp8")
    assert (y[1] == 0).all() and y[2].isnan().all() and y[[0, 3]].isfinite().all()


def test_what_is_saved_is_stored():
    W, A, B, m = layer(N=256, K=256)
    _, kept = saved(lambda: dora_linear(x_of(3, K=256), W, A, B, m, s=S, compute="fp8"))
    assert {t.data_ptr() for t in W.tensors} <= {t.data_ptr() for t in kept}
    assert not any(t.is_floating_point() and t.element_size() > 1 and t.numel() >= 256 * 256 for t in kept)


def test_autocast_and_compiled_whole():
    W, A, B, m = layer()
    x = x_of(4)
    with torch.autocast(device.NAME, BF16):
        y = dora_linear(x.float(), W, A, B, m, s=S, compute="fp8")
    want = dora_linear(x, W, A, B, m, s=S, compute="fp8")
    assert torch.equal(y, want)

    assert_compiles(lambda: dora_linear(x, W, A, B, m, s=S, **HOW), [x, A, B, m], 5e-3)


def test_what_is_refused():
    W, A, B, m = layer()
    x = x_of(3)

    def refused(match, W=W, x=x, **options):
        with pytest.raises(FdoraError, match=match):
            dora_linear(x, W, A, B, m, s=S, **{"compute": "fp8"} | options)

    refused("`compute` must be None, 'fp8', 'mxfp8' or 'nvfp4', got 'int8'", compute="int8")
    refused("not NVFP4, got 'nvfp4' with a tensor. Pass fdora.quant.quantize", W.dequantize(), compute="nvfp4")
    refused("`compute` must be None for a W that is not of e4m3 codes, got 'fp8' with a tensor", W.dequantize())
    refused("got 'fp8' with one of kind int8. Pass fdora.quant.quantize", quantize(W.dequantize(), "int8"))
    refused(r"for scales of so few columns, got 'fp8' with \(16, 32\)", quantize(W.dequantize(), "fp8", block=(16, 32)))
    refused("for an x that is not half precision, got 'fp8' with float32", W.to(torch.float32), x.float())
    refused("None for dropout_mode='peft', got 'fp8'", dropout_p=0.1, dropout_mode="peft")
    refused("`grad_compute` must be None for a W", W.dequantize(), compute=None, grad_compute="fp8")
    layers, _ = members((64, 64), (64, 64), (64, 64))
    layers[1] = layers[1]._replace(W=layers[1].W.dequantize())
    x = x_of(3, K=64)
    with pytest.raises(FdoraError, match=r"dora_linear_group: layers\[1\]: `compute` must be None for a W"):
        dora_linear_group(x, layers, compute="fp8")
    with pytest.raises(FdoraError, match="dora_mlp: up: `grad_compute` must be None for a W"):
        dora_mlp(x, *layers, grad_compute="fp8")
    dense, stack, ends = W.dequantize(), dora_stack([DoraParams(A, B, m)]), torch.tensor([3], dtype=torch.int32)
    W = quantize(torch.randn(3 * 64, 128).to(BF16), "fp8", block=(128, 128)).to(device.NAME)
    A, B, m = (torch.zeros(shape, device=device.NAME) for shape in ((3, 4, 128), (3, 64, 4), (3, 64)))
    with pytest.raises(
        FdoraError, match="dora_experts: `W` must be of blocks that end where an expert of 64 rows does, got blo"
    ):
        dora_experts(x_of(3, K=128), W, A, B, m, s=S, offsets=[1, 1, 3], compute="fp8")
    with pytest.raises(FdoraError, match="dora_linear_multi: `grad_compute` must be None for a W"):
        dora_linear_multi(x_of(3), dense, *stack, s=[S], offsets=ends.to(device.NAME), grad_compute="fp8")


def test_a_quantised_call_is_checked_once(monkeypatch):
    """As a dense one: until a tensor, or what the codes mean, is another."""
    linear = importlib.import_module("fdora.functional.linear")
    W, counted = quantize(torch.randn(128, 256, device=device.NAME, dtype=BF16), "fp8"), []
    x, A, B = (
        x_of(3, K=256),
        torch.ones(4, 256, device=device.NAME, dtype=BF16),
        torch.ones(128, 4, device=device.NAME, dtype=BF16),
    )
    m, check = torch.ones(128, device=device.NAME, dtype=BF16), linear.check_weights
    monkeypatch.setattr(linear, "check_weights", lambda *given: (counted.append(given), check(*given)))
    for w in (W, W, W, W.to(dtype=torch.float32)):
        dora_linear(x.to(w.dtype), w, A.to(w.dtype), B.to(w.dtype), m.to(w.dtype), s=S)
    assert len(counted) == 2
    with pytest.raises(FdoraError, match="`A`"):
        dora_linear(x, W, A[:, 1:], B, m, s=S)
    with pytest.raises(FdoraError):  # the same tensors, said to be another weight
        dora_linear(x, dataclasses.replace(W, shape=(128, 255)), A, B, m, s=S)
