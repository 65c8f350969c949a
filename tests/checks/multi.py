"""What dora_linear_multi promises, against float64 code and against each adapter's own call."""

import itertools
from functools import partial, wraps
from typing import NamedTuple

import pytest
import torch

from fdora.eager import multi
from fdora.eager.norm import smallest_bytes
from fdora.functional import DoraParams, dora_linear, dora_linear_multi, dora_norm, dora_stack, dora_unstack
from fdora.quant import quantize
from tests import device, reference
from tests.cases import run_case, usual
from tests.make import tensors

P, SEEDS = 0.4, [11, 5, 2**40 + 7]
APART = [P, 0.1, 0.7]
RATIOS = {"none": 0.0, "dropout": P, "apart": APART, "peft": P, "peft apart": APART}
ROUTES = ("offsets", "ids")
RANKS, SCALES, LENGTHS = (2, 1, 3), (0.7, -1.5, 2.0), (4, 0, 3)


class Case(NamedTuple):
    """Tokens that several adapters share out among themselves."""

    x: torch.Tensor
    W: torch.Tensor
    bias: torch.Tensor | None
    adapters: list  # DoraParams of each; m None for plain LoRA
    s: tuple
    ids: torch.Tensor  # (M,) whose each token is, -1: nobody's

    def leaves(self):
        """By name: x, bias, A0, B0, m0, A1 and so on."""
        own = {f"{n}{g}": t for g, p in enumerate(self.adapters) for n, t in zip("ABm", p, strict=True) if t is not None}
        return {"x": self.x} | ({} if self.bias is None else {"bias": self.bias}) | own

    def tracked(self):
        leaves = {n: t.detach().clone().requires_grad_() for n, t in self.leaves().items()}
        adapters = [DoraParams(*(leaves.get(f"{n}{g}") for n in "ABm")) for g in range(len(self.adapters))]
        return self._replace(x=leaves["x"], bias=leaves.get("bias"), adapters=adapters)

    def double(self):
        wide = [DoraParams(*(None if t is None else t.double() for t in p)) for p in self.adapters]
        return self._replace(x=self.x.double(), W=self.W.double(), bias=_double(self.bias), adapters=wide)


def _double(t):
    return None if t is None else t.double()


def case(
    lengths=LENGTHS,
    tail=2,
    N=6,
    K=5,
    ranks=RANKS,
    s=SCALES,
    dtype=torch.float64,
    adapter=None,
    kind="plain",
    bias=True,
    route="offsets",
    spread=0.05,
    seed=0,
):
    """Adapters of one W; each has the g that tests.make gave it. By offsets tokens are sorted, by ids shuffled."""
    M = sum(lengths) + tail
    own = [
        tensors(N, K, r, (M,), dtype, adapter, kind, si, spread, seed + i)
        for i, (r, si) in enumerate(zip(ranks, s, strict=True))
    ]
    W, adapters = own[0]["W"], []
    for t in own:
        c, theirs = reference.norm(W, t["A"], t["B"], t["s"]), reference.norm(t["W"], t["A"], t["B"], t["s"])
        m = torch.where(theirs > 0, t["m"] * c / theirs, t["m"])
        adapters.append(DoraParams(t["A"], t["B"], m.to(t["m"].dtype)))
    ids = torch.tensor([g for g, n in enumerate(lengths) for _ in range(n)] + [-1] * tail)
    if route == "ids":
        ids = ids[torch.randperm(M, generator=torch.Generator().manual_seed(seed))]
    bias = own[0]["bias"] if bias else None
    return Case(own[0]["x"], W, bias, adapters, tuple(s), ids.to(device.NAME))


def routed(t):
    """offsets or ids for the call."""
    ends = [int((t.ids == g).sum()) for g in range(len(t.s))]
    if bool((t.ids[:-1] % (len(t.s) + 1) <= t.ids[1:] % (len(t.s) + 1)).all()):  # -1 counts as the last
        return {"offsets": torch.tensor(ends, device=device.NAME).cumsum(0).to(torch.int32)}
    return {"ids": t.ids}


def ranks_of(t):
    return [p.A.shape[0] for p in t.adapters]


def together(t, ranks=True, **extra):
    extra = routed(t) | ({"ranks": ranks_of(t)} if ranks else {}) | extra
    return dora_linear_multi(t.x, t.W, *dora_stack(t.adapters), s=t.s, bias=t.bias, **extra)


def seeds_of(t):
    return [SEEDS[g % 3] for g in range(len(t.s))]


def places(t):
    """The tokens of each adapter, then those of none."""
    return [(t.ids == g).nonzero().squeeze(1) for g in [*range(len(t.s)), -1]]


def whole(t, parts):
    """Outputs of :func:`places` at their places."""
    at = torch.cat(places(t))
    return torch.cat(parts)[at.argsort()]


def alone(t, dropout, dy):
    """One call for each adapter that has tokens, on these tokens where they lie, or gathered: y and gradients, by name."""
    found, at = {}, places(t)
    if "offsets" in routed(t):
        at = [slice(int(i[0]), int(i[-1]) + 1) if len(i) else i for i in at]
    for g, (i, p, s) in enumerate(zip(at, [*t.adapters, None], [*t.s, None], strict=True)):
        x = t.x[i].detach().requires_grad_()
        if p is None:
            found |= {f"y{g}": (i, torch.nn.functional.linear(x, t.W, t.bias))}
        elif x.shape[0]:
            p = DoraParams(*(v.detach().requires_grad_() for v in p))
            drops = {"dropout_p": ratio(dropout, g), "dropout_mode": mode_of(dropout), "seed": seeds_of(t)[g]}
            y = dora_linear(x, t.W, *p, s=s, bias=t.bias, **drops)
            dx, *own = torch.autograd.grad(y, [x, *p], dy[i])
            found |= {f"y{g}": (i, y), f"x{g}": (i, dx)} | {f"{n}{g}": (None, d) for n, d in zip("ABm", own, strict=True)}
    return found


def ratio(dropout, g):
    return APART[g % 3] if "apart" in dropout else RATIOS[dropout]


def mode_of(dropout):
    return "peft" if "peft" in dropout else "lora"


def with_dropout(t, dropout, **extra):
    return together(t, dropout_p=RATIOS[dropout], dropout_mode=mode_of(dropout), seed=seeds_of(t), **extra)


def bits_of_own_calls(t, dropout="none"):
    got = with_gradients(partial(with_dropout, dropout=dropout), t, dy_of(t))
    for n, (at, want) in alone(t, dropout, dy_of(t)).items():
        assert torch.equal(got[n] if at is None else got[n[0]][at], want), n
    return got


def truth(t):
    """In float64, by code of its own."""
    *own, rest = places(t)
    ys = [reference.dora(t.x[at], t.W, *p, s, t.bias) for at, p, s in zip(own, t.adapters, t.s, strict=True)]
    base = torch.nn.functional.linear(t.x[rest].double(), t.W.double(), _double(t.bias))
    return whole(t, [*ys, base])


def with_gradients(call, t, dy):
    """y and the gradient of every leaf; zeros where none comes, as for an adapter without tokens."""
    t = t.tracked()
    y = call(t)
    leaves = t.leaves()
    found = torch.autograd.grad(y, list(leaves.values()), dy.to(y.dtype), allow_unused=True)
    return {"y": y.detach()} | {
        n: torch.zeros_like(leaf) if d is None else d for (n, leaf), d in zip(leaves.items(), found, strict=True)
    }


def dy_of(t):
    rand = torch.Generator().manual_seed(1)
    return torch.randn(t.x.shape[0], t.W.shape[0], generator=rand, dtype=torch.float64).to(t.x)


def cases_agree():
    """Those of tests/cases.py."""
    for k in range(24):
        run_case("multi", f"{k}", usual(device.NAME)._replace(largest=40))


def norms_of_a_bank():
    """Those of each adapter, for dense and quantised weights and in any tile; and the gradient of c, by which one trains."""
    for dtype, shape in itertools.product((torch.float64, torch.float32, torch.bfloat16), ((6, 5), (40, 33), (0, 5))):
        t = case(N=shape[0], K=shape[1], dtype=dtype, adapter=torch.promote_types(dtype, torch.float32))
        A, B, _ = dora_stack(t.adapters)
        c = dora_norm(t.W, A, B, s=t.s)
        assert c.dtype == A.dtype and c.shape == (3, shape[0]) and not c.requires_grad
        for got, (a, b, _), s in zip(c, t.adapters, t.s, strict=True):
            want = reference.norm(t.W, a, b, s)
            assert ((got - want).abs() <= 1e-6 * want).all(), (dtype, shape)
        scales = torch.tensor(t.s, device=device.NAME)
        torch.testing.assert_close(dora_norm(t.W, A, B, s=scales), c, rtol=1e-6, atol=0)
        least = smallest_bytes(t.W, A[0], B[0], False)
        tiled = multi.bank_norm(t.W, A, B, scales.to(c.dtype), None, least)
        torch.testing.assert_close(tiled, c, rtol=1e-6, atol=0)
    t = case(N=8, K=64, dtype=torch.float32)
    for kind in ("nf4", "int8", "fp8"):
        Q = quantize(t.W, kind)
        c = dora_norm(Q, *dora_stack(t.adapters)[:2], s=t.s)
        for got, (a, b, _), s in zip(c, t.adapters, t.s, strict=True):
            torch.testing.assert_close(got, dora_norm(Q, a, b, s=s), rtol=1e-6, atol=0)


def stacks_and_unstacks_bit_for_bit():
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        t = case(dtype=dtype)
        t.adapters[0].A[0, 0] = -0.0
        bank = dora_stack(t.adapters)
        assert [tuple(v.shape) for v in bank] == [(3, 3, 5), (3, 6, 3), (3, 6)]
        for back, p in zip(dora_unstack(bank, ranks_of(t)), t.adapters, strict=True):
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(back, p, strict=True))
        assert dora_unstack(bank, ranks_of(t))[0].A[0, 0].signbit()
        assert not bank.A[1, 1:].any() and not bank.B[0, :, 2:].any()
        again = dora_stack(dora_unstack(bank, ranks_of(t)))
        assert all(torch.equal(a, b) for a, b in zip(again, bank, strict=True))
    lora = dora_stack([p._replace(m=None) for p in t.adapters])
    assert lora.m is None and dora_unstack(lora)[0].m is None


def no_stranger_hears(draw, sick, faults, backend="auto"):
    """A NaN or an infinity in one adapter, or in a token of it, reaches nobody else's tokens and no other gradient."""
    call, t = partial(together, backend=backend), draw()
    want, others = with_gradients(call, t, dy_of(t)), [g for g in range(-1, len(t.s)) if g != sick]
    well = torch.cat([places(t)[g] for g in others])
    for bad, what in faults:
        t = draw()
        dy = dy_of(t)
        if what in ("x", "dy"):
            (t.x if what == "x" else dy)[places(t)[sick][1]] = float(bad)
        else:
            getattr(t.adapters[sick], what).fill_(float(bad))
        got = with_gradients(call, t, dy)
        assert torch.equal(got["y"][well], want["y"][well]) and torch.equal(got["x"][well], want["x"][well]), (bad, what)
        assert all(torch.equal(got[f"{n}{g}"], want[f"{n}{g}"]) for n in "ABm" for g in others if g >= 0), (bad, what)


def strangers_stay_strangers():
    for route in ROUTES:
        draw = partial(case, (3, 2, 2), 2, route=route, bias=False)
        no_stranger_hears(draw, 1, itertools.product(("nan", "inf"), ("A", "B", "m", "x", "dy")))


def seeds_decide_the_masks():
    t = case((6, 5, 4), 3, K=40)
    one = [together(t, dropout_p=P, seed=seed) for seed in (7, torch.tensor(7, device=device.NAME), [7, 7, 7])]
    assert torch.equal(one[0], one[1]) and torch.equal(one[0], one[2])
    each = together(t, dropout_p=P, seed=torch.tensor([7, 8, 9], device=device.NAME))
    assert torch.equal(each, together(t, dropout_p=P, seed=[7, 8, 9]))
    assert torch.equal(each, together(t, dropout_p=[P] * 3, seed=[7, 8, 9]))
    wide = torch.tensor(APART, dtype=torch.float64, device=device.NAME)
    assert torch.equal(*(together(t, dropout_p=p, seed=7) for p in (wide, APART)))
    assert torch.equal(each[:6], one[0][:6]) and not torch.equal(each[6:11], one[0][6:11])
    torch.manual_seed(3)
    drawn = together(t, dropout_p=P)
    assert not torch.equal(drawn, together(t, dropout_p=P))
    torch.manual_seed(3)
    assert torch.equal(drawn, together(t, dropout_p=P))


def each_adapter_has_the_bits_of_its_own_call():
    """Of plain calls on a CPU; tokens of none have those of the base layer."""
    for dtype, adapter, kind, dropout in itertools.product(
        (torch.float32, torch.bfloat16), (torch.float32,), ("plain", "zero_m"), RATIOS
    ):
        for route, bias in itertools.product(ROUTES, (False, True)):
            t = case((20, 0, 33), 7, 24, 40, (8, 3, 16), dtype=dtype, adapter=adapter, kind=kind, route=route, bias=bias)
            bits_of_own_calls(t, dropout)
    for K, r in itertools.product((7, 11, 18), (1, 3)):  # none of whose rows begins where a tensor would
        for lengths, N in (((1, 0, 2), 3), ((3, 30, 21), 1)):
            bits_of_own_calls(case(lengths, 1, N, K, (1, r, r), dtype=torch.float32))


CHECKS = [
    norms_of_a_bank,
    stacks_and_unstacks_bit_for_bit,
    strangers_stay_strangers,
    seeds_decide_the_masks,
]
BITS = [each_adapter_has_the_bits_of_its_own_call]


def without_a_look(check):
    """The same where values may not be read."""

    @wraps(check)
    def run():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(multi, "_readable", lambda bank: False)
            check()

    return run


MASKED = [without_a_look(check) for check in (cases_agree, *CHECKS)]
