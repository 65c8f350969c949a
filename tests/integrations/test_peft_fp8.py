"""use_fdora on layers of 8-bit codes: those of FP8 checkpoints, and dense ones that compute="fp8" rounds."""

import copy
import io
import json
import warnings
from functools import partial
from types import SimpleNamespace

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora import dora
from torch import nn
from transformers.integrations.compressed_tensors import CompressedTensorsFP8Linear
from transformers.integrations.fbgemm_fp8 import FbgemmFp8Linear
from transformers.integrations.finegrained_fp8 import FP8GroupedLinear, FP8Linear

from fdora import FdoraError
from fdora.functional import dora_linear, dora_norm, opaque
from fdora.integrations._peft.ahead import calls_of
from fdora.integrations._peft.quantised import FP8, family, own_product
from fdora.integrations.peft import enabled, init_magnitude, report, restore, use_fdora
from fdora.quant import from_fp8, quantize
from tests import device, reference
from tests.close import assert_within, rel_l2
from tests.integrations.models import perturb
from tests.integrations.one_layer import S, step, trained, truth
from tests.integrations.test_peft_vit import images, output
from tests.integrations.test_peft_vit import made as vision
from tests.integrations.tiny import llama
from tests.memory import saved

K, N, HALF = 256, 384, torch.bfloat16
CONFIG = dict(r=8, lora_alpha=16, target_modules=["0"], use_dora=True)


def filled(layer, block):
    """Codes, and scales in the shape and the dtype that the layer has for them."""
    torch.manual_seed(0)
    layer = layer.to(device.NAME)
    codes, scale = quantize(torch.randn(N, K) / 16, "fp8", block=block).to(device.NAME).tensors
    name = "weight_scale_inv" if hasattr(layer, "weight_scale_inv") else "weight_scale"
    with torch.no_grad():
        layer.weight.copy_(codes)
        getattr(layer, name).copy_(scale.reshape(getattr(layer, name).shape))
        if layer.bias is not None:
            layer.bias.copy_(torch.randn(N))
    return layer.requires_grad_(False), from_fp8(layer.weight, scale.to(getattr(layer, name).dtype), block)


class Compressed(nn.Linear):
    """As compressed-tensors lays out a layer of blocks; its own forward would make it dense for good."""

    def __init__(self):
        super().__init__(K, N, bias=False)
        self.weight = nn.Parameter(torch.empty(N, K, dtype=torch.float8_e4m3fn), requires_grad=False)
        self.weight_scale = nn.Parameter(torch.empty(3, 2, dtype=HALF), requires_grad=False)
        self.quantization_scheme = SimpleNamespace(weights=SimpleNamespace(block_structure=[128, 128]))

    def forward(self, x):
        raise AssertionError("it is not called")


CHECKPOINTS = {
    "blocks": lambda: filled(FP8Linear(K, N, (128, 128), has_bias=True), (128, 128)),
    "blocks, e8m0": lambda: filled(FP8Linear(K, N, (128, 128), scale_fmt="ue8m0"), (128, 128)),
    "tensor": lambda: filled(FP8Linear(K, N), None),
    "FBGEMM": lambda: filled(FbgemmFp8Linear(K, N, True), "row"),
    "compressed-tensors, rows": lambda: filled(CompressedTensorsFP8Linear(K, N), "row"),
    "compressed-tensors, blocks": lambda: filled(Compressed(), (128, 128)),
}


def checkpoint(kind="blocks", **config):
    """A model of one such layer, with an adapter that has moved, and its weight."""
    layer, W = CHECKPOINTS[kind]()
    with enabled():
        model = perturb(get_peft_model(nn.Sequential(layer), LoraConfig(**(CONFIG | config))))
    return model, W


def dense(*names, dtype=HALF, bias=True, **config):
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(K, N, bias=bias), nn.ReLU(), nn.Linear(N, K)).to(device.NAME, dtype)
    config = CONFIG | {"target_modules": list(names or ["0", "2"])} | config
    return perturb(get_peft_model(base, LoraConfig(**config)))


def inputs(dtype=HALF):
    """On a GPU more tokens than are multiplied by the decoded weight there."""
    torch.manual_seed(1)
    return torch.randn(6 if device.NAME == "cpu" else 96, K).to(device.NAME, dtype).requires_grad_()


def ids():
    return torch.arange(24, device=device.NAME).view(2, 12)


def by_hand(model, W, x, **options):
    layer = model.base_model.model[0]
    A, B, m = trained(model)
    y = dora_linear(x, W.to(x.dtype), A, B, m, s=S, bias=layer.base_layer.bias, **options)
    return [y.detach(), *torch.autograd.grad(y.float().square().mean(), [x, A, B, m])]


def naive(model, W, x):
    A, B, m = parameters = [p.detach().to(x.dtype).requires_grad_() for p in trained(model)]
    y = reference.naive(x, W.dequantize(x.dtype), A, B, m, S, model.base_model.model[0].base_layer.bias)
    return [y.detach(), *torch.autograd.grad(y.float().square().mean(), [x, *parameters])]


def same(got, want):
    assert len(got) == len(want) and all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


def alike(got, want):
    """The same launches on a CPU. On a GPU a model's norms and few tokens' x A^T are formed another way: last bits differ."""
    if device.NAME == "cpu":
        return same(got, want)
    assert len(got) == len(want) and all(rel_l2(a, b) < 5e-3 for a, b in zip(got, want, strict=True))


def first(model):
    return model.base_model.model[0]


@pytest.mark.parametrize("kind", CHECKPOINTS)
@pytest.mark.parametrize("dtype", [torch.float32, HALF], ids=str)
def test_a_checkpoints_layer_is_one_call_on_its_codes(kind, dtype):
    model, W = checkpoint(kind)
    x = inputs(dtype)
    got = step(use_fdora(model), x)
    for a, b, c in zip(got, naive(model, W, x), truth(model, x, W.dequantize(torch.float64)), strict=True):
        assert_within(a, b, c)
    alike(got, by_hand(model, W, x))
    (row,) = report(model)
    assert (row.fused, row.composed, row.fallbacks, row.weight, row.codes) == (1, 0, {}, "fp8", 0)
    assert first(model).base_layer.weight.dtype == torch.float8_e4m3fn


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_and_multiplies_codes_where_it_is_asked_to(kind):
    model, W = checkpoint(kind)
    x, decoded = inputs(), step(use_fdora(model), inputs())
    got = step(use_fdora(model, compute="fp8"), x)
    alike(got, by_hand(model, W, x, compute="fp8"))
    assert 1e-3 < rel_l2(got[0], decoded[0]) < 4e-2
    (row,) = report(model)
    assert (row.compute, row.codes, row.why_decoded) == ("fp8", 1, "")
    assert "fp8 products of codes 1x" in str(report(model)) and "in 1 of 1 layers" in str(report(model))
    with torch.autocast(device.NAME, HALF):
        assert model(x.detach().float()).dtype == HALF
        assert model(x.detach().double()).dtype == torch.float64
    assert (report(model)[0].codes, report(model)[0].why_decoded) == (2, "a torch.float64 input")


def test_and_multiplies_codes_in_backward_for_x_alone():
    (model, _), dy = checkpoint("blocks"), torch.randn(96, N, device=device.NAME, dtype=HALF)
    x = torch.randn(96, K, device=device.NAME, dtype=HALF).requires_grad_()
    leaves, found = [x, *(p for p in model.parameters() if p.requires_grad)], []
    for how in (None, "fp8"):
        use_fdora(model, compute="fp8", grad_compute=how)
        found.append(torch.autograd.grad(model(x), leaves, dy))
    alike(found[0][1:], found[1][1:])
    assert 0.01 < rel_l2(found[1][0], found[0][0]) < 0.04
    assert copy.deepcopy(model.base_model.model[0].lora_variant["default"]).grad_compute == "fp8"
    with pytest.raises(FdoraError, match="`grad_compute` must be None without compute, got 'fp8'"):
        use_fdora(model, grad_compute="fp8")
    with pytest.raises(FdoraError, match="`grad_compute` must be None or 'fp8', got 'int8'"):
        use_fdora(model, compute="fp8", grad_compute="int8")


def test_codes_are_kept_transposed_and_anew_where_they_change():
    model, _ = checkpoint("blocks")
    x, found = torch.randn(96, K, device=device.NAME, dtype=HALF).requires_grad_(), []
    base = first(model).base_layer
    for both in (False, True):
        use_fdora(model, compute="fp8", grad_compute="fp8", transposed=both)
        for _ in range(2):
            found.append(step(model, x))
            W = first(model).lora_variant["default"].held.of(base, FP8, HALF, both)
            assert len(W.tensors) == 2 + both
            assert not both or torch.equal(W.tensors[2].float(), base.weight.float().T)
            with torch.no_grad():  # as load_state_dict writes
                base.weight.copy_(-base.weight.float())
    same(found[0], found[2])
    same(found[1], found[3])
    with pytest.raises(FdoraError, match="`transposed` must be False without grad_compute"):
        use_fdora(model, compute="fp8", transposed=True)


def test_codes_stay_with_the_layer_and_are_not_saved():
    """torch's checkpoint runs three functions of Python for each saved tensor. What is not saved must still be as it was."""
    for model in (dense("0"), checkpoint()[0]):
        for both in (False, True):
            use_fdora(model, compute="fp8", grad_compute="fp8", transposed=both)
            y, kept = saved(lambda model=model: model(inputs()))
            assert not [t for t in kept if t.dtype == torch.float8_e4m3fn]
            codes = model.base_model.model[0].base_layer.weight
        codes.view(torch.uint8).add_(0)
        with pytest.raises(RuntimeError, match="must be left as they are until backward"):
            y.sum().backward()


def test_adapters_on_codes_are_made_and_loaded_by_fdora_alone(tmp_path):
    """PEFT's DoRA computes with codes, and raises. m is that of the decoded weight, and the parameters are float32."""
    layer, W = CHECKPOINTS["blocks"]()
    with pytest.raises(NotImplementedError, match="Float8"):
        get_peft_model(nn.Sequential(copy.deepcopy(layer)), LoraConfig(**CONFIG))
    with enabled():
        model = get_peft_model(nn.Sequential(copy.deepcopy(layer)), LoraConfig(**CONFIG))
    A, B, m = trained(model)
    assert A.dtype == B.dtype == m.dtype == torch.float32
    torch.testing.assert_close(m, dora_norm(W, A, B, s=S))
    use_fdora(perturb(model)).save_pretrained(tmp_path)
    want = model(inputs())
    with enabled():
        again = PeftModel.from_pretrained(nn.Sequential(copy.deepcopy(layer)), tmp_path)
    alike([again(inputs())], [want])
    model.add_adapter("second", LoraConfig(**CONFIG))  # beside one that runs through fdora, whoever asks
    model.set_adapter("second")
    assert rel_l2(use_fdora(model)(inputs()), (inputs() @ W.dequantize(HALF).T + layer.bias)) < 1e-2


@pytest.mark.parametrize(
    ("make", "x", "why"),
    [
        (lambda: checkpoint()[0], lambda: inputs(torch.float32), "a torch.float32 input"),
        (lambda: checkpoint(lora_dropout=0.5)[0], inputs, "lora_dropout as PEFT means it"),
        (lambda: dense("0", dtype=torch.float32), lambda: inputs(torch.float32), "a torch.float32 base weight"),
        (lambda: get_peft_model(nn.Sequential(nn.Embedding(50, K)), LoraConfig(**CONFIG)), ids, "not a plain"),
    ],
)
def test_what_multiplies_no_codes_says_why(make, x, why):
    """And computes what it does without being asked."""
    model, x, ys = make().to(device.NAME), x(), []
    for how in (None, "fp8"):
        torch.manual_seed(2)
        ys.append(use_fdora(model, compute=how)(x))
    same(*[[y] for y in ys])
    (row,) = report(model)
    assert row.codes == 0 and row.why_decoded.startswith(why)
    assert f"no fp8 products of codes: {why}" in str(report(model)) and "in 0 of 1 layers" in str(report(model))


def test_dropout_of_the_adapters_input():
    """One call by a mask of its own, also on a CPU: the base layer's own product may need a GPU. Evaluation drops nothing."""
    model, _ = checkpoint(lora_dropout=0.3)
    x = inputs().detach()
    use_fdora(model, compute="fp8", dropout_mode="lora")
    with torch.no_grad():
        mean = sum(model(x).float() for _ in range(300)) / 300
        assert rel_l2(mean, model.eval()(x)) < 0.05
    (row,) = report(model)
    assert (row.fused, row.codes) == (301, 301)


def test_nothing_runs_or_merges_codes_as_if_they_were_the_weight(monkeypatch):
    model, W = checkpoint()
    use_fdora(model)
    for merge in (
        model.merge_adapter,
        lambda: model.merge_adapter(safe_merge=True),
        lambda: copy.deepcopy(model).merge_and_unload(),
    ):
        with pytest.raises(FdoraError, match="dense for a merge"):
            merge()
    assert first(model).merged_adapters == []
    first(model).base_layer.forward = lambda x: x @ W.dequantize(x.dtype).T  # or that of a GPU
    want = step(model, inputs())
    assert report(model)[0].composed == 1
    monkeypatch.setattr(dora, "ENABLE_DORA_CACHING", True)
    with pytest.raises(FdoraError, match="must run through fdora, got DoraCaching is on"):
        model(inputs())
    assert len(want) == 5


def test_what_holds_codes_and_is_another_layer():
    grouped, other = FP8GroupedLinear(K, N, 2, (128, 128)), CHECKPOINTS["FBGEMM"]()[0]
    other.weight_zero_point = torch.zeros(1)
    assert family(grouped) == family(other) == ""
    unread = FP8Linear(K, N).to(device.NAME)
    unread.weight_scale_inv = nn.Parameter(torch.ones(7, device=device.NAME))
    model = get_peft_model(nn.Sequential(nn.Linear(K, N, device=device.NAME)), LoraConfig(**CONFIG))
    first(model).base_layer, unread.forward = unread, lambda x: x @ torch.ones(K, N, device=x.device)
    with pytest.raises(FdoraError, match="must run through fdora, got a weight that cannot be read"):
        use_fdora(model)(inputs(torch.float32))


def test_torchaos_dynamic_float8_is_served_by_products_of_codes():
    Float8Tensor = type("Float8Tensor", (), {"act_quant_kwargs": object()})
    assert own_product(SimpleNamespace(weight=Float8Tensor()), "torchao", None).startswith("torchao rounds x too")
    assert own_product(SimpleNamespace(weight=Float8Tensor()), "torchao", "fp8") == ""
    int8 = SimpleNamespace(weight=type("Int8Tensor", (), {"act_quant_kwargs": object()})())
    assert own_product(int8, "torchao", "fp8").startswith("torchao rounds x too")


def test_a_dense_weight_is_rounded_once_and_says_so(tmp_path):
    """The model is that of the rounded weight: its layers' calls, with no adapter, and with several."""
    model, x = dense("0"), inputs()
    W = quantize(first(model).base_layer.weight, "fp8", block="row")
    size = first(model).base_layer.weight.nbytes
    use_fdora(model, compute="fp8")
    base = first(model).base_layer
    assert base.weight.nbytes + base.weight_scale.nbytes == size / 2 + 4 * N
    layer = nn.Sequential(first(model))
    layer.base_model = SimpleNamespace(model=layer)
    alike(step(layer, x), by_hand(model, W, x, compute="fp8"))
    plain = lambda x: x @ W.dequantize(x.dtype).T + base.bias  # noqa: E731
    with model.disable_adapter():
        assert rel_l2(first(model)(x), plain(x)) < 4e-3
    stock = dense("0")  # the same adapters on the decoded weight, by PEFT
    with torch.no_grad():
        first(stock).base_layer.weight.copy_(W.dequantize())
    for each in (model, stock):
        torch.manual_seed(3)
        each.add_adapter("second", LoraConfig(**CONFIG))
        each.add_adapter("plain", LoraConfig(**(CONFIG | {"use_dora": False})))
    use_fdora(model, compute="fp8")
    for name, p in first(stock).named_parameters():
        if "lora" in name:
            p.data.copy_(first(model).get_parameter(name))
    for names in (["default", "second"], ["plain"], ["second"]):
        for each in (model, stock):
            each.base_model.set_adapter(names)
        assert rel_l2(first(model)(x), first(stock)(x)) < (4e-2 if names == ["second"] else 1e-2)
    mixed = first(model)(x.detach(), adapter_names=["default", "second", "plain"] * (len(x) // 3))
    assert 5e-3 < rel_l2(mixed[2], first(stock.set_adapter("plain") or stock)(x)[2]) < 4e-2
    assert [(row.codes, row.why_decoded) for row in report(model)] == [(2, "")] * 2


@pytest.mark.parametrize("task", [None, "CAUSAL_LM"])
def test_adapters_record_that_their_base_was_rounded(tmp_path, task):
    """Also in a copy of the model; and PEFT loads them without a word."""
    model = dense()
    model.peft_config["default"].task_type = task
    use_fdora(model, compute="fp8")
    for each in (model, copy.deepcopy(model)):
        each.save_pretrained(tmp_path)
        record = json.loads((tmp_path / "adapter_config.json").read_text())["auto_mapping"]
        assert record["fdora"] == {"base": "rounded to float8_e4m3fn with a scale for each row"}
        assert ("base_model_class" in record) == (task is None)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert peft.PeftConfig.from_pretrained(tmp_path).auto_mapping == record
    want, other = {name: p for name, p in model.named_parameters() if "lora" in name}, dense()
    peft.set_peft_model_state_dict(other, peft.load_peft_weights(tmp_path))
    assert all(torch.equal(p, want[name]) for name, p in other.named_parameters() if "lora" in name)


@pytest.mark.parametrize("keep", [None, "cpu"])
def test_restore_gives_back_a_dense_weight(keep):
    model, x = dense(), inputs()
    classes, weights = [type(m) for m in model.modules()], [p.clone() for p in model.parameters()]
    rounded = [quantize(model.base_model.model[i].base_layer.weight, "fp8", block="row") for i in (0, 2)]
    use_fdora(use_fdora(model, compute="fp8", keep=keep), compute="fp8")  # again, as after add_adapter
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        restore(restore(model))
    assert [type(m) for m in model.modules()] == classes
    assert "weight_scale" not in str(list(model.state_dict()))
    if keep:
        assert not said
        same(list(model.parameters()), weights)
    else:
        (warning,) = said
        assert "2 base layers are dense again and stay rounded" in str(warning.message) and warning.filename == __file__
        same([model.base_model.model[i].base_layer.weight for i in (0, 2)], [W.dequantize() for W in rounded])
    assert first(model).base_layer.weight.dtype == HALF and not first(model).base_layer.weight.requires_grad
    merged = model.merge_and_unload()
    assert torch.isfinite(merged(x)).all()


def test_a_rounded_layer_moves_copies_and_loads_as_codes():
    model, x, other, plain = dense("0"), inputs(), use_fdora(dense("0"), compute="fp8"), dense("0").state_dict()
    use_fdora(model, compute="fp8")
    want, base = model(x), first(model).base_layer
    stored = [base.weight.clone(), base.weight_scale.clone()]
    for moved in (copy.deepcopy(model).half(), copy.deepcopy(model).to(device.NAME, torch.float64)):
        base = first(moved).base_layer
        same([base.weight.view(torch.uint8), base.weight_scale], [stored[0].view(torch.uint8), stored[1]])
        assert base.bias.dtype in (torch.float16, torch.float64)
    written = io.BytesIO()
    torch.save(model, written)
    written.seek(0)
    with torch.no_grad():
        first(other).base_layer.weight_scale.zero_()
    other.load_state_dict(model.state_dict())
    for each in (copy.deepcopy(model), torch.load(written, weights_only=False), other):
        alike([each(x)], [want])
    with pytest.raises(RuntimeError, match="use_fdora rounded this layer to 8 bits"):
        model.load_state_dict(plain, strict=False)


def test_what_is_not_rounded():
    model = dense("0", "2")
    tied, trained_ = model.base_model.model[0].base_layer, model.base_model.model[2].base_layer
    model.other, trained_.weight.requires_grad = nn.Linear(K, N), True
    model.other.weight = tied.weight
    use_fdora(model, compute="fp8")
    assert [row.why_decoded for row in report(model)] == ["a base weight that another module has, too, or that is trained"] * 2
    assert tied.weight.dtype == trained_.weight.dtype == HALF
    for options, match in (
        ({"compute": "int8"}, "`compute` must be None or 'fp8', got 'int8'"),
        ({"keep": "gpu"}, "`keep` must"),
    ):
        with pytest.raises(FdoraError, match=match):
            use_fdora(model, **options)
    model = dense()
    model.merge_adapter()
    with pytest.raises(FdoraError, match=r"no merged adapter with compute='fp8', got one in `base_model\.model\.0`"):
        use_fdora(model, compute="fp8")
    assert first(model).base_layer.weight.dtype == HALF


def of_blocks():
    base = llama(hidden_size=128, intermediate_size=256).to(device.NAME, HALF)
    return perturb(get_peft_model(base, LoraConfig(r=8, use_dora=True, target_modules="all-linear")))


@pytest.mark.parametrize("fuse", [None, True])
def test_layers_that_share_x_round_it_once(fuse, monkeypatch):
    """In blocks that use_fdora knows: q, k and v are one call, and so is an MLP. Layer by layer x and dz are the same codes."""
    outs, calls = [], []
    for name in ("dora_linear_group", "dora_mlp"):
        noted = partial(lambda fn, x, *a, **how: calls.append(how["grad_compute"]) or fn(x, *a, **how), getattr(opaque, name))
        monkeypatch.setattr(opaque, name, noted)
    for how in (fuse, False):
        model = use_fdora(of_blocks(), compute="fp8", grad_compute="fp8", fuse=how)
        calls.clear()
        out = model(input_ids=ids(), labels=ids())
        out.loss.backward()
        outs.append([out.logits, *(p.grad for p in model.parameters() if p.grad is not None)])
        assert [(row.fused, row.codes, row.composed) for row in report(model)] == [(1, 1, 0)] * 14
        assert calls == ["fp8"] * (14 if how is False else 6)
    for got, want in zip(*outs, strict=True):  # a sum in another order is another code now and then
        assert rel_l2(got, want) < 6e-2
    assert "in 14 of 14 layers" in str(report(model))
    found = calls_of(use_fdora(of_blocks(), compute="fp8", fuse=fuse))
    assert {(call.fn.__name__, call.kwargs["compute"]) for call in found} == {
        (name, "fp8") for name in ("dora_linear_group", "dora_linear", "dora_mlp")
    }


@pytest.mark.parametrize("family", ["dinov2", "timm"])
def test_vision_blocks_add_their_residual_themselves(family):
    """The sum after a product of codes is not in its call: the same bits as layer by layer."""
    outs = []
    for fuse in (True, False):
        model = use_fdora(vision(family, HALF).to(device.NAME), compute="fp8", fuse=fuse).eval()
        with torch.no_grad():
            outs.append(output(model, images(HALF).to(device.NAME)))
        assert all(row.codes == row.fused == 1 for row in report(model))
    same(*[[y] for y in outs])


def test_a_fresh_adapter_on_a_rounded_weight():
    """m was that of the weight before: init_magnitude makes g 1 again."""
    torch.manual_seed(0)
    model = get_peft_model(nn.Sequential(nn.Linear(K, N, dtype=HALF, device=device.NAME)), LoraConfig(**CONFIG))
    use_fdora(model, compute="fp8")
    A, B, m = trained(model)
    before = m.clone()
    init_magnitude(model)
    base = first(model).base_layer
    W = from_fp8(base.weight, base.weight_scale, "row")
    assert torch.equal(m, dora_norm(W, A, B, s=S)) and not torch.equal(m, before)
    x = inputs()
    assert rel_l2(model(x), base(x)) < 4e-2


def test_compiled_whole():
    model, x = use_fdora(dense("0"), compute="fp8"), inputs()
    want = model(x)
    got = torch.compile(model, backend="eager", fullgraph=True)(x)
    assert rel_l2(got, want) < 1e-3
