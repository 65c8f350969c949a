"""Fused LoRA and DoRA of Axolotl, Unsloth, LoRAFusion and vLLM, from an installed package or a folder that holds these files.

    axolotl-ai-cloud/axolotl  axolotl/kernels/ (in src): lora, dora, quantize, geglu, swiglu, op_registry, utils
    unslothai/unsloth         unsloth/: bnb_availability; unsloth/kernels/: fast_lora, utils, geglu, swiglu
    CentML/lorafusion         lorafusion/utils/common, lorafusion/ops/: lora_v1, multi_lora; lorafusion/ops/triton_ops/: config,
                              utils, fused_lora_xw_sb, fused_lora_dys_dyb, fused_lora_dyw_dsa, and the same of fused_multi_lora
    vllm-project/vllm         vllm/lora/ops/triton_ops/: kernel_utils, utils, lora_shrink_op, lora_expand_op,
                              lora_kernel_metadata

Only these modules run, none of the ``__init__`` above them. What they import beside torch, Triton and numpy serves quantised
weights, dropout, logging, their own benchmarks, or the tensor descriptors that Triton had up to 3.3 (LoRAFusion's variant with
TMA); :func:`stand_ins` answers for it. A checkout of each repository will do as well.

One projection each: Axolotl's ``LoRA_O`` (LoRA and DoRA), Unsloth's ``LoRA_W``, LoRAFusion's ``FusedLinearLoRA`` without
dropout; for many adapters its ``FusedLinearMultiLoRA``. Layers that share their input: Axolotl's ``LoRA_QKV``,
``LoRA_FusedProj``, ``LoRA_MLP``; Unsloth's ``LoRA_QKV``, ``LoRA_MLP``, not in place, since x is read again here. Tokens of a
server: vLLM's shrink and expand.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from ctypes import c_void_p
from dataclasses import replace
from functools import partial
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from pathlib import Path
from types import ModuleType
from typing import NamedTuple
from unittest.mock import MagicMock

import torch
import torch.nn.functional as F
from torch import Tensor

Linear = Callable[[Tensor], Tensor]
Layer = tuple[Tensor, Tensor, Tensor, "Tensor | None"]  # W, A, B, m
Group = Callable[[Tensor], "list[Tensor]"]


def folders(text: str) -> list[Path]:
    """The type of ``--rival-path``: folders, comma separated."""
    found = [Path(part) for part in text.split(",")]
    for folder in found:
        if not folder.is_dir():
            raise argparse.ArgumentTypeError(f"{folder} is no folder")
    return found


RIVAL_PATH = {
    "--rival-path": {
        "type": folders,
        "action": "extend",
        "default": [],
        "help": "folders with the paper's dora.py and dora_fused.py, or with files of bench.checkouts; may be several",
    }
}


def module(name: str, **attributes) -> ModuleType:
    made = ModuleType(name)
    vars(made).update(attributes)
    return made


def stand_ins() -> dict[str, dict[str, ModuleType]]:
    """By package; where a name belongs to another one, it is taken away again once the package is loaded."""
    import triton
    from packaging.version import Version

    bnb = module("bitsandbytes.functional", QuantState=MagicMock, get_ptr=None, lib=MagicMock())
    device = {"DEVICE_TYPE": "cuda", "DEVICE_TYPE_TORCH": "cuda", "DEVICE_COUNT": torch.cuda.device_count()}
    device |= {"is_hip": lambda: False, "get_device_type": lambda: "cuda", "ALLOW_PREQUANTIZED_MODELS": False}
    ops = "lorafusion.ops.triton_ops"
    quantised = [] if find_spec("bitsandbytes") else [module("bitsandbytes", functional=bnb), bnb]
    found = {
        "axolotl": [*quantised, module("axolotl.utils.logging", get_logger=logging.getLogger)],
        "unsloth": [
            module("unsloth_zoo.utils", Version=lambda version: Version(str(version))),
            module("unsloth.device_type", **device),
            module("unsloth.kernels.fp8", weight_dequant=None, fp8_linear=None),
        ],
        "lorafusion": [
            module("loguru", logger=logging.getLogger("lorafusion")),
            *(module(f"{ops}.{name}", **{name: None}) for name in ("fused_lora_xw_sb_tma", "fused_lora_dyw_dsa_tma")),
            *(module(f"{ops}.dropout", seeded_dropout=None), module(f"{ops}.tma_utils", HAS_TMA_DESC=False)),
            *(module(f"{ops}.blocked_dropout", blocked_seeded_dropout=None), module("megatron")),
            module("megatron.core", parallel_state=None),
            module(f"{ops}.fused_dropout_matmul", fused_dropout_matmul=None),
            module("lorafusion.utils.benchmark", benchmark=None, set_warmup_and_number=None),
            module("lorafusion.utils.testing", assert_verbose_allclose_two_rounds=None),
        ],
        "vllm": [
            module("vllm.envs", VLLM_BATCH_INVARIANT=False, VLLM_LORA_ENABLE_DUAL_STREAM=False, VLLM_TUNED_CONFIG_FOLDER=None),
            module("vllm.logger", init_logger=lambda name: MagicMock()),
            module("vllm.platforms", current_platform=MagicMock(is_cuda=lambda: False)),
            module("vllm.triton_utils", tl=triton.language, triton=triton),
            module("vllm.utils.math_utils", next_power_of_2=triton.next_power_of_2),
            module("vllm.utils.torch_utils", async_tensor_h2d=None, direct_register_custom_op=lambda **op: None),
        ],
    }
    return {package: {made.__name__: made for made in modules} for package, modules in found.items()}


def find(name: str, folders: Sequence[Path]) -> Path:
    """The folder of this module's package."""
    package, *_ = parts = name.split(".")
    file = Path(*parts).with_suffix(".py")
    for folder in folders:
        for path in sorted(folder.rglob(parts[-1] + ".py")):
            if path.parts[-len(parts) :] == file.parts:
                return path.parents[len(parts) - 2]
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise FileNotFoundError(f"no {file}: {package} is not installed, and no --rival-path has it")
    return Path(spec.submodule_search_locations[0])


@contextmanager
def present(modules: dict[str, ModuleType], package: str) -> Iterator[None]:
    """Inside, imports find these modules; afterwards only those of the package itself."""
    others = [name for name in modules if name.split(".")[0] != package]
    before = {name: sys.modules.pop(name) for name in others if name in sys.modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name in others:
            del sys.modules[name]
        sys.modules.update(before)


def load(name: str, folders: Sequence[Path]) -> ModuleType:
    """This module, with empty packages above it; from ``folders``, or else from where its package is installed."""
    if name in sys.modules:
        return sys.modules[name]
    package, *inner = name.split(".")[:-1]
    folder = find(name, folders)
    modules = stand_ins()[package]
    for depth in range(len(inner) + 1):
        above = ".".join([package, *inner[:depth]])
        spec = ModuleSpec(above, None, is_package=True)
        spec.submodule_search_locations = [str(folder.joinpath(*inner[:depth]))]
        modules[above] = module_from_spec(spec)
    with present(modules, package):
        return importlib.import_module(name)


def axolotl(folders: Sequence[Path]) -> ModuleType:
    return load("axolotl.kernels.lora", folders)


def unsloth(folders: Sequence[Path]) -> ModuleType:
    return load("unsloth.kernels.fast_lora", folders)


def axolotl_linear(
    folders: Sequence[Path], W: Tensor, A: Tensor, B: Tensor, m: Tensor | None = None, *, s: float, keep=True, state=None
) -> Linear:
    """``keep``: the norm, as they keep it on m until A or B are written; otherwise it is computed in every call. ``state``: how
    bitsandbytes decodes W, for one that is packed."""
    apply = axolotl(folders).LoRA_O.apply

    def layer(x: Tensor) -> Tensor:
        if not keep and hasattr(m, "_dora_cache"):
            del m._dora_cache  # as if A and B had been written
        if state is not None:  # they decode on the stream of the first call: not that of a graph
            sys.modules["axolotl.kernels.quantize"].CUDA_STREAM.clear()
        return apply(x.unsqueeze(0), None, W, None, state, A, B, s, None, m).squeeze(0)

    return layer


def unsloth_linear(folders: Sequence[Path], W: Tensor, A: Tensor, B: Tensor, s: float, state=None) -> Linear:
    apply = unsloth(folders).LoRA_W.apply

    def layer(x: Tensor) -> Tensor:
        if state is not None:  # they decode on the stream of when they were imported: not that of a graph
            now = torch.cuda.current_stream(x.device).cuda_stream
            utils = sys.modules["unsloth.kernels.utils"]
            utils.CUDA_STREAMS = tuple(None if each is None else c_void_p(now) for each in utils.CUDA_STREAMS)
        return apply(x.unsqueeze(0), W, state, A, B, s).squeeze(0)

    return layer


def axolotl_group(folders: Sequence[Path], part: str, layers: Sequence[Layer], s: float) -> Group:
    """Their functions for q/k/v, for layers of one input, and for the MLP."""
    code = axolotl(folders)
    flat = [each for W, A, B, m in layers for each in (W, None, None, A, B, s, None, m)]
    if part == "qkv":
        return lambda x: squeezed(code.LoRA_QKV.apply(x.unsqueeze(0), None, *flat, False))
    if part == "mlp":
        silu = (code.swiglu_forward, code.swiglu_backward)
        return lambda x: squeezed([code.LoRA_MLP.apply(x.unsqueeze(0), None, *flat, *silu, False)])
    flat = [each for W, A, B, m in layers for each in (W, None, A, B, None, m)]
    scales, plain = (s,) * len(layers), (None,) * len(layers)
    return lambda x: squeezed(code.LoRA_FusedProj.apply(scales, plain, x.unsqueeze(0), None, *flat))


def unsloth_group(folders: Sequence[Path], part: str, layers: Sequence[Layer], s: float) -> Group:
    code = unsloth(folders)
    flat = [each for W, A, B, _ in layers for each in (W, None, A, B, s)]
    if part == "qkv":
        return lambda x: squeezed(code.LoRA_QKV.apply(x.unsqueeze(0), *flat, False))
    if part == "mlp":
        silu = (code.swiglu_fg_kernel, code.swiglu_DWf_DW_dfg_kernel)
        return lambda x: squeezed([code.LoRA_MLP.apply(x.unsqueeze(0), *flat, *silu, False)])
    raise NotImplementedError("Unsloth has no function for gate and up alone")


def squeezed(ys: Sequence[Tensor]) -> list[Tensor]:
    return [y.squeeze(0) for y in ys]


def lorafusion_linear(folders: Sequence[Path], W: Tensor, A: Tensor, B: Tensor, s: float) -> Linear:
    """All in x's dtype: their kernels take nothing else."""
    code = load("lorafusion.ops.lora_v1", folders)
    lorafusion_takes(W, A.shape[0])
    code.fused_lora_dyw_dsa_func = partial(without_dropout, code.fused_lora_dyw_dsa)
    return lambda x: code.fused_linear_lora(x.unsqueeze(0), W, A.to(x.dtype), B.to(x.dtype), s).squeeze(0)


LORAFUSION_ROWS = 128  # of a tile: in the call for many adapters each segment is padded to a multiple of it


def lorafusion_multi(
    folders: Sequence[Path], W: Tensor, A: Sequence[Tensor], B: Sequence[Tensor], s: float, lengths: Sequence[int]
) -> Linear:
    """Many adapters of one rank, by these lengths; x is padded as :func:`padded` does. Their tables are made once, here."""
    code = load("lorafusion.ops.multi_lora", folders)
    count, r = len(A), A[0].shape[0]
    if count > 4 or any(a.shape[0] != r for a in A):
        raise ValueError(f"LoRAFusion's call takes up to four adapters, here of one rank, got {[a.shape[0] for a in A]}")
    lorafusion_takes(W, r)
    info = code.prepare_multi_lora_batch_info(
        list(lengths), list(range(count)), [r] * count, [0.0] * count, [s] * count, LORAFUSION_ROWS, W.dtype
    )
    fields = ("seq_len_list", "padded_seq_len_list", "block_to_lookup_table", "block_to_dropout_p", "block_to_alpha")
    given = {name: getattr(info, name) for name in (*fields, "enable_dropout", "same_dropout_p_value", "max_r")}

    def layer(x: Tensor) -> Tensor:
        factors = {"lora_a_list": [a.to(x.dtype) for a in A], "lora_b_list": [b.to(x.dtype) for b in B]}  # it appends to them
        return code.fused_linear_multi_lora(x.unsqueeze(0), W, **factors, **given).squeeze(0)

    return layer


def padded(t: Tensor, lengths: Sequence[int]) -> Tensor:
    """Rows with zeros behind each segment."""
    return torch.cat([F.pad(part, (0, 0, 0, -len(part) % LORAFUSION_ROWS)) for part in t.split(list(lengths))])


def unpadded(t: Tensor, lengths: Sequence[int]) -> Tensor:
    each = t.split([n + -n % LORAFUSION_ROWS for n in lengths])
    return torch.cat([part[:n] for part, n in zip(each, lengths, strict=True)])


def lorafusion_takes(W: Tensor, r: int) -> None:
    if r < 16 or r & (r - 1):
        raise ValueError(f"LoRAFusion's kernels take ranks that are powers of two from 16 on, got {r}")
    if W.is_cuda and torch.cuda.get_device_capability(W.device)[0] == 9:
        fit_lorafusion(r)


def without_dropout(theirs: Callable[..., Tensor], *, dy: Tensor, w: Tensor, dropout_mask: None, **others) -> Tensor:
    """Without dropout they have no mask, and look at its shape all the same."""
    return theirs(dy=dy, w=w, dropout_mask=dy.new_empty(1).expand(dy.shape[0], w.shape[1]), **others)


def fit_lorafusion(r: int) -> None:
    """Their H100 table, for every sm_90, with as many stages (at most theirs) as leave room for this rank's factors.

    Shared memory of a program: (BM + BN) (stages BK + r) elements of two bytes. Theirs is tuned at r = 16 and overflows at 64.
    """
    config = sys.modules["lorafusion.ops.triton_ops.config"]
    fitted = {}
    for kernel in ("fused_lora_xw_sb", "fused_lora_dyw_dsa", "fused_multi_lora_xw_sb", "fused_multi_lora_dyw_dsa"):
        tile = getattr(config.H100_CONFIG, kernel)
        rows = 2 * (tile.block_size_m + tile.block_size_n)
        stages = (232448 // rows - r) // tile.block_size_k
        fitted[kernel] = replace(tile, num_stages=max(1, min(tile.num_stages, stages)))
    config.HARDWARE_CONFIGS[config.get_device_short_name()] = replace(config.H100_CONFIG, **fitted)


class Slots(NamedTuple):
    """How a server adds ``(x A^T) B^T`` of each token's slot to y: h (1, M, r) of x, then y of h, in place. ``tables``: tokens
    sorted by slot; of each slot how many, where they begin, and which it is."""

    shrink: Callable[[Tensor], Tensor]
    expand: Callable[[Tensor, Tensor], object]
    tables: list[Tensor]


def vllm_lora(folders: Sequence[Path], A: Tensor, B: Tensor, slots: Tensor) -> Slots:
    """vLLM's kernels, for a layer of one part: A (S, r, K), B (S, N, r)."""
    ops = "vllm.lora.ops.triton_ops"
    names = ("lora_shrink_op", "lora_expand_op", "lora_kernel_metadata", "utils")
    shrinks, expands, metadata, utils = (load(f"{ops}.{name}", folders) for name in names)
    utils._LORA_A_PTR_DICT.clear(), utils._LORA_B_PTR_DICT.clear()  # by address, and for ever
    tokens = metadata.LoRAKernelMeta.make(len(A), len(slots), slots.device)
    tokens.prepare_tensors(slots.cpu())
    given = tokens.meta_args(len(slots), False)

    def shrink(x: Tensor) -> Tensor:
        h = x.new_empty(1, len(x), A.shape[1], dtype=torch.float32)
        shrinks.lora_shrink(x, [A], h, *given, 1.0)
        return h

    return Slots(shrink, lambda h, y: expands.lora_expand(h, [B], y, *given, add_inputs=True), list(given[1:5]))
