"""A call of any public function with random arguments, its float64 truth, and the error that it may have.

A generator of :data:`FUNCTIONS` draws shapes (0, 1, odd, near powers of two), strides, dtypes, dropout and options once, and gives a
function that draws the tensors of each round: values, alignment of every pointer, some strides. The same cases are a slice of CI
(tests/test_cases.py on the CPU, tests/triton/test_cases.py on the kernels), what hypothesis shrinks, and the endless run of
tests/fuzz.py. A round asks that

* outputs and gradients are within their error budget of the formulas in tests/reference.py,
* the same call gives the same bits, and changes neither its inputs nor the results of the rounds before.

The memory between and around the elements of a tensor is NaN.

The budget of an element is CLOSE roundings of its size: the root of the sum of its squared terms, which is how far
independent roundings of all values on the way can move it (the sum of the absolute terms where a tensor is expanded, so that
its roundings are equal). The root mean square of a tensor's errors may moreover be twice that of naive code in the same
dtype, plus one rounding, as in tests/close.py.
"""

from __future__ import annotations

import math
import os
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from optree import tree_leaves
from torch import Tensor

from fdora.autograd.norm import smallest_bytes_of
from fdora.eager.dropout import drop
from fdora.functional import (
    DoraLayer,
    dora_base_sqnorm,
    dora_compose,
    dora_conv1d,
    dora_conv2d,
    dora_conv3d,
    dora_delta,
    dora_embedding,
    dora_experts,
    dora_experts_mlp,
    dora_init,
    dora_linear,
    dora_linear_group,
    dora_linear_multi,
    dora_merge,
    dora_mlp,
    dora_norm,
    dora_norm_state,
    dora_norm_tree,
    dora_norm_tree_state,
    dora_scale,
    dora_unmerge,
)
from fdora.quant import QuantWeight, quantize
from tests import reference
from tests.close import rms
from tests.quant.make import QUANTISED

Tensors = dict[str, Tensor]
Formula = Callable[[Tensors], Sequence[Tensor]]

CLOSE = 6  # roundings
# Times as many where sums are kept in float32 or float64 and rounded to it, as often as they have terms. A GPU's float32 product adds
# 2048 terms one by one: 0.29 eps of each partial sum, 0.29 sqrt(2048 / 2) = 9.3 eps of the whole by their root.
WIDER = 10
MANY = 64  # elements, from which a root mean square says something
ROUNDS = 3
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
    outputs: torch.dtype | None = None  # what they must have, where that is known


class Options(NamedTuple):
    """What cases are drawn from: the largest size of an axis, and the bytes of the largest matrix in float64."""

    device: torch.device
    backend: str
    dtypes: Sequence[str]
    largest: int
    bytes: int
    whole: int = 0  # sizes are multiples of this, and tensors lie as descriptors of TMA want them
    ranks: Sequence[int] = ()  # of any size where empty
    kinds: Sequence[str] = ()  # of KINDS, all where empty
    tokens: int = 0  # of any number where 0
    dropout: bool = True
    empty: float = 0.0  # how likely a size is 0, where it may be
    codes: bool = False  # every weight that may be quantised is
    weight: Callable[[int, int, torch.dtype], QuantWeight | None] | None = None  # draws the codes of such a weight
    layouts: Sequence[str] = ()  # all of LAYOUTS where empty
    # Every W is of e4m3 codes and multiplied as such, if all may be; of its block, M, N and K: whether x and dz are rounded then.
    rounds: Callable[[object, int, int, int], tuple[bool, bool]] | None = None
    autocast: str = ""  # the dtype of products, whatever tensors have
    full: bool = False  # gradients go through every norm


def usual(device: str = "cpu", backend: str = "auto") -> Options:
    """All that can run there, as large as is quick. The interpreter multiplies bfloat16 wrongly, and no kernel takes float64."""
    on_gpu, kernels = device == "cuda", backend == "triton"
    slow = kernels and INTERPRETED
    dtypes = [n for n in DTYPES if not (slow and n == "bf16") and not (kernels and n == "fp64")]
    return Options(torch.device(device), backend, dtypes, 2048 if on_gpu else 80 if slow else 200, 2**27 if on_gpu else 2**18)


class Draw:
    """Random choices of one case, or of one of its rounds; whatever it gives depends on ``choices`` alone."""

    def __init__(self, choices: random.Random, options: Options):
        self.random, self.options, self.device, self.backend = choices, options, options.device, options.backend
        self.generator = torch.Generator(self.device).manual_seed(choices.getrandbits(48))

    def of(self, *values):
        return self.random.choice(values)

    def chance(self, p: float) -> bool:
        return self.random.random() < p

    def size(self, zero: float = 0.0, most: int = 0) -> int:
        most, u = most or self.options.largest, self.random.random()
        if self.options.whole:
            return self.options.whole * self.random.randint(1, most // self.options.whole)
        zero = max(zero, self.options.empty) if zero else 0.0
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
        if self.options.ranks:
            return self.of(*self.options.ranks)
        if self.options.whole:
            return self.of(8, 16, 24, 64)
        return self.of(1, 2, 3, 4, 8, 8, 16, 16, 17, 24, 32, 64, self.size(most=min(384, self.options.largest)))

    def dtype(self) -> torch.dtype:
        return DTYPES[self.of(*self.options.dtypes)]

    def beside(self, dtype: torch.dtype) -> torch.dtype:
        """Of an adapter: float32 or that of W."""
        return self.of(torch.float32, dtype)

    def layout(self, expanded: bool = True) -> str:
        if self.options.layouts:
            return self.of(*self.options.layouts)
        return "plain" if self.options.whole else self.of(*LAYOUTS[: len(LAYOUTS) - (not expanded)])

    def lead(self, M: int) -> tuple[int, ...]:
        M = self.options.tokens or M
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
        if not self.options.whole and self.chance(0.15):  # the shapes of the round before, and other strides
            layout = self.of("plain", "transposed", "sliced", "padded")
        order = list(range(values.ndim))
        if layout == "transposed" and values.ndim > 1:
            order[-2:] = order[:-3:-1]
        strides, step = [0] * values.ndim, 2 if layout == "sliced" else 1
        for i in reversed(order):
            strides[i], step = step, step * max(1, values.shape[i])
            if layout == "padded" and i == order[-1]:
                step += self.of(1, 3, 8)
        offset = self.of(0, 0, 1, 2, 3, 4, 8) * (not self.options.whole)
        memory = torch.full((offset + step + 8,), math.nan, dtype=dtype, device=self.device)
        return memory.as_strided(values.shape, strides, offset).copy_(values)


# the formulas of a layer: truth is reference.dora


class Eight(NamedTuple):
    """How a product of 8-bit codes rounds: columns under one scale, what rows of dz are multiplied by before, whether x and dz are."""

    columns: int
    a: Tensor | None
    x: bool
    dz: bool
    dtype: torch.dtype  # of dz


class OfCodes(torch.autograd.Function):
    """x W^T, for whose derivatives x is not rounded."""

    @staticmethod
    def forward(ctx, x, W, how):
        ctx.W, ctx.how = W, how
        return (reference.rounded(x, how.columns) if how.x else x) @ W.mT

    @staticmethod
    def backward(ctx, dz):
        W, how = ctx.W, ctx.how
        if not how.dz:
            return dz @ W, None, None
        a = 1.0 if how.a is None else how.a.double()
        return reference.rounded(dz.to(how.dtype).double() * a, how.columns) @ (W.mT / a).mT, None, None


@dataclass
class Layer:
    """What a layer of a call has beside its tensors, which are named W0, A0, B0, m0, b0, c0; W and b where layers share them."""

    i: int
    s: float = 1.0
    adapted: bool = True
    mode: str = "none"
    p: float = 0.0
    seed: int = 0
    codes: QuantWeight | None = None  # what the call has for W
    detach: bool = True
    eight: Eight | None = None
    at: tuple[int, ...] = ()  # where x begins in a larger input

    def mask(self, x: Tensor) -> Tensor:
        """(..., K) of 0 and 1 / (1 - p)."""
        if self.mode == "none":
            return torch.ones_like(x, dtype=torch.float64)
        ones = x.new_ones((x.shape[:-1].numel(), x.shape[-1]), dtype=torch.float64)
        seed = [self.seed, *self.at] if self.at else self.seed
        return drop(ones, torch.tensor(seed, device=x.device), self.p).view(x.shape)

    def parts(self, t: Tensors) -> list[Tensor | None]:
        return [t.get(f"{n}{self.i}", t.get(n)) for n in "WABmbc"]

    def member(self, t: Tensors) -> DoraLayer:
        W, A, B, m, bias, c = self.parts(t)
        W = W if self.codes is None else self.codes
        return DoraLayer(W, A, B, m, self.s, bias, c) if self.adapted else DoraLayer(W, bias=bias)

    def truth(self, t: Tensors, x: Tensor) -> Tensor:
        W, A, B, m, bias, c = self.parts(t)
        if not self.adapted:
            base = x @ W.mT if self.eight is None else OfCodes.apply(x, W, self.eight)
            return base if bias is None else base + bias
        dropped = None if self.mode == "none" else lambda x: x * self.mask(x)
        c = c if self.detach else reference.norm(W, A, B, self.s)
        y = reference.dora(x, W, A, B, m, self.s, bias, c, dropped, self.mode)
        if self.eight is not None:
            y = y + reference.scale(m, self.c if c is None else c) * (OfCodes.apply(x, W, self.eight) - x @ W.mT)
        return y

    def naive(self, t: Tensors, x: Tensor) -> Tensor:
        W, A, B, m, bias, c = self.parts(t)
        W = W.to(x.dtype)
        base = x @ W.mT
        if self.adapted:
            A, B = A.to(x.dtype), B.to(x.dtype)
            norm = torch.linalg.vector_norm(W + self.s * (B @ A), dim=1)
            c = norm if not self.detach else norm.detach() if c is None else c
            g = (m.to(c.dtype) / c.clamp_min(1e-12 if c.dtype != torch.float16 else 1e-7)).to(x.dtype)
            xd = x * self.mask(x).to(x.dtype)
            lora = self.s * (xd @ A.mT) @ B.mT
            base = base + (g - 1) * (xd @ W.mT) + g * lora if self.mode == "peft" else g * (base + lora)
        return base if bias is None else base + bias.to(x.dtype)

    def size(self, t: Tensors, x: Tensor, p: int) -> Tensor:
        W, A, B, m, bias, c = self.parts(t)
        base = x @ W.mT
        if self.adapted:
            c = (self.c**p if c is None else c).clamp_min(1e-12**p)
            g = m / c
            if not self.detach:  # the gradient of a norm is V / c
                whole = W + abs(self.s) ** p * B @ A
                n = (whole * whole.detach()).sum(1) / c
                g = g * (1 + (n - n.detach()) / c)
            xd = x * self.mask(x) ** p
            lora = abs(self.s) ** p * (xd @ A.mT) @ B.mT
            # In "peft" kernels add (g - 1) times what they have rounded, the low-rank term in it: docs/semantics.md, rounding.
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


def coded(d: Draw, N: int, K: int) -> dict | None:
    """What :func:`fdora.quant.quantize` is told, for some weights."""
    if not N * K or (d.chance(0.5) and not d.options.codes and not d.options.rounds):
        return None
    if d.options.rounds:
        return {"kind": "fp8", "block": d.of("row", None, (128, 128), (64, 256))}
    if d.options.weight:
        return {}
    kind = d.of(*QUANTISED)
    how = {"kind": kind.split()[0], **QUANTISED[kind]}
    if how["kind"] in ("nf4", "fp4"):
        how["group"] = d.of(8, 32, 64, 64, 256)
    if how["kind"] in ("int8", "fp8"):
        how["block"] = d.of("row", None, (16, 48), (128, 128))
    return None if how["kind"] in ("mxfp4", "nvfp4") and K % 2 else how


def encoded(d: Draw, W: Tensor, code: dict | None, dtype: torch.dtype) -> QuantWeight | None:
    """Codes of W, or codes that have nothing to do with it."""
    if code is None:
        return None
    return quantize(W, **code, dtype=dtype) if d.options.weight is None else d.options.weight(*W.shape, dtype)


def asked(d: Draw, codes: Sequence[dict | None]) -> dict:
    """Which products of such weights are to be of codes."""
    if not d.options.rounds or None in codes:
        return {}
    return d.of({"compute": "fp8"}, {"grad_compute": "fp8"}, {"compute": "fp8", "grad_compute": "fp8"})


def eight(d: Draw, how: dict, code: dict | None, q: QuantWeight | None, M: int, N: int, dtype: torch.dtype) -> Eight | None:
    """Of a call that was asked for ``how``, and the weight of each N rows of q."""
    if not how.keys() & {"compute", "grad_compute"}:
        return None
    x, dz = d.options.rounds(code["block"], M, N, q.shape[1])
    a = q.tensors[1].reshape(-1, N) if code["block"] == "row" else None
    columns = 128 if isinstance(code["block"], tuple) else 1 << 30
    return Eight(columns, a, x and "compute" in how, dz and "grad_compute" in how, dtype)


def adapted(
    e: Draw, N: int, K: int, r: int, s: float, kind: str, dtypes: dict, layouts: dict, code: dict | None = None
) -> tuple[Tensors, Tensor, QuantWeight | None]:
    """W, A, B and m as they are laid out, the true c, and codes of which W is exactly what they stand for. m is tiny where c is 0,
    or g would be infinite; an expanded m is one value for all rows, and g of a row with a small c would take dz = g dy past what
    float16 holds."""
    *values, m = weights(e, N, K, r, s, kind)
    t = {n: e.lay(v, dtypes[n], layouts[n]) for n, v in zip("WAB", values, strict=True)}
    codes = encoded(e, t["W"], code, dtypes["W"])
    if codes is not None:
        t["W"] = codes.dequantize(torch.float32)
    c = reference.norm(t["W"], t["A"], t["B"], s)
    zero = c == 0
    m = m.where(~zero, 1e-12)
    layout = layouts["m"]
    if zero.any() or (layout == "expanded" and N and m.abs().max() > 1e3 * c.min()):
        layout = "plain"
    t["m"] = e.lay(m, dtypes["m"], layout)
    return t, c, codes


def weights(d: Draw, N: int, K: int, r: int, s: float, kind: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """W, A, B and m in float64."""
    W, A = d.normal(N, K, std=max(K, 1) ** -0.5), d.normal(r, K, std=max(K, 1) ** -0.5)
    B = d.normal(N, r, std=0.0 if kind == "start" else 0.1 * r**-0.5)
    if kind == "zero_rows":
        W[::2] = B[::2] = 0
    if kind == "cancelling" and s:
        W[::2] = -s * (B @ A)[::2] + d.normal(N, K, std=0.01 * max(K, 1) ** -0.5)[::2]
    m = reference.norm(W, A, B, s) * (1 + d.of(0.0015, 0.05) * d.normal(N))
    if kind == "nan_row" and W.numel():
        W[d.random.randrange(N), d.random.randrange(K)] = math.nan
    if kind == "zero_rows":
        m[::2] = 1e-12
    if kind == "zero_m":
        m[r % 3 :: 3] = 0  # of gate and of up not the same rows
    if kind == "negative_m":
        m[::2] *= -1
    if kind in ("large_m", "tiny_m"):
        m[::3] *= 30 if kind == "large_m" else 1e-6
    return W, A, B, m


KINDS = (
    "plain",
    "plain",
    "start",
    "zero_rows",
    "zero_rows",
    "zero_m",
    "negative_m",
    "large_m",
    "tiny_m",
    "cancelling",
    "nan_row",
)

# Of products of codes: a NaN, or a tiny dz, takes more with it.
MULTIPLIED = ("plain", "zero_rows", "negative_m", "large_m", "zero_m")


def layers(
    d: Draw,
    shapes: Sequence[tuple[int, int]],
    dtype: torch.dtype,
    all_adapted: bool,
    biases: tuple[float, ...] = (1.0, 100.0),
    tokens: int = 0,
) -> Callable:
    """Choices for these (N, K): a function of a round's Draw that gives its tensors and layers. ``tokens``: of one x for all."""
    p, mode = d.of((0.0, "none"), (0.0, "none"), (0.3, "lora"), (0.5, "peft")) if d.options.dropout else (0.0, "none")
    fixed, detach = [], d.chance(0.7) and not d.options.full
    if d.options.rounds:
        mode, detach = mode.replace("peft", "lora"), True
    for N, K in shapes:
        has_adapter = all_adapted or d.chance(0.8)
        dtypes = {"W": dtype, **{n: d.beside(dtype) for n in "ABm"}}
        if d.chance(0.4):
            dtypes["b"] = d.dtype()
        kind = d.of("plain", "negative_m", "large_m") if not detach else d.of(*d.options.kinds or KINDS)
        if dtype == torch.float16 and len(biases) == 1:  # 30 times as much in each layer of an MLP is more than it holds
            kind = kind.replace("large_m", "plain")
        if has_adapter and d.chance(0.8 if kind == "zero_rows" else 0.5):  # rows of 0 are where a gradient of c is 0
            dtypes["c"] = torch.promote_types(dtype, torch.float32)
        layouts = {n: d.layout() for n in "WABmb"} | {"c": d.layout(expanded=False)}
        code = coded(d, N, K) if detach and kind != "nan_row" else None
        fixed.append((N, K, d.rank(), d.scaling(), kind, has_adapter, dtypes, layouts, code))

    def fresh(e: Draw) -> tuple[Tensors, list[Layer], float]:
        tensors, found, slack = {}, [], 0.0
        for i, (N, K, r, s, kind, has_adapter, dtypes, layouts, code) in enumerate(fixed):
            own, c, codes = adapted(e, N, K, r, s, kind, dtypes, layouts, code)
            if "c" in dtypes:
                own["c"] = e.lay(c, dtypes["c"], layouts["c"])
            if "b" in dtypes:
                own["b"] = e.lay(e.normal(N, std=e.of(*biases)), dtypes["b"], layouts["b"])
            tensors |= {f"{n}{i}": own[n] for n in own if has_adapter or n in "Wb"}
            how = eight(e, fresh.options, code, codes, tokens, N, dtype) if has_adapter else None
            found.append(Layer(i, s, has_adapter, mode, p, e.random.getrandbits(62), codes, detach, how, fresh.at))
            slack += found[-1].look(tensors)
        return tensors, found, slack

    fresh.options, fresh.at = {"dropout_p": p, "dropout_mode": mode} if p else {}, ()
    fresh.options |= {} if detach else {"detach": False}
    if tokens:
        fresh.options |= asked(d, [code for *_, code in fixed])
    return fresh


def seeds(e: Draw, found: list[Layer], fresh: Callable) -> dict:
    """The seed of each layer, as a number or a tensor; nothing without dropout."""
    if "dropout_p" not in fresh.options:
        return {}
    return {"seed": [torch.tensor(z.seed, device=e.device) if e.chance(0.5) else z.seed for z in found]}


def origin(d: Draw, fresh: Callable) -> dict:
    """Some inputs with dropout are a part of a larger one."""
    fresh.at = d.of((), (2**33 + 3, 2**31 + 5)) if "dropout_p" in fresh.options else ()
    return {"mask_origin": fresh.at} if fresh.at else {}


# the functions


def linear(d: Draw) -> Callable[[Draw], Problem]:
    M, N, K = d.sizes(3, zero=0.05)
    dtype, lead, layout = d.dtype(), d.lead(M), d.layout()
    fresh = layers(d, [(N, K)], dtype, True, tokens=math.prod(lead))
    extra = fresh.options | {"backend": d.backend, "keep_inner": d.chance(0.2)}
    apart = d.options.autocast or {"peft", "fp8"} & set(fresh.options.values())  # y has another dtype, or is no single product
    ends = [] if apart else [n for n in ("gamma", "residual") if d.chance(0.2)]
    extra |= origin(d, fresh)

    def one(e: Draw) -> Problem:
        t, (z,), slack = fresh(e)
        t["x"] = e.lay(e.normal(*lead, K), dtype, layout)
        for n in ends:
            t[n] = e.lay(e.normal(*(() if n == "gamma" else lead), N), dtype, e.layout())
        seed = {n: v[0] for n, v in seeds(e, [z], fresh).items()}

        def call(t: Tensors) -> list[Tensor]:
            more = extra | seed | {n: t[n] for n in ends}
            return [dora_linear(t["x"], **z.member(t)._asdict(), **more)]

        def compose(f: Callable, t: Tensors) -> list[Tensor]:
            return [f(z, t, t["x"]) * t.get("gamma", 1) + t.get("residual", 0)]

        return of_layers(t, call, compose, dtype, slack, z.eight is None)

    return one


def of_layers(t: Tensors, call: Formula, compose: Callable, dtype: torch.dtype, slack: float, plain: bool = True) -> Problem:
    """``compose(f, t)`` builds the outputs of layers ``f(layer, tensors, input)``. Code that is not ``plain`` has no naive twin."""
    return Problem(
        t,
        call,
        truth=lambda t: compose(Layer.truth, t),
        size=lambda t, p: compose(lambda z, t, x: z.size(t, x, p), t),
        naive=(lambda t: compose(Layer.naive, t)) if plain else None,
        dtype=dtype,
        trainable=[n for n in t if n[0] != "W"],
        slack=slack,
    )


def group(d: Draw) -> Callable[[Draw], Problem]:
    M, K, *Ns = d.sizes(d.of(3, 4, 5, 6), zero=0.05)
    dtype, lead, layout = d.dtype(), d.lead(M), d.layout()
    fresh = layers(d, [(N, K) for N in Ns], dtype, False, tokens=math.prod(lead))
    extra = fresh.options | {"backend": d.backend, "keep_inner": d.chance(0.2)} | origin(d, fresh)

    def one(e: Draw) -> Problem:
        t, found, slack = fresh(e)
        t["x"] = e.lay(e.normal(*lead, K), dtype, layout)
        more = extra | seeds(e, found, fresh)

        def call(t: Tensors) -> list[Tensor]:
            return list(dora_linear_group(t["x"], [z.member(t) for z in found], **more))

        plain = all(z.eight is None for z in found)
        return of_layers(t, call, lambda f, t: [f(z, t, t["x"]) for z in found], dtype, slack, plain)

    return one


def mlp(d: Draw) -> Callable[[Draw], Problem]:
    M, K, inner, N = d.sizes(4, zero=0.05)
    dtype, lead, layout, act = d.dtype(), d.lead(M), d.layout(), d.of(*ACTS)
    fresh = layers(d, [(inner, K), (inner, K), (N, inner)], dtype, False, (1.0,))
    extra = fresh.options | {"backend": d.backend, "keep_inner": d.chance(0.2), "act": act} | origin(d, fresh)

    def one(e: Draw) -> Problem:
        t, found, slack = fresh(e)
        for z in found[:2] if fresh.at else ():  # of x, which begins at column 0, and down at the other
            z.at = (fresh.at[0], 0)
        t["x"] = e.lay(e.normal(*lead, K), dtype, layout)
        more = extra | seeds(e, found, fresh)

        def call(t: Tensors) -> list[Tensor]:
            return [dora_mlp(t["x"], *(z.member(t) for z in found), **more)]

        def compose(f: Callable, t: Tensors, gated: Callable = lambda gate, up: ACTS[act](gate) * up) -> list[Tensor]:
            gate, up = (f(z, t, t["x"]) for z in found[:2])
            return [f(found[2], t, gated(gate, up))]

        problem = of_layers(t, call, compose, dtype, slack)
        problem.size = lambda t, p: compose(lambda z, t, x: z.size(t, x, p), t, lambda gate, up: bound(gate, p) * up)
        return problem

    return one


def bound(q: Tensor, p: int) -> Tensor:
    """Of |f(z)|**p, q = |z|**p, for the activations; its slope bounds (|f'| + |f''| |z|)**p with |f'| <= 1.2, |f''| <= 0.8."""
    return 1.2 * q + 0.4 * q**2 if p == 1 else 1.44 * q + 1.28 * q**1.5 + 0.32 * q**2


def norm(d: Draw) -> Callable[[Draw], Problem]:
    N, K = d.sizes(2, zero=0.05)
    r, s, dtype, axis = d.rank(), d.scaling(), d.dtype(), d.of(1, 1, 1, 0)
    kind, how = d.of("plain", "start", "zero_rows", "cancelling", "nan_row"), d.of("plain", "state", "squared", "gradient")
    how = "gradient" if d.options.full else how
    if how == "gradient":  # where c is 0 the true one is none
        kind, N, K = "plain", max(N, 1), max(K, 1)
    dtypes, layouts = dict(W=dtype, A=d.beside(dtype), B=d.beside(dtype)), {n: d.layout() for n in "WAB"}
    with_base, budget = d.chance(0.4), d.of(None, None, 1, 3, 100)  # times as many bytes as it needs
    code = coded(d, N, K) if axis and how != "gradient" and kind != "nan_row" else None

    def one(e: Draw) -> Problem:
        values = dict(zip("WAB", weights(e, N, K, r, s, kind), strict=False))
        t = {n: e.lay(v, dtypes[n], layouts[n]) for n, v in values.items()}
        codes = encoded(e, t["W"], code, dtype)
        if codes is not None:
            t["W"] = codes.dequantize(torch.float32)
        A = t["A"]
        t["A2"] = 2 * A if layouts["A"] == "expanded" else A.new_empty_strided(A.shape, A.stride()).copy_(A)
        t["A2"][-1:, -1:] += 1  # of those that lie as they did one is another

        def call(t: Tensors) -> list[Tensor]:
            own = t["W"] if codes is None else codes
            W, extra = own if axis else t["W"].mT, {"s": s, "norm_axis": axis, "backend": d.backend}
            if budget:
                factors = (t["A"], t["B"]) if axis else (t["B"].mT, t["A"].mT)
                extra["max_bytes"] = budget * smallest_bytes_of(W, *factors, with_base)
            if with_base:
                extra["base_sqnorm"] = dora_base_sqnorm(W, backend=d.backend)
            if how != "state":
                return [dora_norm(own, t["A"], t["B"], squared=how == "squared", detach=how != "gradient", **extra)]
            states = [dora_norm_state(W)]
            for A in ("A", "A", "A2"):
                states.append(dora_norm(own, t[A], t["B"], state=states[-1], **extra))
            kept = states[-1]._replace(c=torch.full_like(states[-1].c, -7))
            if (dora_norm(own, t["A2"], t["B"], state=kept, **extra).c != -7).any():
                raise Wrong("a norm was computed though nothing changed")
            fresh = [dora_norm(own, t[A], t["B"], **extra) for A in ("A", "A2")]
            return [*(state.c for state in states[1:]), *fresh]

        def through(f: Callable, t: Tensors, names: Sequence[str] = ("A", "A", "A2", "A", "A2")) -> list[Tensor]:
            names = names if how == "state" else names[:1]
            three = [(t["W"], t[A], t["B"]) if axis else (t["W"].mT, t["B"].mT, t[A].mT) for A in names]
            return [f(*each) for each in three]

        def truth(W: Tensor, A: Tensor, B: Tensor) -> Tensor:
            squares = (W + s * B @ A).square().sum(1)
            zero = squares == 0  # where a root has no slope
            return squares if how == "squared" else torch.where(zero, 1, squares).sqrt() * ~zero

        def naive(W: Tensor, A: Tensor, B: Tensor) -> Tensor:
            wide = torch.promote_types(W.dtype, torch.float32)
            c = torch.linalg.vector_norm(W.to(wide) + s * B.to(wide) @ A.to(wide), dim=1)
            return c.square() if how == "squared" else c

        def size(W: Tensor, A: Tensor, B: Tensor) -> Tensor:
            """Of c, or c**2; with the gradient that absolute terms have: dc V / c, where c is the true one."""
            whole = W + abs(s) * B @ A
            if how == "gradient":
                true = through(truth, {n: v.double() for n, v in problem.tensors.items()})[0].detach()
                slope = torch.where(true > 0, 0.5 / true, 0)
                return (whole.square() * slope[:, None]).sum(1) + reference.norm(W, A, B, abs(s)).detach()
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


def norm_tree(d: Draw) -> Callable[[Draw], Problem]:
    """Norms of several layers at once, of any sizes, dtypes and codes; by a state, once more of those whose B is another one."""
    fixed = []
    for _ in range(d.of(1, 3, 8)):
        (N, K), dtype, kind = d.sizes(2, zero=0.05), d.dtype(), d.of("plain", "start", "zero_rows", "cancelling", "nan_row")
        dtypes, layouts = dict(W=dtype, A=d.beside(dtype), B=d.beside(dtype)), {n: d.layout() for n in "WAB"}
        code = None if kind == "nan_row" else coded(d, N, K)
        fixed.append((N, K, d.rank(), d.scaling(), kind, dtypes, layouts, code))
    count, one_s = len(fixed), d.of(None, d.scaling())
    s = [s if one_s is None else one_s for _, _, _, s, *_ in fixed]

    def nested(leaves: list) -> list:
        return [leaves[0], leaves[1:3], {"more": leaves[3:]}]

    def one(e: Draw) -> Problem:
        t, weights_of = {}, []
        for i, (N, K, r, _, kind, dtypes, layouts, code) in enumerate(fixed):
            values = dict(zip("WAB", weights(e, N, K, r, s[i], kind), strict=False))
            own = {n: e.lay(v, dtypes[n], layouts[n]) for n, v in values.items()}
            weights_of.append(encoded(e, own["W"], code, dtypes["W"]))
            own["W"] = own["W"] if weights_of[i] is None else weights_of[i].dequantize(torch.float32)
            t |= {f"{n}{i}": v for n, v in own.items()}
        changed = [i for i, (N, K, *_) in enumerate(fixed) if N * K and e.chance(0.4)]
        t |= {f"C{i}": t[f"B{i}"] + 1 for i in changed}

        def call(t: Tensors) -> list[Tensor]:
            W = nested([t[f"W{i}"] if q is None else q for i, q in enumerate(weights_of)])
            before = [(t[f"A{i}"], t[f"B{i}"]) for i in range(count)]
            after = [(A, t[f"C{i}"]) if i in changed else (A, B) for i, (A, B) in enumerate(before)]
            how = {"s": nested(s) if one_s is None else one_s, "backend": d.backend}
            state = dora_norm_tree(W, nested(before), state=dora_norm_tree_state(W), **how)
            kept = state._replace(buffers=tuple(torch.full_like(b, -7) for b in state.buffers))
            again = tree_leaves(dora_norm_tree(W, nested(after), state=kept, **how).c)
            if any((c != -7).any() for i, c in enumerate(again) if i not in changed):
                raise Wrong("a norm was computed though nothing changed")
            now = [again[i] for i in changed]
            wide = [torch.promote_types(dtypes["W"], torch.float32) for *_, dtypes, _, _ in fixed]
            if [c.dtype for c in again] != wide:
                raise Wrong(f"dtypes {[c.dtype for c in again]}, wanted {wide}")
            return [*tree_leaves(dora_norm_tree(W, nested(before), **how)), *tree_leaves(state.c), *now]

        def norms(t: Tensors, f: Callable) -> list[Tensor]:
            each = [("B", i) for i in range(count)] * 2 + [("C", i) for i in changed]
            return [f(t[f"W{i}"], t[f"A{i}"], t[f"{B}{i}"], s[i]) for B, i in each]

        def size(t: Tensors, p: int) -> list[Tensor]:
            wide = {n: v ** (1 / p) for n, v in t.items()}
            return [v**p for v in norms(wide, lambda W, A, B, s: reference.norm(W, A, B, abs(s)))]

        same = [(i, count + i) for i in range(count)]
        return Problem(t, call, lambda t: norms(t, reference.norm), size, same=same)

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
            outputs=dtypes[1],
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
        t = tensors = {n: e.lay(values[n], dtypes[n], layouts[n]) for n in dtypes}

        def y(t: Tensors, s: float, g: Tensor, g_of_base: Tensor) -> list[Tensor]:
            out = g_of_base * t["base"] + g * (s * t["lora"])
            return [out + t["bias"] if biased else out]

        def size(t: Tensors, p: int) -> list[Tensor]:
            g = t["g"]
            less = (tensors["g"].double() - float(delta)).abs() ** p  # exact: no larger than g itself by its roundings
            return y(t, abs(s) ** p, g, less + g - g.detach())

        def call(t: Tensors) -> list[Tensor]:
            if delta:
                return [dora_delta(t["base"], t["lora"], t["g"], s=s, backend=d.backend)]
            return [dora_compose(t["base"], t["lora"], t["g"], s=s, bias=t.get("bias"), backend=d.backend)]

        return Problem(
            t,
            call,
            truth=lambda t: y(t, s, t["g"], t["g"] - float(delta)),
            size=size,
            naive=lambda t: y(t, s, t["g"].to(dtype), (t["g"] - float(delta)).to(dtype)),
            dtype=wide,
            trainable=tuple(t),
        )

    return one


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
    kind = d.of(*(k for k in KINDS if not (back and k in ("zero_m", "tiny_m", "nan_row"))))
    given, code = back or d.chance(0.5), None if back or kind == "nan_row" else coded(d, N, K)
    with_gamma = not back and d.chance(0.3)

    def one(e: Draw) -> Problem:
        t, c, codes = adapted(e, N, K, r, s, kind, dtypes, layouts, code)
        if back:  # a row that was wiped out does not come back
            t["m"] = torch.where(c == 0, 0, torch.where(t["m"] == 0, 1, t["m"]))  # but of 0 nothing was lost
        if with_gamma:
            t["gamma"] = e.lay(e.normal(N), dtype, "plain")
        slack = 0.0
        if given:
            t["c"] = e.lay(c, torch.promote_types(dtype, torch.float32), "sliced")
        else:
            slack = Layer(0, s).look({f"{n}0": v for n, v in t.items()})

        def call(t: Tensors) -> list[Tensor]:
            f, more = (dora_unmerge, {}) if back else (dora_merge, {"gamma": t.get("gamma")})
            W = t["W"] if codes is None else codes
            return [f(W, t["A"], t["B"], t["m"], s=s, norm=t.get("c"), backend=d.backend, **more)]

        def formula(t: Tensors, s: float, c: Tensor) -> list[Tensor]:
            W, A, B, m = (t[n] for n in "WABm")
            g = m / c * t.get("gamma", 1)
            return [(W / g[:, None]).where(c[:, None] > 1e-12, 0) - s * B @ A if back else g[:, None] * (W + s * B @ A)]

        def norm_of(t: Tensors) -> Tensor:
            return t["c"] if given else c.to(t["m"].dtype)

        def size(t: Tensors, p: int) -> list[Tensor]:
            norm = (t["c"] if given else c**p).clamp_min(1e-12**p)
            return formula(t, -(abs(s) ** p) if back else abs(s) ** p, norm)

        return Problem(t, call, lambda t: formula(t, s, norm_of(t).clamp_min(1e-12)), size, dtype=dtype, slack=slack)

    return one


def gated(z: Tensor, act: str) -> Tensor:
    """f(gate) up of (..., 2 F); gpt-oss has gate and up in turn, cut off at 7."""
    if act == "gpt_oss":
        gate, up = z[..., ::2].clamp(max=7), z[..., 1::2].clamp(-7, 7)
        return gate * torch.sigmoid(1.702 * gate) * (up + 1)
    gate, up = z.chunk(2, -1)
    return ACTS[act](gate) * up


def gated_size(z: Tensor, act: str, p: int) -> Tensor:
    gate, up = (z[..., ::2], z[..., 1::2] + 1) if act == "gpt_oss" else z.chunk(2, -1)
    return bound(gate, p) * up


def many(d: Draw, own: bool, act: str | None = None) -> Callable[[Draw], Problem]:
    """Adapters of one W, or experts with a W each, of one layer or of an MLP: tokens in segments or by number, with gates or not,
    some of nobody."""
    (M, N, K), G, r = d.sizes(3, zero=0.05), d.of(1, 2, 3, 5, 9), d.rank()
    M, dtype, kind, by = (
        d.options.tokens or min(M, 150),
        d.dtype(),
        d.of(*(k for k in ("plain", "zero_m", "negative_m", "zero_rows") if k in (d.options.kinds or KINDS))),
        d.of("offsets", "ids", "ids"),
    )
    slots = d.of(1, 2, 2) if own and by == "ids" else 0  # how many experts a token has; 0: one, and no axis of them
    s = [d.scaling() for _ in range(1 if own else G)] * (G if own else 1)
    p = 0.0 if own or not d.options.dropout else d.of(0.0, 0.3)
    apart = p > 0 and d.chance(0.5)
    ratios = [(p, p / 3, 2 * p)[g % 3] if apart else p for g in range(G)]
    lead, ranks = (G,) * own, [r if own else d.of(r, max(1, r // 2)) for _ in range(G)]
    tokens = (M,) if own else d.lead(M) or (1,)
    # what the bank holds beyond a rank; kernels read it where m is 0, and dm is NaN there
    M, beyond = math.prod(tokens), 0.0 if kind == "zero_m" else d.of(0.0, math.nan)
    plain = not own and d.chance(0.2)  # LoRA
    dtypes = {"W": dtype, **{n: d.beside(dtype) for n in "ABm"}} | ({"b": dtype} if act == "gpt_oss" or d.chance(0.5) else {})
    layouts = {n: d.layout(expanded=False) for n in "xWABmb"}
    with_c, inner = d.chance(0.5) and not plain, d.size(most=40) if act else 0
    shapes = [(2 * inner, K), (N, inner)] if act else [(N, K)]
    codes = [coded(d, *shape) if not own or d.options.rounds or shape[0] % 16 == 0 else None for shape in shapes]
    if own and d.options.rounds and codes[0] and isinstance(block := codes[0]["block"], tuple) and N % block[0]:
        codes[0]["block"] = "row"
    products = {} if act or dtype.itemsize > 2 else asked(d, codes)
    mode = "none" if not p else "peft" if not products and d.chance(0.5) else "lora"

    def of_adapter(t: Tensor, name: str, g: int) -> Tensor:
        t = t[g] if own or name in "ABmc" else t
        return t[: ranks[g]] if name == "A" else t[:, : ranks[g]] if name == "B" else t

    def bank(e: Draw, i: int) -> tuple[Tensors, QuantWeight | None]:
        """Layer i."""
        N, K = shapes[i]
        values = {"W": e.normal(*lead, N, K, std=max(K, 1) ** -0.5), "A": e.normal(G, r, K, std=max(K, 1) ** -0.5)}
        far = (
            act == "gpt_oss" and dtype.itemsize > 2 and not d.options.autocast
        )  # some gates are cut off; where z is rounded to half, others would be
        values |= {"B": e.normal(G, N, r, std=0.1 * r**-0.5), "b": e.normal(*lead, N, std=8 if far else 1)}
        for g, rank in enumerate(ranks):
            values["A"][g, rank:] = values["B"][g, :, rank:] = beyond
        if kind == "zero_rows":
            values["W"][..., ::2, :] = values["B"][:, ::2] = 0
        t, code = {n: e.lay(values[n], dtypes[n], layouts[n]) for n in dtypes if n != "m"}, codes[i]
        q = encoded(e, t["W"].flatten(0, -2), code, dtype)
        if q is not None:
            t["W"] = q.dequantize(torch.float32).view(*lead, N, K)
        c = torch.stack([reference.norm(*(of_adapter(t[n], n, g) for n in "WAB"), s[g]) for g in range(G)])
        m = c * (1 + 0.05 * e.normal(G, N)) * (-1 if kind == "negative_m" else 1)
        if kind == "zero_m":
            m[:, ::3] = 0
        if not plain:
            t["m"] = e.lay(m.where(c > 0, 1e-12), dtypes["m"], layouts["m"])
        if with_c:
            t["c"] = e.lay(c, torch.promote_types(dtype, torch.float32), "plain")
        return {f"{n}{i}": v for n, v in t.items()}, q

    def one(e: Draw) -> Problem:
        banks = [bank(e, i) for i in range(len(shapes))]
        t = {n: v for each, _ in banks for n, v in each.items()}
        ids = torch.tensor([[e.random.randrange(-1, G) for _ in range(slots or 1)] for _ in range(M)], dtype=torch.int64)
        ids = ids.view(M, slots or 1).to(e.device)
        if by == "offsets":
            ids = torch.cat([ids[ids >= 0].sort()[0], ids[ids < 0]]).view(M, 1)
        ends = [int((ids == g).sum()) for g in range(G)]
        t["x"] = e.lay(e.normal(*tokens, K), dtype, layouts["x"])
        if slots:
            gates = e.normal(
                M, slots
            ).abs()  # codes of dz are those of what was rounded for a gate: by powers of two nothing is
            t["gates"] = e.lay(gates.log2().round().exp2() if products else gates, dtype, "plain")
        drawn = [e.random.getrandbits(62) for _ in range(G)]
        found = [[Layer(g, s[g], mode=mode, p=ratios[g], seed=drawn[g]) for g in range(G)] for _ in shapes]
        how = eight(e, products, codes[0], banks[0][1], M * (slots or 1), N, dtype)
        for z in found[0] if how else ():
            z.eight = how._replace(a=how.a[z.i * own]) if how.a is not None else how

        def of_one(t: Tensors, i: int, g: int) -> Tensors:
            """The tensors of layer i of one adapter or expert."""
            one = {n: of_adapter(t[f"{n}{i}"], n, g) for n in "WABmbc" if f"{n}{i}" in t}
            return one | dict.fromkeys("mc", one["W"].new_ones(len(one["W"]), dtype=torch.float64)) if plain else one

        slack = sum(max(z.look(of_one(t, i, z.i)) for z in each) for i, each in enumerate(found))

        def call(t: Tensors) -> list[Tensor]:
            where = {"ids": ids if slots else ids.view(tokens), "backend": d.backend}
            if by == "offsets":
                ends_of = torch.tensor(ends, dtype=torch.int32, device=e.device).cumsum(0).to(torch.int32)
                where = {"offsets": ends_of, "backend": d.backend}
            parts = [{n: t.get(f"{n}{i}") for n in "WABmbc"} for i in range(len(shapes))]
            parts = [part if q is None else part | {"W": q} for part, (_, q) in zip(parts, banks, strict=True)]
            if act:
                both = (DoraLayer(*(part[n] for n in "WABm"), s[0], part["b"], part["c"]) for part in parts)
                return [dora_experts_mlp(t["x"], *both, act=act, gates=t.get("gates"), **where)]
            (part,), more = parts, {"bias": parts[0]["b"], "norm": parts[0]["c"]} | where | products
            tensors = [t["x"], *(part[n] for n in "WABm")]
            if own:
                return [dora_experts(*tensors, s=s[0], gates=t.get("gates"), **more)]
            more |= {"dropout_p": ratios if apart else p, "dropout_mode": mode, "seed": drawn} if p else {}
            return [dora_linear_multi(*tensors, s=s, ranks=ranks, **more)]

        def compose(f: Callable, t: Tensors, glu: Callable = gated) -> list[Tensor]:
            frozen, y = Layer(G, adapted=False, eight=found[0][0].eight), 0
            for j in range(ids.shape[1]):
                parts, places = [], []
                for g in range(G + 1):
                    places.append((ids[:, j] == (g if g < G else -1)).nonzero().squeeze(1))
                    x = t["x"].reshape(M, K)[places[-1]]
                    if g < G:
                        x = f(found[0][g], of_one(t, 0, g), x)
                        parts.append(f(found[1][g], of_one(t, 1, g), glu(x, act)) if act else x)
                    else:
                        parts.append(x.new_zeros(len(x), N) if own else f(frozen, of_one(t, 0, 0), x))
                whole = torch.cat(parts)[torch.cat(places).argsort()]
                y = y + (whole * t["gates"][:, j, None] if slots else whole)
            return [y.view(*tokens, N)]

        problem = of_layers(t, call, compose, dtype, slack)
        problem.size = lambda t, p: compose(lambda z, t, x: z.size(t, x, p), t, lambda z, act: gated_size(z, act, p))
        problem.naive = None
        return problem

    return one


def experts_mlp(d: Draw) -> Callable[[Draw], Problem]:
    return many(d, True, d.of(*ACTS, "gpt_oss"))


def embedding(d: Draw) -> Callable[[Draw], Problem]:
    """A table whose norms are those of its columns or of its rows; some numbers come often, some never."""
    (V, width), axis, r, s, dtype = d.sizes(2), d.of(0, 1), d.rank(), d.scaling(), d.dtype()
    lead, padded, with_c = d.lead(d.size(zero=0.05, most=150)), d.chance(0.4), d.chance(0.5)
    more = {"norm_axis": axis, "sparse": d.chance(0.3)} | ({"max_norm": 0.9} if d.backend != "triton" and d.chance(0.3) else {})
    dtypes, layouts = {"W": dtype, **{n: d.beside(dtype) for n in "ABm"}}, {n: d.layout() for n in "WAB"}

    def one(e: Draw) -> Problem:
        W, A = e.normal(V, width, std=(V, width)[axis] ** -0.5), e.normal(r, V, std=V**-0.5)
        t = {n: e.lay(v, dtypes[n], layouts[n]) for n, v in {"W": W, "A": A, "B": e.normal(width, r, std=0.1)}.items()}
        z = Layer(0, s)
        clip = (more.get("max_norm", math.inf) / (t["W"].double().norm(dim=1, keepdim=True) + 1e-7)).clamp_max(1)
        rows = (
            {"W0": t["W"] * clip, "A0": t["B"].mT, "B0": t["A"].mT} if axis else {"W0": t["W"].mT, "A0": t["A"], "B0": t["B"]}
        )
        slack = z.look(rows)
        t["m"] = e.lay((z.c * (1 + 0.05 * e.normal(len(z.c)))).where(z.c > 0, 1e-12), dtypes["m"], "plain")
        ids = (torch.rand(lead, generator=e.generator, device=e.device) ** 2 * V).to(e.of(torch.int64, torch.int32))
        padding = e.random.randrange(V) if padded else None
        behind = None if padding is None else e.of(padding, padding - V)
        if with_c:
            t["c"] = z.c.to(torch.promote_types(dtype, torch.float32))

        def call(t: Tensors) -> list[Tensor]:
            how = {"s": s, "norm": t.get("c"), "padding_idx": behind, "backend": d.backend}
            return [dora_embedding(ids, *(t[n] for n in "WABm"), **how, **more)]

        def formula(t: Tensors, p: int = 1, sign: float = s) -> list[Tensor]:
            c = t.get("c", z.c**p)
            return [reference.embedding(ids, t["W"] * clip**p, *(t[n] for n in "ABm"), sign, axis, c, padding)]

        return Problem(
            t,
            call,
            truth=formula,
            size=lambda t, p: formula(t, p, abs(s) ** p),
            dtype=dtype,
            trainable=[n for n in t if n != "W"],
            slack=slack,
        )

    return one


def conv(d: Draw) -> Callable[[Draw], Problem]:
    """One, two or three axes of space; groups, strides, padding of every kind, transposed ones."""
    n, G, transposed, s, dtype = d.of(1, 2, 2, 3), d.of(1, 2, 2, 3), d.chance(0.4), d.scaling(), d.dtype()
    L, c, out, r = d.of(0, 1, 1, 1, 2, 2, 2), d.of(1, 2, 5), d.of(1, 2, 7), d.of(1, 2, 3)
    kernel, space = [d.of(1, 2, 3) for _ in range(n)], [d.of(5, 6, 9) for _ in range(n)]
    if n == 1 and d.chance(0.3):
        space = [d.of(1100, 4200)]  # more points than one program has, and than one strip of sums
    how = {"stride": d.of(1, 1, 2), "padding": d.of(0, 1), "dilation": d.of(1, 1, 2), "groups": G, "transposed": transposed}
    if not transposed:
        how["padding_mode"] = d.of("zeros", "zeros", "circular", "reflect", "replicate")
        uneven = tuple(d.of(0, 1, 2) for _ in range(n))
        how["padding"] = d.of(1, uneven, uneven, "valid", *(("same",) * 2 if how["stride"] == 1 else ()))
    else:
        how["output_padding"] = d.of(0, 1) if how["stride"] == 2 else 0
    sees_all, alone = G > 1 and not transposed and d.chance(0.4), L == 1 and d.chance(0.3)  # as PEFT's A does; without a batch
    dtypes = {"W": dtype, "x": dtype, **{name: d.beside(dtype) for name in "ABm"}} | ({"b": dtype} if d.chance(0.5) else {})
    layouts, with_c = {name: d.layout() for name in dtypes}, d.chance(0.3)

    def one(e: Draw) -> Problem:
        shapes = {"x": (L, c * G, *space), "B": (out * G, r, *[1] * n), "b": (out * G,)}
        shapes |= {"W": (c * G, out, *kernel) if transposed else (out * G, c, *kernel)}
        wide = G if sees_all else 1
        shapes |= {"A": (c, r, *kernel) if transposed else (r * wide, c * wide, *kernel)}
        t = {name: e.lay(e.normal(*shapes[name]), dtypes[name], layouts[name]) for name in dtypes if name != "m"}

        def norms(W: Tensor, A: Tensor, B: Tensor, s: float) -> Tensor:
            V = reference.kernel(W, A, B, s, G, transposed)
            V = V.unflatten(0, (G, -1)).transpose(1, 2).flatten(0, 1) if transposed else V
            return V.flatten(1).norm(dim=1)

        true = norms(*(t[name] for name in "WAB"), s)
        whole = norms(*(t[name].abs() for name in "WAB"), abs(s))
        t["m"] = e.lay(true * (1 + 0.05 * e.normal(len(true))), dtypes["m"], "plain")
        if with_c:
            t["c"] = true.to(torch.promote_types(dtype, torch.float32))

        def call(t: Tensors) -> list[Tensor]:
            f = (dora_conv1d, dora_conv2d, dora_conv3d)[n - 1]
            x = t["x"][0] if alone else t["x"]
            y = f(x, *(t[name] for name in "WABm"), s=s, bias=t.get("b"), norm=t.get("c"), backend=d.backend, **how)
            return [y[None] if alone else y]

        def formula(t: Tensors, p: int = 1, sign: float = s) -> list[Tensor]:
            return [reference.conv(*(t[name] for name in "xWABm"), sign, t.get("b"), t.get("c", true**p), **how)]

        return Problem(
            t,
            call,
            truth=formula,
            size=lambda t, p: formula(t, p, abs(s) ** p),
            dtype=dtype,
            trainable=[name for name in t if name != "W"],
            slack=norm_eps(dtype) * max((whole / true).tolist()),
        )

    return one


FUNCTIONS = {
    f.__name__: f for f in (linear, group, mlp, norm, norm_tree, base_sqnorm, scale, init, merge, experts_mlp, embedding, conv)
}
FUNCTIONS |= {"compose": partial(composed, delta=False), "delta": partial(composed, delta=True)}
FUNCTIONS |= {"unmerge": partial(merge, back=True), "multi": partial(many, own=False), "experts": partial(many, own=True)}
# the public functions that these call
CALLS = [name for name in globals() if name.startswith("dora_")]
ORDER = ("linear", "group", "mlp", "norm", "linear", "merge", "compose", "group", "mlp", "norm", "linear", "unmerge", "delta")
ORDER += (
    "norm_tree",
    "base_sqnorm",
    "linear",
    "scale",
    "init",
    "multi",
    "embedding",
    "experts",
    "conv",
    "multi",
    "experts_mlp",
)


# running and judging


def run(
    f: Formula, tensors: Tensors, needs: Sequence[str], dys: Sequence[Tensor | None] | Callable, twice: bool = False
) -> dict[str, Tensor | None]:
    """Outputs and gradients by name. ``dys`` may make them from the outputs; None for an output that nobody uses. ``twice``:
    a second backward through the same graph must say the same."""
    leaves = {n: tensors[n].detach().requires_grad_() for n in needs}
    ys = list(f(tensors | leaves))
    found: dict[str, Tensor | None] = {f"y{i}": y for i, y in enumerate(ys)}
    dys = dys(ys) if callable(dys) else dys
    used = [(y, dy) for y, dy in zip(ys, dys, strict=True) if dy is not None and y.requires_grad]
    if leaves and used:
        outputs, weights = map(list, zip(*used, strict=True))
        grads = torch.autograd.grad(outputs, list(leaves.values()), weights, retain_graph=twice, allow_unused=True)
        if twice:
            more = torch.autograd.grad(outputs, list(leaves.values()), weights, allow_unused=True)
            if not all(d.is_sparse or same_bits(d, again) for d, again in zip(grads, more, strict=True) if d is not None):
                raise Wrong("a second backward differs from the first")
        found |= {f"d{n}": d.to_dense() if d is not None and d.is_sparse else d for n, d in zip(leaves, grads, strict=True)}
    return found


def under_autocast(problem: Problem, dtype: torch.dtype, where: str) -> Problem:
    """The same call, whose products and outputs are of this dtype."""

    def call(t: Tensors) -> Sequence[Tensor]:
        with torch.autocast(where, dtype):
            return problem.call(t)

    return replace(problem, call=call, naive=None, dtype=dtype, outputs=dtype)


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
        dtype = t[name[1:]].dtype if name[0] == "d" else problem.outputs or mine.dtype
        if mine.shape != want.shape or mine.dtype != dtype:
            raise Wrong(f"{name} is {tuple(mine.shape)} {mine.dtype}, wanted {tuple(want.shape)}")
        if want.numel() == 0:
            continue
        eps = max(torch.finfo(mine.dtype).eps, torch.finfo(problem.dtype).eps)
        exact = eps == torch.finfo(torch.float64).eps  # the truth has no more digits
        eps *= 1 if eps > 1e-6 else WIDER
        whole = size[name].detach().abs() ** (1 / p)
        error = (mine.detach().double() - want.detach()).abs()
        if not mine[want.isnan()].isnan().all():
            raise Wrong(f"{name} hides a NaN")
        error = error.where(whole < torch.finfo(mine.dtype).max / 4, 0)  # may be infinite
        limit = (CLOSE * eps + problem.slack) * whole + torch.finfo(mine.dtype).tiny
        shares = (error / limit).nan_to_num(nan=math.inf).where(~want.isnan(), 0)
        share = shares.max().item()
        if share > 1:
            worst = tuple(int(i) for i in torch.unravel_index(shares.argmax(), error.shape))
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
        problem, half = fresh(e), DTYPES.get(e.options.autocast)
        if half is not None:
            problem = under_autocast(problem, half, e.device.type)
        needs = [n for n in problem.trainable if mode == "grad" and e.chance(0.7)]
        if any(n[0] == "W" and t.isnan().any() for n, t in problem.tensors.items()):
            needs = []  # all would be NaN
        before = {n: t.clone() for n, t in problem.tensors.items()}
        dys: list[Tensor | None] = []

        def draw(ys: list[Tensor]) -> list[Tensor | None]:
            for y in ys:
                dy = e.lay(e.normal(*y.shape), y.dtype, e.layout())
                dys.append(dy if len(ys) == 1 or e.chance(0.8) else None)
            return dys

        with torch.autocast(e.device.type, half, enabled=half is not None):  # backward inside of it, and then outside
            got = run(problem.call, problem.tensors, needs, draw, twice=e.chance(0.2))
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


def rounds(name: str, draw: Callable[[object], Draw]) -> Iterator[float]:
    """Run a case of this function; yields the largest share of its budget in each round, and raises where a promise is not kept.

    ``draw`` gives the choices of the case ("choices") and of each round (its number).
    """
    fresh, kept = FUNCTIONS[name](draw("choices")), Kept()
    for i in range(ROUNDS):
        yield one_round(draw(i), fresh, kept)


def run_case(name: str, seed: str, options: Options) -> None:
    """All rounds of the case of this function that the seed draws."""
    for _ in rounds(name, lambda part: Draw(random.Random(f"{seed} {part}"), options)):
        pass
