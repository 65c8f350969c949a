"""A layer with a bias: what reading the value before g off the output saves, costs and loses.

    python -m bench.bias --device cuda --beside 512 [--json FILE]

Forward and backward (all gradients) of ``dora_linear`` with the norm given, beside ``keep_inner=True``, which keeps the value
before g: time (on a GPU of replayed CUDA graphs, in turns), what is kept for backward beside inputs and y, and the error of the
gradient of m against float64, relative, over the columns. Biases: none; as large as the product, as vision transformers have
them; and "k": every tenth column 20 to 400 times as large, as in Qwen2.5's k, whose products are formed again in backward.
"""

from __future__ import annotations

from functools import partial
from itertools import product

import torch

from bench.clock import medians_of
from bench.suite import Suite
from fdora.functional import dora_linear, dora_norm
from tests.memory import peak_bytes

# tokens, N, K, r: ViT-g/14 (64 images of 224 x 224) qkv and w3; Qwen2.5-7B q and k
SHAPES = ((16448, 4608, 1536, 16), (16448, 1536, 4096, 16), (4096, 3584, 3584, 16), (4096, 512, 3584, 16), (512, 512, 3584, 16))
BIASES = ("none", "even", "k")
TRUTH = 1024  # columns that are compared with float64
S = 2.0


def inputs(shape, kind, device):
    M, N, K, r = shape
    x, W = torch.randn(M, K, device=device).bfloat16(), (torch.randn(N, K, device=device) / K**0.5).bfloat16()
    A, B = torch.randn(r, K, device=device) / K**0.5, torch.randn(N, r, device=device) / (50 * r**0.5)
    A, B = A.bfloat16(), B.bfloat16()
    c = dora_norm(W, A, B, s=S)
    m = c * (1 + 0.05 * torch.randn(N, device=device))
    bias = None if kind == "none" else torch.randn(N, device=device)
    if bias is not None and kind == "k":
        bias[::10] = torch.logspace(1.3, 2.6, len(bias[::10]), device=device)
    leaves = {"x": x, "A": A, "B": B, "m": m}
    return W, c, None if bias is None else bias.bfloat16(), {n: t.requires_grad_() for n, t in leaves.items()}


def measured(shape, kind, device, runs):
    torch.manual_seed(0)
    W, c, bias, leaves = inputs(shape, kind, device)
    x, A, B, m = leaves.values()
    dy = torch.randn(shape[0], shape[1], device=device).bfloat16()

    def forward(keep):
        return dora_linear(x, W, A, B, m, s=S, bias=bias, norm=c, keep_inner=keep)

    def gradient(keep):
        return torch.autograd.grad(forward(keep), [*leaves.values()], dy)

    with torch.no_grad():
        part = slice(min(TRUTH, shape[1]))
        v = x.double() @ (W[part].double() + S * B[part].double() @ A.double()).T
        truth = (v * dy[:, part].double()).sum(0) / c[part].double()
    row = {"shape": shape, "bias": kind}
    for name, keep in (("read", False), ("kept", True)):
        dm = gradient(keep)[3][part].double()
        row[f"{name}_error"] = ((dm - truth).norm() / truth.norm()).item()
        y_bytes = 2 * shape[0] * shape[1]
        row[f"{name}_mb"] = (peak_bytes(partial(forward, keep), device) - y_bytes) / 2**20
    fns = {name: partial(gradient, name == "kept") for name in ("read", "kept")}
    return row | {f"{name}_ms": ms for name, ms in medians_of(fns, device, runs).items()}


def arguments(parser):
    parser.add_argument("--tiny", action="store_true", help="small sizes, for a smoke test")


def measure(run):
    options = run.options
    for shape, kind in run.cases(product(((96, 64, 48, 8),) if options.tiny else SHAPES, BIASES)):
        run.add(measured(shape, kind, options.device, options.runs))


main = Suite(__doc__, measure, arguments, runs=9)


if __name__ == "__main__":
    main()
