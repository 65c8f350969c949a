"""What a training will take: memory, time and the fastest layout, from shapes alone. No weight is read.

    fdora plan --model config.json --adapters 4x16 --gpu h200 --gpus 2 --length 2048 --microbatches 8
    fdora plan --model config.json --adapters law=64 med=16 --weights nf4 --json plan.json
    fdora plan jobs.toml                  # of what fdora train jobs.toml will do; the same as fdora train jobs.toml --plan

An adapter is a rank (64), several of one rank (4x16), name=rank (law=64), or the folder of a PEFT adapter. The table has a row
for each layout: GiB on the fullest GPU, the most tokens that a microbatch can hold there, time of an optimizer step, and tokens
per second of all GPUs together. Layouts that fit come first, the fastest on top.

Exit status: 0; 1 if no layout fits; 2 for a mistake in arguments or files, with one sentence on stderr.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fdora._check import fail
from fdora._command import WRITTEN, align, mistakes, parser_of, using
from fdora.explain_model import ADAPTER, is_file, load
from fdora.jobs.plan import Memory, Plan, Setup, card, plan, read_model
from fdora.jobs.plan.cost import SPARE
from fdora.jobs.plan.layout import Layout
from fdora.jobs.plan.model import LINEARS, OPTIMIZERS, WEIGHTS, Adapter
from fdora.predict import GPUS

# of PEFT's config: what trains more, less or something else than A, B and m of one rank on all layers of a name
OTHERS = (
    *("rank_pattern", "modules_to_save", "layers_to_transform", "exclude_modules", "target_parameters", "lora_bias"),
    *("trainable_token_indices", "layer_replication"),
)


def read_adapters(texts: list[str]) -> tuple[tuple[Adapter, ...], frozenset[str] | None]:
    """Of a command line: ``64``, ``4x64``, ``name=64``, or the folder of a PEFT adapter; with the targets of the folders.

    Raises:
      FdoraError: another form, or folders whose targets differ, or that train what is not planned.
    """
    found: list[Adapter] = []
    targets: set[frozenset[str]] = set()
    for text in texts:
        if is_file(Path(text) / ADAPTER):
            config = load(Path(text) / ADAPTER, "jobs.plan", "adapters")
            names, bias, kind = (config.get(key) for key in ("target_modules", "bias", "peft_type"))
            wrong = [key for key in OTHERS if config.get(key)]  # what would be planned as if it were not there
            if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                wrong.append("target_modules")
            if bias not in (None, "none"):
                wrong.append("bias")
            if kind not in (None, "LORA"):
                wrong.append("peft_type")
            if wrong:
                want = "folders of LoRA or DoRA adapters of one rank on a list of layers, with nothing else that is trained"
                raise fail("jobs.plan", "adapters", want, f"{wrong[0]} {config.get(wrong[0])!r}", "Pass a rank, and targets.")
            if type(config.get("r")) is not int or config["r"] < 1:
                want, have = f"folders whose {ADAPTER} has a positive int `r`", repr(config.get("r"))
                raise fail("jobs.plan", "adapters", want, have, "Check it.")
            targets.add(frozenset(names or ()))
            found.append(Adapter(Path(text).name, config["r"]))
            continue
        name, _, r = text.rpartition("=")
        count, _, r = r.rpartition("x")
        if not all(n.isdecimal() and len(n) < 7 for n in (r, count or "1")):
            raise fail(
                "jobs.plan", "adapters", "ranks (64, 4x64, name=64) or folders of PEFT adapters", repr(text), "Check the path."
            )
        many = int(count or 1)
        found += [Adapter(name or f"adapter {len(found) + i}", int(r)) for i in range(many)]
    if len(targets) > 1:
        raise fail("jobs.plan", "adapters", "folders with the same target_modules", f"{len(targets)} kinds", "Plan them apart.")
    return tuple(found), targets.pop() if targets else None


GIB = 2**30


def table(found: Plan) -> str:
    model, setup = found.model, found.setup
    adapters = ", ".join(f"{each.name} (r = {each.r})" for each in setup.adapters)
    rates = "measured rates" if found.card.measured else "published rates: times are floors, links are not known"
    head = [
        f"{model.kind}, {model.layers} layers, weights in {setup.weights}; {adapters}",
        f"{found.gpus} x {found.card.name}, {found.card.bytes / GIB:.1f} GiB of which {SPARE:.0%} are left free; {rates}",
        f"{setup.microbatches} microbatches of {found.tokens} tokens for each GPU and step, sequences of {setup.length}",
        "",
    ]
    rows: list[tuple[str, ...]] = [
        ("layout", "fuse", "checkpointing", "GiB", "fits", "tokens at most", "ms a step", "tokens/s", "bubble")
    ]
    for each in found.layouts:
        ms = "?" if each.seconds is None else f"{1e3 * each.seconds:.1f}"
        rate = "?" if each.tokens_per_second is None else f"{each.tokens_per_second:.0f}"
        kind = f"{each.kind} {'+'.join(map(str, each.stages))}".strip()
        yes = [("no", "yes")[flag] for flag in (each.fuse, each.checkpointing, each.fits)]
        bubble = f"{each.bubble:.0%}" if each.kind == "pipeline" and each.seconds is not None else ""
        rows.append((kind, *yes[:2], f"{each.memory.peak / GIB:.2f}", yes[2], f"{each.capacity}", ms, rate, bubble))
    lines = [*head, *align(rows, (0, 1, 4)), ""]
    if found.best is None:
        return "\n".join([*lines, "None fits: fewer tokens, more GPUs, or weights in fewer bits."])
    return "\n".join([*lines, f"Best: {_words(found.best)}. Memory there:", *components(found.best.memory)])


def _words(way: Layout) -> str:
    kinds = {"one": "one GPU", "replicas": "a replica on each GPU", "fsdp2": "FSDP2", "pipeline": "a pipeline"}
    more = {"fuse=True": way.fuse, "gradient checkpointing": way.checkpointing}
    more |= {"of what fits the first; no time is known": way.seconds is None}
    return ", ".join([kinds[way.kind], *(text for text, holds in more.items() if holds)])


def components(held: Memory) -> list[str]:
    rows = [(name, f"{value / GIB:.3f} GiB") for name, value in held._asdict().items() if name != "at" and value]
    rows.append(("peak", f"{held.peak / GIB:.3f} GiB, {held.at}"))
    return [f"  {line}" for line in align(rows, (0, 1))]


OPTIONS: dict[str, tuple[Any, ...]] = {
    "--model": (str, "config.json of transformers, or the folder that holds one", {"required": True}),
    "--adapters": (str, "ranks or folders (default: one adapter of rank 16)", {"nargs": "+", "default": ["16"]}),
    "--gpu": ("h200", f"one of {', '.join(GPUS)}"),
    "--gpus": (1, "how many of them"),
    "--length": (4096, "tokens in a sequence"),
    "--tokens": (int, "tokens in a microbatch, a multiple of --length (default: one sequence)"),
    "--microbatches": (1, "microbatches in a step, for each GPU"),
    "--loss-tokens": (int, "tokens of each sequence that reach the head (default: all)"),
    "--weights": ("bf16", "format of the frozen weights", {"choices": WEIGHTS}),
    "--adapter-dtype": ("float32", "dtype of the adapters, as in PEFT", {"choices": ("float32", "bfloat16")}),
    "--optimizer": ("adamw", "optimizer of the adapters", {"choices": OPTIMIZERS}),
    "--targets": (str, f"adapted layers (default: {' '.join(LINEARS)}, or those of the folders)", {"nargs": "+"}),
    "--profile": (str, "rates of your GPU, as bench.profile_gpu writes them"),
    "--json": (Path, "file for everything, in bytes and seconds"),
}
SAME = ("length", "loss_tokens", "weights", "optimizer", "microbatches")  # of the options and of a Setup


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("plan", __doc__, OPTIONS)
    a = parser.parse_args(argv)
    with mistakes(parser):
        adapters, own = read_adapters(a.adapters)
        size, targets = 4 if a.adapter_dtype == "float32" else 2, frozenset(a.targets or own or LINEARS)
        setup = Setup(adapters=adapters, adapter_bytes=size, targets=targets, **{name: getattr(a, name) for name in SAME})
        found = plan(read_model(a.model), setup, gpu=card(a.gpu, a.profile), gpus=a.gpus, tokens=a.tokens)
        if a.json:
            text = json.dumps(found.to_dict(), indent=1) + "\n"
            with using("jobs.plan", "json", WRITTEN):
                a.json.write_text(text)
        print(table(found))
    return int(found.best is None)


if __name__ == "__main__":
    raise SystemExit(main())
