"""Fit the model of tiles/few.py to what `python -m bench tune few` measured, say how well it chooses, and write it down.

    python -m bench.fit_few RUN... [--write fdora/triton/tiles/few.json]

Of all files, both ways of both directions; backward is what both take less forward. ``regret`` is the measured time of the way
that the model chooses over that of the faster one. Of each pair the predictions must differ as the times do, up to MARGIN: a
fit of the times alone leaves some of them in a tie. The other way's product is that of tiles/products.json: fit that first.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import NamedTuple

import numpy

from bench import records
from bench.fit import GPU, best_of, chosen, side_of, summary
from bench.save import save as save_json
from bench.suite import Suite, summed
from fdora.triton.tiles.few import BesideFit, NarrowFit, beside_us, narrow_us
from fdora.triton.tiles.product import Ask, product_way

START = (0.8, 70_000.0, 20_000.0, 3.0, 1.0, 4.0, 1.0, 4.0, 0.6, 8.0, 0.5, 0.1)  # NarrowFit, BesideFit
SIZE = len(NarrowFit._fields)
MARGIN, WEIGHT = 0.05, 3.0


class Pair(NamedTuple):
    """us of both ways of one direction."""

    forward: bool
    shape: tuple[int, int, int, int]  # M, N, K, r of the product
    narrow: float
    general: float


def pairs(results):
    times = {}
    for number, result in enumerate(results):
        for row in result["rows"]:
            both = "_both" if row.get("op") == "few_both" else ""
            mine = times.setdefault((number if "op" not in row else "", *row["shape"]), {})
            mine |= {name + both: 1e3 * ms for name, ms in row["ms"].items()}
    for (_, M, K, N, r), us in times.items():
        yield Pair(True, (M, N, K, r), us["small"], us["general"])
        yield Pair(False, (M, K, N, r), us["small_both"] - us["small"], us["general_both"] - us["general"])


def predicted(fit, pair):
    """us of both."""
    way = product_way(Ask(*pair.shape, pair.forward, False, True, 90, GPU.num_sms))
    narrow = narrow_us(*pair.shape, pair.forward, NarrowFit(*fit[:SIZE]), GPU, 90)
    return narrow, way.us + beside_us(*pair.shape[1:], pair.forward, BesideFit(*fit[SIZE:]))


def errors(fit, pair):
    narrow, general = predicted(fit, pair)
    found, ahead = math.log(narrow / general), math.log(pair.narrow / pair.general)
    short = min(MARGIN, abs(ahead)) - math.copysign(found, ahead * found)
    return math.log(narrow / pair.narrow), math.log(general / pair.general), WEIGHT * max(0.0, short)


def fitted(found):
    def residuals(q):
        return [error for pair in found for error in errors(numpy.exp(q), pair)]

    return best_of(residuals, [START], scale=0.05, step=0.01)


def written(fit, found):
    return {
        "about": f"the model of few.py fitted to {len(found)} pairs of times: python -m bench.fit_few --write",
        "narrow": NarrowFit(*fit[:SIZE])._asdict(),
        "beside": BesideFit(*fit[SIZE:])._asdict(),
    }


def measure(run):
    options = run.options
    found = list(pairs([records.result(name) for name in options.runs]))
    fit = fitted(found)
    for pair in found:
        us = {"narrow": pair.narrow, "general": pair.general}
        guess = dict(zip(us, predicted(fit, pair), strict=True))
        run.result["rows"].append({"shape": pair.shape, "forward": pair.forward} | chosen(guess, us, min(us.values())))
    sides = {side_of(forward): [row for row in run.result["rows"] if row["forward"] == forward] for forward in (True, False)}
    run.set(summary=[{"direction": side} | summary(rows) for side, rows in sides.items()])
    if options.write:
        save_json(options.write, written(fit, found))


OPTIONS = {
    "runs": dict(nargs="+", help="of bench.tune: few and few_both, h200/few"),
    "--write": Path,
}


main = Suite(measure, OPTIONS, device=None, show=summed)
