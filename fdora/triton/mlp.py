"""A gated MLP as one plan for each direction: gate and up on one x, the activation, down."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import itemgetter
from typing import Any

import torch
from torch import Tensor

from fdora._records import Bank, Bound, Dropout, DropoutMode, Grads, Needs, Operands, Options, SavedMlp
from fdora._torch import needs_dispatcher
from fdora.quant import QuantSpec
from fdora.triton import multi_bwd
from fdora.triton.act import act_backward, act_forward
from fdora.triton.codes import Packed
from fdora.triton.copy import dense
from fdora.triton.factors import at_once
from fdora.triton.gemm import Epilogue
from fdora.triton.linear import rows_of, saves_pre_scale
from fdora.triton.linear_bwd import backward, by_layer, forms_of_grads
from fdora.triton.linear_fwd import columns_of_h, epilogue_of, forward
from fdora.triton.norm_kept import asking
from fdora.triton.op import Likes, planned
from fdora.triton.operands import described, facts, facts_of, flat, norm_forms, read_layers
from fdora.triton.runtime import Array, Builder
from fdora.triton.runtime.walk import plan_for, run
from fdora.triton.scale import Given, config_for
from fdora.triton.scaled_weight import takes_g
from fdora.triton.small import Out, is_small

INNER = ("h", "h_down", "gate", "up", "pre_scale of gate", "pre_scale of up", "pre_scale of down")  # results beside y and c
NOWHERE = -1


def mlp_fwd(
    x: Tensor,
    layers: Sequence[Operands],
    options: Sequence[Options],
    drop: Dropout,
    act: str,
    seen: Sequence[Tensor] = (),
    keep: bool = True,
    fp8: bool = False,
) -> tuple[Tensor, SavedMlp, tuple[Tensor, ...]]:
    """x (..., K), gate, up, down -> y (..., N), what backward reads, and c of each adapted layer that came without one.

    ``seen``, ``keep`` and ``fp8`` as of layers_fwd."""
    s, saves = [o.s for o in options], [o.save for o in options]
    run_it: Any = mlp if needs_dispatcher(x) else _mlp
    results = run_it(x, flat(layers), s, saves, *drop, act, *facts(layers), fp8, seen, keep)
    return unpacked(results, x, layers, saves, drop.mode)


def mlp_bound(
    tensors: tuple[Tensor | None, ...],
    options: Sequence[Options],
    drop: Dropout,
    act: str,
    specs: Sequence[QuantSpec | None] = (),
    fp8: bool = False,
) -> Bound:
    """The same as of layers_bound."""
    s, saves = zip(*options, strict=True)
    plan = plan_for(plan_forward, tensors, *drop, saves, s[0] == s[1], act, *facts_of(specs), fp8)
    at = {each.name: i for i, each in enumerate(plan.results)}
    places = [at.get(name, NOWHERE) for name in INNER]
    pre_scale = tuple([place != NOWHERE for place in places[4:]])
    if not pre_scale[2] and saves[2] != "nothing":
        places[6] = at["y"]
    pick = itemgetter(*places)

    def bound(tensors: tuple[Any, ...]) -> Any:
        y, *_ = results = run(plan, tensors, s)
        inner = pick((*results, None))
        return [y], inner[:4], inner[4:], pre_scale

    return bound


def unpacked(
    tensors: Sequence[Any], x: Tensor, layers: Sequence[Any], saves: Sequence[str], mode: str
) -> tuple[Any, SavedMlp, tuple[Any, ...]]:
    """What a forward returns, as y, what backward reads, and the norms that nobody gave."""
    results = iter(tensors)
    y = next(results)
    pre = [saves_pre_scale(x.dtype, rows_of(x), la, mode, save) for la, save in zip(layers, saves, strict=True)]
    h = next(results) if layers[0].A is not None or layers[1].A is not None else None
    h_down = next(results) if layers[2].A is not None else None
    outputs = [next(results) if _keeps_output(p, mode) else None for p in pre[:2]]
    before = tuple(next(results) if p else None for p in pre)
    kept = y if saves[2] != "nothing" and not pre[2] else None
    return y, SavedMlp(h, h_down, outputs[0], outputs[1], kept, *before), tuple(results)


def _keeps_output(pre_scale: bool, mode: str) -> bool:
    """Of gate and up: the activation's backward reads the output, which follows from the value before g where that is kept."""
    return not pre_scale or mode == "peft"


def _divided(x, operands, s, saves, p, mode, act, text, numbers, fp8) -> tuple[tuple, tuple, tuple]:
    return (x, *operands), (p, mode, tuple(saves), s[0] == s[1], act, tuple(text), tuple(numbers), fp8), tuple(s)


def _results(
    x: Any,
    likes: Likes,
    p: float,
    mode: str,
    saves: Sequence[str],
    same_s: bool,
    act: str,
    text: Any = (),
    numbers: Any = (),
    *_: Any,
) -> dict[str, Any]:
    """What a forward returns: y, h of the pair and of down, gate and up, what is saved before g of each, and norms."""
    M, t, layers = rows_of(x), x.dtype, described(likes, 3, text, numbers)
    F, N = layers[0].W.shape[0], layers[2].W.shape[0]
    pre = [saves_pre_scale(t, M, la, mode, save) for la, save in zip(layers, saves, strict=True)]
    ranks = [0 if la.A is None else la.A.shape[0] for la in layers]
    outputs = [F if _keeps_output(has, mode) else None for has in pre[:2]]
    before = [width if has else None for has, width in zip(pre, (F, F, N), strict=True)]
    widths = (ranks[0] + ranks[1] or None, ranks[2] or None, *outputs, *before)
    inner = {name: None if width is None else ((M, width), t) for name, width in zip(INNER, widths, strict=True)}
    return {"y": ((*x.shape[:-1], N), t), **inner, **norm_forms(layers)}


@planned("", "dora_mlp forward", "tokens rest", _results, has_families=True)
def plan_forward(
    plan: Builder,
    x: Array,
    likes: Likes,
    p: float,
    mode: DropoutMode,
    saves: tuple[str, ...],
    same_s: bool,
    act: str,
    text: tuple[str, ...] = (),
    numbers: tuple[int, ...] = (),
    fp8: bool = False,
) -> None:
    t, dropout = x.dtype, Dropout(p, mode)
    layers = read_layers(plan, t, likes, 3, text, numbers)
    scalars = [plan.scalar(f"s{i}") for i in range(3)]
    y, h, h_down, gate, up, *before = plan.wanted()
    wide, norms = (x.shape[0], layers[0].W.shape[0]), before[3:]
    pair = [out or plan.temp(wide, t) for out in (gate, up)]
    a = plan.temp(wide, t)
    out = [Out(*o) for o in zip(pair, columns_of_h(h, layers[:2]), before, norms, strict=False)]
    forward(plan, x, layers[:2], scalars[:2], out, h, dropout, same_s, fp8=fp8)
    act_forward(plan, pair[0], pair[1], a, act)
    of_down = Out(y.flat(), h_down, before[2], norms[2])
    forward(plan, a, layers[2:], scalars[2:], [of_down], h_down, dropout, True, fp8=fp8)


def mlp_bwd(
    dy: Tensor,
    x: Tensor,
    layers: Sequence[Operands],
    options: Sequence[Options],
    drop: Dropout,
    act: str,
    saved: SavedMlp,
    need_x: bool,
    needs: Sequence[Needs],
    fp8: bool = False,
) -> tuple[Tensor | None, list[Grads]]:
    """dx, and the gradients of gate, up and down; those of bias in float32. ``fp8`` as of layers_bwd."""
    flags = [need for each in needs for need in each]
    s = [o.s for o in options]
    results = iter(plan_backward.call(dy, x, [*saved], flat(layers), s, *drop, act, need_x, flags, *facts(layers), fp8))
    dx = next(results) if need_x else None
    return dx, [Grads._make([next(results) if need else None for need in each]) for each in needs]


@planned(
    "mlp_backward(Tensor dy, Tensor x, Tensor?[] saved, Tensor?[] operands, float[] s, float p, str mode, str act, "
    "bool need_x, bool[] needs, str[] text, SymInt[] numbers, bool fp8) -> Tensor[]",
    "dora_mlp backward",
    "tokens tokens rest",
    lambda dy, x, likes, p, mode, act, need_x, needs, *_: forms_of_grads(x, likes[8:], need_x, needs),
    has_families=True,
    asks=(1, 0),
)
def plan_backward(
    plan: Builder,
    dy: Array,
    x: Array,
    likes: Likes,
    p: float,
    mode: DropoutMode,
    act: str,
    need_x: bool,
    needs: tuple[bool, ...],
    text: tuple[str, ...] = (),
    numbers: tuple[int, ...] = (),
    fp8: bool = False,
) -> None:
    """likes: what is saved, and the operands."""
    t, dropout = x.dtype, Dropout(p, mode)
    saved: Any = SavedMlp._make((plan.operand if i < 2 else plan.tokens)(like) for i, like in enumerate(likes[:8]))
    layers = read_layers(plan, t, likes[8:], 3, text, numbers)
    scalars = [plan.scalar(f"s{i}") for i in range(3)]
    dx, *flat = plan.wanted()
    grads, (_, kept, has_pre) = by_layer(Grads, flat), saved.apart()
    gate, up = (_output(plan, la, y, v) for la, y, v in zip(layers[:2], (saved.gate, saved.up), kept[:2], strict=True))
    a = plan.temp(gate.shape, t)
    act_forward(plan, gate, up, a, act)
    da = plan.temp(gate.shape, t) if need_x or any(map(any, by_layer(Needs, needs)[:2])) else None
    of_down = columns_of_h(saved.h_down, layers[2:])
    below = Given(dy, a, layers[2], scalars[2], of_down[0], kept[2], has_pre[2], grads[2], dropout, fp8=fp8)
    backward(plan, [below], da)
    if da is None:
        return
    kept_pair = [y if v is None else v for y, v in zip((gate, up), kept, strict=False)]
    of_pair = columns_of_h(saved.h, layers[:2])
    pair = [*map(Given, (da, da), (x, x), layers, scalars, of_pair, kept_pair, has_pre, grads, (dropout, dropout))]
    dgate, dup = plan.temp(gate.shape, t), da
    if together := forms_dz_of_both(plan, pair):
        dup = plan.temp(gate.shape, t)
        sums = [multi_bwd.Out(None, None, None, of.grads.m, of.grads.c, None) for of in pair]
        multi_bwd.gated_scale(plan, [alone(of) for of in pair], act, (dgate, dup), sums)
    else:
        act_backward(plan, da, gate, up, dgate, dup, act)
    parts = [of._replace(dy=d, fp8=fp8, scaled=together) for of, d in zip(pair, (dgate, dup), strict=True)]
    backward(plan, parts, dx and dx.flat())


def forms_dz_of_both(plan: Builder, pair: Sequence[Given]) -> bool:
    """Whether one pass forms dz, dm and dc of gate and up from da: 5 M F elements, where the activation's pass and one for each
    layer move 11. Dense layers of many tokens, whose outputs are what is kept of them; few elements have dB in their pass, and
    where W takes g a second dz would be the peak of memory."""
    dy = pair[0].dy
    if dy.dtype == torch.float32 or is_small(dy.shape[0]):
        return False
    for of in pair:
        la = of.la
        twice = la.seed is not None and of.dropout.mode == "peft"
        if la.A is None or la.m is None or of.pre_scale or twice or isinstance(la.W, Packed) or takes_g(plan.device, of):
            return False
    sums = [of.grads.B is not None and not at_once(plan.device, of) for of in pair]
    return not any(config_for(plan, dy, of.la.A.shape[0], has).BLOCK_R for of, has in zip(pair, sums, strict=True))


def alone(of: Given) -> multi_bwd.Given:
    """A layer as a bank of one adapter, which has all tokens."""
    la = of.la
    A, B = (replace(t, shape=(1, *t.shape), stride=(0, *t.stride)) for t in (la.A, la.B))
    bank: Any = Bank._make((la.W, A, B, la.m, la.c, *[None] * 7, 0.0, False, "lora"))
    return multi_bwd.Given(of.dy, of.x, bank, of.h, of.saved, False)


def _output(plan: Builder, la: Any, y: Any, pre_scale: Any) -> Array:
    """The output of gate or up: kept, or again from the value before g."""
    if y is not None:
        return dense(plan, y)
    out = plan.temp(pre_scale.shape, pre_scale.dtype)
    epilogue_of(plan, dense(plan, pre_scale), out, Epilogue("scale", la.m, la.c, la.bias))
    return out


mlp, _mlp = asking(
    plan_forward,
    "mlp(Tensor x, Tensor?[] operands, float[] s, str[] saves, float p, str mode, str act, str[] text, SymInt[] numbers, "
    "bool fp8, Tensor[] seen, bool keep) -> Tensor[]",
    _divided,
)
