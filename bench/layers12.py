"""Twelve decoder layers in the shape of Qwen3-8B, all seven linears adapted: what a forward and a training step cost.

    python -m bench.layers12 --device cuda --r 384 --json FILE

One sequence of 4096 tokens, loss on its last 1024. Inference (no_grad) and gradient (of x and all adapters; ``frozen``: of x
alone), also with activation checkpointing per layer, eager and with torch.compile per layer. Ways share the weights and
have equal adapters, away from their start. ``fdora`` is given its norms, computed once per optimizer step (``norms_ms``, for
all layers, is in no other time); ``fdora_inside`` computes them in every call. ``peft_fdora`` is PEFT's DoRA after
``use_fdora``, which asks in every call whether its norm still holds. Wall time until the GPU is done, median of turns; peak
memory above weights and adapters. Outputs and gradients of ``fdora`` and ``peft_fdora`` are compared with those of PEFT's DoRA.
"""

from __future__ import annotations

import copy
import math
import types
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.attempt import Failures
from bench.clock import free, medians, wall_timer
from bench.decoder import LINEARS, Sizes, angles, decoder
from bench.rivals import adapted, paths
from bench.suite import Run, Suite, add_compiled, add_stack, compilations, words
from bench.ways import S
from fdora.functional import dora_linear, dora_norm
from tests.memory import peak_bytes

WAYS = ("frozen", "peft_lora", "peft_dora", "peft_fdora", "fdora", "fdora_inside")
MODES = ("inference", "gradient", "gradient_checkpointing")
TINY = Sizes(hidden=64, heads=4, kv_heads=2, head=16, intermediate=96)
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
MOST_APART = {"bf16": 0.1, "fp32": 1e-3}  # relative L2 of fdora against PEFT: all layers round, and PEFT rounds more


class Adapted(nn.Module):
    """A linear that calls dora_linear; ``c`` is its norm, None to have it computed in the call."""

    def __init__(self, W: Tensor, A: Tensor, B: Tensor, m: Tensor, inside: bool):
        super().__init__()
        self.W, self.A, self.B, self.m = W, *(nn.Parameter(t.clone()) for t in (A, B, m))
        self.c = None
        if not inside:
            self.refresh()

    def refresh(self) -> None:
        self.c = dora_norm(self.W, self.A, self.B, s=S)

    def forward(self, x: Tensor) -> Tensor:
        return dora_linear(x, self.W, self.A, self.B, self.m, s=S, norm=self.c)


def linears(model: nn.Module) -> dict[str, nn.Module]:
    """All but a language model's head."""
    return {name: each for name, each in model.named_modules() if isinstance(each, nn.Linear) and name != "lm_head"}


def adapters(model: nn.Module, r: int, dtype: torch.dtype) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    values = {}
    for name, layer in linears(model).items():
        W = layer.weight
        A = torch.randn(r, W.shape[1], device=W.device).mul_(W.shape[1] ** -0.5).to(dtype)
        B = torch.randn(W.shape[0], r, device=W.device).mul_(0.05 * r**-0.5).to(dtype)
        norm = dora_norm(W, A, B, s=S, backend="eager")
        values[name] = (A, B, (norm * (1 + 0.0015 * torch.randn_like(norm))).to(dtype))
    return values


def adapt(way: str, base: nn.ModuleList, values: dict) -> tuple[nn.ModuleList, dict[str, Tensor]]:
    """A model of this way around the same weights, and its leaves."""
    if way.startswith("peft"):
        return adapted(way, base, values, LINEARS, S)
    model = copy.deepcopy(base, {id(p): p for p in base.parameters()})
    if way == "frozen":
        return model, {}
    for name, value in values.items():
        parent, _, child = name.rpartition(".")
        W = model.get_submodule(name).weight
        setattr(model.get_submodule(parent), child, Adapted(W, *value, inside=way == "fdora_inside"))
    found = {name: dict(model.get_submodule(name).named_parameters()) for name in values}
    found = {name: {part: p for part, p in parts.items() if part != "W"} for name, parts in found.items()}
    return model, {f"{part} of {name}": p for name, parts in found.items() for part, p in parts.items()}


def call(layer, x, cos, sin):
    return layer(x, cos, sin)


def own_code(fn: Callable, name: str) -> Callable:
    """The function under this name, with a code object of its own.

    Dynamo keeps there what it compiled, so no way walks past the guards of others.
    """
    return types.FunctionType(fn.__code__.replace(co_name=name), fn.__globals__)


class Step:
    """One way's model: ``inference()`` and ``gradient()`` on given inputs."""

    def __init__(self, way: str, base: nn.ModuleList, values: dict, x: Tensor, target: Tensor, head: int):
        self.model, self.leaves = adapt(way, base, values)
        self.x, self.target = x, target
        self.angles = angles(x.shape[1], head, x.dtype, x.device)
        self.call = call
        self.own = own_code(call, f"call_{way}")

    def compile(self) -> Step:
        self.call = torch.compile(self.own, dynamic=False)
        return self

    def run(self, checkpointing: bool = False) -> Tensor:
        x = self.x
        for layer in self.model:
            one = partial(self.call, layer)
            x = checkpoint(one, x, *self.angles, use_reentrant=False) if checkpointing else one(x, *self.angles)
        return x

    @torch.no_grad()
    def inference(self) -> Tensor:
        return self.run()

    def gradient(self, checkpointing: bool = False) -> tuple[Tensor, ...]:
        last = self.run(checkpointing)[:, -self.target.shape[1] :]
        loss = (last.float() - self.target).square().mean()
        return torch.autograd.grad(loss, [self.x, *self.leaves.values()])

    def gradient_checkpointing(self) -> tuple[Tensor, ...]:
        return self.gradient(True)

    def refresh(self) -> None:
        for module in self.model.modules():
            if isinstance(module, Adapted):
                module.refresh()


def agreement(mine, theirs) -> dict[str, dict[str, float]]:
    """Relative L2 difference, cosine and largest difference of outputs and of the gradients of all A, all B, all m, and x."""
    names = ["x", *theirs.leaves]
    gradients = [dict(zip(names, step.gradient(), strict=True)) for step in (mine, theirs)]
    pairs = {"y": (mine.inference(), theirs.inference())}
    for part in "xABm":
        both = (torch.cat([t.flatten() for name, t in g.items() if name[0] == part]) for g in gradients)
        pairs[f"d{part}"] = tuple(both)
    return {name: apart(a, b) for name, (a, b) in pairs.items()}


def apart(a: Tensor, b: Tensor) -> dict[str, float]:
    a, b = a.double().flatten(), b.double().flatten()
    found = {"relative": ((a - b).norm() / b.norm()).item(), "cosine": (a @ b / (a.norm() * b.norm())).item()}
    return found | {"max_difference": (a - b).abs().max().item(), "max": b.abs().max().item()}


def wall_and_peak(fns: Mapping[str, Callable[[], object]], options, failures: Failures) -> dict[str, dict[str, float]]:
    """Wall ms in turns, and peak MB, of those that run."""
    peaks = failures.attempt(fns, lambda key: peak_bytes(fns[key], options.device) / 2**20)
    free(options.device)  # what a way that ran out of memory has left
    ms = medians(failures.attempt(peaks, lambda key: wall_timer(fns[key], options.device, 0)), options.runs)
    return {key: {"ms": round(ms[key], 3), "peak_mb": round(peaks[key], 2)} for key in ms}


def judge(
    apart: Mapping[str, Mapping[str, float]], most: float, failed: Mapping[str, str], paths: Mapping[str, Mapping[str, int]]
) -> None:
    """End with a failure where fdora is wrong, failed, or left calls to PEFT."""
    wrong = [f"{part} of {where}" for where, parts in apart.items() for part, v in parts.items() if not v <= most]
    stock = {where: ran for where, ran in paths.items() if set(ran) - {"composed"} != {"fused"}}
    if wrong or stock or any("fdora" in name or "agreement" in name for name in failed):
        raise SystemExit(f"fdora parts from PEFT's DoRA in {wrong}, or did not run: {dict(failed)}, calls {stock}")


def rows_of(steps: dict[str, Step], compiled: bool, run: Run) -> list[dict]:
    if compiled:
        steps = {name: step.compile() for name, step in steps.items()}
    rows = {name: {"way": name, "compiled": compiled, "r": run.options.r} for name in steps}
    for mode in run.options.modes:
        if run.late(f"{mode}, {'compiled' if compiled else 'eager'}"):
            continue
        tag = {f"{name}, {'compiled ' if compiled else ''}{mode}": name for name in steps}
        fns = {key: getattr(steps[name], mode) for key, name in tag.items()}
        for key, found in wall_and_peak(fns, run.options, run.failed).items():
            rows[tag[key]] |= {f"{mode}_{unit}": value for unit, value in found.items()}
    return list(rows.values())


def arguments(parser) -> None:
    add_stack(parser, 12, WAYS, r=384)
    parser.add_argument("--modes", type=words(MODES, "modes"), default=list(MODES))
    add_compiled(parser)
    parser.add_argument("--tiny", action="store_true", help="small widths, for a smoke test")
    parser.add_argument("--quick", action="store_true", help="four layers, three turns")


def check(parser, options) -> None:
    if options.quick:
        options.layers, options.runs = 4, 3


def measure(run: Run) -> None:
    options, device, dtype = run.options, run.options.device, DTYPES[run.options.dtype]
    sizes = TINY if options.tiny else Sizes()
    torch._dynamo.config.recompile_limit = 64
    torch.manual_seed(0)
    base = decoder(options.layers, sizes, dtype, device)
    values = adapters(base, options.r, DTYPES[options.adapter])
    x = torch.randn(1, options.seq, sizes.hidden, device=device, dtype=dtype).requires_grad_()
    target = torch.randn(1, min(options.loss_tokens, options.seq), sizes.hidden, device=device)
    steps = run.failed.attempt(options.ways, lambda way: Step(way, base, values, x, target, sizes.head))
    facts = {name: getattr(options, name) for name in ("layers", "seq", "dtype", "adapter", "r")}
    run.set(**facts, sizes=vars(sizes), failed=run.failed)
    for way in ("fdora", "peft_fdora") if "peft_dora" in steps else ():
        if way in steps:
            run.set(**{f"{way}_against_peft_dora": agreement(steps[way], steps["peft_dora"])})
    if "peft_fdora" in steps:
        run.set(peft_fdora_ran=paths(steps["peft_fdora"].model))
    if "fdora" in steps:
        ms = medians({"norms": wall_timer(steps["fdora"].refresh, device, 0)}, options.runs)["norms"]
        run.set(norms_ms=round(ms, 3))
    print({key: value for key, value in run.result.items() if "peft" in key or "norms" in key}, "\n", flush=True)
    for compiled in compilations(options):
        run.add(*rows_of(steps, compiled, run))


def judged(run: Run) -> None:
    found = {way: run.result.get(f"{way}_against_peft_dora", {}) for way in ("fdora", "peft_fdora")}
    apart = {way: {name: each["relative"] for name, each in parts.items()} for way, parts in found.items()}
    ran = {"peft_fdora": run.result["peft_fdora_ran"]} if found["peft_fdora"] else {}
    judge(apart, MOST_APART[run.options.dtype], run.failed, ran)


main = Suite(__doc__, measure, arguments, runs=7, seconds=math.inf, check=check, judge=judged)


if __name__ == "__main__":
    main()
