"""What an engine needs to know of a schedule while it runs one."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from fdora._check import check_positive, fail
from fdora.jobs.schedule.order import Batch, places
from fdora.jobs.schedule.records import Microbatch, tokens_of


def optimizer_steps(microbatches: Sequence[Microbatch]) -> tuple[tuple[Batch, ...], ...]:
    """For each microbatch the (adapter, batch) pairs that end with it: once its backward is done on a stage, these adapters'
    optimizers step there.

    Count backwards, not forwards: a stage that counts forwards steps before the gradients of those in flight have come.
    """
    steps: list[list[Batch]] = [[] for _ in microbatches]
    for batch, found in sorted(places(microbatches).items()):
        steps[found[-1]].append(batch)
    return tuple(map(tuple, steps))


def segment_ends(microbatch: Microbatch, adapters: int, *, multiple: int = 1) -> tuple[int, ...]:
    """Where each adapter's tokens end if the samples are concatenated: the offsets of ``torch.nn.functional.grouped_mm``.

    Samples of a microbatch are sorted by adapter already; an adapter without any ends where the one before it does. With
    ``multiple`` each adapter's tokens are followed by what is missing to the next multiple.

    Raises:
      FdoraError: a sample is of an adapter that is not among the first ``adapters``, or ``multiple`` is less than 1.
    """
    check_positive("jobs.schedule.segment_ends", "multiple", multiple, "1 adds nothing.")
    tokens = tokens_of(microbatch)
    for adapter in tokens:
        if not 0 <= adapter < adapters:
            raise fail("jobs.schedule.segment_ends", "adapters", f"more than {adapter}", adapters, "Count all adapters.")
    each = (tokens.get(adapter, 0) for adapter in range(adapters))
    return tuple(accumulate(n + -n % multiple for n in each))
