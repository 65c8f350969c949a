"""Many adapters trained together on one base: a schedule's microbatches through one process, replicas, or a pipeline.

Functions of values: a state goes in, a state comes out. The engine knows nothing of DoRA, nor of PEFT: parameters are pytrees
of tensors with a row for each adapter, such as the banks of :func:`fdora.functional.dora_stack`. docs/adapters.md shows it.
"""

from fdora.jobs.loop.files import load as load
from fdora.jobs.loop.files import save as save
from fdora.jobs.loop.pipeline import Ran as Ran
from fdora.jobs.loop.pipeline import Stage as Stage
from fdora.jobs.loop.pipeline import gather_state as gather_state
from fdora.jobs.loop.pipeline import run_pipeline as run_pipeline
from fdora.jobs.loop.records import Job as Job
from fdora.jobs.loop.records import State as State
from fdora.jobs.loop.records import Work as Work
from fdora.jobs.loop.records import init_state as init_state
from fdora.jobs.loop.records import select_state as select_state
from fdora.jobs.loop.records import works_of as works_of
from fdora.jobs.loop.replicas import replica_step as replica_step
from fdora.jobs.loop.step import Model as Model
from fdora.jobs.loop.step import train_step as train_step
from fdora.jobs.loop.wires import Links as Links
from fdora.jobs.loop.wires import Wire as Wire
from fdora.jobs.loop.wires import connect as connect

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
    "replica_step",
    "run_pipeline",
    "save",
    "select_state",
    "train_step",
    "works_of",
]
