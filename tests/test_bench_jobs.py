"""bench.jobs in small: it looks at the numbers before it times them, and the pipeline's bubble is told next to the simulator's."""

import pytest
import torch

pytest.importorskip("peft", reason="the rivals need PEFT; `make test` installs it")
from bench import jobs, jobs_model, records
from fdora.jobs.schedule.simulate import Action, Task
from tests.test_bench import run

SMALL = "--tiny --layers 2 --r 4 --runs 1 --batches 1 --samples 4 "


@pytest.mark.parametrize("dropout", ["", "--dropout 0.2", "--dropout 0.2 --dropout-mode lora"])
def test_one_process(dropout, tmp_path):
    result = run(jobs, tmp_path, f"{SMALL} --batches 2 {dropout}")
    assert result["failed"] == {}
    ways = {mix: [row["way"] for row in result["rows"] if row["kind"] == mix] for mix in jobs.MIXES}
    assert ways == {"mixed": [*jobs.WAYS, *jobs.ABLATION], "alike": list(jobs.WAYS)}
    seconds = {(row["kind"], row["way"]): row["seconds"] for row in result["rows"]}
    for row in result["rows"]:
        assert row["samples_per_s"] * row["seconds"] == pytest.approx(4 * 2 * 4)
        assert row["lora"] == pytest.approx(row["seconds"] / seconds[row["kind"], "peft_lora"])
        assert row["padded"] == pytest.approx(row["seconds"] / seconds[row["kind"], "padded_lora"])
    assert result["rows"][0]["tokens_per_s"] * result["rows"][0]["seconds"] == pytest.approx(result["tokens"])
    assert set(result["agreement"]) == {"fdora_alone", "fdora_together", "separate"}
    assert all(0 < found[part] < 1e-5 for found in result["agreement"].values() for part in ("losses", "gradients"))
    assert result["microbatches"]["together"] <= result["microbatches"]["alone"]
    count = {row["way"]: row["microbatches"] for row in result["rows"] if "microbatches" in row and row["kind"] == "mixed"}
    assert count["fdora_together"] < count["unmerged"] <= count["unpacked"]
    assert [row["way"] for row in result["breakdown"]] == list(jobs.BROKEN)
    assert "| mixed | fdora_together |" in jobs.main.show(result)


@pytest.fixture(scope="module")
def made():
    return jobs_model.Jobs(jobs.main.parse(f"{SMALL} --batches 2".split()))


def test_schedules_of_the_ablation_hold_every_sample_once(made):
    want = sorted((a, j, n) for a, batches in enumerate(made.lengths) for j, own in enumerate(batches) for n in own)
    for find in (jobs_model.unpacked_of, jobs_model.unmerged_of):
        found = find(made.lengths, made.options)
        assert sorted((s.adapter, s.batch, s.length) for each in found for s in each) == want
        assert all(sum(s.length for s in each) <= made.capacity for each in found)
    padded = jobs_model.padded_of(made.lengths[2])
    assert [len(each) for each in padded] == [4, 4] and sorted(s.length for each in padded for s in each) == sorted(
        n for own in made.lengths[2] for n in own
    )


def test_padding_counts_for_nothing(made):
    work = made.padded[2][0]
    data = made.data(work, padded=True)
    most = max(sample.length for sample in work.samples)
    assert data.lengths == (most,) * 4 and len(data.x) == 4 * most > sum(sample.length for sample in work.samples)
    other = data._replace(x=torch.where((data.owner == 4)[:, None], 7.0, data.x))
    assert not torch.equal(other.x, data.x)
    torch.testing.assert_close(jobs_model.by_modules(made.model, other), jobs_model.by_modules(made.model, data))


def test_a_wrong_way_fails_it(monkeypatch):
    right = jobs.by_modules
    calls = []

    def wrong(model, data):
        calls.append(model)
        return right(model, data) * (1.01 if len(calls) == 2 else 1)  # of fdora_alone

    monkeypatch.setattr(jobs, "by_modules", wrong)
    with pytest.raises(SystemExit, match=r"apart from PEFT's DoRA: \['fdora_alone'\]; failed: {}"):
        jobs.main(f"{SMALL} --ways peft_dora,fdora_alone".split())


def test_two_stages(tmp_path):
    result = run(jobs, tmp_path, f"{SMALL} --world 2 --jobs 1")
    assert [row["way"] for row in result["rows"]] == ["alone", "together"]
    assert len(result["bubbles"]) == result["runs"]
    bubble = result["bubble"]
    assert 0 <= bubble["simulated_from_times"] < 1 and 0 <= bubble["measured"] < 1
    assert bubble["simulated_seconds"] <= bubble["measured_seconds"]  # each action as early as can be
    assert bubble["simulated_from_times"] <= bubble["simulated_with_last"] <= bubble["simulated_with_messages"]
    assert len(bubble["actions"]) == 4 * result["microbatches"]["together"]  # on two stages, forward and backward
    times = [tuple(map(float, action.split()[3:])) for action in bubble["actions"]]
    busy = sum(end - begin for begin, end in times)
    assert busy == pytest.approx(2e3 * bubble["measured_seconds"] * (1 - bubble["measured"]), abs=1)


def test_the_simulator_accounts_for_what_was_measured():
    """With messages and the last optimizer steps its bubble is that of two H200 but for what the host takes between actions."""
    result = records.result("h200/jobs_pipeline")
    options, kept = jobs.main.parse(result["about"]["arguments"].split()), result["bubble"]
    plan, tasks = jobs_model.plan_of(jobs_model.lengths_of(options), options), []
    for device, microbatch, way, *ends in (action.split() for action in kept["actions"]):
        action = Action(int(device), int(microbatch), way == "backward")
        tasks.append(Task(int(device), action, *(float(end) / 1e3 for end in ends)))
    found = jobs.bubbles(plan, tasks, kept["measured_seconds"], result["world"])
    for name in ("measured", "simulated_from_times", "simulated_seconds", "simulated_from_tokens"):
        assert found[name] == pytest.approx(kept[name], abs=1e-5), name
    assert found["measured"] - 0.01 < found["simulated_with_messages"] < found["measured"]


def test_a_message_is_what_a_device_waits_for_with_nothing_else_to_do():
    forward = [
        Task(d, Action(d, n, False), start, start + 2.0) for d, n, start in ((0, 0, 0), (0, 1, 2), (1, 0, 2.5), (1, 1, 4.6))
    ]
    assert jobs.message_of(forward) == 0.5  # the second had come before the first was done
