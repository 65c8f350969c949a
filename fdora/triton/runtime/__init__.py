"""How a call becomes launches: a plan (plan.py) is made once per signature, run by walk.py or, on NVIDIA GPUs, by walk.c.

plan.py      what a plan is; pure
builder.py   what facades write one with; pure
layout.py    where elements and temporaries lie
cost.py      flops and bytes of each kernel, for plans and for profilers
walk.py      ``run(plan, tensors, scalars)``: the cache of plans, and the walk in Python
native.py    the walk in C: a plan whose kernels are compiled, as one object that launches them all
describe.py  a plan as text
device.py    what a GPU can do
private.py   every private name of Triton and of the driver

What facades write plans with stands here too.
"""

from fdora.triton.runtime.builder import Builder, asked, named, numbered
from fdora.triton.runtime.device import Device, cdiv, device_of, grid_of, is_tma_compatible
from fdora.triton.runtime.plan import Array, Like, Plan, Scalar, Tile

__all__ = [
    "Array",
    "Builder",
    "Device",
    "Like",
    "Plan",
    "Scalar",
    "Tile",
    "asked",
    "cdiv",
    "device_of",
    "grid_of",
    "is_tma_compatible",
    "named",
    "numbered",
]
