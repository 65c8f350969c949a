"""The norms of all layers of a PEFT model by one call per forward: each layer's slice is right, whoever changes what and when."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fdora import _dispatch
from tests import device
from tests.close import rel_l2
from tests.norms import capture
from tests.triton.changes import merged, new_weight, times
from tests.triton.marks import HALF, INTERPRETED, needs_kernels  # noqa: F401

pytestmark = needs_kernels


ROUND = {"compute": None}  # what use_fdora makes of base weights


class Net(nn.Module):
    """Two blocks that may be recomputed."""

    def __init__(self, reentrant=None):
        super().__init__()
        self.first = nn.Sequential(nn.Linear(24, 40), nn.GELU(), nn.Linear(40, 24))
        self.second = nn.Sequential(nn.Linear(24, 40, bias=False), nn.GELU(), nn.Linear(40, 24))
        self.reentrant = reentrant

    def forward(self, x):
        for block in (self.first, self.second):
            x = block(x) if self.reentrant is None else checkpoint(block, x, use_reentrant=self.reentrant)
        return x


@pytest.fixture(params=[None, "fp8"], ids=["dense", "codes"])
def counted(monkeypatch, norms, request):
    """Calls for all layers, and layers that looked after themselves. Of base weights of 8-bit codes as of dense ones."""
    pytest.importorskip("peft", reason="needs PEFT; `make test` installs it")
    from fdora.integrations import _norm

    monkeypatch.setattr(_norm, "SMALL", 0)
    monkeypatch.setitem(ROUND, "compute", request.param)
    monkeypatch.setattr(_dispatch, "_forced", "triton")

    def took():
        found = norms.counts()
        return found.pop("model", 0), sum(found.values())

    return took


dense = pytest.mark.parametrize("counted", [None], indirect=True)  # a merge, or what codes are held by themselves


def make(reentrant=None, shim=True, base=None):
    from peft import LoraConfig, get_peft_model

    from fdora.integrations.peft import use_fdora

    torch.manual_seed(0)
    net = Net(reentrant) if base is None else base
    config = LoraConfig(r=4, use_dora=True, target_modules=["0", "2"])
    model = get_peft_model(net.to(device.NAME, HALF[0]), config)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora" in name:
                p.copy_(p * (1 + 0.1 * torch.randn_like(p)) if "magnitude" in name else 0.3 * torch.randn_like(p))
    return use_fdora(model, **ROUND) if shim else model


def inputs():
    return torch.randn(5, 24, generator=torch.Generator().manual_seed(1)).to(device.NAME, HALF[0]).requires_grad_()


def layers(model):
    from fdora.integrations._peft.layer import Linear

    return [m for m in model.modules() if isinstance(m, Linear)]


def assert_as_if_alone(model, x):
    """Output and gradients are those of a copy whose layers each compute their norm."""
    from fdora.integrations._hook import unhook

    other = copy.deepcopy(model)
    unhook(other)
    results = []
    for each in (model, other):
        leaves = [x, *(p for p in each.parameters() if p.requires_grad)]
        for t in leaves:
            t.grad = None
        y = each(x)
        y.float().square().sum().backward()
        results.append([y.detach(), *(t.grad for t in leaves)])
    for got, want in zip(*results, strict=True):
        assert rel_l2(got, want) < 1e-2


def test_every_change_reaches_every_layer(counted):
    from fdora.integrations.peft import use_fdora

    model, x = make(), inputs()
    first = layers(model)[0]

    def scaled(of, by=1.5):
        with torch.no_grad():
            for name, p in model.named_parameters():
                if of in name:
                    p.data.mul_(by)  # moves no version

    def halve(t):
        t.copy_(times(t, 0.5))

    def same_memory_turned():
        for part in (first.lora_A["default"], layers(model)[2].lora_A["default"]):
            square = torch.randn(24, 24, device=device.NAME)[:4]
            part.weight.data = square

    changes = [
        lambda: None,
        lambda: scaled("lora_A"),
        lambda: scaled("lora_B", -1),
        lambda: first.scaling.update(default=3.0),
        lambda: halve(first.base_layer.weight.detach()),
        lambda: first.base_layer.load_state_dict({n: times(p, 0.5) for n, p in first.base_layer.state_dict().items()}),
        lambda: model.load_state_dict({n: times(p, 0.5) for n, p in model.state_dict().items()}),
        lambda: new_weight(first, 0.5),
        same_memory_turned,
        lambda: layers(model)[1].base_layer.weight_scale.mul_(2) if ROUND["compute"] else merged(model, first),
        lambda: model.float().to(HALF[0]),
        lambda: (halve(first.base_layer.weight.data), use_fdora(model, **ROUND)),
        lambda: [layer.lora_A["default"].float() for layer in layers(model)],
    ]
    for change in changes:
        change()
        assert_as_if_alone(model, x)
    counted()
    model(x)
    assert counted() == (1, 0)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_a_step_asks_once_and_recomputation_once_more(counted, reentrant):
    model, x = make(reentrant), inputs()
    for micro in range(3):
        y = model(x)
        assert counted() == (1, 0), micro
        y.float().sum().backward()
        assert counted() == (0 if reentrant is None else 1, 0), micro
    assert_as_if_alone(model, x)


def test_each_backward_asks_anew(counted):
    """Its recomputation has nothing of that of another one, between which anything may have changed."""
    model, x = make(False), inputs()
    losses = [model(x).float().square().mean() for _ in range(2)]
    counted()
    for loss in losses:
        loss.backward()
        assert counted() == (1, 0)


@pytest.mark.parametrize("reentrant", [None, False, True])
def test_bits_decide_what_is_computed(counted, reentrant, norms):
    """All norms once per optimizer step: 4 0 0, with recomputation or without."""
    model, x = make(reentrant), inputs()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for _ in range(2):
        norms.launches.clear()
        for _ in range(3):
            model(x).float().square().mean().backward()
        changed = [launch.computed for launch in norms.launches]
        assert changed[0] == 4 and not any(changed[1:])
        optimizer.step()
        optimizer.zero_grad()


def test_slices_of_a_forward_are_never_written_again(counted, norms):
    """Two forwards, with a write behind autograd's back between them, then both backwards: as each on its own."""
    model, x = make(), inputs()
    leaves = [p for n, p in model.named_parameters() if "magnitude" in n]

    def gradients(between):
        y = model(x)
        between()
        model(x)
        return torch.autograd.grad(y.float().sum(), leaves)

    W, old = layers(model)[0].base_layer.weight, layers(model)[0].base_layer.weight.detach().clone()
    want = gradients(lambda: None)
    B = layers(model)[1].lora_B["default"].weight
    saved = B.detach().clone()

    def write_and_take_back():
        B.data.mul_(9)
        model(x)
        B.data.copy_(saved)

    for got, expected in zip(gradients(write_and_take_back), want, strict=True):
        assert torch.equal(got, expected)
    assert torch.equal(W, old)
    assert len({launch.c.data_ptr() for launch in norms.launches}) == len(norms.of("model")) == len(norms.launches)


def test_outside_of_a_forward_layers_look_after_themselves(counted):
    model, x = make(), inputs()
    model(x)
    counted()
    layer = layers(model)[0]
    layer.lora_B["default"].weight.data.mul_(2)
    y = layer(x)
    runs, alone = counted()
    assert runs == 0 and alone == 1
    assert_as_if_alone(layer, x)
    counted()
    block = model.base_model.model.second
    block[0].lora_A["default"].weight.data.mul_(2)
    block(x).float().sum().backward()
    assert counted() == (0, 2)
    assert y.isfinite().all()


@dense
def test_a_merge_of_another_model_on_the_same_weights(counted):
    """What it leaves there may lie where the weight lay before, at the same version."""
    one, x = make(), inputs()
    base = Net()
    for mine, other in zip(layers(one), [base.first[0], base.first[2], base.second[0], base.second[2]], strict=True):
        other.weight = mine.base_layer.weight
    two = make(base=base)
    two(x)
    lay = [layer.base_layer.weight.data for layer in layers(two)]
    one.merge_adapter()
    for layer, memory in zip(layers(two), lay, strict=True):
        W = layer.base_layer.weight
        assert W.data_ptr() != memory.data_ptr() and not torch.equal(W, memory)
        W.data = memory.copy_(W)
    counted()
    got = two(x)
    assert counted() == (1, 0)
    assert_as_if_alone(two, x)
    assert torch.equal(got, two(x))


def test_a_forward_that_raises_ends_it(counted):
    model, x = make(), inputs()
    model(x)
    handle = model.base_model.model.second.register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        model(x)
    handle.remove()
    counted()
    layer = layers(model)[3]
    layer.lora_B["default"].weight.data.mul_(2)
    layer(torch.zeros(2, 40, device=device.NAME, dtype=HALF[0]))
    assert counted() == (0, 1)


def test_a_write_inside_of_a_forward_is_seen(counted):
    """By the version counter: the layer that comes later looks after itself."""
    model, x = make(), inputs()
    last = layers(model)[3]
    written = last.base_layer.weight_scale if ROUND["compute"] else last.lora_B["default"].weight
    model(x)

    def write(*_):
        with torch.no_grad():
            written.mul_(1.5)

    handle = model.base_model.model.first.register_forward_hook(write)
    counted()
    got = model(x)
    assert counted()[1] == 1
    handle.remove()
    assert rel_l2(got, model(x)) < 1e-2


def test_another_thread_has_no_slices(counted):
    model, x = make(), inputs()
    model(x)
    counted()
    found = []

    def inside(*_):
        thread = threading.Thread(target=lambda: found.append(layers(model)[0](x)))
        thread.start()
        thread.join()

    handle = model.base_model.model.second.register_forward_hook(inside)
    model(x)
    handle.remove()
    assert counted() == (1, 1) and len(found) == 1


def test_optimizers_that_step_inside_of_backward(counted):
    def step(p):
        p.data.sub_(p.grad, alpha=0.05)
        p.grad = None

    for reentrant in (False, True):
        results = []
        for shim in (True, False):
            model, x = make(reentrant, shim=shim), inputs()
            for p in model.parameters():
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(step)
            for _ in range(3):
                y = model(x)
                y.float().square().mean().backward()
            results.append(model(x).detach())
        assert rel_l2(*results) < 2e-2


def test_several_adapters(counted):
    """The table is of the active one; the layers of another look after themselves until the next forward."""
    from peft import LoraConfig

    model, x = make(), inputs()
    model.add_adapter("other", LoraConfig(r=3, use_dora=True, target_modules=["0", "2"]))
    from fdora.integrations.peft import use_fdora

    with torch.no_grad():
        for name, p in model.named_parameters():
            if "lora_B.other" in name:  # else it is 0, and so are gradients
                p.copy_(0.3 * torch.randn_like(p))
    use_fdora(model)
    for name in ("other", "default", "other"):
        model.set_adapter(name)
        assert_as_if_alone(model, x)
        for _ in range(3):
            model(x)
        counted()
        model(x)
        assert counted() == (1, 0)


def test_copies_and_restore(counted):
    from fdora.integrations.peft import restore, use_fdora

    model, x = make(), inputs()
    want = model(x)
    other = copy.deepcopy(model)
    counted()
    assert rel_l2(other(x), want) < 1e-2
    assert counted() == (0, 4)
    use_fdora(other)(x)
    assert counted() == (1, 0)
    for each in (model, other):
        restore(each)
        assert not any(m._forward_pre_hooks or m._forward_hooks for m in each.modules())
        assert not any(m._forward_pre_hooks_with_kwargs or m._forward_hooks_always_called for m in each.modules())


@dense
def test_nobody_asks_any_more(counted):
    """Merged: the hook does nothing and holds nothing."""
    model, x = make(), inputs()
    model(x)
    model.merge_adapter()
    for _ in range(4):
        model(x)
    counted()
    model(x)
    assert counted() == (0, 0)


@dense
@pytest.mark.parametrize("how", ["unload", "merge_and_unload"])
def test_an_unloaded_model_has_no_hooks(counted, how):
    model, x = make(), inputs()
    model(x)
    plain = getattr(model, how)()
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in plain.modules())
    plain(x)
    assert counted() == (1, 0)


def test_the_inner_model_on_its_own(counted):
    """As generate calls it."""
    model, x = make(), inputs()
    model(x)
    counted()
    model.get_base_model()(x)
    assert counted() == (1, 0)


@dense
def test_weights_are_not_kept_alive(counted):
    import weakref

    model, x = make(), inputs()
    model(x)
    first = layers(model)[0].base_layer
    old = weakref.ref(first.weight)
    first.weight = nn.Parameter(first.weight.detach().clone(), requires_grad=False)
    assert old() is None


def test_what_a_graph_captures_is_its_own(counted, norms, monkeypatch):
    """Norms and fingerprints in place, in memory from before the capture. CUDA is not needed to see that a second call of
    the captured code (a replay) is right, whatever eager forwards did meanwhile."""
    model, x = make(), inputs()
    model(x)

    def replay():
        with monkeypatch.context() as patch:
            capture(patch)
            return model(x)

    def reload():
        model.load_state_dict({name: times(p, 0.5) for name, p in model.state_dict().items()})
        assert not norms.of("model in place")[0].words.any()  # before the next replay, which asks nobody

    B = layers(model)[0].lora_B["default"].weight
    steps = [replay, replay, lambda: B.data.mul_(2), replay, lambda: B.data.mul_(2), lambda: model(x), replay]
    steps += [reload, *[replay] * (not ROUND["compute"])]  # of codes another capture has another table
    for step in steps:
        y = step()
        if step is replay:
            assert rel_l2(y, model(x)) < 1e-2
            (first, *_, captured), eager = 2 * norms.of("model in place"), norms.of("model")[-1]
            assert all(map(torch.equal, captured.each, eager.each))
            assert captured.c.data_ptr() == first.c.data_ptr() != eager.c.data_ptr()


def test_selective_checkpointing(counted):
    """It counts the operations of a forward and of its recomputation, which a slice would not have."""
    from functools import partial

    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

    def policy(ctx, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op == torch.ops.aten.mm.default else CheckpointPolicy.PREFER_RECOMPUTE

    def selective(model, x):
        contexts = partial(create_selective_checkpoint_contexts, policy)
        for block in (model.first, model.second):
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return x

    model, x = make(), inputs()
    inner = model.get_base_model()
    want = torch.autograd.grad(model(x).float().square().sum(), x)[0]
    inner.forward = lambda x: selective(inner, x)
    for _ in range(2):
        got = torch.autograd.grad(model(x).float().square().sum(), x)[0]
        assert rel_l2(got, want) < 1e-2


def test_a_checkpoint_around_the_model(counted):
    model, x = make(), inputs()
    want = torch.autograd.grad(model(x).float().square().sum(), x)[0]
    counted()
    y = checkpoint(model, x, use_reentrant=False)
    got = torch.autograd.grad(y.float().square().sum(), x)[0]
    assert counted() == (2, 0)
    assert rel_l2(got, want) < 1e-2


def test_a_launch_that_fails_leaves_no_fingerprint_behind(counted, norms):
    """As where memory is out, or on a Ctrl-C: the fingerprints are those of now, the norms are not."""
    model, x = make(), inputs()
    model(x)
    layers(model)[0].lora_B["default"].weight.data.mul_(3)
    norms.fail_after = 1  # kernel, which writes the fingerprints
    with pytest.raises(MemoryError):
        model(x)
    norms.fail_after = None
    assert_as_if_alone(model, x)


def test_another_backend_is_asked_for(counted):
    """The table is of one backend: under the other one its layers take none of its norms."""
    import fdora

    model, x = make(), inputs()
    model(x)
    with fdora.backend("eager"):
        counted()
        model(x)
        assert counted()[0] == 0
    model(x)
    assert counted() == (1, 0)


def test_a_rank_that_changed_at_the_same_address(counted):
    model, x = make(), inputs()
    model(x)
    first = layers(model)[0]
    A, B = first.lora_A["default"].weight, first.lora_B["default"].weight
    A.data, B.data = A.data[:2], B.data[:, :2]
    assert_as_if_alone(model, x)


@pytest.mark.parametrize("dora", [False, True])
def test_another_adapter_on_one_layer(counted, norms, dora):
    """Both active: that layer looks after itself, and the norms of the others are kept from forward to forward."""
    from peft import LoraConfig

    from fdora.integrations.peft import enabled

    model, x = make(), inputs()
    model(x)
    with enabled():
        model.add_adapter("other", LoraConfig(r=3, use_dora=dora, target_modules=["first.0"]))
    model.base_model.set_adapter(["default", "other"])
    with torch.no_grad():
        layers(model)[0].lora_B["other"].weight.normal_()  # else it is 0, and so are gradients
    elsewhere = layers(model)[1].lora_B["default"].weight
    elsewhere.data = elsewhere.data.clone()  # so that the layers are collected again
    for _ in range(3):
        model(x)
    words = norms.of("model")[-1].words
    for _ in range(12):
        counted()
        model(x)
        (launch,) = norms.of("model")
        assert launch.words is words and not launch.computed  # those of before, never begun anew
        assert norms.counts() == {"model": 1, **({"layer": 2} if dora else {"plain": 1})}  # beside others it keeps no norm
    assert_as_if_alone(model, x)


def test_parameters_are_swapped_after_recomputation(counted, monkeypatch):
    """A run of backward is over, and must not refer to the weights."""
    monkeypatch.setattr(torch.__future__, "_swap_module_params_on_conversion", True)
    model, x = make(reentrant=False), inputs()
    model(x).float().sum().backward()
    model.float()
    model(x.detach().float())


@dense
def test_hooks_of_before_do_not_pile_up(counted):
    import gc
    import weakref

    from fdora.integrations.peft import use_fdora

    model = make()
    gc.collect()
    count = len(weakref.finalize._registry)
    for _ in range(3):
        use_fdora(model)
    assert len(weakref.finalize._registry) == count
    x = inputs()
    plain = model.merge_and_unload()
    gc.collect()
    assert not any(m._forward_pre_hooks for m in plain.modules()) and plain(x).isfinite().all()
