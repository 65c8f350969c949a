"""Tools that take a whole PEFT model: torch.func, torch.jit.trace, torch.onnx, swapped parameters, PEFT's hot swap."""

import copy
import weakref

import pytest
import torch
from peft.utils.hotswap import prepare_model_for_compiled_hotswap
from torch.func import functional_call, grad, vmap

import fdora
from fdora._dispatch import forced
from fdora.integrations import _norm
from fdora.integrations.peft import init_magnitude, report, restore, use_fdora
from tests.close import assert_exact
from tests.integrations.models import FUSED, KINDS, build, inputs, layer, path, run


def differentiated(model):
    """The trained parameters, and the loss of one sample as a function of them."""
    trained = {n: p.detach() for n, p in model.named_parameters() if p.requires_grad}
    return trained, lambda params, x: functional_call(model, params, (x,)).square().sum()


@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_each_sample(kind):
    """On both paths: a hook on the base layer leaves the correction of its output."""
    model, x = build(kind), inputs(kind).detach()
    x = x if x.dim() > 2 or not x.is_floating_point() else x[None].repeat(2, 1, 1)
    trained, loss = differentiated(model)
    samples = x[:, None] if kind.startswith("conv") else x
    want = {n: torch.stack([grad(loss)(trained, sample)[n] for sample in samples]) for n in trained}
    for base_hook in (False, True):
        model = use_fdora(copy.deepcopy(model))
        if base_hook:
            layer(model).base_layer.register_forward_hook(lambda *_: None)
        trained, loss = differentiated(model)
        one = grad(loss)(trained, samples[0])
        each = vmap(grad(loss), (None, 0))(trained, samples)
        for name in want:
            assert_exact(one[name], want[name][0], name)
            assert_exact(each[name], want[name], name)
        assert path(model) == ("fused" if kind in FUSED and not base_hook else "composed")


@pytest.mark.parametrize("kind", KINDS)
def test_several_adapters_at_once(kind):
    """functional_call over a stack of them."""
    model, x = use_fdora(build(kind)), inputs(kind).detach()
    trained, _ = differentiated(model)
    bank = {n: torch.stack([p, 1.5 * p, -p]) for n, p in trained.items()}
    got = vmap(lambda params: functional_call(model, params, (x,)))(bank)
    for i in range(3):
        with torch.no_grad():
            want = functional_call(restore(copy.deepcopy(model)), {n: p[i] for n, p in bank.items()}, (x,))
        assert_exact(got[i], want)


@pytest.fixture
def swapping(monkeypatch):
    monkeypatch.setattr(_norm, "SMALL", 0)  # norms are kept in small layers, too
    before = torch.__future__.get_swap_module_params_on_conversion()
    torch.__future__.set_swap_module_params_on_conversion(True)
    yield
    torch.__future__.set_swap_module_params_on_conversion(before)


@pytest.mark.parametrize("kind", KINDS)
def test_parameters_that_are_swapped(kind, swapping):
    """model.to() exchanges what a parameter holds, and refuses one that somebody refers to weakly."""
    model = use_fdora(build(kind))
    with torch.no_grad():
        model(inputs(kind))
        model.to(torch.float32).to(torch.float64)
        x = inputs(kind)
        assert_exact(model(x), restore(copy.deepcopy(model))(x))
        model.load_state_dict({n: t * 2 if t.is_floating_point() else t for n, t in model.state_dict().items()})
        assert_exact(model(x), restore(copy.deepcopy(model))(x))


def test_a_moved_layer_lets_go_of_its_weight_first(swapping):
    """Where kernels run, compiled code keeps room for the norm of one weight."""
    model = use_fdora(build("no_bias"))
    variant, base = layer(model).lora_variant["default"], layer(model).base_layer
    for change in (lambda: model.to(torch.float32), lambda: model.load_state_dict(model.state_dict())):
        variant.kept.room = (weakref.ref(base.weight), torch.zeros(1), torch.zeros(1))
        change()
        assert variant.kept.room is None


@pytest.mark.parametrize("kind", KINDS)
def test_jit_trace(kind, monkeypatch):
    monkeypatch.setattr(_norm, "SMALL", 0)
    model, x = use_fdora(build(kind)).eval(), inputs(kind).detach()
    want = model(x)
    traced = torch.jit.trace(model, (x,), check_trace=False)
    assert_exact(traced(x), want)
    assert report(model)[0].fallbacks == {"torch.jit.trace or torch.onnx.export": 1}
    with torch.no_grad():
        for p in model.parameters():
            if p.is_floating_point():
                p.mul_(1.5)  # the norm is in the trace, not a constant
    assert_exact(traced(x), restore(model)(x))


@pytest.mark.parametrize("kind", ["linear", "no_bias", "embedding", "conv2d"])
def test_torch_onnx_exports_pefts_operators(kind, monkeypatch):
    """Its newer exporter goes through torch.export; the older one is torch.jit.trace."""
    from fdora.integrations._peft.dora import Dora

    model, x = use_fdora(build(kind)).eval(), inputs(kind).detach()
    want, seen, fall_back = model(x), [], Dora.fall_back
    monkeypatch.setattr(torch.onnx, "is_in_onnx_export", lambda: True)
    monkeypatch.setattr(Dora, "fall_back", lambda *args, **kwargs: seen.append(args[1]) or fall_back(*args, **kwargs))
    assert_exact(torch.export.export(model, (x,)).module()(x), want)
    assert seen and set(seen) == {"torch.jit.trace or torch.onnx.export"}


@pytest.mark.parametrize("dynamo", [False, True])
@pytest.mark.parametrize("kind", ["linear", "no_bias", "embedding", "conv2d"])
def test_torch_onnx(kind, dynamo, tmp_path):
    for package in ("onnxscript", "onnxruntime"):
        pytest.importorskip(package, reason=f"exports and runs a graph with {package}; `make test` installs it")
    import onnxruntime

    model, x = use_fdora(build(kind, dtype=torch.float32)).eval(), inputs(kind).detach()
    x = x.float() if x.is_floating_point() else x
    torch.onnx.export(model, (x,), tmp_path / "model.onnx", dynamo=dynamo)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx")
    (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
    torch.testing.assert_close(torch.from_numpy(y), model(x).detach())


@pytest.mark.parametrize("kind", KINDS)
def test_tensor_scalings_run_stock(kind):
    model, x = build(kind), inputs(kind)
    config = model.peft_config["default"]
    prepare_model_for_compiled_hotswap(model, target_rank=6, config=config)
    assert isinstance(layer(model).scaling["default"], torch.Tensor)
    want = run(model, x)
    got = run(use_fdora(model), x)
    assert all(torch.equal(got[name], want[name]) for name in want)
    (row,) = report(model)
    assert row.fallbacks == {"a scaling that is a tensor (prepare_model_for_compiled_hotswap)": 1}
    init_magnitude(model)
    layer(model).scaling["default"].mul_(2)
    assert_exact(model(x), restore(copy.deepcopy(model))(x))


def test_a_verdict_is_of_one_backend():
    """float32 with a bias is left to PEFT's own sum in eager code alone."""
    from fdora.integrations._peft import fast_path

    model, x = use_fdora(build("linear")), inputs("linear")
    refused = []

    def refusal(*args):
        refused.append(forced())
        return ""

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_path, "_refusal", refusal)
        patch.setattr(fast_path, "_known", {})
        for name in ("eager", "auto", "eager", "auto"):
            with fdora.backend(name):
                model(x)
    assert refused == ["eager", "auto"]


@pytest.mark.parametrize("width", [3, 0])
def test_an_input_of_another_width(width):
    with pytest.raises(fdora.FdoraError, match=rf"`x` must be \(..., K\) with K=24 .*, got \(2, {width}\)"):
        use_fdora(build("no_bias"))(torch.randn(2, width, dtype=torch.float64))


def test_another_parameter_in_the_place_of_the_weight(monkeypatch):
    """In the same memory, so that nothing but the object tells."""
    monkeypatch.setattr(_norm, "SMALL", 0)
    model, x = use_fdora(build("linear")), inputs("linear")
    base = layer(model).base_layer
    model(x)
    old = base.weight
    old.data.mul_(2)
    base.weight = torch.nn.Parameter(old.data, requires_grad=False)
    while base.weight._version < old._version:
        base.weight.add_(0)
    assert (base.weight.data_ptr(), base.weight._version) == (old.data_ptr(), old._version)
    assert_exact(model(x), restore(copy.deepcopy(model))(x))
