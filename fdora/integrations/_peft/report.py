"""What ran where, as rows and as a table; what a step costs in the adapted layers of a model, by the plans of its calls."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fdora import FdoraError
from fdora._command import align
from fdora._records import DropoutMode
from fdora._torch import PLAIN
from fdora.functional import Explanation, dora_linear, select_backend
from fdora.functional import explain as explain_call
from fdora.integrations._peft.dora import COMPOSED, Dora
from fdora.integrations._peft.fast_path import CODES, FUSED
from fdora.integrations._peft.fast_path import dtypes as unserved
from fdora.integrations._peft.quantised import WeightCache, family
from fdora.integrations._peft.sharded import modules_of, weight_of
from fdora.integrations._peft.variants import OURS
from fdora.quant import QuantWeight


class Layout(NamedTuple):
    """What a plan may know of a linear layer: layers of one layout are explained once."""

    operands: tuple[Any, ...]
    """Of W, A, B, m and bias the shape, the dtype and whether it is trained; None for no bias."""
    s: float
    p: float
    mode: DropoutMode
    """Of dropout."""
    device: str


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
    layout: Layout | None
    """What ``Report.explain`` reads: dtypes, what is trained; None for what is no linear layer."""
    weight: str
    """How the base weight is stored, as a ``QuantWeight`` names it ("nf4"), or as its class does; empty where it is dense."""
    p: float
    """``lora_dropout``; 0 where the layer has none or does not use it."""
    dropout_mode: str
    """What that means; see :func:`use_fdora`."""
    compute: str | None
    """As :func:`use_fdora` was asked."""
    codes: int
    """How many of the fused calls multiplied 8-bit codes."""
    why_decoded: str
    """Why, with ``compute``, the last call did not."""


class Report(list[Row]):
    """One row for each DoRA adapter of a model. ``print`` it."""

    def __init__(self, rows: Iterable[Row] = (), gathers: tuple[int, int] = (0, 0)):
        super().__init__(rows)
        self.gathers = gathers
        """All-gathers of a forward and backward through FSDP's units, and how many are for parts of layers alone."""

    def __str__(self) -> str:
        head = ("module", "adapter", "N x K", "r", "backend", "fused", "composed", "stock", "weight", "saved/call", "")
        reasons = dict.fromkeys(f"{row.backend}: {row.why}" for row in self)
        lines = align([head, *map(cells, self)], range(len(head)))
        return "\n".join([*lines, *reasons, *on_dropout(self), *on_compute(self), *advice(*self.gathers)])

    def explain(self, tokens: int = 4096, gpu: str | None = None) -> str:
        """The plans of each kind of layer and their sum over the model: kernels, flops, bytes, times, what backward keeps.

        ``print(report(model).explain(gpu="h200"))``. Nothing runs. ``tokens`` of the whole batch; ``gpu`` as for
        :func:`fdora.functional.explain`, None is the GPU that the model is on.
        """
        if type(tokens) is not int or tokens < 1:
            raise FdoraError(
                f"fdora.Report.explain: `tokens` must be at least 1, got {tokens}. It is sequences times their length."
            )
        kinds: dict[Layout, list[Row]] = {}
        for row in self:
            if row.layout is not None:
                kinds.setdefault(row.layout, []).append(row)
        text = [f"Each layer by itself, {tokens} tokens. Its norm runs once for each change of A or B, not in every call."]
        text += on_dropout(self)
        planned: list[tuple[int, Explanation]] = []
        for how, members in kinds.items():
            row = members[0]
            names = row.module if len(members) == 1 else f"{row.module} and {len(members) - 1} more"
            text += ["", f"{len(members)} x {row.shape[0]}x{row.shape[1]}, r = {row.r}: {names}"]
            where = gpu or (how.device if how.device.startswith("cuda") else None)
            if where is None:
                text.append(f"backend {row.backend} ({row.why}): plain torch has no plan. Pass gpu='h200' to ask for a GPU's.")
                continue
            said = explain_layer(how, tokens, where)
            text.append(str(said))
            if said.plans:
                planned.append((len(members), said))
        left = len(self) - sum(map(len, kinds.values()))
        if left:
            text += ["", f"Left out: {left} embeddings, convolutions, layers with a quantised weight and those that PEFT runs."]
        return "\n".join([*text, "", summed(planned)] if planned else text)


def advice(gathers: int, alone: int) -> list[str]:
    if not gathers:
        return []
    line = f"FSDP: {gathers} all-gathers in a forward and backward"
    if not alone:
        return [line]
    return [f"{line}, {alone} of them for A, B and m as units of their own. Wrap whole blocks alone: {gathers - alone}."]


def on_dropout(rows: Sequence[Row]) -> list[str]:
    """What dropout costs, and what it could cost."""
    asked = Counter((row.p, row.dropout_mode) for row in rows if row.p and row.backend != "stock")
    what = {
        "peft": "as PEFT means it: a second product with W. dropout_mode='lora' has one, and is another function in training",
        "lora": "of the adapter's input alone (dropout_mode='lora'): one product with W; in training not PEFT's function",
    }
    return [f"dropout {p} in {count} of {len(rows)} layers, {what[mode]}." for (p, mode), count in asked.items()]


def on_compute(rows: Sequence[Row]) -> list[str]:
    asked, ran = sum(row.compute is not None for row in rows), sum(row.codes > 0 for row in rows)
    line = f"compute='fp8': {CODES} in {ran} of {asked} layers. A GPU multiplies up to 64 tokens by the decoded "
    return [f"{line}weight."] if asked else []


def cells(row: Row) -> tuple[str, ...]:
    notes = [f"stock {n}x: {why}" for why, n in row.fallbacks.items()]
    if row.composed and row.why_not_fused:
        notes.insert(0, f"not fused: {row.why_not_fused}")
    if row.codes:
        notes.append(f"{CODES} {row.codes}x")
    if row.why_decoded:
        notes.append(f"no {CODES}: {row.why_decoded}")
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
    ours, eye = isinstance(variant, Dora), K * K if linear and (A.dim() == 2 or type(base) is nn.Linear) else 0
    seen = variant if ours else Dora(variant)  # a new one: nothing has run through it
    backend, why = select_backend(m) if ours else ("stock", "use_fdora was not called, or not since")
    weight = stored(layer, seen.held)
    fallbacks = {path.removeprefix("stock: "): n for path, n in seen.calls.items() if path not in (FUSED, COMPOSED, CODES)}
    counts = seen.calls[FUSED], seen.calls[COMPOSED], seen.why_not_fused, fallbacks
    saved = ((4 if weight else 3) * N * K + eye) * A.element_size() if ours else 0
    how = layout(layer, adapter, shape), weight, p_of(layer, adapter), seen.dropout_mode if ours else "peft"
    asked = seen.compute, seen.calls[CODES], seen.why_decoded
    return Row(name, adapter, shape, layer.r[adapter], backend, why, *counts, saved, *how, *asked)


def p_of(layer: Any, adapter: str) -> float:
    dropout = layer.lora_dropout[adapter]
    return 0.0 if adapter in layer.lora_embedding_A or type(dropout) is nn.Identity else float(getattr(dropout, "p", 0.0))


def stored(layer: Any, held: WeightCache) -> str:
    base = layer.get_base_layer()
    kind = family(base)
    try:
        W = held.of(base, kind) if kind else ""
    except FdoraError:  # nobody can decode it any more
        return kind
    return W.kind if isinstance(W, QuantWeight) else kind


def layout(layer: Any, adapter: str, shape: tuple[int, int]) -> Layout | None:
    """None for what is not one call: an embedding, a convolution, a quantised base weight, dtypes that PEFT's code runs."""
    if adapter not in layer.lora_A or layer.lora_A[adapter].weight.dim() != 2:
        return None
    base, dropout = layer.get_base_layer(), layer.lora_dropout[adapter]
    W, bias = getattr(base, "weight", None), getattr(base, "bias", None)
    A, B, m = map(weight_of, modules_of(layer, adapter))
    if W is None or type(W) not in PLAIN or unserved(W, A, B, m):
        return None
    p = float(dropout.p) if type(dropout) is nn.Dropout and layer.training else 0.0
    mode: Any = getattr(layer.lora_variant[adapter], "dropout_mode", "peft")
    (N, K), r = shape, layer.r[adapter]
    shapes = ((N, K), (r, K), (N, r), (N,), (N,))
    operands: list[Any] = []
    for t, of in zip((W, A, B, m, bias), shapes, strict=True):
        operands.append(None if t is None else (of, t.dtype, t is not bias and t.requires_grad))
    return Layout(tuple(operands), float(layer.scaling[adapter]), p, mode, str(W.device))


def explain_layer(how: Layout, tokens: int, gpu: str) -> Explanation:
    made: list[Any] = [bare(*each) if each else None for each in how.operands]
    W, A, B, m, bias = made
    x = bare((tokens, W.shape[1]), W.dtype, any(t.requires_grad for t in (A, B, m)))
    return explain_call(dora_linear, x, W, A, B, m, s=how.s, bias=bias, dropout_p=how.p, dropout_mode=how.mode, gpu=gpu)


def bare(shape: Sequence[int], dtype: torch.dtype, trained: bool) -> Any:
    return torch.empty(*shape, dtype=dtype, device="meta", requires_grad=trained)


def summed(planned: list[tuple[int, Explanation]]) -> str:
    """Of all layers, each explanation as often as there are layers of it."""

    def total(what: str) -> float:
        return sum(count * getattr(said, what) for count, said in planned)

    time = "" if any(said.seconds is None for _, said in planned) else f", at least {1e3 * total('seconds'):.3f} ms"
    outputs = sum(count * t.nbytes for count, said in planned for t in said.kept if t.whose == "output")
    kept = f"keeps {total('new_bytes') / 2**20:.2f} MiB for backward, and {outputs / 2**20:.2f} MiB of outputs"
    work = f"{total('flops') / 1e9:.3f} GFLOP, {total('bytes') / 2**20:.2f} MiB moved"
    return f"all {sum(count for count, _ in planned)} layers: {work}{time}; {kept}"
