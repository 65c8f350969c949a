"""torch's FlopCounterMode sees our ops, and counts what their plans multiply."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

import fdora.functional as F
import fdora.functional.opaque
import fdora.triton  # noqa: F401
from tests import device
from tests.triton.drawn import NAMES, backward_of, calls
from tests.triton.marks import INTERPRETED, needs_kernels  # noqa: F401


@needs_kernels
@pytest.mark.parametrize("name", NAMES)
def test_as_many_as_explain_says(name):
    """Of forward and of backward, whichever gradients are asked for; beside our ops torch's own are counted."""
    for fn, args, kwargs in calls(name, 8):
        with FlopCounterMode(display=False) as counter:
            backward_of(fn(*args, backend="triton", **kwargs))
        found = {str(op): count for op, count in counter.get_flop_counts()["Global"].items()}
        ours = sum(count for op, count in found.items() if op.startswith("fdora."))
        assert ours == F.explain(fn, *args, backend="triton", **kwargs).flops, found


@needs_kernels
def test_norms_of_a_tree():
    W, A, B = (torch.randn(shape, device=device.NAME, dtype=torch.float16) for shape in ((40, 48), (4, 48), (40, 4)))
    with FlopCounterMode(display=False) as counter:
        F.dora_norm_tree({"a": W, "b": [W, W]}, {"a": (A, B), "b": [(A, B)] * 2}, s=2.0, backend="triton")
    assert counter.get_total_flops() == 3 * 2 * 40 * 48 * 4


def test_fake_tensors_are_counted_without_a_gpu():
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        W, A, B = (torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in ((40, 48), (4, 48), (40, 4)))
        torch.ops.fdora.row_norm(W, A, B, 2.0, None, False)
    assert counter.get_total_flops() == 2 * 40 * 48 * 4


def test_every_op_has_a_formula():
    ours = {
        name.partition("::")[2].partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("fdora::")
    }
    assert len(ours) >= 10 and {str(op) for op in flop_registry if str(op).startswith("fdora.")} == {
        f"fdora.{name}"
        for name in ours - {"segment_sum", "scale_slots", "linears"}  # two have no product, the last is made of ops
    }
