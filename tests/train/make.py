"""Two small layers, a head for each adapter, and samples of other lengths; as a whole and as stages; and PyTorch's own loop."""

import random
from typing import NamedTuple

import torch
from torch.nn.functional import cross_entropy

from fdora.functional import dora_init, dora_linear, dora_linear_multi, dora_norm, dora_stack
from fdora.jobs.loop import Job, Model, Stage, Wire, run_pipeline, select_state
from fdora.jobs.schedule import segment_ends

K, H, C = 12, 16, 5
RANKS, S = (4, 2, 3), (2.0, 1.0, 0.5)
JOBS = (
    Job("law", 3e-2),
    Job("code", lambda step: 1e-2 / (1 + step), clip=0.05, weight_decay=0.1),
    Job("news", 1e-2, clip=0.02, betas=(0.8, 0.95), eps=1e-6),
)
LENGTHS = [
    [[5, 9, 3, 4], [7, 2, 8, 1], [6, 6]],
    [[12, 3, 10], [8, 4, 2], [1, 11, 2], [5]],
    [[7, 7, 6, 5, 3], [9, 2, 2, 8, 4]],
]


class Frozen(NamedTuple):
    one: torch.Tensor
    two: torch.Tensor


def frozen(dtype=torch.float32):
    g = torch.Generator().manual_seed(0)
    return Frozen(torch.randn(H, K, generator=g, dtype=dtype) / 4, torch.randn(H, H, generator=g, dtype=dtype) / 4)


def adapters(base):
    """[adapter]{name: DoraParams, "head": (C, H)}, B not zero."""
    g = torch.Generator().manual_seed(1)
    found = []
    for r in RANKS:
        own = {name: dora_init(W, r, generator=g) for name, W in base._asdict().items()}
        for p in own.values():
            p.B.normal_(std=0.1, generator=g)
        found.append(own | {"head": torch.randn(C, H, generator=g, dtype=base.one.dtype) / 4})
    return found


def banks(each):
    heads = torch.stack([own["head"] for own in each])
    return {name: dora_stack([own[name] for own in each]) for name in Frozen._fields} | {"head": {"weight": heads}}


def sample_of(adapter, batch, number, dtype=torch.float32):
    """Its tokens, and its label."""
    g = torch.Generator().manual_seed(1000 * adapter + 100 * batch + number)
    return torch.randn(LENGTHS[adapter][batch][number], K, generator=g, dtype=dtype), random.Random(number + adapter).randrange(
        C
    )


class Data(NamedTuple):
    x: torch.Tensor
    ends: torch.Tensor
    owners: torch.Tensor  # sample of each token
    adapters: torch.Tensor  # of each sample
    labels: torch.Tensor


def data_of(microbatch, dtype=torch.float32):
    found = [sample_of(*s[:3], dtype=dtype) for s in microbatch]
    return Data(
        torch.cat([x for x, _ in found]),
        torch.tensor(segment_ends(microbatch, len(LENGTHS)), dtype=torch.int32),
        torch.repeat_interleave(torch.tensor([s.length for s in microbatch])),
        torch.tensor([s.adapter for s in microbatch]),
        torch.tensor([label for _, label in found]),
    )


def keep_of(base):
    return lambda params: {n: dora_norm(getattr(base, n), *params[n][:2], s=S) for n in params if n != "head"}


def losses_of(head, y, data):
    mean = y.new_zeros(len(data.labels), H).index_add(0, data.owners, torch.tanh(y))
    mean = mean / torch.bincount(data.owners).unsqueeze(1)
    logits = (head[data.adapters] @ mean.unsqueeze(2)).squeeze(2)
    return cross_entropy(logits, data.labels, reduction="none")


def layer_of(base, name):
    """The linear layer of that name, whose input is the data or what came before it."""

    def forward(params, kept, x, data):
        x = data.x if x is None else x
        return dora_linear_multi(x, getattr(base, name), *params[name], s=S, offsets=data.ends, norm=kept[name], ranks=RANKS)

    return forward


def tanh(params, kept, x, data):
    return torch.tanh(x)


def head(params, kept, x, data):
    return losses_of(params["head"]["weight"], x, data)


def after(one, two):
    """``two`` of what ``one`` gives."""
    return lambda params, kept, x, data: two(params, kept, one(params, kept, x, data), data)


def first(base):
    return Stage(after(layer_of(base, "one"), tanh), ("one",), keep_of(base))


def second(base):
    return Stage(after(layer_of(base, "two"), head), ("two", "head"), keep_of(base))


def four(base):
    """The same in four stages."""
    keep = keep_of(base)
    return [
        Stage(layer_of(base, "one"), ("one",), keep),
        Stage(tanh, ()),
        Stage(layer_of(base, "two"), ("two",), keep),
        Stage(head, ("head",)),
    ]


def whole(base):
    one, two = first(base), second(base)
    return Model(
        lambda params, kept, data: two.forward(params, kept, one.forward(params, kept, None, data), data), keep_of(base)
    )


def alone(base, own, a):
    """PyTorch's loop for one adapter: a batch at once. Losses of its batches, and what it became."""
    job, r = JOBS[a], RANKS[a]
    own = {
        n: tuple(t.clone().requires_grad_() for t in p) if n != "head" else p.clone().requires_grad_() for n, p in own.items()
    }
    leaves = [*own["one"], *own["two"], own["head"]]
    optimizer = torch.optim.AdamW(leaves, lr=1.0, betas=job.betas, eps=job.eps, weight_decay=job.weight_decay)
    found = []
    for j, batch in enumerate(LENGTHS[a]):
        losses = []
        for i in range(len(batch)):
            x, label = sample_of(a, j, i, base.one.dtype)
            x = torch.tanh(dora_linear(x, base.one, *own["one"], s=S[a]))
            x = torch.tanh(dora_linear(x, base.two, *own["two"], s=S[a])).mean(0)
            losses.append(cross_entropy(own["head"] @ x, torch.tensor(label)))
        torch.stack(losses).mean().backward()
        if job.clip is not None:
            torch.nn.utils.clip_grad_norm_(leaves, job.clip)
        optimizer.param_groups[0]["lr"] = job.rate(j)
        optimizer.step()
        optimizer.zero_grad()
        found.append(torch.stack(losses).mean().item())
    assert own["one"][0].shape[0] == r
    return found, own


WIRE = Wire(lambda work: (sum(s.length for s in work.samples), H))


def piped(works, state, stages, links, **options):
    """The schedule through the stages of this process."""
    own = {n: stage for n, stage in enumerate(stages) if n % len(links.ranks) == links.rank}
    names = [name for stage in own.values() for name in stage.names]
    data = lambda n: data_of(works[n].samples)  # noqa: E731
    mine = select_state(state, names)
    return run_pipeline(mine, works, data, stages=own, wire=WIRE, jobs=JOBS, links=links, **options)


def curves(works, losses):
    """{(adapter, batch): mean loss} of {microbatch: losses}."""
    found = {}
    for n, each in losses.items():
        for sample, loss in zip(works[n].samples, each.tolist(), strict=True):
            found.setdefault(sample[:2], []).append(loss)
    return {batch: sum(each) / len(each) for batch, each in found.items()}


def same(one, other):
    """Bits of two states, norms aside."""
    from fdora.jobs.loop.records import TREES, flat

    for part in TREES:
        left, right = flat(getattr(one, part)), flat(getattr(other, part))
        assert left.keys() == right.keys()
        for key in left:
            assert torch.equal(left[key], right[key]), f"{part} {key}"
    assert one.steps == other.steps and one.position == other.position
