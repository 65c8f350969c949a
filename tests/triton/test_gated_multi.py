"""Two banks and the gated activation behind them as one node, against the node of each."""

import pytest
import torch
from torch import Tensor

from fdora import FdoraError
from fdora.functional import dora_linear_multi, dora_norm
from fdora.functional.act import gated_act
from fdora.functional.multi import gated_multi
from tests import device
from tests.triton.marks import HALF, INTERPRETED, needs_kernels  # noqa: F401

pytestmark = needs_kernels


def made(on: str, dtype: torch.dtype, ends: list[int], r: int, **more) -> tuple[Tensor, list[dict], Tensor, list[Tensor]]:
    """x, the arguments of gate and of up, offsets and all leaves."""
    draw = torch.Generator(on).manual_seed(0)
    G, (M, K, F) = len(ends), (200, 48, 96)

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


@pytest.mark.parametrize("act", ["silu", "gelu_tanh"])
@pytest.mark.parametrize(
    ("ends", "r", "more"),
    [
        ([70, 70, 180], 4, {}),  # one adapter without tokens, tokens of nobody
        ([200], 16, {}),
        ([3, 120, 200], 8, {"ranks": [8, 2, 5]}),
        ([3, 120, 200], 8, {"dropout_p": 0.3, "seed": 5}),
    ],
)
def test_as_the_node_of_each(act, ends, r, more):
    x, pair, offsets, leaves = made(device.NAME, HALF[0], ends, r, **more)
    da = torch.randn(200, 96, device=device.NAME).to(HALF[0])
    found = gated_multi(x, pair, act, offsets)
    grads = torch.autograd.grad(found, leaves, da)
    gate, up = (dora_linear_multi(x, offsets=offsets, **of) for of in pair)
    expected = gated_act(gate, up, act, backend="triton")
    assert torch.equal(found, expected)
    for mine, other in zip(grads, torch.autograd.grad(expected, leaves, da), strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-2, atol=1e-2 * other.abs().max().item())
    assert type(found.grad_fn).__name__ == "GatedMultiBackward"


def test_what_is_refused_as_by_the_node_of_each():
    x, pair, offsets, _ = made(device.NAME, HALF[0], [200], 4)
    with pytest.raises(FdoraError, match="`act` must be one of silu"):
        gated_multi(x, pair, "relu", offsets)
    narrow = pair[1] | {name: pair[1][name][..., :80] for name in ("m", "norm")}
    narrow |= {"W": pair[1]["W"][:80], "B": pair[1]["B"][:, :80]}
    with pytest.raises(FdoraError, match="`up` must be"):
        gated_multi(x, [pair[0], narrow], "silu", offsets)
