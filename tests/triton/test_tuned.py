"""`fdora tune`: what it writes, when that changes a tile, and that nothing else does."""

import json
import os
import warnings
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

from fdora import FdoraError, _tuned, doctor, tune
from fdora.__main__ import main
from fdora.functional import dora_linear, explain
from fdora.triton import search
from fdora.triton.tiles import product
from fdora.triton.tiles.product import Ask, Way, best, product_way, ways_of
from tests import device
from tests.triton.marks import INTERPRETED, needs_kernels  # noqa: F401 (read by the mark)

SHAPE = (4096, 4096, 4096, 64)
HERE, OTHER = (90, 132), (90, 114)
KEPT = (product.product_way, product.fused_config, product.bank_config, product.grouped_config)
KEPT += (_tuned.entries, _tuned.factors_of)


def ask(gpu=HERE, M=4096, forward=True):
    return Ask(M, *SHAPE[1:], forward, False, True, *gpu)


@pytest.fixture(autouse=True)
def file(tmp_path, monkeypatch):
    """What each test's process reads."""
    path = tmp_path / "cache" / "tiles.json"
    monkeypatch.setenv("FDORA_TILES", str(path))
    anew()
    yield path
    anew()


@pytest.fixture
def facts(monkeypatch):
    """What torch says of the GPU."""
    found = type("Facts", (), {"major": 9, "minor": 0, "multi_processor_count": 132})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: found)
    return found


def anew():
    """As in a process that starts now."""
    for choice in KEPT:
        choice.cache_clear()


def plant(file, faster, by, gpu=HERE, made_with=None, forward=True):
    """All but one way of the shape take ``by`` times as long as the model says."""
    factors = {way.name: by for way in ways_of(ask(gpu, forward=forward))} | {faster: 1.0}
    entry = {"made_with": made_with or _tuned.made_with(), "factors": {_tuned.class_of(forward, 4096): factors}}
    _tuned.save(file, _tuned.key_of(*gpu), entry)
    anew()


def second(gpu=HERE):
    return sorted(ways_of(ask(gpu)), key=lambda way: way.us)[1]


def usual(of):
    return min(ways_of(of), key=lambda way: way.us)


def test_a_planted_factor_changes_the_tile_of_its_gpu_alone(file):
    plant(file, second().name, 1.5)
    found = product_way(ask())
    assert (found.kind, found.tile) == (second().kind, second().tile) != usual(ask())[:2]
    assert found.tuned and product_way(ask(OTHER)) == usual(ask(OTHER))
    for M, forward in ((4096, False), (1024, True), (64, True)):  # another direction, class, and tokens that have none
        assert product_way(ask(M=M, forward=forward)) == usual(ask(M=M, forward=forward))
    plant(file, second(OTHER).name, 1.5, OTHER)  # beside the first
    assert product_way(ask(OTHER)).tuned and product_way(ask()).tuned


def test_products_of_banks_and_experts_are_chosen_so_too(file):
    before = product.grouped_config(ask(), 8), product.fused_config(ask())
    plant(file, next(way.name for way in ways_of(ask()) if way.tile and way.tile.BLOCK_M == 64), 5.0)
    after = product.grouped_config(ask(), 8), product.fused_config(ask())
    assert all(a != b and a.BLOCK_M == 64 for a, b in zip(after, before, strict=True))


def test_within_the_noise_nothing_changes(file):
    ratio = second().us / usual(ask()).us
    plant(file, second().name, ratio * 1.02)
    assert product_way(ask()) == usual(ask())
    plant(file, second().name, ratio * 1.04)
    assert product_way(ask()).tuned


def test_only_what_was_measured_is_compared():
    ways = [Way("after", None, 2.0), Way("first", None, 1.0)]
    assert best(ways, {"after": 0.01}) == ways[1] == best(ways, {}) and best(ways, {"first": 50.0}) == ways[1]
    assert best(ways, {"after": 0.4, "first": 1.0}) == ("after", None, 0.8, True)


def test_one_more_tile_has_the_factor_of_the_same_tile():
    for forward in (True, False):
        names = [[way.name for way in ways_of(ask(forward=forward)._replace(extra=extra))] for extra in (False, True)]
        assert names[0] == names[1] and len({*names[0]}) == len(names[0])


def test_without_a_file_the_model_chooses(file):
    """As before there was any: by the shape and the GPU alone."""
    assert not file.exists()
    for M in (65, 300, 512, 2048, 5000):
        for forward in (True, False):
            for gpu in (HERE, (80, 108), (100, 148), (89, 128), (0, 304)):
                of = ask(gpu, M, forward)
                assert product_way(of) == usual(of) and not product_way(of).tuned
    assert _tuned.entries() == {}


@pytest.mark.parametrize("name", ["model", "torch", "triton"])
def test_other_versions_are_not_these(file, name):
    plant(file, second().name, 1.5, made_with=_tuned.made_with() | {name: "0"})
    assert product_way(ask()) == usual(ask())
    assert "run fdora tune again" in _tuned.state(_tuned.key_of(*HERE))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"gpus": []}',
        '{"gpus": {"x": {}}}',
        '{"gpus": {"x": {"made_with": {"torch": "2"}, "factors": {"y": {"z": NaN}}}}}',
        '{"gpus": {"x": {"made_with": {"torch": "2"}, "factors": {"y": {"z": -1}}}}}',
        '{"gpus": {"x": {"made_with": {"torch": "2"}, "factors": {"y": {"z": "1"}}}}}',
        "\xff",
    ],
)
def test_a_broken_file_is_told_of_once(file, text, facts):
    file.parent.mkdir()
    file.write_text(text, encoding="latin-1")
    with pytest.warns(RuntimeWarning, match=r"^fdora\.tune: .*tiles\.json, which is broken.* Delete it") as told:
        assert product_way(ask()) == usual(ask()) and product_way(ask(OTHER)) == usual(ask(OTHER))
    assert len(told) == 1
    assert "broken" in doctor.tiles(torch.device("cuda", 0)).fault
    with pytest.raises(FdoraError, match="broken"):
        _tuned.save(file, "here", {})
    assert file.read_text(encoding="latin-1") == text


def test_a_file_that_cannot_be_read_is_none(file):
    file.mkdir(parents=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert product_way(ask()) == usual(ask())


def test_it_is_read_once(file, monkeypatch):
    plant(file, second().name, 1.5)
    read, load = [], _tuned.load
    monkeypatch.setattr(_tuned, "load", lambda path: read.append(path) or load(path))
    for M in range(3000, 3100):
        product_way(ask(M=M))
        product_way(ask(OTHER, M))
    assert read == [file]


def test_a_write_that_fails_leaves_what_was_there(file, monkeypatch):
    plant(file, second().name, 1.5)
    before = file.read_text()
    for broken in ("replace", "write"):
        with monkeypatch.context() as patch, pytest.raises(OSError, match="no room"):
            if broken == "replace":
                patch.setattr(os, "replace", no_room)
            else:
                patch.setattr(Path, "write_text", lambda path, text: path.write_bytes(b"half") and no_room())
            _tuned.save(file, "here", {"made_with": _tuned.made_with(), "factors": {}})
        assert file.read_text() == before and [*file.parent.iterdir()] == [file]
    _tuned.save(file, "here", {"made_with": _tuned.made_with(), "factors": {}})
    assert [*json.loads(file.read_text())["gpus"]] == [_tuned.key_of(*HERE), "here"]


def no_memory(*_):
    raise torch.cuda.OutOfMemoryError


def no_room(*_):
    raise OSError("no room")


def test_where_it_is(monkeypatch, tmp_path):
    for named in ("", "0"):
        monkeypatch.setenv("FDORA_TILES", named)
        assert _tuned.place() is None and "FDORA_TILES says nothing" in _tuned.state(_tuned.key_of(*HERE))
    monkeypatch.delenv("FDORA_TILES")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert _tuned.place() == tmp_path / "fdora" / "tiles.json"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert _tuned.place() == tmp_path / ".cache" / "fdora" / "tiles.json"


@pytest.mark.parametrize("forward", [True, False])
def test_explain_names_it(file, forward):
    """In the plan of this direction, whichever way it is."""
    W, A, B, m = (torch.empty(*s, dtype=torch.bfloat16, device="meta") for s in ((4096, 4096), (64, 4096), (4096, 64), (4096,)))
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)

    def said():
        return explain(dora_linear, x, W, A, B, m, s=2.0, norm=m.float(), gpu="h200").plans

    names = [way.name for way in ways_of(ask(forward=forward))]
    assert str(file) not in str(said()) and {"after"} < {*names}
    for name in {*names} - {usual(ask(forward=forward)).name}:
        plant(file, name, 5.0, forward=forward)
        assert [f", which {file} says is faster" in plan.path for plan in said()] == [forward, not forward]


def test_doctor_names_it(file, facts):
    plant(file, second().name, 1.5)
    line = doctor.tiles(torch.device("cuda", 0))
    assert line == ("tiles", f"tuned by {file}", "")
    facts.multi_processor_count = 114
    assert doctor.tiles(torch.device("cuda", 0)).text.endswith("says nothing of this GPU")


# the command


@pytest.fixture
def refused(capsys):
    """Runs it, which ends with status 2; what it says."""

    def run():
        with pytest.raises(SystemExit) as stopped:
            main(["tune"])
        assert stopped.value.code == 2
        return capsys.readouterr().err

    return run


def test_it_refuses_without_a_gpu(file, refused, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    said = refused()
    assert said.count("\n") == 1 and "an NVIDIA GPU" in said and not file.exists()


def test_it_wants_a_place(refused, monkeypatch):
    monkeypatch.setenv("FDORA_TILES", "0")
    assert "`--out` must be a file" in refused()


@pytest.fixture
def gpu(monkeypatch, facts):
    """A GPU whose kernels take as long as ``us`` says: of a shape, a direction and a way. Yields ``us`` to change."""
    of = {"us": lambda shape, forward, way: way.us}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a GPU")
    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(tune, "select_backend", lambda *_: type("Choice", (), {"name": "triton"}))
    monkeypatch.setattr(search, "device_of", lambda _: type("On", (), {"capability": 90, "num_sms": 132}))
    monkeypatch.setattr(search, "compile_ahead", no_room)  # what fails there is no end of it
    monkeypatch.setattr(search, "on_gpu", lambda: None)
    monkeypatch.setattr(search, "operands", lambda shape, forward, device: shape)
    monkeypatch.setattr(
        search, "timed", lambda shape, forward, ways, timer: {w.name: of["us"](shape, forward, w) for w in ways}
    )
    return of


def test_where_the_model_is_right_nothing_changes(file, gpu, capsys):
    assert main(["tune"]) == 0
    out = capsys.readouterr().out
    assert out.count(" 16 shapes; the choice of 0 changes, before / after 1.000: left as it is\n") == 6
    (entry,) = _tuned.load(file).values()
    assert entry == {"name": "a GPU", "made_with": _tuned.made_with(), "factors": {}}
    assert _tuned.state(_tuned.key_of(*HERE)) == f"as fdora has them; {file} found nothing faster"
    assert product_way(ask()) == usual(ask())


def test_a_gpu_that_is_slow_at_one_tile_gets_others(file, gpu, capsys):
    """All of it is half as fast, which changes nothing, and one tile of forward is slower still."""
    slow = usual(ask()).name
    gpu["us"] = lambda shape, forward, way: 2 * way.us * (1.3 if forward and way.name == slow else 1)
    assert main(["tune"]) == 0
    found = _tuned.load(file)[_tuned.key_of(*HERE)]["factors"]
    assert "forward from 2049 tokens" in found and not [of for of in found if of.startswith("backward")]
    assert found["forward from 2049 tokens"][slow] == 2.6 and found["forward from 2049 tokens"]["after"] == 2.0
    assert product_way(ask()).tuned and product_way(ask()).name != slow
    assert main(["tune", "--out", str(file.parent / "other.json")]) == 0
    assert f"FDORA_TILES={file.parent / 'other.json'}" in capsys.readouterr().out


def test_what_is_true_of_one_shape_alone_is_not_taken(file, gpu):
    """Factors are judged by shapes that they have not seen: times that are another way's each time promise nothing."""
    shapes = tune.shapes()

    def us(shape, forward, way):
        names = [each.name for each in search.candidates(shape, forward)]
        return way.us * (0.5 if names.index(way.name) == shapes.index(shape) // 3 % len(names) else 1.0)

    gpu["us"] = us
    assert main(["tune"]) == 0 and not _tuned.load(file)[_tuned.key_of(*HERE)]["factors"]


def row(us):
    ways = [Way("first", None, 1.0), Way("after", None, 1.05)]
    return tune.Row("a class", ways, {"first": 1.0, "after": us})


def test_no_shape_is_judged_by_its_own_time():
    """What the first makes of the others is a loss for them, and they make nothing of it."""
    assert tune.gains_of([row(0.1), row(1.05), row(1.05)]) == pytest.approx([1 / 1.05] * 2)
    assert tune.adopted([row(0.1)] + [row(1.05) for _ in range(4)]) == {}


def test_few_shapes_prove_nothing(capsys):
    assert tune.adopted([row(0.8) for _ in range(3)]) == {} and "3 shapes; the choice of 3 changes" in capsys.readouterr().out
    assert tune.adopted([row(0.8) for _ in range(4)]) == {"a class": {"after": 0.7619, "first": 1.0}}
    assert tune.adopted([row(us) for us in (0.94, 1.0, 0.94, 1.0)]) == {}  # a choice that changes, and is not faster


def test_a_gpu_on_which_nothing_runs(file, gpu, refused, monkeypatch):
    monkeypatch.setattr(search, "timed", lambda *_: {})
    assert "fdora doctor" in refused() and not file.exists()


def test_shapes_are_in_turns():
    found = tune.shapes()
    assert len(set(found)) == len(found) == 48
    assert [_tuned.class_of(True, M) for M, *_ in found[:4]] == [
        "forward from 65 tokens",
        "forward from 513 tokens",
        "forward from 2049 tokens",
        "forward from 65 tokens",
    ]


def test_the_time_ends_the_search():
    """A clock that each product moves by ten seconds: none begins that might not end in time. What finds no memory is no row."""
    now = [0.0]

    def one(case):
        now[0] += 10
        if case == 1:
            raise torch.cuda.OutOfMemoryError
        return case

    assert tune.within(45, [(i,) for i in range(9)], one, lambda: now[0]) == [0, 2, 3]


@needs_kernels
@pytest.mark.parametrize("forward", [True, False])
def test_ways_are_planned_and_compared(forward, monkeypatch):
    """With a clock that counts."""
    shape, asked = (80, 48, 64, 16), []
    ways, sets = search.candidates(shape, forward), search.operands(shape, forward, device.NAME, torch.float16)

    def timer(fn, launches):
        asked.append(launches)
        fn()
        return lambda: len(asked)

    us = search.timed(sets, forward, ways, timer)
    assert set(us) == {way.name for way in ways} and all(1 <= n <= 50 for n in asked) and len(asked) == len(ways)
    lost = Way("fused", ways[0].tile._replace(BLOCK_K=24), 1.0)  # no power of two
    assert set(search.timed(sets, forward, [lost, ways[0]], timer)) == {ways[0].name}
    with pytest.raises(torch.cuda.OutOfMemoryError):
        search.timed(sets, forward, ways, no_memory)
    monkeypatch.setattr(search, "exact", lambda of, forward: torch.ones(80, 64 if forward else 48, device=device.NAME))
    with pytest.raises(ArithmeticError, match="is wrong by"):
        search.timed(sets, forward, ways[:1], timer)
