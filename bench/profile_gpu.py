"""Rates of a GPU as a training step meets them: what ``fdora.plan`` predicts times with.

    python -m bench.profile_gpu --device cuda --gpu h200 --json fdora/plan/profiles/h200.json --commit HASH
    python -m bench.profile_gpu --device cuda --gpu h200 --world 2 --json fdora/plan/profiles/h200.json --commit HASH

Each is a slope, so that what a launch costs does not count as work: of products between two numbers of tokens, of passes over
memory between two sizes, of attention between two lengths. ``start`` is what is left of the smallest pass. Products run one
after the other for long enough to be throttled, as they are in a step. ``host`` is what Python and torch take for one small
operation, ``layer`` for forward and backward of one DoRA layer through PEFT. With ``--world`` also what a GPU receives per
second while the parts of a large tensor are gathered, and when one sends it to another; a process each, by NCCL (gloo on a
CPU). An earlier file of the same GPU keeps the rates that this call does not measure. Medians of replayed CUDA graphs, in
turns.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F

from bench.clock import anchor_graph, graph_timer, medians, synchronize, wall_timer
from bench.norm_forms import about
from bench.save import save

Fn = Callable[[], object]


def times(fns: dict[str, Fn], device: str, runs: int) -> dict[str, float]:
    """Seconds, of GPU time."""
    if device == "cpu":
        return {name: t / 1e3 for name, t in medians({n: wall_timer(f, device, 0) for n, f in fns.items()}, runs).items()}
    anchor = anchor_graph()
    return {name: t / 1e3 for name, t in medians({n: graph_timer(f, anchor) for n, f in fns.items()}, runs).items()}


def rates(device: str, runs: int, small: int) -> dict[str, float]:
    """``small`` divides sizes, for a smoke test."""
    dtype = torch.bfloat16

    def make(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.randn(*shape, device=device, dtype=torch.float32).to(dtype)

    K, N, many, few = 4096 // small, 14336 // small, 8192 // small, 2048 // small
    x, W = make(many, K), make(N, K)
    fns: dict[str, Fn] = {}
    for M in (many, few):  # a hundred products in a row, there and back

        def chain(M=M) -> None:
            for _ in range(3):
                (x[:M] @ W.T) @ W

        fns[f"product {M}"] = chain
    sizes = 2**26 // small**2, 2**22 // small**2, 2**10
    for n in sizes:
        t, out = make(n, dtype=torch.float32), torch.empty(n, device=device)
        fns[f"pass {n}"] = lambda t=t, out=out: torch.mul(t, t, out=out)
    heads, kv, head = 32, 8, 128 // small
    lengths = 8192 // small, 2048 // small
    backward: dict[str, tuple] = {}
    for S in lengths:
        q, k, v = (make(1, h, S, head).requires_grad_() for h in (heads, kv, kv))
        dy = make(1, heads, S, head)

        def attend(q=q, k=k, v=v) -> torch.Tensor:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)

        def there_and_back(q=q, k=k, v=v, dy=dy, attend=attend) -> object:
            return torch.autograd.grad(attend(), (q, k, v), dy)

        fns[f"attention {S}"] = torch.no_grad()(attend)
        fns[f"attention and backward {S}"] = there_and_back
        backward[str(S)] = (q, k, v)
    found = times(fns, device, runs)
    a, b = lengths
    work = 2 * heads * head * (a * a - b * b)  # both products, half of them masked
    forward = found[f"attention {a}"] - found[f"attention {b}"]
    both = found[f"attention and backward {a}"] - found[f"attention and backward {b}"]
    moved = 8 * (sizes[0] - sizes[1])
    return {
        "flops": 12 * (many - few) * N * K / (found[f"product {many}"] - found[f"product {few}"]),
        "bytes": moved / (found[f"pass {sizes[0]}"] - found[f"pass {sizes[1]}"]),
        "start": found[f"pass {sizes[2]}"],
        "attention": work / forward,
        "attention_backward": 2.5 * work / (both - forward),
    }


def host(device: str, runs: int) -> dict[str, float]:
    """Seconds until the next operation can be issued."""
    from bench.rivals import peft_layer
    from fdora.functional import dora_init
    from fdora.integrations.peft import use_fdora

    x = torch.randn(16, 256, device=device, dtype=torch.bfloat16)
    W = torch.randn(256, 256, device=device, dtype=torch.bfloat16)
    layer, _ = peft_layer(W, *dora_init(W, 8), 2.0)
    use_fdora(layer)
    one = x.requires_grad_()
    parameters = [p for p in layer.parameters() if p.requires_grad]
    y = layer(one)
    fns = {"host": lambda: torch.add(W, W), "layer": lambda: torch.autograd.grad(layer(one).sum(), parameters)}
    del y
    return {name: t / 1e3 for name, t in medians({n: wall_timer(f, device) for n, f in fns.items()}, runs).items()}


def links(rank: int, world: int, device: str, runs: int, numel: int, address: str, out: str) -> None:
    """One process: bytes that a GPU receives per second."""
    where = f"cuda:{rank}" if device != "cpu" else "cpu"
    if device != "cpu":
        torch.cuda.set_device(rank)
    backend = "nccl" if device != "cpu" else "gloo"
    dist.init_process_group(backend, init_method=address, rank=rank, world_size=world, timeout=timedelta(seconds=120))
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
        for _ in range(runs + 1):
            synchronize(device)
            dist.barrier()
            seconds.append(wall_timer(fn, device, 0)() / 1e3)
        found[name] = moved * part.nbytes / sorted(seconds[1:])[runs // 2]
    if rank == 0:
        Path(out).write_text(json.dumps(found))
    dist.destroy_process_group()


def linked(options) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        out, numel = f"{folder}/links.json", 2**27 // options.small**3
        address = f"file://{folder}/meet"
        mp.spawn(links, (options.world, options.device, options.runs, numel, address, out), options.world)
        return json.loads(Path(out).read_text())


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--gpu", required=True, help="its name in fdora.predict.GPUS")
    parser.add_argument("--world", type=int, default=1, help="GPUs whose links are measured")
    parser.add_argument("--runs", type=int, default=9)
    parser.add_argument("--small", type=int, default=1, help="divides the sizes, for a smoke test")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", help="recorded in the JSON")
    options = parser.parse_args(argv)
    earlier = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    found = earlier.get("profile", {}) if earlier.get("gpu") == options.gpu else {}
    torch.manual_seed(0)
    if options.world > 1:
        found |= linked(options)
    else:
        found |= rates(options.device, options.runs, options.small) | host(options.device, options.runs)
    memory = torch.cuda.get_device_properties(0).total_memory if options.device != "cpu" else 0
    facts = about(options.device, options.commit, argv)
    found = {name: float(f"{value:.4g}") for name, value in found.items()}
    save(options.json, {"about": facts, "gpu": options.gpu, "memory": memory, "profile": found})
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
