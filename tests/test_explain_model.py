"""fdora explain: its formulas against what torch counts, its shapes against transformers' and PEFT's own."""

import json
import math
from itertools import pairwise

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fdora import FdoraError, predict
from fdora.__main__ import main
from fdora.explain_model import KNOWN, Kind, by_plans, cost, explain, header, read
from fdora.functional import dora_init, dora_linear
from fdora.predict import GPUS, Gpu
from tests.memory import Traffic, held_bytes

QWEN = {"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4}
QWEN |= {"num_key_value_heads": 2, "head_dim": 24, "num_hidden_layers": 3}
M, N, K, r = 500, 300, 200, 7


@pytest.fixture
def counting(monkeypatch):
    """Two GPUs that turn a prediction into its flops, and into its bytes."""
    monkeypatch.setitem(GPUS, "flops", Gpu("", 1, math.inf))
    monkeypatch.setitem(GPUS, "bytes", Gpu("", math.inf, 1))


def held(layer, x):
    """Bytes that autograd keeps beside parameters: x, and what was made on the way to the output, which counts if it is kept."""
    return held_bytes(lambda: layer(x)) + x.nbytes


@pytest.mark.parametrize("method", ["lora", "peft_dora"])
def test_stock_layers_cost_what_torch_counts(counting, method):
    """The same flops, the same bytes but for vectors, the same kept."""
    peft = pytest.importorskip("peft", reason="compares with PEFT's layers; `make test` installs it")
    base = torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(K, N, bias=False))
    config = peft.LoraConfig(r=r, target_modules=["1"], use_dora=method == "peft_dora", lora_alpha=3)
    model = peft.get_peft_model(base, config)
    x, dy = torch.randn(M, K, requires_grad=True), torch.randn(M, N)
    kept = held(model, x) - dy.nbytes  # the output is not
    with FlopCounterMode(display=False) as flops, Traffic() as traffic:
        y = model(x)
        forward = flops.get_total_flops(), traffic.bytes
        y.backward(dy)
    backward = flops.get_total_flops() - forward[0], traffic.bytes - forward[1]
    in_flops, in_bytes = (predict.predict(M, N, K, r, gpu=g, method=method, itemsize=4) for g in ("flops", "bytes"))
    assert (in_flops.forward, in_flops.backward) == (forward[0], backward[0])
    assert in_bytes.forward == pytest.approx(forward[1], rel=2e-3) and in_bytes.backward == pytest.approx(backward[1], rel=2e-3)
    assert in_bytes.kept <= kept <= in_bytes.kept + 8 * 4 * N and in_bytes.output == 0


@pytest.mark.parametrize("bias", [False, True])
def test_our_layer_keeps_what_is_said_and_multiplies_as_much(counting, bias):
    x, W = torch.randn(M, K, requires_grad=True), torch.randn(N, K)
    A, B, m = (t.requires_grad_() for t in dora_init(W, r))
    bias = torch.randn(N) if bias else None
    kept = held(lambda x: dora_linear(x, W, A, B, m, s=2.0, bias=bias), x)
    with FlopCounterMode(display=False) as flops:
        y = dora_linear(x, W, A, B, m, s=2.0, bias=bias)
        forward = flops.get_total_flops()
        y.backward(torch.randn(M, N))
    said = predict.predict(M, N, K, r, gpu="flops", itemsize=4)
    assert (said.forward, said.backward) == (forward, flops.get_total_flops() - forward)
    assert said.output == 4 * M * N and said.kept + said.output <= kept <= said.kept + said.output + 8 * 4 * N


def test_a_prediction_by_hand():
    """A few tokens are bound by the bytes of W."""
    e, rate = 2, GPUS["h100"]
    few = predict.predict(1, 8192, 8192, 16, gpu="h100")
    assert few.path.startswith("few tokens") and few.forward == pytest.approx(e * 8192 * 8192 / rate.bytes, rel=0.01)
    apart = [predict.predict(1, 8192, 8192, 16, gpu="b200"), predict.predict(1, 8192, 8192, 65, gpu="h100")]
    for found, per_second in zip(apart, (GPUS["b200"].bytes, rate.bytes), strict=True):  # the norm reads W again
        assert found.forward == pytest.approx(2 * e * 8192 * 8192 / per_second, rel=0.03)
    assert predict.predict(65, 8192, 8192, 16).path != predict.predict(64, 8192, 8192, 16).path


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize(("tokens", "N", "K", "r"), [(4096, 4096, 4096, 16), (4096, 4096, 4096, 128), (8, 8192, 8192, 16)])
def test_our_numbers_are_those_of_the_plans_and_near_the_formulas(gpu, tokens, N, K, r):
    pytest.importorskip("triton", reason="plans need Triton; `make test` installs it")
    kind = Kind("q_proj", N, K, r, 1)
    planned, formula = cost(tokens, kind, gpu, "fdora"), predict.predict(tokens, N, K, r, gpu=gpu)
    assert planned == by_plans(tokens, kind, gpu) and planned.path == formula.path and planned.output == formula.output
    assert planned.kept == formula.kept + 4 * N  # c
    # What the formulas leave out: partial sums, of the norm and of dm and dB; and where cuBLAS multiplies and a pass adds the
    # rest, the product that is written and read between them.
    forward, backward = (2 * 2 * tokens * size / GPUS[gpu].bytes for size in (N, K))
    assert formula.forward <= planned.forward <= 1.03 * formula.forward + forward
    assert formula.backward <= planned.backward <= 1.10 * formula.backward + backward


def test_above_rank_64_dB_reads_dz_again(counting):
    """Every unit of rank costs the same, but for the step to 65."""
    costs = [predict.predict(M, N, K, each, gpu="bytes", itemsize=1).backward for each in (63, 64, 65, 66)]
    steps = [b - a for a, b in pairwise(costs)]
    assert steps[0] == steps[2] and steps[1] == steps[0] + M * N


@pytest.mark.parametrize("kind", KNOWN)
def test_shapes_are_those_of_transformers(tmp_path, kind):
    """Every model type that it knows, built on the meta device from the very file."""
    transformers = pytest.importorskip("transformers", reason="compares with transformers' models; `make test` installs it")
    if kind not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {kind}; runs with 5.23, as in `make test`")
    config = transformers.AutoConfig.for_model(**(QWEN | {"model_type": kind}))
    config.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = transformers.AutoModel.from_config(config)
    want = {}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            key = name.rpartition(".")[2], layer.out_features, layer.in_features
            want[key] = want.get(key, 0) + 1
    found = {(k.name, k.N, k.K): k.layers for k in read(tmp_path, None).kinds}
    assert found == want


def adapter(folder, **options):
    peft = pytest.importorskip("peft", reason="reads what PEFT writes; `make test` installs it")
    layers = {"q_proj": torch.nn.Linear(32, 48), "k_proj": torch.nn.Linear(32, 16), "v_proj": torch.nn.Linear(32, 16)}
    block = torch.nn.ModuleDict(layers | {"conv": torch.nn.Conv1d(4, 8, 3), "embed": torch.nn.Embedding(10, 32)})
    base = torch.nn.ModuleDict({"0": block, "1": torch.nn.ModuleDict({"q_proj": torch.nn.Linear(32, 48)})})
    settings = dict(r=4, rank_pattern={"k_proj": 2}, target_modules=["q_proj", "k_proj", "v_proj"], use_dora=True)
    peft.get_peft_model(base, peft.LoraConfig(**settings | options)).save_pretrained(folder)
    return folder


def test_an_adapter(tmp_path):
    title, kinds, notes = read(adapter(tmp_path / "mine"), None)
    assert title == "adapter mine" and not notes
    assert sorted(kinds) == [("k_proj", 16, 32, 2, 1), ("q_proj", 48, 32, 4, 2), ("v_proj", 16, 32, 4, 1)]
    out = explain(tmp_path / "mine", tokens=128, gpu="a100")
    assert "A100 SXM 80 GB" in out and "312 TFLOP/s" in out
    line = next(line for line in out.splitlines() if line.startswith("q_proj"))
    each = predict.predict(128, 48, 32, 4, gpu="a100")
    assert line.split()[:5] == ["q_proj", "(48,", "32)", "2", "4"] and f"{1e3 * (each.forward + each.backward):.3f}" in line


def test_an_adapter_of_other_kinds(tmp_path):
    _, kinds, notes = read(adapter(tmp_path, target_modules=["q_proj", "conv", "embed"], use_dora=False), None)
    assert kinds == [("q_proj", 48, 32, 4, 2)]
    assert notes == ["2 of 2 layers have no magnitude: they are plain LoRA today.", "Left out: 2 embeddings and convolutions."]


def test_no_weight_is_read(tmp_path):
    """The file ends where its header does."""
    file = adapter(tmp_path) / "adapter_model.safetensors"
    whole = file.read_bytes()
    before = explain(tmp_path)
    file.write_bytes(whole[: 8 + int.from_bytes(whole[:8], "little")])
    assert explain(tmp_path) == before and header(file)


def test_the_total(tmp_path, capsys):
    """Per layer times how many there are; x of q, k, v and of gate, up counts once."""
    file = tmp_path / "model.json"
    file.write_text(json.dumps(QWEN))
    assert main(["explain", "--model", str(file), "--tokens", "4096", "--r", "8", "--gpu", "b200"]) == 0
    out = capsys.readouterr().out
    head, shapes = (
        "qwen3, 3 layers, all linear layers adapted, 4096 tokens, bfloat16",
        [
            (96, 64),
            (48, 64),
            (48, 64),
            (64, 96),
            (160, 64),
            (160, 64),
            (64, 160),
        ],
    )
    assert out.startswith(head) and out.count("x A^T, then the product") == 7
    each = {m: [predict.predict(4096, *s, 8, gpu="b200", method=m) for s in shapes] for m in ("fdora", "lora", "peft_dora")}
    ms = [f"{3e3 * sum(p.forward + p.backward for p in ps):.1f}" for ps in each.values()]
    again = 3 * 3 * 2 * 4096 * 64  # two times x of q, k, v and one of gate and up, in each of three layers
    kept = [f"{(3 * sum(p.kept for p in ps) - again) / 2**20:.0f}" for ps in each.values()]
    kept[0] += f" + {3 * sum(p.output for p in each['fdora']) / 2**20:.0f}"
    assert out.splitlines()[-1].split("once")[1].split() == " ".join([*ms, *kept]).split()


def test_r_is_16_by_default(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    assert {kind.r for kind in read(tmp_path, None).kinds} == {16} and {kind.r for kind in read(tmp_path, 3).kinds} == {3}


def written(tmp_path, **config):
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def broken(tmp_path, **config):
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"} | config))
    return tmp_path


def tensors(tmp_path, text):
    broken(tmp_path)
    data = text.encode()
    (tmp_path / "adapter_model.safetensors").write_bytes(len(data).to_bytes(8, "little") + data)
    return tmp_path


A = '"l.lora_A.weight": {"shape": [4, 8]}'
MISTAKES = {
    "nothing": (
        lambda p: p / "none.json",
        "`model` must be a config.json, a folder with one, or the folder of a PEFT adapter, got",
    ),
    "empty folder": (lambda p: p, "`model` must be a config.json, a folder with one"),
    "no JSON": (
        lambda p: [(p / "c.json").write_text("{"), p / "c.json"][1],
        "`model` must be a JSON file, got JSONDecodeError",
    ),
    "a list": (lambda p: [(p / "c.json").write_text("[]"), p / "c.json"][1], "`model` must be a JSON object, got a list"),
    "another model": (lambda p: written(p, **QWEN | {"model_type": "gpt2"}), "`model` must be of a model type among gemma,"),
    "a nested model": (lambda p: written(p, model_type="gemma3", text_config={}), "Pass the 'gemma3' model's text part"),
    "no size": (lambda p: written(p, **QWEN | {"hidden_size": None}), "a positive integer 'hidden_size', got None"),
    "a size of 0": (lambda p: written(p, **QWEN | {"intermediate_size": 0}), "a positive integer 'intermediate_size', got 0"),
    "no head_dim": (lambda p: written(p, **QWEN | {"head_dim": None}), "a positive integer 'head_dim', got None"),
    "not LoRA": (lambda p: broken(p, peft_type="IA3"), "`model` must be an adapter of peft_type LORA, got 'IA3'"),
    "parameters": (
        lambda p: broken(p, target_parameters=["experts.w"]),
        "`model` must be an adapter of layers, got target_parameters",
    ),
    "no tensors": (broken, "`model` must be a folder with a whole adapter_model.safetensors, got FileNotFoundError"),
    "a cut header": (lambda p: tensors(p, '{"a": '), "a whole adapter_model.safetensors, got JSONDecodeError"),
    "no shapes": (lambda p: tensors(p, '{"a": {}}'), "a whole adapter_model.safetensors, got KeyError"),
    "A without B": (lambda p: tensors(p, f"{{{A}}}"), "A (r, K) and B (N, r) for each layer, got (4, 8) and None for l"),
    "another rank": (lambda p: tensors(p, f'{{{A}, "l.lora_B.weight": {{"shape": [8, 5]}}}}'), "got (4, 8) and (8, 5) for l"),
    "no layer": (lambda p: tensors(p, "{}"), "`model` must be an adapter with linear layers, got 0 layers of other kinds"),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_mistakes_are_a_sentence_and_status_2(tmp_path, capsys, what):
    make, words = MISTAKES[what]
    with pytest.raises(SystemExit) as stopped:
        main(["explain", "--model", str(make(tmp_path))])
    err = capsys.readouterr().err
    assert stopped.value.code == 2 and err.startswith("fdora.explain: ") and words in err and err.count("\n") == 1


def test_mistakes_in_arguments(tmp_path):
    folder = written(tmp_path, **QWEN)
    for options, words in (
        ({"tokens": 0}, "`tokens` must be at least 1, got 0"),
        ({"r": 0}, "`r` must be at least 1, got 0"),
        (
            {"gpu": "v100"},
            "`gpu` must be one of h200, h100, a100, l40s, b200, 4090, b300, 5090, rtx6000pro, mi300x, got 'v100'",
        ),
    ):
        with pytest.raises(FdoraError) as error:
            explain(folder, **options)
        assert words in str(error.value)
    with pytest.raises(FdoraError, match="`r` must be left out for an adapter, got 8"):
        read(broken(folder), 8)
    for arguments, words in (((1, 1, 1, 0), "`r` must be at least 1"), ((0, 1, 1, 1), "`M` must be at least 1")):
        with pytest.raises(FdoraError, match=words):
            predict.predict(*arguments)
    with pytest.raises(FdoraError, match="`method` must be"):
        predict.predict(1, 1, 1, 1, method="dora")
    with pytest.raises(FdoraError, match="`gpu` must be"):
        predict.predict(1, 1, 1, 1, gpu="v100")
