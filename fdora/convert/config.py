"""What PEFT's ``adapter_config.json`` means for its tensors.

The tensors say which layers are adapted and at what rank. The config adds the scaling, whether there are magnitudes and how W
is stored. It may also say that the layer computes something else than ``W + s B A``, or that W was changed before training. So
every field is read, or known to change nothing, or refused. A field that is not known here is refused unless it is empty.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping
from typing import Any

from fdora._check import check_rank, fail, is_number

Config = Mapping[str, Any]

READ = {"peft_type", "init_lora_weights", "lora_alpha", "alpha_pattern", "use_rslora", "use_dora", "fan_in_fan_out"}

# Which layers have an adapter and of what rank (the tensors say it), training, book-keeping, options of an initialisation.
# Biases, modules saved whole and token rows have tensors of their own, and from_peft refuses a tensor that is no adapter's.
CHANGE_NOTHING = {
    "target_modules",
    "exclude_modules",
    "layers_to_transform",
    "layers_pattern",
    "r",
    "rank_pattern",
    "lora_dropout",
    "velora_config",
    "inference_mode",
    "runtime_config",
    "ensure_weight_tying",
    "task_type",
    "base_model_name_or_path",
    "revision",
    "auto_mapping",
    "peft_version",
    "megatron_core",
    "qalora_group_size",
    "loftq_config",
    "eva_config",
    "corda_config",
    "lora_ga_config",
    "bias",
    "lora_bias",
    "modules_to_save",
    "trainable_token_indices",
}

REFUSED = {
    "layer_replication": "Its layers are copies that the model's files do not hold: save the replicated model, and adapt that.",
    "target_parameters": "One adapter there serves many experts, with a rank of its own: merge it with PEFT.",
    "alora_invocation_tokens": "It acts on some tokens only, so no weight is equal to it.",
    "arrow_config": "It chooses adapters for each token, so no weight is equal to it.",
    "monteclora_config": "Its weights are sampled, so no weight is equal to it.",
    "use_qalora": "Its A acts on groups of inputs: merge it with PEFT.",
    "use_bdlora": "Its factors are block diagonal: merge it with PEFT.",
    "kasa_config": "It changed W and has a third factor: merge it with PEFT.",
    "megatron_config": "Its tensors may be one rank's shards: gather them, and save the adapter with plain layers.",
}

# Initialisations that leave W as it is. pissa, olora, corda, loftq and lora_ga put a part of W into A and B.
KEEP_W = (True, False, None, "gaussian", "eva", "orthogonal", "mica")


def check_config(fn: str, config: Config) -> None:
    """Refuse what ``W + s B A`` and magnitudes over the rows of W, as it is in the model's files, cannot express."""
    if config.get("peft_type") != "LORA":
        remedy = "Other methods of PEFT are no LoRA, whatever their tensors are called: merge them with PEFT."
        raise fail(fn, "peft_type", "'LORA'", repr(config.get("peft_type")), remedy)
    init = config.get("init_lora_weights", True)
    if (init.lower() if isinstance(init, str) else init) not in KEEP_W:
        want = f"one that leaves W as it is ({', '.join(map(repr, KEEP_W))})"
        remedy = (
            "Save the adapter with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...); if your model's files "
            "hold the W that was left for training, set init_lora_weights to true in the config."
        )
        raise fail(fn, "init_lora_weights", want, repr(init), remedy)
    for field, value in config.items():
        if not value or field in READ or field in CHANGE_NOTHING:
            continue
        unknown = "It is not known here: set it to null, if you know that it does not change what the weights mean."
        raise fail(fn, field, "absent or empty", repr(value), REFUSED.get(field, unknown))


def scaling(fn: str, config: Config, path: str, r: int) -> float:
    """``alpha / r``, or ``alpha / sqrt(r)`` for rsLoRA, with the alpha of the first pattern that fits the path."""
    check_rank(fn, r)
    patterns = config.get("alpha_pattern") or {}
    if not isinstance(patterns, dict):
        have = f"a {type(patterns).__name__}"
        raise fail(fn, "alpha_pattern", "an object: module pattern -> alpha", have, "Save the adapter again.")
    try:
        pattern = next((pattern for pattern in patterns if re.match(rf"(.*\.)?({pattern})$", path)), None)  # PEFT's own rule
    except re.error as error:
        raise fail(fn, "alpha_pattern", "of regular expressions", error, "Save the adapter again.") from None
    alpha = number(fn, config, "lora_alpha") if pattern is None else number(fn, patterns, pattern)
    return alpha / (math.sqrt(r) if config.get("use_rslora") else r)


def number(fn: str, config: Config, field: str) -> float:
    value = config.get(field)
    if not is_number(value) or not abs(value) <= sys.float_info.max:
        raise fail(fn, field, "a finite number", repr(value), "Write into the config what the adapter was trained with.")
    return value
