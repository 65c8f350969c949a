"""Autograd of what a mixture of experts does beside its layers, and of an expert's whole MLP as one node."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdora._records import WIDTH, BankNeeds, Operands
from fdora._torch import apply
from fdora.autograd._ops import OPS, autocast_off, gradients_of, reread
from fdora.autograd.multi import REMEDY, Tokens, bank_of
from fdora.autograd.multi import Call as BankCall
from fdora.autograd.weight import Specs, flat_of, layers_of, specs_of
from fdora.eager.experts import ACTS as ACTS


class Route(NamedTuple):
    """Which pairs of a token and one of its k experts are whose."""

    offsets: Tensor  # (E,) int32, ends of the experts among the sorted pairs
    order: Tensor  # (T k,) int64: the pair t k + j at each place
    place: Tensor  # (T, k) int64: its inverse


class Spread(torch.autograd.Function):
    """x (T, N) -> (T k, N), the row of each pair, sorted by expert; or ``back``: (T k, N) -> (T, N), the sum of a token's rows.
    Each is the gradient of the other."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, order: Tensor, place: Tensor, back: bool, backend: str) -> Tensor:
        ops = OPS[backend]
        return ops.combine(x, place, None) if back else ops.spread(x, order, None, place.shape[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, *tensors, ctx.back, ctx.backend = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        return apply(Spread, d, *ctx.saved_tensors, not ctx.back, ctx.backend), None, None, None, None


class Weighted(torch.autograd.Function):
    """The way back with a gate (T, k) for each row. Saves the rows, which whoever made them keeps too."""

    generate_vmap_rule = True

    @staticmethod
    def forward(rows: Tensor, gates: Tensor, order: Tensor, place: Tensor, backend: str) -> Tensor:
        return OPS[backend].combine(rows, place, gates)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*inputs[:4])
        ctx.backend = inputs[4]

    @staticmethod
    def backward(ctx: Any, d: Tensor) -> Any:
        needs = ctx.needs_input_grad[:2]
        return *gradients_of("experts", needs, _weighted_bwd, d, ctx.backend, needs, *ctx.saved_tensors), None, None, None


def _weighted_bwd(d: Tensor, backend: str, needs: tuple[bool, bool], rows: Tensor, gates: Tensor, *to: Tensor) -> Any:
    ops, (order, place) = OPS[backend], to
    drows = ops.spread(d, order, gates, place.shape[1]) if needs[0] else None
    return drows, ops.gates_bwd(d, rows, place, gates.dtype) if needs[1] else None


class Call(NamedTuple):
    """What is no tensor in a call of an MLP."""

    act: str
    saves: tuple[bool, bool]  # whether the m of each layer needs a gradient
    backend: str

    fp8: bool = False
    """Forward multiplies 8-bit numbers, and both W are QuantWeights of e4m3."""
    fp8_grad: bool = False
    """The same of backward, for both dx."""

    def bank(self, i: int) -> BankCall:
        return BankCall(None, 0.0, self.saves[i], self.backend, "dora_experts_mlp", True)


class Mlp(torch.autograd.Function):
    """down(f(gate) up) of sorted rows. Saves x as it came, both h, z and, for the m of down, y; rows and a are formed again."""

    generate_vmap_rule = True

    @staticmethod
    def forward(
        x: Tensor, call: Call, specs: Specs, s1: Tensor, s2: Tensor, offsets: Tensor, order: Any, place: Any, *flat: Any
    ) -> Any:
        ops, layers = OPS[call.backend], layers_of(flat, specs)
        with autocast_off(x):
            rows = _rows(ops, x, order, place)
            z, h1, kept1 = ops.multi_fwd(rows, _bank(call, 0, s1, offsets, layers, x.dtype, call.fp8), call.saves[0])
            a = ops.gated_fwd(z, call.act)
            y, h2, kept2 = ops.multi_fwd(a, _bank(call, 1, s2, offsets, layers, x.dtype, call.fp8), call.saves[1])
        return y, z, h1, h2, *(kept1[:1] if kept1 else ()), *(kept2[:1] if kept2 else ())

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, ctx.call, ctx.specs, *tensors = inputs
        y, z, h1, h2, *kept = output
        ctx.mark_non_differentiable(z, h1, h2, *kept)
        ctx.set_materialize_grads(False)
        # With a bias in the first or both layers, or in float32, the value before g is kept beside the output.
        biases, wide = (tensors[10], tensors[10 + WIDTH]), x.dtype == torch.float32
        before = [saves and (wide or bias is not None) for saves, bias in zip(ctx.call.saves, biases, strict=True)]
        rest = iter(kept)
        first, second = (next(rest) if each else None for each in before)
        ctx.save_for_backward(x, z, h1, h2, first, y if second is None and ctx.call.saves[1] else second, *tensors)
        ctx.before = tuple(before)

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, *_: Any) -> Any:
        flags = ctx.needs_input_grad
        if dy is None:
            return (None,) * len(flags)
        #        x  call specs s1 s2 offsets order place  W A B m c bias seed  W ...
        own: Any = [flags[8 + i * WIDTH + 1 : 8 + i * WIDTH + 6] for i in range(2)]
        needs = BankNeeds(flags[0], *own[0]), BankNeeds(any((flags[0], *own[0])), *own[1])
        wanted = (*needs[0], *needs[1][1:])
        saved = reread(ctx, "dora_experts_mlp", REMEDY)
        dx, *grads = gradients_of("dora_experts_mlp", wanted, _backward, dy, ctx.call, ctx.specs, ctx.before, needs, *saved)
        stored = len(flags) - 8 - 2 * WIDTH
        return dx, *[None] * 7, None, *grads[:5], None, None, *grads[5:], None, *[None] * stored


def _backward(dy: Tensor, call: Call, specs: Specs, before: tuple[bool, bool], needs: Any, x: Tensor, *saved: Any) -> Any:
    """dx, then dA, dB, dm, dc and dbias of each layer."""
    z, h1, h2, kept1, kept2, s1, s2, offsets, order, place, *flat = saved
    ops, layers = OPS[call.backend], layers_of(flat, specs)
    down = _bank(call, 1, s2, offsets, layers, x.dtype, call.fp8_grad)
    a = ops.gated_fwd(z, call.act)
    da, *second = ops.multi_bwd(dy, a, down, h2, _kept(kept2, kept2, before[1]), needs[1])
    dx: Tensor | None = None
    first: Any = (None,) * 5
    if da is not None:
        dz = ops.gated_bwd(da, z, call.act)
        bank = _bank(call, 0, s1, offsets, layers, x.dtype, call.fp8_grad)
        seen = z if call.saves[0] else None
        dx, *first = ops.multi_bwd(dz, _rows(ops, x, order, place), bank, h1, _kept(kept1, seen, before[0]), needs[0])
        if dx is not None and place is not None:
            dx = ops.combine(dx, place, None)
    return dx, *first, *second


def _kept(value: Tensor | None, output: Tensor | None, before: bool) -> tuple[Tensor, ...]:
    """As multi_bwd takes it: the value before g and a mark, or the output."""
    if before:
        assert value is not None
        return value, value.new_empty(0)
    return () if output is None else (output,)


def _rows(ops: Any, x: Tensor, order: Tensor | None, place: Tensor | None) -> Tensor:
    return x if order is None or place is None else ops.spread(x, order, None, place.shape[1])


def _bank(call: Call, i: int, s: Tensor, offsets: Tensor, layers: Any, dtype: torch.dtype, fp8: bool) -> Any:
    return bank_of(call.bank(i), Tokens(s, offsets), layers[i], dtype, fp8)


def experts_mlp(
    x: Tensor, layers: tuple[Operands, Operands], s: tuple[Tensor, Tensor], offsets: Tensor, route: Route | None, call: Call
) -> Tensor:
    """x (T, K), or rows that are sorted where there is no route -> sorted rows of y."""
    order, place = (None, None) if route is None else (route.order, route.place)
    specs = specs_of(layers)
    return apply(Mlp, x, call, specs, *s, offsets, order, place, *flat_of(layers, specs))[0]


def spread(x: Tensor, route: Route, backend: str) -> Tensor:
    return apply(Spread, x, route.order, route.place, False, backend)


def combine(rows: Tensor, gates: Tensor | None, route: Route, backend: str) -> Tensor:
    """The weighted sum of the rows of a token; without gates, (T, k, N): each by itself."""
    if gates is None:
        back: Tensor = apply(Spread, rows, route.place.reshape(-1), route.order[:, None], False, backend)
        return back.reshape(*route.place.shape, rows.shape[1])
    return apply(Weighted, rows, gates, route.order, route.place, backend)
