"""Every private name of Triton and of CUDA's driver that fdora uses. What a new Triton can break, it breaks here.

Kernels always start the public way, ``kernel[grid](...)``, the first time. Only what that call returns, a compiled kernel,
is looked into, and only to start it again without Triton's Python: its function, its threads and shared memory, and the
types of its parameters. The driver itself says how many parameters a function has and of which sizes (cuFuncGetParamInfo):
where that is not what the types say, or anything here is missing, the public way remains.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import Any, NamedTuple

import torch
import triton

IS_3_4 = triton.__version__.startswith("3.4.")
HAS_PDL = not IS_3_4  # it has the functions, and its compiler cannot call them
NARROW = 16 if IS_3_4 else 8  # columns that a product has at least
if HAS_PDL:
    from triton.language.extra.cuda import gdc_launch_dependents as gdc_launch_dependents
    from triton.language.extra.cuda import gdc_wait as gdc_wait
else:
    gdc_launch_dependents = gdc_wait = None

_knobs = triton.knobs.runtime
INTERPRETED = bool(_knobs.interpret)
# Options of every kernel: a multiplication and an addition are one instruction. Triton 3.10 changes the default.
OPTIONS = {"enable_fp_fusion": True}
# Stages of a loop whose product takes its first operand from registers (a sum that is rounded, say): on sm_90 such a product
# may read them when the next trip has written them, where ptxas is older than 13.3, as Triton 3.6's (triton-lang/triton#9433).
# With one stage each product is waited for.
NOT_AHEAD = 1
# dtype -> CUtensorMapDataType, cudaDataType_t
TENSOR_MAP_TYPE = {torch.float16: 6, torch.float32: 7, torch.bfloat16: 9, torch.float8_e4m3fn: 0}
CUDA_TYPE = {torch.float32: 0, torch.float16: 2, torch.bfloat16: 14}
COMPUTE_32F = 68
MAX_SHARED = 232_448  # above it a launch needs an attribute that only newer drivers know


def has_launch_hooks() -> bool:
    """Whether somebody listens to launches, or debugs them: they get them the public way."""
    enter, leave = _knobs.launch_enter_hook, _knobs.launch_exit_hook
    return bool(getattr(enter, "calls", enter) or getattr(leave, "calls", leave) or _knobs.debug)


@contextmanager
def compiling_in_threads() -> Iterator[None]:
    """Inside, ``kernel.warmup(...)`` asks for what threads compile, and the end waits for all of it. Where Triton has no
    such mode (3.6 has it), each call compiles before it returns; interpreted, there is nothing to compile.

    Kernels are parsed one at a time: two threads in ast.parse may end in a SystemError ("AST constructor recursion depth
    mismatch", cpython issue 106905; seen in Python 3.11.7)."""
    mode = getattr(triton, "AsyncCompileMode", None)
    if mode is None:
        yield
        return
    parse, one = triton.JITFunction.parse, Lock()

    def alone(kernel: Any) -> Any:
        with one:
            return parse(kernel)

    triton.JITFunction.parse = alone
    try:
        with mode(ThreadPoolExecutor()):
            yield
    finally:
        triton.JITFunction.parse = parse


class Compiled(NamedTuple):
    """What starting a compiled kernel takes."""

    function: int
    threads: int
    shared: int
    types: tuple[str, ...]  # of all parameters, "constexpr" where it has none at run time
    descriptors: tuple[dict, ...]  # how each tensor descriptor was lowered
    scratch: int  # how many pointers follow that we pass as 0
    owner: Any  # the kernel: its death unloads the function


def look_into(built: Any) -> Compiled | None:
    """None where this is not a kernel of a kind that is known to start without Triton's launcher."""
    try:
        meta = built.metadata
        plain = meta.num_ctas == 1 and not getattr(meta, "launch_cooperative_grid", False) and meta.shared <= MAX_SHARED
        scratch = getattr(meta, "global_scratch_size", 0) or getattr(meta, "profile_scratch_size", 0)
        types = tuple(built.src.signature.values())
        descriptors = tuple(getattr(meta, "tensordesc_meta", None) or ())
        if not plain or scratch or not isinstance(built.function, int):
            return None
        sizes = _sizes(types)
        have = _parameter_sizes(built.function)
        if sizes is None or have is None or have[: len(sizes)] != sizes:
            return None
        extra = have[len(sizes) :]
        if extra not in ([8], [8, 8], []):
            return None
        return Compiled(built.function, 32 * meta.num_warps, meta.shared, types, descriptors, len(extra), built)
    except (AttributeError, TypeError):
        return None


def _sizes(types: tuple[str, ...]) -> list[int] | None:
    """Bytes of each parameter as Triton's launcher passes them: a descriptor is a map, two int32 and two int64."""
    out: list[int] = []
    for kind in types:
        if kind == "constexpr":
            continue
        if not isinstance(kind, str):
            return None
        if kind.startswith("tensordesc"):
            out += [128, 4, 4, 8, 8]
        elif kind[0] == "*":
            out.append(8)
        elif kind in _PACK:
            out.append(struct.calcsize(_PACK[kind]))
        else:
            return None
    return out


_PACK = {"i32": "<i", "u32": "<I", "i64": "<q", "u64": "<Q", "fp32": "<f", "f32": "<f"}


def packing(kind: str) -> Callable[[int], bytes]:
    """What gives the bytes of a number as a parameter of this type."""
    return struct.Struct(_PACK[kind]).pack


@lru_cache(1)
def _driver() -> Any:
    return ctypes.CDLL("libcuda.so.1")


def enter_context() -> None:
    """Makes the context of the current GPU this thread's, as Triton's own launcher does."""
    number, context = ctypes.c_int(), ctypes.c_void_p()
    error = _driver().cuDeviceGet(ctypes.byref(number), current_device())
    error = error or _driver().cuDevicePrimaryCtxRetain(ctypes.byref(context), number)
    error = error or _driver().cuCtxSetCurrent(context)
    if error:
        raise RuntimeError(f"fdora: a thread has no context of CUDA and gets none, error {error}")


def _parameter_sizes(function: int) -> list[int] | None:
    try:
        ask = _driver().cuFuncGetParamInfo
    except (OSError, AttributeError):  # a driver before CUDA 12.4
        return None
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while ask(ctypes.c_void_p(function), ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size)) == 0:
        sizes.append(size.value)
    return sizes


def tensor_map(how: dict, dtype: torch.dtype, shape: tuple[int, ...], pitch: int, address: int) -> bytes | None:
    """The descriptor of a matrix in 128 bytes, as Triton's launcher would encode it; None where it would do otherwise."""
    if how.get("fp4_padded") or how.get("is_im2col") or how.get("elem_size") != dtype.itemsize:
        return None
    room = ctypes.create_string_buffer(256)
    at = -ctypes.addressof(room) % 64
    block = how["block_size"]
    u32, u64 = ctypes.c_uint32, ctypes.c_uint64
    interleave, promotion, fill = 0, 2, 0  # none; 128 bytes of L2; zeros outside
    error = _driver().cuTensorMapEncodeTiled(
        ctypes.byref(room, at),
        TENSOR_MAP_TYPE[dtype],
        u32(2),
        ctypes.c_void_p(address),
        (u64 * 2)(shape[1], shape[0]),
        (u64 * 1)(pitch * dtype.itemsize),
        (u32 * 2)(block[1], block[0]),
        (u32 * 2)(1, 1),
        interleave,
        how["swizzle"],
        promotion,
        fill,
    )
    return None if error else room.raw[at : at + 128]


def _address(library: Any, name: str) -> int:
    return ctypes.cast(getattr(library, name), ctypes.c_void_p).value or 0


@lru_cache(1)
def walker() -> Any:
    """The module of walk.c, set up; None where it cannot be: no compiler, or a torch before 2.10."""
    capsule = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if capsule is None:
        return None
    try:
        from triton.runtime.build import compile_module_from_src

        source = "\n".join([(Path(__file__).parent / name).read_text() for name in ("plain.c", "walk.c")])
        module = compile_module_from_src(src=source, name="fdora_walk", library_dirs=[], include_dirs=[], libraries=[])
        launch = replace = gemm = 0
        empty: Any = _empty_anywhere
        handle: Any = None
        if torch.version.cuda and torch.cuda.is_available():
            launch, replace = (_address(_driver(), name) for name in ("cuLaunchKernelEx", "cuTensorMapReplaceAddress"))
            cublas = ctypes.CDLL(f"libcublas.so.{torch.version.cuda.partition('.')[0]}")  # torch has loaded it
            gemm = _address(cublas, "cublasGemmEx")
            empty, handle = _empty_on_gpu(), torch._C._cuda_getCurrentBlasHandle
        module.setup(capsule, torch.Tensor, torch.nn.Parameter, empty, handle, enter_context, launch, replace, gemm)
    except Exception as error:  # whatever a compiler or a loader says: the walk in Python remains
        global why_no_walker
        why_no_walker = f"{type(error).__name__}: {error}"
        return None
    return module


why_no_walker = "torch is older than 2.10" if not hasattr(torch.Tensor, "__dlpack_c_exchange_api__") else ""


def _empty_anywhere(size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype)


def _empty_on_gpu() -> Any:
    """torch.empty_strided on the current GPU. Inductor's own takes a third of the time: it parses no keywords."""
    try:
        from torch._C._dynamo.guards import _empty_strided_cuda  # type: ignore[attr-defined]
    except ImportError:
        return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device="cuda")
    return _empty_strided_cuda


current_device: Any = getattr(torch._C, "_cuda_getDevice", None)  # a torch without CUDA has none of them
exchange_device: Any = getattr(torch._C, "_cuda_exchangeDevice", None)
raw_stream: Any = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def usual_math() -> bool:
    """Whether cuBLAS may multiply as torch lets it by default; else torch's own products, which obey the setting, run."""
    bf16, fp16 = _bf16_reductions(), _fp16_reductions()
    if type(bf16) is tuple:  # torch 2.10 and later
        bf16, fp16 = bf16[0], fp16[0]
    return bool(bf16 and fp16) and not _fp16_sums()


_bf16_reductions: Any = torch._C._get_cublas_allow_bf16_reduced_precision_reduction
_fp16_reductions: Any = torch._C._get_cublas_allow_fp16_reduced_precision_reduction
_fp16_sums: Any = getattr(torch._C, "_get_cublas_allow_fp16_accumulation", bool)
