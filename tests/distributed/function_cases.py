"""Two processes: every function on DTensors of one mesh dimension, against one process."""

import itertools
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from fdora import FdoraError
from fdora.functional import (
    DoraLayer,
    ShardNormState,
    _sharded_tree,
    dora_base_sqnorm,
    dora_compose,
    dora_delta,
    dora_init,
    dora_init_tree,
    dora_linear,
    dora_linear_group,
    dora_merge,
    dora_merge_tree,
    dora_mlp,
    dora_norm,
    dora_norm_state,
    dora_norm_tree,
    dora_norm_tree_state,
    dora_scale,
    dora_unmerge,
)
from tests import reference
from tests.close import assert_exact
from tests.distributed import programs
from tests.distributed.lay import DEVICE, GIVES, LAYER, Collectives, P, R, S, check, full, laid, made, mesh, put, random
from tests.distributed.world import run


def norm_truth(t):
    return reference.norm(t["W"], t["A"], t["B"], t["s"])


def columns(t, *names, dim=1):
    """This process's columns."""
    part = {n: t[n].chunk(dist.get_world_size(), dim)[dist.get_rank()] for n in names}
    return t | part


# plain tensors, group=


def case_norm_of_columns():
    t = made(N=6, K=9, r=3)
    mine = columns(t, "W", "A")
    for group in (dist.group.WORLD, mesh(2)):
        with Collectives() as seen:
            c = dora_norm(mine["W"], mine["A"], mine["B"], s=t["s"], group=group)
        assert seen.count == {"all_reduce": 1}
        assert_exact(c, norm_truth(t))
    base = dora_base_sqnorm(mine["W"])
    assert_exact(dora_norm(mine["W"], mine["A"], mine["B"], s=t["s"], base_sqnorm=base, group=mesh(2)), norm_truth(t))
    rows = columns(t, "W", "B", dim=0)
    c = dora_norm(rows["W"], t["A"], rows["B"], s=t["s"], norm_axis=0, group=mesh(2))
    assert_exact(c, dora_norm(t["W"], t["A"], t["B"], s=t["s"], norm_axis=0))


def case_gradient_of_the_norm_of_columns():
    """The sum of what the processes make of c is differentiated: each uses c in its own way."""
    t = made(N=6, K=9, r=3)
    ways = [
        torch.linspace(1, 2, 6, dtype=torch.float64, device=DEVICE),
        torch.linspace(-1, 3, 6, dtype=torch.float64, device=DEVICE),
    ]
    A, B = (t[n].clone().requires_grad_() for n in "AB")
    c = (t["W"] + t["s"] * B @ A).norm(dim=1)
    want = torch.autograd.grad((c * (ways[0] + ways[1])).sum(), (A, B))
    mine = columns(t, "W", "A")
    a, b = (mine[n].clone().requires_grad_() for n in "AB")
    c = dora_norm(mine["W"], a, b, s=t["s"], detach=False, group=mesh(2))
    (c * ways[dist.get_rank()]).sum().backward()
    dist.all_reduce(b.grad)
    assert_exact(a.grad, columns({"A": want[0]}, "A")["A"])
    assert_exact(b.grad, want[1])


def case_state_of_columns():
    """A changes on one process alone: no other one waits for it, and all have the new norm."""
    t = made(N=6, K=8, r=3)
    mine = columns(t, "W", "A")
    state = dora_norm_state(mine["W"])
    for step in range(4):
        if step == 2 and dist.get_rank() == 1:
            mine["A"] = mine["A"] * 1.5
        before = state
        with Collectives() as seen:
            state = dora_norm(mine["W"], mine["A"], mine["B"], s=t["s"], state=state, group=mesh(2))
        assert seen.count == {"all_reduce": 1} and isinstance(state, ShardNormState)
        reused = torch.equal(before.fingerprint, state.fingerprint)
        assert reused == (step == 1 or step == 3 or (step == 2 and dist.get_rank() == 0)), step
        t["A"][:, 4:] *= 1.5 if step == 2 else 1
        assert_exact(state.c, norm_truth(t))
    poisoned = state._replace(part=state.part * 0 + 2)  # what is reused is the part
    c = dora_norm(mine["W"], mine["A"], mine["B"], s=t["s"], state=poisoned, group=mesh(2)).c
    assert_exact(c, torch.full_like(c, 8**0.5))


def case_compiled_norm_of_columns():
    t = made(N=6, K=8, r=3)
    mine = columns(t, "W", "A")
    group = mesh(2)

    def both(W, A, B, state):
        c = dora_norm(W, A, B, s=0.7, detach=False, group=group)
        return c, dora_norm(W, A, B, s=0.7, state=state, group=group).c

    a = mine["A"].clone().requires_grad_()
    args = mine["W"], a, mine["B"], dora_norm_state(mine["W"])
    got = torch.compile(both, fullgraph=True, backend="aot_eager")(*args)
    assert_exact(got[0].detach(), norm_truth(t))
    assert_exact(got[1], norm_truth(t))
    got[0].sum().backward()
    want, a.grad = a.grad, None
    both(*args)[0].sum().backward()
    assert_exact(a.grad, want)


# one layer


def linear(x, W, A, B, m, bias=None, norm=None, **options):
    return dora_linear(x, W, A, B, m, s=0.7, bias=bias, norm=norm, **options)


def of_a_layer(*without, **sizes):
    return {n: v for n, v in made(**sizes).items() if n not in ("s", *without)}


def compiled(fn):
    torch._dynamo.reset()
    return torch.compile(fn, fullgraph=True, backend="aot_eager")


MASKS = [
    {"dropout_p": 0.4, "dropout_mode": mode, "seed": 11, **at}
    for mode in ("lora", "peft")
    for at in ({}, {"mask_origin": (3, 2)})
]
SIZES = [dict(N=6, K=8, r=3), dict(N=7, K=5, r=2, lead=(5,)), dict(N=7, K=9, r=3, lead=(6,)), dict(N=1, K=1, r=2, lead=(1,))]


def case_layers():
    """The table of docs/distributed.md: results, gradients, where they lie, and the collectives; masks are those of one process."""
    for way, sizes, options in itertools.product(LAYER, SIZES, ({}, {"keep_inner": True}, *MASKS)):
        of = (*GIVES[way][:2], None) if options or sizes["N"] == 1 else GIVES[way]
        check(partial(linear, **options), of_a_layer(**sizes), LAYER[way], *of, what=f"{way} {sizes} {options}")
    for way, (out, gradients, count) in GIVES.items():
        t, lies = of_a_layer("bias", N=6, K=8, r=3), LAYER[way]
        check(linear, t, lies, P if way == "row" else out, gradients, count and 1, what=way)
        t["norm"] = dora_norm(t["W"], t["A"], t["B"], s=0.7)
        check(linear, t | {"bias": random(6)}, lies, out, gradients, min(count, 1), what=f"{way}, norm given")


def case_plain_tensors_among_dtensors():
    """They count as replicated, and their gradient is whole: PEFT's lora_A is one."""
    for way, plain in (("col", "xA"), ("row", ["B", "m", "bias"]), ("data", ["A", "B", "m", "bias"])):
        check(linear, of_a_layer(N=6, K=8, r=3), LAYER[way] | dict.fromkeys(plain), what=way)


def case_gradients_through_norms():
    def own_norm(x, W, A, B, m):
        norm = dora_norm(W, A, B, s=0.7, detach=False)
        assert not isinstance(W, DTensor) or norm.placements[0] in (W.placements[0], R)
        return norm, linear(x, W, A, B, m, norm=norm)

    for way in LAYER:
        check(own_norm, of_a_layer("bias", N=7, K=9, r=3), LAYER[way], what=way)


def case_masks_of_other_axes():
    where, t = mesh(2), made(N=6, K=8, lead=(2, 3))
    l = laid(t, where, ["data"])  # the first of three axes
    y = dora_linear(*(l[n] for n in "xWABm"), s=t["s"], dropout_p=0.4, seed=1)
    assert_exact(full(y).detach(), dora_linear(*(t[n] for n in "xWABm"), s=t["s"], dropout_p=0.4, seed=1))
    cut = l | {"x": distribute_tensor(t["x"], where, [Shard(1)])}
    y = dora_linear(*(cut[n] for n in "xWABm"), s=t["s"])
    assert_exact(full(y).detach(), dora_linear(*(t[n] for n in "xWABm"), s=t["s"]))
    with pytest.raises(FdoraError, match="`x` must be cut along its first axis for dropout"):
        dora_linear(*(cut[n] for n in "xWABm"), s=t["s"], dropout_p=0.4, seed=1)


def case_half_precision():
    """Each process rounds its y once; sums of rounded ones lose no more than twice what one process does."""
    where, t = mesh(2), made(N=32, K=64, r=4, lead=(16,), dtype=torch.bfloat16, adapter=torch.float32)
    truth = reference.dora(*(t[n] for n in "xWABm"), t["s"], t["bias"])
    one = (dora_linear(*(t[n] for n in "xWABm"), s=t["s"], bias=t["bias"]) - truth).abs().max()
    for way in LAYER:
        l = laid(t, where, [way])
        y = dora_linear(*(l[n] for n in "xWABm"), s=t["s"], bias=l["bias"])
        assert y.dtype == torch.bfloat16 and (full(y) - truth).abs().max() <= 3 * one, way


# several layers


def several(lead, *layers, seed=0):
    """x, and W0, A0 and so on of layers of these sizes."""
    found = {"x": random(*lead, layers[0]["K"], seed=seed)}
    for i, sizes in enumerate(layers):
        found |= {f"{n}{i}": v for n, v in of_a_layer("x", **sizes, seed=i).items()}
    return found


def members(t, count):
    return [DoraLayer(t[f"W{i}"], *(t.get(f"{n}{i}") for n in "ABm"), 0.7, t[f"bias{i}"]) for i in range(count)]


def lying(t, *ways):
    return {n: LAYER[ways[int(n[-1])]][n[:-1]] if n[-1].isdigit() else LAYER[ways[0]][n] for n in t}


def group(x, seed=None, **t):
    more = {} if seed is None else {"dropout_p": 0.3, "seed": seed}
    first, second, third = members(t, 3)
    return dora_linear_group(x, [first, second, third if third.A is not None else DoraLayer(third.W, bias=third.bias)], **more)


def mlp(x, mode=None, **t):
    return dora_mlp(x, *members(t, 3), **({} if mode is None else {"dropout_p": 0.3, "dropout_mode": mode, "seed": [1, 2, 3]}))


MLP = {"tp": ("col", "col", "row"), "data": ("data",) * 3, "same": ("same",) * 3}


def case_groups():
    t = several((4,), *(dict(N=n, K=8, r=r) for n, r in ((6, 2), (3, 4), (5, 1))))
    t = {n: v for n, v in t.items() if n not in ("A2", "B2", "m2")}
    for way, seed in itertools.product(LAYER, (None, [1, 2, 3])):
        check(partial(group, seed=seed), t, lying(t, way, way, way), GIVES[way][0], what=way)


def case_mlp():
    t = several((4,), dict(N=7, K=8), dict(N=7, K=8, r=3), dict(N=5, K=7))
    for (kind, ways), mode in itertools.product(MLP.items(), (None, "lora", "peft")):  # tp: down's norm, y
        check(partial(mlp, mode=mode), t, lying(t, *ways), GIVES[ways[2]][0], None, GIVES[ways[2]][2], what=kind)


def case_compiled_layers():
    for way in ("col", "row"):
        check(linear, of_a_layer(N=6, K=8, r=3), LAYER[way], GIVES[way][0], run=compiled(linear), what=way)
    t, fn = several((4,), dict(N=7, K=8), dict(N=7, K=8, r=3), dict(N=8, K=7)), partial(mlp, mode="lora")
    check(fn, t, lying(t, *MLP["tp"]), R, run=compiled(fn))


def case_compiled_functions():
    """Several layers, the norm, the merge and compose, in one graph each."""

    def layers(x, W, A, B, m, bias):
        c = dora_norm(W, A, B, s=0.7)
        return *dora_linear_group(x, [DoraLayer(W, A, B, m, 0.7, bias, c), DoraLayer(W, A, B, m, 0.7)]), dora_scale(m, c)

    def weights(W, A, B, m):
        return dora_merge(W, A.detach(), B.detach(), m.detach(), s=0.7)

    def composed(base, lora, g):
        return dora_compose(base, lora, g, s=0.7)

    t = of_a_layer(N=6, K=8, r=3)
    for way in ("col", "row", "data"):
        check(layers, t, LAYER[way], run=compiled(layers), what=way)
    for way in ("col", "row"):
        check(weights, {n: t[n] for n in "WABm"}, LAYER[way], LAYER[way]["W"], trained=(), run=compiled(weights), what=way)
    t = {"base": random(4, 8), "lora": random(4, 8, seed=1), "g": random(8, seed=2)}
    check(composed, t, dict(base=S(0), lora=S(0), g=R), S(0), trained=t, run=compiled(composed))


# functions of the weight


def case_weights_as_fsdp_keeps_them():
    """Every parameter cut along its first axis: A is gathered, nothing else."""
    where, t = mesh(2), made(N=7, K=8, r=3)
    l = {n: distribute_tensor(v, where, [Shard(0)]) if n in "WABm" else v for n, v in t.items()}
    with Collectives() as seen:
        c = dora_norm(l["W"], l["A"], l["B"], s=t["s"])
    assert sum(seen.count.values()) == 1, seen.count
    assert c.placements == (Shard(0),) and torch.equal(full(c), dora_norm(t["W"], t["A"], t["B"], s=t["s"]))
    assert_exact(full(dora_merge(*(l[n] for n in "WABm"), s=t["s"])), dora_merge(*(t[n] for n in "WABm"), s=t["s"]))


def case_norms_merges_and_starts():
    where, t = mesh(2), made(N=7, K=9, r=3)
    c = dora_norm(t["W"], t["A"], t["B"], s=t["s"])
    merged = dora_merge(*(t[n] for n in "WABm"), s=t["s"])
    for way in ("col", "row", "same"):
        l = {n: v.detach() if isinstance(v, DTensor) else v for n, v in laid(t, where, [way]).items()}
        W, A, B, m = (l[n] for n in "WABm")
        base = dora_base_sqnorm(W)
        assert_exact(full(base), dora_base_sqnorm(t["W"]))
        got = dora_norm(W, A, B, s=t["s"], base_sqnorm=base)
        assert got.shape == (7,) and got.placements == (LAYER[way]["norm"],)
        assert_exact(full(got), c)
        assert_exact(full(dora_norm(W, A, B, s=t["s"], squared=True)), c**2)
        assert_exact(full(dora_norm(W, A, B, s=t["s"], norm_axis=0)), dora_norm(t["W"], t["A"], t["B"], s=t["s"], norm_axis=0))
        assert_exact(full(dora_norm(W, t["A"], t["B"], s=t["s"])), c)  # any A and B
        state = dora_norm_state(W)
        for _ in range(2):
            state = dora_norm(W, A, B, s=t["s"], state=state)
            assert_exact(full(state.c), c)
        W1 = dora_merge(W, A, B, m, s=t["s"])
        assert W1.placements == W.placements and W1.shape == (7, 9)
        assert_exact(full(W1), merged)
        g = dora_scale(m, got)
        assert g.placements == m.placements
        assert_exact(full(g), dora_scale(t["m"], c))
        assert_exact(full(dora_unmerge(W1, A, B, m, s=t["s"], norm=got)), t["W"])

        start = dora_init(
            W, 3, generator=torch.Generator(DEVICE).manual_seed(dist.get_rank())
        )  # the first process's A everywhere
        want = dora_init(t["W"], 3, generator=torch.Generator(DEVICE).manual_seed(0))
        assert [p.placements[0] for p in start] == [LAYER[way][n] for n in "ABm"]
        for a, b in zip(start, want, strict=True):
            assert_exact(full(a), b)


def case_trees_as_fsdp_keeps_them():
    """All norms with one all-gather of A, one of c: no weight is sent. Uneven shards and empty ones; and a plain leaf."""
    where = mesh(2)
    ts = {f"{i}": made(N=n, K=8, r=r, seed=i) for i, (n, r) in enumerate(((6, 4), (7, 3), (1, 1), (33, 2)))}
    cut = {i: {n: distribute_tensor(t[n], where, [Shard(0)]) for n in "WAB"} for i, t in ts.items()}
    plain = {n: ts["0"][n] for n in "WAB"}
    weights = {i: l["W"] for i, l in cut.items()} | {"plain": plain["W"]}
    params = {i: (l["A"], l["B"]) for i, l in cut.items()} | {"plain": (plain["A"], plain["B"])}
    want = {i: dora_norm(t["W"], t["A"], t["B"], s=0.7) for i, t in ts.items()}
    with Collectives() as seen:
        c = dora_norm_tree(weights, params, s=0.7)
    assert sum(seen.count.values()) == 1, seen.count
    for i, v in want.items():
        assert c[i].placements == (Shard(0),) and torch.equal(full(c[i]), v), i
    with Collectives() as seen:
        c = dora_norm_tree(weights, params, s=0.7, gather=True)
    assert sum(seen.count.values()) == 2, seen.count
    for i, v in want.items():
        assert type(c[i]) is torch.Tensor and torch.equal(c[i], v), i
    assert torch.equal(c["plain"], want["0"])
    state = dora_norm_tree_state(weights)
    for _ in range(2):
        with Collectives() as seen:
            state = dora_norm_tree(weights, params, s=0.7, state=state, gather=True)
        assert sum(seen.count.values()) == 2
        assert all(torch.equal(state.c[i], v) for i, v in want.items())
    poisoned = state._replace(buffers=tuple(b * 0 + 5 for b in state.buffers))
    assert (dora_norm_tree(weights, params, s=0.7, state=poisoned, gather=True).c["1"] == 5).all()
    merged = dora_merge_tree(weights, {i: (*p, want.get(i, want["0"])) for i, p in params.items()}, s=0.7)
    for i, v in ts.items():
        assert_exact(full(merged[i]), v["W"] + 0.7 * v["B"] @ v["A"])


def of_one_process(ts, s):
    """Its kernels take all layers at once, and may add in another order than those of one layer."""
    return dora_norm_tree({i: t["W"] for i, t in ts.items()}, {i: (t["A"], t["B"]) for i, t in ts.items()}, s=s)


def case_trees_in_even_rows():
    """What FSDP2 keeps of most models, by a plan: the bits of one process, two collectives, whatever lies where; and errors."""
    where = mesh(2)
    for dtype in (torch.float64, torch.float32):
        # A GPU's float64 products come from cuBLAS, whose order of sums depends on how many rows there are.
        same = torch.equal if DEVICE == "cpu" or dtype == torch.float32 else partial(torch.allclose, rtol=1e-13, atol=0)
        ts = {f"{i}": made(N=n, K=8 + i, r=r, seed=i) for i, (n, r) in enumerate(((6, 4), (64, 2), (2, 6), (34, 2)))}
        ts = {i: {n: t[n].to(dtype) for n in "WAB"} for i, t in ts.items()}
        s = {i: 0.7 if dtype == torch.float64 else 0.5 + int(i) for i in ts}
        cut = {i: {n: distribute_tensor(t[n], where, [Shard(0)]) for n in "WAB"} for i, t in ts.items()}
        weights, params = {i: l["W"] for i, l in cut.items()}, {i: (l["A"], l["B"]) for i, l in cut.items()}
        for most in (1 << 27, 200):  # bytes of A at a time
            _sharded_tree._plans.clear()
            _sharded_tree.MOST, before = most, _sharded_tree.MOST
            want = of_one_process(ts, s)
            state = dora_norm_tree_state(weights)
            for _ in range(3):
                with Collectives() as seen:
                    c = dora_norm_tree(weights, params, s=s, gather=True)
                    state = dora_norm_tree(weights, params, s=s, state=state, gather=True)
                runs = len(_sharded_tree._plans[0][1].runs)
                assert len(_sharded_tree._plans) == 1 and runs == (1 if most > 200 else 3 + (dtype == torch.float64))
                assert sum(seen.count.values()) == 2 * (runs + 1), seen.count
                assert all(same(c[i], v) and torch.equal(state.c[i], c[i]) for i, v in want.items())
                kept = torch.cat([torch.ones(1 << 16, device=DEVICE) for _ in range(2)])  # what is gathered next lies elsewhere
            poisoned = state._replace(buffers=tuple(b * 0 + 5 for b in state.buffers))
            with torch.no_grad():
                cut["1"]["B"].to_local().mul_(2)
            c = dora_norm_tree(weights, params, s=s, state=poisoned, gather=True).c
            want = of_one_process(ts | {"1": ts["1"] | {"B": 2 * ts["1"]["B"]}}, s)["1"]
            assert same(c["1"], want) and all((c[i] == 5).all() for i in "023")
            with torch.no_grad():
                cut["1"]["B"].to_local().div_(2)
            _sharded_tree.MOST = before
            del kept
    with pytest.raises(FdoraError, match="`state` must"):
        dora_norm_tree(weights, params, s=s, state=dora_norm_tree_state({"0": weights["0"]}), gather=True)
    with pytest.raises(FdoraError, match=r"of leaf weights\['1'\]"):
        dora_norm_tree(weights, params | {"1": params["0"]}, s=s, gather=True)


def case_trees_of_tensor_parallel_weights():
    """Squares of all cut rows in one all-reduce."""
    where = mesh(2)
    ts = {f"{i}": made(N=6 + i, K=9, r=2, seed=i) for i in range(4)}
    ways = dict(zip(ts, ("col", "row", "row", "same"), strict=True))
    l = {i: {n: v.detach() for n, v in laid({n: t[n] for n in "WAB"}, where, [ways[i]]).items()} for i, t in ts.items()}
    weights, params = {i: v["W"] for i, v in l.items()}, {i: (v["A"], v["B"]) for i, v in l.items()}
    for gather, count in ((False, 1), (True, 2)):
        with Collectives() as seen:
            c = dora_norm_tree(weights, params, s=0.7, gather=gather)
        assert sum(seen.count.values()) == count, seen.count
        for i, t in ts.items():
            assert_exact(full(c[i]), norm_truth(t))
            assert gather or c[i].placements == (LAYER[ways[i]]["norm"],)
    start = dora_init_tree(weights, 3)
    assert {i: p.A.placements[0] for i, p in start.items()} == {i: LAYER[way]["A"] for i, way in ways.items()}


def case_compose():
    def both(base, lora, g, bias):
        return dora_compose(base, lora, g, s=0.7, bias=bias), dora_delta(base, lora, g, s=0.7)

    t = {"base": random(4, 7), "lora": random(4, 7, seed=1), "g": random(7, seed=2), "bias": random(7, seed=3)}
    for tokens, vector, out in ((S(1), S(0), S(1)), (S(0), R, S(0)), (R, R, R), (P, R, R)):
        lies = dict(base=tokens, lora=tokens, g=vector, bias=vector)
        check(both, t, lies, None if tokens == P else out, trained=t, what=f"{tokens}")
        y = dora_compose(
            *(put(v, mesh(2), lies[n]) for n, v in t.items() if n != "bias"), s=0.7, bias=put(t["bias"], mesh(2), vector)
        )
        assert y.placements == (out,)


def case_program_tp():
    programs.check(programs.inside("tp"), programs.inside("one"), 1, 0)


# what is refused


def dora_layer(l):
    return DoraLayer(*(l[n] for n in "WABm"), 0.7, l["bias"])


def case_errors():
    where, t = mesh(2), made(N=6, K=8, r=3)

    def call(way, fn=dora_linear, **change):
        l = laid(t, where, [way]) | change
        return dora_linear(
            *(l[n] for n in "xWABm"), s=t["s"], bias=l["bias"], **{k: v for k, v in change.items() if k not in t}
        )

    cut = lambda v, i: distribute_tensor(v.detach(), where, [Shard(i)])  # noqa: E731
    refused = {
        r"`x` must be \S*R\S* on mesh dimension tp, on which W is S\(0\), got S\(0\). Redistribute it; if W is what FSDP": dict(
            way="col", x=cut(t["x"], 0)
        ),
        r"`B` must be .*got a plain tensor, which counts as R. Wrap each process's part": dict(way="col", B=t["B"]),
        r"`A` must be .*, got S\(0\). Redistribute it.": dict(way="row", A=cut(t["A"], 0)),
        r"`W` must be Replicate, Shard\(0\) or Shard\(1\) on mesh dimension tp, got P": dict(
            way="same", W=DTensor.from_local(t["W"], where, [Partial()])
        ),
        r"`seed` must be given, the same in every process": dict(way="col", dropout_p=0.5),
        r"`W` must be frozen": dict(way="col", W=cut(t["W"], 0).requires_grad_()),
        r"`m` must be on DeviceMesh": dict(way="col", m=distribute_tensor(t["m"], mesh(1, 2), [R, Shard(0)])),
    }
    for text, options in refused.items():
        with pytest.raises(FdoraError, match=text):
            call(**options)
    with pytest.raises(FdoraError, match="`group` must be None for DTensors"):
        dora_norm(cut(t["W"], 0), t["A"], cut(t["B"], 0), s=1.0, group=where)
    for group, have in ((7, "a int"), (mesh(1, 2), "a mesh of 2 dimensions")):
        with pytest.raises(FdoraError, match=f"`group` must be a ProcessGroup or a DeviceMesh of one dimension, got {have}"):
            dora_norm(t["W"], t["A"], t["B"], s=1.0, group=group)
    with pytest.raises(
        FdoraError, match="`squared` must be False with a state, a group or detach=False, got True with a group"
    ):
        dora_norm(t["W"], t["A"], t["B"], s=1.0, group=where, squared=True)
    state = dora_norm(t["W"], t["A"], t["B"], s=1.0, state=dora_norm_state(t["W"]), group=where)
    with pytest.raises(FdoraError, match="`state` must be a NormState without a group, got a ShardNormState"):
        dora_norm(t["W"], t["A"], t["B"], s=1.0, state=state)
    with pytest.raises(FdoraError, match="`m` must be cut as c is"):
        dora_scale(t["m"], cut(t["m"], 0))
    a, b = laid(t, where, ["col"]), laid(t, where, ["same"])
    one = [dora_layer(l) for l in (a, b)]
    with pytest.raises(FdoraError, match=r"layers\[1\]: `W` must be .*, as in layers\[0\]"):
        dora_linear_group(a["x"], one)
    square = laid(made(N=8, K=8, r=3), where, ["same"])
    with pytest.raises(FdoraError, match=r"dora_mlp: `gate.W` must be Shard\(0\) where down's is Shard\(1\)"):
        dora_mlp(a["x"], one[0], one[0], dora_layer(square))


if __name__ == "__main__":
    run(globals())
