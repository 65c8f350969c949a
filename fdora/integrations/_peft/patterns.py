"""The blocks of a model that fdora knows, and how their layers run in one call.

A block is known by all of the code that would run, not by a name or a piece of source: its forward is written down here as it
is written there, and the bytecode is compared. A function is looked at as it is: what ``functools.wraps`` says about it is not
followed. Only transformers' own decorator that renames an argument is looked through (:func:`undecorated`). What is not known,
or what somebody patched, is left alone. Two things are of an open class, of which no list can be written: an attention that
gives q, k and v the same x (:func:`shares_x`), and what follows the last layer of an attention or an MLP (:func:`chain`). These
are read from the syntax tree of the code that runs.

Gated MLPs of transformers and timm run in one call of dora_mlp. It keeps x, gate and up, and forms what lies between again:
half of what its three layers keep on their own. The class is exchanged like that of a layer. q, k and v stay modules that the
attention calls one by one: the first computes for all, the others hand over what waits for them.

In blocks of vision transformers, ``x + drop(scale(inner(norm(x))))`` twice, LayerScale and the sum with the residual go into
the call of the last layer before them. The block tells the layer beforehand (:class:`Tail`), and looks afterwards whether it
was heard. A layer that cannot listen returns what it always does, and the block goes on as it is written. Nothing is folded
into a layer that something else follows, listens to, or is called in another thread.
"""

from __future__ import annotations

import ast
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from types import CodeType
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import activations, modeling_layers
from transformers.utils import deprecation

from fdora._records import DropoutMode
from fdora._torch import PLAIN, autocast_on, in_subgraph, is_traced, trace
from fdora.functional import DoraLayer, prepared
from fdora.functional.prepared import folded, linears, loses_inner
from fdora.integrations._hook import hooked
from fdora.integrations._norm import version
from fdora.integrations._peft.fast_path import FUSED, Call, given_norms, keep_route, ready, verdict
from fdora.integrations._peft.layer import Dora, Exchanged, Layer, active, call_of, subclass
from fdora.quant import QuantWeight

ATTENTION = ("q_proj", "k_proj", "v_proj")
MLP = ("gate_proj", "up_proj", "down_proj")


def forward_of(module: nn.Module) -> Any:
    """The function that a call of the module runs; None where the instance has another one than its class."""
    return None if "forward" in module.__dict__ else type(module).forward


# The forwards of gated MLPs, transformers' first.
def gated(self, x):
    return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


def gated_and_named(self, x):
    y = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return y


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
    if not all(isinstance(part, STATEMENTS) for part in parts) or any(isinstance(node, MAYBE) for node in nodes):
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


STATEMENTS = (ast.Assign, ast.AnnAssign, ast.Expr)
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


class Branch(NamedTuple):
    """Names of the modules of one half of a block. No scale: its place is empty."""

    norm: str
    inner: str
    scale: str
    drop: str


class Block(NamedTuple):
    first: Branch
    second: Branch
    attends: Callable[..., tuple[tuple, dict[str, Any]]]
    """From what the block is called with behind x, what its attention is called with behind x."""
    pair: bool = False
    """The attention returns its output and something else."""


def timm_mask_and_causal(self, x, attn_mask=None, is_causal=False):
    x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), attn_mask=attn_mask, is_causal=is_causal)))
    x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
    return x


def timm_mask(self, x, attn_mask=None):
    x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), attn_mask=attn_mask)))
    x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
    return x


def timm_plain(self, x):
    x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
    x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
    return x


def dinov2(self, hidden_states, attention_mask=None, **kwargs):
    residual = hidden_states
    hidden_states = self.norm1(hidden_states)
    hidden_states, _ = self.attention(hidden_states, attention_mask=attention_mask, **kwargs)
    hidden_states = self.layer_scale1(hidden_states)
    hidden_states = self.drop_path(hidden_states) + residual
    residual = hidden_states
    hidden_states = self.norm2(hidden_states)
    hidden_states = self.mlp(hidden_states)
    hidden_states = self.layer_scale2(hidden_states)
    hidden_states = self.drop_path(hidden_states) + residual
    return hidden_states


def dinov3(self, hidden_states, attention_mask=None, position_embeddings=None, **kwargs):
    residual = hidden_states
    hidden_states = self.norm1(hidden_states)
    hidden_states, _ = self.attention(
        hidden_states, attention_mask=attention_mask, position_embeddings=position_embeddings, **kwargs
    )
    hidden_states = self.layer_scale1(hidden_states)
    hidden_states = self.drop_path(hidden_states) + residual
    residual = hidden_states
    hidden_states = self.norm2(hidden_states)
    hidden_states = self.mlp(hidden_states)
    hidden_states = self.layer_scale2(hidden_states)
    hidden_states = self.drop_path(hidden_states) + residual
    return hidden_states


def vit(self, hidden_states, attention_mask=None, **kwargs):
    residual = hidden_states
    hidden_states = self.layernorm_before(hidden_states)
    hidden_states, _ = self.attention(hidden_states, attention_mask, **kwargs)
    hidden_states = self.dropout(hidden_states)
    hidden_states = hidden_states + residual
    residual = hidden_states
    hidden_states = self.layernorm_after(hidden_states)
    hidden_states = self.mlp(hidden_states)
    hidden_states = self.dropout(hidden_states)
    hidden_states = hidden_states + residual
    return hidden_states


TIMM = Branch("norm1", "attn", "ls1", "drop_path1"), Branch("norm2", "mlp", "ls2", "drop_path2")
DINO = Branch("norm1", "attention", "layer_scale1", "drop_path"), Branch("norm2", "mlp", "layer_scale2", "drop_path")
VIT = Branch("layernorm_before", "attention", "", "dropout"), Branch("layernorm_after", "mlp", "", "dropout")


def both(attn_mask: Any = None, is_causal: Any = False) -> Any:
    return (), {"attn_mask": attn_mask, "is_causal": is_causal}


def mask(attn_mask: Any = None) -> Any:
    return (), {"attn_mask": attn_mask}


def nothing() -> Any:
    return (), {}


def named(attention_mask: Any = None, **kwargs: Any) -> Any:
    return (), {"attention_mask": attention_mask, **kwargs}


def positions(attention_mask: Any = None, position_embeddings: Any = None, **kwargs: Any) -> Any:
    return (), {"attention_mask": attention_mask, "position_embeddings": position_embeddings, **kwargs}


def placed(attention_mask: Any = None, **kwargs: Any) -> Any:
    return (attention_mask,), kwargs


BLOCKS: tuple[tuple[Any, Block], ...] = (
    (timm_mask_and_causal, Block(*TIMM, both)),
    (timm_mask, Block(*TIMM, mask)),
    (timm_plain, Block(*TIMM, nothing)),
    (dinov2, Block(*DINO, named, True)),
    (dinov3, Block(*DINO, positions, True)),
    (vit, Block(*VIT, placed, True)),
)


def block_of(function: Any) -> Block | None:
    return how_of(beneath(function), BLOCKS)


def how_of(function: Any, known: Sequence[tuple[Any, Any]]) -> Any:
    """What stands beside the form that a function is written in; None where it is none of these."""
    return next((how for form, how in known if is_written(function, form)), None)


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


def is_written(function: Any, known: Any) -> bool:
    """Whether a function has the bytecode, the constants (a docstring is the first of them) and the defaults of a known one."""
    code = code_of(function)
    return code is not None and all_of(function, code) == all_of(known, known.__code__)


def all_of(function: Any, code: CodeType) -> tuple[Any, ...]:
    defaults = getattr(function, "__defaults__", None), getattr(function, "__kwdefaults__", None)
    return body(code), code.co_consts[1:], *defaults


# The forward of LayerScale, by the name of its parameter.
def lambda1(self, hidden_state):
    return hidden_state * self.lambda1


def gamma(self, x):
    return x.mul_(self.gamma) if self.inplace else x * self.gamma


def scale_of(module: nn.Module) -> str | None:
    """The parameter by which a module multiplies its input; empty where it does nothing; None where it may do anything else."""
    if hooked(module):
        return None
    if type(module) is nn.Identity:
        return ""
    return how_of(type(module).forward, ((lambda1, "lambda1"), (gamma, "gamma")))


def idle(module: Any) -> bool:
    """Whether calling the module now changes nothing."""
    if type(module) is nn.Dropout:
        return (module.p == 0 or not module.training) and not hooked(module)
    return type(module) is nn.Identity and not hooked(module)


class Gated(NamedTuple):
    """Names of its modules."""

    gate: str
    up: str
    down: str
    act: str
    rest: tuple[str, ...] = ()
    """Modules that must do nothing."""
    packed: bool = False
    """gate and up are halves of one layer, which both name."""

    def layers(self) -> tuple[str, ...]:
        return (self.gate, self.down) if self.packed else (self.gate, self.up, self.down)

    def serves(self, module: Any) -> bool:
        """Whether the instance computes what dora_mlp does, now."""
        if not all([idle(module._modules.get(name)) for name in self.rest]):
            return False
        return not self.packed or (module.chunk_dim == -1 and isinstance(module.gate_last, bool))


def timm_swiglu(self, x):
    x_gate = self.fc1_g(x)
    x = self.fc1_x(x)
    x = self.act(x_gate) * x
    x = self.drop1(x)
    x = self.norm(x)
    x = self.fc2(x)
    x = self.drop2(x)
    return x


def timm_packed(self, x):
    x = self.fc1(x)
    x1, x2 = x.chunk(2, dim=self.chunk_dim)
    x = x1 * self.act(x2) if self.gate_last else self.act(x1) * x2
    x = self.drop1(x)
    x = self.norm(x)
    x = self.fc2(x)
    x = self.drop2(x)
    return x


REST = ("drop1", "norm", "drop2")
GATED: tuple[tuple[Any, Gated], ...] = (
    (gated, Gated(*MLP, "act_fn")),
    (gated_and_named, Gated(*MLP, "act_fn")),
    (timm_swiglu, Gated("fc1_g", "fc1_x", "fc2", "act", REST)),
    (timm_packed, Gated("fc1", "fc1", "fc2", "act", REST, packed=True)),
)


def gated_of(function: Any) -> Gated | None:
    return how_of(function, GATED)


class Ends(NamedTuple):
    gamma: Tensor | None
    residual: Tensor | None


class Tail:
    """Of one layer that ends a branch. It belongs to the layers it was made for: a replica or a copy has none."""

    def __init__(self, inner: nn.Module, layer: Any, after: tuple[str, ...], scale: str | None, scales: Any):
        self.inner = weakref.ref(inner)
        self.layer = weakref.ref(layer)
        self.forward = plain_forward(inner)
        """The inner module's, when it was looked at."""
        self.scale, self.scales = scale, scales
        """LayerScale's parameter, and its forward."""
        self.after = after
        """Modules that y passes before the inner module returns it: they must be idle."""
        self.waiting: dict[Any, Ends] = {}

    def stands(self, inner: Any, layer: Any, scale: Any) -> bool:
        here: Any = self.inner() is inner and self.layer() is layer
        return (
            here
            and (scale is None or (type(scale).forward is self.scales and not hooked(scale)))
            and plain_forward(inner) is self.forward
            and not hooked(inner)
            and not hooked(layer)
            and all([idle(inner._modules.get(name)) for name in self.after])
        )

    def take(self, layer: Any, x: Tensor, N: int) -> Ends | None:
        """For the layer itself: what to do beside it, if it can be done without a dtype or a shape being another."""
        ends = self.waiting.get(where()) if self.waiting and self.layer() is layer else None
        if ends is None or autocast_on(x):
            return None
        for t, shape in ((ends.gamma, (N,)), (ends.residual, (*x.shape[:-1], N))):
            if t is not None and (type(t) not in PLAIN or t.shape != shape or t.dtype != x.dtype or t.device != x.device):
                return None
        return ends

    def taken(self) -> None:
        del self.waiting[where()]


def where() -> Any:
    """What is told in one thread, or in one trace, is for the same alone."""
    return trace() if torch.compiler.is_dynamo_compiling() else threading.get_ident()


def plain_forward(module: Any) -> Any:
    """The class's, beneath that of a block of ours."""
    return getattr(type(module), "FORWARD", None) or type(module).forward


class VitBlock(Exchanged):
    """A block of a vision transformer, whose halves tell their last layers what follows."""

    recognise = staticmethod(block_of)

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, VitBlock):  # bound methods outlive unfuse_blocks
            return type(self).forward(self, x, *args, **kwargs)
        cls: Any = type(self)
        if cls.STOCK.forward is not cls.FORWARD or type(x) not in PLAIN:
            return cls.STOCK.forward(self, x, *args, **kwargs)
        if torch.compiler.is_dynamo_compiling() and in_subgraph():
            return cls.STOCK.forward(self, x, *args, **kwargs)
        how = cls.HOW
        args, kwargs = how.attends(*args, **kwargs)
        x = half(self, how.first, x, args, kwargs, how.pair)
        return half(self, how.second, x, (), {}, False)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """A copy is the model's own class: nothing waits for its layers."""
        return blank, (self.STOCK,), self.__dict__


def blank(stock: Any) -> Any:
    return stock.__new__(stock)


def half(block: Any, branch: Branch, x: Tensor, args: tuple, kwargs: dict[str, Any], pair: bool) -> Tensor:
    """``x + drop(scale(inner(norm(x))))``, in as few steps as its last layer takes upon itself."""
    parts = block._modules
    inner, scale, drop = parts[branch.inner], parts[branch.scale] if branch.scale else None, parts[branch.drop]
    tail, h = tail_of(inner, scale), parts[branch.norm](x)
    ends = Ends(None, None)
    if tail is not None:
        ends = Ends(None if tail.scale is None else getattr(scale, tail.scale), x if idle(drop) else None)
    if tail is None or (ends.gamma is None and ends.residual is None):
        out, heard = inner(h, *args, **kwargs), False
    else:
        out, heard = listened(tail, ends, inner, h, args, kwargs)
    if pair:
        out, _ = out
    if heard and ends.residual is not None:
        return out
    out = out if scale is None or heard else scale(out)
    return drop(out) + x


def listened(tail: Tail, ends: Ends, inner: Any, h: Tensor, args: tuple, kwargs: dict[str, Any]) -> tuple[Any, bool]:
    """What the inner module returns, and whether its last layer did what it was told."""
    key = where()
    tail.waiting[key] = ends
    if torch.compiler.is_dynamo_compiling():  # a trace that fails leaves nothing; a graph may break here, not inside of a try
        out = inner(h, *args, **kwargs)
        return out, tail.waiting.pop(key, None) is None
    try:
        out = inner(h, *args, **kwargs)
    finally:
        left = tail.waiting.pop(key, None)
    return out, left is None


def tail_of(inner: Any, scale: Any) -> Tail | None:
    """That of the adapter that is active now."""
    for layer in last_layers(inner):
        found = active(layer)
        tail = None if found is None else found[1].tail
        return tail if tail is not None and tail.stands(inner, layer, scale) else None
    return None


def last_layers(inner: Any) -> list[Any]:
    """The layers of PEFT right below, those with a tail."""
    return [each for each in inner._modules.values() if isinstance(each, Layer) and has_tail(each)]


def has_tail(layer: Any) -> bool:
    return any([isinstance(v, Dora) and v.tail is not None for v in layer.lora_variant.values()])


def give_tail(block: Any, branch: Branch) -> bool:
    """Whether this half ends in a layer that may take up what follows."""
    inner, scale = block._modules[branch.inner], block._modules[branch.scale] if branch.scale else None
    by = "" if scale is None else scale_of(scale)
    if by is None or inner is None or hooked(inner):
        return False
    after: list[str] = []
    for name in chain(plain_forward(inner)):
        each = inner._modules.get(name)
        if isinstance(each, Layer):
            for variant in each.lora_variant.values():
                if isinstance(variant, Dora):
                    variant.tail = Tail(inner, each, tuple(after), by or None, None if scale is None else type(scale).forward)
                    variant.route = None  # of a call that knew of no tail
            return True
        if not isinstance(each, (nn.Identity, nn.Dropout)):
            return False
        after.append(name)
    return False


class Waiting(NamedTuple):
    """Outputs that nobody has asked for yet, by the layer's place, and what they belong to."""

    x: Tensor
    version: int | str
    grad: bool
    outputs: dict[int, Tensor]


class Shared:
    """q, k and v of one attention."""

    def __init__(self, layers: list[Any]):
        self.layers = [weakref.ref(layer) for layer in layers]  # they hold this: a cycle would outlive merge_and_unload
        self.waiting: Waiting | None = None

    def output(self, layer: Any, x: Tensor, place: int, traced: bool) -> Tensor | None:
        """This layer's y; None where it is to be computed alone."""
        if self.layers[place]() is not layer:  # a replica of DataParallel
            return None
        waiting, now, grad = self.waiting, state_of(x, traced), torch.is_grad_enabled()
        if waiting is not None:
            self.waiting = None
            if place in waiting.outputs and waiting.x is x and waiting.version == now and waiting.grad == grad:
                left = {i: each for i, each in waiting.outputs.items() if i != place}
                self.waiting = Waiting(x, now, grad, left) if left else None
                return waiting.outputs[place]
        if place:
            return None
        members = tuple([each() for each in self.layers])
        known = None if traced else ready(members, x, alone=False)
        if known is not None:
            y, *rest = prepared.call(*known)
        else:
            found = together(members, x)
            if found is None:
                return None
            dtype = found.calls[0].dtype  # y of quantised layers goes back to that of x
            ys = linears(x if dtype is None else x.to(dtype), found.layers(), *found.options())
            y, *rest = ys if dtype is None else [each.to(x.dtype) for each in ys]
        self.waiting = Waiting(x, now, grad, dict(enumerate(rest, 1)))
        return y


def state_of(x: Tensor, traced: bool) -> int | str:
    """x's version. A trace knows of none: what waits there is for the same trace alone."""
    return trace() if traced and torch.compiler.is_dynamo_compiling() else version(x)


class Mlp(Exchanged):
    """A gated MLP in one call of dora_mlp."""

    recognise = staticmethod(gated_of)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if not isinstance(self, Mlp):  # bound methods outlive unfuse_blocks
            return type(self).forward(self, *args, **kwargs)
        cls: Any = type(self)  # self.FORWARD would be bound
        how: Gated = cls.HOW
        if len(args) == 1 and not kwargs and cls.STOCK.forward is cls.FORWARD and how.serves(self):
            act: Any = act_of(
                self._modules[how.act] if how.act in self._modules else getattr(self, how.act, None)
            )  # it may be another one by now, or have hooks
            layers = [self._modules[name] for name in how.layers()]
            known = None if act is None or how.packed or is_traced() else ready(tuple(layers), *args, alone=False, act=act)
            if known is not None:
                return prepared.call(*known)[0]
            found = together(layers, *args, mlp=True, packed=how.packed) if act is not None else None
            if found is not None:
                down = found.calls[-1]
                ends = None if down.variant.tail is None else down.ends(layers[-1], args[0])
                if ends is not None:
                    down.variant.tail.taken()
                gate_last = how.packed and self.gate_last
                return found.mlp(args[0], act, None if not how.packed else gate_last, ends)  # type: ignore[arg-type]
        return cls.STOCK.forward(self, *args, **kwargs)

    def __setattr__(self, name: str, value: Any) -> None:
        mine = name in type(self).HOW.layers()
        super().__setattr__(name, value)
        if mine and not isinstance(value, Layer):  # unload, merge_and_unload
            self.__class__ = self.STOCK


class Together(NamedTuple):
    """What layers do in one call."""

    calls: list[Call]

    def layers(self) -> list[DoraLayer]:
        return [of(call, c) for call, c in zip(self.calls, given_norms(self.calls), strict=True)]

    def options(self) -> tuple[float, DropoutMode, bool]:
        """Dropout's p and mode, and whether to keep the value before g."""
        return self.calls[0].p, self.calls[0].mode, any([call.variant.keep_inner for call in self.calls])

    def mlp(self, x: Tensor, act: Any, gate_last: bool | None, ends: Any) -> Tensor:
        """Of gate, up and down; or of both in one layer and down, where ``gate_last`` is not None: which half is the gate."""
        if gate_last is None:
            gate, up, down = self.layers()
        else:
            both, down = [of(call, call.norm()) for call in self.calls]
            gate, up = halves(both, gate_last)
        p, mode, keep_inner = self.options()
        if ends is None:
            return linears(x, (gate, up, down), p, mode, keep_inner, act)[0]
        m, bias = folded(x.dtype, ends.gamma, down.m, down.bias)  # type: ignore[arg-type]
        keep_inner = keep_inner or loses_inner(x.dtype, ends.gamma, None)
        y = linears(x, (gate, up, down._replace(m=m, bias=bias)), p, mode, keep_inner, act)[0]
        return y if ends.residual is None else y + ends.residual


def together(layers: Sequence[Any], x: Tensor, mlp: bool = False, packed: bool = False) -> Together | None:
    """What each layer would do with x, if all do it in one call of dora_linear, nobody listens, and p is the same."""
    found: list[Call] = []
    for layer in layers:
        adapter = active(layer) if isinstance(layer, Layer) and not hooked(layer) else None
        call = "" if adapter is None else call_of(layer, x, *adapter)
        if isinstance(call, str) or (found and how_called(call) != how_called(found[0])):
            return None
        if mlp and call.dtype not in (None, x.dtype):  # layer by layer, what lies between has the dtype of x
            return None
        found.append(call)
    if packed and (isinstance(found[0].W, QuantWeight) or found[0].p or found[0].W.shape[0] != 2 * found[1].W.shape[1]):
        return None  # dropout draws one mask for both halves
    why, backend = verdict(x, found, mlp and not packed)
    if backend and not packed:
        for layer, call in zip(layers, found, strict=True):
            keep_route(layer, call)
    return None if why else Together(found)


def how_called(call: Call) -> tuple[Any, ...]:
    """What all layers of one call must have in common."""
    return call.p, call.mode, call.dtype


def halves(both: DoraLayer, gate_last: bool) -> tuple[DoraLayer, DoraLayer]:
    """gate and up of a layer that computes the two beside each other: rows of W, B, m, bias and c; A is that of both."""
    W, A, B, m, s, bias, c = both
    parts: Any = zip(*[(None, None) if t is None else t.chunk(2) for t in (W, B, m, bias, c)], strict=True)  # type: ignore[union-attr]
    As: Any = A, A.view(A.shape)  # type: ignore[union-attr]  # Dynamo takes no tensor twice
    first, second = (DoraLayer(W, a, B, m, s, bias, c) for a, (W, B, m, bias, c) in zip(As, parts, strict=True))
    return (second, first) if gate_last else (first, second)


def of(call: Call, c: Tensor) -> DoraLayer:
    variant, W, A, B, m, bias, s, *_ = call
    variant.count(FUSED)
    return DoraLayer(W, A, B, m, s, bias, c)


def fuse_blocks(model: nn.Module) -> int:
    """Run the blocks that are known in fewer calls. How many were found."""
    found = 0
    for module in list(model.modules()):
        parts, forward = module._modules, forward_of(module)
        how, block = gated_of(forward), block_of(forward)
        stock: Any = type(module)
        if how is not None and adapted(parts, how.layers()) and act_of(getattr(module, how.act, None)) is not None:
            module.__class__ = subclass(Mlp, stock)
            found += 1
        if block is not None and sum([give_tail(module, branch) for branch in (block.first, block.second)]):
            module.__class__ = subclass(VitBlock, stock)
            found += 1
        if adapted(parts, ATTENTION) and shares_x(forward):
            layers: list[Any] = [parts[name] for name in ATTENTION]
            for adapter in set.intersection(*(set(layer.lora_variant) for layer in layers)):
                shared = Shared(layers)
                for place, layer in enumerate(layers):
                    layer.lora_variant[adapter].shared, layer.lora_variant[adapter].place = shared, place
            found += 1
    return found


def adapted(parts: dict[str, Any], names: tuple[str, ...]) -> bool:
    return all(isinstance(parts.get(name), Layer) for name in names)


def unfuse_blocks(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, (Mlp, VitBlock)):
            module.__class__ = module.STOCK
        for variant in getattr(module, "lora_variant", {}).values():
            if isinstance(variant, Dora):
                variant.shared = variant.tail = None
