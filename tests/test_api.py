"""The public surface: what modules export and nothing else, docstrings with every part, and where moved ones are."""

import importlib
import inspect

import pytest

import fdora
import fdora.functional as F

SECTIONS = ("Args:", "Returns:", "Raises:", "Memory:", "References:")
# Their names and signatures are those on docs/api.md, which tests/test_docs.py compares: a change is a decision, made there.
MODULES = ("functional", "quant", "convert", "jobs.schedule", "jobs.plan", "jobs.loop", "jobs.causal")
# Whose functions, by how their names begin, have every part in their docstring.
DESCRIBED = {"functional": "dora_", "quant": "", "jobs.causal": ""}


def public(module):
    return importlib.import_module(f"fdora.{module}")


EVERY = [(module, name) for module in DESCRIBED for name in public(module).__all__]


def test_names():
    for module in MODULES:
        there = {n for n, v in vars(public(module)).items() if not n.startswith("_") and not inspect.ismodule(v)}
        assert there == set(public(module).__all__), module
    assert sorted(fdora.__all__) == ["FdoraError", "__version__", "backend"]
    assert all(getattr(fdora, name) is getattr(F, name) for name in F.__all__)
    with pytest.raises(AttributeError, match="module 'fdora' has no attribute 'dora_all'"):
        fdora.dora_all
    assert all(getattr(public("jobs"), name) is getattr(public("jobs.causal"), name) for name in ("train", "TrainJob"))
    with pytest.raises(AttributeError, match=r"module 'fdora\.jobs' has no attribute 'trains'"):
        public("jobs").trains


@pytest.mark.parametrize(("module", "name"), [(m, n) for m, n in EVERY if n.islower() and n.startswith(DESCRIBED[m])])
def test_docstrings_have_every_part_in_order(module, name):
    doc, signature = (of(getattr(public(module), name)) for of in (inspect.getdoc, inspect.signature))
    assert "``" in doc.splitlines()[0] or "``" in doc.split("\n\n")[1], "no formula at the top"
    at = [doc.find(section) for section in SECTIONS]
    assert -1 not in at and at == sorted(at), dict(zip(SECTIONS, at, strict=True))
    for parameter in signature.parameters:
        assert f"{parameter}:" in doc or f"{parameter}," in doc or f", {parameter}" in doc, f"{parameter} is not described"


@pytest.mark.parametrize(("old", "new"), [("schedule", "schedule"), ("plan", "plan"), ("train", "loop")])
def test_what_moved_says_where_it_is(old, new):
    for module in (f"fdora.{old}", f"fdora.{old}.records"):
        with pytest.raises(ImportError, match=rf"^fdora\.{old} is now fdora\.jobs\.{new}: import that"):
            importlib.import_module(module)
