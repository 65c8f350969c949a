"""The norm that one adapter of one layer keeps from call to call, for as long as the bits of A, B and s stay the same."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fdora._norm_cache import NormCache, give_norm
from fdora._records import NormOf
from fdora._torch import PLAIN, capturing, functorch_active, is_traced, piece_of, stays
from fdora.functional import NormState, dora_norm, dora_norm_state, select_backend
from fdora.functional.norm import guarded_norm, kept_norms
from fdora.integrations._shard import Shard, lies_in_rows, watched
from fdora.integrations._tree import ALONE, UNASKED, kepts_of_models
from fdora.quant import QuantWeight

SMALL = 1 << 18  # elements of W below which its norm is computed sooner than A and B are compared


class KeptNorm:
    """A copy or a pickle of the layer starts without one."""

    def __init__(self) -> None:
        self.memo: tuple[NormCache, Any] | None = None  # and what W lies in
        self.room: tuple[Any, Tensor, Tensor] | None = None  # whose it is (None: what FSDP gathers comes and goes), c, words
        self.norms: Any = None  # those of all layers of a model, see _tree.py
        self.place = UNASKED
        self.served: Any = None  # see _hook.py
        self.base: weakref.ref[Any] | None = None  # the module whose weight it is the norm of
        self.layer: weakref.ref[Any] | None = None  # with the adapter
        self.shard: Shard | None = None

    def __reduce__(self) -> tuple[type[KeptNorm], tuple[()]]:
        return KeptNorm, ()

    def drop(self) -> None:
        """What was computed here does not hold: the next norm is computed."""
        self.memo = None
        if self.room is not None:
            self.room[2].zero_()

    def forget(self) -> None:
        """The base weight may have changed: nobody's norm of it holds, those of its model and of others on it neither."""
        W = self.weight()
        for kept in (self, *[kept for kept in kepts_of_models() if W is not None and kept.weight() is W]):
            kept.drop()
            if kept.norms is not None:
                kept.norms.forget()

    def weight(self) -> Any:
        """The parameter that stands in the place of W, if that is known."""
        base = None if self.base is None else self.base()
        return None if base is None else dict.get(base._parameters, "weight")

    def make_room(self, W: Any) -> None:
        """Forget; and where compiled code can keep the norm of W, make room: it fills tensors, but makes none that stay."""
        if self.norms is not None:
            self.norms.restart()
        self.memo, self.room, self.place, self.shard = None, None, UNASKED, None
        if type(W) in PLAIN:
            self.room_of(W, W.shape, weakref.ref(W))

    def room_of(self, W: Any, shape: Any, who: Any) -> None:
        """For a W of this shape; of what FSDP gathers ``W`` is the piece that lies here, and ``who`` is None."""
        if not W.is_floating_point() or W.element_size() == 1 or W.is_meta or shape.numel() < SMALL:
            return
        if select_backend(W).name == "triton":
            c, words = map(stays, empty_state(W.detach().new_empty(1).expand(shape)))
            self.room = (who, c, words)
            give_norm(words, self)

    def watch(self, known: dict[int, Tensor]) -> bool:
        """Between two forwards of the model: what stands in the place of W, and whether that is another. ``known`` are
        shards of what is gathered now."""
        base = None if self.base is None else self.base()
        if base is None:
            return False
        before, param = self.shard, known.get(id(base), dict.get(base._parameters, "weight"))
        self.shard = watched(before, param)
        if self.shard is not before and lies_in_rows(param):  # FSDP2 gathers it; the others' shards say no shape
            assert param is not None
            self.room_of(piece_of(param), param.shape, None)
        return self.shard is not before

    def look_at(self, param: Any) -> None:
        """W is a part of this DTensor, whose version says what that of the part does not."""
        if self.shard is None:
            self.shard = watched(None, param)

    def made_from(self, W: Tensor) -> tuple[int, ...]:
        """Which W compiled code has the norm of, as :meth:`eager` asks."""
        shard = () if self.shard is None else self.shard.state()
        return shard or (W.data_ptr(), version(W))

    def frozen(self, W: Tensor) -> Tensor:
        """W, detached where nobody asks for its gradient: in a call without a graph, and where it is FSDP1's view of trained
        parameters beside a frozen one."""
        if W.requires_grad and not torch.is_grad_enabled():
            return W.detach()
        if not W.requires_grad or W.is_leaf:
            return W
        param = None if self.shard is None else self.shard.param()
        return W if param is None or param.requires_grad else W.detach()

    def of(self, owner: Any, W: Any, A: Tensor, B: Tensor, s: float) -> Tensor:
        """c (N,). owner is the tensor that W is, or was made from. Mapped code computes it every time."""
        if not is_traced():
            return self.eager(owner, W, A, B, s)
        c: Tensor | None = None if self.norms is None else self.norms.traced_c(self, W, A, B, s)
        if c is not None:
            return c
        if self.room is None or not self.has_room_for(owner, W):
            return dora_norm(W, A, B, s=s)
        return kept_norms([(W, A, B, s, *self.room[1:])])[0]

    def unasked(self, W: Any, A: Tensor, B: Tensor, s: float) -> Tensor | None:
        """What c of a dense W is known by, for compiled code that asks when it runs; None where it is there, or asked for
        otherwise."""
        there = self.norms is not None and self.norms.traced_c(self, W, A, B, s) is not None
        room = self.room
        return room[2] if not there and room is not None and self.has_room_for(W, W) else None

    def has_room_for(self, owner: Any, W: Any) -> bool:
        """Whether compiled code keeps c and a fingerprint of this W here."""
        room = self.room
        if room is None or not compiled_kernels(W) or room[2].device != W.device:
            return False
        return room[1].shape[0] == W.shape[0] if room[0] is None else room[0]() is owner

    def on_mesh(self, W: Any, A: Any, B: Any, s: float) -> Tensor:
        """c of a DTensor. Where columns are spread every process adds up in every call, whatever it has kept."""
        if is_traced():
            c: Tensor = dora_norm(W, A, B, s=s)
            return c
        shard = () if self.shard is None else self.shard.state()  # what FSDP has gathered along another dimension of the mesh
        key = id(W), *(shard or Shard(W).state())
        c = self.cache(key, W)[0].current((W,), key, lambda old, _: dora_norm(W, A, B, s=s, state=old), True).c
        return c

    def cache(self, key: Any, W: Any, storage: Any = None) -> tuple[NormCache, bool]:
        """Of the W that this is the key of, and whether it is from before."""
        memo = self.memo  # read and written as a whole: the replicas of DataParallel share it
        if memo is not None and memo[0].made_from == key:
            return memo[0], True
        # Not weakref.ref(owner): torch.utils.swap_tensors, and so model.to, refuses such a tensor.
        self.memo = NormCache(empty_state(W)), None if storage is None else StorageWeakRef(storage)
        return self.memo[0], False

    def eager(self, owner: Any, W: Any, A: Tensor, B: Tensor, s: float) -> Tensor:
        """The same where nothing traces."""
        c = self.given(W, A, B, s, False)
        if c is not None or W.shape[0] * W.shape[1] < SMALL:
            return dora_norm(W, A, B, s=s) if c is None else c
        storage = owner.untyped_storage()
        shard = () if self.shard is None else self.shard.state()
        where = 0 if shard else storage._cdata  # what a shard is gathered into comes and goes
        # FSDP1 makes another view for each forward; a parameter is another one only when somebody replaced it.
        who = id(owner) if type(owner) is torch.nn.Parameter else 0
        stored = W.tensors if isinstance(W, QuantWeight) else (owner,)
        versions = tuple([version(t) for t in stored if t is not None])
        of = W.dtype, W.device, W.shape, torch.is_inference_mode_enabled()
        key = (*of, who, where, owner.storage_offset(), versions, shard)
        memo, known = self.cache(key, W, storage)

        def update(old: Any, _: Any) -> NormState:
            if known:  # of the same W: what dora_norm would check has been checked
                return NormState(*guarded_norm(NormOf(W, A, B, s), old[0], old[1], select_backend(W).name))
            return dora_norm(W, A, B, s=s, state=old)

        return memo.current((owner,), key, update, True).c

    def given(self, W: Any, A: Tensor, B: Tensor, s: float, compiled: bool = True) -> Tensor | None:
        """c that the model's hook computed, if it holds for this call: for compiled code, too, when it runs."""
        c: Tensor | None
        if self.norms is None:
            return None
        if self.norms.on_shards is not None and not (compiled and capturing(W.device)):
            c = self.norms.on_shards.c_of(self, W, A, s)
            if c is not None:
                return c
        c = None if self.place == ALONE else self.norms.c_of(self.place, W, A, B, s, compiled)
        if c is None and self.place == UNASKED:  # it was not collected, and is again by the next forward if it can be
            self.norms.restart()
            self.place = ALONE
        return self.norms.of_unit(self, W, A, B, s) if c is None else c


@torch.inference_mode(False)  # else nobody outside of it could write there
def empty_state(W: Any) -> Any:
    return dora_norm_state(W)


def compiled_kernels(W: Any) -> bool:
    """Whether compiled code calls kernels here, and for one adapter, not for a mapped bank of them."""
    return torch.compiler.is_compiling() and not functorch_active() and select_backend(W).name == "triton"


def version(t: Tensor) -> int:
    """Moves with most changes in place. Adapters are compared by their bits; of W only this is looked at."""
    return 0 if t.is_inference() else t._version
