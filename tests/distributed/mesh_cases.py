"""Four processes, meshes of two dimensions: data or FSDP beside tensor parallelism, HSDP, and shards that are empty."""

import itertools
from functools import partial

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from fdora import FdoraError
from fdora.functional import dora_linear, dora_merge, dora_norm, dora_norm_tree
from tests.close import assert_exact
from tests.distributed import programs
from tests.distributed.lay import LAYER, Collectives, check, full, made, mesh, put
from tests.distributed.world import run

DROPPED = [("data", "col"), ("data", "row"), ("row", "col"), ("col", "row"), ("row", "row")]


def linear(x, W, A, B, m, bias=None, **options):
    return dora_linear(x, W, A, B, m, s=0.7, bias=bias, **options)


def of_a_layer(**sizes):
    return {n: v for n, v in made(**sizes).items() if n != "s"}


def case_layers_on_two_dimensions():
    """Each dimension by itself: gradients, norms and masks."""
    for sizes, options in ((dict(N=6, K=8, r=3), {}), (dict(N=7, K=5, lead=(6,)), dict(dropout_p=0.4, seed=5))):
        for ways in DROPPED if options else itertools.product(LAYER, LAYER):
            lies = {n: [LAYER[way][n] for way in ways] for n in LAYER["same"]}
            check(partial(linear, **options), of_a_layer(**sizes), lies, where=mesh(2, 2), what=f"{ways}")


def case_empty_shards():
    """Two rows or columns for four processes: those without any call like the others, or these would wait for ever."""
    where = mesh(4)
    for sizes in (dict(N=2, K=5), dict(N=5, K=2), dict(N=1, K=1, lead=(1,))):
        t = of_a_layer(**sizes)
        for without, way in itertools.product((None, "bias"), LAYER):
            check(linear, {n: v for n, v in t.items() if n != without}, LAYER[way], where=where, what=f"{way} {without}")
        weights = {"a": put(t["W"], where, Shard(0))}
        params = {"a": tuple(put(t[n], where, Shard(0)) for n in "AB")}
        for gather in (False, True):
            c = dora_norm_tree(weights, params, s=0.7, gather=gather)["a"]
            assert_exact(full(c), dora_norm(t["W"], t["A"], t["B"], s=0.7))


class Layers(torch.nn.Module):
    """A column of rows and a row of columns, as tensor parallelism cuts them."""

    def __init__(self, a, b, where=None):
        super().__init__()
        for name, t, way in (("a", a, "col"), ("b", b, "row")):
            for n in "WABm":
                v = t[n] if where is None else distribute_tensor(t[n], where, [LAYER[way][n]])
                self.register_parameter(name + n, torch.nn.Parameter(v, requires_grad=n != "W"))
        self.norms = {}

    def forward(self, x):
        for name in "ab":
            W, A, B, m = (getattr(self, name + n) for n in "WABm")
            x = dora_linear(x, W, A, B, m, s=0.7, norm=self.norms.get(name))
        return x

    def trees(self):
        return {n: getattr(self, n + "W") for n in "ab"}, {n: (getattr(self, n + "A"), getattr(self, n + "B")) for n in "ab"}


def case_fsdp_over_tensor_parallel():
    """A storage that is cut twice, along the same axis: norms on it, a forward over it, and averages of gradients."""
    where = mesh(2, 2)
    a, b = made(N=10, K=6, r=3), made(N=5, K=10, r=2, seed=1)
    x = made(N=6, K=6, lead=(4,), seed=2)["x"]
    one = Layers(a, b)
    (one(x) ** 2).mean().backward()
    two = fully_shard(Layers(a, b, where["tp"]), mesh=where["dp"], reshard_after_forward=True)
    mine = x.chunk(2)[where["dp"].get_local_rank()]
    for gather, count in ((False, 2), (True, None), ("dp", 3)):
        with Collectives() as seen:
            c = dora_norm_tree(*two.trees(), s=0.7, gather=gather)
        assert count is None or sum(seen.count.values()) == count, seen.count
        for n, t in (("a", a), ("b", b)):
            assert_exact(full(c[n]).detach(), dora_norm(t["W"], t["A"], t["B"], s=0.7), f"{gather} {n}")
    two.norms = c
    x1 = distribute_tensor(mine, where["tp"], [Replicate()])
    y = two(x1)
    (full(y) ** 2).mean().backward()
    for (n, p), q in zip(one.named_parameters(), two.parameters(), strict=True):
        if p.requires_grad:
            assert_exact(q.grad.full_tensor(), p.grad, n)
    W, A, B, m = (getattr(two, "b" + n) for n in "WABm")
    merged = dora_merge(W, A, B, m, s=0.7)
    assert merged.placements == W.placements
    assert_exact(full(merged), dora_merge(*(b[n] for n in "WABm"), s=0.7))
    two.reshard()
    with pytest.raises(FdoraError, match="Unshard what FSDP keeps in shards first"):
        dora_linear(mine, two.aW, two.aA, two.aB, two.am, s=0.7)
    with pytest.raises(FdoraError, match=r"`W` must be on .* and unshard what FSDP keeps in shards"):
        dora_linear(x1, two.aW, two.aA, two.aB, two.am, s=0.7)
    with pytest.raises(FdoraError, match="`gather` must be True, False or one of"):
        dora_norm_tree(*two.trees(), s=0.7, gather="fsdp")


def case_hsdp():
    """Replicas of shards: norms on the storage."""
    where, t = mesh(2, 2), made(N=7, K=6, r=3)
    lie = [Replicate(), Shard(0)]
    l = {n: distribute_tensor(t[n], where, lie) for n in "WABm"}
    want = dora_norm(t["W"], t["A"], t["B"], s=0.7)
    for gather in (False, True):
        assert_exact(full(dora_norm_tree([l["W"]], [(l["A"], l["B"])], s=0.7, gather=gather)[0]), want)
    assert_exact(full(dora_norm(l["W"], l["A"], l["B"], s=0.7)), want)
    twice = {n: distribute_tensor(t[n], where, [Shard(0)] * 2) for n in "WB"}
    trees = [twice["W"]], [(l["A"], twice["B"])]
    for gather, left in ((True, None), ("tp", where["dp"])):
        (c,) = dora_norm_tree(*trees, s=0.7, gather=gather)
        assert_exact(full(c), want)
        assert left is None or c.device_mesh == left
    with pytest.raises(FdoraError, match="`gather` must be a dimension that cut last, got 'dp'"):
        dora_norm_tree(*trees, s=0.7, gather="dp")
    assert_exact(full(dora_merge(*(l[n] for n in "WABm"), s=0.7)), dora_merge(*(t[n] for n in "WABm"), s=0.7))


def case_program_both():
    programs.check(programs.inside("both"), programs.inside("one"), 1, 2)


if __name__ == "__main__":
    run(globals())
