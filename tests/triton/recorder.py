"""walk.c on a machine without a GPU: what stands for the driver and for cuBLAS, and notes what it is asked."""

import ctypes
import threading
from collections import defaultdict
from contextlib import contextmanager
from ctypes import POINTER, c_float, c_int, c_uint32, c_void_p

import torch

from fdora.triton.runtime import native, private
from fdora.triton.runtime.plan import Array, Launch, Tile
from fdora.triton.runtime.private import Compiled

DTYPES = {0: torch.float32, 2: torch.float16, 14: torch.bfloat16}
NAMES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.int64: "i64",
    torch.int32: "i32",
    torch.int16: "i16",
    torch.int8: "i8",
    torch.uint8: "u8",
    torch.float8_e4m3fn: "fp8e4nv",
}
INVALID_VALUE = 7


class Config(ctypes.Structure):  # CUlaunchConfig
    _fields_ = [
        ("grid", c_uint32 * 3),
        ("block", c_uint32 * 3),
        ("shared", c_uint32),
        ("stream", c_void_p),
        ("attributes", c_void_p),
        ("count", c_uint32),
    ]


class Attribute(ctypes.Structure):  # CUlaunchAttribute
    _fields_ = [("id", c_uint32), ("pad", c_uint32), ("flag", c_int)]


def compiled_of(step, number, scratch=0):
    """What compiling this launch would give, but for the code."""
    types = []
    for a in (*step.args, *(None for _ in step.constexprs)):
        if isinstance(a, Tile):
            types.append(f"tensordesc<{NAMES[a.array.dtype]}{list(a.block)}>")
        elif isinstance(a, Array):
            types.append("*" + NAMES[a.dtype])
        elif a is None or (type(a) is int and a == 1):
            types.append("constexpr")
        elif type(a) is int:
            types.append("i64" if a > 0x7FFFFFFF else "i32")
        else:
            types.append("fp32")
    maps = tuple({"block_size": list(a.block), "swizzle": 3} for a in step.args if isinstance(a, Tile))
    return Compiled(number, 32 * step.num_warps, 1000 + number, tuple(types), maps, scratch, Owner())


class Owner:
    """Stands for a compiled kernel."""


def fake_map(how, dtype, shape, pitch, address):
    """128 bytes that depend on everything that a real one does."""
    return repr((sorted(how.items()), str(dtype), shape, pitch, address)).encode()[:128].ljust(128, b".")


class Recorder:
    """Every call of each thread, in order; a product is also computed where ``compute`` says so."""

    def __init__(self, compute=True):
        self.calls, self.sizes, self.errors, self.made = defaultdict(list), {}, {}, defaultdict(list)
        self.compute = compute
        self.functions = (
            ctypes.CFUNCTYPE(c_int, POINTER(Config), c_void_p, POINTER(c_void_p), c_void_p)(self.launch),
            ctypes.CFUNCTYPE(c_int, c_void_p, c_void_p)(self.replace),
            ctypes.CFUNCTYPE(
                c_int,
                c_void_p,
                *(c_int,) * 5,
                POINTER(c_float),
                c_void_p,
                c_int,
                c_int,
                c_void_p,
                c_int,
                c_int,
                POINTER(c_float),
                c_void_p,
                c_int,
                c_int,
                c_int,
                c_int,
            )(self.gemm),
        )
        self.addresses = [ctypes.cast(f, c_void_p).value for f in self.functions]

    @property
    def mine(self):
        return self.calls[threading.get_ident()]

    def empty(self, size, stride, dtype):
        made = torch.empty_strided(size, stride, dtype=dtype)
        self.made[threading.get_ident()].append(made)
        return made

    def enter(self):
        self.mine.append(("enter",))
        self.errors.pop("launch", None)

    def launch(self, config, function, params, extra):
        c = config.contents
        pdl = None
        if c.count:
            attribute = ctypes.cast(c.attributes, POINTER(Attribute)).contents
            pdl = (c.count, attribute.id, attribute.flag)
        given = [ctypes.string_at(params[i], n) for i, n in enumerate(self.sizes.get(function, ()))]
        self.mine.append(("launch", function, tuple(c.grid), tuple(c.block), c.shared, c.stream, pdl, given, extra))
        return self.errors.get("launch", 0)

    def replace(self, at, address):
        ctypes.memmove(at, (address or 0).to_bytes(8, "little"), 8)
        return self.errors.get("replace", 0)

    def gemm(self, handle, ta, tb, m, n, k, alpha, a, type_a, lda, b, type_b, ldb, beta, c, type_c, ldc, how, algorithm):
        """Column by column, as cuBLAS has it: c = alpha op(a) op(b) + beta c, (m, k) (k, n) -> (m, n)."""
        self.mine.append(("gemm", handle, a, b, c, alpha[0], beta[0], (m, n, k), how, algorithm))
        if self.errors.get("gemm"):
            return self.errors["gemm"]
        if lda < max(1, k if ta else m) or ldb < max(1, n if tb else k) or ldc < max(1, m):
            return INVALID_VALUE
        if self.compute:
            left = matrix(a, DTYPES[type_a], (m, k), (lda, 1) if ta else (1, lda))
            right = matrix(b, DTYPES[type_b], (k, n), (ldb, 1) if tb else (1, ldb))
            out = matrix(c, DTYPES[type_c], (m, n), (1, ldc))
            total = alpha[0] * (left.double() @ right.double())
            out.copy_(total + beta[0] * out.double() if beta[0] else total)
        return 0


def matrix(address, dtype, shape, stride):
    """The memory there, as a tensor."""
    extent = 1 + sum((n - 1) * d for n, d in zip(shape, stride, strict=True))
    buffer = (ctypes.c_char * (extent * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype).as_strided(shape, stride)


TORCH = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None), torch.Tensor, torch.nn.Parameter


def setup_of(recorder, empty=None, handle=lambda: 77):
    return *TORCH, empty or recorder.empty, handle, recorder.enter, *recorder.addresses


@contextmanager
def recording(compute=True):
    """walk.c with a recorder in the place of the driver and of cuBLAS: yields the module and the recorder."""
    module, recorder = private.walker(), Recorder(compute)
    assert module is not None, private.why_no_walker
    module.setup(*setup_of(recorder))
    real, native.tensor_map = native.tensor_map, fake_map
    try:
        yield module, recorder
    finally:
        native.tensor_map = real
        module.setup(*TORCH, private._empty_anywhere, None, None, 0, 0, 0)


def assembled(plan, module, recorder, scratch=0):
    """The Program of a plan whose kernels are said to be compiled, and what was said."""
    steps = [step for step in plan.steps if isinstance(step, Launch)]
    kernels = [compiled_of(step, 100 + i, scratch) for i, step in enumerate(steps)]
    for c in kernels:
        recorder.sizes[c.function] = [*private._sizes(c.types), *[8] * scratch]
    return native.assemble(plan, kernels, module, 0), kernels
