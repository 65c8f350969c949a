"""bench.steps in small, on the CPU: what they write, what they compare, and how GPU time is taken."""

import pytest
import torch

pytest.importorskip("peft", reason="the rivals need PEFT; `make test` installs it")
pytest.importorskip("transformers", reason="the layers are those of transformers; `make test` installs it")
from bench import decoder, records, steps
from bench.clock import Failures
from tests.test_bench import run

SMALL = "--layers 1 --loss-tokens 4 "
CELL = steps.Cell("tiny", 8, 4)


def test_a_new_optimizer_step_changes_every_norm(monkeypatch):
    """step and micro leave other adapters, of as many norms as there are layers; inference and a gradient do not."""
    ways = small_ways("use_fdora")
    way = ways["use_fdora"]
    calls = {"step": 1, "micro": steps.MICRO, "checkpointing": 1}
    counted = []
    stock = way.gradient
    monkeypatch.setattr(way, "gradient", lambda: (counted.append(1), stock())[1])
    for mode in steps.MODES:
        before, counted[:] = [A.clone() for A in way.As], []
        getattr(way, mode)()
        assert len(counted) == calls.get(mode, 0) and len(way.As) == 7
        assert all(torch.equal(a, -b if mode in calls else b) for a, b in zip(way.As, before, strict=True))
    assert not way.model.checkpointing


def small_ways(*names, given=""):
    options = steps.main.parse([*(SMALL + given).split(), "--ways", ",".join(names)])
    failures = Failures()
    ways = steps.build(CELL, options, failures)
    steps.inputs(CELL, ways, options)
    assert not failures and list(ways) == list(names)
    return ways


def test_with_dropout_results_are_compared_while_nothing_is_dropped():
    """Else no way would agree with another: each draws masks of its own, the same again in a layer that is checkpointed."""
    ways = small_ways("peft_dora", "use_fdora", given="--dropout 0.5")
    assert max(steps.agreement(ways["use_fdora"], ways["peft_dora"]).values()) < 0.1
    for way in ways.values():
        drawn = []
        for seed, way.model.checkpointing in ((0, False), (1, False), (0, True)):
            torch.manual_seed(seed)
            drawn.append(torch.cat([t.flatten() for t in way.gradient()]))
        assert decoder.apart(drawn[1], drawn[0])["relative"] > 0.1 > decoder.apart(drawn[2], drawn[0])["relative"]
        with decoder.timed_as("inference", 0.5, [way.model]):
            assert not way.model.training and torch.equal(way.inference(), way.inference())
        assert way.model.training


@pytest.mark.parametrize(("mode", "left_out"), [("step", 1), ("default:step", 4), ("reduce-overhead:micro", 4)])
def test_what_is_compiled_is_called_until_its_graphs_are_replayed(mode, left_out, monkeypatch):
    """The first call compiles, the two behind it record graphs: none of them is among the turns."""
    (way,) = (ways := small_ways("peft_lora")).values()
    calls = []
    for name in ("step", "micro"):
        monkeypatch.setattr(way, name, lambda name=name: calls.append(name))
    options, failures = steps.main.parse([*SMALL.split(), "--runs", "3"]), Failures()
    (row,) = steps.measure(CELL, ways, mode, None, options, failures)
    timed = mode.rpartition(":")[2]
    assert not failures and calls == ["step"] * left_out + [timed] * row["turns"]


def test_checkpointing_keeps_the_layers_input_alone():
    (way,) = small_ways("use_fdora").values()
    kept = {}
    for checkpointing in (False, True):
        way.model.checkpointing, seen = checkpointing, []
        with torch.autograd.graph.saved_tensors_hooks(lambda t, seen=seen: (seen.append(t), t)[1], lambda t: t):
            way.loss()
        kept[checkpointing] = len(seen)
    assert kept[True] < kept[False] / 3


def test_ways_share_the_frozen_weights():
    ways = small_ways(*steps.WAYS)
    frozen = {p.data_ptr() for p in ways["frozen"].model.parameters()}
    for way in ways.values():
        own = {p.data_ptr() for p in way.leaves.values()}
        assert {p.data_ptr() for p in way.model.parameters()} == frozen | own and not frozen & own
    first, second = (ways[name].leaves for name in ("peft_dora", "use_fdora_fused"))
    assert first.keys() == second.keys() and all(torch.equal(first[n], second[n]) for n in first)


def test_a_wrong_fdora_fails_the_command(tmp_path, monkeypatch):
    stock = steps.adapted

    def spoilt(way, *args):
        model, leaves = stock(way, *args)
        if way == "use_fdora":
            for name, p in leaves.items():
                p.data.mul_(1.5 if name[0] == "B" else 1)
        return model, leaves

    monkeypatch.setattr(steps, "adapted", spoilt)
    with pytest.raises(SystemExit, match=r"fdora parts from PEFT's DoRA in \['.* of use_fdora, tiny, S 8, r 4'.*\]"):
        run(steps, tmp_path, SMALL + "--cells tiny:8:4 --modes inference --ways peft_dora,use_fdora --runs 1")
    assert records.load(tmp_path / "result.json")["agreement"]


def test_turns_fit_the_time(monkeypatch):
    """Five of them, and more where there is time; none of the ways is always the first."""
    seen = []
    monkeypatch.setattr(steps, "once", lambda fn, device: (seen.append(fn), {"a": 10.0, "b": 30.0}[fn])[1])
    fns = {"a": "a", "b": "b"}
    for most_ms, runs, turns in ((0, 9, 5), (0, 1, 1), (239, 9, 5), (250, 9, 6), (1e9, 9, 9), (1e9, 3, 3)):
        seen.clear()
        assert steps.wall(fns, "cpu", most_ms, runs) == ({"a": 10.0, "b": 30.0}, turns)
        assert "".join(seen) == ("abba" * turns)[: 2 * turns]
    assert steps.main.parse([]).runs > steps.LEAST == 5


def test_gpu_time_by_graph_or_by_events(monkeypatch):
    """Without a GPU: what is captured, what falls back, and what a micro-batch is made of."""
    ways = small_ways("frozen", "peft_lora", "peft_dora")
    cost = {"first": 9.0, "gradient": 1.0, "inference": 2.0}

    def capture(fn, launches, anchor):
        if fn.__self__.name == "peft_dora":
            raise RuntimeError("not permitted when stream is capturing")
        return cost[fn.__name__]

    monkeypatch.setattr(steps, "anchor_graph", lambda: None)
    monkeypatch.setattr(steps, "capture", capture)
    monkeypatch.setattr(steps, "replay_ms", lambda graph: graph)
    monkeypatch.setattr(steps, "behind_a_wait", lambda fn, issue_ms: 100 + cost[fn.__name__])
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *args: None)
    options = steps.main.parse([*SMALL.split(), "--runs", "1"])
    failures = Failures()
    found = {}
    for mode in ("inference", "micro"):
        rows = steps.measure(CELL, ways, mode, steps.Gpu(True), options, failures)
        found[mode] = {row["way"]: (row["gpu_ms"], row["gpu_by"]) for row in rows}
    assert found["inference"] == found["micro"] == dict.fromkeys(ways, (102.0, "events"))  # one clock for all of a line
    assert len(failures) == 3 and all("capture" in label and "peft_dora" in label for label in failures)
    failures.clear()
    able = {name: way for name, way in ways.items() if name != "peft_dora"}
    for mode in ("inference", "micro"):
        rows = steps.measure(CELL, able, mode, steps.Gpu(True), options, failures)
        assert [(row["gpu_ms"], row["gpu_by"]) for row in rows] == 2 * [(2.0, "graph")]
    (row,) = steps.measure(CELL, {"frozen": ways["frozen"]}, "inference", steps.Gpu(False), options, failures)
    assert row["gpu_by"] == "events" and not failures


@pytest.mark.parametrize(("mode", "many"), [("reduce-overhead", False), ("whole-reduce-overhead", True)])
def test_a_layer_and_the_whole_stack_can_be_compiled(mode, many, monkeypatch):
    (way,) = small_ways("use_fdora").values()
    want, stock, graphs = way.gradient(), torch.compile, []

    def counting(graph, inputs):
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(steps.torch, "compile", lambda f, mode, dynamic: stock(f, backend=counting, dynamic=dynamic))
    way.compile(mode)
    for a, b in zip(way.gradient(), want, strict=True):
        assert decoder.apart(a, b)["relative"] < 0.05
    assert graphs and (way.run is not torch.nn.Module.__call__) == many
    seen, count = [], len(graphs)
    monkeypatch.setattr(torch.compiler, "cudagraph_mark_step_begin", lambda: seen.append(1))
    way.micro()
    assert len(seen) == steps.MICRO and len(graphs) == count
    way.compile("")
    way.step()
    assert len(seen) == steps.MICRO and way.model.run is way.run is torch.nn.Module.__call__


def test_the_first_micro_batch_finds_new_adapters(monkeypatch):
    """And the others do not: else each of the eight would be charged with norms that one of them computes."""
    (way,) = small_ways("peft_lora").values()
    done = []
    monkeypatch.setattr(way, "gradient", lambda: done.append("gradient"))
    monkeypatch.setattr(way, "optimize", lambda: done.append("optimizer"))
    way.first()
    way.gradient()
    assert done == ["optimizer", "gradient", "gradient"]
