"""Who may import whom, how long a file may be, and what an import costs."""

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "fdora"

# layer -> layers of fdora that it may import, beside itself. Data flows down this list, nothing points up.
MAY = {
    "root": {"_check", "_dispatch"},
    "integrations": {"root", "functional"},
    "convert": {"_check", "functional"},
    "functional": {"_check", "_dispatch", "autograd"},
    "autograd": {"eager", "triton"},
    "eager": set(),
    "triton": set(),
    "_check": set(),
    "_dispatch": {"_check"},
}
FOREIGN = {
    "eager": {"torch"},
    "triton": {"torch", "triton"},
    "convert": {"torch", "safetensors"},
    "integrations": {"torch", "packaging", "peft", "torchao", "torchtune", "axolotl", "llamafactory", "swift"},
}  # the rest may import torch and the standard library


def layer_of(parts):
    return "root" if len(parts) == 0 or parts == ("__init__",) else parts[0]


def imports(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def faults(layer, source):
    for name in imports(source):
        head, *rest = name.split(".")
        if head == "fdora":
            # from fdora import eager -> eager; from fdora.eager.norm import scale -> eager
            target = rest[0] if rest and (rest[0] in MAY) else "root"
            if target != layer and target not in MAY[layer]:
                yield f"{layer} imports {name}"
        elif head not in sys.stdlib_module_names and head not in FOREIGN.get(layer, {"torch"}):
            yield f"{layer} imports {name}"


def files():
    return sorted(PACKAGE.rglob("*.py"))


def test_no_arrow_points_up():
    found = []
    for file in files():
        layer = layer_of(file.relative_to(PACKAGE).with_suffix("").parts)
        assert layer in MAY, f"{file} is in no layer"
        found += [f"{file.name}: {fault}" for fault in faults(layer, file.read_text())]
    assert not found


@pytest.mark.parametrize(
    ("layer", "line"),
    [
        ("eager", "from fdora.autograd import norm"),
        ("eager", "from fdora import triton"),
        ("eager", "import fdora.functional.norm"),
        ("triton", "from fdora.eager.norm import scale"),
        ("functional", "from fdora.eager import norm"),
        ("autograd", "from fdora._check import FdoraError"),
        ("eager", "import triton"),
        ("functional", "import transformers"),
        ("root", "from fdora.functional import dora_norm"),
        ("functional", "from fdora.integrations.peft import use_fdora"),
        ("integrations", "from fdora.autograd.linear import linear"),
        ("functional", "from fdora.convert import merge"),
        ("convert", "from fdora.eager.norm import blocks"),
        ("convert", "import numpy"),
        ("integrations", "from fdora.autograd.norm import row_norm"),
    ],
)
def test_the_walk_sees_red(layer, line):
    assert list(faults(layer, line))


def test_one_concept_per_file():
    long = {f.name: n for f in files() if (n := len(f.read_text().splitlines())) > 300}
    assert not long


def run(code, **env):
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=os.environ | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_import_is_light_and_patches_nothing():
    out = run(
        "import torch, sys, time\n"
        "before = {n: id(v) for n, v in vars(torch).items()}, {n: id(v) for n, v in vars(torch.nn.functional).items()}\n"
        "loaded = set(sys.modules)\n"
        "start = time.perf_counter()\n"
        "import fdora\n"
        "seconds = time.perf_counter() - start\n"
        "import fdora.functional\n"
        "assert ({n: id(v) for n, v in vars(torch).items()}, {n: id(v) for n, v in vars(torch.nn.functional).items()}) == before\n"
        "new = {m.split('.')[0] for m in set(sys.modules) - loaded}\n"
        "kernels = {'triton'} if torch.version.cuda or torch.version.hip else set()\n"  # loaded where a GPU may come to be used
        "assert not (new - kernels) & {'triton', 'transformers', 'peft', 'einops', 'optree', 'numpy'}, new\n"
        "print(seconds)"
    )
    assert float(out) < 0.3


def test_import_of_the_functions_is_light_too():
    out = run("import torch, time; t = time.perf_counter(); import fdora.functional; print(time.perf_counter() - t)")
    assert float(out) < 0.3
