"""The forward of a layer of NF4 codes, many tokens: each way of its product behind decoding W, beside PEFT's QLoRA.

    python -m bench.quant_ways --device cuda [--shapes 14336x4096,28672x8192] [--M 4096] [--r 16,64] --json FILE

Shapes are K x N. Everything is as ``bench.quant`` has it, the norm given; ``now`` is what the plan chooses, ``after`` cuBLAS's
product of x and a pass for the rest, the others tiles of the product with all inside. The choice was fitted to products of
random weights; a GPU that is bound by its power takes less of it for a W of few values. Works on a CPU: for the tests.
"""

from __future__ import annotations

from contextlib import nullcontext
from itertools import product
from unittest import mock

import torch

from bench.clock import anchor_graph, medians, timer
from bench.command import command
from bench.norm_forms import about
from bench.products import TILES
from bench.quant import Quantised
from bench.quant_forms import line
from bench.records import save
from fdora.triton.choice import Way
from fdora.triton.runtime import walk

SHAPES = "14336x4096,28672x8192,4096x14336,8192x8192"
RIVALS = ("linear", "linear4bit", "qlora")
WAYS = {"now": None, "after": Way("after", None, 0.0)}
WAYS |= {" ".join(map(str, tile[1:4])): Way("fused", tile, 0.0) for tile in (*TILES[:2], TILES[-1])}


def row_of(M: int, K: int, N: int, r: int, device: str, runs: int) -> dict:
    case = Quantised(M, K, N, r, device)
    anchor = None if device == "cpu" else anchor_graph()
    held = [case.way(name, []) for name in RIVALS]  # graphs read their parameters
    timers = {name: timer(way.forward, device, anchor) for name, way in zip(RIVALS, held, strict=True)}
    want, plans = None, []
    for name, way in WAYS.items():
        how = nullcontext() if way is None else mock.patch("fdora.triton.product.product_way", lambda *_, way=way: way)
        with how:
            walk._plans.clear()  # a plan is made once for a shape
            forward = case.way("fdora", []).forward
            y = forward()
            want = y if want is None else want
            error = ((y - want).float().norm() / want.float().norm()).item()
            print("" if error <= 6e-3 else f"    WRONG: {name} by {error:.1e}", end="", flush=True)
            timers[name] = timer(forward, device, anchor)
            plans += walk._plans.values()  # a graph reads what they hold
    ms = medians(timers, runs)
    row = {"M": M, "K": K, "N": N, "r": r} | {name: round(t, 5) for name, t in ms.items()}
    line(row)
    return row


def main(argv: list[str] | None = None) -> None:
    options = command(__doc__, runs=5)
    options.add_argument("--shapes", default=SHAPES, help="KxN, comma separated (default: %(default)s)")
    options.add_argument("--M", default="4096")
    options.add_argument("--r", default="16,64")
    options = options.parse_args(argv)
    facts, rows = about(options.device, options.commit, argv), []
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes.split(",")]
    for (K, N), M, r in product(shapes, map(int, options.M.split(",")), list(map(int, options.r.split(",")))):
        rows.append(row_of(M, K, N, r, options.device, options.runs))
        save(options.json, {"about": facts, "rows": rows})
        if options.device != "cpu":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
