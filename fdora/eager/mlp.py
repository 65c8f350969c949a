"""A gated MLP, ``y = down(f(gate(x)) up(x))``: what backward can form again is not saved.

The tensor saved of gate and up is their output, which the activation's backward needs anyway and dm reads too; or, where the
output will not do for dm, the value before g, from which the output follows. Only under "peft" dropout both are saved.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from fdora._records import Bound, Dropout, Grads, Needs, Operands, Options, Saved, SavedMlp, layers_in
from fdora.eager.act import Act, act_bwd, act_fwd
from fdora.eager.linear import as_matrix, layers_bwd, layers_fwd, output, shaped


def mlp_fwd(
    x: Tensor, layers: Sequence[Operands], options: Sequence[Options], drop: Dropout, act: Act, fp8: bool = False
) -> tuple[Tensor, SavedMlp, tuple[Tensor, ...]]:
    """x (..., K), gate, up, down -> y (..., N), what backward reads, and no norms: all were given."""
    (gate, up), saved = layers_fwd(as_matrix(x), layers[:2], options[:2], drop, fp8=fp8)
    (y,), below = layers_fwd(act_fwd(gate, up, act), layers[2:], options[2:], drop, fp8=fp8)
    pre = [v if has else None for v, has in zip((*saved.kept, *below.kept), (*saved.pre_scale, *below.pre_scale), strict=True)]
    outputs = [v if before is None or drop.mode == "peft" else None for v, before in zip((gate, up), pre[:2], strict=True)]
    y = shaped(y, x)
    kept = y if pre[2] is None and options[2].save != "nothing" else None
    return y, SavedMlp(saved.h, below.h, outputs[0], outputs[1], kept, *pre), ()


def mlp_bound(_: tuple[Tensor | None, ...], options: Sequence[Options], drop: Dropout, act: Act, **dense: Any) -> Bound:
    """The same of x and the operands one behind the other, every W a tensor."""

    def bound(tensors: tuple[Any, ...]) -> Any:
        y, saved, _ = mlp_fwd(tensors[0], layers_in(tensors[1:]), options, drop, act)
        return [y], *saved.apart()

    return bound


def mlp_bwd(
    dy: Tensor,
    x: Tensor,
    layers: Sequence[Operands],
    options: Sequence[Options],
    drop: Dropout,
    act: Act,
    saved: SavedMlp,
    need_x: bool,
    needs: Sequence[Needs],
    fp8: bool = False,
) -> tuple[Tensor | None, list[Grads]]:
    """dx, and the gradients of gate, up and down; those of bias in acc_dtype."""
    flat, pre = as_matrix(x), (saved.pre_gate, saved.pre_up, saved.pre_down)
    gate, up = (
        output(v, la.m, la.c, la.bias) if y is None else y  # type: ignore[arg-type]
        for y, v, la in zip((saved.gate, saved.up), pre[:2], layers[:2], strict=True)
    )
    need_a = need_x or any(map(any, needs[:2]))
    below = Saved(saved.h_down, (saved.y if pre[2] is None else pre[2],), (pre[2] is not None,))
    a = act_fwd(gate, up, act)
    da, of_down = layers_bwd([as_matrix(dy)], a, layers[2:], options[2:], drop, below, need_a, needs[2:], fp8)
    del a
    if da is None:
        return None, [Grads(), Grads(), *of_down]
    pair: list[Tensor | None] = list(act_bwd(da, gate, up, act))
    del da
    kept = tuple(y if v is None else v for y, v in zip((gate, up), pre[:2], strict=True))
    del gate, up
    above = Saved(saved.h, kept, tuple(v is not None for v in pre[:2]))
    dx, grads = layers_bwd(pair, flat, layers[:2], options[:2], drop, above, need_x, needs[:2], fp8)
    return dx if dx is None else dx.reshape(x.shape), [*grads, *of_down]
