"""A gated MLP as one plan for each direction: gate and up on one x, the activation, down."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fdora._records import Bound, Dropout, DropoutMode, Grads, Needs, Operands, Options, SavedMlp, layers_in
from fdora._torch import needs_dispatcher
from fdora.triton import act as activation
from fdora.triton.copy import dense
from fdora.triton.gemm import Epilogue
from fdora.triton.linear import rows_of, saves_pre_scale
from fdora.triton.linear_bwd import backward, forms_of_grads, needs_in, result_grads
from fdora.triton.linear_fwd import columns_of_h, epilogue_of, forward, result_h
from fdora.triton.norm_kept import run_asking
from fdora.triton.op import op, planned
from fdora.triton.operands import Likes, any_norms, facts, fake_layers, fake_norms, flat, norms_of, read_layers, with_norms
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import Device
from fdora.triton.runtime.plan import Array, Plan
from fdora.triton.runtime.walk import plan_for, run
from fdora.triton.small import Out


def mlp_fwd(
    x: Tensor,
    layers: Sequence[Operands],
    options: Sequence[Options],
    drop: Dropout,
    act: str,
    seen: Sequence[Tensor] = (),
    keep: bool = True,
) -> tuple[Tensor, SavedMlp, tuple[Tensor, ...]]:
    """x (..., K), gate, up, down -> y (..., N), what backward reads, and c of each adapted layer that came without one.

    ``seen`` and ``keep`` as of layers_fwd."""
    s, saves = [o.s for o in options], [o.save for o in options]
    run_it: Any = mlp if needs_dispatcher(x) else _mlp
    results = run_it(x, flat(layers), s, saves, *drop, act, *facts(layers), seen, keep)
    return unpacked(results, x, layers, saves, drop.mode)


def mlp_bound(tensors: tuple[Tensor | None, ...], options: Sequence[Options], drop: Dropout, act: str) -> Bound:
    """The same for plain tensors where nothing traces, every layer with a dense W, an adapter and c: the host's short way."""
    s, saves = zip(*options, strict=True)
    plan = plan_for(plan_forward, tensors, *drop, saves, s[0] == s[1], act, (), ())
    has_y, more = saves[2] != "nothing", len(plan.results) > 5

    def bound(tensors: tuple[Any, ...]) -> Any:
        results = run(plan, tensors, s)
        if more:
            y, saved, _ = unpacked(results, tensors[0], layers_in(tensors[1:]), saves, drop.mode)
            return [y], *saved.apart()
        y, *parts = results
        return [y], tuple(parts), (None, None, y if has_y else None), (False,) * 3

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


def _mlp(x, operands, s, saves, p, mode, act, text, numbers, seen, keep) -> tuple[Tensor, ...]:
    given: tuple[Tensor, ...] = run_asking(_planned, seen, keep, x, operands, s, saves, p, mode, act, text, numbers)
    return given


def _planned(x, operands, s, saves, p, mode, act, text, numbers, seen=(), keep=True):
    operands = with_norms(operands, any_norms(operands)) if seen else operands
    tensors, s, options = (x, *operands), tuple(s), (p, mode, tuple(saves))
    return plan_for(plan_forward, tensors, *options, s[0] == s[1], act, tuple(text), tuple(numbers)), tensors, s


def plan_forward(
    likes: Likes,
    device: Device,
    p: float,
    mode: DropoutMode,
    saves: tuple[str, ...],
    same_s: bool,
    act: str,
    text: tuple[str, ...] = (),
    numbers: tuple[int, ...] = (),
) -> Plan:
    plan = Builder("dora_mlp forward", device)
    x = plan.tokens(likes[0])
    (*lead, _), t = likes[0].shape, x.dtype
    layers = read_layers(plan, t, likes[1:], 3, text, numbers)
    scalars = [plan.scalar(f"s{i}") for i in range(3)]
    M, F, N = x.shape[0], layers[0].W.shape[0], layers[2].W.shape[0]
    dropout = Dropout(p, mode)
    y = plan.result("y", (*lead, N), t).flat()
    h, h_down = result_h(plan, x, layers[:2], "h"), result_h(plan, x, layers[2:], "h_down")
    pre = [saves_pre_scale(t, M, la, mode, save) for la, save in zip(layers, saves, strict=True)]
    pair = [
        plan.result(name, (M, F), t) if _keeps_output(has, mode) else plan.temp((M, F), t)
        for name, has in zip(("gate", "up"), pre, strict=False)
    ]
    before = [
        plan.result(f"pre_scale of {name}", (M, width), t) if has else None
        for name, width, has in zip(("gate", "up", "down"), (F, F, N), pre, strict=True)
    ]
    norms = norms_of(plan, layers)
    a = plan.temp((M, F), t)
    out = [Out(*o) for o in zip(pair, h.parts, before, norms, strict=False)]
    forward(plan, x, layers[:2], scalars[:2], out, h.whole, dropout, same_s)
    activation.forward(plan, pair[0], pair[1], a, act)
    forward(plan, a, layers[2:], scalars[2:], [Out(y, h_down.parts[0], before[2], norms[2])], h_down.whole, dropout, True)
    return plan.plan()


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
) -> tuple[Tensor | None, list[Grads]]:
    """dx, and the gradients of gate, up and down; those of bias in float32."""
    flags = [need for each in needs for need in each]
    s = [o.s for o in options]
    results = iter(_mlp_backward(dy, x, [*saved], flat(layers), s, *drop, act, need_x, flags, *facts(layers)))
    dx = next(results) if need_x else None
    return dx, [Grads(*(next(results) if need else None for need in each)) for each in needs]


def plan_backward(
    likes: Likes,
    device: Device,
    p: float,
    mode: DropoutMode,
    act: str,
    need_x: bool,
    needs: tuple[bool, ...],
    text: tuple[str, ...] = (),
    numbers: tuple[int, ...] = (),
) -> Plan:
    plan = Builder("dora_mlp backward", device)
    dy, x = plan.tokens(likes[0]), plan.tokens(likes[1])
    assert dy is not None and x is not None
    t, dropout = x.dtype, Dropout(p, mode)
    saved: Any = SavedMlp._make((plan.operand if i < 2 else plan.tokens)(like) for i, like in enumerate(likes[2:10]))
    layers = read_layers(plan, t, likes[10:], 3, text, numbers)
    scalars = [plan.scalar(f"s{i}") for i in range(3)]
    dx = plan.result("dx", likes[1].shape, t).flat() if need_x else None
    grads = result_grads(plan, layers, needs)
    gate, up = (
        _output(plan, la, y, pre)
        for la, y, pre in zip(layers[:2], (saved.gate, saved.up), (saved.pre_gate, saved.pre_up), strict=True)
    )
    a = plan.temp(gate.shape, t)
    activation.forward(plan, gate, up, a, act)
    da = plan.temp(gate.shape, t) if need_x or any(map(any, needs_in(needs)[:2])) else None
    kept, has_pre = (saved.y if saved.pre_down is None else saved.pre_down), saved.pre_down is not None
    of_down = columns_of_h(saved.h_down, layers[2:]).parts
    backward(plan, [dy], a, layers[2:], scalars[2:], of_down, [kept], [has_pre], dropout, da, grads[2:])
    if da is None:
        return plan.plan()
    dgate = plan.temp(gate.shape, t)
    activation.backward(plan, da, gate, up, dgate, da, act)
    pre: Any = (saved.pre_gate, saved.pre_up)
    kept_pair = [y if v is None else v for y, v in zip((gate, up), pre, strict=True)]
    of_pair = columns_of_h(saved.h, layers[:2]).parts
    backward(
        plan, [dgate, da], x, layers[:2], scalars[:2], of_pair, kept_pair, [v is not None for v in pre], dropout, dx, grads[:2]
    )
    return plan.plan()


def _output(plan: Builder, la: Any, y: Any, pre_scale: Any) -> Array:
    """The output of gate or up: kept, or again from the value before g."""
    if y is not None:
        return dense(plan, y)
    out = plan.temp(pre_scale.shape, pre_scale.dtype)
    epilogue_of(plan, dense(plan, pre_scale), out, Epilogue("scale", la.m, la.c, la.bias))
    return out


def _fake_mlp(x, operands, s, saves, p, mode, act, text, numbers, seen, keep):
    gate, up, down = fake_layers(operands, 3, text, numbers)
    M, F, N = rows_of(x), gate.W.shape[0], down.W.shape[0]
    pre = [saves_pre_scale(x.dtype, M, la, mode, save) for la, save in zip((gate, up, down), saves, strict=True)]
    r = sum(la.A.shape[0] for la in (gate, up) if la.A is not None)
    made = [(*x.shape[:-1], N), *([(M, r)] if r else []), *([(M, down.A.shape[0])] if down.A is not None else [])]
    made += [(M, F) for has in pre[:2] if _keeps_output(has, mode)]
    made += [(M, width) for width, has in zip((F, F, N), pre, strict=True) if has]
    return [x.new_empty(shape) for shape in made] + (fake_norms(x, (gate, up, down)) if keep else [])


mlp = op(
    "mlp",
    "(Tensor x, Tensor?[] operands, float[] s, str[] saves, float p, str mode, str act, str[] text, SymInt[] numbers, "
    "Tensor[] seen, bool keep) -> Tensor[]",
    _mlp,
    _fake_mlp,
    _planned,
)
mlp_backward, _mlp_backward = planned(
    "mlp_backward",
    "(Tensor dy, Tensor x, Tensor?[] saved, Tensor?[] operands, float[] s, float p, str mode, str act, bool need_x, "
    "bool[] needs, str[] text, SymInt[] numbers) -> Tensor[]",
    plan_backward,
    lambda dy, x, saved, operands, s, p, mode, act, need_x, needs, *_: forms_of_grads(x, operands, need_x, needs),
    asks=(1, 0),
)
