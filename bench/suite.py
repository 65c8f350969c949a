"""What every measurement has in common: its command, what a result says of itself, and the loop over its cases."""

from __future__ import annotations

import argparse
import importlib
import math
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from tqdm import tqdm

from bench import clock, records
from bench.clock import Failures
from bench.processes import run_in_processes
from bench.table import table
from bench.ways import ENDS

Case = TypeVar("Case")
ELSEWHERE = ("--device", "--json", "--commit", "--seconds", "--rival-path")


def words(known: Iterable[str], what: str) -> Callable[[str], list[str]]:
    """The type of an argument: some of these, comma separated."""

    def parse(text: str) -> list[str]:
        if unknown := set(text.split(",")) - set(known):
            raise argparse.ArgumentTypeError(f"unknown {what}: {', '.join(sorted(unknown))}; there are {', '.join(known)}")
        return text.split(",")

    return parse


def numbers(text: str) -> list[int]:
    """The type of an argument: whole numbers, comma separated."""
    return [int(each) for each in text.split(",")]


def shapes(text: str) -> list[tuple[int, ...]]:
    """The type of an argument: 4096x14336,... ."""
    return [tuple(map(int, shape.split("x"))) for shape in text.split(",")]


def compile_ahead(jobs: int, one: Callable[..., None], tasks: Iterable[tuple]) -> None:
    """``one(*task)`` of each, in processes: Triton keeps what it compiles on disk. Who cannot is told of here and later."""
    start, pool = time.perf_counter(), ProcessPoolExecutor(jobs, get_context("spawn"))
    with pool:
        for task, done in [(task, pool.submit(one, *task)) for task in tasks]:
            if error := done.exception():
                print(f"not compiled ahead: {task}, {type(error).__name__}: {str(error)[:200]}", flush=True)
    print(f"compiled after {time.perf_counter() - start:.0f} s", flush=True)


class Some(NamedTuple):
    """Of an option: some of these, comma separated, all of them where nothing is said."""

    known: Iterable[str]
    default: Iterable[str] | None = None


class One(NamedTuple):
    """Of an option: one of these."""

    known: Iterable[str]
    default: str | None = None


OF_LISTS = {int: numbers, tuple: shapes, str: lambda text: text.split(",")}
SAID = {"--tiny": "small widths, for a smoke test"}
COMPILED = {"--no-compile": False, "--no-eager": False}  # eager and compiled, or one of them: `compilations`


def add_options(parser: argparse.ArgumentParser, options: Mapping[str, Any]) -> None:
    """Arguments by name: a default, `Some` or `One`, a type, or what argparse takes; with a sentence where it is a pair."""
    for name, given in options.items():
        value, said = given if type(given) is tuple else (given, SAID.get(name))
        how = {"default": value, "help": said}
        if value is False:
            how = {"action": "store_true", "help": said}
        elif isinstance(value, Some):
            default = value.known if value.default is None else value.default
            how |= {"type": words(value.known, name.strip("-")), "default": list(default)}
        elif isinstance(value, One):
            how |= {"choices": list(value.known), "default": value.default}
        elif isinstance(value, dict):
            how = value
        elif callable(value):
            how |= {"type": value, "default": None}
        else:
            how["type"] = OF_LISTS[type(value[0])] if isinstance(value, list) else type(value)
        parser.add_argument(name, **how)


def stack(
    layers: int, ways: Iterable[str], seq: int | None = 4096, r: int = 64, many: bool = False, more: Iterable[str] = ()
) -> dict[str, Any]:
    """What commands of decoder layers share. ``seq=None``: their cases say how many tokens and which rank. ``many``: adapters
    of several dtypes. Each way of fdora has others with an end of bench.ways.ENDS, for who asks, as are ``more``."""
    ways, dtypes = list(ways), ("bf16", "fp32")
    sizes = {} if seq is None else {"--seq": seq, "--r": r}
    dtype = {"--dtype": (One(dtypes, "bf16"), "of weights and activations")}
    adapter = {"--adapter": (Some(dtypes, ()) if many else One(dtypes, "bf16"), "of A, B and m")}
    dropout = {"--dropout": (0.0, "lora_dropout of every way; nothing is dropped where results are compared")}
    every = [*ways, *more, *(f"{way}_{end}" for way in ways if "fdora" in way for end in ENDS)]
    return {"--layers": layers, **sizes, "--loss-tokens": 1024, **dtype, **adapter, **dropout, "--ways": Some(every, ways)}


def compilations(options: argparse.Namespace) -> list[bool]:
    return [compiled for compiled in (False, True) if not (options.no_compile if compiled else options.no_eager)]


def present(device: str) -> str:
    """Itself, where this machine has it; else the command ends with a sentence, not in the middle of a measurement."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(f"{device} wants a GPU, and torch {torch.__version__} finds none here")
    return device


def interpreted(device: str) -> str:
    """The same for a command that starts kernels itself."""
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise argparse.ArgumentTypeError("cpu wants TRITON_INTERPRET=1: only Triton's interpreter runs kernels there")
    return present(device)


def roofs(device: str) -> dict[str, float]:
    """Measured bytes/ms of an elementwise kernel (read and written) and flops/ms of a bf16 product.

    No ``copy_``: in a CUDA graph it is a node of its own kind, 2.6 TB/s on an H200 where kernels move 4.3.
    """
    big = torch.randn(2**28, device=device).bfloat16()
    other = torch.empty_like(big)
    a, b = (torch.randn(8192, 8192, device=device).bfloat16() for _ in range(2))
    ms = clock.medians_of({"copy": lambda: torch.neg(big, out=other), "mm": lambda: a @ b}, device, 9)
    return {"bytes_per_ms": 2 * big.nbytes / ms["copy"], "flops_per_ms": 2 * 8192**3 / ms["mm"]}


def given(argv: Iterable[str]) -> str:
    """A command's arguments, without those that say where it runs, for how long, and where its result goes."""
    left, found = iter(argv), []
    for each in left:
        name, equals, _ = each.partition("=")
        if name not in ELSEWHERE:
            found.append(each)
        elif not equals:
            next(left, None)
    return " ".join(found)


def about(device: str, commit: str | None, argv: Iterable[str] | None = None) -> dict[str, Any]:
    """What every result says of itself; the arguments are those of the process where ``argv`` is None."""

    def output(*command: str) -> str | None:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip() or None

    facts = {"torch": torch.__version__, "python": platform.python_version(), "commit": commit}
    facts["arguments"] = given(sys.argv[1:] if argv is None else argv)
    if device == "cpu":
        return facts | {"cpu": platform.processor() or platform.machine(), "threads": torch.get_num_threads()}
    import triton

    drivers = output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or ""  # a line for each GPU
    facts |= {"gpu": torch.cuda.get_device_name(), "driver": drivers.split("\n")[0], "triton": triton.__version__}
    return facts | roofs(device)


class Run:
    """One run of a suite: its options, and its result, which is written after every case."""

    def __init__(self, options: argparse.Namespace, argv: Iterable[str] | None, rank: int = 0):
        """``rank``: of this process among several; the first alone speaks and writes."""
        self.options, self.rank, self.start, self.failed = options, rank, time.perf_counter(), Failures()
        device = getattr(options, "device", "cpu")
        self.facts = about(device, options.commit, argv)
        self.result = {"about": self.facts}
        if hasattr(options, "runs"):
            self.result["runs"] = options.runs
        self.result |= {"rows": [], "skipped": []}
        self.say(self.facts, "\n")

    def say(self, *what: object) -> None:
        if self.rank == 0:
            tqdm.write(" ".join(map(str, what)))  # above the bar of `cases`, if one is shown
            sys.stdout.flush()

    def cases(self, cases: Iterable[Case]) -> Iterator[Case]:
        """Those for which there is time; the others are listed as skipped."""
        for case in tqdm(cases, "cases", disable=True if self.rank else None, leave=False):
            if self.late(case._asdict() if hasattr(case, "_asdict") else list(case) if isinstance(case, tuple) else case):
                continue
            yield case
            if getattr(self.options, "device", "cpu") != "cpu":
                torch.cuda.empty_cache()
        self.save()

    def late(self, case: object) -> bool:
        """Whether there is no time to start it; then it is listed as skipped."""
        late = time.perf_counter() - self.start > getattr(self.options, "seconds", math.inf)
        if late:
            self.result["skipped"].append(case)
        return late

    def add(self, *rows: dict[str, Any], part: str = "rows") -> None:
        for row in rows:
            self.say(row)
        self.result.setdefault(part, []).extend(rows)
        self.save()

    def attempt(self, name: str, rows: Callable[[], Iterable[dict[str, Any]]]) -> None:
        """Adds these rows, or lists under this name why there are none."""
        for found in self.failed.attempt([name], lambda _: rows()).values():
            self.add(*found)

    def set(self, *options: str, **parts: Any) -> None:
        """What a result says beside its rows: the options of these names, and these parts."""
        self.result |= {name: getattr(self.options, name) for name in options} | parts
        self.save()

    def end(self, *mine: str) -> None:
        """Says what failed, of rows and of cases; what begins with one of ``mine`` is fdora's, and makes the command fail."""
        each = [self.failed, *(row.get("failed", {}) for row in self.result["rows"])]
        reasons = sorted({f"{name}: {reason}" for failed in each for name, reason in failed.items()})
        print("".join(f"\nfailed: {reason}" for reason in reasons))
        if found := [reason for reason in reasons if reason.startswith(mine)]:
            raise SystemExit("\n".join(["fdora failed:", *found]))

    def save(self) -> None:
        if self.rank == 0:
            records.save(self.options.json, self.result)


@dataclass(frozen=True)
class Suite:
    """A measurement as a command, which runs where its module is the program: ``measure(run)`` adds the rows of its cases,
    ``show`` says them, ``judge`` raises what is wrong. ``options``: its arguments, as `add_options` has them, beside --json,
    --commit, and those of --runs, --seconds and --device that have a default here. ``kernels``: on a CPU Triton must interpret
    them. ``world``: how many processes, one group, run it if nobody says otherwise; a 1 is this one. ``ahead``: what compiles
    its kernels, and the tasks that it is called with, in as many processes as --jobs says. ``quick``: what --quick makes of
    the options. --help begins with the first paragraph of the module."""

    measure: Callable[[Run], None]
    options: dict[str, Any] = field(default_factory=dict)
    runs: int | None = None
    seconds: float | None = None
    device: str | None = "cpu"
    kernels: bool = False
    world: int | None = None
    quick: Mapping[str, Any] = field(default_factory=dict)
    ahead: Callable[[argparse.Namespace], tuple[Callable[..., None], Iterable[tuple]]] | None = None
    check: Callable[[argparse.ArgumentParser, argparse.Namespace], None] = lambda parser, options: None
    show: Callable[[dict[str, Any]], str] = lambda result: tables(result)
    judge: Callable[[Run], None] = lambda run: None

    def __post_init__(self) -> None:
        if self.measure.__module__ == "__main__":
            self()

    def parse(self, argv: list[str] | None = None) -> argparse.Namespace:
        parser = argparse.ArgumentParser(description=self.measure.__globals__["__doc__"].split("\n\n")[0])
        if self.device:
            parser.add_argument("--device", default=self.device, type=interpreted if self.kernels else present)
        common = {
            "--runs": (self.runs, None),
            "--seconds": (self.seconds, "start nothing after this time"),
            "--json": (Path, "write the result to this file as well, as FILE:RUN under another name"),
            "--commit": (str, "what is measured, recorded in the file"),
            "--world": (self.world, "processes"),
            "--jobs": (0 if self.ahead else None, "processes that compile all kernels first"),
            "--quick": (False if self.quick else None, ", ".join(f"{k} {v}" for k, v in self.quick.items())),
        }
        add_options(parser, {name: how for name, how in common.items() if how[0] is not None} | self.options)
        options = parser.parse_args(argv)
        if self.quick and options.quick:
            vars(options).update(self.quick)
        self.check(parser, options)
        return options

    def __call__(self, argv: list[str] | None = None) -> None:
        options = self.parse(argv)
        if self.ahead and options.jobs:
            compile_ahead(options.jobs, *self.ahead(options))
        if self.world and (self.world, options.world) != (1, 1):
            run_in_processes(options.world, options.device, member, self.measure.__module__, options, argv)
        else:
            self.run(options, argv)

    def run(self, options: argparse.Namespace, argv: list[str] | None, rank: int = 0) -> None:
        run = Run(options, argv, rank)
        self.measure(run)
        if rank:
            return
        run.save()
        if parts(run.result):
            print("\n" + self.show(run.result))
        if late := run.result["skipped"]:
            print(f"\n{len(late)} cases not started in {options.seconds:.0f} s: {late}")
        self.judge(run)


def member(rank: int, module: str, *arguments: Any) -> None:
    """One of several processes that run the suite of this module."""
    importlib.import_module(module).main.run(*arguments, rank)


def parts(result: dict[str, Any]) -> list[list[dict[str, Any]]]:
    return [each for each in result.values() if records.is_rows(each)]


def beside_lora(result: dict[str, Any]) -> str:
    """A line for each case: times and peaks by way, and as shares of LoRA's."""
    lines = []
    for row, fields in records.measured(result["rows"]):
        lines.append({"case": records.where(row)} | fields)
        for key in [key for key in fields if "peft_lora" in fields[key]]:
            lora, *others = {"peft_lora": None} | fields[key]
            lines[-1][f"{key} of LoRA's"] = {way: round(fields[key][way] / fields[key][lora], 3) for way in others}
    return shown(lines)


def summed(result: dict[str, Any]) -> str:
    return shown(result["summary"])


def tables(result: dict[str, Any]) -> str:
    return "\n\n".join(map(shown, parts(result)))


def shown(part: list[dict[str, Any]] | dict[str, Any]) -> str:
    """Rows in one table, or the branches of a tree; a metric that is by way has a column for each."""
    if isinstance(part, dict):
        part = [{"of": ", ".join(each["at"])} | each["values"] for each in records.tree_lines("", [], part)]
    flat = [dict(flattened(row)) for row in part]
    head = list(dict.fromkeys(key for row in flat for key in row))
    return table(head, ([row.get(key, "") for key in head] for row in flat))


def flattened(row: Mapping[str, Any], *under: str) -> Iterator[tuple[str, Any]]:
    """Without curves, and without what is not of a way but of each of its parts."""
    for key, value in row.items():
        if isinstance(value, dict):
            yield from flattened(value, *under, key) if under not in (("error",), ("kernels",)) else ()
        elif not isinstance(value, list) or 0 < len(value) < 5:
            yield " ".join([*under[1:], key, *under[:1]]), float(f"{value:.6g}") if isinstance(value, float) else value
