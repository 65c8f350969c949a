"""Dropout on a part of an input: what tests/cases.py does not draw."""

import pytest
import torch

from fdora import FdoraError
from fdora.functional import dora_linear
from tests.close import assert_exact
from tests.make import tensors


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
    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend="aot_eager")  # the seed, too, as that of a next step
    assert_exact(compiled(t["x"], 5, (7, 2)), want)
    many = torch.vmap(lambda seed: f(t["x"], seed, (7, 2)))(torch.tensor([5, 6], device=t["x"].device))
    assert_exact(many[0], want)
