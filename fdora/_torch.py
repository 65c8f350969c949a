"""Every private name of torch that fdora uses, and what it is for. (Those of Triton: fdora/triton/runtime/private.py.)

All exist in torch 2.8 to 2.13; where one may be missing, the line that asks for it says what runs instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode

PLAIN = (Tensor, torch.nn.Parameter)

functorch_active = torch._C._are_functorch_transforms_active
dispatch_modes = torch._C._len_torch_dispatch_stack
unsafe_view = torch.ops.aten._unsafe_view.default  # another shape for a fresh tensor, which autograd does not take for a view
backward_task = torch._C._current_graph_task_id  # the number of the backward that runs in this thread; -1 where none does
jit_tracing = torch._C._is_tracing  # a tenth of torch.jit.is_tracing's time
any_autocast = torch._C._is_any_autocast_enabled  # on any device but MPS
is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor  # by torch.func
is_batched = torch._C._functorch.is_batchedtensor  # by torch.func.vmap


def without_grad(t: Tensor) -> Tensor:
    """What torch.func.grad has wrapped: a tensor with values, unless it was mapped."""
    while not torch.compiler.is_compiling() and torch._C._functorch.is_gradtrackingtensor(t):
        t = torch._C._functorch.get_unwrapped(t)
    return t


def storage_of(t: Tensor) -> int:
    """Where the memory of a tensor is noted: the same for all that share it, with data or without."""
    return int(t.untyped_storage()._cdata)


def register_pytree(cls: type, flatten: Any, unflatten: Any, name: str) -> None:
    """For torch's own trees: torch.func, torch.export, compiled code. ``flatten`` gives (children, context)."""
    torch.utils._pytree.register_pytree_node(cls, flatten, unflatten, serialized_type_name=name)


def cpu_has_bf16() -> bool:
    """Whether this CPU has instructions for bfloat16 products, and torch uses them."""
    return torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()


def library_of(name: str) -> torch.library.Library:
    """For one op of ours. A second import in one process (a notebook's reload) takes the place of the first."""
    try:
        from torch._library.custom_ops import get_library_allowing_overwrite
    except ImportError:
        _libraries.append(torch.library.Library("fdora", "FRAGMENT"))
        return _libraries[-1]
    return get_library_allowing_overwrite("fdora", name)


_libraries: list[torch.library.Library] = []  # an op lives as long as the library that defined it


def is_traced() -> bool:
    """Whether a compiler or torch.func runs this code."""
    return torch.compiler.is_compiling() or functorch_active()


def autocast_on(t: Tensor) -> bool:
    return (any_autocast() or t.is_mps) and t.device.type != "meta" and torch.is_autocast_enabled(t.device.type)


def while_tracing(function: Any) -> Any:
    """Dynamo calls the function while it traces a call of it, and takes what it returns for a constant.

    As torch.compiler.assume_constant_result has it, which imports all of Dynamo.
    """
    function._dynamo_marked_constant = True
    return function


def untraced(function: Any, *args: Any) -> Any:
    """``function(*args)``, into which no compiler looks. Where Dynamo gave a frame up it traces each function called there.

    Where torch does not say whether it does, the function is called as it is.
    """
    asks = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    if asks is None or not asks():
        return function(*args)
    from torch._dynamo import disable

    return disable(function)(*args)


@while_tracing
def trace() -> str:
    """The name of what Dynamo traces now: after a graph break it is another."""
    from torch._guards import CompileContext

    return str(CompileContext.current_compile_id())


@while_tracing
def exporting() -> bool:
    """Whether what Dynamo traces now is for torch.export. Traced, the question is answered yes before torch 2.12."""
    return torch.compiler.is_exporting()


@while_tracing
def in_subgraph() -> bool:
    """Whether what Dynamo traces now is the body of an operator (a checkpoint, a cond), which must not set attributes."""
    try:
        from torch._dynamo.symbolic_convert import InstructionTranslator

        return not InstructionTranslator.current_tx().output.is_root_tracer()
    except (ImportError, AttributeError):
        return True  # to set none is always right


def stays(t: Tensor) -> Tensor:
    """The tensor, which keeps its address: a CUDA graph of compiled code reads and writes it there, not a copy.

    As torch._dynamo.mark_static_address has it, which imports all of Dynamo.
    """
    t._dynamo_static_input_type = "unguarded"  # type: ignore[attr-defined]
    return t


def needs_dispatcher(t: Tensor | list[Tensor]) -> bool:
    """Whether torch must see an op as an op: a compiler, torch.func, a tensor subclass, or a dispatch mode that counts ops. A
    list is asked about its first tensor.

    Otherwise a launcher is called as plain Python: the op costs the host several us, and 1 ms in a training loop, where it
    takes the interpreter lock again while the autograd thread still holds it (H100 host, torch 2.11).
    """
    kind = type(t[0]) if type(t) is list and t else type(t)
    return is_traced() or kind not in PLAIN or dispatch_modes() > 0


class Direct:
    """What an op of ours calls in the place of torch's dispatcher: its launcher, where nobody else needs to see the call.

    That is where eager code calls a launcher as plain Python (needs_dispatcher), and no graph, no trace of torch.jit, no
    profiler that lists ops and no subclass among the arguments. The dispatcher turns each argument from Python into C++ and
    back, which takes as long as the rest of an op; compiled code calls three to seven of ours in a decoder layer.
    """

    def __init__(self, dispatch: Any, launcher: Any):
        self.dispatch, self.launcher = dispatch, launcher

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        seen = kwargs or is_grad_enabled() or dispatch_modes() or functorch_active() or jit_tracing() or profiled()
        if seen or function_modes():
            return self.dispatch(*args, **kwargs)
        for arg in args:
            if type(arg) is list or type(arg) is tuple:
                if arg and not _KINDS.issuperset(map(type, arg)):
                    return self.dispatch(*args)
            elif type(arg) not in _KINDS:
                return self.dispatch(*args)
        return self.launcher(*args)

    def __hash__(self) -> int:  # that of the op, which may be a key already
        return hash(self.dispatch)

    def __eq__(self, other: Any) -> bool:
        return self is other or self.dispatch is other

    def __getattr__(self, name: str) -> Any:
        return getattr(self.dispatch, name)


_KINDS = {Tensor, torch.nn.Parameter, type(None), float, int, bool, str}
profiled = torch._C._autograd._profiler_enabled
function_modes = torch._C._len_torch_function_stack
is_grad_enabled = torch.is_grad_enabled  # looked up here, in a fraction of the time


def call_directly(op: Any, launcher: Any) -> None:
    """``op``, an OpOverload of ours, is Direct from now on. Nothing changes where a torch keeps its call elsewhere."""
    dispatch = getattr(op, "_op", None)
    if dispatch is not None:
        op._op = Direct(getattr(dispatch, "dispatch", dispatch), launcher)


def strided_shard() -> Any:
    """The placement of what FSDP cut after tensor parallelism had cut it."""
    from torch.distributed.tensor.placement_types import _StridedShard

    return _StridedShard


def fsdp2_groups(model: torch.nn.Module) -> Iterator[list[tuple[torch.nn.Module, str, Tensor]]]:
    """Module, name and sharded parameter of each that :func:`fully_shard` has sharded, in groups that are gathered together;
    nothing where it is not as known.

    While a unit is gathered, its modules hold other parameters, and the public way to these (the model's own state dict)
    reshards it.
    """
    from torch.distributed.fsdp import FSDPModule

    for unit in model.modules():
        state = unit._get_fsdp_state() if isinstance(unit, FSDPModule) and hasattr(unit, "_get_fsdp_state") else None
        groups = getattr(state, "_fsdp_param_groups", None)  # torch 2.12 has several to a unit
        for group in [getattr(state, "_fsdp_param_group", None)] if groups is None else groups:
            params = getattr(group, "fsdp_params", ())
            yield [(each._module_info.module, each._module_info.param_name, each.sharded_param) for each in params]


def piece_of(t: Any) -> Tensor | None:
    """A DTensor's own tensor of this rank; None of another tensor. ``to_local`` gives a view of it, which nobody holds."""
    return getattr(t, "_local_tensor", None)


def no_graph() -> bool:
    """Whether code runs for its values only: then the Function, which refuses what it cannot differentiate, can be left out."""
    watched = torch.is_grad_enabled() or torch.compiler.is_compiling() or functorch_active()
    return not watched and forward_ad._current_level < 0


def values_only() -> bool:
    """:func:`no_graph` where nothing traces."""
    return not torch.is_grad_enabled() and forward_ad._current_level < 0


def has_tangents() -> bool:
    """Whether tensors may have those of forward mode, which no_grad does not stop."""
    return forward_ad._current_level >= 0 or torch.compiler.is_compiling()


def detached(*tensors: Any) -> tuple[Any, ...]:
    """The tensors as constants to every derivative."""
    return tuple(None if t is None else t.detach() for t in tensors) if has_tangents() else tensors


def foreach_norms(tensors: list[Tensor]) -> Tensor:
    """(len,) float64: the norm of each tensor, by one kernel for many of them."""
    return torch.stack(torch._foreach_norm(tensors, 2, torch.float64))


foreach_add, foreach_add_ = torch._foreach_add, torch._foreach_add_  # likewise
foreach_mul_, foreach_zero_ = torch._foreach_mul_, torch._foreach_zero_


def foreach_clone(tensors: list[Tensor]) -> list[Tensor]:
    made = [torch.empty_like(t) for t in tensors]
    if made:
        torch._foreach_copy_(made, tensors)
    return made


def all_reduce_sum(t: Tensor, group: Any) -> Tensor:
    """A new tensor, the sum over a process group, a 1-D mesh or (a mesh, its dimension): an op that compilers see.

    torch.distributed.all_reduce writes in place, which they do not trace in every version; the functional form has no public
    name. Not differentiable before torch 2.11: callers have a backward of their own.
    """
    from torch.distributed import _functional_collectives as collectives

    return collectives.wait_tensor(collectives.all_reduce(t, "sum", group))


def all_gathered(mine: Tensor, count: int, group: Any) -> Tensor:
    """One behind the other, (count * n,), what each of so many processes has (n,)."""
    out = mine.new_empty(count * mine.numel())
    gather = getattr(torch.distributed, "all_gather_single", None)  # since torch 2.13 the name of the other
    (gather or torch.distributed.all_gather_into_tensor)(out, mine, group=group)
    return out


def capturing(device: torch.device) -> bool:
    """Whether what runs there now goes into a CUDA graph."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def default_store() -> Any:
    """Where all processes of torch.distributed meet; it has no public name."""
    from torch.distributed import distributed_c10d

    return distributed_c10d._get_default_store()


def apply(function: type[torch.autograd.Function], *args: Any) -> Any:
    """``function.apply(*args)``, past what ``Function.apply`` does for the sake of torch.func and of default arguments.

    For a Function with setup_context that is to ask inspect for the signature of ``forward`` and bind by name, on every
    apply: half of the host time of a small layer. Ours are all positional, with no defaults.
    """
    if torch.compiler.is_compiling():
        if functorch_active():  # a tensor that torch.func.grad was given says of itself no, until something is made of it
            args = tuple([a.view_as(a) if isinstance(a, Tensor) else a for a in args])
        # Without a graph to build Dynamo would hand a forward that takes *args its ctx as well (torch 2.13): do without apply.
        wanted = torch.is_grad_enabled() and any(isinstance(a, Tensor) and a.requires_grad for a in args)
        return function.apply(*args) if wanted else function.forward(*args)
    if functorch_active():
        return function.apply(*args)
    return eager_apply(function)(*args)


def eager_apply(function: type[torch.autograd.Function]) -> Any:
    """The same, where nothing traces, as something to call."""
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]
