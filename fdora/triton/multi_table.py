"""A layer whose tokens belong to a few adapters of small ranks, in any order: as one layer with all of their ranks.

    h = s_a x A_a^T     one product with the A of all, each token's row then 0 but for its own adapter's columns
    y = g_a (x W^T + h B^T) + bias

Nothing is sorted and nothing copied but B; launches and tiles are those of one layer (product.py), and g of a row is looked up
in a table. What it costs beside one adapter are 2 M G r (K + N) flops. Rows of zeros would meet what is not finite in another
adapter's B and be NaN: such numbers are zeros in the copy, and g of that adapter and column is a NaN. Those of A meet nobody:
the columns of others are selected, not multiplied.
"""

from __future__ import annotations

from typing import Any

import torch

from fdora.triton.copy import in_dtype, operand, stacked
from fdora.triton.fp8 import Low, way_of, x_of, y_of_codes
from fdora.triton.gemm import Epilogue
from fdora.triton.kernels.multi_table import multi_table_kernel
from fdora.triton.multi_gemm import block_of, has_columns, joined
from fdora.triton.product import scaled_product
from fdora.triton.runtime import Array, Builder, cdiv
from fdora.triton.tiles.configs import GemmConfig, power_of_two

RANKS = 256  # of all adapters, at most
SORTED = 1 << 18  # tokens times ranks: what the flops of other adapters' columns cost is then less than the launches of tiles
AREA = 4096  # numbers of B that a program reads


def takes_table(M: int, ranks: int, is_sorted: bool) -> bool:
    """Whether so many tokens take this way, of so many ``ranks`` in all. The others are sorted at least, and may be already."""
    return ranks <= RANKS and (not is_sorted or M * ranks <= SORTED)


def multi_table(
    plan: Builder, x: Array, bank: Any, y: Array, h: Array, pre_scale: Array | None, codes: GemmConfig | None = None
) -> str:
    """(M, K) and a bank -> y, h and pre_scale, all in the order of x. ``codes``: a product of codes, by this tile. Returns what
    it does, in words."""
    (M, N), (G, R, _), t = y.shape, bank.A.shape, x.dtype
    wide, width = plan.temp((M, G * R)), cdiv(G * R, 8) * 8
    A = None if has_columns(bank.A) else joined(bank.A)
    A = stacked(plan, [bank.A[g] for g in range(G)], t) if A is None else operand(plan, in_dtype(plan, A, t))
    plan.product(wide, x, A.T)
    masked, clean = plan.temp((M, G * R), t, (width, 1)), plan.temp((N, G * R), t, (width, 1))
    owner, g = plan.temp((M,), torch.int32), plan.temp((G + 1, N))
    block_r, block_m = power_of_two(R), 16
    block_n, tiles = max(16, AREA // block_r), cdiv(M, block_m)
    given = {"wide": wide, "b": bank.B, "h": h, "masked": masked, "owner": owner, "clean": clean, "g": g}
    given |= {"M": M, "N": N, "G": G, "R": R, "tiles": tiles, "BLOCK_M": block_m, "BLOCK_N": block_n}
    given |= {"BLOCK_R": block_r, "BLOCK_Q": power_of_two(G * R), "BLOCK_G": block_of(G)}
    plan.launch(multi_table_kernel, (tiles + (G + 1) * cdiv(N, block_n),), given, bank)
    end = Epilogue("table", g, owner, bank.bias)
    if codes is not None:
        y_of_codes(plan, y, x_of(plan, x, bank.W), bank.W, codes, Low(masked, clean), end, pre_scale)
        return way_of(bank.W)
    return scaled_product(plan, y, x, masked, bank.W, clean, end, pre_scale)
