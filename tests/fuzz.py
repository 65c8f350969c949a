"""Call every public function with random arguments, for as long as you like, and compare it with float64.

    python -m tests.fuzz --device cuda --seconds 600 --seed 0 --json FILE
    TRITON_INTERPRET=1 python -m tests.fuzz --backend triton --seconds 300

A case draws a function, shapes (0, 1, odd, near powers of two), strides, dtypes, dropout and options once, and calls it
several times with new data: values, alignment of every pointer, some strides, tensors that require grad, grad mode, stream and
current device change from round to round, so that whatever is kept by shape meets other data. Every round asks that

* outputs and gradients are within their error budget of the formulas in tests/reference.py,
* the same call gives the same bits, and changes neither its inputs nor the results of the rounds before.

The memory between and around the elements of a tensor is NaN. Case K depends on the seed, K and the options below
alone; what fails prints one line that runs it again, and makes the exit status 1. A failure that needs the calls before it
comes back with ``--only 0-K``.

The budget of an element is CLOSE roundings of its size: the root of the sum of its squared terms, which is how far
independent roundings of all values on the way can move it (the sum of the absolute terms where a tensor is expanded, so that
its roundings are equal). The root mean square of a tensor's errors may moreover be twice that of naive code in the same
dtype, plus one rounding, as in tests/close.py.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import shlex
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.save import save
from fdora.eager.dropout import drop
from fdora.functional import (
    DoraLayer,
    dora_base_sqnorm,
    dora_compose,
    dora_delta,
    dora_init,
    dora_linear,
    dora_linear_group,
    dora_merge,
    dora_mlp,
    dora_norm,
    dora_norm_state,
    dora_scale,
    dora_unmerge,
)
from tests import reference
from tests.close import rms

Tensors = dict[str, Tensor]
Formula = Callable[[Tensors], Sequence[Tensor]]

CLOSE = 6  # roundings
WIDER = 8  # times as many where sums are kept in float32 or float64 and rounded to it: as often as they have terms
MANY = 64  # elements, from which a root mean square says something
ROUNDS = 3
MOST_FAILURES = 50
LAYOUTS = ("plain",) * 6 + ("transposed", "sliced", "padded", "expanded")
ACTS = {"silu": F.silu, "gelu": F.gelu, "gelu_tanh": lambda z: F.gelu(z, approximate="tanh")}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32, "fp64": torch.float64}
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


class Wrong(Exception):
    """A promise that was not kept."""


@dataclass
class Problem:
    """One call: its tensors by name, and four writings of it. All formulas give the outputs in the same order."""

    tensors: Tensors
    call: Formula
    truth: Formula  # of float64 tensors
    size: Callable[[Tensors, int], Sequence[Tensor]]  # of |t|**p; gives |size|**p
    naive: Formula | None = None  # of the tensors as they are
    dtype: torch.dtype = torch.float32  # of the products
    trainable: Sequence[str] = ()
    same: Sequence[tuple[int, int]] = ()  # outputs that must be equal bit for bit
    slack: float = 0.0  # relative error that is allowed beside the roundings: that of c


class Draw:
    """Random choices of one case, or of one of its rounds; whatever it gives depends on its seed alone."""

    def __init__(self, seed: str, device: torch.device, options: argparse.Namespace):
        self.random, self.device, self.options = random.Random(seed), device, options
        self.generator = torch.Generator(device).manual_seed(self.random.getrandbits(48))
        self.backend = options.backend

    def of(self, *values):
        return self.random.choice(values)

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def size(self, zero: float = 0.0, most: int = 0) -> int:
        most, u = most or self.options.largest, self.random.random()
        if u < zero:
            return 0
        if u < zero + 0.08:
            return 1
        if u < 0.6:  # near the edges of tiles
            near = 2 ** self.random.randint(2, max(2, most.bit_length() - 1))
            return min(most, near * self.of(1, 1, 3) // self.of(1, 2) + self.of(-1, 0, 0, 0, 1, 8))
        return int(math.exp(self.random.uniform(0, math.log(most))))

    def sizes(self, count: int, zero: float = 0.0) -> list[int]:
        """Sizes of which any two make a matrix within the byte budget in float64."""
        found = [self.size(zero if i < 1 else zero / 4) for i in range(count)]
        most = self.options.bytes // 8
        while (two := sorted(found)[-2:]) and math.prod(two) > most:
            found[found.index(two[-1])] = max(1, two[-1] // 2)
        return found

    def rank(self) -> int:
        return self.of(1, 2, 3, 4, 8, 8, 16, 16, 17, 24, 32, 64, self.size(most=min(384, self.options.largest)))

    def dtype(self) -> torch.dtype:
        return DTYPES[self.of(*self.options.dtypes)]

    def beside(self, dtype: torch.dtype) -> torch.dtype:
        """Of an adapter: float32 or that of W."""
        return self.of(torch.float32, dtype)

    def layout(self) -> str:
        return self.of(*LAYOUTS)

    def lead(self, M: int) -> tuple[int, ...]:
        if M == 1 and self.chance(0.4):
            return ()
        kind = self.of(1, 1, 2, 3)
        if kind == 1:
            return (M,)
        a = self.of(1, 2, 3)
        return (a, max(M // a, min(M, 1))) if kind == 2 else (a, 1, max(M // a, min(M, 1)))

    def scaling(self) -> float:
        return self.of(1.0, 2.0, 2.0, 0.5, 0.7, -1.3, 16.0, 0.0)

    def normal(self, *shape: int, std: float = 1.0) -> Tensor:
        return torch.randn(shape, generator=self.generator, device=self.device, dtype=torch.float64) * std

    def lay(self, values: Tensor, dtype: torch.dtype, layout: str) -> Tensor:
        """These values (the first of them, where they are expanded), with NaN around and between them."""
        if layout == "expanded" and values.ndim and values.shape[0]:
            return self.lay(values[:1], dtype, "plain").expand(values.shape)
        if self.chance(0.15):  # the shapes of the round before, and other strides
            layout = self.of("plain", "transposed", "sliced", "padded")
        order = list(range(values.ndim))
        if layout == "transposed" and values.ndim > 1:
            order[-2:] = order[:-3:-1]
        strides, step = [0] * values.ndim, 2 if layout == "sliced" else 1
        for i in reversed(order):
            strides[i], step = step, step * max(1, values.shape[i])
            if layout == "padded" and i == order[-1]:
                step += self.of(1, 3, 8)
        offset = self.of(0, 0, 1, 2, 3, 4, 8)
        memory = torch.full((offset + step + 8,), math.nan, dtype=dtype, device=self.device)
        return memory.as_strided(values.shape, strides, offset).copy_(values)


# the formulas of a layer: truth is reference.dora


@dataclass
class Layer:
    """What a layer of a call has beside its tensors, which are named W0, A0, B0, m0, b0, c0."""

    i: int
    s: float = 1.0
    adapted: bool = True
    mode: str = "none"
    p: float = 0.0
    seed: int = 0

    def mask(self, x: Tensor) -> Tensor:
        """(..., K) of 0 and 1 / (1 - p)."""
        if self.mode == "none":
            return torch.ones_like(x, dtype=torch.float64)
        ones = x.new_ones((x.shape[:-1].numel(), x.shape[-1]), dtype=torch.float64)
        return drop(ones, torch.tensor(self.seed, device=x.device), self.p).view(x.shape)

    def parts(self, t: Tensors) -> list[Tensor | None]:
        return [t.get(f"{n}{self.i}") for n in "WABmbc"]

    def member(self, t: Tensors) -> DoraLayer:
        W, A, B, m, bias, c = self.parts(t)
        return DoraLayer(W, A, B, m, self.s, bias, c) if self.adapted else DoraLayer(W, bias=bias)

    def truth(self, t: Tensors, x: Tensor) -> Tensor:
        W, A, B, m, bias, c = self.parts(t)
        if not self.adapted:
            return x @ W.mT if bias is None else x @ W.mT + bias
        dropped = None if self.mode == "none" else lambda x: x * self.mask(x)
        return reference.dora(x, W, A, B, m, self.s, bias, c, dropped, self.mode)

    def naive(self, t: Tensors, x: Tensor) -> Tensor:
        W, A, B, m, bias, c = self.parts(t)
        base = x @ W.mT
        if self.adapted:
            A, B = A.to(x.dtype), B.to(x.dtype)
            c = torch.linalg.vector_norm((W + self.s * (B @ A)).detach(), dim=1) if c is None else c
            g = (m.to(c.dtype) / c.clamp_min(1e-12 if c.dtype != torch.float16 else 1e-7)).to(x.dtype)
            xd = x * self.mask(x).to(x.dtype)
            lora = self.s * (xd @ A.mT) @ B.mT
            base = base + (g - 1) * (xd @ W.mT) + g * lora if self.mode == "peft" else g * (base + lora)
        return base if bias is None else base + bias.to(x.dtype)

    def size(self, t: Tensors, x: Tensor, p: int) -> Tensor:
        W, A, B, m, bias, c = self.parts(t)
        base = x @ W.mT
        if self.adapted:
            g = m / (self.c**p if c is None else c).clamp_min(1e-12**p)
            xd = x * self.mask(x) ** p
            lora = abs(self.s) ** p * (xd @ A.mT) @ B.mT
            # In "peft" kernels add (g - 1) times what they have rounded, the low-rank term in it: docs/contract.md, rounding.
            base = base + (g + 1) * (xd @ W.mT + lora) if self.mode == "peft" else g * (base + lora)
        return base if bias is None else base + bias

    def look(self, t: Tensors) -> float:
        """Remember the true c; how far float32 may be from it, relative."""
        W, A, B, _, _, c = self.parts(t)
        if not self.adapted or c is not None:
            return 0.0
        self.c, whole = reference.norm(W, A, B, self.s), reference.norm(W.abs(), A.abs(), B.abs(), abs(self.s))
        return norm_eps(W.dtype) * max((whole / self.c)[self.c > 1e-12].tolist(), default=0.0)


def norm_eps(dtype: torch.dtype) -> float:
    return CLOSE * torch.finfo(torch.promote_types(dtype, torch.float32)).eps


def adapted(e: Draw, N: int, K: int, r: int, s: float, kind: str, dtypes: dict, layouts: dict) -> tuple[Tensors, Tensor]:
    """W, A, B and m as they are laid out, and the true c. m is tiny where c is 0, or g would be infinite; an expanded m is one
    value for all rows, and g of a row with a small c would take dz = g dy past what float16 holds."""
    *values, m = weights(e, N, K, r, s, kind)
    t = {n: e.lay(v, dtypes[n], layouts[n]) for n, v in zip("WAB", values, strict=True)}
    c = reference.norm(t["W"], t["A"], t["B"], s)
    zero = c == 0
    m = m.where(~zero, 1e-12)
    layout = layouts["m"]
    if zero.any() or (layout == "expanded" and N and m.abs().max() > 1e3 * c.min()):
        layout = "plain"
    t["m"] = e.lay(m, dtypes["m"], layout)
    return t, c


def weights(d: Draw, N: int, K: int, r: int, s: float, kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W, A, B and m in float64."""
    W, A = d.normal(N, K, std=max(K, 1) ** -0.5), d.normal(r, K, std=max(K, 1) ** -0.5)
    B = d.normal(N, r, std=0.0 if kind == "start" else 0.1 * r**-0.5)
    if kind == "zero_rows":
        W[::2] = B[::2] = 0
    if kind == "cancelling" and s:
        W[::2] = -s * (B @ A)[::2] + d.normal(N, K, std=0.01 * max(K, 1) ** -0.5)[::2]
    m = reference.norm(W, A, B, s) * (1 + d.of(0.0015, 0.05) * d.normal(N))
    if kind == "zero_rows":
        m[::2] = 1e-12
    if kind == "zero_m":
        m[::3] = 0
    if kind == "negative_m":
        m[::2] *= -1
    if kind == "large_m":
        m[::3] *= 30
    return W, A, B, m


KINDS = ("plain", "plain", "start", "zero_rows", "zero_m", "negative_m", "large_m", "cancelling")


def layers(
    d: Draw, shapes: Sequence[tuple[int, int]], dtype: torch.dtype, all_adapted: bool, biases: tuple[float, ...] = (1.0, 100.0)
) -> Callable:
    """Choices for these (N, K): a function of a round's Draw that gives its tensors and layers."""
    p, mode = d.of((0.0, "none"), (0.0, "none"), (0.3, "lora"), (0.5, "peft"))
    fixed = []
    for N, K in shapes:
        has_adapter = all_adapted or d.chance(0.8)
        dtypes = {"W": dtype, **{n: d.beside(dtype) for n in "ABm"}}
        if d.chance(0.4):
            dtypes["b"] = d.dtype()
        if has_adapter and d.chance(0.5):
            dtypes["c"] = torch.promote_types(dtype, torch.float32)
        layouts = {n: d.layout() for n in "WABmb"} | {"c": d.of(*(n for n in LAYOUTS if n != "expanded"))}
        fixed.append((N, K, d.rank(), d.scaling(), d.of(*KINDS), has_adapter, dtypes, layouts))

    def fresh(e: Draw) -> tuple[Tensors, list[Layer], float]:
        tensors, found, slack = {}, [], 0.0
        for i, (N, K, r, s, kind, has_adapter, dtypes, layouts) in enumerate(fixed):
            own, c = adapted(e, N, K, r, s, kind, dtypes, layouts)
            if "c" in dtypes:
                own["c"] = e.lay(c, dtypes["c"], layouts["c"])
            if "b" in dtypes:
                own["b"] = e.lay(e.normal(N, std=e.of(*biases)), dtypes["b"], layouts["b"])
            tensors |= {f"{n}{i}": own[n] for n in own if has_adapter or n in "Wb"}
            found.append(Layer(i, s, has_adapter, mode, p, e.random.getrandbits(62)))
            slack += found[-1].look(tensors)
        return tensors, found, slack

    fresh.dropout = {"dropout_p": p, "dropout_mode": mode} if p else {}
    return fresh


def seeds(e: Draw, found: list[Layer], fresh: Callable) -> dict:
    """The seed of each layer, as a number or a tensor; nothing without dropout."""
    if not fresh.dropout:
        return {}
    return {"seed": [torch.tensor(z.seed, device=e.device) if e.chance(0.5) else z.seed for z in found]}


# the functions


def linear(d: Draw) -> Callable[[Draw], Problem]:
    M, N, K = d.sizes(3, zero=0.05)
    dtype, lead, layout = d.dtype(), d.lead(M), d.layout()
    fresh = layers(d, [(N, K)], dtype, True)
    extra = fresh.dropout | {"backend": d.backend, "keep_inner": d.chance(0.2)}

    def one(e: Draw) -> Problem:
        t, (z,), slack = fresh(e)
        t["x"] = e.lay(e.normal(*lead, K), dtype, layout)
        seed = {n: v[0] for n, v in seeds(e, [z], fresh).items()}

        def call(t: Tensors) -> list[Tensor]:
            W, A, B, m, bias, c = z.parts(t)
            return [dora_linear(t["x"], W, A, B, m, s=z.s, bias=bias, norm=c, **extra, **seed)]

        return of_layers(t, call, [z], lambda f, t: [f(z, t, t["x"])], dtype, slack)

    return one


def of_layers(t: Tensors, call: Formula, found: list[Layer], compose: Callable, dtype: torch.dtype, slack: float) -> Problem:
    """``compose(f, t)`` builds the outputs of layers ``f(layer, tensors, input)``."""
    return Problem(
        t,
        call,
        truth=lambda t: compose(Layer.truth, t),
        size=lambda t, p: compose(lambda z, t, x: z.size(t, x, p), t),
        naive=lambda t: compose(Layer.naive, t),
        dtype=dtype,
        trainable=[n for n in t if n[0] != "W"],
        slack=slack,
    )


def group(d: Draw) -> Callable[[Draw], Problem]:
    M, K, *Ns = d.sizes(d.of(3, 4, 5, 6), zero=0.05)
    dtype, lead, layout = d.dtype(), d.lead(M), d.layout()
    fresh = layers(d, [(N, K) for N in Ns], dtype, False)
    extra = fresh.dropout | {"backend": d.backend, "keep_inner": d.chance(0.2)}

    def one(e: Draw) -> Problem:
        t, found, slack = fresh(e)
        t["x"] = e.lay(e.normal(*lead, K), dtype, layout)
        more = extra | seeds(e, found, fresh)

        def call(t: Tensors) -> list[Tensor]:
            return list(dora_linear_group(t["x"], [z.member(t) for z in found], **more))

        return of_layers(t, call, found, lambda f, t: [f(z, t, t["x"]) for z in found], dtype, slack)

    return one


def mlp(d: Draw) -> Callable[[Draw], Problem]:
    M, K, inner, N = d.sizes(4, zero=0.05)
    dtype, lead, layout, act = d.dtype(), d.lead(M), d.layout(), d.of(*ACTS)
    fresh = layers(d, [(inner, K), (inner, K), (N, inner)], dtype, False, (1.0,))
    extra = fresh.dropout | {"backend": d.backend, "keep_inner": d.chance(0.2), "act": act}

    def one(e: Draw) -> Problem:
        t, found, slack = fresh(e)
        t["x"] = e.lay(e.normal(*lead, K), dtype, layout)
        more = extra | seeds(e, found, fresh)

        def call(t: Tensors) -> list[Tensor]:
            return [dora_mlp(t["x"], *(z.member(t) for z in found), **more)]

        def compose(f: Callable, t: Tensors, gated: Callable = lambda gate, up: ACTS[act](gate) * up) -> list[Tensor]:
            gate, up = (f(z, t, t["x"]) for z in found[:2])
            return [f(found[2], t, gated(gate, up))]

        problem = of_layers(t, call, found, compose, dtype, slack)
        problem.size = lambda t, p: compose(lambda z, t, x: z.size(t, x, p), t, lambda gate, up: bound(gate, p) * up)
        return problem

    return one


def bound(q: Tensor, p: int) -> Tensor:
    """Of |f(z)|**p, q = |z|**p, for the activations; its slope bounds (|f'| + |f''| |z|)**p with |f'| <= 1.2, |f''| <= 0.8."""
    return 1.2 * q + 0.4 * q**2 if p == 1 else 1.44 * q + 1.28 * q**1.5 + 0.32 * q**2


def norm(d: Draw) -> Callable[[Draw], Problem]:
    N, K = d.sizes(2, zero=0.05)
    r, s, dtype, axis = d.rank(), d.scaling(), d.dtype(), d.of(1, 1, 1, 0)
    kind, how = d.of("plain", "start", "zero_rows", "cancelling"), d.of("plain", "state", "squared", "gradient")
    if how == "gradient":  # where c is 0 the true one is none
        kind, N, K = "plain", max(N, 1), max(K, 1)
    dtypes, layouts = dict(W=dtype, A=d.beside(dtype), B=d.beside(dtype)), {n: d.layout() for n in "WAB"}
    with_base, budget = d.chance(0.4), d.of(None, None, 2**20 + 64 * (N + K) * (r + 8))

    def one(e: Draw) -> Problem:
        values = dict(zip("WAB", weights(e, N, K, r, s, kind), strict=False))
        t = {n: e.lay(v, dtypes[n], layouts[n]) for n, v in values.items()}
        # An expanded A flipped has the same bits, which a state reuses, but other strides, and so perhaps another last bit.
        t["A2"] = t["A"].flip(0) if r > 1 and layouts["A"] != "expanded" else 2 * t["A"]

        def call(t: Tensors) -> list[Tensor]:
            W, extra = t["W"] if axis else t["W"].mT, {"s": s, "norm_axis": axis, "max_bytes": budget, "backend": d.backend}
            if with_base:
                extra["base_sqnorm"] = dora_base_sqnorm(W, backend=d.backend)
            if how != "state":
                return [dora_norm(t["W"], t["A"], t["B"], squared=how == "squared", detach=how != "gradient", **extra)]
            states = [dora_norm_state(W)]
            for A in ("A", "A", "A2"):
                states.append(dora_norm(t["W"], t[A], t["B"], state=states[-1], **extra))
            fresh = [dora_norm(t["W"], t[A], t["B"], **extra) for A in ("A", "A2")]
            return [*(state.c for state in states[1:]), *fresh]

        def through(f: Callable, t: Tensors, names: Sequence[str] = ("A", "A", "A2", "A", "A2")) -> list[Tensor]:
            names = names if how == "state" else names[:1]
            three = [(t["W"], t[A], t["B"]) if axis else (t["W"].mT, t["B"].mT, t[A].mT) for A in names]
            return [f(*each) for each in three]

        def truth(W: Tensor, A: Tensor, B: Tensor) -> Tensor:
            c = reference.norm(W, A, B, s)
            return c.square() if how == "squared" else c

        def naive(W: Tensor, A: Tensor, B: Tensor) -> Tensor:
            wide = torch.promote_types(W.dtype, torch.float32)
            c = torch.linalg.vector_norm(W.to(wide) + s * B.to(wide) @ A.to(wide), dim=1)
            return c.square() if how == "squared" else c

        def size(W: Tensor, A: Tensor, B: Tensor) -> Tensor:
            """Of c, or c**2; with the gradient that absolute terms have: dc V / c, where c is the true one."""
            whole = W + abs(s) * B @ A
            if how == "gradient":
                true = through(truth, {n: v.double() for n, v in problem.tensors.items()})[0].detach()
                return (whole.square() / (2 * true[:, None])).sum(1) + reference.norm(W, A, B, abs(s)).detach()
            return whole.square().sum(1) if how == "squared" else reference.norm(W, A, B, abs(s))

        problem = Problem(
            t,
            call,
            truth=lambda t: through(truth, t),
            size=lambda t, p: [v**p for v in through(size, {n: v ** (1 / p) for n, v in t.items()})],
            naive=lambda t: through(naive, t),
            dtype=torch.promote_types(dtype, torch.float32),
            trainable=("A", "B") if how == "gradient" else (),
            same=((0, 1), (0, 3), (2, 4)) if how == "state" else (),
        )
        return problem

    return one


def base_sqnorm(d: Draw) -> Callable[[Draw], Problem]:
    (N, K), dtype, layout = d.sizes(2, zero=0.05), d.dtype(), d.layout()
    wide = torch.promote_types(dtype, torch.float32)

    def one(e: Draw) -> Problem:
        return Problem(
            {"W": e.lay(e.normal(N, K), dtype, layout)},
            call=lambda t: [dora_base_sqnorm(t["W"], backend=d.backend)],
            truth=lambda t: [t["W"].square().sum(1)],
            size=lambda t, p: [(t["W"] ** (2 / p)).sum(1) ** p],
            naive=lambda t: [t["W"].to(wide).square().sum(1)],
            dtype=wide,
        )

    return one


def scale(d: Draw) -> Callable[[Draw], Problem]:
    N, dtypes, layouts = d.size(zero=0.05), (d.dtype(), d.of(torch.float32, torch.float64)), (d.layout(), d.layout())

    def one(e: Draw) -> Problem:
        c = e.normal(N).abs() + 0.1
        c[:: e.of(2, 3, N + 1)] = 0
        values = c * (1 + 0.05 * e.normal(N)), c
        t = {n: e.lay(*rest) for n, *rest in zip("mc", values, dtypes, layouts, strict=True)}

        def g(t: Tensors, floor: float = 1e-12) -> list[Tensor]:
            return [t["m"] / t["c"].clamp_min(floor)]

        return Problem(
            t,
            call=lambda t: [dora_scale(t["m"], t["c"])],
            truth=g,
            size=lambda t, p: g(t, 1e-12**p),
            dtype=dtypes[1],
            trainable=("m", "c"),
        )

    return one


def composed(d: Draw, delta: bool) -> Callable[[Draw], Problem]:
    (M, N), s, dtype = d.sizes(2, zero=0.05), d.scaling(), d.dtype()
    wide, lead, biased = torch.promote_types(dtype, torch.float32), d.lead(M), not delta and d.chance(0.5)
    dtypes = {"base": dtype, "lora": d.dtype(), "g": wide} | ({"bias": d.dtype()} if biased else {})
    layouts = {n: d.layout() for n in dtypes}
    spread = d.of(0.0015, 0.05, 1.0)

    def one(e: Draw) -> Problem:
        values = {"base": e.normal(*lead, N), "lora": e.normal(*lead, N, std=0.1), "g": 1 + spread * e.normal(N)}
        values["bias"] = e.normal(N, std=e.of(1.0, 100.0))
        t = {n: e.lay(values[n], dtypes[n], layouts[n]) for n in dtypes}

        def y(t: Tensors, s: float, g: Tensor, less: float) -> list[Tensor]:
            out = (g - less) * t["base"] + g * (s * t["lora"])
            return [out + t["bias"] if biased else out]

        def call(t: Tensors) -> list[Tensor]:
            if delta:
                return [dora_delta(t["base"], t["lora"], t["g"], s=s, backend=d.backend)]
            return [dora_compose(t["base"], t["lora"], t["g"], s=s, bias=t.get("bias"), backend=d.backend)]

        return Problem(
            t,
            call,
            truth=lambda t: y(t, s, t["g"], float(delta)),
            size=lambda t, p: y(t, abs(s) ** p, t["g"], -float(delta)),
            naive=lambda t: y(t, s, t["g"].to(dtype), float(delta)),
            dtype=wide,
            trainable=tuple(t),
        )

    return one


def compose(d: Draw) -> Callable[[Draw], Problem]:
    return composed(d, False)


def delta(d: Draw) -> Callable[[Draw], Problem]:
    return composed(d, True)


def init(d: Draw) -> Callable[[Draw], Problem]:
    (N, K), r, dtype, layout = d.sizes(2, zero=0.05), d.rank(), d.dtype(), d.layout()
    wide = torch.promote_types(dtype, torch.float32)
    adapter = d.of(None, dtype, torch.float32)

    def one(e: Draw) -> Problem:
        seed, W = e.random.getrandbits(40), e.lay(e.normal(N, K), dtype, layout)

        def call(t: Tensors) -> list[Tensor]:
            generator = torch.Generator(e.device).manual_seed(seed)
            A, B, m = dora_init(t["W"], r, dtype=adapter, generator=generator)
            if (A.dtype, B.dtype, m.dtype) != (adapter or wide, adapter or wide, wide):
                raise Wrong(f"dtypes {A.dtype}, {B.dtype}, {m.dtype}")
            if K and A.numel() > MANY and not 0.5 < A.double().abs().max() * math.sqrt(K) < 1.01:
                raise Wrong(f"A is at most {A.abs().max():.3g}, wanted {K**-0.5:.3g}")
            y = dora_norm(t["W"], A.to(wide), B.to(wide), s=2.0) if A.dtype == torch.float32 else m
            return [B, m, y]

        def truth(t: Tensors) -> list[Tensor]:
            c = t["W"].square().sum(1).sqrt()
            return [c.new_zeros((N, r)), c, c]

        def size(t: Tensors, p: int) -> list[Tensor]:
            c = (t["W"] ** (2 / p)).sum(1).sqrt() ** p
            return [c.new_zeros((N, r)), c, c]

        return Problem({"W": W}, call, truth, size, dtype=wide)

    return one


def merge(d: Draw, back: bool = False) -> Callable[[Draw], Problem]:
    N, K = d.sizes(2, zero=0.05)
    r, s, dtype, layouts = d.rank(), d.scaling(), d.dtype(), {n: d.layout() for n in "WABm"}
    dtypes = {"W": dtype, **{n: d.beside(dtype) for n in "ABm"}}
    kind = d.of(*(k for k in KINDS if not (back and k == "zero_m")))
    given = back or d.chance(0.5)

    def one(e: Draw) -> Problem:
        t, c = adapted(e, N, K, r, s, kind, dtypes, layouts)
        if back:  # a row that was wiped out does not come back
            t["m"] = torch.where(t["m"] == 0, 1, t["m"])
        slack = 0.0
        if given:
            t["c"] = e.lay(c, torch.promote_types(dtype, torch.float32), "sliced")
        else:
            slack = Layer(0, s).look({f"{n}0": v for n, v in t.items()})

        def call(t: Tensors) -> list[Tensor]:
            f = dora_unmerge if back else dora_merge
            return [f(t["W"], t["A"], t["B"], t["m"], s=s, norm=t.get("c"), backend=d.backend)]

        def formula(t: Tensors, s: float, c: Tensor) -> list[Tensor]:
            W, A, B, m = (t[n] for n in "WABm")
            g = m / c
            return [(W / g[:, None]).where(c[:, None] > 1e-12, 0) - s * B @ A if back else g[:, None] * (W + s * B @ A)]

        def norm_of(t: Tensors) -> Tensor:
            return t["c"] if given else c.to(t["m"].dtype)

        def size(t: Tensors, p: int) -> list[Tensor]:
            norm = (t["c"] if given else c**p).clamp_min(1e-12**p)
            return formula(t, -(abs(s) ** p) if back else abs(s) ** p, norm)

        return Problem(t, call, lambda t: formula(t, s, norm_of(t).clamp_min(1e-12)), size, dtype=dtype, slack=slack)

    return one


def unmerge(d: Draw) -> Callable[[Draw], Problem]:
    return merge(d, back=True)


FUNCTIONS = {f.__name__: f for f in (linear, group, mlp, norm, base_sqnorm, scale, compose, delta, init, merge, unmerge)}
ORDER = ("linear", "group", "mlp", "norm", "linear", "merge", "compose", "group", "mlp", "norm", "linear", "unmerge", "delta")
ORDER += ("base_sqnorm", "linear", "scale", "init")


# running and judging


def run(
    f: Formula, tensors: Tensors, needs: Sequence[str], dys: Sequence[Tensor | None] | Callable
) -> dict[str, Tensor | None]:
    """Outputs and gradients by name. ``dys`` may make them from the outputs; None for an output that nobody uses."""
    leaves = {n: tensors[n].detach().requires_grad_() for n in needs}
    ys = list(f(tensors | leaves))
    found: dict[str, Tensor | None] = {f"y{i}": y for i, y in enumerate(ys)}
    dys = dys(ys) if callable(dys) else dys
    used = [(y, dy) for y, dy in zip(ys, dys, strict=True) if dy is not None and y.requires_grad]
    if leaves and used:
        outputs, weights = map(list, zip(*used, strict=True))
        grads = torch.autograd.grad(outputs, list(leaves.values()), weights, allow_unused=True)
        found |= {f"d{n}": d for n, d in zip(leaves, grads, strict=True)}
    return found


def powers(t: Tensor, p: int, tiny: float) -> Tensor:
    """|t|**p; the smallest normal number is added, for numbers below it lose digits."""
    return (t.detach().double().abs() + tiny) ** p


def judge(problem: Problem, got: dict, needs: Sequence[str], dys: Sequence[Tensor | None]) -> float:
    """The largest error as a share of its budget; raises where it is over 1, or a result is missing or has another form."""
    t = {n: v.detach() for n, v in problem.tensors.items()}
    dense = all(0 not in v.stride() or v.numel() < 2 for v in (*t.values(), *(dy for dy in dys if dy is not None)))
    p = 2 if dense else 1
    tiny = torch.finfo(torch.float16).tiny if problem.dtype == torch.float16 else 0.0
    wide_dys = [None if dy is None else dy.double() for dy in dys]
    truth = run(problem.truth, {n: v.double() for n, v in t.items()}, needs, wide_dys)
    size_dys = [None if dy is None else powers(dy, p, tiny) for dy in dys]
    size = run(lambda t: problem.size(t, p), {n: powers(v, p, tiny) for n, v in t.items()}, needs, size_dys)
    naive = {}
    if problem.naive is not None:
        naive = run(problem.naive, t, needs, dys) if any(v.numel() >= MANY for v in truth.values() if v is not None) else {}
    closest = 0.0
    for name, want in truth.items():
        mine = got.get(name)
        if want is None:  # of an output that nobody uses
            if mine is not None and mine.count_nonzero():
                raise Wrong(f"{name} is not 0")
            continue
        if mine is None:
            raise Wrong(f"{name} is missing")
        if mine.shape != want.shape or (name[0] == "d" and mine.dtype != t[name[1:]].dtype):
            raise Wrong(f"{name} is {tuple(mine.shape)} {mine.dtype}, wanted {tuple(want.shape)}")
        if want.numel() == 0:
            continue
        eps = max(torch.finfo(mine.dtype).eps, torch.finfo(problem.dtype).eps)
        exact = eps == torch.finfo(torch.float64).eps  # the truth has no more digits
        eps *= 1 if eps > 1e-6 else WIDER
        whole = size[name].detach().abs() ** (1 / p)
        error = (mine.detach().double() - want.detach()).abs()
        error = error.where(whole < torch.finfo(mine.dtype).max / 4, 0)  # may be infinite
        limit = (CLOSE * eps + problem.slack) * whole + torch.finfo(mine.dtype).tiny
        share = (error / limit).nan_to_num(nan=math.inf).max().item()
        if share > 1:
            worst = tuple(int(i) for i in torch.unravel_index((error / limit).nan_to_num(nan=math.inf).argmax(), error.shape))
            raise Wrong(
                f"{name}{list(worst)} of {tuple(want.shape)} is {mine[worst]:.6g}, wanted {want[worst]:.6g}, "
                f"{share:.3g} times its budget; {int((error > limit).sum())} like it"
            )
        closest = max(closest, share)
        theirs = naive.get(name)
        if theirs is not None and want.numel() >= MANY and theirs.isfinite().all() and not exact:
            budget = 2 * rms(theirs.detach().double() - want) + (eps + problem.slack) * rms(whole)
            if rms(error) > budget:
                raise Wrong(f"{name} {tuple(want.shape)}: root mean square of errors {rms(error):.3g}, budget {budget:.3g}")
    return closest


def same_bits(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return a is b
    words = {8: torch.int64, 4: torch.int32, 2: torch.int16}[a.element_size()]
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.detach().view(words), b.detach().view(words))


@dataclass
class Kept:
    """Results of earlier rounds, and what they were."""

    results: list[dict] = field(default_factory=list)
    copies: list[dict] = field(default_factory=list)

    def add(self, found: dict) -> None:
        self.results.append(found)
        self.copies.append({n: None if t is None else t.detach().clone() for n, t in found.items()})

    def check(self) -> None:
        for k, (now, then) in enumerate(zip(self.results, self.copies, strict=True)):
            for name, t in now.items():
                if not same_bits(t, then[name]):
                    raise Wrong(f"{name} of round {k} was changed by a later call")


def one_round(e: Draw, fresh: Callable[[Draw], Problem], kept: Kept) -> float:
    mode = e.of("grad", "grad", "grad", "no_grad", "inference")
    with ExitStack() as stack:
        if e.device.type == "cuda":
            stack.enter_context(torch.cuda.device(e.random.randrange(torch.cuda.device_count())))
            if e.chance(0.4):
                side = torch.cuda.Stream(e.device)
                side.wait_stream(torch.cuda.current_stream(e.device))
                stack.callback(torch.cuda.synchronize, e.device)
                stack.enter_context(torch.cuda.stream(side))
                if e.chance(0.5):  # a stream of a device makes it the current one
                    stack.enter_context(torch.cuda.device(e.random.randrange(torch.cuda.device_count())))
        if mode != "grad":
            stack.enter_context(torch.no_grad() if mode == "no_grad" else torch.inference_mode())
        problem = fresh(e)
        needs = [n for n in problem.trainable if mode == "grad" and e.chance(0.7)]
        before = {n: t.clone() for n, t in problem.tensors.items()}
        dys: list[Tensor | None] = []

        def draw(ys: list[Tensor]) -> list[Tensor | None]:
            for y in ys:
                dy = e.lay(e.normal(*y.shape), y.dtype, e.layout())
                dys.append(dy if len(ys) == 1 or e.chance(0.8) else None)
            return dys

        got = run(problem.call, problem.tensors, needs, draw)
        again = run(problem.call, problem.tensors, needs, dys)
        for name, t in got.items():
            if not same_bits(t, again[name]):
                raise Wrong(f"{name} differs from call to call")
        for i, j in problem.same:
            if not same_bits(got[f"y{i}"], got[f"y{j}"]):
                raise Wrong(f"y{i} and y{j} differ in bits")
        for name, t in problem.tensors.items():
            if not same_bits(t, before[name]):
                raise Wrong(f"{name} was written to")
        closest = judge(problem, got, needs, dys)
        kept.add(got)
        kept.check()
        return closest


def case(k: int, options: argparse.Namespace, counts: Counter, closest: dict[str, float]) -> str | None:
    """What is wrong with case k, if anything."""
    name = options.functions[k % len(options.functions)]
    device, kept = torch.device(options.device), Kept()
    choose = random.Random(f"{options.seed} {k}")
    if device.type == "cuda":
        device = torch.device("cuda", choose.randrange(torch.cuda.device_count()))
    i = -1
    try:
        fresh = FUNCTIONS[name](Draw(f"{options.seed} {k} choices", device, options))
        for i in range(ROUNDS):
            share = one_round(Draw(f"{options.seed} {k} {i}", device, options), fresh, kept)
            counts[name] += 1
            closest[name] = max(closest.get(name, 0.0), share)
    except Exception as error:  # a wrong result, or whatever a call raises
        what = str(error) if isinstance(error, Wrong) else f"{type(error).__name__}: {error}"
        if options.raises:
            raise
        return f"{name}, round {i}: {' '.join(what.split())[:300]}"
    return None


def numbers(text: str) -> range:
    first, _, last = text.partition("-")
    return range(int(first), int(last or first) + 1)


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--seconds", type=float, default=60.0, help="start no case after this time")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--backend", default="auto", choices=("auto", "eager", "triton"))
    parser.add_argument("--functions", type=lambda s: s.split(","), default=list(ORDER), help=f"of {', '.join(FUNCTIONS)}")
    parser.add_argument("--dtypes", type=lambda s: s.split(","), help=f"of {', '.join(DTYPES)}; default: all that can run")
    parser.add_argument("--largest", type=int, help="size; default 2048 on a GPU, 200 on a CPU, 80 interpreted")
    parser.add_argument("--bytes", type=int, help="of the largest matrix in float64; default 128 MiB on a GPU, 256 KiB else")
    parser.add_argument("--only", type=numbers, help="case K, or cases J-K")
    parser.add_argument("--raises", action="store_true", help="end with the traceback of the first failure")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--commit", help="recorded in the JSON")
    options = parser.parse_args(argv)
    kernels = options.backend == "triton"
    on_gpu, slow = options.device == "cuda", kernels and INTERPRETED
    # The interpreter multiplies bfloat16 wrongly, and no kernel takes float64.
    usual = [n for n in DTYPES if not (slow and n == "bf16") and not (kernels and n == "fp64")]
    options.dtypes = options.dtypes or usual
    options.largest = options.largest or (2048 if on_gpu else 80 if slow else 200)
    options.bytes = options.bytes or (2**27 if on_gpu else 2**18)
    if unknown := (set(options.functions) - set(FUNCTIONS)) | (set(options.dtypes) - set(DTYPES)):
        parser.error(f"unknown functions or dtypes: {', '.join(sorted(unknown))}")
    return options


def command(options: argparse.Namespace, k: int) -> str:
    """Runs case k again."""
    words = ["TRITON_INTERPRET=1"] if INTERPRETED else []
    words += ["python", "-m", "tests.fuzz", "--device", options.device, "--backend", options.backend]
    words += ["--seed", str(options.seed), "--only", str(k)]
    if options.functions != list(ORDER):
        words += ["--functions", ",".join(options.functions)]
    words += ["--dtypes", ",".join(options.dtypes), "--largest", str(options.largest), "--bytes", str(options.bytes)]
    return shlex.join(words)


def main(argv: Sequence[str] | None = None) -> dict:
    options, start = parse(argv), time.perf_counter()
    counts: Counter[str] = Counter()
    closest: dict[str, float] = {}
    failures: list[dict] = []
    k = cases = 0
    for k in options.only if options.only is not None else range(10**9):
        if options.only is None and time.perf_counter() - start > options.seconds:
            break
        cases += 1
        what = case(k, options, counts, closest)
        if what:
            failures.append({"case": k, "what": what, "command": command(options, k)})
            print(f"WRONG {what} | {failures[-1]['command']}", flush=True)
            if len(failures) >= MOST_FAILURES:
                break
    seconds = time.perf_counter() - start
    print(
        f"{cases} cases, {sum(counts.values())} rounds in {seconds:.1f} s, {len(failures)} wrong; rounds of each: {dict(counts)}"
    )
    print("largest error as a share of its budget:", {n: round(v, 2) for n, v in closest.items()}, flush=True)
    about = {"torch": torch.__version__, "device": options.device, "backend": options.backend, "seed": options.seed}
    about |= {"interpreted": INTERPRETED, "commit": options.commit, "dtypes": options.dtypes}
    if options.device == "cuda":
        about |= {"gpu": torch.cuda.get_device_name(), "gpus": torch.cuda.device_count()}
    result = {"about": about, "seconds": round(seconds, 1), "cases": cases, "rounds": dict(counts), "failures": failures}
    save(options.json, result | {"share_of_budget": closest})
    if failures:
        raise SystemExit(1)
    return result


if __name__ == "__main__":
    main()
