"""docs/predict.md keeps its word about `explain`."""

import re

import pytest

import fdora.functional as functional
from tests.snippets import ROOT, programs, ran

PAGE = (ROOT / "docs/predict.md").read_text()


def test_the_program(capsys):
    pytest.importorskip("triton", reason="its plans need Triton; `make test` installs it")
    space = ran(programs("docs/predict.md")[0], "docs/predict.md")
    said, out = space["said"], capsys.readouterr().out
    assert [plan.name for plan in said.plans] == ["dora_norm", "dora_linear forward", "dora_linear backward"]
    assert str(said) in out and {t.whose for t in said.kept} == {"new", "argument", "output"} and said.seconds > 0
    for word in ("cuBLAS", "TMA", "GFLOP", "MiB", "workspace", "kept for backward"):
        assert word in out and f"`{word}`" in PAGE, word


def test_it_names_every_function():
    from fdora.functional.explain import CALLS

    assert {name for name in re.findall(r"`(dora_\w+)`", PAGE)} == {fn.__name__ for fn in CALLS}
    assert all(hasattr(functional, fn.__name__) for fn in CALLS)
