"""What the functions on trees promise, for one backend and dtype."""

from typing import NamedTuple

import optree
import pytest
import torch

from fdora import FdoraError
from fdora.functional import (
    DoraParams,
    NormTreeState,
    dora_init,
    dora_init_tree,
    dora_merge,
    dora_merge_tree,
    dora_norm_tree,
    dora_norm_tree_state,
)
from fdora.quant import from_fp8, quantize
from tests import device, reference
from tests.make import tensors

S = 0.7


class Attention(NamedTuple):
    q: object
    v: object


SHAPES = {"q": (66, 257, 24), "v": (5, 3, 2), "up": (128, 128, 16), "down": (1, 1, 1), "head": (40, 70, 7)}


def nested(leaf):
    """Dicts, lists and NamedTuples; leaf is called with each name."""
    return {"blocks": [{"attn": Attention(leaf("q"), leaf("v")), "mlp": [leaf("up"), leaf("down")]}], "head": leaf("head")}


def inputs(dtype, adapter=None):
    each = {name: tensors(*shape, dtype=dtype, adapter=adapter) for name, shape in SHAPES.items()}
    return nested(lambda n: each[n]["W"]), nested(lambda n: DoraParams(each[n]["A"], each[n]["B"], each[n]["m"]))


def truth(weights, params, s=S):
    return optree.tree_map(lambda W, p: reference.norm(W, p.A, p.B, s), weights, params)


def assert_norms(c, weights, params, s=S):
    def one(c, want, W):
        assert c.dtype == torch.promote_types(W.dtype, torch.float32) and not c.requires_grad and c.shape == want.shape
        torch.testing.assert_close(c.double(), want, rtol=1e-9 if W.dtype == torch.float64 else 4e-7, atol=1e-12)

    optree.tree_map(one, c, truth(weights, params, s), weights)


def moved(weights, params, state, backend, s=S):
    """The state after a call whose old c is poisoned, and which leaves were computed: the others hold the poison."""
    poisoned = state._replace(buffers=tuple(torch.full_like(b, -7) for b in state.buffers))
    new = dora_norm_tree(weights, params, s=s, state=poisoned, backend=backend)
    assert isinstance(new, NormTreeState) and all((b == -7).all() for b in poisoned.buffers)  # nothing is mutated
    want = dora_norm_tree(weights, params, s=s, backend=backend)
    computed = []
    for path, c, c_want in zip(optree.tree_paths(new.c), optree.tree_leaves(new.c), optree.tree_leaves(want), strict=True):
        kept = c.numel() > 0 and bool((c == -7).all())
        assert kept or torch.equal(c.nan_to_num(9), c_want.nan_to_num(9))  # bit for bit
        computed += [] if kept else [path]
    return new, computed


def one_leaf_and_none(backend, dtype):
    t = tensors(40, 70, 7, dtype=dtype)
    c = dora_norm_tree(t["W"], DoraParams(t["A"], t["B"], t["m"]), s=S, backend=backend)
    assert_norms(c, t["W"], DoraParams(t["A"], t["B"], t["m"]))
    assert dora_norm_tree({}, {}, s=S, backend=backend) == {}
    state = dora_norm_tree({}, {}, s=S, state=dora_norm_tree_state({}), backend=backend)
    assert state == NormTreeState({}, (), ())


def only_what_changed_is_computed(backend, dtype):
    for adapter in {dtype, torch.promote_types(dtype, torch.float32)}:
        weights, params = inputs(dtype, adapter)
        state, computed = moved(weights, params, dora_norm_tree_state(weights), backend)
        assert len(computed) == len(SHAPES) and isinstance(state.c["blocks"][0]["attn"], Attention)
        weights["head"][0] += 1  # the contract: nobody looks at W
        assert moved(weights, params, state, backend)[1] == []
        copied = optree.tree_map(torch.clone, params)  # other addresses, the same bits
        assert moved(weights, copied, state, backend)[1] == []
        weights["head"][0] -= 1
        low = params["blocks"][0]["mlp"][0]
        low.A.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[low.A.element_size()])[-1, -1] ^= 1
        state, computed = moved(weights, params, state, backend)
        assert computed == [("blocks", 0, "mlp", 0)]
        params["head"].B.data.mul_(2)  # moves no version
        params["blocks"][0]["attn"].v.B.data[0, 0] += 1
        state, computed = moved(weights, params, state, backend)
        assert computed == [("blocks", 0, "attn", 1), ("head",)]
        state, computed = moved(weights, params, state, backend, s=1.5)
        assert len(computed) == len(SHAPES)
        scales = nested(lambda n: 2.0 if n == "up" else 1.5)
        assert moved(weights, params, state, backend, s=scales)[1] == [("blocks", 0, "mlp", 0)]


def an_optimizer_step_is_seen(backend, dtype):
    weights, params = inputs(dtype)
    state, _ = moved(weights, params, dora_norm_tree_state(weights), backend)
    leaves = [p.requires_grad_() for p in optree.tree_leaves(params)]
    optimizer = torch.optim.AdamW(leaves, lr=0.01, fused=True)
    for p in leaves:
        p.grad = torch.ones_like(p)
    optimizer.step()
    assert len(moved(weights, params, state, backend)[1]) == len(SHAPES)


def two_leaves_share_a_weight(backend, dtype):
    t, u = tensors(40, 70, 7, dtype=dtype), tensors(40, 70, 3, dtype=dtype, seed=1)
    weights = {"a": t["W"], "b": t["W"]}
    params = {n: DoraParams(x["A"], x["B"], x["m"]) for n, x in (("a", t), ("b", u | {"A": u["A"]}))}
    state, _ = moved(weights, params, dora_norm_tree_state(weights), backend)
    assert_norms(state.c, weights, params)
    params["b"].B.data[0, 0] += 1
    assert moved(weights, params, state, backend)[1] == [("b",)]


def factors_that_trade_places_are_not_taken_for_each_other(backend, dtype):
    """One layer no longer begins at 16 bytes, so that both change their place in the table, and their factors with them."""
    W, V = (tensors(16, 128, 16, dtype=dtype, seed=i)["W"] for i in range(2))
    one, two = (DoraParams(t["A"], t["B"], None) for t in (tensors(16, 128, 16, dtype=dtype, seed=i) for i in range(2)))
    room = torch.zeros(one.A.numel() + 8, device=W.device, dtype=dtype)
    shifted = one._replace(A=room[8 // room.element_size() :][: one.A.numel()].view(one.A.shape).copy_(one.A))
    state, _ = moved([W, V], [one, two], dora_norm_tree_state([W, V]), backend)
    assert moved([W, V], [shifted, two], state, backend)[1] == []
    for params in ([two, shifted], [two, one]):
        new, computed = moved([W, V], params, state, backend)
        assert computed == [(0,), (1,)]
        assert_norms(new.c, [W, V], params)


def starts_and_merges(backend, dtype):
    weights, _ = inputs(dtype)
    ranks = nested(lambda n: len(n))
    rand = lambda: torch.Generator(device=device.NAME).manual_seed(3)  # noqa: E731
    params = dora_init_tree(weights, 3, generator=rand())
    first, one = optree.tree_leaves(weights)[0], rand()
    assert all(map(torch.equal, optree.tree_leaves(params)[:3], dora_init(first, 3, generator=one)))
    assert all(p.B.shape == (W.shape[0], 3) for W, p in zip(optree.tree_leaves(weights), leaves(params), strict=True))
    assert [p.A.shape[0] for p in leaves(dora_init_tree(weights, ranks))] == optree.tree_leaves(ranks)
    half = dora_init_tree(weights, 2, dtype=dtype)
    assert all(p.A.dtype == dtype and p.m.dtype != torch.float16 for p in leaves(half))
    weights, params = inputs(dtype)
    c = dora_norm_tree(weights, params, s=S, backend=backend)
    for norm in (None, c):
        merged = dora_merge_tree(weights, params, s=S, norm=norm, backend=backend)
        for got, W, p, n in zip(
            *map(optree.tree_leaves, (merged, weights)), leaves(params), optree.tree_leaves(c), strict=True
        ):
            assert torch.equal(got, dora_merge(W, *p, s=S, norm=n, backend=backend)) and got.dtype == W.dtype


def leaves(params):
    return optree.tree_leaves(params, is_leaf=lambda t: isinstance(t, DoraParams))


def errors_name_the_leaf(backend, dtype):
    weights, params = inputs(dtype)
    at = r"weights\['blocks'\]\[0\]\['attn'\]\.q"

    def change(name, of):
        return optree.tree_map(lambda n, p: of(p) if n == name else p, nested(lambda n: n), params)

    cases = {
        rf"dora_norm_tree: `A` of leaf {at} must be": dict(params=change("q", lambda p: p._replace(A=p.A.T))),
        rf"`params` of leaf {at} must be DoraParams": dict(params=change("q", lambda p: p.A[0, 0])),
        r"`s` of leaf weights\['head'\] must be a finite": dict(s=nested(lambda n: float("nan") if n == "head" else 1.0)),
        r"`params` must be of the structure of weights": dict(params=params["blocks"]),
        r"`s` must be of the structure of weights": dict(s={"head": 1.0}),
        r"`state` must be a NormTreeState": dict(state=3),
        r"`state` must be of these weights": dict(state=dora_norm_tree_state(weights["blocks"])),
        rf"`W` of leaf {at} must be a torch.Tensor": dict(
            weights=optree.tree_map(lambda n, w: 1.0 if n == "q" else w, nested(lambda n: n), weights)
        ),
    }
    for message, change_of in cases.items():
        args = {"weights": weights, "params": params, "s": S, "state": None} | change_of
        with pytest.raises(FdoraError, match=message):
            dora_norm_tree(**args, backend=backend)
    weights["head"].requires_grad_()
    dora_norm_tree(optree.tree_map(torch.Tensor.detach, weights), params, s=S, backend=backend)
    with pytest.raises(FdoraError, match=r"`W` of leaf weights\['head'\] must be frozen"):
        dora_norm_tree(weights, params, s=S, backend=backend)
    with torch.no_grad():
        dora_norm_tree(weights, params, s=S, backend=backend)
    with pytest.raises(FdoraError, match=r"dora_init_tree: `r` of leaf .* must be at least 1"):
        dora_init_tree(weights, 0)
    with pytest.raises(FdoraError, match=r"dora_merge_tree: `params` of leaf .* must be DoraParams\(A, B, m\)"):
        dora_merge_tree(weights, optree.tree_map(lambda W, p: (p.A, p.B), weights, params), s=S, backend=backend)
    with pytest.raises(FdoraError, match=r"dora_norm_tree_state: `W` of leaf weights\['x'\] must be \(N, K\)"):
        dora_norm_tree_state({"x": torch.zeros(3)})


def traced_and_mapped(backend, dtype):
    weights, params = inputs(dtype)
    want = dora_norm_tree(weights, params, s=S, backend=backend)
    call = torch.compile(lambda p: dora_norm_tree(weights, p, s=S, backend=backend), backend="aot_eager")
    for a, b in zip(*map(optree.tree_leaves, (call(params), want)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=0)
    bank = torch.utils._pytree.tree_map(lambda t: torch.stack([t, 2 * t]), params)
    c = torch.func.vmap(lambda p: dora_norm_tree(weights, p, s=S, backend=backend))(bank)
    for i, factor in enumerate((1, 2)):
        scaled = optree.tree_map(lambda t, f=factor: f * t, params)
        assert_norms(optree.tree_map(lambda t, i=i: t[i], c), weights, scaled)
    start = dora_norm_tree_state(weights)
    state = torch.func.vmap(lambda p: dora_norm_tree(weights, p, s=S, state=start, backend=backend))(bank)
    assert torch.equal(state.c["head"], c["head"]) and not any(words.any() for words in state.fingerprint)


def a_captured_graph_decides_on_the_gpu(backend, dtype):
    if device.NAME == "cpu":
        pytest.skip("CUDA graphs need a GPU; runs with --device cuda on a machine with one")
    weights, params = inputs(dtype)
    state = dora_norm_tree(weights, params, s=S, state=dora_norm_tree_state(weights), backend=backend)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        new = dora_norm_tree(weights, params, s=S, state=state, backend=backend)
        for old, now in zip((*state.buffers, *state.fingerprint), (*new.buffers, *new.fingerprint), strict=True):
            old.copy_(now)
    for change in (lambda: None, lambda: params["head"].A.mul_(2), lambda: params["blocks"][0]["mlp"][0].B[3, 4].add_(1)):
        change()
        graph.replay()
        want = dora_norm_tree(weights, params, s=S, backend=backend)
        assert all(map(torch.equal, optree.tree_leaves(state.c), optree.tree_leaves(want)))
        right = [b.clone() for b in state.buffers]
        for b in state.buffers:
            b.add_(1)
        poison = [c.clone() for c in optree.tree_leaves(state.c)]  # not the buffers: nobody writes what lies between
        graph.replay()
        assert all(map(torch.equal, optree.tree_leaves(state.c), poison))
        for b, before in zip(state.buffers, right, strict=True):
            b.copy_(before)


def other_codes_are_seen(backend, dtype):
    """Though all else lies where it lay. 8 bits are in one buffer with dense weights."""
    dtype = torch.float32 if dtype == torch.float64 else dtype  # codes for float64 go by themselves
    each = [tensors(128, 384, 16, dtype=dtype, seed=i) for i in range(3)]
    weights, params = [t["W"] for t in each], [(t["A"], t["B"]) for t in each]
    narrow, fp8 = (quantize(weights[0], "fp8", block=block) for block in ((32, 32), (128, 128)))
    codes, scales = fp8.tensors
    twice = from_fp8(codes, 2 * scales, (128, 128), dtype=dtype)
    weights[1] = quantize(weights[1], "nf4")
    for first in (fp8, twice, narrow):  # tiles of the last have several scales, so that it goes by itself
        weights[0] = first
        assert len(dora_norm_tree_state(weights).buffers) == 2
        for W, p, c in zip(weights, params, dora_norm_tree(weights, params, s=S, backend=backend), strict=True):
            dense = W if isinstance(W, torch.Tensor) else W.dequantize(torch.float64)
            torch.testing.assert_close(c.double(), reference.norm(dense, *p, S), rtol=4e-7, atol=0)


CHECKS = [
    one_leaf_and_none,
    only_what_changed_is_computed,
    an_optimizer_step_is_seen,
    two_leaves_share_a_weight,
    factors_that_trade_places_are_not_taken_for_each_other,
    starts_and_merges,
    other_codes_are_seen,
    errors_name_the_leaf,
    traced_and_mapped,
    a_captured_graph_decides_on_the_gpu,
]
