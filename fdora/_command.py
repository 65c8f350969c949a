"""What the commands share: the module's docstring as help; a mistake is one sentence on stderr and exit status 2."""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Iterator
from contextlib import contextmanager

from fdora._check import FdoraError, fail


def parser_of(module: str, doc: str | None) -> ArgumentParser:
    return ArgumentParser(f"python -m {module}", description=doc, formatter_class=RawDescriptionHelpFormatter)


@contextmanager
def mistakes(parser: ArgumentParser) -> Iterator[None]:
    """End the program over what somebody asked wrongly. A defect stays a traceback."""
    try:
        yield
    except FdoraError as error:
        parser.exit(2, f"{error}\n")


@contextmanager
def writing(fn: str, arg: str, remedy: str = "Check the path.") -> Iterator[None]:
    """Say of a place that it cannot be written. matplotlib's error of a suffix that it does not know is a ValueError."""
    try:
        yield
    except FdoraError:
        raise
    except (OSError, ValueError) as error:
        raise fail(fn, arg, "a file that can be written", f"{type(error).__name__}: {error}", remedy) from None
