"""The packing as a mixed-integer program for HiGHS, which comes with scipy.

Samples s, microbatches b < B, adapters a. Binary x[s, b]: s is in b; k[a, b]: multiples of a in b, integers.

    sum_b x[s, b] = 1        sum_{s of a} length_s x[s, b] <= multiple k[a, b]        sum_a k[a, b] <= U

Which microbatch is which means nothing, so the n-th holds no sample before the n-th, by length: that leaves out most of the
B! equal answers. Fewer microbatches: B is one less than greedily, and of the microbatches beyond the lower bound as few as can
be are used. Least remainder: B is kept and sum_a k[a, B - 1] is least; that microbatch may hold any sample. Each of the two
has half of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from itertools import pairwise
from typing import Any

from fdora.jobs.schedule.records import Microbatch, Sample, Spec, load


def available() -> bool:
    return find_spec("scipy") is not None


def solve(bins: Sequence[Microbatch], bound: int, spec: Spec) -> tuple[list[list[Sample]], int, str]:
    """The best microbatches found from ``bins`` on, what is now known of the least number, and what the solver said."""
    best, said = [list(each) for each in bins], []
    if len(best) > bound:
        fewer, proven = minimise(best, len(best) - 1, bound, False, spec)
        best = fewer or best
        bound = len(best) if proven else bound
        said.append(f"fewest: {'proven' if proven else 'stopped at its limit'}")
    if len(best) > 1:
        less, proven = minimise(best, len(best), bound, True, spec)
        if less and rank(less, spec) < rank(best, spec):
            best = less
        said.append(f"least remainder: {'proven' if proven else 'stopped at its limit'}")
    return best, bound, "; ".join(said)


def rank(bins: Sequence[Sequence[Sample]], spec: Spec) -> tuple[int, int]:
    """Small is good: how many, and how much the emptiest holds."""
    return len(bins), min((load(each, spec) for each in bins), default=0)


def minimise(
    bins: list[list[Sample]], B: int, bound: int, remainder: bool, spec: Spec
) -> tuple[list[list[Sample]] | None, bool]:
    """Microbatches, None where none were found, and whether the answer (also that there are none) is proven."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    samples = sorted((sample for each in bins for sample in each), key=lambda each: (-each.length, each))
    adapters = sorted({sample.adapter for sample in samples})
    S, G, U = len(samples), len(adapters), spec.units
    x = np.arange(S * B).reshape(S, B)
    k = x.size + np.arange(G * B).reshape(G, B)
    extra = 0 if remainder else B - bound  # of which each is used or not
    z = x.size + k.size + np.arange(extra)
    entries: list[tuple[float, int, Any]] = []  # value, row, column
    limits: list[tuple[float, float]] = []

    def constrain(terms: list[tuple[Any, float]], least: float, most: float) -> None:
        entries.extend((value, len(limits), column) for column, value in terms)
        limits.append((least, most))

    for s in range(S):
        constrain([(x[s, b], 1) for b in range(B)], 1, 1)
    for b in range(B):
        for g, adapter in enumerate(adapters):
            mine = [(x[s, b], sample.length) for s, sample in enumerate(samples) if sample.adapter == adapter]
            constrain([*mine, (k[g, b], -spec.multiple)], -np.inf, 0)
        used = z[b - bound] if not remainder and b >= bound else None
        constrain([(k[g, b], 1) for g in range(G)] + ([] if used is None else [(used, -U)]), -np.inf, U if used is None else 0)
    for first, second in pairwise(z):
        constrain([(first, -1), (second, 1)], -np.inf, 0)
    upper = np.concatenate([np.ones(x.size), np.full(k.size, U), np.ones(extra)])
    for s in range(S):
        upper[x[s, s + 1 : B - remainder]] = 0
    cost = np.zeros(len(upper))
    cost[k[:, B - 1] if remainder else z] = 1
    integral = np.ones(len(upper))
    if spec.multiple == 1:
        integral[k] = 0  # they are sums of integers there
    values, rows, columns = zip(*entries, strict=True)
    matrix = coo_array((values, (rows, columns)), shape=(len(limits), len(upper))).tocsr()
    low, high = np.array(limits, float).T
    answer = milp(
        cost,
        integrality=integral,
        bounds=Bounds(np.zeros(len(upper)), upper),
        constraints=LinearConstraint(matrix, low, high),
        options={"time_limit": spec.seconds / 2},
    )
    proven = answer.status in (0, 2)  # optimal, infeasible
    if answer.x is None:
        return None, proven
    taken = (answer.x[x] > 0.5).T
    found = [[samples[s] for s in np.flatnonzero(each)] for each in taken if each.any()]
    # what comes from floating point is checked in integers
    whole = sorted(sample for each in found for sample in each) == sorted(samples)
    return (found, proven) if whole and all(load(each, spec) <= U for each in found) else (None, False)
