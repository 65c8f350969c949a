"""Kernels of a call as torch.profiler sees them: in order, named, timed; as a table."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from bench.clock import synchronize
from bench.table import table


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


def by_name(kernels: Sequence[Kernel], layers: float) -> list[Kernel]:
    """The time that one layer spends in the kernels of each name, the longest first."""
    total = {}
    for kernel in kernels:
        total[kernel.name] = total.get(kernel.name, 0.0) + kernel.us / layers
    return [Kernel(*each) for each in sorted(total.items(), key=lambda each: -each[1])]


def short(name: str) -> str:
    """What a kernel does: of Inductor's, the operations that fell together; of others, the name without its templates."""
    fused = re.match(r"triton_(?:poi|red|per|tem)_fused_(.*?)_?\d*$", name)
    if fused:
        return " + ".join(re.sub(r"_?native_layer_norm", " layer_norm", fused[1]).strip("_ ").split("_"))[:60]
    plain = re.sub(r"^void |<.*|\(.*", "", name)
    return plain.split("::")[-1][:40]


def shares(kernels: Sequence[Kernel]) -> str:
    total = sum(kernel.us for kernel in kernels)
    return table(["kernel", "us", "share"], [[short(k.name), f"{k.us:.1f}", f"{100 * k.us / total:.1f} %"] for k in kernels])
