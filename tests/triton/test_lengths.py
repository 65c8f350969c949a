"""Numbers of tokens that never repeat: what stays of each in memory, and kernels that are compiled before any comes."""

import os
import threading
from functools import partial
from inspect import signature
from itertools import count
from time import sleep
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

import fdora
from fdora import _facts
from fdora.functional import ahead, dora_linear
from fdora.triton import linear, tree
from fdora.triton.dropped import LEAST
from fdora.triton.runtime import family, walk
from fdora.triton.runtime.device import Device
from fdora.triton.runtime.private import HAS_PDL
from fdora.triton.runtime.rows import class_of
from tests import device
from tests.triton.marks import HALF, INTERPRETED, needs_kernels  # noqa: F401 (read by the mark)
from tests.triton.recorder import assembled, recording
from tests.triton.test_walk import in_c, on_cpu
from tests.triton.written import BF16, FP32, alike, arrays, by_tma, layer

MiB = 2**20
K, N, r = 2048, 1024, 16
NUMBERS = count(90)  # of GPUs for which nothing was compiled


def resident():
    """Bytes of this process."""
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@in_c
@on_cpu
def test_ten_thousand_lengths_leave_little_behind(chosen_anew, monkeypatch):
    """Plans with what walk.c runs of them: of the lengths that came last, and of no more."""
    monkeypatch.setattr(walk, "device_of", lambda device: Device(0, 90, 132, True))
    monkeypatch.setattr(walk, "ready", bool)
    monkeypatch.setattr(_facts, "facts", _facts.python_facts)

    def bare(*shape, dtype=torch.bfloat16):
        return torch.empty(*shape, dtype=dtype, device="meta")

    layer = bare(N, K), bare(r, K), bare(N, r), bare(N), bare(N, dtype=torch.float32), None, None
    options = 0.0, "lora", ("output",), True, (), ()
    with recording(compute=False) as (module, recorder):
        for M in range(64, 10_064):
            if M == 164:
                before = resident()
            plan = walk.plan_for(linear.plan_forward, (bare(M, K), *layer), *options)
            plan.native, _ = assembled(plan, module, recorder)
    assert len(chosen_anew) == walk.MAX_PLANS < 10_000
    assert resident() - before < 50 * MiB  # all of them: 90


def test_all_lengths_share_few_kernels():
    """Of Qwen3-8B's o_proj with float32 adapters and dropout in PEFT's meaning: numbers that 16 divides, and others; from 2048
    tokens on by other kernels, those of dropped.py."""
    ahead.load_kernels()
    meta = partial(torch.empty, device="meta")
    W, A, B, m = meta(4096, 4096, dtype=torch.bfloat16), meta(64, 4096), meta(4096, 64), meta(4096)
    trained = [t.requires_grad_() for t in (A, B, m)]
    found, few = set(), set()
    for M in range(64, 4001, 23):
        x = meta(M, 4096, dtype=torch.bfloat16, requires_grad=True)
        how = dict(s=2.0, norm=meta(4096), dropout_p=0.05, dropout_mode="peft")
        call = signature(dora_linear).bind(x, W, *trained, **how)
        call.apply_defaults()
        noted, *_ = ahead.record(dora_linear, call, Device(0, 90, 132, True), False)
        keys = {key for plan in noted.plans for key in walk.native.keys_of(plan)}
        found |= keys
        few |= keys if (class_of(M) or [M])[-1] < LEAST else set()
    assert 10 < len(few) <= 20 and len(found - few) <= 11


@pytest.fixture
def compiled(tmp_path, monkeypatch):
    """An sm_90 in the place of this machine's GPU, whose launches do nothing, and an empty cache: what is compiled, and where."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver

    seen, number = [], next(NUMBERS)

    def note(src, cache_hit, **facts):
        seen.append((src.name, threading.current_thread() is threading.main_thread()))
        assert not cache_hit

    utils = SimpleNamespace(
        get_device_properties=lambda device: {"max_shared_mem": 232_448},
        load_binary=lambda *args: (1, 1, 32, 0, 1024),
        unload_module=lambda module: None,
    )
    hopper = SimpleNamespace(
        get_current_device=lambda: number,
        get_current_stream=lambda device: 0,
        get_current_target=lambda: GPUTarget("cuda", 90, 32),
        launcher_cls=lambda src, metadata: lambda *args: None,
        utils=utils,
    )
    monkeypatch.setattr(driver, "_active", hopper)
    monkeypatch.setattr(walk.native, "_AVAILABLE", False)  # nobody is to ask a real driver about these
    monkeypatch.setattr(triton.knobs.cache, "dir", str(tmp_path))
    monkeypatch.setattr(triton.knobs.compilation, "listener", note)
    return seen


def tensor_like(like):
    if like is not None:
        skipped = 0 if like.aligned else 1
        whole = torch.empty(skipped + like.nbytes // like.dtype.itemsize, dtype=like.dtype, device="meta")
        return whole.as_strided(like.shape, like.stride, skipped)


@pytest.mark.parametrize("aligned", [True, False])
def test_kernels_are_compiled_in_threads_as_a_walk_asks_for_them(aligned, compiled, monkeypatch):
    """After that it compiles nothing: dtypes, alignment, descriptors, constants and options are those of the launches. No two
    kernels are parsed at a time."""
    import triton

    parse, inside, most = triton.JITFunction.parse, [], []

    def seen(kernel):
        inside.append(kernel)
        most.append(len(inside))
        sleep(0.002)  # others may come
        inside.pop()
        return parse(kernel)

    monkeypatch.setattr(triton.JITFunction, "parse", seen)
    likes = alike(64, 64, dtype=BF16, aligned=aligned), *layer(64, 64, 16, BF16, FP32, seed=True)
    plan = linear.plan_forward(likes, Device(-1, 90, 132, HAS_PDL), 0.1, "peft", ("output",), True)
    steps = walk.native.launches_of(plan)
    assert any(map(by_tma, steps)) and aligned == all(a.aligned for step in steps for a in arrays(step))
    walk.compile_launches(steps)
    assert max(most) == 1 and triton.JITFunction.parse is seen
    assert len(compiled) == len(set(walk.native.keys_of(plan))) > 2
    in_threads = hasattr(triton, "AsyncCompileMode")  # Triton 3.6 has it
    assert not any(at_home for _, at_home in compiled if in_threads)
    before = len(compiled)
    walk.run(plan, tuple(map(tensor_like, likes)), (2.0,))
    assert len(compiled) == before


@needs_kernels
def test_a_warm_up_runs_each_form_of_layer_with_few_lengths(kernels_everywhere, chosen_anew, monkeypatch):
    """After it no length of these starts a kernel that was not started before, and the model is what it was."""
    from peft import LoraConfig, get_peft_model

    from fdora.integrations.peft import use_fdora
    from tests.integrations.tiny import llama

    base = llama(hidden_size=32, intermediate_size=48, num_attention_heads=2, num_key_value_heads=1)
    model = get_peft_model(base, LoraConfig(r=4, use_dora=True, target_modules="all-linear"))
    model = use_fdora(model.to(device.NAME, HALF[0]))
    ran, run = [], ahead.Ahead.run
    monkeypatch.setattr(ahead.Ahead, "run", lambda call, tokens: (ran.append((call.fn.__name__, tokens)), run(call, tokens)))
    together, guarded = [], tree.TreeLayers.guarded
    monkeypatch.setattr(tree.TreeLayers, "guarded", lambda own, *of: together.append(own.count) or guarded(own, *of))
    before = {name: t.clone() for name, t in model.state_dict().items()}
    lengths = [17, 18, 80, 81]
    seconds, kernels = fdora.warmup(model, lengths)
    assert seconds > 0 and kernels > 5 and together == [14]  # the norms of all layers
    assert {name for name, _ in ran} <= {"dora_linear_group", "dora_linear", "dora_mlp"} and 3 < len(ran) < 9
    assert all(torch.equal(t, before[name]) for name, t in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    known = {key for plan in chosen_anew.values() for key in walk.native.keys_of(plan)}
    dict.clear(chosen_anew)  # not what they are filled in from
    written = {key for key in family._families if key[0].write.__name__ == "plan_forward"}
    for tokens in (80, 18):
        model(input_ids=torch.zeros(1, tokens, dtype=torch.int64, device=device.NAME)).logits.sum().backward()
    of_layers = [plan for plan in chosen_anew.values() if "norm" not in plan.name]
    assert of_layers and not {key for plan in of_layers for key in walk.native.keys_of(plan)} - known
    assert {key for key in family._families if key[0].write.__name__ == "plan_forward"} == written and len(written) > 2


def test_a_warm_up_says_what_it_wants():
    pytest.importorskip("peft", reason="needs PEFT; `make test` installs it")
    from peft import LoraConfig, get_peft_model

    from fdora.integrations.peft import use_fdora

    model = get_peft_model(torch.nn.Sequential(torch.nn.Linear(8, 8)), LoraConfig(r=2, use_dora=True, target_modules=["0"]))
    with pytest.raises(fdora.FdoraError, match="must have linear layers that fdora runs"):
        fdora.warmup(model, 5)
    use_fdora(model)
    with fdora.backend("eager"):
        assert fdora.warmup(model, range(1, 5)) == (0.0, 0)
    for wrong in (0, [3, -1], ["4"]):
        with pytest.raises(fdora.FdoraError, match="`tokens` must be a positive int"):
            fdora.warmup(model, wrong)
