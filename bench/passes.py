"""Time backward's elementwise pass with the products that read what it writes, and both factors' gradients, tile by tile.

    python -m bench.passes --device cuda --jobs 14 --json FILE
    python -m bench.passes --device cuda --seed 3 --shapes 20 --jobs 14 --json FILE

``pass``: dz = g dy and dm. ``chain``: the pass, then dh = s dz B, and dB where the tile has not formed it: what of dz is
still in the cache counts. ``factors``: dA = dh^T x and dB = dz^T h, in one launch or two products. Beside them ``add``,
torch's sum of two tensors into a third, which moves the bytes of the pass, and ``bare``, dy B and dy^T h. Shapes without
``--seed`` are those where backward took longest beside its bare products. GPU time of replayed CUDA graphs, in turns, medians.
"""

from __future__ import annotations

import itertools
import math
import time
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context

import torch

from bench import clock
from bench.command import command
from bench.norm_forms import about
from bench.products import DEVICE, DTYPE, close, planned, randn
from bench.records import save
from bench.shapes import CACHE, draw
from fdora._records import Operands
from fdora.triton.configs import ScaleConfig, power_of_two
from fdora.triton.factors import FactorsConfig, factor_gradients
from fdora.triton.scale import Sums, scale_backward

WORST = (
    (4964, 896, 8064, 384),
    (4705, 1664, 12672, 64),
    (203, 2304, 14720, 64),
    (2354, 3072, 8192, 192),
    (1752, 1920, 7040, 96),
    (768, 5120, 7680, 384),
    (512, 768, 16000, 16),
    (2015, 1024, 3072, 4),
    (3779, 4096, 12288, 128),
    (576, 4096, 12288, 128),
    (192, 1280, 5120, 16),
    (576, 4096, 2560, 16),
    (64, 5120, 25600, 24),
)
# BLOCK_M, BLOCK_N, num_warps, STAGES
TILES = (
    (32, 64, 4, 1),
    (32, 64, 4, 3),
    (64, 64, 4, 1),
    (64, 64, 4, 3),
    (32, 128, 4, 1),
    (32, 128, 4, 3),
    (16, 256, 4, 1),
)
STRIPS = (64, 128, 256, 512)
FACTORS = ((64, 64, 4, 3), (64, 128, 4, 3), (128, 64, 4, 3), (64, 64, 4, 4))  # BLOCK_C, BLOCK_M, num_warps, num_stages


def scales(r):
    """Every tile, with and without dB."""
    for (bm, bn, warps, stages), rows, fused in itertools.product(TILES, STRIPS, (False, True)):
        if rows >= bm and not (fused and r > 64):
            yield ScaleConfig(bm, bn, rows, power_of_two(r) if fused else 0, warps, stages)


def factors(r):
    return [FactorsConfig(bc, min(64, power_of_two(r)), *rest) for bc, *rest in FACTORS]


class Drawn:
    """dy and what the pass reads beside it; several sets where one would stay in the cache."""

    def __init__(self, M, K, N, r):
        self.shape = M, K, N, r
        self.sets = [self.one(M, K, N, r) for _ in range(max(1, min(8, CACHE // (2 * (3 * M * N + M * K)))))]
        dy, y, x, _, h, _, dh, m, _ = self.sets[0]
        self.dz = (dy.float() * m).to(dy.dtype)
        self.dm, self.dB = (dy.float() * y.float()).sum(0) / m, self.dz.float().T @ h.float()
        self.dA = dh.float().T @ x.float()

    def one(self, M, K, N, r):
        vectors = torch.rand(N, device=DEVICE) + 1, torch.ones(N, device=DEVICE)
        return randn(M, N), randn(M, N), randn(M, K), randn(N, 64), randn(M, r), randn(N, r), randn(M, r), *vectors

    def timer(self, write, *wanted):
        """``write(plan, *arrays)``; ``wanted``: (number of the result, what it must be)."""
        launch, turns = planned(write, *self.sets[0]), itertools.cycle(self.sets)
        for number, (what, want) in enumerate(wanted):
            close(launch(*self.sets[0])[number], want, what)
        return lambda: launch(*next(turns))

    def scale(self, config, chain):
        (M, _, N, r), t = self.shape, DTYPE

        def write(plan, dy, y, x, W, h, B, dh, m, c):
            dm, dB = plan.result("dm", (N,), m.dtype), plan.result("dB", (N, r), t)
            dz = plan.temp((M, N), t) if chain else plan.result("dz", (M, N), t)
            sums = Sums(dz=dz, dm=dm, dB=dB if config.BLOCK_R else None)
            scale_backward(plan, dy, y, False, x, Operands(W, None, B, m, c, None, None), h, sums, config)
            if chain:
                plan.product(plan.result("dh", (M, r), t), dz, B)
                if not config.BLOCK_R:
                    plan.product(dB, dz.T, h)

        wanted = [("dm", self.dm)]
        if chain or config.BLOCK_R:
            wanted.append(("dB", self.dB))
        return self.timer(write, *wanted)

    def factors(self, config):
        (_, K, N, r), t = self.shape, DTYPE

        def write(plan, dy, y, x, W, h, B, dh, m, c):
            dA, dB = plan.result("dA", (r, K), t), plan.result("dB", (N, r), t)
            if config is None:
                plan.product(dA, dh.T, x)
                plan.product(dB, dy.T, h)
            else:
                factor_gradients(plan, x, dh, dA, dy, h, dB, config)

        return self.timer(write, ("dA", self.dA))

    def ways(self):
        """name -> what makes a function to time"""
        found, r = {}, self.shape[3]
        for config in scales(r):
            for chain in (False, True):
                found[" ".join(("chain" if chain else "pass", *map(str, config)))] = partial(self.scale, config, chain)
        for config in factors(r):
            found[" ".join(("factors", *map(str, config)))] = partial(self.factors, config)
        return found | {"factors": partial(self.factors, None), "add": self.add, "bare": self.bare}

    def add(self):
        out, turns = torch.empty_like(self.dz), itertools.cycle(self.sets)

        def one():
            dy, y, *_ = next(turns)
            return torch.add(dy, y, out=out)

        return one

    def bare(self):
        turns = itertools.cycle(self.sets)

        def one():
            dy, _, _, _, h, B, *_ = next(turns)
            return dy @ B, dy.T @ h

        return one


def compile_way(r, kind, *options):
    """In a process of its own. Of the shape a kernel sees only what 16 divides, and whether one strip holds all tokens."""
    for M in (63, 64, 1023, 1024, 4096):
        getattr(Drawn(M, 256, 512, r), kind)(*options)()
    torch.cuda.synchronize()


def compile_all(shapes, jobs):
    tasks = {}
    for *_, r in shapes:
        alike = power_of_two(r) if r % 16 == 0 else r
        for config in scales(r):
            rank = 16 if r % 16 == 0 and not config.BLOCK_R else alike
            tasks[rank, "scale", config._replace(ROWS=256), True] = None
        for config in factors(r):
            tasks[alike, "factors", config] = None
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for task, done in [(task, pool.submit(compile_way, *task)) for task in tasks]:
            if error := done.exception():
                print(task, type(error).__name__, str(error)[:200], flush=True)


def case(shape, runs, where):
    M, _, N, _ = shape
    drawn, timers = Drawn(*shape), {}
    for name, make in drawn.ways().items():
        try:
            timers[name] = clock.quick_timer(make(), clock.launches_of(0.01 + 9 * M * N / 3e9, len(drawn.sets)), *where)
        except AssertionError:
            raise
        except Exception as error:  # too much shared memory, too many registers: not a candidate on this GPU
            print(f"    {name}: {type(error).__name__}", flush=True)
    return {"shape": shape, "ms": {name: round(t, 5) for name, t in clock.medians(timers, runs).items()}}


def parse(argv=None):
    parser = command(__doc__, device="cuda", runs=3, seconds=math.inf)
    parser.add_argument("--seed", type=int, help="draw shapes instead of those above")
    parser.add_argument("--shapes", type=int, default=20)
    parser.add_argument("--jobs", type=int, default=8, help="processes that compile")
    return parser.parse_args(argv)


def main(argv=None):
    options, start = parse(argv), time.perf_counter()
    shapes = WORST if options.seed is None else draw(options.seed, options.shapes)
    compile_all(shapes, options.jobs)
    print(f"compiled after {time.perf_counter() - start:.0f} s", flush=True)
    where, facts, rows = (clock.anchor_graph(), torch.cuda.Stream()), about("cuda", options.commit, argv), []
    for shape in shapes:
        if time.perf_counter() - start > options.seconds:
            break
        rows.append(case(shape, options.runs, where))
        found = sorted((ms, name) for name, ms in rows[-1]["ms"].items())
        for kind in ("pass", "chain", "factors", "add", "bare"):
            print(shape, *[each for each in found if each[1].startswith(kind)][:3], flush=True)
        save(options.json, {"about": facts, "rows": rows})
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
