"""Two checkouts in turns on one GPU: whether their results have the same bits, and the time of one by the other's.

    python -m bench.against --other PATH --device cuda [--only NAME ...] [--runs 9] [--json FILE]

Each checkout has a process of its own. A case is made in both from the same seed, forward and backward are captured in a
CUDA graph each, and the two are replayed in turns. ``ratio``: the median time here by the median time there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[1]
S = 0.5


def made(device: str, dtype: torch.dtype, *shape: int, scale: float = 1.0) -> torch.Tensor:
    return (torch.randn(shape, device=device) * scale).to(dtype)


def layer(device: str, N: int, K: int, r: int, dtype: torch.dtype, adapter: torch.dtype | None = None) -> dict[str, Any]:
    adapter = adapter or dtype
    W, A, B = (
        made(device, dtype, N, K, scale=0.02),
        made(device, adapter, r, K, scale=0.02),
        made(device, adapter, N, r, scale=0.02),
    )
    m = W.float().norm(dim=1) * (1 + 0.05 * torch.randn(N, device=device))
    return {"W": W, "A": A.requires_grad_(), "B": B.requires_grad_(), "m": m.requires_grad_()}


def cases(device: str) -> dict[str, Callable[[], tuple[Callable[[], Any], list[torch.Tensor]]]]:
    """name -> what makes the case: a forward, and what it is differentiated by (nothing: forward alone)."""
    from fdora import functional as F
    from fdora import quant

    tiny = device == "cpu"
    bf16 = torch.float32 if tiny else torch.bfloat16
    size = (lambda n: max(16, n // 128)) if tiny else (lambda n: n)
    found: dict[str, Any] = {}

    def case(name: str) -> Callable[[Any], Any]:
        def keep(make: Any) -> Any:
            found[name] = make
            return make

        return keep

    def linear(M, N, K, r, dtype=bf16, adapter=None, given=False, form=None, bias=False, **extra):
        def make():
            t, x = layer(device, size(N), size(K), r, dtype, adapter), made(device, dtype, size(M), size(K)).requires_grad_()
            W = t["W"] if form is None else quant.quantize(t["W"], form)
            c = F.dora_norm(W, t["A"], t["B"], s=S) if given else None
            b = made(device, dtype, size(N)).requires_grad_() if bias else None
            leaves = [x, t["A"], t["B"], t["m"], *([b] if bias else [])]
            return lambda: F.dora_linear(x, W, t["A"], t["B"], t["m"], s=S, norm=c, bias=b, **extra), leaves

        return make

    def norm(N, K, r, dtype=bf16, form=None, adapter=None):
        def make():
            t = layer(device, size(N), size(K), r, dtype, adapter)
            W = t["W"] if form is None else quant.quantize(t["W"], form)
            return lambda: F.dora_norm(W, t["A"], t["B"], s=S), []

        return make

    for M, N, K, r in ((4096, 4096, 4096, 16), (4096, 14336, 4096, 64), (2048, 4096, 14336, 16), (512, 3584, 3584, 128)):
        found[f"linear {M} {N} {K} {r}"] = linear(M, N, K, r, given=True)
    for M, N, K, r in ((4096, 5120, 5120, 384), (700, 2560, 9728, 32), (1, 4096, 4096, 16), (16, 4096, 14336, 64)):
        found[f"linear {M} {N} {K} {r}"] = linear(M, N, K, r)
    found["linear bias 4096"] = linear(4096, 3584, 3584, 16, bias=True, given=True)
    found["linear float32 adapters 2048"] = linear(2048, 4096, 4096, 16, adapter=torch.float32, given=True)
    found["linear float32 512"] = linear(512, 2048, 2048, 16, torch.float32, given=True)
    found["linear dropout 2048"] = linear(2048, 4096, 4096, 16, given=True, dropout_p=0.1, dropout_mode="peft", seed=7)
    found["linear detach 2048"] = linear(2048, 4096, 4096, 64, given=True, detach=False)
    found["linear detach 384"] = linear(2048, 4096, 4096, 384, given=True, detach=False)
    for form in ("nf4", "int8", "fp8"):
        found[f"linear {form} 2048"] = linear(2048, 4096, 4096, 16, form=form)
        found[f"linear {form} 8"] = linear(8, 4096, 4096, 16, form=form)
        for r in (16, 192):
            found[f"norm {form} r {r}"] = norm(4096, 4096, r, form=form)
    found["norm nf4 float32 adapters r 192"] = norm(4096, 4096, 192, form="nf4", adapter=torch.float32)
    for r in (8, 16, 64, 128, 384):
        found[f"norm r {r}"] = norm(4096, 14336, r)
        found[f"norm float32 adapters r {r}"] = norm(4096, 4096, r, adapter=torch.float32)
    found["norm ragged"] = norm(4095, 4097, 24)

    @case("group 2048")
    def _():
        x = made(device, bf16, size(2048), size(4096)).requires_grad_()
        ts = [layer(device, size(n), size(4096), 16, bf16) for n in (4096, 1024, 1024)]
        layers = [F.DoraLayer(t["W"], t["A"], t["B"], t["m"], S) for t in ts]
        return lambda: F.dora_linear_group(x, layers), [x, *(t[n] for t in ts for n in "ABm")]

    @case("mlp 2048")
    def _():
        x = made(device, bf16, size(2048), size(4096)).requires_grad_()
        ts = [layer(device, size(n), size(k), 16, bf16) for n, k in ((14336, 4096), (14336, 4096), (4096, 14336))]
        layers = [F.DoraLayer(t["W"], t["A"], t["B"], t["m"], S) for t in ts]
        return lambda: F.dora_mlp(x, *layers), [x, *(t[n] for t in ts for n in "ABm")]

    def multi(M, by_ids):
        def make():
            G, N, K, r = 6, size(4096), size(4096), 16
            W, x = made(device, bf16, N, K, scale=0.02), made(device, bf16, size(M), K).requires_grad_()
            A, B = (made(device, bf16, G, *d, scale=0.02).requires_grad_() for d in ((r, K), (N, r)))
            m = (W.float().norm(dim=1)[None] * (1 + 0.05 * torch.randn(G, N, device=device))).requires_grad_()
            s = torch.full((G,), S, device=device)
            who = torch.arange(size(M), device=device) * G // size(M)
            ends = torch.searchsorted(who, torch.arange(G, device=device), right=True).int()
            how = {"ids": who[torch.randperm(size(M), device=device)]} if by_ids else {"offsets": ends}
            return lambda: F.dora_linear_multi(x, W, A, B, m, s=s, **how), [x, A, B, m]

        return make

    for M in (4096, 700, 8):
        found[f"multi {M}"], found[f"multi ids {M}"] = multi(M, False), multi(M, True)

    @case("experts 4096")
    def _():
        E, N, K, r, M = 8, size(2048), size(2048), 16, size(4096)
        W, x = made(device, bf16, E, N, K, scale=0.02), made(device, bf16, M, K).requires_grad_()
        A, B = (made(device, bf16, E, *d, scale=0.02).requires_grad_() for d in ((r, K), (N, r)))
        m = (W.float().norm(dim=2) * 1.01).requires_grad_()
        ends = (torch.arange(1, E + 1, device=device) * M // E).int()
        return lambda: F.dora_experts(x, W, A, B, m, s=S, offsets=ends), [x, A, B, m]

    @case("embedding 8192")
    def _():
        V, d, r = size(32000), size(4096), 16
        W, A, B = made(device, bf16, V, d), made(device, bf16, r, V, scale=0.02), made(device, bf16, d, r, scale=0.02)
        m = (W.float().norm(dim=0) * 1.01).requires_grad_()
        ids = torch.randint(V, (size(8192),), device=device)
        leaves = [A.requires_grad_(), B.requires_grad_(), m]
        return lambda: F.dora_embedding(ids, W, A, B, m, s=S), leaves

    @case("compose 4096")
    def _():
        base, lora = (made(device, bf16, size(4096), size(4096)).requires_grad_() for _ in range(2))
        g = (1 + 0.05 * torch.randn(size(4096), device=device)).requires_grad_()
        return lambda: F.dora_compose(base, lora, g, s=S), [base, lora, g]

    @case("merge 4096")
    def _():
        t = layer(device, size(4096), size(4096), 64, bf16)
        return lambda: F.dora_merge(t["W"], t["A"], t["B"], t["m"], s=S), []

    return found


def worker(device: str) -> None:
    """Reads commands, a JSON a line: make a case, replay it so many times, end."""
    import fdora

    torch.set_float32_matmul_precision("highest")
    known, run, graphs = cases(device), None, []
    for line in sys.stdin:
        said = json.loads(line)
        if "names" in said:
            answer: Any = {"names": list(known), "fdora": fdora.__file__}
        elif "make" in said:
            torch.manual_seed(0)
            try:
                run, graphs, answer = prepare(device, known[said["make"]])
            except Exception as error:
                answer = {"error": f"{type(error).__name__}: {error}"[-200:]}
        else:
            answer = timed(device, run, graphs, said["count"])
        print("@" + json.dumps(answer), flush=True)


def prepare(device: str, make: Callable[[], Any]) -> tuple[Any, list, dict]:
    """All of it on the stream that is captured: a leaf's node remembers the stream of its first use."""
    if device == "cpu":
        return first_run(make)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        run, graphs, said = first_run(make)
        for _ in range(3):
            run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            run()
    return run, [*graphs, graph], said


def first_run(make: Callable[[], Any]) -> tuple[Any, list, dict]:
    forward, leaves = make()
    torch.manual_seed(1)
    y = forward()
    dys = [torch.randn_like(t) for t in (y if isinstance(y, (tuple, list)) else [y])]

    def run() -> list[torch.Tensor]:
        y = forward()
        ys = list(y) if isinstance(y, (tuple, list)) else [y]
        return [*ys, *torch.autograd.grad(ys, leaves, dys)] if leaves else ys

    torch.manual_seed(2)
    results = run()
    hashes = [hashlib.sha256(t.detach().float().cpu().numpy().tobytes()).hexdigest()[:12] for t in results]
    return run, [], {"hashes": hashes, "norms": [float(t.detach().double().norm()) for t in results]}


def timed(device: str, run: Any, graphs: list, count: int) -> float:
    """ms of one replay."""
    if device == "cpu":
        start = time.perf_counter()
        run()
        return 1e3 * (time.perf_counter() - start)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    graphs[0].replay()
    begin.record()
    for _ in range(count):
        graphs[0].replay()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / count


class Checkout:
    def __init__(self, root: Path, device: str):
        """Its fdora, and this file."""
        env = os.environ | {"PYTHONPATH": str(root)}
        command = [sys.executable, str(Path(__file__).resolve()), "--worker", "--device", device]
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
    times: list[tuple[float, float]] = []
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


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--other", type=Path, help="the other checkout")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", action="append", default=[], help="cases whose names begin so")
    parser.add_argument("--runs", type=int, default=9, help="turns (%(default)s)")
    parser.add_argument("--jobs", type=int, default=0, help="processes of each checkout that compile ahead")
    parser.add_argument("--seconds", type=float, default=1e9, help="starts no case after these")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if given.worker:
        return worker(given.device)
    start, roots = time.monotonic(), [ROOT, given.other.resolve()]
    here, there = (Checkout(root, given.device) for root in roots)
    mine, theirs = here.ask(names=True), there.ask(names=True)
    print(f"{mine['fdora']} beside {theirs['fdora']}")
    names = [n for n in mine["names"] if not given.only or any(n.startswith(o) for o in given.only)]
    if given.jobs:
        compile_ahead(roots, given.device, names, given.jobs)
        print(f"compiled in {time.monotonic() - start:.0f} s", flush=True)
    rows: list[dict[str, Any]] = []
    for i, name in enumerate(names):
        if time.monotonic() - start > given.seconds:
            print(f"not started: {names[i:]}")
            break
        rows.append(compared(here, there, name, given.runs))
        if "error" in rows[-1]:  # a capture that failed leaves the generator of random numbers waiting for its end
            here, there = (Checkout(root, given.device) for root in roots)
        print(json.dumps(rows[-1]), flush=True)
        if given.json:
            given.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
