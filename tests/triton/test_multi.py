"""Kernels for many adapters on one W: against float64 code that knows each token's adapter, and against calls of their own."""

from collections import Counter

import pytest
import torch

import fdora
from fdora.eager import multi as eager
from fdora.functional import dora_linear_multi, dora_norm, dora_stack
from fdora.triton import multi
from fdora.triton.runtime import walk
from fdora.triton.tiles.configs import ScaleConfig
from tests import device, reference
from tests.checks.multi import APART, SEEDS, case, dy_of, places, ranks_of, routed, together, truth, whole, with_gradients
from tests.close import assert_within, rel_l2
from tests.triton.marks import HALF, INTERPRETED, needs_kernels  # noqa: F401
from tests.triton.written import by_tma, kernels, launches

pytestmark = needs_kernels
# lengths of segments, tokens of nobody, N, K, ranks; up to 64 tokens take the kernels of multi_small.py, the rest tiles
FEW = ((5, 0, 17), 4, 72, 48, (20, 3, 16))
ONES = ((1,) * 6, 0, 40, 64, (4, 1, 2) * 2)  # each token its own adapter
LONG = ((5,), 2, 40, 600, (4,))  # x A^T in parts
MANY = ((60, 0, 90), 12, 72, 48, (20, 3, 16))
CROWDED = ((3, 0, 1, 40, 2) * 2, 0, 70, 33, (4, 1, 2, 4, 3) * 2)  # tiles of many segments; nothing is a multiple of 8
THIN = ((200, 0, 90), 5, 40, 32, (2, 1, 2))  # dB on the tiles of dz; sums over tokens in parts
SLABS = ((5, 0, 17), 4, 72, 48, (40, 3, 64))  # above the ranks that one launch forms h and h B^T of
STEPS = ((60, 0, 90), 12, 72, 48, (96, 64, 70))  # whole steps of low rank, and some behind them
WIDE = ((60, 0, 90), 12, 72, 136, (64, 3, 70))  # one rank is a whole step, of which backward looks at nothing where h is finite
SHAPES = {
    "slabs": SLABS,
    "steps": STEPS,
    "wide": WIDE,
    "few": FEW,
    "ones": ONES,
    "long": LONG,
    "many": MANY,
    "crowded": CROWDED,
    "thin": THIN,
}
S = (0.7, -1.5, 2.0, 1.0)
CLOSE = 2 * torch.finfo(HALF[0]).eps  # a few roundings, one after the other


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


def naive(t):
    *own, rest = places(t)
    ys = [reference.naive(t.x[at], t.W, *p, s, t.bias) for at, p, s in zip(own, t.adapters, t.s, strict=True)]
    return whole(t, [*ys, torch.nn.functional.linear(t.x[rest], t.W, t.bias)])


def assert_as_the_truth(t, ranks, what):
    dy = dy_of(t)
    got = with_gradients(lambda t: together(t, ranks=ranks, backend="triton"), t, dy)
    theirs, want = with_gradients(naive, t, dy), with_gradients(truth, t.double(), dy.double())
    for n, v in got.items():
        budget = theirs[n].double()
        if n[0] == "m" and v.numel():  # it reads y back, rounded once more
            noise = torch.finfo(t.x.dtype).eps * (dy.double() * want["y"].double()).norm(dim=0) / want[n].abs().clamp_min(1e-3)
            budget = want[n] + noise.amax() + (budget - want[n]).abs()
        if n[0] in "AB":  # products of two rounded factors; one that naive code happens to round well sets no budget
            # in float32 the first factor is a sum over N or K columns in the order of the machine's BLAS: sqrt(N) roundings
            sums = t.W.shape[0] ** 0.5 if t.x.dtype == torch.float32 else 1
            floor = sums * torch.finfo(t.x.dtype).eps * want[n].double().abs().amax() if v.numel() else 0
            budget = want[n] + floor + (budget - want[n]).abs()
        assert_within(v, budget, want[n].double(), f"{what} {n}")


AS_IT_IS = ("few", "slabs", "ones", "long", "many", "crowded", "steps")


@pytest.mark.parametrize(
    ("shape", "way"),
    [(shape, "") for shape in AS_IT_IS] + [(shape, way) for shape in ("many", "crowded") for way in ("apart", "tiles")],
)
@pytest.mark.parametrize("route", ["offsets", "ids"])
def test_as_the_truth(shape, way, route, request):
    if way:
        request.getfixturevalue(way)
    for i, dtype in enumerate((*HALF, torch.float32)):
        bias = (route == "ids") != bool(i % 2)
        t = drawn(shape, dtype, dtype if bias else torch.float32, route, bias)
        assert_as_the_truth(t, bias, f"{shape} {dtype} {route}")


@pytest.mark.parametrize("shape", ["many", "steps", "crowded"])
def test_by_tma(shape, tiles, as_hopper):
    """The tiles that Hopper takes, interpreted; "crowded" lies as no descriptor can be made, and takes pointers."""
    plans = as_hopper()
    for bias in (False, True)[shape == "crowded" :]:
        assert_as_the_truth(drawn(shape, torch.float16, None, "offsets", bias), bias, shape)
    products = [s for p in plans.values() for s in launches(p, "multi_gemm")]
    assert len(products) in (2, 4) and all(by_tma(s) == (shape != "crowded") for s in products)


def test_plain_lora_and_a_norm_with_a_gradient():
    t = drawn("many", HALF[0], bias=False)
    lora = t._replace(adapters=[p._replace(m=None) for p in t.adapters])
    dy = dy_of(t)
    got = with_gradients(lambda t: together(t, backend="triton"), lora, dy)
    want = with_gradients(truth, lora.double(), dy.double())
    for n, v in want.items():
        assert v.norm() == 0 or rel_l2(got[n], v) < CLOSE, n
    A, B, m = dora_stack(t.adapters)
    c = dora_norm(t.W, A, B, s=t.s).requires_grad_()
    y = dora_linear_multi(t.x, t.W, A, B, m, s=t.s, norm=c, backend="triton", **routed(t))
    (dc,) = torch.autograd.grad(y, c, dy)
    wide = t.double()
    C = c.detach().double().requires_grad_()
    y = dora_linear_multi(wide.x, wide.W, *dora_stack(wide.adapters), s=t.s, norm=C, **routed(t))
    assert rel_l2(dc, torch.autograd.grad(y, C, dy.double())[0]) < CLOSE


@pytest.mark.parametrize("shape", ["many", "crowded"])
def test_a_few_ranks_in_all_are_one_layer(shape, as_hopper):
    """Tokens in any order as they come: one product of x beside one layer's, with the tiles that this has."""
    plans = as_hopper()
    for route in ("offsets", "ids"):
        t = drawn(shape, torch.float16, None, route, False)
        assert_as_the_truth(t, True, f"{shape} {route}")
    forward = [p for p in plans.values() if p.name.endswith("forward")]
    assert len(forward) == 2
    for plan in forward:
        found = kernels(plan)
        assert found.pop("multi_ranks_kernel") == found.pop("multi_table_kernel") == 1
        assert [*found] == ["product", "gemm_pointer_kernel" if shape == "crowded" else "gemm_tma_kernel"]


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
    """What is not finite in one adapter, or in a token of one, reaches nobody else's tokens and no other gradient."""
    for fixture in map(request.getfixturevalue, how):
        fixture and fixture()
    shape, _, route = shape.partition(" ")
    healthy = drawn(shape, HALF[0], route=route or "offsets", bias=False)
    want, well = (
        with_gradients(lambda t: together(t, backend="triton"), healthy, dy_of(healthy)),
        torch.cat(places(healthy)[1:]),
    )
    for bad, what in zip(map(float, ("nan", "inf", "nan", "inf", "nan")), ("A", "B", "m", "x", "dy"), strict=True):
        t = drawn(shape, HALF[0], route=route or "offsets", bias=False)
        dy = dy_of(t)
        if what in ("x", "dy"):
            (t.x if what == "x" else dy)[places(t)[0][1]] = bad
        else:
            getattr(t.adapters[0], what).fill_(bad)
        got = with_gradients(lambda t: together(t, backend="triton"), t, dy)
        assert torch.equal(got["y"][well], want["y"][well]) and torch.equal(got["x"][well], want["x"][well]), (bad, what)
        assert all(torch.equal(got[n], want[n]) for n in ("A1", "B1", "m1", "A2", "B2", "m2")), (bad, what)


@pytest.mark.parametrize("how", [(), ("as_hopper",), ("apart",), ("tiles", "as_hopper")], ids=str)
def test_what_lies_beyond_a_rank_is_not_read(how, request):
    for fixture in map(request.getfixturevalue, how):
        fixture and fixture()
    for shape in ("few", "many", "steps", "few odd", "many odd"):
        lengths, tail, N, K, ranks = SHAPES[shape.split()[0]]
        if "odd" in shape:  # in the middle of what is read at once
            ranks = [(5, 37, 11, 21)[g % 4] for g in range(len(ranks))]
        t = case(
            lengths, tail, N, K, ranks, (S * len(ranks))[: len(ranks)], HALF[0], None, bias=False, route="offsets", spread=0.02
        )
        found = []
        for fill in (0.0, float("nan")):
            bank = [v.detach().clone() for v in dora_stack(t.adapters)]
            for g, r in enumerate(ranks_of(t)):
                bank[0][g, r:], bank[1][g, :, r:] = fill, fill
            bank = [v.requires_grad_() for v in bank]
            c = multi.bank_norm(t.W, bank[0].detach(), bank[1].detach(), torch.tensor(t.s, device=device.NAME), ranks_of(t))
            y = dora_linear_multi(t.x, t.W, *bank, s=t.s, norm=c, ranks=ranks_of(t), backend="triton", **routed(t))
            found.append([c, y, *torch.autograd.grad(y, bank, dy_of(t))])
        assert all(map(torch.equal, *found)), shape


@pytest.mark.parametrize("max_bytes", [None, 20_000, 5_000])
def test_norms_of_a_bank(max_bytes, chosen_anew):
    for dtype, adapter in ((HALF[0], HALF[0]), (HALF[0], torch.float32), (torch.float32, torch.float32)):
        for N, K, ranks in ((150, 140, (20, 3, 16)), (256, 128, (16, 16))):
            t = case((1,) * len(ranks), 0, N, K, ranks, S[: len(ranks)], dtype, adapter)
            A, B, _ = dora_stack(t.adapters)
            s = torch.tensor(t.s, device=device.NAME)
            for given in (None, ranks):
                B = B.to(dtype) if given else B  # beside a float32 A
                c = multi.bank_norm(t.W, A, B, s, given, max_bytes)
                want = eager.bank_norm(t.W.double(), A.double(), B.double(), s.double(), given)
                assert rel_l2(c, want) < 1e-6, (dtype, adapter, N, given)
    assert max_bytes is None or all(0 < plan.workspace <= max_bytes for plan in chosen_anew.values())


@pytest.fixture
def short_strips(monkeypatch):
    monkeypatch.setattr("fdora.triton.multi_norm.span_of", lambda *_: 128)


@pytest.mark.parametrize("G", [1, 2, 4, 5])
def test_norms_by_strips(G, chosen_anew, short_strips):
    """Adapters beside each other, and one too many; several strips along K, the last one shorter; whole tiles, and masks."""
    for N, K, r in ((128, 320, 16), (70, 300, 20)):
        t = case((1,) * G, 0, N, K, (r,) * G, (*S, 0.5)[:G], HALF[0], HALF[0])
        A, B, _ = dora_stack(t.adapters)
        s = torch.tensor(t.s, device=device.NAME)
        c = multi.bank_norm(t.W, A, B, s, None)
        assert rel_l2(c, eager.bank_norm(t.W.double(), A.double(), B.double(), s.double(), None)) < 1e-6, (N, K, r)
    assert all(kernels(plan)["strip_norm_kernel"] == 1 for plan in chosen_anew.values())


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


@pytest.mark.parametrize(("shape", "way"), [("few", "as_hopper"), ("many", "as_hopper"), ("many", "tiles")])
def test_a_weight_of_another_dtype_under_autocast(shape, way, as_hopper, request):
    request.getfixturevalue(way)
    as_hopper()
    t = drawn(shape, torch.float32)
    with torch.autocast(device.NAME, HALF[0]):
        got = with_gradients(lambda t: together(t, backend="triton"), t, dy_of(t))
    want = with_gradients(truth, t.double(), dy_of(t).double())
    assert got["y"].dtype == HALF[0] and got["A0"].dtype == torch.float32
    assert all(rel_l2(got[n], want[n]) < 2 * CLOSE for n in ("y", "x", "A0", "B2", "m2"))


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32], ids=str)
def test_tokens_are_sorted_by_counting(dtype):
    """As the eager backend sorts them, stably; what is no adapter's comes last."""
    for M, G in ((0, 3), (1, 1), (200, 5), (150, 70)):
        ids = torch.randint(-1, G + 1, (M,), device=device.NAME).to(dtype)
        for each in (ids, torch.stack([ids, ids])[:, : M // 2].T[:, 0]):  # any stride
            offsets, order, place = multi.route(each, G)
            assert all(map(torch.equal, (offsets, order), eager.route(each, G)[:2])), (M, G)
            assert torch.equal(order[place], torch.arange(len(each), device=device.NAME))


def test_sums_in_parts(as_hopper, monkeypatch):
    """The gradient of B on the tiles of dz, and sums over tokens in parts, where these are few beside their operands."""
    monkeypatch.setattr("fdora.triton.multi_bwd.scale_config", lambda *_: ScaleConfig(32, 64, 128, 16, 4))
    plans = as_hopper()
    assert_as_the_truth(drawn("thin", torch.float16, None, "offsets", False), True, "thin")
    found = sum((kernels(p) for p in plans.values() if p.name.endswith("backward")), Counter())
    assert found["multi_sum_kernel"] == 2 and found["multi_grad_kernel"] == 1


def test_the_kernels_are_what_the_backend_runs(chosen_anew):
    t = drawn("few", HALF[0])
    with fdora.backend("triton"):
        together(t)
    assert {p.name for p in walk._plans.values()} == {"dora_linear_multi forward", "norms of a bank"}


@pytest.mark.parametrize("shape", ["few", "many"])
def test_each_adapter_has_its_ratio_of_dropout(shape):
    """In the pass that drops x, and in the one behind the product of dx."""
    t = drawn(shape, torch.float32, None, "offsets", True)
    dy, G = dy_of(t), len(t.adapters)
    how = {"dropout_p": [APART[g % 3] for g in range(G)], "seed": [SEEDS[g % 3] for g in range(G)]}
    got, want = (with_gradients(lambda t, name=name: together(t, backend=name, **how), t, dy) for name in ("triton", "eager"))
    for n, v in got.items():
        torch.testing.assert_close(v, want[n], rtol=1e-4, atol=1e-4, msg=n)
