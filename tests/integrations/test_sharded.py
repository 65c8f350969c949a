"""PEFT models that FSDP, DDP, DeepSpeed or tensor parallelism shard: two processes with gloo, many cases (sharded_cases.py).

With two every gradient has the bits of one process: the sum of two numbers has no order. With four, over ten steps
(test_sharded_table.py), it is as near to float64 as that of one process.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("peft", reason="`make test` installs it")
from tests.distributed.world import wait
from tests.integrations.sharded_cases import CASES, COMPILED, DROPPED, FUSED, ON_SHARDS, PROCESSES, STEPS, TENSOR_PARALLEL, ZERO
from tests.integrations.sharded_layouts import LAYOUTS
from tests.integrations.tiny import LAYERS

ROOT = Path(__file__).parents[2]
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


def run(folder, names, path=""):
    """What each case found, for each rank."""
    command = [sys.executable, "-m", "tests.integrations.sharded_cases"]
    env = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, (path, str(ROOT))))}
    logs = [folder / f"log{rank}" for rank in range(PROCESSES)]
    ranks = []
    for rank, log in enumerate(logs):
        with log.open("w") as out:
            line = [*command, str(rank), str(PROCESSES), str(folder), *names]
            ranks.append(subprocess.Popen(line, cwd=ROOT, env=env, stdout=out, stderr=subprocess.STDOUT))
    try:
        ended = wait(ranks, LIMIT)
    finally:
        for each in ranks:
            each.kill()
            each.wait()
    file = folder / "found.json"
    found = json.loads(file.read_text()) if file.exists() else {}
    assert not ended and set(found) == set(names), "\n".join([ended, *(log.read_text()[-4000:] for log in logs)])
    return found


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    return run(tmp_path_factory.mktemp("sharded"), list(CASES))


def each_rank(found, name):
    for rank, mine in enumerate(found[name]):
        assert "error" not in mine, f"rank {rank}: {mine['error']}"
        yield mine


def trains(mine):
    """As near to float64, over all steps, as one process that averages by hand: twice as far at most, and never by 1e-4: fdora runs there, too.

    Where sums have an order of their own, what other orders come to in one process is the bar (permuted.py).
    """
    bars = {what: mine.get(f"{what} bar", 2 * mine.get(f"{what} may be off", 0)) for what in ("losses", "adapters")}
    return all(mine.get(f"{what} off", 0) < min(1e-4, max(1e-6, most)) for what, most in bars.items())


@pytest.mark.parametrize("name", LAYOUTS)
def test_layout(found, name):
    """Every call is fused, with the bits of whole parameters on the rank's batch; a norm is computed once for each step."""
    for mine in each_rank(found, name):
        again = "checkpointed" in name
        assert (mine["fused"], mine["composed"], mine["fallbacks"]) == ((3 if again else 2) * LAYERS, 0, {})
        assert mine["norms"] == NORMS
        assert mine["logits same"] and mine["loss same"] and (mine["gradients same"] or not TWO)
        assert mine["gradients off"] < 2e-6 and mine["gradients off from alone"] < 1e-6 and trains(mine)
        assert mine["adapters same"] or name == "ddp" or not TWO  # which reduces the sum of micro-batches, in other bits
        assert mine["checkpoint loads"] and mine["checkpoint written"]
        assert mine["checkpoint same"] == mine["adapters same"]
        assert mine["after off"] < 1e-6 and mine["after change off"] < 1e-6  # a norm of before would leave 1e-2
        assert mine["shapes"] == [[32, 64], [64, 64], [64, 96], [96, 64]]
        counts = {NAMES[op]: n for op, n in mine["collectives"].items() if op in NAMES}
        assert counts == COLLECTIVES.get(name, LEAVES if "leaves" in name else BLOCKS)
        if name.startswith("fsdp"):
            gathers = BLOCKS["all-gathers"] if "kept" in name else counts["all-gathers"]
            assert mine["says"].startswith(f"FSDP: {gathers} all-gathers in a forward and backward")
            assert mine["says"].endswith("Wrap whole blocks alone: 5.") == ("leaves" in name)


@pytest.mark.parametrize("name", FUSED)
def test_fuse(found, name):
    for mine in each_rank(found, f"fuse, {name}"):
        again = "checkpointed" in name
        assert (mine["fused"], mine["composed"], mine["fallbacks"]) == ((3 if again else 2) * LAYERS, 0, {})
        assert mine["norms"] == NORMS
        assert mine["logits off"] < 1e-6 and mine["gradients off"] < 2e-6 and trains(mine)


@pytest.mark.parametrize("name", COMPILED)
def test_compiled(found, name):
    """One graph for each block, as PEFT's LoRA has there, and what eager code trains to."""
    for mine in each_rank(found, f"compiled, {name}"):
        assert mine["breaks"] == 0
        assert mine["loss off"] < 1e-6 and mine["gradients off"] < 2e-6 and trains(mine)


@pytest.mark.parametrize("how", ["transformers", "parallelize_module", "fsdp over it"])
def test_tensor_parallel(found, how):
    for mine in each_rank(found, f"tp {how}"):
        assert mine["fused"] and (mine["composed"], mine["fallbacks"]) == (0, {})
        assert mine["norms"] == [0, 0, *NORMS[2:]]  # the first was computed for the logits before
        assert mine["logits off"] < 1e-6 and mine["gradients off"] < 2e-6 and trains(mine) and mine["replicas same"]
        assert mine["after change off"] < max(1e-6, 2 * mine["after change may be off"])
        counts = Counter({NAMES[op]: n for op, n in mine["collectives"].items() if op in PARALLEL_NAMES})
        assert counts == PARALLEL[how == "transformers"]
        assert mine.get("fresh off", 0) < 1e-6
        assert mine["shapes"] == [*([[32, 64]] if TWO else []), [64, 64], [64, 96], [96, 64]]


@pytest.mark.parametrize("how", TENSOR_PARALLEL)
def test_gradients_through_norms_under_tensor_parallelism(found, how):
    for mine in each_rank(found, f"full DoRA, {how}"):
        assert mine["fused"] and (mine["composed"], mine["fallbacks"]) == (0, {})
        assert mine["gradients off"] < 2e-6  # without the norm's they are 1e-3 off


def test_few_rows_under_tensor_parallelism(found):
    for mine in each_rank(found, "few rows"):
        assert (mine["composed"], mine["fallbacks"]) == (0, {}) and mine["gradients off"] < 2e-6


@pytest.mark.parametrize("name", ON_SHARDS)
def test_norms_on_shards(found, name):
    """The same bits; each rank computes its share of the rows, with two all-gathers in a forward, whatever it has kept."""
    for mine in each_rank(found, f"on shards, {name}"):
        shared = not name.startswith("hsdp")  # there each rank is a replica
        assert mine["same"] and (mine["composed"], mine["fallbacks"]) == (0, {}) and mine["gradients off"] < 2e-6
        assert (mine["gradients same"] and mine["adapters same"]) or not TWO
        assert trains(mine)
        assert mine["norms"] == NORMS and mine["rows"] == 896 // (PROCESSES if shared else PROCESSES // 2)
        assert mine["gathers"] == 2
        assert mine["after change off"] < 1e-6 and mine["after one rank's change off"] < 1e-6


@pytest.mark.parametrize("name", DROPPED)
def test_dropout(found, name):
    for mine in each_rank(found, f"dropout, {name}"):
        assert (mine["fused"], mine["composed"], mine["fallbacks"]) == (0, LAYERS, {})
        assert mine["loss same"] and mine["gradients off"] < 1e-6


@pytest.mark.parametrize("how", TENSOR_PARALLEL)
def test_dropout_of_the_adapters_input_alone(found, how):
    for mine in each_rank(found, f"lora dropout, {how}"):
        assert mine["fused"] and (mine["composed"], mine["fallbacks"]) == (0, {})
        assert mine["loss off"] < 1e-6 and mine["drawn apart"] > 1e-6 and mine["finite"]  # PEFT's meaning is 1e-3 off


def test_a_bf16_policy(found):
    for mine in each_rank(found, "bf16 policy"):
        assert (mine["composed"], mine["fallbacks"], mine["norms"]) == (0, {}, 0)
        assert mine["fdora off"] < 1.05 * mine["stock off"] < 0.1


def test_a_model_that_was_loaded_sharded(found):
    for mine in each_rank(found, "loaded by transformers under fsdp"):
        assert (mine["composed"], mine["fallbacks"]) == (0, {}) and mine["fused"]
        assert mine["fresh off"] < 1e-6 and mine["m off"] < 3e-7
        assert mine["gradients off"] < 2e-6 and mine["logits off"] < 1e-6


def test_zero(tmp_path):
    path = Path(sys.prefix) / "deepspeed"
    if not path.exists():
        pytest.skip(f"`make test` installs DeepSpeed into {path}; this environment was made otherwise")
    found = run(tmp_path, list(ZERO), str(path))
    for name in ZERO:
        zero_holds(found, name)


def zero_holds(found, name):
    for mine in each_rank(found, name):
        assert (mine["fused"], mine["composed"], mine["fallbacks"]) == (LAYERS, 0, {})
        assert mine["norms"] == NORMS and mine["loss same"] and trains(mine)
        assert mine["after off"] < 1e-6 and mine["after change off"] < 1e-6


def holds(found, name):
    """The test of one case, for sharded_table.py."""
    kind, _, rest = name.partition(", ")
    kinds = {"fuse": test_fuse, "compiled": test_compiled, "on shards": test_norms_on_shards, "dropout": test_dropout}
    kinds["lora dropout"] = test_dropout_of_the_adapters_input_alone
    kinds["full DoRA"] = test_gradients_through_norms_under_tensor_parallelism
    alone = {"bf16 policy": test_a_bf16_policy, "loaded by transformers under fsdp": test_a_model_that_was_loaded_sharded}
    alone["few rows"] = test_few_rows_under_tensor_parallelism
    if name in alone:
        alone[name](found)
    elif name in ZERO:
        zero_holds(found, name)
    elif name.startswith("tp "):
        test_tensor_parallel(found, name.removeprefix("tp "))
    else:
        kinds[kind](found, rest) if kind in kinds else test_layout(found, name)
