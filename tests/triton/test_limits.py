"""What kernels of many adapters cannot count is refused before a plan is made; what is not refused fits. Nothing runs."""

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

from fdora import FdoraError
from fdora.functional import DoraLayer, dora_experts, dora_experts_mlp, dora_linear_multi, dora_norm, explain
from fdora.functional.bank import MOST_ADAPTERS, MOST_OF_EACH, MOST_RANK
from fdora.triton import multi
from tests.triton.marks import INTERPRETED, needs_kernels  # noqa: F401
from tests.triton.written import BF16, FP32, HOPPER, alike, bank, by_tma, calls_of_experts, calls_of_multi, kernels, launches

ON_SECOND, ON_FIRST = 65_535, 2**31 - 1  # programs that CUDA starts on an axis
FEW, TOKENS, MANY = 8, 4096, 5_000_000  # of so many tokens the sums over those of an adapter are cut into strips


def plans(G, calls, M, r, dtype):
    for make, likes, options in calls(M, 64, 64, r, G, dtype):
        yield make(tuple(likes), HOPPER, *options)


def over(plan):
    """Kernels whose grid has an axis that CUDA does not start."""
    return {
        step.kernel.fn.__name__
        for step in launches(plan)
        if step.grid[0] > ON_FIRST or any(n > ON_SECOND for n in step.grid[1:])
    }


CASES = [
    (calls, M, r, dtype)
    for calls in (calls_of_multi, calls_of_experts)
    for M, r, dtype in ((FEW, 8, BF16), (TOKENS, 8, BF16), (TOKENS, 48, FP32), (MANY, 8, BF16))
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0].__name__}-{case[1]}-{case[2]}-{case[3]}")
def test_so_many_adapters_fit(case):
    assert [over(plan) for plan in plans(MOST_ADAPTERS, *case) if over(plan)] == []


def test_one_more_does_not():
    found = set()
    for case in CASES:
        found |= {name for plan in plans(MOST_ADAPTERS + 1, *case) for name in over(plan)}
    assert found == {
        "multi_sum_kernel",
        "multi_finish_kernel",
        "multi_grad_kernel",
        "sum_kernel",
        "strip_root_kernel",
        "norm_kernel",
    }


def test_the_table_of_routes_has_room():
    """adapter * 32768 + slab in int32, a slab in 14 bits."""
    assert (MOST_ADAPTERS + 1) * 32768 - 1 <= 2**31 - 1
    x = alike(TOKENS, 64, dtype=BF16)
    plan = multi.plan_forward((x, *bank(TOKENS, 64, 64, MOST_RANK, 2, BF16, BF16)), HOPPER, (), 0.0, "lora", False)
    (step,) = launches(plan, "multi_routes_kernel")
    span = step.args[step.kernel.arg_names.index("span")]
    assert 1 < span <= 16384 and any(by_tma(each) for each in launches(plan, "multi_gemm_tma_kernel")) and not over(plan)
    few = multi.plan_forward(
        (x._replace(shape=(FEW, 64)), *bank(FEW, 64, 64, MOST_RANK, 2, BF16, BF16)), HOPPER, (), 0.0, "lora", False
    )
    assert "multi_shrink_kernel" in kernels(few) and not over(few)
    more = bank(FEW, 64, 64, MOST_RANK + 1, 2, BF16, BF16)
    few = multi.plan_forward((x._replace(shape=(FEW, 64)), *more), HOPPER, (), 0.0, "lora", False)
    assert over(few) == {"multi_shrink_kernel"}
    assert MOST_OF_EACH == 2**15 - 1  # bits of a rank in the words of multi_ranks_kernel


@pytest.mark.parametrize("experts", [False, True])
def test_rows_that_tma_cannot_count_are_read_by_pointers(experts):
    """16384 adapters of 131072 outputs."""
    for G, wanted in ((16383, True), (16384, False)):
        likes = (alike(TOKENS, 64, dtype=BF16), *bank(TOKENS, 131072, 64, 8, G, BF16, BF16, experts=experts))
        plan = multi.plan_forward(likes, HOPPER, (), 0.0, "lora", False)
        assert any(by_tma(step) for step in launches(plan)) == wanted


def meta(*shape, dtype=BF16):
    return torch.empty(shape, dtype=dtype, device="meta")


def call_multi(G, r=2, **options):
    ranks = {"ranks": (1, *[r] * (G - 1))} if options.pop("table", False) else {}
    tensors = meta(3, 8), meta(8, 8), meta(G, r, 8), meta(G, 8, r), meta(G, 8)
    return dora_linear_multi, tensors, {"s": meta(G, dtype=FP32), "ids": meta(3, dtype=torch.int64)} | ranks | options


def call_experts(E, **options):
    tensors = meta(3, 8), meta(E, 8, 8), meta(E, 2, 8), meta(E, 8, 2), meta(E, 8)
    return dora_experts, tensors, {"s": 1.0, "ids": meta(3, 1, dtype=torch.int64)} | options


def call_mlp(E, **options):
    up = DoraLayer(meta(E, 16, 8), meta(E, 2, 8), meta(E, 16, 2), meta(E, 16), 1.0)
    down = DoraLayer(meta(E, 8, 8), meta(E, 2, 8), meta(E, 8, 2), meta(E, 8), 1.0)
    return dora_experts_mlp, (meta(3, 8), up, down), {"ids": meta(3, 1, dtype=torch.int64)} | options


def call_norm(G, **options):
    return dora_norm, (meta(8, 8), meta(G, 2, 8), meta(G, 8, 2)), {"s": meta(G, dtype=FP32)} | options


def call_stack(E, **options):
    return dora_norm, (meta(E, 8, 8), meta(E, 2, 8), meta(E, 8, 2)), {"s": 1.0} | options


TOO_MANY = (
    "fdora.{}: `{}` must be of at most 65535 adapters for kernels, got 65536. "
    "Split them into several calls, or pass backend='eager'."
)
REFUSED = {
    call_multi: ("dora_linear_multi", "A"),
    call_experts: ("dora_experts", "A"),
    call_mlp: ("dora_experts_mlp", "gate_up.A"),
    call_norm: ("dora_norm", "A"),
    call_stack: ("dora_norm", "A"),
}


@pytest.mark.parametrize("call", REFUSED, ids=lambda call: call.__name__)
def test_one_more_is_refused(call):
    """explain decides as the call does."""
    fn, args, options = call(MOST_ADAPTERS + 1)
    with pytest.raises(FdoraError) as found:
        explain(fn, *args, **options, gpu="h200")
    assert str(found.value) == TOO_MANY.format(*REFUSED[call])
    assert explain(fn, *args, **options, gpu="h200", backend="eager").backend == "eager"
    fn, args, options = call(MOST_ADAPTERS)
    assert explain(fn, *args, **options, gpu="h200").backend == "triton"


def test_ranks_that_are_too_large():
    for options, most, beside in (({}, MOST_RANK, ""), ({"table": True}, MOST_OF_EACH, " beside `ranks`")):
        fn, args, given = call_multi(2, most, **options)
        assert explain(fn, *args, **given, gpu="h200").backend == "triton"
        fn, args, given = call_multi(2, most + 1, **options)
        with pytest.raises(FdoraError) as found:
            explain(fn, *args, **given, gpu="h200")
        words = f"fdora.dora_linear_multi: `A` must be of a rank of at most {most}{beside} for kernels, got {most + 1}."
        assert str(found.value) == f"{words} Pass backend='eager'."
