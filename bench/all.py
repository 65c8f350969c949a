"""Every committed result by one command, each in a process of its own, in the order of the table below.

    python -m bench all --device cuda --commit HASH
    python -m bench all --device cuda --commit HASH --seconds 570 --missing
    python -m bench all --list

A run is written to ``bench/results/SUITE.jsonl`` under its machine and name. In slices: ``--seconds`` starts nothing that would
not fit (by the table's rough seconds on an H100), hands what is left to the commands and kills what outlives it; ``--missing``
runs what has no whole result of this commit yet, ``--only`` what is named. What fails is reported with its last lines while the
others go on, and makes the exit status 1 at the end. A command writes after every case, so one that was cut off leaves what it
finished, with a "problem" that says so.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import torch
from tqdm import tqdm

from bench import records
from bench.table import table

ROOT = Path(__file__).parent.parent
LAST_CASE = 60  # seconds: a command starts no case when less is left


class Entry(NamedTuple):
    seconds: int  # on an H100, roughly
    command: str


MODELS = ("llama-3.1-8b", "gemma-3-12b --layers 6", "qwen2.5-7b", "qwen2.5-32b", "mistral-small-24b", "qwen3-vl-8b")
# W is small beside the tokens
NARROW = (
    *("7225,768,24448,192", "8192,2048,8192,64", "4096,1024,3072,32", "8192,2560,9728,16", "6000,768,3072,64"),
    *("16384,4096,14336,64", "16384,4096,4096,16", "8192,1024,8192,384"),
)
FLOORS = "--ways frozen,bare,peft_lora,fdora,fdora_inside"
COMPILED = "--no-eager --compiled default,reduce-overhead"
TRAINED = "--dropout 0.05 --adapter fp32 --ways peft_lora,peft_dora"  # as people train: under autocast, with dropout
TABLE = {
    "norm_forms": Entry(15, "bench.norm_forms --runs 15"),
    "compose": Entry(15, "bench.compose"),
    "embedding": Entry(40, "bench.embedding"),
    "host": Entry(45, "bench.host --first-call"),
    "launches": Entry(15, "bench.launches"),
    "issue_time": Entry(40, "bench.issue_time"),
    "schedule": Entry(60, "bench.schedule"),
    "suite": Entry(80, "pytest bench -o python_files=bench_*.py -p no:cacheprovider"),
    "layer_quick": Entry(400, "bench.layer --quick"),
    "layer_fp32": Entry(500, "bench.layer --quick --adapter fp32 --peft-autocast"),
    "layer_all": Entry(
        300,
        "bench.layer --shapes all --M 4096,16384 --r 16,384 --runs 5 --ways frozen,bare,peft_lora,peft_dora,dorafactors,fdora",
    ),
    "layer_few": Entry(180, f"bench.layer --M 1,16,64,128,512 --r 16,128,384 {FLOORS}"),
    "layer_ranks": Entry(90, f"bench.layer --r 8,64,128,768 {FLOORS}"),
    "peaks": Entry(100, "bench.peaks"),
    "scaled_weight": Entry(20, f"bench.shapes --ways bare,fdora_dz,fdora {' '.join(f'--shape {shape}' for shape in NARROW)}"),
    "shapes": Entry(60, "bench.shapes --jobs 8"),
    "shapes_18": Entry(60, "bench.shapes --jobs 8 --seed 18"),
    "shapes_17": Entry(60, "bench.shapes --jobs 8 --seed 17"),
    "shapes_unseen": Entry(60, "bench.shapes --jobs 8 --seed 101"),
    "norm_model": Entry(30, "bench.norm_model --r 16,64,384"),
    "group": Entry(110, "bench.group --jobs 8 --quick"),
    "multi": Entry(150, "bench.multi --runs 5 --jobs 8"),
    "multi_again": Entry(60, "bench.multi --runs 5 --jobs 7 --G 4,32 --ways frozen,one,multi --kernels"),
    "multi_mixed4": Entry(25, "bench.multi --runs 9 --G 4 --r mixed --shapes 4096x4096 --ways multi,one --jobs 4"),
    "serve": Entry(60, "bench.serve --runs 3 --jobs 15 --shapes 4096x4096,14336x4096"),
    "serve_wide": Entry(60, "bench.serve --runs 3 --jobs 15 --shapes 4096x14336,5120x27648"),
    "experts": Entry(150, "bench.experts --runs 5"),
    "layers12_r384_eager": Entry(60, "bench.layers12 --r 384 --no-compile"),
    "layers12_r16_eager": Entry(60, "bench.layers12 --r 16 --no-compile"),
    "layers12_r384_compiled": Entry(200, "bench.layers12 --r 384 --no-eager"),
    "layers12_r16_compiled": Entry(200, "bench.layers12 --r 16 --no-eager"),
    "steps": Entry(560, "bench.steps"),
    "steps_compiled": Entry(470, f"bench.steps --cells 2048:512:16,8b:4096:16 {COMPILED}"),
    "steps_compiled_512": Entry(150, f"bench.steps --cells 2048:512:16 --ways peft_lora,use_fdora,use_fdora_fused {COMPILED}"),
    "steps_compiled_replay": Entry(
        70, "bench.steps --cells 2048:512:16 --ways peft_lora,use_fdora,use_fdora_fused --no-eager --compiled reduce-overhead"
    ),
    "steps_dropout": Entry(
        150,
        f"bench.steps --cells 2048:512:16,8b:4096:64 {TRAINED},use_fdora,use_fdora_fused,use_fdora_lora_dropout,"
        "use_fdora_fused_lora_dropout",
    ),
    "lengths": Entry(
        100,
        "bench.lengths --dropout 0.05 --adapter fp32 --layers 2 --ways peft_lora,use_fdora_fused,use_fdora_fused_lora_dropout "
        "--count 120",
    ),
    "trainer": Entry(300, "bench.trainer --warmup"),
    "trainer_compiled": Entry(500, "bench.trainer --compiled"),
    "model_qwen3-8b": Entry(450, "bench.model --model qwen3-8b --adapter bf16"),
    "model_qwen3-8b_fp32": Entry(450, "bench.model --model qwen3-8b --adapter fp32"),
    **{f"model_{m.split()[0]}": Entry(90, f"bench.model --model {m} --quick --no-compile") for m in MODELS},
    **{f"model_{m.split()[0]}_compiled": Entry(300, f"bench.model --model {m} --quick --no-eager") for m in MODELS},
    "model_qwen3-8b_dropout": Entry(
        150,
        f"bench.model --quick --no-compile {TRAINED},peft_fdora,peft_fdora_fused,peft_fdora_lora_dropout,"
        "peft_fdora_fused_lora_dropout",
    ),
    "model_qwen3-8b_sweep_r": Entry(150, "bench.model --sweep r --quick"),
    "model_qwen3-8b_sweep_S": Entry(200, "bench.model --sweep S --quick"),
    "model_qwen3-8b_sweep_width": Entry(200, "bench.model --sweep width --layers 1 --quick"),
    **{f"converge_s{i}": Entry(140, f"bench.converge --seeds {i} --optimizers adamw") for i in range(3)},
    **{f"converge_muon_s{i}": Entry(180, f"bench.converge --seeds {i} --optimizers muon") for i in range(3)},
    "quant": Entry(230, "bench.quant --runs 3 --no-norms --jobs 15 --M 512,4096,1,16,16384"),
    "quant_norms": Entry(330, "bench.quant --runs 5 --M 1 --ways linear"),
    "quant_model": Entry(60, "bench.quant_model"),
    "quant_4096": Entry(
        45,
        "bench.quant --runs 3 --no-norms --M 4096 --shapes 4096x14336,14336x4096,8192x8192,28672x8192 "
        "--ways linear4bit,qlora,fdora --jobs 12",
    ),
    "fp8_64": Entry(30, "bench.fp8 --M 4096,2048,16384 --r 64 --runs 3"),
    "fp8_more": Entry(50, "bench.fp8 --M 4096,2048,16384,512,128 --r 64 --runs 3"),
    "fp8_16": Entry(20, "bench.fp8 --M 2048,4096,16384 --shapes 4096x4096,14336x4096 --r 16 --runs 3"),
    "vit": Entry(110, "bench.vit"),
    "vit_40": Entry(300, "bench.vit --layers 40"),
    "diffusion_klein": Entry(100, "bench.diffusion --models klein --batch 2"),
    "diffusion_sdxl": Entry(100, "bench.diffusion --models sdxl --dtype fp16 --r 16 --checkpointing no"),
    "diffusion_sdxl_conv": Entry(105, "bench.diffusion --models sdxl_conv --dtype fp16 --r 16 --checkpointing no"),
    "diffusion_sdxl_4": Entry(90, "bench.diffusion --models sdxl --batch 4 --checkpointing yes"),
    "diffusion_klein_r16": Entry(80, "bench.diffusion --models klein --batch 2 --r 16 --adapter half --checkpointing yes"),
    "full": Entry(20, "bench.full"),
    "full_dora": Entry(600, "bench.converge --ways fdora,full"),
    "full_dora_adamw_s2": Entry(100, "bench.converge --ways fdora,full --seeds 2 --optimizers adamw"),
    "full_dora_muon_s2": Entry(100, "bench.converge --ways fdora,full --seeds 2 --optimizers muon"),
    "sharded_r64": Entry(60, "bench.sharded --world 2 --layers 6 --r 64 --runs 7"),  # two GPUs
    "sharded_r384": Entry(
        90,
        "bench.sharded --world 2 --layers 6 --r 384 --modes step,step_checkpointing --runs 9 --no-profile "
        "--ways peft_lora,peft_dora,peft_fdora,peft_fdora_fused,peft_fdora_fused_shards",
    ),
    "sharded_r384_profile": Entry(
        60,
        "bench.sharded --world 2 --layers 6 --r 384 --runs 9 --modes step "
        "--ways peft_lora,peft_fdora,peft_fdora_fused,peft_fdora_shards,peft_fdora_fused_shards",
    ),
    "sharded_dropout": Entry(
        90,
        f"bench.sharded --world 2 --modes step,step_checkpointing --runs 9 {TRAINED},peft_fdora,peft_fdora_fused,"
        "peft_fdora_lora_dropout,peft_fdora_fused_lora_dropout",
    ),
    "jobs": Entry(100, "bench.jobs"),
    "jobs_pipeline": Entry(90, "bench.jobs --world 2 --jobs 8"),  # two GPUs
    "sharded_12": Entry(
        80,
        "bench.sharded --world 2 --layers 12 --ways peft_lora,peft_fdora,peft_fdora_fused,peft_fdora_shards "
        "--modes step --runs 9 --no-profile",
    ),
    "sharded_qwen2.5-32b": Entry(
        60,
        "bench.sharded --world 2 --model qwen2.5-32b --layers 4 --ways peft_lora,peft_dora,peft_fdora,peft_fdora_fused "
        "--modes step --runs 7 --no-profile",
    ),
    "sharded_tp": Entry(60, "bench.sharded --world 2 --layout tp --layers 6 --modes step --runs 9 --no-profile"),
    "sharded_compiled": Entry(
        90,
        "bench.sharded --world 2 --layers 4 --ways peft_lora,peft_fdora,peft_fdora_fused --modes step --runs 11 --compiled "
        "--no-profile",
    ),
    **{
        f"sharded_zero{stage}": Entry(
            60,
            f"bench.sharded --world 2 --layout zero{stage} --layers 6 --modes step --runs 7 --no-profile "
            "--ways peft_lora,peft_fdora,peft_fdora_fused",
        )
        for stage in (2, 3)  # want DeepSpeed
    },
    "parallel": Entry(60, "bench.parallel --world 2 --runs 5"),
    "demo": Entry(60, "demo.run"),
}
# Commands whose runs are in the file of another; a file has the name of its command otherwise.
FILES = {"launches": "host", "issue_time": "host", "norm_forms": "norm", "norm_model": "norm", "pytest": "suite", "run": "demo"}
FILES |= {"lengths": "steps", "serve": "multi", "trainer": "model"}
WITH_RIVALS = ("layer", "group", "multi", "serve", "quant")
# Commands that take --seconds.
TIMED = (*WITH_RIVALS, "experts", "pytest", "steps", "model", "converge", "shapes", "peaks", "layers12", "vit", "diffusion")


def command_of(name: str) -> tuple[str, list[str]]:
    """The last word of its module, and its arguments."""
    module, *given = TABLE[name].command.split()
    return module.rpartition(".")[2], given


class Place(NamedTuple):
    """Where a run is written."""

    file: Path
    run: str

    def lines(self) -> list[dict] | None:
        return records.read(self.file).get(self.run) if self.file.exists() else None

    def save(self, result: dict) -> None:
        records.save(Path(f"{self.file}:{self.run}"), result)


def place_of(name: str, options: argparse.Namespace) -> Place:
    command, _ = command_of(name)
    machine = "cpu" if options.device == "cpu" else torch.cuda.get_device_name().split()[1].lower()  # NVIDIA H200 ...
    return Place(options.out / f"{FILES.get(command, command)}.jsonl", f"{machine}/{name}")


def arguments(name: str, place: Place, folder: str, options: argparse.Namespace, left: float) -> list[str]:
    """The demo writes a report into a folder, all others a run."""
    command, given = command_of(name)
    words = [sys.executable, "-m", TABLE[name].command.split()[0], *given, f"--device={options.device}"]
    if name == "demo":
        return [*words, f"--out={folder}"]
    words += [f"--json={place.file}:{place.run}", *([f"--commit={options.commit}"] if options.commit else [])]
    if command in TIMED and left < math.inf:
        words.append(f"--seconds={max(0, int(left - LAST_CASE))}")
    return words + [f"--rival-path={each}" for each in options.rival_path if command in WITH_RIVALS]


def watch(command: list[str], left: float) -> tuple[int | None, str]:
    """Its exit status, None if it had to be killed, and its last lines."""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        child = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT, preexec_fn=os.setpgrp)
        try:
            code = child.wait(None if left == math.inf else left)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)  # with a compiler's workers: its group is its own
            child.wait()
        log.seek(0)
        return code, "".join(log.readlines()[-15:])


def run(name: str, place: Place, options: argparse.Namespace, left: float) -> tuple[int | None, str]:
    """Exit status, and what is wrong with the result: nothing where it is whole."""
    before = place.lines()
    with tempfile.TemporaryDirectory() as folder:
        code, last = watch(arguments(name, place, folder, options, left), left)
        report = Path(folder) / "report.json"
        if report.exists():
            result = json.loads(report.read_text())
            machine = {"cpu" if options.device == "cpu" else "gpu": result["device"], "torch": result["versions"]["torch"]}
            place.save({"about": machine | {"commit": options.commit}} | result)
    lines = place.lines()
    if code == 0:
        return code, lacking(name, lines, options.commit)
    problem = "cut off by --seconds" if code is None else f"exit status {code}"
    if lines and lines != before:
        place.save(records.result_of(lines) | {"problem": problem})
    return code, problem if code is None else f"{problem}, its last lines:\n{last}"


def lacking(name: str, lines: list[dict] | None, commit: str | None) -> str:
    """Why this is no whole result of this commit; empty where it is."""
    if lines is None:
        return "no result"
    result = records.result_of(lines)
    about, (_, given) = result.get("about", {}), command_of(name)
    if about.get("commit") != commit:
        return "of another commit"
    if about.get("arguments", " ".join(given)) != " ".join(given):
        return f"of other arguments: {about['arguments'] or 'none'}"
    late = [reason for reason in result.get("failed", {}).values() if reason.startswith("not started")]
    if late or result.get("skipped") or result.get("summary", {}).get("skipped"):
        return "some cases were not started"
    return result.get("problem", "")


def folders(text: str) -> list[Path]:
    return [Path(folder).resolve() for folder in text.split(",")]


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--out", type=Path, default=records.RESULTS, help="folder of the results")
    parser.add_argument("--commit", help="recorded in the results")
    parser.add_argument("--seconds", type=float, default=math.inf, help="for everything together")
    parser.add_argument("--only", type=lambda s: s.split(","), default=list(TABLE), help="names, in any order")
    parser.add_argument("--missing", action="store_true", help="only what has no whole result of this commit")
    parser.add_argument(
        "--rival-path", type=folders, action="extend", default=[], help="for layer, group, multi, serve and quant"
    )
    parser.add_argument("--list", action="store_true")
    options = parser.parse_args(argv)
    if unknown := set(options.only) - set(TABLE):
        parser.error(f"unknown results: {', '.join(sorted(unknown))}; there are {', '.join(TABLE)}")
    options.out = options.out.resolve()
    return options


def main(argv=None):
    options, start = parse(argv), time.perf_counter()
    places = {name: place_of(name, options) for name in TABLE if name in options.only}
    reasons = {name: lacking(name, place.lines(), options.commit) for name, place in places.items()}
    chosen = [name for name, reason in reasons.items() if reason or not options.missing]
    if options.list:
        print(table(["result", "about s", "python -m", "lacking"], [[n, *TABLE[n], reasons[n]] for n in chosen]))
        print(f"\nabout {sum(TABLE[name].seconds for name in chosen)} s together")
        return
    failed, not_run = [], {}
    for name in tqdm(chosen, "results", disable=None, leave=False):
        left = options.seconds - (time.perf_counter() - start)
        if TABLE[name].seconds > left:
            not_run[name] = f"takes about {TABLE[name].seconds} s, {left:.0f} were left"
            continue
        begin = time.perf_counter()
        code, problem = run(name, places[name], options, left)
        tqdm.write(f"{name}: {time.perf_counter() - begin:.0f} s{problem and ', ' + problem}")
        sys.stdout.flush()
        if code:
            failed.append(name)
        elif problem:
            not_run[name] = problem
    for name, why in not_run.items():
        print(f"not run: {name} ({why})")
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
