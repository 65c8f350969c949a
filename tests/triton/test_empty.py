"""Sizes of 0, as a process has that is left without rows or columns: by every backend a result, and gradients of zeros."""

import pytest
import torch

import fdora.functional as F
from fdora.quant import quantize
from tests import device
from tests.triton.marks import INTERPRETED, needs_kernels  # noqa: F401

pytestmark = [needs_kernels, pytest.mark.parametrize("backend", ["eager", "triton"])]
TOKENS, R = 4, 3


def backward(function, backend, trained, *frozen, **more):
    """``function`` of x, W, A, B and m, and a gradient for each that is trained."""
    leaves = {n: torch.randn(*shape, device=device.NAME, requires_grad=True) for n, shape in trained.items()}
    y = function(**leaves, **dict(zip(("W", "ids"), frozen, strict=False)), backend=backend, **more)
    y.sum().backward()
    for n, leaf in leaves.items():
        assert leaf.grad.shape == leaf.shape and leaf.grad.isfinite().all(), n
    return y


@pytest.mark.parametrize(("N", "K"), [(16, 0), (0, 16), (0, 0)])
def test_a_linear_and_a_bank(backend, N, K):
    W = torch.randn(N, K, device=device.NAME)
    one = {"x": (TOKENS, K), "A": (R, K), "B": (N, R), "m": (N,)}
    two = {"x": (TOKENS, K), "A": (2, R, K), "B": (2, N, R), "m": (2, N)}
    ids = torch.tensor([0, 1, 1, 0], device=device.NAME)
    for y in (
        backward(F.dora_linear, backend, one, W, s=0.5),
        backward(F.dora_linear_multi, backend, two, W, ids, s=[0.5, 2.0]),
    ):
        assert y.shape == (TOKENS, N) and not y.any()


@pytest.mark.parametrize(("N", "K", "width"), [(16, 16, 0), (0, 16, 16), (16, 0, 16), (0, 0, 0)])
@pytest.mark.parametrize("drop", [{}, {"dropout_p": 0.5, "dropout_mode": "peft", "seed": [1, 2, 3]}], ids=["", "peft"])
def test_a_gated_mlp(backend, N, K, width, drop):
    shapes = {"gate": (width, K), "up": (width, K), "down": (N, width)}
    trained = {
        f"{n}_{of}": shape for of, (o, i) in shapes.items() for n, shape in zip("ABm", ((R, i), (o, R), (o,)), strict=True)
    }

    def mlp(x, backend, **t):
        layers = [
            F.DoraLayer(torch.randn(o, i, device=device.NAME), *(t[f"{n}_{of}"] for n in "ABm"), 0.5)
            for of, (o, i) in shapes.items()
        ]
        return F.dora_mlp(x, *layers, backend=backend, **drop)

    y = backward(mlp, backend, {"x": (TOKENS, K), **trained})
    assert y.shape == (TOKENS, N) and not y.any()


@pytest.mark.parametrize("kind", ["nf4", "mxfp4", "int8", "fp8"])
@pytest.mark.parametrize(("N", "K"), [(64, 0), (0, 64)])
def test_codes(backend, kind, N, K):
    W = quantize(torch.randn(N, K, device=device.NAME), kind)
    y = backward(F.dora_linear, backend, {"x": (TOKENS, K), "A": (R, K), "B": (N, R), "m": (N,)}, W, s=0.5)
    assert y.shape == (TOKENS, N) and not y.any()


@pytest.mark.parametrize(("tokens", "d"), [(TOKENS, 0), (0, 5)])
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
