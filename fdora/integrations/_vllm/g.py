"""g of a layer of vLLM, from the weight in whatever format its own product reads."""

from __future__ import annotations

from collections.abc import Iterator
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from fdora.functional import dora_norm, dora_scale

ROWS = 512  # unit rows in one product
UNIT = 64.0  # in steps of a quantised activation: float8 and int8 hold it


def g_of(module: Any, slot: int, m: Any) -> Tensor:
    """``m / ||W + B A||`` of this process's rows, A and B as the slot has them (s is in B); 1 where a part has no m."""
    As, Bs = ([t[slot, 0] for t in stacked] for stacked in (module.lora_a_stacked, module.lora_b_stacked))
    ends = torch.tensor([0, *(len(B) for B in Bs)]).cumsum(0).tolist()
    squares = torch.zeros(ends[-1], device=Bs[0].device)
    for columns, W in parts_of(module):
        for i, (A, B) in enumerate(zip(As, Bs, strict=True)):
            rows = slice(ends[i], ends[i + 1])
            factors = [t if t.dtype == W.dtype else t.float() for t in (A[:, columns], B)]
            squares[rows] += dora_norm(W[rows], *factors, s=1.0, squared=True)
    if module.tp_size > 1 and type(module).over_columns:
        squares = import_module("vllm.distributed").tensor_model_parallel_all_reduce(squares)
    cut, given = torch.cat(own_part(module, m)).unbind(1)
    return torch.where(given > 0, dora_scale(cut, squares.sqrt()), 1)


def parts_of(module: Any) -> Iterator[tuple[slice, Tensor]]:
    """Columns of W, (N, columns) each. Of a quantised weight, in any format, unit rows times W^T through vLLM's product."""
    base, (N, K) = module.base_layer, (module.g_stacked.shape[1], module.lora_a_stacked[0].shape[-1])
    plain = import_module("vllm.model_executor.layers.linear").UnquantizedLinearMethod
    W = getattr(base, "weight", None)
    if isinstance(base.quant_method, plain) and W is not None and tuple(W.shape) == (N, K):
        yield slice(0, K), W.detach().as_subclass(Tensor)
        return
    step = getattr(base, "input_scale", None)
    unit = 1.0 if step is None else UNIT * float(step.max())
    dtype = getattr(base, "params_dtype", module.lora_a_stacked[0].dtype)
    for k in range(0, K, ROWS):
        x = torch.zeros(min(ROWS, K - k), K, dtype=dtype, device=module.g_stacked.device)
        x.diagonal(k).fill_(unit)
        yield slice(k, k + len(x)), (base.quant_method.apply(base, x, None).float() / unit).T


def own_part(module: Any, m: Any) -> list[Tensor]:
    """Of the magnitudes of whole layers those of this process, beside a 1 where there is one: (rows, 2) for each part.

    vLLM's own code cuts them: they are set as a B of two columns, in buffers that are there for that long.
    """
    kept = module.lora_a_stacked, module.lora_b_stacked
    device = kept[1][0].device
    module.lora_a_stacked = tuple([torch.zeros(1, 1, 1, A.shape[-1], device=device) for A in kept[0]])
    module.lora_b_stacked = tuple([torch.zeros(1, 1, B.shape[2], 2, device=device) for B in kept[1]])
    as_B = [None if t is None else torch.stack((t, torch.ones_like(t)), 1) for t in (m if isinstance(m, list) else [m])]
    as_A = [None if t is None else torch.zeros(1, 1) for t in as_B]
    try:
        module.set_lora(0, *((as_A, as_B) if isinstance(m, list) else (as_A[0], as_B[0])))
        return [B[0, 0] for B in module.lora_b_stacked]
    finally:
        module.lora_a_stacked, module.lora_b_stacked = kept
