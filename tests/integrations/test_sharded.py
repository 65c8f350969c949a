"""PEFT models that FSDP, DDP, DeepSpeed or tensor parallelism shard: two processes with gloo, many cases (sharded_cases.py).

With two every gradient has the bits of one process: the sum of two numbers has no order. With four, over five steps, it is as near
to float64 as that of one process. More of either: ``PROCESSES=4 STEPS=10 python -m pytest tests/integrations/test_sharded.py``.
"""

import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("peft", reason="`make test` installs it")
from tests.distributed import world
from tests.integrations.sharded_cases import CASES, PROCESSES, STEPS, TENSOR_PARALLEL, ZERO
from tests.integrations.tiny import LAYERS

LIMIT = 600 if STEPS == 3 else 3600  # seconds: a collective that a rank leaves out would wait for a minute
TWO = PROCESSES == 2
NORMS = [LAYERS, 0] * STEPS
BLOCKS, LEAVES = {"all-gathers": 5, "reduce-scatters": 2}, {"all-gathers": 89, "reduce-scatters": 42}
# One forward and backward of two decoder layers: as many as LoRA's there, and for each leaf one in forward, one in backward.
COLLECTIVES = {
    "ddp": {"all-reduces": 1},
    "fsdp2 blocks, kept gathered": {"all-gathers": 3, "reduce-scatters": 2},
    "fsdp2 layers": {"all-gathers": 29, "reduce-scatters": 14},
    "hsdp blocks": {"all-reduces": 2} if TWO else BLOCKS | {"all-reduces": 2},  # over one process each shard is whole
    "fsdp2 root": {"all-gathers": 1, "reduce-scatters": 1},
}
# Tensor parallel, through PEFT, whose A, B and m are plain: in forward two norms and two sums of y for each layer; in backward dx of
# five layers, but three of the first, and one sum for each adapted layer of all its gradients that are whole. transformers keeps m in
# parts, and has sums of its own, for the embedding and the head.
PARALLEL = {False: {"all-reduces": 29}, True: {"all-reduces": 31, "all-gathers": 1}}
PARALLEL_NAMES = {"all_reduce", "all_gather_into_tensor"}
NAMES = {"allgather": "all-gathers", "allgather_base": "all-gathers", "reduce_scatter_base": "reduce-scatters"}
NAMES |= {"allreduce": "all-reduces", "all_reduce": "all-reduces", "all_gather_into_tensor": "all-gathers"}


def run(names, *packages):
    """What each case found, for each rank."""
    return world.found("tests.integrations.sharded_cases", PROCESSES, LIMIT, packages, names)


@pytest.fixture(scope="module")
def found(request):
    """Of the cases that were asked for."""
    return run([item.callspec.params["name"] for item in request.session.items if item.function is test_case])


def trains(mine):
    """As near to float64, over all steps, as one process that averages by hand: twice as far at most, and never by 1e-4: fdora runs there, too.

    Where sums have an order of their own, what other orders come to in one process is the bar (permuted.py).
    """
    bars = {what: mine.get(f"{what} bar", 2 * mine.get(f"{what} may be off", 0)) for what in ("losses", "adapters")}
    return all(mine.get(f"{what} off", 0) < min(1e-4, max(1e-6, most)) for what, most in bars.items())


def near(mine, *what, bar=1e-6):
    """None of these is off by more. A norm of before would leave 1e-2 after a change."""
    return all(mine[f"{each} off"] < bar for each in what)


def layout(mine, name):
    """Every call is fused, with the bits of whole parameters on the rank's batch; a norm is computed once for each step."""
    assert mine["norms"] == NORMS
    assert mine["logits same"] and mine["loss same"] and (mine["gradients same"] or not TWO)
    assert near(mine, "gradients", bar=2e-6) and mine["gradients off from alone"] < 1e-6 and trains(mine)
    assert mine["adapters same"] or name == "ddp" or not TWO  # which reduces the sum of micro-batches, in other bits
    assert mine["checkpoint loads"] and mine["checkpoint written"]
    assert mine["checkpoint same"] == mine["adapters same"]
    assert near(mine, "after", "after change") and mine["shapes"] == [[32, 64], [64, 64], [64, 96], [96, 64]]
    counts = {NAMES[op]: n for op, n in mine["collectives"].items() if op in NAMES}
    assert counts == COLLECTIVES.get(name, LEAVES if "leaves" in name else BLOCKS)
    if name.startswith("fsdp"):
        gathers = BLOCKS["all-gathers"] if "kept" in name else counts["all-gathers"]
        assert mine["says"].startswith(f"FSDP: {gathers} all-gathers in a forward and backward")
        assert mine["says"].endswith("Wrap whole blocks alone: 5.") == ("leaves" in name)


def fuse(mine, name):
    assert mine["norms"] == NORMS and near(mine, "logits") and near(mine, "gradients", bar=2e-6) and trains(mine)


def compiled(mine, name):
    """One graph for each block, as PEFT's LoRA has there, and what eager code trains to."""
    assert mine["breaks"] == 0 and near(mine, "loss") and near(mine, "gradients", bar=2e-6) and trains(mine)


def tensor_parallel(mine, name):
    assert mine["norms"] == [0, 0, *NORMS[2:]]  # the first was computed for the logits before
    assert near(mine, "logits") and near(mine, "gradients", bar=2e-6) and trains(mine) and mine["replicas same"]
    assert mine["after change off"] < max(1e-6, 2 * mine["after change may be off"])
    counts = Counter({NAMES[op]: n for op, n in mine["collectives"].items() if op in PARALLEL_NAMES})
    assert counts == PARALLEL[name == "tp transformers"]
    assert mine.get("fresh off", 0) < 1e-6
    assert mine["shapes"] == [*([[32, 64]] if TWO else []), [64, 64], [64, 96], [96, 64]]


def gradients(mine, name):
    """Without what comes through the norms they are 1e-3 off."""
    assert near(mine, "gradients", bar=2e-6)


def on_shards(mine, name):
    """The same bits; each rank computes its share of the rows, with two all-gathers in a forward, whatever it has kept."""
    shared = not name.startswith("hsdp")  # there each rank is a replica
    assert mine["logits same"] and mine["loss same"] and near(mine, "gradients", bar=2e-6) and trains(mine)
    assert (mine["gradients same"] and mine["adapters same"]) or not TWO
    assert mine["norms"] == NORMS and mine["rows"] == 896 // (PROCESSES if shared else PROCESSES // 2)
    assert mine["gathers"] == 2 and near(mine, "after change", "after one rank's change")


def dropout(mine, name):
    assert mine["loss same"] and near(mine, "gradients")


def lora_dropout(mine, name):
    """Of the adapter's input alone; PEFT's meaning is 1e-3 off."""
    assert near(mine, "loss") and mine["drawn apart"] > 1e-6 and mine["finite"]


def policy(mine, name):
    assert mine["norms"] == 0 and mine["fdora off"] < 1.05 * mine["stock off"] < 0.1


def loaded(mine, name):
    assert near(mine, "fresh", "logits") and near(mine, "m", bar=3e-7) and near(mine, "gradients", bar=2e-6)


def zero(mine, name):
    assert mine["norms"] == NORMS and mine["loss same"] and trains(mine) and near(mine, "after", "after change")


HOLDS = {"fuse": fuse, "compiled": compiled, "on shards": on_shards, "dropout": dropout, "full DoRA": gradients}
HOLDS["lora dropout"] = lora_dropout
HOLDS |= {"few rows": gradients, "bf16 policy": policy, "loaded by transformers under fsdp": loaded}
HOLDS |= {f"tp {how}": tensor_parallel for how in ("transformers", *TENSOR_PARALLEL)} | dict.fromkeys(ZERO, zero)
ONCE = {"": 2 * LAYERS, "fuse": 2 * LAYERS, "dropout": LAYERS} | dict.fromkeys(ZERO, LAYERS)  # calls, once more if checkpointed


def holds(found, name):
    """Of what each rank found; calls are one each, but with torch's masks."""
    kind, _, rest = name.partition(", ")
    kind, rest = (kind, rest or name) if kind in HOLDS else ("", name)
    for rank, mine in enumerate(found[name]):
        assert isinstance(mine, dict), f"rank {rank}: {mine or 'it never ran'}"
        if kind != "compiled":  # there nobody counts
            calls, others = (mine[path] for path in (("composed", "fused") if kind == "dropout" else ("fused", "composed")))
            assert calls and (others, mine["fallbacks"]) == (0, {})
            assert calls == ONCE.get(kind, calls) + LAYERS * ("checkpointed" in name and kind in ONCE)
        HOLDS.get(kind, layout)(mine, rest)


@pytest.mark.parametrize("name", CASES)
def test_case(found, name):
    holds(found, name)


# to which four processes are not as two: sums have an order, a mesh has two dimensions, a process has no rows
OF_FOUR = [
    *("ddp", "fsdp2 leaves", "hsdp blocks", "fsdp1 leaves", "on shards, fsdp2 blocks", "on shards, hsdp blocks"),
    *("full DoRA, fsdp over it", "lora dropout, fsdp over it", "few rows", "tp transformers", "tp fsdp over it"),
]


@pytest.mark.xdist_group("tests/integrations/test_sharded.py")  # not beside the processes of the others
def test_four_processes_and_five_steps():
    command = [sys.executable, "-m", "pytest", *(f"{__file__}::test_case[{name}]" for name in OF_FOUR)]
    done = subprocess.run(command, env=os.environ | {"PROCESSES": "4", "STEPS": "5"}, capture_output=True, text=True)
    assert done.returncode == 0 and f"{len(OF_FOUR)} passed" in done.stdout, done.stdout[-4000:]


def test_zero():
    path = Path(sys.prefix) / "deepspeed"
    if not path.exists():
        pytest.skip(f"`make test` installs DeepSpeed into {path}; this environment was made otherwise")
    found = run(ZERO, path)
    for name in ZERO:
        holds(found, name)
