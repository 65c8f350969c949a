"""Against PEFT's own layer: the same numbers, out of its own parameters."""

import pytest
import torch
from peft import LoraConfig, get_peft_model

from fdora.eager.dropout import drop
from fdora.functional import dora_linear, dora_norm
from tests import device

P, SEED, S = 0.3, 5, 2.0


class SameMask(torch.nn.Module):
    """nn.Dropout with the mask that fdora draws for a seed."""

    def forward(self, x):
        seed = torch.tensor(SEED, device=x.device)
        return drop(x.reshape(-1, x.shape[-1]), seed, P).reshape(x.shape) if self.training else x


def peft_layer(bias, dropout, K=24, N=40, r=8):
    base = torch.nn.Sequential(torch.nn.Linear(K, N, bias=bias))
    config = LoraConfig(r=r, lora_alpha=int(S * r), target_modules=["0"], use_dora=True, lora_dropout=P if dropout else 0.0)
    model = get_peft_model(base, config).to(device.NAME)
    layer = model.base_model.model[0]
    with torch.no_grad():
        layer.lora_B["default"].weight.normal_(std=0.05)
        layer.lora_magnitude_vector["default"].weight.mul_(1 + 0.05 * torch.randn(N, device=device.NAME))
    if dropout:
        layer.lora_dropout["default"] = SameMask()
    return model, layer


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dropout", [False, True], ids=["p0", "dropout"])
@pytest.mark.parametrize("train", [True, False], ids=["train", "eval"])
def test_output_and_every_gradient(bias, dropout, train):
    model, layer = peft_layer(bias, dropout)
    model.train(train)
    A, B = layer.lora_A["default"].weight, layer.lora_B["default"].weight
    m = layer.lora_magnitude_vector["default"].weight
    W, b = layer.get_base_layer().weight, layer.get_base_layer().bias
    x = torch.randn(2, 7, 24, device=device.NAME, requires_grad=True)
    p = P if dropout and train else 0.0

    theirs = model(x)
    ours = dora_linear(x, W, A, B, m, s=S, bias=b, dropout_p=p, dropout_mode="peft", seed=SEED)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)
    assert not torch.equal(ours, torch.nn.functional.linear(x, W, b))
    dy = torch.randn_like(ours)
    for name, a, d in zip(
        "xABm", torch.autograd.grad(ours, (x, A, B, m), dy), torch.autograd.grad(theirs, (x, A, B, m), dy), strict=True
    ):
        torch.testing.assert_close(a, d, rtol=1e-5, atol=1e-5, msg=lambda text, name=name: f"d{name}: {text}")


def test_merged_weight_is_pefts():
    from fdora.functional import dora_merge, dora_unmerge

    _, layer = peft_layer(False, False)
    W = layer.get_base_layer().weight.detach().clone()
    A, B, m = (
        p.detach()
        for p in (layer.lora_A["default"].weight, layer.lora_B["default"].weight, layer.lora_magnitude_vector["default"].weight)
    )
    layer.merge()
    merged = dora_merge(W, A, B, m, s=S)
    torch.testing.assert_close(merged, layer.get_base_layer().weight.detach(), rtol=1e-5, atol=1e-6)
    layer.unmerge()
    torch.testing.assert_close(dora_unmerge(merged, A, B, m, s=S, norm=dora_norm(W, A, B, s=S)), W, rtol=1e-5, atol=1e-6)


def test_zero_rows_where_peft_gives_nan():
    """A known difference, kept: 0 / 0 is never NaN here."""
    model, layer = peft_layer(False, False)
    with torch.no_grad():
        layer.get_base_layer().weight[3] = 0
        layer.lora_B["default"].weight[3] = 0
        layer.lora_magnitude_vector["default"].weight[3] = 0
    x = torch.randn(4, 24, device=device.NAME)
    p = (layer.lora_A["default"].weight, layer.lora_B["default"].weight, layer.lora_magnitude_vector["default"].weight)
    assert model(x)[:, 3].isnan().all()
    assert (dora_linear(x, layer.get_base_layer().weight, *p, s=S)[:, 3] == 0).all()
