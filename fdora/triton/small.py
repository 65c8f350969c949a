"""The layer for a handful of tokens (decoding): bound by reading W once, so tiles are narrow and many.

    parts of h = s x A^T             one program per slab of the rank and part of K
    out = g (x W + h B) + bias       one program per few columns, all of K, then all of r

On sm_90 and later the second kernel starts while the first one runs (programmatic dependent launch): it streams its part of
W and waits for h only before the products with B, so h costs next to nothing.

A W of codes is read once as they are stored, and decoded where they are multiplied. Where columns are too few to fill the GPU,
K is split too, and the second launch becomes two:

    parts of x W                     one program per few columns and part of K
    out = g (sum + h B) + bias       one program per few columns; parts are added in their order

Above r = 64 h B is one of the parts, whose programs read B while others read codes: 14336 x 4096, r = 384, one token, 0.039 ms
before and 0.032 so (H200).

Each weight is value(code) * scale in float32, rounded once to the dtype of x: the number that a dense W of that dtype holds.
So y is that of the dense way up to the order of a sum. Nothing of the size of W is written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fdora.quant import Codes8, Lut4
from fdora.triton.codes import Ints, Packed, decoding, has_ptx
from fdora.triton.kernels.small import add_parts_kernel, shrink_kernel, small_kernel
from fdora.triton.kernels.small_codes import codes_parts_kernel, small_codes_kernel
from fdora.triton.runtime import Array, Builder, Scalar, cdiv, is_tma_compatible, named
from fdora.triton.runtime.private import NARROW
from fdora.triton.tiles.codes import CodesConfig, parts_config, small_codes_config
from fdora.triton.tiles.configs import SmallConfig, power_of_two, small_config
from fdora.triton.tiles.few import LIMIT, takes_narrow_tiles

BESIDE = 64  # above this rank h B is a part beside those of x W
Config = SmallConfig | CodesConfig


def is_small(tokens: int) -> bool:
    """Whether there are narrow tiles for so many. W of codes and banks take them then."""
    return tokens <= LIMIT


def why_many(x: Array) -> str:
    """In words, of tokens that do not take this way."""
    return f"more than {LIMIT} tokens" if x.shape[0] > LIMIT else "predicted faster than one pass over W"


def is_few(plan: Builder, x: Array, la: Any, forward: bool) -> bool:
    """Of x (M, K), or of dy in backward: whether the pass of this file takes the layer. With a dense W it does where it is
    predicted to be faster than the product of gemm.py."""
    if la.A is None or isinstance(la.W, Packed):
        return is_small(x.shape[0])
    w, r = la.W.T if forward else la.W, la.A.shape[0]
    (M, K), N, on = x.shape, w.shape[1], plan.device
    return takes_narrow_tiles(int(M), N, K, r, w.stride[1] != 1, is_tma_compatible(x), on.capability, on.num_sms)


class Out(NamedTuple):
    """Where the results of a layer's forward go."""

    y: Array
    h: Array | None
    pre_scale: Array | None
    c: Array | None = None  # the norm, where nobody gave it


class Back(NamedTuple):
    """Where those of its backward go, and what dA = (s dz B)^T x reads."""

    dx: Array
    dA: Array | None = None
    x: Array | None = None


class Ends(NamedTuple):
    """What a pass x w + h b with h = s x a reads and writes beside that, in the order of the kernels, behind the parts of h."""

    h: Array | None
    b: Array
    out: Array
    pre_scale: Array | None
    m: Array | None
    c: Array | None
    bias: Array | None
    u: Array | None  # beside dA = h^T u
    dA: Array | None
    s: Scalar

    @property
    def strides(self) -> dict[str, int]:
        """Of u; of what is not there 1, which is compiled in."""
        return named("stride_um stride_un", (1, 1) if self.u is None else self.u.stride)

    def are_empty(self, plan: Builder) -> bool:
        """Whether there is no token or no column; sums over them are 0 then."""
        if self.out.numel:
            return False
        for t in (self.h, self.dA):
            if t is not None:
                plan.zero(t)
        return True


def small_forward(
    plan: Builder, x: Array, la: Any, s: Scalar, out: Out, config: Config | None = None, accumulate: bool = False
) -> None:
    """(M, K) and a layer, W in the dtype of x or of codes -> y, pre_scale (M, N) and h = s x A^T (M, r). ``accumulate``: added
    to y.

    ``config`` overrides the table.
    """
    ends = Ends(out.h, la.B.T, out.y, out.pre_scale, la.m, la.c, la.bias, None, None, s)
    _small(plan, x, la.W, False, la.A.T, ends, config, accumulate)


def small_backward(
    plan: Builder, dz: Array, la: Any, s: Scalar, out: Back, config: Config | None = None, accumulate: bool = False
) -> None:
    """(M, N), a layer -> dx = dz W + s dz B A (M, K) and dA. ``accumulate``: added to dx."""
    ends = Ends(None, la.A, out.dx, None, None, None, None, None if out.dA is None else out.x, out.dA, s)
    _small(plan, dz, la.W, True, la.B, ends, config, accumulate)


def reads(W: Packed) -> bool:
    """Whether these take it: 4-bit codes in whole words of rows and groups, or any 8-bit ones."""
    if not isinstance(W.form, Lut4):
        return isinstance(W.form, Codes8) or W.codes.itemsize == 4 or (W.shape[1] % 4 == 0 and W.codes.aligned)
    K, group = W.shape[1], W.form.group
    power = group & (group - 1) == 0 and group >= 8
    return power and K % 8 == 0 and (K % group == 0 or W.form.layout == "row") and W.codes.aligned


def parts_of(K: int, r: int) -> int:
    """Few slabs of a small rank: K is split as well, so that more than one multiprocessor works and nobody loops for long."""
    return max(1, min(8 if r <= 64 else 4 if r <= 128 else 2, K // 256))


def shrunk(plan: Builder, x: Array, a: Array) -> Array:
    """(M, K) (K, r) -> the parts of x a, (parts, M, r) float32. The kernel that adds them may start early."""
    (M, K), r, rows = x.shape, a.shape[1], power_of_two(x.shape[0])
    parts = parts_of(K, r)
    part = plan.temp((parts, M, r))
    span = cdiv(cdiv(K, parts), 16) * 16
    wide = rows < 64 and plan.device.capability > 0  # an AMD GPU has 64 KiB of shared memory: too little for a slab in float32
    given = {"x": x, "a": a, "part": part, "M": M, "K": K, "R": r, "span": span, "PDL": plan.pdl}
    given |= {"BLOCK_M": rows, "BLOCK_R": 16, "BLOCK_K": min(512 if wide else 128, power_of_two(span))}
    plan.launch(shrink_kernel, (cdiv(r, 16), parts), given | named("stride_ak stride_ar", a.stride))
    return part


def _small(
    plan: Builder, x: Array, W: Array | Packed, columns: bool, a: Array, ends: Ends, config: Any, accumulate: bool
) -> None:
    """(M, K), W (N, K) or, for its columns, (K, N), (K, r) (r, N): x w + s x a b, and what comes with it."""
    if ends.are_empty(plan):
        return
    (M, K), N, r, on = x.shape, ends.out.shape[1], a.shape[1], plan.device
    part = shrunk(plan, x, a)
    of = {"x": x, "part": part, "PARTS": part.shape[0], "M": M, "N": N, "K": K, "R": r, "ACCUMULATE": accumulate}
    of |= {"BLOCK_R": min(64, power_of_two(r))}
    if isinstance(W, Packed):
        return _of_codes(plan, W, columns, ends, of, config)
    w, rows = W if columns else W.T, power_of_two(M)
    config = config or small_config(rows, N, K, w.stride[1] == 1, on.capability, on.num_sms)
    plan.launch(small_kernel, "N", {"w": w, "BLOCK_M": rows, **ends.strides}, of, ends, config, pdl=plan.pdl)


def _of_codes(plan: Builder, W: Packed, columns: bool, ends: Ends, of: dict[str, Any], config: CodesConfig | None) -> None:
    (M, N, K, r), (_, capability, num_sms, pdl) = (of[size] for size in "MNKR"), plan.device
    weight = _codes(W, capability)
    # Forward, 8 columns of tokens are no product of wgmma's: 1 token then takes twice the time of 16 (H200, Triton 3.6).
    rows = NARROW if columns and M <= NARROW else power_of_two(M)
    of_words = W.form.code if isinstance(W.form, Ints) and W.form.bits == 4 else ""
    config = config or small_codes_config(rows, N, K, weight["HOW"].BITS, columns, capability, num_sms, of_words)
    step = config.BLOCK_K * config.SLICES
    even, splits = N % config.BLOCK_N == 0 and K % step == 0, min(config.SPLITS, cdiv(K, step))
    beside = splits > 1 and not columns and r > BESIDE
    rows = rows if splits > 1 or ends.dA is None else max(16, rows)  # dA sums over tokens, 16 at least
    weight |= {"COLUMNS": columns, "EVEN": even, "BLOCK_M": rows}
    halves = of_words.startswith("hqq") and not columns  # a tile has two runs of columns
    if splits == 1 and not halves:
        return plan.launch(small_codes_kernel, "N", weight | ends.strides, of, ends, config, pdl=pdl)
    sums = plan.temp((splits + beside, M, N))
    low = (of["part"], ends.h, ends.b, ends.s, of["PARTS"]) if beside else (None, None, None, None, 0)
    weight |= {"out": sums, "HALVES": halves, **named("part h b s PARTS", low)}
    plan.launch(codes_parts_kernel, (cdiv(N, config.BLOCK_N), splits + beside), weight, of, config, pdl=pdl)
    if beside:  # nothing is left of it to add
        r, ends = 0, ends._replace(h=None)
    given = {"sums": sums, "R": r, "SPLITS": splits + beside, "BLOCK_M": power_of_two(M), **ends.strides}
    plan.launch(add_parts_kernel, "N", given, ends, parts_config(M, r, columns), of, num_stages=2, pdl=pdl)


def _codes(W: Packed, capability: int) -> dict[str, Any]:
    """W as the kernels of few tokens take it: 4-bit codes in words of eight."""
    given = decoding(W, capability)
    if W.codes.itemsize == 1 and not isinstance(W.form, Codes8):
        ptx = has_ptx(capability) and capability >= 80
        codes = W.codes.words((W.codes.numel // 4,), (1,), torch.int32)
        columns = W.shape[1] // (8 if isinstance(W.form, Lut4) else 4)  # of HQQ's 4 bits, a word has half of 8 codes in a row
        given |= {"codes": codes, "stride_cn": columns, "HOW": given["HOW"]._replace(PTX=ptx)}
    return given
