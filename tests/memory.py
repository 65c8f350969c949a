"""Peak memory as the allocator sees it, temporaries inside ops included; what is kept for backward; and bytes that ops move."""

import gc

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Traffic(TorchDispatchMode):
    """Bytes that operations read and write."""

    bytes = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        out = op(*args, **(kwargs or {}))
        if not op.is_view:
            tensors = [t for t in tree_leaves((args, kwargs, out)) if isinstance(t, torch.Tensor)]
            self.bytes += sum(t.numel() * t.element_size() for t in tensors)
        return out


def peak_bytes(fn, device="cpu"):
    """Most bytes alive at once during fn() beyond those alive before it.

    Whatever an earlier call left and this one frees would hide as many bytes. So no cycle is collected meanwhile, and the
    first call's result is held: autograd's thread on a GPU may let go of its share late, after fn has returned.
    """
    first = fn()
    collecting = gc.isenabled()
    gc.disable()
    try:
        peak, result = (_cpu if device == "cpu" else _cuda)(fn)
    finally:
        if collecting:
            gc.enable()
    known = _storages(first, device)
    new = sum(size for at, size in _storages(result, device).items() if at not in known)
    assert peak >= new, f"a peak of {peak} bytes, but the result alone takes {new}: fn freed what was alive before it"
    return peak


def _cuda(fn):
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    result = fn()
    return torch.cuda.max_memory_allocated() - before, result


def saved(fn):
    """The result of fn(), and the tensors that autograd was given to keep for its backward."""
    found = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: found.append(t) or t, lambda t: t):
        return fn(), found


def held_bytes(fn):
    """What fn() leaves alive on a CPU while its result is held: of a forward, that and what it keeps for backward."""
    events, _held = _events(fn)
    return sum(events)


def _cpu(fn):
    events, result = _events(fn)
    alive = peak = 0
    for size in events:
        alive += size
        peak = max(peak, alive)
    return peak, result


def _events(fn):
    """Bytes that the CPU's allocator gave, or took back (negative), in order; and the result."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities, profile_memory=True) as prof:
        result = fn()
    events = [e for e in prof.profiler.kineto_results.events() if e.name() == "[memory]"]
    assert events, "the profiler saw no allocation"
    return [e.nbytes() for e in sorted(events, key=lambda e: e.start_ns())], result


def _storages(result, device):
    """Bytes by address of the tensors in a result, each piece of memory once."""
    tensors = (t for t in tree_leaves(result) if isinstance(t, torch.Tensor) and t.device.type == torch.device(device).type)
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
