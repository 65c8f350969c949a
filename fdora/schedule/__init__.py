"""Microbatches for many adapters that are trained on one base: packed, merged and ordered so that a pipeline need not wait.

Pure functions of lengths: no tensors, no globals, nothing of a framework. docs/schedule.md explains them.
"""

from fdora.schedule.events import optimizer_steps as optimizer_steps
from fdora.schedule.events import segment_ends as segment_ends
from fdora.schedule.groups import plan_groups as plan_groups
from fdora.schedule.merge import merge as merge
from fdora.schedule.order import insert_noops as insert_noops
from fdora.schedule.pack import pack as pack
from fdora.schedule.picture import draw as draw
from fdora.schedule.records import Packed as Packed
from fdora.schedule.records import Packing as Packing
from fdora.schedule.records import Sample as Sample
from fdora.schedule.records import Schedule as Schedule
from fdora.schedule.records import Spec as Spec
from fdora.schedule.records import from_json as from_json
from fdora.schedule.records import to_json as to_json
from fdora.schedule.simulate import Action as Action
from fdora.schedule.simulate import Task as Task
from fdora.schedule.simulate import Timeline as Timeline
from fdora.schedule.simulate import depth_of as depth_of
from fdora.schedule.simulate import interleaved as interleaved
from fdora.schedule.simulate import one_f_one_b as one_f_one_b
from fdora.schedule.simulate import simulate as simulate
from fdora.schedule.verify import verify as verify
from fdora.schedule.whole import schedule as schedule

__all__ = [
    "Action",
    "Packed",
    "Packing",
    "Sample",
    "Schedule",
    "Spec",
    "Task",
    "Timeline",
    "depth_of",
    "draw",
    "from_json",
    "insert_noops",
    "interleaved",
    "merge",
    "one_f_one_b",
    "optimizer_steps",
    "pack",
    "plan_groups",
    "schedule",
    "segment_ends",
    "simulate",
    "to_json",
    "verify",
]
