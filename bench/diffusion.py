"""A training step of diffusion models at their published sizes: PEFT's LoRA, its DoRA, and that after ``use_fdora``.

    python -m bench.diffusion --models klein --batch 2 --device cuda --json FILE
    python -m bench.diffusion --models sdxl,sdxl_conv --dtype fp16 --r 16 --checkpointing no --device cuda --json FILE

The models are diffusers' own with random weights. klein: Flux 2 klein 4B, 512 x 512 pixels (1024 tokens, and 512 of text), the
targets of PEFT's image-generation benchmark; like there float32 adapters run without autocast. sdxl: its UNet, 1024 x 1024
pixels, the attention as diffusers' DreamBooth scripts adapt it, and the feed-forward layers; sdxl_conv: the convolutions of its
residual blocks and the projections around its attention as well; float32 adapters run under autocast, as there. A step is the
mean squared error against a random target (scaled, as float16 wants it), the gradients of all adapters, and AdamW (fused).

The ways share weights and have equal adapters, away from their start. Wall time until the GPU is done, in turns; GPU time of a
replayed CUDA graph of the whole step; medians, and peak memory above weights, adapters and optimizer. Before a model is timed,
the outputs and gradients of PEFT's DoRA and of fdora are compared with PEFT's DoRA in float32: fdora may lose twice what PEFT
loses.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench import decoder
from bench.clock import free
from bench.decoder import adapters, apart, judge, left, of_part, wall_and_peak
from bench.rivals import adapted, paths
from bench.steps import Gpu
from bench.suite import Run, Some, Suite, beside_lora
from bench.ways import S

WAYS = ("peft_lora", "peft_dora", "peft_fdora")
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LOSS_SCALE = 4096.0  # of a GradScaler; AdamW does not see it
MOST = 2.0  # times PEFT's own error


class Kind(NamedTuple):
    """A model as it is trained: ``small`` is its name among the tests' tiny ones, ``autocast`` that of float32 adapters."""

    config: Mapping[str, Any]
    targets: tuple[str, ...]
    side: int
    text: int
    autocast: bool
    small: str


SIZES = decoder.SIZES["diffusion"]
ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
FLUX2 = (*ATTENTION, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out", "to_qkv_mlp_proj", "linear_in", "linear_out")
LINEAR = (*ATTENTION, "net.0.proj", "net.2")
MODELS = {
    "klein": Kind(SIZES["klein"], FLUX2, 32, 512, False, "flux2"),
    "sdxl": Kind(SIZES["sdxl"], LINEAR, 128, 77, True, "sdxl"),
    "sdxl_conv": Kind(SIZES["sdxl"], (*LINEAR, "proj_in", "proj_out", "conv1", "conv2"), 128, 77, True, "sdxl"),
}


class Case(NamedTuple):
    model: str
    dtype: str
    adapter: str
    r: int
    batch: int
    checkpointing: str


def network(model: str, tiny: bool) -> nn.Module:
    """Frozen, in float32."""
    import diffusers

    from tests.integrations import diffusion as small

    kind = MODELS[model]
    name, config, _ = small.MODELS[kind.small]
    return getattr(diffusers, name)(**(config if tiny else kind.config)).requires_grad_(False)


def checkpointed(module: nn.Module, *args: Any) -> Any:
    """Nothing draws, so no generator's state is kept: that of a GPU cannot be read while a graph is captured."""
    return checkpoint(module.__call__, *args, use_reentrant=False, preserve_rng_state=False)


class Trained:
    """One way's model, on the inputs of :meth:`feed`."""

    def __init__(self, way: str, base: nn.Module, values: Mapping[str, tuple], kind: Kind, autocast: torch.dtype | None):
        self.way = way
        self.model, self.leaves = adapted(way, base, values, kind.targets, S)
        device = next(iter(self.leaves.values())).device.type
        self.context = partial(torch.autocast, device, autocast) if autocast else nullcontext
        self.optimizer = torch.optim.AdamW(self.leaves.values(), lr=1e-5, fused=True, capturable=device != "cpu")

    def feed(self, x: Mapping[str, Any], target: Tensor, checkpointing: bool) -> None:
        self.x, self.target = x, target
        self.model.disable_gradient_checkpointing()
        if checkpointing:
            self.model.enable_gradient_checkpointing(checkpointed)

    def results(self) -> tuple[Tensor, tuple[Tensor, ...]]:
        """The output, and the gradients of all leaves."""
        with self.context():
            y = self.model(**self.x).sample
            loss = F.mse_loss(y.float(), self.target)
        return y.detach(), torch.autograd.grad(LOSS_SCALE * loss, list(self.leaves.values()))

    def step(self) -> None:
        _, gradients = self.results()
        for p, gradient in zip(self.leaves.values(), gradients, strict=True):
            p.grad = gradient
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def parts(self) -> dict[str, Tensor]:
        """The output, and the gradients of all A, all B and all m, each as one."""
        y, gradients = self.results()
        named = dict(zip(self.leaves, gradients, strict=True))
        return {"y": y} | {f"d{part}": of_part(part, named) for part in "ABm"}


def wide(x: Any) -> Any:
    """The same inputs in float32."""
    if isinstance(x, dict):
        return {key: wide(t) for key, t in x.items()}
    return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x


class Bench:
    """Rows of one command. A base model, and the ways on it, stay until a case asks for others."""

    def __init__(self, run: Run):
        self.run, self.options = run, run.options
        self.base = None
        self.ways = {}
        self.built = ()
        run.set(tiny=self.options.tiny, errors={}, paths={}, failed=run.failed)

    def build(self, case: Case) -> None:
        options, kind, built = self.options, MODELS[case.model], case[:4]
        self.ways.clear()
        if self.built[:2] != built[:2]:
            self.base = None
            free(options.device)
            torch.manual_seed(0)
            with torch.device(options.device):
                self.base = network(case.model, options.tiny).to(DTYPES[case.dtype])
        free(options.device)
        self.built, dtype = built, DTYPES[case.dtype]
        self.values = adapters(self.base, case.r, torch.float32 if case.adapter == "fp32" else dtype, kind.targets)
        autocast = dtype if kind.autocast and case.adapter == "fp32" else None
        tags = {f"{way}, {label(case)}": way for way in options.ways}
        made = self.run.failed.attempt(tags, lambda tag: Trained(tags[tag], self.base, self.values, kind, autocast))
        self.ways = {tags[tag]: way for tag, way in made.items()}

    def inputs(self, case: Case) -> tuple[dict[str, Any], Tensor]:
        """Those of the model, and what its output is compared with."""
        from tests.integrations import diffusion as small

        kind = MODELS[case.model]
        sizes = {} if self.options.tiny else {"side": kind.side, "text": kind.text}
        x = small.inputs(self.base, batch=case.batch, **sizes)
        return x, torch.randn_like(x["sample"] if "sample" in x else x["hidden_states"], dtype=torch.float32)

    def agree(self, case: Case, x: dict[str, Any], target: Tensor) -> None:
        """The relative L2 error of each way of DoRA, against PEFT's in float32."""
        exact = {name: tuple(t.float() for t in parts) for name, parts in self.values.items()}
        truth = Trained("peft_dora", copy.deepcopy(self.base).float(), exact, MODELS[case.model], None)
        truth.feed(wide(x), target, True)
        want = truth.parts()
        del truth
        for way, each in self.ways.items():
            if "dora" in way:
                got = each.parts()
                found = {part: float(f"{apart(t, want[part])['relative']:.3g}") for part, t in got.items()}
                self.run.result["errors"].setdefault(label(case), {})[way] = found
                if way != "peft_dora":
                    self.run.result["paths"][label(case)] = paths(each.model)
        self.run.say(label(case), self.run.result["errors"].get(label(case)), self.run.result["paths"].get(label(case)))

    def measure(self, case: Case) -> None:
        options, new = self.options, self.built != case[:4]
        if new:
            self.build(case)
        x, target = self.inputs(case)
        for way in self.ways.values():
            way.feed(x, target, case.checkpointing == "yes")
        if new:
            self.run.failed.attempt([f"agreement, {label(case)}"], lambda _: self.agree(case, x, target))
        free(options.device)
        tags = {f"{way}, {label(case)}": way for way in self.ways}
        steps = {tag: self.ways[way].step for tag, way in tags.items()}
        found = wall_and_peak(steps, options, self.run.failed, "{}")
        gpu_ms, by = {}, ""
        if options.device != "cpu":
            able = {tag: steps[tag] for tag in found}
            gpu_ms, by = Gpu(True).times(able, {tag: each["ms"] for tag, each in found.items()}, options.runs, self.run.failed)
        for tag, each in found.items():
            gpu = {"gpu_ms": round(gpu_ms[tag], 3), "gpu_by": by} if gpu_ms else {}
            self.run.add({**case._asdict(), "way": tags[tag]} | each | gpu)


def label(case: Case) -> str:
    return ", ".join(f"{name} {value}" for name, value in case._asdict().items())


OPTIONS = {
    "--models": Some(MODELS),
    "--dtype": (Some(DTYPES, ["bf16"]), "of weights and activations"),
    "--adapter": (Some(("fp32", "half"), ["fp32"]), "of A, B and m; half is the dtype of the weights"),
    "--r": [64],
    "--batch": [1],
    "--checkpointing": Some(("no", "yes")),
    "--ways": Some(WAYS),
    "--tiny": False,
}


def measure(run: Run) -> None:
    bench, options = Bench(run), run.options
    axes = (options.models, options.dtype, options.adapter, options.r, options.batch, options.checkpointing)
    for case in run.cases([Case(*each) for each in product(*axes)]):
        bench.measure(case)


def judged(run: Run) -> None:
    """fdora's errors in shares of PEFT's."""
    shares = {}
    for where, ways in run.result["errors"].items():
        theirs = ways.get("peft_dora", {})
        shares |= {where: {part: e / theirs[part] for part, e in ways.get("peft_fdora", {}).items()}} if theirs else {}
    judge(shares, MOST, run.failed, left(run.result["paths"], run.options))


main = Suite(measure, OPTIONS, runs=5, seconds=math.inf, show=lambda found: beside_lora(found["rows"]), judge=judged)
