"""The code that a module runs: whether it is written as one that is known, or what its syntax tree says.

Two functions are the same where their bytecode is. A function is looked at as it is: what ``functools.wraps`` says about it is
not followed. Only what transformers itself puts around a forward is looked through: its decorator that renames an argument
(:func:`undecorated`) and checkpointing (:func:`beneath`).
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator, Sequence
from functools import cache
from types import CodeType
from typing import Any

from transformers import modeling_layers
from transformers.utils import deprecation


def code_of(function: Any) -> CodeType | None:
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None


KIND = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def body(code: CodeType) -> tuple[Any, ...]:
    """What a function does, but for its constants. Names of local variables do not matter."""
    arguments = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & KIND)
    return code.co_code, code.co_names, code.co_nlocals, code.co_freevars, code.co_cellvars, arguments


def how_of(function: Any, known: Sequence[tuple[Any, Any]]) -> Any:
    """What stands beside the form that a function is written in; None where it is none of these. They have the bytecode, the
    constants (a docstring is the first of them) and the defaults in common."""
    code = code_of(function)
    forms = () if code is None else known
    return next((how for form, how in forms if all_of(function, code) == all_of(form, form.__code__)), None)


def beneath(function: Any) -> Any:
    """The forward that a layer of transformers was written with, where its base class has put checkpointing around it."""
    code = code_of(function)
    if code is None or not any(code is each for each in wrappers()):
        return function
    return function.__closure__[code.co_freevars.index("forward")].cell_contents


@cache
def wrappers() -> tuple[CodeType, ...]:
    """The code itself: one that looks like it is another."""
    made = getattr(modeling_layers.GradientCheckpointingLayer.__init_subclass__, "__code__", None)
    return () if made is None else tuple(code for code in nested(made) if "forward" in code.co_freevars)


def all_of(function: Any, code: Any) -> tuple[Any, ...]:
    defaults = getattr(function, "__defaults__", None), getattr(function, "__kwdefaults__", None)
    return body(code), code.co_consts[1:], *defaults


def renaming() -> CodeType | None:
    """The code of every function that transformers' ``deprecate_kwarg`` returns."""
    decorate = getattr(deprecation, "deprecate_kwarg", None)
    return None if decorate is None else code_of(decorate("old", version="1000.0.0", new_name="new")(renaming))


RENAMING = renaming()


def undecorated(function: Any) -> Any:
    """The function that runs behind ``deprecate_kwarg``: that of the wrapper's closure, which ``__wrapped__`` need not be."""
    while RENAMING is not None and code_of(function) is RENAMING:
        function = inspect.getclosurevars(function).nonlocals.get("func")
    return function


def tree_of(function: Any) -> ast.FunctionDef | None:
    """The syntax tree, if the source that is found compiles to the very code that runs."""
    code = code_of(undecorated(function))
    if code is None:
        return None
    try:
        lines, _ = inspect.findsource(code)  # of the code, not of the function: that would follow __wrapped__
        file = ast.parse("".join(lines))  # the whole file: the bytecode of a function depends on imports around it
        made = compile(file, code.co_filename, "exec", dont_inherit=True)
    except (OSError, SyntaxError):  # made by hand, or the file has changed since
        return None
    if not any(same(each, code) for each in nested(made) if each.co_firstlineno == code.co_firstlineno):
        return None
    for node in ast.walk(file):
        if (
            isinstance(node, ast.FunctionDef)
            and min([node.lineno, *(d.lineno for d in node.decorator_list)]) == code.co_firstlineno
        ):
            return node
    return None


def nested(code: CodeType) -> Iterator[CodeType]:
    for each in code.co_consts:
        if isinstance(each, CodeType):
            yield each
            yield from nested(each)


def same(a: Any, b: Any) -> bool:
    """Two constants, or two code objects that differ in nothing but their lines."""
    if not (isinstance(a, CodeType) and isinstance(b, CodeType)):
        return type(a) is type(b) and bool(a == b)
    if (a.co_name, a.co_varnames, len(a.co_consts), body(a)) != (b.co_name, b.co_varnames, len(b.co_consts), body(b)):
        return False
    return all(map(same, a.co_consts, b.co_consts))
