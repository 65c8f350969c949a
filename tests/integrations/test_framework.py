"""What every file for a framework does without the framework, and the methods that are set aside. Nothing but PEFT is needed."""

import copy
import importlib
import sys
import types
from importlib import metadata

import pytest
from torch import nn

from fdora import FdoraError
from fdora.integrations import _framework
from fdora.integrations._framework import need, put_back, set_aside
from tests.process import python

PACKAGES = {
    "axolotl": "axolotl",
    "swift": "ms-swift",
    "llamafactory": "llamafactory",
    "unsloth": "unsloth",
    "peft": "peft",
    "torchtune": "torchtune",
}


@pytest.mark.parametrize("have", [None, "0.0.1"])
@pytest.mark.parametrize("name", PACKAGES)
def test_absent_or_too_old(name, have, monkeypatch):
    def version(package):
        assert package == PACKAGES[name]
        if have is None:
            raise metadata.PackageNotFoundError(package)
        return have

    monkeypatch.setattr(_framework, "version", version)
    before = sys.modules.pop(f"fdora.integrations.{name}", None)
    loaded = set(sys.modules)
    with pytest.raises(FdoraError) as caught:
        importlib.import_module(f"fdora.integrations.{name}")
    said = str(caught.value)
    assert said.startswith(f"fdora.integrations.{name}: `{PACKAGES[name]}` must be ") and said.count("\n") == 0
    assert (f"got {have}. " in said) if have else ("got none, it is not installed. " in said)
    assert f"pip install '{PACKAGES[name]}>=" in said
    assert name not in set(sys.modules) - loaded and f"fdora.integrations.{name}" not in sys.modules
    if before is not None:
        sys.modules[f"fdora.integrations.{name}"] = before


@pytest.mark.parametrize("name", PACKAGES)
def test_in_an_environment_with_torch_alone(name):
    """Neither the framework nor PEFT nor what they bring."""
    code = (
        "import importlib.metadata, sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('peft', 'packaging', 'transformers', 'torchao', 'torchtune'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}')\n"
        "sys.meta_path.insert(0, Absent())\n"
        "def version(name):\n"
        "    raise importlib.metadata.PackageNotFoundError(name)\n"
        "importlib.metadata.version = version\n"
        "import fdora\n"
        "try:\n"
        f"    import fdora.integrations.{name}\n"
        "except fdora.FdoraError as error:\n"
        "    print(error)\n"
    )
    done = python("-c", code)
    assert f"`{PACKAGES[name]}` must be " in done.stdout and "not installed" in done.stdout, done.stderr


@pytest.mark.parametrize(
    ("least", "have", "fine"), [("0.18.0", "0.18.0", True), ("0.18.0", "0.9.9", False), ("1.0", "1.1.dev0", True)]
)
def test_versions_are_compared_as_versions(least, have, fine, monkeypatch):
    monkeypatch.setattr(_framework, "version", lambda package: have)
    if fine:
        return need("x", "x", least)
    with pytest.raises(FdoraError, match=f"must be {least} or newer, got {have}"):
        need("x", "x", least)


def test_set_aside_and_put_back():
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    first, second = model
    first.forward = types.MethodType(lambda self, x: x + 1, first)
    second.apply_o = theirs = types.MethodType(lambda self, x: x + 2, second)
    before = [dict(layer.__dict__) for layer in model]
    set_aside(first, "forward")
    set_aside(second, "apply_o", types.MethodType(lambda self, x: x + 3, second))
    assert "forward" not in first.__dict__ and first.forward.__func__ is nn.Linear.forward
    assert second.apply_o(0) == 3 and theirs(0) == 2
    other = copy.deepcopy(model)
    for _ in range(2):
        put_back(model)
        assert [dict(layer.__dict__) for layer in model] == before
    assert other[1].apply_o(0) == 3 and other[1].apply_o.__self__ is other[1]
    put_back(other)
    assert other[1].apply_o(0) == 2 and other[0].forward.__self__ is other[0]
