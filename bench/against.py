"""Two checkouts in turns on one GPU: whether their results have the same bits, and the time of one by the other's.

    python -m bench.against --other PATH --device cuda [--only NAME ...] [--runs 9] [--json FILE]

Each checkout has a process of its own, with the ways of this bench on its fdora. A case is made in both from the same seed,
forward and backward are captured in a CUDA graph each, and the two are replayed in turns. ``ratio``: the median time here by
that there.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import statistics
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
if __name__ == "__main__" and "--worker" in sys.argv:  # of another checkout: its fdora, and the rest from here
    sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

from bench import experts as mixture  # noqa: E402
from bench import group, ways  # noqa: E402
from bench import multi as banks  # noqa: E402
from bench.clock import (  # noqa: E402
    Failures,
    capture,
    once,
    replay_ms,
)
from bench.suite import Run, Suite  # noqa: E402
from bench.ways import BF16, Inputs, S, Way, differentiated  # noqa: E402
from fdora.functional import dora_compose, dora_embedding, dora_merge, dora_norm  # noqa: E402
from fdora.quant import quantize  # noqa: E402

FLOAT = torch.float32
Make = Callable[[], Way]


def layer(
    device: str, M: int, N: int, K: int, r: int, adapter=BF16, form=None, given=False, bias=False, dtype=BF16, **how
) -> Way:
    i = Inputs.random(M, K, N, r, adapter, device)
    x, W, dy = (t.detach().to(dtype) for t in (i.x, i.W, i.dy))
    i = i._replace(x=x.requires_grad_(), W=coded(W, form), dy=dy)
    norm = dora_norm(i.W, i.A.detach(), i.B.detach(), s=S) if given else None
    if bias:
        how["bias"] = torch.randn(N, device=device).to(dtype).requires_grad_()
    return ways.fdora(i, norm, **how)


def coded(W: torch.Tensor, form: str | None) -> Any:
    return W if form is None else quantize(W, form)


def norm(device: str, N: int, K: int, r: int, adapter=BF16, form=None) -> Way:
    i = Inputs.random(1, K, N, r, adapter, device)
    W = coded(i.W, form)
    return Way(lambda: dora_norm(W, i.A.detach(), i.B.detach(), s=S), None)


def shared(device: str, part: str, M: int) -> Way:
    return group.build("fdora", group.Case.random("tiny" if device == "cpu" else "llama8b", part, M, 16, "bf16", device))


def multi(device: str, M: int, N: int, K: int, name: str) -> Way:
    return banks.build(name, banks.Bank.random(M, K, N, [16] * 6, BF16, device))


def experts(device: str, tokens: int) -> Way:
    model = "tiny" if device == "cpu" else "qwen3-30b"
    return mixture.layer_way("fdora_inside", mixture.Case.random(model, tokens, 16, BF16, device))


def embedding(device: str, V: int, d: int, tokens: int) -> Way:
    i, ids = Inputs.random(tokens, V, d, 16, BF16, device), torch.randint(V, (tokens,), device=device)
    leaves = {"A": i.A, "B": i.B, "m": i.m}
    return differentiated(lambda: dora_embedding(ids, i.W.mT, i.A, i.B, i.m, s=S), leaves, i.dy)


def compose(device: str, M: int, N: int) -> Way:
    base, lora, dy, g = (torch.randn(*shape, device=device).to(BF16) for shape in ((M, N), (M, N), (M, N), (N,)))
    leaves = {"base": base.requires_grad_(), "lora": lora.requires_grad_(), "g": g.float().requires_grad_()}
    return differentiated(lambda: dora_compose(*leaves.values(), s=S), leaves, dy)


def merge(device: str, N: int, K: int, r: int) -> Way:
    i = Inputs.random(1, K, N, r, BF16, device)
    return Way(lambda: dora_merge(i.W, i.A.detach(), i.B.detach(), i.m.detach(), s=S), None)


GIVEN = ((4096, 4096, 4096, 16), (4096, 14336, 4096, 64), (2048, 4096, 14336, 16), (512, 3584, 3584, 128))
INSIDE = ((4096, 5120, 5120, 384), (700, 2560, 9728, 32), (1, 4096, 4096, 16), (16, 4096, 14336, 64))


def cases(device: str) -> dict[str, Make]:
    """name -> what makes the case: sizes are a 128th on a CPU."""

    def case(make: Callable[..., Way], *sizes: int, r: tuple[int, ...] = (), **how: Any) -> Make:
        sizes = tuple(max(16, n // 128) for n in sizes) if device == "cpu" else sizes
        return partial(make, device, *sizes, *r, **how)

    square, found = (2048, 4096, 4096), {}
    for shapes, given in ((GIVEN, True), (INSIDE, False)):
        for shape in shapes:
            found["linear {} {} {} {}".format(*shape)] = case(layer, *shape[:3], r=shape[3:], given=given)
    found["linear bias 4096"] = case(layer, 4096, 3584, 3584, r=(16,), bias=True, given=True)
    found["linear float32 adapters 2048"] = case(layer, *square, r=(16,), adapter=FLOAT, given=True)
    found["linear float32 512"] = case(layer, 512, 2048, 2048, r=(16,), adapter=FLOAT, dtype=FLOAT, given=True)
    how = {"dropout_p": 0.1, "dropout_mode": "peft", "seed": 7}
    found["linear dropout 2048"] = case(layer, *square, r=(16,), given=True, **how)
    for r, name in ((64, "2048"), (384, "384")):
        found[f"linear detach {name}"] = case(layer, *square, r=(r,), given=True, detach=False)
    for form in ("nf4", "int8", "fp8"):
        for M in (2048, 8):
            found[f"linear {form} {M}"] = case(layer, M, 4096, 4096, r=(16,), form=form)
        for r in (16, 192):
            found[f"norm {form} r {r}"] = case(norm, 4096, 4096, r=(r,), form=form)
    found["norm nf4 float32 adapters r 192"] = case(norm, 4096, 4096, r=(192,), form="nf4", adapter=FLOAT)
    for r in (8, 16, 64, 128, 384):
        found[f"norm r {r}"] = case(norm, 4096, 14336, r=(r,))
        found[f"norm float32 adapters r {r}"] = case(norm, 4096, 4096, r=(r,), adapter=FLOAT)
    found["norm ragged"] = case(norm, 4095, 4097, r=(24,))
    for name, part in (("group", "qkv"), ("mlp", "mlp")):
        found[f"{name} 2048"] = partial(shared, device, part, 24 if device == "cpu" else 2048)
    for M, (name, way) in product((4096, 700, 8), (("multi", "multi"), ("multi ids", "multi_ids"))):
        found[f"{name} {M}"] = case(multi, M, 4096, 4096, name=way)
    found["experts 4096"] = case(experts, 4096)
    found["embedding 8192"] = case(embedding, 32000, 4096, 8192)
    found["compose 4096"] = case(compose, 4096, 4096)
    found["merge 4096"] = case(merge, 4096, 4096, r=(64,))
    return found


def worker(device: str) -> None:
    """Reads commands, a JSON a line: make a case, replay it so many times, end."""
    import fdora

    torch.set_float32_matmul_precision("highest")
    known, replay = cases(device), None
    for line in sys.stdin:
        said, failed = json.loads(line), Failures()
        if "names" in said:
            answer = {"names": list(known), "fdora": fdora.__file__}
        elif "make" in said:
            torch.manual_seed(0)
            made = failed.attempt(["error"], lambda _: prepare(device, known[said["make"]]))
            replay, answer = made.get("error", (None, failed))
        else:
            answer = replay(said["count"])
        print("@" + json.dumps(answer), flush=True)


def prepare(device: str, make: Make) -> tuple[Callable[[int], float], dict]:
    """ms of one of so many replays, and what the first run gave. All of it on the stream that is captured: a leaf's node
    remembers the stream of its first use."""
    if device == "cpu":
        run, said = first_run(make)
        return lambda count: once(run, device), said
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run, said = first_run(make)
        for _ in range(3):
            run()
        torch.cuda.synchronize()
    graphs = {}

    def replay(count: int) -> float:
        if count not in graphs:
            graphs.clear()
            with torch.cuda.stream(stream):
                graphs[count] = capture(run, count)
            replay_ms(graphs[count])
        return replay_ms(graphs[count]) / count

    return replay, said


def first_run(make: Make) -> tuple[Callable[[], Any], dict]:
    way = make()
    run = way.both or way.forward
    torch.manual_seed(2)
    found = run()
    results = list(found.values()) if isinstance(found, dict) else [found]
    hashes = [hashlib.sha256(t.detach().float().cpu().numpy().tobytes()).hexdigest()[:12] for t in results]
    return run, {"hashes": hashes, "norms": [float(t.detach().double().norm()) for t in results]}


class Checkout:
    def __init__(self, root: Path, device: str):
        """Its fdora, and this file."""
        env = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (str(root), os.environ.get("PYTHONPATH"))))}
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", device]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = subprocess.Popen(command, cwd=root, env=env, **pipes)  # type: ignore[call-overload]

    def say(self, **what: Any) -> None:
        self.process.stdin.write(json.dumps(what) + "\n")
        self.process.stdin.flush()

    def ask(self, **what: Any) -> Any:
        self.say(**what)
        return self.heard()

    def heard(self) -> Any:
        for line in self.process.stdout:
            if line.startswith("@"):
                return json.loads(line[1:])
        raise SystemExit("a process ended")


def compared(here: Checkout, there: Checkout, name: str, runs: int) -> dict[str, Any]:
    here.say(make=name)
    other, mine = there.ask(make=name), here.heard()
    if "error" in mine or "error" in other:
        return {"case": name, "error": [mine.get("error"), other.get("error")]}
    count = max(1, min(200, int(8 / max(0.02, here.ask(count=2)))))
    times = []
    for i in range(runs):
        first, second = (here, there) if i % 2 else (there, here)
        pair = first.ask(count=count), second.ask(count=count)
        times.append(pair if i % 2 else pair[::-1])
    a, b = (statistics.median(column) for column in zip(*times, strict=True))
    off = [abs(p - q) / max(abs(q), 1e-30) for p, q in zip(mine["norms"], other["norms"], strict=True)]
    return {"case": name, "ms": a, "other_ms": b, "ratio": a / b, "same": mine["hashes"] == other["hashes"], "off": max(off)}


def compile_ahead(roots: list[Path], device: str, names: list[str], jobs: int) -> None:
    """Every case in many processes at once: what they compile stays in Triton's cache on the disk."""

    def lane(i: int) -> None:
        root, mine = roots[i % len(roots)], names[i // len(roots) :: jobs]
        checkout = Checkout(root, device)
        for name in mine:
            checkout.ask(make=name)
        checkout.process.stdin.close()
        checkout.process.wait()

    with ThreadPoolExecutor(jobs * len(roots)) as pool:
        list(pool.map(lane, range(jobs * len(roots))))


def measure(run: Run) -> None:
    options, roots = run.options, [ROOT, run.options.other.resolve()]
    here, there = (Checkout(root, options.device) for root in roots)
    mine, theirs = here.ask(names=True), there.ask(names=True)
    print(f"{mine['fdora']} beside {theirs['fdora']}")
    names = [n for n in mine["names"] if not options.only or any(n.startswith(o) for o in options.only)]
    if options.jobs:
        compile_ahead(roots, options.device, names, options.jobs)
    for name in run.cases(names):
        run.add(row := compared(here, there, name, options.runs))
        if "error" in row:  # a capture that failed leaves the generator of random numbers waiting for its end
            here, there = (Checkout(root, options.device) for root in roots)


OPTIONS = {
    "--other": dict(type=Path, required=True, help="the other checkout"),
    "--only": dict(action="append", default=[], help="cases whose names begin so"),
    "--jobs": (0, "processes of each checkout that compile ahead"),
}

if __name__ == "__main__" and "--worker" in sys.argv:
    sys.exit(worker(sys.argv[-1]))

main = Suite(measure, OPTIONS, runs=9, seconds=math.inf)
