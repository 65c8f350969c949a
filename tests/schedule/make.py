"""Instances and a judge that shares nothing with the package."""

import random

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from fdora.jobs.schedule import Spec

few = settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
# tokens of a sample: log-normal, by median and spread, of the kinds of text that are usually summarised: short, even, long, mixed
KINDS = ((490, 0.7), (800, 0.35), (1600, 0.3), (880, 0.55))


def drawn(adapters, batches, samples, capacity=6144, seed=0):
    from math import log

    rng = random.Random(seed)
    kinds = [KINDS[a % len(KINDS)] for a in range(adapters)]
    length = lambda m, spread: min(capacity, max(16, round(rng.lognormvariate(log(m), spread))))  # noqa: E731
    return [[[length(*kind) for _ in range(samples)] for _ in range(batches)] for kind in kinds]


@st.composite
def instances(draw, exact=False):
    """Lengths 1 to what fits, 1 to 6 adapters, depth 1 to 8, ragged."""
    multiple = draw(st.sampled_from((1, 1, 3, 16)))
    capacity = multiple * draw(st.integers(1, 12)) + draw(st.integers(0, multiple - 1))
    most = capacity // multiple * multiple
    batch = st.lists(st.integers(1, most), min_size=1, max_size=4 if exact else 7)
    adapters = draw(st.lists(st.lists(batch, max_size=2 if exact else 5), max_size=3 if exact else 6))
    return adapters, Spec(capacity, draw(st.integers(1, 8)), multiple, 20.0 if exact else 0)


def judged(microbatches, lengths, spec):
    """Faults, counted by brute force."""
    faults = 0
    left = [(a, j, i, n) for a, batches in enumerate(lengths) for j, batch in enumerate(batches) for i, n in enumerate(batch)]
    for microbatch in microbatches:
        for sample in microbatch:
            if tuple(sample) in left:
                left.remove(tuple(sample))
            else:
                faults += 1
        total = 0
        for a in range(len(lengths)):
            tokens = sum(s.length for s in microbatch if s.adapter == a)
            while tokens % spec.multiple:
                tokens += 1
            total += tokens
        faults += total > spec.capacity
    for p, one in enumerate(microbatches):
        for q, other in enumerate(microbatches):
            for s in one:
                for t in other:
                    if s.adapter == t.adapter and s.batch < t.batch and q - p < spec.depth:
                        faults += 1
    return faults + len(left)
