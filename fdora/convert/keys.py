"""The names under which frameworks keep an adapter. Pure: state dict in, ``{module path: Adapter}`` out, and back.

                PEFT                                   torchtune                 kohya, LyCORIS, ComfyUI
    A           base_model.model.PATH.lora_A.weight    PATH.lora_a.weight        NAME.lora_down.weight
    B           base_model.model.PATH.lora_B.weight    PATH.lora_b.weight        NAME.lora_up.weight
    m           base_model.model.PATH                  PATH.magnitude            NAME.dora_scale
                    .lora_magnitude_vector
    shape of m  (N,); convolution (1, N, 1, 1)         (N,)                      (N, 1) rows or (1, K) columns, 1s of a kernel
    scaling     adapter_config.json                    the recipe's config       NAME.alpha; s = alpha / r

Tensors pass through bit for bit; only m changes its axes, and alpha becomes s. A key that fits no pattern is an error, so
nothing is ever lost in silence.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from fdora._check import FdoraError, fail
from fdora.convert.adapter import Adapter

State = Mapping[str, Tensor]
PEFT, PEFT_PARTS = "base_model.model.", {"A": ".lora_A.weight", "B": ".lora_B.weight", "m": ".lora_magnitude_vector"}
TUNE_PARTS = {"A": ".lora_a.weight", "B": ".lora_b.weight", "m": ".magnitude"}
KOHYA_PARTS = {"A": ".lora_down.weight", "B": ".lora_up.weight", "m": ".dora_scale", "alpha": ".alpha"}


def from_peft(state: State, config: Mapping[str, Any]) -> dict[str, Adapter]:
    """PEFT's ``adapter_model.safetensors`` with its ``adapter_config.json``: ranks, alphas, their patterns and rsLoRA count.

    Raises:
      FdoraError: a tensor of anything but a linear layer or a convolution (an embedding, a bias, a module saved whole).
    """
    out = {}
    for path, t in _grouped("from_peft", state, PEFT, PEFT_PARTS).items():
        r, alpha = len(t["A"]), config["lora_alpha"]
        for pattern, value in (config.get("alpha_pattern") or {}).items():
            if re.match(rf"(.*\.)?({pattern})$", path):  # PEFT's own rule; the first that fits
                alpha = value
                break
        m = t.get("m")
        s = alpha / (r**0.5 if config.get("use_rslora") else r)
        out[path] = Adapter(t["A"], t["B"], None if m is None else m.flatten(), s)
    return out


def to_peft(adapters: Mapping[str, Adapter]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """``(state, config)`` for PEFT; config is what LoraConfig needs, with a rank and alpha for each module that differs.

    Raises:
      FdoraError: DoRA over input columns (PEFT has only rows), or DoRA beside LoRA (one ``use_dora`` holds for all).
    """
    fn = "convert.to_peft"
    _rows_only(fn, adapters)
    first = next(iter(adapters.values()))
    if len({p.m is None for p in adapters.values()}) > 1:
        raise fail(
            fn, "adapters", "all DoRA or all LoRA", "both", "Give LoRA layers the magnitude of no change, dora_norm(W, A, B)."
        )
    state: dict[str, Tensor] = {}
    for path, p in adapters.items():
        state |= _named(PEFT + path, PEFT_PARTS, p)
        if p.m is not None:
            state[PEFT + path + PEFT_PARTS["m"]] = (
                p.m.flatten() if p.A.dim() == 2 else p.m.reshape(1, -1, *[1] * (p.A.dim() - 2))
            )
    config = {
        "peft_type": "LORA",
        "r": len(first.A),
        "lora_alpha": _alpha(first),
        "use_dora": first.m is not None,
        "target_modules": sorted(adapters),
        "rank_pattern": {path: len(p.A) for path, p in adapters.items() if len(p.A) != len(first.A)},
        "alpha_pattern": {path: _alpha(p) for path, p in adapters.items() if _alpha(p) != _alpha(first)},
    }
    return state, config


def from_torchtune(state: State, config: Mapping[str, Any]) -> dict[str, Adapter]:
    """torchtune's adapter with the ``{"r", "lora_alpha"}`` of its recipe. Paths stay torchtune's: see ``fdora.convert.llama``.

    Raises:
      FdoraError: a key that is no adapter's.
    """
    out = {}
    for path, t in _grouped("from_torchtune", state, "", TUNE_PARTS).items():
        out[path] = Adapter(t["A"], t["B"], t.get("m"), config["lora_alpha"] / config["r"])
    return out


def to_torchtune(adapters: Mapping[str, Adapter]) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """``(state, {"r", "lora_alpha"})`` for torchtune.

    Raises:
      FdoraError: DoRA over input columns, or more than one rank or scaling: a recipe has one.
    """
    fn = "convert.to_torchtune"
    _rows_only(fn, adapters)
    kinds = {(len(p.A), _alpha(p)) for p in adapters.values()}
    if len(kinds) != 1:
        remedy = "A recipe of torchtune has one of each: combine(W, [p], [1.0], r=...) makes s = 1."
        raise fail(fn, "adapters", "of one rank and alpha", sorted(kinds), remedy)
    r, alpha = kinds.pop()
    state: dict[str, Tensor] = {}
    for path, p in adapters.items():
        state |= _named(path, TUNE_PARTS, p) | ({} if p.m is None else {path + TUNE_PARTS["m"]: p.m.flatten()})
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
        by_row = m is None or (len(m) == N == m.numel())
        if m is not None and not by_row and m.numel() != t["A"].shape[1]:
            want = f"({N}, 1) or (1, {t['A'].shape[1]})"
            raise fail(fn, f"{name}.dora_scale", want, tuple(m.shape), "It belongs to another layer.")
        s = t["alpha"].item() / r if "alpha" in t else 1.0
        out[paths[name]] = Adapter(t["A"], t["B"], None if m is None else m.flatten(), s, int(by_row))
    return out


def to_kohya(adapters: Mapping[str, Adapter], names: Mapping[str, str]) -> dict[str, Tensor]:
    """The state dict of a kohya, LyCORIS or ComfyUI file; ``names`` is ``{path: name}``, see :func:`kohya_names`.

    Raises:
      FdoraError: a path that is not in ``names``.
    """
    state: dict[str, Tensor] = {}
    for path, p in adapters.items():
        if path not in names:
            raise fail(
                "convert.to_kohya", "names", f"a name for each module, {path!r} too", f"{len(names)} others", "See kohya_names."
            )
        name, ones = names[path], [1] * (p.A.dim() - 2)
        state |= _named(name, KOHYA_PARTS, p) | {name + KOHYA_PARTS["alpha"]: torch.tensor(float(_alpha(p)))}
        if p.m is not None:
            state[name + KOHYA_PARTS["m"]] = p.m.reshape(-1, 1, *ones) if p.norm_axis else p.m.reshape(1, -1, *ones)
    return state


def _named(path: str, parts: dict[str, str], p: Adapter) -> dict[str, Tensor]:
    return {path + parts["A"]: p.A, path + parts["B"]: p.B}


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
    if not out:
        raise FdoraError(f"fdora.convert.{fn}: `state` must hold an adapter, got nothing. Is this the right file?")
    return out


def _alpha(p: Adapter) -> float:
    """s r, an int where it is one: what is written is 16, not 16.000000000000004."""
    alpha = float(f"{p.s * len(p.A):.12g}")
    return int(alpha) if alpha.is_integer() else alpha


def _rows_only(fn: str, adapters: Mapping[str, Adapter]) -> None:
    for path, p in adapters.items():
        if p.norm_axis == 0 and p.m is not None:
            remedy = "This framework has no norm over input columns: merge it, or use to_lora."
            raise fail(fn, "norm_axis", "1", f"0 for {path!r}", remedy)
