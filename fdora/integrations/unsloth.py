"""Unsloth's DoRA through fdora's functions: one line after ``get_peft_model``. For Unsloth 2026.10.9 and newer.

    model = FastLanguageModel.get_peft_model(model, r=16, use_dora=True, ...)
    use_fdora(model)
    restore(model)       # as if nothing had been

Unsloth's fused LoRA kernels know no magnitude. Since 2026.10.9 each of them, in training and in ``generate``, calls the layers
one by one where a DoRA adapter is active, and so PEFT's DoRA, which this replaces. Before, token by token decoding ran the
adapter without its magnitude, and nothing that is set on a model can change that: an older Unsloth is refused.
"""

from __future__ import annotations

from fdora.integrations._framework import need

need("unsloth", "unsloth", "2026.10.9")

from typing import Literal, TypeVar

from torch import nn

from fdora.integrations import peft
from fdora.integrations.peft import report, restore

__all__ = ["report", "restore", "use_fdora"]

Model = TypeVar("Model", bound=nn.Module)


def use_fdora(model: Model, *, dropout_mode: Literal["peft", "lora"] = "peft") -> Model:
    """:func:`fdora.integrations.peft.use_fdora` for Unsloth's models; refuses versions that ignore m in places. Idempotent.

    Raises:
      FdoraError: Unsloth is not installed or older than 2026.10.9; there is no DoRA adapter in the model.
    """
    need("unsloth", "unsloth", "2026.10.9")
    return peft.use_fdora(model, dropout_mode=dropout_mode)
