"""Embeddings and convolutions of PEFT in one call: its numbers in every configuration, and the truth where it is wrong."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fdora.integrations.peft import init_magnitude, report, restore, use_fdora
from tests import reference
from tests.close import assert_exact
from tests.integrations import models
from tests.integrations.models import build, inputs, layer, path, run, same

V, D = models.K, models.N


@pytest.mark.parametrize("kind", ["conv1d strided", "conv2d padded", "conv3d padded"])
def test_channels_last(kind):
    """The norm too: of a kernel whose channels lie last."""
    model, x = build(kind, torch.float32), inputs(kind, torch.float32)
    want = run(model, x)
    form = {"conv1d": None, "conv2d": torch.channels_last, "conv3d": torch.channels_last_3d}[kind.split()[0]]
    if form is not None:
        model, x = model.to(memory_format=form), x.detach().to(memory_format=form).requires_grad_()
    got = run(use_fdora(model), x)
    for n in want:
        torch.testing.assert_close(got[n], want[n], rtol=1e-5, atol=1e-5)


def test_the_padding_row_adds_nothing_to_a_gradient():
    """PEFT lets its tokens into the gradients of m and B, where the row is not zero; the output is PEFT's."""
    model = build(nn.Embedding.from_pretrained(torch.randn(V, D).double(), padding_idx=3), init_lora_weights=False)
    x = torch.tensor([[3, 5, 3], [1, 3, 5]])
    stock, ours = run(model, x), run(use_fdora(model), x)
    module = layer(model)
    A, B = module.lora_embedding_A["default"], module.lora_embedding_B["default"]
    m, W = module.lora_magnitude_vector["default"].weight, module.base_layer.weight
    y = reference.embedding(x, W, A, B, m, 1.5, padding_idx=3)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    want = {"y": y.detach()} | dict(zip(("A", "B", "m"), torch.autograd.grad(y, (A, B, m), dy), strict=True))
    names = {"y": "y", "A": "lora_embedding_A", "B": "lora_embedding_B", "m": "magnitude"}
    for short, value in want.items():
        (full,) = [n for n in ours if names[short] in n]
        assert_exact(ours[full], value, full)
        agrees = torch.allclose(stock[full], value, rtol=1e-9, atol=1e-9)
        assert agrees == (short in "yA"), full


def test_sparse_gradients_of_a_sparse_embedding():
    """PEFT's A is the other way round, which torch cannot turn where rows are dense."""
    model, x = build(nn.Embedding(V, D, sparse=True), init_lora_weights=False), torch.tensor([[3, 5, 3], [1, 3, 5]])
    with pytest.raises(RuntimeError, match="transpositions between sparse and dense"):
        run(model, x)
    dense = build(nn.Embedding(V, D), init_lora_weights=False)
    dense.load_state_dict(model.state_dict())
    got, want = run(use_fdora(model), x), run(use_fdora(dense), x)
    assert path(model) == "fused"
    for n, value in want.items():
        assert got[n].is_sparse == ("lora_embedding_A" in n)
        assert torch.equal(got[n].to_dense(), value), n


NOT_FUSED = {
    "max_norm": (lambda: nn.Embedding(V, D, max_norm=2.0), "max_norm", "embedding"),
    "by frequency": (lambda: nn.Embedding(V, D, scale_grad_by_freq=True), "frequency", "embedding"),
    "another class": (lambda: models.Scaled(V, D), "Scaled", "embedding"),
    "conv2d mirrored": (lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"), "padding mode", "conv2d"),
}


@pytest.mark.parametrize("kind", NOT_FUSED)
def test_what_is_not_one_call_is_pefts_formula_with_a_reason(kind):
    make, why, like = NOT_FUSED[kind]
    model, x = build(make()), inputs(like)
    want = run(model, x)
    same(run(use_fdora(model), x), want)
    assert path(model) == "composed" and why in report(model)[0].why_not_fused and why in str(report(model))


# groups: A of PEFT reads all channels, B has groups; its norm is of another kernel


def grouped(dtype=torch.float64, seed=0, **config):
    torch.manual_seed(seed)
    return build(nn.Conv2d(4, 6, 3, groups=2, padding=1), dtype, **config), torch.randn(
        2, 4, 6, 6, dtype=dtype, requires_grad=True
    )


def parts(model):
    module = layer(model)
    A, B = module.lora_A["default"].weight, module.lora_B["default"].weight
    return module.base_layer, A, B, module.lora_magnitude_vector["default"].weight


def truth(model, x, dropped=None):
    """y, and PEFT's dropout: its formula, with the norm of the kernel that it applies."""
    base, A, B, m = parts(model)
    if dropped is None:
        return reference.conv(x, base.weight, A, B, m.view(-1), 1.5, base.bias, groups=2, padding=1)
    c = reference.kernel(base.weight, A, B, 1.5, 2).flatten(1).norm(dim=1).detach().view(1, -1, 1, 1)
    plain = F.conv2d(dropped, base.weight, padding=1, groups=2)
    lora = F.conv2d(F.conv2d(dropped, A, padding=1), B, groups=2)
    return base(x) + (m / c - 1) * plain + m / c * 1.5 * lora


@pytest.mark.parametrize("how", ["train", "eval", "dropout"])
def test_groups_have_the_norm_of_the_kernel_in_use(how):
    model, x = grouped(dropout=0.4 if how == "dropout" else 0.0)
    model.train(how != "eval")
    stock = run(model, x)
    with pytest.warns(UserWarning, match="1 convolutions with groups, one of them `base_model.model.0`"):
        ours = run(use_fdora(model), x)
    drop = layer(model).lora_dropout["default"] if how == "dropout" else None
    same(ours, run(model, x, f=lambda x: truth(model, x, drop and drop(x))))
    assert not torch.allclose(stock["y"], ours["y"])
    assert path(model) == ("composed" if how == "dropout" else "fused")


def test_groups_have_one_norm_wherever_they_run():
    """What PEFT's code must run for us, traced or compiled, has it too; a new adapter has PEFT's; magnitudes can be made anew."""
    model, x = grouped()
    want = truth(model, x).detach()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        use_fdora(model)
        traced = torch.jit.trace(model.eval(), (x,))
    assert_exact(traced(x), want)
    assert report(model)[0].fallbacks
    scaling = layer(model).scaling
    with pytest.MonkeyPatch.context() as patched:  # what PEFT's code serves
        patched.setitem(scaling, "default", torch.tensor(scaling["default"]))
        assert_exact(torch.compile(model, fullgraph=True, backend="eager")(x).detach(), want)
    base, A, B, m = parts(model)
    init_magnitude(model)
    c = reference.kernel(base.weight, A, B, 1.5, 2).flatten(1).norm(dim=1)
    assert_exact(m.detach().view(-1), c.detach())
    with torch.no_grad():
        B.zero_()
    init_magnitude(model)
    assert_exact(model(x), base(x))
    assert_exact(restore(model)(x), base(x))


def test_a_dilated_kernel_is_served_where_peft_cannot():
    model, x = build(nn.Conv2d(4, 6, 3, dilation=2)), torch.randn(2, 4, 7, 7, dtype=torch.float64)
    with pytest.raises(RuntimeError):
        model(x)
    base, A, B, m = parts(model)
    want = reference.conv(x, base.weight, A, B, m.view(-1), 1.5, base.bias, dilation=2)
    assert_exact(use_fdora(model)(x), want)
    model.merge_adapter()
    assert_exact(model(x), want)
