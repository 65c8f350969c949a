"""adapter_config.json against PEFT itself: what PEFT's own load and merge make of W, this makes of it too, or refuses."""

import json
import typing
from types import SimpleNamespace

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.pytorch_utils import Conv1D

from fdora import FdoraError
from fdora.convert import combine, from_peft, merge, read, to_kohya, to_lora, to_peft, to_torchtune, write
from fdora.convert.config import CHANGE_NOTHING, KEEP_W, READ, REFUSED
from tests.convert.make import missed

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
FIELDS = set(LoraConfig().to_dict())
INITS = [
    value
    for part in typing.get_args(typing.get_type_hints(LoraConfig)["init_lora_weights"])
    for value in (typing.get_args(part) or (True, False))
]


class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.q = torch.nn.Linear(12, 12)
        self.up = torch.nn.Linear(12, 20)

    def forward(self, x):
        return self.up(self.q(x))[..., :12]


class Model(torch.nn.Module):
    """Two blocks, and a layer of the name of another one's end."""

    def __init__(self):
        super().__init__()
        self.model = torch.nn.Module()
        self.model.layers = torch.nn.ModuleList(Block() for _ in range(2))
        self.q = torch.nn.Linear(12, 12, bias=False)
        self.embed = torch.nn.Embedding(7, 12)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.model.layers:
            x = layer(x)
        return self.q(x)


def base():
    torch.manual_seed(1)
    return Model()


def gpt2():
    torch.manual_seed(1)
    return GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=2, n_head=2, vocab_size=11, n_positions=8))


def moved(model):
    """Training, as far as the numbers are concerned."""
    generator = torch.Generator().manual_seed(2)
    for p in model.parameters():
        if p.requires_grad:
            p.data += 0.3 * torch.randn(p.shape, generator=generator)
    return model


def saved(folder, make=base, **config):
    """An adapter as PEFT trains and saves it."""
    model = moved(get_peft_model(make(), LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": ["q", "up"]} | config)))
    model.save_pretrained(folder)
    return model


def edited(folder, **fields):
    """Other fields in its config, as PEFT would have written them."""
    config = json.loads((folder / CONFIG).read_text()) | fields
    (folder / CONFIG).write_text(json.dumps(config))


def weights(model):
    return {
        name.removesuffix(".weight"): t.detach().clone() for name, t in model.state_dict().items() if name.endswith("weight")
    }


def by_peft(folder, make=base):
    return weights(PeftModel.from_pretrained(make(), folder).merge_and_unload())


def by_fdora(folder, make=base):
    adapters = read(folder)
    return {path: merge(W, adapters[path]) if path in adapters else W for path, W in weights(make()).items()}


def assert_same_as_peft(folder, make=base):
    """Of every weight of the model, those without an adapter too."""
    want, got, start = by_peft(folder, make), by_fdora(folder, make), weights(make())
    assert want.keys() == got.keys() == start.keys()
    for path, W in want.items():
        torch.testing.assert_close(got[path], W, rtol=1e-5, atol=1e-5, msg=path)
    change = max((want[path] - start[path]).abs().max() for path in start)
    assert change > 0.1


def assert_written_again(folder, make=base):
    """What was read from ``folder / "a"`` and written to "b" has PEFT's own tensors, and PEFT reads it."""
    write(folder / "b", read(folder / "a"))
    one, other = (load_file(folder / name / TENSORS) for name in "ab")
    assert one.keys() == other.keys() and all(torch.equal(t, other[key]) for key, t in one.items())
    assert_same_as_peft(folder / "b", make)


def refused(folder, match):
    with pytest.raises(FdoraError, match=match) as raised:
        read(folder)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("rslora", [False, True])
@pytest.mark.parametrize("dora", [False, True])
def test_gpt2_stores_its_weights_the_other_way(dora, rslora, tmp_path):
    """c_proj of attention is square: nothing but fan_in_fan_out tells its sides apart."""
    saved(tmp_path / "a", gpt2, target_modules=["c_attn", "c_proj", "c_fc"], use_dora=dora, use_rslora=rslora)
    adapters = read(tmp_path / "a")
    assert len(adapters) == 8 and all(p.fan_in_fan_out for p in adapters.values())
    assert_same_as_peft(tmp_path / "a", gpt2)
    assert_written_again(tmp_path, gpt2)
    assert all(torch.equal(W, by_peft(tmp_path / "a", gpt2)[path]) for path, W in by_peft(tmp_path / "b", gpt2).items())


def test_sums_and_lora_of_weights_stored_the_other_way(tmp_path):
    saved(tmp_path / "a", gpt2, target_modules=["c_attn", "c_proj"], use_dora=True)
    saved(tmp_path / "b", gpt2, target_modules=["c_attn", "c_proj"], r=2)
    start, (a, b) = weights(gpt2()), (by_peft(tmp_path / name, gpt2) for name in "ab")
    combined, loras = {}, {}
    for path, p in read(tmp_path / "a").items():
        q, W = read(tmp_path / "b")[path], start[path]
        combined[path], error = combine(W, [p, q], [0.7, -0.2])
        assert error < 1e-5 and combined[path].fan_in_fan_out
        loras[path], error = to_lora(W, p, r=16)
        assert error < 1e-4 and loras[path].fan_in_fan_out and loras[path].m is None
    for name, adapters, numbers in (("sum", combined, (0.7, -0.2)), ("lora", loras, (1.0, 0.0))):
        write(tmp_path / name, adapters)
        got = by_peft(tmp_path / name, gpt2)
        for path in adapters:
            W = start[path]
            want = W.double() + numbers[0] * (a[path] - W).double() + numbers[1] * (b[path] - W).double()
            assert missed(W, got[path], want) < 1e-4


def test_a_layout_that_does_not_fit_is_refused(tmp_path):
    saved(tmp_path, gpt2, target_modules=["c_attn"], use_dora=True)
    path, p = next(iter(read(tmp_path).items()))
    W = weights(gpt2())[path]
    plain = p._replace(fan_in_fan_out=False)
    torch.testing.assert_close(merge(W.T, plain), merge(W, p).T)
    for wrong, V in ((plain, W), (p, W.T)):
        with pytest.raises(FdoraError, match=rf"pass p._replace\(fan_in_fan_out={not wrong.fan_in_fan_out}\)"):
            merge(V, wrong)
    with pytest.raises(FdoraError, match="of one fan_in_fan_out"):
        combine(W, [p, plain], [1.0, 1.0])
    with pytest.raises(FdoraError, match="all with fan_in_fan_out or all without"):
        to_peft({"x": p, "y": plain})
    with pytest.raises(FdoraError, match="`fan_in_fan_out` must be False, got True for 'x'"):
        to_kohya({"x": p}, {"x": "x"})
    with pytest.raises(FdoraError, match="`fan_in_fan_out` must be False, got True for 'x'"):
        to_torchtune({"x": p})


class Convs(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv2d(4, 4, 3)
        self.proj = Conv1D(4, 4)

    def forward(self, x):
        return self.proj(self.conv(x).mean((2, 3)))


def convs():
    torch.manual_seed(1)
    return Convs()


def test_a_convolution_never_is_the_other_way(tmp_path):
    saved(tmp_path / "a", convs, target_modules=["conv", "proj"], use_dora=True)
    assert {path: p.fan_in_fan_out for path, p in read(tmp_path / "a").items()} == {"conv": False, "proj": True}
    assert_same_as_peft(tmp_path / "a", convs)
    assert_written_again(tmp_path, convs)


@pytest.mark.parametrize("init", INITS, ids=str)
def test_every_initialisation_that_peft_knows(init, tmp_path):
    """Served where PEFT's load leaves W as it is, else refused."""
    saved(tmp_path, r=4)
    edited(tmp_path, init_lora_weights=init)
    if init in KEEP_W:
        assert_same_as_peft(tmp_path)
    else:
        refused(tmp_path, "`init_lora_weights` must be one that leaves W as it is")


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_2", "olora"])
def test_the_remedy_for_them(init, tmp_path):
    torch.manual_seed(0)
    model = get_peft_model(base(), LoraConfig(r=3, lora_alpha=5, target_modules=["q", "up"], init_lora_weights=init))
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(tmp_path / "start")
    model.peft_config["default"].init_lora_weights = init
    moved(model).save_pretrained(tmp_path / "a", path_initial_model_for_weight_conversion=str(tmp_path / "start"))
    assert_same_as_peft(tmp_path / "a")
    trained = weights(model.merge_and_unload())
    for path, W in by_fdora(tmp_path / "a").items():
        torch.testing.assert_close(W, trained[path], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "init", ["pissa_niter_16", "PISSA", "OLoRA", "corda", "loftq", "lora_ga", "of next year", 2, ["eva"]], ids=str
)
def test_initialisations_that_are_not_known(init, tmp_path):
    saved(tmp_path)
    edited(tmp_path, init_lora_weights=init)
    refused(tmp_path, "`init_lora_weights` must be one that leaves W as it is")


@pytest.mark.parametrize(
    "config",
    [
        {"use_rslora": True, "rank_pattern": {"layers.1.q": 4}, "alpha_pattern": {"layers.*.up": 7, "up": 9}},
        {"rank_pattern": {"^q": 2}, "alpha_pattern": {"layers.1.q": 2, "q": 11}},
        {"layers_to_transform": [1], "layers_pattern": "layers", "target_modules": ["up"]},
        {"exclude_modules": ["layers.0.q"], "lora_dropout": 0.3},
        {"target_modules": r".*\.up", "task_type": "FEATURE_EXTRACTION"},
        {"bias": "all", "target_modules": ["q"], "exclude_modules": r"model.layers.*"},
        {"modules_to_save": []},
    ],
    ids=str,
)
@pytest.mark.parametrize("dora", [False, True])
def test_fields_that_are_served(config, dora, tmp_path):
    saved(tmp_path / "a", use_dora=dora, **config)
    if config.get("bias"):  # biases of all layers lie beside the adapter: refused, until somebody takes them out
        refused(tmp_path / "a", r"got 'base_model.model.*\.bias'")
        state = {key: t for key, t in load_file(tmp_path / "a" / TENSORS).items() if not key.endswith("bias")}
        save_file(state, tmp_path / "a" / TENSORS)
    assert_same_as_peft(tmp_path / "a")
    assert_written_again(tmp_path)


@pytest.mark.parametrize(
    ("config", "key"),
    [
        ({"modules_to_save": ["layers.1.up"], "target_modules": ["q"]}, "model.layers.1.up.weight"),
        ({"trainable_token_indices": {"embed": [1, 2]}}, "embed.token_adapter.trainable_tokens_delta"),
        ({"lora_bias": True, "target_modules": ["up"]}, "model.layers.0.up.lora_B.bias"),
        ({"target_modules": ["embed"]}, "embed.lora_embedding_A"),
    ],
    ids=str,
)
def test_fields_with_tensors_that_are_no_adapters(config, key, tmp_path):
    saved(tmp_path, **config)
    keys = load_file(tmp_path / TENSORS)
    assert any(name.startswith(f"base_model.model.{key}") for name in keys), list(keys)
    refused(tmp_path, r"`state` must be of base_model.model.\*.lora_A.weight.*Take it out")


def test_biases_of_adapted_layers(tmp_path):
    """Old PEFT neither saved nor loaded them: then there is nothing to lose."""
    saved(tmp_path, bias="lora_only")
    if any(key.endswith("bias") for key in load_file(tmp_path / TENSORS)):
        refused(tmp_path, r"got 'base_model.model.*\.bias'")
    else:
        assert_same_as_peft(tmp_path)


@pytest.mark.skipif(
    "target_parameters" not in FIELDS,
    reason="this PEFT's LoraConfig has no target_parameters; runs with PEFT 0.21, which `make test` installs",
)
def test_parameters_as_targets(tmp_path):
    saved(tmp_path, target_modules=[], target_parameters=["model.layers.0.up.weight"])
    refused(tmp_path, "`target_parameters` must be absent or empty")


def test_replicated_layers(tmp_path):
    """A layer of the replicated model is not the layer of that number in the files."""

    def model():
        whole = base()
        whole.model.config = SimpleNamespace(num_hidden_layers=2)  # PEFT counts them
        return whole

    saved(tmp_path, model, layer_replication=[[0, 1], [0, 2]], target_modules=["up"])
    assert any("layers.2.up" in key for key in load_file(tmp_path / TENSORS))
    refused(tmp_path, "`layer_replication` must be absent or empty.*copies")
    up = PeftModel.from_pretrained(model(), tmp_path).base_model.model.model.layers[1].up
    theirs = up.base_layer.weight + up.get_delta_weight("default")  # merging would add to the shared weight of all copies
    edited(tmp_path, layer_replication=None)
    p = read(tmp_path)["model.layers.1.up"]
    assert torch.allclose(merge(base().model.layers[0].up.weight, p), theirs, atol=1e-5)
    assert not torch.allclose(merge(base().model.layers[1].up.weight, p), theirs, atol=0.1)


@pytest.mark.parametrize("field", sorted(REFUSED))
def test_fields_that_are_refused(field, tmp_path):
    saved(tmp_path)
    edited(tmp_path, **{field: {"a": 1} if field.endswith("config") or field == "use_bdlora" else [1]})
    refused(tmp_path, rf"`{field}` must be absent or empty, got .*")
    edited(tmp_path, **{field: None})
    assert_same_as_peft(tmp_path)


def test_every_field_of_this_peft_is_known():
    assert READ | CHANGE_NOTHING | set(REFUSED) >= FIELDS
    assert not (READ & CHANGE_NOTHING or READ & set(REFUSED) or CHANGE_NOTHING & set(REFUSED))


def test_a_field_of_next_year(tmp_path):
    saved(tmp_path)
    for empty in (None, False, [], {}, ""):
        edited(tmp_path, use_next=empty)
        assert_same_as_peft(tmp_path)
    edited(tmp_path, use_next=1)
    refused(tmp_path, "`use_next` must be absent or empty, got 1. It is not known here")


@pytest.mark.parametrize("peft_type", ["ADALORA", "XLORA", "VERA", None, "lora"])
def test_other_methods(peft_type, tmp_path):
    saved(tmp_path)
    edited(tmp_path, peft_type=peft_type)
    refused(tmp_path, "`peft_type` must be 'LORA', got ")


def test_magnitudes_and_use_dora_go_together(tmp_path):
    saved(tmp_path, use_dora=True)
    edited(tmp_path, use_dora=False)  # PEFT's load drops them
    refused(tmp_path, "`state` must be without lora_magnitude_vector, as use_dora=False says, got .* with one")
    edited(tmp_path, use_dora=True)
    state = load_file(tmp_path / TENSORS)
    one = "base_model.model.q.lora_magnitude_vector"
    save_file({key: t for key, t in state.items() if key != one}, tmp_path / TENSORS)
    refused(tmp_path, "with lora_magnitude_vector, as use_dora=True says, got 'q' without one")
    save_file({key: t for key, t in state.items() if not key.endswith("vector")}, tmp_path / TENSORS)
    refused(tmp_path, "without one. Take both files from one adapter")


@pytest.mark.parametrize("alpha", [None, "5", True, float("nan"), float("inf")], ids=str)
def test_alpha_is_a_number(alpha, tmp_path):
    saved(tmp_path)
    edited(tmp_path, lora_alpha=alpha)
    refused(tmp_path, "`lora_alpha` must be a finite number")
    edited(tmp_path, lora_alpha=5, alpha_pattern={"q": alpha})
    refused(tmp_path, "`q` must be a finite number")


def test_a_pattern_is_for_one_layer_alone(tmp_path):
    """PEFT takes the first pattern that fits the end of a path: "q" would fit "layers.0.q" too."""
    saved(tmp_path / "a", alpha_pattern={"^q": 9}, rank_pattern={"^q": 2}, use_dora=True)
    got = read(tmp_path / "a")
    assert got["q"].s == 4.5 and got["model.layers.0.q"].s == pytest.approx(5 / 3)
    order = ["model.layers.1.up", "q", *(f"model.layers.{name}" for name in ("0.q", "0.up", "1.q"))]
    write(tmp_path / "b", {path: got[path] for path in order})
    assert_same_as_peft(tmp_path / "b")
    assert all(torch.equal(W, by_peft(tmp_path / "a")[path]) for path, W in by_peft(tmp_path / "b").items())
    back = read(tmp_path / "b")
    assert {path: p.s for path, p in back.items()} == pytest.approx({path: p.s for path, p in got.items()})


def test_tensors_that_a_sharded_save_leaves_behind(tmp_path):
    saved(tmp_path)
    state, config = load_file(tmp_path / TENSORS), json.loads((tmp_path / CONFIG).read_text())
    for part in ("A", "B"):
        for gone in (torch.empty(0), torch.empty(0, 12), torch.tensor(1.0), torch.ones(3)):
            with pytest.raises(FdoraError, match=f"`state` must be a matrix in {part} of 'q', got shape"):
                from_peft(state | {f"base_model.model.q.lora_{part}.weight": gone}, config)


def test_nothing_to_write():
    with pytest.raises(FdoraError, match="`adapters` must be at least one, got none"):
        to_peft({})
