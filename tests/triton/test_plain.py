"""plain.c and its twin in Python: the parameters of plain modules, or None."""

import sys

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

from fdora._plain import python_parameters
from fdora.triton.runtime import private

QUIET = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "forward", "mark")
SPEC = (
    ((), nn.ModuleDict, ()),
    (("base",), nn.Linear, ("weight", "bias")),
    (("parts", "a"), nn.Linear, ("weight",)),
    (("parts", "b"), nn.Identity, ()),
)


class Other(nn.Linear): ...


def made():
    return nn.ModuleDict(
        {"base": nn.Linear(4, 4, bias=False), "parts": nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Identity()})}
    )


def without_weight(m):
    del m["base"]._parameters["weight"]


def not_a_dict(m):
    m["base"].__dict__["_parameters"] = [("weight", None)]


CHANGES = {
    "nothing": lambda m: None,
    "an attribute that is false": lambda m: setattr(m["base"], "mark", []),
    "an attribute that is true": lambda m: setattr(m["base"], "mark", [1]),
    "a hook": lambda m: m["parts"]["a"].register_forward_hook(lambda *_: None),
    "a hook before": lambda m: m["parts"]["b"].register_forward_pre_hook(lambda *_: None),
    "a hook of backward": lambda m: m["base"].register_full_backward_hook(lambda *_: None),
    "a hook before backward": lambda m: m["base"].register_full_backward_pre_hook(lambda *_: None),
    "a hook of the whole": lambda m: m.register_forward_hook(lambda *_: None),
    "a forward of its own": lambda m: setattr(m["parts"]["a"], "forward", lambda x: x),
    "another class": lambda m: setattr(m["parts"]["a"], "__class__", Other),
    "another class of the whole": lambda m: setattr(m, "__class__", type("Mine", (nn.ModuleDict,), {})),
    "another module": lambda m: m["parts"].update({"b": nn.Dropout(0.1)}),
    "no module": lambda m: m["parts"].pop("a"),
    "none on the way": lambda m: m.pop("parts"),
    "None for a module": lambda m: m["parts"]._modules.update({"a": None}),
    "no parameter": without_weight,
    "parameters that are no dict": not_a_dict,
    "a hook of what is on the way": lambda m: m["parts"].register_forward_hook(lambda *_: None),  # nobody calls it
    "another parameter": lambda m: setattr(m["base"], "bias", nn.Parameter(torch.ones(4))),
}
STILL = ("nothing", "an attribute that is false", "a hook of what is on the way", "another parameter")


def of_c(*args):
    module = private.walker()
    assert module is not None, private.why_no_walker
    return module.parameters(*args)


READERS = [
    python_parameters,
    pytest.param(
        of_c,
        marks=pytest.mark.skipif(
            "private.walker() is None", reason="needs a C compiler and torch 2.10; `make test` has torch 2.13"
        ),
    ),
]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("change", CHANGES)
def test_what_is_plain_is_read_and_nothing_else(read, change):
    m = made()
    CHANGES[change](m)
    found = read(m, SPEC, QUIET)
    if change not in STILL:
        assert found is None
        return
    assert type(found) is tuple and len(found) == 3
    for t, wanted in zip(found, (m["base"].weight, m["base"].bias, m["parts"]["a"].weight), strict=True):
        assert t is wanted


@pytest.mark.parametrize("read", READERS)
def test_nothing_is_kept(read):
    m = made()
    parts = [m, m["base"], m["base"].weight, m["parts"]["a"].weight, m["parts"]["b"], m["base"].__dict__]
    before = list(map(sys.getrefcount, parts))
    for _ in range(3):
        read(m, SPEC, QUIET)
        read(m, (*SPEC, (("missing",), nn.Linear, ())), QUIET)
    assert list(map(sys.getrefcount, parts)) == before


@pytest.mark.skipif("private.walker() is None", reason="needs a C compiler and torch 2.10; `make test` has torch 2.13")
def test_what_c_does_not_take():
    with pytest.raises(TypeError, match="path, class, names"):
        of_c(made(), list(SPEC), QUIET)
    assert of_c(made(), ((("base",), nn.Linear, ("weight",) * 40),), QUIET) is None  # more than there is room for
    assert of_c(3, SPEC, QUIET) is None  # no module at all


def test_a_way_that_begins_at_no_module_ends_there():
    with pytest.raises(AttributeError):
        python_parameters(3, SPEC, QUIET)
