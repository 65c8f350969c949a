"""What the files for whole frameworks share: one sentence when a framework is absent, and methods set aside on an instance."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

from torch import nn

from fdora import FdoraError

_KEPT = "_fdora_set_aside"


def need(integration: str, package: str, least: str) -> None:
    """Raise unless the package is installed and not older than that. Imports nothing."""
    try:
        have = version(package)
    except PackageNotFoundError:
        have, older = "none, it is not installed", True
    else:
        from packaging.version import Version  # here: torch alone does not bring it

        older = Version(have) < Version(least)
    if older:
        raise FdoraError(
            f"fdora.integrations.{integration}: `{package}` must be {least} or newer, got {have}. "
            f"pip install '{package}>={least}'."
        )


def set_aside(module: nn.Module, name: str, instead: Any = None) -> None:
    """Take a method off this instance, so that its class's is found again, or put another in its place."""
    method = module.__dict__.pop(name)
    module.__dict__.setdefault(_KEPT, {})[name] = method
    if instead is not None:
        module.__dict__[name] = instead


def put_back(model: nn.Module) -> None:
    """Undo :func:`set_aside` everywhere in the model."""
    for module in model.modules():
        module.__dict__.update(module.__dict__.pop(_KEPT, {}))
