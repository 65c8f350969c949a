"""Adapters and weights in safetensors files (``pip install safetensors``). Weights are read one layer at a time.

What is written takes its place by one rename when all of it is on the disk: a failure, or a kill at any moment, leaves what was
there or what is new.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

from torch import Tensor

from fdora._check import FdoraError, fail
from fdora._command import progress
from fdora.convert.adapter import Adapter, adapter_scale
from fdora.convert.keys import (
    PEFT,
    from_diffusers,
    from_kohya,
    from_peft,
    from_torchtune,
    to_diffusers,
    to_kohya,
    to_peft,
    to_torchtune,
)

Dialect = Literal["peft", "torchtune", "kohya", "diffusers"]
TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
DIFFUSERS, METADATA = "pytorch_lora_weights.safetensors", "lora_adapter_metadata"
OLD = ".fdora-old"
OVERWRITE = "Pass overwrite=True, or --overwrite to the command: other files in it stay."
Texts = Mapping[str, str]


class Weights(Mapping[str, Tensor]):
    """``{module path: W}`` over the safetensors files of a model: each weight is read when it is asked for, and not kept."""

    def __init__(self, path: str | Path):
        """path: one file, or a folder of them, of which an index (``*.safetensors.index.json``) says what is where."""
        from safetensors import safe_open

        fn, path = "convert.Weights", Path(path)
        self._open = safe_open
        self._file: dict[str, Path] = {}
        with readable(fn, path):
            shards = sorted(path.glob("*.safetensors")) if path.is_dir() else [path]
            indices = sorted(path.glob("*.safetensors.index.json")) if path.is_dir() else []
        for index in indices:
            with readable(fn, index):
                found = json.loads(index.read_text())
            places = found.get("weight_map") if isinstance(found, dict) else None
            if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
                raise fail(fn, "path", f"a folder whose index {index} has a weight_map", "none", "Save the model again.")
            self._add({key: path / name for key, name in places.items()})
        for file in [] if indices else shards:
            with readable(fn, file), safe_open(str(file), "pt") as f:
                self._add(dict.fromkeys(f.keys(), file))
        if not self._file:
            raise fail(fn, "path", "a safetensors file, or a folder of them", str(path), "Save the model so.")

    def _add(self, places: Mapping[str, Path]) -> None:
        found = {key.removesuffix(".weight"): file for key, file in places.items() if key.endswith(".weight")}
        for key in found.keys() & self._file.keys():
            have = f"{key!r} in {self._file[key].name} and in {found[key].name}"
            raise fail("convert.Weights", "path", "a folder with each weight once", have, "Pass the one file, or an index.")
        self._file |= found

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


def read(
    path: str | Path, dialect: Dialect = "peft", *, names: Texts | None = None, prefix: str | None = None
) -> dict[str, Adapter]:
    """``{module path: Adapter}`` of a folder (peft, torchtune), of a file (kohya, with ``names`` from :func:`kohya_names`), or
    of either (diffusers, with ``prefix`` for a component other than UNet and transformer, see :func:`from_diffusers`).

    Raises:
      FdoraError: a file is missing or damaged, or the adapter is refused: see :func:`from_peft` and its like.
    """
    folder = file = Path(path)
    if dialect == "kohya":
        return from_kohya(_tensors(file), _given(names))
    if dialect == "diffusers":
        file = folder / DIFFUSERS if folder.is_dir() else file
        return from_diffusers(_tensors(file), _metadata(file), prefix=prefix)
    _, parse = _folders(dialect)
    with readable("convert.read", folder):
        if not folder.exists() and _old(folder).exists():  # `write` was killed between its two renames
            folder = _old(folder)
    return parse(_tensors(folder / TENSORS), _config(folder / CONFIG))


def write(
    path: str | Path,
    adapters: Mapping[str, Adapter],
    dialect: Dialect = "peft",
    *,
    names: Texts | None = None,
    prefix: str = "unet",
    overwrite: bool = False,
) -> None:
    """The way back from :func:`read`: a folder (peft, torchtune) or one file (kohya; diffusers, with the component as
    ``prefix``), which replaces one that is there.

    A folder that holds anything is refused unless ``overwrite`` is given. Then a new folder takes its place, with these tensors
    and config and all other files of the old one, which is moved to ``<path>.fdora-old`` and removed last. A kill leaves the
    old folder or the new one: if it came between the two moves, :func:`read` reads ``<path>.fdora-old``, and the next
    ``write`` moves it back first. Processes that write at once take turns, where the file system has locks.

    Raises:
      FdoraError: the dialect cannot hold the adapters, the folder is not empty, or the place cannot be written.
    """
    if dialect == "kohya":
        write_file(Path(path), to_kohya(adapters, _given(names)))
        return
    if dialect == "diffusers":
        state, config = to_diffusers(adapters, prefix=prefix)
        write_file(Path(path), state, {METADATA: json.dumps(config, indent=2)})
        return
    state, config = _folders(dialect)[0](adapters)
    text = json.dumps(config, indent=2) + "\n"
    with writable(Path(path)):
        folder = _real(path)
        make_folder(folder.parent)
    old, own = _old(folder), (TENSORS, CONFIG)
    with _aside(folder) as aside:
        if old.exists():  # of a process that was killed
            shutil.rmtree(old) if _holds(folder) else os.rename(old, folder)
        holds = check_folder(folder, overwrite)
        new = aside / "new"
        new.mkdir()
        if holds:
            shutil.copytree(folder, new, True, lambda at, _: own if Path(at) == folder else (), _linked, dirs_exist_ok=True)
        _save(new / TENSORS, state)
        (new / CONFIG).write_text(text)
        for each in (new / TENSORS, new / CONFIG, *(Path(at) for at, *_ in os.walk(new))):
            _sync(each)
        if holds:
            os.rename(folder, old)
        try:
            os.rename(new, folder)
        except BaseException:
            if holds:
                os.rename(old, folder)
            raise
        _switched(folder)
        shutil.rmtree(old, ignore_errors=True)  # the next run removes what stays


def check_folder(path: str | Path, overwrite: bool) -> bool:
    """Whether the folder holds anything, which only ``overwrite`` allows."""
    with writable(Path(path)):
        holds = _holds(Path(path))
    if holds and not overwrite:
        raise fail("convert.write", "path", f"a new or empty folder ({path})", "one that holds files", OVERWRITE)
    return holds


def write_scales(path: str | Path, weights: Mapping[str, Tensor], adapters: Mapping[str, Adapter]) -> None:
    """g of every layer, float32, as ``base_model.model.<path>.g``, for a server that keeps W unmerged:
    ``y = g * (x @ W.T + s * (x @ A.T) @ B.T) + bias`` needs A, B and these, and no norm. See :func:`adapter_scale`."""
    for layer, p in adapters.items():
        if p.norm_axis == 0:
            raise fail("convert.write_scales", "norm_axis", "1", f"0 for {layer!r}", "A g of input columns scales x: merge it.")
    write_file(
        Path(path),
        {
            f"{PEFT}{layer}.g": adapter_scale(weights[layer], adapters[layer]).float()
            for layer in progress(list(adapters), "layers")
        },
    )


def _tensors(file: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    with readable("convert.read", file):
        return load_file(file)


def _metadata(file: Path) -> dict[str, Any] | None:
    """What diffusers keeps of PEFT's config in its file."""
    from safetensors import safe_open

    with readable("convert.read", file), safe_open(str(file), "pt") as f:
        text = (f.metadata() or {}).get(METADATA)
        config = json.loads(text) if text else None
    return None if config is None else _object(METADATA, config)


def _config(file: Path) -> dict[str, Any]:
    with readable("convert.read", file):
        config = json.loads(file.read_text())
    return _object(CONFIG, config)


def _object(name: str, config: Any) -> dict[str, Any]:
    if not isinstance(config, dict):
        raise fail("convert.read", name, "an object of JSON", f"a {type(config).__name__}", "Save the adapter again.")
    return config


def _save(file: Path, state: Mapping[str, Tensor], about: Texts | None = None) -> None:
    from safetensors.torch import save_file

    own = {key: t.detach().to("cpu", copy=True).contiguous() for key, t in state.items()}  # safetensors takes no views
    save_file(own, file, metadata={"format": "pt", **(about or {})})


def write_file(path: Path, state: Mapping[str, Tensor], about: Texts | None = None) -> None:
    """One file, with ``about`` in its metadata, in the place of the one that is there."""
    with writable(path):
        path = _real(path)
    with _aside(path) as aside:
        _save(aside / path.name, state, about)
        _sync(aside / path.name)
        if path.is_dir():
            raise IsADirectoryError(f"{path} is a folder")
        os.replace(aside / path.name, path)
        _switched(path)


@contextmanager
def _aside(target: Path) -> Iterator[Path]:
    """An empty folder beside ``target`` for what will take its place. What a killed process left of it is removed: another one
    that writes there waits."""
    prefix = f".{target.name}.fdora-"
    with writable(target), _alone(target.parent):
        for left in target.parent.iterdir():
            if left.name.startswith(prefix):
                shutil.rmtree(left)
        # what cannot be removed is left to the next process: the new files may be in place already
        with TemporaryDirectory(dir=target.parent, prefix=prefix, ignore_cleanup_errors=True) as aside:
            yield Path(aside)


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    with _opened(folder) as at:
        try:
            _lock(at, "LOCK_EX")
            yield
        finally:
            _lock(at, "LOCK_UN")  # a process that was forked meanwhile has it, too


def _lock(at: int, how: str) -> None:
    with suppress(ImportError, OSError):  # Windows has no locks, some network file systems none of folders
        import fcntl

        fcntl.flock(at, getattr(fcntl, how))


def _real(path: str | Path) -> Path:
    """Where a link leads: the link stays."""
    return Path(os.path.realpath(path))  # resolve() takes a loop for a defect of the program


def _holds(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())


def _old(folder: Path) -> Path:
    return Path(f"{_real(folder)}{OLD}")


def _sync(path: Path) -> None:
    """The file, or the names in a folder, on the disk."""
    with _opened(path) as at:
        os.fsync(at)


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """A file or a folder, to be synced or locked."""
    at = os.open(path, os.O_RDONLY)
    try:
        yield at
    finally:
        os.close(at)


def make_folder(folder: Path) -> None:
    """A folder, and those it is in, with their names on the disk."""
    if not folder.exists():
        make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


def _switched(target: Path) -> None:
    """The new name on the disk. What was there before is gone, so an error says another thing."""
    try:
        _sync(target.parent)
    except OSError as error:
        want, remedy = f"a place whose folder can be synced ({target})", "The new files are there; a loss of power may undo it."
        raise fail("convert.write", "path", want, error, remedy) from error


def _linked(source: str, target: str) -> None:
    with suppress(OSError):
        return os.link(source, target)
    shutil.copy2(source, target)  # a file system without links
    _sync(Path(target))


@contextmanager
def readable(fn: str, file: Path) -> Iterator[None]:
    """What the file system, safetensors or JSON say about a bad file, as one sentence."""
    from safetensors import SafetensorError

    try:
        yield
    except FdoraError:
        raise
    except (OSError, SafetensorError, ValueError, RecursionError) as error:  # JSON's and UTF-8's are ValueErrors, NUL's too
        have = "no such file" if isinstance(error, FileNotFoundError) else str(error)
        remedy = "Check the path; save a damaged file again."
        raise fail(fn, "path", f"such that {file} can be read", have, remedy) from error


@contextmanager
def writable(path: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except FdoraError:
        raise
    except (OSError, SafetensorError, ValueError) as error:  # of a NUL in the path
        remedy = "The files that were there are unchanged."
        raise fail("convert.write", "path", f"a place that can be written ({path})", error, remedy) from error


def _given(names: Texts | None) -> Texts:
    if names is None:
        raise fail("convert", "names", "{path: name} for kohya", None, "Make it with kohya_names(paths).")
    return names


def _folders(dialect: str) -> Any:
    """Of those that are a folder: how it is written, and read."""
    ways = {"peft": (to_peft, from_peft), "torchtune": (to_torchtune, from_torchtune)}
    if dialect not in ways:
        want, remedy = "'peft', 'torchtune', 'kohya' or 'diffusers'", "Others can be read as one of these."
        raise fail("convert", "dialect", want, repr(dialect), remedy)
    return ways[dialect]
