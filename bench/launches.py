"""What each way to reach a kernel costs the host, in us per call: the pieces of a small layer's time.

    python -m bench.launches [--json FILE]

One small kernel (the column sums) launched by Triton's binder, by a plan of fdora, inside a custom_op and inside a triton_op;
descriptors built for each launch or kept; torch's own calls beside them. A plan also allocates its result. Needs a GPU.
"""

from __future__ import annotations

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bench.clock import medians, wall_timer
from bench.suite import Suite
from bench.table import table
from fdora.triton.gemm import Operand, gemm
from fdora.triton.kernels.sums import sum_kernel
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import cdiv
from fdora.triton.runtime.walk import plan_for, run
from fdora.triton.sums import SUM_N, SUM_T, column_sums


def by_binder(partial: Tensor, out: Tensor) -> None:
    grid = (cdiv(partial.shape[1], SUM_N),)
    sum_kernel[grid](partial, out, partial.shape[1], partial.shape[0], None, False, SUM_N, SUM_T, num_warps=4)


def plan_sums(likes, device):
    plan = Builder("column sums", device)
    partial = plan.matrix(likes[0])
    column_sums(plan, partial, plan.result("sums", partial.shape[1:], partial.dtype))
    return plan.plan()


def plan_gemm(likes, device):
    plan = Builder("gemm", device)
    x, W, h, b = map(plan.matrix, likes)
    gemm(plan, plan.result("y", (x.shape[0], W.shape[1]), x.dtype), x, h, Operand(W, b, trans=False))
    return plan.plan()


def by_plan(maker, *tensors):
    return run(plan_for(maker, tensors), tensors)[0]


@torch.library.custom_op("fdora_bench::custom", mutates_args=())
def custom(partial: Tensor) -> Tensor:
    return by_plan(plan_sums, partial)


@torch.library.triton_op("fdora_bench::triton", mutates_args={"out"})
def by_triton_op(partial: Tensor, out: Tensor) -> None:
    grid = (cdiv(partial.shape[1], SUM_N),)
    kernel = torch.library.wrap_triton(sum_kernel)
    kernel[grid](partial, out, partial.shape[1], partial.shape[0], None, False, SUM_N, SUM_T, num_warps=4)


class Classic(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy


class WithSetup(Classic):
    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass


def pieces(device="cuda"):
    partial, out = torch.randn(8, 512, device=device), torch.empty(512, device=device)
    x, W = (torch.randn(*shape, device=device).bfloat16() for shape in ((128, 512), (512, 512)))
    h, b = torch.randn(128, 16, device=device).bfloat16(), torch.randn(16, 512, device=device).bfloat16()
    leaf, dy = x.clone().requires_grad_(), torch.randn_like(x)
    return {
        "torch.empty": lambda: torch.empty((16, 512), device=device, dtype=torch.bfloat16),
        "torch.mm": lambda: torch.mm(x, W),
        "kernel by Triton's binder": lambda: by_binder(partial, out),
        "plan found": lambda: plan_for(plan_sums, (partial,)),
        "kernel by a plan, with its result": lambda: by_plan(plan_sums, partial),
        "the same inside custom_op": lambda: custom(partial),
        "kernel inside triton_op": lambda: by_triton_op(partial, out),
        "one TensorDescriptor": lambda: TensorDescriptor.from_tensor(x, [64, 64]),
        "gemm by TMA, 5 descriptors": lambda: by_plan(plan_gemm, x, W, h, b),
        "Function forward": lambda: Classic.apply(leaf),
        "Function forward, setup_context": lambda: WithSetup.apply(leaf),
        "Function forward + backward": lambda: torch.autograd.grad(Classic.apply(leaf), leaf, dy),
        "F.linear forward + backward": lambda: torch.autograd.grad(torch.nn.functional.linear(leaf, W), leaf, dy),
    }


def measure(run):
    timers = {name: wall_timer(fn, "cuda", 20.0) for name, fn in pieces().items()}
    run.set(us={name: round(1e3 * ms, 1) for name, ms in medians(timers, run.options.runs).items()})
    print(table(["piece", "us"], run.result["us"].items()))


main = Suite(measure, device="cuda", runs=15)
