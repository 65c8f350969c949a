"""Fold an adapter into its weight, ``W' = g (W + s B A)``, and take it out again: one read and one write of W, no dense B A.

A program owns one tile: products on tensor cores with a float32 sum, then g, then one rounding. Roof: the larger of two
passes over W and the products.
"""

from __future__ import annotations

from functools import partial

from fdora.triton.kernels.merge import merge_kernel
from fdora.triton.norm import tiled
from fdora.triton.op import planned
from fdora.triton.runtime import Array, Builder, Scalar, Tile, cdiv, is_tma_compatible
from fdora.triton.split import by_rows
from fdora.triton.tiles.configs import merge_config


@planned(
    "merge(bool undo, Tensor W, Tensor A, Tensor B, Tensor m, Tensor c, float s) -> Tensor",
    "dora_merge",
    "matrix matrix matrix vector vector s",
    lambda W, *_: {"W": (W.shape, W.dtype)},
    "one read and one write of W, no dense B A",
    asks=(1,),
)
def plan_merge(plan: Builder, W: Array, A: Array, B: Array, m: Array, c: Array, s: Scalar, undo: bool) -> None:
    """(N, K) -> (N, K) in the dtype of W, contiguous. Undone, a row with c = 0 was -s B A itself; one with g = 0 and c > 0
    comes back as NaN."""
    plan.name = "dora_unmerge" if undo else plan.name
    (merged,), half, on = plan.wanted(), W.itemsize == 2, plan.device
    for i, j, of in by_rows(plan, A, B):
        w, out = W.rows(i, j), merged.rows(i, j)
        aligned = half and all(is_tma_compatible(t) for t in (w, of.A, of.B, out))
        plain = of.scale_n is None and not undo
        config = merge_config(of.A.shape[0], of.A.itemsize == 2, on.capability, aligned, half, plain)
        given = tiled(config, w, of.A, of.B) | {"m": m.rows(i, j), "c": c.rows(i, j), "s": s, "UNDO": undo}
        programs = cdiv(w.shape[0], config.BLOCK_N) * cdiv(w.shape[1], config.BLOCK_K)
        if config.TMA:
            programs = min(programs, on.num_sms)
        given["out"] = Tile(out, config[:2]) if config.TMA else out
        plan.launch(merge_kernel, (programs,), given, of, config)


merge_fwd, unmerge_fwd = partial(plan_merge.call, False), partial(plan_merge.call, True)
