"""The expert modules of transformers: their weights go into dora_experts_mlp as they are; PEFT refuses DoRA on them."""

import pytest
import torch

from fdora.functional import DoraLayer, dora_experts_mlp, dora_init

pytest.importorskip("transformers", reason="the expert modules are its; `make test` installs it")
E, K, F, TOP = 4, 24, 16, 2


def mixtral():
    from transformers.models.mixtral import MixtralConfig, modeling_mixtral

    return modeling_mixtral.MixtralExperts(MixtralConfig(num_local_experts=E, hidden_size=K, intermediate_size=F)), "silu"


def qwen3():
    from transformers.models.qwen3_moe import Qwen3MoeConfig, modeling_qwen3_moe

    config = Qwen3MoeConfig(num_experts=E, hidden_size=K, moe_intermediate_size=F)
    return modeling_qwen3_moe.Qwen3MoeExperts(config), "silu"


def deepseek():
    from transformers.models.deepseek_v3 import DeepseekV3Config, modeling_deepseek_v3

    config = DeepseekV3Config(n_routed_experts=E, hidden_size=K, moe_intermediate_size=F)
    module = getattr(modeling_deepseek_v3, "DeepseekV3Experts", None) or modeling_deepseek_v3.DeepseekV3NaiveMoe
    return module(config), "silu"


def gpt_oss():
    from transformers.models.gpt_oss import GptOssConfig, modeling_gpt_oss

    config = GptOssConfig(num_local_experts=E, hidden_size=K, intermediate_size=F)
    return modeling_gpt_oss.GptOssExperts(config), "gpt_oss"


@pytest.mark.parametrize("make", [mixtral, qwen3, deepseek, gpt_oss], ids=lambda f: f.__name__)
def test_an_adapter_that_has_not_moved_changes_nothing(make):
    """Shapes, the order of gate and up, the activation with its limits, biases and the combination are the model's."""
    try:
        experts, act = make()
    except (ImportError, AttributeError) as missing:
        pytest.skip(f"this transformers has its experts elsewhere: {missing}; 5.0 and newer have them")
    rand = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in experts.parameters():
            p.copy_(torch.randn(p.shape, generator=rand) * (1.5 if act == "gpt_oss" else 0.3))
    experts.requires_grad_(False)
    x = torch.randn(30, K, generator=rand)
    gates, ids = torch.randn(30, E, generator=rand).softmax(1).topk(TOP)
    layers = []
    for name in ("gate_up_proj", "down_proj"):
        W, bias = getattr(experts, name), getattr(experts, f"{name}_bias", None)
        W = W.mT if act == "gpt_oss" else W
        params = [torch.stack(parts) for parts in zip(*(dora_init(w, 4) for w in W), strict=True)]
        layers.append(DoraLayer(W, *params, 2.0, bias))
    y = dora_experts_mlp(x, *layers, act=act, ids=ids, gates=gates)
    want = experts(x, ids, gates)
    torch.testing.assert_close(y, want, rtol=1e-4, atol=1e-4 * want.abs().max().item())


def test_peft_refuses_dora_on_parameters():
    """So there is no shim; once this fails, there is one to write."""
    from peft import LoraConfig, get_peft_model

    with pytest.raises(ValueError, match="does not work with use_dora=True"):
        get_peft_model(torch.nn.Sequential(mixtral()[0]), LoraConfig(use_dora=True, target_parameters=["0.gate_up_proj"]))
