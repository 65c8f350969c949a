"""DINOv2's ViT-g/14 in half precision: plain, with PEFT's LoRA and DoRA, and with fdora, eager and compiled.

    python -m bench.vit --device cuda --json FILE
    python -m bench.vit --device cuda --layers 40 --modes inference --json FILE
    python -m bench.vit --device cuda --layers 40 --whole --no-eager --json FILE

The model is bench/vit_model.py, random weights; every linear of its blocks is adapted, away from its start. "plain_folded" has
LayerScale multiplied into the weights before it, as one may do by hand where nothing trains. "peft_fdora" is PEFT's DoRA after
``use_fdora``, "peft_fdora_fused" after ``use_fdora(fuse=True)``: LayerScale and the residual in the layer before them, gate,
up and down in one call. Wall time of one call until the GPU is done, median of turns; peak memory above weights and adapters;
images a second. Blocks are compiled one by one, and one graph serves all of them; with ``--whole`` the model is one graph, with
patch embedding, class token and positions, and a break in it is an error. The gradient is that of all adapters and of the
images. First the outputs and gradients of fdora's ways are compared with PEFT's DoRA in float32, on two layers.

torch.profiler names and times the kernels of a layer, by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import product

import torch
from torch import Tensor, nn

from bench.clock import free
from bench.decoder import adapters, call, compile_each, compiled_forward, in_float32, judge, relative, wall_and_peak
from bench.kernels import Kernel, by_name, profiled, shares
from bench.rivals import adapted, paths
from bench.suite import COMPILED, One, Run, Some, Suite, compilations, tables
from bench.vit_model import GIANT, LINEARS, TINY, Vit, fold_scale, vit
from bench.ways import HALVES, S

WAYS = ("plain", "plain_folded", "peft_lora", "peft_dora", "peft_fdora", "peft_fdora_fused")
MODES = {"inference": 256, "gradient": 64}  # images of a batch
GOAL = 1.12  # compiled DoRA over the compiled plain model
MOST_APART = 0.05  # relative L2 against float32


def made(way: str, base: Vit, values: dict) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model of this way around the same weights, and its leaves."""
    if way.startswith("plain"):
        return (fold_scale(base) if way == "plain_folded" else base), {}
    return adapted(way, base, values, LINEARS, S, "")


class Compared:
    """One way's model."""

    def __init__(self, way: str, base: Vit, values: dict):
        self.way = way
        self.model, self.leaves = made(way, base, values)
        self.run: Callable = call

    @property
    def vit(self) -> Vit:
        return self.model if isinstance(self.model, Vit) else self.model.get_base_model()

    def eager(self) -> None:
        self.run = call
        for block in self.vit.blocks:
            block.__dict__.pop("forward", None)

    def compile(self, whole: bool) -> None:
        if whole:
            self.run = compiled_forward(self.way, forward=call, fullgraph=True)
        else:
            compile_each(self.way, self.vit.blocks)

    def of(self, mode: str, images: Tensor):
        if mode == "inference":
            return torch.no_grad()(lambda: self.run(self.model, images))
        images = images.detach().requires_grad_()  # so that all blocks are alike: one graph serves them
        wanted = [*self.leaves.values(), images]
        return lambda: torch.autograd.grad(loss(self.run(self.model, images)), wanted)


def loss(y: Tensor) -> Tensor:
    """Of a normalised y, whose squares would always have the same mean."""
    return (y.float() * torch.arange(y.shape[-1], device=y.device).sin()).sum()


def pixels(batch: int, options) -> Tensor:
    return torch.randn(batch, 3, options.sizes.pixels, options.sizes.pixels, device=options.device, dtype=options.dtype)


def agreement(options) -> dict[str, dict[str, float]]:
    """Outputs and gradients of two layers, against PEFT's DoRA in float32."""
    torch.manual_seed(1)
    base = vit(options.sizes, 2, options.device, options.dtype)
    values = adapters(base, options.r, options.dtype, LINEARS)
    images = pixels(2 if options.device == "cpu" else MODES["gradient"], options)  # kernels that will be timed

    def results(way: str, base: Vit, values: dict, images: Tensor) -> dict[str, Tensor]:
        run = Compared(way, base, values)
        y, gradients = run.of("inference", images)(), run.of("gradient", images)()
        return {"output": y, "gradients": torch.cat([t.flatten() for t in gradients])}

    truth = results("peft_dora", *in_float32(base, values), images.float())
    return {way: relative(results(way, base, values, images), truth) for way in options.ways if "dora" in way}


def rows_of(run: Run, models: dict[str, Compared], mode: str, compiled: bool, kernels: dict[str, list[Kernel]]) -> None:
    """The ways of one mode, timed in turns."""
    options, batch = run.options, run.options.batch or MODES[mode]
    images, label = pixels(batch, options), f"{mode}, {{}}{', compiled' if compiled else ''}"
    if run.late(label.format("all ways")):
        return
    for model in models.values():
        model.compile(options.whole) if compiled else model.eager()
    fns = {way: model.of(mode, images) for way, model in models.items()}
    for way, found in wall_and_peak(fns, options, run.failed, label).items():
        row = {"way": way, "compiled": compiled, "mode": mode, "batch": batch} | found
        row |= {"images_per_s": round(1e3 * batch / found["ms"], 1)}
        if options.device != "cpu":
            every, tag = profiled(fns[way]), label.format(way)
            kernels[tag] = by_name(every, options.layers)
            run.result["kernels"][tag] = [kernel._asdict() for kernel in kernels[tag]]
            row |= {"kernels_per_layer": round(len(every) / options.layers, 1)}
            row |= {"gpu_ms": round(sum(kernel.us for kernel in every) / 1e3, 2)}
        run.add(row)
    run.set(paths={way: paths(each.model) for way, each in models.items() if "fdora" in way})


def summary(rows: list[dict]) -> list[str]:
    """The goal: compiled DoRA over the compiled plain model, whichever of fdora's ways is the faster."""
    lines = []
    for mode in MODES:
        ms = {row["way"]: row["ms"] for row in rows if row["mode"] == mode and row["compiled"]}
        ours = {way: t for way, t in ms.items() if "fdora" in way}
        if ours and "plain" in ms:
            way = min(ours, key=lambda way: ours[way])
            lines.append(f"{mode}: compiled {way} takes {ours[way] / ms['plain']:.3f} of the compiled plain model")
    if lines:
        lines.append(f"(goal of inference: {GOAL})")
    return lines


OPTIONS = {
    "--layers": (8, "the model has 40, all alike"),
    "--batch": (int, "256 for inference and 64 for the gradient, if not given"),
    "--r": 16,
    "--dtype": One(HALVES, "fp16"),
    "--ways": Some(WAYS),
    "--modes": Some(MODES),
    **COMPILED,
    "--whole": False,
    "--tiny": False,
}


def check(parser, options):
    options.dtype, options.sizes = HALVES[options.dtype], TINY if options.tiny else GIANT


def measure(run: Run) -> None:
    options = run.options
    torch._dynamo.config.recompile_limit = 64
    run.set("tiny", "layers", "r", "whole", dtype=str(options.dtype), failed=run.failed)
    run.set(agreement=agreement(options), kernels={}, paths={})
    print(run.result["agreement"], flush=True)
    torch.manual_seed(0)
    base = vit(options.sizes, options.layers, options.device, options.dtype)
    values = adapters(base, options.r, options.dtype, LINEARS)
    models = {way: Compared(way, base, values) for way in options.ways}
    kernels = {}
    for mode, compiled in product(options.modes, compilations(options)):
        rows_of(run, models, mode, compiled, kernels)
        free(options.device)
    for label, each in kernels.items():
        print(f"\n{label}, one block\n{shares(each)}")


def shown(result: dict) -> str:
    return "\n\n".join([tables(result), *summary(result["rows"])])


def judged(run: Run) -> None:
    judge(run.result["agreement"], MOST_APART, run.failed, {})


main = Suite(measure, OPTIONS, runs=3, seconds=math.inf, check=check, show=shown, judge=judged)
