"""Cases of tests/cases.py by the ways that only a large call or a Hopper takes: a function, and what is exchanged for it."""

from typing import NamedTuple

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

from fdora.triton import embedding
from fdora.triton.multi_gemm import HConfig
from fdora.triton.tiles.codes import CodesConfig
from fdora.triton.tiles.configs import GemmConfig, ScaleConfig, power_of_two
from fdora.triton.tiles.few import LIMIT
from fdora.triton.tiles.fp8 import POINTERS
from fdora.triton.tiles.product import Way, fused_config
from tests import device
from tests.cases import MULTIPLIED, run_case, usual
from tests.triton.marks import INTERPRETED, needs_kernels  # noqa: F401 (read by the mark)
from tests.triton.test_mutations import caught_by, swap
from tests.triton.written import HOPPER, kernels

pytestmark = needs_kernels
TALL = GemmConfig(True, 64, 64, 64, 8, False, False, 4, 3)


class By(NamedTuple):
    """A function of tests/cases.py, what stands elsewhere in fdora.triton then, what its calls are drawn from, and what must run."""

    name: str
    kernel: str
    changes: dict
    drawn: dict
    hopper: bool = False
    count: int = 6  # cases


LARGE = embedding.config_of(70_000, 300, 20, True, 2)  # of many tokens


def product_by(kind):
    def way(ask):
        return Way("fused", TALL, 0.0) if kind == "tall" else Way(kind, fused_config(ask) if kind == "fused" else None, 0.0)

    return {"product.product_way": way}


def walks(**change):
    def config(_, r):
        return LARGE._replace(BLOCK_T=16, BLOCK_D=64, BLOCK_R=power_of_two(r), **change)

    return {"embedding.WALKS": 64, "embedding.walk_config": config}


G_W = {"scaled_weight.moves_less": lambda *_: True}
IN_PARTS = {"scaled_weight.COLUMNS": 64, "scaled_weight.AT_ONCE": 48 * 64 * 2}
APART = {"multi_table.RANKS": 0}
TILES = APART | {"multi_gemm.APART": 0}
COPIES = {"multi.wants_copy": lambda _: True, "multi_bwd.wants_copy": lambda _: True}
MASKS = {"dropout.CACHED": 0}
K_IN_PARTS = {"multi_gemm.h_config": lambda *_: HConfig(16, 16, 32, 4, 3, 3)}
SHORT = {"multi_bwd.scale_config": lambda *_: ScaleConfig(32, 64, 128, 16, 4)}
HALF, WHOLE = {"dtypes": ["fp16"]}, {"dtypes": ["fp16"], "whole": 8, "largest": 300}
BY_POINTERS = {"fp8.fp8_config": lambda of, *_: POINTERS if of.M > LIMIT else None, "fp8.grouped_fp8": lambda *_: None}
CODES, TALL_BLOCK = HALF | {"kinds": MULTIPLIED}, (64, 256)  # which no tile of an sm_90 has to itself


def by_expert(block, M, N, K):
    return block != TALL_BLOCK, block != TALL_BLOCK and N % 128 == 0


OF_CODES = {
    "by pointers": CODES | {"largest": 150, "rounds": lambda block, M, N, K: (M > LIMIT, False)},
    "by tma": CODES | {"whole": 16, "largest": 160, "rounds": lambda block, M, N, K: (M > LIMIT and block != TALL_BLOCK,) * 2},
    "of experts": CODES | {"whole": 16, "largest": 300, "tokens": 130, "rounds": by_expert},
}
CODES_IN_PARTS = {"small.small_codes_config": lambda *_: CodesConfig(64, 64, 1, 2, 2, 2)}
FEW_OF_CODES = HALF | {"tokens": 13, "codes": True, "ranks": (16, 40, 70, 400), "whole": 128, "largest": 256}
FEW_OF_CODES |= {"dropout": False, "kinds": MULTIPLIED}
OF_HALF = {"norm_bwd.SERVED": (torch.float16,)}  # it needs a scale where gradients are small: these are not
FOUR = {"runtime.walk.device_of": lambda _: HOPPER._replace(num_sms=4)}  # both products in one launch
FULL = {"full": True, "tokens": 16}
AUTOCAST = {"autocast": "fp16", "dtypes": ["fp32"], "kinds": MULTIPLIED}
BANK = {"tokens": 130, "kinds": MULTIPLIED[:-1]}  # dm of a bank where m is 0 is that of the decoded W
WAYS = {
    "product after": By("group", "rest_kernel", product_by("after"), {"tokens": 97}),
    "product first": By("group", "product", product_by("first"), {"tokens": 97}),
    "product fused": By("mlp", "gemm_pointer_kernel", product_by("fused"), {"tokens": 97}),
    "tall tiles": By("group", "gemm_tma_kernel", product_by("tall"), WHOLE | {"tokens": 97, "largest": 80}, True),
    "g W": By("linear", "by_g_kernel", G_W, HALF | {"tokens": 100}),
    "g W in parts": By("group", "by_g_kernel", G_W | IN_PARTS, HALF | {"tokens": 100}),
    "dB by long strips": By("linear", "by_g_kernel", G_W | {"scale.long_strip": lambda *_: 128}, WHOLE | {"tokens": 150}, True),
    "codes in parts": By("group", "dequantize_kernel", IN_PARTS, HALF | {"tokens": 70, "codes": True, "largest": 300}),
    "apart": By("multi", "multi_epilogue_kernel", APART, {"tokens": 130}),
    "tiles": By("multi", "multi_gemm_pointer_kernel", TILES, {"tokens": 130}),
    "tiles by tma": By("multi", "multi_gemm_tma_kernel", TILES, WHOLE | {"tokens": 130, "ranks": (24, 72, 96)}, True),
    "copies of the dropped x": By("multi", "multi_drop_kernel", TILES | COPIES, {"tokens": 130}),
    "x A^T in parts of K": By("multi", "multi_h_sum_kernel", TILES | K_IN_PARTS, {"tokens": 130}),
    "masks of one layer": By("linear", "multi_h_kernel", MASKS, HALF | {"tokens": 130}, count=18),
    "sums in parts": By("multi", "multi_sum_kernel", TILES | SHORT, {"tokens": 130}),
    "experts by tma": By("experts", "multi_gemm_tma_kernel", {}, WHOLE | {"layouts": ("plain", "plain", "transposed")}, True),
    "mlps of experts by tma": By("experts_mlp", "multi_gemm_tma_kernel", {}, WHOLE, True),
    "a large tile": By(
        "embedding",
        "embedding_kernel",
        {"embedding.config_of": lambda *_: LARGE},
        {"ranks": (1, 3, 16, 24, 32), "largest": 300},
    ),
    "walks": By("embedding", "embedding_walk_kernel", {"embedding.MANY": 2, **walks(STAGES=3)}, HALF),
    "walks of one stage": By("embedding", "embedding_walk_kernel", walks(STAGES=1, per_sm=1), HALF),
    "two launches": By("embedding", "embedding_ready_kernel", {"embedding.MANY": 2, "embedding.WALKS": 0}, {"largest": 80}),
    "few rows at a time": By(
        "norm", "quant_kernel", {"split.BUDGET": 71_000}, {"dtypes": ["fp32"], "largest": 300, "codes": True}
    ),
    "factors": By(
        "group", "factors_kernel", G_W | {"scale.long_strip": lambda *_: 0}, WHOLE | {"tokens": 97, "largest": 150}, True
    ),
    "table by tma": By("multi", "multi_table_kernel", {}, WHOLE | {"tokens": 130, "largest": 150}, True),
    "codes by pointers": By("group", "fp8_gemm_kernel", BY_POINTERS, OF_CODES["by pointers"]),
    "codes by tma": By("group", "turn_kernel", {}, OF_CODES["by tma"], True, 4),
    "banks of codes by pointers": By("multi", "fp8_gemm_kernel", BY_POINTERS, OF_CODES["by pointers"] | BANK),
    "banks of codes by tma": By("multi", "turn_kernel", {}, OF_CODES["by tma"] | BANK, True, 4),
    "experts of codes": By("experts", "fp8_rows_kernel", {}, OF_CODES["of experts"], True, 2),
    "dx of experts of codes": By("experts", "turn_kernel", {}, OF_CODES["of experts"] | {"whole": 128}, True, 1),
    "few tokens of codes": By("group", "small_codes_kernel", {}, FEW_OF_CODES, count=3),
    "few tokens of codes in parts": By("group", "add_parts_kernel", CODES_IN_PARTS, FEW_OF_CODES, count=5),
    "full DoRA": By("linear", "norm_pass_kernel", OF_HALF, FULL | HALF | {"largest": 150}),
    "full DoRA, large ranks": By("norm", "norm_terms_kernel", OF_HALF, FULL | HALF | {"ranks": (40, 80), "largest": 300}),
    "full DoRA at once": By(
        "linear", "norm_products_kernel", OF_HALF | FOUR, FULL | WHOLE | {"ranks": (136,), "largest": 200}, True, 4
    ),
    "full DoRA by tma, apart": By(
        "group", "norm_tokens_kernel", OF_HALF, FULL | WHOLE | {"ranks": (136,), "largest": 200}, True, 3
    ),
    "gate and up in one pass": By("mlp", "multi_gated_kernel", {}, HALF | {"tokens": 97, "kinds": ("zero_m",)}, count=6),
    "autocast": By("group", "copy_kernel", {}, AUTOCAST),
    "autocast of few tokens": By("linear", "small_kernel", {}, AUTOCAST | {"tokens": 8}),
    "autocast of codes": By("linear", "dequantize_kernel", {}, AUTOCAST | {"tokens": 70, "codes": True}, count=4),
    "autocast of a bank": By("multi", "multi_table_kernel", {}, AUTOCAST | {"tokens": 130}, count=3),
    "autocast of experts": By("experts_mlp", "multi_gemm_pointer_kernel", {}, AUTOCAST | {"tokens": 40}, count=2),
    "copies of few rows": By("group", "copy_kernel", {"copy.MOST_ROWS": 3}, {"largest": 80}),
}


def prepared(way, patch, as_hopper):
    """As that way wants it: the function, and what its calls are drawn from."""
    name, _, changes, drawn, hopper, _ = WAYS[way]
    if hopper and device.NAME == "cpu":
        as_hopper()
    for place, new in changes.items():
        patch.setattr(f"fdora.triton.{place}", new)
    return name, usual(device.NAME, "triton")._replace(**drawn)


@pytest.mark.parametrize("way", WAYS)
def test_a_slice(way, chosen_anew, as_hopper, monkeypatch):
    name, drawn = prepared(way, monkeypatch, as_hopper)
    for k in range(WAYS[way].count):
        run_case(name, f"{way} {k}", drawn)
    assert any(kernels(plan)[WAYS[way].kernel] for plan in chosen_anew.values())


# the way whose cases must notice, what stands in one place of fdora/triton, the fault
FAULTS = [
    (
        "product first",
        "plan.product(dx, dh, operand(plan, A), accumulate=accumulate)",
        "plan.product(dx, dh, operand(plan, A))",
    ),
    (
        "product after",
        "plan.product(dx, dz, operand(plan, W), accumulate=accumulate)",
        "plan.product(dx, dz, operand(plan, W))",
    ),
    ("product after", "finish(acc + there.to(tl.float32), (out", "finish(acc, (out"),
    (
        "product fused",
        "wt = tl.load(at_w, mask=within(k, n, K - k0, N), other=0.0)\n        acc = tl.dot(xt, wt.to",
        "wt = tl.load(at_w, mask=within(k, n, K, N), other=0.0)\n        acc = tl.dot(xt, wt.to",
    ),
    ("tall tiles", 'if EPILOGUE != "accumulate" and EPILOGUE != "dropped":  # rows', 'if EPILOGUE != "dropped":  # rows'),
    ("g W", "store(v * g_tile(m, c, n, N)[:, None], Matrix(out", "store(v, Matrix(out"),
    ("g W", "plan.product(dh, dy, gB, s)", "plan.product(dh, dy, gB)"),
    ("factors", "acc *= g_tile(m, norm, c, C)[:, None]", "acc *= 1.0"),
    ("g W in parts", "A.columns(i, j), dh)", "A.columns(0, j - i), dh)"),
    ("dB by long strips", "sum_B += tl.load(at_strip", "sum_B = tl.load(at_strip"),
    ("codes in parts", "decode(plan, la.W, part, g, i)", "decode(plan, la.W, part, g, 0)"),
    ("apart", 'elif g is None or OTHER == "":\n        acc += there', 'elif g is None or OTHER == "":\n        acc += 0.0'),
    ("apart", "rank = tl.where(lo < hi, rank_of(ranks, a, G, R), 0)", "rank = tl.where(lo < hi, R, 0)"),
    (
        "tiles",
        "first, last, stop = tl.load(record), tl.load(record + 1), M",
        "first, last, stop = tl.load(record), tl.load(record), M",
    ),
    ("tiles by tma", "right, skip = tails, at", "right, skip = tails, 0"),
    ("tiles by tma", "acc = tl.where(keep_by_segments(keys, t, n, M), acc, 0.0)\n        acc = slabs(", "acc = slabs("),
    ("tiles", "acc = tl.where(keep_by_segments(keys, t, n, M), acc, 0.0)\n    x, w =", "x, w ="),
    ("tiles", "t - origin, k0 + k), xt, 0.0)", "t, k0 + k), xt, 0.0)"),
    ("tiles", "keep_rows(mask[0], mask[1], t - mask[2], q)", "keep_rows(mask[0], mask[1], t, q)"),
    ("copies of the dropped x", "1 / (1 - bank.p) if gain else 1.0", "1 / (1 - bank.p)"),
    ("copies of the dropped x", "bank._replace(order=None, seed=None)", "bank._replace(seed=None)"),
    ("x A^T in parts of K", "range(0, tl.where(some, ends - begins, 0)", "range(0, tl.where(some, K - begins, 0)"),
    ("x A^T in parts of K", "at + tl.cast(i, tl.int64) * M * R", "at + tl.cast(0, tl.int64) * M * R"),
    ("masks of one layer", "masked=True, gain=1 / (1 - p)", "masked=True"),
    ("masks of one layer", "scale *= gain", "scale *= 1.0"),
    ("apart", "key_of(bits, t - begin)", "key_of(bits, t)"),
    ("apart", "scale *= scale_of(seed, a, G)", "scale *= 1.0"),
    ("tiles by tma", "base = tl.load(route + ROUTE * at_row + 3) - steps_k", "base = -steps_k"),
    ("sums in parts", "vector(partial + (strip + a).to", "vector(partial + (strip + 0 * a).to"),
    ("experts by tma", "x, w, row, i * BLOCK_K, own * W_SPAN", "x, w, row, i * BLOCK_K, 0"),
    ("experts by tma", '"W_SPAN": (N if trans_b else K) if', '"W_SPAN": N if'),
    ("experts by tma", "elif row + v.shape[0] > M:", "elif row + v.shape[0] > M + 4:"),
    ("mlps of experts by tma", "tl.sigmoid(gate * SHARPNESS) * _limited(up)", "tl.sigmoid(gate * SHARPNESS) * (up + 1)"),
    (
        "a large tile",
        "a = rows_of(A, v, known, tl.arange(0, BLOCK_R), R)",
        "a = rows_of(A, v, known, tl.arange(0, BLOCK_R), R - 1)",
    ),
    ("a large tile", "range(first, min(first + SPAN, D), BLOCK_D)", "range(first, min(first + BLOCK_D, D), BLOCK_D)"),
    ("walks of one stage", "_numbers(ids, i + step, T, BLOCK_T)", "_numbers(ids, i + 1, T, BLOCK_T)"),
    ("walks", "gd = g_tile(m, c, d, D)\n        for i", "gd = g_tile(m, c, d * 0, D)\n        for i"),
    ("two launches", "put(gd, g, at, D)", "put(gd, g, at, D - 1)"),
    ("few rows at a time", "hi if LO_FIRST else lo, mask=mask)", "hi, mask=mask)"),
    (
        "factors",
        "Matrix(dA, 1, K), None, None, tile * BLOCK_C, M, K, R",
        "Matrix(dA, 1, K), None, None, tile * BLOCK_C, M, K, R - 1",
    ),
    ("tiles by tma", "t = tl.where((q < wide)[None, :], t, 0.0).to(dtype)", "t = t.to(dtype)"),
    ("copies of few rows", "at += rows", "at += 0"),
    (
        "codes by pointers",
        "acc += tl.dot(xt, wt) * _scale_at(x_scale, w_scale, t, n, k0,",
        "acc += tl.dot(xt, wt) * _scale_at(x_scale, w_scale, t, n, 0,",
    ),
    ("codes by pointers", "s = _scale_of(tl.max(largest, axis=0))", "s = _scale_of(tl.max(largest, axis=0) * 1.03)"),
    ("codes by tma", "v *= vector(by, k, K)", "v *= 1.0"),
    ("gate and up in one pass", "sum_up += d_up * u", "sum_up += d_up * z"),
    ("gate and up in one pass", "exact += dot_rows(below, own_h, own_b, few, N, hi - lo, R, ACT, OF_UP)", "exact += 0.0"),
    (
        "gate and up in one pass",
        "own_x, own_w, few, N, hi - lo, K, ACT, OF_UP)",
        "own_x, own_w, few, N, hi - lo, K, ACT, False)",
    ),
    ("full DoRA", "total += s * tl.dot(g.to(f.dtype)", "total += tl.dot(g.to(f.dtype)"),
    ("full DoRA", "total += tl.load(onto + at, mask=mask, other=0.0).to(tl.float32)", "total += 0.0"),
    ("full DoRA, large ranks", "total = loaded(parts, i, j, P, Q) + scale * acc", "total = loaded(parts, i, j, P, Q)"),
    ("full DoRA at once", "put(s * total, out, at, size)", "put(total, out, at, size)"),
    ("full DoRA at once", "put(q, out, n, N)", "put(q / s, out, n, N)"),
    ("codes by tma", "at_w + after // BK, t, t < M)", "at_w, t, t < M)"),
    ("banks of codes by tma", 'scale if form.scale == "tensor" else None, 1, ALL)', "None, 1, ALL)"),
    ("experts of codes", "_unit(w_scale, (down + n) // BN, n < N, EMPTY)", "_unit(w_scale, n // BN, n < N, EMPTY)"),
    ("dx of experts of codes", "w_scale + ((down + col) // BN)", "w_scale + (col // BN)"),
    ("dx of experts of codes", "by += tl.minimum(adapter_of(t, None, offsets, M, G, BLOCK_G), G - 1)", "by += (t * 0)"),
]
# as in test_mutations.py
FIRST = {"right, skip = tails, 0": 24, '"W_SPAN": N if': 14, "elif row + v.shape[0] > M + 4:": 27}
FIRST |= {"decode(plan, la.W, part, g, 0)": 24, "A.columns(0, j - i), dh)": 28, "plan.product(dx, dh, operand(plan, A))": 9}
FIRST |= {"plan.product(dx, dz, operand(plan, W))": 9, "tl.sigmoid(gate * SHARPNESS) * (up + 1)": 14, "t = t.to(dtype)": 6}
FIRST |= {"sum_up += d_up * z": 2, "exact += 0.0": 2, "own_x, own_w, few, N, hi - lo, K, ACT, False)": 2}
FIRST |= {"_unit(w_scale, n // BN, n < N, EMPTY)": 4, "w_scale + (col // BN)": 5, "None, 1, ALL)": 4}


@pytest.mark.skipif(
    "device.NAME != 'cpu' or not INTERPRETED", reason="its faults are read by the interpreter; runs with TRITON_INTERPRET=1"
)
@pytest.mark.parametrize(("way", "old", "new"), FAULTS, ids=[f"{way}:{new[:40]}" for way, _, new in FAULTS])
def test_fault_is_caught(way, old, new, chosen_anew, as_hopper, monkeypatch, tmp_path):
    name, drawn = prepared(way, monkeypatch, as_hopper)
    swap(monkeypatch, tmp_path, old, new)
    assert caught_by(name, drawn=drawn, first=FIRST.get(new, 0)), "no case noticed"
