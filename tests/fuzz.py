"""Draw cases of every public function for as long as you like, and compare them with float64: tests/cases.py without an end.

    python -m tests.fuzz --device cuda --seconds 600 --seed 0 --json FILE
    TRITON_INTERPRET=1 python -m tests.fuzz --backend triton --seconds 300

Beside what a case says of itself, tensors that require grad, grad mode, stream and current device change from round to round, so
that whatever is kept by shape meets other data. Case K depends on the seed, K and the options below alone; what fails prints one
line that runs it again, and makes the exit status 1. A failure that needs the calls before it comes back with ``--only 0-K``.
"""

from __future__ import annotations

import argparse
import random
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch

from bench.save import save
from tests.cases import DTYPES, FUNCTIONS, INTERPRETED, ORDER, Draw, Wrong, rounds, usual

MOST_FAILURES = 50


def case(k: int, options: argparse.Namespace, counts: Counter, closest: dict[str, float]) -> str | None:
    """What is wrong with case k, if anything."""
    name, drawn, i = options.functions[k % len(options.functions)], options.drawn, 0
    if drawn.device.type == "cuda":
        choose = random.Random(f"{options.seed} {k}")
        drawn = drawn._replace(device=torch.device("cuda", choose.randrange(torch.cuda.device_count())))
    try:
        for share in rounds(name, lambda part: Draw(random.Random(f"{options.seed} {k} {part}"), drawn)):
            i += 1
            counts[name] += 1
            closest[name] = max(closest.get(name, 0.0), share)
    except Exception as error:  # a wrong result, or whatever a call raises
        what = str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}"
        return f"{name}, round {i}: {' '.join(what.split())[:300]}"
    return None


def numbers(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seconds", type=float, default=60.0, help="start no case after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="auto", choices=("auto", "eager", "triton"))
    parser.add_argument("--functions", type=lambda s: s.split(","), default=list(ORDER), help=f"of {', '.join(FUNCTIONS)}")
    parser.add_argument("--dtypes", type=lambda s: s.split(","), help=f"of {', '.join(DTYPES)}; default: all that can run")
    parser.add_argument("--largest", type=int, help="size; default 2048 on a GPU, 200 on a CPU, 80 interpreted")
    parser.add_argument("--only", type=numbers, help="case K, or cases J-K")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args(argv)
    given = {n: v for n in ("dtypes", "largest") if (v := getattr(options, n))}
    options.drawn = usual(options.device, options.backend)._replace(**given)
    if unknown := (set(options.functions) - set(FUNCTIONS)) | (set(options.drawn.dtypes) - set(DTYPES)):
        parser.error(f"unknown functions or dtypes: {', '.join(sorted(unknown))}")
    return options


def command(options: argparse.Namespace, k: int) -> str:
    """Runs case k again."""
    words = ["TRITON_INTERPRET=1"] if INTERPRETED else []
    words += ["python", "-m", "tests.fuzz", "--device", options.device, "--backend", options.backend]
    words += ["--seed", str(options.seed), "--only", str(k)]
    if options.functions != list(ORDER):
        words += ["--functions", ",".join(options.functions)]
    words += ["--dtypes", ",".join(options.drawn.dtypes), "--largest", str(options.drawn.largest)]
    return shlex.join(words)


def main(argv: Sequence[str] | None = None) -> dict:
    options, start = parse(argv), time.perf_counter()
    counts: Counter[str] = Counter()
    closest: dict[str, float] = {}
    failures: list[dict] = []
    k = cases = 0
    for k in options.only if options.only is not None else range(10**9):
        if options.only is None and time.perf_counter() - start > options.seconds:
            break
        cases += 1
        what = case(k, options, counts, closest)
        if what:
            failures.append({"case": k, "what": what, "command": command(options, k)})
            print(f"WRONG {what} | {failures[-1]['command']}", flush=True)
            if len(failures) >= MOST_FAILURES:
                break
    seconds = time.perf_counter() - start
    print(
        f"{cases} cases, {sum(counts.values())} rounds in {seconds:.1f} s, {len(failures)} wrong; rounds of each: {dict(counts)}"
    )
    print("largest error as a share of its budget:", {n: round(v, 2) for n, v in closest.items()}, flush=True)
    about = {"torch": torch.__version__, "device": options.device, "backend": options.backend, "seed": options.seed}
    about |= {"interpreted": INTERPRETED, "dtypes": options.drawn.dtypes}
    result = {"about": about, "seconds": round(seconds, 1), "cases": cases, "rounds": dict(counts), "failures": failures}
    save(options.json, result | {"share_of_budget": closest})
    if failures:
        raise SystemExit(1)
    return result


if __name__ == "__main__":
    main()
