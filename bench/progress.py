"""How far a command is, on stderr: one line that is written anew, or a line per case where stderr is no terminal."""

from __future__ import annotations

import sys
import time

WIDTH = 24


class Progress:
    """``[######..................] 3 of 12 cases, 41 s, about 123 s to go``; call :meth:`done` after each case."""

    def __init__(self, cases: int):
        self.cases, self.finished, self.start = cases, 0, time.perf_counter()

    def done(self) -> None:
        self.finished += 1
        k, n, seconds = self.finished, self.cases, time.perf_counter() - self.start
        rest = f"about {seconds * (n - k) / k:.0f} s to go" if k < n else "done"
        bar = ("#" * (WIDTH * k // n)).ljust(WIDTH, ".")
        print(f"[{bar}] {k} of {n} cases, {seconds:.0f} s, {rest}", file=sys.stderr, flush=True, end=self.end())

    def end(self) -> str:
        return "\r" if sys.stderr.isatty() and self.finished < self.cases else "\n"
