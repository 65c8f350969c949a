"""What suites of models share: adapters away from their start, compiled layers, how two models are compared and judged."""

from __future__ import annotations

import copy
import json
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from bench.clock import Failures, free, medians, wall_timer
from bench.ways import away
from tests.memory import peak_bytes

# From the published configurations, and what stands for them in a smoke test.
SIZES = json.loads(Path(__file__).with_name("models.json").read_text())
LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
MOST_APART = {"bf16": 0.1, "fp32": 1e-3}  # relative L2 of fdora against PEFT: all layers round, and PEFT rounds more


def adapters(
    model: nn.Module, r: int, dtype: torch.dtype, targets: Iterable[str] = ()
) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    """A, B and m, in PEFT's shapes, of each linear but a language model's head; with ``targets`` of each linear and convolution
    whose path ends in one."""
    kinds, ends, values = (nn.Linear, nn.Conv2d) if targets else nn.Linear, tuple(f".{each}" for each in targets), {}
    for name, layer in model.named_modules():
        if isinstance(layer, kinds) and (name.endswith(ends) if targets else name != "lm_head"):
            A, B, m, _ = away(layer.weight.flatten(1), r, dtype)
            kernel = layer.weight.shape[2:]
            ones = [1] * len(kernel)
            values[name] = (A.view(r, -1, *kernel), B.view(-1, r, *ones), m.view(1, -1, *ones) if kernel else m)
    return values


def context(device: str, dtype: str, adapter: str) -> Callable[[], AbstractContextManager]:
    """Of a forward: float32 adapters of a bf16 model run under bf16 autocast, as trainers run them."""
    mixed = (dtype, adapter) == ("bf16", "fp32")
    return partial(torch.autocast, torch.device(device).type, torch.bfloat16) if mixed else nullcontext


def adapted_as(options, adapter: str | None = None) -> dict[str, Any]:
    """What these options say of every way: its dropout, and what its forward runs in."""
    where = context(options.device, options.dtype, adapter or options.adapter)
    return {"dropout": options.dropout, "context": where}


@contextmanager
def evaluated(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Inside, these are in evaluation, and in training afterwards."""
    modules = list(modules)
    for module in modules:
        module.eval()
    try:
        yield
    finally:
        for module in modules:
            module.train()


@contextmanager
def nothing_dropped(*models: nn.Module) -> Iterator[list[nn.Module]]:
    """Inside, these drop nothing: each way draws masks of its own, so with dropout no result is another's. Gives what does."""
    dropping = [module for model in models for module in model.modules() if isinstance(module, nn.Dropout) and module.training]
    with evaluated(dropping):
        yield dropping


def timed_as(mode: str, dropout: float, models: Iterable[nn.Module]) -> AbstractContextManager:
    """Inside, models are in the state of this mode: what drops in training is evaluated for inference."""
    return evaluated(models if dropout and mode.endswith("inference") else ())


def forward_of(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return type(layer).forward(layer, *args, **kwargs)


def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def compiled_forward(way: str, mode: str | None = None, forward: Callable = forward_of, **options: bool) -> Callable:
    """The forward of a way's layers, compiled, or `call` of its model with all hooks: a function with a code object of its own.

    Dynamo keeps there what it compiled, so no way walks past the guards of others.
    """
    own = types.FunctionType(forward.__code__.replace(co_name=f"forward_{way}"), forward.__globals__)
    return torch.compile(own, mode=mode, **{"dynamic": False, **options})


def compile_each(way: str, layers: Iterable[nn.Module]) -> None:
    """One by one: one graph serves all of them."""
    compiled = compiled_forward(way)
    for layer in layers:
        layer.forward = partial(compiled, layer)


def agreement(mine, theirs) -> dict[str, float]:
    """Relative L2 difference of outputs and of the gradients of all A, all B, all m, and x."""
    names = ["x", *theirs.leaves]
    found = []
    with nothing_dropped(mine.model, theirs.model) as dropping:
        for way in (mine, theirs):
            gradients = dict(zip(names, way.gradient(), strict=True))
            found.append({"y": way.inference()} | by_part(gradients, "xABm"))
    if dropping:  # once as it will be timed: its calls are counted, by the path that they take
        mine.gradient()
    return relative(*found)


def by_part(gradients: Mapping[str, Tensor], parts: str = "ABm") -> dict[str, Tensor]:
    """The gradients of all leaves whose names begin so, one behind the other."""
    return {f"d{part}": torch.cat([t.flatten() for name, t in gradients.items() if name[0] == part]) for part in parts}


def in_float32(base: nn.Module, values: Mapping[str, tuple]) -> tuple[nn.Module, dict[str, tuple]]:
    """A model and its adapters' values, for a run that says what the others lose."""
    return copy.deepcopy(base).float(), {name: tuple(t.float() for t in parts) for name, parts in values.items()}


def relative(mine: Mapping[str, Tensor], truth: Mapping[str, Tensor]) -> dict[str, float]:
    """L2 of each difference, as a share."""
    return {name: float(f"{apart(t, truth[name])['relative']:.3g}") for name, t in mine.items()}


def apart(a: Tensor, b: Tensor) -> dict[str, float]:
    a, b = a.double().flatten(), b.double().flatten()
    found = {"relative": ((a - b).norm() / b.norm()).item(), "cosine": (a @ b / (a.norm() * b.norm())).item()}
    return found | {"max_difference": (a - b).abs().max().item(), "max": b.abs().max().item()}


def wall_and_peak(
    fns: Mapping[str, Callable[[], object]], options, failures: Failures, label: str
) -> dict[str, dict[str, float]]:
    """Wall ms in turns, and peak MB, of those that run."""
    peaks = failures.attempt(fns, lambda key: peak_bytes(fns[key], options.device) / 2**20, label)
    free(options.device)  # what a way that ran out of memory has left
    ms = medians(failures.attempt(peaks, lambda key: wall_timer(fns[key], options.device, 0), label), options.runs)
    return {key: {"ms": round(ms[key], 3), "peak_mb": round(peaks[key], 2)} for key in ms}


def left(
    paths: Mapping[str, Mapping[str, int]], options, mine: Iterable[str] = ("fused", "composed")
) -> dict[str, Mapping[str, int]]:
    """Ways that left calls to PEFT. On a CPU, where no kernel draws a mask, layers that drop are meant to."""
    if options.device == "cpu" and getattr(options, "dropout", 0.0):
        return {}
    return {where: ran for where, ran in paths.items() if "fused" not in ran or not set(ran) <= set(mine)}


def judge(
    apart: Mapping[str, Mapping[str, float]], most: float, failed: Mapping[str, str], stock: Mapping[str, Mapping[str, int]]
) -> None:
    """End with a failure where fdora is wrong, failed, or left calls to PEFT. What 8 bits lose is said, not judged."""
    exact = {where: parts for where, parts in apart.items() if "fp8" not in where}
    wrong = [f"{part} of {where}" for where, parts in exact.items() for part, v in parts.items() if not v <= most]
    if wrong or stock or any("fdora" in name or "agreement" in name for name in failed):
        raise SystemExit(f"fdora parts from PEFT's DoRA in {wrong}, or did not run: {dict(failed)}, calls {stock}")
