"""Many adapters trained on one base: what goes when (``schedule``), what it takes (``plan``), what runs it (``loop``), and all
of it for a PEFT model (``causal``, whose ``train`` and ``TrainJob`` are here too).

They use the library's public functions at most, and nothing in the library needs them.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fdora.jobs.causal import TrainJob as TrainJob
    from fdora.jobs.causal import train as train


def __getattr__(name: str) -> Any:
    """They are imported when they are asked for: schedules want no tensors."""
    if name in ("TrainJob", "train"):
        from fdora.jobs import causal

        return getattr(causal, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
