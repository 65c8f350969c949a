"""Files of diffusers, kohya and LyCORIS: what fdora writes is loaded there and gives PEFT's output; what they write is read."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

pytest.importorskip("diffusers", reason="its models; `make test` installs it")

from diffusers import FlowMatchEulerDiscreteScheduler, Flux2KleinPipeline, StableDiffusionXLPipeline
from diffusers.utils import convert_state_dict_to_diffusers
from peft import LoraConfig, get_peft_model_state_dict

from fdora import FdoraError
from fdora.convert import Adapter, for_comfyui, from_diffusers, kohya_names, read, to_diffusers, to_kohya, write
from fdora.convert.__main__ import main
from tests.convert.test_keys import same
from tests.integrations.diffusion import MODELS, made
from tests.integrations.diffusion_files import adapters_of, bare, forward
from tests.process import run_cases

PIPELINES = {"sdxl": (StableDiffusionXLPipeline, "unet"), "flux2": (Flux2KleinPipeline, "transformer")}
FILE = "pytorch_lora_weights.safetensors"


def test_in_lycoris():
    run_cases(Path(__file__).with_name("lycoris_cases.py"), "lycoris", 7, OMP_NUM_THREADS="1")


def close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize("name", MODELS)
def test_a_model_of_diffusers(name, tmp_path):
    """``load_lora_adapter`` and ``save_lora_adapter``; ranks and alphas that differ from layer to layer."""
    model = made(name, torch.float32, rank_pattern={"to_q": 2}, alpha_pattern={"to_k": 9})
    there, want, base = adapters_of(model), forward(model), bare(name, model)
    assert {(len(p.A), p.s) for p in there.values()} >= {(2, 2.0), (3, 3.0), (3, 4 / 3)}
    write(tmp_path / "ours.safetensors", there, "diffusers", prefix="net")
    base.load_lora_adapter(tmp_path, weight_name="ours.safetensors", prefix="net", adapter_name="one")
    close(forward(base), want)
    same(adapters_of(base, "one"), there)
    base.save_lora_adapter(tmp_path, "one")
    same(read(tmp_path, "diffusers"), there)
    same(read(tmp_path / "ours.safetensors", "diffusers", prefix="net"), there)


def pipeline(name, model):
    """Of nothing but the one model: the loaders look at no other."""
    cls, component = PIPELINES[name]
    if component == "unet":
        parts = dict.fromkeys(("vae", "text_encoder", "text_encoder_2", "tokenizer", "tokenizer_2"))
        return cls(unet=model, scheduler=FlowMatchEulerDiscreteScheduler(), **parts)
    parts = dict.fromkeys(("vae", "text_encoder", "tokenizer"))
    return cls(transformer=model, scheduler=FlowMatchEulerDiscreteScheduler(), **parts)


@pytest.mark.parametrize("name", PIPELINES)
def test_a_pipeline_of_diffusers(name, tmp_path):
    """``load_lora_weights``, and ``save_lora_weights`` as DreamBooth's scripts call it, old names and no metadata included."""
    cls, component = PIPELINES[name]
    model = made(name, torch.float32)
    there, want, base = adapters_of(model), forward(model), bare(name, model)
    write(tmp_path / FILE, there, "diffusers", prefix=component)
    pipeline(name, base).load_lora_weights(tmp_path)
    close(forward(base), want)
    state = get_peft_model_state_dict(model)
    known = {f"{component}_lora_adapter_metadata": model.peft_config["default"].to_dict()}
    cls.save_lora_weights(tmp_path / "known", **{f"{component}_lora_layers": state}, **known)
    same(read(tmp_path / "known", "diffusers"), there)
    cls.save_lora_weights(tmp_path / "bare", **{f"{component}_lora_layers": convert_state_dict_to_diffusers(state)})
    keys = load_file(tmp_path / "bare" / FILE)
    assert any(".lora.down." in key for key in keys)
    same(read(tmp_path / "bare", "diffusers"), {path: p._replace(s=1.0) for path, p in there.items()})
    other = {f"text_encoder.{key}": t for key, t in to_diffusers({"q": next(iter(there.values()))}, prefix="")[0].items()}
    save_file(keys | other, tmp_path / "both")
    assert list(read(tmp_path / "both", "diffusers", prefix="text_encoder")) == ["q"]
    with pytest.raises(FdoraError, match=r"got 'text_encoder\.q\.lora_A.weight'"):
        read(tmp_path / "both", "diffusers")


def comfyui(W, state, name):
    """Its formula in float64: rows are divided by the norm of W, columns by that of the changed weight."""
    down, up, m = (state[f"{name}.{part}"].double() for part in ("lora_down.weight", "lora_up.weight", "dora_scale"))
    V = W.double() + state[f"{name}.alpha"].double() / len(down) * (up.flatten(1) @ down.flatten(1)).view(W.shape)
    over = W.double() if m.shape[0] == len(W) else V
    return m * V / over.square().sum([axis for axis, n in enumerate(m.shape) if n == 1], keepdim=True).sqrt()


def test_comfyui_gets_its_own_magnitude(tmp_path):
    model = made("sdxl", torch.float32)
    W = {
        key.removesuffix(".weight").replace(".base_layer", ""): t
        for key, t in model.state_dict().items()
        if "base_layer.weight" in key
    }
    save_file({f"{path}.weight": t for path, t in W.items()}, tmp_path / "model.safetensors")
    there = adapters_of(model)
    write(tmp_path / FILE, there, "diffusers")
    main(
        [
            "keys",
            f"{tmp_path}/model.safetensors",
            f"{tmp_path}/out",
            f"{tmp_path}/{FILE}",
            "--of",
            "diffusers",
            "--to",
            "comfyui",
        ]
    )
    state, names = load_file(tmp_path / "out"), kohya_names(there)
    plain = to_kohya(there, names)
    far = 0
    for path, p in there.items():
        V = W[path].double() + p.s * (p.B.flatten(1).double() @ p.A.flatten(1).double()).view(W[path].shape)
        rows = (-1, *[1] * (V.dim() - 1))
        want = p.m.double().view(rows) * V / V.flatten(1).norm(dim=1).view(rows)
        torch.testing.assert_close(comfyui(W[path], state, names[path]), want, rtol=1e-5, atol=1e-6)
        far += (comfyui(W[path], plain, names[path]) - want).norm() > 0.01 * want.norm()
    assert far > len(there) / 2
    q = Adapter(torch.ones(1, 4), torch.ones(3, 1), torch.ones(4), 1.0, norm_axis=0)
    assert for_comfyui(torch.ones(3, 4), q) is q


@pytest.mark.parametrize("component", ["unet", "transformer"])
def test_the_command(component, tmp_path):
    """diffusers, kohya, diffusers, PEFT: the same adapter."""
    model = made("unet" if component == "unet" else "flux2", torch.float32)
    there = adapters_of(model)
    W = {key.replace(".base_layer", ""): t for key, t in model.state_dict().items() if "base_layer.weight" in key}
    save_file(W, tmp_path / "model")
    write(tmp_path / "a", there, "diffusers", prefix=component)
    steps = ["--of diffusers --to kohya", f"--of kohya --to diffusers --component {component}", "--of diffusers --to peft"]
    for at, step in zip("abc", steps, strict=True):
        main(["keys", f"{tmp_path}/model", f"{tmp_path}/{chr(ord(at) + 1)}", f"{tmp_path}/{at}", *step.split()])
    same(read(tmp_path / "d"), there)
    state = load_file(tmp_path / "c")
    assert all(key.startswith(f"{component}.") for key in state)
    same(from_diffusers(state), {path: p._replace(s=1.0) for path, p in there.items()})


def test_a_tensor_under_both_of_its_names_is_refused():
    p = Adapter(torch.ones(1, 4), torch.ones(3, 1), None, 1.0)
    state, config = to_diffusers({"a": p})
    for there, again in (("lora_A", "lora.down"), ("lora_B", "lora.up")):
        twice = state | {f"unet.a.{again}.weight": torch.zeros_like(state[f"unet.a.{there}.weight"])}
        with pytest.raises(FdoraError, match="got one tensor under both of its names"):
            from_diffusers(twice, config)


def test_lora_beside_dora_is_refused(tmp_path):
    p = Adapter(torch.ones(1, 4), torch.ones(3, 1), torch.ones(3), 1.0)
    with pytest.raises(FdoraError, match="all DoRA or all LoRA"):
        to_diffusers({"a": p, "b": p._replace(m=None)})
    assert LoraConfig(**to_diffusers({"a": p}, prefix="")[1]).use_dora


@pytest.mark.parametrize(("text", "said"), [("[1]", "must be an object of JSON, got a list"), ("{", "convert.read")])
def test_metadata_that_is_no_config(tmp_path, text, said):
    save_file({"unet.to_q.lora_A.weight": torch.ones(1, 2)}, tmp_path / FILE, {"lora_adapter_metadata": text})
    with pytest.raises(FdoraError, match=said):
        read(tmp_path, "diffusers")
