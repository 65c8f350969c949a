"""Quantised base weights as values: what is stored, what it stands for, and how to read it. Depends on no vendor's package.

W = from_bnb(layer.weight)                 # or from_hqq, from_torchao, from_gptq, ...: nothing is copied
W.shape, W.dtype, W.kind                   # (N, K), torch.bfloat16, "nf4"
W.dequantize(rows=slice(0, 128))           # in plain torch
"""

from fdora.quant.bnb import from_bnb, from_bnb_int8
from fdora.quant.codes8 import Codes8, from_fp8, from_int8, from_mxfp8, with_transpose
from fdora.quant.cut import cut
from fdora.quant.gptq import Gptq, from_awq, from_gptq
from fdora.quant.hqq import Hqq, from_hqq
from fdora.quant.lut4 import TABLES, Lut4
from fdora.quant.mx import from_mxfp4, from_nvfp4
from fdora.quant.opaque import Opaque, opaque
from fdora.quant.quantize import quantize
from fdora.quant.torchao import Affine, TorchaoNf4, from_torchao
from fdora.quant.weight import Kind, QuantSpec, QuantWeight, register_kind

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
    "from_mxfp8",
    "from_nvfp4",
    "from_torchao",
    "opaque",
    "quantize",
    "register_kind",
    "with_transpose",
]
