"""A language model on several GPUs: PEFT's LoRA, its DoRA, and that after ``use_fdora``, in one run.

    python -m bench.sharded --world 2 --device cuda --json FILE
    python -m bench.sharded --world 2 --device cuda --layout tp
    python -m bench.sharded --world 2 --tiny --layers 2 --seq 16 --loss-tokens 4 --r 4 --runs 1     # gloo, CPU

Starts one process per GPU (NCCL; gloo without GPUs). Architecture, adapters and ways are bench.model's. FSDP2: each decoder
layer is a unit, every rank has a sequence of its own. ``--layout tp``: torch's parallelize_module cuts q, k, v, gate and up by
rows, o and down by columns, and of each adapter what plain LoRA's has cut; every rank has
the same sequence; PEFT's DoRA raises there. ``--layout zero2`` and ``zero3``: DeepSpeed's engine, on the same sequence as well.
A step: forward, backward, fused AdamW; also with gradient checkpointing, and of 4 micro-batches, which share their norms. Wall
time from one barrier until every rank's GPU is done, median of turns; what the host takes to issue forward, backward and the
optimizer's step, nothing waited for in between; peak memory above what is there between steps. On a GPU a profile of one step
sums the kernels of all norms, the collectives, and the busiest of the rest.
Before anything is timed, loss and averaged gradients are compared with those of PEFT's DoRA (of whole weights, for tensor
parallelism), while nothing is dropped: every way draws masks of its own; the collectives of a step are counted. Ways with
``_shards`` compute norms on the shards (``norms_on_shards=True``); their collectives are not among those counted.
float32 adapters run under bf16 autocast.
"""

from __future__ import annotations

import copy
import os
import statistics
import time
from collections import Counter
from collections.abc import Callable
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from bench.clock import free, synchronize
from bench.decoder import MOST_APART, adapted_as, adapters, by_part, judge, left, nothing_dropped, relative
from bench.kernels import by_name, profiled
from bench.model import ARCHITECTURES, WAYS, Trained, network
from bench.processes import timed
from bench.rivals import paths
from bench.suite import One, Run, Some, Suite, stack
from bench.ways import DTYPES
from tests.memory import peak_bytes

EVERY = (*WAYS, "peft_fdora_shards", "peft_fdora_fused_shards")
MODES = ("step", "step_checkpointing", "step_4")
PARTS = ("forward", "backward", "optimizer")
ZERO = {"zero2": 2, "zero3": 3}
LAYOUTS = ("fsdp", "tp", *ZERO)
ROWS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
COLUMNS = ("self_attn.o_proj", "mlp.down_proj")
NORMS = ("norm_kernel", "choose_kernel", "norms_kernel", "fingerprint", "roots_kernel")


def shard(model, blocks, mesh) -> None:
    for block in blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def parallelize(blocks, mesh) -> None:
    """The base layer, and of the adapter what is cut with it, as plain LoRA is run."""
    plan = {f"{path}.{part}": ColwiseParallel() for path in ROWS for part in ("base_layer", "lora_B.default")}
    plan |= {f"{path}.{part}": RowwiseParallel() for path in COLUMNS for part in ("base_layer", "lora_A.default")}
    for block in blocks:
        parallelize_module(block, mesh, plan)


def engine(model, optimizer, stage: int, rank: int, world: int):
    """DeepSpeed's, which averages gradients, shards them (and in stage 3 all weights) and keeps adapters in float32."""
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world)}
    import deepspeed

    deepspeed.ops.__compatible_ops__ = {}  # or it compiles its own sums in shared memory on a CPU: minutes
    config = {"train_micro_batch_size_per_gpu": 1, "bf16": {"enabled": next(model.parameters()).dtype == torch.bfloat16}}
    config |= {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "gradient_clipping": 0.0}
    return deepspeed.initialize(model=model, optimizer=optimizer, config=config | {"zero_optimization": {"stage": stage}})[0]


class Sharded(Trained):
    """Its leaves are those of the layout: shards under FSDP2, parts and whole ones under tensor parallelism."""

    def __init__(self, way, base, values, inputs, options, mesh):
        super().__init__(way, base, values, inputs, min(options.loss_tokens, options.seq), **adapted_as(options))
        names = {id(p): name for name, p in self.leaves.items()}
        places = {name: names[id(p)] for name, p in self.model.named_parameters() if id(p) in names}
        blocks = self.model.get_base_model().get_decoder().layers
        self.stage = ZERO.get(options.layout)
        if options.layout == "tp":
            parallelize(blocks, mesh)
        if options.compiled:
            self.compile()
        if options.layout == "fsdp":
            shard(self.model, blocks, mesh)
        self.leaves = {places[name]: p for name, p in self.model.named_parameters() if name in places}
        spread = [isinstance(p, DTensor) for p in self.leaves.values()]
        groups = [[p for p, cut in zip(self.leaves.values(), spread, strict=True) if cut is kind] for kind in (False, True)]
        groups = [{"params": group} for group in groups if group]  # one fused update takes DTensors, or none
        self.optimizer = torch.optim.AdamW(groups, lr=1e-5, fused=options.device == "cuda")
        if self.stage:
            self.model = engine(self.model, self.optimizer, self.stage, mesh.get_local_rank(), mesh.size())

    def backward(self, loss) -> None:
        self.model.backward(loss) if self.stage else super().backward(loss)

    def update(self) -> None:
        self.model.step() if self.stage else super().update()

    def gradient(self, p) -> torch.Tensor:
        if self.stage:
            from deepspeed.utils import safe_get_full_grad

            return safe_get_full_grad(p)
        return p.grad.full_tensor() if isinstance(p.grad, DTensor) else p.grad

    def issue(self, device: str) -> list[float]:
        """ms in which the host issues each part of a step, from an empty queue."""
        dist.barrier()
        synchronize(device)
        times = [time.perf_counter()]
        loss = self.loss()
        times.append(time.perf_counter())
        self.backward(loss)
        times.append(time.perf_counter())
        self.update()
        times.append(time.perf_counter())
        synchronize(device)
        return [1e3 * (b - a) for a, b in pairwise(times)]

    def gradients_of_all(self) -> dict[str, torch.Tensor]:
        """The average over the ranks, of all A, all B, all m; and the loss."""
        found = averaged(self, self.gradient)
        if self.stage:
            self.update()  # the engine forgets its gradients in no other way
        else:
            self.optimizer.zero_grad(set_to_none=True)
        return found


def truth(base, values, inputs, options) -> dict[str, torch.Tensor]:
    """PEFT's DoRA on whole weights, where it cannot be cut as the others are."""
    last = min(options.loss_tokens, options.seq)
    return averaged(Trained("peft_dora", copy.deepcopy(base), values, inputs, last, **adapted_as(options)), lambda p: p.grad)


def averaged(run: Trained, gradient: Callable[[nn.Parameter], torch.Tensor]) -> dict[str, torch.Tensor]:
    with nothing_dropped(run.model):
        loss = run.loss()
        run.backward(loss)
    found = {"loss": loss.detach().clone()}
    dist.all_reduce(found["loss"])
    return found | by_part({name: gradient(p) for name, p in run.leaves.items()})


class Collectives(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if any(t is DTensor for t in types):
            return NotImplemented  # its own operations come again, on parts
        if op.namespace in ("c10d", "_c10d_functional") and "wait" not in op.__name__:
            self.counts[op.__name__.partition(".")[0].strip("_")] += 1
        return op(*args, **(kwargs or {}))


def profile(step) -> dict:
    """GPU ms of one step by kind, and the busiest kernels."""
    step()
    kernels = profiled(step)
    moved = [k for k in kernels if "nccl" in k.name.lower()]
    own = [k for k in kernels if k not in moved]
    count, found = Counter(k.name for k in kernels), {"launches": len(kernels)}
    norms = [k for k in kernels if any(name in k.name for name in NORMS)]
    for name, some in {"norms": norms, "nccl": moved}.items():
        found[f"{name}_launches"] = len(some)
    for name, some in {"all": own, "norms": norms, "nccl": moved}.items():
        found[f"{name}_ms"] = round(sum(k.us for k in some) / 1e3, 3)
    return found | {"busiest": [(name[:80], count[name], round(ms, 3)) for name, ms in by_name(own, 1e3)[:16]]}


def micro(run: Sharded, mode: str):
    step = run.of(mode.replace("step_4", "step"))  # sets checkpointing
    return (lambda: run.step(4)) if mode.startswith("step_4") else step


def measure(run: Run) -> None:
    options, failures, result = run.options, run.failed, run.result
    mesh = dist.init_device_mesh(options.device, (options.world,))
    torch.manual_seed(0)
    base = network(options, options.layers)
    values = adapters(base, options.r, DTYPES[options.adapter])
    draw = torch.Generator().manual_seed(1 + run.rank * (options.layout == "fsdp"))
    tokens = torch.randint(base.lm_head.out_features - 1, (1, options.seq), generator=draw)
    inputs = {"input_ids": tokens.to(base.lm_head.weight.device)}
    exact = None if options.layout == "fsdp" else truth(base, values, inputs, options)
    ways = failures.attempt(options.ways, lambda way: Sharded(way, copy.deepcopy(base), values, inputs, options, mesh))
    base = None
    free(options.device)
    run.set("world", "model", "layers", "seq", "layout", "r", "adapter", "dropout", "compiled", failed=failures)
    run.set(agreement={}, collectives={}, paths={}, profiles={})
    if exact is None and "peft_dora" in ways:
        exact = ways["peft_dora"].gradients_of_all()
    for way in [way for way in ways if exact and "fdora" in way]:
        result["agreement"][way] = relative(ways[way].gradients_of_all(), exact)
    exact = None
    run.say("agreement", result["agreement"])
    for mode in options.modes:
        run.add(*rows_of(ways, mode, options, failures))
    for way, each in ways.items():  # last: compiled code would run as it is written from here on
        each.of("step")
        with Collectives() as collectives:
            each.step(1)
        result["collectives"][way] = dict(collectives.counts)
    if options.device == "cuda" and not options.no_profile:
        result["profiles"] = {way: profile(micro(each, "step")) for way, each in ways.items()}
    run.set(paths={way: paths(each.model) for way, each in ways.items() if "fdora" in way})
    run.say({name: result[name] for name in ("collectives", "profiles", "paths", "failed")})


def rows_of(ways: dict[str, Sharded], mode: str, options, failures) -> list[dict]:
    device = options.device
    peaks = failures.attempt(ways, lambda way: peak_bytes(micro(ways[way], mode), device) / 2**20)
    turns, rows = {way: [] for way in peaks}, []
    for _ in range(options.runs + 2):
        for way, mine in turns.items():
            mine.append((timed(micro(ways[way], mode), device), *ways[way].issue(device)))
    for way, mine in turns.items():
        columns = [*zip(*mine[2:], strict=True)]
        ms, *issue = (round(statistics.median(column), 3) for column in columns)
        row = {"way": way, "mode": mode, "dropout": options.dropout, "ms": ms, "peak_mb": round(peaks[way], 1)}
        row |= {"issue_ms": dict(zip(PARTS, issue, strict=True)), "least_ms": round(min(columns[0]), 3)}
        rows.append(row)
    lora = next((row["ms"] for row in rows if row["way"] == "peft_lora"), None)
    return [row | ({"of_lora": round(row["ms"] / lora, 4)} if lora else {}) for row in rows]


def judged(run: Run) -> None:
    result, options, failures = run.result, run.options, run.failed
    stock = {} if options.compiled else left(result["paths"], options, {"fused"})
    judge(result["agreement"], MOST_APART[options.dtype], failures, stock)
    if failures:
        raise SystemExit(f"failed: {dict(failures)}")


OPTIONS = {
    **stack(6, EVERY),
    "--layout": (One(LAYOUTS, "fsdp"), "tp: tensor parallel; zero2, zero3: DeepSpeed"),
    "--model": One([m for m in ARCHITECTURES if "vl" not in m], "llama-3.1-8b"),
    "--modes": Some(MODES),
    "--compiled": (False, "torch.compile of each decoder layer"),
    "--tiny": False,
    "--no-profile": False,
}


def check(parser, options) -> None:
    if options.layout != "fsdp" and options.ways == list(EVERY):
        options.ways = ["peft_lora", "peft_fdora"]
    if options.layout in ZERO and (options.compiled or "step_4" in options.modes):
        parser.error("ZeRO's engine takes steps of one micro-batch, and is not compiled: --modes step,step_checkpointing")
    if options.runs < 1 or options.seq < 2:
        parser.error("--runs and --seq must be at least 1 and 2")


main = Suite(measure, OPTIONS, runs=9, world=2, check=check, judge=judged)
