"""Two processes: banks of adapters, embeddings, convolutions and experts on DTensors, against one process."""

from functools import partial
from runpy import run_path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from fdora import FdoraError
from fdora.functional import dora_conv1d, dora_conv2d, dora_embedding, dora_experts, dora_linear, dora_linear_multi, dora_norm
from fdora.quant import from_fp8, quantize
from tests.close import assert_exact
from tests.distributed.lay import DEVICE, GIVES, LAYER, Collectives, P, R, S, check, full, mesh, put, random
from tests.distributed.world import ROOT, run

BANK = {
    "rows": (dict(x=R, W=S(0), A=R, B=S(1), m=S(1), norm=S(1), bias=S(0), ids=R), S(1), dict(x=P, A=P), 0),
    "columns": (dict(x=S(1), W=S(1), A=S(2), B=R, m=R, norm=R, bias=R, ids=R), R, dict(B=P, m=P), 2),
    "data": (dict(x=S(0), W=R, A=R, B=R, m=R, norm=R, bias=R, ids=S(0)), S(0), dict(A=P, B=P, m=P, bias=P), 0),
    "same": (dict(x=R, W=R, A=R, B=R, m=R, norm=R, bias=R, ids=R), R, {}, 0),
}


def bank(N=7, K=9, G=3, r=2, M=6):
    t = {"x": random(M, K), "W": random(N, K, seed=1), "A": random(G, r, K, seed=2), "B": random(G, N, r, seed=3)}
    ids = torch.tensor([2, -1, 0, 1, 1, 0], device=DEVICE)
    return t | {"m": 1 + random(G, N, seed=4), "bias": random(N, seed=5), "ids": ids}


def case_banks():
    s, offsets = [0.5, 1.0, 2.0], torch.tensor([1, 1, 4], dtype=torch.int32, device=DEVICE)
    by_ids, by_offsets = partial(dora_linear_multi, s=s), partial(dora_linear_multi, s=s, offsets=offsets, ranks=[1, 2, 2])
    for kind, (lies, out, gradients, forward) in BANK.items():
        t = bank()
        check(by_ids, t, lies, out, gradients, forward, what=kind)
        c = dora_norm(t["W"], t["A"], t["B"], s=s)
        norm = dora_norm(*(put(t[n], mesh(2), lies[n]) for n in "WAB"), s=s)
        assert norm.placements == (lies["norm"],)
        assert_exact(full(norm), c)
        check(by_ids, t | {"norm": c}, lies, out, gradients, int(kind == "columns"), what=f"{kind}, norm given")
        if kind != "data":
            del t["ids"]
            check(by_offsets, t, lies, out, gradients, forward, what=f"{kind}, offsets")
    t = bank()
    part = t["W"].chunk(2, 1)[dist.get_rank()], t["A"].chunk(2, 2)[dist.get_rank()]
    with Collectives() as seen:
        assert_exact(dora_norm(*part, t["B"], s=s, group=mesh(2)), dora_norm(t["W"], t["A"], t["B"], s=s))
    assert seen.count == {"all_reduce": 1}


def case_banks_under_fsdp2():
    """The example, beside one process with all tokens."""
    space = run_path(str(ROOT / "examples/many_adapters_fsdp.py"))
    torch.manual_seed(0)
    alone = torch.nn.ModuleList([space["Block"]() for _ in range(2)]).to(DEVICE)
    given = [space[name].to(DEVICE) for name in ("x", "ids", "wanted")]
    losses = space["train"](alone, *given)
    found = torch.tensor(space["losses"], device=DEVICE)
    dist.all_reduce(found)
    torch.testing.assert_close(found / 2, torch.tensor(losses, device=DEVICE))
    assert losses[-1] < 0.9 * losses[0]
    for block, own in zip(space["model"], alone, strict=True):
        for name in "ABm":
            sharded = getattr(block, name)
            assert sharded.placements == (S(0),)
            torch.testing.assert_close(full(sharded), getattr(own, name), rtol=1e-3, atol=1e-4)


TABLES = {  # by norm_axis
    0: {
        "vocabulary": (dict(ids=R, W=S(0), A=S(1), B=R, m=R), P, dict(B=P, m=P), 1),
        "columns": (dict(ids=R, W=S(1), A=R, B=S(0), m=S(0)), S(2), dict(A=P), 0),
        "data": (dict(ids=S(0), W=R, A=R, B=R, m=R), S(0), dict(A=P, B=P, m=P), 0),
        "tokens": (dict(ids=S(1), W=R, A=R, B=R, m=R), S(1), dict(A=P, B=P, m=P), 0),
        "same": (dict(ids=R, W=R, A=R, B=R, m=R), R, {}, 0),
    },
    1: {
        "vocabulary": (dict(ids=R, W=S(0), A=S(1), B=R, m=S(0)), P, dict(B=P), 0),
        "data": (dict(ids=S(0), W=R, A=R, B=R, m=R), S(0), dict(A=P, B=P, m=P), 0),
    },
}


def case_embeddings():
    """Uneven vocabularies, and one row for two processes; padding and a longest row, wherever they lie."""
    for axis, kinds in TABLES.items():
        for V, d in ((7, 5), (1, 3)):
            t = {"ids": torch.arange(15, device=DEVICE).view(3, 5) % V, "W": random(V, d)}
            t |= {"A": random(2, V, seed=1), "B": random(d, 2, seed=2), "m": 1 + random((d, V)[axis], seed=3)}
            for kind, (lies, out, gradients, forward) in kinds.items():
                for more in ({}, {"padding_idx": 0}, {"padding_idx": -1}, {"max_norm": 1.0}):
                    if not (kind == "columns" and "max_norm" in more):
                        fn = partial(dora_embedding, s=0.7, norm_axis=axis, **more)
                        check(fn, t, lies, out, gradients, forward, what=f"{axis} {V} {kind} {more}")
    t = {"W": random(6, 4), "A": random(2, 6), "B": random(4, 2), "m": random(4)}
    cut = {n: put(v, mesh(2), TABLES[0]["vocabulary"][0][n]) for n, v in t.items()}
    y = full(dora_embedding(torch.tensor([5, 6, -1], device=DEVICE), **cut, s=1.0))  # plain numbers: the same everywhere
    assert y[0].isfinite().all() and y[1:].isnan().all()


def kernel(n, L, C, O, *space, c=None):
    """x, W, A, B, m and bias of a convolution over n axes."""
    wide, c = [3] * n, c or C
    t = {"x": random(L, C, *space), "W": random(O, c, *wide, seed=1), "A": random(2, c, *wide, seed=2)}
    return t | {"B": random(O, 2, *[1] * n, seed=3), "m": 1 + random(O, seed=4), "bias": random(O, seed=5)}


def case_convolutions():
    """As layers, channels for columns and rows; and shards of size 0."""
    for way, (out, *rest) in GIVES.items():
        for n, fn in ((1, dora_conv1d), (2, dora_conv2d)):
            check(partial(fn, s=0.7, padding=1), kernel(n, 3, 5, 7, *(6, 4)[:n]), LAYER[way], out, *rest, what=f"{way} {n}")
    for way, (C, O) in {"col": (2, 1), "row": (1, 2), "data": (2, 2)}.items():
        check(partial(dora_conv1d, s=0.7), kernel(1, 1, C, O, 5), LAYER[way], *GIVES[way], what=way)
    t = kernel(1, 3, 4, 6, 5, c=2)
    check(partial(dora_conv1d, s=0.7, groups=2), t, LAYER["data"], *GIVES["data"])


def case_quantised_weights():
    """A QuantWeight is whole in every process: with tokens that are cut, and with nothing that is."""
    W = quantize(random(64, 64), "nf4")
    t = {"x": random(6, 64), "A": random(2, 64, seed=1), "B": random(64, 2, seed=2), "m": 1 + random(64, seed=3)}

    def layer(x, A, B, m):
        return dora_linear(x, W, A, B, m, s=0.7)

    for way in ("data", "same"):
        check(layer, t, LAYER[way], *GIVES[way])
    cut = [put(t[n], mesh(2), S(0) if n in "Bm" else R) for n in ("x", "A", "B", "m")]
    with pytest.raises(FdoraError, match="`B` must be R on mesh dimension tp, on which W is R"):
        layer(*cut)
    spread, scale = put(random(64, 64), mesh(2), S(0)), torch.ones(64)
    for arg, call in (
        ("W", lambda: quantize(spread, "nf4")),
        ("weight", lambda: from_fp8(spread.to(torch.float8_e4m3fn), scale, "row")),
        ("scale", lambda: from_fp8(t["x"].to(torch.float8_e4m3fn), put(scale, mesh(2), S(0)), "row")),
    ):
        with pytest.raises(FdoraError, match=rf"`{arg}` must be a plain tensor, got a DTensor. Pass {arg}.full_tensor\(\)"):
            call()


def case_experts():
    """Whole experts, two here and one there: the numbers of one process's call, no collective."""
    t = {"x": random(9, 5), "W": random(3, 4, 5, seed=1), "A": random(3, 2, 5, seed=2), "B": random(3, 4, 2, seed=3)}
    t |= {"m": 1 + random(3, 4, seed=4), "bias": random(3, 4, seed=5)}
    whole = {n: v.clone().requires_grad_(n not in ("W", "x")) for n, v in t.items()}
    want = dora_experts(**whole, s=0.7, offsets=[2, 5, 9])
    (want**2).sum().backward()
    first, last, ends = ((0, 5, [2, 5]), (5, 9, [4]))[dist.get_rank()]
    cut = {n: put(v, mesh(2), S(0)).requires_grad_(n != "W") for n, v in t.items() if n != "x"}
    with Collectives() as seen:
        got = dora_experts(t["x"][first:last], **cut, s=0.7, offsets=ends)
        (got**2).sum().backward()
    assert not seen.count and not isinstance(got, DTensor)
    assert_exact(got.detach(), want[first:last].detach())
    for n, v in cut.items():
        assert n == "W" or v.grad.placements == (S(0),)
        if n != "W":
            assert_exact(full(v.grad), whole[n].grad, n)


def case_compiled():
    s = torch.ones(3, dtype=torch.float64, device=DEVICE)

    def f(ids, table, image, **t):
        y = dora_linear_multi(t["x"], *(t[n] for n in "WABm"), s=s, ids=ids)
        convolved = dora_conv1d(image, *(t[f"{n}2"] for n in "WABm"), s=0.7)
        return y, dora_embedding(ids.clamp_min(0), table, *(t[f"{n}1"] for n in "ABm"), s=0.7), convolved

    t = {n: v for n, v in bank().items() if n != "bias"}
    lies = BANK["rows"][0] | {f"{n}1": lie for n, lie in TABLES[0]["vocabulary"][0].items()}
    lies |= {"table": lies["W1"], "image": LAYER["row"]["x"]} | {f"{n}2": lie for n, lie in LAYER["row"].items()}
    t |= {"table": random(6, 4), "A1": random(2, 6, seed=1), "B1": random(4, 2, seed=2), "m1": random(4, seed=3)}
    t |= {"image": random(2, 3, 5)} | {f"{n}2": v for n, v in kernel(1, 2, 3, 4, 5).items() if n in "WABm"}
    check(f, t, lies, run=torch.compile(f, fullgraph=True, backend="aot_eager"))


def case_errors():
    where, t, table = mesh(2), bank(), {"W": random(6, 4), "A": random(2, 6), "B": random(4, 2), "m": random(4)}

    def lie(tensors, lies, **change):
        return {n: put(v, where, (lies | change)[n]) for n, v in tensors.items()}

    data, rows, ids = BANK["data"][0], BANK["rows"][0], torch.arange(3, device=DEVICE)
    offsets = torch.tensor([1, 1, 4], dtype=torch.int32, device=DEVICE)
    image = {"x": random(2, 4, 5), "W": random(4, 2, 3), "A": random(2, 2, 3), "B": random(4, 2, 1), "m": random(4)}
    no_ids = {n: v for n, v in t.items() if n != "ids"}
    for text, call in {
        "dora_linear_multi: `dropout_p` must be 0 with DTensors": lambda: dora_linear_multi(
            **lie(t, rows), s=[1.0] * 3, dropout_p=0.5, seed=1
        ),
        "dora_linear_multi: `ids` must be .* where x is cut by tokens, got offsets": lambda: dora_linear_multi(
            **lie(no_ids, data), s=[1.0] * 3, offsets=offsets
        ),
        r"dora_linear_multi: `B` must be S.* on mesh dimension tp, on which W is S": lambda: dora_linear_multi(
            **lie(t, rows, B=R), s=[1.0] * 3
        ),
        "dora_norm: `group` must be None for DTensors": lambda: dora_norm(
            *[lie(t, rows)[n] for n in "WAB"], s=[1.0] * 3, group=where
        ),
        "dora_embedding: `norm_axis` must be 0 where W is cut by columns": lambda: dora_embedding(
            ids, **lie(table, TABLES[0]["columns"][0]), s=1.0, norm_axis=1
        ),
        "dora_embedding: `max_norm` must be None where W is cut by columns": lambda: dora_embedding(
            ids, **lie(table, TABLES[0]["columns"][0]), s=1.0, max_norm=2.0
        ),
        "dora_conv1d: `groups` must be 1 where W is cut": lambda: dora_conv1d(**lie(image, LAYER["col"]), s=1.0, groups=2),
        "dora_conv1d: `x` must be of 3 axes with DTensors": lambda: dora_conv1d(
            **lie(image | {"x": random(4, 5)}, LAYER["data"]), s=1.0
        ),
        "dora_experts: `x` must be a plain tensor": lambda: dora_experts(
            **lie({n: t[n] for n in "xABm"} | {"W": random(3, 7, 9)}, dict.fromkeys("xWABm", S(0))), s=1.0, offsets=[1, 2, 3]
        ),
        r"dora_experts: `B` must be Shard\(0\), by experts": lambda: dora_experts(
            t["x"],
            **lie({n: t[n] for n in "ABm"} | {"W": random(3, 7, 9)}, dict.fromkeys("WAm", S(0)) | {"B": R}),
            s=1.0,
            offsets=[1, 2, 3],
        ),
    }.items():
        with pytest.raises(FdoraError, match=text):
            call()


if __name__ == "__main__":
    run(globals())
