"""The adapters of a model as banks for dora_linear_multi, and back."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fdora import FdoraError
from fdora.functional import DoraParams, dora_stack, dora_unstack
from fdora.integrations._peft.quantised import look, weight_of
from fdora.quant import QuantWeight


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
    W: Tensor | QuantWeight | None
    """The base layer's own weight; None where it has another product than that of a weight that can be read."""


def banks_of(layers: Iterable[tuple[str, Any]], adapters: Sequence[str] | None) -> dict[str, LayerBank]:
    fn, found, seen = "fdora.read_banks", {}, set[str]()
    if isinstance(adapters, str):
        raise FdoraError(f"{fn}: `adapters` must be a sequence of names, got {adapters!r}. Pass [{adapters!r}].")
    for path, layer in layers:
        names = [name for name in (layer.lora_A if adapters is None else adapters) if name in layer.lora_A]
        parts = {name: parts_of(fn, path, layer, name) for name in names}
        seen.update(parts)
        if not parts:
            continue
        dora = tuple(m is not None for _, _, m in parts.values())
        like = next((m for _, _, m in parts.values() if m is not None), None)
        ones: Any = None if like is None else torch.ones_like(like)
        whole = [DoraParams(A, B, ones if m is None else m) for A, B, m in parts.values()]
        ranks, s = tuple(p.A.shape[0] for p in whole), tuple(float(layer.scaling[name]) for name in parts)
        found[path] = LayerBank(tuple(parts), dora_stack(whole), s, ranks, dora, weight_below(layer))
    lacking = [name for name in adapters or () if name not in seen]
    if lacking or not found:
        have = lacking or adapters
        raise FdoraError(f"{fn}: `adapters` must be names of linear adapters, got {have}. No layer has such an adapter.")
    return found


def put_banks(layers: Iterable[tuple[str, Any]], banks: dict[str, LayerBank]) -> None:
    fn, known = "fdora.write_banks", dict(layers)
    pairs = []
    for path, bank in banks.items():
        if path not in known:
            raise FdoraError(f"{fn}: `banks` must be of this model's layers, got `{path}`. It has no such layer.")
        params = dora_unstack(bank.params, bank.ranks)
        if len(params) != len(bank.adapters):
            have = f"{len(params)} for {bank.adapters} of `{path}`"
            raise FdoraError(f"{fn}: `banks` must hold a row for each adapter, got {have}. Read them from this model.")
        for name, new in zip(bank.adapters, params, strict=True):
            if name not in known[path].lora_A:
                have = f"`{name}` of `{path}`"
                raise FdoraError(f"{fn}: `banks` must be of the model's adapters, got {have}. Read them from this model.")
            for t, value in zip(parts_of(fn, path, known[path], name), new, strict=True):
                if t is None:
                    continue
                got, want = (None if u is None else f"{tuple(u.shape)} {u.dtype}" for u in (value, t))
                if got != want:
                    raise FdoraError(
                        f"{fn}: `banks` must hold {want}, got {got} for `{name}` of `{path}`. Read them from this model."
                    )
                pairs.append((t, value))
    for t, value in pairs:  # all of them fit: a bank that is refused changes nothing
        t.copy_(value)


def weight_below(layer: Any) -> Tensor | QuantWeight | None:
    base = layer.get_base_layer()
    kind, own_product = look(base)
    if not kind:
        return base.weight if type(base) is nn.Linear else None
    W = own_product or weight_of(base, kind, None)
    return None if isinstance(W, str) else W


def parts_of(fn: str, path: str, layer: Any, name: str) -> tuple[Any, Any, Tensor | None]:
    """A, B and m, the model's own tensors. What is more than these three is refused: a bank would be another adapter."""
    A, B = layer.lora_A[name].weight, layer.lora_B[name].weight
    magnitude = layer.lora_magnitude_vector
    have = ""
    if A.dim() != 2:
        have = "a convolution"
    elif any(getattr(part[name], "bias", None) is not None for part in (layer.lora_A, layer.lora_B)):
        have = "a bias beside A and B (lora_bias)"
    elif name in layer.lora_variant and name not in magnitude:
        have = f"a {type(layer.lora_variant[name]).__name__}"
    if have:
        raise FdoraError(f"{fn}: `model` must have linear adapters of A, B and m, got {have} at `{path}`. Name `adapters`.")
    return A.detach(), B.detach(), magnitude[name].weight.detach() if name in magnitude else None
