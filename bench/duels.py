"""Where fdora loses: every time, peak and error of every committed result beside every rival's."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import NamedTuple

from bench import group
from bench.converge import TARGET
from bench.records import names, result
from bench.table import pivot, table
from bench.ways import NAMES, RIVALS, opponent

MODES12 = ("inference", "gradient", "gradient_checkpointing")
UNITS = {"ms": "", "peak_mb": ", peak memory"}
MEASURED = ("ms", "peak_mb", "tokens_per_s", "gpu_ms", "gpu_by", "turns", "first_ms")
PEFT = ("peft_lora", "peft_dora")
QLORA = ("linear4bit", "qlora", "qdora", "unsloth_qlora", "axolotl_qlora", "axolotl_qdora")
GOAL = 1.10  # of gradients through the norm, over a step without
SIZES = "{M}, {K} x {N}, {r}"


class Contest(NamedTuple):
    """A case: values by what was measured and by way, and which rival meets which way of fdora; the smaller is the better."""

    case: str
    fields: Mapping[str, Mapping[str, float]]
    pairs: Sequence[tuple[str, str]]


class Duel(NamedTuple):
    what: str
    rival: str
    case: str
    theirs: float
    mine: float


def duels(contests: Iterator[Contest]) -> Iterator[Duel]:
    for case, fields, pairs in contests:
        for rival, mine in pairs:
            for what, values in fields.items():
                if rival in values and mine in values:
                    yield Duel(what.format(NAMES.get(mine, mine)), rival, case, values[rival], values[mine])


def how(row: dict) -> str:
    return "compiled" if row["compiled"] else "eager"


def where(row: dict) -> str:
    """The case of a row: all that was neither measured nor is its way."""
    return ", ".join(f"{k} {v}" for k, v in row.items() if k not in ("way", *MEASURED) and v != "")


def beside_peft(rows: Sequence[dict], fields: dict[str, str], case: Callable[[dict], str] = where) -> Iterator[Contest]:
    """Rows of one way each: those of PEFT against those of fdora."""
    for label, found in pivot(rows, case).items():
        pairs = [(rival, mine) for mine in found if "fdora" in mine for rival in found if rival in PEFT]
        values = {
            f"{what}: {{}}": {way: row[field] for way, row in found.items() if field in row} for field, what in fields.items()
        }
        yield Contest(label, values, pairs)


def of_layers(found: dict) -> Iterator[Contest]:
    pairs = [(rival, opponent(rival)) for rival in RIVALS]
    for row in found["rows"]:
        case, norm = SIZES.format(**row), f"norm {row['norm']}"
        case += "" if row.get("base", "bf16") == "bf16" else f", {row['base']}"
        yield Contest(case, {f"{row['mode']}, {norm}": row["ms"]}, pairs)
        if row["mode"] == "fwd_bwd":
            peaks = {way: peak for way, peak in row["peak_mb"].items() if peak >= gradients_mb(row)}
            yield Contest(case, {f"peak memory, {norm}": peaks}, pairs)


def gradients_mb(row: dict) -> float:
    """What dx, dA and dB take: a peak below it hid what an earlier call freed late (one rival, 1 token, r = 384).

    `peak_bytes` refuses such a peak; results that are older than that may hold one.
    """
    M, K, N, r = (row[size] for size in ("M", "K", "N", "r"))
    return 2 * (M * K + r * K + N * r) / 2**20 - 0.005


def of_layers12(found: dict) -> Iterator[Contest]:
    fields = {f"{mode}_{unit}": mode.replace("_", " ") + extra for mode in MODES12 for unit, extra in UNITS.items()}
    yield from beside_peft(found["rows"], fields, lambda row: f"r {row['r']}, {how(row)}")


def of_issue_time(found: dict) -> Iterator[Contest]:
    rows = [{"run": i, "way": way} | ms for i, run in enumerate(found["runs"]) for way, ms in run["ms"].items()]
    fields = {part: f"time to issue a {part}" for part in ("forward", "backward")}
    yield from beside_peft(rows, fields, lambda row: f"run {row['run']}")


def of_host(found: dict) -> Iterator[Contest]:
    case = SIZES.format(**dict(zip("MKNr", found["sizes"], strict=True)))
    yield from beside_peft(found["rows"], {"fwd_us": "host, fwd", "fwd_bwd_us": "host, fwd_bwd"}, lambda row: case)


def of_norms(found: dict) -> Iterator[Contest]:
    forms = [row for row in found["rows"] if "form" in row and row.get("kind", "weight") == "weight"]
    for case, rows in pivot(forms, "{N} x {K}, {r}, {dtype}".format_map, by="form").items():
        fields = {"norm": "ms", "norm, peak memory": "peak_mb"}
        values = {what: {form: row[field] for form, row in rows.items()} for what, field in fields.items()}
        yield Contest(case, values, [("dense", "triton" if "triton" in rows else "tiles")])


def of_compose(found: dict) -> Iterator[Contest]:
    for row, mode in product(found["rows"], ("fwd", "fwd_bwd")):
        values = {name: row[key] for name, way in COMPOSE if (key := f"{mode}_{way}_ms") in row}
        yield Contest("{M} x {N}".format(**row), {f"{row['op']}, {mode}": values}, [("plain torch", "triton")])


COMPOSE = (("plain torch", "plain"), ("triton", "triton"))


def of_groups(found: dict) -> Iterator[Contest]:
    for row, field in product(found["rows"], ("ms", "peak_mb")):
        if (field, row["mode"]) != ("peak_mb", "fwd"):
            what = "shared input, " + (row["mode"] if field == "ms" else "peak memory")
            pairs = [(rival, "fdora") for rival in group.RIVALS]
            yield Contest("{part} of {model}, {M}, r {r}".format(**row), {what: row[field]}, pairs)


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


def of_quantised(found: dict) -> Iterator[Contest]:
    """Of layers, and of a decoder layer; searches compare tiles."""
    for row in found["rows"] if "norms" in found else []:
        yield Contest(SIZES.format(**row), {f"NF4 layer, {row['mode']}": row["ms"]}, [(rival, "fdora") for rival in QLORA])
    pairs = [("dense", "codes"), ("decode", "dequantize"), ("decode", "dequantize_norm")]
    for row in found.get("norms", []):
        yield Contest("{N} x {K}, {r}".format(**row), {"norm of NF4 codes: {}": row["ms"]}, pairs)
    for mode, ways in pivot(found["rows"] if "whole" in found else [], lambda row: row["mode"]).items():
        fields = {
            f"NF4 decoder layer, {field}: {{}}": {way: row[field] for way, row in ways.items() if field in row}
            for field in ("ms", "gpu_ms", "peak_mb")
        }
        ours = [way for way in ways if way.startswith("use_fdora")]
        yield Contest(mode, fields, [(rival, mine) for mine in ours for rival in ("qlora", "qdora")])


def of_vit(found: dict) -> Iterator[Contest]:
    fields = {unit: f"ViT-g/14{extra}" for unit, extra in UNITS.items()}
    yield from beside_peft(found["rows"], fields, lambda row: f"{row['mode']} of {row['batch']}, {how(row)}")


def of_full(found: dict) -> Iterator[Contest]:
    for row in found["rows"]:
        if "ratio" in row:
            fields = {"gradients through the norm, over without": {"the goal": GOAL, "fdora": row["ratio"]}}
            yield Contest((SIZES + ", norm {norm}").format(**row), fields, [("the goal", "fdora")])


# By how the name of a run begins, up to its first "_".
FAMILIES = {
    "layer": of_layers,
    "layers12": of_layers12,
    "model": lambda found: beside_peft(found["rows"], {unit: f"model{extra}" for unit, extra in UNITS.items()}),
    "host": of_host,
    "vit": of_vit,
    "full": of_full,
    "steps": lambda found: beside_peft(found["rows"], {"ms": "training step, wall time", "gpu_ms": "training step, GPU time"}),
    "issue": of_issue_time,
    "quant": of_quantised,
    "norm": of_norms,
    "compose": of_compose,
    "demo": of_demo,
    "group": of_groups,
    "converge": of_convergence,
}


def losses() -> str:
    groups = {}
    for name in names():
        family = FAMILIES.get(name.split("/")[1].split("_")[0])
        for duel in duels(family(result(name))) if family else ():
            groups.setdefault((name, duel.what, duel.rival), []).append(duel)
    lines, total = [], 0
    for (name, what, rival), each in groups.items():
        lost = [duel for duel in each if duel.theirs < duel.mine]
        total += len(lost)
        if lost:
            worst = max(lost, key=lambda duel: duel.mine / duel.theirs)
            share = f"{len(lost)} of {len(each)}", f"{worst.mine / worst.theirs:.2f}"
            lines.append([name, what, NAMES.get(rival, rival), *share, worst.case])
    head = ["results", "what", "against", "lost", "worst, times the rival's", "there: tokens, K x N, r"]
    said = f"fdora loses {total} of {sum(map(len, groups.values()))} comparisons of a time, a peak or an error with another's"
    return f"{said}:\n\n{table(head, lines)}"
