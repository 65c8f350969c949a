"""When one process of several fails, the others stop waiting and say why.

A process that raises leaves a note in the store of ``torch.distributed``, and who waits looks for one. gloo's operations block
and cannot be called off: a thread waits for them. A GPU's do not block: it is asked whether it is through before the host goes
on, for behind a message that never comes any copy from the host's memory would block it. Without this, others would wait until
the timeout of the group, 10 minutes for NCCL and 30 for gloo.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from queue import SimpleQueue
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fdora._check import FdoraError, fail
from fdora._torch import default_store

LOOK, ASK = 0.1, 2e-5  # seconds between two looks at the store, and at a GPU, while nothing comes
PATIENCE = 10.0  # seconds for NCCL to call off what is under way; the error comes whether it does or not
NOTE, LENGTH = "failed", 500
REMEDY = "Mend what it says; then call connect, or new_group, again: the groups are not usable any more."


class Waiter:
    """A thread that waits for operations, one after the other. Stuck in one, it holds up no exit."""

    def __init__(self) -> None:
        self.queue: SimpleQueue[Any] = SimpleQueue()
        self.thread: threading.Thread | None = None

    def hand(self, work: Any) -> Future[None]:
        if self.thread is None:
            self.thread = threading.Thread(target=self.run, daemon=True)
            self.thread.start()
        handed = Future[None]()
        self.queue.put((work, handed))
        return handed

    def run(self) -> None:
        for work, handed in iter(self.queue.get, None):
            try:
                work.wait()
                handed.set_result(None)
            except RuntimeError as error:
                handed.set_exception(error)


class Watch:
    """For the processes of one group, whose name they share. None: one process, which waits for nobody."""

    def __init__(self, fn: str, group: Any) -> None:
        self.fn, self.group = fn, group
        self.store = None if group is None else dist.PrefixStore(f"fdora.jobs.loop/{group.group_name}", default_store())
        self.waiter = Waiter()

    def look(self, error: RuntimeError | None = None) -> None:
        """Raises if another process has failed; ``error``: what a broken connection said, if one is broken."""
        note = None
        try:
            if self.store is not None and self.store.check([NOTE]):
                note = self.store.get(NOTE).decode()
        except RuntimeError as gone:  # the process that held the store
            error = gone
        if note is None and error is not None:
            note = f"one that is gone: {str(error)[:LENGTH]}"
        if note is not None:
            raise Elsewhere(str(fail(self.fn, "group", "of processes that all go on", note, REMEDY))) from error

    def note(self, error: BaseException) -> None:
        """For the others, unless the failure is theirs."""
        if self.store is None or isinstance(error, Elsewhere):
            return
        place, count = dist.get_rank(self.group), dist.get_world_size(self.group)
        text = f"process {place} of {count}, which failed: {type(error).__name__}: {error}"
        with suppress(RuntimeError):  # nobody is left who could read it
            self.store.set(NOTE, text[:LENGTH])

    def wait(self, work: Any, t: Tensor) -> None:
        """For an operation on t."""
        if work is None:
            return
        if t.is_cuda:
            self.poll(work.is_completed)
            work.wait()  # the stream, too; raises what went wrong
        else:
            self.finish(self.waiter.hand(work))

    def finish(self, handed: Future[None]) -> None:
        while not wait([handed], LOOK).done:
            self.look()
        error: Any = handed.exception()
        if error:
            self.look(error)

    def idle(self, device: torch.device) -> None:
        """Until the GPU has done what it was given: then the host may block on it."""
        if device.type != "cuda" or self.store is None:
            return
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(device))
        self.poll(event.query)

    def poll(self, through: Callable[[], bool]) -> None:
        last = time.monotonic()
        while not through():
            time.sleep(ASK)
            if time.monotonic() > last + LOOK:
                last = time.monotonic()
                self.look()


def call_off(groups: Sequence[Any]) -> None:
    """All at once: NCCL gives memory back in it, and so waits for messages of groups that are not called off yet."""
    threads = [threading.Thread(target=group.abort, daemon=True) for group in groups]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE)


def on_gpus(group: Any) -> bool:
    """NCCL's, perhaps beside gloo for a CPU's tensors."""
    return torch.cuda.is_available() and "nccl" in dist.get_backend_config(group)


class Elsewhere(FdoraError):
    """What failed was another process."""


@contextmanager
def watching(fn: str, group: Any, groups: Sequence[Any] = ()) -> Iterator[Watch]:
    """What fails inside ends the others' waiting. ``groups``: those of a GPU, whose operations are called off then."""
    watch = Watch(fn, group)
    watch.look()
    try:
        yield watch
    except BaseException as error:
        watch.note(error)
        call_off([each for each in groups if each is not None and on_gpus(each)])
        raise
    finally:
        watch.waiter.queue.put(None)
