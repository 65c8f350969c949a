"""Two adapters of one PEFT model, trained together: in one process, on replicas, and in a pipeline of two stages.

python examples/many_adapters.py, or torchrun --nproc-per-node 2 examples/many_adapters.py
"""

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model

from fdora.functional import dora_linear_multi, dora_norm
from fdora.integrations.peft import read_banks, write_banks
from fdora.jobs import loop
from fdora.jobs.schedule import Spec, schedule, segment_ends

if dist.is_torchelastic_launched():  # by torchrun
    dist.init_process_group("gloo")
rank, count = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)

torch.manual_seed(0)
base = torch.nn.Sequential(torch.nn.Linear(64, 48, bias=False))
model = get_peft_model(base, LoraConfig(r=8, use_dora=True, target_modules=["0"]), adapter_name="law")
model.add_adapter("med", LoraConfig(r=4, use_dora=True, target_modules=["0"]))
((path, bank),) = read_banks(model).items()
W = model.get_submodule(path).base_layer.weight

lengths = [[[5, 9], [7, 2]], [[12, 3, 4]]]  # [adapter][batch][sample]: tokens
x = [[[torch.randn(n, 64) for n in batch] for batch in batches] for batches in lengths]
jobs = [loop.Job("law", 1e-3, clip=1.0), loop.Job("med", lambda step: 2e-3 / (1 + step), weight_decay=0.01)]


def keep(params):
    return dora_norm(W, *params[path][:2], s=bank.s)


def project(params, c, data):
    return dora_linear_multi(data["x"], W, *params[path], s=bank.s, offsets=data["ends"], norm=c, ranks=bank.ranks)


def losses_of(y, data):
    return torch.zeros(data["samples"]).index_add(0, data["owner"], y.square().mean(1))


def data_of(work):
    tokens = torch.cat([x[s.adapter][s.batch][s.number] for s in work.samples])
    owner = torch.repeat_interleave(torch.tensor([sample.length for sample in work.samples]))
    ends = torch.tensor(segment_ends(work.samples, adapters=2), dtype=torch.int32)
    return {"x": tokens, "ends": ends, "owner": owner, "samples": len(work.samples)}


works = loop.works_of(schedule(lengths, Spec(capacity=16, depth=2)))
state = spread = start = loop.init_state({path: bank.params}, jobs, keep)
whole = loop.Model(lambda params, c, data: losses_of(project(params, c, data), data), keep)

for work in works:  # in one process
    state, losses = loop.train_step(state, work, data_of(work), model=whole, jobs=jobs)
for n in range(0, len(works), count):  # on replicas: each process takes one microbatch of a round
    turn = works[n : n + count]
    mine = data_of(turn[rank]) if rank < len(turn) and turn[rank].samples else None
    spread, losses = loop.replica_step(spread, turn, mine, model=whole, jobs=jobs)
torch.testing.assert_close(spread.params[path].m, state.params[path].m)  # another order of sums

stages = [  # a pipeline: one stage on each process, or both here
    loop.Stage(lambda params, c, y, data: project(params, c, data), (path,), keep),
    loop.Stage(lambda params, c, y, data: losses_of(y, data), ()),
]
links = loop.connect()  # on all processes
own = {n: stage for n, stage in enumerate(stages) if n % len(links.ranks) == links.rank}
mine = loop.select_state(start, [name for stage in own.values() for name in stage.names])
wire = loop.Wire(lambda work: (sum(sample.length for sample in work.samples), 48))  # what a stage hands to the next
ran = loop.run_pipeline(mine, works, lambda n: data_of(works[n]), stages=own, wire=wire, jobs=jobs, links=links)
after = loop.gather_state(ran.state, links)  # the whole of it, for `save`, or for another number of stages
assert torch.equal(after.params[path].m, state.params[path].m)  # the bits of one process

if rank == 0:
    loop.save("adapters", state, jobs)
    write_banks(model, {path: bank._replace(params=state.params[path])})
    model.save_pretrained("adapters")
if dist.is_initialized():
    dist.destroy_process_group()
