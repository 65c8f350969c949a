"""What a schedule is made of, as values, and as JSON both ways."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from fdora._check import check_positive, fail, is_number

Lengths = Sequence[Sequence[Sequence[int]]]  # [adapter][batch][sample]: tokens


class Spec(NamedTuple):
    """What a microbatch may hold, and how long its packing may take."""

    capacity: int  # tokens, with what is added to reach ``multiple``
    depth: int = 1  # microbatches in flight: the number of stages under 1F1B, see ``depth_of``
    multiple: int = 1  # the tokens of each adapter in a microbatch count as the next multiple
    seconds: float = 10.0  # in which packings are solved exactly, all of them together; 0 solves none
    workers: int = 1  # processes that solve; never more than there are cores

    @property
    def units(self) -> int:
        """Capacity in multiples."""
        return self.capacity // self.multiple


class Sample(NamedTuple):
    """One sequence: ``lengths[adapter][batch][number] == length``."""

    adapter: int
    batch: int  # the optimizer steps once for each batch of an adapter
    number: int
    length: int


Microbatch = tuple[Sample, ...]  # sorted; without samples it is a no-op


class Packing(NamedTuple):
    """The microbatches of samples that are trained side by side; the last one holds the fewest tokens."""

    microbatches: tuple[Microbatch, ...]
    bound: int  # no packing has fewer microbatches
    remainder: int  # tokens of the last one, multiples counted
    method: str  # "greedy" or "exact": which gave these microbatches
    why: str  # why nothing better was looked for, or what the solver said

    @property
    def optimal(self) -> bool:
        """Whether fewer microbatches are known to be impossible."""
        return len(self.microbatches) == self.bound


class Packed(NamedTuple):
    """How one packing of a schedule was found, without its microbatches."""

    adapters: tuple[int, ...]
    microbatches: int
    bound: int
    remainder: int
    method: str
    why: str


class Schedule(NamedTuple):
    """Microbatches in the order in which they enter the pipeline."""

    spec: Spec
    groups: tuple[tuple[int, ...], ...]  # adapters that share microbatches by plan; a merge may mix others in
    microbatches: tuple[Microbatch, ...]
    packings: tuple[Packed, ...]  # before the merge

    @property
    def tokens(self) -> int:
        return sum(sample.length for each in self.microbatches for sample in each)

    @property
    def noops(self) -> int:
        return sum(not each for each in self.microbatches)

    @property
    def fill(self) -> float:
        """Tokens over the capacity of all microbatches, no-ops among them; 1 for a schedule of nothing."""
        room = len(self.microbatches) * self.spec.capacity
        return self.tokens / room if room else 1.0

    @property
    def bound(self) -> int:
        """No schedule of these samples has fewer microbatches: by what one can hold, and by what each adapter waits."""
        m, U = self.spec.multiple, self.spec.units
        tokens = Counter[tuple[int, int]]()
        for each in self.microbatches:
            for sample in each:
                tokens[sample[:2]] += sample.length
        chains: dict[int, int] = {}  # from the first microbatch of an adapter to its last
        for (adapter, _), n in tokens.items():
            between = self.spec.depth - 1 if adapter in chains else 0
            chains[adapter] = chains.get(adapter, 0) + between + -(-n // (U * m))
        return max([-(-self.tokens // (U * m)), *chains.values()])


def tokens_of(samples: Iterable[Sample]) -> dict[int, int]:
    """Of each adapter that has any."""
    tokens: dict[int, int] = {}
    for sample in samples:
        tokens[sample.adapter] = tokens.get(sample.adapter, 0) + sample.length
    return tokens


def load(samples: Iterable[Sample], spec: Spec) -> int:
    """Multiples that a microbatch of these samples takes: sum over adapters of ceil(tokens / multiple)."""
    return sum(-(-n // spec.multiple) for n in tokens_of(samples).values())


def check_spec(fn: str, spec: Spec) -> None:
    if not isinstance(spec, Spec):
        raise fail(fn, "spec", "a Spec", f"a {type(spec).__name__}", "Write Spec(capacity=6144, depth=4).")
    for arg in ("capacity", "depth", "multiple", "workers"):
        value, remedy = getattr(spec, arg), "It counts tokens, microbatches or processes."
        check_positive(fn, f"spec.{arg}", value, remedy)
        if value >= 1 << 31:
            raise fail(fn, f"spec.{arg}", "below 2^31", value, remedy)
    if spec.multiple > spec.capacity:
        raise fail(fn, "spec.multiple", f"at most the capacity, {spec.capacity}", spec.multiple, "Nothing would fit.")
    if not is_number(spec.seconds) or not 0 <= spec.seconds < float("inf"):
        raise fail(fn, "spec.seconds", "a finite number of seconds, 0 or more", repr(spec.seconds), "0 solves nothing exactly.")


def check_sample(fn: str, arg: str, length: Any, spec: Spec) -> None:
    check_positive(fn, arg, length, "It is the number of tokens of one sample.")
    if -(-length // spec.multiple) > spec.units:
        want = f"at most {spec.units * spec.multiple} tokens, what one microbatch holds"
        raise fail(fn, arg, want, length, "Truncate or split the sample, or raise the capacity.")


def check_lengths(fn: str, lengths: Lengths, spec: Spec) -> None:
    check_list(fn, "lengths", lengths)
    for a, batches in enumerate(lengths):
        check_list(fn, f"lengths[{a}]", batches)
        for j, batch in enumerate(batches):
            check_list(fn, f"lengths[{a}][{j}]", batch)
            if not len(batch):
                raise fail(fn, f"lengths[{a}][{j}]", "a batch with samples", "none", "Leave the batch out: it has no gradient.")
            for i, length in enumerate(batch):
                check_sample(fn, f"lengths[{a}][{j}][{i}]", length, spec)


def check_list(fn: str, arg: str, value: Any) -> None:
    if not isinstance(value, Collection) or isinstance(value, (str, Mapping)):
        raise fail(fn, arg, "a list", f"a {type(value).__name__}", "Write lengths[adapter][batch][sample], numbers of tokens.")


def to_json(schedule: Schedule) -> str:
    """A schedule as JSON, with a line for each microbatch: ``[[adapter, batch, number, length], ...]``."""
    head = {"spec": schedule.spec._asdict(), "groups": schedule.groups, "packings": [p._asdict() for p in schedule.packings]}
    lines = ",\n".join(json.dumps(each) for each in schedule.microbatches)
    return f'{json.dumps(head)[:-1]}, "microbatches": [\n{lines}\n]}}\n'


def sample_of(numbers: Any) -> Sample:
    sample = Sample(*numbers)
    if any(type(each) is not int for each in sample):
        raise TypeError(f"{numbers} for four integers")
    return sample


def from_json(text: str) -> Schedule:
    """What :func:`to_json` wrote, equal to what it was given.

    Raises:
      FdoraError: the text is no such JSON.
    """
    try:
        found = json.loads(text)
        groups = tuple(tuple(group) for group in found["groups"])
        microbatches = tuple(tuple(map(sample_of, each)) for each in found["microbatches"])
        packings = tuple(Packed(**each | {"adapters": tuple(each["adapters"])}) for each in found["packings"])
        spec = Spec(**found["spec"])
    except (ValueError, TypeError, KeyError) as error:
        raise fail(
            "jobs.schedule.from_json", "text", "JSON of to_json", f"{type(error).__name__}: {error}", "Write it again."
        ) from None
    check_spec("jobs.schedule.from_json", spec)
    return Schedule(spec, groups, microbatches, packings)
