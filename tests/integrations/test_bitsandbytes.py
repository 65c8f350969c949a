"""bitsandbytes for real: 4- and 8-bit bases under DoRA, and the 8-bit AdamW that moves values and no version counter.

Of the 4-bit shapes only those are compared with PEFT whose blocks do not cross rows: bitsandbytes 0.50 reads others wrongly on
CPUs with AVX-512. And no stock layer runs in eval mode on a CPU before it is read: that packs its weight anew, in place.
"""

import warnings

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import LlamaForCausalLM

from fdora import FdoraError
from fdora.functional import dora_mlp, opaque
from fdora.integrations import _norm
from fdora.integrations._peft import layer as peft_layer
from fdora.integrations._peft import quantised, variants
from fdora.integrations.peft import init_magnitude, report, restore, use_fdora
from fdora.quant import from_bnb
from tests import device, reference
from tests.close import assert_compiles, assert_within, rel_l2
from tests.integrations.models import perturb
from tests.integrations.tiny import LORA, llama

bnb = pytest.importorskip("bitsandbytes", reason="needs bitsandbytes; `make test` installs it")
K, N, S = 64, 128, 2.0
HALF = torch.bfloat16
CONFIG = {"r": 8, "lora_alpha": 16, "target_modules": ["0", "2"]}


def four_bits(compute=torch.float32, sizes=((K, N), (N, K)), base=torch.float32, quant_type="nf4", **options):
    """Two layers; PEFT knows a model of 4 bits by an attribute."""
    torch.manual_seed(0)
    options = {"compute_dtype": compute, "quant_type": quant_type} | options
    made = [bnb.nn.Linear4bit(*each, **options) for each in sizes]
    for each in made:
        each.weight.data = each.weight.data.to(base)
    model = nn.Sequential(made[0], nn.GELU(), made[1]).to(device.NAME)
    model.is_loaded_in_4bit = True
    return perturb(get_peft_model(model, LoraConfig(**CONFIG, use_dora=True)))


def eight_bits():
    torch.manual_seed(0)
    made = [bnb.nn.Linear8bitLt(*each, has_fp16_weights=False) for each in ((K, N), (N, K))]
    model = nn.Sequential(made[0], nn.GELU(), made[1]).to(device.NAME)
    model.is_loaded_in_8bit = True
    return perturb(get_peft_model(model, LoraConfig(**CONFIG, use_dora=True)))


def layers(model):
    return [model.base_model.model[i] for i in (0, 2)]


def inputs(dtype=torch.float32, K=K):
    torch.manual_seed(1)
    return torch.randn(6, K, device=device.NAME).to(dtype).requires_grad_()


def step(model, x):
    torch.manual_seed(1)
    y = model(x)
    leaves = [x, *(p for p in model.parameters() if p.requires_grad)]
    return [y.detach(), *torch.autograd.grad(y.float().square().mean(), leaves)]


@torch.enable_grad()
def truth(model, x):
    """In float64, of the weights as they are stored."""
    x = x.detach().double().requires_grad_()
    y, leaves = x, [x]
    for i, layer in enumerate(layers(model)):
        A, B, m = (
            part["default"].weight.detach().double().requires_grad_()
            for part in (layer.lora_A, layer.lora_B, layer.lora_magnitude_vector)
        )
        W = from_bnb(layer.base_layer.weight).dequantize(torch.float64)
        y = reference.dora(y, W, A, B, m, S, layer.base_layer.bias)
        y = nn.functional.gelu(y) if i == 0 else y
        leaves += [A, B, m]
    return [y.detach(), *torch.autograd.grad(y.square().mean(), leaves)]


def paths(model):
    return [(row.fused, row.composed, sum(row.fallbacks.values())) for row in report(model)]


@pytest.mark.parametrize(
    ("compute", "given", "base", "autocast", "options"),
    [
        (torch.float32, torch.float32, torch.float32, False, {}),
        (torch.float32, torch.float32, torch.float32, False, {"quant_type": "fp4", "compress_statistics": False}),
        (torch.float32, torch.float32, torch.float32, True, {}),
        (HALF, torch.float32, HALF, False, {}),
        (HALF, HALF, HALF, False, {"quant_storage": HALF}),
        (HALF, HALF, HALF, True, {}),
        (torch.float32, HALF, torch.float16, False, {}),
        (None, HALF, HALF, False, {}),
        (None, torch.float32, torch.float32, False, {}),
    ],
)
def test_four_bits_are_one_call(compute, given, base, autocast, options):
    """As near to the truth as PEFT, whatever the layer computes in. y has the dtype of x, as PEFT's has but under autocast on a
    GPU, where it leaves it in float32; there y is rounded once to autocast's dtype, whatever dtype then holds it."""
    model, x = four_bits(compute, base=base, **options), inputs(given)
    with torch.autocast(device.NAME, HALF, enabled=autocast):
        stock = step(model, x)
        got = step(use_fdora(model), x)
    assert [t.dtype for t in got] == [given, *[t.dtype for t in stock[1:]]]
    if autocast:
        got[0], stock[0] = got[0].to(HALF), stock[0].to(HALF)
    if compute == HALF and given == torch.float32:  # PEFT's adapters run in float32 there, but under autocast
        with torch.autocast(device.NAME, HALF):
            stock = step(four_bits(compute, base=base), x)
    for a, b, c in zip(got, stock, truth(model, x), strict=True):
        assert_within(a, b, c)
    assert paths(model) == [(1, 0, 0)] * 2
    assert [row.weight for row in report(model)] == [options.get("quant_type", "nf4")] * 2
    assert options.get("quant_type", "nf4") in str(report(model)).splitlines()[1].split()


def test_the_dtype_that_a_layer_computes_in_is_settled_by_its_first_input():
    model = use_fdora(four_bits(None))
    model(inputs(HALF))
    assert [layer.base_layer.compute_dtype for layer in layers(model)] == [HALF] * 2
    assert model(inputs()).dtype == torch.float32 and layers(model)[0].base_layer.compute_dtype == HALF


@pytest.mark.parametrize("given", [torch.float32, HALF])
def test_compiled_whole(given):
    model, x = use_fdora(four_bits(HALF, base=HALF)), inputs(given)
    assert_compiles(lambda: model(x), [x, *(p for p in model.parameters() if p.requires_grad)], 1e-2)


def test_a_magnitude_of_the_dtype_of_the_state():
    model, x = four_bits(), inputs()
    for layer in layers(model):
        layer.lora_magnitude_vector.to(HALF)
    got = step(use_fdora(model), x)
    for a, b in zip(got, truth(model, x), strict=True):
        assert rel_l2(a, b) < (1e-5 if a.dtype == torch.float32 else 1e-2)
    assert paths(model) == [(1, 0, 0)] * 2


def quantised_llama(compute, given):
    config = llama().config
    config.intermediate_size = 128
    model = LlamaForCausalLM(config).to(given)
    for _, module in list(model.named_modules()):
        for name, child in list(module.named_children()):
            if type(child) is nn.Linear and name != "lm_head":
                made = bnb.nn.Linear4bit(
                    child.in_features, child.out_features, bias=False, compute_dtype=compute, quant_type="nf4"
                )
                made.weight = bnb.nn.Params4bit(child.weight.data, quant_type="nf4")
                setattr(module, name, made)
    model = model.to(device.NAME)
    model.is_loaded_in_4bit = True
    return perturb(get_peft_model(model, LoraConfig(**LORA, use_dora=True)))


@pytest.mark.parametrize(("compute", "given"), [(torch.float32, torch.float32), (HALF, HALF), (HALF, torch.float32)])
def test_blocks_are_fused_as_well(monkeypatch, compute, given):
    """In one call each; an MLP layer by layer where its layers compute in another dtype than they are given."""
    torch.manual_seed(0)
    model, ids = quantised_llama(compute, given), torch.randint(3, 250, (2, 9), device=device.NAME)

    def run():
        model.zero_grad()
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        return [loss.detach(), *(p.grad for p in model.parameters() if p.requires_grad)]

    want, got = run(), None
    for fuse in (False, True):
        got = run() if use_fdora(model, fuse=fuse) else None
        for a, b in zip(got, want, strict=True):
            assert rel_l2(a, b) < (1e-5 if compute == torch.float32 else 0.05)
        assert all(row.composed == 0 and not row.fallbacks for row in report(model))
    first = model.base_model.model.model.layers[0]
    assert type(first.mlp).__name__ == "LlamaMLP" and hasattr(first.mlp, "STOCK")
    q, k, v = (getattr(first.self_attn, f"{name}_proj") for name in "qkv")
    x = torch.randn(3, 64, device=device.NAME, dtype=given)
    outputs, shared = [q(x)], q.lora_variant["default"].shared
    assert list(shared.waiting.outputs) == [1, 2]
    outputs += [k(x), v(x)]
    assert all(y.dtype == given for y in outputs) and shared.waiting is None
    nodes = []
    monkeypatch.setattr(opaque, "dora_mlp", lambda *args, **options: nodes.append(1) or dora_mlp(*args, **options))
    assert first.mlp(x).dtype == given and len(nodes) == (compute == given)


def test_a_forward_that_is_not_bitsandbytes_own_keeps_its_product():
    class Other(bnb.nn.Linear4bit):
        def forward(self, x):
            return 3 * super().forward(x)

    model, x = four_bits(), inputs()
    for layer in layers(model):
        layer.base_layer.__class__ = Other
    want = model(x)
    assert rel_l2(use_fdora(model)(x), want) < 1e-5
    assert paths(model) == [(0, 1, 0)] * 2
    assert "not bitsandbytes' own" in report(model)[0].why_not_fused


@pytest.mark.parametrize("disable", [torch._disable_dynamo, torch.compiler.disable])
def test_a_forward_that_is_not_to_be_compiled_is_the_same(monkeypatch, disable):
    """As Unsloth leaves it."""
    for kind in (bnb.nn.Linear4bit, type(layers(four_bits())[0])):
        monkeypatch.setattr(kind, "forward", disable(kind.forward))
    model = use_fdora(four_bits())
    model(inputs())
    assert paths(model) == [(1, 0, 0)] * 2


def test_the_state_that_fsdp_drops_is_that_of_the_layer():
    model, x = use_fdora(four_bits()), inputs()
    want = model(x)
    for layer in layers(model):
        base = layer.base_layer
        base.quant_state, base.weight.quant_state = base.weight.quant_state, None
    assert torch.equal(model(x), want) and paths(model) == [(2, 0, 0)] * 2


def test_the_norm_is_kept_until_anything_that_it_is_of_changes(monkeypatch):
    monkeypatch.setattr(_norm, "SMALL", 0)
    calls, dora_norm = [], _norm.dora_norm
    monkeypatch.setattr(_norm, "dora_norm", lambda *args, **kwargs: calls.append(1) or dora_norm(*args, **kwargs))
    model, x = use_fdora(four_bits(compress_statistics=False)), inputs()
    first = layers(model)[0]
    model(x)
    model(x)
    assert len(calls) == 2  # once for each layer
    with torch.no_grad():
        first.lora_A["default"].weight.data.mul_(1.5)
    assert_within(model(x).detach(), model(x).detach(), truth(model, x)[0])
    first.base_layer.weight.quant_state.absmax.mul_(1.2)  # scales in place, of the same codes
    assert rel_l2(model(x).detach(), truth(model, x)[0]) < 1e-6
    assert len(calls) == 3
    codes = first.base_layer.weight.data.clone()
    codes[:100] = 0x77
    first.base_layer.weight.data = codes  # other codes, of the same parameter
    assert rel_l2(model(x).detach(), truth(model, x)[0]) < 1e-6


def test_nf4_merges_as_in_peft():
    model, x = four_bits(), inputs().detach()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # merging rounds to four bits again
        use_fdora(model)(x)
        model.merge_adapter()
        ours = model(x)
        again = four_bits()
        again.merge_adapter()
        assert rel_l2(ours, again(x)) < 1e-5
        model.unmerge_adapter()
        again.unmerge_adapter()
        assert rel_l2(model(x), use_fdora(again)(x)) < 1e-5


def test_no_eval_forward_packs_a_weight_anew():
    """On a CPU with AVX512-BF16, Linear4bit does that; what it left is read wrongly by its own dequantisation."""
    model, x = four_bits(), inputs().detach()
    before = [layer.base_layer.__dict__[quantised.PACKS] for layer in layers(model)]
    for layer in layers(model):
        layer.base_layer.__dict__[quantised.PACKS] = 1
    use_fdora(use_fdora(model)).eval()
    with torch.no_grad():
        want = model(x)
        with model.disable_adapter():
            model(x)
        assert torch.equal(model(x), want)
        assert rel_l2(want, truth(model, x)[0]) < 1e-6
    restore(model)
    assert all(layer.base_layer.__dict__[quantised.PACKS] == 1 for layer in layers(model))
    for layer, old in zip(layers(model), before, strict=True):
        layer.base_layer.__dict__[quantised.PACKS] = old
    layers(model)[0].base_layer.weight.quant_state.packing_format_for_cpu = True
    with pytest.raises(FdoraError, match="packed for the CPU"):
        use_fdora(model)(x)


def test_a_weight_that_bitsandbytes_misreads(monkeypatch):
    """Blocks across rows, on a CPU with AVX-512. Here it reads one of two wrongly on every machine."""
    sizes = ((96, 40), (40, 96))
    model, x = four_bits(sizes=sizes), inputs(K=96)
    first, second = layers(model)
    W = from_bnb(first.base_layer.weight)
    monkeypatch.setattr(quantised, "dequantize_module_weight", lambda base: 1.3 * W.dequantize())
    monkeypatch.setattr(quantised.QuantWeight, "device", torch.device("cpu"))
    with pytest.warns(UserWarning, match=r"reads 1 weights wrongly.*base_model\.model\.0.*init_magnitude"):
        use_fdora(model)
    monkeypatch.undo()
    for a, b in zip(step(model, x), truth(model, x), strict=True):
        assert rel_l2(a, b) < (1e-5 if device.NAME == "cpu" else 1e-2)
    init_magnitude(model)
    c = reference.norm(W.dequantize(torch.float64), first.lora_A["default"].weight, first.lora_B["default"].weight, S)
    torch.testing.assert_close(first.lora_magnitude_vector["default"].weight.double(), c, rtol=1e-6, atol=0)
    junk = torch.zeros(40, 96, device=device.NAME)
    monkeypatch.setattr(quantised, "misread", lambda base, W: W.shape[1] == 96)
    monkeypatch.setattr(variants, "misread", quantised.misread)
    assert torch.equal(first.lora_variant["default"].read(first, junk), W.dequantize())
    assert second.lora_variant["default"].read(second, junk) is junk


def test_eight_bits_keep_their_product_and_nothing_is_dense(monkeypatch):
    x = inputs()
    want = step(eight_bits(), x)  # PEFT's second step would fail on a CPU: its dequantisation loses the row maxima
    model = use_fdora(eight_bits())
    monkeypatch.setattr(variants, "dequantize_module_weight", None)
    for _ in range(3):
        for a, b in zip(step(model, x), want, strict=True):
            assert rel_l2(a, b) < (1e-5 if device.NAME == "cpu" else 1e-2)
    assert paths(model) == [(0, 3, 0)] * 2
    row = report(model)[0]
    assert row.weight == "int8" and "bitsandbytes keeps its product, the norm is read from the codes" in row.why_not_fused


def test_eight_bits_for_life():
    model, x = use_fdora(eight_bits()), inputs()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = model(x)
        model.add_adapter("other", LoraConfig(**CONFIG, use_dora=True))  # PEFT dequantises, and drops the row maxima
        assert torch.equal(use_fdora(model)(x), before)
        model.base_model.set_adapter(["default", "other"])
        assert model(x).isfinite().all()
        model.set_adapter("default")
        assert torch.equal(model.eval()(x), model(x))
        before = model.train()(x)
        model.merge_adapter()
        assert rel_l2(model(x), before) < 0.05
        model.unmerge_adapter()
        assert rel_l2(model(x), before) < 0.05
    assert [type(layer).__name__ for layer in layers(restore(model))] == ["Linear8bitLt"] * 2
    assert not any(isinstance(layer, peft_layer.Layer) for layer in layers(model))


def test_a_mixed_batch_reads_the_codes_once():
    """Each row as a forward of its adapter alone."""
    model = four_bits()
    model.add_adapter("other", LoraConfig(**CONFIG | {"r": 4}, use_dora=True))
    model = use_fdora(perturb(model)).eval()
    names, x = ["other", "default", "__base__", "other", "default", "default"], inputs().detach()
    y = model(x, adapter_names=names)
    for name in ("default", "other"):
        model.set_adapter(name)
        rows = [i for i, each in enumerate(names) if each == name]
        torch.testing.assert_close(y[rows], model(x)[rows], rtol=1e-4, atol=1e-5)
    assert all(row.fused == 2 and not row.fallbacks for row in report(model))
    with pytest.raises(ValueError, match="Cannot pass `adapter_names` when DoRA is enabled"):  # LLM.int8 keeps its own product
        use_fdora(eight_bits()).eval()(x, adapter_names=["default"] * 6)
