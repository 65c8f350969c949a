"""ms-swift's DoRA through fdora's functions: ``--tuner_type fdora``. For ms-swift 4.6 and newer.

A plugin file of your own, in a folder of its own, with two lines:

    from fdora.integrations.swift import register
    register()

    swift sft --external_plugins fdora_plugin.py --tuner_type fdora --lora_rank 16 ...

It is SWIFT's ``--tuner_type lora --use_dora true`` (same options, same checkpoints, same defaults: a ``lora_dropout`` of 0.05
is one of them), and then :func:`use_fdora`. To merge or serve a checkpoint, or train on without fdora: ``--tuner_type lora``.
"""

from __future__ import annotations

from fdora.integrations._framework import need, set_aside

need("swift", "ms-swift", "4.6.0")

import copy
from typing import Any, Literal, TypeVar

from peft.tuners.lora.layer import LoraLayer
from torch import nn

from fdora import FdoraError
from fdora.integrations import peft
from fdora.integrations.peft import report, restore

if __name__.startswith("_swift_external"):  # SWIFT then puts this folder, which has a file called peft.py, first on the path
    raise FdoraError(
        "fdora.integrations.swift: `--external_plugins` must be a file of your own, got this one. "
        "Put `from fdora.integrations.swift import register; register()` into a file in another folder and pass that."
    )

from swift.tuner_plugin import PeftTuner, tuners_map

__all__ = ["FdoraTuner", "register", "report", "restore", "unregister", "use_fdora"]

Model = TypeVar("Model", bound=nn.Module)


class FdoraTuner(PeftTuner):
    """SWIFT's own DoRA, run by fdora."""

    dropout_mode: Literal["peft", "lora"] = "peft"

    @staticmethod
    def prepare_model(args: Any, model: nn.Module) -> nn.Module:
        if args.tuner_backend != "peft":
            raise FdoraError(
                f"fdora.integrations.swift: `tuner_backend` must be peft, got {args.tuner_backend}. "
                "With Unsloth, call fdora.integrations.unsloth.use_fdora in a script of your own."
            )
        from swift.pipelines.train.tuner import prepare_adapter

        args = copy.copy(args)
        args.tuner_type, args.use_dora = "lora", True
        return use_fdora(prepare_adapter(args, model), dropout_mode=FdoraTuner.dropout_mode)

    @staticmethod
    def from_pretrained(model: nn.Module, model_id: str, **kwargs: Any) -> nn.Module:
        return use_fdora(PeftTuner.from_pretrained(model, model_id, **kwargs), dropout_mode=FdoraTuner.dropout_mode)

    @staticmethod
    def save_pretrained(
        model: nn.Module,
        save_directory: str,
        state_dict: dict[str, Any] | None = None,
        safe_serialization: bool = True,
        **kwargs: Any,
    ) -> None:
        """With the tensors that SWIFT gathered: those of a sharded model are pieces. PeftTuner leaves ``state_dict`` out."""
        kwargs = {"selected_adapters": ["default"]} | kwargs
        model.save_pretrained(save_directory, safe_serialization=safe_serialization, state_dict=state_dict, **kwargs)  # type: ignore[operator]


def register(*, dropout_mode: Literal["peft", "lora"] = "peft") -> None:
    """``--tuner_type fdora`` exists from now on, in this process; ``lora_dropout`` means what ``dropout_mode`` says."""
    FdoraTuner.dropout_mode = dropout_mode
    tuners_map["fdora"] = FdoraTuner


def unregister() -> None:
    """Undo :func:`register`. Models made meanwhile keep running through fdora: :func:`restore` them one by one."""
    FdoraTuner.dropout_mode = "peft"
    tuners_map.pop("fdora", None)


def use_fdora(model: Model, *, dropout_mode: Literal["peft", "lora"] = "peft") -> Model:
    """:func:`fdora.integrations.peft.use_fdora`, for a model with SWIFT's adapters. Idempotent.

    SWIFT binds a ``forward`` to every A and B that first moves its input to its weight's device. Where the layer is on one
    device that does nothing but keep fdora from reading A and B itself: it is set aside there.

    Raises:
      FdoraError: there is no DoRA adapter in the model.
    """
    peft.use_fdora(model, dropout_mode=dropout_mode)
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            parts = [*layer.lora_A.values(), *layer.lora_B.values()]
            if len({p.device for p in layer.parameters()}) == 1:
                for part in parts:
                    if "forward_origin" in part.__dict__ and "forward" in part.__dict__:
                        set_aside(part, "forward")
    return model
