"""Time every way of a product with its low-rank term, on shapes drawn at random.

    python -m bench.products --device cuda --seed 1 --shapes 120 --seconds 170 --json FILE
    python -m bench.products --device cuda --seed 5 --shapes 10 --exhaustive --multiples 16 --jobs 14 --json EVERY
    python -m bench.products --device cuda --shape 65792,1536,8192,16 --forward --exhaustive --json FILE    # M, K, N, r
    python -m bench.fit FILE --write fdora/triton/fitted.py --unseen EVERY

GPU time of replayed CUDA graphs, all ways of a shape in turns, medians; each way is checked against float32 torch first. Inputs
in turn from sets larger than the cache. ``bare`` is the product of x alone, by cuBLAS. ``--exhaustive``: every tile that fits,
not only those that the model knows: what its choice costs beside the best there is; ``--multiples 16`` leaves out shapes for
which each of them would be compiled once more. Some ways alone, ``--ways after,first,bare``, tell the fit what has changed of
them; ``--shape`` looks at single shapes, ``--rests`` at tiles of the pass behind cuBLAS. Nothing is ever timed outside of
commands: what they find is data that a pure function reads.
"""

from __future__ import annotations

import itertools
import math
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing import get_context
from typing import NamedTuple

import torch

from bench import clock
from bench.command import command
from bench.norm_forms import about
from bench.records import save
from bench.shapes import CACHE, draw
from fdora.triton import product
from fdora.triton.choice import SHARED, Way
from fdora.triton.configs import GemmConfig, RestConfig, power_of_two
from fdora.triton.gemm import Epilogue
from fdora.triton.product import scaled_product, summed_product
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import device_of
from fdora.triton.runtime.walk import like, run

# BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, EPILOGUE_SUBTILE, persistent, num_warps, num_stages
TILES = [
    GemmConfig(True, *tile)
    for tile in (
        (128, 256, 64, 8, True, True, 8, 4),
        (256, 128, 64, 8, True, True, 8, 4),
        (64, 256, 64, 8, True, True, 4, 4),
        (64, 128, 64, 8, False, False, 4, 4),
        (64, 64, 128, 8, False, False, 4, 6),
        (64, 128, 128, 8, False, True, 4, 4),
        (128, 128, 64, 8, False, True, 4, 6),
    )
]
# BLOCK_M, BLOCK_N, BLOCK_R, num_warps, num_stages
RESTS = [
    RestConfig(*tile)
    for tile in (
        (64, 128, 64, 4, 3),
        (64, 64, 64, 4, 3),
        (64, 64, 64, 4, 4),
        (32, 128, 64, 4, 3),
        (64, 128, 64, 8, 3),
        (128, 64, 64, 4, 3),
        (128, 128, 64, 8, 3),
        (64, 64, 128, 4, 2),
        (64, 64, 128, 4, 3),
        (32, 64, 128, 4, 3),
        (64, 128, 128, 8, 2),
        (64, 128, 32, 4, 4),
    )
]


def every_tile():
    """What fits on Hopper, with its deepest pipeline, and where programs do not walk with one that leaves room for a second."""
    sides = [(m, n) for m in (64, 128, 256) for n in (64, 128, 256) if m * n <= 32768]
    for (m, n), k, persistent in itertools.product(sides, (64, 128), (True, False)):
        if k == 128 and m * n > 8192:
            continue
        subtile = m * n > 16384
        out = 2 * m * n // (2 if subtile else 1)  # on its way from registers to memory
        deepest, shared = ((room - out) // (2 * k * (m + n)) for room in (SHARED, SHARED // 2))
        depths = {min(8, deepest)} if persistent or subtile else {min(8, deepest), min(8, shared)}
        for stages, warps in itertools.product(sorted(depths), (4, 8) if m * n == 16384 else (8 if subtile else 4,)):
            if stages >= 2:
                yield GemmConfig(True, m, n, k, 8, subtile, persistent, warps, stages)


DEVICE, DTYPE = "cuda", torch.bfloat16


def randn(*shape, std=1.0):
    return torch.randn(*shape, device=DEVICE).mul_(std).to(DTYPE)


def planned(write, *tensors):
    """``write(builder, *arrays)`` as a plan for tensors like these; a function that runs it on tensors."""
    builder = Builder("tune", device_of(tensors[0].device))
    write(builder, *(builder.matrix(like(t)) for t in tensors))
    plan = builder.plan()
    return lambda *given: run(plan, given, (1.0,) * len(plan.scalars))


def close(got, want, what):
    error = ((got.float() - want).norm() / want.norm()).item()
    assert error <= 5e-3, f"{what} is wrong by {error:.1e}"


@contextmanager
def rest_by(tile):
    """Another tile of the pass behind cuBLAS, while plans are written."""
    before, product.rest_config = product.rest_config, lambda r: tile._replace(BLOCK_R=min(tile.BLOCK_R, power_of_two(r)))
    try:
        yield
    finally:
        product.rest_config = before


class Which(NamedTuple):
    exhaustive: bool = False
    kinds: tuple = ("fused", "after", "first", "bare")
    rests: bool = False


ALL, BOTH = Which(), (True, False)


def ways_of(forward, which=ALL):
    """name -> (way, config)"""
    exhaustive, kinds, rests = which
    tiles = dict.fromkeys([*TILES, *every_tile()] if exhaustive else TILES)
    ways = {" ".join(["fused", *map(str, tuple(tile)[1:])]): ("fused", tile) for tile in tiles}
    ways |= {way: (way, None) for way in ("after", "first", "bare") if way != "first" or not forward}
    found = {name: way for name, way in ways.items() if way[0] in kinds}
    return found | {" ".join(["rest", *map(str, tile)]): ("after", tile) for tile in RESTS if rests}


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
        chosen = Way(way, config, 0.0)
        if way == "bare":
            plan.product(y, x, W.T if self.forward else W)
        elif self.forward:
            scaled_product(plan, y, x, h, W, b, Epilogue("scale", m, c), None, chosen)
        else:
            summed_product(plan, y, x, h, W, b, False, chosen)

    def make(self, way, config):
        with rest_by(config) if type(config) is RestConfig else nullcontext():
            launch = planned(partial(self.write, way, config), *self.sets[0])
        turns = itertools.cycle(self.sets)
        if way != "bare":
            close(launch(*self.sets[0])[0][self.rows], self.want, way)
        return lambda: launch(*next(turns))[0]


def compile_way(M, r, forward, way, config):
    """In a process of its own."""
    Drawn(forward, M, 256, 256, r).make(way, config)


def compile_all(jobs, which, directions, shapes):
    """A kernel knows of the sizes whether 16 divides them, the pass behind cuBLAS a slab of the rank."""
    alike = dict.fromkeys((256 if M % 16 == 0 else 250, r if r % 16 or which.rests else 16) for M, _, _, r in shapes)
    ways = [(forward, *way) for forward in directions for way in ways_of(forward, which).values()]
    tasks = [(*sizes, *way) for sizes in alike for way in ways]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for task, done in [(task, pool.submit(compile_way, *task)) for task in tasks]:
            if error := done.exception():
                print(task, type(error).__name__, str(error)[:200], flush=True)


def time_products(shapes, end, which, directions=BOTH):
    """ms of every way, in both directions. (M, K, N, r) of the layer: backward multiplies (M, N) by (N, K)."""
    where = clock.anchor_graph(), torch.cuda.Stream()
    for (M, K, N, r), forward in itertools.product(shapes, directions):
        if time.perf_counter() > end:
            return
        drawn, timers = Drawn(forward, M, *((N, K) if forward else (K, N)), r), {}
        launches = clock.launches_of(0.005 + 2e-9 * M * N * K / 600, len(drawn.sets))
        for name, way in ways_of(forward, which).items():
            try:
                timers[name] = clock.quick_timer(drawn.make(*way), launches, *where)
            except AssertionError:
                raise
            except Exception as error:  # too much shared memory, too many registers: not a candidate on this GPU
                print(f"    {name}: {type(error).__name__}", flush=True)
        ms = {name: round(t, 5) for name, t in clock.medians(timers, 5).items()}
        yield {"shape": (M, K, N, r), "forward": forward, "ms": ms}


def parse(argv=None):
    parser = command(__doc__, device="cuda", seconds=math.inf)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--shapes", type=int, default=120)
    parser.add_argument("--forward", action="store_true", help="that direction alone")
    parser.add_argument("--backward", action="store_true", help="that direction alone")
    parser.add_argument("--exhaustive", action="store_true", help="every tile that fits")
    parser.add_argument("--rests", action="store_true", help="tiles of the pass behind cuBLAS, too")
    parser.add_argument("--ways", default=ALL.kinds, type=lambda text: tuple(text.split(",")), help="fused,after,first,bare")
    parser.add_argument("--multiples", type=int, default=1, help="of the shapes drawn those whose tokens and rank are")
    parser.add_argument("--shape", action="append", help="M,K,N,r in the place of those drawn")
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile")
    return parser.parse_args(argv)


def drawn(options):
    every = draw(options.seed, 20 * options.shapes if options.multiples > 1 else options.shapes)
    return [shape for shape in every if shape[0] % options.multiples == shape[3] % options.multiples == 0][: options.shapes]


def main(argv=None):
    options, start = parse(argv), time.perf_counter()
    which, directions = (
        Which(options.exhaustive, options.ways, options.rests),
        tuple(d for d in BOTH if d == options.forward or options.forward == options.backward),
    )
    shapes = [tuple(map(int, shape.split(","))) for shape in options.shape or ()] or drawn(options)
    compile_all(options.jobs, which, directions, shapes)
    print(f"compiled after {time.perf_counter() - start:.0f} s", flush=True)
    facts, rows = about("cuda", options.commit, argv), []
    for row in time_products(shapes, start + options.seconds, which, directions):
        rows.append(row)
        fastest = sorted((ms, name) for name, ms in row["ms"].items())
        print(row["shape"], row["forward"], fastest[:4], flush=True)
        save(options.json, {"about": facts, "rows": rows})


if __name__ == "__main__":
    main()
