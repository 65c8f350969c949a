"""The layer's kernels: every check of the functional layer, on the Triton backend, and what only kernels can get wrong."""

import itertools

import pytest
import torch

from fdora.functional import dora_linear, dora_norm
from fdora.triton import gemm
from tests import device
from tests.checks.linear import an_empty_row_of_float16_touches_no_other
from tests.close import assert_within
from tests.make import grads, tensors, tracked
from tests.triton.marks import INTERPRETED, needs_gpu, needs_kernels

pytestmark = needs_kernels
DROPOUT = {
    "none": {},
    "lora": dict(dropout_p=0.3, dropout_mode="lora", seed=5),
    "peft": dict(dropout_p=0.3, dropout_mode="peft", seed=5),
}


def forward_and_back(t, mode="none", backend="triton", names=("x", "A", "B", "m"), dy=None, **extra):
    t = tracked(t, *names)
    y = dora_linear(t["x"], t["W"], t["A"], t["B"], t["m"], s=t["s"], backend=backend, **DROPOUT[mode], **extra)
    torch.manual_seed(1)
    dy = torch.randn(y.shape, device=y.device).to(y.dtype) if dy is None else dy
    return {"y": y.detach()} | grads(y, dy, **{n: t[n] for n in names})


@needs_gpu
@pytest.mark.parametrize("mode", DROPOUT)
def test_how_tiles_are_shared_out_moves_no_bit(mode, monkeypatch, chosen_anew):
    t = tensors(4096, 512, 64, (4096,), torch.bfloat16, torch.bfloat16)
    before = forward_and_back(t, mode)
    monkeypatch.setattr(gemm, "beside_others", lambda: True)
    chosen_anew.clear()
    for name, one in forward_and_back(t, mode).items():
        assert torch.equal(one, before[name]), name


def test_an_empty_row_of_float16_touches_no_other():
    an_empty_row_of_float16_touches_no_other("triton")


@pytest.mark.parametrize("tokens", [8, 96])
@pytest.mark.parametrize("mode", DROPOUT)
@pytest.mark.parametrize("half", list(itertools.permutations((torch.float16, torch.bfloat16))), ids=str)
def test_autocast_to_the_other_half_precision(half, mode, tokens):
    """Weights and adapters in one, products in the other: the gradient of a parameter is rounded to its own dtype, once."""
    inside, outside = half
    if INTERPRETED and inside == torch.bfloat16:
        pytest.skip("the interpreter multiplies bf16 wrongly; runs with --device cuda")
    t = tensors(48, 40, 16, (tokens,), outside)
    names = ("x", "A", "B", "m")
    torch.manual_seed(1)
    dy = torch.randn(tokens, 48, device=device.NAME).to(inside)
    c = dora_norm(t["W"], t["A"], t["B"], s=t["s"], backend="eager")

    def run(t, backend, dy, c):
        t = tracked(t, *names)
        with torch.autocast(device.NAME, inside, enabled=dy.dtype == inside):
            y = dora_linear(*(t[n] for n in "xWABm"), s=t["s"], norm=c, backend=backend, **DROPOUT[mode])
        assert y.dtype == dy.dtype
        return {"y": y.detach()} | grads(y, dy, **{n: t[n] for n in names})

    wide = {n: v.double() if isinstance(v, torch.Tensor) else v for n, v in t.items()}
    wide["x"] = t["x"].to(inside).double()
    got, eager, truth = run(t, "triton", dy, c), run(t, "eager", dy, c), run(wide, "eager", dy.double(), c.double())
    noise = torch.finfo(inside).eps * (dy.double() * truth["y"]).norm(dim=0) / wide["m"].abs()
    eager["m"] = truth["m"] + noise + (eager["m"].double() - truth["m"]).abs()
    for n in "AB":
        eager[n] = truth[n] + torch.finfo(outside).eps * truth[n].abs() + (eager[n].double() - truth[n]).abs()
    for n, v in got.items():
        assert n == "y" or v.dtype == outside
        assert_within(v, eager[n], truth[n], f"{mode} {n}")


@pytest.mark.parametrize("lead", [(2, 3), (2, 0), (6,)], ids=str)
def test_a_compiler_may_ask_about_a_layer_without_outputs(lead):
    K, r = 8, 4
    with torch.device("meta"):
        x, W, A, B = torch.empty(*lead, K), torch.empty(0, K), torch.empty(r, K), torch.empty(0, r)
        operands = [W, A, B, torch.empty(0), torch.empty(0), None, None]
        y, h = torch.ops.fdora.linear(x, operands, [1.0], ["nothing"], 0.0, "lora", [], [], None, False, [], True)
    assert y.shape == (*lead, 0) and h.shape == (x[..., 0].numel(), r)


@pytest.mark.parametrize("keep", [True, False])
def test_a_compiler_hears_of_norms_that_somebody_keeps(keep):
    with torch.device("meta"):
        x, W, A, B, m = torch.empty(5, 8), torch.empty(16, 8), torch.empty(4, 8), torch.empty(16, 4), torch.empty(16)
        operands, seen = [W, A, B, m, None, None, None], [torch.empty(2, dtype=torch.int64)]
        found = torch.ops.fdora.linear(x, operands, [1.0], ["nothing"], 0.0, "lora", [], [], None, False, seen, keep)
    assert [t.shape for t in found] == [(5, 16), (5, 4), *[(16,)] * keep]
