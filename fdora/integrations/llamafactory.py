"""LLaMA-Factory's DoRA through fdora's functions: another name for the command. For LLaMA-Factory 0.9.5 and newer.

    python -m fdora.integrations.llamafactory train config.yaml          # instead of llamafactory-cli train config.yaml
    torchrun --nproc-per-node 8 -m fdora.integrations.llamafactory train config.yaml

with ``use_dora: true`` in the file. Every DoRA layer that this process makes runs through fdora, then LLaMA-Factory's own
``main`` takes over: same options, same checkpoints. Nothing of it is patched; the original command runs the original code.

``--dropout-mode lora`` before ``train`` makes ``lora_dropout`` that of the adapter's input alone, see :func:`use_fdora`.

Its second version (``USE_V1=1``) has plugins: under ``peft_config`` write ``name: fdora`` instead of ``name: lora`` and
``use_dora: true``. This command registers the name; in a script of your own call :func:`register`.
"""

from __future__ import annotations

from fdora.integrations._framework import need

need("llamafactory", "llamafactory", "0.9.5")

import os
import sys
from typing import Any, Literal

from torch import nn

from fdora import FdoraError
from fdora.integrations.peft import disable, enable, report, restore, use_fdora

__all__ = ["disable", "enable", "main", "register", "report", "restore", "unregister", "use_fdora"]


def register(*, dropout_mode: Literal["peft", "lora"] = "peft") -> None:
    """``PeftPlugin("fdora")`` of the second version: its "lora" with ``use_dora``, and then :func:`use_fdora`."""
    from llamafactory.v1.plugins.model_plugins.peft import PeftPlugin, get_lora_model

    def fdora(model: nn.Module, config: dict[str, Any], is_train: bool = False) -> nn.Module:
        if any(p.is_meta for p in model.parameters()):  # LLaMA-Factory refuses it by the name "lora"
            raise FdoraError(
                "fdora.integrations.llamafactory: `model` must have its weights, got one on meta. Use another init_config."
            )
        adapted = get_lora_model(model, {**config, "use_dora": True}, is_train)
        merged = bool(config.get("adapter_name_or_path")) and not is_train
        return adapted if merged else use_fdora(adapted, dropout_mode=dropout_mode)

    PeftPlugin("fdora").register()(fdora)


def unregister() -> None:
    """Undo :func:`register`. Models made meanwhile keep running through fdora: :func:`restore` them one by one."""
    from llamafactory.v1.plugins.model_plugins.peft import PeftPlugin

    PeftPlugin._registry.pop("fdora", None)


def main() -> None:
    """LLaMA-Factory's command line in this process, with fdora in it.

    Before the command ``--dropout-mode lora`` may stand, which is the ``dropout_mode`` of :func:`use_fdora`.

    Raises:
      FdoraError: the command would train in processes that LLaMA-Factory starts by itself, without fdora; the mode is another.
    """
    from llamafactory.extras.misc import get_device_count, is_env_enabled

    mode: Any = "peft"
    if sys.argv[1:2] == ["--dropout-mode"]:
        mode = sys.argv[2] if len(sys.argv) > 2 else None
        del sys.argv[1:3]
    command = sys.argv[1] if len(sys.argv) > 1 else "help"
    train, v1, worker = command in ("train", "sft", "dpo", "rm"), is_env_enabled("USE_V1"), "LOCAL_RANK" in os.environ
    elsewhere = "webui" if command == "webui" else "USE_RAY" if train and is_env_enabled("USE_RAY") else ""
    if elsewhere:
        raise FdoraError(
            f"fdora.integrations.llamafactory: training must happen in this process, got {elsewhere}, which starts others. "
            "Use train, under torchrun for several devices."
        )
    several = is_env_enabled("FORCE_TORCHRUN") or (get_device_count() > 1 and not is_env_enabled("USE_KT"))
    if train and several and not worker:
        raise FdoraError(
            "fdora.integrations.llamafactory: training on several devices must be started by torchrun, got one process. "
            "torchrun --nproc-per-node N -m fdora.integrations.llamafactory train config.yaml, or show it one device."
        )
    enable(mode)
    if v1:
        register(dropout_mode=mode)
    if train and worker:  # what their command's own workers call
        if v1:
            from llamafactory.v1.launcher import main as run
        else:
            from llamafactory.train.tuner import run_exp as run

            del sys.argv[1]
    else:
        from llamafactory.cli import main as run
    run()


if __name__ == "__main__":
    main()
