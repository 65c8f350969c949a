"""Calls of Python in a model without a GPU: a driver and a cuBLAS that do nothing, so that what is left is what the CPU does.

    python -m bench.host_steps --ways peft_lora,use_fdora

The models of bench.steps, tiny, on the CPU: torch's own operators compute; fdora's plans run through walk.c for an H200 and
launch nothing, so no value means anything. For each adapted linear of a step: calls of Python and of C functions, and how many
more where its length is new; and the files of fdora that they are in.
"""

from __future__ import annotations

import os
import sys
import threading

os.environ["TRITON_INTERPRET"], os.environ["FDORA_BACKEND"] = "1", "triton"  # before fdora: kernels without CUDA

import torch  # noqa: E402
from triton.runtime.build import compile_module_from_src  # noqa: E402

from bench.decoder import LINEARS  # noqa: E402
from bench.steps import WAYS, Cell, Way, build, inputs  # noqa: E402
from bench.suite import Run, Suite, stack  # noqa: E402
from fdora import _dispatch, _facts, _plain  # noqa: E402
from fdora.triton import tree  # noqa: E402
from fdora.triton.runtime import native, private, walk  # noqa: E402
from fdora.triton.runtime.device import Device  # noqa: E402
from fdora.triton.runtime.plan import Launch, Tile  # noqa: E402
from fdora.triton.runtime.private import Compiled  # noqa: E402

H200 = Device(0, 90, 132, True)
PACKAGE = os.path.dirname(_facts.__file__)
NOTHING = """
#define PY_SSIZE_T_CLEAN
#include <Python.h>
static int nothing(void) { return 0; }
static PyObject *address(PyObject *self, PyObject *ignored) { return PyLong_FromVoidPtr((void *)nothing); }
static PyMethodDef methods[] = {{"address", address, METH_NOARGS, ""}, {NULL, NULL, 0, NULL}};
static struct PyModuleDef definition = {PyModuleDef_HEAD_INIT, "fdora_nothing", NULL, -1, methods};
PyMODINIT_FUNC PyInit_fdora_nothing(void) { return PyModule_Create(&definition); }
"""


def pretend() -> None:
    """From now on plans are for an H200, count as compiled, and launch nothing."""
    from torch._C._dynamo.guards import _empty_strided_cpu

    _dispatch.TRITON_DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # the interpreter, which has none, runs nothing
    module = private.walker()
    if module is None:
        raise SystemExit(f"there is no C walk here: {private.why_no_walker}")
    source = compile_module_from_src(src=NOTHING, name="fdora_nothing", library_dirs=[], include_dirs=[], libraries=[])
    nothing = [source.address()] * 3
    module.setup(
        torch.Tensor.__dlpack_c_exchange_api__, torch.Tensor, torch.nn.Parameter, _empty_strided_cpu, int, int, *nothing
    )  # int() is 0
    for each in (walk, tree):
        each.device_of = lambda device: H200
    native._AVAILABLE, native._dummy = True, bool_of_one
    native.kernels_of, native.tensor_map = kernels_of, lambda *_: bytes(128)
    _facts.use(module.facts, module.places)
    _plain.use(module.follow, module.unchanged, module.operands)
    walk.current_device, walk.raw_stream, walk.usual_math = int, abs, bool_of_one


def bool_of_one(*_) -> bool:
    """In the place of usual_math: as many calls."""
    return bool(0 == 0 and abs(1)) and not False


def kernels_of(plan):
    return [*map(compiled, native.launches_of(plan))]


def compiled(step: Launch) -> Compiled:
    """As if it were."""
    types = [
        "fp32" if isinstance(a, float) else "i64" if type(a) is int else "constexpr" if a is None else "*fp32"
        for a in step.args
    ]
    maps = tuple({} for a in step.args if isinstance(a, Tile))
    return Compiled(1, 32 * step.num_warps, 0, tuple(types), maps, 0, None)


def calls(way: Way) -> tuple[int, int, int]:
    """Of Python functions and of C functions in one step, and the files of fdora among them."""
    counts, files = {"call": 0, "c_call": 0}, set()

    def count(frame, event, argument):
        if event in counts:
            counts[event] += 1
            files.add(frame.f_code.co_filename)

    threading.setprofile(count)
    sys.setprofile(count)
    way.step()
    sys.setprofile(None)
    threading.setprofile(None)
    return counts["call"], counts["c_call"], sum(file.startswith(PACKAGE) for file in files)


def measure(run: Run) -> None:
    """Lengths of one class (fdora/triton/runtime/rows.py); Triton's kernels are others where 16 does not divide."""
    options = run.options
    torch.set_num_threads(1)
    pretend()
    count = options.layers * len(LINEARS)
    for name, way in build(Cell("tiny", 512, 16), options, run.failed).items():
        for length in (512, 496, 512, 496):
            inputs(Cell("tiny", length, 16), {name: way}, options)
            way.step()
        inputs(Cell("tiny", 464, 16), {name: way}, options)
        new, again = calls(way), calls(way)
        more = [round((a - b) / count, 1) for a, b in zip(new, again, strict=True)]
        row = {
            "way": name,
            "python_calls": round(again[0] / count, 1),
            "c_calls": round(again[1] / count, 1),
            "files": again[2],
        }
        run.add(row | {"python_calls_of_a_new_length": more[0], "c_calls_of_a_new_length": more[1]})


main = Suite(measure, stack(2, WAYS, seq=None))
