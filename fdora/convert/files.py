"""Adapters and weights in safetensors files (``pip install safetensors``). Weights are read one layer at a time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

from torch import Tensor

from fdora._check import FdoraError, fail
from fdora.convert.adapter import Adapter, adapter_scale
from fdora.convert.keys import PEFT, from_kohya, from_peft, from_torchtune, to_kohya, to_peft, to_torchtune

Dialect = Literal["peft", "torchtune", "kohya"]
TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


class Weights(Mapping[str, Tensor]):
    """``{module path: W}`` over the safetensors files of a model: each weight is read when it is asked for, and not kept."""

    def __init__(self, path: str | Path):
        """path: one file, or a folder of them."""
        from safetensors import safe_open

        path = Path(path)
        self._open = safe_open
        self._file: dict[str, Path] = {}
        for file in sorted(path.glob("*.safetensors")) if path.is_dir() else [path]:
            with safe_open(str(file), "pt") as f:
                self._file |= {key.removesuffix(".weight"): file for key in f.keys() if key.endswith(".weight")}  # noqa: SIM118
        if not self._file:
            raise fail("convert.Weights", "path", "a safetensors file, or a folder of them", str(path), "Save the model so.")

    def __getitem__(self, path: str) -> Tensor:
        if path not in self._file:
            near = [have for have in self._file if have.endswith("." + path.rpartition(".")[2])][:1]
            raise FdoraError(
                f"fdora.convert.Weights: the weight of {path!r} must be among the {len(self._file)} in these files, got none"
                f"{f'; one of them is {near[0]!r}' if near else ''}. Pass the model that the adapter was trained on."
            )
        with self._open(str(self._file[path]), "pt") as f:
            return f.get_tensor(path + ".weight")

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)


def read(path: str | Path, dialect: Dialect = "peft", *, names: Mapping[str, str] | None = None) -> dict[str, Adapter]:
    """``{module path: Adapter}`` of a folder with a config beside the tensors (peft, torchtune) or of one file (kohya, with
    ``names`` from :func:`kohya_names`)."""
    from safetensors.torch import load_file

    if dialect == "kohya":
        return from_kohya(load_file(path), _given(names))
    state, config = load_file(Path(path) / TENSORS), json.loads((Path(path) / CONFIG).read_text())
    return (from_peft if _known(dialect) == "peft" else from_torchtune)(state, config)


def write(
    path: str | Path, adapters: Mapping[str, Adapter], dialect: Dialect = "peft", *, names: Mapping[str, str] | None = None
) -> None:
    """The way back from :func:`read`. Nothing is written where the dialect cannot hold the adapters."""
    from safetensors.torch import save_file

    if dialect == "kohya":
        save_file(_own(to_kohya(adapters, _given(names))), path)
        return
    state, config = (to_peft if _known(dialect) == "peft" else to_torchtune)(adapters)
    Path(path).mkdir(parents=True, exist_ok=True)
    save_file(_own(state), Path(path) / TENSORS, metadata={"format": "pt"})
    (Path(path) / CONFIG).write_text(json.dumps(config, indent=2) + "\n")


def write_scales(path: str | Path, weights: Mapping[str, Tensor], adapters: Mapping[str, Adapter]) -> None:
    """g of every layer, float32, as ``base_model.model.<path>.g``, for a server that keeps W unmerged:
    ``y = g * (x @ W.T + s * (x @ A.T) @ B.T) + bias`` needs A, B and these, and no norm. See :func:`adapter_scale`."""
    from safetensors.torch import save_file

    for layer, p in adapters.items():
        if p.norm_axis == 0:
            raise fail("convert.write_scales", "norm_axis", "1", f"0 for {layer!r}", "A g of input columns scales x: merge it.")
    save_file({f"{PEFT}{layer}.g": adapter_scale(weights[layer], p).float() for layer, p in adapters.items()}, path)


def _own(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """safetensors takes contiguous tensors that share nothing."""
    return {key: t.detach().contiguous().clone() for key, t in state.items()}


def _given(names: Mapping[str, str] | None) -> Mapping[str, str]:
    if names is None:
        raise fail("convert", "names", "{path: name} for kohya", None, "Make it with kohya_names(paths).")
    return names


def _known(dialect: str) -> str:
    if dialect not in ("peft", "torchtune"):
        raise fail("convert", "dialect", "'peft', 'torchtune' or 'kohya'", repr(dialect), "Others can be read as one of these.")
    return dialect
