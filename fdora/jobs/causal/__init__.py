"""Adapters of PEFT on one causal model of transformers, trained together: :func:`train`, which is ``fdora.jobs.train`` too.

It puts together what stands beside it: ``fdora.jobs.schedule`` packs the samples, ``fdora.jobs.loop`` runs them.
"""

from fdora.jobs.causal.data import Step, Trained, TrainJob
from fdora.jobs.causal.whole import train

__all__ = ["Step", "TrainJob", "Trained", "train"]
