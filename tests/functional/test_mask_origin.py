"""Dropout on a part of an input: the part of the whole."""

import pytest
import torch

from fdora import FdoraError
from fdora.functional import DoraLayer, dora_linear, dora_linear_group, dora_mlp
from tests.close import assert_exact
from tests.make import tensors

MODES = ("lora", "peft")


def layer(N, K, r, seed):
    t = tensors(N, K, r, seed=seed)
    return DoraLayer(t["W"], t["A"], t["B"], t["m"], t["s"])


@pytest.mark.parametrize("mode", MODES)
def test_parts_of_the_tokens(mode):
    options = dict(dropout_p=0.4, dropout_mode=mode)
    t = tensors(6, 5, 2, (2, 3, 4))
    x, la = t["x"], layer(6, 5, 2, 0)
    calls = {
        "linear": lambda x, at: dora_linear(x, *la[:4], s=la.s, seed=3, mask_origin=at, **options),
        "group": lambda x, at: dora_linear_group(x, [la, la], seed=[3, 4], mask_origin=at, **options)[1],
        "mlp": lambda x, at: dora_mlp(
            x, layer(7, 5, 2, 1), layer(7, 5, 2, 2), layer(5, 7, 3, 3), seed=[1, 2, 3], mask_origin=at, **options
        ),
    }
    for name, call in calls.items():
        assert_exact(torch.cat([call(x[:1], None), call(x[1:], (12, 0))]), call(x, None), name)
        assert_exact(call(x, (0, 0)), call(x, None), name)
        assert not torch.allclose(call(x[1:], None), call(x, None)[1:])


@pytest.mark.parametrize("at", [(1,), [0, 0], (0, -1), (0.5, 0), 3])
def test_what_is_no_origin(at):
    t = tensors()
    with pytest.raises(FdoraError, match=r"`mask_origin` must be \(t0, k0\), two ints that are not negative"):
        dora_linear(*(t[n] for n in "xWABm"), s=1.0, dropout_p=0.5, mask_origin=at)


def test_seeds_as_tensors_and_in_compiled_code():
    t = tensors()
    f = lambda x, seed, at: dora_linear(  # noqa: E731
        x, *(t[n] for n in "WABm"), s=1.0, dropout_p=0.5, seed=seed, mask_origin=at
    )
    want = f(t["x"], 5, (7, 2))
    assert_exact(f(t["x"], torch.tensor(5, device=t["x"].device), (7, 2)), want)
    assert_exact(torch.compile(f, fullgraph=True, backend="aot_eager")(t["x"], 5, (7, 2)), want)
    many = torch.vmap(lambda seed: f(t["x"], seed, (7, 2)))(torch.tensor([5, 6], device=t["x"].device))
    assert_exact(many[0], want)
