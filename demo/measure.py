"""What a step costs: its time and its peak memory."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter

import torch
from torch.profiler import ProfilerActivity, profile


def timed(step: Callable[[], float], device: torch.device) -> tuple[float, float]:
    """What the step returns, and its seconds; on a GPU until the last kernel is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    start = perf_counter()
    result = step()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return result, perf_counter() - start


def peak_bytes(step: Callable[[], object], device: torch.device) -> int:
    """The most that a step holds beside what was there before it, as torch's own allocator counts it."""
    step()  # the first call also allocates what a library keeps for good, such as a workspace
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        step()
        return torch.cuda.max_memory_allocated(device) - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        step()
    with TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        trace.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    # Each allocation and each release is an event that says how much is allocated after it.
    changes = sorted((e["ts"], e["args"]) for e in events if e["name"] == "[memory]" and e["args"]["Device Type"] == 0)
    totals = [args["Total Allocated"] for _, args in changes]
    return max(totals) - (totals[0] - changes[0][1]["Bytes"])
