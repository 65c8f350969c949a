"""Base layers whose weight is quantised, as a QuantWeight. Known by their class and by what their forward computes.

One call of dora_linear takes the place of a base layer whose own product is that of the dequantised weight. Where it is not
(LLM.int8 and torchao's dynamic quantisation round x as well), the base layer keeps its product and its numbers, and only the
norm is read from the codes. No vendor's package is imported here.

Layers of e4m3 codes (transformers' FP8Linear, FBGEMM's, those of compressed-tensors, and the ones that rounded.py makes) are
known by what they hold, not by their class. Their own forward rounds x as well; fdora's does where use_fdora is asked for
``compute="fp8"``, and else multiplies by the decoded weight. PEFT's own code would take their codes for the weight.

PEFT's own merge into a torchao weight adds s B A and leaves the magnitude out: it dequantises W, adds ``get_delta_weight`` and
quantises again; to unmerge it subtracts. So for the time of either that delta is ``g (W + s B A) - W``, and what takes it back.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from peft.tuners.lora.torchao import TorchaoLoraLinear
from peft.utils.integrations import dequantize_module_weight
from torch import Tensor, nn

from fdora import FdoraError
from fdora._torch import PLAIN, is_traced
from fdora.functional import dora_merge, dora_norm, dora_unmerge
from fdora.integrations._framework import set_aside
from fdora.quant import Codes8, QuantWeight, from_bnb, from_bnb_int8, from_fp8, from_hqq, from_torchao, with_transpose

BNB4, BNB8, HQQ, TORCHAO, FP8 = "bitsandbytes 4 bit", "bitsandbytes 8 bit", "HQQ", "torchao", "e4m3 codes"
CLASSES = {
    ("bitsandbytes.nn.modules", "Linear4bit"): BNB4,
    ("bitsandbytes.nn.modules", "Linear8bitLt"): BNB8,
    ("hqq.core.quantize", "HQQLinear"): HQQ,
}
SCALE, SCALE_INV = "weight_scale", "weight_scale_inv"  # what frameworks call the scales of e4m3 codes
# What HQQ's backends that dequantise are called; the int8 one rounds x.
HQQ_FORWARDS = ("pytorch", "pytorch_compile", "pytorch_backprop", "pytorch_backprop_compile", "aten", "aten_backprop")
DISABLED = ("torch._compile", "torch._dynamo.eval_frame", "torch._dynamo.external_utils")  # where torch.compiler.disable wraps
PACKS = "support_avx512bf16_for_cpu"  # of a Linear4bit: whether its eval forward on a CPU packs the weight anew, in place


def family(base: nn.Module) -> str:
    """Whose layer it is; empty for one that nobody here knows to be quantised."""
    W: Any = base._parameters.get("weight")
    of = type(W)
    if of in PLAIN and W.dtype == torch.float8_e4m3fn and scale_of(base) is not None:
        return FP8
    if type(base) is not nn.Linear:
        names = ((each.__module__, each.__qualname__) for each in type(base).__mro__)
        return next((CLASSES[name] for name in names if name in CLASSES), "")
    return TORCHAO if of not in PLAIN and of.__module__.startswith("torchao.") else ""


def scale_of(base: Any) -> Any:
    """What e4m3 codes are multiplied by, whatever its name says; None where a layer is another one than nn.Linear, too."""
    if not isinstance(base, nn.Linear) or held(base, "n_groups") is not None or held(base, "weight_zero_point") is not None:
        return None
    scale = held(base, SCALE_INV)
    return held(base, SCALE) if scale is None else scale


def held(module: nn.Module, name: str) -> Any:
    """As getattr, for which a module raises and catches where it has no such thing: microseconds, in every call."""
    for names in (module._parameters, module.__dict__, module._buffers):
        if name in names:
            return names[name]
    return None


def of_codes(base: Any) -> QuantWeight:
    """One scale, one for each row (in a row or a column), or one for each block of the size that the layer names."""
    scale: Any = scale_of(base)
    weights = getattr(getattr(base, "quantization_scheme", None), "weights", None)
    block = getattr(base, "block_size", None) or getattr(weights, "block_structure", None)
    if not block:
        block = None if scale.numel() == 1 else "row"
        scale = scale.reshape(-1)
    return from_fp8(base.weight, scale, block)


def look(base: nn.Module, compute: str | None = None) -> tuple[str, str]:
    kind = family(base)
    return kind, own_product(base, kind, compute) if kind else ""


def own_product(base: Any, kind: str, compute: str | None) -> str:
    """Why the base layer's product is not that of its dequantised weight; empty where it is, to rounding, or where
    ``compute`` asks for x to be rounded."""
    if kind == FP8 or (compute and kind == TORCHAO and type(base.weight).__name__ == "Float8Tensor"):
        return ""
    if kind == BNB8:
        return "LLM.int8 rounds x too: bitsandbytes keeps its product, the norm is read from the codes"
    if kind == BNB4:
        return "" if is_bnbs(type(base).forward) else "a Linear4bit whose forward is not bitsandbytes' own"
    if kind == HQQ:
        forwards = [getattr(type(base), f"forward_{name}", None) for name in HQQ_FORWARDS]
        return "" if any([type(base).forward is f for f in forwards if f is not None]) else "an HQQ backend that rounds x"
    for name in ("act_quant_kwargs", "activation_quantization"):
        if getattr(base.weight, name, None) is not None:
            return "torchao rounds x too: it keeps its product, the norm is read from the codes"
    return ""


def is_bnbs(function: Any) -> bool:
    """By where it was written, not by what functools.wraps says; but where torch is told not to compile it (Unsloth) it is
    still the same."""
    while (module := getattr(function, "__globals__", {}).get("__name__", "")) in DISABLED and hasattr(function, "__wrapped__"):
        function = function.__wrapped__
    return bool(module == "bitsandbytes.nn.modules")


def compute_dtype(base: Any, kind: str, x: Tensor) -> torch.dtype | None:
    """In which a Linear4bit runs its product, to give back that of x; None where a layer takes x as it is."""
    if kind != BNB4:
        return None
    if not base.compute_type_is_set:  # as its own first forward decides
        base.set_compute_type(x)
        base.compute_type_is_set = True
    return x.dtype if base.compute_dtype is None else base.compute_dtype


def state_of(base: Any) -> Any:
    """FSDP's views of a weight have no state; the layer does."""
    state = getattr(base.weight, "quant_state", None)
    return base.quant_state if state is None else state


def sources(base: Any, kind: str) -> tuple[Any, ...]:
    """All that a QuantWeight of this layer is made from."""
    if kind == BNB4:
        state = state_of(base)
        return base.weight, state, getattr(state, "absmax", None), getattr(state, "packing_format_for_cpu", False)
    if kind == BNB8:  # row maxima: of the parameter until the first forward, of the state after it
        scb = getattr(base.weight, "SCB", None)
        return base.weight, base.state.SCB if scb is None else scb
    if kind == HQQ:
        meta = base.meta or {}
        return base.W_q, meta.get("scale"), meta.get("zero")
    return (base.weight, scale_of(base)) if kind == FP8 else (base.weight,)


def weight_of(base: Any, kind: str, dtype: torch.dtype | None) -> QuantWeight | str:
    """Or why there is none. None is the dtype that the format says; a weight that nobody can decode any more is an error."""
    weight, *rest = sources(base, kind)
    try:
        if kind == BNB4:
            W = from_bnb(weight, rest[0])
        elif kind == BNB8:
            W = from_bnb_int8(weight, *rest)
        elif kind == FP8:
            W = of_codes(base)
        else:
            W = from_hqq(base) if kind == HQQ else from_torchao(weight)
    except FdoraError as error:
        if kind == BNB4 and rest[2]:  # packed
            raise
        return f"a weight that cannot be read: {error}"
    return W if dtype in (None, W.dtype) else W.to(dtype=dtype)


class WeightCache:
    """The QuantWeight of one layer, for as long as it is made from the same tensors."""

    def __init__(self) -> None:
        self.memo: tuple[tuple[Any, ...], int, dict[Any, Any]] | None = None

    def of(self, base: Any, kind: str, dtype: torch.dtype | None = None, transposed: bool = False) -> QuantWeight | str:
        """``transposed``: of fp8, with codes for backward, a copy, which a write to the codes makes old. Whatever is asked for,
        the other tensors are the same."""
        if is_traced():
            return weight_of(base, kind, dtype)
        copied, now = transposed and kind == FP8, sources(base, kind)
        pointer = now[0].data_ptr() if kind != TORCHAO and isinstance(now[0], Tensor) else 0  # somebody may set .data
        memo: Any = self.memo
        W = self.known(now, pointer, (dtype, copied))
        if W is None:
            if not stands(memo, now, pointer):
                memo = now, pointer, {}
            written = base.weight._version if copied and not base.weight.is_inference() else 0
            with torch.inference_mode(False):
                made = memo[2].get("made") or weight_of(base, kind, None)
                if isinstance(made, str):
                    return made
                if kind == FP8 and type(base.weight) is nn.Parameter:  # which nodes need not save: autograd/node.py
                    made = replace(made, tensors=(base.weight, *made.tensors[1:]))
                memo[2]["made"], W = made, made if dtype in (None, made.dtype) else made.to(dtype=dtype)
                W = with_transpose(W) if copied else W
            memo[2][dtype, copied] = written, W
            self.memo = memo
        return W

    def known(self, now: tuple[Any, ...], pointer: int, how: tuple[Any, bool]) -> QuantWeight | None:
        """That of before in this dtype, with codes for backward or without, if it was made from the same tensors."""
        memo: Any = self.memo
        if not stands(memo, now, pointer):
            return None
        written, W = memo[2].get(how, (0, None))
        return W if not how[1] or now[0].is_inference() or now[0]._version == written else None


def stands(memo: Any, now: tuple[Any, ...], pointer: int) -> bool:
    return memo is not None and memo[1] == pointer and all([a is b for a, b in zip(memo[0], now, strict=True)])


def decoded(W: QuantWeight, x: Tensor, mode: str) -> str:
    """Why compute="fp8" multiplies x by the decoded weight; empty where it multiplies codes."""
    facts, device = W.facts, x.device.type
    if not isinstance(facts, Codes8) or facts.code != "e4m3":
        return f"a weight of kind {W.kind}"
    if facts.scale == "block" and facts.block[1] % 128:
        return f"scales of blocks of {facts.block[1]} columns"
    cast = torch.is_autocast_enabled(device) and x.dtype != torch.float64
    dtype = torch.get_autocast_dtype(device) if cast else x.dtype
    if dtype not in (torch.float16, torch.bfloat16):
        return f"a {dtype} input"
    return "lora_dropout as PEFT means it; dropout_mode='lora' is served" if mode == "peft" else ""


def refuse_merge(base: Any) -> None:
    if family(base) == FP8:
        raise FdoraError(
            "fdora.use_fdora: the base weight must be dense for a merge, got 8-bit codes. If use_fdora rounded it, "
            "restore(model) gives it back; else merge with fdora.functional.dora_merge or dora_merge_quantized."
        )


def dont_pack(base: Any) -> None:
    """From now on an eval forward on a CPU leaves the weight as it is: bitsandbytes' own dequantisation reads it wrongly after
    it was packed anew (0.50), and so would every norm, merge and state dict."""
    if vars(base).get(PACKS):
        set_aside(base, PACKS, False)


def mend(base: Any) -> None:
    """PEFT's dequantisation of an 8-bit weight on a CPU leaves a parameter with codes and no row maxima (0.21), with which the
    next forward of bitsandbytes fails. The state still has them."""
    if family(base) == BNB8 and base.weight.CB is not None and base.weight.SCB is None:
        base.weight.SCB = base.state.SCB


def misread(base: Any, W: QuantWeight) -> bool:
    """Whether bitsandbytes' own dequantisation is wrong here: 0.50 overlooks that blocks cross rows where a CPU has AVX-512."""
    if W.device.type != "cpu" or W.shape[1] % 16 or W.shape[1] % state_of(base).blocksize == 0:
        return False
    theirs = dequantize_module_weight(base)
    ours = W.dequantize(theirs.dtype)
    return bool((theirs - ours).float().norm() > 1e-3 * ours.float().norm())  # right, it is the same bits


MISREAD = (
    "fdora.use_fdora: bitsandbytes reads {} weights wrongly on this CPU, one of them in `{}`: their blocks "
    "cross rows. fdora reads them right, but PEFT took m from what it read wrongly: for new adapters call "
    "init_magnitude(model). Both read it right with a blocksize that divides in_features."
)


class Merging(TorchaoLoraLinear):
    """PEFT's layer, which merges W' of the magnitude as well."""

    def merge(self, *args: Any, **kwargs: Any) -> None:
        self._during(True, super().merge, *args, **kwargs)

    def unmerge(self) -> None:
        self._during(False, super().unmerge)

    def _during(self, merging: bool, run: Any, *args: Any, **kwargs: Any) -> None:
        self.__dict__["get_delta_weight"] = lambda adapter: delta_of(self, adapter, merging)
        try:
            run(*args, **kwargs)
        finally:
            del self.__dict__["get_delta_weight"]


def delta_of(module: Any, adapter: str, merging: bool) -> Tensor:
    """What PEFT adds to W to merge an adapter, or subtracts to unmerge it."""
    weights = getattr(module.lora_variant.get(adapter), "weights", None)
    if weights is None:  # no variant of ours: an adapter without a magnitude
        return TorchaoLoraLinear.get_delta_weight(module, adapter)
    w = weights(module, adapter)
    why = w if isinstance(w, str) else "another adapter is merged already" if module.merged_adapters else ""
    if why:
        raise NotImplementedError(f"fdora: a DoRA adapter cannot be merged into this torchao weight: {why}. Merge it alone.")
    W = w.W.dequantize(torch.float32) if isinstance(w.W, QuantWeight) else w.W.detach().float()
    A, B, m = [t.detach().float() for t in (w.A, w.B, w.m)]
    s, dtype, key = float(module.scaling[adapter]), module.get_base_layer().weight.dtype, f"{adapter}-weight_norm"
    if merging:
        module._cache_store(key, dora_norm(W, A, B, s=s))
        return (dora_merge(W, A, B, m, s=s, norm=module._caches[key]) - W).to(dtype)
    return (W - dora_unmerge(W, A, B, m, s=s, norm=module._cache_pop(key))).to(dtype)
