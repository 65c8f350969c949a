"""Replicas: every process has the whole model and all adapters, and takes one of as many microbatches.

    dP_a = sum over replicas, over rounds of d(sum_i w_i loss_i) / dP_a,     w_i = 1 / samples of the batch, wherever they are

A round is one microbatch for each replica, consecutive in the schedule. Its gradients are summed before anybody steps, so the
state is the same on all replicas after every round, to the bit: any of them saves it, and any number goes on with it. Numbers
that travel: A, B and m of the adapters in the round, in float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from fdora._check import fail
from fdora._torch import foreach_add_, foreach_clone
from fdora.jobs.loop.records import Job, State, Work
from fdora.jobs.loop.step import Model, check_turn, gradients, stepped
from fdora.jobs.loop.watch import Watch, watching


def replica_step(
    state: State,
    works: Sequence[Work],
    data: Any,
    *,
    model: Model,
    jobs: Sequence[Job],
    group: Any = None,
    donate: bool = False,
) -> tuple[State, Tensor]:
    """A round on all replicas; for each adapter whose batch it ends, ``P_a <- AdamW_a(P_a, clip_a(sum of dP_a))``.

    Args:
      state: the same on all replicas: of :func:`init_state`, :func:`load`, or the one before.
      works: the round: as many consecutive microbatches of :func:`works_of` as there are replicas, in the last round perhaps
        fewer. The schedule's ``Spec.depth`` must be the number of replicas, or more: one round then holds no two batches of
        an adapter.
      data: what ``model.forward`` takes of this replica's microbatch, ``works[rank]``; None where it has none.
      model: forward, and what is kept between optimizer steps.
      jobs: rate, clipping and AdamW's numbers of each adapter.
      group: the replicas' process group; None is all processes, or this one alone where ``torch.distributed`` was not started.
      donate: as for :func:`train_step`.

    Returns:
      The state after the round, the same bits on all replicas, and the losses of this replica's samples, detached.

    Raises:
      FdoraError: more microbatches than replicas, a sample's batch comes before the one ahead of it has stepped, or another
        replica failed, with what it said.

    Memory: as for :func:`train_step`, and the gradients of the round's adapters once more in float32.
    References: LoRAFusion, 2025, arXiv:2510.00206, section 5.
    """
    fn = "jobs.loop.replica_step"
    group = dist.group.WORLD if group is None and dist.is_available() and dist.is_initialized() else group
    rank, count = (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))
    with watching(fn, group, (group,)) as watch:  # who is refused says so to those who are not
        if len(works) > count:
            want = f"at most {count} microbatches, one for each replica"
            raise fail(fn, "works", want, len(works), "Give works[n : n + replicas].")
        for work in works:
            check_turn(fn, state, work, f"Make the schedule with Spec(depth={count}), and give its rounds in order.")
        mine = works[rank] if rank < len(works) and works[rank].samples else None
        found: Sequence[Tensor | None] = [None for _ in optree.tree_leaves(state.params)]
        losses = torch.empty(0)
        if mine is not None:
            found, losses = gradients(fn, state, mine, data, model)
        adapters = sorted({sample.adapter for work in works for sample in work.samples})
        grads = summed(state.grads, found, adapters, group, watch, donate) if adapters else state.grads
        state = state._replace(grads=grads, position=state.position + len(works))
        due = [a for work in works for a, _ in work.due]
        return stepped(state, due, model, jobs, donate), losses


@torch.no_grad()
def summed(grads: Any, found: Sequence[Tensor | None], adapters: Sequence[int], group: Any, watch: Watch, donate: bool) -> Any:
    """The rows of these adapters, with what all replicas found: one message, the same on all of them."""
    old, spec = optree.tree_flatten(grads)
    wide = torch.float64 if any(t.dtype == torch.float64 for t in old) else torch.float32
    pairs = [(have, more, a) for have, more in zip(old, found, strict=True) for a in adapters]
    rows = [torch.zeros_like(have[a]) if more is None else more[a] for have, more, a in pairs]
    flat = torch.cat([row.flatten().to(wide) for row in rows])
    if group is not None:
        watch.idle(flat.device)
        watch.wait(dist.all_reduce(flat, group=group, async_op=True), flat)
    new = old if donate else foreach_clone(old)
    own = [t[a] for t in new for a in adapters]
    parts = flat.split([row.numel() for row in rows])
    foreach_add_(own, [part.view_as(row).to(row.dtype) for part, row in zip(parts, own, strict=True)])
    return optree.tree_unflatten(spec, new)
