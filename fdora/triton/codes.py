"""A W of 4- or 8-bit codes in a plan: which formats kernels decode, the facts in a plan's key, the tensors among its arrays.

The facts are those of fdora.quant, Lut4 and Codes8, and the tensors lie as these say. A kernel decodes to the same bits as
``QuantWeight.dequantize``: float32 products of a value and a scale, rounded where the format's own decoder rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fdora.quant import Codes8, Gptq, Hqq, Lut4, QuantSpec, QuantWeight
from fdora.quant.bnb import UNIT
from fdora.quant.codes8 import decode as decode8
from fdora.quant.gptq import decode_awq, decode_gptq
from fdora.quant.hqq import decode as decode_hqq
from fdora.quant.lut4 import NESTED
from fdora.quant.lut4 import decode as decode4
from fdora.quant.weight import kind_of
from fdora.triton.kernels.decode import How
from fdora.triton.runtime import Array, Builder, Like, cdiv, named
from fdora.triton.runtime.device import INTERPRETED

TABLES, LAYOUTS, MODES = ("nf4", "fp4", "e2m1"), ("flat", "row"), ("tensor", "row", "block")
MORE = {"fp32": 0, "nested": 3, "e8m0": 0, "e4m3*global": 1, "e4m3/global": 1}  # tensors beside codes and scales
HQQ = {dtype: f"hqq {dtype}" for dtype in (torch.float16, torch.bfloat16, torch.float32)}
INTS = ("gptq", "gptq+1", "awq", *HQQ.values())
PERMUTES, SHUFFLES = 1, 2  # what looks codes up, as kernels/decode.py has it
LOOKUP = SHUFFLES  # of 4-bit codes for a norm: a third of the instructions
TEXTS, NUMBERS = 3, 4  # of each W, as an op takes its facts


class Ints(NamedTuple):
    """Integers with a zero and a scale for each group of a row: (code - zero) * scale. Kernels read them as bytes."""

    code: str
    """gptq: a word has codes of columns of a row, and those of rows lie side by side; gptq+1: its stored zeros are one less.
    awq: a word has codes of eight rows. hqq, and in which dtype it computes: a byte has a code of a row in the upper half of W,
    and that of the row N / 2 below it."""
    bits: int
    group: int
    indexed: bool = False
    """Whether a tensor says of which group a column is."""

    @property
    def per(self) -> int:
        """Codes in a word, or in a byte."""
        return (8 if self.code in HQQ.values() else 32) // self.bits


Form = Lut4 | Codes8 | Ints


class Coded(NamedTuple):
    """What a plan must know of a W of codes beside its tensors."""

    shape: tuple[int, int]
    form: Form

    @property
    def tensors(self) -> int:
        """How many."""
        if isinstance(self.form, Ints):
            return 3 + self.form.indexed
        return 2 + (MORE.get(self.form.scales, 0) if isinstance(self.form, Lut4) else self.form.transposed)


class Packed(NamedTuple):
    """A W of codes among the arrays of a plan."""

    shape: tuple[int, int]
    form: Form
    codes: Array
    rest: tuple[Array | None, ...]
    """Of 4 bits: scales, code256 or the global scale, scales2, offset. Of 8: scales. Of integers: scales, zeros, groups."""
    transposed: Array | None = None  # the codes once more, (K, N)


def is_decoded(spec: QuantSpec) -> bool:
    """Whether kernels read this format: its decoder in torch is one of those that they agree with, bit for bit."""
    decode, form = kind_of(spec.kind).dequantize, spec.facts
    if decode is decode4 and isinstance(form, Lut4):
        return form.table in TABLES and form.scales in MORE
    if isinstance(form, (Gptq, Hqq)):
        return ints_of(spec) is not None
    return decode is decode8 and isinstance(form, Codes8) and code_of(form) != ""


def coded_of(W: QuantWeight | QuantSpec) -> Coded:
    """For formats of which :func:`is_decoded` is true."""
    form: Any = W.facts
    if isinstance(form, (Gptq, Hqq)):
        form = ints_of(W.spec if isinstance(W, QuantWeight) else W)
    return Coded(W.shape, form)


def ints_of(spec: QuantSpec) -> Ints | None:
    """None where no kernel reads them: other bits than 4 and 8, HQQ's axis 0, groups that go on in the next row, half a row."""
    decode, facts, (N, K) = kind_of(spec.kind).dequantize, spec.facts, spec.shape
    if isinstance(facts, Gptq) and facts.bits in (4, 8):
        if decode is decode_awq:
            return Ints("awq", facts.bits, facts.group)
        if decode is decode_gptq:
            return Ints("gptq+1" if facts.plus else "gptq", facts.bits, facts.group, spec.count == 4)
    if decode is not decode_hqq or not isinstance(facts, Hqq) or facts.axis != 1 or facts.bits not in (4, 8):
        return None
    whole = K % facts.group == 0 and N * facts.bits % 8 == 0
    return Ints(HQQ[facts.compute], facts.bits, facts.group) if whole and facts.compute in HQQ else None


def is_coded(W: Any) -> bool:
    """Whether this is no tensor, in whatever way it is written down."""
    return isinstance(W, (QuantWeight, Coded, Packed))


def tensors_of(weight: Sequence[Tensor | None]) -> list[Tensor]:
    return [t for t in weight if t is not None]


def code_of(form: Codes8) -> str:
    """What a kernel calls the code and its unit; nothing where there is no such kernel."""
    if form.unit == 1.0:
        return form.code if form.code in ("int8", "e4m3") else ""
    return "int8/127" if form.code == "int8" and form.unit == UNIT else ""


# as an op takes them: no record


def written(weights: Sequence[Coded | None]) -> tuple[list[str], list[int]]:
    """The facts of all weights of a call; of one that is a tensor, nothings. Both are empty where all are."""
    text: list[str] = []
    numbers: list[int] = []
    if all([W is None for W in weights]):
        return text, numbers
    for W in weights:
        if W is None:
            text += ["", "", ""]
            numbers += [0, 0, 0, 0]
        elif isinstance(W.form, Lut4):
            text += [W.form.table, W.form.scales, W.form.layout]
            numbers += [*W.shape, W.form.group, int(W.form.hi_first)]
        elif isinstance(W.form, Ints):
            text += [W.form.code, "", ""]
            numbers += [*W.shape, W.form.group, -W.form.bits if W.form.indexed else W.form.bits]
        elif not code_of(W.form):
            raise ValueError(f"no kernel reads weights of {W.form}")  # written as nothing it would be a tensor
        else:
            text += [code_of(W.form), W.form.scale, "transposed" if W.form.transposed else ""]
            numbers += [*W.shape, *W.form.block]
    return text, numbers


def weights_of(text: Sequence[str], numbers: Sequence[int]) -> tuple[Any, ...]:
    """What was written, None for a tensor. Nothing where all weights are tensors."""
    found: list[Coded | None] = []
    for i in range(len(text) // TEXTS):
        a, b, c = text[TEXTS * i : TEXTS * (i + 1)]
        N, K, p, q = numbers[NUMBERS * i : NUMBERS * (i + 1)]
        if not a:
            found.append(None)
        elif a in TABLES:
            found.append(Coded((N, K), Lut4(a, bool(q), p, b, c)))
        elif a in INTS:
            found.append(Coded((N, K), Ints(a, abs(q), p, q < 0)))
        else:
            code, _, divided = a.partition("/")
            found.append(Coded((N, K), Codes8(code, b, (p, q), UNIT if divided else 1.0, c != "")))
    return tuple(found)


def facts_of(spec: QuantSpec) -> tuple[list[str], list[int]] | None:
    """The facts of this one; None where no kernel reads its format."""
    return written([coded_of(spec)]) if is_decoded(spec) else None


# in a plan


def packed(plan: Builder, likes: Sequence[Like | None], W: Coded) -> Packed:
    """The next arguments of the plan: codes of 4 bits and all scales without gaps, codes of 8 bits as they lie."""
    _check(likes, W)
    form = W.form
    if isinstance(form, Lut4):
        codes, scales, *rest = map(plan.flat, likes)
        if form.scales not in ("fp32", "nested"):
            scales = _as_bytes(scales)
        return Packed(W.shape, form, _as_bytes(codes), (scales, *rest, *[None] * (3 - len(rest))))
    if isinstance(form, Ints):
        codes, *rest = map(plan.flat, likes)
        if form.code not in HQQ.values():  # as HQQ has them
            rest[:2] = rest[1::-1]
        return Packed(W.shape, form, codes, (*rest, *[None] * (3 - len(rest))))
    codes, scales, turned = plan.matrix(likes[0]), plan.flat(likes[1]), [plan.matrix(like) for like in likes[2:]]
    return Packed(W.shape, form, _as_bytes(codes) if form.code == "e4m3" else codes, (scales,), *turned)


def _as_bytes(t: Array) -> Array:
    assert t.itemsize == 1
    return t.words(t.shape, t.stride, torch.uint8)


def _check(likes: Sequence[Like | None], W: Coded) -> None:
    """What a kernel would read past the end of, or read wrongly."""
    (N, K), form = W
    sizes = [0 if like is None else like.nbytes // like.dtype.itemsize for like in likes]
    if isinstance(form, Lut4):
        groups = cdiv(N * K, form.group) if form.layout == "flat" else N * cdiv(K, form.group)
        more = {"nested": [256, cdiv(groups, NESTED), 1]}.get(form.scales, [1] * MORE.get(form.scales, 0))
        wanted = [cdiv(N * K, 2), groups, *more]
        known = form.table in TABLES and form.scales in MORE and form.layout in LAYOUTS
    elif isinstance(form, Ints):
        groups = sizes[2] // max(1, N) if form.indexed else cdiv(K, form.group)
        zeros = N if form.code in HQQ.values() else cdiv(N, form.per)
        wanted = [N * K // form.per, *sorted((groups * zeros, groups * N)), *[K] * form.indexed]
        known = form.code in INTS and form.bits in (4, 8)
    else:
        block_n, block_k = block_of(form)
        groups = {"tensor": 1, "row": N}.get(form.scale, cdiv(N, block_n) * cdiv(K, block_k))
        wanted = [N * K, groups, *[N * K] * form.transposed]
        known = code_of(form) != "" and form.scale in MODES
    if not known:
        raise ValueError(f"no kernel reads weights of {form}")
    if sizes != wanted:
        raise ValueError(f"a weight of shape {tuple(W.shape)} and {form} has tensors of {wanted} elements, got {sizes}")


def block_of(form: Codes8) -> tuple[int, int]:
    return form.block if form.scale == "block" else (1, 1)


# what kernels are told


def in_pairs(form: Form, K: int) -> bool:
    """Whether a row of W is whole bytes and groups, and a tile whole groups or within one."""
    if not isinstance(form, Lut4):
        return True
    power = form.group & (form.group - 1) == 0 and form.group > 1
    return K % 2 == 0 and power and (K % form.group == 0 or form.layout != "flat")


def has_ptx(capability: int) -> bool:
    """Whether codes are looked up by instructions of NVIDIA GPUs."""
    return capability > 0 and not INTERPRETED


def decoding(W: Packed, capability: int, by: int = PERMUTES) -> dict[str, Any]:
    """What kernels that read W are launched with: its tensors, and how they lie. ``by``: what looks 4-bit codes up."""
    form, ptx = W.form, has_ptx(capability)
    strides: tuple[int | None, ...] = (None, None)
    if isinstance(form, Lut4):
        tensors = (W.codes, *W.rest)
        lies = (form.layout == "flat", in_pairs(form, W.shape[1]), False, 1, 1, by if ptx else 0)
        facts = (4, form.table, form.hi_first, form.group, form.scales, *lies)
    elif isinstance(form, Ints):
        N, K = W.shape
        lies_by_row = (N // form.per if form.code == "awq" else N, cdiv(N, form.per))
        strides = (K, N * form.bits // 8) if form.code in HQQ.values() else lies_by_row
        tensors = (W.codes, *W.rest, None)
        code, plus, _ = form.code.partition("+")
        facts = (8, code, False, 1, "group", False, True, plus != "", form.bits, form.group, ptx)
    else:
        tensors, strides = (W.codes, *W.rest, None, None, None), W.codes.stride
        by_bits = form.code == "e4m3" and capability < 89  # Triton has no float8 below sm_89
        facts = (8, code_of(form), False, 1, form.scale, False, True, by_bits, *block_of(form), ptx)
    return {
        **named("codes scales code256 scales2 offset", tensors),
        **named("stride_cn stride_ck", strides),
        "HOW": How._make(facts),
        "groups": groups_of(W),
    }


def group_of(W: Packed) -> int:
    """Columns of a group of packed integers, else 0: a tile should lie in one."""
    return W.form.group if isinstance(W.form, Ints) else 0


def groups_of(W: Packed) -> int:
    """Scales to a row of W."""
    if isinstance(W.form, Ints):
        scales, *_ = W.rest
        return 0 if scales is None else scales.numel // max(1, W.shape[0])
    return cdiv(W.shape[1], W.form.group if isinstance(W.form, Lut4) else block_of(W.form)[1])
