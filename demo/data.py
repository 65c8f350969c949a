"""Real text with labels on every machine: docstrings of the standard library, labelled with their package.

Files are parsed, never imported. Nothing is drawn at random: the same Python gives the same texts and the same split.
"""

from __future__ import annotations

import ast
import hashlib
import sys
import sysconfig
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from demo import stop

MIN_CHARACTERS = 20
"""A shorter docstring says too little."""
MIN_TEXTS = 40
"""A package with fewer is no class."""
HELD_OUT = 0.3
"""Most of a class's texts that are held out; whole modules, so a little less."""
MIN_CLASSES, MIN_TOTAL = 12, 2000
"""What the demo promises to run on."""

Modules = dict[str, list[str]]
"""Name of a module -> its docstrings."""


class DataError(Exception):
    """This Python's standard library holds too little text."""


class Sample(NamedTuple):
    text: str
    label: int


class Corpus(NamedTuple):
    classes: list[str]
    train: list[Sample]
    held_out: list[Sample]
    modules: tuple[int, int]
    """How many modules the train and the held-out texts come from."""


def load_corpus(root: Path | None = None) -> Corpus:
    """The docstrings under ``root`` (None: the standard library of the running Python), split by module.

    A class is a package with at least 40 different docstrings in at least two modules. Of each class whole modules are
    held out, up to 30 % of its texts, so no module, and no text, is on both sides.

    Raises:
      DataError: fewer than 12 classes or 2,000 texts were found.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    packages = {name: m for name, m in read_packages(root) if len(m) >= 2 and sum(map(len, m.values())) >= MIN_TEXTS}
    total = sum(len(texts) for modules in packages.values() for texts in modules.values())
    if len(packages) < MIN_CLASSES or total < MIN_TOTAL:
        raise DataError(
            f"The demo needs {MIN_TOTAL} docstrings of {MIN_CLASSES} standard packages, but {root} holds "
            f"{total} of {len(packages)}: please run it with a Python whose standard library is there as .py files."
        )
    train: list[Sample] = []
    held_out: list[Sample] = []
    n_held = 0
    for label, modules in enumerate(packages.values()):
        held = pick_held_out(modules)
        n_held += len(held)
        for module, texts in modules.items():
            (held_out if module in held else train).extend(Sample(text, label) for text in texts)
    n_modules = sum(map(len, packages.values()))
    return Corpus(list(packages), train, held_out, (n_modules - n_held, n_held))


def read_packages(root: Path) -> Iterator[tuple[str, Modules]]:
    """Each top-level package of the standard library with its docstrings, in alphabetical order; no text comes twice."""
    seen: set[str] = set()
    for package in sorted(sys.stdlib_module_names - {"test"}):
        if not (root / package / "__init__.py").is_file():
            continue
        modules: Modules = {}
        for path in stop.steps(sorted((root / package).rglob("*.py"))):
            parts = path.relative_to(root).with_suffix("").parts
            if any(is_test_folder(part) for part in parts[1:-1]):
                continue
            new = {text.lower(): text for text in docstrings(path) if text.lower() not in seen}
            seen |= new.keys()
            if new:
                modules[".".join(parts).removesuffix(".__init__")] = list(new.values())
        yield package, modules


def is_test_folder(name: str) -> bool:
    return name in ("test", "tests", "site-packages") or name.endswith("_test")


def docstrings(path: Path) -> Iterator[str]:
    """The docstrings of a file's module, classes and functions, each on one line."""
    try:
        with warnings.catch_warnings():  # old modules have old escapes; they are not ours to mend
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError):
        return
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = " ".join((ast.get_docstring(node) or "").split())
            if len(text) >= MIN_CHARACTERS:
                yield text


def pick_held_out(modules: Modules) -> set[str]:
    """Modules to hold out: in the order of a hash of their names, each that still fits below the share; at least one."""
    room = HELD_OUT * sum(map(len, modules.values()))
    held: set[str] = set()
    for module in sorted(modules, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if len(modules[module]) <= room:
            held.add(module)
            room -= len(modules[module])
    return held or {min(modules, key=lambda name: (len(modules[name]), name))}
