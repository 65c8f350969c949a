"""What is kept for backward, and that nothing is computed that nobody asked for."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from fdora.functional import (
    DoraLayer,
    dora_linear,
    dora_linear_group,
    dora_mlp,
    dora_norm,
    prepared,
)
from tests import device
from tests.make import tensors, tracked
from tests.memory import peak_bytes, saved

M, N, K, r = 64, 48, 40, 8
NAMES = ("x", "A", "B", "m")


def make(kind="plain", dtype=torch.float32, names=NAMES):
    return tracked(tensors(N, K, r, (M,), dtype, kind=kind), *names)


def test_changing_the_output_in_place_is_an_error_or_allowed():
    t = make()
    args = [t[n] for n in ("x", "W", "A", "B", "m")]
    if device.NAME == "cpu":
        y = dora_linear(*args, s=0.7)
        y += 1
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    y = dora_linear(*args, s=0.7, keep_inner=True)
    y += 1
    y.sum().backward()
    for keep_inner in (False, True) if device.NAME == "cpu" else (True,):
        mlp = [layer(F_IN, K), layer(F_IN, K), layer(K, F_IN)]
        for ys in (dora_linear_group(t["x"], mlp[:2], keep_inner=keep_inner), [dora_mlp(t["x"], *mlp, keep_inner=keep_inner)]):
            ys[0].add_(1)
            if keep_inner:
                ys[0].sum().backward()
            else:
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    ys[0].sum().backward()


def kept_for_backward(f, *given):
    """The result of f() and the shapes of what autograd keeps for it, once for each piece of memory, beside ``given``."""
    out, kept = saved(f)
    outs = out if isinstance(out, tuple) else (out,)
    theirs = {t.untyped_storage().data_ptr() for t in given}
    mine = {v.untyped_storage().data_ptr(): v for v in kept if v.numel()}
    names = {y.untyped_storage().data_ptr(): f"y{i}" for i, y in enumerate(outs)}
    for at, v in mine.items():
        nbytes = v.untyped_storage().nbytes()
        seeds = v.dtype == torch.int64 and nbytes == 3 * 16  # of three layers, side by side
        assert at in theirs or seeds or nbytes == v.numel() * v.element_size(), "a view keeps more than it shows"
    return sorted(str(names.get(at, tuple(v.shape))) for at, v in mine.items() if at not in theirs)


def layer(n, k, rank=r, kind="plain", biased=False, trained=("A", "B", "m", "bias")):
    t = tracked(tensors(n, k, rank, (1,), torch.float32, kind=kind), *trained)
    norm = dora_norm(t["W"], t["A"].detach(), t["B"].detach(), s=t["s"])
    return DoraLayer(t["W"], t["A"], t["B"], t["m"], t["s"], t["bias"] if biased else None, norm)


def parts(layers):
    return [t for la in layers for t in la if isinstance(t, torch.Tensor)]


F_IN = 56  # the width inside the MLP

on_cpu = pytest.mark.skipif("device.NAME != 'cpu'", reason="what eager code keeps on a GPU is inner; runs with --device cpu")


@pytest.mark.parametrize(
    ("make", "options", "inner"),
    [
        *[({"kind": kind, "biased": biased}, {}, "y0") for kind in ("plain", "zero_m") for biased in (False, True)],
        ({}, {"keep_inner": True}, f"({M}, {N})"),
        ({}, {"dropout_p": 0.5, "dropout_mode": "peft"}, f"({M}, {N})"),
        ({"trained": ("A", "B")}, {}, None),
    ],
    ids=str,
)
def test_a_layer_keeps_its_output_or_what_stands_for_it(make, options, inner):
    """Of its size nothing else; nothing for a frozen magnitude, and nothing at all without a gradient."""
    if inner == "y0" and device.NAME != "cpu":
        pytest.skip("eager on a GPU keeps inner, to look at g it would have to wait; runs with --device cpu")
    x, la = torch.randn(M, K, device=device.NAME).requires_grad_(), layer(N, K, **make)
    call = lambda: dora_linear(x, *la[:4], s=la.s, bias=la.bias, norm=la.norm, **options)  # noqa: E731
    kept = kept_for_backward(call, x, *parts([la]))
    assert [each for each in kept if each in ("y0", f"({M}, {N})")] == ([inner] if inner else [])
    with torch.no_grad():
        assert kept_for_backward(call, x, *parts([la])) == []


@on_cpu
def test_a_group_keeps_its_input_once_one_h_and_its_outputs():
    x = torch.randn(M, K).requires_grad_()
    layers = [layer(48, K), layer(44, K, 4), layer(52, K)]
    others = [layer(48, K, biased=True), layer(44, K, 4, kind="zero_m"), layer(52, K), DoraLayer(layers[0].W)]
    frozen = [la._replace(m=la.m.detach()) for la in others[:3]]
    for group, outputs in ((layers, ["y0", "y1", "y2"]), (others, ["y0", "y1", "y2"]), (frozen, [])):
        kept = kept_for_backward(lambda: dora_linear_group(x, group), x, *parts(group))
        assert kept == [f"({M}, {8 + 4 + 8})", *outputs]


@on_cpu
@pytest.mark.parametrize("kind", ["plain", "biased", "zero_m", "no_dm"])
def test_an_mlp_keeps_two_tensors_of_its_width(kind):
    """What LoRA needs (x, gate, up), h of each layer and the output: nothing else, whether gate and up or their inner."""
    x = torch.randn(M, K).requires_grad_()
    make = dict(kind="zero_m" if kind == "zero_m" else "plain", biased=kind == "biased")
    layers = [layer(F_IN, K, **make), layer(F_IN, K, **make), layer(K, F_IN, **make)]
    if kind == "no_dm":
        layers = [la._replace(m=la.m.detach()) for la in layers]
    kept = kept_for_backward(lambda: dora_mlp(x, *layers), x, *parts(layers))
    last = [] if kind == "no_dm" else ["y0"]
    assert kept == sorted([f"({M}, {2 * r})", f"({M}, {r})", *[f"({M}, {F_IN})"] * 2, *last])


@on_cpu
def test_peft_dropout_keeps_two_more_in_the_mlp():
    x = torch.randn(M, K).requires_grad_()
    layers = [layer(F_IN, K), layer(F_IN, K), layer(K, F_IN)]
    kept = kept_for_backward(lambda: dora_mlp(x, *layers, dropout_p=0.5, dropout_mode="peft"), x, *parts(layers))
    assert kept == sorted(["()", f"({M}, {2 * r})", f"({M}, {r})", *[f"({M}, {F_IN})"] * 4, f"({M}, {K})"])


@on_cpu
def test_an_mlp_needs_less_at_its_peak_than_three_layers():
    """Two tensors of its width are kept where three layers and the activation keep four. At the peak eager code wins one of
    them: a gradient of each and what the last layer to be differentiated makes."""
    x = torch.randn(256, 64).requires_grad_()
    layers = [layer(512, 64), layer(512, 64), layer(64, 512)]
    leaves = [x, *(t for la in layers for t in la[1:4])]

    def apart():
        gate, up = (dora_linear(x, *la[:4], s=la.s, norm=la.norm) for la in layers[:2])
        a = torch.nn.functional.silu(gate) * up
        torch.autograd.grad(dora_linear(a, *layers[2][:4], s=0.7, norm=layers[2].norm).sum(), leaves)

    def together():
        torch.autograd.grad(dora_mlp(x, *layers).sum(), leaves)

    width = 4 * 256 * 512
    assert peak_bytes(together) + width / 2 <= peak_bytes(apart)


@pytest.mark.parametrize("used", [(0,), (1,), (0, 1)], ids=str)
def test_an_output_nobody_uses_costs_no_product(used):
    x = torch.randn(M, K, device=device.NAME).requires_grad_()
    ys = dora_linear_group(x, [layer(N, K, trained=()), layer(N, K, trained=())])
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad([ys[i] for i in used], [x], [torch.ones_like(ys[i]) for i in used])
    assert counter.get_total_flops() == len(used) * (2 * M * N * K + 2 * M * N * r + 2 * M * r * K)


def test_a_group_forms_h_in_one_product():
    layers, shapes = [layer(N, K, trained=()), layer(N, K, 4, trained=())], []
    x = torch.randn(M, K, device=device.NAME)

    class Products(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func is torch.ops.aten.mm.default:
                shapes.append((tuple(args[0].shape), tuple(args[1].shape)))
            return func(*args, **(kwargs or {}))

    with Products():
        dora_linear_group(x, layers, backend="eager")
    assert ((M, K), (K, r + 4)) in shapes and ((M, K), (K, r)) not in shapes and ((M, K), (K, 4)) not in shapes


@pytest.mark.parametrize("given", [False, True])
def test_full_dora_is_one_node(given):
    """Of two, autograd would add the gradients of A and of B."""
    t = make(names=("x", "A", "B", "m"))
    args = [t[n] for n in ("x", "W", "A", "B", "m")]
    norm = dora_norm(*(t[n].detach() for n in ("W", "A", "B")), s=t["s"]) if given else None
    y = dora_linear(*args, s=t["s"], norm=norm, detach=False)
    assert [type(f).__name__ for f, _ in y.grad_fn.next_functions if f is not None] == 4 * ["AccumulateGrad"]


def flops(t, wanted, **extra):
    y = dora_linear(*(t[n] for n in ("x", "W", "A", "B", "m")), s=t["s"], norm=extra.pop("norm"), **extra)
    with FlopCounterMode(display=False) as counter:
        torch.autograd.grad(y, [t[n] for n in wanted], torch.ones_like(y))
    return counter.get_total_flops()


@pytest.mark.parametrize("wanted", [("x",), ("A",), ("B",), ("m",), ("x", "A", "B", "m"), ("A", "B"), ("B", "m")], ids="".join)
def test_only_the_needed_products_run(wanted):
    t = make(names=wanted)
    norm = dora_norm(*(t[n].detach() for n in ("W", "A", "B")), s=t["s"])
    # the counter sees torch's products, not those of kernels
    dh = 2 * M * N * r if {"x", "A"} & set(wanted) else 0
    want = {"x": 2 * M * N * K + 2 * M * r * K, "A": 2 * M * r * K, "B": 2 * M * N * r, "m": 0}
    assert flops(t, wanted, norm=norm, backend="eager") == dh + sum(want[n] for n in wanted)


def test_forward_makes_no_dense_product_when_the_norm_is_given():
    t = make(names=())
    norm = dora_norm(t["W"], t["A"], t["B"], s=t["s"])
    with FlopCounterMode(display=False) as counter:
        dora_linear(*(t[n] for n in ("x", "W", "A", "B", "m")), s=t["s"], norm=norm, backend="eager")
    assert counter.get_total_flops() == 2 * M * (N * K + K * r + r * N)


@pytest.mark.parametrize("is_bound", [False, True])
@pytest.mark.parametrize("changed", ["W", "A", "B", "m", "norm"])
def test_parameters_and_norms_stay_with_the_node(changed, is_bound):
    """What is left is saved, whatever it is a view of: a checkpoint counts."""
    t = make()
    norm = dora_norm(t["W"], t["A"], t["B"], s=0.7)
    p = {n: torch.nn.Parameter(t[n].detach(), requires_grad=n != "W") for n in ("W", "A", "B", "m")} | {"norm": norm}

    def call():
        if not is_bound:
            return dora_linear(t["x"], *list(p.values())[:4], s=0.7, norm=norm)
        operands = (t["x"], *p.values(), None, None)
        backend = "triton" if device.NAME == "cuda" else "eager"
        return prepared.call(operands, prepared.bind(operands, (0.7,), (True,), False, backend))[0]

    y, kept = saved(call)
    assert {v.data_ptr() for v in kept if v.numel()} & {v.data_ptr() for v in p.values()} == set()
    y.sum().backward(retain_graph=True)
    with torch.no_grad():
        p[changed].mul_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_a_parameter_of_inference_mode_is_left_to_torch():
    t = make()
    with torch.inference_mode():
        W = torch.nn.Parameter(t["W"].clone(), requires_grad=False)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved"):
        dora_linear(t["x"], W, t["A"], t["B"], t["m"], s=0.7)
