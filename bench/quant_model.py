"""Decoder layers on an NF4 base through PEFT: time and memory of a training step, and whether a whole model fits.

    python -m bench.quant_model --device cuda --json FILE
    python -m bench.quant_model --device cuda --model 8b --layers 4 --S 4096 --r 64 --ways qlora,use_fdora

Layers, ways and modes as in bench.steps, every linear packed by bitsandbytes in NF4 with nested scales: PEFT's LoRA (qlora),
its DoRA (qdora), that after ``use_fdora`` and after ``use_fdora(fuse=True)``. A step takes the gradients of x and of all
adapters and changes the sign of every A, so that all norms are new; ``micro`` is one of eight micro-batches of a step. Wall
time until the GPU is done, GPU time of replayed CUDA graphs, peak of the allocator beyond weights and adapters.

``whole`` sums what a model of such layers takes in training, each layer checkpointed: packed weights, embedding and head in
bf16, adapters in float32 with gradients and two moments of Adam, the input of every layer, and the peak of one layer's step.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from bench.clock import free
from bench.decoder import adapters
from bench.steps import SIZES, Cell, Gpu, Stack, Way, compared, inputs, measured
from bench.suite import One, Run, Some, Suite
from bench.table import columns, table

WAYS = {"qlora": "peft_lora", "qdora": "peft_dora", "use_fdora": "use_fdora", "use_fdora_fused": "use_fdora_fused"}
MODELS = {"70b": (80, 128256), "8b": (36, 151936), "2048": (28, 151936), "tiny": (2, 100)}  # layers and words of the whole


def quantise(model: nn.Module) -> None:
    """Every linear as bitsandbytes' Linear4bit."""
    import bitsandbytes as bnb

    for name, layer in list(model.named_modules()):
        if type(layer) is not nn.Linear:
            continue
        device, W = layer.weight.device, layer.weight.detach().cpu()
        made = bnb.nn.Linear4bit(W.shape[1], W.shape[0], False, W.dtype, True, "nf4", device="meta")
        made.weight = bnb.nn.Params4bit(W, requires_grad=False, compress_statistics=True, quant_type="nf4").to(device)
        made.quant_state = made.weight.quant_state
        parent, _, last = name.rpartition(".")
        setattr(model.get_submodule(parent), last, made)


def stored_bytes(model: nn.Module) -> int:
    """Codes and scales of all layers."""
    from fdora.quant import from_bnb

    found = 0
    for layer in model.modules():
        if getattr(layer, "quant_state", None) is not None:
            found += sum(t.nbytes for t in from_bnb(layer.weight).tensors if t is not None)
    return found


def whole(options, packed: int, adapted: int, peak: int) -> dict[str, float]:
    """GB of a model of such layers."""
    layers, words = MODELS[options.model]
    width = SIZES[options.model]["hidden_size"]
    parts = {
        "packed weights": packed / options.layers * layers,
        "embedding and head": 2 * 2 * words * width,
        "adapters, gradients, moments": 16 * adapted / options.layers * layers,
        "inputs of layers": 2 * options.S * width * layers,
        "peak of one layer": peak / options.layers,
    }
    return {name: round(size / 1e9, 2) for name, size in {**parts, "sum": sum(parts.values())}.items()}


OPTIONS = {
    "--model": One(MODELS, "70b"),
    "--layers": 1,
    "--S": 4096,
    "--r": 64,
    "--ways": Some(WAYS),
}
# Of bench.steps: all turns of every mode, and peaks
LIKE_STEPS = {"dtype": "bf16", "loss_tokens": 1024, "dropout": 0.0, "modes": ("inference", "step", "micro"), "compiled": []}
LIKE_STEPS |= {"no_eager": False, "cell_seconds": 1e6, "peaks": True}


def check(parser, options) -> None:
    vars(options).update(LIKE_STEPS)


COLUMNS = {"mode": "{mode}", "way": "{way}", "wall ms": "{ms}", "GPU ms": "{gpu_ms}", "peak MB": "{peak_mb}"}


def markdown(result: dict) -> str:
    parts = list(next(iter(result["whole"].values())))
    sums = table(["a whole model, GB", *parts], [[way, *each.values()] for way, each in result["whole"].items()])
    return f"{columns(result['rows'], COLUMNS)}\n\n{sums}"


def measure(run: Run) -> None:
    options = run.options
    torch.manual_seed(0)
    base = Stack(options.model, options.layers, torch.bfloat16, options.device)
    values = adapters(base, options.r, torch.bfloat16)
    quantise(base)
    free(options.device)
    cell = Cell(options.model, options.S, options.r)
    ways = run.failed.attempt(options.ways, lambda name: Way(WAYS[name], base, values))
    inputs(cell, ways, options)
    count = sum(t.numel() for t in next(iter(ways.values())).leaves.values())
    run.set(layers=options.layers, cell=cell._asdict(), packed_bytes=stored_bytes(base), adapters=count, failed=run.failed)
    if "qdora" in ways:
        run.set(agreement=compared(ways, "qdora"))
        print(run.result["agreement"], flush=True)
    for row in measured(run, cell, ways, None if options.device == "cpu" else Gpu(True)):
        run.add(row)
    steps = {row["way"]: math.ceil(row["peak_mb"] * 2**20) for row in run.result["rows"] if row["mode"] == "step"}
    run.set(whole={name: whole(options, run.result["packed_bytes"], count, peak) for name, peak in steps.items()})


main = Suite(measure, OPTIONS, runs=7, check=check, show=markdown, judge=lambda run: run.end("use_fdora"))
