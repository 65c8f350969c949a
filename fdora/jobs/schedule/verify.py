"""Whether a schedule is right, found out without the code that makes one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from fdora.jobs.schedule.records import Lengths, Microbatch, Spec


def verify(microbatches: Sequence[Microbatch], lengths: Lengths, spec: Spec) -> tuple[str, ...]:
    """One sentence for each fault of these microbatches. There is none if

    - every sample of ``lengths`` is in exactly one microbatch, once, with its length, and nothing else is;
    - no microbatch holds more than the capacity, each adapter's tokens counted as the next multiple;
    - a microbatch has one batch of an adapter, batches of an adapter come in order, and between the last microbatch of one
      and the first of the next lie at least ``depth`` positions.
    """
    wanted = Counter(
        (a, j, i, length)
        for a, batches in enumerate(lengths)
        for j, batch in enumerate(batches)
        for i, length in enumerate(batch)
    )
    found = Counter((s.adapter, s.batch, s.number, s.length) for each in microbatches for s in each)
    faults = [f"sample {sample} is missing" for sample in sorted((wanted - found).elements())]
    faults += [f"sample {sample} is there once too often" for sample in sorted((found - wanted).elements())]
    ends: dict[tuple[int, int], tuple[int, int]] = {}  # of each batch: first and last position
    for p, microbatch in enumerate(microbatches):
        tokens: Counter[int] = Counter()
        batches: dict[int, set[int]] = {}
        for adapter, batch, _, length in microbatch:
            tokens[adapter] += length
            batches.setdefault(adapter, set()).add(batch)
            ends[adapter, batch] = ends.get((adapter, batch), (p, p))[0], p
        padded = sum(n + -n % spec.multiple for n in tokens.values())
        if padded > spec.capacity:
            faults.append(f"microbatch {p} holds {padded} tokens, more than {spec.capacity}")
        for adapter, several in batches.items():
            if len(several) > 1:
                faults.append(f"microbatch {p} holds batches {sorted(several)} of adapter {adapter}")
    ordered = sorted(ends)
    for one, other in pairwise(ordered):
        gap = ends[other][0] - ends[one][1]
        if one[0] == other[0] and gap < spec.depth:
            faults.append(
                f"batch {other[1]} of adapter {one[0]} begins {gap} after batch {one[1]} ends, less than {spec.depth}"
            )
    return tuple(faults)
