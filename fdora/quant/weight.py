"""A quantised weight as a value: a few tensors, and static facts that say how they are decoded; and the kinds there are."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import optree
import torch
from torch import Tensor

from fdora._check import FLOATS, Weight, check_dtype, check_whole, fail
from fdora._recording import active
from fdora._torch import register_pytree

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu)
Facts = TypeVar("Facts")
CHUNK = 1 << 24  # numbers: of a large weight so many at a time are float32 before they are rounded


Decode = Callable[["QuantWeight", int, int], Tensor]


class Kind(NamedTuple):
    """A registered format: its name, its decoder, and the names of its tensors."""

    name: str
    dequantize: Decode
    tensors: tuple[str, ...]
    by_rows: bool


KINDS: dict[str, Kind] = {}


def register_kind(name: str, *, dequantize: Decode, tensors: tuple[str, ...] = (), by_rows: bool = True) -> Kind:
    """Teach fdora a format: ``W[i:j] = dequantize(weight, i, j)``.

    Args:
      name: of the kind, as in ``QuantWeight.kind``; a name that is taken is an error, unless all of it is the same.
      dequantize: gives rows i to j (at least one) of ``weight``, (j - i, K), in the dtype in which the format is
        decoded (float32 for most), as a new tensor, in plain torch with no dependence on values, for compilers.
      tensors: names of ``weight.tensors``, in order; those at the end may be missing in a weight.
      by_rows: whether some rows cost less than all of them.

    Returns:
      The ``Kind``.

    Raises:
      FdoraError: another kind has that name.

    Memory: keeps ``dequantize`` for good.
    References: none.
    """
    kind = Kind(name, dequantize, tuple(tensors), by_rows)
    if KINDS.setdefault(name, kind) != kind:
        raise fail("quant.register_kind", "name", "new", repr(name), "Choose another name.")
    return kind


def kind_of(name: str) -> Kind:
    found = KINDS.get(name)
    if found is None:
        known = ", ".join(sorted(KINDS))
        raise fail("quant.QuantWeight", "kind", f"one of {known}", repr(name), "Teach it with fdora.quant.register_kind.")
    return found


@dataclass(frozen=True)
class QuantSpec:
    """All of a :class:`QuantWeight` except its tensors: hashable, a static argument of compiled code."""

    kind: str
    shape: tuple[int, int]
    dtype: torch.dtype
    facts: Hashable
    count: int
    """How many tensors."""

    def weight(self, tensors: Sequence[Tensor | None]) -> QuantWeight:
        """The weight again, from as many tensors, for example those that an autograd.Function kept."""
        if len(tensors) != self.count:
            raise fail("quant.QuantSpec.weight", "tensors", f"{self.count} tensors", len(tensors), "Pass weight.tensors.")
        return QuantWeight(self.kind, tuple(tensors), self.shape, self.dtype, self.facts)


@dataclass(frozen=True, eq=False, repr=False)
class QuantWeight(Weight):
    """``W[n, k] = decode(tensors, facts)[n, k]``: an (N, K) weight in ``nn.Linear`` layout, frozen, in one of several formats.

    The constructors of fdora.quant make it. It is a pytree for optree and for torch, whose leaves are the tensors; an argument
    of compiled code; and can be copied, pickled and saved. ``torch.load(weights_only=True)`` takes it inside
    ``torch.serialization.safe_globals(fdora.quant.SAFE)``. Two of them are equal if they are the same object.
    """

    kind: str
    """The format: nf4, fp4, mxfp4, nvfp4, int8, fp8, hqq, gptq, awq, torchao_nf4, affine, opaque, or a registered one."""
    tensors: tuple[Tensor | None, ...]
    """What is stored, in the order that the kind names; see :meth:`named`."""
    shape: tuple[int, int]
    """(N, K), whatever shape the stored tensors have."""
    dtype: torch.dtype
    """The floating dtype that it stands for, and that ``dequantize()`` returns."""
    facts: Hashable
    """What else the kind must know: a NamedTuple of its module."""

    @property
    def spec(self) -> QuantSpec:
        return QuantSpec(self.kind, self.shape, self.dtype, self.facts, len(self.tensors))

    @property
    def device(self) -> torch.device:
        for t in self.tensors:
            if t is not None:
                return t.device
        raise fail("quant.QuantWeight", "tensors", "at least one tensor", "none", "Build it with a constructor of fdora.quant.")

    @property
    def nbytes(self) -> int:
        """Of the stored tensors together."""
        return sum(t.numel() * t.element_size() for t in self.tensors if t is not None)

    @property
    def requires_grad(self) -> bool:
        """False: it is frozen."""
        return False

    @property
    def ndim(self) -> int:
        return 2

    def detach(self) -> QuantWeight:
        """Itself: it has no gradient and no tangent."""
        return self

    def named(self) -> dict[str, Tensor | None]:
        """The tensors by the names that the kind gives them, for example codes and scales."""
        names = kind_of(self.kind).tensors
        return {names[i] if i < len(names) else str(i): t for i, t in enumerate(self.tensors)}

    def to(self, device: torch.device | str | torch.dtype | None = None, dtype: torch.dtype | None = None) -> QuantWeight:
        """The same values on another device; a dtype changes only ``.dtype``, never what is stored."""
        if isinstance(device, torch.dtype):
            device, dtype = None, device
        tensors = self.tensors
        if device is not None:
            tensors = tuple(None if t is None else t.to(device) for t in tensors)
        if dtype is not None:
            check_floating("quant.QuantWeight.to", dtype)
        return replace(self, tensors=tensors, dtype=self.dtype if dtype is None else dtype)

    def dequantize(self, dtype: torch.dtype | None = None, rows: slice | None = None, out: Tensor | None = None) -> Tensor:
        """``W[rows]`` as a dense tensor.

        Args:
          dtype: of the result; None is that of ``out``, or of the weight. The format is decoded in its own precision (float32
            for most, see the constructor) and rounded to ``dtype`` once.
          rows: a slice with step 1; only these are decoded. None is all.
          out: (rows, K) tensor to write to, of any strides; None allocates.

        Returns:
          (rows, K) tensor on the device of the weight, or ``out``. It never requires grad.

        Raises:
          FdoraError: ``dtype`` is not floating or not that of ``out``; ``rows`` has a step; ``out`` has another shape
            or device.

        Memory: a large weight is rounded in slices of 64 MB of float32, so that little stands beside the result; compiled code
        does it in one.
        References: the constructor of each kind.
        """
        fn, (N, K) = "quant.QuantWeight.dequantize", self.shape
        first, last = (0, N) if rows is None else bounds(fn, "rows", rows, N)
        if out is not None:
            if not isinstance(out, Tensor):
                raise fail(fn, "out", "a torch.Tensor", f"a {type(out).__name__}", "Leave it out to have one allocated.")
            if out.shape != (last - first, K) or out.device != self.device:
                have = f"{tuple(out.shape)} on {out.device}"
                raise fail(fn, "out", f"{(last - first, K)} on {self.device}", have, "Allocate it with that shape there.")
            if dtype not in (None, out.dtype):
                raise fail(fn, "dtype", f"the dtype of `out`, {out.dtype}", dtype, "Leave dtype out.")
            dtype = out.dtype
        dtype = self.dtype if dtype is None else dtype
        check_floating(fn, dtype)
        with torch.no_grad():
            return self._decode(first, last, dtype, out)

    def _decode(self, first: int, last: int, dtype: torch.dtype, out: Tensor | None) -> Tensor:
        if (noted := active()) is not None and self.device.type == "meta":
            return noted.decode(self, first, last, dtype) if out is None else out
        kind, K = kind_of(self.kind), self.shape[1]
        step, nothing = max(1, CHUNK // max(1, K)), first == last or K == 0  # of which no kind has to think
        narrow = out is not None or dtype not in (torch.float32, torch.float64)
        in_slices = kind.by_rows and narrow and last - first > step and not torch.compiler.is_compiling()
        if not (nothing or in_slices):
            W = kind.dequantize(self, first, last).to(dtype)
            return W if out is None else out.copy_(W)
        if out is None:
            out = torch.empty((last - first, K), dtype=dtype, device=self.device)
        for i in () if nothing else range(first, last, step):
            j = min(i + step, last)
            out[i - first : j - first].copy_(kind.dequantize(self, i, j))
        return out

    def __getstate__(self) -> dict[str, Any]:
        # pickle cannot read a float8 tensor again (torch 2.13; torch.load can): its bytes and its dtype. Views, as cut() makes
        # them, are copied: torch.save would write the whole storage.
        dtypes = tuple(t.dtype if t is not None and t.dtype in FLOAT8 else None for t in self.tensors)
        own = [t if t is None or t.untyped_storage().nbytes() <= t.nbytes else t.clone() for t in self.tensors]
        tensors = [t if d is None or t is None else t.view(torch.uint8) for t, d in zip(own, dtypes, strict=True)]
        return vars(self) | {"tensors": tuple(tensors), "float8": dtypes}

    def __setstate__(self, state: dict[str, Any]) -> None:
        dtypes, tensors = state["float8"], state["tensors"]
        tensors = tuple(t if d is None else t.view(d) for t, d in zip(tensors, dtypes, strict=True))
        vars(self).update({name: value for name, value in state.items() if name != "float8"}, tensors=tensors)

    def __repr__(self) -> str:
        N, K = self.shape
        return f"QuantWeight({self.kind}, ({N}, {K}), {self.dtype}, {self.facts}, {self.nbytes} bytes)"


def check_floating(fn: str, dtype: object) -> None:
    if dtype not in FLOATS:
        raise fail(fn, "dtype", "a floating dtype of torch", dtype, "Pass, for example, torch.bfloat16.")


def matrix(fn: str, shape: Sequence[int]) -> tuple[int, int]:
    """(N, K) as a tuple of ints, which a torch.Size is to nobody's hash but its own."""
    if len(shape) != 2:
        raise fail(fn, "shape", "(N, K)", tuple(shape), "Pass one weight of a linear layer; of a stack of experts, one expert.")
    N, K = shape
    return N, K


def bounds(fn: str, arg: str, rows: Any, N: int) -> tuple[int, int]:
    """Its first row and the one behind its last. Not by slice.indices, which Dynamo cannot trace before torch 2.12."""
    ends = (rows.start, rows.stop) if isinstance(rows, slice) and rows.step in (None, 1) else (0.0,)
    if not all([i is None or isinstance(i, (int, torch.SymInt)) for i in ends]):
        raise fail(fn, arg, "a slice with step 1, of ints", rows, "Take all of a range, then index the result.")
    first, last = 0 if rows.start is None else rows.start, N if rows.stop is None else rows.stop
    first, last = (min(N, max(0, i + N if i < 0 else i)) for i in (first, last))
    return first, max(first, last)


def stored(fn: str, arg: str, t: Any, dtypes: tuple[torch.dtype, ...], size: Sequence[int] | None = None) -> Tensor:
    """A tensor that is stored as it is: of a dtype and a shape that the format has, contiguous, and no Parameter."""
    if not isinstance(t, Tensor):
        raise fail(fn, arg, "a torch.Tensor", f"a {type(t).__name__}", "Pass the tensor that the checkpoint holds.")
    check_whole(fn, {arg: t})
    check_dtype(fn, arg, t, dtypes, "Pass it as the checkpoint holds it.")
    if size is not None and tuple(t.shape) != tuple(size):
        raise fail(
            fn, arg, f"of shape {tuple(size)}", tuple(t.shape), "Pass the tensors of one layer, as the checkpoint holds them."
        )
    if not t.is_contiguous():
        raise fail(fn, arg, "contiguous", f"strides {t.stride()}", f"Pass {arg}.contiguous().")
    t = t.detach()
    if torch.compiler.is_compiling() or not t.is_inference() or torch.is_inference_mode_enabled():
        return t
    # autograd keeps no tensor that was made in inference mode, as HQQ makes its own; another one of the same memory it does
    return torch.empty(0, dtype=t.dtype, device=t.device).set_(t.untyped_storage(), t.storage_offset(), t.shape, t.stride())


def made(
    fn: str, kind: str, tensors: tuple[Tensor | None, ...], shape: tuple[int, int], dtype: torch.dtype, facts: Hashable
) -> QuantWeight:
    """What a constructor returns. Its tensors are on one device: a number on the host beside codes on a GPU is a mistake that
    torch would let pass, and kernels not."""
    W = QuantWeight(kind, tensors, shape, dtype, facts)
    if any([t is not None and t.device != W.device for t in tensors]):
        have = ", ".join([f"{name} on {t.device}" for name, t in W.named().items() if t is not None])
        raise fail(fn, "tensors", "on one device", have, f"Move all to {W.device}.")
    return W


def read_as(W: QuantWeight, facts: type[Facts], count: int) -> tuple[Facts, tuple[Tensor, ...]]:
    """The facts, and so many tensors of those that come first: what a decoder asks of a weight that no constructor made."""
    fn, remedy = "quant.QuantWeight", "Build it with a constructor of fdora.quant."
    if not isinstance(W.facts, facts):
        raise fail(fn, "facts", f"a {facts.__name__} where the kind is {W.kind}", f"a {type(W.facts).__name__}", remedy)
    first = [t for t in W.tensors[:count] if isinstance(t, Tensor)]
    if len(first) < count:
        have = [type(t).__name__ for t in W.tensors]
        raise fail(fn, "tensors", f"{count} tensors, or more, where the kind is {W.kind}", have, remedy)
    return W.facts, tuple(first)


def repeated(t: Tensor, group: int, first: int, last: int) -> Tensor:
    """First to last of the numbers, or rows, of which each in ``t`` stands for ``group``."""
    start = first // group
    return t[start : -(-last // group)].repeat_interleave(group, 0)[first - start * group : last - start * group]


def _flatten(W: QuantWeight) -> tuple[tuple[Tensor | None, ...], QuantSpec]:
    return W.tensors, W.spec


def _unflatten(spec: QuantSpec, tensors: Sequence[Any]) -> QuantWeight:
    # Not spec.weight: trees are mapped to anything, for example to shapes.
    return QuantWeight(spec.kind, tuple(tensors), spec.shape, spec.dtype, spec.facts)


# The namespace of fdora's trees, as of its NamedTuples, is the global one.
optree.register_pytree_node(QuantWeight, _flatten, _unflatten, namespace=vars(optree.registry)["__GLOBAL_NAMESPACE"])  # type: ignore[arg-type]
register_pytree(QuantWeight, _flatten, lambda tensors, spec: _unflatten(spec, tensors), "fdora.quant.QuantWeight")
