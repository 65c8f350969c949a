"""What ``explain`` says of convolutions, embeddings and experts; each checks the arguments as the function does."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fdora._check import fail
from fdora._records import Bank
from fdora.autograd.conv import composed, halves, rows
from fdora.autograd.multi import COUNTED
from fdora.functional._explain_many import SORTED, bank_norms, bare
from fdora.functional._explanation import Call, Parts, kept_of, stand_in
from fdora.functional.bank import check_kernels
from fdora.functional.conv import Given, check_conv, geometry
from fdora.functional.embedding import check_embedding
from fdora.functional.experts import check_experts, check_route, ends_on, pairs
from fdora.functional.experts_mlp import check_layers
from fdora.functional.linear import dtype_of_products, save_for_dm
from fdora.quant import QuantWeight

CONVOLVED = "torch convolves, forward and backward, and forms g: that has no plan."
PLACED = "torch inverts the order of the tokens: that has no plan."


def conv(a: Any) -> Call:
    n = int(a.fn[-2])
    asked = a.stride, a.padding, a.dilation, a.groups, a.padding_mode, a.transposed, a.output_padding
    how = geometry(a.fn, n, asked)
    check_conv(a.fn, n, Given(a.x, a.W, a.A, a.B, a.m, a.s, a.bias, a.norm), how)
    dtype = dtype_of_products(a.fn, a.x, a.W)

    def plans(triton: Any, on: Any) -> Parts:
        x, W, A, B, m, c, bias = map(stand_in, (a.x, a.W, a.A, a.B, a.m, a.norm, a.bias))
        norms = [] if c is not None else [triton.norm(on, *rows(W, A.detach(), B.detach(), how), None, False)]
        x = (x if x.dim() == n + 2 else x[None]).to(dtype)
        base, lora = (laid(t, x, W) for t in halves(x, W, A, B, how))
        of_compose = composed(base, lora, m, bare(*m.shape) if c is None else c)
        (forward, *backward), kept = triton.compose(on, *of_compose, bias, False)
        G, r = how.groups, A.shape[1] if how.transposed else A.shape[0]
        apart = G > 1 and (how.transposed or A.shape[1] == W.shape[1])  # each group applies all of A
        new = {"h": bare(x.shape[0], r * G if apart else r, *base.shape[2:], dtype=dtype), "c": bare(*m.shape)} | kept
        if apart:
            new["A of each group"] = bare(G * A.shape[0], *A.shape[1:], dtype=dtype)
        elif A.dtype != dtype:
            new["A in the dtype of x"] = A.to(dtype)
        if B.dtype != dtype:
            new["B in the dtype of x"] = B.to(dtype)
        held = [kept_of("x", x, "argument"), *(kept_of(name, t, "new") for name, t in new.items())] if backward else []
        return Parts([*norms, forward], backward, held, (CONVOLVED,))

    return a.x.device, dtype, plans


def laid(y: Tensor, x: Tensor, W: Tensor) -> Tensor:
    """Channels last where torch's convolution gives that; of tensors without data it does not say so."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(y.dim(), torch.contiguous_format)
    asked = any([t.dim() == y.dim() and not t.is_contiguous() and t.is_contiguous(memory_format=last) for t in (x, W)])
    return y.contiguous(memory_format=last) if asked else y


def embedding(a: Any) -> Call:
    check_embedding(a.fn, a.ids, a.W, a.A, a.B, a.m, a.s, a.norm, a.norm_axis, a.padding_idx, a.max_norm)

    def plans(triton: Any, on: Any) -> Parts:
        ids, W, A, B, m, c = map(stand_in, (a.ids, a.W, a.A, a.B, a.m, a.norm))
        trained = torch.is_grad_enabled() and any([t is not None and t.requires_grad for t in (A, B, m, c)])
        kept, norms = ([kept_of("ids", ids, "argument")] if trained else []), []
        if c is None and a.norm_axis == 0:
            norms, c = [triton.norm(on, W.T, A, B, None, False)], torch.empty(W.shape[1], dtype=torch.float32, device="meta")
            kept += [kept_of("c", c)] if trained else []
        by_columns = trained and a.norm_axis == 0 and a.max_norm is None
        backward = triton.embedding_backward(on, ids, W, A, B, m, c, a.padding_idx, a.sparse) if by_columns else None
        notes = () if backward or not trained else ("Backward is plain torch: it has no plan.",)
        if a.max_norm is not None:
            return Parts(norms, (), kept, ("With max_norm forward is plain torch, too.", *notes))
        forward = [*norms, triton.embedding(on, ids, W, A, B, m, c, a.norm_axis == 1)]
        return Parts(forward, [backward] if backward else [], kept, notes)

    return a.W.device, a.W.dtype, plans


class TokenRoute:
    """How tokens come to their experts and back, and which plans that takes; by offsets none."""

    def __init__(self, triton: Any, on: Any, x: Tensor, a: Any, E: int):
        self.triton, self.on, self.x, self.ids = triton, on, x, stand_in(a.ids)
        self.gates: Any = pairs(stand_in(a.gates))
        self.rows, self.first = x, []
        self.notes: tuple[str, ...] = ()
        self.given = isinstance(a.offsets, Tensor) and a.offsets.dtype == torch.int32
        if self.ids is None:
            self.offsets = bare(E, dtype=torch.int32)
            return
        T, k = self.ids.shape[0], 1 if self.ids.dim() == 1 else self.ids.shape[1]
        self.offsets, self.order = bare(E, dtype=torch.int32), bare(T * k, dtype=torch.int64)
        self.place = bare(T, k, dtype=torch.int64)
        self.first = [triton.route(on, self.ids.reshape(-1), E)] if T * k <= COUNTED else []
        self.notes = (PLACED,) if T * k <= COUNTED else (SORTED, PLACED)
        self.rows = x.new_empty((T * k, x.shape[1])).requires_grad_(x.requires_grad)

    def there(self) -> list[Any]:
        return [] if self.ids is None else [self.triton.spread(self.on, self.x, self.order, None, self.place.shape[1])]

    def there_backward(self) -> list[Any]:
        wanted = self.ids is not None and self.x.requires_grad and torch.is_grad_enabled()
        return [self.triton.combine(self.on, self.rows, self.place, None)] if wanted else []

    def back(self, y: Tensor) -> list[Any]:
        if self.ids is None:
            return []
        if self.gates is None:
            return [self.triton.spread(self.on, y, self.place.reshape(-1), None, 1)]
        return [self.triton.combine(self.on, y, self.place, self.gates)]

    def back_backward(self, y: Tensor) -> list[Any]:
        if self.ids is None or not torch.is_grad_enabled():
            return []
        if self.gates is None:
            return [self.triton.combine(self.on, y, self.order[:, None], None)] if y.requires_grad else []
        dy = y.new_empty((self.place.shape[0], y.shape[1]))
        k = self.place.shape[1]
        plans = [self.triton.spread(self.on, dy, self.order, self.gates, k)] if y.requires_grad else []
        weighted = self.gates.requires_grad
        return plans + ([self.triton.gates_backward(self.on, dy, y, self.place, self.gates.dtype)] if weighted else [])

    def kept(self, y: Tensor) -> dict[str, Tensor]:
        if self.ids is None:
            return {} if self.given else {"offsets": self.offsets}
        return {"offsets": self.offsets, "order": self.order, "place": self.place} | ({} if self.gates is None else {"y": y})

    def bank(self, layer: Any, dtype: torch.dtype) -> Bank:
        """Of W, A, B, m, c, bias."""
        W, A, B, m, c, bias = layer
        c = bare(*m.shape) if c is None else c
        return Bank(
            W if W.dtype == dtype else bare(*W.shape, dtype=dtype),
            A,
            B,
            m,
            c,
            bias,
            s=bare(A.shape[0]),
            offsets=self.offsets,
            order=None,
            seed=None,
            ranks=None,
            p=0.0,
        )


def norms_of(triton: Any, on: Any, layer: Any) -> list[Any]:
    W, A, B, _, c, _ = layer
    return [] if c is not None else bank_norms(triton, on, W, A, B, None)


def refuse_codes(fn: str, *Ws: Any) -> None:
    for W in Ws:
        if isinstance(W, QuantWeight):
            remedy = "Pass W.dequantize() in its shape: the plans are the same, behind a pass that decodes in each direction."
            raise fail("explain", "W", f"experts of {fn} that are a tensor", f"codes of kind {W.kind}", remedy)


def experts(a: Any) -> Call:
    refuse_codes(a.fn, a.W)
    check_experts(a.fn, a.x, a.W, a.A, a.B, a.m, a.s, a.bias, a.norm)
    E, N = a.m.shape
    check_route(a.fn, a.x, E, a.offsets, a.ids, a.gates)
    if a.ids is None:
        ends_on(a.fn, a.offsets, a.x, E)
    dtype = dtype_of_products(a.fn, a.x, a.W)

    def plans(triton: Any, on: Any) -> Parts:
        check_kernels(a.fn, a.A, "triton")
        layer = tuple(map(stand_in, (a.W, a.A, a.B, a.m, a.norm, a.bias)))
        route = TokenRoute(triton, on, stand_in(a.x).to(dtype), a, E)
        bank = route.bank(layer, dtype)
        (forward, *backward), kept = triton.multi(on, route.rows, bank, save_for_dm(bank.m, bank.c, False) != "nothing")
        y = bare(route.rows.shape[0], N, dtype=dtype).requires_grad_(bool(backward))
        first = [*route.first, *route.there(), *norms_of(triton, on, layer)]
        after = route.back_backward(y) + ([*backward, *route.there_backward()] if backward else [])
        held = kept | route.kept(y) | {"s": bank.s} | ({} if a.norm is not None else {"c": bank.c})
        return Parts(
            [*first, forward, *route.back(y)], after, [kept_of(n, t) for n, t in held.items()] if after else [], route.notes
        )

    return a.x.device, dtype, plans


def experts_mlp(a: Any) -> Call:
    refuse_codes(a.fn, a.gate_up.W, a.down.W)
    check_layers(a.fn, a.x, a.gate_up, a.down, a.act)
    E, N = a.down.m.shape
    check_route(a.fn, a.x, E, a.offsets, a.ids, a.gates)
    if a.ids is None:
        ends_on(a.fn, a.offsets, a.x, E)
    dtype = dtype_of_products(a.fn, a.x, a.gate_up.W)

    def plans(triton: Any, on: Any) -> Parts:
        for label, la in (("gate_up", a.gate_up), ("down", a.down)):
            check_kernels(a.fn, la.A, "triton", arg=f"{label}.A")
        layers = [tuple(map(stand_in, (la.W, la.A, la.B, la.m, la.norm, la.bias))) for la in (a.gate_up, a.down)]
        route = TokenRoute(triton, on, stand_in(a.x).to(dtype), a, E)
        first, second = (route.bank(layer, dtype) for layer in layers)
        saves = [save_for_dm(bank.m, bank.c, False) != "nothing" for bank in (first, second)]
        (up, *up_backward), kept_up = triton.multi(on, route.rows, first, saves[0])
        z = bare(route.rows.shape[0], first.B.shape[1], dtype=dtype)
        inner = bare(z.shape[0], z.shape[1] // 2, dtype=dtype).requires_grad_(bool(up_backward))
        (down, *down_backward), kept_down = triton.multi(on, inner, second, saves[1])
        y = bare(z.shape[0], N, dtype=dtype).requires_grad_(bool(down_backward))
        act = triton.gated(on, z, a.act)
        after = route.back_backward(y)
        if down_backward:
            after += [act, *down_backward]
            if up_backward:
                after += [triton.gated_backward(on, inner, z, a.act), *route.there(), *up_backward, *route.there_backward()]
        held = {"x": route.x, "z": z} | {f"{name} of gate_up": t for name, t in kept_up.items() if name not in ("x", "y")}
        held |= {name if name == "y" else f"{name} of down": t for name, t in kept_down.items() if name != "x"} | route.kept(y)
        for label, bank, layer in (("gate_up", first, layers[0]), ("down", second, layers[1])):
            held |= {f"s of {label}": bank.s} | ({} if layer[4] is not None else {f"c of {label}": bank.c})
        before = [*route.first, *norms_of(triton, on, layers[0]), *norms_of(triton, on, layers[1]), *route.there()]
        known = [kept_of(name, t) for name, t in held.items()] if after else []
        return Parts([*before, up, act, down, *route.back(y)], after, known, route.notes)

    return a.x.device, dtype, plans
