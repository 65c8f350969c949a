"""Adapters and weights in safetensors files (``pip install safetensors``). Weights are read one layer at a time.

What is written takes its place only when all of it is on the disk: a failure leaves the files that were there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

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
            with readable("convert.Weights", file), safe_open(str(file), "pt") as f:
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
        file = self._file[path]
        with readable("convert.Weights", file), self._open(str(file), "pt") as f:
            return f.get_tensor(path + ".weight")

    def __iter__(self) -> Iterator[str]:
        return iter(self._file)

    def __len__(self) -> int:
        return len(self._file)


def read(path: str | Path, dialect: Dialect = "peft", *, names: Mapping[str, str] | None = None) -> dict[str, Adapter]:
    """``{module path: Adapter}`` of a folder with a config beside the tensors (peft, torchtune) or of one file (kohya, with
    ``names`` from :func:`kohya_names`).

    Raises:
      FdoraError: a file is missing or damaged, or the adapter is refused: see :func:`from_peft` and its like.
    """
    if dialect == "kohya":
        return from_kohya(_tensors(Path(path)), _given(names))
    parse = from_peft if _known(dialect) == "peft" else from_torchtune
    return parse(_tensors(Path(path) / TENSORS), _config(Path(path) / CONFIG))


def write(
    path: str | Path, adapters: Mapping[str, Adapter], dialect: Dialect = "peft", *, names: Mapping[str, str] | None = None
) -> None:
    """The way back from :func:`read`. A failure leaves the files that were there: never new tensors beside an old config.

    Raises:
      FdoraError: the dialect cannot hold the adapters, or the place cannot be written.
    """
    if dialect == "kohya":
        write_file(Path(path), to_kohya(adapters, _given(names)))
        return
    state, config = (to_peft if _known(dialect) == "peft" else to_torchtune)(adapters)
    text = json.dumps(config, indent=2) + "\n"
    with writable(Path(path)):
        Path(path).mkdir(parents=True, exist_ok=True)
    _replace(Path(path), {CONFIG: lambda file: file.write_text(text), TENSORS: lambda file: _save(file, state)})


def write_scales(path: str | Path, weights: Mapping[str, Tensor], adapters: Mapping[str, Adapter]) -> None:
    """g of every layer, float32, as ``base_model.model.<path>.g``, for a server that keeps W unmerged:
    ``y = g * (x @ W.T + s * (x @ A.T) @ B.T) + bias`` needs A, B and these, and no norm. See :func:`adapter_scale`."""
    for layer, p in adapters.items():
        if p.norm_axis == 0:
            raise fail("convert.write_scales", "norm_axis", "1", f"0 for {layer!r}", "A g of input columns scales x: merge it.")
    write_file(Path(path), {f"{PEFT}{layer}.g": adapter_scale(weights[layer], p).float() for layer, p in adapters.items()})


def _tensors(file: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    with readable("convert.read", file):
        return load_file(file)


def _config(file: Path) -> dict[str, Any]:
    with readable("convert.read", file):
        config = json.loads(file.read_text())
    if not isinstance(config, dict):
        raise fail("convert.read", CONFIG, "an object of JSON", f"a {type(config).__name__}", "Save the adapter again.")
    return config


def _save(file: Path, state: dict[str, Tensor]) -> None:
    from safetensors.torch import save_file

    own = {key: t.detach().contiguous().clone() for key, t in state.items()}  # safetensors takes no views
    save_file(own, file, metadata={"format": "pt"})


def write_file(path: Path, state: dict[str, Tensor]) -> None:
    _replace(path.parent, {path.name: lambda file: _save(file, state)})


def _replace(folder: Path, files: Mapping[str, Callable[[Path], object]]) -> None:
    """Write all files aside, then move them into place. A failure puts the old ones back.

    One move is atomic, two are not: of several files the old ones are moved away first, and the first of ``files``, a config,
    comes back last. Between the moves it is missing, so no reader takes new tensors with an old config.
    """
    with writable(folder), TemporaryDirectory(dir=folder, prefix=".fdora-") as aside:
        new, old = Path(aside, "new"), Path(aside, "old")
        new.mkdir()
        old.mkdir()
        for name, save in files.items():
            save(new / name)
            if (folder / name).is_dir():
                raise IsADirectoryError(f"{folder / name} is a folder")
        try:
            for name in files:
                if len(files) > 1 and (folder / name).exists():
                    os.replace(folder / name, old / name)
            for name in reversed(list(files)):
                os.replace(new / name, folder / name)
        except BaseException:
            for name in files:
                if (old / name).exists():
                    os.replace(old / name, folder / name)
                elif not (new / name).exists():
                    (folder / name).unlink()
            raise


@contextmanager
def readable(fn: str, file: Path) -> Iterator[None]:
    """What the file system, safetensors or JSON say about a bad file, as one sentence."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError, json.JSONDecodeError, UnicodeDecodeError) as error:
        have = "no such file" if isinstance(error, FileNotFoundError) else str(error)
        remedy = "Check the path; save a damaged file again."
        raise fail(fn, "path", f"such that {file} can be read", have, remedy) from error


@contextmanager
def writable(path: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        remedy = "The files that were there are unchanged."
        raise fail("convert.write", "path", f"a place that can be written ({path})", error, remedy) from error


def _given(names: Mapping[str, str] | None) -> Mapping[str, str]:
    if names is None:
        raise fail("convert", "names", "{path: name} for kohya", None, "Make it with kohya_names(paths).")
    return names


def _known(dialect: str) -> str:
    if dialect not in ("peft", "torchtune"):
        raise fail("convert", "dialect", "'peft', 'torchtune' or 'kohya'", repr(dialect), "Others can be read as one of these.")
    return dialect
