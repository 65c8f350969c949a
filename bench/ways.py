"""The ways to run one adapted linear that bench.layer compares, on the same inputs.

A way has ``forward()`` (no graph) and ``both()`` (forward and backward from a random contiguous dy; gradients by name), None
where it is for inference alone. ``bare`` is the eight matrix products alone, each writing its own output, with adapters
already in x's dtype; ``addmm_lora`` is LoRA as torch has it, ``dense`` DoRA by way of the whole adapted weight.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from bench.checkouts import axolotl_linear, lorafusion_linear, unsloth_linear
from bench.clock import Failures, free, medians_of
from bench.rivals import factored, paper_layer, peft_layer
from bench.truth import Outputs, exact, gradients, named
from bench.truth import errors as errors_of
from fdora.functional import dora_linear, dora_norm
from tests.memory import peak_bytes

S = 2.0
Given = TypeVar("Given", bound=Any)
BF16 = torch.bfloat16
DTYPES, HALVES = {"bf16": BF16, "fp32": torch.float32}, {"bf16": BF16, "fp16": torch.float16}
LORA = ("peft_lora", "peft_lora_compiled", "addmm_lora", "axolotl_lora", "unsloth_lora", "lorafusion")
DORA = ("peft_dora", "peft_dora_compiled", "peft_dora_cached", "dense_compiled", "factored", "dorafactors", "axolotl_dora")
RIVALS = LORA + DORA
FDORA = ("fdora", "fdora_inside", "fdora_compiled", "fdora_inside_compiled")
FULL = ("fdora_full", "fdora_full_inside")  # with gradients through the norm
WAYS = ("frozen", "bare", *RIVALS, "axolotl_dora_inside", *FDORA)
# These keep the norm from call to call, and NAME_inside computes it in each: a time without a norm is compared with no other.
KEEP_NORM = ("fdora", "fdora_full", "fdora_compiled", "peft_dora_cached", "axolotl_dora")

# One colour for a way in every picture.
ORANGE, RED, BLUE, LIGHT = "#f2994a", "#d64541", "#2f6fbb", "#8fbce6"
COLOURS = {"peft_lora": ORANGE, "peft_dora": RED, "peft": RED, "dense": RED}
COLOURS |= dict.fromkeys(("fdora", "triton", "peft_fdora_fused"), BLUE) | dict.fromkeys(
    ("inside", "tiles", "peft_fdora"), LIGHT
)

NAMES = {
    "frozen": "frozen",
    "bare": "products",
    "peft_lora": "PEFT LoRA",
    "peft_lora_compiled": "PEFT LoRA, compiled",
    "addmm_lora": "addmm LoRA",
    "axolotl_lora": "Axolotl LoRA",
    "unsloth_lora": "Unsloth LoRA",
    "lorafusion": "LoRAFusion",
    "peft_dora": "PEFT DoRA",
    "peft_dora_compiled": "PEFT DoRA, compiled",
    "peft_dora_cached": "PEFT DoRA, cached",
    "dense_compiled": "dense, compiled",
    "factored": "factored",
    "dorafactors": "paper",
    "axolotl_dora": "Axolotl DoRA",
    "separate": "fdora, separate calls",
    "fdora": "fdora",
    "fdora_inside": "fdora, norm inside",
    "fdora_compiled": "fdora, compiled",
    "peft_fdora": "PEFT with use_fdora",
    "peft_fdora_fused": "PEFT with use_fdora(fuse=True)",
    "use_fdora": "use_fdora",
    "use_fdora_fused": "use_fdora(fuse=True)",
}
ENDS = {
    "lora_dropout": "LoRA's dropout",
    "fp8": "8 bits in both directions",
    "fp8_transposed": "8 bits in both directions, codes twice",
}
NAMES |= {f"{way}_{end}": f"{said}, {of}" for end, of in ENDS.items() for way, said in NAMES.items() if "fdora" in way}


def opponent(rival: str) -> str:
    """The fdora that meets it: compiled against compiled."""
    return "fdora_compiled" if rival.endswith("compiled") else "fdora"


def away(
    W: Tensor, r: int, dtype: torch.dtype, generator: torch.Generator | None = None, ranks: Sequence[int] = ()
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A, B, m and the norm of an adapter away from its start: B is not 0, g is spread by 0.0015. For several W one each, of
    these ``ranks``."""
    *many, N, K = W.shape

    def normal(*shape: int, std: float, dtype: torch.dtype = dtype) -> Tensor:
        return torch.randn(*many, *shape, generator=generator, device=W.device, dtype=dtype).mul_(std)

    A, B = normal(r, K, std=K**-0.5), normal(N, r, std=0.05 * r**-0.5)
    for g, own in enumerate(ranks):
        A[g, own:], B[g, :, own:] = 0, 0
    each = zip(W, A, B, strict=True) if many else [(W, A, B)]
    norms = [dora_norm(*parts, s=S, backend="eager") for parts in each]
    norm = torch.stack(norms) if many else norms[0]
    return A, B, (norm * (1 + normal(N, std=0.0015, dtype=torch.float32))).to(dtype), norm


def dense_inputs(M: int, K: int, N: int, generator: torch.Generator) -> list[Tensor]:
    """x, W and dy in bf16."""
    shapes = ((M, K), (N, K), (M, N))
    x, W, dy = (torch.randn(*shape, generator=generator, device=generator.device, dtype=BF16) for shape in shapes)
    return [x, W.mul_(K**-0.5), dy]


class Inputs(NamedTuple):
    """bf16 x, W and dy; A, B and m in the adapters' dtype, away from their start."""

    x: Tensor
    W: Tensor
    A: Tensor
    B: Tensor
    m: Tensor
    norm: Tensor
    dy: Tensor

    @classmethod
    def random(cls, M: int, K: int, N: int, r: int, adapter: torch.dtype, device: str) -> Inputs:
        generator = torch.Generator(device).manual_seed(0)
        x, W, dy = dense_inputs(M, K, N, generator)
        A, B, m, norm = away(W, r, adapter, generator)
        return cls(x.requires_grad_(), W, A.requires_grad_(), B.requires_grad_(), m.requires_grad_(), norm, dy)


def fresh(given: Given, names: Iterable[str]) -> Given:
    """The same memory, under leaves of their own that have these names."""
    return given._replace(**{name: getattr(given, name).detach().requires_grad_() for name in names})


@dataclass
class Way:
    forward: Callable[[], Any]
    both: Callable[[], Any] | None
    truth: str | None = None
    """Which formula it must agree with."""
    call: Callable[[], Any] | None = None
    """What autograd differentiates."""
    leaves: dict[str, Tensor] = field(default_factory=dict)
    dy: Any = None


def differentiated(
    call: Callable[[], Any],
    leaves: dict[str, Tensor],
    dy: Outputs,
    truth: str | None = "dora",
    context=nullcontext,
) -> Way:
    """A way that gives y, or several outputs, and the gradients of its leaves for this dy, or these."""

    def forward():
        with torch.no_grad(), context():
            return call()

    def both():
        with context():
            y = call()
        grads = torch.autograd.grad(y, list(leaves.values()), dy)
        return named(y) | {f"d{name}": grad for name, grad in zip(leaves, grads, strict=True)}

    return Way(forward, both, truth, call, leaves, dy)


def trained(layer: Callable[[Tensor], Tensor], i: Inputs, leaves: dict[str, Tensor], truth: str, context=nullcontext) -> Way:
    return differentiated(lambda: layer(i.x), {"x": i.x, **leaves}, i.dy, truth, context)


Truths = Callable[[str], dict[str, Tensor]]
LEAVES = {"dora": "xABm", "full": "xABm", "lora": "xAB", "frozen": "x"}  # by formula


def truths(i: Inputs, W: Tensor) -> Truths:
    """What a way must give by its formula: dora, full (through its norm, too), lora or frozen. W may be what codes say."""

    def call(kind: str, t: dict[str, Tensor]) -> Tensor:
        rest = {"A": i.A.detach(), "B": i.B.detach(), "m": None}
        return exact(W=W, s=0.0 if kind == "frozen" else S, detach=kind != "full", **(rest | t))

    return by_formula(call, {name: getattr(i, name) for name in "xABm"}, i.dy)


def by_formula(call: Callable[[str, dict[str, Tensor]], Outputs], leaves: dict[str, Tensor], dy: Outputs) -> Truths:
    """Outputs and gradients of each formula, which has these leaves or, by the first letters of their names, some of them."""

    @cache
    def of(kind: str) -> dict[str, Tensor]:
        return gradients(partial(call, kind), {name: t for name, t in leaves.items() if name[0] in LEAVES[kind]}, dy)

    return of


def errors(way: Way, truth: Truths) -> dict[str, float]:
    """Relative L2 of every output, with and without a graph, and of each gradient."""
    results, forward = way.both() if way.both else {}, named(way.forward())
    if way.truth is None:
        return {}
    want = truth(way.truth)
    assert not results or results.keys() == want.keys(), f"gives {', '.join(results)}, wanted {', '.join(want)}"
    return errors_of(results, want) | {f"{name}_no_grad": e for name, e in errors_of(forward, want).items()}


def against(truth: Truths) -> Callable[[str, Way], dict[str, float]]:
    """What `checked` asks."""
    return lambda name, way: errors(way, truth)


def in_turns(ways: Sequence[Way]) -> Way:
    """Another of these, which are alike, at each call; each has run once, since a graph can capture no first call."""
    for way in ways[1:]:
        warm(way)
    forward, both = cycle(way.forward for way in ways), cycle(way.both for way in ways)
    return replace(ways[0], forward=lambda: next(forward)(), both=ways[0].both and (lambda: next(both)()))


def warm(way: Way) -> None:
    """Its kernels are compiled afterwards."""
    way.forward()
    if way.both:
        way.both()


def kept_bytes(way: Way, given: Iterable[Tensor]) -> int:
    """What autograd keeps for backward: each piece of memory once, without the leaves and what was ``given``."""
    kept = {}

    def keep(t: Tensor) -> Tensor:
        kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
        return t.detach()  # a node that held its own output would never go, and every later capture would fail

    assert way.call is not None
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        y = way.call()  # held, so that no address comes twice
    known = {t.untyped_storage().data_ptr() for t in (*way.leaves.values(), *given)}
    del y
    return sum(size for at, size in kept.items() if at not in known)


class Checked(NamedTuple):
    """What ran and is right, by way: its errors, why others do not, peak of both directions and what autograd keeps, in MiB."""

    ways: dict[str, Way]
    error: dict[str, dict[str, float]]
    failed: Failures
    peak: dict[str, float]
    kept: dict[str, float]


def checked(
    names: Iterable[str],
    build: Callable[[str], Way],
    errors: Callable[[str, Way], dict[str, float]],
    most: float,
    device: str,
    mine: Iterable[str] = (*FDORA, *FULL),
    peaks: Iterable[str] = (),
    given: Sequence[Tensor] | None = None,
) -> Checked:
    """These ways; one of ``mine`` that is wrong does not run. ``peaks``: whose peak is measured. Where it is ``given``, what is
    there besides the leaves, what autograd keeps is measured as well, and each way's garbage is freed before the next."""
    found = Checked({}, {}, Failures(), {}, {})

    def prepare(name: str) -> Way:
        way = build(name)
        found.error[name] = {key: float(f"{e:.2e}") for key, e in errors(name, way).items()}
        wrong = ", ".join(f"{key} by {e:.1e}" for key, e in found.error[name].items() if not e <= most)
        assert not (wrong and name in mine), f"{name} is wrong: {wrong}"
        if way.both and name in peaks:
            found.peak[name] = round(peak_bytes(way.both, device) / 2**20, 2)
        if given is not None:
            if way.call is not None:
                found.kept[name] = round(kept_bytes(way, given) / 2**20, 3)
            free(device)
        return way

    found.ways.update(found.failed.attempt(names, prepare))
    return found


def by_mode(ways: dict[str, Way], both: str = "fwd_bwd") -> Iterator[tuple[str, dict[str, Callable[[], Any]]]]:
    """What is timed, forward and in both directions, of the ways that have it."""
    for mode in ("fwd", both):
        yield mode, {name: fn for name, way in ways.items() if (fn := way.forward if mode == "fwd" else way.both)}


def ratios(ms: Mapping[str, float], pairs: Iterable[tuple[str, str]]) -> dict[str, float]:
    return {f"{a}/{b}": round(ms[a] / ms[b], 3) for a, b in pairs if a != b and a in ms and b in ms}


def mode_ms(ways: dict[str, Way], device: str, runs: int) -> dict[str, float]:
    """Median ms of each way forward and in both directions, by ``fwd_NAME_ms`` and ``fwd_bwd_NAME_ms``."""
    timed = ((mode, medians_of(fns, device, runs)) for mode, fns in by_mode(ways))
    return {f"{mode}_{name}_ms": round(t, 4) for mode, ms in timed for name, t in ms.items()}


def bare(*layers: Inputs) -> Way:
    """The matrix products of one layer, or of several."""
    each = [(i, i.x.detach(), i.A.detach().to(i.x.dtype), i.B.detach().to(i.x.dtype)) for i in layers]

    def forward():
        return [(x @ i.W.mT, h := x @ A.mT, h @ B.mT) for i, x, A, B in each]

    def both():
        kept, out = forward(), []
        for (base, h, lora), (i, x, A, B) in zip(kept, each, strict=True):
            dh = i.dy @ B
            out += [base, lora, i.dy @ i.W, dh @ A, dh.mT @ x, i.dy.mT @ h]
        return out

    return Way(forward, both)


def fdora(i: Inputs, norm: Tensor | None = None, compiled: bool = False, **how: Any) -> Way:
    """``how``: of dora_linear; a bias is a leaf, too."""

    def layer(x: Tensor, A: Tensor, B: Tensor, m: Tensor) -> Tensor:
        return dora_linear(x, i.W, A, B, m, s=S, norm=norm, **how)

    call = torch.compile(layer, fullgraph=True, dynamic=False) if compiled else layer
    leaves = {"A": i.A, "B": i.B, "m": i.m} | ({"bias": how["bias"]} if "bias" in how else {})
    return trained(lambda x: call(x, i.A, i.B, i.m), i, leaves, "dora" if how.get("detach", True) else "full")


def lora(x: Tensor, W: Tensor, A: Tensor, B: Tensor, *rest: Any) -> Tensor:
    """As PEFT has it, whatever else a DoRA would take."""
    return F.linear(x, W) + S * F.linear(F.linear(x, A.to(x.dtype)), B.to(x.dtype))


def addmm_lora(x: Tensor, W: Tensor, A: Tensor, B: Tensor) -> Tensor:
    return (x @ W.mT).addmm_(x @ A.to(x.dtype).mT, B.to(x.dtype).mT, alpha=S)


def dense(x: Tensor, W: Tensor, A: Tensor, B: Tensor, m: Tensor) -> Tensor:
    """x W'^T, W' = m / ||W + s B A|| (W + s B A), the norm detached. B A is a product in x's dtype, the rest float32."""
    whole = W.float() + S * (B.to(x.dtype) @ A.to(x.dtype)).float()
    g = m.float() / torch.linalg.vector_norm(whole.detach(), dim=1)
    return F.linear(x, (g[:, None] * whole).to(x.dtype))


def peft_dora_cached(i: Inputs, context=nullcontext) -> Way:
    """PEFT's cache of the norm and of B A, which works in eval mode alone and knows nothing of a backward."""
    from peft.helpers import DoraCaching

    layer, _ = peft_layer(i.W, i.A, i.B, i.m, S)
    layer.eval()

    def forward():
        with torch.no_grad(), context(), DoraCaching():
            return layer(i.x)

    return Way(forward, None)


def build(name: str, i: Inputs, rival_path: Sequence[Path] = (), autocast: bool = False, state: Any = None) -> Way:
    """The way of this name; raises where it cannot run here. ``autocast`` puts PEFT's layers under bf16 autocast. ``state``:
    how bitsandbytes decodes W, for rivals that take one that is packed."""
    context = partial(torch.autocast, i.x.device.type, BF16) if autocast else nullcontext
    if name == "bare":
        return bare(i)
    if name.startswith("fdora"):
        return fdora(i, None if "inside" in name else i.norm, name.endswith("compiled"), detach="full" not in name)
    if name == "peft_dora_cached":
        return peft_dora_cached(i, context)
    truth = "frozen" if name == "frozen" else "lora" if name in LORA else "dora"
    leaves = {n: getattr(i, n) for n in LEAVES[truth] if n != "x"}
    if name.startswith(("peft", "dorafactors")):
        make = partial(paper_layer, rival_path) if name == "dorafactors" else peft_layer
        layer, leaves = make(i.W, i.A, i.B, leaves.get("m"), S)
        return trained(torch.compile(layer, dynamic=False) if name.endswith("compiled") else layer, i, leaves, truth, context)
    if name.startswith("axolotl_dora"):
        leaves["m"] = i.m.detach().clone().requires_grad_()  # it keeps the norm there, each way its own
    return trained(linear_of(name, (i.W, *leaves.values()), rival_path, state), i, leaves, truth)


def linear_of(name: str, given: Sequence[Tensor], rival_path: Sequence[Path], state: Any) -> Callable[[Tensor], Tensor]:
    """A layer without a module, of this W and these adapters."""
    if name.startswith("axolotl"):
        return axolotl_linear(rival_path, *given, s=S, keep="inside" not in name, state=state)
    if name == "unsloth_lora":
        return unsloth_linear(rival_path, *given, S, state)
    if name == "lorafusion":
        return lorafusion_linear(rival_path, *given, S)
    if name == "dense_compiled":
        call = torch.compile(dense, fullgraph=True, dynamic=False)
    else:
        call = {"frozen": F.linear, "addmm_lora": addmm_lora, "factored": lambda *each: factored(*each, S)}[name]
    return lambda x: call(x, *given)
