"""What a step costs in the adapted layers of a model: the plans of one call of each kind of layer, and their sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from fdora import FdoraError
from fdora._torch import PLAIN
from fdora.functional import Explanation, dora_linear
from fdora.functional import explain as explain_call
from fdora.integrations._peft.dora import dtypes as unserved


class Layout(NamedTuple):
    """What a plan may know of a linear layer beside its shape and rank."""

    W: torch.dtype
    A: torch.dtype
    B: torch.dtype
    m: torch.dtype
    bias: torch.dtype | None
    trained: tuple[bool, bool, bool]
    """A, B, m."""
    s: float
    p: float
    """Dropout."""
    device: str


def layout(layer: Any, adapter: str) -> Layout | None:
    """None for what is not one call: an embedding, a convolution, a quantised base weight, dtypes that PEFT's code runs."""
    if adapter not in layer.lora_A or layer.lora_A[adapter].weight.dim() != 2:
        return None
    W = getattr(layer.get_base_layer(), "weight", None)
    bias, dropout = getattr(layer.get_base_layer(), "bias", None), layer.lora_dropout[adapter]
    A, B, m = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight, layer.lora_magnitude_vector[adapter].weight
    if W is None or type(W) not in PLAIN or unserved(W, A, B, m):
        return None
    p = float(dropout.p) if type(dropout) is nn.Dropout and layer.training else 0.0
    dtypes = W.dtype, A.dtype, B.dtype, m.dtype, None if bias is None else bias.dtype
    trained = A.requires_grad, B.requires_grad, m.requires_grad
    return Layout(*dtypes, trained, float(layer.scaling[adapter]), p, str(W.device))


class Kind(NamedTuple):
    """Layers that a plan cannot tell apart."""

    shape: tuple[int, int]
    r: int
    layout: Layout


def explain_rows(rows: Sequence[Any], tokens: int, gpu: str | None) -> str:
    if type(tokens) is not int or tokens < 1:
        raise FdoraError(
            f"fdora.Report.explain: `tokens` must be at least 1, got {tokens}. It is sequences times their length."
        )
    kinds: dict[Kind, list[Any]] = {}
    for row in rows:
        if row.layout is not None:
            kinds.setdefault(Kind(row.shape, row.r, row.layout), []).append(row)
    text = [f"Each layer by itself, {tokens} tokens. Its norm runs once for each change of A or B, not in every call."]
    total = Sum()
    for kind, members in kinds.items():
        N, K = kind.shape
        names = members[0].module if len(members) == 1 else f"{members[0].module} and {len(members) - 1} more"
        text += ["", f"{len(members)} x {N}x{K}, r = {kind.r}: {names}"]
        where = gpu or (kind.layout.device if kind.layout.device.startswith("cuda") else None)
        if where is None:
            row = members[0]
            text.append(f"backend {row.backend} ({row.why}): plain torch has no plan. Pass gpu='h200' to ask for a GPU's.")
            continue
        said = explain_kind(kind, tokens, where)
        text.append(str(said))
        if said.plans:
            total = total.plus(said, len(members))
    left = len(rows) - sum(map(len, kinds.values()))
    if left:
        text += ["", f"Left out: {left} embeddings, convolutions, layers with a quantised weight and those that PEFT runs."]
    return "\n".join([*text, "", str(total)] if total.layers else text)


def explain_kind(kind: Kind, tokens: int, gpu: str) -> Explanation:
    (N, K), r, how = kind.shape, kind.r, kind.layout

    def bare(dtype: torch.dtype, *shape: int, trained: bool = False) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta", requires_grad=trained)

    A, B, m = (
        bare(dtype, *shape, trained=trained)
        for dtype, shape, trained in zip((how.A, how.B, how.m), ((r, K), (N, r), (N,)), how.trained, strict=True)
    )
    x, W = bare(how.W, tokens, K, trained=any(how.trained)), bare(how.W, N, K)
    bias = None if how.bias is None else bare(how.bias, N)
    return explain_call(dora_linear, x, W, A, B, m, s=how.s, bias=bias, dropout_p=how.p, dropout_mode="peft", gpu=gpu)


class Sum(NamedTuple):
    """Of layers."""

    layers: int = 0
    flops: float = 0
    bytes: float = 0
    seconds: float | None = 0.0
    new: int = 0
    outputs: int = 0

    def plus(self, said: Explanation, count: int) -> Sum:
        seconds = None if self.seconds is None or said.seconds is None else self.seconds + count * said.seconds
        flops, moved = self.flops + count * said.flops, self.bytes + count * said.bytes
        outputs = self.outputs + count * sum(t.nbytes for t in said.kept if t.whose == "output")
        return Sum(self.layers + count, flops, moved, seconds, self.new + count * said.new_bytes, outputs)

    def __str__(self) -> str:
        time = "" if self.seconds is None else f", at least {1e3 * self.seconds:.3f} ms"
        kept = f"keeps {self.new / 2**20:.2f} MiB for backward, and {self.outputs / 2**20:.2f} MiB of outputs"
        return f"all {self.layers} layers: {self.flops / 1e9:.3f} GFLOP, {self.bytes / 2**20:.2f} MiB moved{time}; {kept}"
