"""The mask is a function of the seed and the position, and a fair one."""

import pytest
import torch

from fdora.eager.dropout import drop, keep_mask
from fdora.functional import dora_linear
from tests import device
from tests.make import tensors

P = 0.3


def mask(M, K, seed):
    return keep_mask(M, K, torch.tensor(seed, device=device.NAME), P)


def test_known_bits():
    """Frozen: the kernels must draw this very mask."""
    assert mask(2, 8, 0).int().tolist() == KNOWN[0]
    assert mask(2, 8, (5 << 32) + 7).int().tolist() == KNOWN[1]


KNOWN = [
    [[1, 1, 1, 1, 1, 1, 1, 0], [0, 1, 1, 0, 1, 1, 0, 1]],
    [[1, 1, 1, 1, 0, 1, 0, 0], [0, 1, 1, 1, 1, 0, 1, 1]],
]


def test_rate_and_independence():
    M, K = 1000, 700
    a, b = mask(M, K, 1).double(), mask(M, K, 2).double()
    sigma = (P * (1 - P)) ** 0.5
    n = M * K
    assert abs(a.mean().item() - (1 - P)) < 4 * sigma / n**0.5
    assert (a.mean(0) - (1 - P)).abs().max() < 5 * sigma / M**0.5  # no column, no row is special
    assert (a.mean(1) - (1 - P)).abs().max() < 5 * sigma / K**0.5

    def correlation(u, v):
        return ((u - (1 - P)) * (v - (1 - P))).mean().item() / sigma**2

    for other in (b, a.roll(1, 0), a.roll(1, 1), a.roll((1, 1), (0, 1)), a.flip(1)):
        assert abs(correlation(a, other)) < 5 / n**0.5
    seeds = torch.stack([mask(1, 64, s)[0] for s in range(1000)]).double()  # neighbouring seeds
    assert (seeds.mean(0) - (1 - P)).abs().max() < 5 * sigma / 1000**0.5
    assert abs(correlation(seeds[1:], seeds[:-1])) < 5 / 63e3**0.5


@pytest.mark.parametrize("p", [0.05, 0.5])
@pytest.mark.parametrize("stride", [1, 64, 4096])
def test_pairs_of_columns_and_of_tokens_are_independent(p, stride):
    """z of each pair of 192 columns over 20,000 tokens, and of tokens over columns, has the variance of independent ones: 1, to
    0.01 over 18,336 pairs. A hash of one product has 1.7 and more here; with a sum for its first product it has 1.2 at 4096."""
    at = [i * stride for i in range(192)]
    columns = torch.cat([keep_mask(20_000, 1, torch.tensor([7, 0, k], device=device.NAME), p) for k in at], 1)
    tokens = torch.cat([keep_mask(1, 20_000, torch.tensor([7, t, 0], device=device.NAME), p) for t in at])
    for drawn in (columns.T, tokens):
        off = (drawn.float() - (1 - p)) / (p * (1 - p)) ** 0.5
        z = (off @ off.T / drawn.shape[1] ** 0.5)[tuple(torch.triu_indices(192, 192, 1))]
        assert abs(z.var().item() - 1) < 0.05 and z.abs().max() < 6


def test_a_part_has_the_mask_of_the_whole():
    """However the whole is cut, and beyond 2^32 rows."""

    def part(M, K, t0, k0):
        return keep_mask(M, K, torch.tensor([7, t0, k0], device=device.NAME), P)

    whole = mask(40, 30, 7)
    for i, j, k, l in ((0, 40, 0, 30), (0, 17, 0, 30), (17, 40, 3, 9), (39, 40, 29, 30), (5, 5, 0, 3)):
        assert torch.equal(part(j - i, l - k, i, k), whole[i:j, k:l])
    far = part(20, 30, 2**32 - 10, 2**31 - 5)
    assert torch.equal(part(9, 20, 2**32 + 1, 2**31 + 5), far[11:, 10:])
    assert not torch.equal(far[10:], part(10, 30, 0, 2**31 - 5))  # the high word of a position counts


def test_drop_keeps_the_mean_and_dtype():
    x = torch.ones(500, 400, device=device.NAME).bfloat16()
    y = drop(x, torch.tensor(3, device=device.NAME), P)
    assert y.dtype == torch.bfloat16 and abs(y.float().mean() - 1) < 0.01
    assert drop(x, None, P) is x
    x[0, 0] = float("inf")  # a dropped inf is 0, not NaN
    assert not drop(x, torch.tensor(3, device=device.NAME), 0.999).isnan().any()


def test_seed_rules():
    t = tensors(6, 50, 2, (8,))
    args = [t[n] for n in ("x", "W", "A", "B", "m")]

    def call(seed, mode="lora"):
        return dora_linear(*args, s=2.0, dropout_p=P, dropout_mode=mode, seed=seed)

    for mode in ("lora", "peft"):
        state = torch.get_rng_state()
        assert torch.equal(call(5, mode), call(torch.tensor(5, device=device.NAME), mode))
        assert not torch.equal(call(5, mode), call(6, mode))
        assert torch.equal(state, torch.get_rng_state())  # a given seed leaves torch's generator alone
        assert not torch.equal(call(None, mode), call(None, mode))  # no seed: a new mask each call ...
        torch.manual_seed(1)
        first = call(None, mode)
        torch.manual_seed(1)
        assert torch.equal(first, call(None, mode))  # ... from torch's generator
    assert torch.equal(dora_linear(*args, s=2.0, dropout_p=0.0, dropout_mode="peft"), dora_linear(*args, s=2.0))
