"""A model's life with fdora: on, off, copied, saved, trained, extended, compiled; and what is not served."""

import copy
import dataclasses
import pickle
import weakref

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from peft.tuners.lora import layer as lora
from peft.tuners.lora import variants
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

import fdora.eager.norm
from fdora import FdoraError, _norm_cache
from fdora.autograd._ops import OPS
from fdora.integrations import _norm
from fdora.integrations._peft import fast_path
from fdora.integrations._peft.dora import Dora
from fdora.integrations.peft import disable, enable, enabled, init_magnitude, report, restore, use_fdora
from tests.close import assert_exact
from tests.integrations import models
from tests.integrations.models import KINDS, build, inputs, layer, run

STOCK = {name: getattr(variants, name) for name in dir(variants) if name.startswith("Dora") and name.endswith("Variant")}


@pytest.fixture
def reuse(monkeypatch):
    """Norms are reused in small layers, too; and counted."""
    monkeypatch.setattr(_norm, "SMALL", 0)
    computed = []
    norm_fwd = fdora.eager.norm.norm_fwd
    counted = lambda *args: computed.append(1) or norm_fwd(*args)  # noqa: E731
    monkeypatch.setattr(fdora.eager.norm, "norm_fwd", counted)
    monkeypatch.setitem(OPS, "eager", dataclasses.replace(OPS["eager"], norm_fwd=counted))
    return computed


def snapshot(model):
    found = {}
    for name, module in model.named_modules():
        state = {k: dict(v) if isinstance(v, dict) else v for k, v in module.__dict__.items()}
        found[name] = (id(module), type(module), state)
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_restore_leaves_no_trace(kind):
    model, x = build(kind), inputs(kind)
    classes = [(c, dict(vars(c))) for c in (lora.Linear, lora.Embedding, lora.Conv2d, lora.LoraLayer, *STOCK.values())]
    want, before, keys = run(model, x), snapshot(model), list(model.state_dict())
    assert use_fdora(use_fdora(model)) is model
    assert list(model.state_dict()) == keys
    run(model, x)
    assert restore(model) is model
    restore(model)
    after = snapshot(model)
    assert list(after) == list(before)
    for name in before:
        assert after[name][:2] == before[name][:2]
        assert after[name][2].keys() == before[name][2].keys()
        for key, value in before[name][2].items():
            now = after[name][2][key]
            same = now == value if isinstance(value, (dict, list)) and key != "lora_variant" else now is value
            assert same or now == value, f"{name}.{key}"
    assert layer(model).lora_variant["default"] is before["base_model.model.0"][2]["lora_variant"]["default"]
    assert all(dict(vars(c)) == content for c, content in classes)
    assert all(torch.equal(a, want[name]) for name, a in run(model, x).items())


def test_use_fdora_says_what_it_needs():
    with pytest.raises(FdoraError, match="must have a DoRA adapter of PEFT, got none"):
        use_fdora(build("linear", use_dora=False))
    with pytest.raises(FdoraError, match=r"must be a torch\.nn\.Module, got a dict"):
        restore({})
    with pytest.raises(FdoraError, match="use_fdora"):
        init_magnitude(build("linear"))
    both = nn.ModuleList([use_fdora(build("linear")), use_fdora(build("linear")).to("meta")])
    m = layer(both[0]).lora_magnitude_vector["default"].weight
    before = m.detach().clone()
    with pytest.raises(FdoraError, match=r"got `1\.base_model\.model\.0`: meta tensors"):
        init_magnitude(both)
    assert torch.equal(m, before)


@pytest.mark.parametrize("kind", ["linear", "no_bias", "embedding", "conv2d"])
def test_copies_are_their_own(kind, reuse):
    model, x = use_fdora(build(kind)), inputs(kind)
    want = model(x)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        variant = layer(other).lora_variant["default"]
        assert variant is not layer(model).lora_variant["default"]
        assert (variant.kept.memo, dict(variant.calls)) == (None, {})
        assert type(layer(other)) is type(layer(model))
        assert_exact(other(x), want)
        assert sum(variant.calls.values()) == 1
        with torch.no_grad():
            for p in other.parameters():
                p.mul_(1.5)
        assert_exact(model(x), want)
        restore(model)
        assert type(layer(other).lora_variant["default"]) is type(variant)
        use_fdora(model)


@pytest.mark.parametrize("kind", ["linear", "embedding", "conv2d"])
def test_checkpoints_both_ways(kind, tmp_path):
    model, x = build(kind), inputs(kind)
    stock = {k: v.clone() for k, v in get_peft_model_state_dict(model).items()}
    want = model(x)
    model.save_pretrained(tmp_path / "stock")
    ours = get_peft_model_state_dict(use_fdora(model))
    assert list(ours) == list(stock)
    assert all(torch.equal(ours[k], stock[k]) for k in stock)
    model.save_pretrained(tmp_path / "ours")
    base = restore(model).unload()
    for folder, low in (("ours", False), ("stock", False), ("stock", True)):
        loaded = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / folder, low_cpu_mem_usage=low)
        assert torch.equal(loaded(x), want)
        assert_exact(use_fdora(loaded)(x), want)
        with enabled():
            loaded = PeftModel.from_pretrained(copy.deepcopy(base), tmp_path / folder, low_cpu_mem_usage=low)
        assert_exact(loaded(x), want)
        assert sum(loaded.base_model.model[0].lora_variant["default"].calls.values()) == 1


def test_adapters_that_come_later():
    model, x = use_fdora(build("linear")), inputs("linear")
    model.add_adapter("later", LoraConfig(r=2, target_modules=["0"], use_dora=True))
    model.add_adapter("plain", LoraConfig(r=2, target_modules=["0"]))
    models.perturb(model)
    for name in ("plain", "later"):
        model.set_adapter(name)
        want = model(x)
        assert_exact(use_fdora(model)(x), want) if name == "later" else None
        if name == "plain":
            assert [(row.adapter, row.backend) for row in report(model)] == [("default", "eager"), ("later", "stock")]
            assert "use_fdora was not called" in str(report(model))
    assert [row.fused for row in report(model)] == [0, 1]
    model.delete_adapter("later")
    model.set_adapter("default")
    want = restore(model)(x)
    assert_exact(use_fdora(model)(x), want)


def test_half_precision_plain_adapters_beside_ours_still_get_their_float32_input():
    model = build("linear", dtype=torch.bfloat16)
    model.add_adapter("plain", LoraConfig(r=2, target_modules=["0"]))
    use_fdora(model)
    model.set_adapter("plain")
    for part in (layer(model).lora_A, layer(model).lora_B):
        part["plain"].float()
    assert model(inputs("linear", torch.bfloat16)).dtype == torch.bfloat16


def test_registry():
    def names():
        return {name: getattr(variants, name) for name in STOCK}

    with enabled():
        enable()
        assert not any(names()[n] is STOCK[n] for n in STOCK)
        for kind in KINDS:
            assert isinstance(layer(build(kind)).lora_variant["default"], Dora)
    assert names() == STOCK
    enable()
    enable()
    with enabled():
        pass
    assert names() != STOCK
    model, x = build("linear"), inputs("linear")
    disable()
    disable()
    assert names() == STOCK
    ours = model(x)
    assert report(model)[0].fused == 1
    restore(model)
    assert type(layer(model)) is lora.Linear
    assert type(layer(model).lora_variant["default"]) is variants.DoraLinearVariant
    assert_exact(ours, model(x))
    with pytest.raises(ZeroDivisionError), enabled():
        1 / 0
    assert names() == STOCK


class Net(nn.Module):
    """Embedding, linear with and without bias, a recomputed block."""

    def __init__(self):
        super().__init__()
        self.embed, self.up, self.down = nn.Embedding(20, 8), nn.Linear(8, 16, bias=False), nn.Linear(16, 8)

    def block(self, x):
        return self.down(torch.tanh(self.up(x)))

    def forward(self, i):
        x = self.embed(i)
        return checkpoint(self.block, x, use_reentrant=False)


def train(shim, optimizer, steps=30, micro=2):
    torch.manual_seed(0)
    config = LoraConfig(r=4, target_modules=["embed", "up", "down"], use_dora=True)
    model = models.perturb(get_peft_model(Net(), config)).double()
    if shim:
        use_fdora(model)
    opt = optimizer([p for p in model.parameters() if p.requires_grad])
    data = torch.Generator().manual_seed(1)
    target = torch.randn(20, 8, generator=data, dtype=torch.float64)
    losses = []
    for _ in range(steps):
        for _ in range(micro):
            i = torch.randint(0, 20, (4, 5), generator=data)
            loss = (model(i) - target[i]).square().mean()
            loss.backward()
            losses.append(loss.item())
        opt.step()
        opt.zero_grad()
    return model, torch.tensor(losses)


class Behind:
    """An optimizer that writes through .data, as bitsandbytes' do: no version counter moves."""

    def __init__(self, params):
        self.params = params

    def step(self):
        for p in self.params:
            p.data.sub_(p.grad, alpha=0.5)

    def zero_grad(self):
        for p in self.params:
            p.grad = None


@pytest.mark.parametrize(
    "optimizer", [lambda params: torch.optim.AdamW(params, lr=0.05, fused=True), Behind], ids=["fused AdamW", ".data"]
)
def test_training_is_pefts_and_no_norm_is_stale(optimizer, reuse):
    _, want = train(False, optimizer)
    model, got = train(True, optimizer)
    torch.testing.assert_close(got, want, rtol=1e-8, atol=1e-8)
    assert got[-1] < 0.7 * got[0]
    assert len(reuse) == 3 * 30  # once for each layer and step: not for the second micro-batch, not for the recomputation
    assert [row.fused + row.composed for row in report(model)] == [60, 120, 120]


@pytest.mark.parametrize("kind", ["linear", "no_bias", "embedding", "conv2d", "Conv1D", "quantised"])
def test_norm_follows_its_inputs(kind, reuse):
    model, x = use_fdora(build(kind)), inputs(kind)
    module, computed = layer(model), 0

    def step(new):
        nonlocal computed
        ours = model(x)
        computed += new
        assert len(reuse) == computed
        assert_exact(ours, restored()(x))

    def restored():
        other = copy.deepcopy(model)
        return restore(other)

    step(1)
    step(0)
    module.scaling["default"] *= 2
    step(1)
    for name, p in model.named_parameters():
        if "lora_B" in name or "embedding_A" in name:
            p.data.mul_(1.5)
        if "magnitude" in name:
            p.data.mul_(1.1)
    step(1)
    step(0)
    model.eval()
    step(0)
    with torch.inference_mode():
        step(1)
    step(1)
    if kind != "quantised" and not (kind == "Conv1D" and models.old_peft()):
        model.merge_adapter()
        model.unmerge_adapter()
        step(1)
        module.base_layer.weight = nn.Parameter(module.base_layer.weight.detach() * 2, requires_grad=False)
        step(1)
        with torch.no_grad():
            module.base_layer.weight.mul_(3)
        use_fdora(model)
        step(1)
    if kind in ("linear", "no_bias"):
        model.load_state_dict({k: v * (0.5 if "base_layer" in k else 1) for k, v in model.state_dict().items()})
        step(1)


@pytest.mark.parametrize("kind", ["linear", "conv2d"])
def test_a_plain_adapter_that_merges_beside_ours(kind, reuse):
    """Its merge changes the base weight by rounding, and no variant hears of it."""
    model, x = build(kind), inputs(kind)
    model.add_adapter("plain", LoraConfig(r=2, target_modules=["0"]))
    use_fdora(model)
    model(x)
    model.set_adapter("plain")
    model.merge_adapter()
    model.unmerge_adapter()
    model.set_adapter("default")
    model(x)
    assert len(reuse) == 2
    model(x)
    assert len(reuse) == 2


@pytest.mark.parametrize("together", [False, True], ids=["two models", "one model"])
def test_a_plain_adapter_that_merges_into_the_weight_of_another_layer(together, reuse):
    merging, other, x = build("no_bias"), build("no_bias"), inputs("no_bias")
    layer(other).base_layer.weight = layer(merging).base_layer.weight
    merging.add_adapter("plain", LoraConfig(r=2, target_modules=["0"], init_lora_weights=False))
    for model in [nn.ModuleList([merging, other])] if together else [merging, other]:
        use_fdora(model)
    for change in (lambda: merging.merge_adapter(["plain"]), merging.unmerge_adapter):
        other(x)
        change()
        assert_exact(other(x).detach(), copy.deepcopy(other)(x).detach())


def test_bound_methods_outlive_restore():
    """Accelerate's hooks keep the forward they replace."""
    model, x = use_fdora(build("linear")), inputs("linear")
    kept, module = layer(model).forward, layer(restore(model))
    assert torch.equal(kept(x), module(x))


def test_a_captured_graph_reads_and_writes_the_memory_from_before(reuse, monkeypatch):
    """A replay finds nothing else there. CUDA is not needed to see which tensors are kept."""
    model, x = use_fdora(build("no_bias")), inputs("no_bias").detach()
    variant, module = layer(model).lora_variant["default"], layer(model)
    with torch.no_grad():
        model(x)
        memo = variant.kept.memo[0]
        kept, now = memo.graph, [t.clone() for t in memo.graph]
        monkeypatch.setattr(_norm_cache, "capturing", lambda t: True)
        module.lora_B["default"].weight.mul_(2)
        assert_exact(model(x), restore(copy.deepcopy(model))(x))
    assert all(a is b for a, b in zip(memo.graph, kept, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(kept, now, strict=True))
    assert len(reuse) == 2
    model(x)
    assert len(reuse) == 2


def test_a_norm_does_not_keep_the_weight_alive(reuse):
    model, x = use_fdora(build("linear")), inputs("linear")
    model(x)
    old = weakref.ref(layer(model).base_layer.weight)
    layer(model).base_layer.weight = nn.Parameter(layer(model).base_layer.weight.detach().clone(), requires_grad=False)
    assert old() is None


@pytest.mark.parametrize("kind", ["linear", "Conv1D", "embedding", "conv2d"])
def test_compile_in_one_graph(kind):
    model, x = build(kind), inputs(kind)
    want = run(use_fdora(model), x)
    calls = dict(layer(model).lora_variant["default"].calls)
    got = run(torch.compile(model, fullgraph=True, backend="aot_eager"), x)
    assert {k.removeprefix("_orig_mod."): v for k, v in got.items()}.keys() == want.keys()
    for name, value in got.items():
        assert_exact(value, want[name.removeprefix("_orig_mod.")], name)
    assert dict(layer(model).lora_variant["default"].calls) == calls


def test_one_compilation_for_parameters_of_other_sizes():
    """Sizes and strides are dynamic then, and some found to be constant again: the rank, the adapters' columns."""
    torch._dynamo.reset()
    for N, K in ((24, 20), (40, 36)):
        model, x = use_fdora(build(nn.Linear(K, N))), torch.randn(3, K, dtype=torch.float64)
        trained = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}

        def call(params, x, model=model):
            return torch.func.functional_call(model, params, (x,))

        assert_exact(torch.compile(call, fullgraph=True, backend="eager")(trained, x), model(x).detach())


class Sharded(torch.Tensor):
    """A tensor subclass that fdora knows nothing of."""


@pytest.mark.parametrize("kind", ["linear", "embedding", "conv2d"])
@pytest.mark.parametrize("how", ["requires_grad", "subclass", "dtype", "meta", "device"])
def test_what_is_not_served_runs_stock_and_is_counted(kind, how):
    model, x = build(kind), inputs(kind)
    module = layer(model)
    magnitude = module.lora_magnitude_vector["default"]
    if how == "requires_grad":
        module.base_layer.weight.requires_grad_()
    if how == "subclass":
        magnitude.weight = nn.Parameter(magnitude.weight.detach().as_subclass(Sharded))
    if how == "dtype":
        magnitude.weight = nn.Parameter(magnitude.weight.detach().bfloat16())
    if how == "meta":
        model, x = model.to("meta"), x.to("meta")
    if how == "device":
        magnitude.weight = nn.Parameter(magnitude.weight.detach().to("meta"))
        with pytest.raises(RuntimeError, match="meta"):
            use_fdora(model)(x)
    want = None if how == "device" else model(x)
    use_fdora(model)
    if want is not None:
        got = model(x)
        assert got.dtype == want.dtype
        assert how == "meta" or torch.equal(got, want)
    row = report(model)[0]
    words = {"requires_grad": "requires grad", "subclass": "Sharded", "dtype": "bfloat16", "meta": "meta", "device": "devices"}
    assert (row.fused, row.composed, list(row.fallbacks.values())) == (0, 0, [1])
    assert words[how] in next(iter(row.fallbacks))
    assert f"stock 1x: {next(iter(row.fallbacks))}" in str(report(model))


def test_emptied_storage_is_seen():
    """FSDP frees what it has gathered; the shape stays."""
    W, A = torch.randn(6, 4), torch.randn(2, 4)
    assert fast_path.obstacle(W, A) == ""
    W.untyped_storage().resize_(0)
    why = fast_path.obstacle(A, W)
    del W  # no message may print it
    assert "storage" in why


def test_pieces_are_seen():
    """With use_orig_params=True FSDP leaves a rank's flat piece in the place of a parameter."""
    W, A, B, m = torch.randn(6, 4), torch.randn(2, 4), torch.randn(6, 2), torch.randn(6)
    assert isinstance(fast_path.served(W, W, A, B, m), fast_path.Weights)
    for pieces in ((W.flatten(), A, B, m), (W, A[0], B, m), (W, A, B[:3], m), (W, A, B, m[:3]), (W, A[:, :2], B, m)):
        assert "sharded" in fast_path.served(W, *pieces)


def test_dora_caching_stays_pefts():
    from peft import helpers

    if not hasattr(helpers, "DoraCaching"):
        pytest.skip("this PEFT has no DoraCaching; runs with PEFT 0.21, which `make test` installs")
    model, x = use_fdora(build("linear")).eval(), inputs("linear")
    magnitude = layer(model).lora_magnitude_vector["default"]
    want = model(x)
    with helpers.DoraCaching():
        assert_exact(model(x), want)
        assert magnitude._dora_cache
    assert_exact(model(x), want)
    assert not magnitude._dora_cache
    assert report(model)[0].fallbacks == {"DoraCaching is on": 1}


def test_report():
    model = use_fdora(build("linear"))
    other = build("embedding")
    pair = nn.ModuleList([model, other])
    model(inputs("linear"))
    first, second = report(pair)
    assert first[:5] == ("0.base_model.model.0", "default", (40, 24), 4, "eager")
    assert "cpu" in first.why
    assert (first.fused, first.composed, first.fallbacks) == (1, 0, {})
    assert first.saved == (3 * 40 * 24 + 24 * 24) * 8
    assert (second.shape, second.backend, second.saved) == ((40, 24), "stock", 0)
    text = str(report(pair)).splitlines()
    assert len(text) == 3 + 2
    assert text[1].split()[:5] == ["0.base_model.model.0", "default", "40x24", "4", "eager"]
    use_fdora(other)
    assert report(pair)[1].saved == 3 * 40 * 24 * 8
    assert report(use_fdora(build("conv2d")))[0][2] == (6, 4 * 3 * 2)


@pytest.fixture
def mesh():
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    yield torch.distributed.device_mesh.init_device_mesh("cpu", (1,))
    torch.distributed.destroy_process_group()


def test_fsdp2(mesh):
    """Sharded as a layer: plain weights inside its forward. Sharded part by part: each part is called for its weight."""
    x, built = inputs("no_bias"), build("no_bias")
    want = built(x)
    for parts in (False, True):
        model = use_fdora(copy.deepcopy(built))
        module = layer(model)
        for part in (module.lora_A, module.lora_B, module.lora_magnitude_vector) if parts else ():
            fully_shard(part["default"], mesh=mesh)
        fully_shard(module, mesh=mesh)
        assert_exact(model(x), want)
        row = report(model)[0]
        assert (row.fused, row.composed, row.fallbacks) == (1, 0, {})
        assert_exact(restore(model)(x), want)
        assert len(report(model)[0].fallbacks) == 0
