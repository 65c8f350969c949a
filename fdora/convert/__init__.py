"""Combine adapters, turn them into plain LoRA, write them for another framework, and compute g for serving.

An adapter of a layer is ``Adapter(A, B, m, s)``; what it does to the weight is, exactly,

    W' - W = diag(g - 1) W + s diag(g) B A,      g = m / ||W + s B A|| per row

The first term has full rank, so neither adding up factors nor dropping m gives the same layer.
"""

from fdora.convert.adapter import Adapter as Adapter
from fdora.convert.adapter import adapter_scale as adapter_scale
from fdora.convert.adapter import merge as merge
from fdora.convert.files import Weights as Weights
from fdora.convert.files import read as read
from fdora.convert.files import write as write
from fdora.convert.files import write_scales as write_scales
from fdora.convert.keys import from_kohya as from_kohya
from fdora.convert.keys import from_peft as from_peft
from fdora.convert.keys import from_torchtune as from_torchtune
from fdora.convert.keys import kohya_names as kohya_names
from fdora.convert.keys import to_kohya as to_kohya
from fdora.convert.keys import to_peft as to_peft
from fdora.convert.keys import to_torchtune as to_torchtune
from fdora.convert.llama import llama_from_torchtune as llama_from_torchtune
from fdora.convert.llama import llama_to_torchtune as llama_to_torchtune
from fdora.convert.lowrank import combine as combine
from fdora.convert.lowrank import to_lora as to_lora

__all__ = [
    "Adapter",
    "Weights",
    "adapter_scale",
    "combine",
    "from_kohya",
    "from_peft",
    "from_torchtune",
    "kohya_names",
    "llama_from_torchtune",
    "llama_to_torchtune",
    "merge",
    "read",
    "to_kohya",
    "to_lora",
    "to_peft",
    "to_torchtune",
    "write",
    "write_scales",
]
