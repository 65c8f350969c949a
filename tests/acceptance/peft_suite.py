"""PEFT's own DoRA tests, unmodified, with and without fdora: ``python -m tests.acceptance.peft_suite --venv .venv-peft``.

PEFT's source archive carries its tests. They run twice, stock and with ``-p peft_plugin``, which calls ``enable()``. The same
tests must pass, and enough calls must have been served by fdora: a shim that falls back would pass, too. Tests that need a
model hub fail both ways. About four minutes on two cores; the environment, once made, is used again.
"""

import argparse
import json
import os
import subprocess
import sys
import tarfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
TORCH = "torch==2.13.0"
# What the tests import. torchvision must be absent: it fails to import against a CPU torch.
NEEDS = [
    *("transformers", "accelerate", "datasets", "safetensors", "diffusers", "sentencepiece", "protobuf", "attrs"),
    *("pytest", "pytest-xdist", "pytest-timeout", "parameterized", "scipy", "scikit-learn", "setuptools", "wheel"),
    *("einops>=0.8", "optree>=0.14"),  # what fdora itself requires: it is found by its path
]
FILES = ("test_lora_variants", "test_helpers", "test_riemannian_lora", "test_custom_models", "test_initialization")
ENOUGH = 350
# That mixed batches with DoRA raise: fdora serves them (tests/integrations/test_peft_mixed.py).
SERVED = {"tests.test_custom_models.TestMixedAdapterBatches::test_mixed_adapter_batches_lora_with_dora_raises"}


def environment(folder, version):
    """The interpreter of a virtual environment with this PEFT."""
    python = folder / "bin" / "python"
    pip = [python, "-m", "pip", "install", "--quiet"]
    done = folder / f"peft-{version}"
    if not done.exists():
        subprocess.run([sys.executable, "-m", "venv", folder], check=True)
        pins = folder / "constraints.txt"
        pins.write_text(TORCH + "\n")
        subprocess.run([*pip, TORCH, "numpy"], check=True)
        subprocess.run([*pip, "--constraint", pins, *NEEDS, f"peft=={version}"], check=True)
        done.touch()
    return python


def check(python, version):
    """An interpreter that was given has what the tests need."""
    modules = "accelerate, datasets, diffusers, parameterized, peft, pytest_timeout, scipy, sklearn, transformers, xdist"
    done = subprocess.run([python, "-c", f"import {modules}; print(peft.__version__)"], capture_output=True, text=True)
    if done.stdout.strip() != version:
        have = f"PEFT {done.stdout.strip()}" if done.stdout else done.stderr.strip().rpartition("\n")[2]
        raise SystemExit(f"{python} must have PEFT {version} and what its tests import, got {have}. Pass --venv FOLDER.")


def sources(python, folder, version):
    """PEFT's tests, unpacked beside its pyproject.toml. Nothing of the archive is built or installed."""
    there = folder / f"peft-{version}-tests"
    if not there.exists():
        no_build = ("--no-binary", ":all:", "--no-deps", "--no-build-isolation")
        subprocess.run(
            [python, "-m", "pip", "download", "--quiet", *no_build, "--dest", folder, f"peft=={version}"], check=True
        )
        with tarfile.open(folder / f"peft-{version}.tar.gz") as archive:
            top = f"peft-{version}/"
            wanted = [m for m in archive.getmembers() if m.name.startswith((top + "tests/", top + "pyproject.toml"))]
            archive.extractall(folder / "unpacked", members=wanted, filter="data")
        (folder / "unpacked" / f"peft-{version}" / "tests" / "__init__.py").touch()  # the archive leaves it out
        (folder / "unpacked" / f"peft-{version}").rename(there)
    return there


def run(python, there, folder, shim, workers):
    """Outcome of each test id, and the calls by path."""
    name = "shim" if shim else "stock"
    out, counts = folder / f"{name}.xml", folder / f"{name}-counts"
    counts.mkdir(exist_ok=True)
    for old in [*counts.iterdir(), *([out] if out.exists() else [])]:
        old.unlink()
    env = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "FDORA_COUNTS": str(counts)}
    env.pop("PYTHONPATH", None)
    if shim:  # not the root of this repository: it has a package called tests, too
        path = folder / "path"
        path.mkdir(exist_ok=True)
        for link, target in (
            (path / "fdora", ROOT / "fdora"),
            (path / "peft_plugin.py", Path(__file__).with_name("peft_plugin.py")),
        ):
            link.unlink(missing_ok=True)
            link.symlink_to(target)
        env["PYTHONPATH"] = str(path)
    files = [f"tests/{f}.py" for f in FILES if (there / "tests" / f"{f}.py").exists()]
    options = ["-o", "addopts=", "-p", "no:cacheprovider", "-n", str(workers), "-k", "dora", "-q", "--timeout", "600"]
    plugin = ["-p", "peft_plugin"] if shim else []
    done = subprocess.run(
        [python, "-m", "pytest", *options, *plugin, f"--junitxml={out}", *files],
        cwd=there,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    if not out.exists():
        raise SystemExit(f"{name}: pytest wrote no results.\n{done.stdout[-4000:]}")
    calls = sum((Counter(json.loads(f.read_text())) for f in counts.iterdir()), Counter())
    return outcomes(out), calls


def outcomes(xml):
    found = {}
    for case in ET.parse(xml).iter("testcase"):
        kinds = {child.tag for child in case} & {"failure", "error", "skipped"}
        found[f"{case.get('classname')}::{case.get('name')}"] = kinds.pop() if kinds else "passed"
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--peft", default="0.21.2", help="version of PEFT")
    parser.add_argument("--venv", type=Path, help="where the environment is, or is made; default: the running interpreter")
    parser.add_argument("--work", type=Path, help="where archives and results go; default: the environment")
    parser.add_argument("-n", type=int, default=2, help="processes")
    options = parser.parse_args()
    python = environment(options.venv.absolute(), options.peft) if options.venv else Path(sys.executable)
    folder = (options.work or options.venv or Path(".venv-peft")).absolute()
    check(python, options.peft)
    folder.mkdir(parents=True, exist_ok=True)
    there = sources(python, folder, options.peft)

    stock, _ = run(python, there, folder, False, options.n)
    shim, calls = run(python, there, folder, True, options.n)
    for name, found in (("stock", stock), ("fdora", shim)):
        print(f"PEFT {options.peft}, {name}: {dict(sorted(Counter(found.values()).items()))}")
    served = calls["fused"] + calls["composed"]
    print(f"calls: {dict(calls)}; {served} served by fdora")
    differ = {i: (stock.get(i), shim.get(i)) for i in stock.keys() | shim.keys() if stock.get(i) != shim.get(i)}
    for test in SERVED & stock.keys():
        if differ.pop(test, None) != ("passed", "failure"):
            raise SystemExit(f"{test} was to pass stock, and to fail with fdora, which serves what it says is refused.")
    for test, (a, b) in sorted(differ.items()):
        print(f"  {test}: {a} stock, {b} with fdora")
    if differ or not any(kind == "passed" for kind in stock.values()):
        raise SystemExit("The outcomes are not identical.")
    if served < ENOUGH:
        raise SystemExit(f"Only {served} calls were served by fdora, {ENOUGH} are wanted.")


if __name__ == "__main__":
    main()
