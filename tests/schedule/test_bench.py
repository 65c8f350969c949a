"""bench.schedule: a small run, and that its table says what its rows do."""

import re

from bench import records, report, schedule
from fdora.jobs.schedule import Spec, simulate
from fdora.jobs.schedule import schedule as found
from fdora.jobs.schedule.pack import first_fit


def test_a_small_run(tmp_path):
    path = tmp_path / "schedule.json"
    schedule.main(f"--samples 3 --batches 2 --depth 2 --total 24 --json {path} --commit abc".split())
    result = records.load(path)
    out = schedule.markdown(result)
    assert result["about"]["commit"] == "abc" and [row["s"] >= 0 for row in result["times"]] == [True] * 3
    assert [(row["adapters"], row["way"]) for row in result["rows"]] == [
        (n, way) for n in (1, 2, 3, 4) for way in schedule.WAYS
    ]
    assert len(re.findall(r"^\| [1-4] \|", out, re.M)) == 16 and out.count("| 15.0% |") == 1 and "Megatron's 1F1B 48.8%" in out


def test_its_rows_are_the_simulators():
    lengths, spec = schedule.drawn(["long", "short"], 3, 4, 6144, 1), Spec(6144, 3, 128, 0.0)
    rows = dict(schedule.row(lengths, spec))
    mine = simulate(found(lengths, spec), 3)
    assert rows["schedule"]["bubble"] == mine.bubble and abs(rows["schedule"]["throughput"] - mine.throughput) < 1e-9
    runs = [simulate(first_fit(samples, spec), 3) for samples in schedule.alone(lengths)]
    count = sum(len(run.microbatches) for run in runs)
    tokens = sum(n for batches in lengths for batch in batches for n in batch)
    # busy times, forward and backward of every token on every stage, over all the time there was
    assert abs(rows["flushed"]["bubble"] - (1 - 2 * tokens / sum(run.time for run in runs))) < 1e-9 and len(runs) == 6
    assert abs(rows["flushed"]["fill"] - tokens / (count * 6144)) < 1e-9
    assert rows["half"]["bubble"] < rows["schedule"]["bubble"] < rows["flushed"]["bubble"]


def test_the_page_has_it():
    assert "## Many adapters in a pipeline" in report.document()
