"""Fit the model of fdora/triton/tiles/waves.py to what bench.tune measured, say how well it predicts, and write it down.

    python -m bench fit RUN... [--unseen RUN] [--write fdora/triton/tiles/products.json] [--json FILE] [--figure FILE]

Of several runs, what a later one has timed again counts. A fused tile that took
over NEAR times the fastest way of a shape counts FAR there, since the choice is between others, but in full where it would be
predicted below that: tiles that lose here and there must not look better than they are. Shapes are held out in
``--folds`` parts: each is predicted by a fit that has not seen it. ``regret`` is the measured time of the way that the model
chooses over that of the fastest way measured. ``--unseen``: other shapes, which no fit sees; where every tile was timed
(``product_every``) their regret is what the choice costs beside the best there is.
"""

from __future__ import annotations

import json
import math
import statistics
from pathlib import Path

import numpy
from scipy.optimize import least_squares, nnls

from bench import records
from bench.save import save as save_json
from bench.suite import Suite, summed
from bench.tune import TILES
from fdora.triton.tiles.configs import GemmConfig
from fdora.triton.tiles.product import together
from fdora.triton.tiles.waves import CublasFit, Fit, PassFit, Tile, after_us, cublas_us, fused_us, gpu_of

GPU = gpu_of(90, 132)
LEAST, MOST = (0.2, 0.02, 0.1, 0.3, 0.2), (0.97, 1.0, 10.0, 5.0, 1.1)
STARTS = ((0.6, 0.3, 2.0, 2.0, 0.8), (0.8, 0.15, 4.0, 2.0, 0.9), (0.7, 0.6, 1.0, 0.8, 0.6))
CUBLAS_STARTS = ((0.85, 10.0, 3.0, 2.0, 0.8, 0.15, 2.0, 1.0), (0.83, 11.0, 0.5, 2.6, 0.85, 0.1, 3.6, 0.5))
NEAR, FAR = 1.3, 0.1
ALIKE = 1.25  # bare products that differ by more are not the same kernel, and say nothing of how warm the GPU was


def merged(results):
    """The rows of all files, one for each product. What a later file has timed again replaces it, as in the first run: a fused
    product in proportion to the bare one of its run, since a cooler GPU speeds up both; a pass as what it took beyond it."""
    rows = {}
    for result in results:
        for row in (taken(row) for row in result["rows"] if "ms" in row):
            found = rows.setdefault((*row["shape"], row["forward"]), row)
            if found is not row:
                before, bare = found["ms"]["bare"], row["ms"]["bare"]
                warmer = before / bare if 1 / ALIKE < before / bare < ALIKE else 1.0
                found["ms"] |= {
                    name: warmer * ms if name.startswith("fused") else before + ms - bare
                    for name, ms in row["ms"].items()
                    if name != "bare"
                }
    return list(rows.values())


def taken(row):
    """A row of bench.tune with its direction, without what the plans of its day took."""
    ms = {name: t for name, t in row["ms"].items() if name != "chosen"}
    return row | {"forward": row.get("forward", row.get("op") != "product_back"), "ms": ms}


def size(row):
    """M, N, K, r of the product."""
    M, K, N, r = row["shape"]
    return (M, N, K, r) if row["forward"] else (M, K, N, r)


def fields(name):
    """Of a config that the search names."""
    return tuple(json.loads(word.lower()) for word in name.split()[1:])


def tile_of(config):
    """Of a GemmConfig without its first field."""
    return Tile(*config[:3], together(GemmConfig(True, *config)))


def best_of(residuals, starts, bounds=(-math.inf, math.inf), scale=0.1, step=None):
    fits = [
        least_squares(residuals, numpy.log(s), bounds=bounds, loss="soft_l1", f_scale=scale, diff_step=step) for s in starts
    ]
    return [float(f"{v:.4g}") for v in numpy.exp(min(fits, key=lambda fit: fit.cost).x)]


def fastest(row):
    return min((ms for name, ms in row["ms"].items() if name != "bare"), default=math.inf)


def names_of(rows):
    return dict.fromkeys(name for row in rows for name in row["ms"])


def fitted(rows):
    """{"fused": {config: Fit}, "cublas": CublasFit, way: PassFit} of one direction."""
    timed = {name: [row for row in rows if name in row["ms"]] for name in names_of(rows)}
    found = {"fused": {}}
    for name, some in timed.items():
        way = name.split()[0]
        if way == "fused":
            if GemmConfig(True, *fields(name)) not in TILES:  # of an exhaustive search, or one that was left out
                continue
            found["fused"][fields(name)] = fused(some, name)
        elif way == "bare":
            found["cublas"] = cublas(some)
        elif way != "fused":
            found[way] = passes(some, name)
    return found


def fused(rows, name):
    tile = tile_of(fields(name))
    times = [(size(row), 1e3 * row["ms"][name], 1e3 * NEAR * fastest(row)) for row in rows]

    def error(q):
        fit, found = Fit(*numpy.exp(q)), []
        for s, us, limit in times:
            guess = fused_us(*s, tile, fit, GPU)
            found += (
                [math.log(guess / us), 0.0] if us <= limit else [FAR * math.log(guess / us), max(0.0, math.log(limit / guess))]
            )
        return found

    return Fit(*best_of(error, STARTS, (numpy.log(LEAST), numpy.log(MOST))))


def cublas(rows):
    times = [(size(row)[:3], 1e3 * row["ms"]["bare"]) for row in rows]

    def error(q):
        return [math.log(cublas_us(*s, CublasFit(*numpy.exp(q)), GPU) / us) for s, us in times]

    return CublasFit(*best_of(error, CUBLAS_STARTS, scale=0.05, step=0.02))


def passes(rows, name):
    """What it adds, as a share of the product."""
    at = [(1, r / 64, M * N / 1e6, M * N / 1e6 * r / 64) for M, N, _, r in map(size, rows)]
    weights = [1 / (1e3 * row["ms"]["bare"]) for row in rows]
    added = [1e3 * (row["ms"][name] - row["ms"]["bare"]) for row in rows]
    x, _ = nnls(numpy.array(at) * numpy.array(weights)[:, None], numpy.maximum(0, added) * numpy.array(weights))
    return PassFit(*(float(f"{v:.4g}") for v in x))


def predicted(model, row):
    """name -> us, of the ways that the model knows"""
    s, times = size(row), {}
    for name in row["ms"]:
        way = name.split()[0]
        if way == "fused" and fields(name) not in model["fused"]:
            continue
        if way == "fused":
            times[name] = fused_us(*s, tile_of(fields(name)), model["fused"][fields(name)], GPU)
        elif way == "bare":
            times[name] = cublas_us(*s[:3], model["cublas"], GPU)
        else:
            times[name] = after_us(*s, model["cublas"], model[way], GPU)
    return times


def judged(model, rows, names):
    """For each shape: the way the model takes, its predicted and measured us, and its regret."""
    out = []
    for row in rows:
        times = {name: us for name, us in predicted(model, row).items() if name in names}
        us = {name: 1e3 * row["ms"][name] for name in times}
        out.append({"shape": row["shape"], "forward": row["forward"]} | chosen(times, us, 1e3 * fastest(row)))
    return out


def chosen(predicted, us, fastest):
    """The way that a model takes by its predictions."""
    way = min(predicted, key=predicted.get)
    return {
        "way": way,
        "predicted_us": round(predicted[way], 2),
        "us": round(us[way], 2),
        "regret": round(us[way] / fastest, 4),
    }


def summary(judgements):
    errors = [abs(math.log(each["predicted_us"] / each["us"])) for each in judgements]
    regrets = [each["regret"] for each in judgements]
    return {
        "shapes": len(judgements),
        "median error": round(statistics.median(errors), 3),
        "worst error": round(max(errors), 3),
        "mean regret": round(statistics.geometric_mean(regrets), 4),
        "worst regret": round(max(regrets), 3),
    }


def held_out(rows, folds):
    shapes = list(dict.fromkeys(tuple(row["shape"]) for row in rows))
    out = []
    for fold in range(folds):
        test = set(shapes[fold::folds])
        model = fitted([row for row in rows if tuple(row["shape"]) not in test])
        out += judged(model, [row for row in rows if tuple(row["shape"]) in test], set(names_of(rows)) - {"bare"})
    return out


def written(models, rows, gpu):
    about = f"the model of waves.py fitted to {gpu}, {len(rows) // 2} shapes: python -m bench fit --write"
    return {"about": about} | {side_of(forward): as_data(model) for forward, model in models.items()}


def side_of(forward):
    return "forward" if forward else "backward"


def as_data(model):
    """Fields by name, as fdora/triton/tiles/product.py reads them."""
    fused = [
        {"tile": dict(zip(GemmConfig._fields[1:], config, strict=True)), "fit": fit._asdict()}
        for config, fit in model["fused"].items()
    ]
    return {"fused": fused} | {of: fit._asdict() for of, fit in model.items() if of != "fused"}


def figure(judgements, path):
    import matplotlib

    matplotlib.use("svg")
    from matplotlib import pyplot

    _, axes = pyplot.subplots(figsize=(5, 5))
    for kind in ("fused", "after", "first"):
        some = [each for each in judgements if each["way"].startswith(kind)]
        axes.plot([each["us"] for each in some], [each["predicted_us"] for each in some], ".", label=kind)
    ends = [min(each["us"] for each in judgements), max(each["us"] for each in judgements)]
    axes.plot(ends, ends, color="0.6", linewidth=0.8)
    axes.set(xscale="log", yscale="log", xlabel="measured us", ylabel="predicted us, held out")
    axes.legend()
    pyplot.savefig(path, bbox_inches="tight", metadata={"Date": None})


def measure(run):
    options = run.options
    results = [records.result(name) for name in options.runs]
    rows = merged(results)
    unseen = merged([records.result(options.unseen)]) if options.unseen else []
    run.set(measured=[result["about"] for result in results], summary=[])
    models = {}
    for forward in (True, False):
        side = [row for row in rows if row["forward"] == forward]
        models[forward], held = fitted(side), held_out(side, options.folds)
        names = set(predicted(models[forward], {"shape": (1, 1, 1, 1), "forward": forward, "ms": names_of(side)})) - {"bare"}
        whole = [row for row in side if names <= set(row["ms"])]  # else there is little to choose from
        held = [each for each in held if any(each["shape"] == row["shape"] for row in whole)]
        inside, new = judged(models[forward], whole, names), [row for row in unseen if row["forward"] == forward]
        run.result["rows"] += held
        for which, found in (("all seen", inside), ("held out", held), ("unseen", judged(models[forward], new, names))):
            if found:
                run.result["summary"].append({"direction": side_of(forward), "which": which} | summary(found))
    if options.figure:
        figure(run.result["rows"], options.figure)
    if options.write:
        save_json(options.write, written(models, rows, results[0]["about"]["gpu"]))


OPTIONS = {
    "runs": dict(nargs="+", help="of bench.tune: h200/products_more"),
    "--unseen": dict(help="a run of bench.tune too"),
    "--folds": 4,
    "--write": Path,
    "--figure": Path,
}


main = Suite(measure, OPTIONS, device=None, show=summed)
