"""Kernels of a call as torch.profiler sees them: in order, named, timed; as a table, and as a picture of one block."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from bench.clock import synchronize
from bench.table import table

COLOURS = {"product": "tab:blue", "attention": "tab:purple", "fdora": "tab:cyan", "fused": "tab:orange"}
COLOURS |= {"norm": "tab:green", "elementwise": "tab:red", "copy": "0.6", "other": "0.8"}


class Kernel(NamedTuple):
    name: str
    us: float


def profiled(fn: Callable[[], object], device: str = "cuda", calls: int = 1) -> list[Kernel]:
    """What so many calls of it run on the GPU, in order; on a CPU torch's operations with their own time. It has run before."""
    from torch.profiler import ProfilerActivity, profile

    synchronize(device)
    with profile(activities=[ProfilerActivity.CPU if device == "cpu" else ProfilerActivity.CUDA]) as seen:
        for _ in range(calls):
            fn()
        synchronize(device)
    return kernels_of(seen.events(), device)


def kernels_of(events: Iterable[Any], device: str) -> list[Kernel]:
    """Those of a profile: of the GPU, or of the CPU."""
    if device == "cpu":
        return [Kernel(e.name, e.self_cpu_time_total) for e in events if e.name.startswith(("aten::", "fdora::"))]
    on_gpu = [e for e in events if e.device_type == torch.autograd.DeviceType.CUDA and not e.is_user_annotation]
    return [Kernel(e.name, e.time_range.elapsed_us()) for e in sorted(on_gpu, key=lambda e: e.time_range.start)]


def middle_block(kernels: Sequence[Kernel], layers: int) -> list[Kernel]:
    """Of a forward: those of one block from the middle, where what is there repeats; else the mean over all, by name."""
    period, start = len(kernels) // layers, len(kernels) // 2
    names = [kernel.name for kernel in kernels]
    for size in range(period, max(period // 2, period - 5), -1):  # what runs before and after the blocks is counted in
        if start >= size and names[start - size : start] == names[start : start + size]:
            return list(kernels[start : start + size])
    return by_name(kernels, layers)


def by_name(kernels: Sequence[Kernel], layers: float) -> list[Kernel]:
    """The time that one layer spends in the kernels of each name, the longest first."""
    total: dict[str, float] = {}
    for kernel in kernels:
        total[kernel.name] = total.get(kernel.name, 0.0) + kernel.us / layers
    return [Kernel(*each) for each in sorted(total.items(), key=lambda each: -each[1])]


def kind(name: str) -> str:
    """By what libraries call their kernels; the first that fits."""
    low = name.lower()
    for word, found in (
        ("flash", "attention"),
        ("fmha", "attention"),
        ("attention", "attention"),
        ("sdpa", "attention"),
        ("triton_", "fused"),
        ("gemm", "product"),
        ("nvjet", "product"),
        ("cutlass", "product"),
        ("xmma", "product"),
        ("_kernel_", "fdora"),
        ("layer_norm", "norm"),
        ("layernorm", "norm"),
        ("elementwise", "elementwise"),
        ("memcpy", "copy"),
        ("memset", "copy"),
        ("copy", "copy"),
        ("cat", "copy"),
    ):
        if word in low:
            return found
    return "fdora" if low.endswith("_kernel") else "other"


def short(name: str) -> str:
    """What a kernel does: of Inductor's, the operations that fell together; of others, the name without its templates."""
    fused = re.match(r"triton_(?:poi|red|per|tem)_fused_(.*?)_?\d*$", name)
    if fused:
        return " + ".join(re.sub(r"_?native_layer_norm", " layer_norm", fused[1]).strip("_ ").split("_"))[:60]
    plain = re.sub(r"^void |<.*|\(.*", "", name)
    return plain.split("::")[-1][:40]


def shares(kernels: Sequence[Kernel]) -> str:
    total = sum(kernel.us for kernel in kernels)
    rows = [[kind(k.name), short(k.name), f"{k.us:.1f}", f"{100 * k.us / total:.1f} %"] for k in kernels]
    return table(["", "kernel", "us", "share"], [*rows, ["", f"{len(kernels)} kernels", f"{total:.1f}", ""]])


def picture(blocks: Mapping[str, Sequence[Kernel]], path: Path) -> None:
    """A line for each way: its kernels in their order, each as wide as its time."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    figure, axes = pyplot.subplots(figsize=(14, 1.5 + 0.75 * len(blocks)))
    for line, kernels in enumerate(blocks.values()):
        at = 0.0
        for kernel in kernels:
            axes.barh(line, kernel.us, left=at, height=0.6, color=COLOURS[kind(kernel.name)], edgecolor="white", linewidth=0.7)
            at += kernel.us
        widest = max(sum(k.us for k in each) for each in blocks.values())
        at = 0.0
        for kernel in kernels:
            room = int(150 * kernel.us / widest)
            if room > 3:
                axes.text(at + kernel.us / 2, line, short(kernel.name)[:room], ha="center", va="center", fontsize=5)
            at += kernel.us
        axes.text(at, line, f"  {at / 1e3:.2f} ms, {len(kernels)} kernels", va="center", fontsize=7)
    axes.set_yticks(range(len(blocks)), list(blocks), fontsize=8)
    axes.invert_yaxis()
    axes.set_xlabel("us of one block on the GPU, kernels in their order")
    axes.margins(x=0.12)
    axes.legend(
        handles=[Patch(color=c, label=name) for name, c in COLOURS.items()],
        fontsize=7,
        ncols=8,
        loc="upper right",
        bbox_to_anchor=(1, 1.15),
    )
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
