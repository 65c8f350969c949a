"""What one call of a layer is, whether dora_linear can take it, and the short way of calls that are like one before.

What a layer is called with is found out once (``call_of`` of calls.py, :func:`eligibility`). Where nothing about it was out of
the ordinary it keeps a route (fdora/_plain.py): which modules were looked at, and how they were. As long as they are so, the
next call only follows it, and asks what tensors with these facts are called by. Else it is found out again. The short way is
never taken in a trace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import torch
from peft.tuners.lora import dora
from peft.tuners.lora.dora import DoraLinearLayer
from torch import Tensor, nn

from fdora import _facts, _plain
from fdora._check import FLOATS
from fdora._dispatch import forced
from fdora._plain import Entry, Names, Route
from fdora._records import WIDTH, Dropout, DropoutMode
from fdora._torch import PLAIN, any_autocast, autocast_on, dispatch_modes, is_traced, jit_tracing
from fdora.functional import DoraLayer, prepared, select_backend
from fdora.functional.prepared import check_detach, drawn, is_decoded, is_opaque, linears
from fdora.integrations._peft.quantised import SCALE, SCALE_INV, decoded
from fdora.integrations._peft.sharded import HOOKS
from fdora.quant import QuantWeight

FUSED = "fused"  # how a layer that ran in one call is counted
CODES = "fp8 products of codes"  # and one of them that rounded x to 8 bits

# The last one: what DoraCaching left is for call_of to clear.
PEFT = Names("lora_variant", "_active_adapter", (*HOOKS, "forward", "_dora_cache"))


class Call(NamedTuple):
    """What one call of dora_linear takes."""

    variant: Any
    W: Tensor | QuantWeight
    A: Tensor
    B: Tensor
    m: Tensor
    bias: Tensor | None
    s: float
    p: float = 0.0
    mode: DropoutMode = "lora"
    """What dropout drops; with p = 0 always this one."""
    dtype: torch.dtype | None = None
    """To which x is cast, and y back: of a Linear4bit, that in which it computes."""
    compute: Literal["fp8"] | None = None
    """Of dora_linear."""

    def epilogue(self, layer: Any, x: Tensor) -> Any:
        """What the block of a vision transformer wants done beside the layer; None where it is to do that itself."""
        if (self.p and self.mode == "peft") or self.dtype not in (None, x.dtype) or self.compute:
            return None
        return self.variant.tail.take(layer, x, self.W.shape[0])

    def tally(self) -> None:
        """Count it where the layer counts what ran."""
        self.variant.count(FUSED)
        if self.compute:
            self.variant.count(CODES)

    def norm(self, full: bool = False) -> Tensor:
        """With its gradient where use_fdora was asked for that; ``full``: the value, of which the layer takes it on itself."""
        variant, W, A, B, s = self.variant, self.W, self.A, self.B, self.s
        c: Tensor = variant.kept.of(owner(W), W, A, B, s)
        if full:
            check_detach("use_fdora", W)
        return c if full else variant.with_gradient(c, W, A, B, s)


def given_norms(calls: Sequence[Call]) -> list[Any]:
    """Of layers that run in one call. In a trace of Dynamo what the norm of each is known by: the call asks when it runs."""
    if is_opaque(calls[0].W) and all([call.variant.detach for call in calls]):
        unasked = [call.variant.kept.unasked(call.W, call.A, call.B, call.s) for call in calls]
        if all([seen is not None for seen in unasked]):
            return unasked
    return [call.norm() for call in calls]


def layers_of(calls: Sequence[Call], norms: Sequence[Any]) -> list[DoraLayer]:
    """What one call takes of them. They are counted."""
    layers = []
    for call, c in zip(calls, norms, strict=True):
        call.tally()
        layers.append(DoraLayer(call.W, call.A, call.B, call.m, call.s, call.bias, c))
    return layers


def how_called(call: Call) -> tuple[float, DropoutMode, torch.dtype | None, tuple[Any, Any]]:
    """What all layers of one call must have in common; the last are ``compute`` and ``grad_compute``."""
    return call.p, call.mode, call.dtype, (call.compute, call.compute and call.variant.grad_compute)


def keeps_inner(calls: Sequence[Call]) -> bool:
    return any([call.variant.keep_inner for call in calls])


def run(x: Tensor, calls: Sequence[Call], act: str = "") -> Sequence[Tensor]:
    """y of each layer, of an MLP the one y, by one call. They have the dtype of x."""
    p, mode, dtype, computes = how_called(calls[0])
    layers = layers_of(calls, given_norms(calls))
    ys = linears(x if dtype is None else x.to(dtype), layers, p, mode, keeps_inner(calls), act, computes)
    return ys if dtype is None else [y.to(x.dtype) for y in ys]


_known: dict[tuple, Any] = {}  # what eligibility said, and what prepared.call takes: each by all that it depends on
MOST = 4096  # each may hold a plan


def remember(key: tuple, value: Any) -> Any:
    if len(_known) >= MOST:
        _known.clear()
    _known[key] = value
    return value


def ready(layers: tuple[Any, ...], x: Tensor, alone: bool = True, act: str = "") -> tuple[tuple[Any, ...], Any] | None:
    """What prepared.call takes: a call of which nothing is left to check, with norms and seeds, counted.
    Where neither Dynamo nor torch.func looks on. ``alone``: the layer itself was called."""
    found = _plain.follow(layers, PEFT, alone)
    if found is None or dispatch_modes() or jit_tracing() or getattr(dora, "ENABLE_DORA_CACHING", False):
        return None
    first, autocast = found[0][0], (any_autocast() or x.is_mps) and autocast_on(x)
    how, norms = first.route.how, first.kept.norms
    codes = codes_of(found, x.dtype) if how.codes else ()
    if codes is None or (len(found) > 1 and any([each[0].route.how != how for each in found])):
        return None
    if codes:
        found = [each[:7] for each in found]
        if not first.detach:
            check_detach("use_fdora", codes[0])
    cast = x.to(torch.get_autocast_dtype(x.device.type)) if autocast and x.dtype != torch.float64 else x
    given = None if norms is None else norms.with_norms(cast, found, codes)
    if given is None and (given := with_own_norms(x, cast, calls_of(found, codes, how), act)) is None:
        return None
    operands = list(given)
    saved: tuple[bool, ...] = ()
    scalars: tuple[float, ...] = ()
    keep_inner, grad, at = False, torch.is_grad_enabled(), 1
    full = len(found) == 1 and not act and not first.detach  # one node takes the gradient through the norm on
    for variant, s, W, A, B, m, _ in found:
        if W.requires_grad or m is None:
            return None
        asked = m.requires_grad
        if full:
            check_detach("use_fdora", W)
            asked = asked or A.requires_grad or B.requires_grad
        elif not variant.detach:
            c = operands[at + 4] = variant.with_gradient(operands[at + 4], W, A, B, s)
            asked = asked or c.requires_grad
        at += WIDTH
        saved, scalars, keep_inner = (*saved, grad and asked), (*scalars, s), keep_inner or variant.keep_inner
    if codes:
        operands[1::WIDTH] = [None] * len(codes)
        operands += [t for W in codes for t in W.tensors]
    specs = tuple([W.spec for W in codes])
    key = _facts.facts(tuple(operands)), scalars, saved, keep_inner, act, full, forced(), how, specs, autocast
    call, backend = _known.get(key), ""
    if call is None:
        if key[0] is not None:  # a norm may be what the others are not
            backend = backend_of(x, calls_of(found, codes, how), act)
        if not backend:
            return None
    if how.p:  # drawn for this call alone
        operands[WIDTH:at:WIDTH] = drawn(len(found), x.device)
    tensors = tuple(operands)
    if call is None:
        drop = Dropout(how.p, how.mode)
        bound = prepared.bind(
            tensors, scalars, saved, keep_inner, backend, full, act or None, drop, how.computes, specs, autocast
        )
        call = remember(key, bound)
    for each in found:
        each[0].calls[FUSED] += 1
        if how.computes[0]:
            each[0].calls[CODES] += 1
    return tensors, call


class How(NamedTuple):
    """What a route knows of a call beside its modules; the same for all layers of one."""

    p: float
    mode: DropoutMode
    computes: Any
    codes: bool
    """Whether W is codes: their scales come behind what else was found."""


def calls_of(found: Sequence[Any], codes: Sequence[QuantWeight], how: How) -> list[Call]:
    """Of layers whose routes were followed, as call_of makes them."""
    p, mode, (compute, _), _ = how
    each = zip(found, codes or [of[2] for of in found], strict=True)
    return [Call(of[0], W, *of[3:7], of[1], p, mode, None, compute) for of, W in each]  # type: ignore[call-arg]


def codes_of(found: Sequence[Any], dtype: torch.dtype) -> list[QuantWeight] | None:
    """The weights of layers that hold codes and scales, as they were made for the last call; None where one is made anew."""
    if any([len(each) == 7 for each in found]):
        return None
    known = [each[0].held.known((each[2], each[7]), each[2].data_ptr(), (dtype, each[0].transposed)) for each in found]
    return None if any([W is None for W in known]) else known


def with_own_norms(x: Tensor, cast: Tensor, calls: list[Call], act: str) -> tuple[Any, ...] | None:
    """Where the model's hook gives none. ``cast``: x as products take it."""
    missing = [t is None for call in calls for t in call[1:5]]
    if any(missing) or any([call.W.requires_grad for call in calls]) or not backend_of(x, calls, act):
        return None
    tensors: list[Any] = [cast]
    for variant, W, A, B, m, bias, s, *_ in calls:
        tensors += owner(W), A, B, m, variant.kept.eager(owner(W), W, A, B, s), bias, None
    return tuple(tensors)


def keep_route(layer: Any, call: Call) -> None:
    """For the calls that follow this one, which had nothing left to check."""
    variant, (name, *others) = call.variant, layer.active_adapters
    variant.route = None
    if others or variant.tail is not None or type(call.s) is not float or call.dtype is not None:
        return  # other names may be other layers', and who has a tail may be told more
    if not {int, float}.issuperset(map(type, layer.scaling.values())):  # compared by ==, which tensors do not answer
        return
    looked_at = ("_disable_adapters", "merged_adapters", "fan_in_fan_out", "training")
    own = {at: getattr(layer, at) for at in looked_at} | {"merged_adapters": [], "scaling": dict(layer.scaling)}
    base, dropout, codes = layer.base_layer, layer.lora_dropout[name], isinstance(call.W, QuantWeight)
    entries = [
        Entry((), type(layer), (), tuple(own.items())),
        Entry(("base_layer",), type(base), ("weight",)),
        Entry(("lora_A", name), nn.Linear, ("weight",)),
        Entry(("lora_B", name), nn.Linear, ("weight",)),
        Entry(("lora_magnitude_vector", name), DoraLinearLayer, ("weight",)),
        Entry(("base_layer",), type(base), ("bias",)),
    ]
    if layer.training:  # else its dropout drops nothing
        drops = () if type(dropout) is nn.Identity else (("p", dropout.p), ("training", dropout.training))
        entries.append(Entry(("lora_dropout", name), type(dropout), (), drops))
    if codes:
        scales = SCALE if base._parameters.get(SCALE_INV) is None else SCALE_INV
        entries.append(Entry(("base_layer",), type(base), (scales,)))
    p, mode, _, computes = how_called(call)
    how = How(p, mode, computes, codes)
    variant.route = Route(name, call.s, tuple(entries), sum(len(entry.parameters) for entry in entries), how)
    found = _plain.follow((layer,), PEFT._replace(quiet=()), False)
    wanted = (owner(call.W), *call[2:6])
    if found is None or any([t is not same for t, same in zip(found[0][2:7], wanted, strict=True)]):
        variant.route = None  # its tensors come another way


def owner(W: Any) -> Any:
    """The tensor whose storage says whether W is another one."""
    return W.tensors[0] if isinstance(W, QuantWeight) else W


def backend_of(x: Tensor, calls: list[Call], act: str) -> str:
    """The backend of one call of these, if nothing is left to check; else empty."""
    for call in calls:
        W, variant = call.W, call.variant
        if isinstance(W, QuantWeight) and call.compute != (None if decoded(W, x, call.mode) else variant.compute):
            return ""
    return eligibility(x, calls, bool(act))[1]


def eligibility(x: Tensor, calls: Sequence[Call], mlp: bool = False) -> tuple[str, str]:
    """Why dora_linear cannot take these tensors, empty where it can; and the backend that runs if nothing is left to check.

    Remembered by all that it looks at. All calls have the same p.
    """
    W = calls[0].W
    key = None
    if not is_traced() and W.device.type != "meta":
        tensors: list[Tensor | None] = [x]
        specs: list[Any] = []
        for call in calls:
            if isinstance(call.W, QuantWeight):
                specs += (call.W.spec, call.dtype)
                tensors += (*call.W.tensors, *call[2:6])
            else:
                tensors += call[1:6]  # type: ignore[arg-type]
        found = _facts.facts(tuple(tensors))
        if found is not None:
            frozen = not (W.requires_grad if len(calls) == 1 else any([call.W.requires_grad for call in calls]))
            key = (found, tuple(specs), frozen, calls[0].p == 0, mlp, autocast_on(x), forced())
            known = _known.get(key)
            if known is not None:
                return known
    made = "", ""
    for call in calls:  # no next(.., "") and no slice of a NamedTuple: Dynamo of torch 2.8 has neither
        why = _refusal(x, call)
        if why:
            made = why, ""
            break
    if key is None:
        return made
    if not made[0]:
        made = "", fitting(x, calls, mlp)
    return remember(key, made)


def fitting(x: Tensor, calls: Sequence[Call], mlp: bool) -> str:
    """The backend, where dora_linear, or dora_mlp, would find nothing wrong, and cast nothing but x; else empty."""
    autocast = autocast_on(x)
    if x.dim() == 0 or (autocast and x.dtype == torch.float64):
        return ""
    backend = select_backend(x).name
    if calls[0].p and backend != "triton":
        return ""
    for i, (_, W, A, _, _, bias, *_) in enumerate(calls):
        K = calls[0].W.shape[0] if mlp and i == 2 else x.shape[-1]
        if isinstance(W, QuantWeight) and not is_decoded(W.spec, backend):
            return ""
        if (W.dtype != x.dtype and not autocast) or W.shape[1] != K or A.shape[0] == 0:
            return ""
        if bias is not None and (bias.shape != W.shape[:1] or bias.device != x.device or bias.dtype not in FLOATS):
            return ""
    return backend if not mlp or calls[0].W.shape == calls[1].W.shape else ""


def _refusal(x: Tensor, call: Call) -> str:
    why = unfit(x, call.W, call.A, call.B, call.m, call.dtype)
    if why or isinstance(call.W, QuantWeight) or torch.is_autocast_enabled(x.device.type):
        return why
    if call.bias is not None and x.dtype == torch.float32 and select_backend(x).name == "eager":
        return "float32 with a bias, eager: the base layer's own sum keeps a fresh adapter an exact no-op"
    return ""


def unfit(x: Tensor, W: Any, A: Tensor, B: Tensor, m: Tensor, dtype: torch.dtype | None) -> str:
    """Why no call takes these tensors."""
    if type(x) not in PLAIN:
        return f"the input is a {type(x).__name__}"
    device, quant = W.device, isinstance(W, QuantWeight)
    for t in (A, B, m) if quant else (W, A, B, m):
        if type(t) not in PLAIN or t.device != device:
            return "sharded parameters, or on several devices"
    if x.device != device or device.type == "meta":
        return "the input is on another device, or meta tensors"
    why = dtypes(W, A, B, m) or shapes(W, A, B, m)
    if not why and dtype is None and x.dtype != W.dtype and not torch.is_autocast_enabled(device.type):
        return f"a {x.dtype} input for a {W.dtype} base weight"
    return why


class Weights(NamedTuple):
    """Views in nn.Linear's layout: W (N, K), A (r, K), B (N, r), m (N,). owner is the tensor that W was made from."""

    owner: Any
    W: Tensor | QuantWeight
    A: Tensor
    B: Tensor
    m: Tensor


def obstacle(*tensors: Any) -> str:
    """Why fdora's functions cannot take these parameters; empty where they can."""
    opaque = is_traced()  # no storage to ask for
    device = tensors[0].device
    if isinstance(tensors[0], QuantWeight):
        tensors = (*[t for t in tensors[0].tensors if t is not None], *tensors[1:])
    for t in tensors:
        if type(t) not in PLAIN:
            return f"a {type(t).__name__} among the parameters"
        if t.device != device:
            return "parameters on several devices"
        if not opaque and device.type != "meta" and t.untyped_storage().size() == 0:
            return "parameters without storage (sharded)"
    return "meta tensors" if device.type == "meta" else ""


def served(owner: Any, W: Tensor | QuantWeight, A: Tensor, B: Tensor, m: Tensor) -> Weights | str:
    """The weights, if they are what dora_linear wants."""
    return obstacle(W, A, B, m) or dtypes(W, A, B, m) or shapes(W, A, B, m) or Weights(owner, W, A, B, m)


def shapes(W: Tensor | QuantWeight, A: Tensor, B: Tensor, m: Tensor) -> str:
    """Why these are not the weights of one layer; empty where they are. Sharded ones come as pieces, of any shape."""
    if len(W.shape) == A.dim() == B.dim() == 2:
        (N, K), r = W.shape, A.shape[0]
        if (A.shape, B.shape, m.shape) == ((r, K), (N, r), (N,)):
            return ""
    return "parameters of other shapes (sharded)"


def dtypes(W: Tensor | QuantWeight, A: Tensor, B: Tensor, m: Tensor) -> str:
    """Why dora_linear does not take weights of these dtypes; empty where it does."""
    if W.requires_grad:
        return "the base weight requires grad"
    if not isinstance(W, QuantWeight) and (not W.is_floating_point() or W.element_size() == 1):
        return f"a {W.dtype} base weight"
    for t in (A, B, m):
        if t.dtype not in (torch.float32, W.dtype):
            return f"a {t.dtype} adapter on a {W.dtype} base weight"
    return ""
