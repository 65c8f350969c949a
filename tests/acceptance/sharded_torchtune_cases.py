"""torchtune's functions of its distributed LoRA recipe, in its order, in two processes; and one model, whole, with torchtune's code."""

from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torchtune import training
from torchtune.models.llama3 import lora_llama3
from torchtune.modules.peft import DoRALinear, get_adapter_params, set_trainable_params
from torchtune.modules.transformer import TransformerSelfAttentionLayer

from fdora.integrations.torchtune import report, use_fdora
from tests.distributed.world import run

SIZES = dict(vocab_size=100, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=32, max_seq_len=32, intermediate_dim=48)
LORA = dict(lora_attn_modules=["q_proj", "k_proj", "v_proj", "output_proj"], apply_lora_to_mlp=True, use_dora=True)


def built():
    model = lora_llama3(**LORA, **SIZES, lora_rank=4, lora_alpha=8.0)
    set_trainable_params(model, get_adapter_params(model))
    return model


def moved(adapters):
    draw = torch.Generator().manual_seed(1)
    return {n: p + 0.05 * torch.randn(p.shape, generator=draw) for n, p in adapters.items()}


def steps(model, average):
    """Losses of this process and the adapters, after three steps on data of its own."""
    ids = torch.randint(100, (3, 2, 2, 12), generator=torch.Generator().manual_seed(2))[:, dist.get_rank()]
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    optimizer, losses = torch.optim.SGD(trained.values(), lr=0.5), []
    for step in ids:
        loss = F.cross_entropy(model(step)[:, :-1].flatten(0, 1), step[:, 1:].flatten())
        loss.backward()
        for p in trained.values():
            if average:
                dist.all_reduce(p.grad)
                p.grad /= dist.get_world_size()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), trained


def sharded(whole, checkpointing=False):
    """As the recipe's _setup_model, with use_fdora after the builder."""
    base = {n: t for n, t in whole.items() if "lora" not in n and "magnitude" not in n}
    adapters = {n: t for n, t in whole.items() if n not in base}
    with torch.device("meta"):
        model = built()
    use_fdora(model)
    if checkpointing:
        training.set_activation_checkpointing(model, auto_wrap_policy={TransformerSelfAttentionLayer})
    conditions = [partial(training.get_shard_conditions, names_to_match=None)]
    training.shard_model(model=model, shard_conditions=conditions, cpu_offload=False, reshard_after_forward=True)
    device = torch.device("cpu")
    training.load_from_full_model_state_dict(model, adapters, device, cpu_offload=False)
    for m in model.modules():
        if hasattr(m, "rope_init"):
            with device:
                m.rope_init()
    training.load_from_full_model_state_dict(model, base, device, cpu_offload=False)
    training.validate_no_params_on_meta_device(model)
    return model


def compare(**options):
    torch.manual_seed(0)
    stock = built()
    for m in stock.modules():
        if isinstance(m, DoRALinear):
            m.initialize_dora_magnitude()
    values = stock.state_dict()
    adapters = {n: t for n, t in values.items() if "lora" in n or "magnitude" in n}
    stock.load_state_dict(moved(adapters), strict=False)
    whole = {n: t.clone() for n, t in stock.state_dict().items()}
    model = sharded(whole, **options)
    wanted, want = steps(stock, True)
    losses, got = steps(model, False)
    torch.testing.assert_close(losses, wanted, rtol=0, atol=1e-5)
    saved = training.gather_cpu_state_dict(model, dist.get_rank() == 0, adapter_weights_only=True)
    for name, p in got.items():
        n = name.replace("_checkpoint_wrapped_module.", "")
        value, change = p.detach().full_tensor(), (want[n] - whole[n]).norm()
        assert change > 1e-5 and (value - want[n]).norm() < 1e-3 * change, n
        assert dist.get_rank() > 0 or torch.equal(saved[n], value), n
    counts = report(model)
    assert counts and all(set(count) == {"fused"} for count in counts.values()), counts


def case_recipe():
    compare()


def case_recipe_with_checkpointing():
    compare(checkpointing=True)


if __name__ == "__main__":
    run(globals())
