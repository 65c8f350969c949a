"""bench.schedule: a small run, and that its table says what its rows do."""

import re

from bench import report, schedule
from tests.test_bench import run


def test_a_small_run(tmp_path):
    result = run(schedule, tmp_path, "--samples 3 --batches 2 --depth 2 --total 24")
    out = schedule.main.show(result)
    assert [row["s"] >= 0 for row in result["times"]] == [True] * 3
    assert [(row["adapters"], row["way"]) for row in result["rows"]] == [
        (n, way) for n in (1, 2, 3, 4) for way in schedule.WAYS
    ]
    assert len(re.findall(r"^\| [1-4] \|", out, re.M)) == 16 and "15.00 % with two" in out and "Megatron's 1F1B 48.79 %" in out


def test_the_page_has_it():
    assert "## Many adapters in a pipeline" in report.document()
