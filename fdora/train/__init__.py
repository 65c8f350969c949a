"""Many adapters trained together on one base: a schedule's microbatches through one process, replicas, or a pipeline.

Functions of values: a state goes in, a state comes out. The engine knows nothing of DoRA, nor of PEFT: parameters are pytrees
of tensors with a row for each adapter, such as the banks of :func:`fdora.functional.dora_stack`. docs/adapters.md shows it.
"""

from fdora.train.files import load as load
from fdora.train.files import save as save
from fdora.train.pipeline import Ran as Ran
from fdora.train.pipeline import Stage as Stage
from fdora.train.pipeline import gather_state as gather_state
from fdora.train.pipeline import run_pipeline as run_pipeline
from fdora.train.records import Job as Job
from fdora.train.records import State as State
from fdora.train.records import Work as Work
from fdora.train.records import init_state as init_state
from fdora.train.records import select_state as select_state
from fdora.train.records import works_of as works_of
from fdora.train.replicas import replica_step as replica_step
from fdora.train.step import Model as Model
from fdora.train.step import train_step as train_step
from fdora.train.wires import Links as Links
from fdora.train.wires import Wire as Wire
from fdora.train.wires import connect as connect

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
