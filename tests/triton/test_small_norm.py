"""Few tokens without a norm: the pass over W forms it, and nothing else reads W."""

import math

import torch

from fdora.triton import mlp, small_norm
from fdora.triton.linear import plan_forward
from tests import device  # noqa: F401 (read by the mark)
from tests.close import rel_l2
from tests.make import tensors
from tests.triton.marks import HALF, INTERPRETED, needs_kernels  # noqa: F401
from tests.triton.written import HOPPER, alike, arrays, calls_without_norm, kernels, launches, layer

INSIDE = {"shrink_kernel": 1, "small_norm_kernel": 1}
APART = {"norm_kernel": 1, "sum_kernel": 1}


def exact(t):
    """The norm in float64."""
    return torch.linalg.vector_norm(t["W"].double() + t["s"] * t["B"].double() @ t["A"].double(), dim=1)


@needs_kernels
def test_the_norm_is_exact_where_w_and_the_adapter_cancel_and_nan_stays_in_its_row():
    """c as a result of the plan: of rows that are 0, that the adapter takes away but for 1 %, and of a NaN."""
    from fdora.triton.runtime.walk import like, run

    t = tensors(48, 64, 8, (5,), HALF[0], HALF[0])
    W = (-t["s"] * t["B"].float() @ t["A"].float()).mul(0.99).to(HALF[0])
    W[3], t["B"][3] = 0, 0
    W[5, 7] = math.nan
    operands = (t["x"], W, t["A"], t["B"], t["m"], None, None, None)
    plan = plan_forward(tuple(None if v is None else like(v) for v in operands), HOPPER, 0.0, "lora", ("nothing",), True)
    assert dict(kernels(plan)) == INSIDE
    y, _, c = run(plan, operands, (t["s"],))
    want = exact(t | {"W": W})
    others = [i for i in range(48) if i != 5]
    assert torch.isnan(c[5]) and torch.isnan(y[:, 5]).all() and not torch.isnan(y[:, others]).any()
    assert c[3] == 0 and (c.double() - want)[others].abs().max() <= 1e-6 * W.float()[others].norm(dim=1).max()
    assert rel_l2(c[others], want[others]) < 1e-5


# what needs no kernels


def test_what_a_plan_launches():
    """W is an argument of one launch; where the pass does not fit, and under dropout, of the norm's too."""
    for maker, likes, options in calls_without_norm(8, 512, 1024, 16, torch.bfloat16):
        plan, dropped = maker(tuple(likes), HOPPER, *options), likes[7] is not None
        found = {k: v for k, v in kernels(plan).items() if k != "copy_kernel"}
        assert {k: found.get(k) for k in APART} == APART if dropped else found == INSIDE
        assert sum(a.slot == 1 for step in launches(plan) for a in arrays(step)) == 1 + dropped * (
            found.get("gemm_tma_kernel", 0) > 0
        )
    for M, r, adapter in ((65, 16, torch.bfloat16), (8, 65, torch.bfloat16), (8, 16, torch.float32)):
        la = layer(512, 1024, r, torch.bfloat16, adapter)
        la[4] = None
        plan = plan_forward((alike(M, 1024, dtype=torch.bfloat16), *la), HOPPER, 0.0, "lora", ("nothing",), True)
        assert "small_norm_kernel" not in kernels(plan) and kernels(plan)["norm_kernel"] == 1
    x, up, down = alike(4, 48, dtype=torch.float16), *(layer(*s, 8, *[torch.float16] * 2) for s in ((32, 48), (48, 32)))
    up[4] = down[4] = None
    pair, three = ((la, 0.0, "lora", ("nothing",) * n, True) for n, la in ((2, up * 2), (3, up * 2 + down)))
    for count, plan_of, (la, *options) in ((2, plan_forward, pair), (3, mlp.plan_forward, (*three, "silu"))):
        found = kernels(plan_of((x, *la), HOPPER, *options))  # each pass forms the norm of its own W
        assert found["small_norm_kernel"] == count and "norm_kernel" not in found


def test_what_is_asked_of_the_operands():
    x, W, A, B = (torch.empty(*s, dtype=torch.bfloat16) for s in ((2, 4, 64), (32, 64), (8, 64), (32, 8)))
    assert small_norm.norm_inside(x, W, A, B)
    assert not small_norm.norm_inside(x.new_empty(5, 13, 64), W, A, B) and not small_norm.norm_inside(x, W, A.float(), B)
    assert not small_norm.norm_inside(x, object(), A, B) and not small_norm.norm_inside(x.float(), W, A, B)
    assert not small_norm.norm_inside(x.new_empty(0, 64), W, A, B)
