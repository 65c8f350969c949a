"""The norm that compiled code keeps: by itself, and through PEFT with and without checkpointing."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fdora._norm_cache import give_norm
from fdora.functional import dora_norm, dora_norm_state
from fdora.functional.norm import kept_norms
from tests import device
from tests.checks.norm_state import S, inputs
from tests.norms import capture
from tests.triton.changes import adapted
from tests.triton.marks import DTYPES, HALF, INTERPRETED, needs_kernels  # noqa: F401

pytestmark = needs_kernels


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_norm_is_kept_until_something_changes(dtype):
    W, A, B = inputs(dtype)
    c, seen = dora_norm_state(W)
    versions = c._version, seen._version
    s = S
    changes = [lambda: None, lambda: A[3, 5].add_(1), lambda: B.data.mul_(2), lambda: W.mul_(2), lambda: seen.data.zero_()]
    for change in changes:
        change()
        with torch.no_grad():
            first = kept_norms([(W, A, B, s, c, seen)])[0]
        assert torch.equal(first, dora_norm(W, A, B, s=s, backend="triton")) and torch.equal(first, c)
        assert first.data_ptr() != c.data_ptr()
        c.data.fill_(-7)
        assert (kept_norms([(W, A, B, s, c, seen)])[0] == -7).all()  # nothing was computed
        c.data.copy_(first)
    assert torch.equal(kept_norms([(W, A, B, -s, c, seen)])[0], dora_norm(W, A, B, s=-s, backend="triton"))
    other = W + 1
    assert torch.equal(kept_norms([(other, A, B, -s, c, seen)])[0], dora_norm(other, A, B, s=-s, backend="triton"))
    assert (c._version, seen._version) == versions  # else autograd would refuse a backward that reads them


def test_what_is_new_is_not_cleared():
    """A CUDA graph whose capture is the first to ask would clear it again with every replay, and compute every time."""
    W, A, B = inputs(HALF[0])
    c, seen = dora_norm(W, A, B, s=S, state=dora_norm_state(W), backend="triton")
    give_norm(seen, Moved(W))  # nothing is known of what lay there before
    c.fill_(-7)
    assert (kept_norms([(W, A, B, S, c, seen)])[0] == -7).all()


class Moved:
    """Keeps a norm elsewhere now, and says of every W that it is the one that it was."""

    norms = None

    def __init__(self, W):
        self.room = (None, *dora_norm_state(W))

    def given(self, *_):
        return None

    def made_from(self, W):
        return (0,)


def test_memory_that_another_norm_left_is_not_its_own():
    W, A, B = inputs(HALF[0])
    c, seen = dora_norm_state(W)
    before = Moved(W)
    give_norm(seen, before)
    for _ in range(2):
        assert torch.equal(kept_norms([(W, A, B, S, c, seen)])[0], dora_norm(W, A, B, s=S, backend="triton"))
        W.mul_(2)


def test_several_norms_come_together():
    """Each begins where a tensor of its own could."""
    layers = [inputs(HALF[0], N=N) for N in (48, 64, 7)]
    states = [dora_norm_state(W) for W, *_ in layers]
    for s in (S, S, -S):
        got = kept_norms([(*layer, s, *state) for layer, state in zip(layers, states, strict=True)])
        for each, layer in zip(got, layers, strict=True):
            assert (
                torch.equal(each, dora_norm(*layer, s=s, backend="triton")) and each.data_ptr() % 128 == got[0].data_ptr() % 128
            )


def test_many_chunks_of_rows(monkeypatch, chosen_anew):
    """float32 adapters are split some rows at a time: all are compared before any fingerprint is replaced."""
    monkeypatch.setattr("fdora.triton.split.rows_at_a_time", lambda *_: 128)
    W, A, B = inputs(HALF[0], N=300, adapter=torch.float32)
    c, seen = dora_norm_state(W)
    for _ in range(2):
        assert torch.equal(kept_norms([(W, A, B, S, c, seen)])[0], dora_norm(W, A, B, s=S, backend="triton"))
        B[-1, 0] += 1


@pytest.fixture
def model(kernels_everywhere):
    """Two DoRA layers of PEFT that fdora runs."""
    from fdora.integrations.peft import use_fdora

    return use_fdora(adapted(nn.Sequential(nn.Linear(48, 64), nn.Linear(64, 48)), ["0", "1"]))


def test_room_for_it(model, norms):
    """Where kernels can run: made anew when the model moves; a copy gets it from its own use_fdora."""
    import copy

    from fdora.integrations.peft import use_fdora

    x = torch.randn(5, 48, device=device.NAME, dtype=HALF[0], requires_grad=True)

    def kinds(model):
        torch._dynamo.reset()
        torch.compile(lambda x: checkpoint(model, x, use_reentrant=False), backend="aot_eager", fullgraph=True)(x)
        return norms.counts()

    assert kinds(model) == {"layer in place": 2}
    torch.compile(lambda x: checkpoint(model, x, use_reentrant=False), backend="aot_eager", fullgraph=True)(x)
    first, second = (launch.words for launch in norms.of("layer in place"))
    model.load_state_dict(model.state_dict())
    assert not first.any() and not second.any()
    other = copy.deepcopy(model)
    norms.counts()
    assert "layer in place" not in kinds(other)
    assert kinds(use_fdora(other)) == {"layer in place": 2}
    model.to("meta")
    model.to_empty(device=device.NAME)
    assert kinds(model) == {"layer in place": 2} and norms.launches == []


def test_exported_code_sees_a_change(model):
    x = torch.randn(5, 48, device=device.NAME, dtype=HALF[0])
    program = torch.export.export(model, (x,), strict=True)
    for _ in range(2):
        torch.testing.assert_close(program.module()(x), model(x), rtol=2e-3, atol=2e-3)
        for name, p in model.named_parameters():
            if "lora_A" in name:
                p.data.mul_(1.5)


# what is kept of all layers of a model at once


@pytest.fixture
def models():
    """Nothing kept from before, nothing left behind. Yields the module and a function that draws the tensors of two layers."""
    from fdora._norm_cache import forget_norms
    from fdora.triton import tree

    def draw():
        return [list(pair) for pair in zip(inputs(HALF[0]), inputs(HALF[0], N=24), strict=True)]

    forget_norms()
    yield tree, draw
    forget_norms()


def test_captures_of_one_model_keep_it_once(models, norms, monkeypatch):
    """Every step of a training loop may capture: what stays for the sake of graphs does not grow with their number, nor go
    while a graph can read it; and each replay after a change of W computes."""
    from fdora._norm_cache import forget_norms

    tree, draw = models
    W, A, B = draw()
    tree.model_norms(W, A, B, [S, S])
    with monkeypatch.context() as patch:
        capture(patch)
        for _ in range(3):
            tree.model_norms(W, A, B, [S, S])
    eager, *captured = norms.of("model in place")
    assert len(captured) == 3 and [launch.computed for launch in captured] == [2, 0, 0]
    assert len({launch.c.data_ptr() for launch in captured} - {eager.c.data_ptr()}) == 1
    words = weakref.ref(captured[0].words)
    del eager, captured
    norms.launches.clear()
    for _ in range(2):  # the second time nobody but the graph knows of it
        words().fill_(5)
        forget_norms()
        gc.collect()
        assert words() is not None and not words().any()


def test_what_a_graph_reads_goes_with_its_weights(models, norms, monkeypatch):
    """The next capture sees that they are gone. One of them is enough to stay for."""
    from fdora._norm_cache import forget_norms

    tree, draw = models

    def captured():
        W, A, B = draw()
        W = [nn.Parameter(w, requires_grad=False) for w in W]
        tree.model_norms(W, A, B, [S, S])
        with monkeypatch.context() as patch:
            capture(patch)
            tree.model_norms(W, A, B, [S, S])
        words = weakref.ref(norms.launches[-1].words)
        norms.launches.clear()
        forget_norms()  # nobody but the graph knows of it
        gc.collect()
        return W, words

    W, words = captured()
    others = captured()
    assert words() is not None
    del W[0]
    captured()
    assert words() is not None  # one of its weights lives
    W.clear()
    captured()
    assert words() is None and others[1]() is not None


def test_the_first_norms_of_a_process_are_found_by_the_second_call(models, norms, monkeypatch):
    """A capture that comes second finds what the warm-up made."""
    from fdora import _facts

    tree, draw = models
    monkeypatch.setattr(_facts, "facts", _facts.python_facts)
    W, A, B = draw()
    first = tree.model_norms(W, A, B, [S, S])
    second = tree.model_norms(W, A, B, [S, S])
    assert torch.equal(first, second) and [launch.computed for launch in norms.launches] == [2, 0]


def test_the_oldest_model_may_be_gone_already(models, monkeypatch):
    """Another thread forgets all norms between the look and the deed."""
    from fdora import _norm_cache

    tree, draw = models

    class Racing(dict):
        def __iter__(self):
            oldest = next(super().__iter__())
            self.clear()
            yield oldest

    monkeypatch.setattr(_norm_cache, "MOST", 1)
    monkeypatch.setattr(_norm_cache, "_of_calls", Racing())
    for _ in range(3):
        W, A, B = draw()
        assert tree.model_norms(W, A, B, [S, S]).shape == (sum(map(tree.room, W)),)
    assert len(_norm_cache._of_calls) == 1


def test_norms_that_nobody_takes_are_not_used(monkeypatch):
    """Else a model whose layers look after themselves would have its norms computed in every forward, for ever."""
    from types import SimpleNamespace

    from fdora.integrations import _tree
    from fdora.triton import norm_kept

    has, c = [False], torch.ones(3)
    table = SimpleNamespace(has=lambda *_: has[0])
    run = SimpleNamespace(task=-1, captured=False, table=table, versions=(), c=[c])
    norms = SimpleNamespace(local=SimpleNamespace(run=run), on_shards=None, used=False)
    norms.running = lambda device: _tree.ModelNorms.running(norms, device)
    giver = SimpleNamespace(norms=norms, place=0, given=lambda *_: c)
    monkeypatch.setattr(norm_kept, "_giver_of", lambda seen: giver)
    seen = torch.zeros(1)
    monkeypatch.setattr(norm_kept, "seen_for_graphs", {seen.data_ptr()})
    for taken in (False, True):
        has[0] = taken
        assert norm_kept.norms_now([c] * norm_kept.WIDTH, [1.0], [seen])[0] is c
        assert norms.used == taken
