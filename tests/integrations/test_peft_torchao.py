"""peft_torchao_cases.py in a process of its own: torchtune wants another torchao here."""

from pathlib import Path

from tests.process import run_cases


def test_the_library():
    quiet = {"TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1"}
    run_cases(Path(__file__).with_name("peft_torchao_cases.py"), "torchao", 13, **quiet)
