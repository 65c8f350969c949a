"""The walk in C against the plan and against the walk in Python: on a CPU with recorders for the driver and cuBLAS, on a GPU for real."""

import gc
import inspect
import itertools
import random
import re
import struct
import subprocess
import sys
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.utils._pytree import tree_leaves

triton = pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime import jit  # noqa: E402

from fdora._facts import python_facts  # noqa: E402
from fdora.triton.runtime import native, private, walk  # noqa: E402
from fdora.triton.runtime.cost import Cost  # noqa: E402
from fdora.triton.runtime.device import Device  # noqa: E402
from fdora.triton.runtime.plan import Array, Launch, Product, Scalar, Tile  # noqa: E402
from tests import device  # noqa: E402
from tests.triton.drawn import NAMES, backward_of, calls  # noqa: E402
from tests.triton.marks import HALF, INTERPRETED, needs_gpu, needs_kernels  # noqa: E402, F401
from tests.triton.recorder import assembled, fake_map, recording, setup_of  # noqa: E402
from tests.triton.written import (  # noqa: E402
    BF16,
    FP16,
    FP32,
    alike,
    calls_of_coded_layers,
    calls_of_codes,
    calls_of_fp8,
    calls_of_groups,
    calls_of_linear,
    calls_of_weights,
    plan_of,
)

in_c = pytest.mark.skipif(
    not hasattr(torch.Tensor, "__dlpack_c_exchange_api__"),
    reason="walk.c needs torch 2.10 or newer, before it the walk in Python runs; `make test` installs 2.13",
)
# Interpreted kernels are Python functions, whose signature native.py need not read.
on_cpu = pytest.mark.skipif("device.NAME != 'cpu'", reason="changes what walk.c calls; runs with --device cpu")
GPU = Device(0, 90, 132, True)
STREAM = 4242


def memory_for(like):
    """A tensor of this form, at an address of this alignment."""
    if like is None:
        return None
    extent = 1 + sum((n - 1) * d for n, d in zip(like.shape, like.stride, strict=True)) if 0 not in like.shape else 0
    store = torch.zeros(extent + 16, dtype=like.dtype)
    t = store[0 if like.aligned else 1 :].as_strided(like.shape, like.stride)
    assert (t.data_ptr() % 16 == 0) == like.aligned or 0 in like.shape
    return t


def first_of(calls, wanted=lambda plan: True):
    """The first of these plans that is wanted, and tensors for it."""
    made = ((maker(tuple(likes), GPU, *options), likes) for maker, likes, options in calls)
    plan, likes = next((plan, likes) for plan, likes in made if wanted(plan))
    return plan, tuple(map(memory_for, likes))


def expected(plan, base, scalars, kernels, scratch=0):
    """What the driver and cuBLAS must be asked, from the plan alone; gemm's layouts are proved by computing."""

    def address(a):
        return base[a.slot] + a.offset * a.itemsize + (plan.temporaries[a.temp][0] if a.temp >= 0 else 0)

    each = iter(kernels)
    for step in plan.steps:
        if isinstance(step, Product):
            alpha = scalars[step.alpha.number] if isinstance(step.alpha, Scalar) else step.alpha
            yield {address(step.a), address(step.b)}, address(step.out), alpha, float(step.accumulate)
            continue
        c, params = next(each), []
        maps = iter(c.descriptors)
        for a in step.args:
            if isinstance(a, Array):
                params.append(struct.pack("<Q", address(a)))
            elif isinstance(a, Tile):
                t = a.array
                room = fake_map(next(maps), t.dtype, t.shape, t.stride[0], 0)
                params += [struct.pack("<Q", address(t)) + room[8:], *(struct.pack("<i", n) for n in t.shape)]
                params += [struct.pack("<q", d) for d in t.stride]
            elif isinstance(a, Scalar):
                params.append(struct.pack("<f", scalars[a.number]))
            elif isinstance(a, float):
                params.append(struct.pack("<f", a))
            elif type(a) is int and a != 1:
                params.append(struct.pack("<q" if a > 0x7FFFFFFF else "<i", a))
        params += [bytes(8)] * scratch
        grid, pdl = (*step.grid, 1, 1)[:3], (1, 6, 1) if step.pdl else None
        yield "launch", c.function, grid, (32 * step.num_warps, 1, 1), c.shared, STREAM, pdl, params, None


def small_calls():
    """Every kind of plan, in sizes that memory is cheap for."""
    for M, r in ((8, 16), (200, 16), (200, 200)):
        yield from itertools.islice(calls_of_linear(M, 96, 64, r, BF16), 0, None, 5)
    yield from itertools.islice(calls_of_linear(130, 37, 70, 20, FP16, FP32), 0, None, 7)
    yield from itertools.islice(calls_of_linear(40, 96, 64, 16, FP32), 0, None, 7)
    for M, dtype in ((8, BF16), (200, BF16), (40, FP32)):
        yield from calls_of_groups(M, 96, 64, 16, dtype)
    for r, (dtype, adapter) in itertools.product((8, 100), ((BF16, None), (BF16, FP32), (FP32, None))):
        yield from calls_of_weights(96, 128, r, dtype, adapter)
    yield from calls_of_codes(96, 128, 16, BF16)
    for M in (8, 200):
        yield from calls_of_coded_layers(M, 96, 512, 16, BF16)
        yield from calls_of_fp8(M, 96, 128, 16, BF16)


@in_c
@on_cpu
def test_every_pointer_scalar_and_integer_is_what_the_plan_says():
    kinds, count = set(), 0
    with recording(compute=False) as (module, recorder):
        for number, (maker, likes, options) in enumerate(small_calls()):
            if number % 3 == 1:  # an argument at an odd address
                likes = [like and like._replace(aligned=False) if i == 0 else like for i, like in enumerate(likes)]
            plan = maker(tuple(likes), GPU, *options)
            if any(type(step).__name__ == "Fill" for step in plan.steps):
                continue
            tensors = tuple(map(memory_for, likes))
            scalars, scratch = tuple(0.5 + i for i in range(len(plan.scalars))), number % 3
            program, kernels = assembled(plan, module, recorder, scratch)
            recorder.calls.clear()
            recorder.made.clear()
            results = program.run(tensors, scalars, STREAM)
            (made,), asked = recorder.made.values(), recorder.mine
            assert [(tuple(t.shape), t.stride(), t.dtype) for t in results] == [tuple(a)[1:] for a in plan.results]
            assert all(a is b for a, b in zip(results, made, strict=False))
            assert len(made) == len(results) + (plan.workspace > 0)
            assert not plan.workspace or (made[-1].dtype, made[-1].numel()) == (torch.uint8, plan.workspace)
            base = [0 if t is None else t.data_ptr() for t in (*tensors, *made)]
            want = list(expected(plan, base, scalars, kernels, scratch))
            assert len(asked) == len(want)
            for got, must, step in zip(asked, want, plan.steps, strict=True):
                if got[0] == "gemm":
                    assert ({got[2], got[3]}, got[4], got[5], got[6]) == must and got[1] == 77 and got[8:] == (68, -1)
                else:
                    assert got == must, step.kernel
                    kinds.add(step.kernel.__name__)
                count += 1
            del made, results
    assert count > 300 and len(kinds) == OF_LAYERS, kinds


OF_LAYERS = 33  # of these, what the calls above launch


def layouts(rows, columns, generator):
    """Matrices of every layout that a plan hands to cuBLAS: rows, columns, with gaps, as columns of a wider one."""

    def draw(*shape):
        return torch.randn(*shape, generator=generator)

    yield draw(rows, columns)
    yield draw(columns, rows).T
    yield draw(rows, columns + 5)[:, 2 : 2 + columns]
    yield draw(columns + 3, rows + 5)[1 : 1 + columns, 2 : 2 + rows].T
    yield draw(rows, 3 * columns)[:, ::3] if columns == 1 else draw(rows, columns)


@in_c
@on_cpu
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (FP16, FP16), (BF16, FP32)], ids=str)
@pytest.mark.parametrize("shape", [(7, 5, 3), (1, 5, 3), (7, 1, 3), (7, 5, 1), (1, 1, 1), (33, 64, 40)], ids=str)
def test_products_are_those_of_torch(shape, dtypes):
    """Computed from the pointers and integers that cuBLAS gets: layouts, alpha, adding onto, a part of a wider result."""
    (M, N, K), (dtype, out_dtype) = shape, dtypes
    generator = torch.Generator().manual_seed(0)
    near = dict(rtol=4 * torch.finfo(out_dtype).eps, atol=4 * torch.finfo(out_dtype).eps * K)
    with recording() as (module, recorder):
        for a, b in itertools.product(layouts(M, K, generator), layouts(K, N, generator)):
            a, b = (torch.empty_strided(t.shape, t.stride(), dtype=dtype).copy_(t) for t in (a, b))

            def write(plan, a, b):
                s = plan.scalar("s")
                a, b = plan.tokens(a) if a.stride[1] == 1 or a.shape[1] == 1 else plan.operand(a), plan.operand(b)
                plain, scaled, added = (plan.result(name, (M, N), out_dtype) for name in ("plain", "scaled", "added"))
                wide, turned = plan.result("wide", (M, N + 6), out_dtype), plan.result("turned", (N, M), out_dtype)
                plan.product(plain, a, b)
                plan.product(scaled, a, b, s)
                plan.product(added, a, b)
                plan.product(added, a, b, s, accumulate=True)
                plan.product(wide.columns(4, 4 + N), a, b)
                plan.product(turned, b.T, a.T)
                plan.product(plan.temp((M, N), out_dtype), a, b)

            plan = plan_of(write, walk.like(a), walk.like(b), device=GPU)
            tensors = tuple(
                t.clone(memory_format=torch.contiguous_format) if i in plan.copies else t for i, t in enumerate((a, b))
            )
            program, _ = assembled(plan, module, recorder)
            want = torch.mm(a.double(), b.double())
            for found in (program.run(tensors, (-1.5,), STREAM), walk._walk(plan, tensors, (-1.5,))):
                plain, scaled, added, wide, turned = (t.double() for t in found)
                for got, factor in ((plain, 1), (scaled, -1.5), (wide[:, 4 : 4 + N], 1), (turned.T, 1)):
                    torch.testing.assert_close(got, factor * want, **near)
                torch.testing.assert_close(added, -0.5 * want, rtol=2 * near["rtol"], atol=4 * near["atol"])


def two_products(plan, a, b):
    """(M, K) (K, K) twice: through the workspace."""
    a, b, s = plan.tokens(a), plan.operand(b), plan.scalar("s")
    out, middle = plan.result("out", a.shape, a.dtype), plan.temp(a.shape, a.dtype)
    plan.product(middle, a, b, s)
    plan.product(out, middle, b)


@in_c
@on_cpu
def test_threads_do_not_write_into_one_another():
    b, together = torch.randn(8, 8), threading.Barrier(4)
    with recording() as (module, recorder):
        plan = plan_of(two_products, alike(5, 8, dtype=FP32), walk.like(b), device=GPU)
        program, _ = assembled(plan, module, recorder)

        def many(seed):
            generator = torch.Generator().manual_seed(seed)
            together.wait()  # else the first worker may be through before there is a second
            for i in range(100):
                a = torch.randn(5, 8, generator=generator)
                (out,) = program.run((a, b), (float(seed + i),), STREAM)
                torch.testing.assert_close(out, (seed + i) * a @ b @ b, rtol=1e-4, atol=1e-2)
            return True

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(many, range(4)))
        assert len(recorder.calls) == 4


@in_c
@on_cpu
def test_errors_of_the_driver_become_errors_of_python():
    plan, tensors = first_of(calls_of_linear(200, 96, 64, 16, BF16))
    with recording(compute=False) as (module, recorder):
        program, _ = assembled(plan, module, recorder)
        counts = [sys.getrefcount(t) for t in tensors if t is not None]
        for what, code, message in (
            ("gemm", 13, "step 0 of a plan did not start, error 13"),
            ("launch", 700, "step 1 of a plan did not start, error 700"),
            ("replace", 1, "tensor map did not take its address, error 1"),
        ):
            recorder.errors = {what: code}
            recorder.calls.clear()
            with pytest.raises(RuntimeError, match=message):
                program.run(tensors, (0.5,), STREAM)
            assert len(recorder.mine) == {"gemm": 1, "launch": 2, "replace": 0}[what]  # nothing after it
        recorder.errors = {}
        made = [weakref.ref(t) for many in recorder.made.values() for t in many]
        recorder.made.clear()
        assert len(program.run(tensors, (0.5,), STREAM)) == 2  # the program is none the worse
        recorder.made.clear()
        gc.collect()
        assert counts == [sys.getrefcount(t) for t in tensors if t is not None] and not [r for r in made if r() is not None]
        for wrong in (
            (tensors[:-1], (0.5,), STREAM),
            (tensors, (), STREAM),
            (tensors, (0.5, 1.0), STREAM),
            (list(tensors), (0.5,), STREAM),
            (tensors, ("s",), STREAM),
            (tensors, (0.5,), "stream"),
            ((*tensors[:-1], 3), (0.5,), STREAM),
            (tensors, (0.5,)),
        ):
            with pytest.raises((TypeError, ValueError, RuntimeError, BufferError, AttributeError)):
                program.run(*wrong)


@in_c
@on_cpu
@pytest.mark.parametrize("stays", [False, True])
def test_a_thread_without_a_context_of_cuda_gets_one(stays):
    """Autograd's threads have none before something of CUDA's runtime ran there, and what runs first may be a plan."""
    plan, tensors = first_of(calls_of_linear(200, 96, 64, 16, BF16), lambda plan: isinstance(plan.steps[0], Launch))
    with recording(compute=False) as (module, recorder):
        program, _ = assembled(plan, module, recorder)
        recorder.errors = {"launch": 201}
        if stays:
            recorder.enter = lambda: recorder.mine.append(("enter",))
            module.setup(*setup_of(recorder))
            with pytest.raises(RuntimeError, match="step 0 of a plan did not start, error 201"):
                program.run(tensors, (0.5,), STREAM)
            assert [call[0] for call in recorder.mine] == ["launch", "enter", "launch"]
        else:
            program.run(tensors, (0.5,), STREAM)
            assert [call[0] for call in recorder.mine][:3] == ["launch", "enter", "launch"]
            assert len(recorder.mine) == len(plan.steps) + 2


@in_c
@on_cpu
def test_a_handle_or_memory_that_is_not_to_be_had():
    """An error of torch's comes through, whatever was made before it is let go."""
    plan = plan_of(two_products, alike(5, 8, dtype=FP32), alike(8, 8, dtype=FP32), device=GPU)
    tensors = torch.zeros(5, 8), torch.zeros(8, 8)
    with recording() as (module, recorder):
        program, _ = assembled(plan, module, recorder)
        left = []

        def no_memory(size, stride, dtype):
            if dtype == torch.uint8:
                raise torch.OutOfMemoryError("no room")
            made = recorder.empty(size, stride, dtype)
            left.append(weakref.ref(made))
            recorder.made.clear()
            return made

        module.setup(*setup_of(recorder, empty=no_memory))
        with pytest.raises(torch.OutOfMemoryError, match="no room"):
            program.run(tensors, (1.0,), STREAM)
        module.setup(*setup_of(recorder, handle=lambda: 1 / 0))
        with pytest.raises(ZeroDivisionError):
            program.run(tensors, (1.0,), STREAM)
        recorder.made.clear()
        assert left and not [r for r in left if r() is not None] and not recorder.mine


@in_c
@on_cpu
def test_a_program_keeps_its_kernels_and_nothing_else():
    with recording(compute=False) as (module, recorder):
        plan, tensors = first_of(calls_of_weights(96, 128, 8, BF16))
        program, kernels = assembled(plan, module, recorder)
        owners = [weakref.ref(c.owner) for c in kernels]
        refs = [weakref.ref(t) for t in (*tensors, *program.run(tensors, (0.5,), STREAM))]
        recorder.made.clear()
        del kernels, tensors
        gc.collect()
        assert all(owner() is not None for owner in owners) and not [r for r in refs if r() is not None]
        del program
        gc.collect()
        assert not [owner for owner in owners if owner() is not None]


@in_c
@on_cpu
def test_what_is_too_much_for_it_the_walk_in_python_runs(monkeypatch):
    """More tensors or layers than it has room for, sums of no terms, and a descriptor that cannot be encoded."""
    monkeypatch.setattr(native, "_AVAILABLE", True)
    monkeypatch.setattr(native, "_dummy", lambda index: 0)

    def many(count):
        def write(plan, *likes):
            a, *_ = map(plan.operand, likes)
            out = plan.result("out", (4, 4), FP32)
            for _ in range(count):
                plan.product(out, a, a, plan.scalar("s"))

        return plan_of(write, *[alike(4, 4, dtype=FP32)] * count, device=GPU)

    def filled(plan):
        plan.zero(plan.result("out", (4, 4), FP32))

    with recording(compute=False) as (module, recorder):
        assert native.program(many(module.MAX_SCALARS))
        assert native.program(many(module.MAX_SCALARS + 1)) is False
        with pytest.raises(ValueError, match="too many"):
            assembled(many(module.MAX_SCALARS + 1), module, recorder)
        wide = plan_of(lambda plan, *likes: [plan.operand(t) for t in likes], *[alike(4, 4)] * module.MAX_TENSORS, device=GPU)
        assert native.program(wide) is False
        assert native.program(plan_of(filled, device=GPU)) is False
        plan, _ = first_of(calls_of_linear(200, 96, 64, 16, BF16))
        monkeypatch.setattr(native, "tensor_map", lambda *_: None)
        assert assembled(plan, module, recorder)[0] is False


@in_c
@on_cpu
def test_a_program_is_made_once_all_its_kernels_are_compiled(monkeypatch):
    monkeypatch.setattr(native, "_AVAILABLE", True)
    monkeypatch.setattr(native, "_compiled", {})
    monkeypatch.setattr(native, "_dummy", lambda index: 0)
    maker, likes, options = next(calls_of_weights(96, 128, 8, BF16))
    plan = maker(tuple(likes), GPU, *options)
    from tests.triton.recorder import compiled_of

    steps = [step for step in plan.steps if isinstance(step, Launch)]
    assert len(steps) == 2
    with recording(compute=False):
        monkeypatch.setattr(native, "look_into", lambda step: compiled_of(step, 100))
        assert native.program(plan) is None
        native.remember(GPU, steps[0], steps[0])
        assert native.program(plan) is None
        native.remember(GPU, steps[1], steps[1])
        assert native.program(plan)
        assert native.program(maker(tuple(likes), GPU._replace(gpu=1), *options)) is None  # another GPU's are not its own
        native._compiled.clear()
        monkeypatch.setattr(native, "look_into", lambda step: None)
        for step in steps:
            native.remember(GPU, step, step)
        assert native.program(plan) is False


def kernel(a, b, n, m, s):
    """Only its signature matters."""


INTS = (0, 1, 2, 15, 16, 48, 4096, 2**31 - 1, 2**31, 2**31 + 16, 2**40)


def test_what_triton_tells_apart_has_another_key():
    """Two launches of one key are one kernel to Triton's own binder, which does not look at what 16 divides of the last number."""
    backend = make_backend(GPUTarget("cuda", 90, 32))
    names = inspect.signature(kernel).parameters
    parameters = [jit.KernelParam(i, p, False, p.name == "m") for i, p in enumerate(names.values())]
    mine = SimpleNamespace(arg_names=list(names), do_not_specialize_on_alignment=["m"])
    binder = jit.create_function_from_signature(inspect.signature(kernel), parameters, backend)
    store = torch.zeros(64, dtype=torch.int64)  # 16-byte aligned
    pairs = [(None, None)]
    for dtype, aligned in itertools.product((torch.bfloat16, torch.float32), (True, False)):
        t = store.view(torch.uint8)[0 if aligned else 8 :][:64].view(dtype)
        pairs.append((t, Array(0, 0, (16,), (1,), dtype, aligned)))
    rand, found = random.Random(0), {}
    for (a, like_a), (b, like_b) in itertools.product(pairs, pairs):
        for _ in range(30):
            n, m, s = rand.choice(INTS), rand.choice(INTS), rand.choice((0.5, 1.0))
            scalar = rand.choice((s, Scalar(0, "s")))
            key = native._key(GPU, Launch(mine, (1,), (like_a, like_b, n, m, scalar), (), 4, 3, False, None))[1:]
            known = found.setdefault(key, binder(a, b, n, m, s)[1])
            assert str(known) == str(binder(a, b, n, m, s)[1]), (key, n, m)
    assert len(found) > 200
    assert len({str(known) for known in found.values()}) == len(found)  # and no two keys are


def test_constants_blocks_warps_stages_and_devices_are_in_the_key():
    t = Array(0, 0, (16, 16), (16, 1), FP32, True)
    first, other = (partial(kernel) for _ in range(2))
    first.arg_names = other.arg_names = ["a", "n"]
    step = Launch(first, (1,), (t, 16), (1,), 4, 3, False, None)
    others = [
        step,
        *(
            step._replace(**{n: v})
            for n, v in (
                ("constexprs", (2,)),
                ("num_warps", 8),
                ("num_stages", 4),
                ("pdl", True),
                ("kernel", other),
                ("args", (Tile(t, (8, 8)), 16)),
                ("args", (Tile(t, (8, 16)), 16)),
            )
        ),
    ]
    keys = {native._key(GPU, each) for each in others} | {native._key(GPU._replace(gpu=1), step)}
    assert len(keys) == 9
    assert native._key(GPU, step._replace(grid=(5,))) in keys  # the grid is not


@pytest.fixture
def ready(monkeypatch):
    """A plan with a Program of its own on a GPU that is not there; yields it and what was run."""
    ran = []
    plan = plan_of(two_products, alike(5, 8, dtype=FP32), alike(8, 8, dtype=FP32), device=GPU)
    plan.native = SimpleNamespace(run=lambda tensors, scalars, stream: ran.append(("program", stream)))
    monkeypatch.setattr(walk, "_walk", lambda *_: ran.append(("python",)))
    monkeypatch.setattr(walk, "current_device", lambda: 0)
    monkeypatch.setattr(walk, "raw_stream", lambda index: 1000 + index)
    monkeypatch.setattr(walk, "exchange_device", lambda index: pytest.fail("it is the current one"))
    monkeypatch.setattr(walk, "usual_math", lambda: True)
    return plan, ran


@pytest.mark.parametrize("hook", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_and_a_debugger_get_every_launch_the_public_way(hook, ready, monkeypatch):
    """And so do products by another rule. Else the current stream of the device is passed."""
    plan, ran = ready
    heard = ((hook, SimpleNamespace(calls=[print])), (hook, SimpleNamespace(calls=[])), (hook, print), ("debug", True))
    for name, value in heard:
        with monkeypatch.context() as patch:
            patch.setattr(triton.knobs.runtime, name, value)
            walk.run(plan, (torch.ones(5, 8), torch.ones(8, 8)), (1.0,))
    monkeypatch.setattr(walk, "usual_math", lambda: False)
    walk.run(plan, (torch.ones(5, 8), torch.ones(8, 8)), (1.0,))
    assert ran == [("python",), ("program", 1000), *[("python",)] * 3]


@pytest.mark.parametrize(
    ("flag", "value"), [("allow_bf16_reduced_precision_reduction", False), ("allow_fp16_accumulation", True)]
)
def test_the_math_that_torch_lets_be_changed(flag, value, monkeypatch):
    assert private.usual_math()
    monkeypatch.setattr(torch.backends.cuda.matmul, flag, value)
    assert not private.usual_math()


def built(**changes):
    """A compiled kernel as Triton hands it out."""
    meta = dict(
        num_ctas=1, num_warps=8, shared=3000, tensordesc_meta=[{"swizzle": 3}], global_scratch_size=0, profile_scratch_size=0
    )
    source = SimpleNamespace(
        signature={"a": "*bf16", "d": "tensordesc<bf16[64, 64]>", "n": "i32", "s": "fp32", "B": "constexpr"}
    )
    whole = dict(metadata=SimpleNamespace(**(meta | changes.pop("meta", {}))), src=source, function=5)
    return SimpleNamespace(**(whole | changes))


SIZES = [8, 128, 4, 4, 8, 8, 4, 4]


@pytest.mark.parametrize(("extra", "scratch"), [([], 0), ([8], 1), ([8, 8], 2)])
def test_a_kernel_is_looked_into(extra, scratch, monkeypatch):
    monkeypatch.setattr(private, "_parameter_sizes", lambda function: SIZES + extra)
    got = private.look_into(built())
    assert got[:6] == (
        5,
        256,
        3000,
        ("*bf16", "tensordesc<bf16[64, 64]>", "i32", "fp32", "constexpr"),
        ({"swizzle": 3},),
        scratch,
    )


@pytest.mark.parametrize(
    "changes",
    [
        dict(meta=dict(num_ctas=2)),
        dict(meta=dict(shared=300_000)),
        dict(meta=dict(launch_cooperative_grid=True)),
        dict(meta=dict(global_scratch_size=64)),
        dict(meta=dict(profile_scratch_size=64)),
        dict(function=None),
        dict(metadata=None),
        dict(src=SimpleNamespace(signature={"a": "*bf16", "n": ("i32", "i32")})),
        dict(src=SimpleNamespace(signature={"a": "*bf16", "n": "fp64"})),
        dict(src=None),
    ],
    ids=str,
)
def test_a_kernel_of_another_kind_is_left_to_triton(changes, monkeypatch):
    monkeypatch.setattr(private, "_parameter_sizes", lambda function: SIZES)
    assert private.look_into(built(**changes)) is None


@pytest.mark.parametrize("sizes", [None, SIZES[:-1], [*SIZES, 4], [*SIZES, 8, 8, 8], [4, *SIZES[1:]]], ids=str)
def test_a_driver_that_says_otherwise_is_believed(sizes, monkeypatch):
    monkeypatch.setattr(private, "_parameter_sizes", lambda function: sizes)
    assert private.look_into(built()) is None


@in_c
def test_facts_of_c_and_of_python_tell_the_same_apart():
    module = private.walker()
    assert module is not None, private.why_no_walker
    x = torch.randn(8, 24)
    some = [x, x.clone(), x.half(), x.bfloat16(), x[:, :16], x.T, x[1:], x.flatten(), x[:, 1:17], x.double(), x.long()]
    some += [x[None], x[:0], torch.tensor(3), torch.tensor(4), torch.nn.Parameter(x.clone()), x.clone().requires_grad_(), None]
    tuples = [(a, b) for a in some for b in (None, x, x.T)] + [(a,) for a in some] + [()]
    for one, two in itertools.product(tuples, tuples):
        assert (python_facts(one) == python_facts(two)) == (module.facts(one) == module.facts(two)), (one, two)

    class Mine(torch.Tensor):
        pass

    for odd in (x.as_subclass(Mine), 3, "x"):
        assert module.facts((x, odd)) is None and python_facts((x, odd)) is None
    with pytest.raises(TypeError, match="tuple"):
        module.facts([x])
    assert module.facts((x,) * 10_000) == module.facts((x.clone(),) * 10_000)


def test_without_a_compiler_the_walk_in_python_remains(monkeypatch):
    import triton.runtime.build as build

    monkeypatch.setattr(build, "compile_module_from_src", lambda **_: 1 / 0)
    private.walker.cache_clear()
    before = private.why_no_walker
    try:
        assert private.walker() is None
        if hasattr(torch.Tensor, "__dlpack_c_exchange_api__"):
            assert "ZeroDivisionError" in private.why_no_walker
    finally:
        private.walker.cache_clear()
        monkeypatch.setattr(private, "why_no_walker", before)


# through the public functions


def rand(*shape, dtype=HALF[0]):
    return torch.randn(*shape, device=device.NAME).to(dtype)


def layer(M=96):
    """dora_linear with its norm given, by kernels, on leaves."""
    from fdora.functional import dora_linear, dora_norm

    x, W, A, B, m = rand(M, 64), rand(80, 64), rand(16, 64), rand(80, 16), rand(80)
    c = dora_norm(W, A, B, s=2.0, backend="triton")
    leaves = [t.requires_grad_() for t in (x, A, B, m)]
    return leaves, lambda x, A, B, m: dora_linear(x, W, A, B, m, s=2.0, norm=c, backend="triton")


def step(f, leaves, dy=None):
    y = f(*leaves)
    return [y, *torch.autograd.grad(y, leaves, torch.ones_like(y) if dy is None else dy)]


@needs_kernels
@pytest.mark.parametrize("name", NAMES)
def test_no_tensor_outlives_a_call_of_any_op(name, chosen_anew):
    """Neither what was passed nor what it made, on a first call and on one of a plan that is there."""
    gc.freeze()  # what was there before need not be looked at 16 times
    for _ in range(2):
        for fn, args, kwargs in calls(name, 4):
            out = fn(*args, backend="triton", **kwargs)
            backward_of(out)
            tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
            refs = [weakref.ref(t) for t in (*tensors, *(t.grad for t in tensors if t.is_leaf and t.grad is not None))]
            del args, kwargs, out, tensors
            gc.collect()
            assert chosen_anew and len(refs) >= 4 and not [r for r in refs if r() is not None]
    gc.unfreeze()


@needs_kernels
def test_one_tensor_twice():
    """The next call of the same form has two."""
    leaves, f = layer()
    y = f(*leaves).detach()
    for dy in (y, y.clone(), y):
        got = step(f, leaves, dy)
    want = step(f, leaves, y.clone())
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@needs_kernels
def test_inference_mode():
    leaves, f = layer()
    with torch.inference_mode():
        once = f(*leaves)
        assert once.is_inference()
    again = f(*(t.detach() for t in leaves))
    assert not again.is_inference() and torch.equal(once, again)


@needs_kernels
def test_selective_checkpointing():
    """It numbers the ops of a forward, and looks for each again when it computes it anew: on every call, and every shape."""
    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    aten = torch.ops.aten
    saved = (aten.mm.default, aten.addmm.default)

    def policy(_, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE

    for M in (96, 112):
        for _ in range(3):
            leaves, f = layer(M)
            contexts = partial(create_selective_checkpoint_contexts, policy)
            y = checkpoint(f, *leaves, use_reentrant=False, context_fn=contexts)
            got = torch.autograd.grad(y.float().sum(), leaves)
            want = torch.autograd.grad(f(*leaves).float().sum(), leaves)
            for a, b in zip(got, want, strict=True):
                torch.testing.assert_close(a, b, rtol=0, atol=0)


@needs_kernels
@pytest.mark.parametrize("M", [96, 8])
@pytest.mark.parametrize("dtype", [HALF[0], torch.float32])
def test_forward_mode_is_refused_without_a_graph_too(M, dtype):
    """Kernels would write past the tangents."""
    from torch.autograd import forward_ad

    leaves, f = layer(M)
    with torch.no_grad(), forward_ad.dual_level(), pytest.raises(NotImplementedError):
        f(forward_ad.make_dual(leaves[0].detach(), torch.ones_like(leaves[0])), *leaves[1:])


@needs_kernels
def test_subclasses_run_and_are_let_go(chosen_anew):
    from fdora.functional import dora_norm

    class Mine(torch.Tensor):
        pass

    for M in (96, 8):
        leaves, f = layer(M)
        want = f(*leaves)
        x = leaves[0].detach().as_subclass(Mine)
        with torch.no_grad():
            torch.testing.assert_close(f(x, *leaves[1:]).as_subclass(torch.Tensor), want.detach(), rtol=0, atol=0)
        ref = weakref.ref(x)
        del x
        gc.collect()
        assert ref() is None
    W, A, B = rand(80, 64), rand(16, 64), rand(80, 16)
    want = dora_norm(W, A, B, s=2.0, backend="triton")
    got = dora_norm(*(t.as_subclass(Mine) for t in (W, A, B)), s=2.0, backend="triton")
    torch.testing.assert_close(got.as_subclass(torch.Tensor), want, rtol=0, atol=0)
    assert chosen_anew and not [part for part in tree_leaves(list(chosen_anew)) if isinstance(part, torch.Tensor)]


@needs_kernels
def test_a_second_import_takes_the_place_of_the_first():
    code = """
import importlib, sys, torch
import fdora.triton.compose
importlib.reload(fdora.triton.compose)
for name in [n for n in sys.modules if n.split(".")[0] == "fdora"]:
    del sys.modules[name]
from fdora.autograd._ops import NO_KERNELS, OPS
assert not NO_KERNELS and "triton" in OPS, NO_KERNELS
x, g = torch.randn(4, 8, device=sys.argv[1]), torch.ones(8, device=sys.argv[1])
assert torch.allclose(torch.ops.fdora.compose(x, x, g, None, 1.0, False), 2 * x, atol=1e-5)
"""
    done = subprocess.run([sys.executable, "-c", code, device.NAME], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


# on a GPU


@needs_gpu
@in_c
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("M", [8, 200])
def test_the_same_bits_by_c_and_by_python(M, dtype, chosen_anew, monkeypatch):
    from fdora.functional import DoraLayer, dora_linear_group, dora_merge, dora_mlp, dora_norm, dora_norm_state

    torch.manual_seed(0)
    x, W, A, B = (rand(*s, dtype=dtype) for s in ((M, 64), (96, 64), (16, 64), (96, 16)))
    m = rand(96, dtype=dtype)
    leaves = [t.requires_grad_() for t in (x, A, B, m)]

    def everything():
        c = dora_norm(W, A, B, s=2.0)
        state = dora_norm(W, A, B, s=2.0, state=dora_norm_state(W))
        la = DoraLayer(W, A, B, m, 2.0, norm=c)
        down = DoraLayer(W.T.contiguous(), B.T.contiguous(), A.T.contiguous(), m[:64], 2.0)
        y, pair = dora_mlp(x, la, la, down), dora_linear_group(x, [la, la], dropout_p=0.2, dropout_mode="peft", seed=[1, 2])
        total = y.float().sum() + sum(p.float().sum() for p in pair)
        return [c, state.c, state.fingerprint, dora_merge(W, A, B, m, s=2.0), y, *pair, *torch.autograd.grad(total, leaves)]

    want = everything()
    everything()
    assert all(plan.native for plan in chosen_anew.values()), [plan.name for plan in chosen_anew.values() if not plan.native]
    monkeypatch.setattr(walk, "_walk", None)
    got = everything()
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# what reviews found


def scaled_by(plan, a):
    """A launch with a scalar, of a kernel that notes what it is started with."""
    a = plan.matrix(a)
    out = plan.result("out", a.shape, a.dtype)
    plan.launch(Noted(), (1,), {"a": a, "out": out, "s": plan.scalar("s")}, cost=Cost())


class Noted:
    """Stands for a kernel: the public way to start it."""

    __name__, seen, arg_names = "noted", [], ["a", "out", "s"]

    def fn(a, out, s): ...

    def __getitem__(self, grid):
        return lambda *args, **options: self.seen.append(args[2])


@pytest.mark.parametrize("s", [1, 2, True])
def test_a_whole_number_is_a_float_to_every_kernel(s):
    """Triton would compile an int for int parameters, and a 1 into the kernel; the key of both is that of a float."""
    plan = plan_of(scaled_by, alike(4, 4, dtype=FP32))
    Noted.seen.clear()
    walk.run(plan, (torch.ones(4, 4),), (s,))
    assert [type(v) for v in Noted.seen] == [float] and Noted.seen == [s]


@pytest.mark.parametrize("kind", ["constexpr", "i32", "i64"])
def test_a_kernel_compiled_for_another_kind_of_scalar_is_left_to_triton(kind):
    plan = plan_of(scaled_by, alike(4, 4, dtype=FP32), device=GPU)
    compiled = private.Compiled(1, 128, 0, ("*fp32", "*fp32", kind), (), 0, None)
    assert native._params(plan.steps[0], compiled, [], 0) is None
    for real in ("fp32", "f32"):
        assert native._params(plan.steps[0], compiled._replace(types=("*fp32", "*fp32", real)), [], 0) is not None


@in_c
def test_facts_have_no_limit():
    """Very many layers have a key too: their forward finds its plan again, and what is kept of them is theirs."""
    module, x, y = private.walker(), torch.randn(8, 24), torch.randn(8, 25)
    for count in (95, 96, 97, 128, 129, 1000, 10_000):
        keys = [(x,) * count, (*(x,) * (count - 1), y), (*(x,) * (count - 1), None), (None,) * count]
        assert len({module.facts(key) for key in keys}) == 4 and None not in map(module.facts, keys)
        assert module.facts(keys[0]) == module.facts((x.clone(),) * count)
    deep = torch.zeros((1,) * 60 + (2,))  # more words than a tensor has on average
    assert module.facts((deep,) * 20) == module.facts((deep.clone(),) * 20) != module.facts((deep,) * 19 + (x,))


@in_c
def test_the_first_call_of_a_process_makes_its_plan_once(chosen_anew, monkeypatch):
    """The key that it is kept under is the one that the second call asks with."""
    from fdora import _facts

    monkeypatch.setattr(_facts, "facts", python_facts)
    made = []

    def maker(likes, where):
        made.append(likes)
        return plan_of(lambda plan, a: plan.result("out", a.shape, a.dtype), *likes)

    x = torch.ones(4, 4)
    for _ in range(2):
        walk.run(walk.plan_for(maker, (x,)), (x,))
    assert len(made) == len(chosen_anew) == 1 and _facts.facts is private.walker().facts


def test_no_thread_adds_a_plan_while_another_looks_for_the_oldest(monkeypatch):
    """A dict that grows under an iterator raises."""
    x, inside, lock, stopped = torch.ones(4, 4), [], walk._lock, threading.Event()

    def maker(likes, where, number):
        return plan_of(lambda plan, a: plan.result("out", a.shape, a.dtype), *likes)

    def add():
        walk.plan_for(maker, (x,), -1)
        stopped.set()  # at its end, where nothing holds it

    class Asked:
        def __enter__(self):
            if threading.current_thread() in inside:
                stopped.set()
            lock.acquire()

        def __exit__(self, *_):
            lock.release()

    class Slow(dict):
        def __iter__(self):
            found = super().__iter__()
            if not inside:
                inside.append(threading.Thread(target=add))
                monkeypatch.setattr(walk, "MAX_PLANS", 3)  # the other one has taken its oldest out already
                inside[0].start()
                stopped.wait()
            return found

    monkeypatch.setattr(walk, "_lock", Asked())
    monkeypatch.setattr(walk, "MAX_PLANS", 2)
    monkeypatch.setattr(walk, "_plans", Slow())
    for number in range(4):
        walk.plan_for(maker, (x,), number)
    inside[0].join()
    assert len(walk._plans) <= 3


def test_a_kernel_compiled_for_more_alignment_than_its_key_says_is_not_kept(monkeypatch):
    """Rows of a matrix at an odd address can begin at 16 bytes, which Triton sees and compiles for; the next one's need not."""
    kept = {}
    monkeypatch.setattr(native, "_AVAILABLE", True)
    monkeypatch.setattr(native, "_compiled", kept)
    monkeypatch.setattr(native, "look_into", lambda built: built)

    def write(plan, a):
        part = plan.matrix(a).rows(1, 8)  # 12 bytes further
        out = plan.result("out", part.shape, part.dtype)
        plan.launch(Noted(), (1,), {"a": part, "out": out, "s": plan.scalar("s")}, cost=Cost())

    plan, store = plan_of(write, alike(8, 3, dtype=FP32, aligned=False)), torch.zeros(40)
    assert store.data_ptr() % 16 == 0
    for begin, count in ((1, 0), (2, 1), (1, 1)):
        walk.run(plan, (store[begin : begin + 24].view(8, 3),), (1.0,))
        assert len(kept) == count


def test_the_address_for_tensor_maps_comes_from_no_graphs_pool(monkeypatch):
    """It stays for as long as the process, and the first plan may be bound where Inductor allocates for a CUDA graph."""
    asked = []
    monkeypatch.setattr(native, "_dummies", {})
    monkeypatch.setattr(native, "by_another_thread", lambda make, device: asked.append(device) or torch.empty(256))
    assert native._dummy(0) == native._dummy(0)
    assert asked == [torch.device("cuda", 0)]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"s": None}, "lacks ['s'] and has [] too many"),
        ({"t": 1}, "lacks [] and has ['t'] too many"),
    ],
    ids=["missing", "unknown"],
)
def test_a_launch_names_every_parameter_of_its_kernel(change, says):
    def write(plan, a):
        a = plan.matrix(a)
        given = {"a": a, "out": plan.result("out", a.shape, a.dtype), "s": plan.scalar("s")} | change
        plan.launch(Noted(), (1,), {name: v for name, v in given.items() if v is not None}, cost=Cost())

    with pytest.raises(TypeError, match=re.escape(f"a launch of noted {says}")):
        plan_of(write, alike(4, 4, dtype=FP32))
