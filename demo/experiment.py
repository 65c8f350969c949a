"""The demo's plan: measure the model as it is, with a linear probe, with DoRA through fdora and with DoRA in PEFT."""

from __future__ import annotations

import platform
from copy import deepcopy
from dataclasses import asdict
from functools import partial
from importlib.metadata import version
from statistics import median
from typing import Any

import torch
from torch import Generator, nn
from tqdm import tqdm

import fdora
from demo import stop
from demo.adapt import adapt, linear_layers, peft_twin
from demo.batches import Texts
from demo.data import load_corpus
from demo.measure import peak_bytes, timed
from demo.model import MODEL, load_encoder, load_tokenizer
from demo.probe import accuracy, embed_all, train_probe
from demo.train import Runner, Settings

TOLERANCE = 1e-4
"""How far the two loss curves may be apart."""


def run(settings: Settings, device: torch.device, limit: int | None = None, nf4: bool = False) -> dict[str, Any]:
    """All of it; ``limit`` keeps only so many texts of each side, for a quick look; ``nf4`` quantises the encoder. Returns what
    report.json holds."""
    torch.set_float32_matmul_precision("highest")  # float32 is to be float32 on a GPU too, not TF32
    corpus = load_corpus()
    n_train, n_held = len(corpus.train), len(corpus.held_out)
    print(
        f"{n_train + n_held:,} docstrings of {len(corpus.classes)} standard packages: {n_train:,} from {corpus.modules[0]} "
        f"modules to train on, {n_held:,} from {corpus.modules[1]} other modules held out",
        flush=True,
    )
    stop.check()
    tokenizer = load_tokenizer()
    train, held_out = (
        Texts(side[:: -(-len(side) // limit) if limit else 1], tokenizer, settings.max_tokens)
        for side in (corpus.train, corpus.held_out)
    )
    labels = train.labels.to(device), held_out.labels.to(device)

    stop.check()
    model = load_encoder(device)
    weights = {"float32": sum(layer.weight.nbytes for layer in linear_layers(model).values())}
    if nf4:
        from demo.quantised import never_packed, quantised, weight_bytes  # bitsandbytes is wanted here alone

        model = quantised(model)
        weights["nf4"] = weight_bytes(model)
    torch.manual_seed(settings.seed)
    head = nn.Linear(model.config.hidden_size, len(corpus.classes)).to(device)
    print(
        f"{MODEL['name']} ({MODEL['licence']}) from the package {MODEL['package']} {MODEL['package_version']} "
        f"({MODEL['package_licence']}), {len(linear_layers(model))} linear layers, on {device_name(device)}",
        flush=True,
    )
    frozen = embed_all(model, held_out, device, "embedding held-out texts")
    probe = train_probe(head, embed_all(model, train, device, "embedding texts to train on"), labels[0])
    before, probed = accuracy(head, frozen, labels[1]), accuracy(probe, frozen, labels[1])

    params = adapt(model, settings.r, settings.s, Generator(device).manual_seed(settings.seed))
    other = load_encoder(device)
    twin = peft_twin(quantised(other) if nf4 else other, params, settings.r, settings.alpha)
    twin = never_packed(twin) if nf4 else twin
    runners = [
        Runner("fdora", model, [tensor for p in params.values() for tensor in p], deepcopy(head), settings),
        Runner("peft", twin, [p for p in twin.parameters() if p.requires_grad], deepcopy(head), settings),
    ]
    longest = train.batch(train.by_length()[-settings.batch_size :], device)
    stop.check()
    peaks = [peak_bytes(partial(r.dry_step, longest), device) for r in runners]
    race(runners, train, device)
    adapted = [accuracy(r.head, embed_all(r.model, held_out, device, f"held-out texts, {r.name}"), labels[1]) for r in runners]
    differences = [abs(a - b) for a, b in zip(*(r.losses for r in runners), strict=True)]
    return {
        "model": MODEL,
        "data": {
            "source": f"docstrings of the standard library of Python {platform.python_version()}",
            "classes": corpus.classes,
            "texts": {"train": n_train, "held_out": n_held},
            "modules": dict(zip(("train", "held_out"), corpus.modules, strict=True)),
            "texts_used": {"train": len(train), "held_out": len(held_out)},
        },
        "settings": asdict(settings),
        "adapted_layers": len(params),
        "held_out_accuracy": {"before": before, "linear_probe": probed, "fdora": adapted[0], "peft": adapted[1]},
        "trained_parameters": {
            "before": 0,
            "linear_probe": sum(p.numel() for p in head.parameters()),
            **{r.name: r.trained() for r in runners},
        },
        "step_seconds_median": {r.name: median(r.seconds) for r in runners},
        "bytes_of_linear_weights": weights,
        "peak_bytes_of_a_step": {r.name: peak for r, peak in zip(runners, peaks, strict=True)},
        "largest_loss_difference": max(differences),
        "tolerance": TOLERANCE,
        "loss": {r.name: r.losses for r in runners},
        "step_seconds": {r.name: r.seconds for r in runners},
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "versions": {
            "python": platform.python_version(),
            "fdora": fdora.__version__,
            **{name: version(name) for name in ("torch", "peft", "transformers", *(["bitsandbytes"] if nf4 else []))},
        },
    }


def race(runners: list[Runner], texts: Texts, device: torch.device) -> None:
    """Train all runners on the same batches, in turn, so that whatever else the machine does slows all of them."""
    settings = runners[0].settings
    order = texts.shuffled(settings.batch_size, Generator().manual_seed(settings.seed))
    bar = tqdm(range(settings.steps), "fine-tuning with " + " and ".join(r.name for r in runners), unit="step")
    for i in stop.steps(bar):
        batch = texts.batch(next(order), device)
        for r in runners if i % 2 == 0 else reversed(runners):
            loss, seconds = timed(partial(r.step, batch), device)
            r.losses.append(loss)
            r.seconds.append(seconds)
        bar.set_postfix({r.name: f"{r.losses[-1]:.4f}" for r in runners}, refresh=False)


def device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} ({platform.machine()}, {torch.get_num_threads()} threads)"
