"""Experts of codes in plain torch, their stacks as checkpoints hold them, and what is refused."""

import types

import pytest
import torch

from fdora import FdoraError
from fdora.autograd import quant as of_quant
from fdora.functional import DoraLayer, dora_experts, dora_experts_mlp, dora_norm
from fdora.quant import from_bnb, from_fp8, from_mxfp4, opaque, quantize
from tests.checks.experts import S, mixture
from tests.close import rel_l2
from tests.memory import saved

E, N, K = 3, 32, 64


def test_backward_keeps_the_codes_alone():
    t = mixture(E, N, K, 2, 7, torch.float32)
    q, x = quantize(t["W"].flatten(0, 1), "mxfp4").to(torch.float32), t["x"].requires_grad_()
    _, kept = saved(lambda: dora_experts(x, q, t["A"], t["B"], t["m"], s=S, offsets=[3, 5, 7]))
    assert max(each.untyped_storage().nbytes() for each in kept) < 4 * N * K  # one dense expert


def test_stacks_as_checkpoints_hold_them():
    """gpt-oss's blocks and scales, bitsandbytes' parameter of three axes, DeepSeek's blocks, a number for each expert."""
    W = torch.randn(E, N, K)
    flat = quantize(W.flatten(0, 1), "mxfp4")
    codes, scales = flat.tensors
    whole = from_mxfp4(codes.view(E, N, K // 32, 16), scales.view(E, N, K // 32))
    assert whole.shape == (E * N, K) and torch.equal(whole.dequantize(), flat.dequantize())
    flat = quantize(W.flatten(0, 1), "nf4")
    facts = {"shape": W.shape, "blocksize": 64, "quant_type": "nf4", "dtype": torch.float32}
    state = types.SimpleNamespace(**facts, absmax=flat.tensors[1], state2=None, offset=None)
    assert torch.equal(from_bnb(flat.tensors[0], state).dequantize(), flat.dequantize())
    codes = W.to(torch.float8_e4m3fn)
    blocks, each = torch.rand(E, N // 16, K // 32), torch.rand(E)
    want = torch.cat([from_fp8(codes[e], blocks[e], (16, 32)).dequantize() for e in range(E)])
    assert torch.equal(from_fp8(codes, blocks, (16, 32)).dequantize(), want)
    want = torch.cat([from_fp8(codes[e], each[e]).dequantize() for e in range(E)])
    for scale in (each, each[:, None, None]):
        assert torch.equal(from_fp8(codes, scale).dequantize(), want)
    rows = torch.rand(E, N)
    for scale in (rows, rows[..., None]):
        assert torch.equal(
            from_fp8(codes, scale, "row").dequantize()[N : 2 * N], from_fp8(codes[1], rows[1], "row").dequantize()
        )
    with pytest.raises(FdoraError, match="`block` must be of rows that divide the 32 of an expert, got \\(24, 32\\)"):
        from_fp8(codes, torch.rand(E, 2, 2), (24, 32))
    for block in ((0, 32), ("16", 32), 16):
        with pytest.raises(FdoraError, match=r"`block` must be None, 'row' or \(bn, bk\), got"):
            from_fp8(codes, blocks, block)
    with pytest.raises(FdoraError, match=r"`scale` must be a torch\.Tensor, got a NoneType"):
        from_fp8(codes, None)
    with pytest.raises(FdoraError, match=r"`codes` must be a torch\.Tensor, got a NoneType"):
        from_mxfp4(None, None)


def test_other_shapes_are_refused():
    t = mixture(E, N, K, 2, 7, torch.float32)
    q = quantize(t["W"][:2].flatten(0, 1), "int8").to(torch.float32)
    args = t["A"], t["B"]
    words = r"dora_experts: `W` must be a QuantWeight of \(96, 64\), 3 experts of 32 rows, got \(64, 64\)"
    with pytest.raises(FdoraError, match=words):
        dora_experts(t["x"], q, *args, t["m"], s=S, offsets=[1, 2, 7])
    up, down = DoraLayer(t["W"], *args, t["m"], S), DoraLayer(t["W"][:, :, : N // 2], t["A"][:, :, : N // 2], t["B"], t["m"], S)
    for name, layers in {"gate_up": (up._replace(W=None), down), "down": (up, down._replace(W=[1]))}.items():
        with pytest.raises(FdoraError, match=rf"dora_experts_mlp: {name}: `W` must be a torch.Tensor, got (None|a list)\."):
            dora_experts_mlp(t["x"], *layers, offsets=[1, 2, 7])
    with pytest.raises(FdoraError, match="`detach` must be left out for a stack of experts"):
        dora_norm(quantize(t["W"].flatten(0, 1), "int8").to(torch.float32), *args, s=S, detach=False)


def counted(W):
    """A stack as a function that gives all of it, and its calls."""
    calls = []
    flat = W.flatten(0, 1)
    return opaque(lambda: calls.append(1) or flat.clone(), flat.shape, W.dtype, "cpu"), calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ends", [[5, 5, 9], [3, 7, 12], [0, 0, 4]], ids=str)
def test_a_function_is_called_once_for_all_experts(dtype, ends, monkeypatch):
    """In the norms, forward and backward. Each expert has the bits of a call of its own, those of nobody zeros."""
    t = mixture(E, N, K, 2, 12, dtype, torch.float32, spread=0.02)
    q, calls = counted(t["W"])
    leaves = {n: t[n].requires_grad_() for n in ("x", "A", "B", "m", "bias")}
    monkeypatch.setattr(of_quant, "default_bytes", lambda device: 4000)  # a norm takes several runs of rows
    c = dora_norm(q, t["A"], t["B"], s=S)
    assert len(calls) == 1

    def call(W, norm, **where):
        return dora_experts(t["x"], W, *(t[n] for n in "ABm"), s=S, bias=t["bias"], norm=norm, **(where or {"offsets": ends}))

    found = []
    for W, counts in ((q, (2, 3)), (t["W"], (3, 3))):
        y = call(W, c)
        assert len(calls) == counts[0]
        found.append([y, *torch.autograd.grad(y.float().square().sum(), list(leaves.values()))])
        assert len(calls) == counts[1]
    for name, got, want in zip(("y", *leaves), *found, strict=True):
        assert torch.equal(got, want), name
    assert rel_l2(call(q, None), found[0][0]) <= 0.0 and len(calls) == 5  # its norm, and the product
    with torch.no_grad():
        call(q, c, ids=torch.arange(12)[:, None] % E)
    assert len(calls) == 6


def test_a_function_under_transforms():
    """There a loop over the experts remains."""
    t = mixture(E, N, K, 2, 12, torch.float32)
    q, _ = counted(t["W"])
    c = dora_norm(q, t["A"], t["B"], s=S)

    def of(W):
        return lambda x, A: dora_experts(x, W, A, t["B"], t["m"], s=S, norm=c, offsets=[3, 7, 12])

    got, want = torch.func.vjp(of(q), t["x"], t["A"]), torch.func.vjp(of(t["W"]), t["x"], t["A"])
    assert torch.equal(got[0], want[0])
    for a, b in zip(got[1](got[0]), want[1](want[0]), strict=True):
        assert torch.equal(a, b)
    xs = torch.stack([t["x"], t["x"].flip(0)])
    mapped = torch.vmap(lambda x: of(q)(x, t["A"]))(xs)
    assert torch.allclose(mapped[1], of(q)(xs[1], t["A"]), atol=1e-5)
    compiled = torch.compile(of(q), backend="aot_eager")
    assert torch.allclose(compiled(t["x"], t["A"]), got[0], atol=1e-5)
