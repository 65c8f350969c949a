"""The code of others, from folders: bench.checkouts and bench.rivals beside stand-ins with the names of the real ones."""

import sys

import pytest
import torch

pytest.importorskip("peft", reason="the rivals need PEFT; `make test` installs it")
from bench import checkouts, decoder, layer, serve, ways
from bench.rivals import COMPOSED, adapted
from tests.test_bench import LAYER, SMALL, run


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
    "vllm/__init__.py": "raise ImportError",
    "vllm/lora/ops/triton_ops/utils.py": """
from vllm import envs
from vllm.logger import init_logger
from vllm.platforms import current_platform
from vllm.utils.math_utils import next_power_of_2
assert not current_platform.is_cuda() and next_power_of_2(5) == 8 and init_logger(__name__)
_LORA_A_PTR_DICT, _LORA_B_PTR_DICT = {"of another layer": 1}, {"of another layer": 1}
is_batch_invariant, BY = envs.VLLM_BATCH_INVARIANT, 1
""",
    "vllm/lora/ops/triton_ops/lora_kernel_metadata.py": """
class LoRAKernelMeta:
    @classmethod
    def make(cls, max_loras, max_num_tokens, device):
        assert max_num_tokens and str(device) == "cpu"
        return cls()
    def prepare_tensors(self, token_lora_mapping):
        self.slots = token_lora_mapping
    def meta_args(self, token_nums, specialize_active_lora):
        assert token_nums == len(self.slots) and specialize_active_lora is False
        return (self.slots,)
""",
    "vllm/lora/ops/triton_ops/lora_shrink_op.py": """
import torch
from vllm.triton_utils import tl, triton
from vllm.utils.torch_utils import direct_register_custom_op
from vllm.lora.ops.triton_ops import utils
def _lora_shrink(x, A, h, slots, scaling):
    assert not utils._LORA_A_PTR_DICT and not utils.is_batch_invariant and h.dtype == torch.float32
    h[0] = scaling * torch.einsum("tk,trk->tr", x.float(), A[0][slots].float())
try:
    direct_register_custom_op(op_name="lora_shrink", op_func=_lora_shrink, mutates_args=["output_tensor"])
    lora_shrink = torch.ops.vllm.lora_shrink
except AttributeError:
    lora_shrink = _lora_shrink
""",
    "vllm/lora/ops/triton_ops/lora_expand_op.py": """
import torch
from vllm.lora.ops.triton_ops import utils
def lora_expand(h, B, y, slots, add_inputs):
    assert not utils._LORA_B_PTR_DICT and add_inputs
    y += (utils.BY * torch.einsum("tr,tnr->tn", h[0].to(y.dtype).float(), B[0][slots].float())).to(y.dtype)
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
    for name in [name for name in sys.modules if name.split(".")[0] in ("axolotl", "unsloth", "lorafusion", "vllm")]:
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


def test_serve_runs_kernels_of_vllm_from_a_folder(tmp_path, rivals):
    rows = run(serve, tmp_path, rivals + SMALL["serve"])["rows"][1:]
    assert rows and all(row["ms"].keys() == set(serve.WAYS) and not row["failed"] for row in rows)
    sys.modules["vllm.lora.ops.triton_ops.utils"].BY = 2
    with pytest.raises(SystemExit, match="idle is wrong: bits by"):
        run(serve, tmp_path, rivals + SMALL["serve"])


@pytest.mark.parametrize("way", COMPOSED)
def test_models_in_the_form_of_others_compute_pefts_dora(way):
    """Outputs and gradients of a model with a bias; and a parameter that is given is shared."""
    base = torch.nn.Sequential(torch.nn.Linear(48, 32), torch.nn.ReLU(), torch.nn.Linear(32, 24, bias=False)).requires_grad_(
        False
    )
    values = {name: tuple(map(torch.nn.Parameter, parts)) for name, parts in decoder.adapters(base, 4, torch.float32).items()}
    x, found = torch.randn(5, 48), []
    for each in ("peft_dora", way):
        model, leaves = adapted(each, base, values, ["0", "2"], ways.S)
        assert leaves["B of 2"] is values["2"][1]
        assert ("forward" in vars(model[0])) == (each == way)
        y = model(x)
        found.append([y, *torch.autograd.grad(y.square().sum(), list(leaves.values()))])
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs)
