"""DINOv2's ViT-g/14 in half precision: plain, with PEFT's LoRA and DoRA, and with fdora, eager and compiled.

    python -m bench.vit --device cuda --json FILE --picture FILE.svg
    python -m bench.vit --device cuda --layers 40 --modes inference --json FILE

The model is bench/vit_model.py, random weights; every linear of its blocks is adapted, away from its start. "plain_folded" has
LayerScale multiplied into the weights before it, as one may do by hand where nothing trains. "peft_fdora" is PEFT's DoRA after
``use_fdora``, "peft_fdora_fused" after ``use_fdora(fuse=True)``: LayerScale and the residual in the layer before them, gate,
up and down in one call. Wall time of one call until the GPU is done, median of turns; peak memory above weights and adapters;
images a second. Blocks are compiled one by one: one graph serves all of them. The gradient is that of all adapters and of the
images. First the outputs and gradients of fdora's ways are compared with PEFT's DoRA in float32, on two layers.

torch.profiler names and times the kernels of the middle block; of the gradient those of a layer, by name. In the picture they
stand in their order, each as wide as its time: what one box does was one operation for each name in eager mode.
"""

from __future__ import annotations

import copy
import math
import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.attempt import Failures
from bench.clock import medians, wall_timer
from bench.kernels import Kernel, by_name, middle_block, picture, profiled, shares
from bench.layer import free
from bench.layers12 import adapters, apart, own_code
from bench.records import save
from bench.rivals import fill_all, paths
from bench.suite import about, command
from bench.table import table
from bench.vit_model import GIANT, LINEARS, TINY, Vit, fold_scale, vit
from bench.ways import S
from tests.memory import peak_bytes

WAYS = ("plain", "plain_folded", "peft_lora", "peft_dora", "peft_fdora", "peft_fdora_fused")
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}
MODES = {"inference": 256, "gradient": 64}  # images of a batch
GOAL = 1.12  # compiled DoRA over the compiled plain model
MOST_APART = 0.05  # relative L2 against float32


def adapted(way: str, base: Vit, values: dict) -> tuple[nn.Module, dict[str, Tensor]]:
    """The model of this way around the same weights, and its leaves."""
    if way.startswith("plain"):
        return (fold_scale(base) if way == "plain_folded" else base), {}
    from peft import LoraConfig, get_peft_model

    from fdora.integrations.peft import use_fdora

    model = copy.deepcopy(base, {id(p): p for p in base.parameters()})
    r, dora = next(iter(values.values()))[0].shape[0], way != "peft_lora"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        config = LoraConfig(r=r, lora_alpha=S * r, use_dora=dora, target_modules=list(LINEARS))
        model = get_peft_model(model, config, autocast_adapter_dtype=False)
    leaves = fill_all(model, values, dora, "base_model.model.")
    if "fdora" in way:
        use_fdora(model, fuse=way == "peft_fdora_fused")
    return model, leaves


def call(block, x):
    return type(block).forward(block, x)


class Run:
    """One way's model."""

    def __init__(self, way: str, base: Vit, values: dict):
        self.way = way
        self.model, self.leaves = adapted(way, base, values)

    @property
    def vit(self) -> Vit:
        return self.model if isinstance(self.model, Vit) else self.model.get_base_model()

    def eager(self) -> None:
        for block in self.vit.blocks:
            block.__dict__.pop("forward", None)

    def compile(self) -> None:
        compiled = torch.compile(own_code(call, f"call_{self.way}"), dynamic=False)
        for block in self.vit.blocks:
            block.forward = partial(compiled, block)

    def of(self, mode: str, images: Tensor):
        if mode == "inference":
            return torch.no_grad()(lambda: self.model(images))
        images = images.detach().requires_grad_()  # so that all blocks are alike: one graph serves them
        wanted = [*self.leaves.values(), images]
        return lambda: torch.autograd.grad(loss(self.model(images)), wanted)


def loss(y: Tensor) -> Tensor:
    """Of a normalised y, whose squares would always have the same mean."""
    return (y.float() * torch.arange(y.shape[-1], device=y.device).sin()).sum()


def pixels(batch: int, options) -> Tensor:
    return torch.randn(batch, 3, options.sizes.pixels, options.sizes.pixels, device=options.device, dtype=options.dtype)


def agreement(options) -> dict[str, dict[str, float]]:
    """Outputs and gradients of two layers, against PEFT's DoRA in float32."""
    torch.manual_seed(1)
    base = vit(options.sizes, 2, options.device, options.dtype)
    values = adapters(base.blocks, options.r, options.dtype)
    images = pixels(2 if options.device == "cpu" else MODES["gradient"], options)  # kernels that will be timed
    values = {f"blocks.{name}": parts for name, parts in values.items()}

    def results(way: str, base: Vit, values: dict, images: Tensor) -> Tensor:
        run = Run(way, base, values)
        y, out = run.of("inference", images)(), run.of("gradient", images)()
        return [t.float() for t in (y, *out)]

    exact = {name: tuple(t.float() for t in parts) for name, parts in values.items()}
    truth = results("peft_dora", copy.deepcopy(base).float(), exact, images.float())
    found = {}
    for way in options.ways:
        if "dora" in way:
            got = results(way, base, values, images)
            flat = [torch.cat([t.flatten() for t in each[1:]]) for each in (got, truth)]
            found[way] = {"output": apart(got[0], truth[0])["relative"], "gradients": apart(*flat)["relative"]}
    return found


class Bench:
    """Rows of one command; the JSON is rewritten after every case."""

    def __init__(self, options, argv):
        self.options, self.start, self.failures = options, time.perf_counter(), Failures()
        self.kernels: dict[str, list[Kernel]] = {}
        self.result: dict = {"about": about(options.device, options.commit, argv), "tiny": options.tiny}
        self.result |= {"layers": options.layers, "r": options.r, "dtype": str(options.dtype)}
        self.result |= {"agreement": {}, "rows": [], "kernels": {}, "paths": {}, "failed": self.failures, "skipped": []}

    def late(self) -> bool:
        return time.perf_counter() - self.start > self.options.seconds

    def cases(self, runs: dict[str, Run], mode: str, compiled: bool) -> None:
        """The ways of one mode, timed in turns."""
        options, batch = self.options, self.options.batch or MODES[mode]
        images, label = pixels(batch, options), f"{mode}, {{}}{', compiled' if compiled else ''}"

        def prepared(tag: str) -> tuple[Any, dict]:
            run = runs[tags[tag]]
            run.compile() if compiled else run.eager()
            fn = run.of(mode, images)
            row = {"peak_mb": round(peak_bytes(fn, options.device) / 2**20, 1)}
            if options.device != "cpu":
                every = profiled(fn)
                row |= {"kernels_per_layer": round(len(every) / options.layers, 1)}
                row |= {"gpu_ms": round(sum(kernel.us for kernel in every) / 1e3, 2)}
                self.kernels[tag] = (middle_block if mode == "inference" else by_name)(every, options.layers)
                self.result["kernels"][tag] = [kernel._asdict() for kernel in self.kernels[tag]]
            return fn, row

        tags = {label.format(way): way for way in runs}
        ready = {}
        for tag in tags:
            if self.late():
                self.result["skipped"].append(tag)
                continue
            ready |= self.failures.attempt([tag], prepared)
            free(options.device)
        ms = medians({tag: wall_timer(fn, options.device, 0) for tag, (fn, _) in ready.items()}, options.runs)
        for tag, (_, row) in ready.items():
            way, t = tags[tag], ms[tag]
            known = {"way": way, "compiled": compiled, "mode": mode, "batch": batch, "ms": round(t, 2)}
            self.result["rows"].append(known | {"images_per_s": round(1e3 * batch / t, 1)} | row)
            print(self.result["rows"][-1], flush=True)
        self.result["paths"] = {way: paths(run.model) for way, run in runs.items() if "fdora" in way}
        save(options.json, self.result)


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


def markdown(result: dict) -> str:
    head = ["", "ms", "images / s", "peak, MB", "kernels a layer", "ms in kernels"]
    cells = [
        [f"{row['mode']} of {row['batch']}, {row['way']}, {'compiled' if row['compiled'] else 'eager'}", row["ms"]]
        + [row.get(key, "") for key in ("images_per_s", "peak_mb", "kernels_per_layer", "gpu_ms")]
        for row in result["rows"]
    ]
    return table(head, cells)


def parse(argv):
    parser = command(__doc__, runs=3, seconds=math.inf)
    parser.add_argument("--layers", type=int, default=8, help="the model has 40, all alike")
    parser.add_argument("--batch", type=int, help="256 for inference and 64 for the gradient, if not given")
    parser.add_argument("--r", type=int, default=16)
    parser.add_argument("--dtype", choices=DTYPES, default="fp16")
    parser.add_argument("--ways", type=lambda s: s.split(","), default=list(WAYS))
    parser.add_argument("--modes", type=lambda s: s.split(","), default=list(MODES))
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-eager", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="small widths, for a smoke test")
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args(argv)
    options.dtype, options.sizes = DTYPES[options.dtype], TINY if options.tiny else GIANT
    options.compiled = [compiled for compiled in (False, True) if not (options.no_compile if compiled else options.no_eager)]
    if unknown := (set(options.modes) - set(MODES)) | (set(options.ways) - set(WAYS)):
        parser.error(f"unknown modes or ways: {', '.join(sorted(unknown))}")
    return options


def main(argv=None):
    options = parse(argv)
    torch._dynamo.config.recompile_limit = 64
    bench = Bench(options, argv)
    print(bench.result["about"], "\n", flush=True)
    bench.result["agreement"] = agreement(options)
    print(bench.result["agreement"], flush=True)
    torch.manual_seed(0)
    base = vit(options.sizes, options.layers, options.device, options.dtype)
    values = {f"blocks.{name}": parts for name, parts in adapters(base.blocks, options.r, options.dtype).items()}
    runs = {way: Run(way, base, values) for way in options.ways}
    for mode in options.modes:
        for compiled in options.compiled:
            bench.cases(runs, mode, compiled)
            free(options.device)
    result = bench.result
    print("\n" + markdown(result), *summary(result["rows"]), sep="\n")
    for label, kernels in bench.kernels.items():
        print(f"\n{label}, one block\n{shares(kernels)}")
    if options.picture and bench.kernels:
        picture({label: each for label, each in bench.kernels.items() if label.startswith("inference")}, options.picture)
    save(options.json, result)
    wrong = [f"{way}: {found}" for way, found in result["agreement"].items() if max(found.values()) > MOST_APART]
    if wrong or any("fdora" in name for name in bench.failures):
        raise SystemExit(f"fdora parts from PEFT's DoRA: {wrong}, or did not run: {dict(bench.failures)}")


if __name__ == "__main__":
    main()
