"""Adapters of one language model, trained together and saved as PEFT does.

    fdora train jobs.toml
    fdora plan jobs.toml                  # what it will do: of the model its config and tokenizer are read, no weight
    fdora plan jobs.toml --gpu h200 --picture plan.png

jobs.toml, of which model, output and each job's data, lr and adapter are needed:

    model = "path/to/model"               # of transformers; a name of its hub where that can be reached
    output = "adapters"                   # gets adapters/law, adapters/med, and a checkpoint while it runs
    capacity = 4096                       # the most tokens of a microbatch; without it chosen: fdora plan says how
    dtype = "bfloat16"                    # of the model's weights; device, every and seed beside it
    dropout_mode = "lora"                 # of DoRA; without it PEFT's
    stages = 2                            # a pipeline of processes: torchrun --nproc-per-node 2 -m fdora train jobs.toml

    [jobs.law]                            # an adapter named law
    data = "law.jsonl"
    lr = 2e-4
    batch = 8                             # and clip, betas, eps, weight_decay, epochs, steps, seed, evaluation, evaluate
    adapter = { r = 16, lora_alpha = 32, use_dora = true, target_modules = "all-linear" }    # of peft.LoraConfig

A line of data is JSON: {"input_ids": [...], "labels": [...]}, {"text": "..."}, or {"prompt": "...", "completion": "..."}, whose
prompt has no labels. Texts end with the tokenizer's end of a sequence. A training that was stopped goes on when the command is
given again; jobs that are new in the file begin beside the others. Samples, optimizers, losses are those of fdora.jobs.train.

Exit status: 0; 1 where an adapter diverged; 2 for a mistake in arguments or files, with one sentence on stderr.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from fdora._check import FLOATS, FdoraError, fail
from fdora._command import WRITTEN, mistakes, one_line, parser_of, using
from fdora.jobs.causal.data import IGNORED, Course, Step, TrainJob, check_job, check_seed
from fdora.jobs.causal.fit import card_of, memory_of, seconds_of, terms_of
from fdora.jobs.causal.whole import Prepared, prepared, train
from fdora.jobs.loop import Job
from fdora.jobs.plan import Card, card
from fdora.jobs.plan.__main__ import GIB, components
from fdora.jobs.schedule import draw, simulate
from fdora.jobs.schedule.__main__ import summary
from fdora.predict import GPUS


def words(model: Any, jobs: Sequence[TrainJob], ready: Prepared, card: Card | None) -> list[str]:
    """Lines for each job, the schedule, memory, and time where the rates of the GPU are known."""
    layers, banks, course, _, notes, _, why = ready
    left = course.works[notes["position"] :]
    names, lines, stages = [each.job.name for each in jobs], [], course.schedule.spec.depth
    for a, each in enumerate(jobs):
        kind, r = "DoRA" if model.peft_config[names[a]].use_dora else "LoRA", max(layer.ranks[a] for layer in layers.values())
        lines.append(f"{of_job(each, a, course)}; {kind}, r = {r}")
    lines += [
        f"to do: {len(left)} of {len(course.works)} microbatches",
        *summary(course.schedule, notes["parts"][-1][0], stages),
        f"capacity {course.schedule.spec.capacity}: {why or 'as given'}",
    ]
    most = max(sum(sample.length for sample in work.samples) for work in course.works)
    try:
        terms = terms_of(model, layers, banks, names, course.reads)
        lines += [f"memory of the whole model and the largest microbatch, {most} tokens:", *components(memory_of(terms, most))]
    except FdoraError as error:
        return [*lines, f"memory: not planned. {error}"]
    if card is None:
        return lines
    share = stages * (1 - simulate(course.schedule, stages).bubble)  # of the GPUs, that work at a time
    time = f", about {seconds_of(terms, left, card) / share:.0f} s" if card.measured and left else ""
    return [*lines, f"{stages} x {card.name}: {card.bytes / GIB:.1f} GiB{time}"]


def of_job(each: TrainJob, a: int, course: Course) -> str:
    lengths = [[sample.length for sample in work.samples if sample.adapter == a] for work in course.works]
    seen, held = sum(map(len, course.orders[a])), [n for n, own in enumerate(lengths) if own]
    return (
        f"{each.job.name}: {len(course.orders[a])} optimizer steps, {seen} samples, {sum(map(sum, lengths))} tokens, "
        f"{seen / len(each.data):.3g} epochs; in {len(held)} microbatches, waits in {held[-1] + 1 - len(held)} before its last"
    )


FN = "train"
Table = dict[str, Any]
WHOLE: Table = {"model": str, "output": str, "dtype": str, "device": str, "dropout_mode": str, "jobs": dict}
WHOLE |= dict.fromkeys(("capacity", "every", "seed", "stages"), int)
OF_OPTIMIZER = {"lr": (int, float), "clip": (int, float), "betas": list, "eps": float, "weight_decay": (int, float)}
OF_JOB = {"batch": int, "epochs": int, "steps": int, "seed": int, "evaluate": int}
EACH = {"data": str, "evaluation": str, "adapter": dict} | OF_OPTIMIZER | OF_JOB


def read_toml(path: str) -> Table:
    try:
        import tomllib
    except ModuleNotFoundError:  # Python 3.10
        raise fail(FN, "jobs", "read by Python 3.11 or newer", "an older one", "Call fdora.jobs.train.") from None
    with using(FN, path, "a TOML file"):
        found = tomllib.loads(Path(path).read_text())
    check_table(path, found, WHOLE, ("model", "output", "jobs"))
    if not found["jobs"]:
        raise fail(FN, "jobs", "a table for each adapter", "none", "Write [jobs.NAME].")
    for name, each in found["jobs"].items():
        check_table(f"jobs.{name}", each, EACH, ("data", "lr", "adapter"))
    return found


def check_table(arg: str, found: Any, known: Table, needed: Iterable[str]) -> None:
    """Its names and their types."""
    if not isinstance(found, dict):
        raise fail(FN, arg, "a table", repr(found)[:60], "fdora train --help has an example.")
    unknown, missing = sorted(set(found) - set(known)), sorted(set(needed) - set(found))
    if unknown or missing:
        have = f"unknown {', '.join(unknown)}" if unknown else f"none of {', '.join(missing)}"
        raise fail(FN, arg, f"a table of {', '.join(needed)} and what else is known", have, f"Known are {', '.join(known)}.")
    for name, value in found.items():
        if not isinstance(value, known[name]) or isinstance(value, bool):
            raise fail(FN, f"{arg}.{name}", f"of type {known[name]}", repr(value)[:60], "fdora train --help has an example.")
        if name == "seed":
            check_seed(f"{arg}.{name}", value)


def samples_of(path: str, tokenizer: Any) -> list[dict[str, list[int]]]:
    with using(FN, path, "lines of JSON"):
        lines = Path(path).read_text().split("\n")  # splitlines would also split at what JSON may hold: U+2028, form feeds
    samples = []
    for n, line in enumerate(lines, 1):
        if line.strip():
            arg = f"{path}, line {n}"
            with using(FN, arg, "JSON", "Each line is one sample."):
                found = json.loads(line)
            samples.append(sample_of(arg, found, tokenizer))
    return samples


def sample_of(arg: str, line: Any, tokenizer: Any) -> dict[str, list[int]]:
    if isinstance(line, dict) and {"input_ids", "labels"} <= set(line):
        return line
    texts = [line.get(key) for key in ("prompt", "completion")] if isinstance(line, dict) else [None]
    if None in texts:
        texts = ["", line.get("text") if isinstance(line, dict) else None]
    if not all(isinstance(text, str) for text in texts):
        want = "input_ids and labels, a text, or a prompt and a completion"
        raise fail(FN, arg, want, repr(line)[:60], "fdora train --help has an example.")
    prompt = tokenizer()(texts[0]).input_ids if texts[0] else []
    end = tokenizer().eos_token_id
    if end is None:
        remedy = "Set eos_token in its tokenizer_config.json, or write input_ids and labels."
        raise fail(FN, "model", "one whose tokenizer ends a sequence", "one without eos_token", remedy)
    # what begins a sequence belongs in front of the prompt alone
    rest = [*tokenizer()(texts[1], add_special_tokens=not prompt).input_ids, end]
    return {"input_ids": prompt + rest, "labels": [IGNORED] * len(prompt) + rest}


def jobs_of(found: Table, tokenizer: Any) -> list[TrainJob]:
    jobs = []
    for name, each in found["jobs"].items():
        how: Table = {key: tuple(v) if key == "betas" else v for key, v in each.items() if key in OF_OPTIMIZER}
        rest: Table = {key: v for key, v in each.items() if key in OF_JOB}
        rest |= {key: samples_of(each[key], tokenizer) for key in ("data", "evaluation") if key in each}
        jobs.append(TrainJob(Job(name, **how), **rest))
        check_job(f"jobs.{name}", jobs[-1])
    return jobs


def adapted(found: Table, values: bool = True) -> Any:
    """The model with a new adapter for each job; without values it is read from its config alone."""
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoConfig, AutoModelForCausalLM

    dtype = getattr(torch, found.get("dtype", "bfloat16"), None)
    if dtype not in FLOATS:
        raise fail(FN, "dtype", "float32, bfloat16 or float16", repr(found["dtype"]), "It is that of the model's weights.")
    configs = {}
    for name, each in found["jobs"].items():
        with accepted(name):
            configs[name] = LoraConfig(task_type="CAUSAL_LM", **each["adapter"])
    torch.manual_seed(found.get("seed", 0))
    with nullcontext() if values else torch.device("meta"):
        with using(FN, "model", MODEL):
            if values:
                model: Any = AutoModelForCausalLM.from_pretrained(found["model"], dtype=dtype)
            else:
                model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(found["model"]), dtype=dtype)
        model = (model.to(device_of(found)) if values else model).eval()
        for name, config in configs.items():
            with accepted(name):
                if isinstance(model, PeftModel):
                    model.add_adapter(name, config)
                else:
                    model = get_peft_model(model, config, adapter_name=name)
    return model


MODEL = "a causal model of transformers, with a tokenizer where there are texts"


@contextmanager
def accepted(name: str) -> Iterator[None]:
    """What PEFT says of a job's adapter; of its name that is a KeyError."""
    try:
        yield
    except (TypeError, ValueError, KeyError, re.error) as error:
        raise fail(FN, f"jobs.{name}.adapter", "what peft.LoraConfig takes", one_line(error), "Look there.") from None


def device_of(found: Table) -> torch.device:
    name = found.get("device", "cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        there = device.type == "cpu" or torch.get_device_module(device).is_available()
    except RuntimeError:
        there = False
    if not there:
        raise fail(FN, "device", "one that torch has here", repr(name), "fdora plan knows others by --gpu.")
    return device


@contextmanager
def joined(stages: int, device: torch.device) -> Iterator[bool]:
    """Among the processes that torchrun started, if there are stages; whether this is the first of them."""
    if stages == 1:
        yield True
        return
    if "LOCAL_RANK" not in os.environ:
        remedy = "Start the processes by torchrun --nproc-per-node N -m fdora train jobs.toml."
        raise fail(FN, "stages", "1 in a process of its own", stages, remedy)
    if device.type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("gloo" if device.type == "cpu" else None)
    try:
        yield dist.get_rank() == 0
    finally:
        dist.destroy_process_group()


def show(step: Step) -> None:
    after = "" if step.evaluation is None else f", evaluation {step.evaluation:.4f}"
    print(f"{step.name} {step.step}/{step.steps}: loss {step.loss:.4f}, rate {step.rate:.2e}{after}", flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = parser_of("train", __doc__)
    parser.add_argument("jobs", help="TOML file of a model and its jobs")
    parser.add_argument("--plan", action="store_true", help="say what would be done, and end; fdora plan does it too")
    parser.add_argument("--gpu", help=f"plan for one of {', '.join(GPUS)} (default: what is here)")
    parser.add_argument("--picture", help="plan, with a file for a picture of the schedule; needs matplotlib")
    a = parser.parse_args(argv)
    with mistakes(parser):
        found = read_toml(a.jobs)

        @cache
        def tokenizer() -> Any:
            from transformers import AutoTokenizer

            with using(FN, "model", MODEL):
                return AutoTokenizer.from_pretrained(found["model"])

        jobs, stages, output = jobs_of(found, tokenizer), found.get("stages", 1), Path(found["output"])
        folder = output / "checkpoint"
        if a.plan or a.gpu or a.picture:
            model, where = adapted(found, values=False), card(a.gpu) if a.gpu else card_of(device_of(found))
            ready = prepared(model, jobs, found.get("capacity"), folder, where, stages, found.get("dropout_mode", "peft"))
            print("\n".join(words(model, jobs, ready, where)))
            if a.picture:
                microbatches = [work.samples for work in ready.course.works]  # each as long as it has tokens, on each stage
                line = simulate(microbatches, ready.course.schedule.spec.depth)
                title = f"{len(microbatches)} microbatches, bubble {line.bubble:.1%}"
                with using("jobs.train", "picture", WRITTEN):
                    draw(line, a.picture, names=[*found["jobs"]], title=title)
            return 0
        rest = {key: found[key] for key in ("capacity", "every", "seed", "stages", "dropout_mode") if key in found}
        with joined(stages, device_of(found)) as first:
            model = adapted(found)
            done = train(model, jobs, folder=folder, on_step=show, **rest)
            names = [name for name in found["jobs"] if name not in done.diverged]
            if first:
                model.save_pretrained(output, selected_adapters=names)
                places = [output if name == "default" else output / name for name in names]  # as PEFT has it
                print(f"saved: {', '.join(map(str, places))}")
                for name, steps in done.diverged.items():
                    print(f"not saved: {name}, which diverged after {steps} steps")
    return int(bool(done.diverged))


if __name__ == "__main__":
    raise SystemExit(main())
