"""The blocks of vision transformers that fdora knows, in timm and in transformers: ``x + drop(scale(inner(norm(x))))``, twice.

Each is written here as it is written there, beside what its attention gets; known.py says why the bytecode is compared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import CodeType
from typing import Any, NamedTuple

from torch import nn
from transformers import modeling_layers

from fdora.integrations._hook import hooked
from fdora.integrations._peft.known import body, code_of, nested


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
    function = beneath(function)
    return next((block for known, block in BLOCKS if is_written(function, known)), None)


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
    forward = type(module).forward
    return next((known.__name__ for known in (lambda1, gamma) if is_written(forward, known)), None)


def idle(module: Any) -> bool:
    """Whether calling the module now changes nothing."""
    if type(module) is nn.Dropout:
        return (module.p == 0 or not module.training) and not hooked(module)
    return type(module) is nn.Identity and not hooked(module)
