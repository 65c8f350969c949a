"""Products straight from NF4 codes against a dense W first: the tiles for few tokens, and one fused product for many.

    python -m bench.quant_forms --device cuda [--only few,back,formats,many] [--seconds S] [--json FILE]

Weights take turns from a set larger than the GPU's cache: a model reads each layer's W from memory. Every way is checked
against the dense W, then timed in replayed CUDA graphs, all ways of a shape in turns. Ways of
bitsandbytes, where it is installed:

    gemv         F.gemv_4bit, plain scales (its own for nested ones first decodes them in a launch of its own: gemv_nested)
    matmul       matmul_4bit without autograd, then LoRA as PEFT adds it: (x A^T B^T) s, clone, add
    qlora        dequantize_4bit and F.linear, as matmul_4bit does under autograd, and LoRA; backward: the same products for dx

With ``--device cpu`` only small shapes run, interpreted or not at all: for the tests.
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import statistics
import time
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from bench import clock
from bench.command import command
from bench.norm_forms import about
from bench.records import save
from fdora._records import Operands
from fdora.quant import TABLES, Codes8, Lut4, QuantWeight
from fdora.triton.codes import Coded, packed
from fdora.triton.configs_few import CodesConfig
from fdora.triton.dequantize import dequantized
from fdora.triton.gemm import Epilogue, Operand, gemm
from fdora.triton.kernels.g import g_tile
from fdora.triton.kernels.small_quant import rows4
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import INTERPRETED, device_of
from fdora.triton.runtime.walk import like, run
from fdora.triton.small import Back, Out
from fdora.triton.small_quant import small_backward_of_codes, small_forward_of_codes

SHAPES = ((4096, 4096), (14336, 4096), (4096, 14336), (28672, 8192), (8192, 8192), (1024, 8192))
SOME = ((4096, 4096), (14336, 4096), (4096, 14336))
TOKENS, RANKS, MANY = (1, 4, 16, 32, 64), (16, 64), (128, 512, 4096)
NESTED, PLAIN = Lut4("nf4", True, 64, "nested", "flat"), Lut4("nf4", True, 64, "fp32", "flat")
FORMS = {
    "nf4": PLAIN,
    "mxfp4": Lut4("e2m1", False, 32, "e8m0", "row"),
    "nvfp4": Lut4("e2m1", False, 16, "e4m3*global", "row"),
    "int8 row": Codes8("int8", "row", (0, 0), 1.0),
    "fp8 block": Codes8("e4m3", "block", (128, 128), 1.0),
}
DTYPE = torch.bfloat16
CACHE, S = 2**28, 2.0  # bytes: more than any GPU's L2 holds
# columns, terms, slices, warps, stages, parts of K
FULL = [(64, 128, 1, 4, 4, p) for p in (1, 2, 4, 8, 16)] + [(64, 128, 1, 4, 3, p) for p in (1, 2, 4)]
FULL += [(64, 256, 1, 4, 3, p) for p in (1, 2, 4)] + [(64, 256, 1, 4, 2, 4), (128, 128, 1, 8, 3, 2), (128, 128, 1, 8, 3, 4)]
SLICED = [(32, 128, 4, 4, 3, 1), (32, 128, 4, 4, 3, 2)]
FORWARD = {8: FULL + SLICED, 16: FULL + SLICED, 32: FULL, 64: FULL}
NARROW = [(64, 32, 8, 8, 3, p) for p in (1, 2, 4)] + [(64, 32, 4, 4, 3, p) for p in (2, 4, 8)]
NARROW += [(256, 32, 1, 4, 4, p) for p in (2, 4, 8, 16)] + [(256, 64, 1, 4, 3, p) for p in (4, 8, 16)]
NARROW += [(512, 32, 1, 4, 3, p) for p in (4, 8, 16)]
COLUMNS = {8: NARROW, 16: NARROW, 64: NARROW[:-3]}
GEMMS = [
    (64, 64, 128, 4, 3),
    (128, 64, 128, 4, 3),
    (128, 128, 128, 8, 3),
    (64, 128, 128, 8, 3),
    (256, 128, 128, 8, 2),
    (256, 64, 128, 4, 2),
]  # tokens, columns, terms, warps, stages


class Weight(NamedTuple):
    """Codes and scales of one layer."""

    coded: Coded
    tensors: tuple[torch.Tensor, ...]


def weight(form, N, K, device):
    """Random codes; scales near 0.02."""
    u8 = {"dtype": torch.uint8, "device": device}
    if isinstance(form, Codes8):
        codes = torch.randint(0, 120, (N, K), **u8)
        groups = N if form.scale == "row" else (-(-N // form.block[0]), -(-K // form.block[1]))
        scales = torch.rand(groups, device=device) * 1e-3 + 1e-3
        code = torch.int8 if form.code == "int8" else torch.float8_e4m3fn
        return Weight(Coded((N, K), form), (codes.view(code), scales))
    codes, groups = torch.randint(0, 256, (N * K // 2,), **u8), N * K // form.group
    if form.scales == "nested":
        first = torch.linspace(-1, 1, 256, device=device)
        second, offset = torch.rand(-(-groups // 256), device=device) * 0.01, torch.tensor(0.03, device=device)
        more = (torch.randint(0, 256, (groups,), **u8), first, second, offset)
    elif form.scales == "e8m0":
        more = (torch.randint(118, 124, (groups,), **u8),)
    elif form.scales == "e4m3*global":
        e4m3 = torch.randint(0x28, 0x58, (groups,), **u8).view(torch.float8_e4m3fn)
        more = (e4m3, torch.tensor(0.0123, device=device))
    else:
        more = (torch.rand(groups, device=device) * 0.02 + 0.01,)
    return Weight(Coded((N, K), form), (codes, *more))


class Layer(NamedTuple):
    """What a call gets besides W."""

    x: torch.Tensor
    A: torch.Tensor
    B: torch.Tensor
    m: torch.Tensor
    c: torch.Tensor


def layer(M, N, K, r, device):
    x, A, B = (torch.randn(*shape, device=device).to(DTYPE) for shape in ((M, K), (r, K), (N, r)))
    return Layer(x, A * K**-0.5, B * 0.1, torch.rand(N, device=device) + 1, torch.ones(N, device=device))


def forward_plan(form, M, N, K, la, first, config):
    builder = Builder("few tokens", device_of(la.x.device))
    x, A, B = (builder.matrix(like(t)) for t in la[:3])
    m, c = (builder.vector(like(t)) for t in la[3:])
    W, s = packed(builder, [like(t) for t in first.tensors], first.coded), builder.scalar("s")
    out = Out(builder.result("y", (M, N), la.x.dtype), builder.result("h", (M, la.A.shape[0]), la.x.dtype), None)
    small_forward_of_codes(builder, x, Operands(W, A, B, m, c, None, None), s, out, config and CodesConfig(*config))
    return builder.plan()


def backward_plan(form, M, N, K, la, dz, first, config):
    builder = Builder("few tokens, backward", device_of(dz.device))
    z, x, A, B = (builder.matrix(like(t)) for t in (dz, *la[:3]))
    W, s = packed(builder, [like(t) for t in first.tensors], first.coded), builder.scalar("s")
    out = Back(builder.result("dx", (M, K), dz.dtype), builder.result("dA", tuple(la.A.shape), la.A.dtype), x)
    given = Operands(W, A, B, None, None, None, None)
    small_backward_of_codes(builder, z, given, s, out, config and CodesConfig(*config))
    return builder.plan()


def few(form, M, N, K, r, Ws, la, config):
    plan, turns = forward_plan(form, M, N, K, la, Ws[0], config), itertools.cycle(Ws)
    return lambda: run(plan, (*la, *next(turns).tensors), (S,))[0]


def back(form, M, N, K, r, Ws, la, dz, config):
    plan, turns = backward_plan(form, M, N, K, la, dz, Ws[0], config), itertools.cycle(Ws)
    return lambda: run(plan, (dz, *la[:3], *next(turns).tensors), (S,))[0]


# the fused product for many tokens


@triton.jit
def many_kernel(
    x,
    codes,
    scales,
    code256,
    scales2,
    offset,
    h,
    b,
    out,
    m,
    c,
    M,
    N,
    K,
    R,
    words,
    groups,
    stride_xm,
    stride_xk,
    KIND: tl.constexpr,
    HIGH_FIRST: tl.constexpr,
    GROUP: tl.constexpr,
    SCALES: tl.constexpr,
    PTX: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_R: tl.constexpr,
    GROUP_N: tl.constexpr,
):
    """Tiles of W are decoded where they are multiplied: once for each BLOCK_M tokens. h is (M, R), b (N, R)."""
    tiles_m, tiles_n = tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    group = pid // (GROUP_N * tiles_m)
    height = min(tiles_n - group * GROUP_N, GROUP_N)
    col = (group * GROUP_N + (pid % (GROUP_N * tiles_m)) % height) * BLOCK_N
    row = ((pid % (GROUP_N * tiles_m)) // height) * BLOCK_M
    acc = rows4(
        x + row.to(tl.int64) * stride_xm,
        codes,
        scales,
        code256,
        scales2,
        offset,
        col,
        0,
        K,
        M - row,
        N,
        K,
        words,
        groups,
        stride_xm,
        stride_xk,
        KIND,
        HIGH_FIRST,
        GROUP,
        SCALES,
        PTX,
        True,
        BLOCK_M,
        BLOCK_N,
        BLOCK_K,
        1,
    )
    t, n, r = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_R)
    for r0 in range(0, R, BLOCK_R):
        in_r = r < R - r0
        ht = tl.load(h + t[None, :].to(tl.int64) * R + (r0 + r)[:, None], mask=in_r[:, None] & (t < M)[None, :], other=0.0)
        bt = tl.load(b + n[:, None].to(tl.int64) * R + (r0 + r)[None, :], mask=in_r[None, :] & (n < N)[:, None], other=0.0)
        acc = tl.dot(bt, ht, acc)
    acc = acc * g_tile(m, c, n, N)[:, None]
    at = t[None, :].to(tl.int64) * N + n[:, None]
    tl.store(out + at, acc.to(out.dtype.element_ty), mask=(n < N)[:, None] & (t < M)[None, :])


def many(form, M, N, K, r, Ws, la, config):
    bm, bn, bk, warps, stages = config
    turns, h, y = itertools.cycle(Ws), S * (la.x @ la.A.T), la.x.new_empty(M, N)
    ptx = not INTERPRETED

    def call():
        codes, scales, code256, scales2, offset = next(turns).tensors
        torch.mm(la.x, la.A.T, out=h)
        many_kernel[(-(-M // bm) * -(-N // bn),)](
            la.x,
            codes.view(torch.int32),
            scales,
            code256,
            scales2,
            offset,
            h,
            la.B,
            y,
            la.m,
            la.c,
            M,
            N,
            K,
            r,
            K // 8,
            K // form.group,
            la.x.stride(0),
            1,
            form.table,
            form.hi_first,
            form.group,
            form.scales,
            ptx,
            bm,
            bn,
            bk,
            max(16, min(64, r)),
            8,
            num_warps=warps,
            num_stages=stages,
        )
        return y

    return call


# the dense ways


def dense(W, la):
    """Its W, rounded once."""
    form, N = W.coded.form, W.coded.shape[0]
    kind = "fp8" if isinstance(form, Codes8) else "nf4"  # either decodes what its facts say
    codes, scales, *more = W.tensors
    if kind == "nf4" and form.layout == "row":
        codes, scales = codes.view(N, -1), scales.view(N, -1)
    return QuantWeight(kind, (codes, scales, *more), W.coded.shape, la.x.dtype, form).dequantize()


def fused_after(M, N, K, r, la, decode, Ws):
    """Decode, by ``decode`` or in the same plan, then the product of gemm.py."""
    builder = Builder("many tokens", device_of(la.x.device))
    x, h, B = (builder.matrix(like(t)) for t in (la.x, la.x.new_empty(M, r), la.B))
    m, c = (builder.vector(like(t)) for t in la[3:])
    if decode is None:
        W = dequantized(builder, packed(builder, list(map(like, Ws[0].tensors)), Ws[0].coded), DTYPE)
    else:
        W = builder.matrix(like(decode(Ws[0])))
    gemm(builder, builder.result("y", (M, N), la.x.dtype), x, h, Operand(W, B, trans=True), Epilogue("scale", m, c))
    plan, turns = builder.plan(), itertools.cycle(Ws)

    def call():
        W = next(turns)
        return run(plan, (la.x, la.x @ la.A.T, la.B, la.m, la.c, *(W.tensors if decode is None else [decode(W)])), ())[0]

    return call


def vendor():
    try:
        import bitsandbytes
    except ImportError:
        return None
    return bitsandbytes


def state_of(bnb, W):
    """A weight as bitsandbytes holds it."""
    (N, K), (codes, scales, *more) = W.coded.shape, W.tensors
    F = bnb.functional
    second, offset = None, None
    if more:
        first, second, offset = more
        second = F.QuantState(absmax=second, code=first, blocksize=256, dtype=torch.float32)
    code = torch.tensor(TABLES["nf4"], device=codes.device)
    state = F.QuantState(
        absmax=scales,
        shape=torch.Size((N, K)),
        code=code,
        blocksize=64,
        quant_type="nf4",
        dtype=torch.bfloat16,
        offset=offset,
        state2=second,
    )
    return codes.view(-1, 1), state


def with_lora(y, la):
    return y.clone() + (la.x @ la.A.T @ la.B.T) * S


def rivals_of(bnb, M, Ws, plain, la):
    F, states, plains = bnb.functional, [state_of(bnb, W) for W in Ws], [state_of(bnb, W) for W in plain]
    turns, flat = itertools.cycle(states), itertools.cycle(plains)

    def gemv(turns):
        packed, state = next(turns)
        return F.gemv_4bit(la.x, packed.t(), state=state)

    def matmul():
        packed, state = next(turns)
        return with_lora(bnb.matmul_4bit(la.x, packed.t(), state), la)

    def bare():
        packed, state = next(turns)
        return bnb.matmul_4bit(la.x, packed.t(), state)

    def qlora():
        packed, state = next(turns)
        return with_lora(torch.nn.functional.linear(la.x, F.dequantize_4bit(packed, state)), la)

    ways = {"matmul_bare": bare, "matmul": matmul, "qlora": qlora}
    return ways | ({"gemv": lambda: gemv(flat), "gemv_nested": lambda: gemv(turns)} if M == 1 else {})


# timing


class Timed:
    """Graphs of one call for each weight."""

    def __init__(self, device, calls):
        self.device, self.calls = device, calls
        self.anchor = None if device == "cpu" else clock.anchor_graph()

    def medians(self, ways):
        timers, runs = {}, 1 if self.device == "cpu" else 5
        for name, fn in ways.items():
            try:
                fn()
                if self.device == "cpu":
                    timers[name] = lambda fn=fn: clock.once(fn, "cpu")
                else:
                    torch.cuda.synchronize()
                    graph = clock.capture(fn, self.calls, self.anchor)
                    timers[name] = lambda graph=graph: clock.replay_ms(graph) / self.calls
            except Exception as error:  # too much shared memory: not a candidate; a rival that is not there
                print(f"    {name}: {type(error).__name__}: {str(error)[:100]}", flush=True)
        turns = [{name: one() for name, one in timers.items()} for _ in range(runs + 1)]
        return {name: statistics.median(turn[name] for turn in turns[1:]) for name in timers}


def close(got, want, what, limit=6e-3):
    """Says what is wrong, and goes on: the other ways are worth their time."""
    error = ((got.float() - want).norm() / want.norm()).item()
    if not error <= limit:
        print(f"    WRONG: {what} by {error:.1e}", flush=True)
    return error <= limit


def searched(timed, make, candidates, want, limit=6e-3):
    """The median ms of every tile that runs and is right, fastest first."""
    ways = {}
    for config in candidates:
        try:
            fn = make(config)
            got = fn()
        except Exception as error:
            print(f"    {config}: {type(error).__name__}: {str(error)[:100]}", flush=True)
            continue
        if close(got, want, config, limit):
            ways[config] = make(config)
    return sorted(timed.medians(ways).items(), key=lambda item: item[1])


def of_shape(candidates, columns):
    """Those whose programs neither leave most of a GPU idle nor are many times what it holds."""
    sms = 132 if not torch.cuda.is_available() else torch.cuda.get_device_properties(0).multi_processor_count
    return [c for c in candidates if sms // 3 <= -(-columns // c[0]) * c[5] <= 12 * sms] or candidates


def padded(M):
    return 8 if M <= 8 else 1 << (M - 1).bit_length()


def compiled(case):
    """In a process of its own: what a later launch finds in Triton's cache."""
    kind, form, M, r, config = case
    try:
        N = K = 4096
        W, la = [weight(form, N, K, "cuda")], layer(M, N, K, r, "cuda")
        if kind == "few":
            few(form, M, N, K, r, W, la, config)()
        elif kind == "after":
            N, K = config
            W, la = [weight(form, N, K, "cuda")], layer(M, N, K, r, "cuda")
            fused_after(M, N, K, r, la, None, W)()
        elif kind == "back":
            back(form, M, N, K, r, W, la, torch.randn(M, N, device="cuda").to(DTYPE), config)()
        else:
            many(form, M, N, K, r, W, la, config)()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{case}: {type(error).__name__}"
    return None


def kernels_of(configs):
    """One of each tile, with parts and without, and one of each number of parts: what has to be compiled."""
    of_tile, of_parts = {(c[:5], c[5] == 1): c for c in configs}, {c[5]: c for c in configs}
    return {*of_tile.values(), *of_parts.values()}


def all_cases(parts):
    if "few" in parts:
        for M in TOKENS:
            yield from (("few", NESTED, M, 16, config) for config in kernels_of(FORWARD[padded(M)]))
    if "back" in parts:
        for M in (1, 16, 64):
            yield from (("back", NESTED, M, 16, config) for config in kernels_of(COLUMNS[padded(M)]))
    if "many" in parts:
        yield from (("many", NESTED, 512, 16, config) for config in GEMMS)
        yield from (("after", NESTED, M, 16, shape) for M in MANY for shape in SOME)


def line(row):
    print("  ".join(f"{k} {v:.4f}" if isinstance(v, float) else f"{k} {v}" for k, v in row.items()), flush=True)


def weights(form, N, K, device, count=None):
    count = count or max(2, min(40, CACHE // (N * K // 2)))
    return [weight(form, N, K, device) for _ in range(count)]


def few_rows(device, shapes, tokens, ranks):
    bnb = vendor() if device != "cpu" else None
    for N, K in shapes:
        Ws = weights(NESTED, N, K, device)
        plain = weights(PLAIN, N, K, device, len(Ws))
        timed = Timed(device, len(Ws))
        for M in tokens:
            best = None
            for r in ranks:
                la = layer(M, N, K, r, device)
                want = (la.x.float() @ dense(Ws[0], la).float().T + S * (la.x @ la.A.T).float() @ la.B.float().T) * la.m
                row = {"M": M, "N": N, "K": K, "r": r}
                if best is None:
                    tiles = of_shape(FORWARD[padded(M)], N)
                    found = searched(timed, lambda config: few(NESTED, M, N, K, r, Ws, la, config), tiles, want)
                    if not found:
                        break
                    best, row["tiles"] = found[0][0], [[list(c), round(ms, 5)] for c, ms in found]
                ways = {"ours": few(NESTED, M, N, K, r, Ws, la, best)}
                if bnb is not None:
                    ways |= rivals_of(bnb, M, Ws, plain, la)
                ms = timed.medians(ways)
                line(row | ms | {"best": best, "tiles": row.get("tiles", ())[1:4]})
                yield row | {"best": list(best)} | {name: round(v, 5) for name, v in ms.items()}


def back_rows(device, shapes, tokens, ranks):
    bnb = vendor() if device != "cpu" else None
    for N, K in shapes:
        Ws = weights(NESTED, N, K, device)
        timed = Timed(device, len(Ws))
        for M in tokens:
            r = ranks[0]
            la, dz = layer(M, N, K, r, device), torch.randn(M, N, device=device).to(DTYPE)
            want = dz.float() @ dense(Ws[0], la).float() + S * (dz @ la.B).float() @ la.A.float()
            tiles = of_shape(COLUMNS[padded(M)], K)
            found = searched(timed, lambda config: back(NESTED, M, N, K, r, Ws, la, dz, config), tiles, want)
            if not found:
                continue
            best = found[0][0]
            ways = {"ours": back(NESTED, M, N, K, r, Ws, la, dz, best)}
            if bnb is not None:
                turns = itertools.cycle([state_of(bnb, W) for W in Ws])

                def qlora():
                    packed, state = next(turns)
                    dh = (dz * S) @ la.B
                    return dz @ bnb.functional.dequantize_4bit(packed, state) + dh @ la.A, dh.T @ la.x

                ways["qlora"] = qlora
            ms = timed.medians(ways)
            row = {"M": M, "N": N, "K": K, "r": r}
            line(row | ms | {"best": best, "tiles": found[1:4]})
            yield row | {"tiles": [[list(c), round(v, 5)] for c, v in found]} | {name: round(v, 5) for name, v in ms.items()}


def format_rows(device, shapes, tokens):
    """Every format with the tile that the table names."""
    for (N, K), M, (name, form) in itertools.product(shapes, tokens, FORMS.items()):
        Ws, la = weights(form, N, K, device), layer(M, N, K, 16, device)
        dz, W = torch.randn(M, N, device=device).to(DTYPE), dense(Ws[0], la).float()
        want = (la.x.float() @ W.T + S * (la.x @ la.A.T).float() @ la.B.float().T) * la.m
        right = [close(few(form, M, N, K, 16, Ws, la, None)(), want, name)]
        want = dz.float() @ W + S * (dz @ la.B).float() @ la.A.float()
        right.append(close(back(form, M, N, K, 16, Ws, la, dz, None)(), want, name))
        ways = {"forward": few(form, M, N, K, 16, Ws, la, None), "backward": back(form, M, N, K, 16, Ws, la, dz, None)}
        row = {"format": name, "M": M, "N": N, "K": K, "right": right} | Timed(device, len(Ws)).medians(ways)
        line(row)
        yield row


def many_rows(device, shapes, tokens, ranks):
    bnb = vendor() if device != "cpu" else None
    for (N, K), M in itertools.product(shapes, tokens):
        r = ranks[0]
        Ws, la = weights(NESTED, N, K, device, 4), layer(M, N, K, r, device)
        timed = Timed(device, 4)
        want = (la.x.float() @ dense(Ws[0], la).float().T + (la.x @ la.A.T).float() @ la.B.float().T) * la.m
        candidates = [config for config in GEMMS if config[0] <= max(M, 64)]
        found = searched(timed, lambda config: many(NESTED, M, N, K, r, Ws, la, config), candidates, want)
        ways = {"ours_after_ours": fused_after(M, N, K, r, la, None, Ws)}
        held = dense(Ws[0], la)
        ways["dense"] = fused_after(M, N, K, r, la, lambda W: held, Ws)
        if bnb is not None:
            states = {id(W): state_of(bnb, W) for W in Ws}
            ways["ours_after_bnb"] = fused_after(M, N, K, r, la, lambda W: bnb.functional.dequantize_4bit(*states[id(W)]), Ws)
            ways |= rivals_of(bnb, M, Ws, Ws, la)
        ms = timed.medians(ways)
        row = {"M": M, "N": N, "K": K, "r": r, "fused": found[0][1] if found else None}
        line(row | ms | {"tiles": found[:3]})
        yield row | {"tiles": [[list(c), round(v, 5)] for c, v in found]} | {name: round(v, 5) for name, v in ms.items()}


def main():
    options = command(__doc__, device="cuda", seconds=140)
    options.add_argument("--only", default="few,formats,back,many")
    options = options.parse_args()
    start, device, parts = time.perf_counter(), options.device, options.only.split(",")
    shapes, tokens, ranks, more, some = SHAPES, TOKENS, RANKS, MANY, SOME
    if device == "cpu":
        shapes, tokens, ranks, more, some = ((64, 256),), (1, 16), (8,), (70,), ((64, 256),)
    else:
        with multiprocessing.get_context("spawn").Pool(min(14, os.cpu_count() or 1)) as pool:
            for problem in pool.imap_unordered(compiled, list(all_cases(parts))):
                if problem:
                    print(problem, flush=True)
        print(f"compiled in {time.perf_counter() - start:.0f} s", flush=True)
    torch.manual_seed(0)
    result: dict = {"about": about(device, options.commit)}
    makers = {
        "few": lambda: few_rows(device, shapes, tokens, ranks),
        "formats": lambda: format_rows(device, some, (1, 16)),
        "back": lambda: back_rows(device, shapes, [M for M in tokens if M in (1, 16, 64)], ranks),
        "many": lambda: many_rows(device, some, more, ranks),
    }
    for part in parts:
        print(f"\n{part}, after {time.perf_counter() - start:.0f} s", flush=True)
        result[part] = []
        for row in makers[part]():
            result[part].append(row)
            save(options.json, result)
            if time.perf_counter() - start > options.seconds:
                print("out of time", flush=True)
                return


if __name__ == "__main__":
    main()
