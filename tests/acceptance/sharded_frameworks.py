"""Frameworks that shard, through their own entry points, in two processes on a CPU: ``python -m tests.acceptance.sharded_frameworks``.

Wants the environment of ``make test``. TRL's trainer on a model that transformers shards; the functions of torchtune's
distributed recipe. Those of Axolotl, ms-swift and LLaMA-Factory v0 go through accelerate's FSDP, which refuses a CPU; the layouts
that they make are in tests/integrations/test_sharded.py.
"""

import sys
from pathlib import Path

from tests.distributed.world import results

CASES = {"accelerate": (), "trl": (), "torchtune": (Path(sys.prefix) / "torchtune",)}


def main(names):
    wrong = 0
    for name in names or CASES:
        for case, said in results(f"tests.acceptance.sharded_{name}_cases", 2, packages=CASES[name]).items():
            wrong += said != "ok"
            print(f"{name}: {case}: {said}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
