"""Adapters trained together are adapters trained alone."""

import json

import optree
import pytest
import torch

from fdora import FdoraError
from fdora.functional import dora_unstack
from fdora.jobs.loop import Job, init_state, load, read_notes, save, train_step, works_of
from fdora.jobs.schedule import Spec, schedule
from tests import device
from tests.train import make


def together(works, state, model, jobs=make.JOBS, dtype=torch.float32, donate=False):
    losses = {}
    for n in range(state.position, len(works)):
        data = make.data_of(works[n].samples, dtype) if works[n].samples else None
        state, found = train_step(state, works[n], data, model=model, jobs=jobs, donate=donate)
        if works[n].samples:
            losses[n] = found
    return state, losses


def start(base, jobs=make.JOBS):
    return init_state(make.banks(make.adapters(base)), jobs, make.keep_of(base))


@pytest.mark.parametrize("capacity", [16, 40])
def test_curves_and_adapters_are_those_of_pytorchs_own_loop(capacity):
    base = make.frozen(torch.float64)
    works = works_of(schedule(make.LENGTHS, Spec(capacity, depth=2, seconds=0)))
    assert any(len({s.adapter for s in w.samples}) > 1 for w in works) and len(works) > max(map(len, make.LENGTHS))
    state, losses = together(works, start(base), make.whole(base), dtype=torch.float64)
    curves = make.curves(works, losses)
    for a, own in enumerate(make.adapters(base)):
        wanted, became = make.alone(base, own, a)
        assert [curves[a, j] for j in range(len(wanted))] == pytest.approx(wanted, abs=1e-12)
        for name in ("one", "two"):
            mine = dora_unstack(state.params[name], make.RANKS)[a]
            for t, want in zip(mine, became[name], strict=True):
                torch.testing.assert_close(t, want.detach(), rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(state.params["head"]["weight"][a], became["head"].detach(), rtol=1e-9, atol=1e-11)
    assert state.steps == tuple(map(len, make.LENGTHS)) and state.position == len(works)
    assert not any(t.any() for t in optree.tree_leaves(state.grads))


def test_on_a_gpu_as_on_a_cpu():
    """Kernels for many tensors at once, numbers that come from pinned memory: with --device cuda."""
    base, works = make.frozen(), works_of(schedule(make.LENGTHS, Spec(40, seconds=0)))
    wanted, _ = together(works, start(base), make.whole(base))
    move = lambda t: t.to(device.NAME) if isinstance(t, torch.Tensor) else t  # noqa: E731
    there = make.Frozen(*map(move, base))
    model, state = make.whole(there), optree.tree_map(move, start(base))
    near = model._replace(forward=lambda p, kept, data: model.forward(p, kept, make.Data(*map(move, data))))
    state, _ = together(works, state, near)
    for t, want in zip(optree.tree_leaves(state.params), optree.tree_leaves(wanted.params), strict=True):
        torch.testing.assert_close(t.cpu(), want, rtol=2e-4, atol=2e-5)


def test_what_is_not_donated_stays():
    base = make.frozen()
    works, state = works_of(schedule(make.LENGTHS, Spec(40, seconds=0))), start(base)
    copy = lambda t: t.clone() if isinstance(t, torch.Tensor) else t  # noqa: E731
    before = optree.tree_map(copy, state)
    after, losses = together(works, state, make.whole(base))
    make.same(state, before)
    donated, others = together(works, optree.tree_map(copy, state), make.whole(base), donate=True)
    make.same(after, donated)
    assert all(torch.equal(losses[n], others[n]) for n in losses)


@pytest.mark.parametrize("stop", [1, 4])
def test_resumed_in_the_middle_to_the_bit(tmp_path, stop):
    """In the middle of batches: gradients are part of the state."""
    pytest.importorskip("safetensors", reason="it writes the files; `make test` installs it")
    base = make.frozen()
    model, works = make.whole(base), works_of(schedule(make.LENGTHS, Spec(16, seconds=0)))
    whole, losses = together(works, start(base), model)
    half, some = together(works[:stop], start(base), model)
    assert any(t.any() for t in optree.tree_leaves(half.grads))
    save(tmp_path, half, make.JOBS)
    assert [p.name for p in tmp_path.iterdir()] == ["training.safetensors"]
    read = load(tmp_path, start(base), make.JOBS, model.keep)
    make.same(read, half)
    again, rest = together(works, read, model)
    make.same(again, whole)
    assert all(torch.equal(losses[n], (some | rest)[n]) for n in losses)


@pytest.mark.parametrize("names", [("../evil", "/evil", "a\\b"), ("a", "./a", "a/"), ("A", "Law \u2615\n", "x" * 200)])
def test_any_text_is_a_name(names, tmp_path):
    """Names are in the file: none is a path, none meets another."""
    pytest.importorskip("safetensors", reason="it writes the files; `make test` installs it")
    base, jobs = make.frozen(), [job._replace(name=name) for job, name in zip(make.JOBS, names, strict=True)]
    state, _ = together(works_of(schedule(make.LENGTHS, Spec(16, seconds=0)))[:2], start(base), make.whole(base))
    save(tmp_path / "in", state, jobs)
    assert [path.name for path in tmp_path.rglob("*")] == ["in", "training.safetensors"]
    make.same(load(tmp_path / "in", start(base), jobs, make.whole(base).keep), state)
    turned = load(tmp_path / "in", start(base), jobs[::-1], make.whole(base).keep)
    for row, back in zip(optree.tree_leaves(state.params), optree.tree_leaves(turned.params), strict=True):
        assert torch.equal(row.flip(0), back)


def test_files_that_are_refused(tmp_path):
    safetensors = pytest.importorskip("safetensors.torch", reason="it writes the files; `make test` installs it")
    base = make.frozen()
    state = start(base)
    save(tmp_path, state, make.JOBS)
    for bad in ("", "x" * 201, "\u2615" * 67, "a\0b", "\ud800"):
        jobs = [make.JOBS[0]._replace(name=bad), *make.JOBS[1:]]
        for call in (
            lambda jobs=jobs: init_state(state.params, jobs),
            lambda jobs=jobs: save(tmp_path, state, jobs),
            lambda jobs=jobs: load(tmp_path / "empty", state, jobs),
        ):
            with pytest.raises(FdoraError, match=r"`jobs` must be named by text of 1 to 200 bytes in UTF-8 without NUL, got"):
                call()
    with pytest.raises(
        FdoraError, match=r"fdora.jobs.loop.load: `jobs` must be 3, one for each adapter of the state given, got 2"
    ):
        load(tmp_path, state, make.JOBS[:2])
    with pytest.raises(FdoraError, match=r"fdora.jobs.loop.load: `jobs` must be .* each with a name of its own"):
        load(tmp_path, state, [make.JOBS[0], *make.JOBS[:2]])
    for odd in ("a\0b", "x" * 5000):
        with pytest.raises(FdoraError, match="can be read"):
            load(odd, state, make.JOBS)
    with pytest.raises(FdoraError, match=r"with an adapter for each job .*, got none for \['new'\] among \['"):
        load(tmp_path, state, [*make.JOBS[:2], make.JOBS[2]._replace(name="new")])
    with pytest.raises(FdoraError, match=r"fdora.jobs.loop.save: `jobs` must be 3, one for each adapter of the state, got 2"):
        save(tmp_path, state, make.JOBS[:2])
    (tmp_path / "file").write_text("")
    with pytest.raises(FdoraError, match="a place that can be written"):
        save(tmp_path / "file", state, make.JOBS)
    (tmp_path / "another").mkdir()
    safetensors.save_file({"weight": torch.zeros(2)}, tmp_path / "another/training.safetensors")
    with pytest.raises(FdoraError, match=r"fdora.jobs.loop.load: `folder` must be what save wrote, got no counters in"):
        load(tmp_path / "another", state, make.JOBS)
    with pytest.raises(FdoraError, match="no such file"):
        load(tmp_path / "other", state, make.JOBS)
    tensors = safetensors.load_file(tmp_path / "training.safetensors")
    good = {"jobs": [job.name for job in make.JOBS], "steps": [0] * 3, "position": 0}
    for damaged in (
        [],
        {},
        good | {"steps": [0]},
        good | {"jobs": 3},
        good | {"jobs": ["law"], "steps": [0]},
        good | {"position": ""},
    ):
        (tmp_path / "damaged").mkdir(exist_ok=True)
        safetensors.save_file(tensors, tmp_path / "damaged/training.safetensors", {"fdora": json.dumps(damaged)})
        with pytest.raises(
            FdoraError, match=r"fdora.jobs.loop.load: `folder` must be what save wrote, got damaged counters in"
        ):
            load(tmp_path / "damaged", state, make.JOBS)
        with pytest.raises(FdoraError, match="damaged counters in"):
            read_notes(tmp_path / "damaged")
    fewer = start(base)
    del fewer.params["head"]
    with pytest.raises(FdoraError, match="another set of tensors"):
        load(tmp_path, fewer, make.JOBS)


def test_errors():
    base = make.frozen()
    state, works = start(base), works_of(schedule(make.LENGTHS, Spec(16, seconds=0)))
    model = make.whole(base)
    late = next(n for n, w in enumerate(works) if any(s.batch for s in w.samples))
    with pytest.raises(FdoraError, match=r"of batch 0 of adapter ., which is next, got one of batch 1"):
        train_step(state, works[late], make.data_of(works[late].samples), model=model, jobs=make.JOBS)
    summed = model._replace(forward=lambda *given: model.forward(*given).sum())
    with pytest.raises(FdoraError, match=r"the loss of each sample, got \(\)"):
        train_step(state, works[0], make.data_of(works[0].samples), model=summed, jobs=make.JOBS)
    with pytest.raises(FdoraError, match=r"params\['head'\]\['weight'\]` must be a floating tensor with 2 rows"):
        init_state(state.params, make.JOBS[:2])
    with pytest.raises(FdoraError, match="each with a name of its own"):
        init_state(state.params, [Job("law", 1.0)] * 3)
