"""Ctrl-C that cannot get lost. Python raises KeyboardInterrupt wherever it happens to be; an import, a finaliser or a callback
may swallow it. So the signal only leaves a mark, and the demo looks for it between its steps."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import TypeVar

T = TypeVar("T")

_marked = False


@contextmanager
def on_ctrl_c() -> Iterator[None]:
    """Inside the block a Ctrl-C makes the next :func:`check` raise KeyboardInterrupt, and a second one raises it at once.

    Afterwards Python's own handler is back, and a Ctrl-C that no check has seen is raised. A handler that is not Python's own
    stays: a shell ignores the signal for what it runs in the background, and a caller may have one.
    """
    global _marked
    _marked = False
    main = threading.current_thread() is threading.main_thread()  # no other thread may set a handler
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _mark)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    check()


def check() -> None:
    """Call it between steps."""
    if _marked:
        raise KeyboardInterrupt


def steps(items: Iterable[T]) -> Iterator[T]:
    """The items, with a :func:`check` before each."""
    for item in items:
        check()
        yield item


def _mark(number: int, frame: FrameType | None) -> None:
    global _marked
    check()
    _marked = True
    os.write(2, b"\nStopping after this step; Ctrl-C again stops at once.\n")  # print is not safe inside a signal handler
