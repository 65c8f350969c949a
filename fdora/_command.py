"""What the commands share. Each is a module whose ``main(argv)`` returns the exit status, with its docstring as help:

0    done, and the answer is yes
1    done, and the answer is no: doctor found a problem, no plan fits
2    a mistake in the command line or its files, which is one sentence on stderr
141  the reader of a pipe has left, as ``| head`` does
"""

from __future__ import annotations

import os
import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import TextIOWrapper
from typing import Any, TypeVar

from fdora._check import FdoraError, fail

T = TypeVar("T")


def parser_of(name: str, doc: str | None, options: Mapping[str, tuple[Any, ...]] | None = None) -> ArgumentParser:
    """``options``: name -> default, or the type where there is none; what it is; and what else argparse may be told."""
    parser = ArgumentParser(f"fdora {name}".strip(), description=doc, formatter_class=RawDescriptionHelpFormatter)
    for option, (default, said, *more) in (options or {}).items():
        known = {"type": default, "help": said}
        if not isinstance(default, type):
            known = {"type": type(default), "default": default, "help": f"{said} (default: %(default)s)"}
        parser.add_argument(option, **(known | dict(*more)))
    return parser


def align(rows: Sequence[tuple[str, ...]], words: Container[int]) -> list[str]:
    """The lines of a table. Columns that are no words are numbers."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(c.ljust(w) if i in words else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))).rstrip()
        for row in rows
    ]


@contextmanager
def mistakes(parser: ArgumentParser) -> Iterator[None]:
    """End the program over what somebody asked wrongly, or does not read. A defect stays a traceback."""
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names that the terminal has no letters for
    try:
        yield
        sys.stdout.flush()
    except FdoraError as error:
        parser.exit(2, f"{error}\n")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what Python would still write at its end
        parser.exit(141)


@contextmanager
def using(fn: str, arg: str, want: str, remedy: str = "Check the path.") -> Iterator[None]:
    """Say of a file that it is none, or cannot be written. What parsers say, and matplotlib of a suffix that it does not know,
    are ValueErrors."""
    try:
        yield
    except FdoraError:
        raise
    except (OSError, ValueError, RecursionError) as error:
        raise fail(fn, arg, want, f"{type(error).__name__}: {one_line(error)}", remedy) from None


def one_line(error: Exception) -> str:
    return " ".join(str(error).split())


WRITTEN = "a file that can be written"


def progress(items: Iterable[T], name: str) -> Iterable[T]:
    """A bar with the time left on stderr, where that is a terminal."""
    from tqdm import tqdm

    return tqdm(items, name, disable=None, leave=False)
