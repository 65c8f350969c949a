"""fdora: DoRA as stateless functions. The public functions live in :mod:`fdora.functional`."""

from fdora._check import FdoraError as FdoraError
from fdora._dispatch import backend as backend

__version__ = "0.1.0.dev0"
__all__ = ["FdoraError", "__version__", "backend"]
