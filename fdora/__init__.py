"""fdora: DoRA as stateless functions, those of :mod:`fdora.functional`: ``from fdora import dora_linear`` imports them."""

import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

with warnings.catch_warnings():  # torch's own, where NumPy is not installed: it would stand above what each command says
    warnings.filterwarnings("ignore", "Failed to initialize NumPy")
    from fdora._check import FdoraError as FdoraError
    from fdora._dispatch import backend as backend

if TYPE_CHECKING:
    from fdora.functional import *  # noqa: F403

__version__ = "0.1.0.dev0"
__all__ = ["FdoraError", "__version__", "backend"]


def __getattr__(name: str) -> Any:
    """A public name of :mod:`fdora.functional`, which is imported with the first of them. No module is called like these."""
    if name.startswith("dora_") or name[0].isupper() or name in ("explain", "select_backend"):
        import fdora.functional as functional

        if name in functional.__all__:
            return getattr(functional, name)
    if name == "warmup":  # of a shim, which imports this package
        return getattr(import_module("fdora.integrations.peft"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
