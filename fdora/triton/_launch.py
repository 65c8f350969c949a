"""What every kernel file needs around its launches."""

from __future__ import annotations

import os
import threading
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

try:  # Triton 3.5 and later
    from triton.language.extra.cuda import gdc_launch_dependents as gdc_launch_dependents
    from triton.language.extra.cuda import gdc_wait as gdc_wait

    HAS_PDL = True
except ImportError:
    HAS_PDL, gdc_launch_dependents, gdc_wait = False, None, None

SUM_N, SUM_T = 32, 32
PLAIN = (Tensor, torch.nn.Parameter)
_runtime = triton.knobs.runtime


def rows_of(t: Tensor) -> Tensor:
    """(M, N) with its columns next to each other in memory, as the kernels read it; rows may be any distance apart."""
    return t if t.stride(-1) == 1 or (t.shape[-1] == 1 and t.stride(-1) == 0) else t.contiguous()


_built: dict[tuple, tuple] = {}
INTERPRET = os.environ.get("TRITON_INTERPRET") == "1"
DIRECT = torch.version.cuda is not None and not INTERPRET
writing = threading.local()  # .program: where _repeat.py writes down what an op does, while it runs for the first time


def launch(kernel: Any, grid: tuple[int, ...], args: tuple, consts: tuple, num_warps: int, num_stages: int = 3,
           pdl: bool = False) -> tuple | None:  # fmt: skip
    """``kernel[grid](*args, *consts)``, with what Triton looks up on every call remembered.

    ``consts`` are the kernel's last parameters, all constexpr; ``args`` the ones before. Triton binds by name, specialises and
    hashes on each launch: 27 us for a kernel with 17 arguments on the host of an H100, half of it before the driver is called.
    The key below tells apart everything Triton tells apart: dtypes, 16-byte alignment, integers that are 1, divisible
    by 16 or wide. Pointers go in as integers, which spares a query to the driver for each. Returns what it remembers.
    """
    program = getattr(writing, "program", None)
    if program is not None:
        return program.launch(kernel, grid, args, consts, num_warps, num_stages, pdl)
    if not DIRECT or hooked():
        launch_by_name(kernel, grid, args, consts, num_warps, num_stages, pdl)
        return None
    device = torch.cuda.current_device()
    key: list = [kernel, device, consts, num_warps, num_stages, pdl]
    values: list = []
    seen, value = key.append, values.append
    for a in args:
        kind = type(a)
        if kind is int:
            seen(1 if a == 1 else (a > 0x7FFFFFFF, a & 15 == 0))
            value(a)
        elif a is None or kind is float:
            seen(kind)
            value(a)
        elif kind is TensorDescriptor:
            seen(a.base.dtype)
            value(a)
        else:
            pointer = a.data_ptr()
            seen(a.dtype)
            seen(pointer & 15 == 0)
            value(pointer)
    found = _built.get(tuple(key))
    if found is None:
        built = launch_by_name(kernel, grid, args, consts, num_warps, num_stages, pdl)
        found = _built[tuple(key)] = (built.run, built.function, built.packed_metadata)
        return found
    run, function, metadata = found
    x, y, z = (*grid, 1, 1)[:3]
    run(x, y, z, torch._C._cuda_getCurrentRawStream(device), function, metadata, None, None, None, *values, *consts)
    return found


def launch_by_name(
    kernel: Any, grid: tuple[int, ...], args: tuple, consts: tuple, num_warps: int, num_stages: int, pdl: bool
) -> Any:
    extra = {"launch_pdl": True} if pdl else {}
    return kernel[grid](*args, *consts, num_warps=num_warps, num_stages=num_stages, **extra)


def hooked() -> bool:
    """A profiler listens to launches: it gets them the ordinary way."""
    enter, leave = _runtime.launch_enter_hook, _runtime.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave))


@triton.jit
def _sum_kernel(partial, out, N, strips, SQRT: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_T: tl.constexpr):
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    t = tl.arange(0, BLOCK_T)
    acc = tl.zeros((BLOCK_N,), tl.float32)
    for t0 in range(0, strips, BLOCK_T):
        mask = (t0 + t < strips)[:, None] & (n < N)[None, :]
        acc += tl.sum(tl.load(partial + (t0 + t)[:, None].to(tl.int64) * N + n[None, :], mask=mask, other=0.0), axis=0)
    tl.store(out + n, tl.sqrt_rn(acc) if SQRT else acc, mask=n < N)


def column_sums(partial: Tensor, out: Tensor | None = None, sqrt: bool = False) -> Tensor:
    """(strips, N) float32 -> (N,), added in the same order every time; optionally the root."""
    strips, N = partial.shape
    out = torch.empty(N, device=partial.device, dtype=torch.float32) if out is None else out
    if N:
        launch(_sum_kernel, (cdiv(N, SUM_N),), (partial, out, N, strips), (sqrt, SUM_N, SUM_T), 4)
    return out


def traced(t: Tensor) -> bool:
    """Whether torch must see an op: under a compiler, torch.func or a tensor subclass.

    Otherwise the launcher is called as plain Python. The op costs 60 us more by itself, and 1 ms in a training loop, where
    it takes the interpreter lock again while the autograd thread still holds it (H100 host, torch 2.11).
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active():
        return True
    return type(t) not in PLAIN


def fits_tma(t: Tensor) -> bool:
    """What the copy engine asks of a matrix: adjacent columns, and 16 bytes as the unit of its address and of its rows."""
    pitch = t.stride(0) * t.element_size()
    return t.stride(1) == 1 and pitch % 16 == 0 and t.data_ptr() % 16 == 0 and t.stride(0) >= t.shape[1]


def cdiv(a: int, b: int) -> int:
    """Tiles of b in a. (Triton's own went through four Python calls, for 1.5 us.)"""
    return -(-a // b)


@lru_cache
def capability(device: torch.device) -> int:
    """90 for an H100; 0 for what is not an NVIDIA GPU."""
    if device.type != "cuda" or torch.version.hip:
        return 0
    major, minor = torch.cuda.get_device_capability(device)
    return 10 * major + minor


@lru_cache
def overlaps(device: torch.device) -> bool:
    """Whether a kernel may start before the one ahead of it ends, and wait inside (programmatic dependent launch)."""
    return HAS_PDL and capability(device) >= 90


@lru_cache
def multiprocessors(device: torch.device) -> int:
    """How many; a few where kernels are interpreted."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2
