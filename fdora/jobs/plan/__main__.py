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

from fdora._command import align, mistakes, parser_of, writing
from fdora.jobs.plan import Memory, Plan, Setup, card, plan, read_model
from fdora.jobs.plan.adapters import read_adapters
from fdora.jobs.plan.layout import Layout
from fdora.jobs.plan.memory import SPARE
from fdora.jobs.plan.setup import LINEARS, OPTIMIZERS, WEIGHTS
from fdora.predict import GPUS

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
    more = [*(["fuse=True"] if way.fuse else []), *(["gradient checkpointing"] if way.checkpointing else [])]
    known = [] if way.seconds is not None else ["of what fits the first; no time is known"]
    return ", ".join([kinds[way.kind], *more, *known])


def components(held: Memory) -> list[str]:
    skip = ("at",)
    rows = [(name, "", f"{value / GIB:.3f} GiB") for name, value in held._asdict().items() if name not in skip and value]
    rows.append(("peak", "", f"{held.peak / GIB:.3f} GiB, {held.at}"))
    width = max(len(name) for name, _, _ in rows)
    return [f"  {name:{width}}  {text}" for name, _, text in rows]


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("plan", __doc__)
    parser.add_argument("--model", required=True, help="config.json of transformers, or the folder that holds one")
    parser.add_argument("--adapters", nargs="+", default=["16"], help="ranks or folders (default: one adapter of rank 16)")
    parser.add_argument("--gpu", default="h200", help=f"one of {', '.join(GPUS)} (default: %(default)s)")
    parser.add_argument("--gpus", type=int, default=1, help="how many of them (default: %(default)s)")
    parser.add_argument("--length", type=int, default=4096, help="tokens in a sequence (default: %(default)s)")
    parser.add_argument("--tokens", type=int, help="tokens in a microbatch, a multiple of --length (default: one sequence)")
    parser.add_argument(
        "--microbatches", type=int, default=1, help="microbatches in a step, for each GPU (default: %(default)s)"
    )
    parser.add_argument("--loss-tokens", type=int, help="tokens of each sequence that reach the head (default: all)")
    parser.add_argument(
        "--weights", choices=WEIGHTS, default="bf16", help="format of the frozen weights (default: %(default)s)"
    )
    parser.add_argument(
        "--adapter-dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="dtype of the adapters (default: %(default)s, as in PEFT)",
    )
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="adamw", help="optimizer of the adapters (default: %(default)s)"
    )
    parser.add_argument("--targets", nargs="+", help=f"adapted layers (default: {' '.join(LINEARS)}, or those of the folders)")
    parser.add_argument("--profile", help="rates of your GPU, as bench.profile_gpu writes them")
    parser.add_argument("--json", type=Path, help="file for everything, in bytes and seconds")
    a = parser.parse_args(argv)
    with mistakes(parser):
        adapters, own = read_adapters(a.adapters)
        targets = frozenset(a.targets or own or LINEARS)
        size = 4 if a.adapter_dtype == "float32" else 2
        setup = Setup(
            a.length,
            adapters,
            loss_tokens=a.loss_tokens,
            weights=a.weights,
            adapter_bytes=size,
            optimizer=a.optimizer,
            microbatches=a.microbatches,
            targets=targets,
        )
        found = plan(read_model(a.model), setup, gpu=card(a.gpu, a.profile), gpus=a.gpus, tokens=a.tokens)
        if a.json:
            text = json.dumps(found.to_dict(), indent=1) + "\n"
            with writing("jobs.plan", "json"):
                a.json.write_text(text)
        print(table(found))
    return int(found.best is None)


if __name__ == "__main__":
    raise SystemExit(main())
