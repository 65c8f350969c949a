"""The benchmark commands in small, on the CPU: what they write, and that they see a wrong result and outlive a rival's failure."""

import json
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

pytest.importorskip("peft", reason="the rivals need PEFT; `make test` installs it")
from bench import checkouts, converge, group, host, layer, layers12, model, norm_model, records, report, ways
from bench.attempt import Failures
from bench.truth import Truth
from fdora.functional import dora_linear

ROOT = Path(__file__).parent.parent

LAYER = "--shapes 48x32 --M 8 --r 4 --runs 1 "
TWELVE = "--tiny --layers 1 --seq 16 --loss-tokens 4 --r 4 --runs 1 "


def run(command, tmp_path, options):
    path = tmp_path / "result.json"
    command.main([*options.split(), "--json", str(path), "--commit", "abc"])
    result = records.load(path)
    assert result["about"]["commit"] == "abc"
    return result


def doubled(*args, s, **options):
    return dora_linear(*args, s=2 * s, **options)


# layer


def test_layer(tmp_path, capsys, monkeypatch):
    slow = ",".join(f"-{way}" for way in ways.WAYS if way.endswith("compiled"))
    result = run(layer, tmp_path, LAYER + f"--adapter bf16,fp32 --ways={slow}")
    assert len(result["rows"]) == 8 and result["summary"]["cases"] == 2
    ran = {"frozen", "bare", "peft_lora", "addmm_lora", "peft_dora", "factored", "fdora"}
    for row in result["rows"]:
        assert row["M"] == 8 and row["K"] == 48 and row["N"] == 32 and row["r"] == 4
        cached = {"peft_dora_cached"} if row["norm"] == "given" else set()  # no norm of its own, and no backward
        assert set(row["peak_mb"]) == ran and set(row["error"]) == ran | cached
        assert set(row["ms"]) == ran | (cached if row["mode"] == "fwd" else set())
        assert not cached or set(row["error"]["peft_dora_cached"]) == {"y_no_grad"}
        assert all(error < 5e-3 for way in cached | {"addmm_lora"} for error in row["error"][way].values())
        assert set(row["error"]["addmm_lora"]) == set(row["error"]["peft_lora"])
        assert set(row["error"]["fdora"]) == set(row["error"]["peft_dora"]) == {"y", "y_no_grad", "dx", "dA", "dB", "dm"}
        assert "dm" not in row["error"]["peft_lora"] and max(row["error"]["fdora"].values()) < 5e-3
        assert row["ratio"]["fdora/bare"] == pytest.approx(row["ms"]["fdora"] / row["ms"]["bare"], rel=0.02, abs=2e-3)
        elsewhere = {"dorafactors", "axolotl_lora", "axolotl_dora", "unsloth_lora", "lorafusion"}
        assert set(row["failed"]) == elsewhere and all("--rival-path" in reason for reason in row["failed"].values())
    assert {(row["mode"], row["norm"]) for row in result["rows"]} == set(layer.MODES)
    for row in result["summary"]["not_beaten"]:
        assert row["rival"] in ways.RIVALS and row["rival/fdora"] <= 1
    out = capsys.readouterr().out
    assert "Geometric means over 2 cases" in out and "Where a rival is not beaten" in out
    cached = {what for what, rival, *_ in report.layer_duels(result) if rival == "peft_dora_cached"}
    assert cached == {"fwd, norm given"}
    monkeypatch.setattr(report, "RESULTS", tmp_path)
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/layer_small.json").write_text(json.dumps(result))
    head, _, *lines = report.means().splitlines()
    assert "| addmm LoRA | PEFT DoRA | PEFT DoRA, cached | factored |" in head and "Axolotl" not in head
    mean = result["summary"]["geometric_means"]["fwd_bwd, norm given"]["fdora/addmm_lora"]
    assert f"| {1 / mean:.2f} |" in lines[2] and set(ways.RIVALS) <= set(report.NAMES)


def test_layer_compiled(tmp_path):
    result = run(layer, tmp_path, LAYER + "--ways fdora,fdora_compiled")
    assert "fdora_compiled/fdora" in result["rows"][0]["ratio"] and result["summary"]["failed"] == []


def test_layer_compiled_rivals(tmp_path, monkeypatch):
    monkeypatch.setattr(ways.torch, "compile", partial(torch.compile, backend="aot_eager"))  # Inductor takes long
    rivals = ["peft_lora_compiled", "dense_compiled"]
    result = run(layer, tmp_path, LAYER + f"--ways fdora,fdora_compiled,{','.join(rivals)}")
    compiled = {"fdora_compiled/peft_lora_compiled", "dense_compiled/fdora_compiled"}
    for row in result["rows"]:
        assert set(row["ratio"]) >= (compiled if row["norm"] == "given" else set())
        assert all(0 < error < 5e-3 for rival in rivals for error in row["error"][rival].values())
    errors = result["rows"][0]["error"]
    assert "dm" in errors["dense_compiled"] and "dm" not in errors["peft_lora_compiled"]
    met = {(rival, mine) for _, rival, _, _, mine in report.layer_duels({"rows": result["rows"][:1]})}
    assert met == {(rival, result["rows"][0]["ms"]["fdora_compiled"]) for rival in rivals}


def test_layer_sees_a_wrong_result(tmp_path, monkeypatch):
    monkeypatch.setattr(ways, "dora_linear", doubled)
    with pytest.raises(SystemExit, match=r"fdora is wrong: .*dA by 1.*dB by 1"):
        run(layer, tmp_path, LAYER + "--ways frozen,fdora")
    rows = records.load(tmp_path / "result.json")["rows"]
    assert all("fdora" not in row["ms"] and "frozen" in row["ms"] for row in rows)  # no time for a wrong result
    assert rows[0]["error"]["fdora"]["dA"] > 0.9


def test_layer_outlives_a_rival(tmp_path, monkeypatch):
    def broken(*args):
        raise RuntimeError("out of luck")

    monkeypatch.setattr(ways, "factored", broken)
    result = run(layer, tmp_path, LAYER + "--ways factored,fdora --wall")
    assert result["summary"]["failed"] == ["factored: RuntimeError: out of luck"]
    for row in result["rows"]:
        assert set(row["ms"]) == set(row["wall_ms"]) == ({"fdora"} if row["norm"] == "given" else set())


def test_layer_runs_code_of_the_paper_from_a_folder(tmp_path, monkeypatch):
    import sys

    for name in ("PEFT_DORA_FUSED", "PEFT_DORA_FUSED_BACKWARD"):
        monkeypatch.setenv(name, "0")
    for name in ("peft.tuners.lora.dora_fused", "paper_dora"):
        monkeypatch.setitem(sys.modules, name, None)  # put back afterwards
        del sys.modules[name]
    (tmp_path / "src").mkdir()
    (tmp_path / "src/dora_fused.py").write_text("")
    (tmp_path / "src/dora.py").write_text("""
import peft.tuners.lora.dora as stock
class DoraLinearLayer(stock.DoraLinearLayer):
    def forward(self, x, *, lora_A, lora_B, scaling, base_layer, base_result=None):
        return 0 * super().forward(x, lora_A=lora_A, lora_B=lora_B, scaling=scaling, base_layer=base_layer)
""")
    result = run(layer, tmp_path, LAYER + f"--ways peft_dora,dorafactors --rival-path {tmp_path}")
    errors = result["rows"][0]["error"]
    assert errors["peft_dora"]["dB"] < 0.01 and errors["dorafactors"]["dB"] == 1  # it ran that class, and only there


# Each package's own __init__ would fail; its functions take what the real ones take, in that order.
CHECKOUTS = {
    "axolotl/__init__.py": "raise ImportError",
    "axolotl/kernels/lora.py": """
import bitsandbytes as bnb
from bitsandbytes.functional import QuantState
from axolotl.utils.logging import get_logger
from .swiglu import swiglu_forward, swiglu_backward
get_logger(__name__), QuantState | None, bnb.functional.lib.cdequantize_blockwise_fp32
norms = []
def one(x, W, b, quant, A, B, s, lora_bias, m):
    assert b is None and quant is None and lora_bias is None
    y = x @ W.mT + s * (x @ A.to(x.dtype).mT) @ B.to(x.dtype).mT
    if m is None:
        return y
    if not hasattr(m, "_dora_cache"):
        m._dora_cache = (W.double() + s * B.double() @ A.double()).norm(dim=1).detach()
        norms.append(1)
    return y * (m / m._dora_cache).to(x.dtype)
class LoRA_O:
    def apply(x, x_drop, *layer):
        assert x.dim() == 3 and x_drop is None
        return one(x, *layer)
class LoRA_QKV:
    def apply(x, x_drop, *layers):
        assert x.dim() == 3 and x_drop is None and layers[24:] == (False,)
        return tuple(one(x, *layers[i : i + 8]) for i in (0, 8, 16))
class LoRA_MLP:
    def apply(x, x_drop, *layers):
        assert x.dim() == 3 and x_drop is None and layers[24:] == (swiglu_forward, swiglu_backward, False)
        return one(swiglu_forward(one(x, *layers[:8]), one(x, *layers[8:16])), *layers[16:24])
class LoRA_FusedProj:
    def apply(scales, quants, x, x_drop, *flat):
        layers = [flat[i : i + 6] for i in range(0, len(flat), 6)]
        return tuple(one(x, W, b, q, A, B, s, *o) for (W, b, A, B, *o), s, q in zip(layers, scales, quants, strict=True))
""",
    "axolotl/kernels/swiglu.py": """
import torch
def swiglu_forward(gate, up): return torch.nn.functional.silu(gate) * up
def swiglu_backward(): pass
""",
    "unsloth/__init__.py": "raise ImportError",
    "unsloth/kernels/__init__.py": "raise ImportError",
    "unsloth/kernels/fast_lora.py": """
from unsloth_zoo.utils import Version
from ..device_type import is_hip, DEVICE_TYPE, DEVICE_COUNT
from .fp8 import weight_dequant, fp8_linear
import torch
assert Version(torch.__version__) > Version("2.4.0")
FACTOR = 1
def swiglu_fg_kernel(e, g): return torch.nn.functional.silu(e) * g
def swiglu_DWf_DW_dfg_kernel(): pass
def one(x, W, quant, A, B, s):
    assert quant is None
    return x @ W.mT + FACTOR * s * (x @ A.to(x.dtype).mT) @ B.to(x.dtype).mT
class LoRA_W:
    def apply(x, *layer):
        assert x.dim() == 3
        return one(x, *layer)
class LoRA_QKV:
    def apply(x, *layers):
        assert x.dim() == 3 and layers[15:] == (False,)
        return tuple(one(x, *layers[i : i + 5]) for i in (0, 5, 10))
class LoRA_MLP:
    def apply(x, *layers):
        assert x.dim() == 3 and layers[15:] == (swiglu_fg_kernel, swiglu_DWf_DW_dfg_kernel, False)
        return one(swiglu_fg_kernel(one(x, *layers[:5]), one(x, *layers[5:10])), *layers[10:15])
""",
    "lorafusion/__init__.py": "raise ImportError",
    "lorafusion/ops/lora_v1.py": """
import torch
from loguru import logger
from lorafusion.ops.triton_ops.config import H100_CONFIG
from lorafusion.ops.triton_ops.dropout import seeded_dropout
from lorafusion.ops.triton_ops.fused_dropout_matmul import fused_dropout_matmul
from lorafusion.ops.triton_ops.fused_lora_xw_sb_tma import fused_lora_xw_sb_tma
from lorafusion.ops.triton_ops.tma_utils import HAS_TMA_DESC
def fused_lora_dyw_dsa(dy, w, ds, a, dropout_p, dropout_mask):
    assert (dy.shape[0], w.shape[1]) == dropout_mask.shape and dropout_p == 0
    return dy @ w + ds @ a
fused_lora_dyw_dsa_func = fused_lora_dyw_dsa
class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, W, A, B, s):
        ctx.save_for_backward(x, W, A, B)
        ctx.s = s
        return (x @ W.mT + s * (x @ A.mT) @ B.mT)[None]
    @staticmethod
    def backward(ctx, dy):
        x, W, A, B = ctx.saved_tensors
        (dy,), s = dy, ctx.s
        dh = s * dy @ B
        dx = fused_lora_dyw_dsa_func(dy=dy, w=W, ds=dh, a=A, dropout_p=0.0, dropout_mask=None)
        return dx, None, dh.mT @ x, s * dy.mT @ (x @ A.mT), None
def fused_linear_lora(x, linear_w, lora_a, lora_b, alpha, seed=None, dropout_p=0.0, linear_bias=None):
    assert x.dtype == lora_a.dtype == lora_b.dtype and HAS_TMA_DESC is False
    return Function.apply(x.squeeze(0), linear_w, lora_a, lora_b, alpha)
""",
    "lorafusion/ops/triton_ops/config.py": """
from dataclasses import dataclass
@dataclass(frozen=True)
class Tile: block_size_m: int; block_size_n: int; block_size_k: int; num_stages: int
@dataclass
class Config: fused_lora_xw_sb: Tile; fused_lora_dyw_dsa: Tile; fused_multi_lora_xw_sb: Tile; fused_multi_lora_dyw_dsa: Tile
H100_CONFIG = Config(Tile(128, 256, 64, 4), Tile(128, 256, 64, 3), Tile(128, 256, 64, 4), Tile(128, 256, 64, 4))
HARDWARE_CONFIGS = {"h100": H100_CONFIG}
def get_device_short_name(): return "h200"
""",
}


@pytest.fixture
def rivals(tmp_path, monkeypatch):
    """--rival-path with two folders, and nothing installed."""
    for name, text in CHECKOUTS.items():
        path = tmp_path / ("a/deep/src" if name.startswith("axolotl") else "b") / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(checkouts, "find_spec", lambda name: None)
    yield f"--rival-path {tmp_path / 'a'} --rival-path {tmp_path / 'b'},{tmp_path / 'b'} "
    for name in [name for name in sys.modules if name.split(".")[0] in ("axolotl", "unsloth", "lorafusion")]:
        del sys.modules[name]


def test_layer_runs_code_of_others_from_folders(tmp_path, rivals):
    ran = ["axolotl_lora", "unsloth_lora", "lorafusion", "axolotl_dora"]
    named = ",".join(["fdora", "fdora_inside", *ran, "axolotl_dora_inside"])
    result = run(layer, tmp_path, rivals + f"--shapes 48x32 --M 8 --r 16 --runs 1 --adapter bf16,fp32 --ways {named}")
    assert result["summary"]["failed"] == [] == result["summary"]["wrong"]
    for row in result["rows"]:
        assert set(row["ms"]) == {"fdora", *ran} == set(row["peak_mb"])
        assert {"axolotl_dora/fdora", "fdora/lorafusion", "fdora/unsloth_lora", "fdora/axolotl_lora"} <= set(row["ratio"])
        for way in ran:
            assert set(row["error"][way]) == {"y", "y_no_grad", "dx", "dA", "dB"} | ({"dm"} if "dora" in way else set())
            assert 0 < max(row["error"][way].values()) < 1e-2
    inputs, norms = ways.Inputs.random(8, 48, 32, 4, torch.bfloat16, "cpu"), sys.modules["axolotl.kernels.lora"].norms
    for name, wanted in {"axolotl_dora_inside": 3, "axolotl_dora": 1}.items():
        norms.clear()
        way = ways.build(name, inputs)
        way.forward(), way.both(), way.forward()
        assert len(norms) == wanted
    for name in ("bitsandbytes", "loguru", "unsloth_zoo.utils"):
        assert not isinstance(sys.modules.get(name), type(sys)) or sys.modules[name].__spec__  # nothing is left of a stand-in


def test_a_kept_norm_and_a_computed_one_share_no_row():
    values = {"peft_dora": 1, "axolotl_dora": 2, "axolotl_dora_inside": 3, "peft_dora_cached": 4, "fdora_inside_compiled": 5}
    assert layer.select(values, "given") == {"peft_dora": 1, "axolotl_dora": 2, "peft_dora_cached": 4}
    assert layer.select(values, "inside") == {"peft_dora": 1, "axolotl_dora": 3, "fdora_compiled": 5}


def test_layer_times_and_lists_a_wrong_rival(tmp_path, rivals, capsys):
    checkouts.unsloth(checkouts.folders(rivals.split()[-1])).FACTOR = 2
    result = run(layer, tmp_path, rivals + LAYER + "--ways fdora,unsloth_lora,lorafusion")
    (reason,) = result["summary"]["failed"]
    assert reason == "lorafusion: ValueError: LoRAFusion's kernels take ranks that are powers of two from 16 on, got 4"
    assert "unsloth_lora: dA by 1.0e+00" in result["summary"]["wrong"] and "unsloth_lora" in result["rows"][0]["ms"]
    assert "\nwrong: unsloth_lora: dA by 1.0e+00" in capsys.readouterr().out


def test_lorafusion_on_other_hopper_chips_and_ranks(rivals):
    """Its table knows one H100 and r = 16: 227 KiB of shared memory hold fewer stages beside a larger rank's factors."""
    config = checkouts.load("lorafusion.ops.triton_ops.config", checkouts.folders(rivals.split()[-1]))
    for r, stages in {16: (4, 3), 64: (3, 3), 128: (2, 2), 512: (1, 1)}.items():
        checkouts.fit_lorafusion(r)
        fitted = config.HARDWARE_CONFIGS["h200"]
        assert (fitted.fused_lora_xw_sb.num_stages, fitted.fused_lora_dyw_dsa.num_stages) == stages
        assert fitted.fused_multi_lora_xw_sb == fitted.fused_multi_lora_dyw_dsa == fitted.fused_lora_xw_sb


def test_rival_path_is_a_folder(tmp_path):
    with pytest.raises(SystemExit):
        layer.parse(["--rival-path", str(tmp_path / "none")])
    options = group.parse(["--rival-path", f"{tmp_path},{tmp_path.parent}", "--rival-path", str(tmp_path)])
    assert options.rival_path == [tmp_path, tmp_path.parent, tmp_path] and layer.parse([]).rival_path == []


def test_cases():
    assert len(layer.cases(layer.parse(["--quick"]))) == 12
    everything = layer.cases(layer.parse(["--shapes=all", "--M=16,4096", "--r=16", "--adapter=bf16,fp32"]))
    assert len(everything) == len(set(everything)) == 14 * 4
    assert layer.cases(layer.parse(["--shapes=48x32", "--M=8", "--r=4"])) == [(8, 48, 32, 4, "bf16")]
    with pytest.raises(SystemExit):
        layer.parse(["--ways", "fdroa"])


# layers that share their input

GROUP = "--models tiny --M 24 --r 4 --runs 1 "


def test_ways_of_a_group_share_memory_and_no_leaf():
    """A leaf's node remembers its stream: what one way leaves behind is in no other's way."""
    for part in group.PARTS:
        case = group.Case.random("tiny", part, 5, 4, "bf16", "cpu")
        one, two = case.fresh(), case.fresh()
        assert one.x is one.layers[0].x
        for mine, other, own in zip(one.leaves().values(), two.leaves().values(), case.leaves().values(), strict=True):
            assert mine.is_leaf and mine.requires_grad and len({id(mine), id(other), id(own)}) == 3
            assert mine.data_ptr() == other.data_ptr() == own.data_ptr()


def test_group(tmp_path):
    rows = run(group, tmp_path, GROUP + "--parts qkv,gate_up --ways fdora")["rows"]
    names = ("bare", "peft_lora", "separate", "fdora")
    rows += run(group, tmp_path, GROUP + f"--parts mlp --ways {','.join(names)}")["rows"]
    assert [(row["part"], row["mode"]) for row in rows] == [(p, m) for p in group.PARTS for m in ("fwd", "fwd_bwd")]
    for row in rows:
        ran = names if row["part"] == "mlp" else ("fdora",)
        assert set(row["ms"]) == set(row["peak_mb"]) == set(ran) and row["failed"] == {}
        assert set(row["ratio"]) == {f"fdora/{n}" for n in ran} - {"fdora/fdora"}
        layers, outputs = {"qkv": (3, 3), "gate_up": (2, 2), "mlp": (3, 1)}[row["part"]]
        assert len(row["error"]["fdora"]) == 1 + 3 * layers + 2 * outputs
        assert max(row["error"]["fdora"].values()) < group.TOLERANCE[row["part"]]
    kept = rows[-1]["kept_mb"]
    assert kept["fdora"] == round(24 * 2 * (2 * 96 + 3 * 4 + 64) / 2**20, 2) < kept["separate"]


def test_group_runs_code_of_others_from_folders(tmp_path, rivals):
    (_, row) = run(group, tmp_path, GROUP + "--parts qkv --ways axolotl_dora,fdora")["rows"]
    assert "--rival-path" in row["failed"]["axolotl_dora"] and set(row["ms"]) == {"fdora"}
    (_, row) = run(group, tmp_path, rivals + GROUP + "--parts gate_up --ways unsloth_lora,axolotl_dora")["rows"]
    assert "Unsloth has no function" in row["failed"]["unsloth_lora"] and "dm1" in row["error"]["axolotl_dora"]
    for part in group.PARTS:
        case = group.Case.random("tiny", part, 24, 4, "fp32", "cpu")
        for name in group.RIVALS[1:] if part != "gate_up" else ("axolotl_lora", "axolotl_dora"):
            kind = name.split("_")[1]
            way = group.build(name, case)
            errors = group.errors(way, {kind: group.truth(case, kind)})
            assert ("dm0" in errors) == (kind == "dora") and 0 < max(errors.values()) < group.TOLERANCE[part], name


def test_group_sees_a_wrong_result(tmp_path, monkeypatch):
    from fdora.functional import dora_mlp

    monkeypatch.setattr(group, "dora_mlp", lambda x, gate, up, down: dora_mlp(x, gate, up, down._replace(s=4.0)))
    with pytest.raises(SystemExit, match=r"fdora is wrong: .*dA2 by "):
        run(group, tmp_path, GROUP + "--parts mlp --ways separate,fdora")
    row = records.load(tmp_path / "result.json")["rows"][0]
    assert "fdora" not in row["ms"] and "separate" in row["ms"]


# what the layers are compared with


@pytest.mark.parametrize("kind", ["dora", "lora", "frozen"])
def test_truth(kind):
    M, K, N, r, s = 40, 48, 33, 5, 0.0 if kind == "frozen" else 1.5
    x, W, A, B, dy = (torch.randn(*shape).double() for shape in ((M, K), (N, K), (r, K), (N, r), (M, N)))
    m = torch.rand(N).double() + 0.5
    for t in (x, A, B, m):
        t.requires_grad_()
    adapted = W + s * B @ A
    y = x @ adapted.T
    if kind == "dora":
        y = y * (m / adapted.detach().norm(dim=1))
    leaves = {"dx": x, "dA": A, "dB": B} | ({"dm": m} if kind == "dora" else {})
    got = {"y": y, **dict(zip(leaves, torch.autograd.grad(y, list(leaves.values()), dy), strict=True))}
    if kind == "frozen":
        got = {name: got[name] for name in ("y", "dx")}
    truth = Truth(x.detach(), W, A.detach(), B.detach(), m.detach() if kind == "dora" else None, s, dy)
    assert max(truth.errors(got).values()) < 1e-12
    for name in got:
        assert truth.errors(got | {name: 1.01 * got[name]})[name] == pytest.approx(0.01)


# host


def test_host(tmp_path, monkeypatch):
    def broken(*args):
        raise RuntimeError

    monkeypatch.setattr(ways, "peft_layer", broken)
    sizes = "--M 4 --K 32 --N 48 --r 4 --runs 1 --loop-ms 1 "
    result = run(host, tmp_path, sizes + "--ways frozen,peft_dora,fdora,fdora_inside --first-call")
    rows = {row.pop("way"): row for row in result["rows"]}
    assert rows["peft_dora"] == {"failed": "RuntimeError: "}
    assert all(rows[name]["fwd_bwd_us"] > 0 and rows[name]["fwd_us"] > 0 for name in ("frozen", "fdora", "fdora_inside"))
    assert [row["cache"] for row in result["first_call"]] == ["empty", "warm"]
    for row in result["first_call"]:
        # no order of two durations is asked: which is longer depends on what else the machine does
        parts = [row[f"{part}_ms"] for part in ("device_and_inputs", "import_fdora", "first_call")]
        assert row["total_ms"] == pytest.approx(sum(parts), abs=0.03) and min(parts) > 0 < row["second_call_ms"]


# decoder layers


def test_layers12(tmp_path):
    result = run(layers12, tmp_path, TWELVE + "--no-compile")
    assert [row["way"] for row in result["rows"]] == list(layers12.WAYS) and result["failed"] == {}
    for row in result["rows"]:
        assert all(row[f"{mode}_ms"] > 0 and row[f"{mode}_peak_mb"] > 0 for mode in layers12.MODES)
    assert result["norms_ms"] > 0 and list(result["peft_fdora_ran"]) == ["fused"]
    few = "--no-compile --ways peft_dora,fdora,peft_fdora --modes inference "
    exact = run(layers12, tmp_path, TWELVE + few + "--dtype fp32 --adapter fp32")
    for way in ("fdora", "peft_fdora"):
        apart = exact[f"{way}_against_peft_dora"]
        assert set(apart) == {"y", "dx", "dA", "dB", "dm"} and 0 < max(each["relative"] for each in apart.values()) < 1e-5


def test_layers12_compiled(tmp_path, monkeypatch):
    monkeypatch.setattr(layers12.torch, "compile", partial(torch.compile, backend="aot_eager"))  # Inductor takes long
    result = run(layers12, tmp_path, TWELVE + "--no-eager --ways fdora,peft_fdora --modes inference")
    assert [row["compiled"] and row["inference_ms"] > 0 for row in result["rows"]] == [True, True]


def test_layers12_out_of_time(tmp_path):
    result = run(layers12, tmp_path, TWELVE + "--no-compile --ways frozen --modes inference --seconds 0")
    assert result["failed"] == {"inference, eager": "not started within 0 s"}


def test_layers12_sees_a_wrong_result(tmp_path, monkeypatch):
    monkeypatch.setattr(layers12, "dora_linear", doubled)
    with pytest.raises(SystemExit, match="'dA of fdora', 'dB of fdora'"):
        run(layers12, tmp_path, TWELVE + "--no-compile --ways peft_dora,fdora --modes inference")


def test_layers12_sees_calls_that_peft_served(tmp_path, monkeypatch):
    from fdora.integrations._peft import linear

    monkeypatch.setattr(linear, "ready", lambda *_: None)
    monkeypatch.setattr(linear, "call_of", lambda *_: "no reason")
    with pytest.raises(SystemExit, match=r"calls through PEFT .*composed"):
        run(layers12, tmp_path, TWELVE + "--no-compile --ways peft_dora,peft_fdora --modes inference")


# whole models

CONVERGE = "--tiny --layers 1 --eval 2 --batch 4 --seq 32 --r 4 "
MODEL = "--tiny --layers 1 --seq 16 --loss-tokens 4 --r 4 --runs 1 "


def test_model_sizes():
    """Parameters of the whole networks, in units of 1e7, as their makers count them (Gemma's head is its embedding)."""
    options = model.parse(["--device", "meta"])
    counts = {}
    for options.model, (_, sizes) in model.ARCHITECTURES.items():
        parameters = model.network(options, sizes["num_hidden_layers"]).named_parameters()
        tied = {"lm_head.weight"} if options.model.startswith("gemma") else set()
        counts[options.model] = round(sum(p.numel() for name, p in parameters if name not in tied) / 1e7)
    known = {"qwen3-8b": 819, "llama-3.1-8b": 803, "gemma-3-12b": 1177, "qwen2.5-32b": 3276, "mistral-small-24b": 2357}
    assert counts == known | {"qwen2.5-7b": 762, "qwen3-vl-8b": 877}


def test_model_sees_the_image():
    """Every part of the picture reaches the logits, through the tower's end and through each of its taps, and only behind it."""
    options = model.parse([*MODEL.split(), "--model", "qwen3-vl-8b", "--dtype", "fp32", "--layers", "4"])
    base = model.network(options, 4)
    assert base.config.vision_config.depth == 3 and base.config.vision_config.deepstack_visual_indexes == [0, 1, 2]
    inputs = model.inputs_for(base, 40)
    assert (inputs["input_ids"] == base.config.image_token_id).flatten().tolist() == 9 * [True] + 31 * [False]
    embeds = [base.model.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])]
    assert [len(each) for each in (embeds[0].deepstack_features, embeds[0].pooler_output)] == [3, 1]
    step = model.Run("peft_dora", base, model.adapters(base, 4, torch.float32), inputs, 31, False)
    assert {name.split(".")[1] for name in step.leaves} == {"visual", "language_model"}
    assert len(step.leaves) == 3 * (4 * 7 + 3 * 4 + 2 * 4)  # text layers, blocks of the tower, its end and three taps
    inputs["pixel_values"].requires_grad_()
    moved = torch.autograd.grad(step.loss(), inputs["pixel_values"])[0]
    assert moved.abs().amin(dim=1).all()
    assert all(gradient.any() for gradient in step.gradients())


@pytest.mark.parametrize(
    "name, mode", [("qwen3-vl-8b", "gradient_checkpointing"), ("gemma-3-12b", "step_8_checkpointing"), ("qwen2.5-32b", "step")]
)
def test_model(tmp_path, name, mode):
    result = run(model, tmp_path, MODEL + f"--model {name} --dtype fp32 --adapter fp32 --no-compile --modes {mode}")
    assert [row["way"] for row in result["rows"]] == list(model.WAYS) and result["failed"] == {}
    for row in result["rows"]:
        tokens = 16 * (8 if row["mode"].startswith("step_8") else 1)
        assert row["tokens_per_s"] == pytest.approx(1e3 * tokens / row["ms"], rel=0.01) and row["peak_mb"] > 0
    found = result["agreement"]["fp32"]
    assert list(found["one_layer_against_float32"]) == list(model.WAYS[1:])
    for parts in (found["against_peft_dora"], found["fused_against_peft_dora"], *found["one_layer_against_float32"].values()):
        assert set(parts) == {"logits", "dA", "dB", "dm"}
        assert all(part["relative"] < 1e-5 and part["cosine"] > 1 - 1e-9 for part in parts.values())
    assert found["against_peft_dora"]["dA"]["relative"] > 0
    biased = set() if name.startswith("gemma") else {"composed"}  # float32 with a bias, on a CPU
    assert set(result["paths"]["fp32"]) == {"fused"} | biased


def test_model_compiled_and_out_of_time(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(model.torch, "compile", partial(torch.compile, backend="aot_eager"))  # Inductor takes a minute
    torch._dynamo.utils.counters.clear()
    result = run(model, tmp_path, MODEL + "--quick --no-eager --modes gradient_checkpointing --ways peft_fdora")
    counters = torch._dynamo.utils.counters
    assert counters["stats"]["unique_graphs"] > 0 and not counters["graph_break"]
    (row,) = result["rows"]
    assert row["compiled"] and row["adapter"] == "bf16"
    compared = result["agreement"]["bf16"]["compiled_against_eager"]["peft_fdora"]
    assert set(compared) == {"logits", "dA", "dB", "dm"} and all(part["relative"] < 0.05 for part in compared.values())
    assert f"| {row['ms']:.1f} / {row['tokens_per_s']} / {row['peak_mb']:.0f} |" in capsys.readouterr().out
    late = run(model, tmp_path, MODEL + "--no-compile --modes gradient --ways peft_lora --seconds 0 --adapter fp32")
    assert late["rows"] == [] and [case["mode"] for case in late["skipped"]] == ["gradient"]


def test_model_autocasts_float32_adapters():
    options = model.parse([*MODEL.split(), "--adapter", "fp32"])
    step = model.Bench(options).prepare("fp32", 4, 16, 1)["peft_fdora"]
    assert all(p.dtype == torch.float32 for p in step.leaves.values())
    seen = []
    step.model.get_base_model().model.layers[0].mlp.register_forward_hook(
        lambda *_: seen.append(torch.is_autocast_enabled("cpu"))
    )
    step.gradients()
    assert seen == [True]
    assert all(p.dtype == torch.bfloat16 for p in step.model.parameters() if not p.requires_grad)


def test_model_steps():
    """A step is the mean of its micro-batches, by every adapter."""
    options = model.parse([*MODEL.split(), "--dtype", "fp32", "--adapter", "fp32"])
    step = model.Bench(options).prepare("fp32", 4, 16, 1)["peft_fdora"]
    step.optimizer = torch.optim.SGD(step.leaves.values(), lr=1.0)
    assert step.of("inference")().shape[:2] == (1, 4)  # logits of the tokens with a loss, and no others
    before, gradients = [p.detach().clone() for p in step.leaves.values()], step.gradients()
    step.of("step_8_checkpointing")()
    for p, old, gradient in zip(step.leaves.values(), before, gradients, strict=True):
        assert gradient.any() and p.grad is None
        torch.testing.assert_close(p.detach(), old - gradient)


def test_model_checkpointing_runs_a_layer_twice():
    step = model.Bench(model.parse(MODEL.split())).prepare("bf16", 4, 16, 1)["peft_fdora"]
    calls = []
    step.model.get_base_model().model.layers[0].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    for mode, wanted in (("gradient_checkpointing", 2), ("gradient", 1), ("step_8", 8), ("step_8_checkpointing", 16)):
        calls.clear()
        step.of(mode)()
        assert len(calls) == wanted, mode


def test_model_computes_a_norm_once_per_step(monkeypatch):
    """Of 8 micro-batches the first computes it; where small layers are not asked whether A and B changed, each does."""
    from fdora.integrations import _norm

    step = model.Bench(model.parse(MODEL.split())).prepare("bf16", 4, 16, 1)["peft_fdora"]
    assert model.norms_of_a_step(step) == {"layers": 7, "asked": 56, "computed": 56}
    monkeypatch.setattr(_norm, "SMALL", 0)
    step.gradients()  # its norms hold until a step
    stock = _norm.KeptNorm.given, _norm.KeptNorm.own
    assert model.norms_of_a_step(step) == {"layers": 7, "asked": 56, "computed": 7}
    assert (_norm.KeptNorm.given, _norm.KeptNorm.own) == stock


@pytest.mark.parametrize("what", ["S", "width"])
def test_model_sweep(tmp_path, what):
    values = {"r": "2,4", "S": "16,32", "width": "32,64"}[what]
    result = run(model, tmp_path, MODEL + f"--sweep {what} --values {values} --adapter bf16 --modes gradient --ways peft_fdora")
    field = {"S": "seq"}.get(what, what)
    assert ",".join(str(row[field]) for row in result["rows"]) == values
    a, b = (row["peak_mb"] for row in result["rows"])
    fitted = result["sweep"]["exponents"]["gradient, peft_fdora"]["peak_mb"]
    assert fitted == pytest.approx(math.log2(b / a), abs=0.05)  # of rounded sizes


def test_model_sweep_outlives_what_does_not_fit(tmp_path, monkeypatch, capsys):
    """A way that fails at one size is listed with it; the others, and the other sizes, are measured. So is a base that fails."""
    sound, network = model.Run.gradients, model.network

    def gradients(run):
        if run.way == "peft_dora" and run.tokens == 32:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return sound(run)

    def small(options, layers, width=None):
        if width == 96:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return network(options, layers, width)

    monkeypatch.setattr(model.Run, "gradients", gradients)
    monkeypatch.setattr(model, "network", small)
    options = MODEL + "--adapter bf16 --modes gradient --ways peft_lora,peft_dora "
    result = run(model, tmp_path, options + "--sweep S --values 16,32")
    where = "peft_dora, layers 1, seq 32, r 4, adapter bf16, compiled False, mode gradient"
    assert result["failed"] == {where: "OutOfMemoryError: CUDA out of memory."}
    measured = [(row["way"], row["seq"]) for row in result["rows"]]
    assert measured == [("peft_lora", 16), ("peft_dora", 16), ("peft_lora", 32)]
    assert list(result["sweep"]["exponents"]) == ["gradient, peft_lora"]
    assert capsys.readouterr().err.count("of 2 cases") == 2
    result = run(model, tmp_path, options + "--sweep width --values 96,64")
    assert result["failed"] == {"width 96": "OutOfMemoryError: CUDA out of memory."}
    assert [row["width"] for row in result["rows"]] == [64, 64]
    with pytest.raises(SystemExit, match="'agreement, adapter bf16': 'OutOfMemoryError"):
        run(model, tmp_path, MODEL + "--seq 32 --adapter bf16 --modes inference --no-compile --ways peft_dora,peft_fdora")
    rows = records.load(tmp_path / "result.json")["rows"]
    assert [row["way"] for row in rows] == ["peft_dora", "peft_fdora"]
    late = run(model, tmp_path, options + "--sweep width --values 32,64 --seconds 0")
    assert [case["width"] for case in late["skipped"]] == [32, 64] and late["rows"] == []


def test_model_exponents():
    """10 + size^2 is not size^2 before the size is large; the upper half of the sizes is nearer, whatever their order."""
    rows = [{"mode": "step", "way": "w", "r": r, "ms": 10 + r**2, "peak_mb": 3 * r**1.5} for r in (64, 1, 16, 4)]
    (found,) = model.exponents([*rows, rows[0] | {"way": "alone"}], "r").values()
    assert (found["from"], found["to"], found["peak_mb"]) == (1, 64, 1.5)
    u, v = ([math.log2(f(row)) for row in rows] for f in (lambda row: row["r"], lambda row: row["ms"]))
    covariance = sum((a - 3) * (b - sum(v) / 4) for a, b in zip(u, v, strict=True))  # 3: the mean of 0, 2, 4, 6
    assert found["ms"] == pytest.approx(covariance / 20, abs=1e-3)
    upper = {"from": 16, "to": 64, "ms": round(math.log2(4106 / 266) / 2, 3), "peak_mb": 1.5}
    assert found["upper"] == upper and found["ms"] < 1.5 < upper["ms"] < 2


def test_progress(capsys, monkeypatch):
    from bench import progress

    clock = iter([100.0, 110.0, 120.0, 130.0])
    monkeypatch.setattr(progress.time, "perf_counter", lambda: next(clock))
    shown = progress.Progress(3)
    shown.done()
    monkeypatch.setattr(progress.sys.stderr, "isatty", lambda: True, raising=False)
    shown.done()
    shown.done()
    assert capsys.readouterr().err == (
        "[########................] 1 of 3 cases, 10 s, about 20 s to go\n"
        "[################........] 2 of 3 cases, 20 s, about 10 s to go\r"
        "[########################] 3 of 3 cases, 30 s, done\n"
    )


def test_stock_layers_are_seen(tmp_path, monkeypatch):
    from fdora.integrations import peft

    monkeypatch.setattr(peft, "use_fdora", lambda model, **_: model)
    with pytest.raises(SystemExit, match="did not run"):
        run(model, tmp_path, MODEL + "--no-compile --adapter bf16 --modes inference")
    with pytest.raises(SystemExit, match="did not run"):
        run(layers12, tmp_path, TWELVE + "--no-compile --ways peft_dora,peft_fdora --modes inference")
    with pytest.raises(SystemExit, match="did not run"):
        run(converge, tmp_path, CONVERGE + "--steps 2 --pretrain 2 --seeds 0 --optimizers adamw")


def test_model_sees_what_a_compiler_spoils(tmp_path, monkeypatch):
    sound = model.call
    monkeypatch.setattr(model.torch, "compile", lambda *_, **__: lambda *args, **kwargs: sound(*args, **kwargs).flip(-1))
    with pytest.raises(SystemExit, match=r"'logits \(bf16 adapters\)', 'dA"):
        run(model, tmp_path, MODEL + "--no-eager --adapter bf16 --modes inference --ways peft_fdora")


def test_model_sees_a_wrong_result(tmp_path, monkeypatch):
    from fdora.integrations._peft import linear, steady

    first, right = linear.linears, steady.prepared.bind
    monkeypatch.setattr(linear, "linears", lambda x, layers, *rest: first(x, [la._replace(s=2 * la.s) for la in layers], *rest))
    monkeypatch.setattr(steady, "_calls", {})
    monkeypatch.setattr(steady.prepared, "bind", lambda tensors, s, *rest: right(tensors, (2 * s[0], *s[1:]), *rest))
    with pytest.raises(SystemExit, match=r"'dA \(bf16 adapters\)', 'dB \(bf16 adapters\)'"):
        run(model, tmp_path, MODEL + "--no-compile --adapter bf16 --modes inference")


# convergence


def test_converge(tmp_path, capsys):
    result = run(converge, tmp_path, CONVERGE + "--steps 21 --pretrain 40 --seeds 0,1")
    kinds = ["adamw", *(["muon"] if hasattr(torch.optim, "Muon") else [])]
    assert [(row["seed"], row["optimizer"]) for row in result["rows"]] == [(seed, k) for seed in (0, 1) for k in kinds]
    assert result["pretraining_loss"][-1] < result["pretraining_loss"][0] - 0.5
    for row in result["rows"]:
        assert list(row["paths"]) == ["fused"] and all(len(loss) == 2 for loss in row["loss"].values())
        start = {way: loss[0] for way, loss in row["loss"].items()}
        apart = row["difference"]["fdora, peft"]
        assert abs(start["fdora"] - start["peft"]) <= apart["worst"] + 1e-6 and 0 < apart["mean"] <= apart["worst"] < 5e-3
        assert all(row["held_out"][way] < row["held_out_before"][way] for way in converge.WAYS)
        assert row["held_out_before"]["float32"] == result["rows"][0]["held_out_before"]["float32"]  # B = 0
    losses = [row["loss"]["float32"] for row in result["rows"]]
    assert len({tuple(loss) for loss in losses}) == len(losses)  # neither seed nor optimizer is without effect
    assert f"{result['rows'][-1]['held_out']['fdora']:.4f}" in capsys.readouterr().out


def test_converge_says_what_it_leaves_out(tmp_path, monkeypatch, capsys):
    monkeypatch.delattr(torch.optim, "Muon", raising=False)
    short = CONVERGE + "--steps 2 --pretrain 2 --seeds 3 "
    result = run(converge, tmp_path, short)
    assert [row["optimizer"] for row in result["rows"]] == ["adamw"] and result["skipped"] == [[3, "muon"]]
    assert "muon is skipped: torch" in capsys.readouterr().out
    assert run(converge, tmp_path, short + "--optimizers adamw --seconds 0")["skipped"] == [[3, "adamw"]]


def test_converge_with_full_dora(tmp_path, capsys):
    (row,) = run(converge, tmp_path, CONVERGE + "--steps 2 --pretrain 2 --seeds 3 --optimizers adamw --full")["rows"]
    assert list(row["held_out"]) == [*converge.WAYS, "full"] and row["difference"]["full, fdora"]["worst"] > 0
    assert "full after" in capsys.readouterr().out


def test_converge_of_two_ways(tmp_path):
    (row,) = run(converge, tmp_path, CONVERGE + "--steps 2 --pretrain 2 --seeds 3 --optimizers adamw --ways fdora,full")["rows"]
    assert list(row["held_out"]) == ["fdora", "full"] and list(row["difference"]) == ["full, fdora"]
    with pytest.raises(SystemExit):
        converge.parse(["--ways", "ful"])


def test_converge_starts_everywhere_from_the_same_adapters():
    options = converge.parse([*CONVERGE.split(), "--pretrain", "1"])
    base, _ = converge.pretrained(bytes(range(256)) * 9, options)
    for seed in (0, 1):
        models = {way: dict(converge.adapted(way, base, options, seed).named_parameters()) for way in converge.WAYS}
        for name, p in models["float32"].items():
            for way in ("peft", "fdora"):
                q = models[way][name]
                assert q.dtype == (torch.float32 if p.requires_grad else torch.bfloat16) and torch.equal(p, q.float())


def test_converge_sees_a_wrong_result(tmp_path, monkeypatch):
    from fdora.integrations._peft import linear

    def wrong(tensors, call):
        x, W, A, B, m, *rest = tensors
        return right((x, W, A, B, 30 * m, *rest), call)

    right = linear.prepared.call
    monkeypatch.setattr(linear.prepared, "call", wrong)
    with pytest.raises(SystemExit, match="farther from float32"):
        run(converge, tmp_path, CONVERGE + "--steps 2 --pretrain 40 --seeds 0 --optimizers adamw --adapter bf16")


def test_converge_learns_and_is_asked_different_texts():
    source, reference, rest = converge.corpora()
    assert len(source) > 1e6 and len(reference) > 1e5 and len(rest) > 1e4
    windows = {reference[i : i + 200] for i in range(len(reference) - 200)}
    assert not any(rest[i : i + 200] in windows for i in range(len(rest) - 200))


# the pytest-benchmark suite


def suite(tmp_path, *options):
    pytest.importorskip("pytest_benchmark", reason="needs pytest-benchmark; `make test` installs it")
    command = [sys.executable, "-m", "pytest", "-o", "python_files=bench_*.py", "--rounds=2", "-p", "no:cacheprovider"]
    command += [f"--benchmark-storage={tmp_path}", *options]
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=alone)


def test_suite_and_its_gate(tmp_path):
    done = suite(tmp_path, "bench", "--benchmark-save=before", "--commit=abc", f"--json={tmp_path}/suite.json")
    assert done.returncode == 0, done.stdout
    ours = records.load(tmp_path / "suite.json")
    (tmp_path / "suite.json").unlink()
    (path,) = tmp_path.rglob("*_before.json")
    saved = json.loads(path.read_text())
    assert saved["machine_info"] == {}  # no name of a host
    assert {each["extra_info"]["op"] for each in saved["benchmarks"]} == {"norm", "dora_compose", "dora_delta", "linear"}
    assert ours["about"]["commit"] == "abc" and ours["skipped"] == [] and ours["rounds"] == 2
    assert [ours["about"] | row for row in ours["rows"]] == [each["extra_info"] for each in saved["benchmarks"]]
    for each in saved["benchmarks"]:
        assert each["extra_info"]["ms"] == pytest.approx(1e3 * each["stats"]["median"], abs=1e-5)
        facts = {"torch", "commit", "dtype", "backend", "mode", "bytes", "flops", "peak_mb", "wall_ms"}
        assert facts <= set(each["extra_info"]) and each["extra_info"]["commit"] == "abc"
        assert each["stats"]["rounds"] == 2 and each["stats"]["median"] > 0
    for factor, red in ((1e-9, True), (1e18, False)):  # as if it had been faster, as if it had been slower, past any noise
        for each in saved["benchmarks"]:
            each["stats"]["median"] *= factor
        path.write_text(json.dumps(saved))
        gate = suite(tmp_path, "bench/bench_norm.py", "--benchmark-compare", "--benchmark-compare-fail=median:10%")
        assert (gate.returncode != 0) == red, gate.stdout
        assert not red or "Performance has regressed" in gate.stdout + gate.stderr


def test_suite_knows_its_roofs_and_its_time(tmp_path, monkeypatch):
    """In this process."""
    pytest.importorskip("pytest_benchmark", reason="needs pytest-benchmark; `make test` installs it")
    from bench import conftest

    monkeypatch.delenv("PYTEST_XDIST_WORKER", raising=False)  # beside which nothing is measured
    measured = {"bytes_per_ms": 1e3, "flops_per_ms": 1e3}
    monkeypatch.setattr(conftest, "about", lambda *_: {"commit": "abc"} | measured)

    def norms(*options):
        fixed = [
            "-o",
            "python_files=bench_*.py",
            "-p",
            "no:cacheprovider",
            "--benchmark-enable",
            "--rounds=2",
            "-k",
            "eager-0",
            *options,
        ]
        assert pytest.main([f"{ROOT}/bench/bench_norm.py", f"--rootdir={ROOT}", f"--json={tmp_path}/suite.json", *fixed]) == 0
        return records.load(tmp_path / "suite.json")

    half, single = norms()["rows"]
    assert half["roof_ms"] == half["flops"] / 1e3 > half["bytes"] / 1e3
    assert single["roof_ms"] == single["bytes"] / 1e3 < single["flops"] / 1e3
    for row in (half, single):
        assert row["of_roof"] == pytest.approx(row["roof_ms"] / row["ms"], rel=1e-3)
    late = norms("--seconds=0")
    assert late["rows"] == [] and late["skipped"] == ["test_norm[eager-0-bf16]", "test_norm[eager-0-fp32]"]


def test_suite_sees_a_wrong_result(tmp_path):
    (tmp_path / "wrong.py").write_text(
        "import fdora.functional as f\nright = f.dora_norm\nf.dora_norm = lambda *a, s, **o: right(*a, s=1.01 * s, **o)\n"
    )
    done = suite(tmp_path, "bench/bench_norm.py", "-p", "wrong", "-k", "0-bf16", "-o", f"pythonpath={ROOT} {tmp_path}")
    assert done.returncode == 1 and "Tensor-likes are not close" in done.stdout


def test_failures_keep_the_reason(capsys):
    failures = Failures()
    results = failures.attempt(("a", "b"), lambda name: {"a": 1}[name])
    assert results == {"a": 1} and failures == {"b": "KeyError: 'b'"}
    assert capsys.readouterr().out == "b failed: KeyError: 'b'\n"


def test_what_was_not_started_is_in_the_result(tmp_path):
    assert run(group, tmp_path, GROUP + "--parts qkv --seconds 0")["skipped"] == [["tiny", "qkv", 24, 4, "bf16"]]
    assert run(layer, tmp_path, LAYER + "--seconds 0")["summary"]["skipped"] == [[8, 48, 32, 4, "bf16"]]
    late = run(converge, tmp_path, CONVERGE + "--seeds 7 --optimizers adamw --pretrain 1 --seconds 0")
    assert late["skipped"] == [[7, "adamw"]] and late["rows"] == []


# norms


def test_norms_of_a_model(tmp_path):
    rows = run(norm_model, tmp_path, "--models tiny --layers 1 --r 4")["rows"]
    assert [row["way"] for row in rows] == ["plain", "changed", "unchanged", "layers"]
    assert all(row["ms"] > 0 and row["kernels"] for row in rows)


def test_norms_of_a_model_in_other_tiles(tmp_path):
    pytest.importorskip("triton", reason="needs Triton; `make test` installs it")
    rows = run(norm_model, tmp_path, "--models tiny --layers 1 --r 4,80 --tiles")["rows"]
    assert len(rows) == len(norm_model.NARROW) + len(norm_model.MIDDLE) + len(norm_model.WIDE) + 2
    assert {row["tile"][2] for row in rows if row["r"] == 80 and row["tile"]} == {32, 64, 128}


def test_beside(tmp_path):
    pytest.importorskip("triton", reason="needs Triton; `make test` installs it")
    from bench import beside

    rows = run(beside, tmp_path, "--runs 1")["rows"]
    assert [row["way"] for row in rows] == ["one", "shared", "cublas"]
