"""One microbatch through one process: losses, gradients of every adapter in it, and the optimizer steps that are due.

The loss of a batch of adapter a is the mean over its samples, in however many microbatches they are. When the last is through,

    dP_a = sum over microbatches of d(sum_i w_i loss_i) / dP_a,     w_i = 1 / samples of the batch
    dP_a <- dP_a min(1, clip_a / (||dP_a|| + 1e-6)),   then AdamW with the rate of a

Row a of a parameter meets tokens of adapter a alone: its gradient is that of training alone, and a NaN stays with its adapter.

Replicas: every process has the whole model and all adapters, and takes one of as many microbatches.

    dP_a = sum over replicas, over rounds of d(sum_i w_i loss_i) / dP_a,     w_i = 1 / samples of the batch, wherever they are

A round is one microbatch for each replica, consecutive in the schedule. Its gradients are summed before anybody steps, so the
state is the same on all replicas after every round, to the bit: any of them saves it, and any number goes on with it. Numbers
that travel: A, B and m of the adapters in the round, in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import optree
import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.adamw import adamw

from fdora._check import fail
from fdora._torch import foreach_add, foreach_add_, foreach_clone, foreach_mul_, foreach_norms, foreach_zero_
from fdora.jobs.loop.records import TREES, Job, Keep, Params, State, Work, kept_of
from fdora.jobs.loop.watch import Watch, watching


class Model(NamedTuple):
    """The model that is trained, as two functions: the losses of samples, and what to keep between optimizer steps."""

    forward: Callable[[Params, Any, Any], Tensor]
    """``forward(params, kept, data)``: (samples,) losses, in the order of the microbatch's samples."""
    keep: Keep = None
    """``keep(params)``: what forward wants of them once for each optimizer step, such as norms. Without gradients."""


def train_step(
    state: State, work: Work, data: Any, *, model: Model, jobs: Sequence[Job], donate: bool = False
) -> tuple[State, Tensor]:
    """A microbatch forward and backward; for each adapter whose batch it ends, ``P_a <- AdamW_a(P_a, clip_a(dP_a))``.

    Args:
      state: of :func:`init_state`, or the one before.
      work: of :func:`works_of`; one without samples does nothing.
      data: what ``model.forward`` takes: the tokens of ``work.samples``, in their order.
      model: forward, and what is kept between optimizer steps.
      jobs: rate, clipping and AdamW's numbers of each adapter.
      donate: may write gradients and moments into the memory of ``state``, which is then worth nothing. Parameters are
        always new tensors where they change, for a microbatch in flight may hold the old ones.

    Returns:
      The state after it, and the losses of its samples (samples,), detached.

    Raises:
      FdoraError: forward gave no (samples,) losses, or a sample's batch comes before the one ahead of it has stepped.

    Memory: gradients of all parameters once more while they are added; without ``donate`` a copy of what changes.
    References: Zhu et al., LoRAFusion, 2025, arXiv:2510.00206, section 5; Loshchilov and Hutter, 2019, arXiv:1711.05101.
    """
    return one_round("jobs.loop.train_step", TURN, state, [work], data, 0, model, jobs, donate)


def one_round(
    fn: str,
    remedy: str,
    state: State,
    works: Sequence[Work],
    data: Any,
    rank: int,
    model: Model,
    jobs: Sequence[Job],
    donate: bool,
    group: Any = None,
    watch: Any = None,
) -> tuple[State, Tensor]:
    """The microbatches of all replicas, of which this process runs that of its rank; and its losses."""
    for work in works:
        check_turn(fn, state, work, remedy)
    found: Sequence[Tensor | None] = [None for _ in optree.tree_leaves(state.params)]
    losses = torch.empty(0)
    if rank < len(works) and works[rank].samples:
        found, losses = gradients(fn, state, works[rank], data, model)
    adapters = sorted({sample.adapter for work in works for sample in work.samples})
    if group is None or not adapters:
        grads = added(state.grads, found, donate)
    else:
        grads = summed(state.grads, found, adapters, group, watch, donate)
    state = state._replace(grads=grads, position=state.position + len(works))
    due = [a for work in works for a, _ in work.due]
    if due:
        squares = {a: square_sum(state.grads, a) for a in due if jobs[a].clip is not None}
        state = optimizer_step(state, jobs, squares, due, donate)
        state = state._replace(kept=kept_of(model.keep, state.params))
    return state, losses


def gradients(fn: str, state: State, work: Work, data: Any, model: Model) -> tuple[Sequence[Tensor | None], Tensor]:
    """Of all parameters, in the order of the tree; and the losses."""
    params, leaves = leaves_of(state.params)
    losses = model.forward(params, state.kept, data)
    weights = check_losses(fn, losses, work)
    return torch.autograd.grad(losses, leaves, weights, allow_unused=True), losses.detach()


TURN = "Give the microbatches in the schedule's order, and the schedule the depth of this pipeline (depth_of)."


def check_turn(fn: str, state: State, work: Work, remedy: str) -> None:
    """A microbatch must meet the weights that all earlier batches of its adapters have made."""
    for sample in work.samples:
        have = state.steps[sample.adapter]
        if sample.batch != have:
            want = f"of batch {have} of adapter {sample.adapter}, which is next"
            raise fail(fn, "work", want, f"one of batch {sample.batch}", remedy)


def check_losses(fn: str, losses: Any, work: Work) -> Tensor:
    """The weights, as their gradient."""
    if not isinstance(losses, Tensor) or tuple(losses.shape) != (len(work.samples),):
        have = tuple(losses.shape) if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
        raise fail(fn, "forward", f"a function that gives ({len(work.samples)},), the loss of each sample", have, "Do not sum.")
    return on(losses.device, torch.tensor(work.weights, dtype=losses.dtype))


def on(device: torch.device, t: Tensor) -> Tensor:
    """Small numbers of the host, on a GPU without a wait for what it still has to do: that is only so from pinned memory."""
    return t.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else t.to(device)


def leaves_of(params: Params) -> tuple[Params, list[Tensor]]:
    """The same memory as leaves of a graph of their own."""
    leaves, spec = optree.tree_flatten(params)
    leaves = [t.detach().requires_grad_() for t in leaves]
    return optree.tree_unflatten(spec, leaves), leaves


@torch.no_grad()
def added(grads: Params, found: Sequence[Tensor | None], donate: bool) -> Params:
    have, spec = optree.tree_flatten(grads)
    more = {i: t for i, t in enumerate(found) if t is not None}
    if more:
        old = [have[i] for i in more]
        if donate:
            foreach_add_(old, [*more.values()])
        else:
            for i, t in zip(more, foreach_add(old, [*more.values()]), strict=True):
                have[i] = t
    return optree.tree_unflatten(spec, have)


@torch.no_grad()
def square_sum(grads: Params, adapter: int) -> Tensor:
    """Of the squares of one adapter's gradient: () float64, added in the order of the tree."""
    rows = [t[adapter] for t in optree.tree_leaves(grads)]
    return foreach_norms(rows).square().sum() if rows else torch.zeros((), dtype=torch.float64)  # a stage may train nothing


@torch.no_grad()
def optimizer_step(state: State, jobs: Sequence[Job], squares: dict[int, Tensor], due: Sequence[int], donate: bool) -> State:
    """AdamW of each adapter in ``due``, on its rows; their gradients are zero afterwards. ``kept`` is left as it was.

    Kernels that take all tensors at once: a model's banks are hundreds of tensors, and one launch for each would cost the host
    more than the GPU has to do.
    """
    leaves, spec = optree.tree_flatten(state.params)
    if not leaves:  # a stage may train nothing
        return state._replace(steps=tuple(n + (a in due) for a, n in enumerate(state.steps)))
    params = foreach_clone(leaves)
    trees = (optree.tree_leaves(tree) for tree in (state.grads, state.mean, state.square))
    grads, mean, square = (each if donate else foreach_clone(each) for each in trees)
    steps = list(state.steps)
    for a in due:
        job = jobs[a]
        rows, row_grads, row_mean, row_square = ([t[a] for t in each] for each in (params, grads, mean, square))
        if a in squares:
            assert job.clip is not None
            scale = (job.clip / (squares[a].sqrt() + 1e-6)).clamp(max=1.0)  # torch.nn.utils.clip_grad_norm_
            for dtype in {t.dtype for t in row_grads}:
                own = [t for t in row_grads if t.dtype == dtype]
                foreach_mul_(own, scale.to(own[0]))
        counts = [torch.tensor(float(steps[a])) for _ in params]
        adamw(
            rows,
            row_grads,
            row_mean,
            row_square,
            [],
            counts,
            amsgrad=False,
            beta1=job.betas[0],
            beta2=job.betas[1],
            lr=job.rate(steps[a]),
            weight_decay=job.weight_decay,
            eps=job.eps,
            maximize=False,
        )
        foreach_zero_(row_grads)
        steps[a] += 1
    after: Any = [optree.tree_unflatten(spec, each) for each in (params, grads, mean, square)]
    return state._replace(**dict(zip(TREES, after, strict=True)), steps=tuple(steps))


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
        remedy = f"Make the schedule with Spec(depth={count}), and give its rounds in order."
        return one_round(fn, remedy, state, works, data, rank, model, jobs, donate, group, watch)


@torch.no_grad()
def summed(grads: Any, found: Sequence[Tensor | None], adapters: Sequence[int], group: Any, watch: Watch, donate: bool) -> Any:
    """The rows of these adapters, with what all replicas found: one message, the same on all of them."""
    old, spec = optree.tree_flatten(grads)
    wide = torch.float64 if any(t.dtype == torch.float64 for t in old) else torch.float32
    pairs = [(have, more, a) for have, more in zip(old, found, strict=True) for a in adapters]
    rows = [torch.zeros_like(have[a]) if more is None else more[a] for have, more, a in pairs]
    flat = torch.cat([row.flatten().to(wide) for row in rows])
    watch.idle(flat.device)
    watch.wait(dist.all_reduce(flat, group=group, async_op=True), flat)
    new = old if donate else foreach_clone(old)
    own = [t[a] for t in new for a in adapters]
    parts = flat.split([row.numel() for row in rows])
    foreach_add_(own, [part.view_as(row).to(row.dtype) for part, row in zip(parts, own, strict=True)])
    return optree.tree_unflatten(spec, new)
