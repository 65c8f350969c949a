"""Host time of a model without a GPU: a driver and a cuBLAS that do nothing, so that what is left is what the CPU does.

    python -m bench.host_steps
    python -m bench.host_steps --ways use_fdora --profile 40
    python -m bench.host_steps --alone

The models of bench.issue_time, tiny, on the CPU: torch's own operators compute, which costs little at this size; fdora's plans
run through walk.c for an H200 and launch nothing, so no value means anything. us for each adapted linear and beyond the frozen
model's, also as a share of LoRA's; calls of Python and of C functions for each adapted linear, and how many of fdora's files
they are in, counted in one forward. ``--alone``: us of q, k and v, of o and of the MLP of one layer, each in a loop, the least
of many, in time of this process: what others do on the machine moves it least.
"""

from __future__ import annotations

import os
import statistics
import sys
import time

os.environ["TRITON_INTERPRET"], os.environ["FDORA_BACKEND"] = "1", "triton"  # before fdora: kernels without CUDA

import torch  # noqa: E402
from triton.runtime.build import compile_module_from_src  # noqa: E402

from bench.decoder import LINEARS  # noqa: E402
from bench.issue_time import PARTS, excess, issue, profiled  # noqa: E402
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


def alone(way: Way) -> dict[str, float]:
    """us of CPU time of the parts of the first layer, inside of a forward of the model."""
    layer, found = way.model.layers[0], {}
    q, k, v, o = (getattr(layer.self_attn, f"{name}_proj") for name in "qkvo")
    x = way.x.detach().requires_grad_()
    parts = {"q, k, v": lambda: (q(x), k(x), v(x)), "o": lambda: o(x), "MLP": lambda: layer.mlp(x)}

    def measure(*_) -> None:
        for name, part in parts.items():
            taken = []
            for _ in range(40):
                start = time.process_time()
                for _ in range(200):
                    part()
                taken.append((time.process_time() - start) / 200)
            found[name] = 1e6 * min(taken)

    hook = layer.register_forward_pre_hook(measure)
    way.optimize()
    way.loss()
    hook.remove()
    return found


def calls(way: Way) -> tuple[int, int, int]:
    """Of Python functions and of C functions in one forward, and the files of fdora among them."""
    counts = {"call": 0, "c_call": 0}
    files = set()

    def count(frame, event, argument):
        if event in counts:
            counts[event] += 1
            files.add(frame.f_code.co_filename)

    way.optimize()
    sys.setprofile(count)
    way.loss()
    sys.setprofile(None)
    return counts["call"], counts["c_call"], sum(file.startswith(PACKAGE) for file in files)


def measure(run: Run) -> None:
    options = run.options
    torch.set_num_threads(1)
    pretend()
    cell, count = Cell("tiny", 128, 16), options.layers * len(LINEARS)
    ways = build(cell, options, run.failed)
    inputs(cell, ways, options)
    if options.alone:
        run.add(*({"way": name, "us": (way.loss(), alone(way))[1]} for name, way in ways.items()))
        return
    turns = [{name: issue(way, "cpu") for name, way in ways.items()} for _ in range(options.steps + 5)][5:]
    us = {
        kind: {n: {p: of([1e3 * turn[n][i] for turn in turns]) / count for i, p in enumerate(PARTS)} for n in ways}
        for kind, of in (("us", statistics.median), ("fastest us", min))
    }
    beyond = excess(us["us"])
    for name, way in ways.items():
        python, c, files = calls(way)
        row = {"way": name, "python_calls": python / count, "c_calls": c / count, "files": files}
        run.add(row | {kind: found[name] for kind, found in us.items()} | {"us beyond frozen": beyond.get(name, {})})
    for name, way in ways.items() if options.profile else ():
        print(name)
        profiled(way, "cpu", 20).print_stats(options.profile)


OPTIONS = {
    **stack(8, WAYS, seq=None),
    "--steps": (60, "of each way"),
    "--alone": (False, "only parts of one layer in loops"),
    "--profile": (0, "show that many lines of a profile of each way"),
}


main = Suite(measure, OPTIONS)
