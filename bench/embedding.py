"""Time the adapted embedding and the adapted convolution beside torch's own layers and the formulas of PEFT.

    python -m bench.embedding [--device cuda] [--tokens 512,8192] [--only embedding] [--tiles] [--json FILE]

GPU time of replayed CUDA graphs, or CPU wall time; medians of turns. A rival is the formula of its library in plain torch,
its norm inside, as it computes it in every call. ``norm_read`` is the time that reading the table once takes at measured copy
speed. The gradient with ``sparse=True`` beside the dense one is wall time. ``--tiles`` times the kernels' tiles instead: what
fdora/triton/embedding.py chooses among.
"""

from __future__ import annotations

import multiprocessing
import os
from contextlib import contextmanager, suppress
from itertools import product
from unittest import mock

import torch
import torch.nn.functional as F

from bench import clock
from bench.clock import wall_timer
from bench.command import command
from bench.norm_forms import about, medians
from bench.records import save
from bench.table import table
from fdora.functional import dora_conv2d, dora_embedding, dora_norm, select_backend

TABLE = (262_144, 4096, 16)  # V, d, r
CPU_TABLE = (4096, 256, 8)
TOKENS, CPU_TOKENS = "512,8192,16384", "64"
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
    norm = medians({"norm": lambda: dora_norm(W.T, A, B, s=S), "rows": lambda: dora_norm(W, B.T, A.T, s=S)}, device, runs)
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
            row |= {f"fwd_{n}_ms": round(ms, 4) for n, ms in medians(ways, device, runs).items()}
        print(row, flush=True)  # before anything of backward can fail
        row |= {f"fwd_bwd_{n}_ms": round(ms, 4) for n, ms in medians(grads, device, runs).items()}
        # the number of rows that were read is asked for on the host: no graph can hold that, so wall time of both
        sparse = both(lambda ids=ids: dora_embedding(ids, W, A, B, m, s=S, norm=c, sparse=True))
        walls = {n: wall_timer(fn, device, 0) for n, fn in (("sparse", sparse), ("dense", grads["fdora"]))}
        row |= {f"wall_fwd_bwd_{n}_ms": round(ms, 4) for n, ms in clock.medians(walls, runs).items()}
        yield row


def tiles_of(facade, T):
    """Those of one launch for few tokens, and of both ways for many."""
    ones = [(16, d, span, warps) for d, warps in ((128, 4), (256, 4), (256, 8), (512, 8)) for span in (d, 2 * d)]
    ones += [(32, 128, 128, 4), (32, 256, 256, 8), (64, 128, 128, 4), (16, 128, 512, 4)]
    found = [facade.Config(t, d, 16, span, warps, 3) for t, d, span, warps in (ones if T < facade.MANY else ())]
    sides = (
        (16, 512, 8),
        (16, 512, 4),
        (16, 256, 4),
        (16, 256, 8),
        (16, 1024, 8),
        (32, 256, 8),
        (32, 256, 4),
        (32, 128, 4),
        (32, 512, 8),
    )
    pace = {0: (4,), 1: (4, 8, 1000), 3: (4, 1000), 5: (2, 4, 6), 7: (2, 3)}  # stages: programs a multiprocessor
    found += [facade.WalkConfig(*side, stages, some) for side in sides for stages in pace for some in pace[stages]]
    if T >= facade.MANY:
        sides = product((16, 32, 64), (128, 256, 512), (4, 8))
        found += [facade.TileConfig(*tile) for tile in sides if tile[0] * tile[1] <= 16384]
    return found


@contextmanager
def choosing(facade, config):
    """Calls take this tile, whatever else they would take."""
    from fdora.triton.runtime import walk

    kind = type(config).__name__
    what = {"MANY": 1 << 62 if kind == "Config" else 0, "WALKS": 1 << 30 if kind == "WalkConfig" else 0}
    what |= {name: lambda *_: config for name in ("config_of", "walk_config", "tile_config")}
    with mock.patch.multiple(facade, **what):
        walk._plans.clear()
        yield
    walk._plans.clear()


def compiled(config):
    """In a process of its own: what a later launch finds in Triton's cache."""
    from fdora.triton import embedding as facade

    with choosing(facade, config), suppress(Exception), torch.no_grad():
        W, (A, B) = torch.zeros(4096, TABLE[1], device="cuda").bfloat16(), adapter(TABLE[2], 4096, TABLE[1], "cuda")
        m = torch.ones(TABLE[1], device="cuda")
        dora_embedding(torch.zeros(512, device="cuda").long(), W, A, B, m, s=S, norm=m)


def tile_rows(V, d, r, tokens, device, runs):
    """The forward kernels with other tiles than those that are chosen."""
    from bench.kernels import profiled
    from fdora.triton import embedding as facade

    W = torch.empty(V, d, device=device, dtype=torch.bfloat16).normal_()
    A, B = adapter(r, V, d, device)
    m, c = torch.rand(d, device=device) + 0.5, torch.ones(d, device=device)
    if device != "cpu":
        with multiprocessing.get_context("spawn").Pool(min(14, os.cpu_count() or 1)) as pool:
            pool.map(compiled, dict.fromkeys(config for T in tokens for config in tiles_of(facade, T)), 1)
    for T in tokens:
        ids = torch.randint(0, V, (T,), device=device)
        ways = {
            "gather": lambda ids=ids: F.embedding(ids, W),
            "chosen": lambda ids=ids: dora_embedding(ids, W, A, B, m, s=S, norm=c),
        }
        with torch.no_grad():
            ms = medians(ways, device, runs)
            want = truth(ids, W, A, B, m, c)[1]
            for _ in range(2):
                print(T, profiled(ways["gather"]), profiled(ways["chosen"]), flush=True)
            for config in tiles_of(facade, T):
                try:
                    with choosing(facade, config):
                        got = ways["chosen"]()[:: max(1, T // 64)].double()
                        error = ((got - want).norm() / want.norm()).item()
                        assert error <= 2.5e-3, f"wrong by {error:.1e}"
                        ms[f"{type(config).__name__}{tuple(config)}"] = medians({"one": ways["chosen"]}, device, runs)["one"]
                except Exception as error:  # does not fit
                    print(config, type(error).__name__, str(error)[:100])
        for name, value in sorted(ms.items(), key=lambda pair: pair[1]):
            yield {"T": T, "tile": name, "ms": round(value, 5)}


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
            row |= {f"fwd_{n}_ms": round(ms, 4) for n, ms in medians(ways, device, runs).items()}
        row |= {
            f"fwd_bwd_{n}_ms": round(ms, 4) for n, ms in medians({n: both(n, w) for n, w in ways.items()}, device, runs).items()
        }
        yield row


def main(argv=None):
    options = command(__doc__, runs=9)
    options.add_argument("--tokens")
    options.add_argument("--only", choices=("embedding", "conv"))
    options.add_argument("--tiles", action="store_true")
    options = options.parse_args(argv)
    cpu, device = options.device == "cpu", options.device
    facts = about(device, options.commit, argv)
    print(facts, "\n")
    tokens = [int(n) for n in (options.tokens or (CPU_TOKENS if cpu else TOKENS)).split(",")]
    rows = []
    if options.tiles:
        assert select_backend(torch.empty(1, device=device)).name == "triton", "tiles are of the kernel: --device cuda"
        rows += tile_rows(*TABLE, tokens, device, options.runs)
    else:
        if options.only != "conv":
            rows += embedding_rows(*(CPU_TABLE if cpu else TABLE), tokens, device, options.runs, facts)
        if options.only != "embedding":
            for shape in CPU_CONVS if cpu else CONVS:
                rows += conv_rows(*shape, device, options.runs)
    for op in dict.fromkeys(row.get("op") for row in rows):
        some = [row for row in rows if row.get("op") == op]
        print(table(list(some[0]), [row.values() for row in some]), "\n")
    save(options.json, {"about": facts, "runs": options.runs, "rows": rows})


if __name__ == "__main__":
    main()
