"""The hooks that have the norms of a model computed at the beginning of each of its forwards; see _tree.py."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import torch
from torch import nn

from fdora._torch import backward_task, dispatch_modes, exporting, functorch_active, in_subgraph
from fdora.integrations._shard_norms import ShardNorms
from fdora.integrations._tree import Found, ModelNorms

FORWARDS = count(-2, -1)  # tasks of backward have the numbers from 0


class Hook:
    """Before and after the forward of a model. A copy or a pickle of the model has one that does nothing."""

    def __init__(self, norms: Any = None, root: Callable[[], Any] = lambda: None):
        self.norms, self.root = norms, root

    def __reduce__(self) -> tuple[type[Hook], tuple[()]]:
        return Hook, ()

    def before(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        norms = self.norms
        if self.root() is not module:
            return
        if torch.compiler.is_compiling():
            if torch.compiler.is_dynamo_compiling() and not exporting() and not in_subgraph():
                norms.trace()
            return
        norms.watch()
        norms.local.run, norms.local.forward = None, -1
        if watched():
            return
        norms.local.forward = next(FORWARDS)
        norms.local.run = norms.compute(backward_task())
        if norms.on_shards is not None:
            norms.on_shards.compute()

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        norms = self.norms
        if self.root() is module:
            if not torch.compiler.is_compiling():
                norms.local.run, norms.local.forward = None, -1
                if norms.on_shards is not None:
                    norms.on_shards.running = False
            if norms.traced is not None:
                norms.traced = None


def watched() -> bool:
    """Whether values of now must not be taken for those of every call."""
    return torch.jit.is_tracing() or functorch_active() or dispatch_modes() > 0


def hooked(module: nn.Module) -> Any:
    """Whether calling the module does more than its class's forward."""
    if torch.compiler.is_dynamo_compiling():  # so asked, Dynamo guards hooks as it does those of every module: not by default
        hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
        return hooks or "forward" in module.__dict__
    d = module.__dict__
    return d["_forward_hooks"] or d["_forward_pre_hooks"] or d["_backward_hooks"] or d["_backward_pre_hooks"] or "forward" in d


def hook(
    model: nn.Module,
    roots: Sequence[nn.Module],
    kepts: Sequence[Any],
    find: Callable[[Iterable[nn.Module]], Found],
    find_shards: Callable[[Any], Any] | None = None,
) -> None:
    """Before each forward of any of these modules of the model compute the norms of the layers that ``find`` lists among
    modules, some of ``kepts``; and on their shards of those that ``find_shards`` does."""
    norms, served, handles = ModelNorms(weakref.ref(model), find), Served(), list[Any]()
    norms.on_shards = None if find_shards is None else ShardNorms(find_shards)
    norms.kepts = list(map(weakref.ref, kepts))
    for kept in kepts:
        kept.norms, kept.served = norms, served
    for root in roots:
        each = Hook(norms, weakref.ref(root))
        handles.append(root.register_forward_pre_hook(each.before, prepend=True, with_kwargs=True))
        handles.append(root.register_forward_hook(each.after, always_call=True))
    weakref.finalize(served, remove, handles).atexit = False


class Served:
    """Held by all layers that are to be served. Where the last one is gone (merge_and_unload) the hooks go as well."""


def remove(handles: Iterable[Any]) -> None:
    for handle in handles:
        handle.remove()


def unhook(model: nn.Module) -> None:
    """Take all such hooks off, those of copies too."""
    for module in model.modules():
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            for key, found in list(hooks.items()):
                if isinstance(getattr(found, "__self__", None), Hook):
                    del hooks[key]
                    for extra in ("_forward_pre_hooks_with_kwargs", "_forward_hooks_always_called"):
                        getattr(module, extra).pop(key, None)
