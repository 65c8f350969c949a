"""Many adapters trained together on one base: a schedule's microbatches through one process, replicas, or a pipeline.

Functions of values: a state goes in, a state comes out. The engine knows nothing of DoRA, nor of PEFT: parameters are pytrees
of tensors with a row for each adapter, such as the banks of :func:`fdora.functional.dora_stack`: see docs/training-many.md.
"""

from fdora.jobs.loop.pipeline import Ran, Stage, gather_state, run_pipeline
from fdora.jobs.loop.records import Job, State, Work, init_state, load, read_notes, save, select_state, works_of
from fdora.jobs.loop.step import Model, replica_step, train_step
from fdora.jobs.loop.wires import Links, Wire, connect

__all__ = [
    "Job",
    "Links",
    "Model",
    "Ran",
    "Stage",
    "State",
    "Wire",
    "Work",
    "connect",
    "gather_state",
    "init_state",
    "load",
    "read_notes",
    "replica_step",
    "run_pipeline",
    "save",
    "select_state",
    "train_step",
    "works_of",
]
