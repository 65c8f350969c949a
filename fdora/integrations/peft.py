"""PEFT's DoRA through fdora's functions: one line to go, one line to come back. For PEFT 0.18 to 0.21.

    model = get_peft_model(base, LoraConfig(use_dora=True, ...))
    use_fdora(model)     # the layers that are there now; again after add_adapter, load_adapter or a change of base weights
    restore(model)       # as if nothing had been

or, before the model is made, ``enable()`` for every DoRA layer to come. Parameters, checkpoint keys and merges stay PEFT's;
nothing of PEFT is patched but, by ``enable``, five names in its registry. ``print(report(model))`` says what ran.

lora_dropout means what it means in PEFT, unless you ask for ``dropout_mode="lora"``. Where kernels run they draw the mask
themselves, from a seed that torch's generator gives: the same formula with another mask than stock. Elsewhere PEFT's own
module draws it, bit for bit the stock one.
"""

from __future__ import annotations

from fdora.integrations._framework import need, put_back

need("peft", "peft", "0.18.0")

import warnings
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from time import perf_counter
from typing import Any, Literal, TypeVar

import torch
from peft.tuners.lora import LoraModel, variants
from peft.tuners.lora.layer import LoraLayer
from torch import nn

from fdora import FdoraError
from fdora._check import check_positive
from fdora._command import progress
from fdora.functional import dora_norm, dora_norm_tree, dora_norm_tree_state
from fdora.functional.prepared import Warmup, compile_ahead
from fdora.integrations._hook import unhook
from fdora.integrations._peft.ahead import calls_of
from fdora.integrations._peft.banks import LayerBank, banks_of, put_banks
from fdora.integrations._peft.blocks import fuse_blocks, unfuse_blocks
from fdora.integrations._peft.dora import Dora, ours
from fdora.integrations._peft.layer import fuse_layer, unfuse_layer
from fdora.integrations._peft.norms import hook_layers, norms_of
from fdora.integrations._peft.quantised import MISREAD
from fdora.integrations._peft.report import Report, rows
from fdora.integrations._peft.rounded import record, round_base, tied, unround
from fdora.integrations._peft.sharded import gathers
from fdora.integrations._peft.variants import OF_GROUPS, OURS, own_norm

__all__ = [
    "LayerBank",
    "disable",
    "enable",
    "enabled",
    "init_magnitude",
    "read_banks",
    "report",
    "restore",
    "use_fdora",
    "warmup",
    "write_banks",
]

Model = TypeVar("Model", bound=nn.Module)
HOOKS = "_enable_peft_forward_hooks"  # of a tuner, around one forward


def use_fdora(
    model: Model,
    *,
    fuse: bool | None = None,
    dropout_mode: Literal["peft", "lora"] = "peft",
    keep_inner: bool = False,
    detach: bool = True,
    norms_on_shards: bool = False,
    compute: Literal["fp8"] | None = None,
    grad_compute: Literal["fp8"] | None = None,
    transposed: bool = False,
    keep: Literal["cpu"] | None = None,
) -> Model:
    """Run the DoRA layers of this model through fdora. In place; nothing enters its state dict. Idempotent.

    Layers that are added later run stock until it is called again; :func:`report` shows them. It also makes every layer
    compute its norm anew: call it after you change base weights in place (adapters may change as they like). A pickle of the
    whole model needs fdora to be read; a state dict does not.

    Args:
      model: a PeftModel, or any module with PEFT layers in it.
      fuse: also run q, k, v and the gated MLP of Llama-, Qwen-, Gemma- and Mistral-style blocks in one call each: less time,
        and half of what an MLP keeps for backward. In the blocks of timm's and transformers' vision transformers LayerScale and
        the residual go into the layer before them: fewer passes and roundings. None does so wherever such a block is, True
        raises where there is none, False runs layer by layer. A copy or a pickle of the model forgets it for q, k, v and for
        blocks of vision transformers. A call of q_proj computes k and v too, for the next calls of k_proj and v_proj on this
        x: pass False to call them yourself with a backward, or a change of an adapter or of autocast, in between.
      dropout_mode: what ``lora_dropout`` above 0 means. "peft" is PEFT's function,
        ``x W^T + (g - 1) D(x) W^T + g s D(x) A^T B^T + bias``: a second product with W. "lora" drops the adapter's input alone,
        ``g (x W^T + s D(x) A^T B^T) + bias``: one product, the same mean and a smaller variance. Its y differs in training by
        about ``sqrt(p / (1 - p)) |g - 1|``, relative; in evaluation it is the same function. A layer that PEFT's own code runs
        has PEFT's meaning, and :func:`report` says so.
      keep_inner: keep one more activation per layer. Needed where the model changes the layer's output in
        place before backward, as ``nn.ReLU(inplace=True)`` or Gemma 3n with ``"all-linear"`` does (the error says so).
      detach: True treats the norm as a constant, as PEFT does. False lets gradients reach A and B through it too: full DoRA, on
        weights that are not quantised. What runs PEFT's own code (:func:`report` says so) stays detached.
      norms_on_shards: under FSDP2 each process computes the norms of its own rows, all layers in one call before the forward,
        with an all-gather of all A and one of all norms in every forward; else each computes all, as units are gathered.
        Less work with many processes or large ranks. Layers in the root's own unit, and other layouts, go on as without it.
      compute: "fp8" multiplies 8-bit codes in the forward, as that of :func:`fdora.functional.dora_linear`: x is rounded, about
        2.6 % of the base product are lost. Weights of an FP8 checkpoint are read as they are. The others in half precision are
        rounded once, in place, to codes with a scale for each row, which halves their memory: the model is another one from
        then on, by as much noise in its weights, and so is its state dict; merge into the rounded weight, and serve with it.
        Adapters that PEFT saves say so, in ``auto_mapping`` of their config. Dropout needs ``dropout_mode="lora"``.
        :func:`report` says what multiplies codes, and why the rest does not.
      grad_compute: "fp8", together with ``compute``, multiplies 8-bit codes in backward too, for the gradient of x alone.
      transposed: keep the codes of each weight a second time for that, as :func:`fdora.quant.with_transpose` has them: as much
        memory as in bfloat16. Else each backward transposes them. The copies are made by the first forward.
      keep: "cpu" keeps the weights that are rounded on the CPU, from where :func:`restore` puts them back.

    Returns:
      The model.

    Raises:
      FdoraError: there is no DoRA adapter in it, an option is unknown, ``fuse=True`` finds no block all of whose layers have
        one, or ``compute`` meets a merged adapter or a GPU without 8-bit products. With ``detach=False`` a quantised layer
        raises when it runs.
    """
    layers, wrong = _layers("use_fdora", model), []
    _check_mode("use_fdora", dropout_mode)
    _check_compute(layers, compute, grad_compute, transposed, keep)
    unfuse_blocks(model)
    unhook(model)
    shared = tied(model) if compute else set()
    for path, layer in layers:
        for name, variant in list(layer.lora_variant.items()):
            if type(variant) in OURS:
                layer.lora_variant[name] = OURS[type(variant)](variant)
        why = round_base(layer.get_base_layer(), shared, keep) if compute and ours(layer) else ""
        for variant in ours(layer):
            variant.keep_inner, variant.detach, variant.dropout_mode = keep_inner, detach, dropout_mode
            variant.compute, variant.grad_compute, variant.transposed = compute, grad_compute, transposed
            variant.why_decoded, variant.route = why, None
            variant.keep(layer)
            fuse_layer(layer)
            if variant.misread(layer) is not None:
                wrong.append(path)
    for text, paths in ((MISREAD, wrong), (OF_GROUPS, [path for path, layer in layers if own_norm(layer)])):
        if paths:
            warnings.warn(text.format(len(paths), paths[0]), stacklevel=2)
    if not any(ours(layer) for _, layer in layers):
        raise FdoraError(
            "fdora.use_fdora: `model` must have a DoRA adapter of PEFT, got none. "
            "Make it with LoraConfig(use_dora=True), and call this after get_peft_model or load_adapter."
        )
    hook_layers(model, [layer for _, layer in layers], norms_on_shards)
    record(model, _tuners(model))
    for tuner in _tuners(model):
        tuner.__dict__[HOOKS] = partial(_hooks, tuner)
    if fuse is not False and not fuse_blocks(model) and fuse:
        raise FdoraError(
            "fdora.use_fdora: `fuse` must be None or False for a model without blocks it knows, got True. It wants "
            "transformers' q_proj, k_proj, v_proj or gate_proj, up_proj, down_proj, all with DoRA, or vision blocks. "
            "Its layers run apart now."
        )
    return model


def restore(model: Model) -> Model:
    """Undo :func:`use_fdora` and, on this model, :func:`enable`: every layer runs PEFT's own code again. Idempotent.

    Weights that ``compute="fp8"`` rounded are dense again; they stay rounded, and a warning says so, unless they were kept.
    """
    layers = _layers("restore", model)
    unfuse_blocks(model)
    unhook(model)
    for _, layer in layers:
        for name, variant in list(layer.lora_variant.items()):
            if isinstance(variant, Dora):
                layer.lora_variant[name] = variant.stock
        unfuse_layer(layer)
    unround(model)
    for tuner in _tuners(model):
        tuner.__dict__.pop(HOOKS, None)
    put_back(model)
    return model


def _tuners(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, LoraModel) and hasattr(type(module), HOOKS)]


def _hooks(tuner: nn.Module, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
    """PEFT's hooks of one forward. PEFT leaves those for ``adapter_names=`` on the model where it raises; this does not."""
    of_a_call = getattr(type(tuner), HOOKS)(tuner, *args, **kwargs)
    return _removed(tuner, of_a_call) if kwargs.get("adapter_names") else of_a_call


@contextmanager
def _removed(tuner: nn.Module, of_a_call: AbstractContextManager[None]) -> Iterator[None]:
    before = {module: list(module._forward_pre_hooks) for module in tuner.modules()}
    try:
        with of_a_call:
            yield
    except BaseException:
        for module, known in before.items():
            for key in set(module._forward_pre_hooks).difference(known):
                del module._forward_pre_hooks[key]
                module._forward_pre_hooks_with_kwargs.pop(key, None)
        raise


def enable(dropout_mode: Literal["peft", "lora"] = "peft") -> None:
    """Every DoRA layer that PEFT makes from now on, in this process, runs through fdora. Idempotent.

    Five names of ``peft.tuners.lora.variants``, which PEFT looks up when it makes a layer, stand for ours until
    :func:`disable`. Models that exist already do not change, here or there. ``dropout_mode`` is that of :func:`use_fdora`.
    """
    _check_mode("enable", dropout_mode)
    _register(dropout_mode, {stock.__name__: variant for stock, variant in OURS.items()})


def disable() -> None:
    """Undo :func:`enable`. Models made meanwhile keep running through fdora: :func:`restore` them one by one."""
    _register("peft", {stock.__name__: stock for stock in OURS})


@contextmanager
def enabled(dropout_mode: Literal["peft", "lora"] = "peft") -> Iterator[None]:
    """:func:`enable` for a block: ``with enabled(): model = PeftModel.from_pretrained(base, path)``."""
    before = Dora.MADE_WITH, {stock.__name__: getattr(variants, stock.__name__) for stock in OURS}
    enable(dropout_mode)
    try:
        yield
    finally:
        _register(*before)


def _register(mode: Literal["peft", "lora"], kinds: dict[str, Any]) -> None:
    Dora.MADE_WITH = mode
    for name, kind in kinds.items():
        setattr(variants, name, kind)


def report(model: nn.Module) -> Report:
    """What ran in each DoRA layer, how often and why; printable, and a list of rows.

    Calls are counted outside of torch.compile only: compiled code counts the calls that were not compiled.
    """
    return Report(rows(_layers("report", model)), gathers(model))


@torch.enable_grad()
def warmup(model: nn.Module, tokens: int | Iterable[int]) -> Warmup:
    """Compile the kernels of the model's DoRA layers, forward and backward, that these numbers of tokens need.

    Most lengths share their kernels, which are compiled in parallel with Triton 3.6 and later: each form of layer then
    runs, on its own tensors, with few lengths. Call it in the training's mode and under its autocast, after :func:`use_fdora`.
    Parameters and gradients do not change. The norms of the whole model are computed once, which compiles theirs. Embeddings
    and convolutions are left to the first step. Now and then Python's garbage collector walks all that torch and Triton have
    made, for half a second: ``gc.collect(); gc.freeze()`` behind this call keeps that out of later steps.

    Args:
      model: a model that :func:`use_fdora` runs.
      tokens: of a call, batch times length: a number, or all that may come, as ``range(60, 4001)``.

    Returns:
      ``Warmup(seconds, kernels)``; zeros where plain torch runs, as on a CPU.

    Raises:
      FdoraError: a number is not a positive int, or fdora runs no linear layer of the model.

    Memory: for a while, x, y and what one call keeps, with the largest number of tokens.
    """
    counts = [tokens] if isinstance(tokens, int) else list(tokens)
    for count in counts:
        check_positive("warmup", "tokens", count, "Pass numbers of tokens, as range(64, 4097).")
    _layers("warmup", model)
    calls = calls_of(model)
    if not calls:
        raise FdoraError(
            "fdora.warmup: `model` must have linear layers that fdora runs, got none. Call use_fdora(model) first."
        )
    done, begun = compile_ahead(calls, counts, progress), perf_counter()
    found = norms_of(model.modules()) if done.kernels else []
    if found:
        _, W, A, B, scales = map(list, zip(*found, strict=True))
        dora_norm_tree(W, list(zip(A, B, strict=True)), s=scales, state=dora_norm_tree_state(W))
        done = done._replace(seconds=done.seconds + perf_counter() - begun)
    return done


@torch.no_grad()
def init_magnitude(model: Model) -> Model:
    """Set m to ``||W + s B A||`` computed in float32, so that g is exactly 1 at the start.

    PEFT computes m in the dtype of a half-precision base and is off by up to 0.35 % per row. Only for adapters that have not
    been trained: m is overwritten, so the checkpoint is another one than PEFT would have started from.

    Raises:
      FdoraError: a DoRA layer is not run by fdora (call :func:`use_fdora` first), or cannot be (sharded, on meta).
    """
    norms = []
    for name, layer in _layers("init_magnitude", model):
        for adapter, variant in layer.lora_variant.items():
            if type(variant) in OURS:
                raise _no_magnitude(name, "it is stock. Call use_fdora(model) first")
            if isinstance(variant, Dora):
                w = variant.weights(layer, adapter)
                if isinstance(w, str):
                    raise _no_magnitude(name, f"{w}. Call this before the model is sharded or moved to meta")
                c = dora_norm(w.W, w.A, w.B, s=float(layer.scaling[adapter]))
                norms.append((layer.lora_magnitude_vector[adapter].weight, c))
    for m, c in norms:
        m.copy_(c.view(m.shape))
    return model


@torch.no_grad()
def read_banks(model: nn.Module, adapters: Sequence[str] | None = None) -> dict[str, LayerBank]:
    """The adapters of every linear layer as one bank each, for :func:`fdora.functional.dora_linear_multi`: copies.

    Args:
      model: a PeftModel, or any module with PEFT layers in it. It need not run through fdora.
      adapters: their names, in the order of the banks; None is all, in the order in which a layer got them.

    Returns:
      A :class:`LayerBank` for each layer that has one of them, by the name of the layer.

    Raises:
      FdoraError: no layer has one of the adapters, those of a layer differ in dtype, or one is more than A, B and m
        (``lora_bias``, a variant that is not DoRA).
    """
    return banks_of(_layers("read_banks", model), adapters)


@torch.no_grad()
def write_banks(model: Model, banks: dict[str, LayerBank]) -> Model:
    """Copy banks back into the parameters of the adapters, in place, bit for bit: the inverse of :func:`read_banks`.

    Raises:
      FdoraError: the model lacks a layer or an adapter, or one has another shape or dtype. Nothing is written then.
    """
    put_banks(_layers("write_banks", model), banks)
    return model


def _no_magnitude(name: str, why: str) -> FdoraError:
    return FdoraError(f"fdora.init_magnitude: `model` must have DoRA layers that fdora runs, got `{name}`: {why}.")


def _check_mode(fn: str, mode: Any) -> None:
    if mode not in ("peft", "lora"):
        remedy = "'peft' is PEFT's lora_dropout; 'lora' drops the adapter's input alone."
        raise FdoraError(f"fdora.{fn}: `dropout_mode` must be 'peft' or 'lora', got {mode!r}. {remedy}")


def _check_compute(layers: list[tuple[str, Any]], compute: Any, grad_compute: Any, transposed: Any, keep: Any) -> None:
    for name, value, known in (("compute", compute, "fp8"), ("grad_compute", grad_compute, "fp8"), ("keep", keep, "cpu")):
        if value not in (None, known):
            raise FdoraError(f"fdora.use_fdora: `{name}` must be None or {known!r}, got {value!r}. None is the default.")
    if grad_compute and not compute:
        raise FdoraError("fdora.use_fdora: `grad_compute` must be None without compute, got 'fp8'. Pass compute='fp8' too.")
    if transposed and not grad_compute:
        have = "got True. Pass compute='fp8' and grad_compute='fp8' too."
        raise FdoraError(f"fdora.use_fdora: `transposed` must be False without grad_compute, {have}")
    for path, layer in layers if compute else ():
        if layer.merged_adapters:
            raise FdoraError(
                f"fdora.use_fdora: `model` must have no merged adapter with compute='fp8', got one in `{path}`. "
                "Call model.unmerge_adapter() first."
            )
        device = next(layer.parameters()).device
        if device.type == "cuda" and (torch.version.hip or torch.cuda.get_device_capability(device) < (8, 9)):
            raise FdoraError(
                f"fdora.use_fdora: `compute` must be None on this GPU, got 'fp8' on {torch.cuda.get_device_name(device)}. "
                "It needs an NVIDIA GPU of sm_89 or newer."
            )


def _layers(fn: str, model: nn.Module) -> list[tuple[str, Any]]:
    if not isinstance(model, nn.Module):
        raise FdoraError(f"fdora.{fn}: `model` must be a torch.nn.Module, got a {type(model).__name__}. Pass the PEFT model.")
    return [(name, m) for name, m in model.named_modules() if isinstance(m, LoraLayer)]
