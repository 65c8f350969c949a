"""Four kinds of text from the source of the standard library, labelled with its package: one for each adapter of demo.multi.

Files are parsed, never imported; nothing is drawn at random. The same Python gives the same texts in the same order.
"""

from __future__ import annotations

import ast
import hashlib
import io
import sysconfig
import tokenize
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

from demo import stop
from demo.data import DataError, Sample

PACKAGES = ("asyncio", "ctypes", "email", "http", "importlib", "multiprocessing", "unittest", "xml")
"""The classes: packages of every Python since 3.10."""
MIN_CHARACTERS = 16


def docstrings(source: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def comments(source: str, tree: ast.Module) -> Iterator[str]:
    """Lines of comment that follow each other are one text."""
    block, last = "", -1
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            if token.start[0] != last + 1:
                yield block
                block = ""
            block, last = f"{block} {token.string.lstrip('#')}", token.start[0]
    yield block


def signatures(source: str, tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield f"def {node.name}({ast.unparse(node.args)})"


def messages(source: str, tree: ast.Module) -> Iterator[str]:
    """Strings in calls: what errors and logs say, among other things."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            yield from (arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str))


KINDS: dict[str, Callable[[str, ast.Module], Iterator[str]]] = {
    "docstrings": docstrings,
    "comments": comments,
    "signatures": signatures,
    "messages": messages,
}


def load_corpora(counts: dict[str, int], root: Path | None = None) -> dict[str, list[Sample]]:
    """So many texts of each kind, in the order of a hash.

    Raises:
      DataError: the standard library is not there as source, or holds fewer.
    """
    root = root or Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, dict[str, int]] = {kind: {} for kind in counts}
    for label, package in enumerate(PACKAGES):
        for path in stop.steps(sorted((root / package).rglob("*.py"))):
            if "test" in path.parts[len(root.parts) :] or "tests" in path.parts[len(root.parts) :]:
                continue
            for kind, texts in texts_of(path, list(counts)):
                found[kind].setdefault(texts, label)
    corpora = {}
    for kind, count in counts.items():
        order = sorted(found[kind], key=lambda text: hashlib.sha256(text.encode()).digest())
        if len(order) < count:
            raise DataError(f"The demo needs {count} {kind} of {', '.join(PACKAGES)}, but {root} holds {len(order)}.")
        corpora[kind] = [Sample(text, found[kind][text]) for text in order[:count]]
    return corpora


def texts_of(path: Path, kinds: list[str]) -> Iterator[tuple[str, str]]:
    """(kind, text on one line) of a file."""
    try:
        with warnings.catch_warnings():  # old modules have old escapes
            warnings.simplefilter("ignore")
            source = path.read_text(encoding="utf-8")
            tree = ast.parse(source)
            for kind in kinds:
                for text in KINDS[kind](source, tree):
                    line = " ".join(text.split())
                    if len(line) >= MIN_CHARACTERS:
                        yield kind, line
    except (SyntaxError, ValueError, tokenize.TokenError):
        return
