"""One linear layer as others adapt it: PEFT's LoRA and DoRA, and the factored form of "Scaling DoRA" (arXiv:2603.22276).

The paper's own code is not installable. :func:`paper_layer` loads its ``dora.py`` and ``dora_fused.py`` (in
``code/peft_patched/src/peft/tuners/lora`` of sockeye44/dorafactors) from a folder, if you have one, into stock PEFT;
:func:`factored` is our own writing of its formula and data flow: the norm from base, cross and Gram terms in float32,
chunked along K under 256 MB, rounded to the weight's dtype; g in the activations' dtype; a fused delta added to the base.
In models it is composed eagerly, as is the form of most frameworks, whose norm is of W and the whole product B A (`COMPOSED`).
"""

from __future__ import annotations

import copy
import importlib.util
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fdora.functional import dora_delta

CHUNK_BYTES = 2**28


def peft_layer(W: Tensor | nn.Module, A: Tensor, B: Tensor, m: Tensor | None, s: float) -> tuple[nn.Module, dict[str, Tensor]]:
    """PEFT's layer around W, or a layer that holds it, with copies of these adapters (DoRA if m is given); its leaves by our
    names."""
    linear = W if isinstance(W, nn.Module) else nn.Linear(W.shape[1], W.shape[0], bias=False, device="meta")
    if isinstance(W, Tensor):
        linear.weight = nn.Parameter(W, requires_grad=False)
    layer = wrapped(nn.Sequential(linear), A.shape[0], s, ["0"], m is not None).base_model.model[0]
    return layer, fill(layer, A, B, m)


def wrapped(
    model: nn.Module,
    r: int,
    s: float,
    targets: Sequence[str] | str,
    dora: bool,
    dropout: float = 0.0,
    task: str | None = None,
    adapter: str = "default",
) -> nn.Module:
    """PEFT's model around this one, its adapters in the dtype of their layers."""
    from peft import LoraConfig, get_peft_model

    targets = targets if isinstance(targets, str) else list(targets)
    config = LoraConfig(r=r, lora_alpha=s * r, lora_dropout=dropout, use_dora=dora, target_modules=targets, task_type=task)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return get_peft_model(model, config, adapter, autocast_adapter_dtype=False)


def around_the_same_weights(base: nn.Module) -> nn.Module:
    """A copy of this model that shares its parameters, packed ones with the state that says how."""
    states = (getattr(module, "quant_state", None) for module in base.modules())
    shared = [*base.parameters(), *(state for state in states if state is not None)]
    return copy.deepcopy(base, {id(each): each for each in shared})


def fill(layer: nn.Module, A: Tensor, B: Tensor, m: Tensor | None, adapter: str = "default") -> dict[str, Tensor]:
    """Put copies of these values, in their dtype, into PEFT's layer; a parameter itself, for layers that share it."""
    parts = {"A": (layer.lora_A, A), "B": (layer.lora_B, B)}
    if m is not None:
        parts["m"] = (layer.lora_magnitude_vector, m)
    for modules, value in parts.values():
        modules[adapter].weight = value if isinstance(value, nn.Parameter) else nn.Parameter(value.detach().clone())
    return {name: modules[adapter].weight for name, (modules, _) in parts.items()}


def fill_all(model: nn.Module, values: Mapping[str, tuple], dora: bool, adapter: str = "default") -> dict[str, Tensor]:
    """Fill every layer that ``values`` names with its A, B and (for DoRA) m; all leaves, called "A of NAME" and so on."""
    leaves = {}
    for name, (A, B, m) in values.items():
        parts = fill(model.get_submodule(name), A, B, m if dora else None, adapter)
        leaves |= {f"{part} of {name}": p for part, p in parts.items()}
    return leaves


def adapted(
    way: str,
    base: nn.Module,
    values: Mapping[str, tuple],
    targets: Sequence[str] | str,
    s: float,
    task: str | None = None,
    dropout: float = 0.0,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """A copy of this model around the same weights with PEFT's adapters of these values, and its leaves. ``way`` says whether
    they are LoRA's, and whether use_fdora follows: ``fused``, with norms on ``shards``, with ``lora_dropout``, which drops the
    adapter's input alone, in the place of PEFT's meaning; with ``fp8``, which does too, and rounds the weights of its copy; or
    one of `COMPOSED` has its layers computed so. A PEFT model for this ``task`` ("": for none), or layers changed in place."""
    from fdora.integrations.peft import use_fdora

    r, dora = next(iter(values.values()))[0].shape[0], way != "peft_lora"
    # On the model's device: PEFT draws each adapter before it moves it, and the host needs half a minute for 32B's at r = 384.
    with next(base.parameters()).device:
        model = wrapped(around_the_same_weights(base), r, s, targets, dora, dropout, task or None)
    inside = model.base_model.model
    leaves = fill_all(inside, values, dora)
    model = inside if task is None else model
    if "fdora" in way:
        mode: dict[str, Any] = {"dropout_mode": "lora"} if "lora_dropout" in way or "fp8" in way else {}
        mode |= {"compute": "fp8", "grad_compute": "fp8", "transposed": "transposed" in way} if "fp8" in way else {}
        use_fdora(model, fuse="fused" in way, norms_on_shards="shards" in way, **mode)
    if way in COMPOSED:
        for layer in map(
            model.get_submodule, {path.rpartition(".lora_magnitude_vector")[0] for path, _ in model.named_modules()} - {""}
        ):
            layer.forward = partial(composed, COMPOSED[way], layer, s)
    return model.train(), leaves


def paths(model: nn.Module) -> dict[str, int]:
    """How many calls of a model's layers each path of the PEFT integration served; compiled calls are not counted."""
    from fdora.integrations.peft import report

    rows, counts = report(model), Counter[str]()
    for row in rows:
        counts.update({"fused": row.fused, "composed": row.composed, **row.fallbacks})
    return dict(+counts)


@contextmanager
def paper_code(folders: Sequence[Path]):
    """Inside, PEFT builds its DoRA layers from the paper's class (fused forward and backward forced, as its benchmark does)."""
    import peft.tuners.lora.variants as variants

    source = next((path for folder in folders for path in sorted(folder.rglob("dora_fused.py"))), None)
    if source is None:
        raise FileNotFoundError("no --rival-path has dora_fused.py: the paper's code is not installable")
    os.environ |= {"PEFT_DORA_FUSED": "1", "PEFT_DORA_FUSED_BACKWARD": "1"}
    _load("peft.tuners.lora.dora_fused", source)
    theirs = _load("paper_dora", source.with_name("dora.py")).DoraLinearLayer

    class Layer(theirs):  # type: ignore[misc, valid-type]
        def forward(self, *args, adapter_name=None, **kwargs):
            return super().forward(*args, **kwargs)

    with mock.patch.object(variants, "DoraLinearLayer", Layer):
        yield


def _load(name: str, path: Path):
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        sys.modules[name] = module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return sys.modules[name]


def paper_layer(folders: Sequence[Path], W, A, B, m, s) -> tuple[nn.Module, dict[str, Tensor]]:
    with paper_code(folders):
        layer, leaves = peft_layer(W, A, B, m, s)
    assert type(layer.lora_magnitude_vector["default"]).__module__ == __name__, "PEFT built its own layer"
    return layer, leaves


@torch.no_grad()
def factored_norm(W: Tensor, A: Tensor, B: Tensor, s: float) -> Tensor:
    (N, K), r, B = W.shape, A.shape[0], B.float()
    base, U, gram = W.new_zeros(N, dtype=torch.float32), B.new_zeros(N, r), B.new_zeros(r, r)
    step = max(64, (CHUNK_BYTES // 4 - N * r - r * r) // (N + r) // 64 * 64)
    for w, a in zip(W.split(min(step, K), 1), A.split(min(step, K), 1), strict=True):
        w, a = w.float(), a.float()
        base += (w * w).sum(1)
        U.addmm_(w, a.mT)
        gram.addmm_(a, a.mT)
    sq = base + 2 * s * (B * U).sum(1) + s * s * ((B @ gram) * B).sum(1)
    return sq.clamp_min(0).sqrt().to(W.dtype)


@torch.no_grad()
def dense_norm(W: Tensor, A: Tensor, B: Tensor, s: float) -> Tensor:
    return torch.linalg.vector_norm(W + s * (B @ A), dim=1).to(W.dtype)


def composed(norm: Callable[..., Tensor], layer: nn.Module, s: float, x: Tensor) -> Tensor:
    """The forward of PEFT's layer in plain torch, LoRA's input dropped alone."""
    W, bias = layer.base_layer.weight, layer.base_layer.bias
    A, B = (each["default"].weight for each in (layer.lora_A, layer.lora_B))
    base = F.linear(x, W)
    lora = F.linear(F.linear(layer.lora_dropout["default"](x).to(A.dtype), A), B).to(x.dtype)
    g = (layer.lora_magnitude_vector["default"].weight / norm(W, A, B, s)).to(x.dtype)
    y = base + ((g - 1) * base + g * s * lora)
    return y if bias is None else y + bias


COMPOSED = {"dense": dense_norm, "factored": factored_norm}


def factored(x: Tensor, W: Tensor, A: Tensor, B: Tensor, m: Tensor, s: float) -> Tensor:
    base = F.linear(x, W)
    lora = F.linear(F.linear(x.to(A.dtype), A), B).to(x.dtype)
    g = (m / factored_norm(W, A, B, s).clamp_min(1e-6)).to(x.dtype)
    return base + dora_delta(base, lora, g.float(), s=s)
