"""What a norm with a state promises, for one backend and dtype: never stale, and no work when nothing changed."""

import pytest
import torch

from fdora.functional import NormState, dora_norm, dora_norm_state
from fdora.quant import quantize
from tests import device
from tests.make import tensors

S = 0.7
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def inputs(dtype, N=40, K=70, r=20, adapter=None):
    """W, A and B; of a kind of fdora.quant in the place of a dtype W is codes."""
    coded = isinstance(dtype, str)
    t = tensors(N, K, r, dtype=torch.float16 if coded else dtype, adapter=adapter)
    return quantize(t["W"], dtype) if coded else t["W"], t["A"], t["B"]


def moved(W, A, B, state, backend, s=S):
    """The state after a call whose old c is poisoned: recomputed, or the poison."""
    poisoned = state._replace(c=torch.full_like(state.c, -7))
    new = dora_norm(W, A, B, s=s, state=poisoned, backend=backend)
    assert isinstance(new, NormState) and new.c.dtype == state.c.dtype and not new.c.requires_grad
    assert (poisoned.c == -7).all()  # nothing is mutated
    kept = (new.c == -7).all().item()
    assert kept or torch.equal(new.c, dora_norm(W, A, B, s=s, backend=backend))  # bit for bit
    assert not kept or torch.equal(new.fingerprint, state.fingerprint)
    return new, not kept


def first_call_computes(backend, dtype):
    for scale, s in ((1, S), (0, 0.0)):  # zeros too: they must not look like the empty state
        W, A, B = inputs(dtype)
        assert moved(W, A * scale, B * scale, dora_norm_state(W), backend, s)[1]


def nothing_new_costs_nothing(backend, dtype):
    """Not even a look at W: a W changed behind its back goes unnoticed, which is the contract."""
    for adapter in {dtype, torch.promote_types(dtype, torch.float32)}:
        W, A, B = inputs(dtype, adapter=adapter)
        state, _ = moved(W, A, B, dora_norm_state(W), backend)
        W[0] += 1
        assert not moved(W, A.clone(), B.clone(), state, backend)[1]


def any_change_is_seen(backend, dtype):
    def flip(t, i, j, bit=0):
        t.view(BITS[t.element_size()])[i, j] ^= 1 << bit

    def swap(t, i, j):
        t[i], t[j] = t[j].clone(), t[i].clone()

    changes = {
        "A low bit": lambda A, B: flip(A, 3, 5),
        "A last element": lambda A, B: flip(A, -1, -1),
        "A sign": lambda A, B: flip(A, 0, 0, 8 * A.element_size() - 2),
        "B low bit": lambda A, B: flip(B, 7, 19),
        "B first element": lambda A, B: flip(B, 0, 0),
        "A elements swapped": lambda A, B: swap(A, (1, 2), (9, 50)),
        "A neighbours swapped": lambda A, B: swap(A, (1, 2), (1, 3)),
        "B rows swapped": lambda A, B: swap(B, (4,), (5,)),
        "data": lambda A, B: A.data.mul_(1.5),
        "copy_": lambda A, B: B.copy_(torch.randn_like(B)),
    }
    W, A, B = inputs(dtype)
    state, _ = moved(W, A, B, dora_norm_state(W), backend)
    for what, change in changes.items():
        change(A, B)
        state, seen = moved(W, A, B, state, backend)
        assert seen, what
        assert not moved(W, A, B, state, backend)[1], what
    assert moved(W, A, B, state, backend, s=S * (1 + 1e-6))[1]
    assert moved(W, A, B, state, backend, s=-S)[1]


def an_optimizer_step_is_seen(backend, dtype):
    W, A, B = inputs(torch.float32)
    p = [torch.nn.Parameter(t) for t in (A, B)]
    optimizer = torch.optim.AdamW(p, lr=1e-3, fused=True)
    state = dora_norm_state(W)
    for _ in range(3):
        for t in p:
            t.grad = torch.randn_like(t)
        optimizer.step()
        state, seen = moved(W, *p, state, backend)
        assert seen and not moved(W, *p, state, backend)[1]


def any_layout(backend, dtype):
    """Odd sizes, turned and strided adapters: seen and skipped alike."""
    for N, K, r in ((40, 70, 20), (5, 3, 1), (1, 1, 1), (130, 33, 7)):
        W, A, B = inputs(dtype, N, K, r)
        for make in (lambda t: t.T.contiguous().T, lambda t: torch.stack([t, t], -1)[..., 0], lambda t: t.contiguous()):
            a, b = make(A).clone(memory_format=torch.preserve_format), make(B)
            state, seen = moved(W, a, b, dora_norm_state(W), backend)
            assert seen and not moved(W, a, b, state, backend)[1]
            for t in (a, b):
                t[-1, -1] += 1
                state, seen = moved(W, a, b, state, backend)
                assert seen
    W, A, B = inputs(dtype)
    buffer = torch.zeros(A.numel() + 1, device=A.device, dtype=A.dtype)
    unaligned = buffer[1:].view(A.shape).copy_(A)
    state, _ = moved(W, unaligned, B, dora_norm_state(W), backend)
    assert not moved(W, unaligned, B, state, backend)[1]


def traced_and_mapped(backend, dtype):
    W, A, B = inputs(dtype)
    call = torch.compile(lambda A, B, state: dora_norm(W, A, B, s=S, state=state, backend=backend), fullgraph=True)
    state = call(A, B, dora_norm_state(W))
    torch.testing.assert_close(state.c, dora_norm(W, A, B, s=S, backend=backend), rtol=1e-6, atol=0)
    poisoned = state._replace(c=state.c + 1)
    assert torch.equal(call(A, B, poisoned).c, poisoned.c)
    assert not torch.equal(call(A + 1, B, poisoned).c, poisoned.c)
    A, B = torch.stack([A, A + 1]), torch.stack([B, B])
    bank = torch.func.vmap(lambda A, B: dora_norm(W, A, B, s=S, state=dora_norm_state(W), backend=backend))(A, B)
    poisoned = bank._replace(c=bank.c + 1)
    A[1, 2, 3] += 1  # one adapter of two
    new = torch.func.vmap(lambda A, B, *state: dora_norm(W, A, B, s=S, state=NormState(*state), backend=backend))(
        A, B, *poisoned
    )
    assert torch.equal(new.c[0], poisoned.c[0]) and not torch.equal(new.c[1], poisoned.c[1])


def a_captured_graph_decides_on_the_gpu(backend, dtype):
    if device.NAME == "cpu":
        pytest.skip("CUDA graphs need a GPU; runs with --device cuda on a machine with one")
    W, A, B = inputs(dtype, 300, 500, 40)
    old = dora_norm_state(W)
    dora_norm(W, A, B, s=S, state=old, backend=backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        new = dora_norm(W, A, B, s=S, state=old, backend=backend)
        for a, b in zip(old, new, strict=True):
            a.copy_(b)
    for change in (lambda: None, lambda: A.mul_(2), lambda: B[3, 4].add_(1)):
        change()
        graph.replay()
        assert torch.equal(old.c, dora_norm(W, A, B, s=S, backend=backend))
        old.c.add_(1)
        poison = old.c.clone()
        graph.replay()
        assert torch.equal(old.c, poison)


CHECKS = [
    first_call_computes,
    nothing_new_costs_nothing,
    any_change_is_seen,
    an_optimizer_step_is_seen,
    any_layout,
    traced_and_mapped,
    a_captured_graph_decides_on_the_gpu,
]
OF_CODES = [first_call_computes, any_change_is_seen, any_layout, traced_and_mapped, a_captured_graph_decides_on_the_gpu]
