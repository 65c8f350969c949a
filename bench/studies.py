"""Studies of what DoRA does to numbers and to memory, one by its name.

    python -m bench.studies near --json FILE                       # error near g = 1 of six ways to compose
    python -m bench.studies spread --json FILE                     # how g is spread in an adapter that was really trained
    python -m bench.studies timeline --device cuda --json FILE     # allocated and reserved memory through a training step

near: base of deviation 1, s lora of 0.1, g about 1 by a spread; relative error against float64 of what is added to base and of
the output, beside what rounding the exact one costs. spread: the demo's model (22M, pretrained) and recipe, fdora alone; after
so many steps each layer's g = m / c, and what 16 bits make of it: "lost" is the share of values that become 1 exactly, "error"
the relative error of g - 1. timeline: a model of bench.model, the second optimizer step of each way, looked at after every
operation of torch, kept as the most of each of POINTS parts; allocated and reserved bytes by PyTorch's counters.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import torch
from torch import Generator, Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from bench.compose import formula
from bench.suite import One, Run, Suite
from bench.truth import rel_l2
from bench.ways import BF16, HALVES, S
from fdora.functional import dora_compose, dora_delta, dora_norm

SPREADS = (0.0, 1e-4, 3e-4, 1e-3, 1.5e-3, 3e-3, 1e-2, 3e-2, 1e-1)
STEPS = (25, 100, 400)
QUANTILES = (0.05, 0.5, 0.95)
POINTS = 200
WAYS = ("peft_lora", "peft_dora", "peft_fdora", "peft_fdora_fused")


# near


def forms(base: Tensor, lora: Tensor, g: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """What is added to base, and the output, in their dtype. g is float32."""
    half = base.dtype
    coarse, wide = g.to(half), (base.float(), S * lora.float())
    added = {
        "g (base + s lora) - base": coarse * (base + S * lora) - base,
        "(g - 1) base + g s lora": (coarse - 1) * base + coarse * (S * lora),
        "the same, g - 1 in float32": (g - 1).to(half) * base + coarse * (S * lora),
        "float32 inside, g in 16 bits": ((coarse.float() - 1) * wide[0] + coarse.float() * wide[1]).to(half),
        "dora_delta": dora_delta(base, lora, g, s=S),
    }
    y = dora_compose(base, lora, g, s=S)
    return {way: (delta, base + delta) for way, delta in added.items()} | {"dora_compose": (y - base, y)}


def near(run: Run) -> None:
    for (name, half), spread in run.cases(itertools.product(HALVES.items(), SPREADS)):
        random = Generator().manual_seed(0)
        base, lora, g = (torch.randn(size, generator=random) for size in ((512, 4096), (512, 4096), 4096))
        base, lora, g = (t.to(run.options.device) for t in (base.to(half), (lora * 0.1 / S).to(half), 1 + spread * g))
        exact = [formula(op, base, lora, g) for op in ("dora_delta", "dora_compose")]
        ways = forms(base, lora, g) | {"rounding": tuple(t.to(half) for t in exact)}
        errors = {way: [rel_l2(*pair) for pair in zip(found, exact, strict=True)] for way, found in ways.items()}
        delta, output = ({way: float(f"{each[i]:.3g}") for way, each in errors.items()} for i in range(2))
        run.add({"study": "near", "dtype": name, "spread": spread, "delta": delta, "output": output})


# spread


def trained(steps: tuple[int, ...], limit: int | None = None) -> Iterator[tuple[int, dict[str, Tensor]]]:
    """g of each layer of the demo's model after so many steps of its recipe, whose rate of learning falls until the last."""
    from demo.adapt import adapt, linear_layers
    from demo.batches import Texts
    from demo.data import load_corpus
    from demo.model import load_encoder, load_tokenizer
    from demo.train import Runner, Settings

    recipe, corpus = Settings(steps=steps[-1]), load_corpus()
    device, texts = torch.device("cpu"), Texts(corpus.train[:limit], load_tokenizer(), recipe.max_tokens)
    model = load_encoder(device)
    torch.manual_seed(recipe.seed)
    head = nn.Linear(model.config.hidden_size, len(corpus.classes))
    params = adapt(model, recipe.r, recipe.s, Generator().manual_seed(recipe.seed))
    runner = Runner("fdora", model, [t for p in params.values() for t in p], head, recipe)
    order = texts.shuffled(recipe.batch_size, Generator().manual_seed(recipe.seed))
    layers = linear_layers(model)
    for done in range(1, steps[-1] + 1):
        runner.step(texts.batch(next(order), device))
        if done in steps:
            with torch.no_grad():
                yield done, {n: p.m / dora_norm(layers[n].weight, p.A, p.B, s=recipe.s) for n, p in params.items()}


def of_layer(g: Tensor) -> dict:
    """Of one layer's g, or of many at once."""
    away = (g - 1).double()
    row = {"mean": away.mean().item(), "deviation": away.std().item()}
    row |= {
        f"q{int(100 * q):02}": v
        for q, v in zip(QUANTILES, away.quantile(torch.tensor(QUANTILES).double()).tolist(), strict=True)
    }
    rounded = {name: g.to(half) for name, half in HALVES.items()}
    row = {"values": g.numel()} | {key: float(f"{v:.4g}") for key, v in row.items()}
    row["lost"] = {name: round((t == 1).double().mean().item(), 4) for name, t in rounded.items()}
    return row | {"error": {name: float(f"{rel_l2(t.float() - 1, away):.3g}") for name, t in rounded.items()}}


def spread(run: Run) -> None:
    for steps, layers in trained(tuple(run.options.steps), run.options.texts or None):
        for name, g in ({"all": torch.cat(list(layers.values()))} | layers).items():
            run.add({"study": "spread", "steps": steps, "layer": name.removeprefix("encoder.layer.")} | of_layer(g))


# timeline


class Watched(TorchDispatchMode):
    """Notes ``look()`` after every operation."""

    def __init__(self, look: Callable[[], tuple[int, int]]):
        super().__init__()
        self.look, self.seen = look, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.seen.append(self.look())
        return result


def counters() -> tuple[int, int]:
    if not torch.cuda.is_available():
        raise SystemExit("timeline wants a GPU: the memory of a CPU is not counted")
    return torch.cuda.memory_allocated(), torch.cuda.memory_reserved()


def thinned(seen: list[tuple[int, int]], points: int = POINTS) -> list[list[float]]:
    """MiB, allocated and reserved; the most of each part."""
    parts = [seen[i * len(seen) // points : (i + 1) * len(seen) // points] for i in range(points)]
    return [[round(max(column) / 2**20, 1) for column in zip(*part, strict=True)] for part in parts if part]


def timeline(run: Run) -> None:
    from bench.clock import free
    from bench.decoder import adapters
    from bench.model import Trained, inputs_for, network

    options = run.options
    counters()
    torch.manual_seed(0)
    base = network(SimpleNamespace(**vars(options), dtype="bf16"), options.layers)
    values, inputs = adapters(base, options.r, BF16), inputs_for(base, options.seq)
    run.set("model", "layers", "seq", "r")
    for way in run.cases(WAYS):
        trained = Trained(way, base, values, inputs, options.seq)
        step = trained.of("step")
        step()
        free(options.device)
        before = counters()[0]
        with Watched(counters) as watched:
            step()
        seen = watched.seen
        most, held = (max(each[i] for each in seen) for i in range(2))
        row = {"study": "timeline", "way": way, "modules": len(values), "operations": len(seen)}
        row |= {"before_mb": round(before / 2**20, 1), "peak_mb": round(most / 2**20, 1), "reserved_mb": round(held / 2**20, 1)}
        run.add(row | {"points": thinned(seen)})
        del trained, step
        free(options.device)


STUDIES = {"near": near, "spread": spread, "timeline": timeline}


OPTIONS = {
    "study": dict(choices=STUDIES),
    "--steps": (list(STEPS), "of spread: looked at after so many"),
    "--texts": (0, "of spread: of so many texts, 0 for all"),
    "--model": (One(("qwen3-8b", "llama-3.1-8b"), "qwen3-8b"), "of timeline, as --layers, --seq and --r are"),
    "--layers": 12,
    "--seq": 4096,
    "--r": 64,
    "--tiny": False,
}


def measure(run: Run) -> None:
    STUDIES[run.options.study](run)


def judged(run: Run) -> None:
    """fdora's ways lose no more than rounding does, and a hundredth of it."""
    for row in run.result["rows"] if run.options.study == "near" else ():
        for part, way in (("delta", "dora_delta"), ("output", "dora_compose")):
            if not row[part][way] <= 1.01 * row[part]["rounding"]:
                raise SystemExit(f"{way} loses more than rounding: {row}")


main = Suite(measure, OPTIONS, judge=judged)
