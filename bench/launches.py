"""What each way to reach a kernel costs the host, in us per call: the pieces of a small layer's time.

    python -m bench.launches [--json FILE]

One small kernel (the column sums) launched by Triton's binder, through the launcher of fdora, inside a custom_op and
inside a triton_op; descriptors built for each launch or kept; torch's own calls beside them. Needs a GPU.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from bench.clock import medians, wall_timer
from bench.norm_forms import about
from bench.save import save
from bench.table import table
from fdora.triton import _launch
from fdora.triton.gemm import gemm


def by_binder(partial: Tensor, out: Tensor) -> None:
    grid = (_launch.cdiv(partial.shape[1], _launch.SUM_N),)
    _launch._sum_kernel[grid](
        partial, out, partial.shape[1], partial.shape[0], False, _launch.SUM_N, _launch.SUM_T, num_warps=4
    )


@torch.library.custom_op("fdora_bench::custom", mutates_args={"out"})
def custom(partial: Tensor, out: Tensor) -> None:
    _launch.column_sums(partial, out)


@torch.library.triton_op("fdora_bench::triton", mutates_args={"out"})
def by_triton_op(partial: Tensor, out: Tensor) -> None:
    grid = (_launch.cdiv(partial.shape[1], _launch.SUM_N),)
    kernel = torch.library.wrap_triton(_launch._sum_kernel)
    kernel[grid](partial, out, partial.shape[1], partial.shape[0], False, _launch.SUM_N, _launch.SUM_T, num_warps=4)


class Classic(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, dy):
        return dy


class WithSetup(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.clone()

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, dy):
        return dy


def pieces():
    partial, out = torch.randn(8, 512, device="cuda"), torch.empty(512, device="cuda")
    x, W = (torch.randn(*shape, device="cuda").bfloat16() for shape in ((128, 512), (512, 512)))
    h, b = torch.randn(128, 16, device="cuda").bfloat16(), torch.randn(16, 512, device="cuda").bfloat16()
    leaf, dy = x.clone().requires_grad_(), torch.randn_like(x)
    return {
        "torch.empty": lambda: torch.empty((16, 512), device="cuda", dtype=torch.bfloat16),
        "torch.mm": lambda: torch.mm(x, W),
        "kernel by Triton's binder": lambda: by_binder(partial, out),
        "kernel by fdora's launcher": lambda: _launch.column_sums(partial, out),
        "the same inside custom_op": lambda: custom(partial, out),
        "kernel inside triton_op": lambda: by_triton_op(partial, out),
        "one TensorDescriptor": lambda: TensorDescriptor.from_tensor(x, [64, 64]),
        "gemm by TMA, 5 descriptors": lambda: gemm(x, W, h, b),
        "Function forward": lambda: Classic.apply(leaf),
        "Function forward, setup_context": lambda: WithSetup.apply(leaf),
        "Function forward + backward": lambda: torch.autograd.grad(Classic.apply(leaf), leaf, dy),
        "F.linear forward + backward": lambda: torch.autograd.grad(torch.nn.functional.linear(leaf, W), leaf, dy),
    }


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--device", choices=["cuda"], default="cuda")
    options.add_argument("--runs", type=int, default=15)
    options.add_argument("--json", type=Path)
    options.add_argument("--commit", help="recorded in the JSON")
    options = options.parse_args()
    timers = {name: wall_timer(fn, "cuda", 20.0) for name, fn in pieces().items()}
    us = {name: round(1e3 * ms, 1) for name, ms in medians(timers, options.runs).items()}
    print(table(["piece", "us"], us.items()))
    save(options.json, {"about": about("cuda", options.commit), "us": us})


if __name__ == "__main__":
    main()
