"""What ran where, as rows and as a table."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from torch import nn

from fdora import FdoraError
from fdora.functional import select_backend
from fdora.integrations._peft.dora import COMPOSED, FUSED, Dora
from fdora.integrations._peft.explain import Layout, explain_rows, layout
from fdora.integrations._peft.quant import Held, family
from fdora.integrations._peft.variants import OURS
from fdora.quant import QuantWeight


class Row(NamedTuple):
    """One DoRA adapter of one layer."""

    module: str
    adapter: str
    shape: tuple[int, int]
    """(N, K); a convolution's kernel is flattened, an embedding's table transposed."""
    r: int
    backend: str
    """"eager" or "triton", or "stock" where :func:`use_fdora` was not called."""
    why: str
    fused: int
    """Calls of the whole layer at once."""
    composed: int
    """Calls of the base layer and then of its correction."""
    why_not_fused: str
    fallbacks: dict[str, int]
    """Calls that PEFT's own code served, by reason."""
    saved: int
    """Bytes that each stock forward takes for B A, s B A, W + s B A, a quantised W made dense for the norm and, in linear
    layers, the identity; and ours does not."""
    layout: Layout | None = None
    """What ``Report.explain`` reads: dtypes, what is trained; None for what is no linear layer."""
    weight: str = ""
    """How the base weight is stored, as a ``QuantWeight`` names it ("nf4"), or as its class does; empty where it is dense."""


class Report(list[Row]):
    """One row for each DoRA adapter of a model. ``print`` it."""

    def __init__(self, rows: Iterable[Row] = (), gathers: tuple[int, int] = (0, 0)):
        super().__init__(rows)
        self.gathers = gathers
        """All-gathers of a forward and backward through FSDP's units, and how many are for parts of layers alone."""

    def __str__(self) -> str:
        head = ("module", "adapter", "N x K", "r", "backend", "fused", "composed", "stock", "weight", "saved/call", "")
        table = [head, *map(cells, self)]
        widths = [max(len(line[i]) for line in table) for i in range(len(head))]
        reasons = dict.fromkeys(f"{row.backend}: {row.why}" for row in self)
        lines = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in table]
        return "\n".join([*lines, *reasons, *advice(*self.gathers)])

    def explain(self, tokens: int = 4096, gpu: str | None = None) -> str:
        """The plans of each kind of layer and their sum over the model: kernels, flops, bytes, times, what backward keeps.

        ``print(report(model).explain(gpu="h200"))``. Nothing runs. ``tokens`` of the whole batch; ``gpu`` as for
        :func:`fdora.functional.explain`, None is the GPU that the model is on.
        """
        return explain_rows(self, tokens, gpu)


def advice(gathers: int, alone: int) -> list[str]:
    if not gathers:
        return []
    line = f"FSDP: {gathers} all-gathers in a forward and backward"
    if not alone:
        return [line]
    return [f"{line}, {alone} of them for A, B and m as units of their own. Wrap whole blocks alone: {gathers - alone}."]


def cells(row: Row) -> tuple[str, ...]:
    notes = [f"stock {n}x: {why}" for why, n in row.fallbacks.items()]
    if row.composed and row.why_not_fused:
        notes.insert(0, f"not fused: {row.why_not_fused}")
    counts = map(str, (row.fused, row.composed, sum(row.fallbacks.values())))
    shape, saved = "x".join(map(str, row.shape)), f"{row.saved / 1e6:.1f} MB"
    end = (row.weight or "dense", saved, "; ".join(notes))
    return (row.module, row.adapter, shape, str(row.r), row.backend, *counts, *end)


def rows(layers: Iterable[tuple[str, Any]]) -> list[Row]:
    return [
        row(name, layer, adapter, variant)
        for name, layer in layers
        for adapter, variant in layer.lora_variant.items()
        if isinstance(variant, Dora) or type(variant) in OURS
    ]


def row(name: str, layer: Any, adapter: str, variant: Any) -> Row:
    m = layer.lora_magnitude_vector[adapter].weight
    linear = adapter in layer.lora_A
    A = layer.lora_A[adapter].weight if linear else layer.lora_embedding_A[adapter]
    base = layer.get_base_layer()
    N, K = shape = m.numel(), math.prod(A.shape[1:])  # indexing a sharded parameter would communicate
    if type(base) is nn.Linear:  # of the whole: FSDP1 and ZeRO-3 leave pieces of any shape in the place of parameters
        N, K = shape = base.out_features, base.in_features
    r = layer.r[adapter]
    if not isinstance(variant, Dora):
        why = "use_fdora was not called, or not since"
        return Row(name, adapter, shape, r, "stock", why, 0, 0, "", {}, 0, layout(layer, adapter), stored(layer, Held()))
    backend, why = select_backend(m)
    eye = K * K if linear and (A.dim() == 2 or type(base) is nn.Linear) else 0
    weight = stored(layer, variant.held)
    fallbacks = {path.removeprefix("stock: "): n for path, n in variant.calls.items() if path not in (FUSED, COMPOSED)}
    counts = variant.calls[FUSED], variant.calls[COMPOSED], variant.why_not_fused, fallbacks
    saved = ((4 if weight else 3) * N * K + eye) * A.element_size()
    return Row(name, adapter, shape, r, backend, why, *counts, saved, layout(layer, adapter), weight)


def stored(layer: Any, held: Held) -> str:
    base = layer.get_base_layer()
    kind = family(base)
    try:
        W = held.of(base, kind) if kind else ""
    except FdoraError:  # nobody can decode it any more
        return kind
    return W.kind if isinstance(W, QuantWeight) else kind
