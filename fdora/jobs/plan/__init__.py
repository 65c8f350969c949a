"""What training adapters takes, before it runs: memory by component, tokens of a microbatch, time, a layout on GPUs.

    python -m fdora.jobs.plan --model config.json --adapters 64 --gpu h200 --gpus 2

Pure functions of shapes, from records to records; docs/plan.md explains them. Memory is that of transformers' decoders with
``use_fdora``, in bfloat16.
"""

from fdora.jobs.plan.layout import Layout as Layout
from fdora.jobs.plan.memory import Memory as Memory
from fdora.jobs.plan.memory import capacity as capacity
from fdora.jobs.plan.memory import memory as memory
from fdora.jobs.plan.model import Model as Model
from fdora.jobs.plan.model import Part as Part
from fdora.jobs.plan.model import read_model as read_model
from fdora.jobs.plan.setup import Adapter as Adapter
from fdora.jobs.plan.setup import Setup as Setup
from fdora.jobs.plan.time import Card as Card
from fdora.jobs.plan.time import Time as Time
from fdora.jobs.plan.time import card as card
from fdora.jobs.plan.time import times as times
from fdora.jobs.plan.whole import Plan as Plan
from fdora.jobs.plan.whole import plan as plan
from fdora.jobs.plan.work import Profile as Profile

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
