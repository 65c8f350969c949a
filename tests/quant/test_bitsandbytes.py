"""Against bitsandbytes itself, on a CPU, where two faults of version 0.50 are stepped around.

Its AVX-512 code dequantises wrongly where K % 16 == 0 and K is no multiple of the block: such shapes are only compared with our own
loops. And a Linear4bit that ran in eval mode on a CPU has its weight repacked in place: no layer here runs.
"""

import pytest
import torch

from fdora._check import FdoraError
from fdora.quant import from_bnb, from_bnb_int8, quantize
from fdora.quant.quantize import dynamic_map
from tests import device
from tests.quant.make import State

bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes; `make test` installs it")
F = bnb.functional
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def equal(a, b):
    return a.dtype == b.dtype and torch.equal(a, b)


@pytest.mark.parametrize("storage", [torch.uint8, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("N, K, group", [(5, 256, 64), (77, 128, 128), (300, 64, 32)])
def test_four_bits(kind, dtype, nested, storage, N, K, group):
    W = torch.randn(N, K, device=device.NAME).to(dtype)
    packed, state = F.quantize_4bit(W, blocksize=group, quant_type=kind, compress_statistics=nested, quant_storage=storage)
    q = from_bnb(packed, state)
    assert (q.kind, q.shape, q.dtype) == (kind, (N, K), dtype)
    assert q.facts == (kind, True, group, "nested" if nested else "fp32", "flat")
    assert list(q.named()) == ["codes", "scales", "code256", "scales2", "offset"][: 5 if nested else 2]
    assert equal(q.dequantize(), F.dequantize_4bit(packed, state))
    assert q.tensors[0].data_ptr() == packed.data_ptr() and q.tensors[1].data_ptr() == state.absmax.data_ptr()


@pytest.mark.parametrize("N, K", [(7, 50), (3, 33)])
def test_blocks_that_cross_rows(N, K):
    packed, state = F.quantize_4bit(torch.randn(N, K, device=device.NAME), quant_type="nf4")  # K % 16 != 0: its scalar code
    assert equal(from_bnb(packed, state).dequantize(), F.dequantize_4bit(packed, state))


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_our_quantiser_is_its(kind, nested, dtype):
    W = torch.randn(130, 256, device=device.NAME).to(dtype)
    W[3] = 0
    W[4, :64] = 0
    packed, state = F.quantize_4bit(W, quant_type=kind, compress_statistics=nested)
    ours, theirs = quantize(W, kind, nested=nested), from_bnb(packed, state)
    assert ours.spec == theirs.spec
    # A value at the middle of two codes, to a rounding, may take either; everything else is the same but for codes without a
    # value: of 0 and -0, and of groups whose scale is 0, a GPU gives others than a CPU.
    # A nested scale of such a group is not quite 0, and shows that code.
    mixed = theirs.spec.weight((ours.tensors[0], *theirs.tensors[1:]))
    has_scale = W.reshape(-1, 64).any(1, keepdim=True).expand(-1, 64).reshape(W.shape)
    assert (mixed.dequantize(torch.float32) != theirs.dequantize(torch.float32))[has_scale].float().mean() < 1e-3
    for a, b in zip(ours.tensors[2:], theirs.tensors[2:], strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(ours.tensors[1].float(), theirs.tensors[1].float(), rtol=0, atol=0 if not nested else 1)
    for q in (ours, theirs):
        assert ((q.dequantize(torch.float32) - W.float()).norm() / W.float().norm()) < {"nf4": 0.1, "fp4": 0.13}[kind]


def test_the_map_of_scales():
    theirs = F.create_dynamic_map().to(device.NAME)
    assert torch.equal(dynamic_map(torch.device(device.NAME)), theirs)


def test_int8():
    W = torch.randn(33, 50, device=device.NAME).half()
    codes, scb, _ = F.int8_vectorwise_quant(W)
    q = from_bnb_int8(codes, scb)
    assert (q.kind, q.dtype, q.facts) == ("int8", torch.float16, ("int8", "row", (0, 0), 7.874015718698502e-3, False))
    want = F.int8_vectorwise_dequant(codes, scb)
    assert equal(q.dequantize(torch.float32), want.float()) and equal(q.dequantize(), want.half())
    layer = bnb.nn.Linear8bitLt(50, 33, has_fp16_weights=False)
    layer.weight = bnb.nn.Int8Params(W.cpu(), requires_grad=False, has_fp16_weights=False)
    with pytest.raises(FdoraError, match=r"int8 with float32 `scb`.*quantises it"):
        from_bnb_int8(layer.weight)
    weight = layer.to(device.NAME).weight
    assert torch.equal(from_bnb_int8(weight).dequantize(torch.float32), want)


def test_a_weight_that_was_packed_for_the_cpu_is_refused():
    packed, state = F.quantize_4bit(torch.randn(64, 64, device=device.NAME), quant_type="nf4")
    state.packing_format_for_cpu = True
    with pytest.raises(FdoraError, match=r"packed for the CPU.*Load the layer anew"):
        from_bnb(packed, state)


def good(**changes):
    fields = {"absmax": torch.ones(2), "shape": (2, 64), "blocksize": 64, "quant_type": "nf4", "dtype": torch.bfloat16}
    return State(**fields | changes)


BYTES = torch.zeros(64, 1, dtype=torch.uint8)
OUTER = State(torch.ones(1), blocksize=256, code=torch.ones(256))


@pytest.mark.parametrize(
    ("weight", "state", "says"),
    [
        (BYTES, None, "`weight` must be a quantised Params4bit.*layer.quant_state"),
        (BYTES, object(), "Params4bit"),
        ([1], good(), "Params4bit"),
        (BYTES, good(quant_type="int4"), "`quant_state.quant_type` must be nf4 or fp4, got 'int4'"),
        (BYTES, good(shape=(1, 1, 2, 64)), r"\(N, K\)"),
        (BYTES, good(dtype=torch.uint8), "`quant_state.dtype`"),
        (BYTES, good(blocksize=63), "an even number"),
        (BYTES[:63], good(), r"64 bytes for its shape \(2, 64\), got 63 bytes"),
        (torch.zeros(65, dtype=torch.uint8), good(), "got 65 bytes"),
        (BYTES, good(absmax=torch.ones(3)), r"`quant_state.absmax` must be of shape \(2,\), got \(3,\)"),
        (BYTES, good(absmax=torch.ones(2).half()), "`quant_state.absmax` must be float32"),
        (BYTES, good(state2=OUTER), "`quant_state.absmax` must be uint8"),
        (BYTES, good(state2=State(torch.ones(1), blocksize=128), absmax=torch.ones(2).byte()), "must be 256, got 128"),
        (BYTES, good(state2=OUTER, absmax=torch.ones(2).byte()), "`quant_state.offset` must be a torch.Tensor"),
        (torch.zeros(64, 2, dtype=torch.uint8)[:, :1], good(), "contiguous"),
        (BYTES.int(), good(), "`weight` must be uint8 or bfloat16"),
    ],
)
def test_errors(weight, state, says):
    with pytest.raises(FdoraError, match=says):
        from_bnb(weight, state)


def test_errors_of_int8():
    with pytest.raises(FdoraError, match="scb"):
        from_bnb_int8(torch.zeros(2, 3, dtype=torch.int8))
    with pytest.raises(FdoraError, match=r"`scb` must be of shape \(2,\)"):
        from_bnb_int8(torch.zeros(2, 3, dtype=torch.int8), torch.ones(3))
    with pytest.raises(FdoraError, match="`weight` must be int8"):
        from_bnb_int8(torch.zeros(2, 3), torch.ones(2))
