"""A plan is pure: made from what is known of tensors, never from one; its temporaries share memory only where that is safe."""

import dataclasses
import importlib
import itertools
import pkgutil

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

import fdora.triton
from fdora.triton.op import Maker
from fdora.triton.runtime import walk
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import Device
from fdora.triton.runtime.layout import ALIGN, collapses, contiguous, is_operand
from fdora.triton.runtime.plan import WORKSPACE, Array, Launch, Like, Plan, Scalar, Tile
from tests import device
from tests.triton.drawn import NAMES, assert_same_bits, results
from tests.triton.marks import HALF, INTERPRETED, needs_kernels  # noqa: F401 (read by the mark)
from tests.triton.written import (
    FP32,
    HOPPER,
    alike,
    arrays,
    calls_of_many_rows,
    copied,
    every_call,
    kernels,
    launches,
    plan_of,
    results_of,
)

DEVICES = [HOPPER, Device(-1, 80, 108, False), Device(-1, 0, 304, False)]


def content(plan):
    return tuple(getattr(plan, f.name) for f in dataclasses.fields(Plan) if f.name != "native")


@pytest.fixture(scope="module")
def plans():
    """Every call's plan on every kind of device, twice."""
    return [tuple(make(tuple(likes), d, *options) for _ in range(2)) for make, likes, options in every_call() for d in DEVICES]


def test_equal_likes_make_equal_plans(plans):
    assert len(plans) > 1000 and all(content(one) == content(two) for one, two in plans)
    assert len({content(one) for one, _ in plans}) > 1000  # that they can be hashed says that they are immutable


def parts(value):
    yield value
    if isinstance(value, (tuple, list)):
        for each in value:
            yield from parts(each)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from parts(getattr(value, field.name))


def test_no_tensor_inside(plans):
    for plan, _ in plans[::7]:
        assert not [p for p in parts(plan) if isinstance(p, torch.Tensor)]
        assert plan.steps and plan.native is None and not plan.cost.bytes < 0


def test_what_a_step_names_is_inside_what_there_is(plans):
    """Slots exist, temporaries stay inside the workspace, results inside their allocation; kernels get what they declare."""
    for plan, _ in plans:
        extents = [plan_bytes(a.shape, a.stride, a.dtype) for a in (*plan.results,)]
        for step in plan.steps:
            if isinstance(step, Launch):
                assert len(step.args) + len(step.constexprs) == len(step.kernel.arg_names)
                assert all(isinstance(a, (Array, Tile, Scalar, int, float, type(None))) for a in step.args)
                assert 1 <= len(step.grid) <= 3 and all(0 < n < 2**31 for n in step.grid)
            for a in arrays(step):
                end = a.offset * a.itemsize + plan_bytes(a.shape, a.stride, a.dtype)
                assert a.offset >= 0 and (a.temp >= 0) == (a.slot == WORKSPACE)
                if a.temp >= 0:
                    assert end <= plan.temporaries[a.temp][1] and sum(plan.temporaries[a.temp]) <= plan.workspace
                elif a.slot >= len(plan.inputs):
                    assert end <= extents[a.slot - len(plan.inputs)]
                else:
                    assert plan.inputs[a.slot] is not None


def plan_bytes(shape, stride, dtype):
    return dtype.itemsize * (1 + sum((n - 1) * d for n, d in zip(shape, stride, strict=True)) if 0 not in shape else 0)


def lives(plan):
    """The first and the last step that uses each temporary."""
    found = {}
    for i, step in enumerate(plan.steps):
        for a in arrays(step):
            if a.temp >= 0:
                found[a.temp] = (found.get(a.temp, (i, i))[0], i)
    return found


def assert_apart(places, used):
    """No two (begin, size) of which both are in use at one time share a byte."""
    for i, j in itertools.combinations(used, 2):
        together = used[i][0] <= used[j][1] and used[j][0] <= used[i][1]
        (a, n), (b, m) = places[i], places[j]
        assert not (together and a < b + m and b < a + n), (i, j)


def test_temporaries_that_live_at_once_do_not_overlap(plans):
    """Nor do they take twice as much as live at once."""
    shared = 0
    for plan, _ in plans:
        used, places = lives(plan), plan.temporaries
        assert_apart(places, used)
        assert all(begin % ALIGN == 0 for begin, _ in places)
        living = [[places[i][1] for i, (first, last) in used.items() if first <= t <= last] for t in range(len(plan.steps))]
        assert plan.workspace <= 2 * max(sum(-(-size // ALIGN) * ALIGN for size in sizes) for sizes in living)
        shared += plan.workspace < sum(size for _, size in plan.temporaries)
    assert shared > 100  # those whose lives do not meet do


@needs_kernels
@pytest.mark.parametrize("name", NAMES)
def test_poisoned_memory_changes_nothing(name, monkeypatch):
    """Every byte that a step reads of the workspace, and every one of a result, a step wrote before."""

    fills, filled = itertools.cycle((0, 255, 127)), []

    class Poisoning:
        def __getattr__(self, name):
            real = getattr(torch, name)
            return poisoned(real) if name in ("empty", "empty_strided") else real

    def poisoned(real):
        def make(*shape, **options):
            made = real(*shape, **options)
            bytes_ = torch.empty(0, dtype=torch.uint8, device=made.device).set_(made.untyped_storage())
            filled.append(bytes_.fill_(next(fills)).numel())
            return made

        return make

    def drawn():
        return [*results(name, 8), *results(name, 12, empty=0.4, largest=24)]

    want = drawn()
    monkeypatch.setattr(walk.native, "program", lambda plan: False)  # walk.c does not ask torch for memory
    monkeypatch.setattr(walk, "torch", Poisoning())
    for _ in range(2):
        assert_same_bits(drawn(), want)
    assert sum(map(bool, filled)) > 5


@pytest.mark.parametrize(
    ("shape", "stride", "whole"),
    [
        ((4, 6), (6, 1), True),
        ((4, 6), (9, 1), True),  # rows at a distance
        ((4, 6), (1, 4), False),
        ((4, 6), (0, 1), False),  # one row for all
        ((4, 6), (5, 1), False),  # rows that overlap
        ((2, 3, 6), (18, 6, 1), True),
        ((2, 3, 6), (30, 10, 1), True),
        ((2, 3, 6), (6, 12, 1), False),  # transposed tokens
        ((2, 3, 6), (24, 6, 1), False),  # a gap between batches
        ((1, 3, 6), (999, 6, 1), True),
        ((2, 1, 6), (8, 999, 1), True),
        ((4, 1), (3, 5), True),
        ((6,), (1,), True),
        ((6,), (2,), False),
        ((0, 6), (6, 1), True),
        ((2, 0), (7, 3), False),
    ],
    ids=str,
)
def test_leading_axes_as_one(shape, stride, whole):
    """Where they are, without a copy; every element at its place."""
    assert collapses(shape, stride) == whole
    like = Like(shape, stride, FP32, True)
    builder = Builder("tokens", HOPPER)
    flat = builder.tokens(like)
    assert builder.copies == ([] if whole else [0]) and len(flat.shape) == 2
    if not whole or 0 in shape:
        return
    places = [sum(i * d for i, d in zip(at, stride, strict=True)) for at in itertools.product(*map(range, shape))]
    mine = [i * flat.stride[0] + j * flat.stride[1] for i in range(flat.shape[0]) for j in range(flat.shape[1])]
    assert mine == places


@pytest.mark.parametrize(
    ("kind", "shape", "stride", "copied_"),
    [
        ("vector", (6,), (1,), False),
        ("vector", (6,), (2,), True),
        ("vector", (1,), (7,), False),
        ("vector", (6,), (0,), True),
        ("operand", (4, 6), (6, 1), False),
        ("operand", (4, 6), (1, 9), False),
        ("operand", (4, 6), (12, 2), True),
        ("operand", (4, 6), (0, 1), True),
        ("operand", (4, 6), (1, 1), True),
        ("operand", (1, 6), (1, 2), False),
        ("matrix", (4, 6), (12, 2), False),
    ],
    ids=str,
)
def test_which_arguments_are_copied(kind, shape, stride, copied_):
    builder = Builder(kind, HOPPER)
    made = getattr(builder, kind)(Like(shape, stride, FP32, False))
    assert builder.copies == ([0] if copied_ else [])
    assert made.aligned == copied_ and made.stride == (contiguous(shape) if copied_ else stride)
    assert getattr(builder, kind)(None) is None and len(builder.inputs) == 2
    if kind == "operand":
        assert is_operand(shape, stride) != copied_


def test_parts_of_a_matrix():
    a = Array(0, 0, (10, 24), (24, 1), torch.float16, True)
    assert (a.rows(2, 4).offset, a.rows(2, 4).shape, a.rows(2, 4).aligned) == (48, (2, 24), True)
    assert (a.rows(8, 99).shape, a.rows(0, 3).offset) == ((2, 24), 0)
    odd = Array(0, 0, (10, 23), (23, 1), torch.float16, True)
    assert not odd.rows(1, 4).aligned and odd.rows(8, 9).aligned
    assert (a.columns(8, 20).offset, a.columns(8, 20).shape, a.columns(8, 20).aligned) == (8, (10, 12), True)
    assert not a.columns(4, 20).aligned and a == a.T.T and a.T.stride == (1, 24)
    words = a.rows(2, 10).words((48,), (1,), torch.int64)
    assert words.offset == 12
    with pytest.raises(AssertionError):
        a.columns(1, 5).words((1,), (1,), torch.int64)


def test_steps_of_nothing_are_no_steps():
    def write(plan, a):
        a = plan.operand(a)
        out, none = plan.result("out", (4, 3), FP32), plan.result("none", (0, 3), FP32)
        b = plan.temp((0, 3), FP32)
        plan.product(out, plan.temp((4, 0), FP32), b)  # a sum of no terms
        plan.product(none, plan.temp((0, 5), FP32), plan.temp((5, 3), FP32))
        plan.product(out, plan.temp((4, 0), FP32), b, accumulate=True)
        copied(plan, "nothing", none)

    plan = plan_of(write, alike(4, 3))
    assert [type(step).__name__ for step in plan.steps] == ["Fill"] and plan.workspace == 0


def rand(*shape, dtype=HALF[0]):
    return torch.randn(*shape, device=device.NAME).to(dtype)


def layer(M=96, lead=()):
    from fdora.functional import dora_linear, dora_norm

    x, W, A, B, m = rand(*lead, M, 64), rand(80, 64), rand(16, 64), rand(80, 16), rand(80)
    c = dora_norm(W, A, B, s=2.0, backend="triton")
    return x, lambda x, s=2.0, **more: dora_linear(x, W, A, B, m, s=s, norm=c, backend="triton", **more)


@needs_kernels
def test_scalars_change_without_a_new_plan(chosen_anew):
    x, f = layer()
    one, count = f(x), len(chosen_anew)
    two, back = f(x, 5.0), f(x)
    assert len(chosen_anew) == count and torch.equal(one, back) and not torch.equal(one, two)
    torch.testing.assert_close(two, f(x, 5.0, dropout_p=0.0), rtol=0, atol=0)


@needs_kernels
def test_what_a_plan_may_look_at_makes_another(chosen_anew):
    """Shape, strides, dtype and options; the same again does not."""
    x, f = layer()
    f(x)
    count = len(chosen_anew)
    for i, (t, more) in enumerate(
        (
            (x[:95].clone(), {}),
            (torch.cat([x, x], 1)[:, :64], {}),
            (x[None], {}),
            (x, dict(dropout_p=0.5, seed=3)),
            (x, dict(dropout_p=0.25, seed=3)),
            (x, dict(dropout_p=0.25, dropout_mode="peft", seed=3)),
        ),
        1,
    ):
        for _ in range(2):
            f(t, **more)
        assert len(chosen_anew) == count + i
    f(x, dropout_p=0.25, dropout_mode="peft", seed=4)
    assert len(chosen_anew) == count + 6


@needs_kernels
def test_a_pointer_that_is_not_aligned_gets_another_plan(chosen_anew):
    x, f = layer()
    store = rand(96 * 64 + 16)
    want, count = f(x), len(chosen_anew)
    for start, more in ((8, 0), (1, 1), (0, 1), (3, 1)):
        shifted = store[start : start + 96 * 64].view(96, 64).copy_(x)
        torch.testing.assert_close(f(shifted), want, rtol=2e-3, atol=2e-3)
        assert len(chosen_anew) == count + more
    flags = {plan.inputs[0].aligned for plan in chosen_anew.values() if "linear" in plan.name}
    assert flags == {True, False}


@needs_kernels
def test_a_copied_argument_is_aligned_whatever_torch_calls_contiguous():
    """One row at an odd address, with an odd stride: a plan copies it, and contiguous() would hand it back as it is."""
    store = torch.randn(40, device=device.NAME)
    row = store[1:17].as_strided((1, 16), (5, 1))
    assert row.is_contiguous() and row.data_ptr() % 16

    def write(plan, a):
        a = plan.operand(a)
        assert a.aligned
        copied(plan, "out", a)

    seen, real = [], walk._walk
    plan = plan_of(write, walk.like(row), device=walk.device_of(row.device))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk, "_walk", lambda plan, tensors, scalars: (seen.append(tensors[0]), real(plan, tensors, scalars))[1])
        patch.setattr(walk.native, "program", lambda plan: False)
        (out,) = walk.run(plan, (row,))
    assert torch.equal(out, row) and seen[0].data_ptr() % 16 == 0


@needs_kernels
def test_tokens_in_any_number_of_axes(chosen_anew):
    """Where axes lie one after the other nothing is copied; where they do not, one copy; the result has the axes of x."""
    x, f = layer(12, (2, 3))
    want = f(x.reshape(72, 64))
    for t, copies in ((x, 0), (torch.cat([x, x], -1)[..., :64], 0), (x.transpose(0, 1).contiguous().transpose(0, 1), 1)):
        chosen_anew.clear()
        y = f(t)
        assert y.shape == (2, 3, 12, 80) and torch.equal(y.reshape(72, 80), want)
        assert [len(plan.copies) for plan in chosen_anew.values()] == [copies]
    assert torch.equal(f(x[0, 0, 0]), f(x[0, 0, :1])[0])


@needs_kernels
def test_plans_do_not_pile_up(chosen_anew, monkeypatch):
    monkeypatch.setattr(walk, "MAX_PLANS", 3)
    x, f = layer()
    for rows in range(70, 82):
        torch.testing.assert_close(f(x[:rows]), f(x[:rows].clone()), rtol=0, atol=0)
        assert len(chosen_anew) <= 3
    newest = [plan.inputs[0].shape[0] for plan in chosen_anew.values()]
    assert newest == sorted(newest) and newest[-1] == 81  # the oldest went


@needs_kernels
def test_the_oldest_plan_may_have_gone_already(monkeypatch):
    """Another thread can take it between the look and the deed."""

    taken = []

    class Racing(dict):
        def __iter__(self):
            oldest = next(super().__iter__())
            self.pop(oldest)
            taken.append(oldest)
            yield oldest

    monkeypatch.setattr(walk, "MAX_PLANS", 1)
    monkeypatch.setattr(walk, "_plans", Racing())
    x, f = layer()
    for rows in (70, 71, 72):
        assert f(x[:rows]).shape == (rows, 80)
    assert len(taken) == 3  # one for each shape: the norm and the first two took the only place


@needs_kernels
def test_a_guarded_norm_of_no_columns():
    """Its partial sums have no bytes, and there is no workspace."""
    from fdora.functional import dora_norm, dora_norm_state

    W, A, B = rand(40, 8)[:, :0], rand(4, 8)[:, :0], rand(40, 4)
    state = dora_norm(W, A, B, s=2.0, state=dora_norm_state(W), backend="triton")
    assert (state.c == 0).all()


@needs_kernels
@pytest.mark.parametrize("count", [3, 4, 5, 9])
def test_factors_below_each_other(count):
    """More than the copy kernel takes at once; each row begins at 16 bytes; another dtype."""
    from fdora.triton.copy import stacked

    parts = [rand(3 + 5 * i, 37, dtype=FP32) for i in range(count)]
    parts[1] = parts[1].T.contiguous().T

    def write(plan, *likes):
        whole = stacked(plan, [plan.matrix(a) for a in likes], HALF[0])
        assert whole.stride == (40, 1)
        copied(plan, "out", whole)

    (out,) = results_of(write, *parts)
    assert torch.equal(out, torch.cat(parts).to(HALF[0]))


def test_beside_other_processes_a_program_has_few_tiles(monkeypatch):
    """And no wave more than where each multiprocessor has one program."""
    from fdora.triton import gemm
    from fdora.triton.linear import plan_forward
    from tests.triton.written import BF16
    from tests.triton.written import layer as operands

    tile = 128 * 128 * 4096
    assert [gemm.programs_of(tiles, tile, 132) for tiles in (1, 132, 512, 3584)] == [1, 132, 132, 132]
    monkeypatch.setattr(gemm, "beside_others", lambda: True)
    assert [gemm.programs_of(tiles, tile, 132) for tiles in (1, 132, 256, 396, 1024, 3584)] == [1, 132, 128, 132, 256, 512]
    assert [gemm.programs_of(1024, 128 * 128 * K, 132) for K in (0, 1024, 8192, 14336)] == [128, 128, 512, 512]
    assert [gemm.programs_of(tiles, 128 * 256 * 4096, 132) for tiles in (512, 1792)] == [256, 896]
    given = (alike(4096, 1024, dtype=BF16), *operands(14336, 1024, 16, BF16, BF16))
    plan = plan_forward(given, HOPPER._replace(num_sms=132), 0.0, "lora", ("output",), True)
    (step,) = launches(plan, "gemm_tma_kernel")
    assert 132 < step.grid[0] < 4096 * 14336 / 2**14 and step.args[-1] == step.grid[0]


@pytest.mark.parametrize(("stride", "copies"), [((6, 1), 0), ((1, 4), 0), ((0, 1), 1), ((5, 1), 1), ((12, 2), 1)])
def test_cublas_gets_no_rows_that_overlap(stride, copies):
    """One row for all, say: it knows of a distance from row to row that is a row at least."""
    from fdora.triton.copy import operand

    plan = plan_of(lambda plan, W: operand(plan, plan.matrix(W)), alike(4, 6, stride=stride))
    assert kernels(plan) == ({"copy_kernel": copies} if copies else {})


def test_a_product_that_cublas_does_not_have_is_refused():
    for dtype, out in itertools.permutations((torch.float16, torch.bfloat16, FP32), 2):
        a, b = (torch.ones(4, 4, dtype=dtype) for _ in range(2))

        def write(plan, a, b, out=out):
            a, b = plan.operand(a), plan.operand(b)
            plan.product(plan.result("out", (4, 4), out), a, b)

        if out == FP32:
            assert plan_of(write, alike(4, 4, dtype=dtype), alike(4, 4, dtype=dtype)).has_products
            continue
        with pytest.raises(AssertionError):
            plan_of(write, alike(4, 4, dtype=dtype), alike(4, 4, dtype=dtype))
        with pytest.raises((AssertionError, RuntimeError)):
            walk._product(torch.empty(4, 4, dtype=out), a, b, 1.0, False)


@pytest.mark.parametrize("p", [0.0, 0.1])
def test_layers_of_one_call_cast_their_factors_together(p):
    """Of three layers one copy of all A and one of all B, forward and backward."""
    from fdora.functional import DoraLayer, dora_linear_group, explain

    def like(*shape, dtype=FP32):
        return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=dtype == FP32)

    W = torch.empty(1024, 1024, dtype=torch.bfloat16, device="meta")
    layers = [DoraLayer(W, like(16, 1024), like(1024, 16), like(1024), 2.0, None, like(1024).detach()) for _ in range(3)]
    said = explain(dora_linear_group, torch.empty_like(W, requires_grad=True), layers, dropout_p=p, gpu="h200")
    assert [[step.what for step in plan.steps].count("copy_kernel") for plan in said.plans] == [2, 2]


@pytest.mark.parametrize("tokens", [8, 96])
def test_a_backward_without_dx_does_not_cast_the_weight(tokens):
    """Nothing of it reads a product of W."""
    from fdora.triton.linear import plan_backward
    from tests.triton.written import BF16
    from tests.triton.written import layer as operands

    x, y, h, la = (
        alike(tokens, 64, dtype=BF16),
        alike(tokens, 96, dtype=BF16),
        alike(tokens, 16, dtype=BF16),
        list(operands(96, 64, 16, FP32, BF16)),
    )
    for need_x in (False, True):
        flags = (True, True, True, False, False)
        plan = plan_backward((x, h, y, y, *la), HOPPER, 0.0, "lora", (True,), need_x, flags)
        assert kernels(plan)["copy_kernel"] == need_x


# grids


def makers():
    """Every function of the package that makes a plan of likes; those of whole models have a program for each layer."""
    for found in pkgutil.iter_modules(fdora.triton.__path__):
        module = importlib.import_module(f"fdora.triton.{found.name}")
        yield from (f for f in vars(module).values() if isinstance(f, Maker) and f.write.__module__ == module.__name__)


def test_no_grid_is_larger_than_cuda_starts():
    """65,535 blocks on the second and the third axis, 2**31 - 1 on the first, however many rows there are."""
    seen, larger = set(), {}
    for M in (3_000_000, 20_000_000):
        for (make, likes, options), d in itertools.product(calls_of_many_rows(M), DEVICES):
            seen.add(make)
            for step in launches(make(tuple(likes), d, *options)):
                if step.grid[0] >= 2**31 or max(step.grid[1:], default=0) > 65_535:
                    larger[step.kernel.fn.__name__] = M, step.grid
    assert not larger
    assert set(makers()) <= seen


def blocks_of_rows(plan):
    return [step.grid[1] for step in launches(plan, "copy")]


def test_a_copy_of_more_rows_than_a_grid_has_blocks_for():
    """CUDA starts no kernel with more than 65,535 on that axis, and a block is 16 rows: a residual of 4096 images in 257 tokens, r = 12."""
    from fdora.triton.linear import plan_forward
    from tests.triton import written

    for M, blocks in ((1_048_560, [65_535]), (4096 * 257, [65_535, 257]), (3_000_000, [65_535, 65_535, 56_430])):
        likes = [alike(M, 64), *written.layer(256, 64, 12, torch.float16, torch.float16), alike(M, 256)]
        plan = plan_forward(tuple(likes), HOPPER, 0.0, "lora", ("output",), True, (), (), True)
        assert blocks_of_rows(plan) == [*blocks, 16]  # the last: of B, whose rows are made 16 bytes long
