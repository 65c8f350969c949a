"""Every function that takes W takes a QuantWeight: the numbers of its dequantised weight, and nothing dense is saved."""

import copy

import pytest
import torch

from fdora import FdoraError
from fdora.autograd import quant
from fdora.functional import (
    DoraLayer,
    dora_base_sqnorm,
    dora_linear,
    dora_linear_group,
    dora_merge,
    dora_merge_quantized,
    dora_norm,
    dora_norm_state,
    explain,
)
from fdora.quant import from_bnb_int8, from_nvfp4, opaque, quantize
from fdora.quant.quantize import bounds_of
from tests import reference
from tests.close import assert_compiles, rel_l2
from tests.memory import saved
from tests.quant.make import QUANTISED

N, K, R, S = 48, 96, 4, 0.7
KINDS = QUANTISED | {"opaque": {}}


def weight(kind="nf4", n=N, k=K, dtype=torch.float32, seed=0):
    W = torch.randn(n, k, generator=torch.Generator().manual_seed(seed)) / 8
    if kind == "opaque":
        return opaque(lambda t: t.mul(2), (n, k), dtype, "cpu", (W.to(dtype),))
    return quantize(W, kind.split()[0], dtype=dtype, **KINDS[kind])


def adapter(W, seed=1, dtype=None):
    g = torch.Generator().manual_seed(seed)
    n, k = W.shape
    A, B = torch.randn(R, k, generator=g) / 8, torch.randn(n, R, generator=g) / 8
    m = dora_norm(W, A, B, s=S) * (1 + 0.05 * torch.randn(n, generator=g))
    return [t.to(dtype or t.dtype).requires_grad_() for t in (A, B, m)]


def x_of(k=K, rows=5, dtype=torch.float32):
    return torch.randn(rows, k, generator=torch.Generator().manual_seed(2)).to(dtype).requires_grad_()


def test_rows_at_a_time(monkeypatch):
    """max_bytes is shared out: no more rows are decoded together than half of it holds."""
    from fdora.quant import QuantWeight

    W, found = weight("fp8"), []
    A, B, _ = adapter(W)
    decode = QuantWeight.dequantize

    def counting(self, dtype=None, rows=None, out=None):
        found.append(rows)
        return decode(self, dtype, rows, out)

    monkeypatch.setattr(QuantWeight, "dequantize", counting)
    dora_norm(W, A, B, s=S, max_bytes=20_000)
    assert len(found) > 1 and max(r.stop - r.start for r in found) * K * 4 <= 10_000
    assert [r.start for r in found[1:]] == [r.stop for r in found[:-1]] and found[-1].stop == N
    with pytest.raises(FdoraError, match="`max_bytes` must be at least"):
        dora_norm(W, A, B, s=S, max_bytes=100)


def test_a_function_is_called_once_for_a_norm(monkeypatch):
    """Of a kind of which some rows cost as much as all."""
    dense, calls = torch.randn(N, K), []
    W = opaque(lambda: calls.append(1) or dense, (N, K), torch.bfloat16, "cpu")
    A, B, _ = adapter(W)
    calls.clear()
    c = dora_norm(W, A, B, s=S, max_bytes=8000)
    assert len(calls) == 1
    torch.testing.assert_close(
        c.double(), reference.norm(dense, A.detach(), B.detach(), S), rtol=1e-6, atol=0
    )  # not of bfloat16
    base = dora_base_sqnorm(W, max_bytes=8000)
    assert len(calls) == 2
    bank = [torch.stack([t.detach()] * 2) for t in (A, B)]
    monkeypatch.setattr(quant, "default_bytes", lambda device: 8000)
    assert len(quant.norm_parts(W, None)) > 1
    each = dora_norm(W, *bank, s=[S, S])
    assert len(calls) == 3
    torch.testing.assert_close(each, torch.stack([c, c]), rtol=1e-6, atol=0)
    torch.testing.assert_close(base.double(), dense.double().square().sum(1), rtol=1e-6, atol=0)


def test_nothing_dense_is_saved():
    W, x = weight("nf4 nested", 256, 256), x_of(256)
    A, B, m = adapter(W)
    y, kept = saved(lambda: dora_linear(x, W, A, B, m, s=S))
    assert not any(t.is_floating_point() and t.numel() >= 256 * 256 for t in kept)
    stored = {t.data_ptr() for t in W.tensors if t is not None}
    assert stored <= {t.data_ptr() for t in kept}
    y.sum().backward()
    assert A.grad is not None


def test_a_state_reads_the_codes_when_an_adapter_changed(monkeypatch):
    from fdora.quant import QuantWeight

    W = weight()
    A, B, _ = (t.detach() for t in adapter(W))
    state = dora_norm(W, A, B, s=S, state=dora_norm_state(W))
    assert torch.equal(state.c, dora_norm(W, A, B, s=S))
    calls, decode = [], QuantWeight.dequantize
    monkeypatch.setattr(QuantWeight, "dequantize", lambda self, *a, **k: calls.append(1) or decode(self, *a, **k))
    again = dora_norm(W, A, B, s=S, state=state)
    assert torch.equal(again.c, state.c) and not calls
    B[3] += 1
    new = dora_norm(W, A, B, s=S, state=again)
    assert calls and torch.equal(new.c, dora_norm(W, A, B, s=S)) and not torch.equal(new.c, state.c)


AS_STORED = {
    **QUANTISED,
    "int8 of bitsandbytes": from_bnb_int8(
        torch.randint(-127, 128, (N, K), dtype=torch.int8), torch.rand(N), dtype=torch.float32
    ),
    "nvfp4 divided": from_nvfp4(
        *quantize(torch.randn(N, K), "nvfp4").tensors[:2], torch.tensor(3.0), divide=True, dtype=torch.float32
    ),
}


@pytest.mark.parametrize("kind", AS_STORED)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_merge_in_the_format_of_its_weight(kind, dtype, monkeypatch):
    made = AS_STORED[kind]
    W = weight(kind, dtype=dtype) if isinstance(made, dict) else made.to(dtype)
    A, B, m = adapter(W)
    m.data[5], B.data[7] = 0, 0
    with torch.no_grad():
        dense = W.dequantize(torch.float64)
        full = dense + S * B.double() @ A.double()
        exact = (m.double() / full.norm(dim=1))[:, None] * full
    merged, error = dora_merge_quantized(W, A, B, m, s=S)
    assert merged.spec == W.spec and [t.shape for t in merged.tensors] == [t.shape for t in W.tensors]
    assert [t.dtype for t in merged.tensors] == [t.dtype for t in W.tensors]
    lost = (merged.dequantize(torch.float64) - exact).norm() / exact.norm()
    torch.testing.assert_close(error.double(), lost, rtol=1e-3, atol=1e-6)
    assert error.shape == () and not error.requires_grad and 0 < error < 0.2
    # as near as quantize brings the float32 merge, which was not rounded to bfloat16 before
    how = made if isinstance(made, dict) else {}
    again = quantize(exact.float(), kind.split()[0], dtype=dtype, **how).dequantize(torch.float64)
    assert rel_l2(merged.dequantize(torch.float64), exact) <= 1.001 * rel_l2(again, exact)
    monkeypatch.setitem(bounds_of.__globals__, "CHUNK", 7 * K)
    again, in_parts = dora_merge_quantized(W, A, B, m, s=S, norm=dora_norm(W, A, B, s=S))
    torch.testing.assert_close(again.dequantize(), merged.dequantize(), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(in_parts, error, rtol=1e-3, atol=0)


def test_a_merge_forms_few_dense_rows_at_a_time(monkeypatch):
    from fdora.quant import QuantWeight

    W, found, decode = weight("fp8"), [], QuantWeight.dequantize
    A, B, m = adapter(W)
    c = dora_norm(W, A, B, s=S)
    monkeypatch.setitem(bounds_of.__globals__, "CHUNK", 16 * K)
    monkeypatch.setattr(QuantWeight, "dequantize", lambda self, *a, **k: found.append(decode(self, *a, **k)) or found[-1])
    dora_merge_quantized(W, A, B, m, s=S, norm=c)
    assert {len(t) for t in found} == {16}


def test_compiled_whole():
    W, x = weight("nf4 nested"), x_of()
    A, B, m = adapter(W)
    c = dora_norm(W, A, B, s=S)

    assert_compiles(lambda: dora_linear(x, W, A, B, m, s=S, norm=c), [x, A, B, m], 1e-6)


def test_a_bank_of_adapters_by_vmap():
    W, x = weight(), x_of().detach()
    banks = [torch.stack([t.detach() for t in each]) for each in zip(adapter(W, 1), adapter(W, 2), strict=True)]
    got = torch.vmap(lambda A, B, m: dora_linear(x, W, A, B, m, s=S))(*banks)
    for i in range(2):
        torch.testing.assert_close(got[i], dora_linear(x, W, *(b[i] for b in banks), s=S))


def test_explain_in_plain_torch():
    W, x = weight("nf4 nested", 256, 256), x_of(256)
    A, B, m = adapter(W)
    said = explain(dora_linear, x, W, A, B, m, s=S)
    note, stored = said.notes
    assert said.backend == "eager" and "decoded for forward and again for backward" in note
    assert stored == f"W: nf4, (256, 256): 0.03 MiB stored, {W.nbytes / 2**16:.3f} bytes a weight; 0.25 MiB in float32"
    la = DoraLayer(W, A, B, m, S)
    group = explain(dora_linear_group, x, [DoraLayer(W.dequantize()), la]).notes
    assert [each.partition(":")[0] for each in group[1:]] == ["layers[1].W"]
    assert "W is decoded some rows at a time." in explain(dora_norm, W, A, B, s=S).notes[0]
    assert "some rows at a time for the norm" in explain(dora_merge, W, A, B, m, s=S).notes[0]
    whole = weight("opaque", 256, 256)  # its function is called once
    assert "W is decoded once, as a whole." in explain(dora_norm, whole, A, B, s=S).notes[0]
    bank = [torch.stack([t.detach()] * 2) for t in (A, B)]
    assert "W is decoded once, as a whole." in explain(dora_norm, whole, *bank, s=[S, S]).notes[0]
    assert "W is decoded, once, as a whole for the norm." in explain(dora_merge, whole, A, B, m, s=S).notes[0]
    assert explain(dora_linear, x, W.dequantize(), A, B, m, s=S).notes == ("Plain torch runs: it has no plan.",)


def test_what_is_refused():
    W, x = weight(), x_of()
    A, B, m = adapter(W)
    with pytest.raises(FdoraError, match=r"`detach` must be True for a quantised W, got False\. Pass W\.dequantize\(\)\."):
        dora_norm(W, A, B, s=S, detach=False)
    with pytest.raises(FdoraError, match="`norm_axis` must be 1 for a quantised W, got 0"):
        dora_norm(W, A, B, s=S, norm_axis=0)
    with pytest.raises(FdoraError, match="`x` must be float32, got bfloat16"):
        dora_linear(x.bfloat16(), W, A, B, m, s=S)
    with pytest.raises(FdoraError, match=r"`A` must be \(r, K\) with K=96"):
        dora_linear(x, W, torch.randn(R, 8), B, m, s=S)
    with pytest.raises(FdoraError, match=r"`x` must be a torch\.Tensor, got a QuantWeight"):
        dora_linear(W, W, A, B, m, s=S)
    with pytest.raises(FdoraError, match=r"`W` must be a QuantWeight, got a Tensor. Pass dora_merge\(...\) to fdora.quant"):
        dora_merge_quantized(W.dequantize(), A, B, m, s=S)
    with pytest.raises(FdoraError, match=r"`W` must be of kind nf4, .* got opaque of .* with the library that made W"):
        dora_merge_quantized(weight("opaque"), A, B, m, s=S)
    other = copy.deepcopy(W)
    assert torch.equal(dora_norm(other, A, B, s=S), dora_norm(W, A, B, s=S))
