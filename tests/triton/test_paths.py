"""Every way that a plan can take, forced: cases of tests/cases.py go through its kernels, and notice a fault in them."""

import random
from dataclasses import dataclass, field
from importlib import import_module

import pytest

from fdora.triton.embedding import Config, WalkConfig
from fdora.triton.runtime import walk
from fdora.triton.tiles.codes import CodesConfig
from fdora.triton.tiles.configs import GemmConfig, ScaleConfig
from fdora.triton.tiles.product import Way, fused_config
from tests import device
from tests.cases import Draw, rounds, usual
from tests.triton.marks import INTERPRETED, needs_kernels  # noqa: F401 (read by the mark)
from tests.triton.test_mutations import swap
from tests.triton.written import HOPPER

pytestmark = needs_kernels


@dataclass
class Path:
    of: str  # whose cases
    here: str  # what stands in one place of fdora/triton, on this path alone
    fault: str  # what the cases must notice in its place
    says: dict = field(default_factory=dict)  # by its name in fdora/triton: what plans ask, and the answer
    draw: dict = field(default_factory=dict)  # options of the cases
    hopper: bool = False  # on a CPU, plans of an sm_90 are interpreted


def always(answer):
    return lambda *_: answer


def fused(*shape):
    return Way("fused", fused_config(*shape), 0.0)


def tiles_of_codes(rows, columns):
    return lambda *shape: columns if shape[4] else rows


HALF = {"dtypes": ["fp16"], "largest": 80, "tokens": 75, "dropout": False}
WIDE = HALF | {"largest": 160, "tokens": 104, "whole": True}
LONG = WIDE | {"largest": 1200, "bytes": 2**19}
FEW = HALF | {"tokens": 5}
CODES = FEW | {"codes": True, "largest": 300, "bytes": 2**19}
WAY, SCALES_W = "product.product_way", {"scaled_weight.moves_less": always(True)}
TALL = GemmConfig(True, 64, 64, 64, 8, False, False, 4, 3)
SPLIT = CodesConfig(16, 128, 1, 2, 2, 2), CodesConfig(64, 16, 1, 2, 2, 2)
SLICED = CodesConfig(32, 256, 2, 4, 2), CodesConfig(256, 16, 2, 4, 2)

PATHS = {
    "fused, by TMA": Path("linear group", "at = x, w, i * BLOCK_K", "at = x, w, 0", {WAY: fused}, WIDE, True),
    "fused, where another tile ends": Path(
        "group", 'EPILOGUE != "accumulate"', 'EPILOGUE != ""', {WAY: always(Way("fused", TALL, 0.0))}, WIDE, True
    ),
    "cuBLAS, then the rest": Path(
        "linear group", "finish(acc + there.to(tl.float32)", "finish(acc", {WAY: always(Way("after", None, 0.0))}, HALF
    ),
    "the rest, then cuBLAS": Path(
        "linear group",
        "dz, operand(plan, W), accumulate=True)",
        "dz, operand(plan, W), accumulate=False)",
        {WAY: always(Way("first", None, 0.0))},
        HALF,
    ),
    "g W": Path("linear group", "v * g_tile(m, c, n, N)[:, None]", "v", SCALES_W, HALF),
    "g W, some columns at a time": Path(
        "linear group",
        "A.columns(i, j), dh)",
        "A.columns(0, j - i), dh)",
        SCALES_W | {"scaled_weight.COLUMNS": 16, "scaled_weight.AT_ONCE": 400},
        HALF,
    ),
    "g W of codes, some columns at a time": Path(
        "linear group",
        "decode(plan, la.W, part, g, i)",
        "decode(plan, la.W, part, g, 0)",
        {"scaled_weight.COLUMNS": 16, "scaled_weight.AT_ONCE": 400},
        HALF | {"codes": True},
    ),
    "rows of codes that left nothing in y": Path(
        "linear", "dm, dc, n, lost)", "dm, dc, n, lost & (n < 0))", {}, HALF | {"codes": True, "kinds": ("zero_m",)}
    ),
    "g W, dB out of long strips": Path(
        "linear",
        "tl.dot(tl.trans(z), ht, sum_B)",
        "tl.dot(tl.trans(z), ht)",
        SCALES_W | {"scale.long_strip": always(64)},
        HALF,
        True,
    ),
    "both factors in one launch": Path("linear", "acc = tl.dot(tl.trans(u), v, acc)", "acc = acc", {WAY: fused}, WIDE, True),
    "few tokens, the norm with them": Path("linear", "tl.sqrt_rn(c[1])", "c[1]", {}, FEW),
    "few tokens of codes, K in parts": Path(
        "linear",
        "(tl.program_id(1) * M + t)[None, :]",
        "(tl.program_id(1) * 0 + t)[None, :]",
        {"small_quant.small_codes_config": tiles_of_codes(*SPLIT)},
        CODES,
    ),
    "few tokens of codes, in slices": Path(
        "linear",
        "(SLICES, TERMS, TOKENS)), acc)",
        "(SLICES, TERMS, TOKENS)))",
        {"small_quant.small_codes_config": tiles_of_codes(*SLICED)},
        CODES,
    ),
    "many adapters, by TMA": Path("multi", "at_row + 3) - steps_k", "at_row + 3) + 1 - steps_k", {}, WIDE, True),
    "experts, by TMA": Path("experts", "i * BLOCK_K, own * W_SPAN", "i * BLOCK_K, 0 * W_SPAN", {}, WIDE, True),
    "sums over tokens in parts": Path(
        "multi",
        "acc += tl.load(partial + (strip + a)",
        "acc = tl.load(partial + (strip + a)",
        {"multi_bwd.scale_config": always(ScaleConfig(32, 64, 128, 16, 4))},
        HALF | {"largest": 48, "tokens": 260, "ranks": (2,)},
        True,
    ),
    "norms of a bank along strips": Path(
        "multi", "cross += tl.load(at + g", "cross = tl.load(at + g", {"multi_norm.span_of": always(64)}, FEW | {"largest": 200}
    ),
    "the norm, along strips": Path("norm", "squares += TILE(W, w,", "squares = TILE(W, w,", {}, LONG, True),
    "the norm, by TMA": Path(
        "norm",
        "w = W.p.load([rows.first, first_k])\n    w",
        "w = W.p.load([rows.first, 0])\n    w",
        {},
        LONG | {"ranks": (136, 144, 192)},
        True,
    ),
    "the norm, where no descriptor can be made": Path(
        "norm",
        "columns == 1 and pitch * t.itemsize % 16 == 0",
        "columns == 1",
        {},
        HALF | {"largest": 300, "bytes": 2**19, "ranks": (136, 144, 192)},
        True,
    ),
    "codes along strips": Path("norm", "squares += u * u", "squares += v * v", {}, LONG | {"codes": True}, True),
    "codes in runs of tiles": Path(
        "norm", "min(i + 2, end - 1) * T.K", "min(i + 1, end - 1) * T.K", {"quant.run_of": always(2)}, LONG | {"codes": True}
    ),
    "factors in terms, some rows at a time": Path(
        "norm",
        "lo if LO_FIRST else hi",
        "hi",
        {"split.BUDGET": 70_000},
        {"dtypes": ["fp32"], "largest": 300, "bytes": 2**20},
    ),
    "many numbers, in two launches": Path(
        "embedding",
        "gd[None, :] * (w.to(tl.float32) + acc), float",
        "w.to(tl.float32) + acc, float",
        {"embedding.MANY": 2, "embedding.WALKS": 0},
    ),
    "many numbers, walked over": Path(
        "embedding",
        "_numbers(ids, i + step, T, BLOCK_T)",
        "_numbers(ids, i, T, BLOCK_T)",
        {"embedding.WALKS": 64, "embedding.walk_config": always(WalkConfig(16, 64, 4, 1, 0))},
    ),
    "many numbers, some blocks ahead": Path(
        "embedding",
        "t, v = _numbers(ids, i, T, BLOCK_T)",
        "t, v = _numbers(ids, first, T, BLOCK_T)",
        {"embedding.WALKS": 64, "embedding.walk_config": always(WalkConfig(16, 64, 4, 3, 0))},
    ),
    "wide blocks of numbers": Path(
        "embedding",
        "tl.program_id(1) * SPAN",
        "tl.program_id(1) * BLOCK_D",
        {"embedding.WALKS": 0, "embedding.config_of": always(Config(64, 32, 64, 64, 4, 3))},
    ),
    "grids that are flat": Path(
        "compose multi conv linear",
        "column = column % columns",
        "column = column",
        {"runtime.device.MOST_ROWS": 0},
        HALF | {"largest": 200},
    ),
    "copies in several launches": Path("group", "at, room = at + t.shape[0]", "at, room = at", {"copy.MOST_ROWS": 1}, HALF),
}


@pytest.fixture
def path(request, monkeypatch, chosen_anew):
    found = PATHS[request.param]
    if found.hopper and device.NAME == "cpu":
        monkeypatch.setattr(walk, "device_of", lambda of: HOPPER)
    for at, answer in found.says.items():
        module, name = at.rsplit(".", 1)
        monkeypatch.setattr(import_module(f"fdora.triton.{module}"), name, answer)
    return found


def largest_error(path, k):
    """As a share of its budget, in the first round of case k."""
    drawn, names = usual(device.NAME, "triton")._replace(**path.draw), path.of.split()
    return next(rounds(names[k % len(names)], lambda part: Draw(random.Random(f"path {k} {part}"), drawn)))


CASES = 16


@pytest.mark.parametrize("path", PATHS, indirect=True)
def test_cases_agree(path):
    for k in range(CASES):
        assert largest_error(path, k) <= 1


@pytest.mark.skipif("device.NAME != 'cpu'", reason="its faults are read by the interpreter; runs with TRITON_INTERPRET=1")
@pytest.mark.parametrize("path", PATHS, indirect=True)
def test_a_fault_on_it_is_noticed(path, monkeypatch, tmp_path):
    swap(monkeypatch, tmp_path, path.here, path.fault)
    with pytest.raises(Exception):  # noqa: B017 (a wrong result, or a kernel that no longer runs)
        for k in range(CASES):
            largest_error(path, k)
