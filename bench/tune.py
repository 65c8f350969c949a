"""Search the tiles for few tokens on this GPU, and write the table they are chosen from.

    python -m bench.tune [--missing] [--write fdora/triton/table.py] [--json FILE] [--commit H]

Every candidate is checked against float32 torch on the same inputs, then timed in replayed CUDA graphs, all candidates of a
shape in turns; the fastest is written. ``--missing`` keeps what the table has and searches the other shapes. Nothing is ever
timed outside of commands. For more tokens: bench.products and bench.fit.
"""

from __future__ import annotations

import copy
import itertools
import json
import pprint
from pathlib import Path

import torch

from bench import products
from bench.command import command
from bench.norm_forms import about, medians
from bench.products import close, planned, randn
from bench.shapes import CACHE
from fdora._records import Operands
from fdora.triton.configs import SmallConfig
from fdora.triton.small import Back, Out, small_backward, small_forward

SMALL_SHAPES = [
    (tokens, N, K)
    for tokens in (16, 64)
    for N, K in ((1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (512, 512))
]
SMALL_CANDIDATES = [
    SmallConfig(bn, bk, warps, stages)
    for bn, bk in ((16, 256), (16, 512), (32, 128), (32, 256), (32, 512), (64, 64), (64, 128), (64, 256), (128, 64), (128, 128))
    for warps, stages in ((4, 3), (4, 5), (8, 3), (2, 5))
]


DEVICE = products.DEVICE


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
                    la, dx = Operands(W, A, B, None, None, None, None), plan.result("dx", (M, N), dz.dtype)
                    small_backward(plan, dz, la, plan.scalar("s"), Back(dx), config)

                turns = itertools.cycle(Ws[1:] + Ws[:1])
                rest = (x, a, h, m, c) if columns else (x, A, B, m, c)
                launch = planned(backward if columns else forward, Ws[0], *rest)
                return lambda: launch(next(turns), *rest)[0]

            def bare():
                turns = itertools.cycle(Ws)
                return lambda: x @ (next(turns) if columns else next(turns).T)

            results = fastest(make, SMALL_CANDIDATES, lambda y: close(y, want, "small"), calls=len(Ws))
            yield columns, (M, N, K), results, medians({"bare": bare()}, DEVICE, 5)["bare"]


HEAD = '''"""Written by `python -m bench.tune --write`: shape -> fastest config, the fields of configs.py in their order."""

# (tokens, N, K) -> SmallConfig, by whether neighbours in memory are columns of W
SMALL: dict[bool, dict[tuple, tuple]] = '''


def main():
    options = command(__doc__, device=None)
    options.add_argument("--missing", action="store_true", help="only shapes that the table lacks")
    options.add_argument("--write", type=Path)
    options = options.parse_args()
    from fdora.triton.table import SMALL

    facts = about("cuda", options.commit)
    table: dict = copy.deepcopy(SMALL) if options.missing else {}
    rows = []
    for columns, shape, results, bare in tune_small(SMALL_SHAPES, table):
        best, ms = results[0]
        table.setdefault(columns, {})[shape] = tuple(best)
        line = {"side": columns, "shape": shape, "bare_ms": round(bare, 4), "best": tuple(best), "ms": round(ms, 4)}
        line["next"] = [(tuple(config), round(ms, 4)) for config, ms in results[1:4]]
        rows.append(line)
        print(columns, shape, f"bare {bare:.4f}", *(f"{tuple(c)} {ms:.4f}" for c, ms in results[:3]), sep="  ", flush=True)
    if options.json:
        options.json.write_text(json.dumps({"about": facts, "rows": rows}, indent=1) + "\n")
    if options.write:
        options.write.write_text(HEAD + pprint.pformat(table, width=120, sort_dicts=False) + "\n")


if __name__ == "__main__":
    main()
