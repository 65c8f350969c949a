"""hqq_cases.py in a process of its own: PEFT imports hqq wherever it is."""

from pathlib import Path

from tests.process import run_cases


def test_hqq():
    run_cases(Path(__file__).with_name("hqq_cases.py"), "hqq", 17)
