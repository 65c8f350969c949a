"""A whole call as one op that Dynamo does not look into: for integrations.

    y... = linears(x, layers, ...)       dora_linear_group, and with ``act`` [dora_mlp]

Dynamo checks before every compiled call whatever it read while it traced: of a layer's call some four hundred functions, tables
and records of fdora, as many things as the whole of a LoRA layer has. An op with a composite implementation is one node to it.
AOTAutograd looks into that op, so the graph that a compiler gets is what it was, and guards hold the arguments: tensors,
numbers, the backend's name, which is chosen outside, and a digest of this package: torch keeps on disk what AOTAutograd made of
such an op, by its arguments alone, and another fdora may make something else of it.

    scale_slots(z, g, slots, ...)        the last pass of a layer that serves adapters from slots

It changes z, as a compiler and a CUDA graph must see it. Two tensors on the CPU say that there is nothing to do, which costs no
kernel. A graph that is captured has the kernel all the same, for adapters that come later.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fdora._records import DropoutMode
from fdora._torch import exporting, functorch_active, library_of, while_tracing
from fdora.autograd._ops import OPS
from fdora.functional.backend import select_backend
from fdora.functional.group import check_group, check_mlp, dora_linear_group, dora_mlp, run
from fdora.functional.layer import DoraLayer, labelled
from fdora.functional.linear import dropout_of
from fdora.quant import QuantWeight


@while_tracing
def digest() -> str:
    """Of the code that a trace runs."""
    return _digest()


@cache
def _digest() -> str:
    files = sorted(Path(__file__).parents[1].rglob("*.py"))
    return sha256(b"".join([sha256(file.read_bytes()).digest() for file in files])).hexdigest()[:16]


def is_opaque(W: Any) -> bool:
    """Whether a call of this W is such an op here."""
    hidden = torch.compiler.is_dynamo_compiling() and not exporting() and not functorch_active()
    return hidden and not isinstance(W, QuantWeight)


def linears(
    x: Tensor,
    layers: Sequence[DoraLayer],
    p: float,
    mode: DropoutMode,
    keep_inner: bool,
    act: str,
    computes: tuple[Any, Any],
) -> Sequence[Tensor]:
    """p and mode are those of dropout, ``computes`` of forward and of gradients. In such an op the norm of each layer may be
    what its giver is known by (give_norm), an int64 tensor: it is asked for when the op runs."""
    if is_opaque(layers[0].W):
        operands = [t for la in layers for t in (la.W, la.A, la.B, la.m, la.norm, la.bias)]
        name = select_backend(x).name
        s = [la.s for la in layers]
        ys: list[Tensor] = torch.ops.fdora.linears(x, operands, s, p, mode, keep_inner, act, name, digest())
        return ys
    how: dict[str, Any] = {"dropout_p": p, "dropout_mode": mode, "keep_inner": keep_inner}
    how |= {"compute": computes[0], "grad_compute": computes[1]}
    return [dora_mlp(x, *layers, act=act, **how)] if act else dora_linear_group(x, layers, **how)  # type: ignore[arg-type]


def _linears(
    x: Tensor,
    operands: list[Any],
    s: list[float],
    p: float,
    mode: DropoutMode,
    keep_inner: bool,
    act: str,
    backend: Any,
    code: str,
) -> list[Tensor]:
    fn, count = "use_fdora", len(s)
    seen = tuple([c for c in operands[4::6] if c is not None and c.dtype == torch.int64])
    if seen:
        operands[4::6] = [None] * count
    each = zip(*(operands[i::6] for i in range(6)), s, strict=True)
    given = [DoraLayer(W, A, B, m, k, bias, c) for W, A, B, m, c, bias, k in each]
    layers = dict(zip([f"{fn}: {part}" for part in ("gate", "up", "down")], given, strict=True)) if act else labelled(fn, given)
    check_mlp(fn, x, layers, act) if act else check_group(fn, x, given)
    asks: dict[str, Any] = {"act": act or None, "seen": seen, "keep": torch.is_grad_enabled()}
    return list(run(fn, x, layers, None, [None] * count, keep_inner, dropout_of(p, mode), backend, **asks))


_library = library_of("linears")
_library.define(
    "linears(Tensor x, Tensor?[] operands, float[] s, float p, str mode, bool keep_inner, str act, str backend, str code)"
    " -> Tensor[]",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_library.impl("linears", _linears, "CompositeImplicitAutograd")


def _scale_slots(z: Tensor, *given: Any, low: list[Tensor], tables: list[Tensor], idle: Tensor, no_lora: Tensor | None) -> None:
    if no_lora is not None and no_lora.item():
        return
    if low and select_backend(z).name == "triton":
        OPS["triton"].scale_slots(z, *given, low, tables)
    elif low or not idle.item() or (z.is_cuda and torch.cuda.is_current_stream_capturing()):
        OPS["eager"].scale_slots(z, *given, low)


_slots_library = library_of("scale_slots")
_slots_library.define(
    "scale_slots(Tensor(a!) z, Tensor g, Tensor holds, Tensor? bias, Tensor slots, *, Tensor[] low, Tensor[] tables, "
    "Tensor idle, Tensor? no_lora) -> ()",
    tags=(torch.Tag.pt2_compliant_tag,),
)
_slots_library.impl("scale_slots", _scale_slots, "CompositeExplicitAutograd")
torch.library.register_fake("fdora::scale_slots", lambda *_, **__: None, lib=_slots_library)

scale_slots = torch.ops.fdora.scale_slots.default
"""``z <- g[slots] * (z - bias) + bias`` for the tokens whose slot holds DoRA. z (M, N), g (S, N) float32, holds (S,) int32,
bias (N,) as it is in z, slots (M,) int64 (-1 and what is no slot: none); on the CPU: idle, that no slot holds DoRA, and
no_lora, that no token has a slot (one element each).

``low``: h (P, M, R) float32, B (S, N, R) and int32 (P + 1,) of P parts, whose columns begin and end there, in sixteens: h B^T
is added before, also without DoRA, and kernels do it, to whom ``tables`` say whose each token is, int32: the tokens sorted by
slot; how many of each slot, from where on, and which slot (-1: none)."""
