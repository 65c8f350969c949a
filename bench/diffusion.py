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

import math
from collections.abc import Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from itertools import groupby, product
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench import decoder
from bench.clock import free
from bench.decoder import adapters, by_part, in_float32, judge, left, relative, wall_and_peak
from bench.rivals import adapted, paths
from bench.steps import Gpu
from bench.suite import Run, Some, Suite, beside_lora
from bench.ways import HALVES, S

WAYS = ("peft_lora", "peft_dora", "peft_fdora")
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
        return {"y": y} | by_part(dict(zip(self.leaves, gradients, strict=True)))


def wide(x: Any) -> Any:
    """The same inputs in float32."""
    if isinstance(x, dict):
        return {key: wide(t) for key, t in x.items()}
    return x.float() if isinstance(x, Tensor) and x.is_floating_point() else x


def ways_of(run: Run, base: nn.Module, case: Case) -> tuple[dict[str, Trained], dict[str, tuple]]:
    """The ways on this model, and the values of their adapters."""
    kind, dtype, full = MODELS[case.model], HALVES[case.dtype], case.adapter == "fp32"
    values = adapters(base, case.r, torch.float32 if full else dtype, kind.targets)
    autocast = dtype if kind.autocast and full else None
    make = partial(Trained, base=base, values=values, kind=kind, autocast=autocast)
    return run.failed.attempt(run.options.ways, make, f"{{}}, {label(case)}"), values


def inputs(base: nn.Module, case: Case, tiny: bool) -> tuple[dict[str, Any], Tensor]:
    """Those of the model, and what its output is compared with."""
    from tests.integrations import diffusion as small

    kind = MODELS[case.model]
    x = small.inputs(base, batch=case.batch, **({} if tiny else {"side": kind.side, "text": kind.text}))
    return x, torch.randn_like(x["sample"] if "sample" in x else x["hidden_states"], dtype=torch.float32)


def agree(run: Run, ways: Mapping[str, Trained], case: Case, base: nn.Module, values: Mapping[str, tuple], *given: Any) -> None:
    """The relative L2 error of each way of DoRA, against PEFT's in float32 on what was ``given``."""
    truth = Trained("peft_dora", *in_float32(base, values), MODELS[case.model], None)
    truth.feed(*map(wide, given), True)
    want, errors, where = truth.parts(), {}, label(case)
    del truth
    for way, each in ways.items():
        if "dora" in way:
            errors[way] = relative(each.parts(), want)
            if way != "peft_dora":
                run.result["paths"][where] = paths(each.model)
    run.result["errors"][where] = errors
    run.say(where, errors, run.result["paths"].get(where))


def timed(run: Run, ways: Mapping[str, Trained], case: Case) -> None:
    """A row for each way."""
    options, steps, where = run.options, {way: each.step for way, each in ways.items()}, f"{{}}, {label(case)}"
    found = wall_and_peak(steps, options, run.failed, where)
    gpu_ms, by = {}, ""
    if options.device != "cpu":
        able, ms = {way: steps[way] for way in found}, {way: each["ms"] for way, each in found.items()}
        gpu_ms, by = Gpu(True).times(able, ms, options.runs, run.failed, where)
    for way, each in found.items():
        gpu = {"gpu_ms": round(gpu_ms[way], 3), "gpu_by": by} if gpu_ms else {}
        run.add({**case._asdict(), "way": way} | each | gpu)


def of_adapters(run: Run, base: nn.Module, cases: Iterable[Case]) -> None:
    """Cases of the same adapters: the ways are compared in the first."""
    options, ways = run.options, None
    for case in cases:
        new = ways is None
        if new:
            ways, values = ways_of(run, base, case)
        x, target = inputs(base, case, options.tiny)
        for way in ways.values():
            way.feed(x, target, case.checkpointing == "yes")
        if new:
            run.failed.attempt([f"agreement, {label(case)}"], lambda _: agree(run, ways, case, base, values, x, target))
        free(options.device)
        timed(run, ways, case)


def label(case: Case) -> str:
    return ", ".join(f"{name} {value}" for name, value in case._asdict().items())


OPTIONS = {
    "--models": Some(MODELS),
    "--dtype": (Some(HALVES, ["bf16"]), "of weights and activations"),
    "--adapter": (Some(("fp32", "half"), ["fp32"]), "of A, B and m; half is the dtype of the weights"),
    "--r": [64],
    "--batch": [1],
    "--checkpointing": Some(("no", "yes")),
    "--ways": Some(WAYS),
    "--tiny": False,
}


def measure(run: Run) -> None:
    options = run.options
    run.set("tiny", errors={}, paths={}, failed=run.failed)
    axes = (options.models, options.dtype, options.adapter, options.r, options.batch, options.checkpointing)
    for (model, dtype), cases in groupby(run.cases([Case(*each) for each in product(*axes)]), itemgetter(0, 1)):
        torch.manual_seed(0)
        with torch.device(options.device):
            base = network(model, options.tiny).to(HALVES[dtype])
        for _, alike in groupby(cases, itemgetter(2, 3)):
            of_adapters(run, base, alike)
            free(options.device)
        del base
        free(options.device)


def judged(run: Run) -> None:
    """fdora's errors in shares of PEFT's."""
    shares = {}
    for where, ways in run.result["errors"].items():
        theirs = ways.get("peft_dora", {})
        shares |= {where: {part: e / theirs[part] for part, e in ways.get("peft_fdora", {}).items()}} if theirs else {}
    judge(shares, MOST, run.failed, left(run.result["paths"], run.options))


main = Suite(measure, OPTIONS, runs=5, seconds=math.inf, show=beside_lora, judge=judged)
