"""A decoder of transformers through fdora as a list of operations, for :mod:`fdora.jobs.plan.tape`.

M tokens, H hidden, F inner, q and kv the widths of queries and keys; bytes of an activation, e = 2. What stays for backward:

    RMSNorm       x in float32, 4 M H, and 4 M                      in its backward 20 M H: x ** 2 and the mean, each by itself
    dora_linear   x, h = x A^T (e M r), y; with a bias the value before g in the place of y
                  with dropout the value before g; D(x) is drawn anew, and both products with W, one in float32, are
                  temporaries, e M K + 6 M N in forward, e M N + 6 M K in backward, and W as codes, twice there
    rotation      nothing
    attention     q, k, v, its output, 4 M heads
    act, product  their inputs
    dora_mlp      x, gate, up, two h, y; a, da and a dz are temporaries of its backward, e 3 M F
    loss          the logarithms of the softmax, 4 T V of T tokens; in its backward two gradients of that size beside it

An x that several layers read is one piece. A backward of a linear layer has dz, e M N, and sums of dm for each 128 tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

from fdora.jobs.plan.model import ATTENTION, MLP, Model, Part
from fdora.jobs.plan.setup import WEIGHTS, Setup
from fdora.jobs.plan.tape import E, Op, Segment, Work, attention, decoding, kernels, linear, passes, rms_norm, rotation
from fdora.predict import product

STRIP = 128  # tokens whose dm is one partial sum


class Network(NamedTuple):
    segments: tuple[Segment, ...]
    sizes: dict[str, int]
    inputs: tuple[str, ...]


Sizes = dict[str, int]  # bytes by names


class Block:
    """Operations as they are added; names of a layer begin with its number."""

    def __init__(self, model: Model, setup: Setup, tokens: int):
        self.model, self.setup, self.M = model, setup, tokens
        self.ops: list[Op] = []
        self.sizes: Sizes = {}

    def op(
        self, name: str, reads: Iterable[str], writes: Sizes, own: Sizes, keeps: Iterable[str] = (), **rest: Any
    ) -> list[str]:
        """``own``: what it keeps and nobody else reads; ``keeps``: what others do."""
        self.sizes |= writes | own
        self.ops.append(Op(name, tuple(reads), tuple(writes), (*keeps, *own), **rest))
        return [*writes]

    def norm(self, at: str, x: str, width: int) -> str:
        """RMSNorm in float32, each of its operations by itself; over all columns, or those of a head."""
        n, over = self.M * width, width if width == self.model.hidden else self.model.head_dim
        own = {f"{at}.float32": 4 * n + 4 * n // over}
        return self.op(at, [x], {f"{at}.y": E * n}, own, forward=8 * n, backward=16 * n, work=rms_norm(n))[0]

    def call(self, at: str, names: tuple[str, ...]) -> tuple[Sizes, Sizes, list[str], dict[str, Any]]:
        """Layers that run in one call: what they write, what they keep without x, and the rest of an operation."""
        M, setup = self.M, self.setup
        stored, coded = WEIGHTS[setup.weights]
        ys, own, keeps, forward, backward, gradients, work = Sizes(), Sizes(), list[str](), 0, 0, 0, Work()
        for name in names:
            N, K = self.model.linears[name]
            y, there = f"{at}.{name}", setup.decoded(N * K)
            ys[y], back, adapted = E * M * N, there, name in setup.targets
            work += linear(M, N, K, setup.width if adapted else 0, True) + (decoding(N, K, stored) if coded else Work())
            if adapted:
                own[f"{y} h"], more = E * M * setup.width, self.scratch(N)
                if setup.dropout:
                    there, more = there + E * M * K + 6 * M * N + N * K, more + E * M * N + 6 * M * K + 2 * N * K
                if setup.dropout or name in self.model.biases:
                    own[f"{y} before g"] = E * M * N
                else:
                    keeps.append(y)
                back += more
                gradients += setup.adapter_elements(N, K) * setup.adapter_bytes
            forward, backward = max(forward, there), max(backward, back)
        work = work._replace(calls=min(1, work.calls))
        return ys, own, keeps, {"forward": forward, "backward": backward, "gradients": gradients, "work": work}

    def linear(self, at: str, names: tuple[str, ...], x: str, called: str = "") -> list[str]:
        """Layers on one x, in one call where there are several."""
        ys, own, keeps, rest = self.call(at, names)
        if own:  # a frozen W keeps nothing
            keeps.append(x)
        return self.op(f"{at}.{called or names[0]}", [x], ys, own, keeps, **rest)

    def scratch(self, N: int) -> int:
        """Of the backward of one layer."""
        return E * self.M * N + max(4 * -(-self.M // STRIP) * N, E * self.M * self.setup.width)

    def attention(self, at: str, layer: int, x: str) -> str:
        m, M, setup = self.model, self.M, self.setup
        q_width, kv_width = m.heads * m.head_dim, m.kv_heads * m.head_dim
        if setup.fuse and setup.targets.issuperset(ATTENTION):
            q, k, v = self.linear(at, ATTENTION, x, "qkv_proj")
        else:
            q, k, v = (self.linear(at, (name,), x)[0] for name in ATTENTION)
        if m.head_norms:
            q, k = self.norm(f"{at}.q_norm", q, q_width), self.norm(f"{at}.k_norm", k, kv_width)
        n, both = M * q_width, rotation(M * q_width) + rotation(M * kv_width)
        turned = {f"{at}.q turned": E * n, f"{at}.k turned": E * M * kv_width}
        q, k = self.op(f"{at}.rotation", [q, k], turned, {}, forward=2 * E * n, backward=3 * E * n, work=both)
        masked, own, out = masks(m, setup, layer), {f"{at}.sums": 4 * M * m.heads}, f"{at}.attention"
        if masked:  # a mask: torch makes it additive for each layer, and a k and v for each q
            own[f"{at}.mask"] = E * M * setup.row(M)
            if m.heads != m.kv_heads:
                wide = {f"{at}.{name} repeated": E * n for name in ("k", "v")}
                k, v = self.op(f"{at}.repeat", [k, v], wide, {}, work=Work(passes(n, 4, 4), passes(n, 4, 4)))
        work = attention(M, setup.row(M), masked, q_width, kv_width)
        self.op(out, [q, k, v], {out: E * n}, own, [q, k, v, out], backward=4 * E * n, work=work)
        return self.linear(at, ("o_proj",), out)[0]

    def mlp(self, at: str, x: str) -> str:
        m, M, setup = self.model, self.M, self.setup
        n, inner, y = M * m.inner, E * M * m.inner, f"{at}.down_proj"
        if setup.fuse and setup.targets.issuperset((*MLP, "down_proj")):
            ys, own, keeps, rest = self.call(at, (*MLP, "down_proj"))
            decoded, work = rest["forward"], rest["work"] + Work(passes(n, 6), passes(n, 6, 10))
            rest |= {"forward": inner + decoded, "backward": 2 * inner + self.scratch(m.inner) + decoded, "work": work}
            self.sizes |= ys
            return self.op(f"{at}.mlp", [x], {y: ys[y]}, own, [x, *keeps], **rest)[0]
        gate, up = (self.linear(at, (name,), x)[0] for name in MLP)
        work = Work(passes(n, 4), passes(n, 6))
        active = self.op(f"{at}.act", [gate], {f"{at}.act": inner}, {}, [gate], work=work)[0]
        work = Work(passes(n, 6), passes(n, 6, 6))
        both = self.op(f"{at}.product", [active, up], {f"{at}.act up": inner}, {}, [active, up], work=work)[0]
        return self.linear(at, ("down_proj",), both)[0]

    def add(self, at: str, x: str, y: str) -> str:
        n = self.M * self.model.hidden
        return self.op(at, [x, y], {at: E * n}, {}, same=True, work=Work(passes(n, 6)))[0]

    def layer(self, layer: int, x: str) -> str:
        at, H = str(layer), self.model.hidden
        y = self.attention(at, layer, self.norm(f"{at}.norm 1", x, H))
        x = self.add(f"{at}.sum 1", x, self.norm(f"{at}.norm 2", y, H) if self.model.sandwich else y)
        y = self.mlp(at, self.norm(f"{at}.norm 3", x, H))
        return self.add(f"{at}.sum 2", x, self.norm(f"{at}.norm 4", y, H) if self.model.sandwich else y)

    def loss(self, x: str, tokens: int) -> None:
        n, H = tokens * self.model.vocab, self.model.hidden
        one = kernels(product(tokens, self.model.vocab, H))
        y = [self.norm("norm", x, H)]
        y = self.op("head", y, {"logits": E * n}, {}, backward=E * tokens * H, work=Work(one, one))
        y = self.op("float32", y, {"float32": 4 * n}, {}, work=Work(passes(n, 6), passes(n, 6)))
        y = self.op("softmax", y, {"logs": 4 * n}, {}, ["logs"], forward=E * n, work=Work(passes(n, 8), passes(n, 12)))
        self.op("loss", y, {"loss": 4}, {}, work=Work((), passes(n, 4)))

    def take(self, checkpointed: bool) -> Segment:
        segment = Segment(tuple(self.ops), checkpointed)
        self.ops = []
        return segment


def masks(model: Model, setup: Setup, layer: int) -> bool:
    """Whether a layer's attention gets a mask. transformers makes one where a window is as long as a sequence, too."""
    return setup.packed or (layer in model.sliding and setup.length >= model.window)


def decoder(model: Model, setup: Setup, tokens: int, part: Part | None = None) -> Network:
    """Layers on so many tokens: all, or those of a stage, by their numbers in the model.

    A stage that is not the first gets an input whose gradient it must give; its own layers need it, so nothing is left out.
    """
    part = Part(model.layers) if part is None else part
    block, segments = Block(model, setup, tokens), []
    inputs = {"angles": (2 if model.window else 1) * 2 * E * setup.row(tokens) * model.head_dim}
    if any(masks(model, setup, layer) for layer in part.held):
        inputs["mask"] = tokens * setup.row(tokens)
    block.sizes |= inputs
    given = "embedding" if part.first else "received"
    x = block.op(given, [], {"x": E * tokens * model.hidden}, {}, gradients=int(not part.first))[0]
    segments.append(block.take(False))
    for layer in part.held:
        x = block.layer(layer, x)
        segments.append(block.take(setup.checkpointing))
    if part.last:
        block.loss(x, setup.loss_of(tokens))
    else:
        block.op("sent", [x], {"loss": 4}, {}, [x])
    return Network((*segments, block.take(False)), block.sizes, tuple(inputs))
