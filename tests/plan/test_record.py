"""What is counted of a function on tensors without data, and how pieces make a step, by hand."""

import sys

import pytest
import torch

from fdora import FdoraError
from fdora.jobs.plan import Adapter, Part, Setup, cost, memory, read_model
from fdora.jobs.plan.record import Piece, Way, empty, head, layer, network, record
from tests.plan.test_layout import CONFIG, MODEL, SETUP

n = 1000


def test_bytes_and_kernels_by_hand():
    """Of bfloat16: x in float32, its sine, which keeps it, and the result; what is not kept goes at once."""
    found = record(lambda x: x.float().sin().bfloat16(), (n,), 1)
    assert found.kept == 4 * n
    assert (found.forward.most, found.forward.at) == ((2 + 4 + 4 + 2) * n, "_to_copy")
    assert [kernel.bytes for kernel in found.forward.kernels] == [6 * n, 8 * n, 6 * n]
    # x, the gradient of the sine, cosine and their product; and the scalars of the end
    assert (found.backward.most, found.backward.at) == (4 * 4 * n + 4, "mul")
    assert (found.forward.ops, found.forward.calls, found.backward.calls) == (3, 0, 0)


def test_what_hangs_on_no_parameter_keeps_nothing():
    weight = empty(n, requires_grad=True)
    both, alone = (record(lambda x: x.float().sin().bfloat16() + weight, (n,), 1, first) for first in (False, True))
    assert (both.kept, alone.kept) == (4 * n, 0) and len(alone.backward.kernels) < len(both.backward.kernels)


def test_views_and_what_is_there_before_take_no_memory():
    weight = empty(n, n)
    found = record(lambda x: torch.nn.functional.linear(x.view(n, n).t(), weight), (n * n,), 1)
    assert (found.kept, found.forward.most) == (0, 2 * 2 * n * n)
    assert [kernel.flops for kernel in found.forward.kernels] == [2 * n**3]


def test_attention_is_the_kernel_of_a_gpu():
    """No product of all tokens by all; by a mask one that is added, and twice the work."""
    sizes = (1, 4, 64, 32)
    tokens = 4 * 64 * 32

    def attend(x, mask=None):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x, attn_mask=mask, is_causal=mask is None)

    plain = record(attend, sizes, 64)
    # x and sums of rows; the output belongs to others. Some bytes are seeds of a dropout
    assert plain.kept == pytest.approx(2 * tokens + 4 * 4 * 64, abs=24)
    masked = record(lambda x: attend(x, empty(1, 1, 64, 64, dtype=torch.bool)), sizes, 64)
    assert masked.kept == pytest.approx(plain.kept + 2 * 64 * 64, abs=24)
    (one,), (_, two) = (found.forward.kernels for found in (plain, masked))
    assert (one.kind, one.flops, two.flops) == ("attention", 2 * tokens * 64, 4 * tokens * 64)


def pieces(*_):
    body = Piece(100, Way(1000, "a"), Way(3000, "b"))
    return [body, body, Piece(10, Way(500, "c"), Way(2000, "d"), False)]


def test_a_step_by_hand(monkeypatch):
    monkeypatch.setattr(cost, "pieces", pieces)
    monkeypatch.setattr(cost, "sizes", lambda *_: (0, 0, 7))
    model = MODEL._replace(hidden=20)  # an activation of one token: 40 bytes
    walk = lambda **more: cost.walk(model, SETUP._replace(**more), 1, Part(2))  # noqa: E731
    assert walk() == (210, 3100, "backward: b")  # the last layer's, on what the first keeps
    # of the first, beside its input and the gradients of the last, which stay: 47; of the last, on both inputs: 80
    assert walk(checkpointing=True) == (90, 3080, "backward: b")
    assert walk(checkpointing=True, microbatches=2) == (90, 3080, "backward: b")
    monkeypatch.setattr(cost, "sizes", lambda *_: (0, 0, 70))
    assert walk(checkpointing=True)[1] == 3000 + 40 + 70 and walk(checkpointing=True, microbatches=2)[1] == 3080
    far = Piece(100, Way(9000, "a"), Way(3000, "b"))
    monkeypatch.setattr(cost, "pieces", lambda *_: [far, far, pieces()[-1]])
    assert walk() == (210, 9100, "forward: a")
    # the first again, beside the gradient of its output and those of the last
    assert walk(checkpointing=True) == (90, 9000 + 40 + 70, "forward again: a")


@pytest.mark.parametrize("packed", [False, True])
def test_between_two_recordings_it_is_nearly_linear(packed):
    setup, part = SETUP._replace(packed=packed, fuse=True, weights="nf4"), Part(6)
    for tokens in (768, 1300, 6144, 7100):
        assert tokens & (tokens - 1)
        exact = cost.walk(MODEL, setup, tokens, part)
        said = memory(MODEL, setup, tokens, part)
        assert said.activations == pytest.approx(exact[0], rel=0.01)
        assert said.activations + said.temporary == pytest.approx(exact[1], rel=0.03)


def test_a_recording_is_made_once():
    """Of layers that are alike in all that it looks at; a plan tries several ways on the same."""
    layer.cache_clear(), head.cache_clear()
    memory(MODEL, SETUP, 512)
    made = layer.cache_info().misses, head.cache_info().misses
    assert made == (2, 1)  # the first layer's input hangs on no parameter
    for more in ({"checkpointing": True}, {"microbatches": 8}, {"optimizer": "sgd"}, {"adapters": (Adapter("b", 16),)}):
        memory(MODEL._replace(layers=80), SETUP._replace(**more), 512)
    assert (layer.cache_info().misses, head.cache_info().misses) == made
    memory(MODEL, SETUP._replace(fuse=True), 512)
    assert layer.cache_info().misses == 4


def test_what_is_missing_is_said(monkeypatch):
    network.cache_clear()
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(FdoraError, match=r"^fdora\.jobs\.plan: .*Install transformers\.$"):
        read_model(CONFIG)
    monkeypatch.setattr(sys.modules["fdora.functional.explain"], "load_kernels", lambda: (None, "it is not there"))
    with pytest.raises(FdoraError, match="Install triton"):
        record(lambda x: x, (n,), 1)


def test_layers_as_train_runs_them_draw_a_mask():
    """Its value before g stays, and D(x) is drawn anew: more is kept, and more at once."""
    two = Adapter("a", 16), Adapter("b", 16)
    plain, dropped = (memory(MODEL, Setup(1024, two, dropout=drops), 1024) for drops in (False, True))
    assert dropped.activations > 1.2 * plain.activations
