"""Time the adapted embedding and the adapted convolution beside torch's own layers and the formulas of PEFT.

    python -m bench.embedding [--device cuda] [--tokens 512,8192] [--only embedding] [--json FILE]

GPU time of replayed CUDA graphs, or CPU wall time; medians of turns. A rival is the formula of its library in plain torch,
its norm inside, as it computes it in every call. ``norm_read`` is the time that reading the table once takes at measured copy
speed. The gradient with ``sparse=True`` beside the dense one is wall time.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from bench import clock
from bench.clock import medians_of, wall_timer
from bench.suite import One, Suite, numbers
from bench.truth import rel_l2
from bench.ways import S, Way, differentiated, mode_ms
from fdora.functional import dora_conv2d, dora_embedding, dora_norm

TABLE = (262_144, 4096, 16)  # V, d, r
CPU_TABLE = (4096, 256, 8)
TOKENS, CPU_TOKENS = (512, 8192, 16384), (64,)
CONVS = ((32, 256, 256, 28, 3, 16), (32, 512, 512, 14, 3, 16), (32, 256, 1024, 28, 1, 16))  # L, C, O, space, kernel, r
CPU_CONVS = ((2, 16, 24, 8, 3, 4),)


def peft_embedding(ids, W, A, B, m):
    delta = (A.T @ B.T).detach()
    c = torch.linalg.norm((W + S * delta).T, dim=1).detach()
    g = m / c
    return (g * F.embedding(ids, W) + g * (F.embedding(ids, A.T) @ B.T) * S).to(W.dtype)


def lora_embedding(ids, W, A, B):
    return (F.embedding(ids, W) + S * (F.embedding(ids, A.T) @ B.T)).to(W.dtype)


def checked(name: str, got: Tensor, want: Tensor, most: float) -> None:
    error = rel_l2(got, want)
    assert error <= most, f"{name} is wrong by {error:.1e}"


def embedding_rows(V, d, r, tokens, device, runs, facts):
    torch.manual_seed(0)
    W = torch.empty(V, d, device=device, dtype=torch.bfloat16).normal_()
    A, B = torch.randn(r, V, device=device), torch.randn(d, r, device=device).mul_(0.02)  # float32, as PEFT keeps them
    norms = {"norm": partial(dora_norm, W.T, A, B, s=S), "rows": partial(dora_norm, W, B.T, A.T, s=S)}
    c, c1 = (norm() for norm in norms.values())
    m, m1 = (each * (1 + 0.05 * torch.randn_like(each)) for each in (c, c1))
    norm = medians_of(norms, device, runs)
    leaves = {"A": A.requires_grad_(), "B": B.requires_grad_(), "m": m.requires_grad_()}
    for T in tokens:
        ids, dy = torch.randint(0, V, (T,), device=device), torch.randn(T, d, device=device).bfloat16()
        fdora = partial(dora_embedding, ids, W, A, B, m, s=S, norm=c)
        calls = {"peft": partial(peft_embedding, ids, W, A, B, m), "eager": partial(fdora, backend="eager"), "fdora": fdora}
        ways = {name: differentiated(call, leaves, dy) for name, call in calls.items()}
        ways["lora"] = differentiated(partial(lora_embedding, ids, W, A, B), {"A": A, "B": B}, dy)
        ways["gather"] = Way(partial(F.embedding, ids, W), None)
        ways["fdora_per_row"] = Way(torch.no_grad()(partial(dora_embedding, ids, W, A, B, m1, s=S, norm_axis=1)), None)
        with torch.no_grad():  # a graph that lives on would tie the gradients to this stream, and captures to it
            some = slice(None, None, max(1, T // 64))
            want = (m / c).double() * (W[ids[some]].double() + S * A.T[ids[some]].double() @ B.T.double())
        for name in ("eager", "fdora"):
            checked(name, ways[name].forward()[some], want, 2.5e-3)
        row = {"op": "embedding", "T": T, "V": V, "d": d, "r": r} | {f"norm_{n}_ms": round(ms, 4) for n, ms in norm.items()}
        if "bytes_per_ms" in facts:
            row["norm_read_ms"] = round(W.nbytes / facts["bytes_per_ms"], 4)
        row |= mode_ms(ways, device, runs)
        # the number of rows that were read is asked for on the host: no graph can hold that, so wall time of both
        walls = {"sparse": differentiated(partial(fdora, sparse=True), leaves, dy), "dense": ways["fdora"]}
        ms = clock.medians({n: wall_timer(way.both, device, 0) for n, way in walls.items()}, runs)
        yield row | {f"wall_fwd_bwd_{n}_ms": round(t, 4) for n, t in ms.items()}


def lora_conv(x, W, A, B, pad):
    return F.conv2d(x, W, padding=pad) + S * F.conv2d(F.conv2d(x, A.to(x.dtype), padding=pad), B.to(x.dtype))


def peft_conv(x, W, A, B, m, pad):
    base = F.conv2d(x, W, padding=pad)
    delta = (B.flatten(1) @ A.flatten(1)).reshape(W.shape).detach()
    c = (W + S * delta).norm(p=2, dim=(1, 2, 3)).detach()
    g = (m / c)[:, None, None]
    lora = F.conv2d(F.conv2d(x, A.to(x.dtype), padding=pad), B.to(x.dtype))
    return (base + (g - 1) * base + g * lora * S).to(x.dtype)


def conv_rows(L, C, O, space, kernel, r, device, runs):
    torch.manual_seed(0)
    for name, form in (("first", torch.contiguous_format), ("last", torch.channels_last)):
        W = torch.randn(O, C, kernel, kernel, device=device).mul_((C * kernel**2) ** -0.5).bfloat16().to(memory_format=form)
        A = torch.randn(r, C, kernel, kernel, device=device).mul_((C * kernel**2) ** -0.5).to(memory_format=form)
        B = torch.randn(O, r, 1, 1, device=device).mul_(0.05)
        c = dora_norm(W.flatten(1), A.flatten(1), B.flatten(1), s=S)
        m = c * (1 + 0.05 * torch.randn(O, device=device))
        x = torch.randn(L, C, space, space, device=device).bfloat16().to(memory_format=form)
        leaves, pad = {n: t.requires_grad_() for n, t in (("x", x), ("A", A), ("B", B), ("m", m))}, kernel // 2
        calls = {
            "frozen": (partial(F.conv2d, x, W, padding=pad), 1),
            "halves": (partial(lora_conv, x, W, A, B, pad), 3),
            "peft": (partial(peft_conv, x, W, A, B, m, pad), 4),
            "fdora": (partial(dora_conv2d, x, W, A, B, m, s=S, norm=c, padding=pad), 4),
        }
        dy = torch.randn_like(calls["fdora"][0]())
        ways = {n: differentiated(call, dict(list(leaves.items())[:count]), dy) for n, (call, count) in calls.items()}
        checked("fdora", ways["fdora"].forward(), ways["peft"].forward().double(), 1e-2)
        row = {"op": "conv2d", "channels": name, "L": L, "C": C, "O": O, "space": space, "kernel": kernel, "r": r}
        yield row | mode_ms(ways, device, runs)


OPTIONS = {
    "--tokens": numbers,
    "--only": One(("embedding", "conv")),
}


def measure(run):
    options, cpu = run.options, run.options.device == "cpu"
    tokens = options.tokens or (CPU_TOKENS if cpu else TOKENS)
    if options.only != "conv":
        run.add(*embedding_rows(*(CPU_TABLE if cpu else TABLE), tokens, options.device, options.runs, run.facts))
    if options.only != "embedding":
        for shape in run.cases(CPU_CONVS if cpu else CONVS):
            run.add(*conv_rows(*shape, options.device, options.runs))


main = Suite(measure, OPTIONS, runs=9)
