"""Time the adapted embedding and the adapted convolution beside torch's own layers and the formulas of PEFT.

    python -m bench.embedding [--device cuda] [--tokens 512,8192] [--only embedding] [--json FILE]

GPU time of replayed CUDA graphs, or CPU wall time; medians of turns. A rival is the formula of its library in plain torch,
its norm inside, as it computes it in every call. ``norm_read`` is the time that reading the table once takes at measured copy
speed. The gradient with ``sparse=True`` beside the dense one is wall time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from bench import clock
from bench.clock import medians_of, wall_timer
from bench.suite import Suite
from fdora.functional import dora_conv2d, dora_embedding, dora_norm

TABLE = (262_144, 4096, 16)  # V, d, r
CPU_TABLE = (4096, 256, 8)
TOKENS, CPU_TOKENS = (512, 8192, 16384), (64,)
CONVS = ((32, 256, 256, 28, 3, 16), (32, 512, 512, 14, 3, 16), (32, 256, 1024, 28, 1, 16))  # L, C, O, space, kernel, r
CPU_CONVS = ((2, 16, 24, 8, 3, 4),)
S = 2.0


def adapter(r, V, d, device):
    """Away from the start, as PEFT keeps it: float32."""
    A, B = torch.randn(r, V, device=device), torch.randn(d, r, device=device).mul_(0.02)
    return A, B


def peft_embedding(ids, W, A, B, m):
    delta = (A.T @ B.T).detach()
    c = torch.linalg.norm((W + S * delta).T, dim=1).detach()
    g = m / c
    return (g * F.embedding(ids, W) + g * (F.embedding(ids, A.T) @ B.T) * S).to(W.dtype)


def lora_embedding(ids, W, A, B):
    return (F.embedding(ids, W) + S * (F.embedding(ids, A.T) @ B.T)).to(W.dtype)


def truth(ids, W, A, B, m, c):
    some = ids[:: max(1, len(ids) // 64)]
    return some, (m / c).double() * (W[some].double() + S * A.T[some].double() @ B.T.double())


def embedding_rows(V, d, r, tokens, device, runs, facts):
    torch.manual_seed(0)
    W = torch.empty(V, d, device=device, dtype=torch.bfloat16).normal_()
    A, B = adapter(r, V, d, device)
    c = dora_norm(W.T, A, B, s=S)
    m = c * (1 + 0.05 * torch.randn(d, device=device))
    c1 = dora_norm(W, B.T, A.T, s=S)
    m1 = c1 * (1 + 0.05 * torch.randn(V, device=device))
    leaves = [t.requires_grad_() for t in (A, B, m)]
    norm = medians_of({"norm": lambda: dora_norm(W.T, A, B, s=S), "rows": lambda: dora_norm(W, B.T, A.T, s=S)}, device, runs)
    for T in tokens:
        ids, dy = torch.randint(0, V, (T,), device=device), torch.randn(T, d, device=device).bfloat16()
        ways = {
            "gather": lambda ids=ids: F.embedding(ids, W),
            "lora": lambda ids=ids: lora_embedding(ids, W, A, B),
            "peft": lambda ids=ids: peft_embedding(ids, W, A, B, m),
            "eager": lambda ids=ids: dora_embedding(ids, W, A, B, m, s=S, norm=c, backend="eager"),
            "fdora": lambda ids=ids: dora_embedding(ids, W, A, B, m, s=S, norm=c),
            "fdora_per_row": lambda ids=ids: dora_embedding(ids, W, A, B, m1, s=S, norm_axis=1),
        }
        with torch.no_grad():  # a graph that lives on would tie the gradients to this stream, and captures to it
            some, want = truth(ids, W, A, B, m, c)
        for name in ("eager", "fdora"):
            backend = "eager" if name == "eager" else "auto"
            got = dora_embedding(some, W, A, B, m, s=S, norm=c, backend=backend).detach()
            error = ((got.double() - want).norm() / want.norm()).item()
            assert error <= 2.5e-3, f"{name} is wrong by {error:.1e}"

        def both(way, wanted=leaves, dy=dy):
            return lambda: torch.autograd.grad(way(), wanted, dy)

        grads = {
            n: both(w, leaves[:2] if n == "lora" else leaves) for n, w in ways.items() if n not in ("gather", "fdora_per_row")
        }
        row = {"op": "embedding", "T": T, "V": V, "d": d, "r": r}
        row |= {f"norm_{n}_ms": round(ms, 4) for n, ms in norm.items()}
        if "bytes_per_ms" in facts:
            row["norm_read_ms"] = round(W.nbytes / facts["bytes_per_ms"], 4)
        with torch.no_grad():
            row |= {f"fwd_{n}_ms": round(ms, 4) for n, ms in medians_of(ways, device, runs).items()}
        print(row, flush=True)  # before anything of backward can fail
        row |= {f"fwd_bwd_{n}_ms": round(ms, 4) for n, ms in medians_of(grads, device, runs).items()}
        # the number of rows that were read is asked for on the host: no graph can hold that, so wall time of both
        sparse = both(lambda ids=ids: dora_embedding(ids, W, A, B, m, s=S, norm=c, sparse=True))
        walls = {n: wall_timer(fn, device, 0) for n, fn in (("sparse", sparse), ("dense", grads["fdora"]))}
        row |= {f"wall_fwd_bwd_{n}_ms": round(ms, 4) for n, ms in clock.medians(walls, runs).items()}
        yield row


def peft_conv(x, W, A, B, m, kernel):
    pad = kernel // 2
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
        leaves, pad = [t.requires_grad_() for t in (x, A, B, m)], kernel // 2
        ways = {
            "frozen": lambda x=x, W=W: F.conv2d(x, W, padding=pad),
            "halves": lambda x=x, W=W, A=A, B=B: (
                F.conv2d(x, W, padding=pad) + S * F.conv2d(F.conv2d(x, A.to(x.dtype), padding=pad), B.to(x.dtype))
            ),
            "peft": lambda x=x, W=W, A=A, B=B, m=m: peft_conv(x, W, A, B, m, kernel),
            "fdora": lambda x=x, W=W, A=A, B=B, m=m, c=c: dora_conv2d(x, W, A, B, m, s=S, norm=c, padding=pad),
        }
        got, want = (f().detach().double() for f in (ways["fdora"], ways["peft"]))
        assert ((got - want).norm() / want.norm()).item() <= 1e-2
        dy = torch.randn_like(ways["fdora"]())
        wanted = {"frozen": leaves[:1], "halves": leaves[:3]}

        def both(n, way, wanted=wanted, leaves=leaves, dy=dy):
            return lambda: torch.autograd.grad(way(), wanted.get(n, leaves), dy)

        row = {"op": "conv2d", "channels": name, "L": L, "C": C, "O": O, "space": space, "kernel": kernel, "r": r}
        with torch.no_grad():
            row |= {f"fwd_{n}_ms": round(ms, 4) for n, ms in medians_of(ways, device, runs).items()}
        grads = {n: both(n, way) for n, way in ways.items()}
        row |= {f"fwd_bwd_{n}_ms": round(ms, 4) for n, ms in medians_of(grads, device, runs).items()}
        yield row


def arguments(parser):
    parser.add_argument("--tokens", type=lambda text: [int(n) for n in text.split(",")])
    parser.add_argument("--only", choices=("embedding", "conv"))


def measure(run):
    options, cpu = run.options, run.options.device == "cpu"
    tokens = options.tokens or (CPU_TOKENS if cpu else TOKENS)
    if options.only != "conv":
        run.add(*embedding_rows(*(CPU_TABLE if cpu else TABLE), tokens, options.device, options.runs, run.facts))
    if options.only != "embedding":
        for shape in run.cases(CPU_CONVS if cpu else CONVS):
            run.add(*conv_rows(*shape, options.device, options.runs))


main = Suite(__doc__, measure, arguments, runs=9)


if __name__ == "__main__":
    main()
