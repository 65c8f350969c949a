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

import statistics
import time

import optree
import torch
import torch.distributed as dist

from bench.attempt import Failures
from bench.clock import free, synchronize
from bench.jobs_model import LINEARS, TINY, Sizes, by_modules, data_of, decoder, stage_of
from bench.records import save
from bench.schedule import KINDS, drawn
from bench.suite import about, command
from bench.table import table
from fdora.functional import DoraParams, dora_init, dora_stack
from fdora.jobs.loop import Job, Model, init_state, train_step, works_of
from fdora.jobs.loop.step import leaves_of, on
from fdora.jobs.schedule import Sample, Schedule, Spec, schedule

WAYS = ("peft_lora", "peft_dora", "fdora_alone", "fdora_together")
MOST_APART = {torch.bfloat16: 3e-2, torch.float32: 1e-4}
CLIP, LR = 1.0, 1e-4


class Jobs:
    """What every way is given."""

    def __init__(self, options):
        self.device = options.device if options.world == 1 or options.device == "cpu" else f"cuda:{dist.get_rank()}"
        self.dtype = torch.float32 if options.tiny else torch.bfloat16
        self.sizes = TINY if options.tiny else Sizes()
        self.capacity = capacity_of(options)
        self.lengths = lengths_of(options)
        self.plan = plan_of(self.lengths, options)
        self.works = works_of(self.plan)
        alone = [plan_of([each], options).microbatches for each in self.lengths]
        self.alone = [works_of(renamed(each, a)) for a, each in enumerate(alone)]
        self.r, self.layers = options.r, options.layers
        self.count = len(self.lengths)
        self.jobs = [Job(kind, LR, clip=CLIP) for kind in KINDS]
        self.tokens = sum(n for batches in self.lengths for batch in batches for n in batch)
        self.model = decoder(options.layers, self.sizes, self.dtype, self.device)
        draw = torch.Generator(self.device).manual_seed(1)
        self.starts: dict[str, list[DoraParams]] = {}
        for n in range(options.layers):
            for name in LINEARS:
                W = self.model.layers[n][name].weight
                own = [dora_init(W, self.r, dtype=self.dtype, generator=draw) for _ in range(self.count)]
                for p in own:
                    p.B.normal_(std=0.05 * self.r**-0.5, generator=draw)
                self.starts[f"layers.{n}.{name}"] = [p._replace(m=p.m.to(self.dtype)) for p in own]
        self.cache = {}

    def data(self, work):
        """Made once: the input is no part of what is timed."""
        if work.samples not in self.cache:
            self.cache[work.samples] = data_of(work, self.sizes, self.count, self.dtype, self.device)
        return self.cache[work.samples]

    def stage(self, inside, first=True, last=True):
        return stage_of(self.model, inside, (2.0,) * self.count, (self.r,) * self.count, first, last)

    def state(self, stage):
        return init_state({name: dora_stack(self.starts[name]) for name in stage.names}, self.jobs, stage.keep)


def capacity_of(options) -> int:
    return 64 if options.tiny else options.capacity


def lengths_of(options) -> list[list[list[int]]]:
    """Of each job, batch and sample."""
    found = drawn(list(KINDS), options.batches, options.samples, capacity_of(options), 0)
    return [[[min(n, 24) if options.tiny else n for n in b] for b in batches] for batches in found]


def plan_of(lengths: list[list[list[int]]], options) -> Schedule:
    return schedule(
        lengths, Spec(capacity_of(options), depth=options.world, seconds=0)
    )  # see bench.schedule: the solver finds nothing


def renamed(microbatches, adapter):
    return [tuple(Sample(adapter, *sample[1:]) for sample in each) for each in microbatches]


class Peft:
    """Jobs one after the other through a PEFT model with an adapter for each."""

    def __init__(self, jobs: Jobs, dora: bool, fdora: bool):
        import copy
        import warnings

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
                layer = self.model.get_base_model().get_submodule(path)
                own |= {f"{path}.A": layer.lora_A[str(a)].weight, f"{path}.B": layer.lora_B[str(a)].weight}
                if dora:
                    own[f"{path}.m"] = layer.lora_magnitude_vector[str(a)].weight
                for part, value in zip("ABm", params[a], strict=True):
                    if f"{path}.{part}" in own:
                        own[f"{path}.{part}"].data = value.clone()
            self.leaves.append(own)
        if fdora:
            from fdora.integrations.peft import use_fdora

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


def wall(step, device) -> tuple[float, float]:
    """Seconds until it is done, and until the host had issued it: as many, where the GPU waits for the host."""
    synchronize(device)
    start = time.perf_counter()
    step()
    issued = time.perf_counter() - start
    synchronize(device)
    return time.perf_counter() - start, issued


def relative(mine, truth) -> float:
    """Of all tensors of a dict together."""
    top = sum((mine[k].double().flatten() - t.double().flatten()).square().sum() for k, t in truth.items())
    return float((top / sum(t.double().square().sum() for t in truth.values())).sqrt())


def one_process(options) -> None:
    jobs, failures = Jobs(options), Failures()
    result = head(options, jobs) | {"agreement": {}, "rows": [], "failed": failures}
    ways = failures.attempt(options.ways, lambda way: build(way, jobs))
    probe = jobs.alone[0][0]
    if "peft_dora" in ways:
        losses, truth = ways["peft_dora"].gradients(probe)
        for way in [way for way in ways if way.startswith("fdora")]:
            mine, grads = ways[way].gradients(probe)
            of_losses = relative({"": mine}, {"": losses})
            result["agreement"][way] = {"losses": of_losses, "gradients": relative(grads, truth)}
        print(result["agreement"], flush=True)
    free(options.device)
    turns = {way: [] for way in ways}
    for turn in range(options.runs + 1):
        for way in ways:
            seconds = wall(ways[way].run, options.device)
            print(f"turn {turn}, {way}: {seconds[0]:.3f} s", flush=True)
            if turn:
                turns[way].append(seconds)
    report(result, turns, options)
    wrong = [way for way, found in result["agreement"].items() if not max(found.values()) <= MOST_APART[jobs.dtype]]
    if wrong or failures:
        raise SystemExit(f"apart from PEFT's DoRA: {wrong}; failed: {dict(failures)}")


def head(options, jobs: Jobs) -> dict:
    facts = {"about": about(options.device, options.commit), "world": options.world, "layers": options.layers, "r": options.r}
    plans = {"together": len(jobs.works), "alone": sum(map(len, jobs.alone)), "fill": jobs.plan.fill, "capacity": jobs.capacity}
    return facts | {"runs": options.runs, "tokens": jobs.tokens, "microbatches": plans}


def rows_of(turns, tokens: int) -> list[dict]:
    """A row for each way that had a turn."""
    rows = []
    for way, found in turns.items():
        if found:
            seconds, issued = zip(*found, strict=True)
            middle = statistics.median(seconds)
            row = {"way": way, "seconds": middle, "least": min(seconds), "issued": statistics.median(issued)}
            rows.append(row | {"tokens_per_s": tokens / middle})
    return rows


def report(result, turns, options) -> None:
    result["rows"] = rows_of(turns, result["tokens"])
    cells = [
        [row["way"], *(f"{row[name]:.3f}" for name in ("seconds", "least", "issued")), f"{row['tokens_per_s']:,.0f}"]
        for row in result["rows"]
    ]
    print(table(["way", "s", "least", "issued", "tokens/s"], cells), flush=True)
    save(options.json, result)


def parse(argv=None):
    parser = command(__doc__, runs=5)
    parser.add_argument("--world", type=int, default=1, help="stages of a pipeline, a process for each")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--r", type=int, default=16)
    parser.add_argument("--capacity", type=int, default=6144, help="tokens of a microbatch")
    parser.add_argument("--samples", type=int, default=8, help="of a batch")
    parser.add_argument("--batches", type=int, default=3, help="of each job")
    parser.add_argument("--ways", type=lambda s: s.split(","), default=list(WAYS))
    parser.add_argument("--jobs", type=int, default=0, help="processes that compile the kernels of a pipeline first")
    parser.add_argument("--tiny", action="store_true", help="small widths and samples in float32, for a smoke test")
    return parser.parse_args(argv)


def main(argv=None):
    options = parse(argv)
    if options.world == 1:
        one_process(options)
        return
    from bench import jobs_pipeline

    jobs_pipeline.start(options)


if __name__ == "__main__":
    main()
