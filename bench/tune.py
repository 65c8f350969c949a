"""Search the tiles of the layer's kernels on this GPU, and write the table they are chosen from.

    python -m bench.tune [--ops gemm,scale,small] [--missing] [--write fdora/triton/table.py] [--json FILE] [--commit H]

Every candidate is checked against float32 torch on the same inputs, then timed in replayed CUDA graphs, all candidates of a
shape in turns; the fastest is written. ``--missing`` keeps what the table has and searches the other shapes. Nothing is ever
timed outside this command.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import math
import pprint
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch

from bench import clock
from bench.norm_forms import about, medians
from bench.shapes import draw
from fdora._records import Operands
from fdora.triton.choice import Way
from fdora.triton.configs import GemmConfig, RestConfig, ScaleConfig, SmallConfig, power_of_two
from fdora.triton.gemm import Epilogue
from fdora.triton.product import scaled_product, summed_product
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import device_of
from fdora.triton.runtime.walk import like, run
from fdora.triton.scale import Sums, scale_backward
from fdora.triton.small import Out, small_backward, small_forward

# BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, EPILOGUE_SUBTILE, persistent, num_warps, num_stages
TILES = [
    GemmConfig(True, *tile)
    for tile in (
        (128, 256, 64, 8, True, True, 8, 4), (256, 128, 64, 8, True, True, 8, 4), (128, 128, 64, 8, True, True, 4, 4),
        (128, 128, 64, 8, True, False, 4, 3), (64, 256, 64, 8, True, True, 4, 4), (64, 128, 64, 8, False, False, 4, 4),
        (64, 64, 128, 8, False, True, 4, 4),
    )
]  # fmt: skip
RESTS = [
    RestConfig(*tile)
    for tile in (
        (64, 128, 64, 4, 3, True), (64, 128, 128, 4, 2, True), (32, 128, 64, 4, 3, True), (64, 64, 64, 4, 3, True),
        (128, 128, 64, 8, 3, True), (64, 128, 64, 4, 3, False),
    )
]  # fmt: skip
SCALED = [RestConfig(64, 128, 64, 4, 3, True), RestConfig(16, 256, 64, 4, 3, True)]
SCALE_SHAPES = [
    (512, 4096, 16), (4096, 1024, 16), (4096, 4096, 8), (4096, 4096, 16), (4096, 4096, 64), (4096, 4096, 384),
    (4096, 14336, 16), (4096, 14336, 64), (4096, 8192, 384), (16384, 4096, 16), (16384, 4096, 64), (16384, 4096, 384),
]  # fmt: skip
SCALE_CANDIDATES = [
    (bm, bn, rows, fuse_dB, warps)
    for bm, bn, warps in ((64, 128, 4), (64, 64, 4), (128, 128, 8), (64, 128, 8), (128, 64, 4), (32, 128, 4), (32, 64, 4))
    for rows in (128, 256, 512, 1024)
    for fuse_dB in (False, True)
]
SMALL_SHAPES = [(tokens, N, K) for tokens in (16, 64) for N, K in ((1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336),
                (8192, 8192), (512, 512))]  # fmt: skip
SMALL_CANDIDATES = [
    SmallConfig(bn, bk, warps, stages)
    for bn, bk in ((16, 256), (16, 512), (32, 128), (32, 256), (32, 512), (64, 64), (64, 128), (64, 256), (128, 64), (128, 128))
    for warps, stages in ((4, 3), (4, 5), (8, 3), (2, 5))
]


DEVICE, DTYPE = "cuda", torch.bfloat16
CACHE = 2**28  # bytes: more than any GPU's L2 holds


def randn(*shape, std=1.0):
    return torch.randn(*shape, device=DEVICE).mul_(std).to(DTYPE)


def planned(write, *tensors):
    """``write(builder, *arrays)`` as a plan for tensors like these; a function that runs it on tensors."""
    builder = Builder("tune", device_of(tensors[0].device))
    write(builder, *(builder.matrix(like(t)) for t in tensors))
    plan = builder.plan()
    return lambda *given: run(plan, given, (1.0,) * len(plan.scalars))


def fastest(make, candidates, check, calls=1):
    """The median ms of every candidate that runs and is right, fastest first. ``check`` gets the result of call ``calls``."""
    runs = {}
    for config in candidates:
        try:
            fn = make(config)
            check([fn() for _ in range(calls)][-1])
            runs[config] = fn
        except AssertionError:
            raise
        except Exception as error:  # too much shared memory, too many registers: not a candidate on this GPU
            print(f"    {tuple(config)}: {type(error).__name__}", flush=True)
    medians(runs, DEVICE, 1)
    ms = medians(runs, DEVICE, 5)
    return sorted(ms.items(), key=lambda item: item[1])


def close(got, want, what):
    error = ((got.float() - want).norm() / want.norm()).item()
    assert error <= 5e-3, f"{what} is wrong by {error:.1e}"


def product_ways(forward):
    """name -> (way, config)"""
    ways = {name_of("fused", tile): ("fused", tile) for tile in TILES} | {"bare": ("bare", None)}
    ways |= {name_of("after", tile): ("after", tile) for tile in (RESTS if forward else RESTS[:4])}
    return ways | ({name_of("first", tile): ("first", tile) for tile in SCALED} if forward else {"first": ("first", None)})


def name_of(way, config):
    """The fields that differ."""
    return " ".join([way, *map(str, tuple(config)[1 if way == "fused" else 0 :])])


class Drawn:
    """One product and its low-rank term; several sets where one would stay in the cache."""

    def __init__(self, forward, M, N, K, r):
        self.forward, self.M, self.N, self.r = forward, M, N, r
        sets = max(1, min(8, CACHE // (2 * (M * K + K * N + M * N))))
        self.sets = [self.one(M, N, K, r) for _ in range(sets)]
        x, h, W, b, m, _ = self.sets[0]
        w, low = (W.T, b.T) if forward else (W, b)
        self.rows = slice(0, None, max(1, M // 64))
        self.want = (x[self.rows].float() @ w.float() + h[self.rows].float() @ low.float()) * (m if forward else 1)

    def one(self, M, N, K, r):
        x, h = randn(M, K), randn(M, r)
        W = randn(N, K, std=K**-0.5) if self.forward else randn(K, N, std=K**-0.5)
        b = randn(N, r, std=0.1 * r**-0.5) if self.forward else randn(r, N, std=0.1 * r**-0.5)
        return x, h, W, b, torch.rand(N, device=DEVICE) + 1, torch.ones(N, device=DEVICE)

    def write(self, way, config, plan, x, h, W, b, m, c):
        y = plan.result("y", (self.M, self.N), x.dtype)
        chosen = Way(way, config if way == "fused" else None, None if way == "fused" else config, 0.0)
        if way == "bare":
            plan.product(y, x, W.T if self.forward else W)
        elif self.forward:
            scaled_product(plan, y, x, h, W, b, Epilogue("scale", m, c), None, chosen)
        else:
            summed_product(plan, y, x, h, W, b, False, chosen)

    def make(self, way, config):
        launch = planned(partial(self.write, way, config), *self.sets[0])
        turns = itertools.cycle(self.sets)
        if way != "bare":
            close(launch(*self.sets[0])[0][self.rows], self.want, way)
        return lambda: launch(*next(turns))[0]


def compile_way(forward, way, config):
    """In a process of its own: whatever the shape, the same kernel."""
    Drawn(forward, 256, 256, 256, 16).make(way, config)


def compiled(jobs):
    tasks = [(forward, *way) for forward in (True, False) for way in product_ways(forward).values() if way[0] != "bare"]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for task, done in [(task, pool.submit(compile_way, *task)) for task in tasks]:
            try:
                done.result()
            except Exception as error:
                print(task, type(error).__name__, str(error)[:200], flush=True)


def time_scale(M, N, r, where):
    sets = []
    for _ in range(max(1, min(8, CACHE // (6 * M * N)))):
        dy, y, x, W, h, B = randn(M, N), randn(M, N), randn(M, 64), randn(N, 64), randn(M, r), randn(N, r)
        sets.append((dy, y, x, W, h, B, torch.rand(N, device=DEVICE) + 1, torch.ones(N, device=DEVICE)))

    def write(tile, plan, dy, y, x, W, h, B, m, c):
        rank = power_of_two(r) if tile[3] else 0
        dz, dm = plan.result("dz", (M, N), dy.dtype), plan.result("dm", (N,), m.dtype)
        dB = plan.result("dB", (N, r), dy.dtype)
        sums = Sums(dz=dz, dm=dm, dB=dB if rank else None)
        scale_backward(
            plan, dy, y, False, x, Operands(W, None, B, m, c, None, None), h, sums, ScaleConfig(*tile[:3], rank, tile[4])
        )
        if not rank:
            plan.product(dB, dz.T, h)

    def make(tile):
        launch, turns = planned(partial(write, tile), *sets[0]), itertools.cycle(sets)
        return lambda: launch(*next(turns))[0]

    timers = {}
    tiles = [(128, 64, 128, 4), (128, 64, 256, 4), (128, 64, 512, 4), (64, 64, 64, 4)]
    tiles += [(128, 64, 1024, 4)] if M > 1024 else [(128, 32, 128, 4), (128, 32, 256, 4), (128, 32, 512, 4), (256, 32, 512, 8)]
    for tile in [(*tile[:3], fuse, tile[3]) for tile in tiles for fuse in (False, True)]:
        if r <= 64 or not tile[3]:
            timers[str(tile)] = clock.quick_timer(make(tile), clock.launches_of(0.01 + 9 * M * N / 4e9, len(sets)), *where)
    return {name: round(t, 5) for name, t in clock.medians(timers, 5).items()}


def time_products(shapes, end):
    """ms of every way, in both directions. (M, K, N, r) of the layer: backward multiplies (M, N) by (N, K)."""
    where = clock.anchor_graph(), torch.cuda.Stream()
    for number, ((M, K, N, r), forward) in enumerate(itertools.product(shapes, (True, False))):
        if time.perf_counter() > end:
            return
        if number % 4 == 0:
            yield {"shape": (M, N, r), "scale": time_scale(M, N, r, where)}
        drawn, timers = Drawn(forward, M, *((N, K) if forward else (K, N)), r), {}
        launches = clock.launches_of(0.005 + 2e-9 * M * N * K / 600, len(drawn.sets))
        for name, way in product_ways(forward).items():
            try:
                timers[name] = clock.quick_timer(drawn.make(*way), launches, *where)
            except AssertionError:
                raise
            except Exception as error:  # too much shared memory, too many registers: not a candidate on this GPU
                print(f"    {name}: {type(error).__name__}", flush=True)
        ms = {name: round(t, 5) for name, t in clock.medians(timers, 5).items()}
        yield {"shape": (M, K, N, r), "forward": forward, "ms": ms}


def tune_scale(shapes, known):
    for M, N, r in (shape for shape in shapes if shape not in known):
        K = 64
        dy, y, x, W, h, B = randn(M, N), randn(M, N), randn(M, K), randn(N, K), randn(M, r), randn(N, r)
        m, c = torch.rand(N, device=DEVICE) + 1, torch.ones(N, device=DEVICE)
        want = (dy.float() * m).to(DTYPE).float().T @ h.float()

        def make(config):
            rank = power_of_two(r) if config[3] else 0
            scale = ScaleConfig(*config[:3], rank, config[4])

            def write(plan, dy, y, x, W, h, B, m, c):
                dB = plan.result("dB", (N, r), dy.dtype)
                dz, dm = plan.result("dz", (M, N), dy.dtype), plan.result("dm", (N,), m.dtype)
                sums = Sums(dz=dz, dm=dm, dB=dB if rank else None)
                scale_backward(plan, dy, y, False, x, Operands(W, None, B, m, c, None, None), h, sums, scale)
                if not rank:
                    plan.product(dB, dz.T, h)

            tensors = (dy, y, x, W, h, B, m, c)
            launch = planned(write, *tensors)
            return lambda: launch(*tensors)[0]

        candidates = [t for t in SCALE_CANDIDATES if t[2] <= M and (r <= 64 or not t[3])]
        yield None, (M, N, r), fastest(make, candidates, lambda dB: close(dB, want, "scale")), 3 * dy.nbytes / 3e9


def tune_small(shapes, known):
    """Weights in turn from a set larger than the cache: a decoding model reads each layer's W from memory."""
    for columns in (False, True):
        for M, N, K in (shape for shape in shapes if shape not in known.get(columns, {})):
            shape = (K, N) if columns else (N, K)
            Ws = [randn(*shape, std=K**-0.5) for _ in range(max(2, CACHE // (2 * N * K)))]
            x, A, B, h, a = randn(M, K), randn(16, K, std=K**-0.5), randn(N, 16), randn(K, 16, std=K**-0.5), randn(16, N)
            m = c = torch.ones(N, device=DEVICE)
            w, low = (Ws[0], (x @ h).float() @ a.float()) if columns else (Ws[0].T, (x @ A.T).float() @ B.T.float())
            want = x.float() @ w.float() + low

            def make(config):
                def forward(plan, W, x, A, B, m, c):
                    y, h = plan.result("y", (M, N), x.dtype), plan.result("h", (M, 16), x.dtype)
                    small_forward(plan, x, Operands(W, A, B, m, c, None, None), plan.scalar("s"), Out(y, h, None), config)

                def backward(plan, W, dz, A, B, *_):
                    small_backward(
                        plan, dz, W, A, B, dz, plan.scalar("s"), plan.result("dx", (M, N), dz.dtype), None, config=config
                    )

                turns = itertools.cycle(Ws[1:] + Ws[:1])
                rest = (x, a, h, m, c) if columns else (x, A, B, m, c)
                launch = planned(backward if columns else forward, Ws[0], *rest)
                return lambda: launch(next(turns), *rest)[0]

            def bare():
                turns = itertools.cycle(Ws)
                return lambda: x @ (next(turns) if columns else next(turns).T)

            results = fastest(make, SMALL_CANDIDATES, lambda y: close(y, want, "small"), calls=len(Ws))
            yield columns, (M, N, K), results, medians({"bare": bare()}, DEVICE, 5)["bare"]


OPS = {"scale": (tune_scale, SCALE_SHAPES), "small": (tune_small, SMALL_SHAPES)}
HEAD = '"""Written by `python -m bench.tune --write`: shape -> fastest config, the fields of configs.py in their order."""\n'
NOTES = {
    "gemm": "# (M, N, K, r) -> GemmConfig, by whether the columns of W are contiguous\nGEMM: dict[bool, dict[tuple, tuple]]",
    "scale": "# (M, N, r) -> BLOCK_M, BLOCK_N, ROWS, fuse_dB, num_warps\nSCALE: dict[tuple, tuple]",
    "small": "# (tokens, N, K) -> SmallConfig, by whether neighbours in memory are columns of W\n"
    "SMALL: dict[bool, dict[tuple, tuple]]",
}


def products(options):
    start = time.perf_counter()
    compiled(options.jobs)
    print(f"compiled after {time.perf_counter() - start:.0f} s", flush=True)
    facts, rows = about("cuda", options.commit), []
    for row in time_products(draw(options.seed, options.shapes), start + options.seconds):
        rows.append(row)
        if "scale" in row:
            print(row["shape"], sorted((ms, name) for name, ms in row["scale"].items())[:4], flush=True)
            continue
        best = sorted((ms, name) for name, ms in row["ms"].items() if name != "bare")
        print(row["shape"], row["forward"], row["ms"]["bare"], best[:4], flush=True)
        if len(rows) % 8 == 0:
            options.json.write_text(json.dumps({"about": facts, "rows": rows}) + "\n")
    options.json.write_text(json.dumps({"about": facts, "rows": rows}) + "\n")


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--ops", default="gemm,scale,small")
    options.add_argument("--missing", action="store_true", help="only shapes that the table lacks")
    options.add_argument("--write", type=Path)
    options.add_argument("--json", type=Path)
    options.add_argument("--commit", help="recorded in the JSON")
    options.add_argument("--products", action="store_true", help="time every way of a product on shapes drawn at random")
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--shapes", type=int, default=100)
    options.add_argument("--seconds", type=float, default=math.inf, help="start no shape after this time")
    options.add_argument("--jobs", type=int, default=14, help="processes that compile")
    options = options.parse_args()
    if options.products:
        return products(options)
    from fdora.triton import table

    facts = about("cuda", options.commit)
    tables = {"gemm": table.GEMM, "scale": table.SCALE, "small": table.SMALL}
    rows = []
    for op in options.ops.split(","):
        search, shapes = OPS[op]
        new: dict = copy.deepcopy(tables[op]) if options.missing else {}
        for half, shape, results, bare in search(shapes, new):
            best, ms = results[0]
            (new if half is None else new.setdefault(half, {}))[shape] = tuple(best)
            line = {"op": op, "side": half, "shape": shape, "bare_ms": round(bare, 4), "best": tuple(best), "ms": round(ms, 4)}
            line["next"] = [(tuple(config), round(ms, 4)) for config, ms in results[1:4]]
            rows.append(line)
            print(op, half, shape, f"bare {bare:.4f}", *(f"{tuple(c)} {ms:.4f}" for c, ms in results[:3]), sep="  ", flush=True)
        tables[op] = new
    if options.json:
        options.json.write_text(json.dumps({"about": facts, "rows": rows}, indent=1) + "\n")
    if options.write:
        body = [f"\n{NOTES[op]} = {pprint.pformat(tables[op], width=120, sort_dicts=False)}\n" for op in OPS]
        options.write.write_text(HEAD + "".join(body))


if __name__ == "__main__":
    main()
