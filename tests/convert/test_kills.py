"""Files survive a kill: before any operation of `write` or `save` there is what was there, or what is new, and it can be read."""

import os
import shutil

import pytest
import torch

pytest.importorskip("safetensors", reason="it writes the files; `make test` installs it")
if not hasattr(os, "fork"):
    reason = "a forked child is killed, and this system has no fork; `make test` runs these tests on Linux and macOS"
    pytest.skip(reason, allow_module_level=True)

from fdora import FdoraError
from fdora.convert import read, write
from fdora.jobs.loop import Job, init_state, load, save
from tests.convert.make import layer
from tests.kills import every_failure, every_kill


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


@pytest.mark.parametrize("before", [True, False])
def test_what_an_error_says_of_the_files(before, tmp_path):
    """Whichever operation finds the disk full: old files where it says "unchanged", else the new ones."""
    jobs, folder = [Job("a", 0.1)], tmp_path / "state"
    start = init_state({"w": torch.zeros(1, 3)}, jobs)
    states, sets = [start._replace(position=n) for n in (1, 2)], [adapters(0), adapters(5)]
    ways = (
        (lambda n: save(folder, states[n], jobs), lambda: load(folder, start, jobs).position == 2),
        (lambda n: write(folder, sets[n], overwrite=True), lambda: is_one_of(read(folder), sets[1])),
    )
    for put, is_new in ways:
        heard = set()
        shutil.rmtree(folder, ignore_errors=True)
        if before:
            put(0)
        for said in every_failure(lambda put=put: put(1)):
            heard.add(said)
            if said == "unchanged" and not before:
                with pytest.raises(FdoraError, match="no such file"):
                    is_new()
            else:
                assert is_new() == (said != "unchanged")
            shutil.rmtree(folder, ignore_errors=True)
            if before:
                put(0)
        assert {"unchanged", "replaced"} <= heard


def test_names_of_new_folders_are_on_the_disk_too(tmp_path, monkeypatch):
    """A loss of power takes what no folder that was synced has the name of."""
    fsync, synced = os.fsync, set()
    monkeypatch.setattr("os.fsync", lambda at: (synced.add(os.fstat(at).st_ino), fsync(at)))
    jobs = [Job("a", 0.1)]
    save(tmp_path / "new/run", init_state({"w": torch.zeros(1, 3)}, jobs), jobs)
    write(tmp_path / "other/run", adapters(0))
    for path in (tmp_path, *tmp_path.rglob("*")):
        assert path.stat().st_ino in synced, path
    (tmp_path / "other/run/inner").mkdir()
    (tmp_path / "other/run/inner/notes").write_text("mine")
    synced.clear()
    monkeypatch.setattr("os.link", fails)  # a file system without links: what is kept is copied
    write(tmp_path / "other/run", adapters(5), overwrite=True)
    for path in (tmp_path / "other/run", *(tmp_path / "other/run").rglob("*")):
        assert path.stat().st_ino in synced, path


def fails(*_):
    raise OSError("Operation not supported")
