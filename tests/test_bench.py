"""The benchmark commands in small, on the CPU: the loop that they share, what each writes, and that a wrong result is seen."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("peft", reason="the rivals need PEFT; `make test` installs it")
from bench import __main__ as entry
from bench import records, ways
from bench import suite as suites
from fdora.functional import dora_linear

ROOT = Path(__file__).parent.parent
LAYER = "--shapes 128x64 --M 8 --r 4 --runs 1 "
STACK = "--tiny --layers 1 --seq 16 --loss-tokens 4 --r 4 --runs 1 "
SMALL = {
    "layer": LAYER
    + "--ways "
    + "frozen,bare,peft_lora,addmm_lora,peft_dora,peft_dora_cached,factored,fdora,fdora_inside,fdora_full,fdora_full_inside",
    "layer cold": LAYER + "--cold --ways bare,fdora,fdora_inside",
    "layer codes": LAYER + "--base nf4,hqq,gptq,awq --ways frozen,linear4bit,peft_lora,peft_dora,fdora,fdora_inside",
    "group": "--models tiny --M 24 --r 4 --runs 1 --parts qkv,mlp --ways bare,peft_lora,separate,fdora",
    "multi": "--shapes 48x32 --M 24 --decode 6 --serve 80 --runs 1 --loop-ms 0 --G 3 --ways frozen,one,loop,multi,multi_ids",
    "serve": "--shapes 48x32 --r 4 --tokens 1,5 --adapters 1,3 --runs 1 --load 32x48x16,16x32 --layers 2 --load-r 4",
    "experts": "--models tiny --T 24 --r 8 --runs 1 --loop-ms 0 --ways loop,lora_grouped,fdora",
    "fp8": "--shapes 256x128 --M 4 --r 4 --runs 1",
    "fp8_error": "--tokens 8 --out 32 --in 512 --rank 4 --layers 2",
    "compose": "--runs 1",
    "compose embedding": "--runs 1 --ops dora_embedding --shapes 16x64",
    "norm_forms": "--shapes 48x128x8 --runs 1 --kinds weight,codes,bank,experts",
    "host": "--M 4 --K 32 --N 48 --r 4 --runs 1 --loop-ms 1 --ways frozen,peft_dora,fdora",
    "model": STACK + "--quick --no-compile --dtype fp32 --adapter fp32",
    "steps": "--layers 1 --loss-tokens 4 --cells tiny:8:4,tiny-nf4:8:4 --runs 1 --cell-seconds 0",
    "lengths": "--layers 1 --loss-tokens 4 --model tiny --r 4 --count 22 --least 4 --most 9 --warmup",
    "trainer": "--tiny --layers 1 --r 4 --steps 3",
    "vit": "--tiny --layers 2 --batch 2 --runs 1 --dtype bf16 --no-compile --modes inference --ways plain,peft_fdora_fused",
    "diffusion": "--tiny --models sdxl_conv --dtype fp16 --adapter fp32,half --r 4 --batch 2 --runs 1 --checkpointing yes",
    "converge": "--tiny --size large --layers 1 --eval 2 --batch 4 --seq 32 --r 4 --steps 2 --pretrain 2 --seeds 0",
    "sharded": STACK + "--modes step --dtype fp32 --adapter fp32",
}


def run(command, tmp_path, options):
    path = tmp_path / "result.json"
    command.main([*options.split(), "--json", str(path), "--commit", "abc"])
    result = records.load(path)
    assert result["about"]["commit"] == "abc"
    return result


@pytest.mark.parametrize("name", SMALL)
def test_a_command_writes_records(name, tmp_path):
    """Every way of each case has a value, nothing fails but what is not installed, and the lines are read as they were written."""
    if name == "diffusion":
        pytest.importorskip("diffusers", reason="its models; `make test` installs it")
    result = run(importlib.import_module(f"bench.{name.split()[0]}"), tmp_path, SMALL[name])
    lines = records.read(tmp_path / "result.json")["result"]
    assert lines[0]["run"] == "result" and all({"values"} <= line.keys() for line in lines[1:])
    rows = [row for part, shape in lines[0]["parts"].items() if shape != "tree" for row in result[part]]
    assert rows and records.result_of(list(records.lines_of("result", result))) == result
    times = [line["values"] for line in lines[1:] if any(key.endswith("ms") for key in line["values"])]
    assert times or name in ("fp8_error", "converge", "host")
    assert not [why for row in [result, *rows] for why in row.get("failed", {}) if "fdora" in why]
    if name == "layer":  # on a dense weight rivals, too, are what their formula says
        assert result["summary"]["wrong"] == []


def test_every_suite_is_a_command():
    assert {name.split()[0] for name in SMALL} | {"all", "report", "tune", "fit", "host_steps", "schedule"} <= set(
        entry.commands()
    )
    with pytest.raises(SystemExit, match="python -m bench NAME"):
        entry.main(["layers"])


# the loop


def measure(run):
    for M, N in run.cases([(1, 2), (3, 4)]):
        run.add({"M": M, "N": N, "ms": {"fdora": 1.5, "peft_lora": 2.0}, "failed": {"peft_dora": "no luck"}})
    run.end(*run.options.mine)


FAKE = suites.Suite(measure, {"--mine": {"nargs": "*", "default": []}}, 3, 1e9)


def test_the_loop_writes_after_every_case_and_says_what_it_left_out(tmp_path, capsys):
    path = tmp_path / "fake.jsonl"
    FAKE(["--json", str(path), "--commit", "abc", "--seconds=50"])
    result = records.load(path)
    assert [(row["M"], row["ms"]["peft_lora"]) for row in result["rows"]] == [(1, 2.0), (3, 2.0)] and result["runs"] == 3
    assert result["about"]["arguments"] == "" and result["skipped"] == []
    out = capsys.readouterr().out
    assert "| 1 | 2 | 1.5 | 2.0 | no luck |" in out and "failed: peft_dora: no luck" in out
    FAKE(["--json", f"{path}:h200/late", "--seconds", "-1"])
    assert records.load(path, "h200/late")["skipped"] == [[1, 2], [3, 4]] and records.load(path) == result
    with pytest.raises(SystemExit, match="fdora failed:\npeft_dora: no luck"):
        FAKE(["--mine", "peft_dora"])


# the records


def test_committed_results_are_read_as_they_are_written():
    """And are of one format: a case, a way, values."""
    runs = records.runs()
    assert len(runs) >= 117 and len(list(records.RESULTS.glob("*.jsonl"))) <= 30
    for name, (head, *lines) in runs.items():
        assert {"run", "about", "settings", "parts"} == head.keys() and head["run"] == name
        assert all(line.keys() <= {"part", "at", "case", "way", "values"} and "values" in line for line in lines), name
        assert list(records.lines_of(name, records.result_of([head, *lines])))[1:] == lines, name


# one suite


def doubled(*args, s, **options):
    return dora_linear(*args, s=2 * s, **options)


def test_a_wrong_result_gets_no_time(tmp_path, monkeypatch):
    from bench import layer

    monkeypatch.setattr(ways, "dora_linear", doubled)
    with pytest.raises(SystemExit, match=r"fdora is wrong: .*dA by 1.*dB by 1"):
        run(layer, tmp_path, LAYER + "--ways frozen,fdora")
    rows = records.load(tmp_path / "result.json")["rows"]
    assert all("fdora" not in row["ms"] and "frozen" in row["ms"] for row in rows)
    error = rows[0]["error"]["fdora"]
    assert error.keys() == {"y", "y_no_grad", "dx", "dA", "dB", "dm"} and error["dA"] > 0.9


def test_what_a_way_does_not_give_is_missed():
    y = torch.ones(3)
    with pytest.raises(AssertionError, match="gives y, wanted y, dx"):
        ways.errors(ways.Way(lambda: y, lambda: {"y": y}, "lora"), lambda kind: {"y": y, "dx": y})


def test_a_rival_that_fails_is_listed(tmp_path, monkeypatch):
    from bench import layer

    def broken(*args):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(ways, "factored", broken)
    result = run(layer, tmp_path, LAYER + "--ways factored,fdora")
    assert result["summary"]["failed"] == ["factored: RuntimeError: out of luck"]
    assert all("factored" not in row["ms"] for row in result["rows"])


# A way of fdora's that is wrong: where its commands look it up, and what is put there. No command may end well.
WRONG = {
    "layer": "bench.ways.dora_linear",
    "group": "bench.group.dora_linear_group",
    "multi": "bench.multi.dora_linear_multi",
    "serve": "bench.serve.dora_linear_multi",
    "experts": "bench.experts.dora_experts",
    "compose embedding": "bench.compose.dora_embedding",
    "compose": "bench.compose.dora_compose",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_way_fails_its_command(name, tmp_path, monkeypatch):
    """Twice what is right, forward: no suite gives it a time and ends as if it had."""
    module, function = WRONG[name].rsplit(".", 1)
    right = getattr(importlib.import_module(module), function)

    def doubled(*args, **options):
        y = right(*args, **options)
        return 2 * y if isinstance(y, torch.Tensor) else type(y)(2 * each for each in y)

    monkeypatch.setattr(importlib.import_module(module), function, doubled)
    with pytest.raises((SystemExit, AssertionError), match=r"wrong|failed"):
        run(importlib.import_module(f"bench.{name.split()[0]}"), tmp_path, SMALL[name])


# the pytest-benchmark suite


def suite(tmp_path, *options):
    pytest.importorskip("pytest_benchmark", reason="needs pytest-benchmark; `make test` installs it")
    command = [sys.executable, "-m", "pytest", "-o", "python_files=bench_*.py", "--rounds=2", "-p", "no:cacheprovider"]
    command += [f"--benchmark-storage={tmp_path}", *options]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=alone)


def test_suite_and_its_gate(tmp_path):
    done = suite(tmp_path, "bench", "-k", "0-", "--benchmark-save=before", "--commit=abc", f"--json={tmp_path}/suite.json")
    assert done.returncode == 0, done.stdout
    ours = records.load(tmp_path / "suite.json")
    (tmp_path / "suite.json").unlink()
    (path,) = tmp_path.rglob("*_before.json")
    saved = json.loads(path.read_text())
    assert saved["machine_info"] == {}  # no name of a host
    assert {each["extra_info"]["op"] for each in saved["benchmarks"]} == {"norm", "dora_compose", "dora_delta", "linear"}
    assert ours["about"]["commit"] == "abc" and ours["skipped"] == [] and ours["rounds"] == 2
    assert [ours["about"] | row for row in ours["rows"]] == [each["extra_info"] for each in saved["benchmarks"]]
    for each in saved["benchmarks"]:
        assert each["extra_info"]["ms"] == pytest.approx(1e3 * each["stats"]["median"], abs=1e-5)
        facts = {"torch", "commit", "dtype", "backend", "mode", "bytes", "flops", "peak_mb", "wall_ms"}
        assert facts <= set(each["extra_info"]) and each["extra_info"]["commit"] == "abc"
        assert each["stats"]["rounds"] == 2 and each["stats"]["median"] > 0
    for each in saved["benchmarks"]:
        each["stats"]["median"] *= 1e-9  # as if it had been faster, past any noise
    path.write_text(json.dumps(saved))
    gate = suite(tmp_path, "bench/bench_norm.py", "--benchmark-compare", "--benchmark-compare-fail=median:10%")
    assert gate.returncode and "Performance has regressed" in gate.stdout + gate.stderr


def test_suite_sees_a_wrong_result(tmp_path):
    (tmp_path / "wrong.py").write_text(
        "import fdora.functional as f\nright = f.dora_norm\nf.dora_norm = lambda *a, s, **o: right(*a, s=1.01 * s, **o)\n"
    )
    done = suite(tmp_path, "bench/bench_norm.py", "-p", "wrong", "-k", "0-bf16", "-o", f"pythonpath={ROOT} {tmp_path}")
    assert done.returncode == 1 and "Tensor-likes are not close" in done.stdout
