"""Frameworks that shard, through their own entry points, in two processes: ``python -m tests.acceptance.sharded_frameworks``.

Wants the environment of ``make test``. accelerate's FSDP1 and FSDP2, which Axolotl, ms-swift, LLaMA-Factory v0 and TRL go through;
TRL's trainer on a model that transformers shards; the functions of torchtune's distributed recipe. All on a CPU, accelerate also
on two GPUs: ``--device cuda accelerate``.
"""

import sys
from pathlib import Path

from tests import device
from tests.distributed.world import results

CASES = {"accelerate": (), "trl": (), "torchtune": (Path(sys.prefix) / "torchtune",)}


def main(names):
    if names[:2] == ["--device", "cuda"]:
        names, device.NAME = names[2:], "cuda"
    wrong = 0
    for name in names or CASES:
        for case, said in results(f"tests.acceptance.sharded_{name}_cases", 2, packages=CASES[name]).items():
            wrong += said != "ok"
            print(f"{name}: {case}: {said}", flush=True)
    return wrong


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
