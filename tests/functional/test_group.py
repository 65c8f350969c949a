"""Layers that share an input: what tests/cases.py does not draw."""

import pytest
import torch

from fdora import FdoraError
from fdora.functional import DoraLayer, dora_linear_group, dora_mlp


@pytest.mark.parametrize("call", ["group", "mlp"])
def test_what_autocast_allows_is_not_allowed_without(call):
    """Layers of two dtypes: whether that passed the checks once says nothing about the other way."""
    x, half, full = (torch.randn(3, 8, dtype=d) for d in (torch.bfloat16, torch.bfloat16, torch.float32))
    layers = [DoraLayer(torch.randn(8, 8, dtype=t.dtype)) for t in (half, full, half)]
    run = (lambda: dora_linear_group(x, layers)) if call == "group" else (lambda: dora_mlp(x, *layers))
    for _ in range(2):
        with pytest.raises(FdoraError, match=r"layers.1.|up"):
            run()
        with torch.autocast("cpu", torch.bfloat16):
            run()
