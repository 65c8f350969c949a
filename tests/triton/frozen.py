"""The machine code and the plans of this commit, written to a file, and a later commit compared with it; no GPU is needed.

    python -m tests.triton.frozen --write before.json            # at the commit before a change
    python -m tests.triton.frozen --check before.json            # at the commit after it
    python -m tests.triton.frozen --check before.json --kernel norm --kernel sum_kernel

A launch is known by the call of tests/triton/written.py that makes it and by its number there, so a kernel may be renamed or
merged between the two. Of each kernel ``--most`` kinds of launch are compiled for each GPU, spread evenly over all that there
are (0: every one, some 6000 compilations). Machine code is what nvdisasm prints without addresses; ``moved`` counts the launches
that differ in nothing but the places of their parameters. A file holds for the Triton that wrote it and is not committed.
"""

import argparse
import hashlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import triton

from fdora.triton.runtime.describe import describe
from tests.triton.test_compile import build, device, kind
from tests.triton.written import every_call, launches, wants_float8

TARGETS = (80, 90, 100)
NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
PARAMETER = re.compile(r"c\[0x0\]\[0x[0-9a-f]+\]")

work = []  # (key, launch, target): inherited by the processes that compile


def plans_for(target):
    """The plan of each call, None where this GPU has none."""
    on = device(target)
    for maker, likes, options in every_call():
        yield None if target < 89 and wants_float8(maker, options) else maker(tuple(likes), on, *options)


def described(plans):
    return [hashlib.sha256(str(plan and describe(plan)).encode()).hexdigest()[:16] for plan in plans]


def sample(plans, most):
    """[(call, number of the launch)], at most so many of each kernel, one of each kind."""
    kinds = {}
    for i, plan in enumerate(plans):
        for j, step in enumerate(launches(plan) if plan else ()):
            name, text = kind(step)
            kinds.setdefault(name, {}).setdefault(text, (i, j))
    for places in kinds.values():
        each = list(places.values())
        n = len(each) if not most else min(most, len(each))
        yield from (each[k * (len(each) - 1) // max(1, n - 1)] for k in range(n))


def machine_code(cubin):
    """Instructions without their addresses and the names of labels."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run([NVDISASM, "-c", file.name], capture_output=True, text=True, check=True).stdout
    lines = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", text, re.MULTILINE)
    return [re.sub(r"`\([^)]*\)", "`()", line) for line in lines]


def compiled(i):
    """The key of this piece of work, and the kernel, hashes, instructions and shared memory that came of it."""
    key, step, target = work[i]
    try:
        built = build(step, target)
    except Exception as error:  # said with its key; the others go on
        return key, [step.kernel.__name__, "", "", -1, f"{type(error).__name__}: {error}"[:300]]
    code = machine_code(built.asm["cubin"])
    hashes = [
        hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
        for lines in (code, [PARAMETER.sub("c[]", line) for line in code])
    ]
    return key, [step.kernel.__name__, *hashes, len(code), built.metadata.shared]


def compile_all(jobs):
    rows = {}
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        for n, (key, row) in enumerate(pool.map(compiled, range(len(work)), chunksize=4), 1):
            rows[key] = row
            if n % 50 == 0 or n == len(work):
                print(f"\r{n} of {len(work)} compiled", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return rows


def wanted(name, kernels):
    return not kernels or any(name.startswith(k) for k in kernels)


def write(path, most, jobs, kernels):
    frozen = {"triton": triton.__version__, "plans": {}}
    for target in TARGETS:
        plans = list(plans_for(target))
        frozen["plans"][str(target)] = described(plans)
        for i, j in sample(plans, most):
            step = launches(plans[i])[j]
            if wanted(step.kernel.__name__, kernels):
                work.append((f"{target} {i} {j}", step, target))
    frozen["launches"] = compile_all(jobs)
    Path(path).write_text(json.dumps(frozen, indent=0))
    print(f"{len(work)} launches of Triton {triton.__version__} written")


def check(path, jobs, kernels):
    """Prints what differs; 1 where something does."""
    frozen = json.loads(Path(path).read_text())
    if frozen["triton"] != triton.__version__:
        raise SystemExit(f"{path} was written with Triton {frozen['triton']}; this is {triton.__version__}")
    lost = []
    for target in TARGETS:
        plans = list(plans_for(target))
        old, new = frozen["plans"][str(target)], described(plans)
        changed = [i for i, pair in enumerate(zip(old, new, strict=False)) if len(set(pair)) > 1]
        print(
            f"sm_{target}: {len(changed)} of {len(old)} plans are described otherwise, the first {changed[:5]}; {len(new)} calls now"
        )
        for key, row in frozen["launches"].items():
            of, i, j = map(int, key.split())
            if of == target and wanted(row[0], kernels):
                steps = launches(plans[i]) if i < len(plans) and plans[i] else []
                if j < len(steps):
                    work.append((key, steps[j], target))
                else:
                    lost.append(key)
    said = Counter()
    for key, new in compile_all(jobs).items():
        old = frozen["launches"][key]
        same = old[1:] == new[1:]
        word = "equal" if same else "moved" if old[2] == new[2] and old[4] == new[4] else "DIFFERS"
        said[word] += 1
        if word == "DIFFERS":
            print(f"{key}: {old[0]} -> {new[0]}: {old[3]} -> {new[3]} instructions, shared {old[4]} -> {new[4]}")
    print(dict(said), f"{len(lost)} launches are not made any more")
    return 1 if said["DIFFERS"] or lost else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    way = parser.add_mutually_exclusive_group(required=True)
    way.add_argument("--write", metavar="FILE")
    way.add_argument("--check", metavar="FILE")
    parser.add_argument("--most", type=int, default=6, metavar="N", help="kinds of launch of each kernel; 0: all (%(default)s)")
    parser.add_argument("--kernel", action="append", default=[], metavar="NAME", help="only kernels whose name begins so")
    parser.add_argument("--jobs", type=int, default=os.cpu_count(), metavar="N")
    given = parser.parse_args()
    if given.write:
        return write(given.write, given.most, given.jobs, given.kernel)
    return check(given.check, given.jobs, given.kernel)


if __name__ == "__main__":
    sys.exit(main())
