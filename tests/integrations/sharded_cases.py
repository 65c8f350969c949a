"""What test_sharded.py runs in each of its processes.

Each case gives numbers, the test looks at them. Each rank has data of its own, else a sum that is lost would not be
seen. With more processes and steps, as a table: sharded_table.py.
"""

import copy
import functools
import os
from collections import Counter, OrderedDict
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils._python_dispatch import TorchDispatchMode

from fdora.eager import norm as arithmetic
from fdora.functional import _sharded_tree
from fdora.integrations import _norm
from fdora.integrations.peft import enabled, report, use_fdora
from tests.distributed.world import run as run_cases
from tests.integrations.permuted import bar, permuted
from tests.integrations.sharded_layouts import (
    BF16,
    FSDP1,
    LAYOUTS,
    adapters,
    fsdp2,
    fsdp_over_tp,
    gradients,
    parallelize,
    plain_name,
)
from tests.integrations.tiny import LORA, llama

PROCESSES, STEPS = int(os.environ.get("PROCESSES", 2)), int(os.environ.get("STEPS", 3))
MICRO, RATE = 2, 0.2
device = "cpu"
HEADS = {"tie_word_embeddings": False, "num_key_value_heads": max(2, PROCESSES)}  # each has some


def built(sizes=None, **config):
    """The same on every rank and in every call, with adapters that have moved: a copy of what was built once."""
    model = copy.deepcopy(_built(*(tuple((given or {}).items()) for given in (sizes, config))))
    torch.manual_seed(1)
    return model.to(device)


@functools.cache
def _built(sizes, config):
    base = llama(**dict(sizes))
    torch.manual_seed(1)
    model = get_peft_model(base, LoraConfig(**({"use_dora": True} | LORA | dict(config)))).eval()
    return moved(model)


@torch.no_grad()
def moved(model):
    draw = torch.Generator().manual_seed(2)
    for name, p in model.named_parameters():
        if "lora_B" in name:
            p.normal_(std=0.05, generator=draw)
        if "magnitude" in name:
            p.mul_(1 + 0.1 * torch.randn(p.shape, generator=draw))
    return model


def in_float64(model):
    """All of it: transformers' RMSNorm computes in float32 whatever it is given."""
    model.double()
    for name, norm in [each for each in model.named_modules() if type(each[1]).__name__ == "LlamaRMSNorm"]:
        own = torch.nn.RMSNorm(norm.weight.shape, norm.variance_epsilon, dtype=torch.float64)
        own.weight = norm.weight
        model.set_submodule(name, own)
    return model


def batches():
    """For each step, micro-batch and rank."""
    draw = torch.Generator().manual_seed(3)
    return torch.randint(3, 260, (STEPS, MICRO, dist.get_world_size(), 2, 12), generator=draw).to(device)


def loss_of(model, ids):
    return F.cross_entropy(model(input_ids=ids).logits.double()[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


@contextmanager
def counted(module, name, what=lambda *args: 1):
    """How often this function is called, or the sum of what is said of its arguments."""
    total, stock = [0], getattr(module, name)

    def one(*args):
        total[0] += what(*args)
        return stock(*args)

    setattr(module, name, one)
    try:
        yield total
    finally:
        setattr(module, name, stock)


norms_counted = partial(counted, arithmetic, "_direct")  # norms of layers that were computed, not reused


def sgd(model):
    return torch.optim.SGD([p for _, p in trained(model)], lr=RATE, momentum=0.9)


class Collectives(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.__name__:
            self.counts[func.__name__.partition(".")[0].strip("_")] += 1
        return func(*args, **(kwargs or {}))


def train(run, rank, alone=False):
    """Losses of this rank by step, norms computed by micro-batch. ``alone`` averages the ranks' gradients by hand."""
    losses, norms = [], []
    parameters = [p for p in run.parameters() if p.requires_grad]
    optimizer = sgd(run)
    for step in batches():
        total, before = 0.0, [None] * len(parameters)
        for micro in step:
            with norms_counted() as count:
                loss = loss_of(run, micro[rank]) / MICRO
                loss.backward()
            norms.append(count[0])
            total += loss.detach()
            if alone:  # before they are added up, as a sharded model does it: else other bits
                average(run)
                before = [p.grad if g is None else g + p.grad for g, p in zip(before, parameters, strict=True)]
                optimizer.zero_grad()
        losses.append(total)
        if alone:
            for g, p in zip(before, parameters, strict=True):
                p.grad = g
        optimizer.step()
        optimizer.zero_grad()
    return torch.stack(losses), norms


def average(model):
    for p in model.parameters():
        if p.grad is not None:
            dist.all_reduce(p.grad)
            p.grad /= dist.get_world_size()


class Truth:
    """PEFT in float64 on the data of all ranks, and fdora on whole parameters on that of one, averaged by hand."""

    def __init__(self, rank, world):
        self.rank, self.world = rank, world
        exact = in_float64(built())
        ids = batches()
        optimizer = sgd(exact)
        self.losses = []
        for i, step in enumerate(ids):
            loss = sum(loss_of(exact, x) for micro in step for x in micro) / (MICRO * world)
            if i == 0:
                first = sum(loss_of(exact, x) for x in step[0]) / world
                wanted = dict(trained(exact))
                self.gradients = dict(zip(wanted, torch.autograd.grad(first, list(wanted.values())), strict=True))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            self.losses.append(loss.detach())
        self.losses = torch.stack(self.losses)
        self.adapters = {n: p.detach() for n, p in trained(exact)}
        alone = use_fdora(built(), fuse=False)
        self.logits, self.loss = first_step(alone, rank)
        average(alone)
        self.alone = {n: p.grad for n, p in trained(alone)}
        alone = use_fdora(built(), fuse=False)
        self.alone_losses, self.alone_norms = train(alone, rank, alone=True)
        self.alone_adapters = {n: p.detach() for n, p in trained(alone)}
        dist.all_reduce(self.alone_losses)
        self.alone_losses_off = (self.alone_losses / world - self.losses).abs().max().item()
        self.alone_adapters_off = off(self.alone_adapters, self.adapters)
        self.checkpoint = {n: t.clone() for n, t in get_peft_model_state_dict(alone).items()}
        self.after = logits_of(alone, rank)
        change(alone)
        self.after_change = logits_of(alone, rank)


@torch.no_grad()
def change(run):
    """Every frozen parameter, in place: of what is sharded each rank its piece."""
    for p in run.parameters():
        if not p.requires_grad:
            p.mul_(1.05)


@torch.no_grad()
def logits_of(run, rank):
    return run(input_ids=batches()[0, 0, rank]).logits


def checkpoint(run):
    """The adapter's as PEFT writes it, by torch's full state dict: through a whole model, for FSDP1's wrappers hide the layers."""
    if isinstance(run, FSDP1):
        with FSDP1.state_dict_type(run, StateDictType.FULL_STATE_DICT):
            whole = {plain_name(n): t.clone() for n, t in run.state_dict().items()}
    else:
        whole = get_model_state_dict(run, options=StateDictOptions(full_state_dict=True))
    return get_peft_model_state_dict(built(), state_dict=whole)


def loads(saved, after, rank):
    """Whether stock PEFT in one process makes of these files what the sharded model is."""
    stock = built()
    loaded = set_peft_model_state_dict(stock, saved)
    return not loaded.unexpected_keys and torch.allclose(logits_of(stock, rank), after, atol=2e-6)


def written(values):
    """The checkpoint of one process with these parameters."""
    model = built()
    fill(model, values)
    return get_peft_model_state_dict(model)


def begun(run, truth, logits=True):
    """The first forward and backward, beside whole parameters on this rank's batch and beside float64."""
    found = {}
    if logits:
        with torch.no_grad():
            y = run(input_ids=batches()[0, 0, truth.rank]).logits
        found = {"logits same": torch.equal(y, truth.logits), "logits off": (y - truth.logits).abs().max().item()}
    loss = loss_of(run, batches()[0, 0, truth.rank])
    loss.backward()
    got, loss = gradients(run, truth.alone), loss.detach()
    found |= {"loss same": torch.equal(loss, truth.loss), "loss off": (loss - truth.loss).abs().item()}
    found |= {"gradients same": same(got, truth.alone), "gradients off": off(got, truth.gradients)}
    return found | {"gradients off from alone": off(got, truth.alone)}


def went_on(run, truth):
    """All steps; what the adapters are then, and how far from float64, which one process is, too."""
    losses, norms = train(run, truth.rank)
    dist.all_reduce(losses)
    last = adapters(run, truth.alone)
    found = {"norms": norms, "losses off": (losses / truth.world - truth.losses).abs().max().item()}
    found |= {"adapters same": same(last, truth.alone_adapters), "adapters off": off(last, truth.adapters)}
    return last, found | {"losses may be off": truth.alone_losses_off, "adapters may be off": truth.alone_adapters_off}


def changed(run, truth):
    """Every frozen parameter is another."""
    change(run)
    return {"after change off": (logits_of(run, truth.rank) - truth.after_change).abs().max().item()}


def fused(wrap, truth, mesh):
    """The same with q, k, v and the MLP in one call each: other sums, in the same norms."""
    model, again = (use_fdora(built(), fuse=True) for _ in range(2))
    return begun(wrap(model, mesh), truth) | paths(model) | went_on(wrap(again, mesh), truth)[1]


def on_shards(wrap, truth, mesh):
    """Norms of each rank's rows, all in one call: the same bits. And A changed on one rank alone: nobody waits for ever."""
    first, model = (use_fdora(built(), fuse=False, norms_on_shards=True) for _ in range(2))
    found, run = begun(wrap(first, mesh), truth), wrap(model, mesh)
    found |= went_on(run, truth)[1]
    with counted(arithmetic, "_direct", lambda W, *_: W.shape[0]) as rows:  # after a step of the optimizer
        logits_of(run, truth.rank)
    # Not by a mode that counts operations: under one there are none, for values of now are not for it.
    with counted(_sharded_tree, "all_gathered") as gathers:
        loss_of(run, batches()[0, 0, truth.rank]).backward()
    found |= {"rows": rows[0], "gathers": gathers[0]} | changed(run, truth)
    with torch.no_grad():
        for n, p in run.named_parameters():
            if "lora_A" in n and truth.rank == 1:
                p.to_local().mul_(1.5)
    odd = logits_of(run, truth.rank)
    plain = use_fdora(built(), fuse=False)
    fill(plain, {plain_name(n): full(p) for n, p in run.named_parameters()})
    change(plain)
    found["after one rank's change off"] = (odd - logits_of(plain, truth.rank)).abs().max().item()
    return found | paths(model)


def compiled(wrap, fuse, truth, mesh):
    """Blocks that are compiled in one graph each, and then sharded; in the long run beside PEFT's LoRA, which breaks none either."""

    def made(dora):
        torch._dynamo.reset()
        model = built(use_dora=dora)
        if dora:
            use_fdora(model, fuse=fuse)
        for block in model.get_base_model().model.layers:
            block.compile(backend="aot_eager", fullgraph=True)
        return wrap(model, mesh)

    if STEPS > 3:
        loss_of(made(False), batches()[0, 0, truth.rank]).backward()
    run = made(True)
    found = begun(run, truth, logits=False)
    run.zero_grad()
    return found | went_on(run, truth)[1] | {"breaks": len(dict(torch._dynamo.utils.counters["graph_break"]))}


def dropped(wrap, truth, mesh):
    """With torch's own masks: the base layer, then its correction, by the same seeds."""
    alone = use_fdora(built(lora_dropout=0.2), fuse=False).train()
    model = use_fdora(built(lora_dropout=0.2), fuse=False).train()
    run = wrap(model, mesh)
    losses = []
    for each in (alone, run):
        torch.manual_seed(truth.rank)
        loss = loss_of(each, batches()[0, 0, truth.rank])
        loss.backward()
        losses.append(loss)
    average(alone)
    wanted = {n: p.grad for n, p in trained(alone)}
    return {"loss same": torch.equal(*losses), "gradients off": off(gradients(run, wanted), wanted), **paths(model)}


def policy(truth, mesh):
    """bf16 copies of float32 shards: PEFT's own code beside it, under the same policy."""
    found = {}
    for who, made in (("stock", built()), ("fdora", use_fdora(built(), fuse=False))):
        run = fsdp2(made, mesh, mp_policy=BF16)
        first_step(run, truth.rank)
        found[f"{who} off"] = off(gradients(run, truth.alone), truth.gradients)
    with norms_counted() as count:
        first_step(run, truth.rank)
    return found | {"norms": count[0], **paths(run)}


def trained(model):
    return [(n, p) for n, p in model.named_parameters() if p.requires_grad]


def first_step(run, rank):
    ids = batches()[0, 0, rank]
    with torch.no_grad():
        logits = run(input_ids=ids).logits
    loss = loss_of(run, ids)
    loss.backward()
    return logits, loss.detach()


def off(got, want):
    """The largest relative error of a set of tensors, each in its norm; that of one that is missing is infinite."""
    if set(got) != set(want):
        return float("inf")
    return max([((got[n].double() - want[n]).norm() / want[n].norm().clamp_min(1e-30)).item() for n in want])


def same(got, want):
    return set(got) == set(want) and all(torch.equal(got[n], want[n]) for n in want)


def layout(wrap, truth, mesh):
    """One way to shard, from the first forward to the last step."""
    first, model = (use_fdora(built(), fuse=False) for _ in range(2))
    found, run = begun(wrap(first, mesh), truth) | paths(first), wrap(model, mesh)
    last, more = went_on(run, truth)
    found |= more
    saved = checkpoint(run)
    found |= {"checkpoint same": same(saved, truth.checkpoint), "checkpoint written": same(saved, written(last))}
    with Collectives() as collectives:
        loss_of(run, batches()[0, 0, truth.rank]).backward()
    found["collectives"] = dict(collectives.counts)
    after = logits_of(run, truth.rank)
    found |= {"after off": (after - truth.after).abs().max().item(), "checkpoint loads": loads(saved, after, truth.rank)}
    loss_of(run, batches()[0, 0, truth.rank]).backward()  # what stayed gathered goes
    return found | changed(run, truth)


def loaded(truth, mesh, **sizes):
    """transformers shards the model as it loads it; then PEFT makes the adapters."""
    from transformers import LlamaForCausalLM
    from transformers.distributed import DistributedConfig

    folder = Path(os.environ["FOLDER"])
    if dist.get_rank() == 0:
        llama(**HEADS).save_pretrained(folder / "base")
    dist.barrier()
    base = LlamaForCausalLM.from_pretrained(folder / "base", distributed_config=DistributedConfig(**sizes)).to(device)
    torch.manual_seed(1)
    with enabled():
        return get_peft_model(base, LoraConfig(use_dora=True, **LORA)).eval()


TENSOR_PARALLEL = {"parallelize_module": parallelize, "fsdp over it": fsdp_over_tp}


def repeated(model, ids):
    """Steps on these micro-batches: the last loss, norms computed for each, and the gradients of the first step."""
    optimizer, norms, first = sgd(model), [], None
    for _ in range(STEPS):
        for x in ids:
            with norms_counted() as count:
                loss = loss_of(model, x)
                loss.backward()
            norms.append(count[0])
        first = first or {n: full(p.grad) for n, p in trained(model)}
        optimizer.step()
        optimizer.zero_grad()
    return loss.detach(), norms, first


def tensor_parallel(how, truth, mesh):
    """Every rank has the same batch. Gradients, some steps, and that a fresh adapter changes nothing."""
    found = {}
    if how == "transformers":
        run = loaded(truth, mesh, tp_size=truth.world)
        found["fresh off"] = (logits_of(run, 0) - logits_of(llama(**HEADS).to(device).eval(), 0)).abs().max().item()
        fill(run, built(HEADS))
    else:
        run = TENSOR_PARALLEL[how](use_fdora(built(HEADS), fuse=False), mesh)
    exact, alone = in_float64(built(HEADS)), use_fdora(built(HEADS), fuse=False)
    ids = batches()[0, :, 0]
    found["logits off"] = (logits_of(run, 0) - logits_of(exact, 0)).abs().max().item()
    (loss, norms, first), (want, _, wanted), (same_size, *_) = (repeated(model, ids) for model in (run, exact, alone))
    found |= {"gradients off": off(first, wanted), "norms": norms, "losses off": (loss - want).abs().item(), **paths(run)}
    last, wanted = values(run), values(exact)
    found |= {"adapters off": off(last, wanted), "adapters may be off": off(values(alone), wanted)}
    found["losses may be off"] = (same_size - want).abs().item()
    if STEPS > 3:  # the first three stretch little
        found |= bars_of_orders(exact, want, ids)
    everyone = [None] * truth.world
    dist.all_gather_object(everyone, last)
    found["replicas same"] = all(same(everyone[0], each) for each in everyone)
    with Collectives() as collectives:
        loss_of(run, ids[0]).backward()
    found["collectives"] = dict(collectives.counts)
    for model in (run, exact, alone):
        change(model)
    after = [logits_of(model, 0) for model in (run, exact, alone)]
    found["after change off"] = (after[0] - after[1]).abs().max().item()
    found["after change may be off"] = (after[2] - after[1]).abs().max().item()
    return found


def full_dora(how, truth, mesh):
    """detach=False: what reaches A and B through the norms, beside one process in float64."""
    models = [use_fdora(built(HEADS), fuse=False, detach=False), use_fdora(built(HEADS).double(), fuse=False, detach=False)]
    run, exact = TENSOR_PARALLEL[how](models[0], mesh), models[1]
    for model in (run, exact):
        loss_of(model, batches()[0, 0, 0]).backward()
    wanted = {n: p.grad for n, p in trained(exact)}
    return {"gradients off": off({n: full(p.grad) for n, p in trained(run)}, wanted), **paths(run)}


def adapters_input_dropped(how, truth, mesh):
    """Without B a step with dropout of the adapter's input alone is the one without dropout, and with B a random one."""
    model = use_fdora(built(HEADS, lora_dropout=0.4), fuse=False, dropout_mode="lora")
    empty = use_fdora(built(HEADS, lora_dropout=0.4), fuse=False, dropout_mode="lora")
    with torch.no_grad():
        for name, p in empty.named_parameters():
            if "lora_B" in name:
                p.zero_()
    whole = copy.deepcopy(empty).eval()
    run, other = (TENSOR_PARALLEL[how](each, mesh).train() for each in (empty, model))
    ids = batches()[0, 0, 0]
    first, second = (loss_of(other, ids) for _ in range(2))
    first.backward()
    found = {"loss off": (loss_of(run, ids) - loss_of(whole, ids)).abs().item(), "drawn apart": (first - second).abs().item()}
    return found | {"finite": all(bool(full(p.grad).isfinite().all()) for _, p in trained(other)), **paths(other)}


def few_rows(truth, mesh):
    """Layers with fewer rows and columns than processes, or with some left over: what is whole must not pass for a part."""
    found = {}
    for n in (1, truth.world + 1, 2 * truth.world + 1):
        models = []
        for _ in range(2):
            torch.manual_seed(0)
            base = nn.Sequential(OrderedDict(up=nn.Linear(6, n), down=nn.Linear(n, 6, bias=False))).to(device)
            models.append(get_peft_model(base, LoraConfig(use_dora=True, r=2, target_modules=["up", "down"])))
            for _, p in trained(models[-1]):
                nn.init.uniform_(p, 0.2, 1.0)
        plan = {"base_model.model.up.base_layer": ColwiseParallel(), "base_model.model.down.base_layer": RowwiseParallel()}
        run, exact = parallelize_module(use_fdora(models[0]), mesh, plan), models[1].double()
        for model in (run, exact):
            x = torch.linspace(-1, 1, 24, device=device, dtype=next(model.parameters()).dtype).view(4, 6)
            model(x).square().sum().backward()
        wanted = {name: p.grad for name, p in trained(exact)}
        found[n] = off({name: full(p.grad) for name, p in trained(run)}, wanted)
    return {"gradients off": max(found.values()), **paths(run)}


def bars_of_orders(exact, last_loss, ids):
    """How far losses and adapters may be off, by the same model in one process, in orders of its units that the ranks share out."""
    found = []
    for seed in range(2 * dist.get_rank(), 2 * dist.get_rank() + 2):
        alone = use_fdora(permuted(built(HEADS), seed), fuse=False)
        loss, *_ = repeated(alone, ids)
        apart = off(values(alone), values(permuted(copy.deepcopy(exact), seed)))
        found.append(((loss - last_loss).abs().item(), apart))
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    losses, last = zip(*(each for one in everyone for each in one), strict=True)
    return {"losses bar": bar(losses), "adapters bar": bar(last)}


def fsdp_loaded(truth, mesh):
    """Adapters are made after FSDP2 has sharded the base: they are whole on each rank, and the trainer averages their gradients."""
    run = loaded(truth, mesh, fsdp_size=truth.world)
    whole = built(HEADS)
    found = {
        "fresh off": (logits_of(run, truth.rank) - logits_of(llama(**HEADS).to(device).eval(), truth.rank)).abs().max().item()
    }
    start = use_fdora(get_peft_model(llama(**HEADS).to(device), LoraConfig(use_dora=True, **LORA)), fuse=False)
    found["m off"] = off(*({n: t for n, t in values(model).items() if "magnitude" in n} for model in (run, start)))
    fill(run, whole)
    logits, _ = first_step(run, truth.rank)
    average(run)
    exact = in_float64(built(HEADS))
    (sum(loss_of(exact, x) for x in batches()[0, 0]) / truth.world).backward()
    found["gradients off"] = off({n: p.grad for n, p in trained(run)}, {n: p.grad for n, p in trained(exact)})
    found["logits off"] = (logits - logits_of(exact, truth.rank)).abs().max().item()
    return found | paths(run)


def values(model):
    """Of the adapters, whole."""
    return {n: full(p.detach()) for n, p in trained(model)}


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


@torch.no_grad()
def fill(run, whole):
    """The adapters of another model, whatever each lies like."""
    values = whole if isinstance(whole, dict) else dict(whole.named_parameters())
    for name, p in trained(run):
        value = values[name].detach()
        p.copy_(distribute_tensor(value, p.device_mesh, p.placements, src_data_rank=None) if isinstance(p, DTensor) else value)


def zero(stage, truth, mesh):
    """DeepSpeed's engine does what :func:`layout` does by hand; its gradients are seen in the steps."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param

    # It would compile an operation for sums in shared memory: minutes of two cores, and a run that is ended in them leaves a lock
    # that all later ones wait for, without a word. Where the operation is not to be had, DeepSpeed's sums are gloo's.
    deepspeed.ops.__compatible_ops__ = {}
    model = use_fdora(built(), fuse=False)
    parameters = dict(trained(model))
    optimizer = sgd(model)
    sizes = {"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICRO}
    allow = {"zero_allow_untested_optimizer": True, "zero_force_ds_cpu_optimizer": False, "gradient_clipping": 0.0}
    shards = {"zero_optimization": {"stage": stage, "stage3_param_persistence_threshold": 0}}
    run, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=sizes | allow | shards)
    found, losses, norms = {}, [], []
    for i, step in enumerate(batches()):
        total = 0.0
        for j, micro in enumerate(step):
            with norms_counted() as count:
                loss = loss_of(run, micro[truth.rank])
                run.backward(loss)
            norms.append(count[0])
            total += loss.detach() / MICRO
            if i == j == 0:
                found["loss same"] = torch.equal(loss.detach(), truth.loss)
                found |= paths(model)
            run.step()
        losses.append(total)
    losses = torch.stack(losses)
    dist.all_reduce(losses)
    found |= {"norms": norms, "losses off": (losses / truth.world - truth.losses).abs().max().item()}
    found |= {"losses may be off": truth.alone_losses_off, "adapters may be off": truth.alone_adapters_off}
    last = {n: safe_get_full_fp32_param(p) for n, p in parameters.items()}
    found["adapters off"] = off(last, truth.adapters)
    found["after off"] = (logits_of(run, truth.rank) - truth.after).abs().max().item()
    with Collectives() as collectives:
        run.backward(loss_of(run, batches()[0, 0, truth.rank]))
    found["collectives"] = dict(collectives.counts)
    with torch.no_grad():
        for p in model.parameters():
            if not p.requires_grad:
                getattr(p, "ds_tensor", p).mul_(1.05)
    found["after change off"] = (logits_of(run, truth.rank) - truth.after_change).abs().max().item()
    return found


def paths(model):
    """What the report says: how often each path ran, why not the fastest, and shapes."""
    rows = report(model)
    return {
        "fused": sum(row.fused for row in rows),
        "composed": sum(row.composed for row in rows),
        "fallbacks": dict(sum((Counter(row.fallbacks) for row in rows), Counter())),
        "why": sorted({row.why_not_fused for row in rows}),
        "shapes": sorted({row.shape for row in rows}),
        "says": str(rows).splitlines()[-1],
    }


CASES = {name: partial(layout, wrap) for name, wrap in LAYOUTS.items()}

FUSED = (
    "ddp",
    "fsdp2 blocks",
    "fsdp2 blocks, checkpointed",
    "fsdp2 layers",
    "fsdp2 leaves",
    "fsdp1 leaves",
    "fsdp1 blocks, original parameters",
)
CASES |= {f"fuse, {name}": partial(fused, LAYOUTS[name]) for name in FUSED}
ON_SHARDS = ("fsdp2 blocks", "fsdp2 blocks, checkpointed", "fsdp2 leaves", "hsdp blocks")
CASES |= {f"on shards, {name}": partial(on_shards, LAYOUTS[name]) for name in ON_SHARDS}
COMPILED = {"fsdp2 blocks, checkpointed": True}  # and whether q, k, v and the MLP are one call each
COMPILED |= {"fsdp2 blocks": False, "fsdp2 blocks, kept gathered": True, "hsdp blocks": False} if STEPS > 3 else {}
CASES |= {f"compiled, {name}": partial(compiled, LAYOUTS[name], fuse) for name, fuse in COMPILED.items()}
DROPPED = ("fsdp2 leaves", "fsdp1 leaves, original parameters", "fsdp1 blocks, original parameters")
CASES |= {f"dropout, {name}": partial(dropped, LAYOUTS[name]) for name in DROPPED}
CASES["bf16 policy"] = policy
CASES["loaded by transformers under fsdp"] = fsdp_loaded
CASES |= {f"full DoRA, {how}": partial(full_dora, how) for how in TENSOR_PARALLEL}
CASES |= {f"lora dropout, {how}": partial(adapters_input_dropped, how) for how in TENSOR_PARALLEL}
CASES["few rows"] = few_rows
CASES |= {f"tp {how}": partial(tensor_parallel, how) for how in ("transformers", "parallelize_module", "fsdp over it")}
ZERO = {f"zero {stage}": partial(zero, stage) for stage in (2, 3)}  # want DeepSpeed


@functools.cache
def prepared():
    """Made once, for all cases."""
    world = dist.get_world_size()
    return Truth(dist.get_rank(), world), dist.init_device_mesh(device.partition(":")[0], (world,))


if __name__ == "__main__":
    _norm.SMALL = 0  # norms are kept however small the weights are
    os.environ |= {"LOCAL_RANK": os.environ["RANK"], "DS_ACCELERATOR": "cpu"}  # DeepSpeed wants both
    if (
        os.environ["DEVICE"] == "cuda"
    ):  # to look at by hand: other sums than whole parameters on a CPU, and no norms are counted
        device = f"cuda:{os.environ['RANK']}"
    run_cases({f"case_{name}": lambda case=case: case(*prepared()) for name, case in (CASES | ZERO).items()})
