"""Microbatches for many adapters that are trained on one base: packed, merged and ordered so that a pipeline need not wait.

Pure functions of lengths: no tensors, no globals, nothing of a framework. docs/schedule.md explains them.
"""

from fdora.jobs.schedule.events import optimizer_steps as optimizer_steps
from fdora.jobs.schedule.events import segment_ends as segment_ends
from fdora.jobs.schedule.groups import plan_groups as plan_groups
from fdora.jobs.schedule.merge import merge as merge
from fdora.jobs.schedule.order import insert_noops as insert_noops
from fdora.jobs.schedule.pack import pack as pack
from fdora.jobs.schedule.picture import draw as draw
from fdora.jobs.schedule.records import Packed as Packed
from fdora.jobs.schedule.records import Packing as Packing
from fdora.jobs.schedule.records import Sample as Sample
from fdora.jobs.schedule.records import Schedule as Schedule
from fdora.jobs.schedule.records import Spec as Spec
from fdora.jobs.schedule.records import from_json as from_json
from fdora.jobs.schedule.records import to_json as to_json
from fdora.jobs.schedule.simulate import Action as Action
from fdora.jobs.schedule.simulate import Task as Task
from fdora.jobs.schedule.simulate import Timeline as Timeline
from fdora.jobs.schedule.simulate import depth_of as depth_of
from fdora.jobs.schedule.simulate import interleaved as interleaved
from fdora.jobs.schedule.simulate import one_f_one_b as one_f_one_b
from fdora.jobs.schedule.simulate import simulate as simulate
from fdora.jobs.schedule.verify import verify as verify
from fdora.jobs.schedule.whole import schedule as schedule

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
