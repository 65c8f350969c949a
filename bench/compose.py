"""Time compose, delta and embedding: the kernels, eager fdora, and the formula as a framework writes it.

    python -m bench.compose [--device cuda] [--json FILE]
    python -m bench.compose --ops dora_embedding --shapes 512x4096,8192x4096

Forward, and forward with backward, in GPU time (replayed CUDA graphs) or CPU wall time; medians of turns. ``copy`` is the time
that the fewest possible bytes of compose and delta take at measured copy speed. Of an embedding ``plain`` is PEFT's formula,
its norm inside, as it computes it in every call; ``lora`` and ``gather`` have less to do, and fdora is given its norm.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import product

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.suite import Some, Suite, shapes
from bench.truth import rel_l2
from bench.ways import S, Way, away, differentiated, mode_ms
from fdora.functional import dora_compose, dora_delta, dora_embedding, select_backend

SHAPES = shapes("4096x4096,4096x14336,16x4096,16384x4096")
ROWS, RANK = 262_144, 16  # of an embedding
OPS = ("dora_compose", "dora_delta", "dora_embedding")
Calls = dict[str, Callable[..., Tensor]]


def plain(delta: bool, base: Tensor, lora: Tensor, g: Tensor) -> Tensor:
    g = g.to(base.dtype)
    return (g - 1) * base + g * (S * lora) if delta else g * (base + S * lora)


def formula(op: str, base: Tensor, lora: Tensor, g: Tensor) -> Tensor:
    """What these operations must give, in float64."""
    return (g.double() - int(op == "dora_delta")) * base.double() + g.double() * S * lora.double()


def composed(op: str, M: int, N: int, device: str) -> tuple[dict[str, Tensor], Calls, Tensor]:
    """Leaves, calls of them, and what they must give."""
    fn, delta = dora_delta if op == "dora_delta" else dora_compose, op == "dora_delta"
    base, lora = (torch.randn(M, N, device=device).bfloat16() for _ in range(2))
    g = 1 + 0.0015 * torch.randn(N, device=device)
    calls = {"plain": partial(plain, delta), "eager": partial(fn, s=S, backend="eager"), "triton": partial(fn, s=S)}
    return {"base": base, "lora": lora, "g": g}, calls, formula(op, base, lora, g)


def embedded(M: int, N: int, device: str) -> tuple[dict[str, Tensor], Calls, Tensor]:
    """Of bf16 rows of W, with float32 adapters, as PEFT keeps them."""
    V = ROWS if device != "cpu" else 4096
    W = torch.empty(V, N, device=device, dtype=torch.bfloat16).normal_()
    A, B, m, c = away(W.T, RANK, torch.float32)
    ids = torch.randint(0, V, (M,), device=device)

    def lora(A: Tensor, B: Tensor, m: Tensor) -> Tensor:
        return (F.embedding(ids, W) + S * (F.embedding(ids, A.T) @ B.T)).to(W.dtype)

    def peft(A: Tensor, B: Tensor, m: Tensor) -> Tensor:
        g = m / torch.linalg.norm((W + S * (A.T @ B.T).detach()).T, dim=1).detach()
        return (g * F.embedding(ids, W) + g * (F.embedding(ids, A.T) @ B.T) * S).to(W.dtype)

    def fdora(A: Tensor, B: Tensor, m: Tensor, **how: str) -> Tensor:
        return dora_embedding(ids, W, A, B, m, s=S, norm=c, **how)

    calls = {"plain": peft, "eager": partial(fdora, backend="eager"), "triton": fdora}
    calls |= {"lora": lora, "gather": lambda *_: F.embedding(ids, W)}
    truth = (m / c).double() * (W[ids].double() + S * A.T[ids].double() @ B.T.double())
    return {"A": A, "B": B, "m": m}, calls, truth


FREE = ("plain", "lora", "gather")  # to round, or to give something else
MOST = {"dora_embedding": 2.5e-3}  # relative L2; of others a rounding


def case(M: int, N: int, op: str, device: str, runs: int, facts: dict) -> dict:
    torch.manual_seed(0)
    leaves, calls, truth = embedded(M, N, device) if op == "dora_embedding" else composed(op, M, N, device)
    dy = torch.randn(M, N, device=device).bfloat16()
    leaves, ways = {name: t.requires_grad_() for name, t in leaves.items()}, {}
    if select_backend(dy).name != "triton":
        del calls["triton"]
    for name, call in calls.items():
        needed = {n: t for n, t in leaves.items() if (name, n) != ("lora", "m")}
        ways[name] = differentiated(partial(call, *leaves.values()), needed, dy)
        if name == "gather":
            ways[name] = Way(ways[name].forward, None)
        error = rel_l2(ways[name].forward(), truth)
        assert name in FREE or error <= MOST.get(op, 1.7e-3), f"{name} is wrong by {error:.1e}"
    row = {"op": op, "M": M, "N": N} | mode_ms(ways, device, runs)
    if "bytes_per_ms" in facts and op != "dora_embedding":  # 2 reads, 1 write; then 3 reads, 2 writes
        row |= {f"{mode}_copy_ms": round(n * dy.nbytes / facts["bytes_per_ms"], 4) for mode, n in (("fwd", 3), ("fwd_bwd", 8))}
    return row


def measure(run):
    options, device = run.options, run.options.device
    usual = SHAPES[2:3] if device == "cpu" else SHAPES
    for shape, op in run.cases(product(options.shapes or usual, options.ops)):
        run.add(case(*shape, op, device, options.runs, run.facts))


main = Suite(measure, {"--shapes": (shapes, "tokens x width"), "--ops": Some(OPS, OPS[:2])}, runs=9)
