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
import time
import types
from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.attempt import Failures
from bench.clock import medians, wall_timer
from bench.decoder import LINEARS, Sizes, angles, decoder
from bench.records import save
from bench.rivals import inject, paths
from bench.suite import about, command
from bench.table import line
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
    model = copy.deepcopy(base, {id(p): p for p in base.parameters()})
    if way == "frozen":
        return model, {}
    if way.startswith("peft"):
        leaves = inject(model, values, LINEARS, S, way != "peft_lora")
        if way == "peft_fdora":
            from fdora.integrations.peft import use_fdora

            use_fdora(model, fuse=False)
        return model, leaves
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


def measure(steps: dict[str, Step], compiled: bool, options, failures: Failures) -> list[dict]:
    if compiled:
        steps = {name: step.compile() for name, step in steps.items()}
    rows = {name: {"way": name, "compiled": compiled, "r": options.r} for name in steps}
    for mode in options.modes.split(","):
        if time.perf_counter() > options.until:
            failures[f"{mode}, {'compiled' if compiled else 'eager'}"] = f"not started within {options.seconds:.0f} s"
            continue
        tag = {name: f"{name}, {'compiled ' if compiled else ''}{mode}" for name in steps}
        fns = {tag[name]: getattr(step, mode) for name, step in steps.items()}
        peaks = failures.attempt(fns, lambda key: peak_bytes(fns[key], options.device) / 2**20)
        timers = failures.attempt(peaks, lambda key: wall_timer(fns[key], options.device, 0))
        ms = medians(timers, options.runs)
        for name, row in rows.items():
            if tag[name] in ms:
                row |= {f"{mode}_ms": round(ms[tag[name]], 3), f"{mode}_peak_mb": round(peaks[tag[name]], 2)}
    for row in rows.values():
        cells = [f"{row.get(f'{mode}_ms', '')} / {row.get(f'{mode}_peak_mb', '')}" for mode in MODES]
        print(line([row["way"], "compiled" if compiled else "eager", *cells]), flush=True)
    return list(rows.values())


def parse(argv):
    parser = command(__doc__, runs=7, seconds=math.inf)
    parser.add_argument("--r", type=int, default=384)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--seq", type=int, default=4096)
    parser.add_argument("--loss-tokens", type=int, default=1024)
    parser.add_argument("--dtype", choices=DTYPES, default="bf16", help="of weights and activations")
    parser.add_argument("--adapter", choices=DTYPES, default="bf16", help="of A, B and m")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--modes", default=",".join(MODES))
    parser.add_argument("--no-compile", action="store_true")
    parser.add_argument("--no-eager", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="small widths, for a smoke test")
    parser.add_argument("--quick", action="store_true", help="four layers, three turns")
    options = parser.parse_args(argv)
    if options.quick:
        options.layers, options.runs = 4, 3
    options.until = time.perf_counter() + options.seconds
    return options


def main(argv=None):
    options = parse(argv)
    device, dtype = options.device, DTYPES[options.dtype]
    facts, failures = about(device, options.commit, argv), Failures()
    sizes = TINY if options.tiny else Sizes()
    print(facts, "\n", flush=True)
    torch._dynamo.config.recompile_limit = 64
    torch.manual_seed(0)
    base = decoder(options.layers, sizes, dtype, device)
    values = adapters(base, options.r, DTYPES[options.adapter])
    x = torch.randn(1, options.seq, sizes.hidden, device=device, dtype=dtype).requires_grad_()
    target = torch.randn(1, min(options.loss_tokens, options.seq), sizes.hidden, device=device)
    steps = failures.attempt(options.ways.split(","), lambda way: Step(way, base, values, x, target, sizes.head))
    result = {"about": facts, "layers": options.layers, "seq": options.seq, "sizes": vars(sizes), "dtype": options.dtype}
    result |= {"adapter": options.adapter, "r": options.r, "runs": options.runs, "rows": [], "failed": failures}
    compared = {}
    for way in ("fdora", "peft_fdora") if "peft_dora" in steps else ():
        if way in steps:
            compared[way] = result[f"{way}_against_peft_dora"] = agreement(steps[way], steps["peft_dora"])
            for name, comparison in compared[way].items():
                print(way, name, {key: float(f"{value:.6g}") for key, value in comparison.items()}, flush=True)
    if "peft_fdora" in steps:
        result["peft_fdora_ran"] = paths(steps["peft_fdora"].model)
        print("calls through PEFT:", result["peft_fdora_ran"], flush=True)
    if "fdora" in steps:
        result["norms_ms"] = round(medians({"norms": wall_timer(steps["fdora"].refresh, device, 0)}, options.runs)["norms"], 3)
        print("all norms, once:", result["norms_ms"], "ms\n")
    print(line(["way", "", *(f"{mode}: ms / MB" for mode in MODES)]) + "\n|" + "---|" * (2 + len(MODES)), flush=True)
    for compiled in (*([] if options.no_eager else [False]), *([] if options.no_compile else [True])):
        result["rows"] += measure(steps, compiled, options, failures)
        save(options.json, result)
    most = MOST_APART[options.dtype]
    wrong = [f"{n} of {way}" for way, parts in compared.items() for n, v in parts.items() if not v["relative"] <= most]
    ran = result.get("peft_fdora_ran", {})
    if wrong or any("fdora" in name for name in failures) or ("peft_fdora" in compared and set(ran) != {"fused"}):
        raise SystemExit(f"fdora parts from PEFT's DoRA in {wrong}, or did not run: {dict(failures)}, calls through PEFT {ran}")


if __name__ == "__main__":
    main()
