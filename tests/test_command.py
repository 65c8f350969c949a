"""One command, `fdora`: what it imports, its exit statuses, and odd input that ended in tracebacks."""

import json
import os
import runpy
import subprocess
import sys

import pytest

from fdora.__main__ import COMMANDS, main
from tests.process import python

LLAMA = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2, "head_dim": 16}
LLAMA |= {"intermediate_size": 128, "vocab_size": 100}
MODULES = ["fdora", "fdora.jobs.plan", "fdora.jobs.schedule", "fdora.convert"]


def ended(line):
    with pytest.raises(SystemExit) as stopped:
        main([*map(str, line)])
    return stopped.value.code


def test_importing_fdora_imports_neither_triton_nor_peft():
    code = "import sys, fdora, fdora.__main__; assert not {'triton', 'peft', 'fdora.functional'} & {*sys.modules}\n"
    code += "from fdora import dora_linear as a; from fdora.functional import dora_linear as b; assert a is b"
    done = python("-c", code)
    assert done.returncode == 0, done.stderr


def test_no_warning_of_torchs_about_numpy():
    """torch needs none, and warns at its import: nothing but its answer is what a command says."""
    code = "import sys; sys.modules['numpy'] = None; from fdora.__main__ import main; main(['--version'])"
    done = python("-c", code)
    assert done.returncode == 0 and not done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_help(command, capsys):
    assert ended([command, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"usage: fdora {command} ")


def test_the_whole_help_names_every_command(capsys):
    assert ended(["--help"]) == 0
    assert all(f"fdora {name} " in capsys.readouterr().out for name in [*COMMANDS][:1]) and ended(["--version"]) == 0


@pytest.mark.parametrize("module", MODULES)
def test_modules_are_commands_too(module, monkeypatch, capsys):
    """As ``python -m`` runs them."""
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    monkeypatch.delitem(sys.modules, f"{module}.__main__", raising=False)  # as in a process of its own
    with pytest.raises(SystemExit) as stopped:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert stopped.value.code == 0 and capsys.readouterr().out.startswith("usage: fdora")


@pytest.mark.skipif(os.name == "nt", reason="pipes of POSIX")
def test_a_reader_that_leaves(tmp_path):
    """`fdora explain | head` says nothing of its own: its status is that of a program which a pipe has ended."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, "-m", "fdora", "explain", "--model", str(tmp_path), "--tokens", "64"]
    done = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert done.returncode == 141 and "Traceback" not in done.stderr and "BrokenPipe" not in done.stderr


def test_the_answer_no_is_status_1(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    given = ["plan", "--model", tmp_path, "--length", 64, "--gpu", "4090"]
    assert main([*map(str, given)]) == 0 and "Best: " in capsys.readouterr().out
    assert main([*map(str, given), "--tokens", str(64 * 10**9)]) == 1 and "None fits" in capsys.readouterr().out


ODD = {
    "nested": ("[" * 100_000, "`model` must be a JSON file, got RecursionError"),
    "a list for a type": (LLAMA | {"model_type": ["llama"]}, "`model` must be of a model type among"),
    "an object for a type": (LLAMA | {"model_type": {}}, "`model` must be of a model type among"),
    "a size beyond int64": (LLAMA | {"hidden_size": 2**70}, "a positive integer below 2^31 as 'hidden_size'"),
    "layers without end": (LLAMA | {"num_hidden_layers": 10**30}, "a positive integer below 2^31 as 'num_hidden_layers'"),
    "digits without end": (json.dumps(LLAMA).replace("100", "1" * 5000), "`model` must be a JSON file, got ValueError"),
}


@pytest.mark.parametrize("command", ["explain", "plan"])
@pytest.mark.parametrize("what", ODD)
def test_odd_models(tmp_path, capsys, command, what):
    content, words = ODD[what]
    (tmp_path / "config.json").write_text(content if isinstance(content, str) else json.dumps(content))
    assert ended([command, "--model", tmp_path]) == 2 and words in capsys.readouterr().err


LONG = "x" * 5000
ARGUMENTS = {
    "tokens": ("explain", ["--tokens", 10**30], "`tokens` must be below 2^31"),
    "r": ("explain", ["--r", 10**30], "`r` must be below 2^31"),
    "a long path": ("explain", ["--model", LONG], "Check the path"),
    "a long path to plan": ("plan", ["--model", LONG], "Nothing is downloaded"),
    "a long adapter": ("plan", ["--adapters", LONG], "`adapters` must be ranks"),
    "a rank of many digits": ("plan", ["--adapters", "9" * 5000], "`adapters` must be ranks"),
    "a billion adapters": ("plan", ["--adapters", "1000000000x16"], "`adapters` must be ranks"),
    "a large capacity": ("schedule", ["--capacity", 2 * 10**12], "`spec.capacity` must be below 2^31"),
}


@pytest.mark.parametrize("what", ARGUMENTS)
def test_odd_arguments(tmp_path, capsys, what):
    command, more, words = ARGUMENTS[what]
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "lengths.json").write_text("[[[5, 3]]]")
    given = [tmp_path / "lengths.json"] if command == "schedule" else ["--model", tmp_path]
    assert ended([command, *given, *more]) == 2 and words in capsys.readouterr().err


def test_the_largest_capacity_packs(tmp_path, capsys):
    """Sums of subsets are bits of an int: as many as there are tokens, not as fit."""
    (tmp_path / "lengths.json").write_text("[[[5, 3, 4]], [[7]]]")
    assert main(["schedule", str(tmp_path / "lengths.json"), "--capacity", str(2**31 - 1), "--seconds", "0"]) == 0
    assert "1 microbatches" in capsys.readouterr().out


def test_names_that_the_terminal_has_no_letters_for(tmp_path, capsys):
    """They are printed as escapes. Half of a surrogate pair is no name."""
    (tmp_path / "lengths.json").write_text('{"\\u2615": [[5, 3]]}')
    given = ["-m", "fdora", "schedule", tmp_path / "lengths.json", "--capacity", "8", "--seconds", "0"]
    done = python(*given, PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and "groups: \\u2615" in done.stdout, done.stderr
    (tmp_path / "lengths.json").write_text('{"\\ud800": [[5, 3]]}')
    assert ended(["schedule", tmp_path / "lengths.json", "--capacity", 8]) == 2
    assert "surrogates not allowed" in capsys.readouterr().err


def test_shapes_that_are_none(tmp_path, capsys):
    (tmp_path / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    for shape in ('["x", 3]', "[1e3, 4]", f"[{2**70}, 4]", "[-1, 4]", "[" * 100_000):
        data = ('{"l.lora_A.weight": {"shape": %s}}' % shape).encode()  # noqa: UP031
        (tmp_path / "adapter_model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data)
        assert ended(["explain", "--model", tmp_path]) == 2 and "a whole adapter_model" in capsys.readouterr().err


def test_explain_says_that_triton_is_missing(tmp_path, capsys, monkeypatch):
    """Its numbers are other ones then."""
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    given = ["explain", "--model", str(tmp_path), "--tokens", "64"]
    monkeypatch.setattr("fdora.explain_model.find_spec", lambda name: None)
    assert main(given) == 0 and "Without Triton" in capsys.readouterr().out
    monkeypatch.setattr("fdora.explain_model.find_spec", lambda name: name)
    assert main(given) == 0 and "Without Triton" not in capsys.readouterr().out


def test_a_missing_matplotlib_is_said_before_the_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    (tmp_path / "lengths.json").write_text("[[[5]]]")
    out = tmp_path / "out.json"
    assert ended(["schedule", tmp_path / "lengths.json", "--capacity", 8, "--out", out, "--picture", tmp_path / "a.png"]) == 2
    assert "needs matplotlib" in capsys.readouterr().err and not out.exists()
