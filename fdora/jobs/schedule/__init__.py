"""Microbatches for many adapters that are trained on one base: packed, merged and ordered so that a pipeline need not wait.

Pure functions of lengths: no tensors, no globals, nothing of a framework. docs/training-many.md explains them.
"""

from fdora.jobs.schedule.order import insert_noops, merge, optimizer_steps, segment_ends
from fdora.jobs.schedule.pack import pack
from fdora.jobs.schedule.records import Packed, Packing, Sample, Schedule, Spec, from_json, to_json
from fdora.jobs.schedule.simulate import Action, Task, Timeline, depth_of, draw, interleaved, one_f_one_b, simulate
from fdora.jobs.schedule.verify import verify
from fdora.jobs.schedule.whole import plan_groups, schedule

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
