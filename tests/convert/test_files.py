"""Files, the command line, and g for a server."""

import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file

from fdora import FdoraError
from fdora.convert import Weights, kohya_names, merge, read, write, write_scales
from fdora.convert.__main__ import main
from tests.convert.make import columns, layer, merged, missed, target
from tests.convert.test_keys import adapters, same, shapes
from tests.test_layers import ROOT


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

    main(["lora", *args, f"{folder}/first", "--r", "20"])
    got = read(folder / "out")
    assert all(
        p.m is None and missed(W[path], merge(W[path], p), merged(W[path], first[path])) < 1e-4 for path, p in got.items()
    )
    with pytest.raises(
        FdoraError, match=r"^model.layers.0.self_attn.q_proj: fdora.convert.to_lora: the error must be at most 0.01"
    ):
        main(["lora", args[0], str(folder / "refused"), f"{folder}/first", "--r", "2", "--max-error", "0.01"])
    assert not (folder / "refused").exists()

    main(["scales", args[0], str(folder / "g"), f"{folder}/first"])
    assert len(load_file(folder / "g")) == 2

    main(["keys", args[0], str(folder / "kohya"), f"{folder}/first", "--to", "kohya"])
    main(["keys", args[0], str(folder / "back"), str(folder / "kohya"), "--of", "kohya"])
    same(read(folder / "back"), first)
    for wrong in (["lora", *args, "a"], ["keys", *args, "a", "b"]):
        with pytest.raises(SystemExit):
            main(wrong)


def test_it_is_a_command_and_needs_safetensors_for_files_only():
    done = subprocess.run([sys.executable, "-m", "fdora.convert", "-h"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0 and "combine MODEL OUT" in done.stdout
    code = "import sys; sys.modules['safetensors'] = None; from fdora.convert import combine, Weights, from_peft\ntry: Weights('x')\nexcept ImportError: print('late')"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.strip() == "late", done.stderr
