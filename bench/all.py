"""Every committed result by one command, each in a process of its own, in the order of all.txt.

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
from bench.checkouts import RIVAL_PATH
from bench.suite import Some, add_options
from bench.table import table

ROOT = Path(__file__).parent.parent
LAST_CASE = 60  # seconds: a command starts no case when less is left


class Entry(NamedTuple):
    seconds: int  # on an H100, roughly
    command: str


def entries() -> dict[str, Entry]:
    """Of all.txt: the name of a result, its seconds, its command."""
    lines = (line.split(maxsplit=2) for line in Path(__file__).with_suffix(".txt").read_text().splitlines())
    return {name: Entry(int(seconds), command) for name, seconds, command in lines if name != "#"}


TABLE = entries()
# Commands whose runs are in the file of another; a file has the name of its command otherwise.
FILES = {"norm_forms": "norm", "pytest": "suite", "run": "demo"}
FILES |= {"lengths": "steps", "serve": "multi", "trainer": "model"}
WITH_RIVALS = ("layer", "group", "multi", "serve")
# Commands that take --seconds.
TIMED = (*WITH_RIVALS, "experts", "pytest", "steps", "model", "converge", "peaks", "vit", "diffusion")


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
    return words + [f"--rival-path={each.resolve()}" for each in options.rival_path if command in WITH_RIVALS]


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


def parse(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    known = {
        "--device": "cpu",
        "--out": (records.RESULTS, "folder of the results"),
        "--commit": (str, "recorded in the results"),
        "--seconds": (math.inf, "for everything together"),
        "--only": (Some(TABLE), "names, in any order"),
        "--missing": (False, "only what has no whole result of this commit"),
        "--rival-path": RIVAL_PATH["--rival-path"] | {"help": "for layer, group, multi and serve"},
        "--list": False,
    }
    add_options(parser, known)
    options = parser.parse_args(argv)
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
