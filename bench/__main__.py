"""``python -m bench NAME``: the command of that name; without one, their names."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path


def commands() -> dict[str, str]:
    """Each module here with a ``main``, and the first line of what it says of itself."""
    found = {}
    for path in sorted(Path(__file__).parent.glob("*.py")):
        module = ast.parse(path.read_text())
        names = {node.name for node in module.body if isinstance(node, ast.FunctionDef)}
        names |= {ast.unparse(node.targets[0]) for node in module.body if isinstance(node, ast.Assign)}
        if path.stem != "__main__" and "main" in names:
            found[path.stem] = (ast.get_docstring(module) or "").split("\n")[0]
    return found


def main(argv: list[str]) -> None:
    names = commands()
    if not argv or argv[0] not in names:
        lines = "\n".join(f"    {name:14} {said}" for name, said in names.items())
        raise SystemExit(f"python -m bench NAME [arguments], where NAME is one of\n\n{lines}")
    sys.argv = [f"python -m bench {argv[0]}", *argv[1:]]
    importlib.import_module(f"bench.{argv[0]}").main()


if __name__ == "__main__":
    main(sys.argv[1:])
