"""The tables of bench.shapes, bench.passes and bench.fit, for bench.report."""

from __future__ import annotations

from functools import partial

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


FEW_COLUMNS = {"bare": "bare", "one pass": "small", "general": "general", "bare, both": "bare_both"}
FEW_COLUMNS |= {"one pass, both": "small_both", "general, both": "general_both"}
FEW_COLUMNS |= {"norm, one pass": "norm_small", "norm inside": "inside*"}
PASSES_COLUMNS = {"sum of two": "add", "pass": "pass *", "dy B, dy^T h": "bare", "pass, dz B, dz^T h": "chain *"}
PASSES_COLUMNS |= {"dh^T x, dz^T h": "factors", "in one launch": "factors *"}


def in_us(said: str, columns: dict[str, str], result: dict) -> str:
    """A column for each time; one that ends in a star is the fastest of those that begin so."""

    def cell(ms: dict[str, float], key: str) -> str:
        start, star, _ = key.partition("*")
        mine = [each for name, each in ms.items() if name == key or (star and name.startswith(start))]
        return f"{1e3 * min(mine):.1f}" if mine else ""

    rows = result["rows"]
    lines = [[", ".join(map(str, row["shape"])), *(cell(row["ms"], key) for key in columns.values())] for row in rows]
    return f"{said}\n\n{table(['M, K, N, r', *columns], lines)}"


def shapes(result: dict) -> str:
    lines = [[name, found["mean"], found["worst"], found["at"], found["cases"]] for name, found in result["summary"].items()]
    return f"{SHAPES}\n\n{table(['ratio', 'mean', 'worst', 'at M, K, N, r', 'shapes'], lines)}"


def fit(result: dict) -> str:
    found = result["summary"]
    return f"{FIT}\n\n{table([*found[0]], [[*each.values()] for each in found])}"


KINDS = {
    "shapes": shapes,
    "few": partial(in_us, FEW, FEW_COLUMNS),
    "passes": partial(in_us, PASSES, PASSES_COLUMNS),
    "fit": fit,
}
