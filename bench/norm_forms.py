"""Compare the ways to get the row norm: dense product, the factored form of the literature, tiles (what fdora does).

    python -m bench.norm_forms [--device cuda] [--json FILE]

Times are medians of runs taken in turns; memory is the allocator's peak beside the inputs; error is the worst row against
float64. ``factored`` is fdora's with ``base_sqnorm=``, ``tiles`` without.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch

from fdora.functional import dora_base_sqnorm, dora_norm
from tests.memory import peak_bytes

SHAPES = ((4096, 4096, 384), (4096, 4096, 16), (1024, 4096, 64), (14336, 4096, 64))
S = 2.0


def dense(W, A, B):
    return torch.linalg.vector_norm(W + S * (B @ A), dim=1)


def measure(fns, device, runs):
    """Median ms of each, in turns."""
    times = {name: [] for name in fns}
    for _ in range(runs + 1):  # the first turn warms up
        for name, fn in fns.items():
            start = time.perf_counter()
            fn()
            if device != "cpu":
                torch.cuda.synchronize()
            times[name].append(1e3 * (time.perf_counter() - start))
    return {name: statistics.median(t[1:]) for name, t in times.items()}


def main():
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--device", default="cpu")
    options.add_argument("--runs", type=int, default=9)
    options.add_argument("--json", type=Path)
    options = options.parse_args()
    device = options.device
    rows = []
    for (N, K, r), dtype in ((shape, dtype) for shape in SHAPES for dtype in (torch.float32, torch.bfloat16)):
        torch.manual_seed(0)
        W, A = (torch.randn(*shape, device=device).mul_(K**-0.5).to(dtype) for shape in ((N, K), (r, K)))
        B = torch.randn(N, r, device=device).mul_(0.05 * r**-0.5).to(dtype)
        base = dora_base_sqnorm(W)
        truth = torch.cat(
            [(w.double() + S * b.double() @ A.double()).norm(dim=1) for w, b in zip(W.split(512), B.split(512), strict=True)]
        )
        fns = {
            "dense": lambda: dense(W, A, B),
            "factored": lambda: dora_norm(W, A, B, s=S, base_sqnorm=base),
            "tiles": lambda: dora_norm(W, A, B, s=S),
        }
        ms = measure(fns, device, options.runs)
        for name, fn in fns.items():
            rows.append(
                {
                    "form": name,
                    "N": N,
                    "K": K,
                    "r": r,
                    "dtype": str(dtype).removeprefix("torch."),
                    "ms": round(ms[name], 2),
                    "peak_mb": round(peak_bytes(fn, device) / 2**20, 1),
                    "error": float(f"{((fn().double() - truth).abs() / truth).max().item():.1e}"),
                }
            )
    print("| N x K, r, dtype | " + " | ".join(f"{f}: ms / MB / error" for f in ("dense", "factored", "tiles")) + " |")
    print("|---|---|---|---|")
    for i in range(0, len(rows), 3):
        head = "{N} x {K}, {r}, {dtype}".format(**rows[i])
        print(
            f"| {head} | "
            + " | ".join("{ms:.1f} / {peak_mb:.0f} / {error:.0e}".format(**row) for row in rows[i : i + 3])
            + " |"
        )
    if options.json:
        gpu = torch.cuda.get_device_name() if device != "cpu" else None
        about = {
            "torch": torch.__version__,
            "cpu": platform.processor() or platform.machine(),
            "threads": torch.get_num_threads(),
        }
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(
            json.dumps({"about": about | {"gpu": gpu, "runs": options.runs}, "rows": rows}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
