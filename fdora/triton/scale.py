"""Backward's elementwise pass: ``dz = g dy`` beside the sums over tokens for m, c and bias, and dB where r is small.

    dz = g dy       dg_n = sum_t dy v       dm = dg / c       dc = -dm g       dbias = sum_t dy       dB = dz^T h

A program walks down ROWS rows of its columns; with more than one strip of rows the sums go through partials that a second
kernel adds in a fixed order. v = base + s lora is read back as y / g where the output was saved. A row of W with g at
or near 0 left nothing of v in y: for those columns, and only there, the products are formed again,
dg_n = sum_t dy_tn (x_t . W_n + h_t . B_n). That is a branch on the device; the host never looks. Beside a bias forward keeps v:
to read (y - bias) / g costs a layer 36 to 54 % more on an H200 (bench/NOTES.md, With a bias).

Bytes: dy and y read, dz written, 3 M N; dB is formed on the tiles that are there anyway (h holds s x A^T), or with dA in a
launch of their own (factors.py). The roof is those bytes: products that read dy itself, as bare ones do, would need neither y
nor dz, so backward costs 2 M N elements more than bare products, and forward saves the one write of h B^T.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from fdora._records import Dropout
from fdora.triton.kernels.scale import finish_kernel, scale_kernel
from fdora.triton.runtime import Array, Builder, Scalar, cdiv, grid_of
from fdora.triton.tiles.configs import ScaleConfig, long_strip, scale_config

FINISH = {"BLOCK_N": 32, "BLOCK_T": 32}


class Given(NamedTuple):
    """What the backward of one layer reads, and where its gradients go; dx may have those of other layers already."""

    dy: Array
    x: Any
    la: Any
    s: Scalar
    h: Any
    saved: Array | None  # what was kept of the output, or of the value before g
    pre_scale: bool
    grads: Any
    dropout: Dropout
    dx: Array | None = None
    accumulate: bool = False
    fp8: bool = False  # dx by a product of e4m3 codes, where there is one
    scaled: bool = False  # dy is dz, and the sums over tokens are formed


class Sums(NamedTuple):
    """Where the results of the pass go; None for what nobody wants. dB only where its config fuses it."""

    dz: Array | None = None
    beside: Array | None = None  # (lead + gain (g - 1)) dy
    dm: Array | None = None
    dc: Array | None = None
    dbias: Array | None = None
    dB: Array | None = None
    lead: float = 0.0
    gain: float = 1.0


def config_for(plan: Builder, dy: Array, r: int, with_dB: bool = True, long: int = 0) -> ScaleConfig:
    M, N = dy.shape
    return scale_config(int(M), N, r, dy.dtype != torch.float32, plan.device.capability, with_dB, long)


def long_strip_of(plan: Builder, dy: Array, r: int) -> int:
    M, N = dy.shape
    return long_strip(int(M), N, r, dy.dtype != torch.float32, plan.device.capability)


def tiny_of(dtype: torch.dtype) -> float:
    """Below it y = g v is subnormal where v is not small: a row is lost."""
    info = torch.finfo(dtype)
    return info.tiny / info.eps


def scale_backward(plan: Builder, of: Given, out: Sums, config: ScaleConfig) -> None:
    """dy, saved (M, N) with adjacent columns; W, B, m and c of the layer; h is s x A^T. Without m: the sums of dy alone.
    Without W the gradients of lost columns, if there are any, are left to others (scaled_weight.py)."""
    la, (M, N), early = of.la, of.dy.shape, plan.pdl
    K, r = (1 if la.W is None else la.W.shape[1]), (1 if of.h is None else of.h.shape[1])
    need_m, block_r = out.dm is not None or out.dc is not None, 0 if out.dB is None else config.BLOCK_R
    strips = cdiv(M, config.ROWS)
    assert of.pre_scale or not need_m or la.bias is None  # linear.py saves pre_scale there
    single = strips == 1
    shapes: dict[str, Any] = {
        "m": need_m and (strips, N),
        "bias": out.dbias is not None and (strips, N),
        "B": block_r and (strips, N, r),
    }
    partials = {f"partial_{name}": plan.temp(s) if s and not single else None for name, s in shapes.items()}
    finish = not single and any(shapes.values())
    given = {"w": la.W, "b": la.B, "M": M, "N": N, "K": K, "R": r, "tiny": tiny_of(of.dy.dtype), **partials}
    given |= {"BLOCK_R": block_r, "SAVED_PRE_SCALE": of.pre_scale}
    given |= {"PDL": finish and early}  # the sums are resident when the last strip ends
    grid, flat = grid_of(cdiv(N, config.BLOCK_N), strips)
    plan.launch(scale_kernel, grid, given | {"SINGLE": single, "FLAT": flat}, of, out, la, config)
    if finish:
        plan.launch(finish_kernel, "N", given | {"strips": strips} | FINISH, of, out, la, pdl=early)
