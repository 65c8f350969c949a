"""Files, the command line, and g for a server."""

import json
import math
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from fdora import FdoraError
from fdora.convert import Weights, combine, files, kohya_names, merge, read, to_kohya, write, write_scales
from fdora.convert.__main__ import main
from tests.convert.make import columns, layer, merged, missed, target
from tests.convert.test_keys import adapters, same, shapes
from tests.process import python


@pytest.fixture
def model(tmp_path):
    """Two shards with a weight each, and two adapters, the second of one layer alone."""
    (tmp_path / "model").mkdir()
    W = {}
    for i, path in enumerate(adapters()):
        W[path] = layer(seed=i)[0]
        save_file({path + ".weight": W[path], path + ".bias": torch.ones(24)}, tmp_path / "model" / f"{i}.safetensors")
    first = adapters()
    second = {next(iter(first)): layer(r=2, seed=5)[1]}
    write(tmp_path / "first", first)
    write(tmp_path / "second", second)
    return tmp_path, W, first, second


@pytest.mark.parametrize("dialect", ["peft", "torchtune", "kohya"])
def test_there_and_back(dialect, tmp_path):
    there = adapters() if dialect == "torchtune" else shapes()
    names = kohya_names(there) if dialect == "kohya" else None
    write(tmp_path / "a", there, dialect, names=names)
    same(read(tmp_path / "a", dialect, names=names), there)


def test_views_are_written(tmp_path):
    _, p = layer()
    write(tmp_path / "a", {"x": p._replace(A=p.A.T.contiguous().T), "y": p})
    same(read(tmp_path / "a"), {"x": p, "y": p})


def test_weights_are_read_when_asked_for(model):
    folder, W, *_ = model
    weights = Weights(folder / "model")
    assert set(weights) == set(W) and len(weights) == 2
    assert all(torch.equal(weights[path], W[path]) for path in W)
    assert len(Weights(folder / "model" / "0.safetensors")) == 1
    with pytest.raises(
        FdoraError, match=r"weight of 'layers.0.q_proj' must be among the 2 .* one of them is 'model.layers.0.self_attn.q_proj'"
    ):
        weights["layers.0.q_proj"]
    with pytest.raises(FdoraError, match="a safetensors file, or a folder of them"):
        Weights(folder / "first" / "..")


def test_a_weight_in_two_files(model):
    """It is refused, unless an index says which is meant."""
    folder, W, *_ = model
    other = {f"{path}.weight": torch.zeros_like(t) for path, t in W.items()}
    save_file(other, folder / "model" / "z.safetensors")
    with pytest.raises(
        FdoraError, match=r"fdora.convert.Weights: `path` must be a folder with each weight once, got .* and in z"
    ):
        Weights(folder / "model")
    index = folder / "model" / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(other, "z.safetensors")}))
    assert all(torch.equal(t, torch.zeros_like(t)) for t in Weights(folder / "model").values())
    index.write_text(json.dumps({"weight_map": dict.fromkeys(other, "gone.safetensors")}))
    with pytest.raises(FdoraError, match=r"gone\.safetensors can be read, got no such file"):
        Weights(folder / "model")[next(iter(W))]
    for text in ("[]", "{", '{"weight_map": [1]}', '{"weight_map": {"a": 1}}'):
        index.write_text(text)
        with pytest.raises(FdoraError, match=r"fdora.convert.Weights: `path` must be"):
            Weights(folder / "model")


def test_a_server_needs_no_norm(model):
    folder, W, first, _ = model
    write_scales(folder / "g.safetensors", Weights(folder / "model"), first)
    files = load_file(folder / "g.safetensors") | load_file(folder / "first" / "adapter_model.safetensors")
    x = torch.randn(4, 20)
    for path, p in first.items():
        g, A, B = (files[f"base_model.model.{path}.{part}"] for part in ("g", "lora_A.weight", "lora_B.weight"))
        assert g.dtype == torch.float32 and g.shape == (24,)
        y = g * (x @ W[path].T + p.s * (x @ A.T) @ B.T)
        torch.testing.assert_close(y.double(), x.double() @ merged(W[path], p).T, rtol=1e-4, atol=1e-5)
    with pytest.raises(FdoraError, match="`norm_axis` must be 1"):
        write_scales(folder / "g", W, {path: columns(p, W[path]) for path, p in first.items()})


def test_the_command_line(model, capsys):
    folder, W, first, second = model
    args = [str(folder / "model"), str(folder / "out")]
    both = next(iter(first))

    main(["combine", *args, f"{folder}/first=0.5", f"{folder}/second=-2"])
    got = read(folder / "out")
    assert capsys.readouterr().out.startswith("2 layers; largest error of a weight's change: ")
    for path in W:
        parts = [first[path], second[path]] if path == both else [first[path]]
        assert missed(W[path], merge(W[path], got[path]), target(W[path], parts, [0.5, -2.0][: len(parts)])) < 1e-5

    said = refused(capsys, "lora", *args, folder / "first", "--r", "20")
    assert "must be a new or empty folder" in said and "--overwrite" in said
    main(["lora", *args, f"{folder}/first", "--r", "20", "--overwrite"])
    got = read(folder / "out")
    assert all(
        p.m is None and missed(W[path], merge(W[path], p), merged(W[path], first[path])) < 1e-4 for path, p in got.items()
    )
    said = refused(capsys, "lora", args[0], folder / "refused", folder / "first", "--r", "2", "--max-error", "0.01")
    assert said.startswith("model.layers.0.self_attn.q_proj: fdora.convert.to_lora: the error must be at most 0.01")
    assert not (folder / "refused").exists()

    main(["scales", args[0], str(folder / "g"), f"{folder}/first"])
    assert len(load_file(folder / "g")) == 2

    main(["keys", args[0], str(folder / "kohya"), f"{folder}/first", "--to", "kohya"])
    main(["keys", args[0], str(folder / "back"), str(folder / "kohya"), "--of", "kohya"])
    same(read(folder / "back"), first)
    for wrong in (["lora", *args, "a"], ["keys", *args, "a", "b"], ["scales", *args, "a", "--r", "2"], ["lora"], []):
        with pytest.raises(SystemExit) as stopped:
            main(wrong)
        assert stopped.value.code == 2
    capsys.readouterr()


def refused(capsys, *argv):
    """What a command says on stderr as it stops with status 2: one line."""
    capsys.readouterr()
    with pytest.raises(SystemExit) as stopped:
        main([str(arg) for arg in argv])
    out, err = capsys.readouterr()
    assert stopped.value.code == 2 and out == "" and err.endswith("\n") and err.count("\n") == 1
    return err


def test_a_weight_follows_the_last_equals_sign(model, capsys):
    """And only where it is a number, and no folder has the whole name."""
    folder, W, _, second = model
    path = next(iter(second))
    for name in ("lr", "lr=3", "a=b", "2"):
        write(folder / name, {path: second[path]._replace(s=float(len(name)))})

    for given, s, weight in (
        ("lr", 2.0, 1.0),
        ("lr=3", 4.0, 1.0),
        ("lr=3=0.5", 4.0, 0.5),
        ("lr=2", 2.0, 2.0),
        ("lr=-1e-1", 2.0, -0.1),
        ("a=b", 3.0, 1.0),
        ("a=b=2", 3.0, 2.0),
        ("2", 1.0, 1.0),
        ("2=2", 1.0, 2.0),
    ):
        main(["combine", str(folder / "model"), str(folder / "out"), f"{folder}/{given}", "--overwrite"])
        want = target(W[path], [second[path]._replace(s=s)], [weight])
        assert missed(W[path], merge(W[path], read(folder / "out")[path]), want) < 1e-5, given
    for missing in ("first=", "first=x", "first=0.5x"):
        assert f"{folder / missing}" in refused(capsys, "combine", folder / "model", folder / "no", folder / missing)
    assert "=0.5" in refused(capsys, "combine", folder / "model", folder / "no", "=0.5")
    for other in (["lora", "--r", "2"], ["scales"], ["keys"]):  # they have no weights: nothing is dropped in silence
        assert "first=0.5" in refused(capsys, other[0], folder / "model", folder / "no", folder / "first=0.5", *other[1:])
    assert not (folder / "no").exists()


@pytest.mark.parametrize("weight", ["nan", "inf", "-inf", "1e999"])
def test_a_weight_that_is_not_finite_is_refused(weight, model, capsys):
    folder, W, first, _ = model
    said = refused(capsys, "combine", folder / "model", folder / "no", folder / "second", f"{folder}/first={weight}")
    assert f"must be an adapter with a finite weight, got {weight}" in said and not (folder / "no").exists()
    path = next(iter(first))
    with pytest.raises(FdoraError, match="`weights` must be finite"):
        combine(W[path], [first[path]], [float(weight)])
    with pytest.raises(SystemExit):
        main(["lora", str(folder / "model"), str(folder / "no"), str(folder / "first"), "--r", "2", f"--max-error={weight}"])
    assert "is not a finite number" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["A", "B", "m"])
def test_an_adapter_that_is_not_finite_is_refused(part, model, capsys):
    folder, _, first, _ = model
    path = next(iter(first))
    getattr(first[path], part)[1] = float("nan")
    write(folder / "first", first, overwrite=True)
    for command in (["combine", "--r", "2"], ["combine"], ["lora", "--r", "2"]):
        said = refused(capsys, command[0], folder / "model", folder / "no", folder / "first", *command[1:])
        assert said.startswith(path) and "must be finite" in said
    assert not (folder / "no").exists()


def bytes_of(folder):
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def test_the_old_folder_comes_back_where_the_new_one_finds_no_place(model, monkeypatch):
    folder, _, first, _ = model
    old, rename, moves = bytes_of(folder / "second"), os.rename, []

    def the_second_fails(*paths):
        moves.append(paths)
        if len(moves) == 2:
            raise OSError(28, "No space left on device")
        rename(*paths)

    monkeypatch.setattr("os.rename", the_second_fails)
    with pytest.raises(FdoraError, match=r"`path` must be a place that can be written.*No space left on device"):
        write(folder / "second", first, overwrite=True)
    assert bytes_of(folder / "second") == old


def test_other_files_stay(model):
    """Links, and adapters of folders inside, as PEFT saves a second one, among them."""
    folder, W, first, second = model
    (folder / "second" / "README.md").write_text("mine")
    write(folder / "second" / "inner", first)
    (folder / "second" / "link").symlink_to("README.md")
    with pytest.raises(
        FdoraError,
        match=r"`path` must be a new or empty folder .*, got one that holds files. Pass overwrite=True, or --overwrite",
    ):
        write(folder / "second", first)
    same(read(folder / "second"), second)
    write(folder / "second", first, overwrite=True)
    write_scales(folder / "second" / "g.safetensors", W, first)
    write(folder / "second", first, overwrite=True)
    same(read(folder / "second" / "inner"), first)
    assert (folder / "second" / "README.md").read_text() == "mine" and (folder / "second" / "g.safetensors").exists()
    assert os.readlink(folder / "second" / "link") == "README.md"
    for place in (folder / "second", folder / "nowhere" / "g", folder / "second" / "README.md" / "g"):
        with pytest.raises(FdoraError, match="`path` must be a place that can be written"):
            write_scales(place, W, first)
        with pytest.raises(FdoraError, match="`path` must be a place that can be written"):
            write(place, first, "kohya", names=kohya_names(first))
    assert (folder / "second" / "README.md").read_text() == "mine" and len(list((folder / "second").iterdir())) == 6


def test_who_writes_beside_another_waits(model, monkeypatch):
    """Else it takes the other's unfinished files for those that a killed process left."""
    fcntl = pytest.importorskip("fcntl", reason="folders are locked on POSIX alone, as on CI's Linux")
    folder, W, first, _ = model
    found, sync = [], files._sync

    def taken():
        at = os.open(folder, os.O_RDONLY)
        try:
            fcntl.flock(at, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        finally:
            os.close(at)
        return False

    monkeypatch.setattr(files, "_sync", lambda at: found.append(taken()) or sync(at))
    write(folder / "second", first, overwrite=True)
    write_scales(folder / "g", W, first)
    assert all(found) and len(found) > 4 and not taken()


def test_links_stay(model):
    folder, W, first, _ = model
    (folder / "latest").symlink_to("second")
    (folder / "g").symlink_to("first.g")
    write(folder / "latest", first, overwrite=True)
    write_scales(folder / "g", W, first)
    same(read(folder / "second"), first)
    assert (folder / "latest").is_symlink() and (folder / "g").is_symlink() and load_file(folder / "first.g")
    (folder / "loop").symlink_to("loop")
    for call in (lambda: write(folder / "loop", first), lambda: read(folder / "loop")):
        with pytest.raises(FdoraError, match="`path` must be"):
            call()


def test_bad_files_are_told_in_a_sentence(model, capsys):
    folder, _, first, _ = model
    for name in ("no_config", "no_tensors", "bad_config", "list", "bad_tensors"):
        write(folder / name, first)
    (folder / "no_config" / "adapter_config.json").unlink()
    (folder / "no_tensors" / "adapter_model.safetensors").unlink()
    (folder / "bad_config" / "adapter_config.json").write_text("{")
    (folder / "list" / "adapter_config.json").write_text("[]")
    (folder / "bad_tensors" / "adapter_model.safetensors").write_bytes(b"x" * 100)
    model = folder / "model"
    for adapter in ("no_config", "no_tensors", "bad_config", "list", "bad_tensors", "missing"):
        said = refused(capsys, "combine", model, folder / "no", folder / adapter)
        assert said.startswith("fdora.convert.read: `") and (adapter in said or adapter == "list")
    kohya = refused(capsys, "keys", model, folder / "no", folder / "missing", "--of", "kohya")
    assert f"such that {folder / 'missing'} can be read, got no such file" in kohya
    for weights in (folder / "missing", folder / "first" / "adapter_config.json"):
        assert refused(capsys, "scales", weights, folder / "no", folder / "first").startswith("fdora.convert.Weights: `path`")
    assert refused(capsys, "combine", model, folder / "first" / "adapter_config.json", folder / "first").startswith(
        "fdora.convert.write: `path`"
    )
    assert not (folder / "no").exists()


def test_inputs_that_ended_in_tracebacks(model, capsys):
    folder, _, first, _ = model
    model = folder / "model"
    config = json.loads((folder / "first" / "adapter_config.json").read_text())
    texts = {
        "nested": "[" * 100_000,
        "large": json.dumps(config | {"lora_alpha": 10**400}),
        "list": json.dumps(config | {"alpha_pattern": [1]}),
        "regex": json.dumps(config | {"alpha_pattern": {"(": 3}}),
    }
    for name, text in texts.items():
        write(folder / name, first)
        (folder / name / "adapter_config.json").write_text(text)
        said = refused(capsys, "combine", model, folder / "no", folder / name)
        assert said.startswith(("fdora.convert.read: `path`", "fdora.convert.from_peft: `")), said
    for name, W_there in {"float8": torch.ones(24, 20).to(torch.float8_e4m3fn), "vector": torch.ones(24)}.items():
        (folder / name).mkdir()
        save_file({f"{path}.weight": W_there.clone() for path in first}, folder / name / "model.safetensors")
        for command in (["combine", "--r", "1"], ["lora", "--r", "1"], ["scales"]):
            said = refused(capsys, command[0], folder / name, folder / "no", folder / "first", *command[1:])
            assert "fdora.convert: `W` must be " in said, said
    save_file({f"{path}.weight": torch.full((24, 20), math.inf) for path in first}, folder / "infinite")
    for command in (["combine"], ["combine", "--r", "1"], ["lora", "--r", "1"]):
        said = refused(capsys, command[0], folder / "infinite", folder / "no", folder / "first", *command[1:])
        assert "must be finite, and W with them" in said, said
    names = kohya_names(first)
    state = to_kohya(first, names)
    save_file(state | {f"{name}.dora_scale": torch.tensor(1.0) for name in names.values()}, folder / "scalar")
    said = refused(capsys, "keys", model, folder / "no", folder / "scalar", "--of", "kohya")
    assert "dora_scale` must be (24, 1) or (1, 20), got ()" in said, said
    for odd in ("a" * 5000, "a\0b"):
        for place in ([odd, folder / "no", folder / "first"], [model, odd, folder / "first"], [model, folder / "no", odd]):
            assert refused(capsys, "combine", *place).startswith("fdora.convert."), place
    assert not (folder / "no").exists()


def test_a_defect_stays_a_traceback(model, monkeypatch):
    """Only what somebody asked wrongly becomes a sentence."""
    folder, *_ = model
    for bug in (ValueError("bug"), RuntimeError("bug"), KeyError("bug"), ModuleNotFoundError("bug", name="bug")):

        def broken(*_, bug=bug, **__):
            raise bug

        monkeypatch.setattr("fdora.convert.__main__.combine", broken)
        with pytest.raises(type(bug)) as raised:
            main(["combine", str(folder / "model"), str(folder / "no"), str(folder / "first")])
        assert raised.value is bug


def test_the_exit_status(model):
    folder, *_ = model
    done = python("-m", "fdora.convert", "combine", folder / "model", folder / "no", f"{folder}/missing=2")
    assert done.returncode == 2 and "Traceback" not in done.stderr and f"{folder}/missing" in done.stderr


def test_the_help_says_what_it_takes(capsys):
    with pytest.raises(SystemExit):
        main(["-h"])
    assert "combine MODEL OUT" in capsys.readouterr().out


def test_it_needs_safetensors_for_files_only():
    code = (
        "import sys; sys.modules['safetensors'] = None; from fdora.convert import combine, Weights, from_peft\n"
        "try: Weights('x')\nexcept ImportError: print('late')\n"
        "from fdora.convert.__main__ import main; main(['scales', 'a', 'b', 'c'])"
    )
    done = python("-c", code)
    assert done.stdout.strip() == "late" and done.returncode == 2, done.stderr
    assert done.stderr.startswith("fdora.convert: files need safetensors") and done.stderr.count("\n") == 1
