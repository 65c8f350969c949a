"""What ran where, as a table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from fdora.functional import select_backend
from fdora.integrations._peft.dora import COMPOSED, FUSED, Dora
from fdora.integrations._peft.variants import OURS


class Row(NamedTuple):
    """One adapter of one layer."""

    module: str
    adapter: str
    shape: tuple[int, ...]
    r: int
    backend: str
    why: str
    fused: int
    composed: int
    fallbacks: dict[str, int]
    why_not_fused: str
    saved: int
    """Bytes of dense temporaries that one stock forward makes and ours does not: B A, s B A, W + s B A."""


class Report(list[Row]):
    """Rows of a model; ``print`` it."""

    def __str__(self) -> str:
        lines = [
            "module  adapter  shape  r  backend  fused  composed  stock  saved MB  notes",
        ]
        for row in self:
            shape = "x".join(map(str, row.shape))
            stock = sum(row.fallbacks.values())
            notes = [f"{why} ({n})" for why, n in row.fallbacks.items()]
            if row.backend == "stock":
                notes.append(row.why)
            elif row.composed:
                notes.append(f"not fused: {row.why_not_fused}")
            cells = (row.module, row.adapter, shape, row.r, row.backend, row.fused, row.composed, stock)
            lines.append("  ".join(map(str, cells)) + f"  {row.saved / 1e6:.1f}  " + "; ".join(notes))
        return "\n".join(lines)


def rows(layers: Iterable[tuple[str, Any]]) -> list[Row]:
    return [
        row(name, layer, adapter, variant)
        for name, layer in layers
        for adapter, variant in layer.lora_variant.items()
        if isinstance(variant, Dora) or type(variant) in OURS
    ]


def row(name: str, layer: Any, adapter: str, variant: Any) -> Row:
    base = layer.get_base_layer()
    weight = getattr(base, "weight", None)
    shape = tuple(weight.shape) if weight is not None else (layer.out_features, layer.in_features)
    m = layer.lora_magnitude_vector[adapter].weight
    r = layer.r[adapter]
    if not isinstance(variant, Dora):
        return Row(name, adapter, shape, r, "stock", "use_fdora was not called on it", 0, 0, {}, "", 0)
    backend, why = select_backend(m)
    fallbacks = {k.removeprefix("stock: "): n for k, n in variant.calls.items() if k.startswith("stock: ")}
    calls = variant.calls
    saved = 3 * m.numel() * (weight.numel() // max(1, m.numel())) * m.element_size() if weight is not None else 0
    return Row(name, adapter, shape, r, backend, why, calls[FUSED], calls[COMPOSED], fallbacks, variant.why_not_fused, saved)
