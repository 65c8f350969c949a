"""What holds of every kind: the value, rows, out, dtypes, spec, trees, copies, files, compiled code."""

import copy
import dataclasses
import io
import pickle

import optree
import pytest
import torch

from fdora._check import FdoraError
from fdora.quant import (
    SAFE,
    Lut4,
    Opaque,
    QuantWeight,
    from_awq,
    from_bnb,
    from_bnb_int8,
    from_fp8,
    from_gptq,
    from_hqq,
    from_int8,
    from_mxfp4,
    from_nvfp4,
    opaque,
    quantize,
    register_kind,
)
from fdora.quant.weight import KINDS
from tests import device
from tests.quant.make import CASES, State, twice

every = pytest.mark.parametrize("case", CASES)
# one of each way to decode, for what takes long
SOME = ("nf4 across rows", "nf4 nested across rows", "mxfp4", "nvfp4", "bnb int8", "fp8 ragged block", "hqq 4 bits axis 1")
SOME += ("hqq 4 bits axis 0", "gptq", "awq", "opaque")
some = pytest.mark.parametrize("case", SOME)


@every
def test_value(case):
    W, truth = CASES[case]()
    assert W.shape == tuple(truth.shape) and W.dtype == torch.float32 and W.device == truth.device
    D = W.dequantize()
    assert D.shape == truth.shape and D.dtype == torch.float32 and not D.requires_grad
    size = truth.nan_to_num().abs().max().item()
    torch.testing.assert_close(D.double(), truth, rtol=5e-7, atol=3e-7 * size, equal_nan=True)
    assert truth.nan_to_num().abs().max() > 0


@every
def test_rows_are_those_of_the_whole(case):
    W, _ = CASES[case]()
    D, N = W.dequantize(), W.shape[0]
    some_rows = [slice(i, j) for i in range(0, N, max(1, N // 5)) for j in range(i, N + 1, max(1, N // 4))]
    for rows in (*some_rows, slice(N - 1, None), slice(-2, None), slice(3, 2), slice(0, 10**9), slice(None)):
        part = W.dequantize(rows=rows)
        assert part.shape == D[rows].shape and torch.equal(part.nan_to_num(7), D[rows].nan_to_num(7)), rows


@every
def test_out_and_dtype(case):
    W, _ = CASES[case]()
    D = W.dequantize().nan_to_num(7)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        assert torch.equal(W.dequantize(dtype).nan_to_num(7), W.dequantize().to(dtype).nan_to_num(7))
        assert torch.equal(W.to(dtype).dequantize().nan_to_num(7), W.dequantize().to(dtype).nan_to_num(7))
    out = torch.full((W.shape[1], 2), 3.0, device=device.NAME).T
    assert W.dequantize(rows=slice(1, 3), out=out) is out and torch.equal(out.nan_to_num(7), D[1:3])


@every
def test_constructors_copy_nothing_and_decoding_changes_nothing(case):
    W, _ = CASES[case]()
    before = [None if t is None else t.clone() for t in W.tensors]
    W.dequantize(), W.dequantize(torch.bfloat16, rows=slice(0, 2))
    for a, b in zip(before, W.tensors, strict=True):
        assert a is b is None or torch.equal(a.view(torch.uint8) if a.ndim else a, b.view(torch.uint8) if b.ndim else b)
        assert b is None or (type(b) is torch.Tensor and not b.requires_grad)


@every
def test_spec_and_trees(case):
    W, _ = CASES[case]()
    spec = W.spec
    assert hash(spec) == hash(CASES[case]()[0].spec) and spec.count == len(W.tensors)
    assert case == "opaque" or spec == CASES[case]()[0].spec
    again = spec.weight(W.tensors)
    assert all(a is b for a, b in zip(again.tensors, W.tensors, strict=True)) and again.spec == spec
    held = [t for t in W.tensors if t is not None]
    for tree in (optree, torch.utils._pytree):
        leaves = tree.tree_flatten(W)[0]
        assert [id(t) for t in leaves if t is not None] == [id(t) for t in held]
        back = tree.tree_map(lambda t: None if t is None else t.clone(), {"w": [W]})["w"][0]
        assert type(back) is QuantWeight and back.spec == spec and back.tensors[0] is not W.tensors[0]
        assert torch.equal(back.dequantize().nan_to_num(7), W.dequantize().nan_to_num(7))
    assert W.nbytes == sum(t.numel() * t.element_size() for t in held)
    assert (W.requires_grad, W.ndim) == (False, 2) and W.kind in repr(W)
    assert list(W.named().values()) == list(W.tensors) and not any(
        name.isdigit() for name in list(W.named())[: 1 + (W.kind != "opaque")]
    )


@every
def test_copies_and_files(case):
    W, _ = CASES[case]()
    file = io.BytesIO()
    torch.save({"W": W}, file)
    files = []
    for safe in (True, False):
        file.seek(0)
        with torch.serialization.safe_globals([*SAFE, Opaque, twice]):
            files.append(torch.load(file, weights_only=safe)["W"])
    for other in (copy.deepcopy(W), copy.copy(W), pickle.loads(pickle.dumps(W)), *files):
        assert type(other) is QuantWeight and other.spec == W.spec and set(vars(other)) == set(vars(W))
        assert torch.equal(other.dequantize().nan_to_num(7), W.dequantize().nan_to_num(7))
    deep = copy.deepcopy(W).tensors[0]
    assert deep.numel() == 0 or deep.data_ptr() != W.tensors[0].data_ptr()


class Matmul(torch.autograd.Function):
    """As the layer will use it: the packed tensors are kept, and W is decoded again for the gradient."""

    @staticmethod
    def forward(ctx, x, spec, *tensors):
        ctx.spec = spec
        ctx.save_for_backward(*tensors)
        return x @ spec.weight(tensors).dequantize().T

    @staticmethod
    def backward(ctx, dy):
        return dy @ ctx.spec.weight(ctx.saved_tensors).dequantize(dy.dtype), None, *[None] * ctx.spec.count


@some
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_whole(case, backend):
    torch.compiler.reset()
    W, _ = CASES[case]()
    D = W.dequantize()

    def part(W):
        return W.dequantize(torch.bfloat16, rows=slice(1, 4)), W.dequantize() + 0, W.shape[0], W.to(torch.float16).dtype

    a, b, N, dtype = torch.compile(part, fullgraph=True, backend=backend)(W)
    assert torch.equal(a.nan_to_num(7), D[1:4].bfloat16().nan_to_num(7)) and torch.equal(b.nan_to_num(7), D.nan_to_num(7))
    assert (N, dtype) == (W.shape[0], torch.float16)
    x = torch.randn(3, W.shape[1], device=device.NAME, requires_grad=True)
    layer = torch.compile(lambda x, W: Matmul.apply(x, W.spec, *W.tensors), fullgraph=True, backend=backend)
    y = layer(x, W)
    assert torch.equal(y.nan_to_num(7), (x @ D.T).nan_to_num(7))
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx.nan_to_num(7), (torch.ones_like(y) @ D).nan_to_num(7))


@some
def test_meta_and_fake_tensors(case):
    W, _ = CASES[case]()
    M = W.to("meta")
    assert M.device.type == "meta" and M.spec == W.spec and W.device.type == device.NAME
    assert M.dequantize(torch.bfloat16, rows=slice(1, 3)).shape == (2, W.shape[1])
    from torch._subclasses import FakeTensorMode

    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fake = optree.tree_map(mode.from_tensor, W)
        assert fake.dequantize().shape == W.shape
    assert torch.equal(W.dequantize().nan_to_num(7), W.dequantize().nan_to_num(7))  # nothing fake was kept


def test_a_large_weight_is_rounded_in_slices(monkeypatch):
    from fdora.quant import weight

    W = quantize(torch.randn(67, 50, device=device.NAME), "nf4")
    whole, seen, decode = W.dequantize().bfloat16(), [], KINDS["nf4"].dequantize
    monkeypatch.setitem(KINDS, "nf4", KINDS["nf4"]._replace(dequantize=lambda W, i, j: seen.append(j - i) or decode(W, i, j)))
    monkeypatch.setattr(weight, "CHUNK", 500)
    assert torch.equal(W.dequantize(torch.bfloat16), whole) and seen == [10] * 6 + [7]
    out = torch.empty(66, 50, device=device.NAME)
    assert torch.equal(W.dequantize(rows=slice(1, 67), out=out).bfloat16(), whole[1:]) and max(seen[7:]) == 10
    seen.clear()
    W.dequantize(rows=slice(5, 9), dtype=torch.bfloat16)
    assert seen == [4]  # no more than was asked for


def test_under_inference_mode_first():
    with torch.inference_mode():
        W = quantize(torch.randn(4, 34, device=device.NAME), "fp4", group=34)
        D = W.dequantize()
    W = quantize(torch.randn(4, 34, device=device.NAME), "fp4", group=34)
    x = torch.randn(2, 34, device=device.NAME, requires_grad=True)
    (x @ W.dequantize().T).sum().backward()
    assert x.grad.isfinite().all() and D.shape == (4, 34)


def test_requires_no_grad_of_its_scales():
    scale = torch.rand(4, device=device.NAME, requires_grad=True)
    W = from_fp8(torch.randn(4, 6, device=device.NAME).to(torch.float8_e4m3fn), scale, "row")
    assert not W.dequantize().requires_grad and not any(t.requires_grad for t in W.tensors)
    kept = quantize(torch.randn(4, 6, device=device.NAME), "int8")
    kept = kept.spec.weight((kept.tensors[0], torch.rand(4, device=device.NAME, requires_grad=True)))
    assert not kept.dequantize().requires_grad


def test_a_kind_of_ones_own():
    def decode(W, i, j):
        (bits,) = W.tensors
        return bits[i:j].float() * 2 - 1

    try:
        kind = register_kind("signs", dequantize=decode, tensors=("bits",))
        assert register_kind("signs", dequantize=decode, tensors=("bits",)) is not None and KINDS["signs"] == kind
        bits = torch.rand(5, 3, device=device.NAME) > 0.5
        W = QuantWeight("signs", (bits,), (5, 3), torch.bfloat16, ())
        assert torch.equal(W.dequantize(), torch.where(bits, 1.0, -1.0).bfloat16()) and W.named() == {"bits": bits}
        with pytest.raises(FdoraError, match="new"):
            register_kind("signs", dequantize=twice)
    finally:
        KINDS.pop("signs", None)


def test_frozen():
    W = quantize(torch.randn(4, 6), "int8")
    with pytest.raises(AttributeError):
        W.kind = "fp8"
    with pytest.raises(AttributeError):
        W.spec.kind = "fp8"
    assert W not in [quantize(torch.randn(4, 6), "int8")] and W in [W] and isinstance(hash(W), int)
    assert Lut4._fields == ("table", "hi_first", "group", "scales", "layout")


SMALL = "quantize(torch.ones(4, 6), 'int8')"


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (f"{SMALL}.dequantize(torch.int8)", "`dtype` must be a floating dtype"),
        (f"{SMALL}.to(torch.int8)", "`dtype` must be a floating dtype"),
        (f"{SMALL}.dequantize(rows=slice(0, 4, 2))", "`rows` must be a slice with step 1"),
        (f"{SMALL}.dequantize(out=torch.empty(4, 5))", r"`out` must be \(4, 6\) on cpu, got \(4, 5\) on cpu"),
        (f"{SMALL}.dequantize(out=torch.empty(4, 6, device='meta'))", "on meta"),
        (f"{SMALL}.dequantize(torch.float16, out=torch.empty(4, 6))", "`dtype` must be the dtype of `out`"),
        (f"{SMALL}.spec.weight([torch.ones(1)])", "`tensors` must be 2 tensors, got 1"),
        ("QuantWeight('q', (torch.ones(1),), (1, 1), torch.float32, ()).dequantize()", "`kind` must be one of .*nf4"),
        ("QuantWeight('int8', (), (1, 1), torch.float32, ()).device", "at least one tensor"),
        (
            "opaque(lambda: torch.ones(3, 2), (2, 3), torch.float32, 'cpu').dequantize()",
            r"returns a tensor \(2, 3\), got \(3, 2\)",
        ),
        ("opaque(lambda: None, (2, 3), torch.float32, 'cpu').dequantize()", r"returns a tensor \(2, 3\), got a NoneType"),
        (f"{SMALL}.dequantize(out=[1])", "`out` must be a torch.Tensor, got a list"),
        ("opaque(torch.ones(2, 3), (2, 3), torch.float32, 'cpu')", "`f` must be a function"),
        ("opaque(twice, (2, 3, 4), torch.float32, 'cpu')", r"`shape` must be \(N, K\)"),
        ("opaque(twice, (2, 3), torch.int8, 'cpu')", "floating dtype"),
    ],
)
def test_errors(call, says):
    with pytest.raises(FdoraError, match=says):
        eval(call, {"torch": torch, "quantize": quantize, "QuantWeight": QuantWeight, "opaque": opaque, "twice": twice})


E4M3, I8 = torch.ones(4, 16).to(torch.float8_e4m3fn), torch.ones(4, 16, dtype=torch.int8)
META = {"shape": (2, 32), "axis": 1, "group_size": 8, "packing": "4bit_u8", "zero": torch.ones(8, 1)}
BYTES, WORDS = torch.zeros(4, 8, dtype=torch.uint8), torch.zeros(4, 8, dtype=torch.int32)


@pytest.mark.parametrize(
    "make",
    [
        lambda far: from_fp8(E4M3, torch.ones((), device=far), None),
        lambda far: from_int8(I8, torch.ones(4, device=far)),
        lambda far: from_bnb_int8(I8, torch.ones(4, device=far)),
        lambda far: from_nvfp4(BYTES, E4M3[:, :1].contiguous(), torch.ones((), device=far)),
        lambda far: from_mxfp4(BYTES, torch.ones(4, 1, dtype=torch.uint8, device=far)),
        lambda far: from_gptq(WORDS, WORDS[:1, :1], torch.ones(1, 8, device=far)),
        lambda far: from_awq(WORDS, WORDS[:1], torch.ones(1, 64, device=far)),
        lambda far: from_bnb(BYTES.view(-1, 1), State(torch.ones(1, device=far), (4, 16), 64, "nf4", torch.float32)),
        lambda far: from_hqq(BYTES, META | {"scale": torch.ones(8, 1, device=far)}),
    ],
)
def test_constructors_want_one_device(make):
    """torch lets a number on the host pass beside codes on a GPU; kernels do not."""
    assert make("cpu").device.type == "cpu"
    with pytest.raises(FdoraError, match=r"`tensors` must be on one device, got \w+ on cpu, .* on meta.*Move all to cpu\."):
        make("meta")


def test_opaque_moves_what_its_function_returns():
    dense = torch.randn(2, 3)
    W = opaque(lambda: dense, (2, 3), torch.float32, "cpu")
    assert W.nbytes == 0 and W.device.type == "cpu"
    assert W.to("meta").device.type == "meta" and W.to("meta").dequantize().device.type == "meta"
    assert torch.equal(W.dequantize(), dense)


@every
def test_a_weight_that_no_constructor_made_says_what_it_lacks(case):
    W, _ = CASES[case]()
    build = r"Build it with a constructor of fdora.quant."
    with pytest.raises(FdoraError, match=rf"`facts` must be a \w+ where the kind is {W.kind}, got a NoneType. {build}"):
        dataclasses.replace(W, facts=None).dequantize()
    for tensors in ((), (None,) * len(W.tensors), (*W.tensors[:-2], "text")):
        with pytest.raises(
            FdoraError, match=rf"`tensors` must be \d tensors, or more, where the kind is {W.kind}, got .*{build}"
        ):
            dataclasses.replace(W, tensors=tensors).dequantize(torch.float32)
