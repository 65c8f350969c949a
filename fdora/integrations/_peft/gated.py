"""The gated MLPs that fdora knows, by their whole forward: transformers', and timm's, with gate and up in one weight or two."""

from __future__ import annotations

from typing import Any, NamedTuple

from fdora.integrations._peft.known import MLP, is_gated_mlp
from fdora.integrations._peft.vit import idle, is_written


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
TIMM: tuple[tuple[Any, Gated], ...] = (
    (timm_swiglu, Gated("fc1_g", "fc1_x", "fc2", "act", REST)),
    (timm_packed, Gated("fc1", "fc1", "fc2", "act", REST, packed=True)),
)


def gated_of(function: Any) -> Gated | None:
    if is_gated_mlp(function):
        return Gated(*MLP, "act_fn")
    return next((how for known, how in TIMM if is_written(function, known)), None)
