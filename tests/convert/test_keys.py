"""Each framework's names, there and back, bit for bit; and the meaning, against the framework or its formula in float64."""

import json

import pytest
import torch

from fdora import FdoraError
from fdora.convert import (
    Adapter,
    from_kohya,
    from_peft,
    from_torchtune,
    kohya_names,
    llama_from_torchtune,
    llama_to_torchtune,
    to_kohya,
    to_peft,
    to_torchtune,
)
from tests.convert.make import columns, layer, merged

PATHS = ("model.layers.0.self_attn.q_proj", "model.layers.11.mlp.down_proj")


def same(got, want):
    assert got.keys() == want.keys()
    for path, p in want.items():
        assert got[path].norm_axis == p.norm_axis and got[path].s == pytest.approx(p.s, rel=1e-7)
        for a, b in zip(got[path][:3], p[:3], strict=True):
            assert (a is None and b is None) or (a.dtype == b.dtype and torch.equal(a, b))


def adapters(**more):
    return {path: layer(seed=i, **more)[1] for i, path in enumerate(PATHS)}


def shapes():
    """A linear layer in half precision, and a convolution."""
    _, p = layer()
    _, q = layer(K=36, s=2.0)
    q = q._replace(A=q.A.view(3, 4, 3, 3), B=q.B.view(24, 3, 1, 1))
    return {"to_q": Adapter(p.A.half(), p.B.bfloat16(), p.m, 4 / 3), "conv": q}


def test_peft_round_trip():
    for there in (adapters(), shapes(), {p: a._replace(m=None) for p, a in adapters().items()}):
        state, config = to_peft(there)
        same(from_peft(state, json.loads(json.dumps(config))), there)
    state, config = to_peft(adapters())
    assert "base_model.model.model.layers.11.mlp.down_proj.lora_magnitude_vector" in state and config["use_dora"]
    assert to_peft(shapes())[0]["base_model.model.conv.lora_magnitude_vector"].shape == (1, 24, 1, 1)


def test_torchtune_round_trip():
    state, config = to_torchtune(adapters())
    assert sorted(state)[:3] == [f"{PATHS[0]}.{end}" for end in ("lora_a.weight", "lora_b.weight", "magnitude")]
    same(from_torchtune(state, config), adapters())
    with pytest.raises(FdoraError, match="of one rank and alpha"):
        to_torchtune(shapes())


@pytest.mark.parametrize("prefix", ["lora_unet", "lycoris"])
def test_kohya_round_trip(prefix):
    W, p = layer()
    for there in (shapes(), {"a.b_c": columns(p, W), "a.d": p, "e": p._replace(m=None)}):
        names = kohya_names([*there, "never.used"], prefix)
        state = to_kohya(there, names)
        same(from_kohya(state, names), there)
        again = to_kohya(from_kohya(state, names), names)
        assert state.keys() == again.keys() and all(torch.equal(state[k], again[k]) for k in state)
    assert state[f"{prefix}_a_b_c.dora_scale"].shape == (1, 20) and state[f"{prefix}_a_d.dora_scale"].shape == (24, 1)
    assert state[f"{prefix}_e.alpha"] == pytest.approx(0.7 * 3) and f"{prefix}_e.dora_scale" not in state


def test_no_alpha_means_one():
    state = to_kohya({"q": layer()[1]}, {"q": "q"})
    del state["q.alpha"]
    assert from_kohya(state, {"q": "q"})["q"].s == 1.0


def rotated(x, halves):
    """RoPE by one angle of its own for each pair: neighbours, as torchtune has them, or halves of a head."""
    a, b = x.chunk(2, -1) if halves else (x[..., ::2], x[..., 1::2])
    angle = torch.linspace(0.3, 2.0, a.shape[-1], dtype=x.dtype)
    a, b = a * angle.cos() - b * angle.sin(), a * angle.sin() + b * angle.cos()
    return torch.cat((a, b), -1) if halves else torch.stack((a, b), -1).flatten(-2)


def test_llama_paths_and_rows():
    """The scores of attention are the same on both sides: q and k of W, B *and* m in their order."""
    heads, kv, dim = 4, 2, 6
    (Wq, q), (Wk, k) = layer(N=heads * dim), layer(N=kv * dim, seed=1)
    tune = {
        "layers.3.attn.q_proj": q,
        "layers.3.attn.k_proj": k,
        "layers.3.attn.output_proj": q,
        "layers.3.mlp.w2": k,
        "output": q,
    }
    hf = llama_from_torchtune(tune, heads=heads, kv_heads=kv)
    names = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.o_proj", "mlp.down_proj")
    assert list(hf) == [*(f"model.layers.3.{n}" for n in names), "lm_head"]
    assert torch.equal(hf["lm_head"].B, q.B) and not torch.equal(hf["model.layers.3.self_attn.q_proj"].m, q.m)
    same(llama_to_torchtune(hf, heads=heads, kv_heads=kv), tune)
    same(llama_to_torchtune(llama_from_torchtune(tune)), tune)
    assert torch.equal(llama_from_torchtune(tune)["model.layers.3.self_attn.q_proj"].m, q.m)

    def scores(Wq, q, Wk, k, halves):
        x = torch.randn(5, 20, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        at_q, at_k = (rotated((x @ merged(W, p).T).view(5, n, dim), halves) for W, p, n in ((Wq, q, heads), (Wk, k, kv)))
        return torch.einsum("ihd,jhd->hij", at_q, at_k.repeat_interleave(heads // kv, 1))

    def moved(W, n):  # what torchtune's converter does to W: row 2 j + i of a head goes to row i dim / 2 + j
        return torch.stack([W.view(n, dim, -1)[:, 2 * j + i] for i in range(2) for j in range(dim // 2)], 1).view_as(W)

    hq, hk = (hf[f"model.layers.3.self_attn.{n}_proj"] for n in "qk")
    torch.testing.assert_close(scores(moved(Wq, heads), hq, moved(Wk, kv), hk, True), scores(Wq, q, Wk, k, False))
    left_behind = scores(moved(Wq, heads), hq._replace(m=q.m), moved(Wk, kv), hk, True)
    assert not torch.allclose(left_behind, scores(Wq, q, Wk, k, False), rtol=1e-2)


def test_nothing_is_lost_in_silence():
    _, p = layer()
    W = layer()[0]
    state, config = to_peft(adapters())
    with pytest.raises(
        FdoraError, match=r"`state` must be of base_model.model..*got 'base_model.model.embed.lora_embedding_A'"
    ):
        from_peft(state | {"base_model.model.embed.lora_embedding_A": p.A}, config)
    with pytest.raises(FdoraError, match=r"got 'lora_unet_q.hada_w1_a'"):
        from_kohya({"lora_unet_q.hada_w1_a": p.A}, {"q": "lora_unet_q"})
    with pytest.raises(FdoraError, match="`state` must be A and B of 'q', got A alone"):
        from_torchtune({"q.lora_a.weight": p.A}, {"r": 3, "lora_alpha": 3})
    with pytest.raises(FdoraError, match="must hold an adapter, got nothing"):
        from_peft({}, config)
    with pytest.raises(FdoraError, match="'x' too, got 1 others"):
        from_kohya(to_kohya({"x": p}, {"x": "x"}), {"y": "y"})
    with pytest.raises(FdoraError, match="'x' too"):
        to_kohya({"x": p}, {})
    with pytest.raises(FdoraError, match=r"dora_scale` must be \(24, 1\) or \(1, 20\), got \(5,\)"):
        from_kohya(to_kohya({"x": p}, {"x": "x"}) | {"x.dora_scale": torch.ones(5)}, {"x": "x"})
    with pytest.raises(FdoraError, match="different with underscores"):
        kohya_names(["a.b", "a_b"])
    for to in (to_peft, to_torchtune):
        with pytest.raises(FdoraError, match="no norm over input columns"):
            to({"x": columns(p, W)})
    with pytest.raises(FdoraError, match="all DoRA or all LoRA"):
        to_peft({"x": p, "y": p._replace(m=None)})
