"""Few tokens: where one pass over W by narrow tiles ends and the product of many tokens begins, and what a norm inside costs.

    python -m bench.few --device cuda --jobs 14 [--tokens 64,48,32,16,1] --json FILE
    python -m bench.few --device cuda --jobs 14 --ranks 64,256 --tokens 64,16 --json FILE    # without any norm
    python -m bench.few --device cuda --jobs 14 --shape 64,9344,9344,32 [--shape M,K,N,r] --json FILE
    python -m bench.fit_few FILE... --write fdora/triton/fitted_few.py

One layer. ``bare``: its products by cuBLAS, forward three and with backward eight. ``small``: h in passing, one pass over W
(fdora/triton/small.py). ``general``: what more tokens take, by the model of choice.py. ``norm_small``, ``norm_general``: the
norm, then either. ``inside``: the norm out of the pass over W (small_norm.py), tile by tile. GPU time of replayed CUDA graphs,
in turns, medians; weights in turn from sets larger than the cache. Each forward is compared with the formula in float32.
"""

from __future__ import annotations

import itertools
import math
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context

import torch

from bench import clock, products
from bench.command import command
from bench.norm_forms import about
from bench.products import close, randn
from bench.records import save
from bench.shapes import CACHE
from fdora._records import Operands
from fdora.triton import small
from fdora.triton.configs import SmallConfig, power_of_two
from fdora.triton.linear import plan_backward, plan_forward
from fdora.triton.norm import plan_norm
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import device_of
from fdora.triton.runtime.walk import like, run
from fdora.triton.small_norm import fits, small_norm_forward

S = 2.0
WEIGHTS = ((4096, 4096), (4096, 14336), (14336, 4096), (2304, 22144), (1024, 10112))  # K, N
CASES = [(M, K, N, 16) for M in (64, 48, 32, 16, 1) for K, N in WEIGHTS]
CASES += [(M, K, N, 64) for M in (64, 16) for K, N in WEIGHTS[:3]]
SMALLER = ((1280, 5120), (5120, 1280), (2048, 2048), (9216, 3328))  # with --ranks, beside WEIGHTS
INSIDE = tuple(
    SmallConfig(*tile)
    for tile in (
        (64, 64, 4, 4),
        (64, 128, 8, 3),
        (32, 128, 4, 4),
        (128, 64, 8, 4),
        (128, 64, 8, 3),
        (128, 64, 4, 4),
        (64, 64, 8, 4),
    )
)


@contextmanager
def few_up_to(tokens):
    """Another limit, while plans are written."""
    before, small.takes_narrow_tiles = small.takes_narrow_tiles, lambda M, *_: tokens >= M
    try:
        yield
    finally:
        small.takes_narrow_tiles = before


class Drawn:
    """One layer and its tokens; several sets where one would stay in the cache."""

    def __init__(self, M, K, N, r):
        self.shape = M, K, N, r
        self.sets = [self.one(M, K, N, r) for _ in range(max(2, min(16, CACHE // (2 * K * N))))]
        x, W, A, B, m, _ = self.sets[0]
        whole = W.float() + S * B.float() @ A.float()
        self.c = whole.norm(dim=1)
        self.want = m / self.c * (x.float() @ whole.T)

    def one(self, M, K, N, r):
        W, A = randn(N, K, std=K**-0.5), randn(r, K, std=K**-0.5)
        return randn(M, K), W, A, randn(N, r, std=0.1 * r**-0.5), torch.rand(N, device=products.DEVICE) + 1, randn(M, N)

    def plans(self, few, norm, backward):
        """What a call runs, one after the other, as a function of a set."""
        x, W, A, B, m, dy = self.sets[0]
        on, drop = device_of(x.device), (0.0, "lora")
        layer = (W, A, B, m, self.c, None, None)
        likes = tuple(None if t is None else like(t) for t in (x, *layer))
        save = ("output",) if backward else ("nothing",)
        with few_up_to(few):
            forward = plan_forward(likes, on, *drop, save, True)
            h = torch.empty(x.shape[0], A.shape[0], dtype=x.dtype, device=x.device)
            back = (like(x), like(h), like(dy), like(dy), *likes[1:])
            plan = plan_backward(back, on, *drop, (False,), True, (True, True, True, False, False)) if backward else None
        c_plan = plan_norm((like(W), like(A), like(B)), on, None, False) if norm else None

        def call(x, W, A, B, m, dy):
            c = run(c_plan, (W, A, B), (S,))[0] if c_plan else self.c
            y, h = run(forward, (x, W, A, B, m, c, None, None), (S,))[:2]
            if plan is not None:
                run(plan, (x, h, dy, y, W, A, B, m, c, None, None), (S,))
            return y

        return call

    def inside(self, config):
        (M, _, N, r), t = self.shape, self.sets[0][0].dtype
        plan = Builder("inside", device_of(self.sets[0][0].device))
        x, W, A, B = (plan.matrix(like(each)) for each in self.sets[0][:4])
        m, s = plan.vector(like(self.sets[0][4])), plan.scalar("s")
        out = small.Out(plan.result("y", (M, N), t), plan.result("h", (M, r), t), None, plan.result("c", (N,), torch.float32))
        small_norm_forward(plan, x, Operands(W, A, B, m, None, None, None), s, out, config)
        made = plan.plan()

        def call(x, W, A, B, m, dy):
            y, _, c = run(made, (x, W, A, B, m), (S,))
            return y, c

        return call

    @staticmethod
    def bare(x, W, A, B, m, dy):
        h = x @ A.T
        return x @ W.T, h, h @ B.T

    @staticmethod
    def bare_both(x, W, A, B, m, dy):
        h = x @ A.T
        dh = dy @ B
        return x @ W.T, h, h @ B.T, dy @ W, dh @ A, dh.T @ x, dy.T @ h

    def ways(self, norms=True):
        """name -> what makes a function of a set"""
        M = self.shape[0]
        found = {"bare": lambda: self.bare, "bare_both": lambda: self.bare_both}
        for name, few in (("small", 64), ("general", 0)):
            found[name] = partial(self.plans, few, False, False)
            found[f"{name}_both"] = partial(self.plans, few, False, True)
            if norms:
                found[f"norm_{name}"] = partial(self.plans, few, True, False)
        if not norms:
            return found
        if fits(device_of(self.sets[0][0].device), M, self.sets[0][0].dtype, *self.sets[0][1:4]):
            for config in INSIDE:
                found[" ".join(("inside", *map(str, config)))] = partial(self.inside, config)
        return found

    def timer(self, make):
        call, turns = make(), itertools.cycle(self.sets)
        y = call(*self.sets[0])
        if type(y) is tuple and len(y) == 2:  # with its norm
            assert ((y[1] - self.c).abs() / self.c).max() < 1e-5, "the norm is wrong"
            y = y[0]
        if type(y) is not tuple:
            close(y, self.want, "y")
        return lambda: call(*next(turns))


def compile_case(M, r, names):
    """In a process of its own: kernels know of a shape what 16 divides."""
    drawn = Drawn(M, 1024, 2048, r)
    for name, make in drawn.ways().items():
        if name in names:
            try:
                drawn.timer(make)()
            except AssertionError:
                raise
            except Exception as error:
                print(M, r, name, type(error).__name__, str(error)[:100], flush=True)
    torch.cuda.synchronize()


def compile_all(jobs, cases, norms):
    tasks = []
    for rows, r in sorted({(power_of_two(M), r) for M, _, _, r in cases}):
        names = list(Drawn(rows, 64, 64, r).ways(norms))
        tasks += [(rows, r, names[i::8]) for i in range(8)]
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        for done in [pool.submit(compile_case, *task) for task in tasks]:
            done.result()


def case(shape, where, runs, norms=True):
    _, K, N, _ = shape
    drawn, timers = Drawn(*shape), {}
    for name, make in drawn.ways(norms).items():
        try:
            timers[name] = clock.quick_timer(drawn.timer(make), clock.launches_of(0.01 + K * N / 1e9, len(drawn.sets)), *where)
        except AssertionError:
            raise
        except Exception as error:  # too much shared memory, too many registers: not a candidate on this GPU
            print(f"    {name}: {type(error).__name__}", flush=True)
    return {"shape": shape, "ms": {name: round(t, 5) for name, t in clock.medians(timers, runs).items()}}


def main(argv=None):
    parser = command(__doc__, device="cuda", runs=3, seconds=math.inf)
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile all kernels first")
    parser.add_argument("--tokens", type=lambda text: [int(M) for M in text.split(",")], help="of the cases those")
    parser.add_argument("--ranks", type=lambda text: [int(r) for r in text.split(",")], help="in place of the cases; no norms")
    parser.add_argument("--shape", action="append", help="M,K,N,r in the place of the cases")
    options = parser.parse_args(argv)
    start, rows, norms = time.perf_counter(), [], not options.ranks
    ranked = [(M, K, N, r) for r in options.ranks or () for M in options.tokens or (64, 16) for K, N in (*SMALLER, *WEIGHTS)]
    given = [tuple(map(int, shape.split(","))) for shape in options.shape or ()]
    cases = given or ranked or [case for case in CASES if not options.tokens or case[0] in options.tokens]
    if options.jobs:
        compile_all(options.jobs, cases, norms)
        print(f"compiled after {time.perf_counter() - start:.0f} s", flush=True)
    where, facts = (clock.anchor_graph(), torch.cuda.Stream()), about("cuda", options.commit, argv)
    for M, K, N, r in cases:
        if time.perf_counter() - start > options.seconds:
            break
        rows.append(case((M, K, N, r), where, options.runs, norms))
        ms = rows[-1]["ms"]
        best = sorted((t, name) for name, t in ms.items() if name.startswith("inside"))[:3]
        print(
            (M, K, N, r),
            *(f"{name} {1e3 * t:.1f}" for name, t in ms.items() if not name.startswith("inside")),
            *(f"{name} {1e3 * t:.1f}" for t, name in best),
            sep="  ",
            flush=True,
        )
        save(options.json, {"about": facts, "rows": rows})
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
