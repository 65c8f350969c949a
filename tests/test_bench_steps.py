"""bench.steps in small, on the CPU: what they write, what they compare, and how GPU time is taken."""

import argparse
import contextlib

import pytest
import torch

pytest.importorskip("peft", reason="the rivals need PEFT; `make test` installs it")
pytest.importorskip("transformers", reason="the layers are those of transformers; `make test` installs it")
from bench import all as everything
from bench import converge, decoder, records, steps
from bench.clock import Failures

SMALL = "--layers 1 --loss-tokens 4 "
CELL = steps.Cell("tiny", 8, 4)


def run(command, tmp_path, options):
    path = tmp_path / "result.json"
    command.main([*(SMALL + options).split(), "--json", str(path), "--commit", "abc"])
    result = records.load(path)
    assert result["about"]["commit"] == "abc" and result["failed"] == {}
    return result


def test_steps(tmp_path, capsys):
    result = run(steps, tmp_path, "--cells tiny:8:4,tiny:16:4 --runs 1 --cell-seconds 0")
    rows = result["rows"]
    assert [row["way"] for row in rows] == 2 * len(steps.MODES) * list(steps.WAYS)
    assert [row["mode"] for row in rows[:: len(steps.WAYS)]] == 2 * list(steps.MODES)
    assert all(
        row["ms"] > 0 and row["compiled"] == "" and row["dropout"] == 0 and "gpu_ms" not in row and row["turns"] == 1
        for row in rows
    )
    assert (result["runs"], result["cell_seconds"]) == (1, 0)
    assert result["about"]["arguments"] == f"{SMALL}--cells tiny:8:4,tiny:16:4 --runs 1 --cell-seconds 0"
    assert {(row["model"], row["S"], row["r"]) for row in rows} == {("tiny", 8, 4), ("tiny", 16, 4)}
    ((where, found),) = result["agreement"].items()
    assert where == "tiny, S 8, r 4" and set(found) == set(steps.FDORA)
    for each in found.values():
        assert set(each["apart"]) == {"y", "dx", "dA", "dB", "dm"} and 0 < max(each["apart"].values()) < 0.1
        assert set(each["paths"]) == {"fused"}
    out = capsys.readouterr().out
    last = out[out.index("Wall / GPU") :].splitlines()
    assert last[2] == "|  | mode | frozen | peft_lora, ms | peft_dora | use_fdora | use_fdora_fused | GPU by |"
    assert len([line for line in last if line.startswith("| tiny")]) == 2 * len(steps.MODES)


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
        run(steps, tmp_path, "--cells tiny:8:4 --modes inference --ways peft_dora,use_fdora --runs 1")
    assert records.load(tmp_path / "result.json")["agreement"]


def test_a_fdora_that_does_not_run_fails_the_command(tmp_path, monkeypatch):
    def broken(*args):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(steps.Way, "step", broken)
    with pytest.raises(SystemExit, match="out of luck"):
        steps.main([*SMALL.split(), "--cells", "tiny:8:4", "--modes", "step", "--ways", "peft_lora,use_fdora"])


def test_compiled(tmp_path, monkeypatch):
    """Which modes are compiled, each way by itself; nothing is traced here."""
    modes = []
    monkeypatch.setattr(
        steps.torch, "compile", lambda f, mode, dynamic: (modes.append((f.__code__.co_name, mode, dynamic)), f)[1]
    )
    options = "--cells tiny:8:4 --no-eager --ways peft_lora,use_fdora --runs 1 --compiled "
    result = run(steps, tmp_path, options + ",".join(steps.COMPILED))
    kinds = dict.fromkeys((row["compiled"], row["mode"]) for row in result["rows"])
    plain = ("inference", "step", "micro")
    asked = dict.fromkeys(("default", "reduce-overhead"), plain)
    asked |= dict.fromkeys(("whole", "whole-reduce-overhead", "whole-max-autotune", "whole-dynamic"), (*plain, "checkpointing"))
    assert list(kinds) == [(compiled, mode) for compiled, some in asked.items() for mode in some]
    assert all(row["first_ms"] > 0 for row in result["rows"])
    asked = [(mode, False) for mode in ("default", "reduce-overhead") * 2] + [("max-autotune", False), ("default", True)]
    assert modes == [(f"forward_{way}", *how) for how in asked for way in ("peft_lora", "use_fdora")]


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


def test_out_of_time(tmp_path, monkeypatch):
    result = run(steps, tmp_path, "--cells tiny:8:4 --seconds 0")
    monkeypatch.setitem(everything.TABLE, "steps", everything.Entry(0, f"bench.steps {SMALL}--cells tiny:8:4"))
    assert result["rows"] == [] and result["skipped"] == [{"model": "tiny", "S": 8, "r": 4}]
    lines = records.read(tmp_path / "result.json")["result"]
    assert everything.lacking("steps", lines, "abc") == "some cases were not started"


def test_cells():
    assert len(steps.cells("")) == 16 and steps.main.parse([]).cells == steps.cells("")
    assert steps.cells("2048::16") == [("2048", S, 16) for S in (128, 512, 2048, 4096)]
    assert steps.cells("8b:4096:64,8b:4096:64,tiny:8:2") == [("8b", 4096, 64), ("tiny", 8, 2)]
    with pytest.raises(argparse.ArgumentTypeError, match="unknown models 7b"):
        steps.cells("7b:1:1")
    for text in ("--modes forward", "--ways fdora", "--compiled fast"):
        with pytest.raises(SystemExit):
            steps.main.parse(text.split())


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


def test_the_first_micro_batch_finds_new_adapters(monkeypatch):
    """And the others do not: else each of the eight would be charged with norms that one of them computes."""
    (way,) = small_ways("peft_lora").values()
    done = []
    monkeypatch.setattr(way, "gradient", lambda: done.append("gradient"))
    monkeypatch.setattr(way, "optimize", lambda: done.append("optimizer"))
    way.first()
    way.gradient()
    assert done == ["optimizer", "gradient", "gradient"]


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
    where = f"{CELL.model}, S {CELL.S}, r {CELL.r}"
    reason = "RuntimeError: not permitted when stream is capturing"
    parts = ("", "first, ", "gradient, ")
    labels = [f"capture of {part}peft_dora, {where}, {'micro' if part else 'inference'}" for part in parts]
    assert failures == dict.fromkeys(labels, reason)
    failures.clear()
    able = {name: way for name, way in ways.items() if name != "peft_dora"}
    for mode in ("inference", "micro"):
        rows = steps.measure(CELL, able, mode, steps.Gpu(True), options, failures)
        assert [(row["gpu_ms"], row["gpu_by"]) for row in rows] == 2 * [(2.0, "graph")]
    (row,) = steps.measure(CELL, {"frozen": ways["frozen"]}, "inference", steps.Gpu(False), options, failures)
    assert row["gpu_by"] == "events" and not failures
    text = steps.markdown(
        [{**row, "way": way, "ms": ms, "gpu_ms": 4.0} for way, ms in (("peft_lora", 8.0), ("use_fdora", 6.0))]
    )
    assert text.splitlines()[-1] == "| tiny, S 8, r 4 | inference | 8.00 / 4.00 | 0.75 / 1.00 | events |"


def test_curves_of_other_masks_are_compared_with_those_of_pefts():
    rows = [
        {"seed": 0, "optimizer": "adamw", "mask": mask, "loss": {"peft": [1.0, 2.0 + mask], "fdora": [1.0, 5.0 + mask]}}
        for mask in (0, 1)
    ]
    assert converge.masked(rows) == ["adamw, seed 0: PEFT from mask to mask 5.00e-01, fdora from PEFT 1.50e+00."]
    assert converge.masked(rows[:1]) == []


def test_the_rate_of_learning_falls_to_a_tenth_along_a_line():
    """As torch's schedule has it, with an optimizer that knows its first rate alone."""
    steps, data = 5, [torch.tensor([[0, i % 3, 1]]) for i in range(5)]

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.logits = torch.nn.Parameter(torch.linspace(0, 1, 9).view(3, 3))

        def forward(self, input_ids, use_cache):
            return argparse.Namespace(logits=self.logits[input_ids])

    mine, theirs = Model(), Model()
    losses, norms = converge.train(mine, data, [torch.optim.SGD(mine.parameters(), lr=0.5)], contextlib.nullcontext(), None)
    optimizer = torch.optim.SGD(theirs.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, steps)
    for i, batch in enumerate(data):
        loss = converge.loss_of(theirs, batch)
        loss.backward()
        assert losses[i].item() == pytest.approx(loss.item()) and norms[i].item() == pytest.approx(
            theirs.logits.grad.norm().item()
        )
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    torch.testing.assert_close(mine.logits, theirs.logits)
