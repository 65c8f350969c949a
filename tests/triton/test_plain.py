"""plain.c and its twins in Python: what layers are called with, as long as they are as they were."""

import sys
import weakref

import pytest
import torch
from torch import nn

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

from fdora._facts import python_places
from fdora._plain import Entry, Names, Route, python_follow, python_operands, python_unchanged
from fdora.triton.runtime import private

QUIET = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "forward", "mark")
NAMES = Names("variants", "active", QUIET)
ENTRIES = (
    Entry((), nn.ModuleDict, (), (("off", False), ("merged", []), ("scaling", {"a": 2.0}))),
    Entry(("base",), nn.Linear, ("weight", "bias")),
    Entry(("parts", "a"), nn.Linear, ("weight",)),
    Entry(("parts", "b"), nn.Identity, ()),
)
IN_C = pytest.mark.skipif("private.walker() is None", reason="needs a C compiler and torch 2.10; `make test` has torch 2.13")


class Other(nn.Linear): ...


class Variant:
    def __init__(self, entries=ENTRIES, name="a", size=3):
        self.route = Route(name, 2.0, entries, size)


def made():
    layer = nn.ModuleDict(
        {"base": nn.Linear(4, 4, bias=False), "parts": nn.ModuleDict({"a": nn.Linear(4, 2), "b": nn.Identity()})}
    )
    layer.off, layer.merged, layer.scaling = False, [], {"a": 2.0}
    layer.variants, layer.active = {"a": Variant()}, "a"
    return layer


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
    "switched off": lambda m: setattr(m, "off", True),
    "merged": lambda m: m.merged.append("a"),
    "another scale": lambda m: m.scaling.update(a=3.0),
    "an attribute less": lambda m: delattr(m, "scaling"),
    "the name in a list": lambda m: setattr(m, "active", ["a"]),
    "several active": lambda m: setattr(m, "active", ["a", "b"]),
    "another active": lambda m: setattr(m, "active", "b"),
    "an equal name": lambda m: setattr(m, "active", bytes([97]).decode()),
    "a route of another adapter": lambda m: setattr(m.variants["a"], "route", Route("b", 2.0, ENTRIES, 3)),
    "no route": lambda m: setattr(m.variants["a"], "route", None),
    "a variant without routes": lambda m: m.variants.update(a=nn.Identity()),
    "no variants": lambda m: delattr(m, "variants"),
    "a call that is shared": lambda m: setattr(m.variants["a"], "shared", object()),
    "a call that is shared no more": lambda m: setattr(m.variants["a"], "shared", None),
}
STILL = (
    "nothing",
    "an attribute that is false",
    "a hook of what is on the way",
    "another parameter",
    "the name in a list",
    "an equal name",
    "a call that is shared no more",
)
ALONE = {"a hook of the whole": True, "a call that is shared": False}  # what is still so, called alone or with others


def in_c(name):
    def call(*args):
        module = private.walker()
        assert module is not None, private.why_no_walker
        return getattr(module, name)(*args)

    return pytest.param(call, marks=IN_C)


FOLLOW = [python_follow, in_c("follow")]


@pytest.mark.parametrize("follow", FOLLOW)
@pytest.mark.parametrize("change", CHANGES)
def test_a_route_leads_to_what_it_led_to_and_nowhere_else(follow, change):
    m = made()
    CHANGES[change](m)
    for alone in (False, True):
        found = follow((made(), m), NAMES, alone)
        if change not in STILL and alone is not ALONE.get(change):
            assert found is None
            continue
        (_, before), (variant, s, *tensors) = [found[0][:2], found[1]]
        assert (before, s) == (2.0, 2.0) and variant is m.variants["a"] and len(tensors) == 3
        for t, wanted in zip(tensors, (m["base"].weight, m["base"].bias, m["parts"]["a"].weight), strict=True):
            assert t is wanted


@pytest.mark.parametrize("follow", FOLLOW)
def test_nothing_is_kept(follow):
    m, lost = made(), made()
    lost.variants["a"].route = Route("a", 2.0, (*ENTRIES, Entry(("missing",), nn.Linear, ())), 3)
    parts = [m, m["base"], m["base"].weight, m["parts"]["a"].weight, m["parts"]["b"], m["base"].__dict__, m.variants["a"]]
    parts += [lost["base"].weight, lost.variants["a"], lost.variants["a"].route, None]
    before = list(map(sys.getrefcount, parts[:-1]))
    for _ in range(3):
        assert follow((m,), NAMES, True) is not None
        assert follow((m, lost), NAMES, True) is None
    assert list(map(sys.getrefcount, parts[:-1])) == before


@IN_C
def test_what_c_does_not_take():
    follow, unchanged = private.walker().follow, private.walker().unchanged
    with pytest.raises(TypeError, match="tuple of layers"):
        follow([made()], NAMES, True)
    with pytest.raises(TypeError, match="names of their attributes"):
        follow((made(),), QUIET, True)
    m = made()
    for size in (2, 4):  # of another number of parameters than it says
        m.variants["a"].route = Route("a", 2.0, ENTRIES, size)
        assert follow((m,), NAMES, True) is None
    assert follow((3,), NAMES, True) is None  # no module at all
    with pytest.raises(TypeError, match="and a place"):
        unchanged((torch.ones(1),), (), (), 0)
    one = torch.ones(1)
    for known in (((), [2.0], (), [one]), ((one,) * 3, [2.0], (0,) * 3, (one,)), ((one,) * 3, [2.0], (0,) * 3, [])):
        with pytest.raises(TypeError, match="of the layers of a model"):
            private.walker().operands(one, [], None, *known)


@pytest.mark.parametrize("unchanged", [python_unchanged, in_c("unchanged")])
def test_tensors_that_are_those_of_before(unchanged):
    a, b, c, d = (torch.ones(2) for _ in range(4))
    known = tuple(map(weakref.ref, (a, b, c, d)))  # two layers: a and c, b and d
    assert unchanged((a, c), known, (0,) * 4, 0) and unchanged((b, d), known, (0,) * 4, 1)
    assert not unchanged((b, d), known, (0,) * 4, 0) and not unchanged((a, b), known, (0,) * 4, 0)
    before = [sys.getrefcount(t) for t in (a, b)]
    d.add_(1)
    assert not unchanged((b, d), known, (0,) * 4, 1) and unchanged((b, d), known, (0, 0, 0, 1), 1)
    with torch.inference_mode():
        e = torch.ones(2)
    with pytest.raises(RuntimeError, match="version"):  # none was among those that the table was made from
        unchanged((e,), (weakref.ref(e),), (0,), 0)
    assert [sys.getrefcount(t) for t in (a, b)] == before
    del a
    assert not unchanged((b, d), known, (0,) * 4, 0) and not unchanged((None, c), known, (0,) * 4, 0)


class Holder:
    def __init__(self, **facts):
        self.__dict__.update(facts)


def known_of(n):
    """A model of n layers as (norms, what was found of each, what is known of all)."""
    norms = Holder()
    tensors = [[torch.ones(2) for _ in range(5)] for _ in range(n)]
    found = [(Holder(kept=Holder(norms=norms, place=i)), 2.0 + i, *each) for i, each in enumerate(tensors)]
    all_refs = tuple([weakref.ref(each[j]) for j in range(3) for each in tensors])
    return norms, found, [all_refs, [2.0 + i for i in range(n)], (0,) * (3 * n), [torch.full((2,), i) for i in range(n)]]


OTHERS = {
    "another s": lambda a, b: (a[0], 3.0, *a[2:]),
    "another W": lambda a, b: (*a[:2], torch.ones(2), *a[3:]),
    "no W": lambda a, b: (*a[:2], None, *a[3:]),
    "another A": lambda a, b: (*a[:3], b[3], *a[4:]),
    "another B": lambda a, b: (*a[:4], b[4], *a[5:]),
    "of another model": lambda a, b: (Holder(kept=Holder(norms=None, place=0)), *a[1:]),
    "of none": lambda a, b: (Holder(kept=Holder(norms=a[0].kept.norms, place=-1)), *a[1:]),
    "beyond the last": lambda a, b: (Holder(kept=Holder(norms=a[0].kept.norms, place=3)), *a[1:]),
}
OPERANDS = [python_operands, in_c("operands")]


@pytest.mark.parametrize("operands", OPERANDS)
def test_operands_with_the_norms_of_their_model(operands):
    norms, found, known = known_of(3)
    x, c = torch.ones(3), known[-1]
    parts = [x, *[t for each in found for t in each], *c]
    before = list(map(sys.getrefcount, parts))
    assert operands(x, found[:1], Holder(), *known) is None
    for at in ([0], [2], [1, 2, 0]):
        out = operands(x, [found[i] for i in at], norms, *known)
        wanted = [id(x)]
        for i in at:
            wanted += [*map(id, found[i][2:6]), id(c[i]), id(found[i][6]), id(None)]
        assert type(out) is tuple and list(map(id, out)) == wanted
    del out
    assert list(map(sys.getrefcount, parts)) == before


@pytest.mark.parametrize("operands", OPERANDS)
@pytest.mark.parametrize("change", OTHERS)
def test_no_operands_of_another_layer(operands, change):
    norms, found, known = known_of(3)
    assert operands(found[0][2], [found[0], OTHERS[change](*found[:0:-1])], norms, *known) is None


@pytest.mark.parametrize("operands", OPERANDS)
@pytest.mark.parametrize("place", (2, 3, 4))
def test_no_operands_that_were_written_to(operands, place):
    norms, found, known = known_of(3)
    assert operands(None, found[:1], norms, *known) is not None
    found[0][place].add_(1)
    assert operands(None, found[:1], norms, *known) is None


@pytest.mark.parametrize("places", [python_places, in_c("places")])
def test_where_tensors_lie(places):
    a, b = torch.ones(2, 3), torch.ones(4)
    known = tuple(map(weakref.ref, (a, b)))
    before = [sys.getrefcount(t) for t in (a, b)]
    (tensors, key, versions), again = places(known), places(known)
    assert tensors[0] is a and tensors[1] is b and versions == (0, 0) and again[1] == key
    a.add_(1)
    assert places(known)[1:] == (key, (1, 0))
    for change in (
        lambda a, b: a.t_(),
        lambda a, b: setattr(b, "data", torch.ones(4)),
        lambda a, b: setattr(b, "data", torch.ones(5)),
    ):
        change(a, b)
        now = places(known)[1]
        assert now != key
        key = now
    del tensors, again
    assert [sys.getrefcount(t) for t in (a, b)] == before
    del a
    assert places(known) is None
