"""A decoder of transformers through fdora as a list of operations, for :mod:`fdora.jobs.plan.tape`.

M tokens, H hidden, F inner, q and kv the widths of queries and keys; bytes of an activation, e = 2. What stays for backward:

    RMSNorm       x in float32, 4 M H, and 4 M                      in its backward 20 M H: x ** 2 and the mean, each by itself
    dora_linear   x, h = x A^T (e M r), y; with a bias the value before g in the place of y
                  with dropout D(x) and its mask, 3 M K, in the place of x, and the value before g; it is drawn in float32,
                  9 M K in forward, 8 M K in backward
    rotation      nothing
    attention     q, k, v, its output, 4 M heads
    act, product  their inputs
    dora_mlp      x, gate, up, two h, y; a, da and a dz are temporaries of its backward, e 3 M F
    loss          the logarithms of the softmax, 4 T V of T tokens; in its backward two gradients of that size beside it

An x that several layers read is one piece. A backward of a linear layer has dz, e M N, and sums of dm for each 128 tokens.
"""

from __future__ import annotations

from typing import NamedTuple

from fdora.jobs.plan.model import ATTENTION, MLP, Model, Part
from fdora.jobs.plan.setup import WEIGHTS, Setup
from fdora.jobs.plan.tape import Op, Segment
from fdora.jobs.plan.work import E, Kernel, Work, attention, decoding, linear, passes, rms_norm, rotation

STRIP = 128  # tokens whose dm is one partial sum


class Network(NamedTuple):
    segments: tuple[Segment, ...]
    sizes: dict[str, int]
    inputs: tuple[str, ...]


class Call(NamedTuple):
    """What layers that run in one call come to."""

    ys: list[str]
    keeps: list[str]
    forward: int
    backward: int
    gradients: int
    work: Work


class Block:
    """Operations as they are added; names of a layer begin with its number."""

    def __init__(self, model: Model, setup: Setup, tokens: int):
        self.model, self.setup, self.M = model, setup, tokens
        self.ops: list[Op] = []
        self.sizes: dict[str, int] = {}

    def piece(self, name: str, bytes: int) -> str:
        self.sizes[name] = bytes
        return name

    def norm(self, at: str, x: str, width: int) -> str:
        """RMSNorm in float32, each of its operations by itself."""
        n = self.M * width
        y, wide = self.piece(f"{at}.y", E * n), self.piece(f"{at}.float32", 4 * n + 4 * self.M * width // self._normed(width))
        self.ops.append(Op(at, (x,), (y,), (wide,), 8 * n, 16 * n, work=rms_norm(n)))
        return y

    def _normed(self, width: int) -> int:
        """Over how many columns a norm goes."""
        return width if width == self.model.hidden else self.model.head_dim

    def call(self, at: str, names: tuple[str, ...]) -> Call:
        """These layers, whose outputs get names; ``keeps`` has no x."""
        M, setup = self.M, self.setup
        ys, keeps, forward, backward, gradients, work = [], [], 0, 0, 0, Work()
        for name in names:
            N, K = self.model.linears[name]
            work += self.work(name)
            ys.append(self.piece(f"{at}.{name}", E * M * N))
            decoded = setup.decoded(N * K)
            forward, more = max(forward, decoded), 0
            if name in setup.targets:
                before = name in self.model.biases or setup.dropout
                if setup.dropout:
                    keeps.append(self.piece(f"{at}.{name} D(x)", (E + 1) * M * K))
                    forward, more = max(forward, decoded + 9 * M * K), 8 * M * K
                keeps.append(self.piece(f"{at}.{name} before g", E * M * N) if before else ys[-1])
                keeps.append(self.piece(f"{at}.{name} h", E * M * setup.width))
                more = max(more, self.scratch(N))
                gradients += setup.adapter_elements(N, K) * setup.adapter_bytes
            backward = max(backward, more + decoded)
        return Call(ys, keeps, forward, backward, gradients, work._replace(calls=min(1, work.calls)))

    def linear(self, at: str, names: tuple[str, ...], x: str, own: str = "") -> list[str]:
        """Layers on one x, in one call where there are several."""
        ys, keeps, forward, backward, gradients, work = self.call(at, names)
        keeps = [x, *keeps] if keeps and not self.setup.dropout else keeps  # a frozen W keeps nothing
        self.ops.append(Op(f"{at}.{own or names[0]}", (x,), tuple(ys), tuple(keeps), forward, backward, gradients, work=work))
        return ys

    def work(self, name: str) -> Work:
        (N, K), setup = self.model.linears[name], self.setup
        stored, coded = WEIGHTS[setup.weights]
        more = decoding(N, K, stored) if coded else Work()
        return linear(self.M, N, K, setup.width if name in setup.targets else 0, True) + more

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
        turned = [self.piece(f"{at}.{name} turned", E * M * width) for name, width in (("q", q_width), ("k", kv_width))]
        n, both = M * q_width, rotation(M * q_width) + rotation(M * kv_width)
        self.ops.append(Op(f"{at}.rotation", (q, k), tuple(turned), (), 2 * E * n, 3 * E * n, work=both))
        q, k = turned
        masked = masks(m, setup, layer)
        keeps = []
        if masked:  # a mask: torch makes it additive for each layer, and a k and v for each q
            keeps.append(self.piece(f"{at}.mask", E * M * setup.row(M)))
            if m.heads != m.kv_heads:
                wide = [self.piece(f"{at}.{name} repeated", E * n) for name in ("k", "v")]
                self.ops.append(Op(f"{at}.repeat", (k, v), tuple(wide), work=Work(passes(n, 4, 4), passes(n, 4, 4))))
                k, v = wide
        out, sums = self.piece(f"{at}.attention", E * n), self.piece(f"{at}.sums", 4 * M * m.heads)
        keeps += [q, k, v, out, sums]
        work = attention(M, setup.row(M), masked, q_width, kv_width)
        self.ops.append(Op(f"{at}.attention", (q, k, v), (out,), tuple(keeps), 0, 4 * E * n, work=work))
        return self.linear(at, ("o_proj",), out)[0]

    def mlp(self, at: str, x: str) -> str:
        m, M, setup = self.model, self.M, self.setup
        n, inner = M * m.inner, E * M * m.inner
        if setup.fuse and setup.targets.issuperset((*MLP, "down_proj")):
            one = self.call(at, (*MLP, "down_proj"))
            y = one.ys[-1]
            backward = 2 * inner + self.scratch(m.inner) + one.forward
            work = one.work + Work(passes(n, 6), passes(n, 6, 10))
            keeps = (x, *one.keeps)
            self.ops.append(Op(f"{at}.mlp", (x,), (y,), keeps, inner + one.forward, backward, one.gradients, work=work))
            return y
        gate, up = (self.linear(at, (name,), x)[0] for name in MLP)
        active, both = self.piece(f"{at}.act", inner), self.piece(f"{at}.act up", inner)
        self.ops.append(Op(f"{at}.act", (gate,), (active,), (gate,), work=Work(passes(n, 4), passes(n, 6))))
        self.ops.append(Op(f"{at}.product", (active, up), (both,), (active, up), work=Work(passes(n, 6), passes(n, 6, 6))))
        return self.linear(at, ("down_proj",), both)[0]

    def add(self, at: str, x: str, y: str) -> str:
        n = self.M * self.model.hidden
        total = self.piece(at, E * n)
        self.ops.append(Op(at, (x, y), (total,), same=True, work=Work(passes(n, 6))))
        return total

    def layer(self, layer: int, x: str) -> str:
        at, H = str(layer), self.model.hidden
        y = self.attention(at, layer, self.norm(f"{at}.norm 1", x, H))
        x = self.add(f"{at}.sum 1", x, self.norm(f"{at}.norm 2", y, H) if self.model.sandwich else y)
        y = self.mlp(at, self.norm(f"{at}.norm 3", x, H))
        return self.add(f"{at}.sum 2", x, self.norm(f"{at}.norm 4", y, H) if self.model.sandwich else y)

    def loss(self, x: str, tokens: int) -> None:
        n, H = tokens * self.model.vocab, self.model.hidden
        normed = self.norm("norm", x, H)
        logits, wide, logs = self.piece("logits", E * n), self.piece("float32", 4 * n), self.piece("logs", 4 * n)
        one = Kernel(2 * n * H, E * (n + (tokens + self.model.vocab) * H))
        self.ops += [
            Op("head", (normed,), (logits,), (), 0, E * tokens * H, work=Work((one,), (one,))),
            Op("float32", (logits,), (wide,), work=Work(passes(n, 6), passes(n, 6))),
            Op("softmax", (wide,), (logs,), (logs,), E * n, work=Work(passes(n, 8), passes(n, 12))),
            Op("loss", (logs,), (self.piece("loss", 4),), work=Work((), passes(n, 4))),
        ]

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
    block = Block(model, setup, tokens)
    x = block.piece("x", E * tokens * model.hidden)
    segments = []
    inputs = [block.piece("angles", (2 if model.window else 1) * 2 * E * setup.row(tokens) * model.head_dim)]
    if any(masks(model, setup, layer) for layer in part.held):
        inputs.append(block.piece("mask", tokens * setup.row(tokens)))
    block.ops.append(Op("embedding", (), (x,)) if part.first else Op("received", (), (x,), gradients=1))
    segments.append(block.take(False))
    for layer in part.held:
        x = block.layer(layer, x)
        segments.append(block.take(setup.checkpointing))
    if part.last:
        block.loss(x, setup.loss_of(tokens))
    else:
        block.ops.append(Op("sent", (x,), (block.piece("loss", 4),), (x,)))
    segments.append(block.take(False))
    return Network(tuple(segments), block.sizes, tuple(inputs))
