"""Every promise of tests/checks/tree.py, in plain torch."""

import numpy as np
import optree
import pytest
import torch

from fdora import FdoraError
from fdora.functional import dora_merge_tree, dora_norm_tree, dora_norm_tree_state
from tests.checks.tree import CHECKS, inputs


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("check", CHECKS, ids=lambda f: f.__name__)
def test_tree(check, dtype):
    check("eager", dtype)


def test_any_number_is_one_for_all_leaves():
    weights, params = inputs(torch.float32)
    want = dora_norm_tree(weights, params, s=0.5)
    got = dora_norm_tree(weights, params, s=np.float64(0.5))
    assert all(map(torch.equal, optree.tree_leaves(got), optree.tree_leaves(want)))
    for call in (dora_norm_tree, dora_merge_tree):
        with pytest.raises(FdoraError, match=r"`s` .*must be a finite Python number, got a Tensor"):
            call(weights, params, s=torch.tensor(0.5))
        with pytest.raises(FdoraError, match=r"`s` .*must be a finite Python number, got a Tensor"):
            call(weights, params, s=torch.ones(3))  # beside what is remembered of the calls before


def test_a_state_of_another_kind():
    weights, params = inputs(torch.float32)
    state = dora_norm_tree_state(weights)
    with pytest.raises(FdoraError, match="`state` must be a NormTreeState, got a tuple"):
        dora_norm_tree(weights, params, s=0.5, state=tuple(state))


def test_between_the_leaves_are_zeros(monkeypatch):
    """Two calls give the same buffers, gaps included, whatever the memory held."""
    weights, params = inputs(torch.float32)
    state = dora_norm_tree_state(weights)
    empty = torch.empty
    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: empty(*args, **kwargs).fill_(7))
    (buffer,) = dora_norm_tree(weights, params, s=0.5, state=state).buffers
    filled = sum(c.numel() for c in optree.tree_leaves(weights, is_leaf=torch.is_tensor) for c in [c[:, 0]])
    assert buffer.numel() > filled and int((buffer == 0).sum()) == buffer.numel() - filled
