"""What fdora.integrations.torchtune promises; tests/integrations/test_torchtune.py runs it, in a process that has torchtune."""

import copy
import importlib
import inspect
import io

import pytest
import torch
from torch import nn
from torchao.dtypes.nf4tensor import to_nf4
from torchtune.modules.peft import DoRALinear, disable_adapter, get_adapter_params, set_trainable_params

import fdora.eager.norm
import fdora.integrations.torchtune as shim
from fdora import FdoraError
from fdora.convert import adapter_scale, from_torchtune, merge
from fdora.eager.dropout import drop
from fdora.integrations import _norm
from fdora.integrations.torchtune import FdoraLinear, report, restore, use_fdora
from tests.close import assert_compiles

K, N, S = 24, 40, 2.0


def layer(bias=False, dtype=torch.float32, dropout=0.0, K=K, N=N, **more):
    torch.manual_seed(0)
    layer = DoRALinear(K, N, rank=4, alpha=S * 4, use_bias=bias, dropout=dropout, **more)
    return moved(layer).to(dtype)


def moved(model):
    """Adapters that have been trained, and a frozen base."""
    for name, p in model.named_parameters():
        p.requires_grad_("lora_" in name or "magnitude" in name)
        if "lora_b" in name:
            nn.init.normal_(p, std=0.1)
        if "bias" in name:
            nn.init.normal_(p)
    for m in model.modules():
        if isinstance(m, DoRALinear):
            m.initialize_dora_magnitude()
            m.magnitude.data *= 1 + 0.1 * torch.randn_like(m.magnitude)
    return model


def run(model, x, dy=None):
    """y and the gradients of x and of every parameter that wants one, by name."""
    x = x.detach().clone().requires_grad_(x.is_floating_point())
    y = model(x)
    leaves = ({"x": x} if x.requires_grad else {}) | {n: p for n, p in model.named_parameters() if p.requires_grad}
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y) if dy is None else dy
    return {"y": y.detach()} | dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))


def agree(ours, stock, **tolerance):
    assert ours.keys() == stock.keys()
    for name, t in stock.items():
        assert ours[name].dtype == t.dtype and t.abs().max() > 1e-3
        torch.testing.assert_close(ours[name], t, **tolerance, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_output_and_every_gradient(bias, dtype):
    model, x = layer(bias, dtype), torch.randn(2, 7, K).to(dtype)
    if bias:
        model.bias.requires_grad_()  # torchtune freezes it; where it is trained, its gradient has g, too
    stock = run(model, x)
    assert use_fdora(model) is model
    agree(run(model, x), stock, rtol=1e-5, atol=1e-5 if dtype == torch.float32 else 1e-9)
    assert report(model) == {"": {"fused": 1}}


def test_dropout_in_plain_torch_has_torchtunes_mask():
    model, x = layer(True, dropout=0.4), torch.randn(9, K)
    outs = []
    for _ in range(2):
        torch.manual_seed(5)
        outs.append(run(model, x))
        use_fdora(model)
    agree(outs[1], outs[0], rtol=1e-5, atol=1e-5)
    model.eval()
    agree(run(model, x), run(restore(copy.deepcopy(model)), x), rtol=1e-5, atol=1e-5)
    assert report(model)[""] == {"composed": 1, "fused": 1}


def test_dropout_in_kernels_is_of_the_adapters_input_alone(monkeypatch):
    model, x = use_fdora(layer(True, dropout=0.4)), torch.randn(9, K)
    monkeypatch.setattr(shim, "select_backend", lambda _: type("Choice", (), {"name": "triton"}))
    torch.manual_seed(5)
    ours = run(model, x)
    assert report(model)[""] == {"fused": 1}
    torch.manual_seed(5)
    seed = torch.randint(2**62, ())

    class SameMask(nn.Module):
        def forward(self, x):
            return drop(x, seed, 0.4)

    restore(model).dropout = SameMask()
    agree(ours, run(model, x), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bias", [False, True], ids=["plain", "bias"])
def test_nf4_keeps_no_dense_weight(bias):
    model, x = layer(K=128, N=256, quantize_base=True), torch.randn(5, 128)
    if bias:
        model.use_bias, model.bias = True, nn.Parameter(torch.randn(256), requires_grad=False)
    stock = run(model, x)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.append(t.numel() * (type(t) is torch.Tensor)) or t, lambda t: t
    ):
        ours = run(use_fdora(model), x)
    agree(ours, stock, rtol=1e-4, atol=1e-4)
    assert report(model) == {"": {"fused": 1}} and max(sizes) < 128 * 256
    with torch.no_grad():
        model.lora_b.register_forward_hook(lambda *_: None)
        torch.testing.assert_close(model(x), ours["y"], rtol=1e-5, atol=1e-5)
    assert report(model) == {"": {"fused": 1, "composed": 1}}


def test_another_nf4_weight_has_another_norm(monkeypatch):
    monkeypatch.setattr(_norm, "SMALL", 0)
    model, x = use_fdora(layer(K=128, N=256, quantize_base=True)), torch.randn(5, 128)
    kept = model._fdora.weight(model.weight)
    model(x)
    assert model._fdora.weight(model.weight) is kept
    model.weight = nn.Parameter(to_nf4(2 * model.weight.get_original_weight()), requires_grad=False)
    model(x)
    W = model.weight.get_original_weight() + S * model.lora_b.weight @ model.lora_a.weight
    ((c, _),) = model._fdora.kept.memo[0].slots.values()
    torch.testing.assert_close(c, W.detach().norm(dim=1), rtol=1e-5, atol=0)
    assert torch.equal(copy.deepcopy(model)(x), model(x))
    model.load_state_dict(model.state_dict())
    assert model._fdora.held is None


def test_everything_of_torchtunes_stays():
    model = layer(True)
    before, kept = dict(model.__dict__), {n: p for n, p in model.named_parameters()}
    x = torch.randn(3, K)
    want, keys = model(x), list(model.state_dict())
    use_fdora(use_fdora(model))
    assert type(model) is FdoraLinear and isinstance(model, DoRALinear)
    assert list(model.state_dict()) == keys and get_adapter_params(model).keys() == {
        "lora_a.weight",
        "lora_b.weight",
        "magnitude",
    }
    model.disabled = True
    assert torch.equal(model(x), nn.functional.linear(x, model.weight, model.bias))
    model.disabled = False
    for copied in (copy.deepcopy(model), torch.load(_saved(model), weights_only=False)):
        torch.testing.assert_close(copied(x), want)
        assert report(copied) == {"": {"fused": 1}}
    restore(restore(model))
    assert type(model) is DoRALinear and model.__dict__.keys() == before.keys()
    assert all(p is kept[n] for n, p in model.named_parameters()) and torch.equal(model(x), want)
    assert report(model) == {"": {}}


def _saved(model):
    file = io.BytesIO()
    model(torch.randn(3, K))
    torch.save(model, file)
    file.seek(0)
    return file


def test_one_norm_for_each_change(monkeypatch):
    """Counted, and each time the output is that of torchtune's own code on the same values."""
    monkeypatch.setattr(_norm, "SMALL", 0)
    model, x = use_fdora(layer()), torch.randn(3, K)
    computed, norm_fwd = [], fdora.eager.norm.norm_fwd
    monkeypatch.setattr(fdora.eager.norm, "norm_fwd", lambda *a: computed.append(1) or norm_fwd(*a))

    def norms():
        computed.clear()
        for _ in range(2):
            y = model(x.to(model.weight.dtype))
        ours = len(computed)
        torch.testing.assert_close(y, DoRALinear.forward(model, x.to(model.weight.dtype)), rtol=1e-5, atol=1e-5)
        return ours

    assert norms() == 1 and norms() == 0
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)  # moves values, not version counters
    model(x).square().mean().backward()
    optimizer.step()
    assert norms() == 1 and norms() == 0
    model.scaling = 0.5
    assert norms() == 1
    model.load_state_dict({"weight": torch.randn(N, K)}, strict=False)  # adapters as before, another base
    assert norms() == 1
    for p in (model.lora_a.weight, model.lora_b.weight):
        p.data = p.data.bfloat16().float()
    assert norms() == 1
    model.bfloat16().float()  # of these, only W has lost digits
    assert norms() == 1
    model.double()
    assert norms() == 1
    model.weight = nn.Parameter(torch.randn_like(model.weight), requires_grad=False)
    assert norms() == 1
    model.weight.data *= torch.rand(N, 1).double()
    use_fdora(model)
    assert norms() == 1


class Doubled(nn.Module):
    def forward(self, x):
        return 2 * x


FALLBACKS = {
    "the base weight requires grad": lambda m: m.weight.requires_grad_(),
    "a Doubled for dropout": lambda m: setattr(m, "dropout", Doubled()),
    "adapters neither float32 nor torch.float32": lambda m: setattr(m, "magnitude", nn.Parameter(m.magnitude.data.double())),
    "parameters of other shapes (sharded)": lambda m: setattr(m, "magnitude", nn.Parameter(torch.rand(1))),
}


@pytest.mark.parametrize("why", FALLBACKS)
def test_what_cannot_be_served_is_torchtunes_and_counted(why):
    model, x = use_fdora(layer()), torch.randn(3, K)
    FALLBACKS[why](model)
    ours = run(model, x)
    assert report(model) == {"": {f"stock: {why}": 1}}
    stock = run(restore(model), x)
    assert ours.keys() == stock.keys() and all(torch.equal(ours[n], t) for n, t in stock.items())


def test_sharded_parameters_go_torchtunes_way(tmp_path):
    from torch.distributed import destroy_process_group, init_process_group
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        model, mesh = use_fdora(layer()), init_device_mesh("cpu", (1,))
        x = torch.randn(3, K)
        want = model(x)
        for module in (model, model.lora_a, model.lora_b):
            for name, p in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(distribute_tensor(p.data, mesh), requires_grad=p.requires_grad))
        try:
            torch.testing.assert_close(model(distribute_tensor(x, mesh)).full_tensor(), want, rtol=1e-5, atol=1e-5)
        except RuntimeError as error:  # torchtune's own eye is a plain tensor; that it is torchtune's failure is the point
            assert "DTensor" in str(error)
        assert report(model) == {"": {"fused": 1, "stock: a DTensor among the tensors": 1}}
    finally:
        destroy_process_group()


def test_hooks_on_the_parts_still_run():
    model, x = use_fdora(layer()), torch.randn(3, K)
    want, seen = model(x), []
    handle = model.lora_a.register_forward_hook(lambda *_: seen.append(1))
    torch.testing.assert_close(model(x), want, rtol=1e-5, atol=1e-6)
    handle.remove()
    assert seen == [1] and report(model) == {"": {"fused": 1, "composed": 1}}


def test_compiled_without_a_graph_break():
    model, x = use_fdora(layer(True)), torch.randn(3, K, requires_grad=True)
    assert_compiles(lambda: model(x), [x, *(p for p in model.parameters() if p.requires_grad)], 1e-5)


def test_a_model_without_dora_is_a_mistake():
    with pytest.raises(FdoraError, match="must have a DoRALinear of torchtune, got none"):
        use_fdora(nn.Linear(3, 3))


FAMILIES = ("gemma", "gemma2", "llama2", "llama3", "llama3_1", "llama3_2", "mistral", "phi3", "qwen2")  # qwen2 has biases


def decoder(family):
    """By torchtune's own builder."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=50, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, embed_dim=32, max_seq_len=16)
    sizes |= dict(intermediate_dim=48, lora_rank=4, lora_alpha=8, apply_lora_to_mlp=True, use_dora=True)
    sizes["lora_attn_modules"] = ["q_proj", "k_proj", "v_proj", "output_proj"]
    builders = importlib.import_module(f"torchtune.models.{family}._component_builders")
    build = getattr(builders, f"lora_{family}")
    model = build(**{name: size for name, size in sizes.items() if name in inspect.signature(build).parameters})
    set_trainable_params(model, get_adapter_params(model))
    return moved(model)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_trains_as_before(family):
    """Ten steps of fused AdamW with checkpointing: the same losses; disable_adapter and state dicts as before."""
    tokens = torch.randint(50, (2, 17), generator=torch.Generator().manual_seed(2))
    losses = {}
    for ours in (False, True):
        model = decoder(family)
        if ours:
            use_fdora(model)
        optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, fused=True)
        losses[ours] = []
        for _ in range(10):
            logits = torch.utils.checkpoint.checkpoint(model, tokens[:, :-1], use_reentrant=False)
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses[ours].append(loss.item())
        with disable_adapter(model):
            losses[ours].append(model(tokens[:, 1:]).sum().item())
    assert losses[True] == pytest.approx(losses[False], rel=1e-3, abs=1e-2) and losses[True][0] - losses[True][9] > 0.3
    calls = report(model)
    assert len(calls) == 14 and all(c == {"fused": 20} for c in calls.values())
    assert model.state_dict().keys() == decoder(family).state_dict().keys()


def test_the_bias_leaves_torchtune_multiplied_by_g():
    model, x = layer(True), torch.randn(3, K)
    p = from_torchtune(
        {f"a.{k}": v for k, v in model.state_dict().items() if k not in ("weight", "bias")}, {"r": 4, "lora_alpha": 8}
    )["a"]
    W, g = model.weight.detach(), adapter_scale(model.weight.detach(), p)
    torch.testing.assert_close(nn.functional.linear(x, merge(W, p), g * model.bias), model(x), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(nn.functional.linear(x, merge(W, p), model.bias), model(x), atol=1e-2)
