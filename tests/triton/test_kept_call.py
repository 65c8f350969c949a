"""The norms of the layers of one call, compared and computed by one launch: interpreted, and for real with --device cuda."""

import pytest
import torch

from fdora.functional import dora_norm_tree
from tests import device  # noqa: F401 (read by a condition of the marks)
from tests.checks.norm_state import S, inputs
from tests.triton.marks import DTYPES, HALF, INTERPRETED, needs_gpu, needs_kernels  # noqa: F401

pytestmark = needs_kernels


@pytest.fixture(autouse=True)
def nothing_from_before(monkeypatch):
    """Whatever the registers of a GPU say of a tile, one launch takes as many layers as it has arguments for."""
    from fdora import _norm_cache
    from fdora.triton import tree_kept

    monkeypatch.setattr(tree_kept, "in_one_launch", lambda W, *_: len(W) <= tree_kept.FEW)
    _norm_cache.forget_norms()


def want_of(layers, s=S):
    return dora_norm_tree([la[0] for la in layers], [la[1:] for la in layers], s=s, backend="triton")


def ask(layers, fresh, s=S):
    from fdora.triton.tree_kept import norms_of_call

    W, A, B = zip(*layers, strict=True)
    return norms_of_call(W, A, B, [s] * len(W), fresh)


def poison(norms):
    """So that what is computed can be told from what is kept."""
    norms.of("call in place")[-1].c.fill_(-7)


def is_at_rest(norms, layers):
    """No program is missing, none too many: between launches only whose turn it is may not be 0."""
    counters = norms.of("call in place")[-1].counters.clone()
    counters[1 : 4 * layers : 4] = 0
    taken = counters[: 4 * layers].view(layers, 4)[:, 2:]
    assert (taken.min(dim=1).values == 0).all()  # of those whose turn is next
    counters[: 4 * layers].view(layers, 4)[:, 2:] = 0
    return not counters.any()


SHAPES = [(64, 48, 4), (70, 1030, 16), (7, 33, 3)]  # the second: two blocks of rows, two chunks of columns


def layers_of(dtype, count, adapter=None):
    return [inputs(dtype, N=N, K=K, r=r, adapter=adapter) for N, K, r in (SHAPES * 2)[:count]]


@pytest.mark.parametrize("fresh", [False, True])
@pytest.mark.parametrize("count", [1, 3, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_changed_is_computed_and_nothing_else(norms, dtype, count, fresh):
    layers = layers_of(dtype, count)
    changes = [
        (None, lambda: None),
        *((i, lambda i=i: layers[i][1].data[-1, 5].add_(1)) for i in range(count)),
        *((i, lambda i=i: layers[i][2].data.mul_(1.5)) for i in range(count)),
        (None, lambda: None),
    ]
    for got, want in zip(ask(layers, fresh), want_of(layers), strict=True):
        assert torch.equal(got, want)
    for changed, change in changes:
        poison(norms)
        change()
        got, want = ask(layers, fresh), want_of(layers)
        for i in range(count):
            assert torch.equal(got[i], want[i]) if i == changed else (got[i] == -7).all()
        assert is_at_rest(norms, count)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_wherever_one_element_changes(norms, dtype):
    """Every share of every factor, seen by one program alone."""
    layers = [inputs(dtype, N=70, K=1030, r=16)]
    ask(layers, False)
    for t in layers[0][1:]:
        flat = t.data.view(-1)
        for at in [*range(0, flat.numel(), max(1, flat.numel() // 9)), flat.numel() - 1]:
            flat[at] += 1
            poison(norms)
            assert torch.equal(ask(layers, False)[0], want_of(layers)[0]), at


@pytest.mark.parametrize("which", [1, 2])
def test_after_a_step_every_program_sees_the_change(norms, which):
    """Else few of them would compute what is there for all."""
    layers = [inputs(HALF[0], N=640, K=1024, r=8), inputs(HALF[0], N=64, K=512, r=16)]
    ask(layers, False)
    words = norms.of("call in place")[-1].words
    before = words.clone()
    assert before.shape == (2, 16)
    for layer in layers:
        layer[which].data.neg_()
    ask(layers, False)
    assert (words != before).all()


def test_copies_are_nobody_elses():
    layers = layers_of(HALF[0], 3)
    first = ask(layers, True)
    want = [c.clone() for c in first]
    for c in first:
        c.fill_(3)
    assert all(map(torch.equal, ask(layers, True), want))
    assert len({c.untyped_storage().data_ptr() for c in first}) == len(first)


def test_layers_of_several_kinds(norms):
    """A launch for each kind of code: dtypes, and tiles with and without a rest."""
    layers = [inputs(HALF[0], N=70, K=1030, r=16), inputs(HALF[0], N=128, K=256, r=16, adapter=torch.float32)]
    for fresh in (True, False, True):
        assert all(map(torch.equal, ask(layers, fresh), want_of(layers)))
        layers[1][2].data.mul_(1.5)
    assert all(len(launch.plan.steps) == 2 for launch in norms.launches if launch.kind == "call in place")


def test_another_scaling_and_what_is_forgotten(norms):
    from fdora._norm_cache import forget_norms

    layers = layers_of(HALF[0], 2)
    for s in (0.0, -S):
        assert all(map(torch.equal, ask(layers, True, s), want_of(layers, s)))
    ask(layers, False)
    layers[0][0].mul_(2)  # a version of W
    assert all(map(torch.equal, ask(layers, False), want_of(layers)))
    poison(norms)
    forget_norms()
    assert all(map(torch.equal, ask(layers, False), want_of(layers)))


def test_more_layers_than_a_launch_has_copies_for():
    from fdora.triton.tree_kept import FEW

    layers = layers_of(HALF[0], FEW + 1)
    for fresh in (False, True, False):
        assert all(map(torch.equal, ask(layers, fresh), want_of(layers)))
        layers[-1][1].data.mul_(2)


@needs_gpu
def test_graphs_of_large_layers_under_all_changes(norms):
    """Many programs of a layer arrive and take items at the same time: every order of them gives the bits of one launch each."""
    torch.manual_seed(0)
    shapes = [(4096, 2048, 16), (1024, 2048, 16), (2048, 6144, 64)]
    layers = [inputs(HALF[0], N=N, K=K, r=r) for N, K, r in shapes]
    ask(layers, True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        copies, same = ask(layers, True), ask(layers, False)
    graphs = norms.of("call in place")[-1]
    generator = torch.Generator().manual_seed(0)

    def draw(n):
        return int(torch.randint(n, (), generator=generator))

    for _ in range(200):
        kind, t = draw(4), layers[draw(3)][1 + draw(2)].data
        if kind == 0:
            t.mul_(-1)
        elif kind == 1:
            t.view(-1)[draw(t.numel())] += 1
        elif kind == 2:
            for la in layers:
                la[1].neg_()
        graphs.c.fill_(-7) if kind == 2 else None
        for c in copies:
            c.fill_(-5)
        for _ in range(1 + draw(3)):
            graph.replay()
        want = want_of(layers)
        assert all(map(torch.equal, copies, want)) and all(map(torch.equal, same, want))
    counters = graphs.counters[: 4 * 3].view(3, 4)
    assert not counters[:, 0].any() and not graphs.counters[4 * 3 :].any()
