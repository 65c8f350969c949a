"""Dense base layers whose weight is rounded to 8 bits, for ``use_fdora(model, compute="fp8")``, and how they come back.

The class of the base layer is exchanged for one that holds e4m3 codes and a scale for each row. The rest of the shim knows it
by these, as it knows the layers of an FP8 checkpoint. Its own forward, which runs where no adapter is active, multiplies by
the decoded weight.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fdora._torch import PLAIN
from fdora.integrations._hook import hooked
from fdora.integrations._peft.quantised import family, of_codes
from fdora.quant import quantize

RECORD = {"fdora": {"base": "rounded to float8_e4m3fn with a scale for each row"}}
SAVE = "save_pretrained"  # of an adapter's config


class Rounded(nn.Linear):
    """``weight`` (N, K) e4m3 codes, ``weight_scale`` (N, 1) float32."""

    weight_scale: nn.Parameter
    dense: Any
    """What the weight was: its dtype, or a copy of it on the CPU."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, of_codes(self).dequantize(x.dtype), self.bias)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """``model.to(dtype)`` is of the numbers that codes stand for: what is stored moves, and keeps its bits."""
        ints = {id(self.weight): torch.uint8, id(self.weight_scale): torch.int32}

        def moved(t: Tensor) -> Tensor:
            return fn(t.view(ints[id(t)])).view(t.dtype) if id(t) in ints else fn(t)

        return super()._apply(moved, recurse)

    def _load_from_state_dict(self, state: Any, prefix: str, *args: Any) -> None:
        W, errors = state.get(f"{prefix}weight"), args[-1]
        if W is not None and W.dtype != self.weight.dtype:
            errors.append(
                f"{prefix}weight is {W.dtype}, and use_fdora rounded this layer to 8 bits: restore(model), then load."
            )
        else:
            super()._load_from_state_dict(state, prefix, *args)


def record(model: nn.Module, tuners: Iterable[Any]) -> None:
    """From now on what PEFT saves of the adapters of a rounded base says so: in the one field of their config that may hold
    anything, and that PEFT itself writes where a config names no task."""
    configs = [config for tuner in tuners for config in tuner.peft_config.values()]
    for config in configs if any(isinstance(module, Rounded) for module in model.modules()) else ():
        vars(config)[SAVE] = partial(save, config)


def save(config: Any, folder: Any, auto_mapping_dict: Any = None, **kwargs: Any) -> None:
    noted = (auto_mapping_dict or config.auto_mapping or {}) | RECORD
    getattr(type(config), SAVE)(config, folder, auto_mapping_dict=noted, **kwargs)


def tied(model: nn.Module) -> set[int]:
    """Ids of the parameters that two modules have."""
    count = Counter(id(p) for _, p in model.named_parameters(remove_duplicate=False))
    return {key for key, times in count.items() if times > 1}


@torch.inference_mode(False)
@torch.no_grad()
def round_base(base: Any, shared: set[int], keep: str | None) -> str:
    """Exchange a dense weight for codes; or why it stays. Of a quantised one the call says what it makes of it."""
    if family(base):
        return ""
    W = base._parameters.get("weight")
    if type(base) is not nn.Linear or hooked(base) or type(W) not in PLAIN:
        return "not a plain torch.nn.Linear, or one with hooks"
    if W.dtype not in (torch.float16, torch.bfloat16):
        return f"a {W.dtype} base weight"
    if id(W) in shared or W.requires_grad:
        return "a base weight that another module has, too, or that is trained"
    if W.is_meta or not W.untyped_storage().size():
        return "a base weight without storage (sharded, or on meta)"
    stored: Any = quantize(W.detach(), "fp8", block="row").tensors
    codes, scale = stored
    base.__class__ = Rounded
    base.dense = W.detach().cpu() if keep else W.dtype
    base.weight = nn.Parameter(codes, requires_grad=False)
    base.weight_scale = nn.Parameter(scale[:, None], requires_grad=False)
    return ""


def unround(model: nn.Module) -> None:
    """The dense layers again, with the weight that was kept, or with the rounded one, of which a warning tells."""
    rounded = 0
    for module in model.modules():
        if isinstance(module, Rounded):
            base: Any = module
            W, kept = base.dense, isinstance(base.dense, Tensor)
            W = W.to(base.weight.device) if kept else of_codes(base).dequantize(W)
            rounded += not kept
            del base.weight_scale, base.dense
            base.__class__ = nn.Linear
            base.weight = nn.Parameter(W, requires_grad=False)
    if rounded:
        warnings.warn(
            f"fdora.restore: the weights of {rounded} base layers are dense again and stay rounded to 8 bits: their adapters "
            "were trained on these. For the weights of before load them again, or pass keep='cpu' to use_fdora.",
            stacklevel=3,
        )
