"""What a GPU can do, as far as a plan asks."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple, TypeVar

import torch

from fdora._recording import active
from fdora.triton.runtime.private import HAS_PDL
from fdora.triton.runtime.private import INTERPRETED as INTERPRETED

T = TypeVar("T")


class Device(NamedTuple):
    """The facts of one GPU that decide between plans."""

    gpu: int  # its number; -1 where kernels are interpreted on a CPU
    capability: int  # 90 for an H100; 0 for what is not an NVIDIA GPU
    num_sms: int
    supports_pdl: bool  # a kernel may start before the one ahead of it ends, and wait inside (programmatic dependent launch)


class _Devices(dict[torch.device, Device]):
    """Each device that was asked for; of tensors without data the one that is recorded, which is not kept."""

    def __missing__(self, device: torch.device) -> Device:
        if device.type == "meta":
            noted = active()
            return _facts_of(device) if noted is None else noted.device
        self[device] = found = _facts_of(device)
        return found


device_of = _Devices().__getitem__


def _facts_of(device: torch.device) -> Device:
    if device.type != "cuda" or not torch.cuda.is_available():  # the second: fake tensors
        return Device(-1, 0, 2, False)  # a few programs share the tiles where kernels are interpreted
    index = torch.cuda.current_device() if device.index is None else device.index
    properties = torch.cuda.get_device_properties(index)
    capability = 0 if torch.version.hip else 10 * properties.major + properties.minor
    return of_gpu(index, capability, properties.multi_processor_count)


def of_gpu(gpu: int, capability: int, num_sms: int) -> Device:
    """What follows from these numbers."""
    return Device(gpu, capability, num_sms, HAS_PDL and capability >= 90)


def beside_others() -> bool:
    """Whether NCCL's kernels may run beside ours. Asked when a plan is made; one from before is as right, and slower then."""
    group = torch.distributed
    return group.is_available() and group.is_initialized() and group.get_world_size() > 1


def by_another_thread(make: Callable[[], T], device: torch.device) -> T:
    """What ``make`` returns, which may stay: before it captures, Inductor has this thread allocate from a pool in which nothing
    may be left but the results of its graph (reduce-overhead). For the stream of now."""
    if device.type != "cuda":
        return make()
    stream = torch.cuda.current_stream(device)

    def made() -> T:
        with torch.cuda.stream(stream):
            return make()

    with ThreadPoolExecutor(1) as other:
        return other.submit(made).result()


def cdiv(a: int, b: int) -> int:
    """Tiles of b in a."""
    return -(-a // b)


MOST_ROWS = 65_535  # CUDA starts no more on the second axis of a grid; on the first 2^31 - 1


def grid_of(columns: int, rows: int, parts: int = 1) -> tuple[tuple[int, ...], bool]:
    """A grid of programs, and whether it is flat: on one axis, row by row, where the second has no room; a division in each.
    The third axis has ``parts``, where there are several."""
    flat = rows > MOST_ROWS
    first, second = (columns * rows, 1) if flat else (columns, rows)
    if parts > 1:
        return (first, second, parts), flat
    return ((first,) if flat else (first, second)), flat


def is_tma_compatible(t: Any) -> bool:
    """What the copy engine asks of a matrix: adjacent columns, and 16 bytes as the unit of its address and of its rows."""
    pitch, columns = t.stride
    return columns == 1 and pitch * t.itemsize % 16 == 0 and t.aligned and pitch >= t.shape[1]
