"""The host does not go on behind a message on a GPU that never comes."""

import threading
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from fdora import FdoraError
from fdora.jobs.loop import watch


def watched():
    found = watch.Watch("jobs.loop.run_pipeline", None)
    found.store = dist.HashStore()
    return found


def test_it_asks_until_it_is_through_and_only_then_lets_the_stream_wait():
    answers, waited = [True, False, False], []
    work = SimpleNamespace(is_completed=lambda: answers.pop(), wait=lambda: waited.append(not answers))
    watched().wait(work, SimpleNamespace(is_cuda=True))
    assert waited == [True]


def test_a_process_that_failed_ends_it(monkeypatch):
    monkeypatch.setattr(watch, "LOOK", 0)
    mine, work = watched(), SimpleNamespace(is_completed=lambda: False, wait=lambda: pytest.fail("the stream is blocked"))
    mine.store.set(watch.NOTE, "process 1 of 2, which failed: ArithmeticError: all of it is lost")
    with pytest.raises(FdoraError, match="all of it is lost"):
        mine.wait(work, SimpleNamespace(is_cuda=True))


def test_groups_are_called_off_at_once(monkeypatch):
    """Each abort ends when all have begun, as NCCL's may; so whoever waits for one before would wait for ever."""
    together, started, ended = threading.Barrier(3), [], []

    class Thread(threading.Thread):
        def start(self):
            started.append(self)
            super().start()

        def join(self, timeout=None):
            assert len(started) == 3 and timeout == watch.PATIENCE
            super().join()

    def abort(n):
        assert threading.current_thread() in started
        ended.append((together.wait(), n))

    monkeypatch.setattr(watch, "threading", SimpleNamespace(Thread=Thread))
    watch.call_off([SimpleNamespace(abort=lambda n=n: abort(n)) for n in range(3)])
    assert sorted(n for _, n in ended) == [0, 1, 2]
