"""The plug-in for vLLM on a small engine of its shape (vllm_stand_in.py). On the real one: `make serving`."""

import json
import logging
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from fdora import FdoraError
from fdora.integrations import vllm as plugin
from fdora.integrations._vllm import slots as rooms
from tests import reference
from tests.close import assert_within
from tests.integrations import vllm_stand_in as engine
from tests.snippets import ROOT

K, HIDDEN = 16, 24
SHAPES = {"a.q": (64, K), "a.k": (32, K), "a.v": (32, K), "a.o": (K, HIDDEN), "a.gate": (16, K)}
PACKED = {"a.qkv": ["a.q", "a.k", "a.v"]}
S = 1.5


@pytest.fixture(params=["after vLLM's expand", "in its place"])
def vllm(request, monkeypatch):
    """The pass as it is on a CPU, and as it is where there are kernels: here plain torch computes what they do."""
    if request.param == "in its place":
        monkeypatch.setattr(rooms, "select_backend", lambda t: SimpleNamespace(name="triton"))
    with engine.stand_in():
        plugin.register()
        yield
        plugin.unregister()


@pytest.fixture
def base():
    """W and bias of each layer, in float64 of what bfloat16 holds."""
    torch.manual_seed(0)
    return {
        n: (torch.randn(shape).bfloat16().double() / 4, 20 * torch.randn(shape[0]).bfloat16().double())
        for n, shape in SHAPES.items()
    }


def adapter(folder, base, layers=SHAPES, dora=True, r=4, seed=0, change=lambda tensors: None, **config):
    """A folder as PEFT saves it, and what is in it by layer."""
    gen = torch.Generator().manual_seed(seed)
    tensors, made = {}, {}
    for name in layers:
        N, width = SHAPES[name]
        A, B = (torch.randn(shape, generator=gen).bfloat16().float() / 3 for shape in ((r, width), (N, r)))
        m = None
        if dora:
            m = reference.norm(base[name][0], A.double(), B.double(), S).float() * (1 + 0.1 * torch.randn(N, generator=gen))
        made[name] = A, B, m
        at = f"base_model.model.{name}"
        tensors |= {f"{at}.lora_A.weight": A, f"{at}.lora_B.weight": B} | ({f"{at}.lora_magnitude_vector": m} if dora else {})
    change(tensors)
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    (folder / "adapter_config.json").write_text(json.dumps({"r": r, "lora_alpha": S * r, "use_dora": dora} | config))
    return made


def worker(base, dtype=torch.float32, rank=0, size=1, method=None, slots=3):
    """An engine with these layers; ``method`` makes a quantised form of W."""
    cut = lambda name: (base[name][0].to(dtype), base[name][1].to(dtype))  # noqa: E731
    qkv = [cut(name) for name in PACKED["a.qkv"]]
    at = {"rank": rank, "size": size}
    quantised = (lambda *W: method(torch.cat(W))) if method else lambda *W: None
    layers = {
        "a.qkv": (
            engine.ColumnParallelLinearWithLoRA,
            engine.Base([W for W, _ in qkv], 0, torch.cat([b for _, b in qkv]), **at, method=quantised(*(W for W, _ in qkv))),
        ),
        "a.o": (
            engine.RowParallelLinearWithLoRA,
            engine.Base([cut("a.o")[0]], 1, cut("a.o")[1], **at, method=quantised(cut("a.o")[0])),
        ),
        "a.gate": (engine.ReplicatedLinearWithLoRA, engine.Base([cut("a.gate")[0]], None, cut("a.gate")[1])),
        "embed": (engine.VocabParallelEmbeddingWithLoRA, None),
    }
    return engine.WorkerLoRAManager(engine.LoRAModelManager(layers, PACKED, slots, dtype=dtype), dtype)


def truth(base, made, name, x, ids, W=None):
    """In float64, each token with its adapter; and the same as PEFT computes it in the dtype of x."""
    out = {}
    for dtype in (torch.float64, x.dtype):
        w, b = (base[name][0] if W is None else W).to(dtype), base[name][1].to(dtype)
        rows = []
        for t, who in zip(x.to(dtype), ids, strict=True):
            y = w @ t + b
            if who and name in made[who]:
                A, B, m = made[who][name]
                A, B = A.to(dtype), B.to(dtype)
                y = y + S * (B @ (A @ t))
                if m is not None:
                    g = (m.double() / reference.norm(w.double(), A.double(), B.double(), S)).to(dtype)
                    y = g * (y - b) + b
            rows.append(y)
        out[dtype] = torch.stack(rows)
    return out[torch.float64], out[x.dtype]


def calls(worker, dtype, ids, seed=5):
    """Each layer by its name in the checkpoint: x and the rows of y that are its."""
    gen = torch.Generator().manual_seed(seed)
    for name, parts in {"a.qkv": PACKED["a.qkv"], "a.o": ["a.o"], "a.gate": ["a.gate"]}.items():
        x = torch.randn(len(ids), SHAPES[parts[0]][1], generator=gen).to(dtype)
        y = worker._adapter_manager.run(name, x, ids)
        for part, rows in zip(parts, y.split([SHAPES[p][0] for p in parts], 1), strict=True):
            yield part, x, rows


IDS = [1, 0, 2, 3, 1, 0, 3, 2]  # DoRA of all layers, none, LoRA, DoRA without k and o


def load_three(worker, tmp_path, base):
    made = {
        1: adapter(tmp_path / "one", base, seed=1),
        2: adapter(tmp_path / "two", base, dora=False, seed=2),
        3: adapter(tmp_path / "three", base, ["a.q", "a.v", "a.gate"], r=2, seed=3),
    }
    for id, folder in ((1, "one"), (2, "two"), (3, "three")):
        worker.add_adapter(tmp_path / folder, id)
    return made


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mixed_batch_is_each_adapter_alone(vllm, base, tmp_path, dtype):
    found = worker(base, dtype)
    made = load_three(found, tmp_path, base)
    for part, x, y in calls(found, dtype, IDS):
        want, naive = truth(base, made, part, x, IDS)
        assert_within(y, naive, want, part)
    plain = dict(made) | {1: {}, 3: {}}
    assert not torch.allclose(want, truth(base, plain, part, x, IDS)[0], rtol=0.01)  # it would have noticed


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_base_and_lora_keep_the_bits_of_a_vllm_without_the_plugin(base, tmp_path, dtype):
    """In the same batch as DoRA, with a bias; and where there is no DoRA nothing is asked of the layer at all."""
    ids = [0, 2, 0, 2, 2, 0]
    with engine.stand_in():
        stock = worker(base, dtype)
        adapter(tmp_path / "lora", base, dora=False, seed=2)
        stock.add_adapter(tmp_path / "lora", 2)
        want = [y for _, _, y in calls(stock, dtype, ids)]
        plugin.register()
        try:
            found = worker(base, dtype)
            found.add_adapter(tmp_path / "lora", 2)
            assert found._adapter_manager.fdora_slots.idle.item()
            assert all(torch.equal(y, w) for (_, _, y), w in zip(calls(found, dtype, ids), want, strict=True))
            adapter(tmp_path / "dora", base, seed=1)
            found.add_adapter(tmp_path / "dora", 1)
            assert not found._adapter_manager.fdora_slots.idle.item()
            for (_, _, y), w in zip(calls(found, dtype, ids), want, strict=True):
                assert torch.equal(y, w)
            for (_, _, y), w in zip(calls(found, dtype, [1, *ids[1:]]), want, strict=True):
                assert torch.equal(y[1:], w[1:]) and not torch.equal(y[0], w[0])
        finally:
            plugin.unregister()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_two_processes_of_tensor_parallelism(vllm, base, tmp_path, dtype):
    """g of rows is that of whole rows; g of columns is cut as B is. A gate is whole in both."""
    one = worker(base, dtype)
    made = load_three(one, tmp_path, base)

    def work(rank):
        mine = worker(base, dtype, rank, 2)
        for id, folder in ((1, "one"), (2, "two"), (3, "three")):
            mine.add_adapter(tmp_path / folder, id)
        gen, out = torch.Generator().manual_seed(5), {}
        for name, width in (("a.qkv", K), ("a.o", HIDDEN), ("a.gate", K)):
            x = torch.randn(len(IDS), width, generator=gen).to(dtype)
            out[name] = mine._adapter_manager.run(name, x.chunk(2, 1)[rank].contiguous() if name == "a.o" else x, IDS)
        return out

    two = engine.in_parallel(2, work)
    for part, x, y in calls(one, dtype, IDS):
        if part in PACKED["a.qkv"]:
            i = PACKED["a.qkv"].index(part)
            y = torch.cat([rank["a.qkv"].split([SHAPES[p][0] // 2 for p in PACKED["a.qkv"]], 1)[i] for rank in two], 1)
        else:
            y = two[1][part]
            assert torch.equal(y, two[0][part])
        want, naive = truth(base, made, part, x, IDS)
        assert_within(y, naive, want, part)


@pytest.mark.parametrize("step", [None, 0.03], ids=["weights", "weights and x"])
def test_a_quantised_base(vllm, base, tmp_path, step):
    """W is read through the product, whatever its format; a static scale of x, of which 1 is no multiple, moves nothing."""
    found = worker(base, method=lambda W: engine.Codes(W.float(), step))
    manager = found._adapter_manager
    decoded = {
        n: W.double()
        for n, W in zip(PACKED["a.qkv"], manager.modules["a.qkv"].base_layer.quant_method.W.split([64, 32, 32]), strict=True)
    }
    decoded["a.o"] = manager.modules["a.o"].base_layer.quant_method.W.double()
    adapter(tmp_path / "one", base, seed=1)
    found.add_adapter(tmp_path / "one", 1)
    tensors = adapter(tmp_path / "again", base, seed=1)
    slot = manager.lora_index_to_id.index(1)
    for name, parts in {"a.qkv": PACKED["a.qkv"], "a.o": ["a.o"]}.items():
        want = [tensors[p][2].double() / reference.norm(decoded[p], *(t.double() for t in tensors[p][:2]), S) for p in parts]
        torch.testing.assert_close(manager.modules[name].g_stacked[slot].double(), torch.cat(want), rtol=3e-6, atol=0)


def renamed(old, new):
    def change(tensors):
        for key in [key for key in tensors if old in key]:
            tensors[key.replace(old, new)] = tensors.pop(key)

    return change


def without(part):
    return lambda tensors: tensors.pop(next(key for key in tensors if part in key))


def set_to(key, value):
    def change(tensors):
        tensors[f"base_model.model.{key}"] = value

    return change


BAD = {
    "no magnitude": (without("a.k.lora_magnitude"), {}, "`a.k` must be a layer with A, B and m, got none of m."),
    "no A": (without("a.k.lora_A"), {}, "got none of A."),
    "not said": (lambda t: None, {"use_dora": False}, "`use_dora` must be true beside magnitudes, got false."),
    "NaN": (set_to("a.o.lora_magnitude_vector", torch.full((K,), torch.nan)), {}, "`a.o` must be an adapter of finite numbers"),
    "magnitudes of another layer": (set_to("a.k.lora_magnitude_vector", torch.ones(5)), {}, "got (4, 16), (32, 4), (5,)."),
    "another base": (
        lambda t: [
            set_to(f"a.o.{n}", v)(t) for n, v in (("lora_B.weight", torch.ones(8, 4)), ("lora_magnitude_vector", torch.ones(8)))
        ],
        {},
        "`a.o` must be an adapter of a weight (16, 24), got (8, 24). It belongs to another base model.",
    ),
    "an embedding": (
        renamed("a.gate", "embed"),
        {},
        "`embed` must be a linear layer, LoRA of which vLLM cuts by rows alone, got VocabParallel",
    ),
    "no such layer": (
        renamed("a.gate", "a.other"),
        {},
        "`a.other` must be a linear layer that this server adapts, got none of that name.",
    ),
}


@pytest.mark.parametrize("fault", BAD)
def test_what_cannot_be_served_is_refused_before_anything_is_loaded(vllm, base, tmp_path, fault):
    change, config, words = BAD[fault]
    found = worker(base)
    made = {1: adapter(tmp_path / "good", base, seed=1)}
    found.add_adapter(tmp_path / "good", 1)
    manager = found._adapter_manager
    before = [y.clone() for _, _, y in calls(found, torch.float32, [1, 0])]
    adapter(tmp_path / "bad", base, change=change, **config)
    with pytest.raises(FdoraError) as error:
        found.add_adapter(tmp_path / "bad", 2)
    text = str(error.value)
    assert text.startswith("fdora.integrations.vllm: `") and words in text and text.count("\n") == 0
    assert manager.lora_index_to_id == [1, None, None] and list(manager.registered) == [1]
    assert all(torch.equal(y, b) for (_, _, y), b in zip(calls(found, torch.float32, [1, 0]), before, strict=True))
    assert made


def test_an_error_while_a_slot_is_filled_leaves_nothing_behind(vllm, base, tmp_path):
    base["a.o"][0][3, 5] = torch.nan  # shows in the norm alone
    found = worker(base)
    clean = {n: (W.nan_to_num(), b) for n, (W, b) in base.items()}
    adapter(tmp_path / "one", clean)
    with pytest.raises(FdoraError, match=r"`a\.o` must be finite on this base, got a g of NaN or inf\."):
        found.add_adapter(tmp_path / "one", 1)
    manager = found._adapter_manager
    assert manager.lora_index_to_id == [None] * 3 and not manager.registered and manager.fdora_slots.idle.item()


@pytest.mark.parametrize("attribute", ["input_zero_point", "input_global_scale"])
def test_a_weight_that_a_product_does_not_show_is_refused(vllm, base, tmp_path, attribute):
    found = worker(base)
    setattr(found._adapter_manager.modules["a.o"].base_layer, attribute, torch.ones(1))
    adapter(tmp_path / "one", base)
    with pytest.raises(FdoraError, match=f"`a.o` must be a layer whose weight can be read, got one with {attribute}"):
        found.add_adapter(tmp_path / "one", 1)


def test_slots_are_used_again_and_g_is_computed_once(vllm, base, tmp_path, monkeypatch):
    found = worker(base, slots=1)
    manager, slots = found._adapter_manager, found._adapter_manager.fdora_slots
    made = {1: adapter(tmp_path / "one", base, seed=1), 2: adapter(tmp_path / "two", base, dora=False, seed=2)}
    made[3] = adapter(tmp_path / "three", base, ["a.q", "a.v", "a.gate"], seed=3)
    for id, folder in ((1, "one"), (2, "two"), (3, "three"), (1, None), (3, None), (2, None)):
        with monkeypatch.context() as patch:
            if folder is None:
                patch.setattr(rooms, "g_of", None)
                manager.activate_adapter(id)
            else:
                found.add_adapter(tmp_path / folder, id)
        assert slots.kinds == [id != 2] and slots.idle.item() == (id == 2) and slots.holds.tolist() == [int(id != 2)]
        for part, x, y in calls(found, torch.float32, [id, 0]):
            want, naive = truth(base, made, part, x, [id, 0])
            assert_within(y, naive, want, f"{id} {part}")
        manager._deactivate_adapter(id)
        assert slots.idle.item()


def test_fully_sharded_lora_is_refused(vllm, base, tmp_path, monkeypatch):
    """Where it is cut. One process has all of it."""
    monkeypatch.setattr(engine.LoRAConfig, "fully_sharded_loras", True)
    adapter(tmp_path / "one", base)
    worker(base).add_adapter(tmp_path / "one", 1)
    with pytest.raises(FdoraError, match=r"`a\.q` must be a linear layer, LoRA of which vLLM cuts by rows alone"):
        worker(base, size=2).add_adapter(tmp_path / "one", 1)


def test_twice_is_once_and_off_is_stock():
    with engine.stand_in():
        before = {part: plugin._find(part)[2] for part in plugin.PARTS}
        plugin.register()
        once = {part: plugin._find(part)[2] for part in plugin.PARTS}
        plugin.register()
        assert {part: plugin._find(part)[2] for part in plugin.PARTS} == once
        assert all(once[part] is not before[part] for part in before)
        assert engine.LoRAConfig().compute_hash() != "of the config"  # compiled code of a vLLM without the plug-in is not taken
        plugin.unregister()
        assert {part: plugin._find(part)[2] for part in plugin.PARTS} == before


def test_another_vllm_is_left_alone_with_one_sentence(base, tmp_path, monkeypatch, caplog):
    with engine.stand_in():
        monkeypatch.delattr(engine.LoRAModelManager, "register_module")
        logging.getLogger("vllm").propagate = True
        with caplog.at_level(logging.WARNING):
            plugin.register()
        (line,) = [record.getMessage() for record in caplog.records]
        assert line == plugin.obstacle() and "`vllm.lora.model_manager.LoRAModelManager.register_module` must be" in line
        adapter(tmp_path / "one", base)
        monkeypatch.undo()
        with pytest.raises(ValueError, match="DoRA is not supported"):
            worker(base).add_adapter(tmp_path / "one", 1)
    assert "ModuleNotFoundError" in plugin.obstacle() or plugin.obstacle() == ""  # without vLLM, or with one that is known


def test_vllm_finds_it():
    text = (ROOT / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]\nfdora = "fdora.integrations.vllm:register"\n' in text
