"""The kernels at home in torch: compiled, captured, on streams and threads, forked, past 2^31 elements, checkpointed, mapped.

What needs no GPU runs interpreted too (TRITON_INTERPRET=1); the rest with --device cuda.
"""

import faulthandler
import importlib
import os
import pkgutil
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

from fdora.functional import (
    dora_embedding,
    dora_experts,
    dora_linear,
    dora_merge,
    dora_norm,
    dora_norm_state,
    select_backend,
)
from fdora.functional.act import gated_act
from fdora.functional.multi import multi_together
from fdora.quant import quantize
from fdora.triton.op import Maker
from tests import device, reference
from tests.close import rel_l2
from tests.cover import covering
from tests.make import tensors
from tests.triton.drawn import NAMES, backward_of, calls, results
from tests.triton.marks import INTERPRETED, needs_gpu, needs_kernels
from tests.triton.test_explain import OTHERS

either = needs_kernels
gpu = needs_gpu
HALF = torch.float16 if INTERPRETED else torch.bfloat16  # the interpreter of Triton 3.6 multiplies bf16 wrongly
BACKEND = {"backend": "triton"} if INTERPRETED else {}  # on a GPU "auto" must get there by itself
TRAINED = ("x", "A", "B", "m", "bias")
S = 0.7
# how a layer is called: is the norm given, and what is dropped
CALLS = {
    "norm given": dict(given=True),
    "norm inside": dict(given=False),
    "dropout": dict(given=False, dropout_p=0.3, dropout_mode="lora"),
    "peft dropout": dict(given=True, dropout_p=0.3, dropout_mode="peft"),
}
SMALL, TILED = 40, 200  # tokens: the kernel for few of them, and tiles


def inputs(M, seed=0, N=136, K=80, r=8, adapter=torch.float32):
    """x, W, A, B, m, bias, dy and the dropout seed, on the device under test."""
    t = tensors(N, K, r, (M,), HALF, adapter, s=S, seed=seed)
    del t["s"]
    t["dy"] = torch.randn(M, N, generator=torch.Generator().manual_seed(seed)).to(t["x"])
    return t | {"seed": torch.tensor(seed + 3, device=device.NAME)}


def forward(x, W, A, B, m, bias, seed, given=False, **extra):
    c = dora_norm(W, A, B, s=S, **BACKEND) if given else None
    return dora_linear(x, W, A, B, m, s=S, bias=bias, norm=c, **({"seed": seed} if extra else {}), **extra, **BACKEND)


def step(t, call, forward=forward):
    """y and the gradients of x, A, B, m and bias."""
    leaves = {n: t[n].detach().requires_grad_() for n in TRAINED}
    y = forward(**{n: leaves.get(n, v) for n, v in t.items() if n != "dy"}, **call)
    return [y.detach(), *torch.autograd.grad(y, list(leaves.values()), t["dy"])]


def assert_near(got, want, limit=1e-3):
    for n, a, b in zip(("y", *TRAINED), got, want, strict=True):
        assert a.dtype == b.dtype and rel_l2(a, b) <= limit, f"{n}: {rel_l2(a, b):.2g}"


def assert_same(got, want):
    for n, a, b in zip(("y", *TRAINED), got, want, strict=True):
        assert torch.equal(a, b), f"{n}: {rel_l2(a, b):.2g}"


@gpu
def test_kernels_are_chosen():
    assert select_backend(inputs(1)["x"]).name == "triton"


@gpu
@pytest.mark.parametrize("M", [SMALL, TILED])
@pytest.mark.parametrize("call", CALLS)
def test_captured_in_a_graph(call, M):
    """The graph computes from the values that stand there when it is replayed, the seed of the mask among them."""
    call, t = CALLS[call], inputs(M)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):
            first = step(t, call)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(t, call)
    for seed in (1, 2):
        for n, v in inputs(M, seed).items():
            t[n].copy_(v)
        for v in out:
            v.fill_(float("nan"))
        graph.replay()
        want = step(t, call)
        assert_near(out, want)
        assert rel_l2(first[0], want[0]) > 0.1


@gpu
def test_each_replay_draws_another_mask_without_a_seed():
    t = inputs(TILED)
    args = [t[n] for n in ("x", *"WABm")]
    dora_linear(*args, s=S, dropout_p=0.5)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = dora_linear(*args, s=S, dropout_p=0.5)
    graph.replay()
    one = y.clone()
    graph.replay()
    assert not torch.equal(one, y)


@gpu
@pytest.mark.parametrize("M", [SMALL, TILED])
def test_side_stream(M):
    """The input arrives late on that stream: a launch on another one would read what stood there before."""
    t = inputs(M)
    want = step(t, CALLS["dropout"])
    late, x = t["x"].clone(), t["x"].zero_()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        torch.cuda._sleep(40_000_000)
        x.copy_(late)
        assert not stream.query()  # it is late
        got = step(t, CALLS["dropout"])
    stream.synchronize()
    assert_same(got, want)


@gpu
def test_current_device_and_stream_stay():
    before = torch.cuda.current_device(), torch.cuda.current_stream()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step(inputs(TILED), CALLS["peft dropout"])
        assert torch.cuda.current_stream() == stream
    assert (torch.cuda.current_device(), torch.cuda.current_stream()) == before


@either
def test_every_launch_is_made_on_the_device_of_its_tensors(monkeypatch, chosen_anew):
    """Without a second GPU: the walk makes it the current one, and the one of before again, also after an error."""
    from fdora.triton.runtime import walk
    from fdora.triton.runtime.device import Device

    mine, others = 7, 3
    current, seen, outside, product = [others], set(), [], walk._product

    def note(name):
        seen.add(name)
        if current[0] != mine:
            outside.append(name)

    def exchange(index):
        before, current[0] = current[0], index
        return before

    monkeypatch.setattr(walk, "device_of", lambda device: Device(mine, 0, 2, False))
    monkeypatch.setattr(walk, "current_device", lambda: current[0])
    monkeypatch.setattr(walk, "exchange_device", exchange)
    monkeypatch.setattr(walk.native, "program", lambda plan: False)
    monkeypatch.setattr(walk.native, "remember", lambda device, step, built: note(step.kernel.fn.__name__))
    monkeypatch.setattr(walk, "_product", lambda *args: (note("product"), product(*args)))
    assert all([*results(name, 4)] for name in NAMES)
    assert len(seen) >= 40 and not outside, f"{outside} of {seen}"
    assert current == [others]
    monkeypatch.setattr(walk, "_walk", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        dora_merge(*(inputs(1)[n] for n in "WABm"), s=S, **BACKEND)
    assert current == [others]


@gpu
def test_threads_at_once():
    """Each on a stream of its own; they also compile the kernels together, for no other test has this shape."""
    jobs = [inputs(M, seed=i, N=264, K=96, r=24) for i, M in enumerate((SMALL, TILED, 130, TILED))]
    torch.cuda.synchronize()
    start = threading.Barrier(len(jobs))

    def work(t, call):
        start.wait()
        with torch.cuda.stream(torch.cuda.Stream()):
            runs = [step(t, call) for _ in range(10)]
            torch.cuda.current_stream().synchronize()
        return runs

    with ThreadPoolExecutor(len(jobs)) as pool:
        results = list(pool.map(work, jobs, CALLS.values()))
    for t, call, runs in zip(jobs, CALLS.values(), results, strict=True):
        want = step(t, call)
        for got in runs:
            assert_same(got, want)


@gpu
def test_a_forked_child_may_use_the_cpu():
    """Forward only: torch refuses any backward in a child whose parent has run one on a GPU."""
    step(inputs(TILED), CALLS["dropout"])
    t = {n: v.cpu() for n, v in inputs(5).items()}
    want = dora_linear(*(t[n] for n in ("x", *"WABm")), s=S)
    child = os.fork()
    if child == 0:
        try:
            faulthandler.dump_traceback_later(600, exit=True)  # where it hangs, instead of for ever
            torch.set_num_threads(1)  # libgomp does not survive a fork
            with torch.no_grad():
                got = dora_linear(*(t[n] for n in ("x", *"WABm")), s=S)
                dora_merge(*(t[n] for n in "WABm"), s=S)
            os._exit(0 if rel_l2(got, want) <= 1e-2 else 1)
        except BaseException:
            os._exit(2)
    _, status = os.waitpid(child, 0)
    assert status == 0
    step(inputs(TILED), CALLS["dropout"])  # and the parent goes on


CHILDREN = """
import faulthandler, multiprocessing, sys, torch
from fdora.functional import dora_linear, dora_norm, select_backend

def run(device, back):
    faulthandler.dump_traceback_later(600, exit=True)  # where it hangs, instead of for ever
    x, W, A, B, m = (torch.ones(*shape, device=device, requires_grad=shape != (48, 32))
                     for shape in ((70, 32), (48, 32), (8, 32), (48, 8), (48,)))
    y = dora_linear(x, W, A, B, m, s=1.0, norm=dora_norm(W, A, B, s=1.0))
    if back:
        y.sum().backward()
        assert x.grad is not None
    assert select_backend(x).name == ("eager" if device == "cpu" else "triton")
    assert torch.allclose(y, torch.full_like(y, 32**0.5), rtol=1e-2)

if __name__ == "__main__":
    torch.set_num_threads(1)  # libgomp does not survive a fork
    run("cpu", False)  # a backward starts threads of torch's that do not survive a fork
    assert not torch.cuda.is_initialized()
    children = [multiprocessing.get_context(how).Process(target=run, args=("cuda", True), daemon=True) for how in ("fork", "spawn")]
    for child in children:
        child.start()
    for child in children:
        child.join()
    sys.exit(any(child.exitcode != 0 for child in children))
"""


@gpu
def test_children_may_use_the_gpu_after_the_parent_used_the_cpu(tmp_path):
    """Forked or spawned: importing and using the library on a CPU does not start CUDA."""
    (tmp_path / "children.py").write_text(CHILDREN)
    root = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))
    done = subprocess.run(
        [sys.executable, tmp_path / "children.py"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([root, *sys.path])},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@gpu
@pytest.mark.parametrize("mode", ["plain", "peft dropout and bias"])
def test_past_two_to_the_31_elements(mode):
    """Only the last rows, whose offsets need 64 bits, hold anything. (W itself past 2^31: test_norm.py and test_merge.py.)"""
    from fdora.eager.dropout import drop

    M, K, N, tail, p = 270_000, 64, 8192, 300, 0.3
    assert (M - tail) * N > 2**31
    if torch.cuda.mem_get_info()[0] < 40 << 30:
        pytest.skip("needs 40 GiB of free GPU memory; runs with --device cuda on a GPU of 80 GiB")
    t = inputs(tail, N=N, K=K)
    big = {n: torch.zeros(M, t[n].shape[1], device=device.NAME, dtype=HALF) for n in ("x", "dy")}
    for n, v in big.items():
        v[-tail:] = t[n]
    call, masked, names = {}, None, TRAINED[:4]
    if mode != "plain":
        call, names = dict(dropout_p=p, dropout_mode="peft"), TRAINED
        kept = drop(torch.ones_like(big["x"], dtype=torch.float64), t["seed"], p)[-tail:]
        masked = lambda x: x * kept  # noqa: E731
    leaves = {n: (big if n == "x" else t)[n].detach().requires_grad_() for n in names}
    args = [leaves["x"], t["W"], *(leaves[n] for n in "ABm")]
    y = dora_linear(*args, s=S, bias=leaves.get("bias"), **({"seed": t["seed"]} if call else {}), **call)
    got = dict(zip(names, torch.autograd.grad(y, list(leaves.values()), big["dy"]), strict=True))
    wide = {n: t[n].double().requires_grad_() for n in names}
    args = [wide["x"], t["W"], *(wide[n] for n in "ABm")]
    want = reference.dora(*args, S, wide.get("bias"), dropped=masked, mode="peft" if call else "lora")
    truth = dict(zip(names, torch.autograd.grad(want, list(wide.values()), t["dy"].double()), strict=True))
    assert rel_l2(y[-tail:], want.detach()) <= 4e-3
    assert rel_l2(got["x"][-tail:], truth["x"]) <= 6e-3 and not got["x"][:tail].any()
    for n in names[1:]:
        assert rel_l2(got[n], truth[n]) <= 6e-3, n


def form(v):
    """What an op may look at but for sizes and values."""
    return (v.dtype, v.ndim) if isinstance(v, torch.Tensor) else v if isinstance(v, (bool, str)) or v is None else type(v)


class Seen(TorchDispatchMode):
    """Notes the arguments of every custom op, by its name, and the form of each."""

    def __init__(self):
        super().__init__()
        self.args = {}

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op.namespace == "fdora":
            args = tree_map_only(torch.Tensor, torch.Tensor.detach, args)
            forms = [f"{i} {tree_map(form, v)}" for i, v in enumerate(args)]
            self.args.setdefault(op._schema.name.removeprefix("fdora::"), []).append((args, forms))
        return op(*args, **kwargs or {})


def more_calls():
    """Ops that no drawn call reaches, and forms of those that some do."""
    t = inputs(9)
    W, A, B, m, x = (t[n] for n in ("W", "A", "B", "m", "x"))
    codes, bank = quantize(torch.cat([W, W]), "nf4"), [torch.stack([v, v]).requires_grad_() for v in (A, B, m)]
    ends, ids = torch.tensor([4, 9], device=x.device), torch.arange(9, device=x.device) % 3
    yield dora_experts(x, codes.to(HALF), *bank, s=S, offsets=ends, backend="triton")
    yield dora_embedding(ids, W, B.T.requires_grad_(), A.T, m[:80], s=S, sparse=True, backend="triton")
    yield torch.ops.fdora.norm_backward(m, W, A, B, m, S, [True, True])  # a call reaches it with a bfloat16 W
    yield torch.ops.fdora.model_norms([W, W.T], [A, B.T], [B, A.T], [S, 2 * S])
    yield gated_act(x.requires_grad_(), x, backend="triton")
    yield gated_pair()
    kept = dora_norm(W, A, B, s=S, state=dora_norm_state(W), backend="triton")
    yield torch.ops.fdora.row_norms_kept([W] * 2, [A] * 2, [B] * 2, [S] * 2, *zip(kept, kept, strict=True))


def gated_pair():
    draw = partial(torch.randn, dtype=torch.float16, device=device.NAME)
    A, B, m = draw(2, 4, 32), draw(2, 48, 4), torch.rand(2, 48, device=device.NAME)
    layer = {"W": draw(48, 32), "A": A.requires_grad_(), "B": B, "m": m.requires_grad_(), "s": [S, S], "backend": "triton"}
    ends = torch.tensor([8, 20], dtype=torch.int32, device=device.NAME)
    return multi_together(draw(20, 32), [layer, layer], ends, "silu")[0]


@pytest.fixture(scope="module")
def seen():
    with Seen() as found:
        drawn = (found for name in NAMES for found in calls(name, 10))
        for fn, args, kwargs in (*(make() for make in OTHERS.values()), *drawn):
            backward_of(fn(*args, backend="triton", **kwargs))
        for y in more_calls():
            backward_of(tuple(y) if isinstance(y, list) else y)
    return {name: list(islice(covering(each), 8)) for name, each in found.args.items()}


def custom_ops():
    package = importlib.import_module("fdora.triton")
    modules = [importlib.import_module(f"fdora.triton.{m.name}") for m in pkgutil.iter_modules(package.__path__)]
    values = [v.op if isinstance(v, Maker) else v for module in modules for v in vars(module).values()]
    ops = [v for v in values if isinstance(v, torch._ops.OpOverload)]
    return {op._schema.name.removeprefix("fdora::"): op for op in ops}


OPS = sorted({*custom_ops()} - {"segment_sum"})


@either
def test_every_custom_op_is_reached(seen):
    assert {*OPS} <= {*seen}


@either
@pytest.mark.parametrize("name", OPS)
def test_a_custom_op_passes_opcheck(name, seen):
    """Schema, fake tensors, static and dynamic tracing."""
    # the schema is checked by writing to every argument, which torch cannot where numbers have 8 bits
    rest = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for args in seen[name]:
        eight = any(t.dtype == torch.float8_e4m3fn for t in tree_leaves(args) if isinstance(t, torch.Tensor))
        torch.library.opcheck(custom_ops()[name], args, test_utils=rest if eight else ("test_schema", *rest))
