"""Which modules of a model fdora knows: by all of the code that would run, not by a name or a piece of source.

A function is looked at as it is: what ``functools.wraps`` says about it is not followed. What is not known is left alone.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from functools import cache, partial
from types import CodeType
from typing import Any

import torch.nn.functional as F
from torch import nn
from transformers import activations

from fdora.integrations._hook import hooked

ATTENTION = ("q_proj", "k_proj", "v_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def forward_of(module: nn.Module) -> Any:
    """The function that a call of the module runs; None where the instance has another one than its class."""
    return None if "forward" in module.__dict__ else type(module).forward


# The forward of a gated MLP, as it is written in transformers. No constant, no global: the bytecode says all.
def gated(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def gated_and_named(self, x):
    y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return y


def is_gated_mlp(function: Any) -> bool:
    code = code_of(function)
    return code is not None and any(body(code) == body(f.__code__) for f in (gated, gated_and_named))


def code_of(function: Any) -> CodeType | None:
    code = getattr(function, "__code__", None)
    return code if isinstance(code, CodeType) else None


KIND = inspect.CO_VARARGS | inspect.CO_VARKEYWORDS | inspect.CO_GENERATOR | inspect.CO_COROUTINE | inspect.CO_ASYNC_GENERATOR


def body(code: CodeType) -> tuple[Any, ...]:
    """What a function does, but for its constants. Names of local variables do not matter."""
    arguments = (code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags & KIND)
    return code.co_code, code.co_names, code.co_nlocals, code.co_freevars, code.co_cellvars, arguments


def act_of(act: Any) -> str | None:
    """dora_mlp's name for a function, or for a module without hooks; None where it may compute anything else."""
    if not isinstance(act, nn.Module):
        return function_name(act)
    how = ACTS.get((type(act), type(act).forward))
    if how is None or hooked(act):
        return None
    if how == "act":  # it calls what stands there
        return function_name(act.act)
    if how == "approximate":
        return {"none": "gelu", "tanh": "gelu_tanh"}.get(str(act.approximate))
    return how


def function_name(f: Any) -> str | None:
    if type(f) is partial and f.func is F.gelu and not f.args and f.keywords == {"approximate": "tanh"}:
        return "gelu_tanh"
    return "silu" if f is F.silu else "gelu" if f is F.gelu else None


def known_activations() -> dict[tuple[Any, Any], str]:
    """Classes with their forward, which somebody may replace: the activation, or the attribute that says which."""
    named = {"SiLUActivation": "silu", "NewGELUActivation": "gelu_tanh", "GELUActivation": "act", "GELUTanh": "act"}
    found = [(getattr(activations, name, None), how) for name, how in named.items()]  # not all in every transformers
    found += [(nn.SiLU, "silu"), (nn.GELU, "approximate")]
    return {(kind, kind.forward): how for kind, how in found if kind is not None}


ACTS = known_activations()


@cache
def shares_x(function: Any) -> bool:
    """Whether q_proj, k_proj, v_proj are called once each, in this order, all or none, with the same x.

    The function names each of them once, as ``self.q_proj(x)``, in plain statements of its outermost level. From the first of
    these to the last nothing but the three calls names x, so nothing assigns it.
    """
    tree = tree_of(function)
    if tree is None or not tree.args.args:
        return False
    holds = [any(is_projection(node) for node in ast.walk(part)) for part in tree.body]
    spots = [i for i, found in enumerate(holds) if found]
    parts = tree.body[spots[0] : spots[-1] + 1] if spots else []
    nodes = [node for part in parts for node in ast.walk(part)]
    if not all(isinstance(part, PLAIN) for part in parts) or any(isinstance(node, MAYBE) for node in nodes):
        return False
    calls = [node for node in nodes if isinstance(node, ast.Call) and is_projection(node.func)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    if [call.func.attr for call in calls] != list(ATTENTION) or sum(map(is_projection, nodes)) != 3:  # type: ignore[attr-defined]
        return False
    read = [ast.unparse(a) for call in calls for a in (call.func.value, *call.args, *call.keywords)]  # type: ignore[attr-defined]
    me, x = read[:2] if len(read) == 6 else ("", "")
    named = sum(isinstance(node, ast.Name) and node.id == x for node in nodes)
    return read == [me, x] * 3 and me == tree.args.args[0].arg and named == 3


def is_projection(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ATTENTION


PLAIN = (ast.Assign, ast.AnnAssign, ast.Expr)
# What is in one of these runs never, later or often, or is assigned there.
MAYBE = (
    ast.Lambda,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
    ast.IfExp,
    ast.BoolOp,
    ast.NamedExpr,
    ast.Await,
    ast.Yield,
    ast.YieldFrom,
)


def tree_of(function: Any) -> ast.FunctionDef | None:
    """The syntax tree, if the source that is found compiles to the very code that runs."""
    code = code_of(function)
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
    trees = [node for node in ast.walk(file) if isinstance(node, ast.FunctionDef)]
    first = [min([tree.lineno, *(d.lineno for d in tree.decorator_list)]) for tree in trees]
    return next((tree for tree, line in zip(trees, first, strict=True) if line == code.co_firstlineno), None)


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


@cache
def chain(function: Any) -> tuple[str, ...]:
    """The modules that what a function returns has passed, the last one first: proj_drop, proj, norm of

        ``x = self.norm(x); x = self.proj(x); x = self.proj_drop(x); return x`` (or ``return x, weights``)

    Plain statements at its end, each of them the only one that names its module. Nothing else reads what passes between.
    """
    tree = tree_of(function)
    nodes = [] if tree is None else list(ast.walk(tree))[1:]
    if tree is None or not tree.args.args or any(isinstance(node, LATER) for node in nodes):
        return ()
    me, attributes = tree.args.args[0].arg, [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    *before, last = tree.body
    if not isinstance(last, ast.Return) or sum(isinstance(node, ast.Return) for node in nodes) != 1:
        return ()
    given: Any = last.value
    value, *rest = given.elts if isinstance(given, ast.Tuple) and given.elts else [given]
    others = {node.id for each in rest for node in ast.walk(each) if isinstance(node, ast.Name)}
    found: list[str] = []
    while isinstance(value, (ast.Name, ast.Call)):
        name = called(value, me)
        if name is not None and attributes.count(name) == 1:
            found.append(name)
            value = value.args[0]  # type: ignore[union-attr]
        elif isinstance(value, ast.Name) and before and is_assigned(before[-1], value.id) and value.id not in others:
            value = before.pop().value  # type: ignore[attr-defined]
        else:
            break
    return tuple(found)


LATER = (ast.Yield, ast.YieldFrom, ast.Await, ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


def called(node: ast.AST | None, me: str) -> str | None:
    """The module of ``self.module(x)``."""
    if not isinstance(node, ast.Call) or node.keywords or len(node.args) != 1 or not isinstance(node.func, ast.Attribute):
        return None
    of = node.func.value
    return node.func.attr if isinstance(of, ast.Name) and of.id == me and not isinstance(node.args[0], ast.Starred) else None


def is_assigned(node: ast.AST, name: str) -> bool:
    """Whether a statement is ``name = ...``."""
    if not isinstance(node, ast.Assign) or len(node.targets) != 1:
        return False
    target = node.targets[0]
    return isinstance(target, ast.Name) and target.id == name
