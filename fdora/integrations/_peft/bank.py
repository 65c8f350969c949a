"""The adapters of a PEFT model as banks for dora_linear_multi, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdora import FdoraError
from fdora.functional import DoraParams, dora_stack, dora_unstack


class LayerBank(NamedTuple):
    """Adapters of one layer, copied: what :func:`fdora.functional.dora_linear_multi` takes of them."""

    adapters: tuple[str, ...]
    """Their names, in the order of the bank. An adapter that this layer lacks is not among them."""
    params: DoraParams
    """A (G, r, K), B (G, N, r), m (G, N); a row of ones in m for plain LoRA, which wants one in the norm as well."""
    s: tuple[float, ...]
    ranks: tuple[int, ...]
    dora: tuple[bool, ...]
    """Whether each has a magnitude."""


def banks_of(layers: Iterable[tuple[str, Any]], adapters: Sequence[str] | None) -> dict[str, LayerBank]:
    found = {}
    for path, layer in layers:
        parts = {name: parts_of(path, layer, name) for name in adapters or layer.lora_A if name in layer.lora_A}
        if not parts:
            continue
        dora = tuple(m is not None for _, _, m in parts.values())
        like = next((m for _, _, m in parts.values() if m is not None), None)
        ones: Any = None if like is None else torch.ones_like(like)
        whole = [DoraParams(A, B, ones if m is None else m) for A, B, m in parts.values()]
        ranks, s = tuple(p.A.shape[0] for p in whole), tuple(float(layer.scaling[name]) for name in parts)
        found[path] = LayerBank(tuple(parts), dora_stack(whole), s, ranks, dora)
    if not found:
        raise FdoraError(f"fdora.read_banks: `adapters` must be names of linear adapters, got {adapters}. The model has none.")
    return found


def put_banks(layers: Iterable[tuple[str, Any]], banks: dict[str, LayerBank]) -> None:
    known = dict(layers)
    for path, bank in banks.items():
        if path not in known:
            raise FdoraError(f"fdora.write_banks: `banks` must be of this model's layers, got `{path}`. It has no such layer.")
        params = dora_unstack(bank.params, bank.ranks)
        for name, new in zip(bank.adapters, params, strict=True):
            for t, value in zip(parts_of(path, known[path], name), new, strict=True):
                if t is None:
                    continue
                if t.shape != value.shape or t.dtype != value.dtype:
                    have = f"{tuple(value.shape)} {value.dtype} for `{name}` of `{path}`"
                    want = f"{tuple(t.shape)} {t.dtype}"
                    raise FdoraError(f"fdora.write_banks: `banks` must hold {want}, got {have}. Read them from this model.")
                t.copy_(value)


def parts_of(path: str, layer: Any, name: str) -> tuple[Any, Any, Tensor | None]:
    """A, B and m, the model's own tensors."""
    A, B = layer.lora_A[name].weight, layer.lora_B[name].weight
    if A.dim() != 2:
        raise FdoraError(
            f"fdora.read_banks: `model` must have linear adapters, got a convolution at `{path}`. Name `adapters`."
        )
    magnitude = layer.lora_magnitude_vector
    return A.detach(), B.detach(), magnitude[name].weight.detach() if name in magnitude else None
