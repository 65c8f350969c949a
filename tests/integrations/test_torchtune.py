"""torchtune_cases.py in a process of its own: PEFT refuses to share one with the torchao that torchtune needs."""

from pathlib import Path

from tests.process import run_cases


def test_torchtune():
    run_cases(Path(__file__).with_name("torchtune_cases.py"), "torchtune", 28)
