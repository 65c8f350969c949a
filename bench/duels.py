"""Where fdora loses: every time, peak and error of every committed result beside every rival's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain, product
from operator import itemgetter
from typing import NamedTuple

from bench.converge import TARGET
from bench.records import is_rows, measured, names, result, where
from bench.table import table
from bench.ways import NAMES, RIVALS

QLORA = ("linear4bit", "qlora", "qdora", "unsloth_qlora", "axolotl_qlora", "axolotl_qdora")
# Beside ways of fdora, which are called so: forms of the norm, and ways to decode for it.
OWN = (("dense", "triton"), ("dense", "tiles"), ("dense", "codes"), ("decode", "dequantize"), ("decode", "dequantize_norm"))
GOAL = 1.10  # of gradients through the norm, over a step without


class Contest(NamedTuple):
    """A case: values by what was measured and by way, and which rival meets which way of fdora; the smaller is the better."""

    case: str
    fields: Mapping[str, Mapping[str, float]]
    pairs: Sequence[tuple[str, str]]


def met(rival: str, mine: str) -> bool:
    """Compiled against compiled. Ways without a name here compute something else, or on other codes."""
    alike = rival.endswith("compiled") == mine.endswith("compiled")
    return (rival in (*RIVALS, *QLORA) and "fdora" in mine and mine in NAMES and alike) or (rival, mine) in OWN


def of_ways(found: dict) -> Iterator[Contest]:
    """Every time and peak of a rival's way beside fdora's. A peak is that of both directions."""
    for row, fields in chain.from_iterable(map(measured, filter(is_rows, found.values()))):
        ways = dict.fromkeys(way for values in fields.values() for way in values)
        pairs = [(a, b) for a in ways for b in ways if met(a, b) and not (b == "tiles" and "triton" in ways)]
        kind = [row["mode"], f"norm {row['norm']}"] if "norm" in row else []
        if row.get("mode") == "fwd":
            fields.pop("peak_mb", None)
        if "peak_mb" in fields and "norm" in row:
            fields["peak_mb"] = {way: peak for way, peak in fields["peak_mb"].items() if peak >= gradients_mb(row)}
        yield Contest(where(row), {f"{', '.join([*kind, field])}: {{}}": of for field, of in fields.items()}, pairs)


def gradients_mb(row: dict) -> float:
    """What dx, dA and dB take: a peak below it hid what an earlier call freed late (one rival, 1 token, r = 384).

    `peak_bytes` refuses such a peak; results that are older than that may hold one.
    """
    M, K, N, r = (row[size] for size in ("M", "K", "N", "r"))
    return 2 * (M * K + r * K + N * r) / 2**20 - 0.005


def of_compose(found: dict) -> Iterator[Contest]:
    for row, mode in product(found["rows"], ("fwd", "fwd_bwd")):
        values = {name: row[key] for name, way in COMPOSE if (key := f"{mode}_{way}_ms") in row}
        yield Contest("{M} x {N}".format(**row), {f"{row['op']}, {mode}": values}, [("plain torch", "triton")])


COMPOSE = (("plain torch", "plain"), ("triton", "triton"))


def of_convergence(found: dict) -> Iterator[Contest]:
    """Not a time: how far the loss of a step is from PEFT's, against the target, and from float32, against PEFT's."""
    for row in found["rows"]:
        mean = {pair: each["mean"] for pair, each in row["difference"].items()}
        apart = "loss of a step, distance from "
        fields = {f"{apart}PEFT's": {"the target": TARGET, "fdora": mean["fdora, peft"]}}
        fields[f"{apart}float32"] = {"peft_dora": mean["peft, float32"], "fdora": mean["fdora, float32"]}
        yield Contest("{optimizer}, seed {seed}".format(**row), fields, [("the target", "fdora"), ("peft_dora", "fdora")])


def of_demo(found: dict) -> Iterator[Contest]:
    fields = {"demo, step": "step_seconds_median", "demo, peak memory": "peak_bytes_of_a_step"}
    yield Contest(
        f"{found['adapted_layers']} layers",
        {what: {"peft_dora": found[key]["peft"], "fdora": found[key]["fdora"]} for what, key in fields.items()},
        [("peft_dora", "fdora")],
    )


def of_full(found: dict) -> Iterator[Contest]:
    for row in found["rows"]:
        if "ratio" in row:
            fields = {"gradients through the norm, over without": {"the goal": GOAL, "fdora": row["ratio"]}}
            yield Contest(where(row), fields, [("the goal", "fdora")])


# By how the name of a run begins, up to its first "_".
FAMILIES = {"compose": of_compose, "demo": of_demo, "converge": of_convergence, "full": of_full}
OTHERS = ("layer", "layers12", "model", "host", "vit", "steps", "issue", "quant", "norm", "group", "trainer", "sharded")
FAMILIES |= dict.fromkeys((*OTHERS, "diffusion"), of_ways)


def losses() -> str:
    groups = {}
    for name in names():
        family = FAMILIES.get(name.split("/")[1].split("_")[0])
        for case, fields, pairs in family(result(name)) if family else ():
            for (rival, mine), (what, values) in product(pairs, fields.items()):
                if rival in values and mine in values:
                    group = groups.setdefault((name, what.format(NAMES.get(mine, mine)), rival), [])
                    group.append((values[rival], values[mine], case))
    lines, total = [], 0
    for (name, what, rival), each in groups.items():
        lost = [(mine / theirs, case) for theirs, mine, case in each if theirs < mine]
        total += len(lost)
        if lost:
            worst, case = max(lost, key=itemgetter(0))
            lines.append([name, what, NAMES.get(rival, rival), f"{len(lost)} of {len(each)}", f"{worst:.2f}", case])
    head = ["results", "what", "against", "lost", "worst, times the rival's", "there"]
    said = f"fdora loses {total} of {sum(map(len, groups.values()))} comparisons of a time, a peak or an error with another's"
    return f"{said}:\n\n{table(head, lines)}"
