"""Combine adapters, turn them into plain LoRA, write them for another framework, and compute g for serving.

An adapter of a layer is ``Adapter(A, B, m, s)``; what it does to the weight is, exactly,

    W' - W = diag(g - 1) W + s diag(g) B A,      g = m / ||W + s B A|| per row

The first term has full rank, so neither adding up factors nor dropping m gives the same layer.
"""

from fdora.convert.adapter import Adapter, adapter_scale, for_comfyui, merge
from fdora.convert.files import Weights, read, write, write_scales
from fdora.convert.keys import (
    from_diffusers,
    from_kohya,
    from_peft,
    from_torchtune,
    kohya_names,
    llama_from_torchtune,
    llama_to_torchtune,
    to_diffusers,
    to_kohya,
    to_peft,
    to_torchtune,
)
from fdora.convert.lowrank import combine, to_lora

__all__ = [
    "Adapter",
    "Weights",
    "adapter_scale",
    "combine",
    "for_comfyui",
    "from_diffusers",
    "from_kohya",
    "from_peft",
    "from_torchtune",
    "kohya_names",
    "llama_from_torchtune",
    "llama_to_torchtune",
    "merge",
    "read",
    "to_diffusers",
    "to_kohya",
    "to_lora",
    "to_peft",
    "to_torchtune",
    "write",
    "write_scales",
]
