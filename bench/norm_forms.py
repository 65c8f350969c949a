"""Compare the ways to get the row norm: dense product, the factored form of the literature, tiles, and the kernel.

    python -m bench.norm_forms [--device cuda] [--json FILE]

Times are medians of runs taken in turns, on a GPU of replayed CUDA graphs (GPU time, no launch overhead); memory is the
allocator's peak beside the inputs; error is the worst row against float64. On a GPU the roof is printed too: the larger of
W's bytes over a measured copy and the product's flops over a measured cuBLAS product.
"""

from __future__ import annotations

import platform
import subprocess
import sys
from functools import partial

import torch

from bench import clock
from bench.command import command
from bench.records import save
from fdora.functional import dora_base_sqnorm, dora_norm, select_backend
from tests.memory import peak_bytes

SHAPES = ((4096, 4096, 16), (4096, 4096, 384), (1024, 4096, 64), (14336, 4096, 64), (8192, 8192, 384))
S = 2.0
LAUNCHES = 10  # in one graph
ELSEWHERE = ("--device", "--json", "--commit", "--seconds", "--rival-path")


def dense(W, A, B):
    return torch.linalg.vector_norm(W + S * (B @ A), dim=1)


def timer(fn, device):
    if device == "cpu":
        return partial(clock.once, fn, device)
    fn()
    graph = clock.capture(fn, LAUNCHES)
    return lambda: clock.replay_ms(graph) / LAUNCHES


def medians(fns, device, runs):
    return clock.medians({name: timer(fn, device) for name, fn in fns.items()}, runs)


def roofs(device):
    """Measured bytes/ms of an elementwise kernel (read and written) and flops/ms of a bf16 product.

    No ``copy_``: in a CUDA graph it is a node of its own kind, 2.6 TB/s on an H200 where kernels move 4.3.
    """
    big = torch.randn(2**28, device=device).bfloat16()
    other = torch.empty_like(big)
    a, b = (torch.randn(8192, 8192, device=device).bfloat16() for _ in range(2))
    ms = medians({"copy": lambda: torch.neg(big, out=other), "mm": lambda: a @ b}, device, 9)
    return {"bytes_per_ms": 2 * big.nbytes / ms["copy"], "flops_per_ms": 2 * 8192**3 / ms["mm"]}


def given(argv):
    """A command's arguments, without those that say where it runs, for how long, and where its result goes."""
    left, found = iter(argv), []
    for each in left:
        name, equals, _ = each.partition("=")
        if name not in ELSEWHERE:
            found.append(each)
        elif not equals:
            next(left, None)
    return " ".join(found)


def about(device, commit, argv=None):
    """What every result says of itself; the arguments are those of the process where ``argv`` is None."""

    def output(*command):
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None

    facts = {"torch": torch.__version__, "python": platform.python_version(), "commit": commit}
    facts["arguments"] = given(sys.argv[1:] if argv is None else argv)
    if device == "cpu":
        return facts | {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    import triton

    driver = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader").split("\n")[0]  # a line for each GPU
    return facts | {"gpu": torch.cuda.get_device_name(), "driver": driver, "triton": triton.__version__} | roofs(device)


def rows_of(N, K, r, dtype, device, runs, facts):
    torch.manual_seed(0)
    W, A = (torch.randn(*shape, device=device).mul_(K**-0.5).to(dtype) for shape in ((N, K), (r, K)))
    B = torch.randn(N, r, device=device).mul_(0.05 * r**-0.5).to(dtype)
    blocks = zip(W.split(512), B.split(512), strict=True)
    truth = torch.cat([(w.double() + S * b.double() @ A.double()).norm(dim=1) for w, b in blocks])
    base = dora_base_sqnorm(W)
    fns = {
        "dense": lambda: dense(W, A, B),
        "factored": lambda: dora_norm(W, A, B, s=S, base_sqnorm=base, backend="eager"),
        "tiles": lambda: dora_norm(W, A, B, s=S, backend="eager"),
    }
    if device != "cpu":
        fns.pop("factored")  # eager takes it where it may look at values
    if select_backend(W).name == "triton":
        fns["triton"] = lambda: dora_norm(W, A, B, s=S)
    ms = medians(fns, device, runs)
    for name, fn in fns.items():
        error = ((fn().double() - truth).abs() / truth).max().item()
        assert name == "dense" or error <= 1e-6, f"{name} is wrong by {error:.1e}"
        row = {"form": name, "N": N, "K": K, "r": r, "dtype": str(dtype).removeprefix("torch."), "ms": round(ms[name], 4)}
        row |= {"peak_mb": round(peak_bytes(fn, device) / 2**20, 2), "error": float(f"{error:.1e}")}
        if device != "cpu" and dtype == torch.bfloat16:
            row["roof_ms"] = round(max(W.nbytes / facts["bytes_per_ms"], 2 * N * K * r / facts["flops_per_ms"]), 4)
        yield row


def main():
    options = command(__doc__, runs=9)
    options = options.parse_args()
    device, digits = options.device, 1 if options.device == "cpu" else 3
    facts = about(device, options.commit)
    print(facts, "\n")
    rows, head = [], None
    for shape in SHAPES[:4] if device == "cpu" else SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            new = list(rows_of(*shape, dtype, device, options.runs, facts))
            if head is None:
                head = [row["form"] for row in new]
                print("| N x K, r, dtype | " + " | ".join(f"{form}: ms / MB / error" for form in head) + " | roof ms |")
                print("|---" * (len(head) + 2) + "|")
            cells = ["{N} x {K}, {r}, {dtype}".format(**new[0])]
            cells += [f"{row['ms']:.{digits}f} / {row['peak_mb']:.0f} / {row['error']:.0e}" for row in new]
            print("| " + " | ".join([*cells, str(new[0].get("roof_ms", ""))]) + " |", flush=True)
            rows += new
    save(options.json, {"about": facts, "runs": options.runs, "rows": rows})


if __name__ == "__main__":
    main()
