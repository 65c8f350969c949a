"""Try a way; when it cannot run here, keep the reason and go on with the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TypeVar

T = TypeVar("T")


class Failures(dict[str, str]):
    """Reason by way."""

    def attempt(self, names: Iterable[str], step: Callable[[str], T], label: str = "{}") -> dict[str, T]:
        """``step(name)`` for each name, without those that raise: their reason is kept under this label, which says where."""
        results = {}
        for name in names:
            try:
                results[name] = step(name)
            except Exception as problem:  # whatever a rival may raise
                self[tag := label.format(name)] = (f"{type(problem).__name__}: {problem}".splitlines() or ["?"])[0][:300]
                print(f"{tag} failed: {self[tag]}", flush=True)
        return results
