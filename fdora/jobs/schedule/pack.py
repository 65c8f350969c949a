"""Samples into as few microbatches as possible: two greedy ways and a lower bound, then exactly where that leaves a question.

A packing in multiples (``spec.multiple`` tokens; U of them are the capacity) is feasible where each microbatch b has

    sum over adapters a of ceil(sum of lengths of a in b / multiple) <= U

Fewest microbatches come first, then the least load of the last one: what is left of a batch is merged with other batches'.

As a mixed-integer program for HiGHS, which comes with scipy: samples s, microbatches b < B, adapters a; binary x[s, b]: s is
in b; integers k[a, b]: multiples of a in b.

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

from fdora._check import fail
from fdora.jobs.schedule.records import Microbatch, Packing, Sample, Spec, check_sample, check_spec, load

Filled = tuple[int, int, tuple[int, ...]]  # of a microbatch: multiples, tokens, tokens of each class


def available() -> bool:
    return find_spec("scipy") is not None


def solve(bins: Sequence[Microbatch], bound: int, spec: Spec) -> tuple[list[list[Sample]], int, str]:
    """The best microbatches found from ``bins`` on, what is now known of the least number, and what the solver said."""
    best, said = [list(each) for each in bins], []
    for what, remainder in (("fewest", False), ("least remainder", True)):
        if len(best) > (1 if remainder else bound):
            found, proven = minimise(best, bound, remainder, spec)
            if found and rank(found, spec) < rank(best, spec):
                best = found
            bound = len(best) if proven and not remainder else bound
            said.append(f"{what}: {'proven' if proven else 'stopped at its limit'}")
    return best, bound, "; ".join(said)


def rank(bins: Sequence[Sequence[Sample]], spec: Spec) -> tuple[int, int]:
    """Small is good: how many, and how much the emptiest holds."""
    return len(bins), min((load(each, spec) for each in bins), default=0)


def minimise(bins: list[list[Sample]], bound: int, remainder: bool, spec: Spec) -> tuple[list[list[Sample]] | None, bool]:
    """As many microbatches with the least ``remainder``, or fewer; None where none were found, and whether the answer (also
    that there are none) is proven."""
    import numpy as np
    from scipy.optimize import Bounds, LinearConstraint, milp
    from scipy.sparse import coo_array

    samples = sorted((sample for each in bins for sample in each), key=lambda each: (-each.length, each))
    adapters = sorted({sample.adapter for sample in samples})
    S, B, G, U = len(samples), len(bins) - (not remainder), len(adapters), spec.units
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


def lower_bound(samples: Sequence[Sample], spec: Spec) -> int:
    """``max(ceil(sum_a ceil(T_a / multiple) / U), L2)``, T_a the tokens of adapter a.

    L2 (Martello and Toth, 1990) relaxes the multiples: with t <= C / 2, samples longer than C - t are alone, those up to
    C / 2 are apart, and what else is at least t long must fit beside the latter. The largest over all t counts.
    """
    C = spec.units * spec.multiple
    best = -(-load(samples, spec) // spec.units)
    lengths = sorted(sample.length for sample in samples)
    for t in {0, *(n for n in lengths if 2 * n <= C)}:
        alone = sum(n > C - t for n in lengths)
        apart = [n for n in lengths if 2 * n > C and n <= C - t]
        beside = sum(n for n in lengths if t <= n and 2 * n <= C)
        best = max(best, alone + len(apart) + max(0, -(-(beside - len(apart) * C + sum(apart)) // C)))
    return best


def first_fit(samples: Sequence[Sample], spec: Spec) -> list[Microbatch]:
    """The longest first, each into the first microbatch that takes it (first-fit decreasing)."""
    tokens: list[dict[int, int]] = []
    bins: list[list[Sample]] = []
    used: list[int] = []
    m = spec.multiple
    for sample in sorted(samples, key=lambda each: (-each.length, each)):
        for b, have in enumerate(tokens):
            before = have.get(sample.adapter, 0)
            more = -(-(before + sample.length) // m) - -(-before // m)
            if used[b] + more <= spec.units:
                break
        else:
            b, before, more = len(bins), 0, -(-sample.length // m)
            tokens.append({})
            bins.append([])
            used.append(0)
        tokens[b][sample.adapter] = before + sample.length
        bins[b].append(sample)
        used[b] += more
    return in_order(bins, spec)


def fullest(samples: Sequence[Sample], spec: Spec) -> list[Microbatch]:
    """One microbatch after the other: the longest sample that is left, with the set of others that fills it best.

    The sets are found by subset sums: bit n of an int says whether n tokens can be had of an adapter's samples.
    """
    left = sorted(samples, key=lambda each: (-each.length, each))
    bins = []
    while left:
        chosen = {left[0], *best_set(left[1:], left[0], spec)}
        bins.append([sample for sample in left if sample in chosen])
        left = [sample for sample in left if sample not in chosen]
    return in_order(bins, spec)


def best_set(others: list[Sample], first: Sample, spec: Spec) -> list[Sample]:
    """Of ``others`` those that, with ``first``, hold the most tokens in one microbatch."""
    m, U = spec.multiple, spec.units
    # without multiples adapters need not be told apart
    key = (lambda sample: 0) if m == 1 else (lambda sample: sample.adapter)
    classes: dict[int, list[Sample]] = {key(first): []}
    for sample in others:
        classes.setdefault(key(sample), []).append(sample)
    last = [*classes][-1]
    mask = (1 << (min(U * m, sum(each.length for each in [first, *others])) + 1)) - 1
    sums: dict[int, list[int]] = {}  # of each class: what the first 0, 1, 2... of its samples can add up to
    for c, members in classes.items():
        own = sums[c] = [1 << (first.length if c == key(first) else 0)]
        for sample in members:
            own.append((own[-1] | own[-1] << sample.length) & mask)
    # (multiples, tokens, tokens of each class) for the classes so far: the most tokens for each stretch of multiples
    best: list[Filled] = [(0, 0, ())]
    for c in classes:
        if c == last:  # the most that fits beside the others
            best = [(U, total + n, (*each, n)) for used, total, each in best if (n := most(sums[c][-1], (U - used) * m)) >= 0]
        else:
            best = grown(best, sums[c][-1], spec)
    taken: list[Sample] = []
    for c, tokens in zip(classes, max(best)[2], strict=True):
        for i in reversed(range(len(classes[c]))):
            if not sums[c][i] >> tokens & 1:
                taken.append(classes[c][i])
                tokens -= classes[c][i].length
    return taken


STRETCHES = 64  # of the capacity, of each of which one sum is remembered: all where multiples are no shorter


def grown(best: list[Filled], reach: int, spec: Spec) -> list[Filled]:
    """``best`` with one of the sums in ``reach`` added to each."""
    m, U = spec.multiple, spec.units
    wide = -(-U // STRETCHES)
    found: dict[int, Filled] = {}
    for high in range(0, U + 1, wide):
        n = most(reach, high * m)
        u = -(-n // m)
        if n < 0 or (high and u <= high - wide):
            continue  # no sum in this stretch
        for used, total, each in best:
            stretch = -(-(used + u) // wide)
            if used + u <= U and (stretch not in found or total + n > found[stretch][1]):
                found[stretch] = used + u, total + n, (*each, n)
    return [found[stretch] for stretch in sorted(found)]


def most(reach: int, tokens: int) -> int:
    """The largest sum up to ``tokens``, -1 where there is none."""
    return (reach & ((1 << (min(tokens, reach.bit_length()) + 1)) - 1)).bit_length() - 1


def in_order(bins: Sequence[Sequence[Sample]], spec: Spec) -> list[Microbatch]:
    """The fullest first, the one with the least in it last."""
    return sorted((tuple(sorted(each)) for each in bins), key=lambda each: (-load(each, spec), each))


def pack(samples: Sequence[Sample], spec: Spec) -> Packing:
    """Pack samples, at most one batch of each adapter, into as few microbatches as possible.

    Greedily first, two ways, with :func:`lower_bound`. Where that leaves a question and ``spec.seconds`` is not 0,
    ``scipy.optimize.milp`` looks for fewer microbatches, then for less in the last one, each for half of ``spec.seconds`` at
    most; where it stops at that limit, the answer depends on how fast the machine is. ``Packing.why`` says what happened.

    Raises:
      FdoraError: the spec is out of range, a sample does not fit, two are the same, or an adapter has two batches.
    """
    check_spec("jobs.schedule.pack", spec)
    batches: dict[int, int] = {}
    for n, sample in enumerate(samples):
        check_sample("jobs.schedule.pack", f"samples[{n}].length", sample.length, spec)
        if batches.setdefault(sample.adapter, sample.batch) != sample.batch:
            have = f"batches {batches[sample.adapter]} and {sample.batch} of adapter {sample.adapter}"
            raise fail("jobs.schedule.pack", "samples", "of one batch of each adapter", have, "An optimizer step lies between.")
    if len({sample[:3] for sample in samples}) < len(samples):
        raise fail("jobs.schedule.pack", "samples", "distinct", "one of them twice", "Number them: (adapter, batch, number).")
    return solved(greedy(samples, spec), spec)


def greedy(samples: Sequence[Sample], spec: Spec) -> Packing:
    bound = lower_bound(samples, spec)
    bins = min((first_fit(samples, spec), fullest(samples, spec)), key=lambda each: rank(each, spec))
    return Packing(tuple(bins), bound, rank(bins, spec)[1] * spec.multiple, "greedy", "greedy alone was asked for")


def settled(packing: Packing, spec: Spec) -> str:
    """Why nothing better is there to be found; empty where something may be."""
    if len(packing.microbatches) < 2:
        return "one microbatch"
    samples = [sample for each in packing.microbatches for sample in each]
    # the others cannot hold more than U each, and the last one has at least the shortest sample
    floor = load(samples, spec) - (len(packing.microbatches) - 1) * spec.units
    floor = max(floor, min(-(-sample.length // spec.multiple) for sample in samples))
    met = packing.optimal and packing.remainder == floor * spec.multiple
    return "the bounds are met" if met else ""


def solved(packing: Packing, spec: Spec) -> Packing:
    """The same samples, by the solver where it can be of use."""
    why = settled(packing, spec) or ("" if spec.seconds else "no time to solve it")
    if not why and not available():
        why = "scipy is not installed"
    if why:
        return packing._replace(why=why)
    found, bound, why = solve(packing.microbatches, packing.bound, spec)
    if rank(found, spec) < rank(packing.microbatches, spec):
        best = in_order(found, spec)
        return Packing(tuple(best), bound, load(best[-1], spec) * spec.multiple, "exact", why)
    return packing._replace(bound=bound, why=why)
