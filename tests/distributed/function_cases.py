"""Two processes: every function on DTensors of one mesh dimension, against one process."""

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Partial, Shard, distribute_tensor

from fdora import FdoraError
from fdora.functional import (
    DoraLayer,
    ShardNormState,
    _sharded_rows,
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
from tests.distributed.lay import DEVICE, LAYER, TRAINED, Collectives, R, full, laid, made, mesh
from tests.distributed.programs import check, inside
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


def step(t, dy, ways=None, where=None, **options):
    """y and the gradients of what is trained, whole; DTensors if ways are given."""
    t = t if ways is None else laid(t, where, ways)
    leaves = {n: t[n] if ways else t[n].detach().clone().requires_grad_() for n in TRAINED}
    args = t | leaves
    y = dora_linear(args["x"], t["W"], args["A"], args["B"], args["m"], s=t["s"], bias=args["bias"], **options)
    (full(y) * dy).sum().backward()
    return y, {n: v.grad for n, v in leaves.items()}


def check_layer(t, way, where, **options):
    dy = torch.randn_like(t["x"][:, :1] * t["m"])
    want, wanted = step(t, dy, **options)
    got, grads = step(t, dy, [way], where, **options)
    assert_exact(full(got).detach(), want.detach(), way)
    for n in TRAINED:
        assert_exact(full(grads[n]), wanted[n], f"{way}: gradient of {n}")
    return got, grads


def case_layers():
    where = mesh(2)
    for way in LAYER:
        for sizes in (dict(N=6, K=8, r=3), dict(N=7, K=5, r=2, lead=(5,)), dict(N=1, K=1, r=2, lead=(1,))):
            check_layer(made(**sizes), way, where)
            check_layer(made(**sizes), way, where, keep_inner=True)


def case_layers_lie_as_the_table_says():
    where, t = mesh(2), made(N=6, K=8, r=3)
    P = Partial()
    want = {
        "col": (Shard(1), dict(x=P, A=P, B=Shard(0), m=Shard(0), bias=Shard(0))),
        "row": (R, dict(x=Shard(1), A=Shard(1), B=P, m=P, bias=R)),
        "data": (Shard(0), dict(x=Shard(0), A=P, B=P, m=P, bias=P)),
        "same": (R, dict(x=R, A=R, B=R, m=R, bias=R)),
    }
    for way, (out, gradients) in want.items():
        y, grads = check_layer(t, way, where)
        assert y.placements == (out,), way
        assert {n: g.placements[0] for n, g in grads.items()} == gradients, way
        l = laid(t, where, [way])
        y = dora_linear(*(l[n] for n in "xWABm"), s=t["s"])
        assert y.placements == (P if way == "row" else out,) and y.shape == (4, 6)


def case_collectives_of_a_layer():
    """None that docs/distributed.md does not list."""
    where, t = mesh(2), made(N=6, K=8, r=3)
    dy = torch.randn(4, 6, dtype=torch.float64, device=DEVICE)
    forward = {"col": 0, "row": 2, "data": 0, "same": 0}  # row: the norm and y
    for way in LAYER:
        l = laid(t, where, [way])
        args = [l[n] for n in "xWABm"]
        c = dora_norm(*args[1:4], s=t["s"])
        for norm, count in ((None, forward[way]), (c, min(forward[way], 1))):
            with Collectives() as seen:
                y = dora_linear(*args, s=t["s"], bias=l["bias"], norm=norm)
            assert sum(seen.count.values()) == count, (way, seen.count)
            d = distribute_tensor(dy, where, y.placements)
            with Collectives() as seen:
                y.backward(d)
            assert not seen.count, (way, seen.count)


def case_plain_tensors_among_dtensors():
    """They count as replicated, and their gradient is whole: PEFT's lora_A is one."""
    where, t = mesh(2), made(N=6, K=8, r=3)
    dy = torch.randn(4, 6, dtype=torch.float64, device=DEVICE)
    _, wanted = step(t, dy)
    for way, plain in (("col", "xA"), ("row", ["B", "m", "bias"]), ("data", ["A", "B", "m", "bias"])):
        l = laid(t, where, [way]) | {n: t[n].detach().clone().requires_grad_() for n in plain}
        y = dora_linear(*(l[n] for n in "xWABm"), s=t["s"], bias=l["bias"])
        (full(y) * dy).sum().backward()
        for n in TRAINED:
            assert not isinstance(l[n].grad, DTensor) or n not in plain
            assert_exact(full(l[n].grad), wanted[n], f"{way} {n}")


def case_given_norms_and_their_gradients():
    where, t = mesh(2), made(N=7, K=9, r=3)
    dy = torch.randn(4, 7, dtype=torch.float64, device=DEVICE)

    def loss(t, y):
        return (full(y) * dy).sum()

    A, B = (t[n].clone().requires_grad_() for n in "AB")
    c = dora_norm(t["W"], A, B, s=t["s"], detach=False)
    loss(t, dora_linear(t["x"], t["W"], A, B, t["m"], s=t["s"], norm=c)).backward()
    for way in LAYER:
        l = laid(t, where, [way])
        norm = dora_norm(l["W"], l["A"], l["B"], s=t["s"], detach=False)
        assert norm.placements == (LAYER[way]["norm"],)
        assert_exact(full(norm).detach(), c.detach())
        loss(l, dora_linear(*(l[n] for n in "xWABm"), s=t["s"], norm=norm)).backward()
        assert_exact(full(l["A"].grad), A.grad, way)
        assert_exact(full(l["B"].grad), B.grad, way)


def case_masks_are_those_of_one_process():
    where = mesh(2)
    for mode in ("lora", "peft"):
        for way in LAYER:
            check_layer(made(N=7, K=9, r=3, lead=(6,)), way, where, dropout_p=0.4, dropout_mode=mode, seed=11)
            check_layer(made(N=4, K=6), way, where, dropout_p=0.4, dropout_mode=mode, seed=11, mask_origin=(3, 2))
    t = made(N=6, K=8, lead=(2, 3))
    l = laid(t, where, ["data"])  # the first of three axes
    y = dora_linear(*(l[n] for n in "xWABm"), s=t["s"], dropout_p=0.4, seed=1)
    assert_exact(full(y).detach(), dora_linear(*(t[n] for n in "xWABm"), s=t["s"], dropout_p=0.4, seed=1))
    cut = l | {"x": distribute_tensor(t["x"], where, [Shard(1)])}
    assert_exact(
        full(dora_linear(*(cut[n] for n in "xWABm"), s=t["s"])).detach(), dora_linear(*(t[n] for n in "xWABm"), s=t["s"])
    )
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


def case_compiled_layers():
    where, t = mesh(2), made(N=6, K=8, r=3)

    def f(x, W, A, B, m, bias):
        return dora_linear(x, W, A, B, m, s=0.7, bias=bias)

    for way in ("col", "row"):
        torch._dynamo.reset()
        l, again = laid(t, where, [way]), laid(t, where, [way])
        names = ("x", "W", "A", "B", "m", "bias")
        y = torch.compile(f, fullgraph=True, backend="aot_eager")(*(l[n] for n in names))
        want = f(*(again[n] for n in names))
        assert y.placements == want.placements
        for v in (y, want):
            (full(v) ** 2).sum().backward()
        assert_exact(full(y).detach(), full(want).detach(), way)
        for n in TRAINED:
            assert_exact(full(l[n].grad), full(again[n].grad), f"{way} {n}")


def case_compiled_mlp():
    where, x = mesh(2), made(N=6, K=8, lead=(4,))["x"]
    sizes = dict(N=7, K=8), dict(N=7, K=8, r=3), dict(N=8, K=7)
    plain = [layer({}, each, i) for i, each in enumerate(sizes)]
    torch._dynamo.reset()

    def f(x, gate, up, down):
        return dora_mlp(x, *map(dora_layer, (gate, up, down)), dropout_p=0.3, seed=[1, 2, 3])

    found = []
    for g in (f, torch.compile(f, fullgraph=True, backend="aot_eager")):
        lays = [laid(l, where, [way]) for l, way in zip(plain, MLP["tp"], strict=True)]
        x1 = laid({"x": x}, where, ["col"])["x"]
        y = g(x1, *lays)
        (full(y) ** 2).sum().backward()
        found.append([full(y).detach(), *(full(v.grad) for v in (x1, *trained(lays)))])
    for a, b in zip(*found, strict=True):
        assert_exact(a, b)


def case_compiled_functions():
    """Several layers, the norm, the merge and compose, in one graph each."""
    where, t = mesh(2), made(N=6, K=8, r=3)

    def layers(x, W, A, B, m, bias):
        c = dora_norm(W, A, B, s=0.7)
        y, z = dora_linear_group(x, [DoraLayer(W, A, B, m, 0.7, bias, c), DoraLayer(W, A, B, m, 0.7)])
        return y, z, dora_scale(m, c)

    def weights(x, W, A, B, m, bias):
        return (dora_merge(W, A.detach(), B.detach(), m.detach(), s=0.7),)

    def composed(x, W, A, B, m, bias):
        return (dora_compose(x, x * 2, W[0], s=0.7),)

    def sums(ys):
        return [(full(y) ** 2).sum() for y in ys]

    names = ("x", "W", "A", "B", "m", "bias")
    for way in ("col", "row", "data"):
        torch._dynamo.reset()
        l = laid(t, where, [way])
        args, trained = [l[n] for n in names], [l[n] for n in TRAINED]
        for f in (layers, weights) if way != "data" else (layers, composed):
            got, want = torch.compile(f, fullgraph=True, backend="aot_eager")(*args), f(*args)
            for a, b in zip(got, want, strict=True):
                assert a.placements == b.placements
                assert_exact(full(a).detach(), full(b).detach(), f"{way} {f.__name__}")
            if f is layers:
                for n, a, b in zip(
                    TRAINED, *(torch.autograd.grad(sum(ys), trained) for ys in (sums(got), sums(want))), strict=True
                ):
                    assert_exact(full(a), full(b), f"{way} {n}")


# several layers


def layer(t, sizes, seed):
    return {n: v for n, v in made(**sizes, seed=seed).items() if n not in ("x", "s")}


def dora_layer(l, bias=True):
    return DoraLayer(l["W"], l["A"], l["B"], l["m"], 0.7, l["bias"] if bias else None)


def trained(layers):
    return [l[n] for l in layers for n in TRAINED if n in l]


def leaves(l):
    return {n: v.detach().clone().requires_grad_(n in TRAINED) for n, v in l.items()}


def case_groups():
    where = mesh(2)
    x = made(N=6, K=8, lead=(4,))["x"]
    plain = [leaves(layer({}, dict(N=n, K=8, r=r), i)) for i, (n, r) in enumerate(((6, 2), (3, 4), (5, 1)))]
    for way in LAYER:
        for options in ({}, dict(dropout_p=0.3, seed=[1, 2, 3])):
            for v in trained(plain):
                v.grad = None
            x1 = x.clone().requires_grad_()
            frozen = DoraLayer(plain[2]["W"], bias=plain[2]["bias"])
            want = dora_linear_group(x1, [*map(dora_layer, plain[:2]), frozen], **options)
            sum((y**2).sum() for y in want).backward()
            lays = [laid({n: v.detach() for n, v in l.items()}, where, [way]) for l in plain]
            x2 = laid({"x": x}, where, [way])["x"]
            frozen = DoraLayer(lays[2]["W"], bias=lays[2]["bias"])
            got = dora_linear_group(x2, [*map(dora_layer, lays[:2]), frozen], **options)
            sum((full(y) ** 2).sum() for y in got).backward()
            for a, b in zip(got, want, strict=True):
                assert_exact(full(a).detach(), b.detach(), way)
            for a, b in zip([x2, *trained(lays)], [x1, *trained(plain)], strict=True):
                assert (a.grad is None) == (b.grad is None)
                if b.grad is not None:
                    assert_exact(full(a.grad), b.grad, way)


MLP = {"tp": ("col", "col", "row"), "data": ("data",) * 3, "same": ("same",) * 3}


def case_mlp():
    where, F = mesh(2), 7
    x = made(N=6, K=8, lead=(4,))["x"]
    sizes = dict(gate=dict(N=F, K=8), up=dict(N=F, K=8, r=3), down=dict(N=5, K=F))
    plain = [leaves(layer({}, each, i)) for i, each in enumerate(sizes.values())]
    for kind, ways in MLP.items():
        for options in ({}, dict(dropout_p=0.3, seed=[1, 2, 3]), dict(dropout_p=0.3, dropout_mode="peft", seed=[1, 2, 3])):
            for v in trained(plain):
                v.grad = None
            x1 = x.clone().requires_grad_()
            want = dora_mlp(x1, *map(dora_layer, plain), **options)
            (want**2).sum().backward()
            lays = [laid({n: v.detach() for n, v in l.items()}, where, [way]) for l, way in zip(plain, ways, strict=True)]
            x2 = laid({"x": x}, where, [ways[0]])["x"]
            with Collectives() as seen:
                got = dora_mlp(x2, *map(dora_layer, lays), **options)
            assert sum(seen.count.values()) == (2 if kind == "tp" else 0)  # down's norm, y
            (full(got) ** 2).sum().backward()
            assert_exact(full(got).detach(), want.detach(), kind)
            for a, b in zip([x2, *trained(lays)], [x1, *trained(plain)], strict=True):
                assert_exact(full(a.grad), b.grad, kind)


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


def case_trees_in_even_rows():
    """What FSDP2 keeps of most models, by a plan: the bits of one process, two collectives, whatever lies where; and errors."""
    where = mesh(2)
    for dtype in (torch.float64, torch.float32):
        ts = {f"{i}": made(N=n, K=8 + i, r=r, seed=i) for i, (n, r) in enumerate(((6, 4), (64, 2), (2, 6), (34, 2)))}
        ts = {i: {n: t[n].to(dtype) for n in "WAB"} for i, t in ts.items()}
        s = {i: 0.7 if dtype == torch.float64 else 0.5 + int(i) for i in ts}
        cut = {i: {n: distribute_tensor(t[n], where, [Shard(0)]) for n in "WAB"} for i, t in ts.items()}
        weights, params = {i: l["W"] for i, l in cut.items()}, {i: (l["A"], l["B"]) for i, l in cut.items()}
        for most in (1 << 27, 200):  # bytes of A at a time
            _sharded_rows._plans.clear()
            _sharded_rows.MOST, before = most, _sharded_rows.MOST
            want = {i: dora_norm(t["W"], t["A"], t["B"], s=s[i]) for i, t in ts.items()}
            state = dora_norm_tree_state(weights)
            for _ in range(3):
                with Collectives() as seen:
                    c = dora_norm_tree(weights, params, s=s, gather=True)
                    state = dora_norm_tree(weights, params, s=s, state=state, gather=True)
                runs = len(_sharded_rows._plans[0][1].runs)
                assert len(_sharded_rows._plans) == 1 and runs == (1 if most > 200 else 3 + (dtype == torch.float64))
                assert sum(seen.count.values()) == 2 * (runs + 1), seen.count
                assert all(torch.equal(c[i], v) and torch.equal(state.c[i], v) for i, v in want.items())
                kept = torch.cat([torch.ones(1 << 16, device=DEVICE) for _ in range(2)])  # what is gathered next lies elsewhere
            poisoned = state._replace(buffers=tuple(b * 0 + 5 for b in state.buffers))
            with torch.no_grad():
                cut["1"]["B"].to_local().mul_(2)
            c = dora_norm_tree(weights, params, s=s, state=poisoned, gather=True).c
            want = dora_norm(ts["1"]["W"], ts["1"]["A"], 2 * ts["1"]["B"], s=s["1"])
            assert torch.equal(c["1"], want) and all((c[i] == 5).all() for i in "023")
            with torch.no_grad():
                cut["1"]["B"].to_local().div_(2)
            _sharded_rows.MOST = before
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
    where, t = mesh(2), made(N=7, K=5)
    base, lora, bias = torch.randn(4, 7, dtype=torch.float64), torch.randn(4, 7, dtype=torch.float64), t["bias"]
    base, lora, g = base.to(DEVICE), lora.to(DEVICE), t["m"]
    ways = {
        "cols": ((Shard(1), Shard(0)), Shard(1)),
        "data": ((Shard(0), R), Shard(0)),
        "same": ((R, R), R),
        "sum": ((Partial(), R), R),
    }
    p = [v.clone().requires_grad_() for v in (base, lora, g, bias)]
    want = dora_compose(*p[:3], s=0.7, bias=p[3])
    (want**2).sum().backward()
    for kind, ((tokens, vector), out) in ways.items():

        def lie(v, where_to, kind=kind):
            if kind == "sum":  # each process its share of it
                return DTensor.from_local(v * (0.25 + 0.5 * dist.get_rank()), where, [where_to], run_check=False)
            return distribute_tensor(v, where, [where_to])

        a, b = (lie(v, tokens).detach().requires_grad_() for v in (base, lora))
        c, d = (distribute_tensor(v, where, [vector]).requires_grad_() for v in (g, bias))
        y = dora_compose(a, b, c, s=0.7, bias=d)
        assert y.placements == (out,), kind
        (full(y) ** 2).sum().backward()
        assert_exact(full(y).detach(), want.detach(), kind)
        for v, w in zip((a, b, c, d), p, strict=True):
            assert_exact(full(v.grad), w.grad, kind)
        delta = dora_delta(a.detach(), b.detach(), c.detach(), s=0.7)
        assert_exact(full(delta), dora_delta(base, lora, g, s=0.7), kind)


def case_program_tp():
    check(inside("tp"), inside("one"), 1, 0)


# what is refused


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
    with pytest.raises(FdoraError, match="`squared` must be False there, got True with a group"):
        dora_norm(t["W"], t["A"], t["B"], s=1.0, group=where, squared=True)
    state = dora_norm(t["W"], t["A"], t["B"], s=1.0, state=dora_norm_state(t["W"]), group=where)
    with pytest.raises(FdoraError, match="`state` must be a NormState without a group, got a ShardNormState"):
        dora_norm(t["W"], t["A"], t["B"], s=1.0, state=state)
    with pytest.raises(FdoraError, match="`m` must be cut as c is"):
        dora_scale(t["m"], cut(t["m"], 0))
    a, b = laid(t, where, ["col"]), laid(t, where, ["same"])
    one = [dora_layer({n: v for n, v in l.items() if n != "s"}) for l in (a, b)]
    with pytest.raises(FdoraError, match=r"layers\[1\]: `W` must be .*, as in layers\[0\]"):
        dora_linear_group(a["x"], one)
    square = laid(made(N=8, K=8, r=3), where, ["same"])
    with pytest.raises(FdoraError, match=r"dora_mlp: `gate.W` must be Shard\(0\) where down's is Shard\(1\)"):
        dora_mlp(a["x"], one[0], one[0], dora_layer(square))


if __name__ == "__main__":
    run(globals())
