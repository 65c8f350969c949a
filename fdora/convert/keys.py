"""The names under which frameworks keep an adapter. Pure: state dict in, ``{module path: Adapter}`` out, and back.

                PEFT                                   torchtune                 kohya, LyCORIS, ComfyUI
    A           base_model.model.PATH.lora_A.weight    PATH.lora_a.weight        NAME.lora_down.weight
    B           base_model.model.PATH.lora_B.weight    PATH.lora_b.weight        NAME.lora_up.weight
    m           base_model.model.PATH                  PATH.magnitude            NAME.dora_scale
                    .lora_magnitude_vector
    shape of m  (N,); convolution (1, N, 1, 1)         (N,)                      (N, 1) rows or (1, K) columns, 1s of a kernel
    scaling     adapter_config.json                    the recipe's config       NAME.alpha; s = alpha / r

diffusers writes PEFT's names behind that of the component, ``unet.PATH.lora_A.weight``, and PEFT's config as metadata of the
file, each field behind the same name; some of its scripts say ``lora.down`` and ``lora.up``.

Tensors pass through bit for bit; only m changes its axes, and alpha becomes s. A key that fits no pattern is an error, so
nothing is ever lost in silence.

The Llama family between torchtune's names and Hugging Face's.

torchtune rotates neighbouring pairs in RoPE, Hugging Face two halves of a head: the rows of q_proj and k_proj lie in another
order. Whatever has an axis of rows must follow: W, B and *m* (torchtune's own export to PEFT moves B and leaves m behind).
Families without that (Qwen2, Gemma, Phi) have the names only: heads=None.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fdora._check import FdoraError, fail
from fdora.convert.adapter import Adapter
from fdora.convert.config import check_config, number, scaling

State = Mapping[str, Tensor]
Adapters = Mapping[str, Adapter]  # by module path
Saved = tuple[dict[str, Tensor], dict[str, Any]]  # tensors, and a config
PEFT, PEFT_PARTS = "base_model.model.", {"A": ".lora_A.weight", "B": ".lora_B.weight", "m": ".lora_magnitude_vector"}
TUNE_PARTS = {"A": ".lora_a.weight", "B": ".lora_b.weight", "m": ".magnitude"}
COMPONENTS = ("unet", "transformer")
KOHYA_PARTS = {"A": ".lora_down.weight", "B": ".lora_up.weight", "m": ".dora_scale", "alpha": ".alpha"}


def from_peft(state: State, config: Mapping[str, Any]) -> dict[str, Adapter]:
    """PEFT's ``adapter_model.safetensors`` with its ``adapter_config.json``, every field of it: see ``fdora.convert.config``.

    PEFT takes fan_in_fan_out from each layer's class; its config keeps that of the last layer. Where a model mixes both kinds,
    use ``p._replace(fan_in_fan_out=...)``: merging a weight that is not square says so, a square one cannot.

    Raises:
      FdoraError: a tensor of anything but a linear layer or a convolution (an embedding, a bias, a module saved whole),
        magnitudes without use_dora or the reverse, or a config that means more than these tensors can say.
    """
    return _from_peft("from_peft", state, config, PEFT)


def _from_peft(name: str, state: State, config: Mapping[str, Any], prefix: str) -> dict[str, Adapter]:
    fn, out = f"convert.{name}", {}
    check_config(fn, config)
    dora = bool(config.get("use_dora"))
    for path, t in _grouped(name, state, prefix, PEFT_PARTS).items():
        m = t.get("m")
        if (m is not None) != dora:
            want = f"{'with' if dora else 'without'} lora_magnitude_vector, as use_dora={dora} says"
            have = f"{path!r} {'without' if m is None else 'with'} one"
            raise fail(fn, "state", want, have, "Take both files from one adapter.")
        flat = None if m is None else m.flatten()
        turned = bool(config.get("fan_in_fan_out")) and t["A"].dim() == 2  # never a convolution
        out[path] = Adapter(t["A"], t["B"], flat, scaling(fn, config, path, len(t["A"])), fan_in_fan_out=turned)
    return out


def to_peft(adapters: Adapters) -> Saved:
    """``(state, config)`` for PEFT; config is what LoraConfig needs, with a rank and alpha for each module that differs.

    Raises:
      FdoraError: nothing to write, DoRA over input columns (PEFT has only rows), or DoRA beside LoRA, or both layouts of W
        (one ``use_dora`` and one ``fan_in_fan_out`` hold for all).
    """
    fn = "convert.to_peft"
    _rows_only(fn, adapters)
    first = next(iter(adapters.values()), None)
    if first is None:
        raise fail(fn, "adapters", "at least one", "none", "Pass {module path: Adapter}.")
    turned = {p.fan_in_fan_out for p in adapters.values() if p.A.dim() == 2}
    if len(turned) > 1:
        raise fail(fn, "adapters", "all with fan_in_fan_out or all without", "both", "Write them into two folders.")
    if len({p.m is None for p in adapters.values()}) > 1:
        raise fail(
            fn, "adapters", "all DoRA or all LoRA", "both", "Give LoRA layers the magnitude of no change, dora_norm(W, A, B)."
        )
    state: dict[str, Tensor] = {}
    for path, p in adapters.items():
        state |= _named(PEFT + path, PEFT_PARTS, p, (-1,) if p.A.dim() == 2 else (1, -1, *_ones(p)))
    config = {
        "peft_type": "LORA",
        "r": len(first.A),
        "lora_alpha": _alpha(first),
        "use_dora": first.m is not None,
        "fan_in_fan_out": turned == {True},
        "target_modules": sorted(adapters),
        "rank_pattern": {_exactly(path): len(p.A) for path, p in adapters.items() if len(p.A) != len(first.A)},
        "alpha_pattern": {_exactly(path): _alpha(p) for path, p in adapters.items() if _alpha(p) != _alpha(first)},
    }
    return state, config


def from_diffusers(state: State, config: Mapping[str, Any] | None = None, *, prefix: str | None = None) -> dict[str, Adapter]:
    """A LoRA file of diffusers, and the ``lora_adapter_metadata`` in it. Without any, alpha is the rank: so diffusers reads it.

    Args:
      state: of a pipeline's ``save_lora_weights``, or of a model's ``save_lora_adapter``.
      config: the metadata, or None.
      prefix: the component to read, ``"text_encoder"`` say; "" where keys begin with a module's path. None: the UNet or the
        transformer, and then nothing else may be there.

    Raises:
      FdoraError: as :func:`from_peft` does.
    """
    head = f"{prefix}." if prefix else ""
    if prefix is None:
        head = next((f"{name}." for name in COMPONENTS if any(key.startswith(f"{name}.") for key in state)), "")
    else:
        state = {key: t for key, t in state.items() if key.startswith(head)}
    named = {key.replace(".lora.down.", ".lora_A.").replace(".lora.up.", ".lora_B."): t for key, t in state.items()}
    if len(named) < len(state):
        have, remedy = "one tensor under both of its names", "Take one of the two out."
        raise fail("convert.from_diffusers", "state", "of lora_A or lora.down, lora_B or lora.up", have, remedy)
    if config is not None:
        own = {key.removeprefix(head): value for key, value in config.items() if key.startswith(head)}
        return _from_peft("from_diffusers", named, own, head)
    bare = {"peft_type": "LORA", "lora_alpha": 1, "use_dora": any(key.endswith(PEFT_PARTS["m"]) for key in named)}
    return {path: p._replace(s=1.0) for path, p in _from_peft("from_diffusers", named, bare, head).items()}


def to_diffusers(adapters: Adapters, *, prefix: str = "unet") -> Saved:
    """``(state, config)`` of a diffusers file; config is its ``lora_adapter_metadata``. ``prefix`` is the component, as
    ``load_lora_weights`` expects it in front of each key and ``load_lora_adapter`` in its argument of that name.

    Raises:
      FdoraError: as :func:`to_peft` does.
    """
    state, config = to_peft(adapters)
    head = prefix and f"{prefix}."
    return {head + key.removeprefix(PEFT): t for key, t in state.items()}, {head + key: v for key, v in config.items()}


def from_torchtune(state: State, config: Mapping[str, Any]) -> dict[str, Adapter]:
    """torchtune's adapter with the ``{"r", "lora_alpha"}`` of its recipe. Paths stay torchtune's:
    see :func:`llama_from_torchtune`.

    Raises:
      FdoraError: a key that is no adapter's.
    """
    fn, out = "convert.from_torchtune", {}
    alpha, r = number(fn, config, "lora_alpha"), number(fn, config, "r")
    for path, t in _grouped("from_torchtune", state, "", TUNE_PARTS).items():
        if len(t["A"]) != r:
            raise fail(fn, "r", f"{len(t['A'])}, the rank of {path!r}", r, "Take both files from one adapter.")
        out[path] = Adapter(t["A"], t["B"], t.get("m"), alpha / r)
    return out


def to_torchtune(adapters: Adapters) -> Saved:
    """``(state, {"r", "lora_alpha"})`` for torchtune.

    Raises:
      FdoraError: DoRA over input columns, fan_in_fan_out, or more than one rank or scaling: a recipe has one.
    """
    fn = "convert.to_torchtune"
    _rows_only(fn, adapters)
    _linear_layout(fn, adapters)
    kinds = {(len(p.A), _alpha(p)) for p in adapters.values()}
    if len(kinds) != 1:
        remedy = "A recipe of torchtune has one of each: combine(W, [p], [1.0], r=...) makes s = 1."
        raise fail(fn, "adapters", "of one rank and alpha", sorted(kinds), remedy)
    r, alpha = kinds.pop()
    state: dict[str, Tensor] = {}
    for path, p in adapters.items():
        state |= _named(path, TUNE_PARTS, p, (-1,))
    return state, {"r": r, "lora_alpha": alpha}


def kohya_names(paths: Iterable[str], prefix: str = "lora_unet") -> dict[str, str]:
    """``{path: prefix_path}`` with dots made underscores. Kohya's names cannot be read back without the paths.

    Raises:
      FdoraError: two paths become one name.
    """
    names = {path: f"{prefix}_{path.replace('.', '_')}" for path in paths}
    if len(set(names.values())) < len(names):
        twice = sorted(names, key=lambda path: names[path])
        pair = next((a, b) for a, b in pairwise(twice) if names[a] == names[b])
        raise fail("convert.kohya_names", "paths", "different with underscores for dots", pair, "Name them yourself.")
    return names


def from_kohya(state: State, names: Mapping[str, str]) -> dict[str, Adapter]:
    """A kohya, LyCORIS or ComfyUI file; ``names`` is ``{path: name}``, see :func:`kohya_names`. No alpha means s = 1.

    The shape of ``dora_scale`` says which axis was normalised: (N, 1) each output row, (1, K) each input column.

    Raises:
      FdoraError: a name that is not in ``names``, LoHa, LoKr or a ``lora_mid``.
    """
    fn, paths, out = "convert.from_kohya", {name: path for path, name in names.items()}, {}
    for name, t in _grouped("from_kohya", state, "", KOHYA_PARTS).items():
        if name not in paths:
            raise fail(fn, "names", f"a path for each module, {name!r} too", f"{len(paths)} others", "See kohya_names(paths).")
        N, r, m = len(t["B"]), len(t["A"]), t.get("m")
        by_row = m is None or (m.shape[:1] == (N,) and m.numel() == N)
        if m is not None and not by_row and m.numel() != t["A"].shape[1]:
            want = f"({N}, 1) or (1, {t['A'].shape[1]})"
            raise fail(fn, f"{name}.dora_scale", want, tuple(m.shape), "It belongs to another layer.")
        alpha = t["alpha"].flatten().tolist() if "alpha" in t else [r]
        if len(alpha) != 1 or not math.isfinite(alpha[0]):
            raise fail(fn, f"{name}.alpha", "one finite number", alpha, "The file is damaged.")
        out[paths[name]] = Adapter(t["A"], t["B"], None if m is None else m.flatten(), alpha[0] / r, int(by_row))
    return out


def to_kohya(adapters: Adapters, names: Mapping[str, str]) -> dict[str, Tensor]:
    """The state dict of a kohya, LyCORIS or ComfyUI file; ``names`` is ``{path: name}``, see :func:`kohya_names`.

    Raises:
      FdoraError: a path that is not in ``names``, or fan_in_fan_out.
    """
    _linear_layout("convert.to_kohya", adapters)
    state: dict[str, Tensor] = {}
    for path, p in adapters.items():
        if path not in names:
            raise fail(
                "convert.to_kohya", "names", f"a name for each module, {path!r} too", f"{len(names)} others", "See kohya_names."
            )
        state |= _named(names[path], KOHYA_PARTS, p, (*((-1, 1) if p.norm_axis else (1, -1)), *_ones(p)))
        state[names[path] + KOHYA_PARTS["alpha"]] = torch.tensor(float(_alpha(p)))
    return state


def _named(path: str, parts: dict[str, str], p: Adapter, axes: tuple[int, ...]) -> dict[str, Tensor]:
    """``axes``: those that the format gives m."""
    m = {} if p.m is None else {path + parts["m"]: p.m.reshape(axes)}
    return {path + parts["A"]: p.A, path + parts["B"]: p.B} | m


def _ones(p: Adapter) -> list[int]:
    """The axes of a kernel."""
    return [1] * (p.A.dim() - 2)


def _grouped(fn: str, state: State, prefix: str, parts: dict[str, str]) -> dict[str, dict[str, Tensor]]:
    """{path: {"A": .., "B": .., ..}}; every key has its place."""
    out: dict[str, dict[str, Tensor]] = {}
    for key, t in state.items():
        part = next((part for part, end in parts.items() if key.startswith(prefix) and key.endswith(end)), None)
        if part is None:
            ends = ", ".join(f"*{end}" for end in parts.values())
            raise fail(
                f"convert.{fn}", "state", f"of {prefix}{ends}", repr(key), "Take it out, if you know that it is not needed."
            )
        out.setdefault(key[len(prefix) : -len(parts[part])], {})[part] = t
    for path, found in out.items():
        if not {"A", "B"} <= found.keys():
            have = f"{', '.join(sorted(found))} alone"
            raise fail(f"convert.{fn}", "state", f"A and B of {path!r}", have, "The file is not complete.")
        for part in "AB":
            if found[part].dim() < 2 or not found[part].numel():
                want, have = f"a matrix in {part} of {path!r}", f"shape {tuple(found[part].shape)}"
                raise fail(f"convert.{fn}", "state", want, have, "Gather a sharded adapter before you save it.")
    if not out:
        raise FdoraError(f"fdora.convert.{fn}: `state` must hold an adapter, got nothing. Is this the right file?")
    return out


def _alpha(p: Adapter) -> float:
    """s r, an int where it is one: what is written is 16, not 16.000000000000004."""
    alpha = float(f"{p.s * len(p.A):.12g}")
    return int(alpha) if alpha.is_integer() else alpha


def _exactly(path: str) -> str:
    """The pattern of this path alone: PEFT's also fit after any prefix, and the first that fits counts."""
    return "^" + re.escape(path)


def _linear_layout(fn: str, adapters: Adapters) -> None:
    for path, p in adapters.items():
        if p.fan_in_fan_out:
            remedy = (
                "This framework keeps no such layers: merge it, or pass p._replace(fan_in_fan_out=False) with W transposed."
            )
            raise fail(fn, "fan_in_fan_out", "False", f"True for {path!r}", remedy)


def _rows_only(fn: str, adapters: Adapters) -> None:
    for path, p in adapters.items():
        if p.norm_axis == 0 and p.m is not None:
            remedy = "This framework has no norm over input columns: merge it, or use to_lora."
            raise fail(fn, "norm_axis", "1", f"0 for {path!r}", remedy)


HF = {
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.output_proj": "self_attn.o_proj",
    "mlp.w1": "mlp.gate_proj",
    "mlp.w2": "mlp.down_proj",
    "mlp.w3": "mlp.up_proj",
    "output": "lm_head",
}


def llama_from_torchtune(adapters: Adapters, *, heads: int | None = None, kv_heads: int | None = None) -> dict[str, Adapter]:
    """torchtune's paths and rows to Hugging Face's; ``heads`` and ``kv_heads`` of a model whose q and k are permuted."""
    return _renamed(adapters, HF, heads, kv_heads, True)


def llama_to_torchtune(adapters: Adapters, *, heads: int | None = None, kv_heads: int | None = None) -> dict[str, Adapter]:
    """Undo :func:`llama_from_torchtune`."""
    return _renamed(adapters, {theirs: ours for ours, theirs in HF.items()}, heads, kv_heads, False)


def _renamed(
    adapters: Adapters, names: Mapping[str, str], heads: int | None, kv_heads: int | None, to_hf: bool
) -> dict[str, Adapter]:
    """A layer that is none of ``names`` keeps its path."""
    permuted = {"q_proj": heads, "k_proj": heads if kv_heads is None else kv_heads}
    out = {}
    for path, p in adapters.items():
        for old, new in names.items():
            if (path == old and "." not in old) or path.endswith("." + old):
                head = path[: -len(old)]
                head = head and f"model.{head}" if to_hf else head.removeprefix("model.")
                out[head + new] = _moved(p, permuted.get(new.rpartition(".")[2]), to_hf)
                break
        else:
            out[path] = p
    return out


def _moved(p: Adapter, heads: int | None, pairs_to_halves: bool) -> Adapter:
    if heads is None:
        return p

    def rows(t: Tensor) -> Tensor:
        half = t.shape[0] // heads // 2
        split = (heads, half, 2) if pairs_to_halves else (heads, 2, half)
        return t.reshape(*split, -1).transpose(1, 2).reshape(t.shape)

    return p._replace(B=rows(p.B), m=None if p.m is None else rows(p.m))
