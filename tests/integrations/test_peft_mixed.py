"""Mixed batches, ``adapter_names=``: each row as a forward of its own adapter, by fdora, which PEFT refuses for DoRA."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn

from fdora import FdoraError
from fdora.functional import DoraParams, dora_linear_multi, dora_norm
from fdora.integrations.peft import read_banks, report, restore, use_fdora, write_banks
from tests.close import assert_exact
from tests.integrations.models import K, N, build, inputs, layer, perturb

NAMES = ["first", "__base__", "second", "plain", "first", "second"]


def many(dtype=torch.float64, bias=True, **more):
    """Two DoRA adapters of other ranks and scalings, a plain LoRA one, and a second layer that only one of them has."""
    torch.manual_seed(0)
    base = nn.Sequential(nn.Linear(K, N, bias=bias), nn.Linear(N, K, bias=bias)).to(dtype)
    both = {"target_modules": ["0", "1"]} | more
    model = get_peft_model(base, LoraConfig(r=4, lora_alpha=6, use_dora=True, **both), adapter_name="first")
    model.add_adapter("second", LoraConfig(r=2, lora_alpha=4, use_dora=True, target_modules=["0"]))
    model.add_adapter("plain", LoraConfig(r=8, lora_alpha=8, **both))
    return use_fdora(perturb(model)).eval()


def alone(stock, x, name):
    """By stock PEFT, with one adapter or none."""
    if name == "__base__":
        with stock.disable_adapter():
            return stock(x)
    stock.set_adapter(name)
    return stock(x)


def row_by_row(model, x):
    stock = restore(copy.deepcopy(model))
    return torch.cat([alone(stock, x[i : i + 1], name) for i, name in enumerate(NAMES)])


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("lead", [(), (3,), (2, 3)], ids=str)
def test_each_row_is_its_adapters(lead, bias):
    model, x = many(bias=bias), torch.randn(6, *lead, K, dtype=torch.float64)
    y = model(x, adapter_names=NAMES)
    assert_exact(y, row_by_row(model, x))
    counts = {(row.module, row.adapter): row.fused for row in report(model)}
    assert list(counts.values()) == [1, 1, 1], counts
    for name in ("second", "__base__"):
        assert_exact(model(x, adapter_names=[name] * 6)[:1], alone(restore(copy.deepcopy(model)), x[:1], name))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_other_dtypes(dtype):
    """PEFT's adapters are float32 then; a weight of bfloat16 has float32 and bfloat16 magnitudes side by side."""
    model, x = many(dtype), torch.randn(6, 3, K).to(dtype)
    got, want = model(x, adapter_names=NAMES), row_by_row(model, x)
    assert got.dtype == dtype
    torch.testing.assert_close(
        got, want, rtol=2e-2 if dtype == torch.bfloat16 else 1e-4, atol=2e-2 if dtype == torch.bfloat16 else 1e-5
    )


def test_gradients_reach_every_adapter():
    model, x = many(), torch.randn(6, 3, K, dtype=torch.float64, requires_grad=True)
    leaves = {n: p.requires_grad_() for n, p in model.named_parameters() if "lora_" in n}
    dy = torch.randn(6, 3, K, dtype=torch.float64)
    got = torch.autograd.grad(model(x, adapter_names=NAMES), [x, *leaves.values()], dy)
    stock, rows = restore(model), []
    for i, name in enumerate(NAMES):
        rows.append(alone(stock, x[i : i + 1], name))
        for p in leaves.values():  # which set_adapter freezes
            p.requires_grad_()
    want = torch.autograd.grad(torch.cat(rows), [x, *leaves.values()], dy)
    for n, a, b in zip(["x", *leaves], got, want, strict=True):
        assert_exact(a, b, n)


def test_a_changed_adapter_is_seen():
    """Also where it was changed behind autograd's back: a bank is stacked for each call."""
    model, x = many(), torch.randn(6, K, dtype=torch.float64)
    model(x, adapter_names=NAMES)
    module = model.base_model.model[0]
    module.lora_B["first"].weight.data.mul_(2)
    module.base_layer.weight.data.mul_(1.1)
    use_fdora(model)
    assert_exact(model(x, adapter_names=NAMES), row_by_row(model, x))


def test_peft_still_refuses_what_is_not_served():
    """Its own words: a training model, merged adapters, a name too few, and layers that are not linear."""
    model, x = many(), torch.randn(6, K, dtype=torch.float64)
    want = model(x)
    with pytest.raises(ValueError, match="Length of `adapter_names` should be the same"):
        model(x, adapter_names=NAMES[1:])
    with pytest.raises(ValueError, match="non-existing adapter"):
        model(x, adapter_names=["nobody"] * 6)
    assert torch.equal(model(x), want)  # nothing of the calls before is left on the model
    with pytest.raises(ValueError, match="training mode"):
        model.train()(x, adapter_names=NAMES)
    model.eval().merge_adapter(["first"])
    with pytest.raises(ValueError, match="merged adapters"):
        model(x, adapter_names=NAMES)
    other = use_fdora(build("embedding")).eval()
    with pytest.raises(ValueError, match="Cannot pass `adapter_names` when DoRA is enabled"):
        other(inputs("embedding"), adapter_names=["default"] * 3)
    other(inputs("embedding"))
    scaled = use_fdora(build("linear")).eval()
    layer(scaled).scaling["default"] = torch.tensor(1.5)
    with pytest.raises(ValueError, match="Cannot pass `adapter_names` when DoRA is enabled"):
        scaled(inputs("linear"), adapter_names=["default"] * 3)
    scaled(inputs("linear"))


def test_banks_of_a_model_and_back():
    """Bit for bit, in all dtypes; what they compute is what the model computes."""
    for dtype in (torch.float64, torch.float32):
        model = many(dtype)
        before = {n: p.detach().clone() for n, p in model.named_parameters()}
        banks = read_banks(model)
        first, second = banks.values()
        assert (first.adapters, first.ranks, first.s, first.dora) == (
            ("first", "second", "plain"),
            (4, 2, 8),
            (1.5, 2.0, 1.0),
            (True, True, False),
        )
        assert second.adapters == ("first", "plain") and second.params.A.shape == (2, 8, N)
        for p in model.parameters():
            p.data.add_(1)
        write_banks(model, banks)
        for n, p in model.named_parameters():
            assert torch.equal(p, before[n]) == ("lora_" in n), n
        restored = many(dtype)
        write_banks(restored, {path: read_banks(restored, ["second"])[path] for path in read_banks(restored, ["second"])})
        assert all(torch.equal(p, before[n]) for n, p in restored.named_parameters())
    base = restored.base_model.model[0].base_layer
    assert next(iter(read_banks(restored).values())).W is base.weight
    x = torch.randn(6, K)
    A, B, m = first.params
    c = torch.where(torch.tensor(first.dora)[:, None], dora_norm(base.weight, A, B, s=first.s), 1)
    ids = torch.tensor([first.adapters.index(name) if name != "__base__" else -1 for name in NAMES])
    with torch.no_grad():
        y = dora_linear_multi(x, base.weight, A, B, m, s=first.s, ids=ids, norm=c, bias=base.bias, ranks=first.ranks)
        want = restored.base_model.model[0](x, adapter_names=NAMES)
    torch.testing.assert_close(y, want, rtol=1e-6, atol=1e-6)


def test_banks_that_do_not_fit():
    model = many()
    banks = read_banks(model)
    with pytest.raises(FdoraError, match=r"fdora.read_banks: `adapters` must be names of linear adapters, got \['nobody'\]"):
        read_banks(model, ["nobody"])
    with pytest.raises(FdoraError, match=r"fdora.write_banks: `banks` must be of this model's layers, got `nowhere`"):
        write_banks(model, {"nowhere": next(iter(banks.values()))})
    path, bank = next(iter(banks.items()))
    with pytest.raises(FdoraError, match=r"fdora.write_banks: `banks` must hold \(4, 24\) torch.float64, got \(3, 24\)"):
        write_banks(model, {path: bank._replace(ranks=(3, 2, 8))})
    with pytest.raises(FdoraError, match=r"`adapters` must be names of linear adapters, got \['nobody'\]"):
        read_banks(model, ["first", "nobody"])
    with pytest.raises(FdoraError, match=r"`adapters` must be a sequence of names, got 'first'. Pass \['first'\]"):
        read_banks(model, "first")
    # of two layers the second does not fit: the first is left as it was
    before = {key: t.clone() for key, t in model.state_dict().items()}
    changed = {at: each._replace(params=DoraParams(*(t + 1 for t in each.params))) for at, each in banks.items()}
    other, last = [*changed.items()][1]
    for wrong, said in [
        (last._replace(params=last.params._replace(m=None)), r"must hold \(24,\) torch.float64, got None for `first`"),
        (last._replace(adapters=("gone", *last.adapters[1:])), "must be of the model's adapters, got `gone`"),
        (last._replace(adapters=last.adapters[:1]), "must hold a row for each adapter, got 2 for"),
    ]:
        with pytest.raises(FdoraError, match=said):
            write_banks(model, changed | {other: wrong})
        assert all(torch.equal(t, before[key]) for key, t in model.state_dict().items())
    model.add_adapter("biased", LoraConfig(r=2, lora_bias=True, target_modules=["0"]))
    with pytest.raises(FdoraError, match=r"of A, B and m, got a bias beside A and B \(lora_bias\)"):
        read_banks(model)  # a bank has no place for it
    assert list(read_banks(model, ["first"])) == list(banks)
    with pytest.raises(FdoraError, match="got a convolution at"):
        read_banks(build("conv2d"))
