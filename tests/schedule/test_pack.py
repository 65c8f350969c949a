"""Packings against all there are, the bound, and what the solver is asked."""

import random
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fdora.jobs.schedule import Sample, Spec, pack, schedule, whole
from fdora.jobs.schedule.pack import first_fit, fullest, greedy, lower_bound, solve
from tests.schedule.make import drawn, few

PACKING = sys.modules["fdora.jobs.schedule.pack"]  # the function has the name of the module


def partitions(samples):
    if not samples:
        yield []
        return
    for rest in partitions(samples[1:]):
        yield [[samples[0]], *rest]
        for i in range(len(rest)):
            yield [*rest[:i], [samples[0], *rest[i]], *rest[i + 1 :]]


def takes(samples, spec):
    """Multiples, counted one token at a time."""
    total = 0
    for adapter in {s.adapter for s in samples}:
        tokens = sum(s.length for s in samples if s.adapter == adapter)
        total += len(range(0, tokens, spec.multiple))
    return total


def best(samples, spec):
    """(fewest microbatches, then multiples of the least of them), of all partitions."""
    every = ([takes(each, spec) for each in found] for found in partitions(samples))
    return min((len(loads), min(loads)) for loads in every if max(loads) <= spec.units)


@st.composite
def rounds(draw):
    multiple = draw(st.sampled_from((1, 4)))
    spec = Spec(multiple * draw(st.integers(2, 9)), 1, multiple, 60.0)
    lengths = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(1, spec.units * multiple)), min_size=1, max_size=7))
    return [Sample(a, 5 + a, i, n) for i, (a, n) in enumerate(lengths)], spec


@few
@given(rounds())
def test_greedy_lies_between_the_bound_and_what_is_right(case):
    samples, spec = case
    fewest, least = best(samples, spec)
    assert lower_bound(samples, spec) <= fewest
    for way in (first_fit, fullest):
        found = way(samples, spec)
        assert (
            sorted(s for each in found for s in each) == sorted(samples)
            and max(takes(each, spec) for each in found) <= spec.units
        )
        assert (len(found), takes(found[-1], spec)) >= (fewest, least)
    assert greedy(samples, spec).bound == lower_bound(samples, spec)


@few
@given(rounds())
def test_the_solver_finds_the_best(case):
    pytest.importorskip("scipy", reason="the exact packing is scipy's; `make test` installs it")
    samples, spec = case
    found = pack(samples, spec)
    assert (len(found.microbatches), found.remainder) == (best(samples, spec)[0], best(samples, spec)[1] * spec.multiple)
    assert "limit" not in found.why and sorted(s for each in found.microbatches for s in each) == sorted(samples)
    assert pack(samples, spec) == found


def test_what_greed_misses():
    """Four of 55, from the sums alone; both greedy ways need a fifth."""
    pytest.importorskip("scipy", reason="the exact packing is scipy's; `make test` installs it")
    samples, spec = hard()
    plain, found = pack(samples, spec._replace(seconds=0)), pack(samples, spec)
    assert (plain.method, plain.why, plain.optimal) == ("greedy", "no time to solve it", False)
    assert (found.method, found.optimal, len(found.microbatches)) == ("exact", True, len(plain.microbatches) - 1)
    assert "fewest: proven" in found.why


@few
@given(rounds())
def test_the_solver_alone_finds_the_best(case):
    """From one microbatch for each sample: greed has not helped."""
    pytest.importorskip("scipy", reason="the exact packing is scipy's; `make test` installs it")
    samples, spec = case
    found, bound, why = solve([(sample,) for sample in samples], 1, spec)
    loads = [takes(each, spec) for each in found]
    assert (len(loads), min(loads)) == best(samples, spec) and max(loads) <= spec.units and "limit" not in why
    assert bound == (len(loads) if len(samples) > 1 else 1) and sorted(s for each in found for s in each) == sorted(samples)


def hard():
    """An instance on which both greedy ways take one microbatch too many: made of full ones, looked for by seed."""
    spec = Spec(40, 1, 1, 60.0)
    for seed in range(1000):
        rng = random.Random(seed)
        lengths = []
        for _ in range(4):
            one = rng.randint(8, 20)
            two = rng.randint(8, 30 - one)
            lengths += [one, two, 40 - one - two]
        samples = [Sample(0, 0, i, n) for i, n in enumerate(lengths)]
        if len(greedy(samples, spec).microbatches) > 4:
            return samples, spec
    raise AssertionError("greed misses nothing")


def test_the_bound_of_large_samples():
    """Five just above half fit in no fewer than five, whatever their sum; beside 7 of 10 fits no 4."""
    samples = [Sample(0, 0, i, n) for i, n in enumerate([6, 6, 6, 6, 6])]
    assert lower_bound(samples, Spec(10)) == 5
    assert lower_bound([Sample(0, 0, i, n) for i, n in enumerate([7, 7, 4, 4])], Spec(10)) == 3
    assert lower_bound([Sample(0, 0, i, n) for i, n in enumerate([8, 8, 8, 3])], Spec(10)) == 4
    assert lower_bound([Sample(a, 0, 0, 1) for a in range(5)], Spec(8, 1, 4)) == 3  # each takes a multiple of its own


def test_a_bound_that_the_solver_raises():
    """Of 4, 4, 4, 3, 3 no two microbatches of 9 can be made, which the sum allows."""
    pytest.importorskip("scipy", reason="the exact packing is scipy's; `make test` installs it")
    samples = [Sample(0, 0, i, n) for i, n in enumerate([4, 4, 4, 3, 3])]
    spec = Spec(9, 1, 1, 60.0)
    assert lower_bound(samples, spec) == 2 and best(samples, spec)[0] == 3
    found = pack(samples, spec)
    assert found.bound == 3 and found.optimal and found.why.startswith("fewest: proven")


def test_without_scipy_and_without_time(monkeypatch):
    samples, spec = hard()
    lengths = [[[s.length for s in samples]]]
    assert {p.why for p in schedule(lengths, spec._replace(seconds=0)).packings} == {"no time to solve it"}
    monkeypatch.setattr(PACKING, "find_spec", lambda name: None)
    monkeypatch.setattr(PACKING, "solve", None)
    found = pack(samples, spec)
    assert (found.method, found.why) == ("greedy", "scipy is not installed") and not found.optimal
    (packed,) = schedule(lengths, spec).packings
    assert (packed.why, packed.microbatches, packed.bound) == ("scipy is not installed", 5, 4)


def test_an_answer_in_floating_point_is_checked(monkeypatch):
    """What the solver returns is taken only if every sample is there once and nothing is too full."""
    optimize = pytest.importorskip("scipy.optimize", reason="the exact packing is scipy's; `make test` installs it")
    import numpy as np

    class Answer:
        status, x = 0, None

    def wrong(cost, **rest):
        Answer.x = np.zeros(len(cost))
        return Answer

    samples, spec = hard()
    monkeypatch.setattr(optimize, "milp", wrong)
    found = pack(samples, spec)
    assert found.method == "greedy" and not found.optimal and found.why.count("stopped at its limit") == 2


def test_time_goes_where_most_is_to_be_had(monkeypatch):
    """Budget of all packings together, each with its share of what is left; none after the end."""
    now, asked = [0.0], []

    class Clock:
        monotonic = staticmethod(lambda: now[0])

    def solve(bins, bound, spec):
        asked.append((len(bins) - bound, spec.seconds))
        now[0] += spec.seconds
        return bins, bound, "asked"

    monkeypatch.setattr(whole, "time", Clock)
    monkeypatch.setattr(PACKING, "solve", solve)
    monkeypatch.setattr(PACKING, "available", lambda: True)
    easy = [[s.length for s in hard()[0]][:-1]]
    found = schedule([[*easy, *easy, *easy, [s.length for s in hard()[0]]]], hard()[1]._replace(seconds=2.5))
    assert [seconds for _, seconds in asked] == [1.0, 1.0, 0.5] and asked[0][0] == 1
    assert [p.why for p in found.packings].count("no time to solve it") == 1 and found.packings[-1].why == "asked"


@pytest.mark.parametrize("cores", [1, 2])
def test_processes(monkeypatch, cores):
    """Two solve what one solves; never more than there are cores."""
    pytest.importorskip("scipy", reason="the exact packing is scipy's; `make test` installs it")
    pools = []

    class Pool(whole.ProcessPoolExecutor):
        def __init__(self, workers, context):
            pools.append(workers)
            super().__init__(workers, context)

    monkeypatch.setattr(whole, "ProcessPoolExecutor", Pool)
    monkeypatch.setattr(whole, "cores", lambda: cores)
    monkeypatch.setattr(whole, "EACH", 60.0)
    lengths = [[[s.length for s in hard()[0]]] * 3]
    found = schedule(lengths, Spec(40, 1, 1, 60.0, workers=8))
    assert {(p.method, p.microbatches) for p in found.packings} == {("exact", 4)} and pools == [2] * (cores == 2)


def test_sums_fill_a_microbatch():
    """First-fit by length opens with 6 and 4; 6, 2, 2 and 4, 3, 3 are full."""
    samples = [Sample(a, 0, i, n) for a, group in enumerate(([6, 2, 3], [4, 3, 2])) for i, n in enumerate(group)]
    assert [sum(s.length for s in each) for each in fullest(samples, Spec(10))] == [10, 10]
    samples = [Sample(*each) for each in ((0, 0, 0, 6), (0, 0, 1, 3), (1, 0, 0, 4), (1, 0, 1, 2), (2, 0, 0, 1))]
    assert [sum(s.length for s in each) for each in fullest(samples, Spec(10, 1, 2))] == [10, 6]
    shared = [Sample(0, 0, i, 2) for i in range(3)]
    assert first_fit(shared, Spec(8, 1, 4)) == [tuple(shared)]  # 6 tokens are two multiples, not three
    for a in drawn(3, 1, 16, seed=4):
        samples = [Sample(0, 0, i, n) for i, n in enumerate(a[0])]
        assert sum(s.length for s in fullest(samples, Spec(6144))[0]) >= sum(
            s.length for s in first_fit(samples, Spec(6144))[0]
        )
