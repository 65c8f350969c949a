"""Squares of the rows of W + s B A for a W of codes, decoded in registers; see fdora/triton/quant.py.

A program walks a run of tiles of the same rows, with the codes of the next on their way, and writes one partial sum
per row. Of 4-bit codes on Hopper it walks along a strip of some rows with its slab of B at hand; tiles of codes, of their
scales and of A are on their way to shared memory, and sums of squares stay in registers until the strip ends:
kernels/quant_strips.py. The length of a strip, and whether there are any, follows from the columns, the rank and the format
alone, so that a shard of the rows has the bits of the whole.
"""

from __future__ import annotations

import torch

from fdora.quant import Lut4
from fdora.triton.codes import LOOKUP, Ints, Packed, decoding, group_of, groups_of, in_pairs
from fdora.triton.hash import UNGUARDED, Guard
from fdora.triton.kernels.quant import quant_kernel
from fdora.triton.kernels.quant_strips import quant4_strips_kernel
from fdora.triton.runtime import Array, Builder, Scalar, Tile, cdiv, is_tma_compatible
from fdora.triton.split import Factors
from fdora.triton.tiles.quant import StripConfig, quant_config, run_of, strip_config, within

SECOND = 256  # groups to a second scale


def squares_of_codes(plan: Builder, W: Packed, of: Factors, s: Scalar, guard: Guard, dense: Array | None, first: int) -> Array:
    """(runs or strips along K, N): of N rows of W from ``first`` on. ``dense``: W goes there, too."""
    strips = None if of.scale_n is not None or dense is not None else strips_of(plan, W, of.A)
    if strips is not None:
        return _along_strips(plan, W, of, s, guard, first, strips)
    N, K, R = of.B.shape[0], W.shape[1], of.A.shape[0]
    aligned = is_tma_compatible(of.A) and is_tma_compatible(of.B)
    wide = isinstance(W.form, Lut4) and W.form.group >= 32 and of.scale_n is None
    on, pairs = plan.device, in_pairs(W.form, K)
    config = quant_config(R, of.A.itemsize == 2, on.capability, pairs, wide, aligned, dense is not None)
    if group := group_of(W):
        most = 64 if isinstance(W.form, Ints) and W.form.indexed else 128  # a scale and a zero for each number
        config = config._replace(BLOCK_K=within(min(most, config.BLOCK_K), group))
    block_n, block_k, block_r = config[:3]
    run = config.RUN
    run = run or (run_of(cdiv(N, block_n), cdiv(K, block_k), on.num_sms) if comes_ahead(W, block_k) else 1)
    runs = cdiv(K, block_k * run)
    partial = plan.temp((runs, N))
    programs, guarded = cdiv(N, block_n) * runs, guard is not UNGUARDED
    if guarded or config.TMA:  # three programs of 64 x 128 fit on a multiprocessor, one that TMA feeds
        programs = min(programs, (1 if config.TMA else 3) * on.num_sms)
    given = {"partial": partial, "s": s, "first": first, "N": N, "K": K, "R": R, "dense": dense, "RUN": run}
    given |= {"pitch": 0 if dense is None else dense.stride[0], "ONE_SLAB": block_r >= R}
    given |= {"EVEN": N % block_n == 0 and K % block_k == 0 and R % block_r == 0}
    if config.TMA:
        given |= {"A": Tile(of.A, (block_r, block_k)), "B": Tile(of.B, (block_n, block_r))}
    codes = decoding(W, on.capability, LOOKUP)
    plan.launch(quant_kernel, (programs,), given, codes, of, guard, config, pdl=guarded and plan.pdl)
    return partial


def comes_ahead(W: Packed, block_k: int) -> bool:
    """Whether a kernel fetches the next tile's codes early. Beside a scale or an address for each code it would spill."""
    if isinstance(W.form, Lut4):
        return in_pairs(W.form, W.shape[1])
    if isinstance(W.form, Ints):
        return not W.form.indexed and W.form.group % block_k == 0
    return W.form.scale != "block" or W.form.block[1] % block_k == 0


def strips_of(plan: Builder, W: Packed, A: Array) -> StripConfig | None:
    """None where single tiles are what there is: other GPUs, larger ranks, codes that do not lie in whole words."""
    (_, K), form, R = W.shape, W.form, A.shape[0]
    if 0 in (*W.shape, R):  # no tensor map is made of nothing
        return None
    if not isinstance(form, Lut4) or A.itemsize != 2 or not W.codes.aligned or not in_pairs(form, K) or form.group < 8:
        return None
    config = strip_config(R, K, plan.device.capability)
    return None if config is None or K % config.BLOCK_K or not is_tma_compatible(A) else config


def _along_strips(plan: Builder, W: Packed, of: Factors, s: Scalar, guard: Guard, first: int, config: StripConfig) -> Array:
    (N, R), K, form = of.B.shape, W.shape[1], W.form
    assert isinstance(form, Lut4)
    partial = plan.temp((cdiv(K, config.SPAN), N))
    programs, guarded = cdiv(N, config.BLOCK_N) * partial.shape[0], guard is not UNGUARDED
    if guarded:
        programs = min(programs, config.PROGRAMS * plan.device.num_sms)
    together = config.SPAN // form.group  # groups of a strip's row
    codes = decoding(W, plan.device.capability, LOOKUP) | {"codes": W.codes.words((W.codes.numel // 4,), (1,), torch.int32)}
    given = {"A": Tile(of.A, (config.BLOCK_R, config.BLOCK_K)), "B": of.B, "partial": partial, "s": s}
    given |= {"first": first, "N": N, "K": K, "R": R, "span": config.SPAN, "EVEN": N % config.BLOCK_N == 0}
    given |= {"ONE_SECOND": 0 < together <= SECOND and groups_of(W) % together == 0}
    pdl = guarded and plan.pdl
    plan.launch(quant4_strips_kernel, (programs,), given, codes, guard, config, num_stages=config.AHEAD, pdl=pdl)
    return partial
