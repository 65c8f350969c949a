"""A step, operation by operation: what is alive when and the most there is at once, and what is multiplied and moved.

A network is a list of operations on named pieces of memory. Forward, an operation writes its outputs beside its temporaries and
keeps what its backward reads; an input goes with its last reader, unless it is kept. Backward runs the list from its end: the
gradients of the inputs are made beside the temporaries and beside those of the outputs, which then go, and so does what
was kept. A segment that is checkpointed keeps its inputs alone, and runs forward again before its backward.

Two names that are views of one piece of memory are one name here.

Work has one entry for each kernel, and on a GPU

    time = sum over kernels of  start + max(flops / rate, bytes / bandwidth)

RMSNorm and the rotation are torch's operations one by one, as transformers writes them: n elements, bytes of each

    RMSNorm   forward    6 8 4 8 6 4                  to float32, square, mean, times root, to bfloat16, times weight
              backward   4 6 8 12 4 4 8 8 12 12 6 6   the same back; the square's is three, and two gradients are added up
    rotation  forward    4 2 4 4 6                    times cos, -half, joined, times sin, sum
              backward   4 4 2 4 4 6 6

The layers are those of :mod:`fdora.predict`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from fdora.predict import operations, product

E = 2  # bytes of an activation
Kind = Literal["product", "attention", "attention_backward"]


class Kernel(NamedTuple):
    """One of those that an operation starts."""

    flops: float
    bytes: float
    kind: Kind = "product"


class Work(NamedTuple):
    """``calls``: how many of its kernels fdora starts in one call, forward or backward."""

    forward: tuple[Kernel, ...] = ()
    backward: tuple[Kernel, ...] = ()
    calls: int = 0

    def __add__(self, other: Work) -> Work:  # type: ignore[override]
        return Work(self.forward + other.forward, self.backward + other.backward, self.calls + other.calls)


def passes(n: int, *bytes: int) -> tuple[Kernel, ...]:
    return tuple(Kernel(0, n * each) for each in bytes)


def kernels(*ops: tuple[float, float]) -> tuple[Kernel, ...]:
    return tuple(Kernel(flops, E * elements) for flops, elements in ops)


def rms_norm(n: int) -> Work:
    return Work(passes(n, 6, 8, 4, 8, 6, 4), passes(n, 4, 6, 8, 12, 4, 4, 8, 8, 12, 12, 6, 6))


def rotation(n: int) -> Work:
    return Work(passes(n, 4, 2, 4, 4, 6), passes(n, 4, 4, 2, 4, 4, 6, 6))


def attention(tokens: int, length: int, masked: bool, width: int, kv_width: int) -> Work:
    """Causal, a token sees half of its sequence; by a mask, of which nothing is left out, it is compared with all of it."""
    flops = 4 * tokens * (length if masked else length / 2) * width
    moved = E * tokens * 2 * (width + kv_width)
    return Work((Kernel(flops, moved, "attention"),), (Kernel(2.5 * flops, 2 * moved, "attention_backward"),))


def linear(M: int, N: int, K: int, r: int, dx: bool) -> Work:
    """``r``: 0 for a frozen layer. ``dx``: whether the gradient of x is asked for."""
    if not r:
        one = kernels(product(M, N, K))
        return Work(one, one if dx else ())
    _, _, forward, backward, _, _ = operations(M, N, K, r)
    return Work(kernels(*forward), kernels(*(backward if dx else backward[:-1])), 1)


def decoding(N: int, K: int, stored: float) -> Work:
    """Of a quantised W, for forward and again for backward."""
    one = Kernel(0, N * K * (stored + E))
    return Work((one,), (one,))


class Profile(NamedTuple):
    """Measured rates per second, and seconds; see ``bench/profile_gpu.py``."""

    flops: float
    bytes: float
    start: float
    attention: float
    attention_backward: float
    norm16: float  # flops of the norms, of adapters of 16 and of 32 bits
    norm32: float
    host: float
    layer: float
    gather: float = 0.0  # 0: not measured
    send: float = 0.0

    def seconds(self, kernels: tuple[Kernel, ...]) -> float:
        rates = {"product": self.flops, "attention": self.attention, "attention_backward": self.attention_backward}
        return sum(self.start + max(each.flops / rates[each.kind], each.bytes / self.bytes) for each in kernels)


class Op(NamedTuple):
    """Names, and bytes of what has none."""

    name: str
    reads: tuple[str, ...]
    writes: tuple[str, ...]
    keeps: tuple[str, ...] = ()  # for backward: of reads, of writes, or of its own
    forward: int = 0  # temporaries
    backward: int = 0
    gradients: int = 0  # of its parameters: they stay after backward
    same: bool = False  # the gradient of each input is that of the output, as of a sum
    work: Work = Work()


class Segment(NamedTuple):
    """Operations that are checkpointed together, or not at all."""

    ops: tuple[Op, ...]
    checkpointed: bool = False


class Peaks(NamedTuple):
    """Bytes beyond what is there before a step: after forward, the most in it and in backward, and after that."""

    kept: int
    forward: int
    backward: int
    gradients: int
    at: str  # where the most of all is: "backward of 3.mlp"

    @property
    def most(self) -> int:
        return max(self.forward, self.backward)


class _Memory:
    """Pieces by name, each as long as somebody holds it."""

    def __init__(self, sizes: Mapping[str, int]):
        self.sizes, self.held = sizes, Counter[str]()
        self.total = self.most = 0
        self.at = ""

    def hold(self, names: Iterable[str], times: int = 1) -> None:
        for name in names:
            if times and not self.held[name]:
                self.total += self.sizes[name]
            self.held[name] += times

    def release(self, names: Iterable[str]) -> None:
        for name in names:
            self.held[name] -= 1
            if not self.held[name]:
                self.total -= self.sizes[name]

    def look(self, more: int, where: str) -> None:
        if self.total + more > self.most:
            self.most, self.at = self.total + more, where


def walk(segments: Sequence[Segment], sizes: Mapping[str, int], inputs: Sequence[str], gradients: int = 0) -> Peaks:
    """Forward, then backward of everything that hangs on a parameter.

    Args:
      segments: in the order of forward; the last operation writes the loss, which nothing reads.
      sizes: bytes of each name.
      inputs: names that are there before, belong to the caller, and hang on no parameter.
      gradients: bytes of all gradients of parameters, where earlier microbatches have left them.
    """
    ops = [op for segment in segments for op in segment.ops]
    readers = Counter(name for op in ops for name in op.reads)
    trained: set[str] = set()  # names that hang on a parameter
    for op in ops:
        if op.gradients or trained.intersection(op.reads):
            trained.update(op.writes)
    memory = _Memory({**sizes, **{f"d {name}": size for name, size in sizes.items()}})
    for name in inputs:
        memory.hold([name], 1 + readers[name])
    start = memory.total
    for segment in segments:
        if segment.checkpointed:
            memory.hold(_outside(segment))
        keep = set[str]() if segment.checkpointed else trained
        _forward(memory, segment.ops, readers, keep, set(readers), "forward")
    kept, forward, at = memory.total - start, memory.most - start, memory.at
    memory.most = 0
    given: dict[str, str] = {}  # name -> whose memory its gradient is
    for segment in reversed(segments):
        if segment.checkpointed:
            inside = Counter(name for op in segment.ops for name in op.reads)
            written = {name for op in segment.ops for name in op.writes}
            _forward(memory, segment.ops, inside, trained, written, "forward again")
        for op in reversed(segment.ops):
            if trained.intersection(op.writes):
                _backward(memory, op, trained, given, 0 if gradients else op.gradients)
        if segment.checkpointed:
            memory.release(_outside(segment))
    backward = memory.most - start
    return Peaks(kept, forward, backward, memory.total - start, at if forward > backward else memory.at)


def _outside(segment: Segment) -> list[str]:
    """What a segment reads and does not write."""
    written = {name for op in segment.ops for name in op.writes}
    return [name for name in dict.fromkeys(name for op in segment.ops for name in op.reads) if name not in written]


def _forward(memory: _Memory, ops: Sequence[Op], readers: Mapping[str, int], keep: set[str], own: set[str], where: str) -> None:
    """``keep``: for backward of what writes one of these; ``own``: names that go with their last reader."""
    for op in ops:
        for name in op.writes:
            memory.hold([name], 1 + readers.get(name, 0))
        if keep.intersection(op.writes):
            memory.hold(op.keeps)
        memory.look(op.forward, f"{where} of {op.name}")
        memory.release(op.writes)
        memory.release(name for name in op.reads if name in own)


def _backward(memory: _Memory, op: Op, trained: set[str], given: dict[str, str], gradients: int) -> None:
    came = [given.pop(name) for name in op.writes if name in given]
    added = 0
    for name in dict.fromkeys(op.reads):
        if name not in trained:
            continue
        if name not in given:
            given[name] = came[0] if op.same else f"d {name}"
            memory.hold([given[name]])
        elif not op.same:
            added += memory.sizes[name]  # and one of the two goes
    memory.total += gradients
    memory.look(op.backward + added, f"backward of {op.name}")
    memory.release(came)
    memory.release(op.keeps)
