"""The machine code and the plans of this commit, a line for each, to be compared with those of a later one; no GPU is needed.

    python -m tests.triton.frozen > before      # at the commit before a change
    python -m tests.triton.frozen > after       # at the commit after it
    diff before after

A launch is known by the call of tests/triton/written.py that makes it and by its number there, so a kernel may be renamed or
merged between the two. Of each kernel MOST kinds of launch are compiled for each GPU, spread evenly over all that there are.
Machine code is what nvdisasm prints without addresses: a line has its hash, that of the same without the places of parameters,
the number of instructions, and shared memory. Lines hold for one version of Triton.
"""

import hashlib
import os
import re
import subprocess
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import triton

from fdora.triton.runtime.describe import describe
from tests.triton.test_compile import build, device, kind
from tests.triton.written import every_call, launches, wants_float8

TARGETS = (80, 90, 100)
MOST = int(os.environ.get("MOST", 6))  # all are some 6000
NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
PARAMETER = re.compile(r"c\[0x0\]\[0x[0-9a-f]+\]")

work = []  # (key, launch, target): inherited by the processes that compile


def hashed(text):
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def plans_for(target):
    """The plan of each call, None where this GPU has none."""
    on = device(target)
    for maker, likes, options in every_call():
        yield None if target < 89 and wants_float8(maker, options) else maker(tuple(likes), on, *options)


def sample(plans):
    """[(call, number of the launch)], at most MOST of each kernel, one of each kind."""
    kinds = {}
    for i, plan in enumerate(plans):
        for j, step in enumerate(launches(plan) if plan else ()):
            name, text = kind(step)
            kinds.setdefault(name, {}).setdefault(text, (i, j))
    for places in kinds.values():
        each = list(places.values())
        n = min(MOST, len(each))
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
    """The line of this piece of work."""
    key, step, target = work[i]
    try:
        built = build(step, target)
    except Exception as error:  # said in its line; the others go on
        return f"{key} {step.kernel.__name__} {type(error).__name__}: {error}"[:300].replace("\n", " ")
    code = machine_code(built.asm["cubin"])
    hashes = [hashed("\n".join(lines)) for lines in (code, [PARAMETER.sub("c[]", line) for line in code])]
    return " ".join(map(str, (key, step.kernel.__name__, *hashes, len(code), built.metadata.shared)))


def main():
    print(f"Triton {triton.__version__}")
    for target in TARGETS:
        plans = list(plans_for(target))
        for i, plan in enumerate(plans):
            print(f"plan {target} {i} {hashed(str(plan and describe(plan)))}")
        work.extend((f"{target} {i} {j}", launches(plans[i])[j], target) for i, j in sample(plans))
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        for n, line in enumerate(pool.map(compiled, range(len(work)), chunksize=4), 1):
            print(line)
            print(f"\r{n} of {len(work)} compiled", end="", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
