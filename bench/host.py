"""Host time: wall time per call where the GPU has nothing to do, and what the first call costs a fresh process.

    python -m bench.host --device cuda --first-call --json FILE

Medians of many loops of calls, taken in turns, each loop waiting once at its end. The first call is timed in a process of its
own, from the end of ``import torch``, with an empty Triton cache and again with the cache that the first process left.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from bench.clock import Failures, medians, wall_timer
from bench.suite import One, Some, Suite
from bench.ways import DTYPES, Inputs, build, by_mode
from bench.ways import WAYS as EVERY

ROOT = Path(__file__).parent.parent
WAYS = ("frozen", "peft_lora", "peft_dora", "fdora", "fdora_inside")
FIRST = """
import sys, time, torch
device, (M, K, N, r) = sys.argv[1], map(int, sys.argv[2:])
start = time.perf_counter()
x, W, dy, A, B = (torch.randn(*shape, device=device).bfloat16() for shape in ((M, K), (N, K), (M, N), (r, K), (N, r)))
m = W.float().norm(dim=1)
inputs = [t.requires_grad_() for t in (x, A, B, m)]
wait = torch.cuda.synchronize if device != "cpu" else lambda: None
wait()
context = time.perf_counter()
from fdora.functional import dora_linear
imported = time.perf_counter()
def call():
    torch.autograd.grad(dora_linear(x, W, A, B, m, s=2.0), inputs, dy)
    wait()
call()
first = time.perf_counter()
call()
second = time.perf_counter()
print(*(1e3 * t for t in (first - start, context - start, imported - context, first - imported, second - first)))
"""


def first_call(sizes: tuple[int, ...], device: str) -> list[dict]:
    """ms until the first forward and backward is done, and its parts; with an empty cache of kernels, then a full one."""
    fields = ("total_ms", "device_and_inputs_ms", "import_fdora_ms", "first_call_ms", "second_call_ms")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for cache in ("empty", "warm"):
            command = [sys.executable, "-c", FIRST, device, *map(str, sizes)]
            env = os.environ | {"TRITON_CACHE_DIR": folder}
            done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True)
            if done.returncode:
                rows.append({"cache": cache, "failed": done.stderr.strip().splitlines()[-1]})
                continue
            times = map(float, done.stdout.split()[-len(fields) :])
            rows.append({"cache": cache} | {field: round(ms, 2) for field, ms in zip(fields, times, strict=True)})
    return rows


def per_call(options) -> list[dict]:
    """us per call of each way, forward without a graph and forward with backward."""
    inputs = Inputs.random(options.M, options.K, options.N, options.r, DTYPES[options.adapter], options.device)
    failed = Failures()
    ways = failed.attempt(options.ways, lambda name: build(name, inputs))
    rows = {name: {"way": name} for name in options.ways}
    for mode, fns in by_mode(ways):
        timers = failed.attempt(fns, lambda name: wall_timer(fns[name], options.device, options.loop_ms))
        for name, ms in medians(timers, options.runs).items():
            rows[name][f"{mode}_us"] = round(1e3 * ms, 1)
    return [row | ({"failed": failed[name]} if name in failed else {}) for name, row in rows.items()]


OPTIONS = {
    **{f"--{name}": size for name, size in dict(M=16, K=512, N=512, r=16).items()},
    "--adapter": One(DTYPES, "bf16"),
    "--ways": Some(EVERY, WAYS),
    "--first-call": False,
    "--loop-ms": (20.0, "about the length of one loop"),
}


def measure(run):
    options = run.options
    sizes = (options.M, options.K, options.N, options.r)
    run.set("adapter", sizes=sizes)
    run.add(*per_call(options))
    if options.first_call:
        run.add(*first_call(sizes, options.device), part="first_call")


main = Suite(measure, OPTIONS, runs=31)
