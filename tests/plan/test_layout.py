"""Capacity, times and layouts: their arithmetic, with rates that are round numbers."""

import json

import pytest

from fdora import FdoraError
from fdora.jobs.plan import Adapter, Card, Part, Profile, Setup, capacity, card, memory, plan, read_model, times
from fdora.jobs.plan.__main__ import main, read_adapters
from fdora.jobs.plan.cost import SPARE
from fdora.jobs.plan.layout import stages_of
from fdora.jobs.plan.model import LINEARS, OPTIMIZERS
from fdora.jobs.plan.record import Kernel, pieces

for package in ("transformers", "triton"):
    pytest.importorskip(package, reason="a plan records with it; `make test` installs it")
CONFIG = {"model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "vocab_size": 4096}
CONFIG |= {"num_attention_heads": 8, "num_key_value_heads": 2, "tie_word_embeddings": False}
MODEL = read_model(CONFIG)
SETUP = Setup(1024, (Adapter("a", 16),))
PROFILE = Profile(1e12, 1e10, 0.0, 1e12, 1e12, 1e12, 1e11, 0.0, 0.0, 1e10, 1e10)
SMALL = Card("small", 2 * 2**30, PROFILE, True)


def test_capacity_is_the_most_that_fits():
    budget = 2 * 2**30
    for part, flight in ((Part(6), 1), (Part(3, True, False), 2), (Part(3, False, True), 1)):
        most = capacity(MODEL, SETUP, budget, part, flight)
        assert most > 0 and memory(MODEL, SETUP, most, part, flight).peak <= budget
        assert memory(MODEL, SETUP, most + 256, part, flight).peak > budget
    assert capacity(MODEL, SETUP, 2**20) == 0


@pytest.mark.parametrize(("kind", "bytes"), [("nf4", 0.5625), ("nf4_nested", 0.516), ("int8", 1.0), ("fp8_blocks", 1.0)])
def test_stored_bytes_of_a_kind_are_those_of_the_format(kind, bytes):
    """Of a weight, but for scales of rows, tables and offsets."""
    dense, coded = memory(MODEL, SETUP, 1024), memory(MODEL, SETUP._replace(weights=kind), 1024)
    assert coded.linears == pytest.approx(dense.linears / 2 * bytes, rel=5e-3) and coded.embeddings == dense.embeddings
    assert coded.activations == pytest.approx(dense.activations, rel=1e-3) and coded.peak < dense.peak


def test_components_by_hand():
    """But for those that test_peaks.py and test_decoder.py compare with what was measured and with torch."""
    found = memory(MODEL, SETUP._replace(microbatches=4, adapter_bytes=2), 1024)
    assert found.norms == 4 * 6 * sum(N for N, _ in MODEL.linears.values()) and found.gradients == found.adapters
    several = memory(MODEL, SETUP._replace(adapters=(Adapter("a", 16), Adapter("b", 4))), 1024)
    one = memory(MODEL, SETUP, 1024)
    assert several.adapters == 2 * one.adapters  # a bank is as wide as its widest
    # f(gate) is not kept; where the tokens of each begin is
    assert one.activations - several.activations == pytest.approx(6 * 2 * 1024 * 4096, rel=1e-4)
    tied = memory(read_model(CONFIG | {"tie_word_embeddings": True}), SETUP, 1024)
    assert one.embeddings - tied.embeddings == 2 * 4096 * 1024
    assert memory(MODEL, SETUP, 1024, Part(2, True, False)).embeddings == 2 * (4096 * 1024 + 2 * 2 * 1024)


def test_optimizers_and_checkpointing_and_fuse_save_what_they_should():
    base = memory(MODEL, SETUP, 4096)
    assert [memory(MODEL, SETUP._replace(optimizer=o), 4096).optimizer for o in OPTIMIZERS] == [
        2 * base.adapters,
        0,
        base.adapters,
    ]
    fused = memory(MODEL, SETUP._replace(fuse=True), 4096)
    assert base.activations - fused.activations == 6 * 2 * 4096 * 2 * 4096  # act(gate) and its product with up
    again = memory(MODEL, SETUP._replace(checkpointing=True), 4096)
    assert again.activations < fused.activations / 4
    few = memory(MODEL, SETUP._replace(loss_tokens=1), 4096)
    assert base.activations - few.activations == 4 * (4096 - 4) * 4096


def flops(way, *kinds):
    return sum(kernel.flops for kernel in way.kernels if kernel.kind in kinds)


def test_a_layer_multiplies_what_it_must():
    """Forward and backward 2 M N K for each linear layer, and its low rank six times; two products of attention, half masked, and
    by a mask all of it; the head."""
    M, r, sizes = 1024, 16, MODEL.linears.values()
    base, low = (2 * M * sum(found) for found in ([N * K for N, K in sizes], [r * (N + K) for N, K in sizes]))
    _, layer, head = pieces(MODEL._replace(layers=2), SETUP, M, Part(2))
    assert flops(layer.forward, "product") == base + low
    assert flops(layer.backward, "product") == base + 2 * low
    assert [flops(way, "product") for way in head[1:3]] == [2 * M * MODEL.vocab * MODEL.hidden] * 2
    full, masked = layer, pieces(MODEL._replace(layers=2), SETUP._replace(packed=True), M, Part(2))[1]
    assert flops(full.forward, "attention") == 2 * M * M * MODEL.hidden
    assert flops(full.backward, "attention_backward") == 2.5 * flops(full.forward, "attention")
    assert flops(masked.forward, "attention") == 2 * flops(full.forward, "attention")
    assert flops(masked.backward, "attention_backward") == 2 * flops(full.backward, "attention_backward")
    frozen = pieces(MODEL._replace(layers=2), SETUP._replace(targets=frozenset(["q_proj"])), M, Part(2))[1]
    assert flops(frozen.forward, "product") == base + 2 * M * r * 2048


def test_times_add_up():
    assert PROFILE._replace(start=2.0).seconds((Kernel("product", 1e12, 0), Kernel("product", 0, 3e10))) == 8.0
    plain, again = (times(MODEL, SETUP._replace(checkpointing=c), 1024, PROFILE) for c in (False, True))
    inside = times(MODEL, SETUP, 1024, PROFILE, Part(6, False, False))  # without head and loss
    assert again.backward - plain.backward == pytest.approx(inside.forward) and again.forward == plain.forward
    assert plain.step(8) == pytest.approx(8 * (plain.forward + plain.backward) + plain.update)
    waiting = times(MODEL, SETUP, 1024, PROFILE._replace(layer=10.0))
    assert waiting.host == 6 * 7 * 10 and waiting.step(2) == 2 * 420  # seven calls in each layer
    fused = times(MODEL, SETUP._replace(fuse=True), 1024, PROFILE._replace(layer=10.0))
    assert fused.host == 6 * 3 * 10


def test_layouts():
    found = plan(MODEL, SETUP._replace(microbatches=4), gpu=SMALL, gpus=2, tokens=2048)
    kinds = {(way.kind, way.fuse, way.checkpointing): way for way in found.layouts}
    assert len(kinds) == 3 * 4
    rates = [way.tokens_per_second for way in found.layouts if way.fits]
    assert rates == sorted(rates, reverse=True) and found.best == found.layouts[0] and found.best.fits
    for way in found.layouts:
        assert way.fits == (way.memory.peak <= SMALL.bytes * (1 - SPARE)) == (way.capacity >= 2048)
    one, shards, line = (kinds[kind, False, False] for kind in ("replicas", "fsdp2", "pipeline"))
    assert one.tokens_per_second == pytest.approx(2 * 4 * 2048 / one.seconds)
    assert shards.memory.optimizer == one.memory.optimizer // 2 and shards.memory.activations == one.memory.activations
    assert shards.seconds >= one.seconds
    assert sum(line.stages) == 6 and 1 / 9 < line.bubble < 0.4  # 8 microbatches in 2 stages: at least 1 / 9
    assert line.memory.linears < one.memory.linears
    assert line.seconds == pytest.approx(one.seconds / (1 - line.bubble), rel=0.2)  # as many tokens, half a model on each GPU
    part = Part(3, True, False)
    kept, twice = (memory(MODEL, SETUP, 1024, part, n).activations for n in (1, 2))
    assert twice == 2 * kept > 0
    no_links = plan(MODEL, SETUP, gpu=SMALL._replace(profile=PROFILE._replace(gather=0.0, send=0.0)), gpus=2)
    assert {way.kind for way in no_links.layouts if way.seconds is None} == {"fsdp2", "pipeline"}
    tiny = plan(MODEL, SETUP, gpu=SMALL._replace(bytes=2**20))
    assert tiny.best is None and all(way.capacity == 0 for way in tiny.layouts)


def test_slow_links_cost_time_only_where_they_are_used():
    slow = SMALL._replace(profile=PROFILE._replace(gather=1e7))
    fast, late = (plan(MODEL, SETUP, gpu=c, gpus=2, tokens=1024) for c in (SMALL, slow))

    def by_kind(found, kind):
        return next(w.seconds for w in found.layouts if (w.kind, w.fuse, w.checkpointing) == (kind, False, False))

    assert by_kind(late, "fsdp2") > 10 * by_kind(fast, "fsdp2") and by_kind(late, "replicas") == by_kind(fast, "replicas")


@pytest.mark.parametrize(("layers", "gpus", "head", "want"), [(32, 2, 0, (16, 16)), (32, 2, 4, (18, 14)), (7, 3, 1, (3, 2, 2))])
def test_stages(layers, gpus, head, want):
    assert stages_of(layers, gpus, head) == want


def test_several_adapters_run_layer_by_layer():
    found = plan(MODEL, SETUP._replace(adapters=(Adapter("a", 16), Adapter("b", 8))), gpu=SMALL)
    assert {way.fuse for way in found.layouts} == {False}


BAD = {
    "length": dict(length=0),
    "loss_tokens": dict(loss_tokens=0),
    "adapters": dict(adapters=()),
    "adapters[0]": dict(adapters=(Adapter("a", 0),)),
    "weights": dict(weights="nf3"),
    "optimizer": dict(optimizer="lion"),
    "adapter_bytes": dict(adapter_bytes=3),
    "targets": dict(targets=frozenset({"lm_head"})),
    "fuse": dict(fuse=True, adapters=(Adapter("a", 4), Adapter("b", 4))),
}


@pytest.mark.parametrize("arg", BAD)
def test_arguments_out_of_range(arg):
    with pytest.raises(FdoraError, match=rf"plan: `{arg}".replace("[", r"\[")):
        plan(MODEL, SETUP._replace(**BAD[arg]), gpu=SMALL)


def test_command_line(tmp_path, capsys):
    files = {name: tmp_path / f"{name}.json" for name in ("config", "profile", "out")}
    files["config"].write_text(json.dumps(CONFIG))
    files["profile"].write_text(json.dumps({"gpu": "h200", "memory": 2**31, "profile": PROFILE._asdict()}))
    given = ["--model", str(files["config"]), "--profile", str(files["profile"]), "--length", "1024"]
    assert main([*given, "--adapters", "2x8", "law=16", "--gpus", "2", "--json", str(files["out"])]) == 0
    out = capsys.readouterr().out
    assert "law (r = 16)" in out and "Best: " in out and "fsdp2" in out
    said = json.loads(files["out"].read_text())
    assert [each["r"] for each in said["setup"]["adapters"]] == [8, 8, 16] and said["best"] == 0
    assert f"{said['layouts'][0]['memory']['peak'] / 2**30:.2f}" in out
    held = said["layouts"][0]["memory"]
    assert held["peak"] == held["resident"] + held["gradients"] + held["activations"] + held["temporary"]
    assert said["gpu"]["profile"] == PROFILE._asdict() and said["model"]["mlp_bias"] is False
    folder = tmp_path / "law"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps({"r": 4, "target_modules": ["q_proj", "v_proj"]}))
    assert main([*given, "--adapters", str(folder), "--json", str(files["out"])]) == 0
    assert json.loads(files["out"].read_text())["setup"]["targets"] == ["q_proj", "v_proj"]
    for wrong, text in {
        ("--adapters", "many"): "ranks",
        ("--gpu", "tpu"): "`gpu`",
        ("--gpu", "h100"): "of a h100",
        ("--tokens", "1000"): "multiple of the length",
        ("--targets", "lm_head"): "`targets`",
        ("--model", str(tmp_path / "none.json")): "Nothing is downloaded",
        ("--json", str(tmp_path / "none" / "out.json")): "`json` must be a file that can be written",
    }.items():
        with pytest.raises(SystemExit) as stopped:
            main([*given, *wrong])
        assert stopped.value.code == 2 and text in capsys.readouterr().err


FOLDERS = {
    "without r": ({"r": None}, "has a positive int `r`, got None"),
    "of another kind": ({"peft_type": "LOHA"}, "peft_type 'LOHA'"),
    "that trains the head": ({"modules_to_save": ["lm_head"]}, r"modules_to_save \['lm_head'\]"),
    "on some layers": ({"layers_to_transform": [0]}, r"layers_to_transform \[0\]"),
    "but some": ({"exclude_modules": "q_proj"}, "exclude_modules 'q_proj'"),
    "of two ranks": ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
    "with biases": ({"bias": "all"}, "bias 'all'"),
    "with biases of its own": ({"lora_bias": True}, "lora_bias True"),
    "of a pattern": ({"target_modules": "all-linear"}, "target_modules 'all-linear'"),
    "of numbers": ({"target_modules": [3]}, r"target_modules \[3\]"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_folders_that_train_something_else_are_refused(tmp_path, case):
    """Not planned as if what they say were not there."""
    more, said = FOLDERS[case]
    config = {"peft_type": "LORA", "r": 4, "target_modules": ["q_proj"], "bias": "none", "modules_to_save": None}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    assert read_adapters([str(tmp_path)])[1] == {"q_proj"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | more))
    with pytest.raises(FdoraError, match=said):
        read_adapters([str(tmp_path)])


def test_files_that_are_no_json(tmp_path):
    for name in ("config.json", "adapter_config.json"):
        (tmp_path / name).write_text("{")
    with pytest.raises(FdoraError, match=r"fdora.jobs.plan: `model` must be a JSON file, got JSONDecodeError"):
        read_model(tmp_path)
    with pytest.raises(FdoraError, match=r"fdora.jobs.plan: `adapters` must be a JSON file, got JSONDecodeError"):
        read_adapters([str(tmp_path)])


def test_a_gpu_that_nobody_measured_has_floors():
    found = card("B200")
    assert not found.measured and found.profile.flops == 2250e12 and found.profile.start == found.profile.host == 0
    ways = plan(MODEL, SETUP, gpu="b200", gpus=2).layouts
    assert {way.kind for way in ways if way.seconds is None} == {"fsdp2", "pipeline"} and ways[0].kind == "replicas"


def test_every_layout_of_an_h200_has_a_time():
    """Its links are measured, too."""
    assert all(way.seconds for way in plan(MODEL, SETUP, gpu="h200", gpus=2).layouts)


def test_a_broken_profile(tmp_path):
    (tmp_path / "p.json").write_text("{}")
    with pytest.raises(FdoraError, match=r"bench\.profile_gpu"):
        card("h200", tmp_path / "p.json")
    assert set(LINEARS) == set(MODEL.linears)
