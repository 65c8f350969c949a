"""CONTRIBUTING.md leads along names that are there, and in the order in which a call meets them."""

import ast
import re

import pytest

from tests.snippets import ROOT, programs, ran

PAGE = (ROOT / "CONTRIBUTING.md").read_text()
STATIONS = re.findall(r"\[`(\w+)`\]\((fdora/[\w/]+\.py)\)", PAGE)


def test_each_name_stands_in_the_file_it_links_to():
    assert len(STATIONS) > 30 and len(STATIONS) == PAGE.count("](fdora/")
    for name, file in STATIONS:
        path = ROOT / file
        tree = ast.parse(path.read_text())
        there = {node.name for node in tree.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
        there |= {t.id for node in tree.body if isinstance(node, (ast.Assign, ast.AnnAssign)) for t in targets(node)}
        assert name in there | {path.stem}, f"{name} is not defined in {file}"


def targets(node):
    return [t for t in getattr(node, "targets", [getattr(node, "target", None)]) if isinstance(t, ast.Name)]


def test_the_program(capsys):
    """The kernels it names are those that run, in that order."""
    pytest.importorskip("triton", reason="its plans need Triton; `make test` installs it")
    (program,) = programs("CONTRIBUTING.md")
    space = ran(program, "CONTRIBUTING.md")
    steps = [step.what for plan in space["said"].plans for step in plan.steps]
    assert steps == ["norm_kernel", "sum_kernel", "cuBLAS", "gemm_tma_kernel"]
    assert str(space["said"]) in capsys.readouterr().out


def test_it_ends_where_the_kernel_does():
    (line,) = re.findall(r"^tl\.store\(.*$", PAGE, re.M)
    assert f"        {line}\n" in (ROOT / "fdora/triton/kernels/product.py").read_text()
