"""Quantised base weights as values: what is stored, what it stands for, and how to read it. Depends on no vendor's package.

W = from_bnb(layer.weight)                 # or from_hqq, from_torchao, from_gptq, ...: nothing is copied
W.shape, W.dtype, W.kind                   # (N, K), torch.bfloat16, "nf4"
W.dequantize(rows=slice(0, 128))           # in plain torch
"""

from fdora.quant.bnb import from_bnb as from_bnb
from fdora.quant.bnb import from_bnb_int8 as from_bnb_int8
from fdora.quant.codes8 import Codes8 as Codes8
from fdora.quant.codes8 import from_fp8 as from_fp8
from fdora.quant.codes8 import from_int8 as from_int8
from fdora.quant.cut import cut as cut
from fdora.quant.gptq import Gptq as Gptq
from fdora.quant.gptq import from_awq as from_awq
from fdora.quant.gptq import from_gptq as from_gptq
from fdora.quant.hqq import Hqq as Hqq
from fdora.quant.hqq import from_hqq as from_hqq
from fdora.quant.kinds import Kind as Kind
from fdora.quant.kinds import register_kind as register_kind
from fdora.quant.lut4 import TABLES as TABLES
from fdora.quant.lut4 import Lut4 as Lut4
from fdora.quant.mx import from_mxfp4 as from_mxfp4
from fdora.quant.mx import from_nvfp4 as from_nvfp4
from fdora.quant.opaque import Opaque as Opaque
from fdora.quant.opaque import opaque as opaque
from fdora.quant.quantize import quantize as quantize
from fdora.quant.torchao import Affine as Affine
from fdora.quant.torchao import TorchaoNf4 as TorchaoNf4
from fdora.quant.torchao import from_torchao as from_torchao
from fdora.quant.weight import QuantSpec as QuantSpec
from fdora.quant.weight import QuantWeight as QuantWeight

SAFE = [QuantWeight, Lut4, Codes8, Hqq, Gptq, TorchaoNf4, Affine]
"""Classes that a saved weight names, for ``torch.serialization.safe_globals``. Not Opaque: it holds a function."""

__all__ = [
    "SAFE",
    "TABLES",
    "Affine",
    "Codes8",
    "Gptq",
    "Hqq",
    "Kind",
    "Lut4",
    "Opaque",
    "QuantSpec",
    "QuantWeight",
    "TorchaoNf4",
    "cut",
    "from_awq",
    "from_bnb",
    "from_bnb_int8",
    "from_fp8",
    "from_gptq",
    "from_hqq",
    "from_int8",
    "from_mxfp4",
    "from_nvfp4",
    "from_torchao",
    "opaque",
    "quantize",
    "register_kind",
]
