"""What a call would do: its backend, its plans, their cost. It is recorded: the call itself runs, on tensors without data.

So the plans are those of a real call (fdora/_recording.py), and what stays until backward is what autograd then keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import BoundArguments, signature
from typing import Any

import optree
import torch
from torch import Tensor

from fdora._check import FdoraError, fail, is_sharded, name
from fdora._dispatch import BackendChoice, choose, forced
from fdora._recording import Recording, recording
from fdora._torch import autocast_on, storage_of
from fdora.autograd._ops import load_kernels
from fdora.autograd.multi import COUNTED
from fdora.functional._explanation import Explanation as Explanation
from fdora.functional._explanation import Kept, decoding, stand_in, stored
from fdora.functional._tree import parts_of
from fdora.functional.backend import CHECKED, RECORDED, Checked, select_backend
from fdora.functional.compose import dora_compose, dora_delta
from fdora.functional.conv import CONV
from fdora.functional.embedding import dora_embedding
from fdora.functional.experts import dora_experts
from fdora.functional.experts_mlp import dora_experts_mlp
from fdora.functional.group import dora_linear_group, dora_mlp
from fdora.functional.linear import COMPUTES, dora_linear, least_of
from fdora.functional.merge import dora_merge, dora_unmerge
from fdora.functional.multi import dora_linear_multi
from fdora.functional.norm import dora_norm
from fdora.functional.tree import check_tree_state, dora_norm_tree, is_weight
from fdora.predict import GPUS, Gpu, gpu_of
from fdora.quant import QuantWeight

EXPERTS = (dora_experts, dora_experts_mlp)
LAYERS = (dora_linear, dora_linear_group, dora_mlp, dora_embedding, *CONV, *EXPERTS, dora_linear_multi)
CALLS = (*LAYERS, dora_norm, dora_norm_tree, dora_compose, dora_delta, dora_merge, dora_unmerge)


def explain(fn: Callable, /, *args: Any, gpu: str | None = None, backward: bool = True, **kwargs: Any) -> Explanation:
    """What ``fn(*args, **kwargs)`` would do: ``print(explain(dora_linear, x, W, A, B, m, s=2.0, gpu="h200"))``.

    The backend and why; for each plan (norm, forward, backward) the way that was chosen and why, its kernels in order with
    their grids and constants, its cuBLAS products, flops, bytes, workspace; what stays until backward. The least time of a
    step is ``max(flops / rate, bytes / bandwidth)`` at the GPU's published rates. It is a recording: the call and its
    backward run on tensors without data, of the same shapes, strides, dtypes, alignment and requires_grad. An incoming
    gradient is taken to lie like the output.

    Args:
      fn: dora_linear, dora_linear_group, dora_linear_multi, dora_mlp, dora_embedding, dora_conv1d, dora_conv2d, dora_conv3d,
        dora_experts, dora_experts_mlp, dora_norm, dora_norm_tree, dora_compose, dora_delta, dora_merge or dora_unmerge.
      args: as for ``fn``; tensors may be on any device, also "meta". Their values are not read.
      gpu: a key of ``fdora.predict.GPUS`` ("h200", "a100", "mi300x", ...), or a GPU of this machine, such as
        "cuda". None: where the tensors are.
      backward: False leaves the plan of backward out.
      kwargs: as for ``fn``.

    Returns:
      :class:`Explanation`. The eager backend has no plan: it says so, and why it would run.

    Raises:
      FdoraError: whatever ``fn`` would raise for such arguments, but of a seed and of where a mask begins, which no plan looks
        at; another function; an unknown GPU.

    Memory: none on the device.
    References: none; it reads this library's own plans.
    """
    if fn not in CALLS:
        names = ", ".join(known.__name__ for known in CALLS)
        raise fail("explain", "fn", f"one of {names}", getattr(fn, "__name__", repr(fn)), "Ask about one of these.")
    call = signature(fn).bind(*args, **kwargs)
    call.apply_defaults()
    if is_sharded(*optree.tree_leaves(dict(call.arguments))):  # type: ignore[arg-type]
        raise fail("explain", "args", "plain tensors", "a DTensor", "Ask for one process: pass .to_local() of each.")
    asked = call.arguments["backend"]
    coded = _coded(call.arguments)
    if fn in EXPERTS and coded:
        remedy = "Pass W.dequantize() in its shape: the plans are the same, behind a pass that decodes in each direction."
        have = f"codes of kind {next(iter(coded.values())).kind}"
        raise fail("explain", "W", f"experts of {fn.__name__} that are a tensor", have, remedy)
    triton, missing = load_kernels()
    device, autocast = without_data(call)
    dtype = _check(fn, call, device, autocast)
    choice, rates, where = _target(device, dtype, gpu, asked, missing)
    weights = tuple([f"{label}: {W.kind}, {stored(W)}" for label, W in coded.items()])
    if choice.name == "eager":
        how = f" {decoding(fn.__name__, call.arguments.get('W'))}" if coded else ""
        notes = (f"Plain torch runs: it has no plan.{how}", *weights)
        return Explanation(fn.__name__, *choice, rates, (), (), notes)
    if where is not None:
        on = triton.device.device_of(where)
    else:
        assert rates is not None
        on = triton.device.of_gpu(0, rates.capability, rates.num_sms)
    noted, first, saved, out = record(fn, call, on, autocast)
    computes = {which: compute for which in COMPUTES if (compute := call.arguments.get(which)) is not None}
    major, minor = least_of([*computes.values()])
    for which, compute in computes.items():
        if on.gpu >= 0 and on.capability < 10 * major + minor:
            remedy = f"It needs an NVIDIA GPU of sm_{major}{minor} or newer."
            raise fail(fn.__name__, which, "None on this GPU", repr(compute), remedy)
    notes = _notes(fn, call.arguments, noted.plans[:first], noted.plans[first:], bool(saved))
    plans = tuple(triton.describe.describe(plan, rates) for plan in noted.plans[: None if backward else first])
    kept = _kept(fn, call.arguments, noted, saved, out)
    return Explanation(fn.__name__, *choice, rates, plans, kept, (*notes, *weights))


def kernels_of(gpu: str) -> tuple[Any, Callable[..., Any]]:
    """What a recording is told of a GPU of this name in ``fdora.predict.GPUS``, and what describes a plan.

    Raises:
      FdoraError: Triton is missing.
    """
    triton, missing = load_kernels()
    if triton is None:
        raise FdoraError(f"fdora.explain: kernels are recorded with Triton's help, but {missing}. Install triton.")
    rates = GPUS[gpu]
    return triton.device.of_gpu(0, rates.capability, rates.num_sms), triton.describe.describe


def _coded(arguments: dict[str, Any]) -> dict[str, QuantWeight]:
    """The quantised weights of a call, by name; not those of a tree."""
    layers = {f"layers[{i}].W": layer for i, layer in enumerate(arguments.get("layers", ()))}
    layers |= {f"{arg}.W": arguments[arg] for arg in ("gate", "up", "gate_up", "down") if arg in arguments}
    found = {"W": arguments.get("W")} | {label: getattr(layer, "W", None) for label, layer in layers.items()}
    return {label: W for label, W in found.items() if isinstance(W, QuantWeight)}


def without_data(call: BoundArguments) -> tuple[torch.device, bool]:
    """Puts tensors without data in the place of those on the first one's device; that device, and whether x is cast."""
    tensors = [t for t in _leaves(dict(call.arguments)) if isinstance(t, (Tensor, QuantWeight))]
    device = tensors[0].device if tensors else torch.device("cpu")
    x = call.arguments.get("x")
    autocast = isinstance(x, Tensor) and x.dtype != torch.float64 and autocast_on(x)

    def bare(t: Any) -> Any:
        return stand_in(t) if isinstance(t, (Tensor, QuantWeight)) and t.device == device else t

    given: Any = dict(call.arguments)
    arguments: Any = optree.tree_map(bare, given, is_leaf=is_weight)
    call.arguments = arguments
    if autocast:
        call.arguments["x"] = call.arguments["x"].to(torch.get_autocast_dtype(device.type))
    return device, autocast


def _leaves(tree: Any) -> list[Any]:
    return optree.tree_leaves(tree, is_leaf=is_weight)


def _check(fn: Callable, call: BoundArguments, device: torch.device, autocast: bool) -> torch.dtype:
    """The dtype of the products, where the function takes such arguments; else its error."""
    a = call.arguments
    a["backend"] = CHECKED
    try:
        with recording(None, autocast):
            fn(*call.args, **call.kwargs)
    except Checked as found:
        if fn is dora_norm_tree and a["state"] is not None:
            check_tree_state(fn.__name__, parts_of(_leaves(a["weights"])), a["state"])
        return found.dtype
    except FdoraError as error:
        raise FdoraError(str(error).replace("meta", str(device))) from None
    raise fail(fn.__name__, "weights", "a nesting with a weight in it", "none", "There is nothing to compute.")


def _target(
    device: torch.device, dtype: torch.dtype, gpu: str | None, backend: Any, missing: str
) -> tuple[BackendChoice, Gpu | None, torch.device | None]:
    """The backend there, the rates, and the device if it is one of this machine."""
    if gpu in GPUS:
        available = ("eager",) if missing else ("eager", "triton")
        choice = choose("cuda", dtype, backend, forced(), available, missing)
        if choice.name == "triton" and "asked for" not in choice.reason:
            choice = choice._replace(reason=f"{name(dtype)} on the {GPUS[gpu].name}")
        return choice, GPUS[gpu], None
    want = f"one of {', '.join(GPUS)}, or a GPU of this machine"
    if gpu is not None and not str(gpu).startswith("cuda"):
        raise fail("explain", "gpu", want, repr(gpu), "Take the most similar one, and look at ratios.")
    if gpu is not None and not torch.cuda.is_available():
        raise fail("explain", "gpu", f"one of {', '.join(GPUS)} here", repr(gpu), "This machine has no GPU.")
    try:
        where = device if gpu is None else torch.device(gpu)
        rates = gpu_of(torch.cuda.get_device_name(where)) if where.type == "cuda" else None
    except (RuntimeError, AssertionError) as error:  # no such index; a name that torch does not read
        last = torch.cuda.device_count() - 1
        raise fail("explain", "gpu", want, repr(gpu), f"They are cuda:0 to cuda:{last}.") from error
    return select_backend(where, dtype, backend=backend), rates, where


def record(fn: Callable, call: BoundArguments, on: Any, autocast: bool) -> tuple[Recording, int, dict[int, Tensor], Any]:
    """What the call did, how much of it in forward, what autograd saved, by storage, and its result."""
    saved: dict[int, Tensor] = {}

    def pack(t: Tensor) -> Tensor:
        if t.dim() and t.shape != (0,):
            saved.setdefault(storage_of(t), t)
        return t

    call.arguments["backend"] = RECORDED
    with recording(on, autocast) as noted:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            out = fn(*call.args, **call.kwargs)
        first = len(noted.plans)
        ys = [y for y in optree.tree_leaves(out) if y.requires_grad]
        for t in held_by_nodes(ys):
            pack(t)
        if ys:
            trained = [t for t in _leaves(dict(call.arguments)) if isinstance(t, Tensor) and t.requires_grad]
            torch.autograd.grad(ys, trained, list(map(torch.empty_like, ys)), allow_unused=True)
    return noted, first, saved, out


def held_by_nodes(ys: list[Any]) -> Iterator[Tensor]:
    """What the nodes behind these hold beside what autograd saves: norms (autograd/node.py, to_save)."""
    found, todo = set(), [y.grad_fn for y in ys]
    while todo:
        node = todo.pop()
        if node is not None and node not in found:
            found.add(node)
            yield from [t for t in getattr(node, "own", ()) if t is not None]
            todo += [each for each, _ in node.next_functions]


def _kept(fn: Callable, a: dict[str, Any], noted: Recording, saved: dict[int, Tensor], out: Any) -> tuple[Kept, ...]:
    given = {storage_of(t): arg for arg, of in a.items() for t in optree.tree_leaves(of) if isinstance(t, Tensor)}
    outputs = {storage_of(y) for y in optree.tree_leaves(out)}
    shown = set(a) if fn in (dora_norm, dora_compose, dora_delta) else {next(iter(a))}  # others are parameters
    kept = {at: t for at, t in saved.items() if at not in given or given[at] in shown}
    labels = _distinct(fn, a, [given.get(at) or noted.names.get(at) or _of_torch(a, t) for at, t in kept.items()])
    whose = ["argument" if at in given else "output" if at in outputs else "new" for at in kept]
    each = zip(labels, kept.values(), whose, strict=True)
    return tuple(Kept(label, tuple(t.shape), t.dtype, t.nbytes, of) for label, t, of in each)


def _of_torch(a: dict[str, Any], t: Tensor) -> str:
    """A name for what neither a caller nor a plan made: by its form."""
    if not t.is_floating_point():
        p = a.get("dropout_p")
        drops = isinstance(p, Tensor) or bool(p)
        return "offsets" if t.dtype == torch.int32 else "place" if t.dim() == 2 else "seed" if drops else "order"
    for arg in ("A", "B") if "groups" in a else ():
        if t.shape[1:] == a[arg].shape[1:]:
            return f"{arg} in the dtype of x" if t.shape == a[arg].shape else f"{arg} of each group"
    if "groups" in a:
        return "c" if t.dim() == 1 else "h"
    if "offsets" in a:
        return "s" if t.dim() == 1 else "c"
    return "c" if a.get("gamma") is None else "of gamma"


def _distinct(fn: Callable, a: dict[str, Any], labels: list[str]) -> list[str]:
    """Of what comes more than once each its own name, in the order in which autograd saves; of one layer without a number."""
    more: dict[str, list[str]] = {}
    if fn in CONV:
        more = {"c": ["c", "g"], "h": ["h", "base", "lora"]}
    elif fn is dora_experts_mlp:
        parts, wide = {part: a[part] for part in ("gate_up", "down")}, a["x"].dtype == torch.float32
        more = {label: [f"{label} of {part}" for part in parts] for label in ("h", "s")} | {"y": ["z", "y"]}
        more["c"] = [f"c of {part}" for part, la in parts.items() if la.norm is None]
        more["pre_scale"] = [f"pre_scale of {part}" for part, la in parts.items() if wide or la.bias is not None]
    elif fn in (dora_linear_group, dora_mlp):
        layers = a["layers"] if fn is dora_linear_group else (a["gate"], a["up"], a["down"])
        formed = [f"c{i}" for i, la in enumerate(layers) if la.A is not None and la.norm is None]
        more["c"] = [label for label in formed if label not in labels]
    else:
        labels = [label.rstrip("0") for label in labels]
    return [rest.pop(0) if (rest := more.get(label)) else label for label in labels]


def _notes(fn: Callable, a: dict[str, Any], forward: list[Any], backward: list[Any], trained: bool) -> tuple[str, ...]:
    """What has no plan."""
    notes = []
    if fn in CONV:
        notes.append("torch convolves, forward and backward, and forms g: that has no plan.")
    if a.get("ids") is not None and fn is not dora_embedding:
        if a["ids"].numel() > COUNTED:
            notes.append(f"Above {COUNTED} tokens torch sorts them by adapter: that has no plan.")
        if fn in EXPERTS:
            notes.append("torch inverts the order of the tokens: that has no plan.")
    if fn is dora_norm and a["state"] is not None and not any("changed" in getattr(plan, "name", "") for plan in forward):
        notes.append("The fingerprint and the choice by it are plain torch; no plan saves any work.")
    if fn is dora_norm_tree and a["state"] is not None:
        notes.append("With a state the kernels find out which norms changed: of those figures as much is done at most.")
    if fn is dora_embedding and a["max_norm"] is not None:
        notes.append("With max_norm forward is plain torch, too.")
    factors = [a[arg] for arg in "AB" if arg in a] or [t for arg in ("gate", "up", "down") if arg in a for t in a[arg][1:3]]
    through = any(t is not None and t.requires_grad for t in factors) and not a.get("detach", True)
    if trained and through and not any(getattr(plan, "name", "") == "gradient through the norm" for plan in backward):
        notes.append("Backward through the norm is plain torch: it has no plan.")
    if trained and fn is dora_embedding and not backward:
        notes.append("Backward is plain torch: it has no plan.")
    return tuple(notes)
