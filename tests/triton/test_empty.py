"""Sizes of 0, as a process has that is left without rows or columns: by every backend a result, and gradients of zeros."""

import pytest
import torch

import fdora.functional as F
from tests import device
from tests.cases import run_case, usual
from tests.triton.marks import INTERPRETED, needs_kernels  # noqa: F401

pytestmark = [needs_kernels, pytest.mark.parametrize("backend", ["eager", "triton"])]
R = 3


def backward(function, backend, trained, *frozen, **more):
    """``function`` of x, W, A, B and m, and a gradient for each that is trained."""
    leaves = {n: torch.randn(*shape, device=device.NAME, requires_grad=True) for n, shape in trained.items()}
    y = function(**leaves, **dict(zip(("W", "ids"), frozen, strict=False)), backend=backend, **more)
    y.sum().backward()
    for n, leaf in leaves.items():
        assert leaf.grad.shape == leaf.shape and leaf.grad.isfinite().all(), n
    return y


NAMES = [("linear", False), ("linear", True), ("group", False), ("mlp", False), ("multi", False), ("experts_mlp", False)]
NAMES += [("experts", False), ("norm", False), ("norm", True), ("merge", False)]


@pytest.mark.parametrize(("name", "codes"), NAMES)
def test_sizes_of_0(backend, name, codes):
    drawn = usual(device.NAME, backend)._replace(largest=24, empty=0.4, codes=codes)
    for k in range(5):
        run_case(name, f"{name} {k}", drawn)


@pytest.mark.parametrize(("tokens", "d"), [(4, 0), (0, 5)])
def test_an_embedding(backend, tokens, d):
    W, ids = torch.randn(7, d, device=device.NAME), torch.arange(tokens, device=device.NAME)
    assert backward(F.dora_embedding, backend, {"A": (R, 7), "B": (d, R), "m": (d,)}, W, ids, s=0.5).shape == (tokens, d)


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("C", "O"), [(0, 4), (4, 0)])
def test_convolutions(backend, C, O, transposed):
    turn = (lambda a, b: (b, a)) if transposed else (lambda a, b: (a, b))
    for n, conv in enumerate((F.dora_conv1d, F.dora_conv2d, F.dora_conv3d), 1):
        trained = {"x": (2, C, *[5] * n), "A": (*turn(R, C), *[3] * n), "B": (O, R, *[1] * n), "m": (O,)}
        W = torch.randn(*turn(O, C), *[3] * n, device=device.NAME)
        y = backward(conv, backend, trained, W, s=0.5, transposed=transposed)
        assert y.shape == (2, O, *[7 if transposed else 3] * n) and not y.any()
