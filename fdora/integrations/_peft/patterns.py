"""The blocks of a model that fdora knows. blocks.py runs their layers in one call.

A block is known by all of the code that would run, not by a name or a piece of source: its forward is written down here as it
is written there, and the bytecode is compared (code.py). What is not known, or what somebody patched, is left alone. Two
things are of an open class, of which no list can be written: an attention that gives q, k and v the same x (:func:`shares_x`),
and what follows the last layer of an attention or an MLP (:func:`chain`). These are read from the syntax tree of the code that
runs.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from functools import cache, partial
from typing import Any, NamedTuple

import torch.nn.functional as F
from torch import nn
from transformers import activations

from fdora.integrations._hook import hooked
from fdora.integrations._peft.code import beneath, how_of, tree_of

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


# Classes with their forward, which somebody may replace: the activation, or the attribute that says which.
NAMED = {"SiLUActivation": "silu", "NewGELUActivation": "gelu_tanh", "GELUActivation": "act", "GELUTanh": "act"}
KINDS: list[Any] = [(getattr(activations, name, None), how) for name, how in NAMED.items()]
KINDS += [(nn.SiLU, "silu"), (nn.GELU, "approximate")]
ACTS = {(kind, kind.forward): how for kind, how in KINDS if kind is not None}  # not all in every transformers


@cache
def shares_x(function: Any) -> bool:
    """Whether q_proj, k_proj, v_proj are called once each, in this order, all or none, with the same x.

    The function names each of them once, as ``self.q_proj(x)``, in plain statements of its outermost level. From the first of
    these to the last nothing but the three calls names x, so nothing assigns it.
    """
    tree = tree_of(function)
    if tree is None or not tree.args.args:
        return False
    spots = [i for i, part in enumerate(tree.body) if any(map(is_projection, ast.walk(part)))]
    parts = tree.body[spots[0] : spots[-1] + 1] if spots else []
    nodes = [node for part in parts for node in ast.walk(part)]
    if not all(isinstance(part, STATEMENTS) for part in parts) or any(isinstance(node, MAYBE) for node in nodes):
        return False
    calls = [node for node in nodes if isinstance(node, ast.Call) and is_projection(node.func)]
    calls.sort(key=lambda call: (call.lineno, call.col_offset))
    me, x = tree.args.args[0].arg, ast.unparse(calls[0].args[0]) if calls and calls[0].args else ""
    named = sum(isinstance(node, ast.Name) and node.id == x for node in nodes)
    once = sum(map(is_projection, nodes)) == named == len(ATTENTION)
    return once and list(map(ast.unparse, calls)) == [f"{me}.{name}({x})" for name in ATTENTION]


def is_projection(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and node.attr in ATTENTION


STATEMENTS = (ast.Assign, ast.AnnAssign, ast.Expr)
LATER = (ast.Yield, ast.YieldFrom, ast.Await, ast.Lambda, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
# What is in one of these runs never, later or often, or is assigned there.
MAYBE = (*LATER, ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp, ast.IfExp, ast.BoolOp, ast.NamedExpr)


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
    if sum(isinstance(node, ast.Return) for node in nodes) != 1:
        return ()
    me, attributes = tree.args.args[0].arg, [node.attr for node in nodes if isinstance(node, ast.Attribute)]
    value: ast.AST | None
    match tree.body:
        case [*before, ast.Return(ast.Tuple([value, *rest]))]:
            others = {node.id for each in rest for node in ast.walk(each) if isinstance(node, ast.Name)}
        case [*before, ast.Return(value)]:
            others = set()
        case _:
            return ()
    found: list[str] = []
    while True:
        match value, before[-1:]:
            case ast.Call(ast.Attribute(ast.Name(owner), name), [x], []), _ if owner == me and attributes.count(name) == 1:
                if isinstance(x, ast.Starred):
                    return tuple(found)
                found.append(name)
                value = x
            case ast.Name(name), [ast.Assign([ast.Name(target)], given)] if name == target and name not in others:
                value = given
                before.pop()
            case _:
                return tuple(found)


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
