"""Squares of the rows of W + s B A for a W of 4-bit codes, along strips; see fdora/triton/quant.py.

A program walks along a strip of some rows with its slab of B at hand; tiles of codes, of their scales and of A are on their
way to shared memory, and sums of squares stay in registers until the strip ends: kernels/quant_strips.py. The length of a
strip, and whether there are any, follows from the columns, the rank and the format alone, so that a shard of the rows has the
bits of the whole.
"""

from __future__ import annotations

import torch

from fdora.quant import Lut4
from fdora.triton.codes import LOOKUP, Packed, decoding, groups_of, in_pairs
from fdora.triton.hash import WORDS
from fdora.triton.kernels.quant_strips import quant4_strips_kernel
from fdora.triton.norm import Guard, hashes_of
from fdora.triton.runtime.builder import Builder, named
from fdora.triton.runtime.device import cdiv, is_tma_compatible
from fdora.triton.runtime.plan import Array, Scalar, Tile
from fdora.triton.tiles.quant import StripConfig, strip_config

SECOND = 256  # groups to a second scale


def strips_of(plan: Builder, W: Packed, A: Array) -> StripConfig | None:
    """None where single tiles are what there is: other GPUs, larger ranks, codes that do not lie in whole words."""
    (_, K), form, R = W.shape, W.form, A.shape[0]
    if 0 in (*W.shape, R):  # no tensor map is made of nothing
        return None
    if not isinstance(form, Lut4) or A.itemsize != 2 or not W.codes.aligned or not in_pairs(form, K) or form.group < 8:
        return None
    config = strip_config(R, K, plan.device.capability)
    return None if config is None or K % config.BLOCK_K or not is_tma_compatible(A) else config


def squares_along_strips(
    plan: Builder, W: Packed, A: Array, B: Array, s: Scalar, first: int, guard: Guard | None, config: StripConfig
) -> Array:
    """(strips, N): of N rows of W from ``first`` on."""
    (N, R), K, form = B.shape, W.shape[1], W.form
    assert isinstance(form, Lut4)
    partial = plan.temp((cdiv(K, config.SPAN), N), torch.float32)
    programs = cdiv(N, config.BLOCK_N) * partial.shape[0]
    pdl = guard is not None and plan.device.supports_pdl
    if guard is not None:
        programs = min(programs, config.PROGRAMS * plan.device.num_sms)
    codes = W.codes.words((W.codes.numel // 4,), (1,), torch.int32)
    together = config.SPAN // form.group  # groups of a strip's row
    one_second = 0 < together <= SECOND and groups_of(W) % together == 0
    facts = decoding(W, plan.device.capability, LOOKUP) | {"codes": codes}
    asked = "codes scales code256 scales2 offset groups CODE HIGH_FIRST GROUP_SIZE SCALES PTX"  # all of them are in pairs here
    of_codes = {name: facts[name] for name in asked.split()}
    given = {"A": Tile(A, (config.BLOCK_R, config.BLOCK_K)), "B": B, "partial": partial, "s": s, **of_codes}
    given |= {"first": first, "N": N, "K": K, "R": R, "span": config.SPAN, "WORDS": WORDS}
    given |= {**named("old_hash new_hash", hashes_of(guard)), "EVEN": N % config.BLOCK_N == 0, "ONE_SECOND": one_second}
    plan.launch(quant4_strips_kernel, (programs,), given, config, num_stages=config.AHEAD, pdl=pdl)
    return partial
