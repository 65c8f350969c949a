"""The launcher that remembers: it tells apart whatever Triton tells apart, and steps aside for a profiler."""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import make_backend  # noqa: E402
from triton.runtime import jit  # noqa: E402

from fdora.triton import _launch  # noqa: E402

STORE = torch.zeros(64, dtype=torch.int64)  # 16-byte aligned
INTS = (0, 1, 2, 15, 16, 48, 4096, 2**31 - 1, 2**31, 2**31 + 16, 2**40)


class Recorder(dict):
    """Stands for the memory of built kernels: keeps the keys it was asked for, and knows none."""

    def get(self, key, default=None):
        self.asked = key
        return default


def tensor(dtype, aligned):
    return STORE.view(torch.uint8)[0 if aligned else 8 :][:64].view(dtype)


def key_of(args, monkeypatch, consts=(), num_warps=4):
    memory = Recorder()
    monkeypatch.setattr(_launch, "_built", memory)
    built = SimpleNamespace(run=None, function=None, packed_metadata=None)
    monkeypatch.setattr(_launch, "launch_by_name", lambda *a: built)
    _launch.launch("kernel", (1,), args, consts, num_warps)
    return memory.asked


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(_launch, "DIRECT", True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)


def kernel(a, b, n, m, s):
    """Only its signature matters."""


def test_what_triton_tells_apart_has_another_key(monkeypatch):
    backend = make_backend(GPUTarget("cuda", 90, 32))
    parameters = [jit.KernelParam(i, p, False, False) for i, p in enumerate(jit.inspect.signature(kernel).parameters.values())]
    binder = jit.create_function_from_signature(jit.inspect.signature(kernel), parameters, backend)
    pointers = [tensor(d, a) for d in (torch.bfloat16, torch.float32) for a in (True, False)] + [None]
    rand = random.Random(0)
    found = {}
    for a, b in itertools.product(pointers, pointers):
        for _ in range(30):
            args = (a, b, rand.choice(INTS), rand.choice(INTS), rand.choice((0.5, 1.0)))
            known = found.setdefault(key_of(args, monkeypatch), binder(*args)[1])
            assert str(known) == str(binder(*args)[1]), args
    assert len(found) > 200


def test_constants_warps_and_devices_are_in_the_key(monkeypatch):
    args = (tensor(torch.float32, True), 16)
    keys = {key_of(args, monkeypatch), key_of(args, monkeypatch, (1,)), key_of(args, monkeypatch, (2,))}
    keys |= {key_of(args, monkeypatch, (), 8)}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    assert len(keys | {key_of(args, monkeypatch)}) == 5


def test_the_second_launch_goes_straight_to_the_driver(monkeypatch):
    calls, built = [], []
    handle = SimpleNamespace(run=lambda *a: calls.append(a), function="function", packed_metadata="metadata")
    monkeypatch.setattr(_launch, "_built", {})
    monkeypatch.setattr(_launch, "launch_by_name", lambda *a: built.append(a) or handle)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda device: "stream", raising=False)
    t = tensor(torch.float32, True)
    for _ in range(3):
        _launch.launch("kernel", (7, 2), (t, None, 5, 0.5), (True, 64), 4)
    assert len(built) == 1
    assert calls == [(7, 2, 1, "stream", "function", "metadata", None, None, None, t.data_ptr(), None, 5, 0.5, True, 64)] * 2


def test_a_profiler_gets_every_launch_by_name(monkeypatch):
    built = []
    monkeypatch.setattr(_launch, "launch_by_name", lambda *a: built.append(a))
    for hook in ("launch_enter_hook", "launch_exit_hook"):
        with monkeypatch.context() as patch:
            patch.setattr(triton.knobs.runtime, hook, SimpleNamespace(calls=[print]))
            _launch.launch("kernel", (1,), (1,), (), 4)
    assert len(built) == 2
