"""What training adapters takes, before it runs: memory by component, tokens of a microbatch, time, a layout on GPUs.

    fdora plan --model config.json --adapters 64 --gpu h200 --gpus 2

Pure functions of shapes, from records to records; docs/predict.md explains them. Memory is that of transformers' decoders with
``use_fdora``, in bfloat16.
"""

from fdora.jobs.plan.cost import Card, Memory, Profile, Time, capacity, card, memory, times
from fdora.jobs.plan.layout import Layout, Plan, plan
from fdora.jobs.plan.model import Adapter, Model, Part, Setup, read_model

__all__ = [
    "Adapter",
    "Card",
    "Layout",
    "Memory",
    "Model",
    "Part",
    "Plan",
    "Profile",
    "Setup",
    "Time",
    "capacity",
    "card",
    "memory",
    "plan",
    "read_model",
    "times",
]
