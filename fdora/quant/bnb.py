"""bitsandbytes: NF4 and FP4, plain and double-quantised, and int8. Known by its attributes, never imported."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fdora._check import FLOATS, fail
from fdora.quant.codes8 import coded
from fdora.quant.lut4 import NESTED, Lut4
from fdora.quant.weight import QuantWeight, made, matrix, stored

STATE = ("absmax", "shape", "blocksize", "quant_type", "dtype", "offset", "state2")  # of a QuantState
STORAGE = (torch.uint8, torch.bfloat16, torch.float16, torch.float32, torch.float64)
UNIT = 7.874015718698502e-3  # 1 / 127, as bitsandbytes writes it


def from_bnb(weight: Tensor, quant_state: Any = None) -> QuantWeight:
    """``W[n, k] = table[code(n K + k)] * absmax[(n K + k) // blocksize]``, where double-quantised scales are
    ``absmax[b] = code256[codes[b]] * absmax2[b // 256] + offset``.

    Args:
      weight: ``Params4bit`` of a ``Linear4bit``, or its data with ``quant_state``. Data that FSDP keeps in a floating dtype
        (``quant_storage``) is read as bytes. Of a parameter (E, N, K), the experts of a mixture, the weight is (E N, K).
      quant_state: the ``QuantState``; None takes that of ``weight``, which FSDP drops: ``layer.quant_state`` still has it.

    Returns:
      ``QuantWeight`` of kind nf4 or fp4, of the state's dtype, bit for bit what bitsandbytes dequantises (in float32).

    Raises:
      FdoraError: there is no state or not such a one; the CPU forward of bitsandbytes has packed the weight anew
        (``packing_format_for_cpu``), after which its own ``dequantize_4bit`` is wrong too; a shape, dtype or device
        does not fit.

    Memory: keeps the tensors of bitsandbytes, and copies none.
    References: Dettmers et al., QLoRA, 2023, arXiv:2305.14314; bitsandbytes 0.50, ``functional.quantize_4bit``.
    """
    fn = "quant.from_bnb"
    state: Any = getattr(weight, "quant_state", None) if quant_state is None else quant_state
    if getattr(state, "packing_format_for_cpu", False):
        remedy = "Load the layer anew, and do not run it in eval mode on a CPU before: that repacks the weight in place."
        raise fail(fn, "weight", "in the order of quantize_4bit", "a weight packed for the CPU", remedy)
    if not isinstance(weight, Tensor) or not all(hasattr(state, a) for a in STATE):
        have = f"a {type(weight).__name__} with {'no' if state is None else f'a {type(state).__name__} for'} quant_state"
        raise fail(
            fn, "weight", "a quantised Params4bit, or its data and a QuantState", have, "Pass quant_state=layer.quant_state."
        )
    if state.quant_type not in ("nf4", "fp4"):
        raise fail(fn, "quant_state.quant_type", "nf4 or fp4", repr(state.quant_type), "Quantise the layer with one of them.")
    if state.dtype not in FLOATS:
        raise fail(
            fn, "quant_state.dtype", "a floating dtype of torch", state.dtype, "Pass the QuantState of a quantised layer."
        )
    shape = tuple(state.shape)
    N, K = matrix(fn, (shape[0] * shape[1], shape[2]) if len(shape) == 3 else shape)
    group = state.blocksize
    if not isinstance(group, int) or group < 2 or group % 2:
        raise fail(fn, "quant_state.blocksize", "an even number", group, "Quantise the layer with blocksize=64.")
    codes = stored(fn, "weight", weight, STORAGE).view(-1).view(torch.uint8)
    size, groups = -(-N * K // 2), -(-N * K // group)
    if codes.shape[0] != size and not (weight.dtype != torch.uint8 and 0 <= codes.shape[0] - size < weight.element_size()):
        have = f"{codes.shape[0]} bytes"
        raise fail(
            fn, "weight", f"{size} bytes for its shape {(N, K)}", have, "Gather the whole weight of a sharded layer first."
        )
    kind, outer, fp32 = str(state.quant_type), state.state2, (torch.float32,)
    if outer is not None and outer.blocksize != NESTED:
        remedy = "Quantise with bitsandbytes' defaults."
        raise fail(fn, "quant_state.state2.blocksize", f"{NESTED}", outer.blocksize, remedy)
    absmax = stored(fn, "quant_state.absmax", state.absmax, fp32 if outer is None else (torch.uint8,), (groups,))
    tensors = [codes[:size], absmax]
    if outer is not None:
        tensors += [
            stored(fn, "quant_state.state2.code", outer.code, fp32, (256,)),
            stored(fn, "quant_state.state2.absmax", outer.absmax, fp32, (-(-groups // NESTED),)),
            stored(fn, "quant_state.offset", state.offset, fp32, ()),
        ]
    facts = Lut4(kind, True, group, "fp32" if outer is None else "nested", "flat")
    return made(fn, kind, tuple(tensors), (N, K), state.dtype, facts)


def from_bnb_int8(weight: Tensor, scb: Tensor | None = None, *, dtype: torch.dtype = torch.float16) -> QuantWeight:
    """``W[n, k] = weight[n, k] * scb[n] * (1 / 127)``: LLM.int8.

    Args:
      weight: ``Int8Params`` of a ``Linear8bitLt``, or its data (N, K) int8 with ``scb``.
      scb: (N,) float32 absolute maxima of the rows; None takes ``weight.SCB``. After the layer's first forward they are
        ``layer.state.SCB``.
      dtype: that the weight stands for. bitsandbytes quantises from float16 and does not say.

    Returns:
      ``QuantWeight`` of kind int8, bit for bit what bitsandbytes dequantises to float32. It is decoded in float32.

    Raises:
      FdoraError: the weight is not quantised yet, or there are no such ``scb``, or on another device.

    Memory: keeps the tensors of bitsandbytes, and copies none.
    References: Dettmers et al., LLM.int8(), 2022, arXiv:2208.07339; bitsandbytes 0.50, ``functional.int8_vectorwise_dequant``.
    """
    fn = "quant.from_bnb_int8"
    scb = getattr(weight, "SCB", None) if scb is None else scb
    if not isinstance(weight, Tensor) or not isinstance(scb, Tensor):
        have = f"a {type(weight).__name__} with {'no scb' if scb is None else f'a {type(scb).__name__}'}"
        remedy = "Pass scb=layer.state.SCB, or move the layer to its device first, which quantises it."
        raise fail(fn, "weight", "int8 with float32 `scb`", have, remedy)
    codes = stored(fn, "weight", weight, (torch.int8,))
    N, _ = matrix(fn, codes.shape)
    scales = stored(fn, "scb", scb, (torch.float32,), (N,))
    return coded(fn, "int8", "int8", codes, scales, "row", dtype, UNIT)
