"""Against torchao, 0.14 beside torchtune or newer: bit for bit what it dequantises. Run by test_torchao.py in a process of its own."""

import pytest
import torch
import torchao.quantization as ao

from fdora._check import FdoraError
from fdora.quant import from_torchao, quantize

try:
    from torchao.dtypes.nf4tensor import to_nf4  # 0.14
except ImportError:
    from torchao.quantization import to_nf4
mx = pytest.importorskip(
    "torchao.prototype.mx_formats.mx_tensor", reason="this torchao has no MXTensor; runs with 0.14, as in `make test`"
)
DTYPES = (torch.float32, torch.bfloat16)


def linear(N=256, K=384, dtype=torch.bfloat16):
    return torch.nn.Linear(K, N, bias=False, dtype=dtype)


def same(q, want):
    assert q.shape == tuple(want.shape) and q.dtype == want.dtype
    assert torch.equal(q.dequantize(), want) and torch.equal(q.dequantize(rows=slice(3, 37)), want[3:37])
    assert all(type(t) is torch.Tensor and not t.requires_grad for t in q.tensors)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16], ids=str)
@pytest.mark.parametrize("N, K", [(64, 512), (512, 96)])
def test_nf4(N, K, dtype):
    t = to_nf4(torch.randn(N, K).to(dtype))
    q = from_torchao(t)
    assert q.kind == "torchao_nf4" and q.facts == (64, 256) and q.tensors[0].data_ptr() == t.quantized_data.data_ptr()
    same(q, t.get_original_weight())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("granularity", [ao.PerRow(), ao.PerTensor()], ids=lambda g: type(g).__name__)
def test_float8(granularity, dtype):
    from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor

    make = getattr(Float8Tensor, "from_hp", None) or Float8Tensor.to_float8
    t = make(linear(dtype=dtype).weight.detach(), granularity=granularity)
    q = from_torchao(t)
    assert q.kind == "fp8" and q.facts.scale == {"PerRow": "row", "PerTensor": "tensor"}[type(granularity).__name__]
    same(q, t.dequantize())


def test_float8_blocks():
    from torchao.quantization.quantize_.workflows.float8.float8_tensor import Float8Tensor

    W = torch.randn(256, 384)
    ours = quantize(W, "fp8", block=(128, 128))
    codes, scales = ours.tensors
    t = Float8Tensor(codes, scales, block_size=[128, 128], dtype=torch.bfloat16)
    q = from_torchao(t)
    assert q.facts == ("e4m3", "block", (128, 128), 1.0, False)
    same(q, t.dequantize())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("symmetric", [True, False])
def test_int8(dtype, symmetric):
    module = "torchao.quantization.quantize_.workflows.int8.int8_tensor"
    Int8Tensor = pytest.importorskip(
        module, reason="this torchao has no Int8Tensor; runs with 0.18, as in `make test`"
    ).Int8Tensor
    kind = ao.MappingType.SYMMETRIC if symmetric else ao.MappingType.ASYMMETRIC
    for granularity, scale in ((ao.PerRow(), "row"), (ao.PerTensor(), "tensor"), (ao.PerGroup(128), "block")):
        t = Int8Tensor.from_hp(torch.randn(256, 384).to(dtype) + 0.3, granularity, mapping_type=kind)
        q = from_torchao(t)
        assert q.kind == ("int8" if symmetric else "affine") and (not symmetric or q.facts.scale == scale)
        assert q.tensors[0].data_ptr() == t.qdata.data_ptr()
        same(q, t.dequantize())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_intx(dtype):
    IntxUnpackedToInt8Tensor = ao.IntxUnpackedToInt8Tensor
    make = IntxUnpackedToInt8Tensor.from_hp
    W = torch.randn(64, 128).to(dtype)
    for mapping in (ao.MappingType.SYMMETRIC, ao.MappingType.ASYMMETRIC):
        t = make(W, (1, 32), torch.int4, mapping_type=mapping)
        same(from_torchao(t), t.dequantize())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_mxfp4(dtype):
    W = torch.randn(64, 128).to(dtype)
    W[3], W[4, :32] = 0, 0
    t = mx.MXTensor.to_mx(W, torch.float4_e2m1fn_x2, 32)
    ours = quantize(W, "mxfp4")
    if hasattr(t, "is_swizzled_scales"):
        assert torch.equal(ours.tensors[0], t.qdata) and torch.equal(ours.tensors[1], t.scale.view(torch.uint8))
        same(from_torchao(t), t.dequantize())
        assert torch.equal(ours.dequantize(), t.dequantize())
    else:  # 0.14 had the nibbles the other way round, and other names for its tensors
        with pytest.raises(FdoraError, match="MXTensor"):
            from_torchao(t)


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nvfp4(dtype, whole):
    nv = pytest.importorskip(
        "torchao.prototype.mx_formats.nvfp4_tensor", reason="this torchao has no NVFP4Tensor; runs with 0.14, as in `make test`"
    )
    W = torch.randn(64, 128).to(dtype)
    scale = W.float().abs().max() / (448 * 6) if whole else None
    make = getattr(nv.NVFP4Tensor, "to_nvfp4", None)
    t = make(W, per_tensor_scale=scale)
    if not hasattr(t, "is_swizzled_scales"):
        with pytest.raises(FdoraError, match="NVFP4Tensor"):
            from_torchao(t)
        return
    same(from_torchao(t), t.dequantize(dtype))
    if whole:
        ours = quantize(W, "nvfp4")
        assert torch.equal(ours.tensors[1].float(), t.scale.view_as(ours.tensors[1]).float())
        assert (ours.tensors[0] != t.qdata).float().mean() < 1e-2  # at ties, to a rounding


def test_int4_and_what_it_does_not_dequantise_are_refused():
    weight = torch.nn.Parameter(torch.ones(4, 4))
    with pytest.raises(FdoraError, match=r"got a torch\.nn\.parameter\.Parameter"):
        from_torchao(weight)
