"""fdora doctor: what it finds, what it calls a problem, and that its check can fail."""

import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fdora import doctor
from fdora.__main__ import main
from fdora._dispatch import BackendChoice
from fdora.doctor import Line, found, numbers, span
from tests import snippets
from tests.process import python

ROOT = Path(__file__).parent.parent
CPU = torch.device("cpu")


@pytest.fixture
def few(monkeypatch):
    """The self-check on the CPU alone: other devices are other tests' business."""
    monkeypatch.setattr(doctor, "devices", lambda: [CPU])


def test_this_machine(few, capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    for section in ("installed", "backend", "frameworks", "self-check"):
        assert re.search(rf"^{section}$", out, re.M)
    assert f"torch            {torch.__version__}, built for" in out
    assert re.search(
        r"^  peft +(\d[\d.]*: (supported|newer than what was tested) \(0\.18 to 0\.21\)|not installed)$", out, re.M
    )
    assert re.search(r"^  cpu +eager, because ", out, re.M)
    assert re.search(r"^  cpu float32 +c \S+, y \S+, dx \S+, dA \S+, dB \S+, dm \S+$", out, re.M)
    assert out.splitlines()[-1].startswith("OK: fdora computes the right thing on cpu (eager).")


def test_in_an_environment_without_peft_and_triton(tmp_path):
    """As a command; what is not there cannot be imported, and the rest is no different for it."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "class Absent:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.partition('.')[0] in ('peft', 'triton', 'packaging', 'transformers', 'safetensors'):\n"
        "            raise ModuleNotFoundError(f'No module named {name!r}')\n"
        "sys.meta_path.insert(0, Absent())\n"
        "import importlib.metadata as m\n"
        "known = m.version\n"
        "def version(name):\n"
        "    if name in ('peft', 'triton'):\n"
        "        raise m.PackageNotFoundError(name)\n"
        "    return known(name)\n"
        "m.version = version\n"
    )
    env = {"TRITON_INTERPRET": None, "PYTHONPATH": f"{tmp_path}:{ROOT}", "CUDA_VISIBLE_DEVICES": ""}
    done = python("-m", "fdora", "doctor", **env)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^  peft +not installed$", done.stdout, re.M)
    assert re.search(r"^  Triton +not installed$", done.stdout, re.M)
    assert done.stdout.splitlines()[-1].startswith("OK: ") and "no kernel was checked" in done.stdout


@pytest.mark.parametrize("dtype", doctor.DTYPES, ids=str)
@pytest.mark.parametrize("what", ["c", "y", "dA"])
def test_a_wrong_result_is_a_problem(few, capsys, monkeypatch, dtype, what):
    """3 % off: more than any rounding of bfloat16."""
    monkeypatch.setattr(doctor, "DTYPES", (dtype,))
    if what == "c":
        right = doctor.dora_norm
        monkeypatch.setattr(doctor, "dora_norm", lambda *a, **o: 1.03 * right(*a, **o))
    else:
        right = doctor.dora_linear
        change = {
            "y": lambda x, W, A, B, m, **o: 1.03 * right(x, W, A, B, m, **o),
            "dA": lambda x, W, A, B, m, **o: right(x, W, Scaled.apply(A), B, m, **o),
        }[what]
        monkeypatch.setattr(doctor, "dora_linear", change)
    assert main(["doctor"]) == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.startswith("PROBLEM: ") and last.endswith(f" is wrong on cpu {str(dtype)[6:]}.")
    assert re.search(rf"\b{what}\b", last) and (what != "dA" or "dA is wrong" in last)


class Scaled(torch.autograd.Function):
    """The same value, and a gradient that is 3 % too long."""

    @staticmethod
    def forward(ctx, t):
        return t.view_as(t)

    @staticmethod
    def backward(ctx, dt):
        return 1.03 * dt


def test_a_nan_for_many_tokens_alone_is_wrong_too(few, monkeypatch):
    results = {doctor.TOKENS[0]: {"y": (0.1, 1.0)}, doctor.TOKENS[1]: {"y": (float("nan"), 1.0)}}
    monkeypatch.setattr(doctor, "check", lambda device, dtype, tokens: results[tokens])
    assert [line.fault for line in doctor.checks()] == ["y is wrong on cpu float32", "y is wrong on cpu bfloat16"]


def test_a_check_that_does_not_run_is_a_problem(few, capsys, monkeypatch):
    def broken(*_):
        raise RuntimeError("Failed to find C compiler.\nPlease specify it")

    monkeypatch.setattr(doctor, "check", broken)
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "cpu float32      does not run: RuntimeError: Failed to find C compiler.\n" in out
    assert out.splitlines()[-1] == "PROBLEM: the self-check does not run on cpu."


def test_a_gpu_without_kernels_is_a_problem(monkeypatch):
    chip = torch.device("cuda", 0)
    monkeypatch.setattr(doctor, "devices", lambda: [CPU, chip])
    monkeypatch.setattr(doctor, "select_backend", lambda d, dtype: BackendChoice("eager", "Triton is not installed"))
    assert [line.fault for line in doctor.backends()] == ["", "no kernels on cuda:0, because Triton is not installed"]
    monkeypatch.setattr(doctor, "select_backend", lambda d, dtype: BackendChoice("triton", "bfloat16"))
    assert doctor.backends()[1] == Line("cuda:0", "triton, because bfloat16")


def test_a_gpu_is_described(monkeypatch):
    facts = SimpleNamespace(name="NVIDIA H200", major=9, minor=0, total_memory=140 * 2**30, gcnArchName="")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda d: facts)
    monkeypatch.setattr(torch.version, "hip", None)
    assert doctor.gpu(torch.device("cuda", 0)) == "NVIDIA H200, compute capability 9.0, 140 GiB"


def test_no_compiler(few, monkeypatch):
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(doctor.shutil, "which", lambda name: None)
    (line,) = [line for line in doctor.installed() if line.name == "C compiler"]
    assert line.text.startswith("none: ") and not line.fault  # a CPU needs none
    monkeypatch.setenv("CC", "/opt/cc")
    assert doctor.compiler() == "/opt/cc"


def test_the_backend_that_was_asked_for_cannot_run(few, capsys):
    import fdora

    if os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the interpreter runs kernels on a CPU, so this can run; runs without TRITON_INTERPRET, as in `make test`")
    with fdora.backend("triton"):
        assert main(["doctor"]) == 1
    assert "the backend that was asked for cannot run" in capsys.readouterr().out.splitlines()[-1]


def test_versions():
    assert numbers("2.13.0+cu128") == (2, 13, 0) and numbers("0.22.0.dev0") == (0, 22, 0) and numbers("3.4rc1") == (3, 4)
    assert [span(v, "0.18", "0.21") for v in ("0.17.1", "0.18", "0.18.0", "0.21.2", "0.22.0.dev0", "1.0")] == [
        "too old",
        "supported",
        "supported",
        "supported",
        "newer than what was tested",
        "newer than what was tested",
    ]
    assert span("2.9", "2.8", "2.13") == "supported" and span("2.7.1", "2.8", None) == "too old"


def test_found(monkeypatch):
    monkeypatch.setattr(doctor, "version", lambda package: "0.6.1")
    assert found("x", "0.6.1", "0.6.1") == "0.6.1: supported (0.6.1)"
    assert found("x", "0.5", None) == "0.6.1: supported (0.5 or newer)"
    assert found("x", None, "0.5") == "0.6.1: newer than what was tested (up to 0.5)"
    assert found("x", "0.7", "0.8") == "0.6.1: too old (0.7 to 0.8)"


def test_serving(monkeypatch):
    """What vLLM would find and how it is put together: on the small engine of the tests of the plug-in."""
    from tests.integrations.vllm_stand_in import LoRAModelManager, stand_in

    monkeypatch.setattr(doctor, "find_spec", lambda name: None)
    assert doctor.serving() == "not installed"
    monkeypatch.setattr(doctor, "find_spec", lambda name: name == "vllm")
    monkeypatch.setattr(doctor, "entry_points", lambda group: [])
    assert doctor.serving().startswith("does not serve DoRA: fdora is no installed package here")
    monkeypatch.setattr(doctor, "entry_points", lambda group: [SimpleNamespace(name="fdora")])
    monkeypatch.setenv("VLLM_PLUGINS", "other")
    assert doctor.serving() == "does not serve DoRA: VLLM_PLUGINS='other' leaves fdora out"
    monkeypatch.setenv("VLLM_PLUGINS", "other,fdora")
    with stand_in():
        assert doctor.serving() == "serves DoRA adapters (docs/serving.md)"
        monkeypatch.delattr(LoRAModelManager, "activate_adapter")
        assert "activate_adapter` must be a function of self, lora_id, got one that lacks" in doctor.serving()


def test_triton_has_other_names_for_other_chips(monkeypatch):
    known = {"pytorch-triton-rocm": "3.5.1"}

    def version(name):
        if name not in known:
            raise doctor.PackageNotFoundError(name)
        return known[name]

    monkeypatch.setattr(doctor, "version", version)
    assert doctor.triton() == "pytorch-triton-rocm 3.5.1: supported (3.4 or newer)"
    known["triton"] = "3.3"
    assert doctor.triton() == "3.3: too old (3.4 or newer)"
    known.clear()
    assert doctor.triton() == "not installed"


def test_versions_are_those_of_the_documentation():
    """docs/trainers.md says what each file was run with; a file that refuses an older version says so in its code."""
    named = {"PEFT": "peft", "TRL": "trl", "Axolotl": "axolotl", "ms-swift": "ms-swift", "LLaMA-Factory": "llamafactory"}
    named |= {"Unsloth": "unsloth", "torchtune": "torchtune"}
    rows = dict(re.findall(r"^\| ([\w-]+) \|.*\| ([\d.]+(?: to [\d.]+)?) \| [^|]+ \|$", snippets.PAGE, re.M))
    assert set(rows) == set(named)
    for name, run_with in rows.items():
        oldest, newest = doctor.FRAMEWORKS[named[name]]
        assert newest == run_with.split(" to ")[-1], name
        assert " to " not in run_with or oldest == run_with.split(" to ")[0], name
    refused = {}
    for file in (ROOT / "fdora/integrations").glob("*.py"):
        refused |= dict(re.findall(r'^ *need\("\w+", "([\w-]+)", "([\d.]+)"\)', file.read_text(), re.M))
    assert refused.pop("torchao") and set(refused) == set(named.values()) - {"trl"}  # torchtune leaves it out; TRL's is PEFT's
    for package, least in refused.items():
        assert span(least, *doctor.FRAMEWORKS[package]) == "supported", package
        assert numbers(least)[: len(numbers(doctor.FRAMEWORKS[package][0]))] == numbers(doctor.FRAMEWORKS[package][0])


def test_the_check_leaves_the_random_state_and_the_precision(monkeypatch):
    torch.manual_seed(5)
    want = torch.randn(3)
    torch.manual_seed(5)
    torch.set_float32_matmul_precision("high")
    try:
        doctor.check("cpu", torch.float32)
        assert torch.get_float32_matmul_precision() == "high"
    finally:
        torch.set_float32_matmul_precision("highest")
    assert torch.equal(torch.randn(3), want)


def test_the_bug_report_asks_for_it():
    assert "fdora doctor" in (ROOT / ".github/ISSUE_TEMPLATE/bug_report.md").read_text()
