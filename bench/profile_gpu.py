"""Rates of a GPU as a training step meets them: what ``fdora.jobs.plan`` predicts times with.

    python -m bench.profile_gpu --device cuda --gpu h200 --json fdora/jobs/plan/profiles/h200.json --commit HASH
    python -m bench.profile_gpu --device cuda --gpu h200 --world 2 --json fdora/jobs/plan/profiles/h200.json --commit HASH

Everything runs in a row for a second before it is timed, so that the GPU is as warm, and draws as much power, as in a step:
layers that run cold for some milliseconds reach a tenth more. What is measured is what a step is made of:

    flops       of the products of two DoRA layers, 4096 x 14336 and back, r = 64, 4096 tokens, forward and backward, when what
                their other kernels take, by ``bytes`` and ``start``, is taken off
    bytes       of RMSNorm as transformers writes it, forward and backward, torch's operations one by one
    start       a kernel that does next to nothing
    attention   and its backward, causal, 4096 tokens, 32 heads of 128 and 8 of keys
    norm16, norm32   flops of the norm of such a layer, adapters in bfloat16 and in float32
    host        what Python and torch take for one small operation
    layer       the same for forward and backward of one DoRA layer through PEFT
    gather, send     with ``--world``: what a GPU receives per second while the parts of a large tensor are gathered, and when
                one sends it to another; a process each, by NCCL (gloo on a CPU)

An earlier file of the same GPU keeps the rates that this call does not measure. Medians.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from bench.clock import capture, medians, once, replay_ms, synchronize, wall_timer
from bench.save import save
from bench.suite import Suite
from bench.ways import away
from fdora.functional import dora_init, dora_linear, dora_norm
from fdora.functional.backend import RECORDED
from fdora.jobs.plan.record import Kernel, empty, record

Fn = Callable[[], object]


def sustained(fn: Fn, device: str, runs: int, warm: float) -> float:
    """Seconds of one call, of GPU time, after so many seconds of such calls; median of ``runs`` replays."""
    if device == "cpu":
        return statistics.median(once(fn, device) for _ in range(runs)) / 1e3
    for _ in range(2):
        fn()
    torch.cuda.synchronize()
    graph = capture(fn, 1)
    calls = max(1, min(1000, round(0.02 / (replay_ms(graph) / 1e3))))  # of 20 ms
    graph = capture(fn, calls)
    begin, times = time.perf_counter(), []
    while time.perf_counter() - begin < warm:
        replay_ms(graph)
    for _ in range(runs):
        times.append(replay_ms(graph) / calls / 1e3)
    return statistics.median(times)


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    """As transformers' LlamaRMSNorm."""
    wide = x.to(torch.float32)
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
    return weight * wide.to(x.dtype)


def kernels(fn: Callable[[Tensor], Tensor], *shape: int) -> list[Kernel]:
    """What it starts on an input of this shape, forward and backward."""
    found = record(fn, shape, 1)
    return [*found.forward.kernels, *found.backward.kernels]


def rates(device: str, runs: int, small: int, warm: float) -> dict[str, float]:
    """``small`` divides sizes, for a smoke test."""

    def make(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        return (torch.randn(*shape, device=device) * shape[-1] ** -0.5).to(dtype)

    def seconds(fn: Fn) -> float:
        return sustained(fn, device, runs, warm)

    M, K, N, r = 4096 // small, 4096 // small, 14336 // small, 64 // small
    x, dy, weight, tiny = make(M, K).requires_grad_(), make(M, K), make(K), make(1024)
    start = seconds(lambda: torch.mul(tiny, tiny))
    work = kernels(lambda x: rms_norm(x, empty(K)), M, K)
    both = seconds(lambda: torch.autograd.grad(rms_norm(x, weight), x, dy))
    moved = sum(kernel.bytes for kernel in work)
    found = {"start": start, "bytes": moved / (both - start * len(work))}

    layers = []
    for rows, columns in ((N, K), (K, N)):
        W = make(rows, columns)
        *params, c = away(W, r, torch.bfloat16)
        layers.append((W, *(t.requires_grad_() for t in params), c))

    def layers_there_and_back() -> object:
        y = x
        for W, A, B, m, c in layers:
            y = dora_linear(y, W, A, B, m, s=2.0, norm=c)
        return torch.autograd.grad(y, [x, *(t for layer in layers for t in layer[1:4])], dy)

    def recorded(x: Tensor) -> Tensor:
        for W, *params, c in layers:
            A, B, m = (t.detach().to("meta").requires_grad_() for t in params)
            x = dora_linear(x, W.to("meta"), A, B, m, s=2.0, norm=c.to("meta"), backend=RECORDED)
        return x

    work = kernels(recorded, M, K)
    large = [kernel for kernel in work if kernel.flops > M * N * K]  # as much as their rate allows; the others, as memory
    rest = sum(start + kernel.bytes / found["bytes"] for kernel in work if kernel not in large)
    took = seconds(layers_there_and_back) - start * len(large) - rest
    found["flops"] = sum(kernel.flops for kernel in large) / took

    heads, kv, head = 32, 8, 128 // small
    q, k, v = (make(1, h, M, head).requires_grad_() for h in (heads, kv, kv))
    dy = make(1, heads, M, head)

    def attend() -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

    flops, forward = 2 * M * M * heads * head, seconds(torch.no_grad()(attend))
    both = seconds(lambda: torch.autograd.grad(attend(), (q, k, v), dy))
    found |= {"attention": flops / forward, "attention_backward": 2.5 * flops / (both - forward)}
    W, A, B, _, _ = layers[0]
    for name, dtype in (("norm16", torch.bfloat16), ("norm32", torch.float32)):
        a, b = A.detach().to(dtype), B.detach().to(dtype)
        found[name] = 2 * N * K * r / seconds(lambda: dora_norm(W, a, b, s=2.0))
    return found


def host(device: str, runs: int) -> dict[str, float]:
    """Seconds until the next operation can be issued."""
    from bench.rivals import peft_layer
    from fdora.integrations.peft import use_fdora

    x = torch.randn(16, 256, device=device, dtype=torch.bfloat16)
    W = torch.randn(256, 256, device=device, dtype=torch.bfloat16)
    layer, _ = peft_layer(W, *dora_init(W, 8), 2.0)
    use_fdora(layer)
    one = x.requires_grad_()
    parameters = [p for p in layer.parameters() if p.requires_grad]
    fns = {"host": lambda: torch.add(W, W), "layer": lambda: torch.autograd.grad(layer(one).sum(), parameters)}
    return {name: t / 1e3 for name, t in medians({n: wall_timer(f, device) for n, f in fns.items()}, runs).items()}


def links(rank: int, options) -> dict[str, float]:
    """Bytes that a GPU receives per second, of one process."""
    device, world, numel = options.device, options.world, 2**27 // options.small**3
    where = f"cuda:{rank}" if device != "cpu" else "cpu"
    part = torch.ones(numel, device=where, dtype=torch.bfloat16)
    whole = torch.empty(numel * world, device=where, dtype=torch.bfloat16)

    def send() -> None:
        if rank == 0:
            dist.send(part, 1)
        elif rank == 1:
            dist.recv(part, 0)

    found = {}
    for name, fn, moved in (("gather", lambda: dist.all_gather_into_tensor(whole, part), world - 1), ("send", send, 1)):
        fn()
        seconds = []
        for _ in range(options.runs + 1):
            synchronize(device)
            dist.barrier()
            seconds.append(wall_timer(fn, device, 0)() / 1e3)
        found[name] = moved * part.nbytes / sorted(seconds[1:])[options.runs // 2]
    return found


OPTIONS = {
    "--gpu": dict(required=True, help="its name in fdora.predict.GPUS"),
    "--warm": (0.7, "seconds of the same work before it is timed"),
    "--small": (1, "divides the sizes, for a smoke test"),
}


def measure(run):
    """What is written is data that fdora reads, not a measurement for a page."""
    options, path = run.options, run.options.json
    options.json = None
    torch.manual_seed(0)
    if options.world > 1:
        new = links(run.rank, options)
    else:
        new = rates(options.device, options.runs, options.small, options.warm) | host(options.device, options.runs)
    if run.rank:
        return
    earlier = json.loads(path.read_text()) if path and path.exists() else {}
    found = earlier.get("profile", {}) if earlier.get("gpu") == options.gpu else {}
    memory = torch.cuda.get_device_properties(0).total_memory if options.device != "cpu" else 0
    found = {name: float(f"{value:.4g}") for name, value in (found | new).items()}
    save(path, {"about": run.facts, "gpu": options.gpu, "memory": memory, "profile": found})
    print(json.dumps(found, indent=1))


main = Suite(measure, OPTIONS, runs=9, world=1)
