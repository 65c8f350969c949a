"""Ops that are read off from their first call: the same bits for other tensors of the same kind, and what ends a kind."""

import gc
import subprocess
import sys
import weakref
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from tests import device
from tests.triton.marks import HALF, INTERPRETED, needs_gpu, needs_kernels  # noqa: F401, the marks read them

pytestmark = needs_kernels


@pytest.fixture(autouse=True)
def programs(chosen_anew):
    from fdora.triton import _repeat

    return _repeat._programs


@pytest.fixture
def sums():
    """A small op: the column sums of a matrix, in a second launch over that as one row. Counts its own runs."""
    from fdora.triton._launch import column_sums
    from fdora.triton._repeat import repeatable

    def op(x, note=0):
        runs.append(note)
        once = column_sums(x)
        return [once, column_sums(once[None])]

    runs = []
    return repeatable(op), runs


def rand(*shape, dtype=HALF[0]):
    return torch.randn(shape, device=device.NAME).to(dtype)


def calls(seed=0):
    """Every op that can be read off, with arguments of each kind of call: as training makes them."""
    from fdora.functional import dora_norm_state
    from fdora.triton.gemm import _gemm
    from fdora.triton.norm import _guarded, _row_norm
    from fdora.triton.scale import scale_backward
    from fdora.triton.small import small_backward, small_forward

    torch.manual_seed(seed)
    M, N, K, r = 96, 80, 64, 16
    x, W, A, B, dy, y, add = (rand(*s) for s in ((M, K), (N, K), (r, K), (N, r), (M, N), (M, N), (M, N)))
    m, c, bias, h, mask = rand(N), rand(N).float().abs() + 1, rand(N), rand(M, r), torch.tensor(7 + seed, device=device.NAME)
    few, few_y = rand(8, K), rand(8, N)
    empty = dora_norm_state(W)
    back = (dy, y, x, W, h, B, m, c)
    yield _row_norm, (W, A, B, 2.0, None, False)
    yield _row_norm, (W, A.float(), B.float(), 2.0, None, False)  # as terms in half precision
    yield _guarded, (W, A, B, 2.0, None, empty.c + seed, empty.fingerprint, False)
    yield _guarded, (W, A.float(), B.float(), 2.0, None, empty.c, empty.fingerprint, False)
    yield _gemm, (x, W, h, B, "scale", m, c, None, None, None, 0.0, None, False, None, True)
    yield _gemm, (x, W, h, B, "scale", m.float(), c, bias, None, None, 0.0, None, True, None, True)
    yield _gemm, (x, W, h, B, "add", m, c, bias, add, None, 0.0, None, False, None, True)
    yield _gemm, (dy, W, h, A, "none", None, None, None, None, None, 0.0, None, False, None, False)
    yield _gemm, (dy, W, h, A, "none", None, None, None, None, mask, 0.4, dy + 1, False, None, False)
    yield scale_backward, (*back, False, True, False, True, False, False, True)
    yield scale_backward, (*back, True, True, True, True, True, True, False)
    yield small_forward, (few, W, A, B, m, c, bias, 2.0, False)
    yield small_backward, (few_y, W, A, B, few, 2.0, True)


def leaves(result):
    return [result] if isinstance(result, torch.Tensor) else list(result)


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("k", range(13))
def test_the_same_bits_as_the_code_it_was_read_off(k, hopper, programs, monkeypatch):
    from fdora.triton import _repeat, gemm

    if hopper:  # its products read tiles by descriptors
        monkeypatch.setattr(gemm, "capability", lambda _: 90)
    for seed in range(3):
        op, args = list(calls(seed))[k]
        if seed == 1:  # from here on nothing may run as it is written
            assert [p is not None for p in programs.values()] == [True]
            monkeypatch.setattr(_repeat, "_written_down", None)
        got = op(*args)
        want = op.__wrapped__(*args)
        assert type(got) is type(want)
        for a, b in zip(leaves(got), leaves(want), strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                assert a.dtype == b.dtype and a.stride() == b.stride()
                torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("hopper", [False, True])
@pytest.mark.parametrize("k", range(13))
def test_no_tensor_outlives_its_call(k, hopper, programs, monkeypatch):
    """Neither what was passed to a first call nor what it made."""
    from fdora.triton import gemm

    if hopper:
        monkeypatch.setattr(gemm, "capability", lambda _: 90)
    op, args = list(calls())[k]
    refs = [weakref.ref(t) for t in (*args, *leaves(op(*args))) if isinstance(t, torch.Tensor)]
    del args
    gc.collect()
    assert len(programs) == 1 and not [ref() for ref in refs if ref() is not None]


def test_added_onto_in_place(programs):
    from fdora.triton.gemm import _gemm

    for _ in range(2):
        x, w, h, b, onto = (rand(*s) for s in ((96, 64), (64, 80), (96, 16), (16, 80), (96, 80)))
        args = (x, w, h, b, "onto", None, None, None)
        tail = (None, 0.0, None, False, None, False)
        want = _gemm.__wrapped__(*args, onto.clone(), *tail)[0]
        got = _gemm(*args, onto, *tail)[0]
        assert got is onto
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    assert len(programs) == 1


def test_the_second_call_runs_none_of_its_code(sums):
    op, runs = sums
    for _ in range(3):
        x = rand(40, 24, dtype=torch.float32)
        once, total = op(x)
        torch.testing.assert_close(once, x.sum(0))
        torch.testing.assert_close(total, x.sum(0))
    assert len(runs) == 1


def test_what_its_code_may_look_at_makes_another_kind(sums):
    """Shape, strides, dtype, other arguments."""
    op, runs = sums
    x = rand(40, 24, dtype=torch.float32)
    wide = rand(40, 48, dtype=torch.float32)
    for i, args in enumerate(((x,), (x[:39].clone(),), (x.half(),), (x, 1), (wide[:, :24],)), 1):
        for _ in range(2):
            once, _ = op(*args)
        if i < 5:  # the kernel wants adjacent rows
            limit = 2e-2 if args[0].dtype == torch.float16 else 1e-5  # halves are added as halves
            torch.testing.assert_close(once, args[0].float().sum(0), rtol=limit, atol=limit)
        assert len(runs) == i


def test_a_pointer_that_is_not_aligned_runs_the_code(sums, programs):
    op, runs = sums
    store = rand(40 * 24 + 1, dtype=torch.float32)
    for i, start in enumerate((1, 0, 0, 1, 1), 1):
        x = store[start : start + 960].view(40, 24)
        torch.testing.assert_close(op(x)[0], x.sum(0))
        assert len(runs) == (i if i < 3 else i - 1)
    assert len(programs) == 1


def test_one_tensor_twice_is_not_read_off():
    """The next call of this kind may have two."""
    from fdora.triton.scale import scale_backward

    for twice in (True, False):
        op, args = next(each for each in calls() if each[0] is scale_backward)
        args = (args[1], *args[1:]) if twice else args
        for a, b in zip(op(*args), op.__wrapped__(*args), strict=True):
            assert a is b is None or torch.equal(a, b)


def test_more_than_launches_runs_every_time(programs):
    from fdora.triton._launch import column_sums
    from fdora.triton._repeat import repeatable

    more = {
        "a fill": lambda x: [column_sums(x).zero_()],
        "arithmetic": lambda x: [column_sums(x * 2)],
        "a copy": lambda x: [column_sums(x.t().contiguous())],
        "a view as the result": lambda x: [column_sums(x)[1:]],
        "a part of an argument": lambda x: [column_sums(x[1:])],
        "memory of another": lambda x: [column_sums(held)],
    }
    held = rand(8, 8, dtype=torch.float32)
    for what, f in more.items():
        programs.clear()
        op = repeatable(f)
        for _ in range(2):
            x = rand(8, 8, dtype=torch.float32)
            assert torch.equal(op(x)[0], f(x)[0]), what
        assert list(programs.values()) == [None], what


def test_a_profiler_sees_the_code_run(sums, monkeypatch):
    import triton

    op, runs = sums
    x = rand(40, 24, dtype=torch.float32)
    op(x)
    with monkeypatch.context() as patch:
        patch.setattr(triton.knobs.runtime, "launch_enter_hook", lambda *_: None)
        op(x)
    op(x)
    assert len(runs) == 2


def test_kinds_do_not_pile_up(sums, programs, monkeypatch):
    from fdora.triton import _repeat

    monkeypatch.setattr(_repeat, "MOST", 3)
    op, _ = sums
    for rows in range(1, 12):
        x = rand(rows, 16, dtype=torch.float32)
        torch.testing.assert_close(op(x)[0], x.sum(0))
        assert len(programs) <= 3


@needs_gpu  # the interpreter is for one thread
def test_threads_do_not_write_into_one_another(sums):
    op, _ = sums

    def many(rows):
        for i in range(20):
            x = rand(rows, 16 + i % 4, dtype=torch.float32)
            torch.testing.assert_close(op(x)[0], x.sum(0))

    with ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(many, rows) for rows in (3, 4, 3, 5)]:
            done.result()


def test_inference_mode(sums):
    op, runs = sums
    x = rand(40, 24, dtype=torch.float32)
    with torch.inference_mode():
        assert op(x)[0].is_inference()
    once = op(x)[0]
    assert not once.is_inference() and len(runs) == 1
    torch.testing.assert_close(once, x.sum(0))


def test_straight_to_the_driver(sums, monkeypatch):
    """As on a GPU, with a driver that notes down: pointers, the current stream, and nothing on another device."""
    from fdora.triton import _launch

    def driver(*args):
        asked.append(args)

    op, runs = sums
    asked, built = [], SimpleNamespace(run=driver, function="function", packed_metadata="metadata")
    x = rand(40, 24, dtype=torch.float32)
    monkeypatch.setattr(_launch, "DIRECT", True)
    monkeypatch.setattr(_launch, "_built", {})
    monkeypatch.setattr(_launch, "launch_by_name", lambda *args: built)
    current = x.get_device()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: f"stream of {device}", raising=False)
    op(x)
    once, total = op(x)
    assert len(runs) == 1
    numbers = (40, False, 32, 32)
    head = ("function", "metadata", None, None, None)
    first = (1, 1, 1, f"stream of {current}", *head, x.data_ptr(), once.data_ptr(), 24, *numbers)
    assert asked[-2:] == [first, (*first[:9], once.data_ptr(), total.data_ptr(), 24, 1, *numbers[1:])]
    kept = [weakref.ref(t) for t in (once, total)]
    del once, total
    gc.collect()
    assert not [ref() for ref in kept if ref() is not None]
    current += 1
    op(x)
    assert len(runs) == 2


@needs_gpu
def test_the_current_stream_and_graphs(sums):
    op, runs = sums
    x = rand(400, 240, dtype=torch.float32)
    op(x)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        x.add_(1)
        once = op(x)[0]
    torch.cuda.current_stream().wait_stream(side)
    torch.testing.assert_close(once, x.sum(0))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        once = op(x)[0]
    x.mul_(2)
    graph.replay()
    torch.testing.assert_close(once, x.sum(0))
    assert len(runs) == 1


def layer(M=96):
    """dora_linear with its norm given, by kernels, on leaves."""
    from fdora.functional import dora_linear, dora_norm

    x, W, A, B, m = rand(M, 64), rand(80, 64), rand(16, 64), rand(80, 16), rand(80)
    c = dora_norm(W, A, B, s=2.0, backend="triton")
    leaves = [t.requires_grad_() for t in (x, A, B, m)]
    return leaves, lambda x, A, B, m: dora_linear(x, W, A, B, m, s=2.0, norm=c, backend="triton")


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


@pytest.mark.parametrize("M", [96, 8])
@pytest.mark.parametrize("dtype", [HALF[0], torch.float32])
def test_forward_mode_is_refused_without_a_graph_too(M, dtype):
    """Kernels would write past the tangents."""
    from torch.autograd import forward_ad

    leaves, f = layer(M)
    with torch.no_grad(), forward_ad.dual_level(), pytest.raises(NotImplementedError):
        f(forward_ad.make_dual(leaves[0].detach(), torch.ones_like(leaves[0])), *leaves[1:])


def test_subclasses_run_the_code_and_are_let_go(programs):
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
    assert all(not isinstance(each, torch.Tensor) for kind in programs for each in kind)


def test_a_second_import_takes_the_place_of_the_first():
    code = """
import importlib, sys, torch
import fdora.triton.act
importlib.reload(fdora.triton.act)
for name in [n for n in sys.modules if n.split(".")[0] == "fdora"]:
    del sys.modules[name]
from fdora.autograd._ops import NO_KERNELS, OPS
assert not NO_KERNELS and "triton" in OPS, NO_KERNELS
x = torch.randn(4, 8, device=sys.argv[1])
assert torch.allclose(torch.ops.fdora.activation(x, x, "silu"), torch.nn.functional.silu(x) * x, atol=1e-5)
"""
    done = subprocess.run([sys.executable, "-c", code, device.NAME], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
