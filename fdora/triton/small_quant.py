"""The layer for a handful of tokens where W is codes: read once as they are stored, and decoded where they are multiplied.

    parts of h = s x A^T             as in small.py
    out = g (x W + h B) + bias       one program per few columns, all of K, then all of r

Where columns are too few to fill the GPU, K is split too, and the second launch becomes two:

    parts of x W                     one program per few columns and part of K
    out = g (sum + h B) + bias       one program per few columns; parts are added in their order

Above r = 64 h B is one of the parts, whose programs read B while others read codes: 14336 x 4096, r = 384, one token, 0.039 ms
before and 0.032 so (H200).

Each weight is value(code) * scale in float32, rounded once to the dtype of x: the number that a dense W of that dtype holds.
So y is that of the dense way up to the order of a sum. Nothing of the size of W is written.
"""

from __future__ import annotations

from typing import Any

import torch

from fdora.quant import Lut4
from fdora.triton.codes import Packed, decoding, groups_of, has_ptx
from fdora.triton.kernels.small import add_parts_kernel
from fdora.triton.kernels.small_codes import codes_parts_kernel, small_codes_kernel
from fdora.triton.runtime.builder import Builder, named
from fdora.triton.runtime.device import cdiv
from fdora.triton.runtime.plan import Array, Scalar
from fdora.triton.small import Back, Ends, Out, backward_ends, forward_ends, shrunk
from fdora.triton.tiles.codes import CodesConfig, parts_config, small_codes_config
from fdora.triton.tiles.configs import power_of_two

BESIDE = 64  # above this rank h B is a part beside those of x W


def reads(W: Packed) -> bool:
    """Whether the functions here take it: 4-bit codes in whole words of rows and groups, or any 8-bit ones."""
    if not isinstance(W.form, Lut4):
        return True
    K, group = W.shape[1], W.form.group
    power = group & (group - 1) == 0 and group >= 8
    return power and K % 8 == 0 and (K % group == 0 or W.form.layout == "row") and W.codes.aligned


def small_forward_of_codes(
    plan: Builder, x: Array, la: Any, s: Scalar, out: Out, config: CodesConfig | None = None, accumulate: bool = False
) -> None:
    """:func:`fdora.triton.small.small_forward`, W of codes. float16 or bfloat16 x."""
    _small(plan, x, la.W, False, la.A.T, forward_ends(la, s, out), config, accumulate)


def small_backward_of_codes(
    plan: Builder, dz: Array, la: Any, s: Scalar, out: Back, config: CodesConfig | None = None, accumulate: bool = False
) -> None:
    """:func:`fdora.triton.small.small_backward`, W of codes."""
    _small(plan, dz, la.W, True, la.B, backward_ends(la, s, out), config, accumulate)


def _small(
    plan: Builder, x: Array, W: Packed, columns: bool, a: Array, ends: Ends, config: CodesConfig | None, accumulate: bool
) -> None:
    """(M, K), W (N, K) or, for its columns, (K, N), (K, r) (r, N): x w + s x a b, and what comes with it."""
    (M, K), N, r, form = x.shape, ends.out.shape[1], a.shape[1], W.form
    if ends.are_empty(plan):
        return
    part, pdl = shrunk(plan, x, a)
    # Forward, 8 columns of tokens are no product of wgmma's: 1 token then takes twice the time of 16 (H200, Triton 3.6).
    rows = 8 if columns and M <= 8 else power_of_two(M)
    capability, codes, strides = plan.device.capability, W.codes, W.codes.stride
    how: tuple
    if isinstance(form, Lut4):
        codes = codes.words((codes.numel // 4,), (1,), torch.int32)
        scales, code256, scales2, offset = W.rest
        strides = (0, 0)
        how = (4, form.table, form.hi_first, form.group, form.scales, 1, has_ptx(capability) and capability >= 80)
    else:
        (scales,), code256, scales2, offset = W.rest, None, None, None
        strides = strides if columns else strides[::-1]
        facts = decoding(W, capability)
        how = (8, *(facts[name] for name in ("CODE", "BY_BITS", "BN", "SCALES", "BK", "PTX")))
    config = config or small_codes_config(rows, N, K, how[0], columns, capability, plan.device.num_sms)
    step = config.BLOCK_K * config.SLICES
    even, splits = N % config.BLOCK_N == 0 and K % step == 0, min(config.SPLITS, cdiv(K, step))
    beside = splits > 1 and not columns and r > BESIDE
    rows = rows if splits > 1 or ends.dA is None else max(16, rows)  # dA sums over tokens, 16 at least
    sizes = {"M": M, "N": N, "K": K, "R": r, "words": W.shape[1] // 8, "groups": groups_of(W)}
    weight = {"x": x, "codes": codes, "scales": scales, "code256": code256, "scales2": scales2, "offset": offset}
    weight |= named("stride_wk stride_wn", strides) | named("BITS KIND HIGH_FIRST GROUP SCALES BLOCK_COLUMNS PTX", how)
    given = weight | sizes | {"COLUMNS": columns, "EVEN": even, "BLOCK_M": rows, "BLOCK_R": min(64, power_of_two(r))}
    ending = {"part": part, **ends.strides, "PARTS": part.shape[0], "ACCUMULATE": accumulate}
    if splits == 1:
        plan.launch(small_codes_kernel, (cdiv(N, config.BLOCK_N),), {**given, **ending}, ends, config, pdl=pdl)
        return
    sums = plan.temp((splits + beside, M, N), torch.float32)
    low = (part, ends.h, ends.b, ends.s, part.shape[0]) if beside else (None, None, None, None, 0)
    given |= {"out": sums, **named("part h b s PARTS", low)}
    plan.launch(codes_parts_kernel, (cdiv(N, config.BLOCK_N), splits + beside), given, config, pdl=pdl)
    if beside:  # nothing is left of it to add
        r, ends = 0, ends._replace(h=None)
    tile = parts_config(M, r, columns)
    given = {"sums": sums, "x": x, "M": M, "N": N, "R": r, "SPLITS": splits + beside, "BLOCK_M": power_of_two(M)}
    plan.launch(add_parts_kernel, (cdiv(N, tile.BLOCK_N),), {**given, **ending}, ends, tile, num_stages=2, pdl=pdl)
