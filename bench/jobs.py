"""Four jobs on one base, end to end: one after the other through PEFT and through fdora, and together.

    python -m bench.jobs --device cuda --json FILE
    python -m bench.jobs --device cuda --world 2 --json FILE      # two GPUs: the same as a pipeline of two stages
    python -m bench.jobs --tiny --runs 1                          # CPU; --world 2 through gloo

Layers in the shape of Llama-3.1-8B, bf16, every linear adapted; sample lengths drawn as in bench.schedule, a kind for each job.
Every way packs its samples without padding, clips each job's gradient and steps AdamW once for each of its batches. Jobs one
after the other have microbatches of their own, packed by ``fdora.jobs.schedule`` as well; ``together`` is fdora's
``train_step`` on the schedule of all. Tokens/s: wall time of all jobs, until the GPU is done, median of turns. Before that each
way's losses and gradients of one microbatch are compared with PEFT's DoRA.

In a pipeline: ``alone``, one job's schedule after the other, and ``together``; and the bubble of together as measured (each
action timed by a host that waits for the GPU, busy time over the wall time of that run), as ``simulate`` has it from these
times, and as it has it from tokens alone.
"""

from __future__ import annotations

import copy
import warnings

import optree
import torch

from bench import jobs_pipeline
from bench.clock import free
from bench.jobs_model import CLIP, LINEARS, LR, Jobs, by_modules
from bench.jobs_pipeline import rows_of, wall
from bench.rivals import fill
from bench.suite import Run, Some, Suite
from fdora.integrations.peft import use_fdora
from fdora.jobs.loop import Model, train_step
from fdora.jobs.loop.step import leaves_of, on

WAYS = ("peft_lora", "peft_dora", "fdora_alone", "fdora_together")
MOST_APART = {torch.bfloat16: 3e-2, torch.float32: 1e-4}


class Peft:
    """Jobs one after the other through a PEFT model with an adapter for each."""

    def __init__(self, jobs: Jobs, dora: bool, fdora: bool):
        from peft import LoraConfig, get_peft_model

        self.jobs = jobs
        config = LoraConfig(r=jobs.r, lora_alpha=2 * jobs.r, use_dora=dora, target_modules=list(LINEARS))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            base = copy.deepcopy(jobs.model)
            self.model = get_peft_model(base, config, adapter_name="0", autocast_adapter_dtype=False)
            for a in range(1, jobs.count):
                self.model.add_adapter(str(a), config)
        self.leaves = []
        for a in range(jobs.count):
            own = {}
            for path, params in jobs.starts.items():
                layer, (A, B, m) = self.model.get_base_model().get_submodule(path), params[a]
                own |= {f"{path}.{part}": p for part, p in fill(layer, A, B, m if dora else None, str(a)).items()}
            self.leaves.append(own)
        if fdora:
            use_fdora(self.model)
        self.optimizers = [
            torch.optim.AdamW(own.values(), lr=LR, fused=jobs.device != "cpu", weight_decay=0.0) for own in self.leaves
        ]

    def gradients(self, work):
        a = work.samples[0].adapter
        self.model.set_adapter(str(a))
        losses = by_modules(self.model, self.jobs.data(work))
        leaves = self.leaves[a]
        return losses.detach(), dict(zip(leaves, torch.autograd.grad(losses.sum(), leaves.values()), strict=True))

    def run(self):
        for a, works in enumerate(self.jobs.alone):
            self.model.set_adapter(str(a))
            for work in works:
                if not work.samples:
                    continue
                losses = by_modules(self.model, self.jobs.data(work))
                losses.backward(on(losses.device, torch.tensor(work.weights)))
                if work.due:
                    torch.nn.utils.clip_grad_norm_(self.leaves[a].values(), CLIP)
                    self.optimizers[a].step()
                    self.optimizers[a].zero_grad(set_to_none=True)


class Together:
    """All jobs by ``train_step``."""

    def __init__(self, jobs: Jobs):
        self.jobs, self.stage = jobs, jobs.stage(range(jobs.layers))
        self.model = Model(lambda params, kept, data: self.stage.forward(params, kept, None, data), self.stage.keep)
        self.start = jobs.state(self.stage)

    def gradients(self, work):
        a = work.samples[0].adapter
        params, leaves = leaves_of(self.start.params)
        losses = self.model.forward(params, self.start.kept, self.jobs.data(work))
        torch.autograd.backward(losses.sum(), inputs=leaves)
        found = {f"{name}.{part}": t.grad[a] for name, bank in params.items() for part, t in zip("ABm", bank, strict=True)}
        return losses.detach(), found

    def run(self):
        own = {part: optree.tree_map(torch.clone, getattr(self.start, part)) for part in ("grads", "mean", "square")}
        state = self.start._replace(**own)
        for work in self.jobs.works:
            data = self.jobs.data(work) if work.samples else None
            state, _ = train_step(state, work, data, model=self.model, jobs=self.jobs.jobs, donate=True)


def build(way: str, jobs: Jobs):
    return Together(jobs) if way == "fdora_together" else Peft(jobs, way != "peft_lora", way == "fdora_alone")


def relative(mine, truth) -> float:
    """Of all tensors of a dict together."""
    top = sum((mine[k].double().flatten() - t.double().flatten()).square().sum() for k, t in truth.items())
    return float((top / sum(t.double().square().sum() for t in truth.values())).sqrt())


def one_process(run: Run, jobs: Jobs) -> None:
    options, failures, agreement = run.options, run.failed, {}
    run.set(agreement=agreement, failed=failures)
    ways = failures.attempt(options.ways, lambda way: build(way, jobs))
    probe = jobs.alone[0][0]
    if "peft_dora" in ways:
        losses, truth = ways["peft_dora"].gradients(probe)
        for way in [way for way in ways if way.startswith("fdora")]:
            mine, grads = ways[way].gradients(probe)
            agreement[way] = {"losses": relative({"": mine}, {"": losses}), "gradients": relative(grads, truth)}
        print(agreement, flush=True)
    free(options.device)
    turns = {way: [] for way in ways}
    for turn in range(options.runs + 1):
        for way in ways:
            seconds = wall(ways[way].run, options.device)
            print(f"turn {turn}, {way}: {seconds[0]:.3f} s", flush=True)
            if turn:
                turns[way].append(seconds)
    run.add(*rows_of(turns, jobs.tokens))
    wrong = [way for way, found in agreement.items() if not max(found.values()) <= MOST_APART[jobs.dtype]]
    if wrong or failures:
        raise SystemExit(f"apart from PEFT's DoRA: {wrong}; failed: {dict(failures)}")


def measure(run: Run) -> None:
    options, jobs = run.options, Jobs(run.options)
    plans = {"together": len(jobs.works), "alone": sum(map(len, jobs.alone)), "fill": jobs.plan.fill, "capacity": jobs.capacity}
    run.set(world=options.world, layers=options.layers, r=options.r, tokens=jobs.tokens, microbatches=plans)
    (one_process if options.world == 1 else jobs_pipeline.measure)(run, jobs)


OPTIONS = {
    "--layers": 4,
    "--r": 16,
    "--capacity": (6144, "tokens of a microbatch"),
    "--samples": (8, "of a batch"),
    "--batches": (3, "of each job"),
    "--ways": Some(WAYS),
    "--tiny": (False, "small widths and samples in float32, for a smoke test"),
}


main = Suite(measure, OPTIONS, runs=5, world=1, ahead=jobs_pipeline.ahead)
