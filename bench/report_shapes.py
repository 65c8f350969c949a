"""The tables of bench.shapes, bench.passes and bench.fit, for bench.report."""

from __future__ import annotations

from bench.table import table

SHAPES = (
    "Shapes drawn at random (`python -m bench.shapes --device cuda`), the norm given: the first way's GPU time over the "
    'second\'s. "bare" is the matrix products alone, "micro_batches" computes its norm in one of 8.'
)
PASSES = (
    "us on the GPU of backward's elementwise pass, in its best tile, beside torch's sum of two tensors, which moves as many "
    "bytes; of the pass with the two products that read what it writes, beside those two products of dy alone; and of both "
    "factors' gradients, as two products and in one launch (bench/passes.py, until 1fd0804). The shapes are those "
    "where backward was furthest from its bare products."
)
FIT = (
    "The model of waves that chooses a product's way and tile (`python -m bench.fit`): its predictions beside measured times, "
    "and the time of what it chooses over that of the fastest way measured (regret)."
)


FEW = (
    "us on the GPU of one layer and few tokens (bench/few.py, until 1fd0804): bare products; one pass over W by narrow "
    "tiles, and what more tokens take, forward and with backward; forward with the norm apart, and out of the same pass over W "
    "by the fastest of its tiles."
)


def shapes(result: dict) -> str:
    lines = [[name, found["mean"], found["worst"], found["at"], found["cases"]] for name, found in result["summary"].items()]
    return "\n\n".join([SHAPES, table(["ratio", "mean", "worst", "at M, K, N, r", "shapes"], lines)])


def few(result: dict) -> str:
    lines = []
    for row in result["rows"]:
        us = {name: 1e3 * ms for name, ms in row["ms"].items()}
        inside = min((t for name, t in us.items() if name.startswith("inside")), default=None)
        names = ("bare", "small", "general", "bare_both", "small_both", "general_both", "norm_small")
        times = [f"{us[name]:.1f}" if name in us else "" for name in names] + ["" if inside is None else f"{inside:.1f}"]
        lines.append([", ".join(map(str, row["shape"])), *times])
    heads = ["M, K, N, r", "bare", "one pass", "general", *(f"{name}, both" for name in ("bare", "one pass", "general"))]
    return "\n\n".join([FEW, table([*heads, "norm, one pass", "norm inside"], lines)])


def passes(result: dict) -> str:
    lines = []
    for row in result["rows"]:
        us = {name: 1e3 * ms for name, ms in row["ms"].items()}

        def best(kind: str, us: dict[str, float] = us) -> float:
            return min(t for name, t in us.items() if name.startswith(kind + " "))

        times = (us["add"], best("pass"), us["bare"], best("chain"), us["factors"], best("factors"))
        lines.append([", ".join(map(str, row["shape"])), *(f"{t:.1f}" for t in times)])
    heads = ["M, K, N, r", "sum of two", "pass", "dy B, dy^T h", "pass, dz B, dz^T h", "dh^T x, dz^T h", "in one launch"]
    return "\n\n".join([PASSES, table(heads, lines)])


def fit(result: dict) -> str:
    found = result["summary"]
    return "\n\n".join([FIT, table([*found[0]], [[*each.values()] for each in found])])
