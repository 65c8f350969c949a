"""The layer's kernels: every check of the functional layer, on the Triton backend, and what only kernels can get wrong."""

from functools import partial

import pytest
import torch

from fdora.functional import dora_linear
from fdora.triton import gemm
from tests import device  # noqa: F401 (read by the marks)
from tests.checks.linear import DROPOUT, an_empty_row_of_float16_touches_no_other
from tests.close import outputs_and_gradients
from tests.make import tensors, tracked
from tests.triton.marks import INTERPRETED, needs_gpu, needs_kernels  # noqa: F401

pytestmark = needs_kernels


@needs_gpu
@pytest.mark.parametrize("mode", DROPOUT)
def test_how_tiles_are_shared_out_moves_no_bit(mode, monkeypatch, chosen_anew):
    t = tracked(tensors(4096, 512, 64, (4096,), torch.bfloat16, torch.bfloat16), *"xABm")
    leaves, call = [t[n] for n in "xABm"], partial(dora_linear, *(t[n] for n in "xWABm"), s=t["s"], **DROPOUT[mode])
    before = outputs_and_gradients(call, leaves)
    monkeypatch.setattr(gemm, "beside_others", lambda: True)
    chosen_anew.clear()
    assert all(map(torch.equal, outputs_and_gradients(call, leaves), before))


def test_an_empty_row_of_float16_touches_no_other():
    an_empty_row_of_float16_touches_no_other("triton")


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
