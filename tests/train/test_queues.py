"""No order of a pipeline's messages lets NCCL wait for ever: run by a model of its queues, on a CPU."""

import pytest

from tests.train.queues import Meet, Message, Work, recorded, stuck

DOWN, UP, BACK = Message("a", 0, 1), Message("b", 1, 0), Message("a", 1, 0)
MADE = [[DOWN, Work(1), UP, Work(2)]] * 2  # communicators, and nothing under way


@pytest.mark.parametrize("whole", [False, True], ids=["lazy", "eager"])
@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_every_process_gets_through(count, chunks, whole):
    for microbatches in (1, 2, 5, 12):
        assert not stuck(recorded(count, chunks, microbatches), whole)
    assert not stuck(recorded(count, chunks, 11, empty={2, 3, 7}), whole)


def test_the_model_of_queues():
    after = lambda *steps: [[*made, *own] for made, own in zip(MADE, steps, strict=True)]  # noqa: E731
    assert not stuck(after([DOWN, UP], [UP, DOWN]))  # two communicators: their queues do not wait for each other
    assert stuck(after([DOWN, BACK], [BACK, DOWN])) == {0: DOWN, 1: BACK}  # in one they do
    assert stuck(after([DOWN, Work(3), UP], [UP, Work(4), DOWN])) == {0: Work(3), 1: Work(4)}  # so does the host, here
    assert stuck([[DOWN, UP], [UP, DOWN]]) == {0: DOWN, 1: UP}  # communicators that are made in two orders
    ring = [Message("a", n, (n + 1) % 3) for n in range(3)]
    made = [[ring[0], Work(0), ring[2], Work(1)], [ring[0], Work(2), ring[1], Work(3)], [ring[1], Work(4), ring[2], Work(5)]]
    around = [[*made[n], ring[n - 1], ring[n]] for n in range(3)]
    assert not stuck(around) and len(stuck(around, whole=True)) == 3
    assert not stuck([[Work("s"), Meet("s")]] * 2) and stuck([[Work("s"), Meet("s")], []]) == {0: Meet("s")}
