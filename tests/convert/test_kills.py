"""Files survive a kill: before any operation of `write` or `save` there is what was there, or what is new, and it can be read."""

import os
import shutil

import pytest
import torch

pytest.importorskip("safetensors", reason="it writes the files; `make test` installs it")
if not hasattr(os, "fork"):
    pytest.skip("a child of this process is killed", allow_module_level=True)

from fdora import FdoraError
from fdora.convert import read, write
from fdora.jobs.loop import Job, init_state, load, save
from tests.convert.make import layer
from tests.kills import every_kill


def adapters(seed):
    return {"x": layer(seed=seed)[1], "y": layer(seed=seed + 1)[1]}


def is_one_of(got, *wanted):
    return any(all(torch.equal(getattr(got[k], f), getattr(each[k], f)) for k in each for f in "ABm") for each in wanted)


@pytest.mark.parametrize("before", [True, False])
def test_write(before, tmp_path):
    old, new, folder = adapters(0), adapters(5), tmp_path / "adapter"

    def begin():
        for path in tmp_path.iterdir():
            shutil.rmtree(path)
        if before:
            write(folder, old)
            (folder / "notes").mkdir()
            (folder / "notes/mine.txt").write_text("mine")

    begin()
    for n in every_kill(lambda: write(folder, new, overwrite=True)):
        if before or folder.exists():
            assert is_one_of(read(folder), old, new), n
        place = folder if folder.exists() else tmp_path / "adapter.fdora-old"
        if before:
            assert (place / "notes/mine.txt").read_text() == "mine", n
        if n % 2:  # what is left of it is no hindrance, and goes
            write(folder, new, overwrite=True)
            assert is_one_of(read(folder), new) and [path.name for path in tmp_path.iterdir()] == ["adapter"], n
            assert (folder / "notes/mine.txt").exists() == before
        begin()
    assert n > 12


@pytest.mark.parametrize("before", [True, False])
def test_save(before, tmp_path):
    jobs = [Job("a", 0.1), Job("b", 0.1)]
    start = init_state({"w": torch.zeros(2, 3)}, jobs)
    old, new = start._replace(position=1), start._replace(position=2, params={"w": torch.ones(2, 3)})
    if before:
        save(tmp_path, old, jobs)
    for n in every_kill(lambda: save(tmp_path, new, jobs)):
        try:
            got = load(tmp_path, start, jobs)
        except FdoraError as error:
            assert not before and "no such file" in str(error), n
        else:
            assert (got.position, got.params["w"].mean()) in ([(1, 0), (2, 1)] if before else [(2, 1)]), n
        if n % 2:
            save(tmp_path, new, jobs)
            assert [path.name for path in tmp_path.iterdir()] == ["training.safetensors"], n
        for path in tmp_path.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        if before:
            save(tmp_path, old, jobs)
    assert n > 6
