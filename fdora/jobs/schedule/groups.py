"""Which adapters share microbatches.

Together they fill them better; apart, the batches of one group fill the time in which another waits for its optimizer step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fdora.jobs.schedule.merge import merge
from fdora.jobs.schedule.order import insert_noops
from fdora.jobs.schedule.pack import greedy
from fdora.jobs.schedule.records import Lengths, Microbatch, Packing, Sample, Spec, check_lengths, check_spec

EVERY = 5  # adapters up to which every way to group them is tried: there are 52 for five, 203 for six
ROUNDS = 6  # of which the trial schedules are made

Groups = tuple[tuple[int, ...], ...]


def rounds_of(groups: Groups, lengths: Lengths) -> list[tuple[int, list[Sample]]]:
    """(group, samples that are packed together), in the order of training.

    A group has as many rounds as its longest adapter has batches. Batches of the others, and rounds of the groups, are spread
    evenly: who has fewer is not through long before the rest.
    """
    found = []
    for g, group in enumerate(groups):
        rounds = max((len(lengths[a]) for a in group), default=0)
        for k in range(rounds):
            batches = ((a, k * len(lengths[a]) // rounds, (k + 1) * len(lengths[a]) // rounds) for a in group)
            samples = [Sample(a, j, i, n) for a, j, after in batches if after > j for i, n in enumerate(lengths[a][j])]
            found.append(((2 * k + 1) / (2 * rounds), g, samples))
    return [(g, samples) for _, g, samples in sorted(found, key=lambda each: each[:2])]


def line_up(packings: Sequence[Packing], spec: Spec) -> tuple[Microbatch, ...]:
    """Packings one after the other, merged where that helps, with gaps."""
    row = tuple(each for packing in packings for each in packing.microbatches)
    ways = insert_noops(merge(row, spec), spec), insert_noops(row, spec)
    return min(ways, key=len)


def plan_groups(lengths: Lengths, spec: Spec) -> Groups:
    """The groups whose schedule has the fewest microbatches and no-ops, packed greedily, by the first batches of each adapter.

    Up to five adapters every way to group them is tried. For more: sorted by their mean length, dealt to and fro into 1, 2,
    3... groups, so that long samples meet short ones. Of equals the one with more groups wins: fewer gaps hang by one group.

    Args:
      lengths: ``lengths[adapter][batch][sample]``, in tokens.

    Raises:
      FdoraError: the spec is out of range, a sample does not fit, a batch is empty.
    """
    check_spec("jobs.schedule.plan_groups", spec)
    check_lengths("jobs.schedule.plan_groups", lengths, spec)
    longest = max(map(len, lengths), default=0)
    first = [batches[: -(-len(batches) * ROUNDS // max(ROUNDS, longest))] for batches in lengths]
    packed: dict[tuple[Sample, ...], Packing] = {}

    def cost(groups: Groups) -> tuple[int, int, Groups]:
        packings = []
        for _, samples in rounds_of(groups, first):
            key = tuple(samples)
            packed[key] = packed[key] if key in packed else greedy(samples, spec)
            packings.append(packed[key])
        return len(line_up(packings, spec)), -len(groups), groups

    return min(ways_to_group(lengths), key=cost)


def ways_to_group(lengths: Lengths) -> Iterator[Groups]:
    adapters = [a for a, batches in enumerate(lengths) if batches]
    if len(adapters) <= EVERY:
        yield from partitions(adapters)
        return
    tokens = {a: [n for batch in lengths[a] for n in batch] for a in adapters}
    ranked = sorted(adapters, key=lambda a: (-sum(tokens[a]) / len(tokens[a]), a))
    for count in range(1, len(adapters) + 1):
        there_and_back = [*range(count), *reversed(range(count))]
        groups: list[list[int]] = [[] for _ in range(count)]
        for n, a in enumerate(ranked):
            groups[there_and_back[n % (2 * count)]].append(a)
        yield tuple(tuple(sorted(group)) for group in groups)


def partitions(adapters: list[int]) -> Iterator[Groups]:
    """Every way to divide them, groups in the order of their first member."""
    if not adapters:
        yield ()
        return
    *others, last = adapters
    for groups in partitions(others):
        for g in range(len(groups)):
            yield (*groups[:g], (*groups[g], last), *groups[g + 1 :])
        yield (*groups, (last,))
