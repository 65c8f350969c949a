"""What training adapters takes, before it runs: memory by component, tokens of a microbatch, time, a layout on GPUs.

    python -m fdora.plan --model config.json --adapters 64 --gpu h200 --gpus 2

Pure functions of shapes, from records to records; docs/plan.md explains them. Memory is that of transformers' decoders with
``use_fdora``, in bfloat16.
"""

from fdora.plan.layout import Layout as Layout
from fdora.plan.memory import Memory as Memory
from fdora.plan.memory import capacity as capacity
from fdora.plan.memory import memory as memory
from fdora.plan.model import Model as Model
from fdora.plan.model import Part as Part
from fdora.plan.model import read_model as read_model
from fdora.plan.setup import Adapter as Adapter
from fdora.plan.setup import Setup as Setup
from fdora.plan.time import Card as Card
from fdora.plan.time import Time as Time
from fdora.plan.time import card as card
from fdora.plan.time import times as times
from fdora.plan.whole import Plan as Plan
from fdora.plan.whole import plan as plan
from fdora.plan.work import Profile as Profile

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
