"""Banks on one x as one node, and with the gated activation behind two of them, against the node of each."""

import pytest
import torch
from torch import Tensor

from fdora import FdoraError
from fdora.functional import dora_linear_multi, dora_norm
from fdora.functional.act import gated_act
from fdora.functional.multi import multi_together
from tests import device
from tests.triton.marks import HALF, INTERPRETED, needs_kernels  # noqa: F401

pytestmark = needs_kernels


def made(on: str, dtype: torch.dtype, ends: list[int], r: int, **more) -> tuple[Tensor, list[dict], Tensor, list[Tensor]]:
    """x, the arguments of gate and of up, offsets and all leaves."""
    draw = torch.Generator(on).manual_seed(0)
    G, (M, K, F) = len(ends), (max(200, ends[-1]), 48, 96)

    def drawn(*shape: int) -> Tensor:
        return (torch.randn(*shape, generator=draw, device=on) / K**0.5).to(dtype)

    x, pair, leaves = drawn(M, K).mul_(K**0.5).requires_grad_(), [], []
    for lost in (3, 5):
        W, A, B = drawn(F, K), drawn(G, r, K), drawn(G, F, r)
        norm = dora_norm(W, A, B, s=[2.0] * G)
        m = (norm * (1 + 0.1 * torch.randn(G, F, generator=draw, device=on))).to(torch.float32)
        m[:, lost] = 0.0  # nothing of v is left in this column, and the other layer has its own
        leaves += [each.requires_grad_() for each in (A, B, m)]
        pair.append({"W": W, "A": A, "B": B, "m": m, "s": [2.0] * G, "norm": norm, "backend": "triton"} | more)
    return x, pair, torch.tensor(ends, dtype=torch.int32, device=on), [x, *leaves]


@pytest.mark.parametrize("act", ["silu", "gelu_tanh", None])
@pytest.mark.parametrize(
    ("ends", "r", "more"),
    [
        ([70, 70, 180], 4, {}),  # one adapter without tokens, tokens of nobody
        ([200], 16, {}),
        ([3, 120, 200], 8, {"ranks": [8, 2, 5]}),
        ([3, 120, 200], 8, {"dropout_p": 0.3, "seed": 5}),
        ([3, 700, 1040], 8, {}),  # one fused product for dx
        ([3, 700, 1040], 8, {"dropout_p": [0.3, 0.6, 0.0], "seed": 5}),  # with masks inside
    ],
)
def test_as_the_node_of_each(act, ends, r, more):
    x, layers, offsets, leaves = made(device.NAME, HALF[0], ends, r, **more)
    found = multi_together(x, layers, offsets, act)
    expected = [dora_linear_multi(x, offsets=offsets, **of) for of in layers]
    expected = expected if act is None else [gated_act(*expected, act, backend="triton")]
    dys = [torch.randn_like(y) for y in expected]
    grads = torch.autograd.grad(found, leaves, dys)
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    for mine, other in zip(grads, torch.autograd.grad(expected, leaves, dys), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-2 * other.abs().max().item())
    assert {y.grad_fn for y in found} == {found[0].grad_fn} and type(found[0].grad_fn).__name__ == "MultiBackward"


def test_an_output_that_nobody_used_has_no_gradient():
    x, layers, offsets, (x, A, B, m, *others) = made(device.NAME, HALF[0], [70, 200], 4)
    first = multi_together(x, layers, offsets)[0]
    dy = torch.randn_like(first)
    grads = torch.autograd.grad(first, [x, A, B, m, *others], dy, allow_unused=True)
    expected = torch.autograd.grad(dora_linear_multi(x, offsets=offsets, **layers[0]), [x, A, B, m], dy)
    assert all(map(torch.equal, grads[:4], expected)) and grads[4:] == (None,) * 3


def test_plain_lora_is_one_node_before_its_activation():
    x, layers, offsets, leaves = made(device.NAME, HALF[0], [70, 200], 4)
    plain = [of | {"m": None, "norm": None} for of in layers]
    (a,) = multi_together(x, plain, offsets, "silu")
    expected = gated_act(*(dora_linear_multi(x, offsets=offsets, **of) for of in plain), "silu", backend="triton")
    assert torch.equal(a, expected) and len({fn for fn, _ in a.grad_fn.next_functions}) == 1
    leaves, da = [x, *(of[n] for of in plain for n in "AB")], torch.randn_like(a)
    for mine, other in zip(torch.autograd.grad(a, leaves, da), torch.autograd.grad(expected, leaves, da), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-2 * other.abs().max().item())


def test_what_is_no_plain_product_is_a_call_of_its_own():
    x, layers, offsets, _ = made(device.NAME, HALF[0], [200], 4)
    with pytest.raises(FdoraError, match="`compute`"):
        multi_together(x, [of | {"compute": "fp8"} for of in layers], offsets)


def test_what_is_refused_as_by_the_node_of_each():
    x, pair, offsets, _ = made(device.NAME, HALF[0], [200], 4)
    with pytest.raises(FdoraError, match="`act` must be one of silu"):
        multi_together(x, pair, offsets, "relu")
    narrow = pair[1] | {name: pair[1][name][..., :80] for name in ("m", "norm")}
    narrow |= {"W": pair[1]["W"][:80], "B": pair[1]["B"][:, :80]}
    with pytest.raises(FdoraError, match="`up` must be"):
        multi_together(x, [pair[0], narrow], offsets, "silu")
