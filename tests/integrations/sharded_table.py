"""Every layout of sharded_cases.py in one run, as a table: how far each is from float64, and whether it holds the test's bars.

    python -m tests.integrations.sharded_table --processes 4 --steps 10          # 20 minutes of a CPU
    python -m tests.integrations.sharded_table --steps 2 "fsdp2 blocks" "tp parallelize_module"

Errors are relative, the worst of all processes, after so many steps where it says adapters. Norms are those that a process computes
in the first two micro-batches of the second step. Collectives are those of one forward and backward of two decoder layers.
ZeRO wants DeepSpeed, which `make test` installs. Exits with 1 where a layout does not hold.
"""

import argparse
import os
import sys
from pathlib import Path

from bench.table import table

ERRORS = {"outputs": "logits off", "gradients": "gradients off", "adapters": "adapters off", "losses": "losses off"}


def worst(ranks, name):
    values = [mine[name] for mine in ranks if name in mine]
    return f"{max(values):.0e}" if values else ""


def collectives(names, mine):
    return ", ".join(f"{n} {names[op]}" for op, n in sorted(mine.get("collectives", {}).items()) if op in names)


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("cases", nargs="*", help="default: all")
    options = parser.parse_args(argv)
    os.environ |= {
        "PROCESSES": str(options.processes),
        "STEPS": str(options.steps),
    }  # read by these modules and their processes
    from tests.integrations import test_sharded as tests

    zero = {f"zero {stage}" for stage in (2, 3)}
    packages = Path(sys.prefix) / "deepspeed"
    wanted = options.cases or [*tests.CASES, *sorted(zero if packages.exists() else ())]
    found = {}
    for names, more in (([n for n in wanted if n not in zero], ()), ([n for n in wanted if n in zero], (packages,))):
        found |= tests.run(names, *more) if names else {}
    lines, wrong = [], []
    for name in wanted:
        try:
            tests.holds(found, name)
            said = "yes"
        except AssertionError as error:
            said = "NO"
            wrong.append(f"{name}: {str(error).splitlines()[0] if str(error) else 'a bar of tests.integrations.test_sharded'}")
        ranks = [mine if isinstance(mine, dict) else {} for mine in found[name]]
        norms = ranks[0].get("norms", "")
        norms = ", ".join(map(str, norms[2:4])) if isinstance(norms, list) else norms
        lines.append([name, said, *(worst(ranks, key) for key in ERRORS.values()), norms, collectives(tests.NAMES, ranks[0])])
    print(f"{options.processes} processes, {options.steps} steps")
    print(table(["layout", "holds", *ERRORS, "norms", "collectives"], lines))
    if wrong:
        print(*wrong, sep="\n")
    if not packages.exists() and not options.cases:
        print("zero 2, zero 3: not run, DeepSpeed is not there")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
