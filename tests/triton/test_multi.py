"""Kernels for many adapters on one W: against float64 code that knows each token's adapter, and against calls of their own."""

from functools import partial

import pytest
import torch

from fdora.eager import multi as eager
from fdora.functional import dora_stack
from fdora.triton import multi
from tests import device
from tests.checks.multi import case, no_stranger_hears, together
from tests.close import rel_l2
from tests.triton.marks import HALF, INTERPRETED, needs_kernels  # noqa: F401
from tests.triton.written import kernels

pytestmark = needs_kernels
# lengths of segments, tokens of nobody, N, K, ranks; up to 64 tokens take the kernels of multi_small.py, the rest tiles
SHAPES = {
    "few": ((5, 0, 17), 4, 72, 48, (20, 3, 16)),
    "many": ((60, 0, 90), 12, 72, 48, (20, 3, 16)),
    "wide": (
        (60, 0, 90),
        12,
        72,
        136,
        (64, 3, 70),
    ),  # one rank is a whole step, of which backward looks at nothing where h is finite
}
S = (0.7, -1.5, 2.0, 1.0)


def drawn(shape, dtype, adapter=None, route="offsets", bias=True):
    lengths, tail, N, K, ranks = SHAPES[shape]
    s = (S * len(ranks))[: len(ranks)]
    return case(lengths, tail, N, K, ranks, s, dtype, adapter, bias=bias, route=route, spread=0.02)


@pytest.fixture
def apart(monkeypatch, chosen_anew):
    """More than a few tokens as where ranks are many in all: the product as they come, then a pass in sorted order."""
    monkeypatch.setattr("fdora.triton.multi_table.RANKS", 0)


@pytest.fixture
def tiles(monkeypatch, apart):
    """As where tokens are many too: sorted ones in tiles of one adapter or several."""
    monkeypatch.setattr("fdora.triton.multi_gemm.APART", 0)


@pytest.mark.parametrize(
    ("shape", "how"),
    [
        ("few", ()),
        ("few ids", ()),
        ("many", ()),
        ("many ids", ()),
        ("many", ("as_hopper",)),
        ("many ids", ("apart",)),
        ("many", ("tiles",)),
    ]
    + [(shape, ("tiles", "as_hopper")) for shape in ("many", "many ids", "wide")],
    ids=str,
)
def test_strangers_stay_strangers(shape, how, request):
    for fixture in map(request.getfixturevalue, how):
        fixture and fixture()
    shape, _, route = shape.partition(" ")
    faults = zip(("nan", "inf", "nan", "inf", "nan"), ("A", "B", "m", "x", "dy"), strict=True)
    no_stranger_hears(partial(drawn, shape, HALF[0], route=route or "offsets", bias=False), 0, faults, "triton")


@pytest.fixture
def short_strips(monkeypatch):
    monkeypatch.setattr("fdora.triton.multi_norm.span_of", lambda *_: 128)


# adapters beside each other in strips, and one too many; several strips along K, the last one shorter; whole tiles, and masks
BANKS = [(150, 140, (20, 3, 16)), (256, 128, (16, 16)), (128, 320, (16,)), (70, 300, (20,) * 4), (70, 300, (20,) * 5)]


@pytest.mark.parametrize(("way", "max_bytes"), [(None, None), (None, 20_000), (None, 5_000), ("short_strips", None)])
def test_norms_of_a_bank(way, max_bytes, chosen_anew, request):
    way and request.getfixturevalue(way)
    for dtype, adapter in ((HALF[0], HALF[0]), (HALF[0], torch.float32), (torch.float32, torch.float32)):
        for N, K, ranks in BANKS[:2] if max_bytes else BANKS:
            G = len(ranks)
            t = case((1,) * G, 0, N, K, ranks, (*S, 0.5)[:G], dtype, adapter)
            A, B, _ = dora_stack(t.adapters)
            s = torch.tensor(t.s, device=device.NAME)
            for given in (None, ranks):
                B = B.to(dtype) if given else B  # beside a float32 A
                c = multi.bank_norm(t.W, A, B, s, given, max_bytes)
                want = eager.bank_norm(t.W.double(), A.double(), B.double(), s.double(), given)
                assert rel_l2(c, want) < 1e-6, (dtype, adapter, N, given)
    plans = chosen_anew.values()
    assert max_bytes is None or all(0 < plan.workspace <= max_bytes for plan in plans)
    assert way is None or sum(kernels(plan)["strip_norm_kernel"] for plan in plans) >= len(BANKS)


@pytest.mark.parametrize("ranks", [None, (16, 9)])
def test_norms_of_rows_that_cancel(ranks, short_strips):
    """As exact as directly, to the bits of what goes in; rows beside them and other adapters keep their bits, NaN its row."""
    t = case((1, 1), 0, 140, 300, ranks or (16, 16), (0.7, -1.5), HALF[0], HALF[0])
    A, B, _ = dora_stack(t.adapters)
    s, W = torch.tensor(t.s, device=device.NAME), t.W.clone()
    B[0, ::9] *= 20
    plain = multi.bank_norm(W, A, B, s, ranks)
    W[::9] = -(s[0] * B[0].float() @ A[0].float())[::9].to(W.dtype)  # c is what W lost in rounding
    W[5, 7] = B[1, 18, 2] = float("nan")
    c, want = multi.bank_norm(W, A, B, s, ranks), eager.bank_norm(W.double(), A.double(), B.double(), s.double(), ranks)
    assert c.isnan().nonzero().tolist() == [[0, 5], [1, 5], [1, 18]]
    of_W = torch.linalg.vector_norm(W.double(), dim=1)
    assert (want[0, ::9] < 0.01 * of_W[::9]).all()
    worst = ((c - want).abs() / (want + of_W)).nan_to_num(0).max().item()
    assert worst < 1e-6, worst
    same = torch.arange(140) % 9 != 0
    same[5] = False
    assert torch.equal(c[:, same], plain[:, same])


def test_one_plan_whatever_the_lengths(tiles, chosen_anew):
    """Nothing asks for a length: other segments are other numbers in the same launches."""
    t = drawn("many", HALF[0])
    made = []
    for ends in ((60, 60, 150), (0, 0, 0), (1, 162, 162)):
        offsets = torch.tensor(ends, dtype=torch.int32, device=device.NAME)
        together(t, offsets=offsets, norm=torch.ones(3, 72, device=device.NAME), backend="triton")
        made.append(list(chosen_anew.values()))
    assert made[0] and made[0] == made[1] == made[2]
    assert sum(kernels(p)["multi_gemm_pointer_kernel"] + kernels(p)["multi_gemm_tma_kernel"] for p in made[0]) == 1


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_tokens_are_sorted_by_counting(dtype):
    """As the eager backend sorts them, stably; what is no adapter's comes last."""
    for M, G in ((0, 3), (1, 1), (200, 5), (150, 70)):
        ids = torch.randint(-1, G + 1, (M,), device=device.NAME).to(dtype)
        for each in (ids, torch.stack([ids, ids])[:, : M // 2].T[:, 0]):  # any stride
            offsets, order, place = multi.route(each, G)
            assert all(map(torch.equal, (offsets, order), eager.route(each, G)[:2])), (M, G)
            assert torch.equal(order[place], torch.arange(len(each), device=device.NAME))
