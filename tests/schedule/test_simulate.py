"""Pipelines in time: by hand, by formula, and drawn."""

import re
import sys

import pytest

from fdora.jobs.schedule import Sample, Spec, depth_of, draw, interleaved, one_f_one_b, schedule, segment_ends, simulate
from fdora.jobs.schedule.__main__ import main
from fdora.jobs.schedule.simulate import bars
from tests.schedule.make import drawn


def row(*lengths):
    return [(Sample(0, 0, i, n),) if n else () for i, n in enumerate(lengths)]


def test_two_stages_by_hand():
    """Forward 2 and 1, backward twice that, one unit of way."""
    found = simulate(row(2, 1), 2, backward=lambda each, stage: 2 * sum(s.length for s in each), transfer=1.0)
    when = {(t.device, t.action.microbatch, "B" if t.action.backward else "F"): (t.start, t.end) for t in found.tasks}
    assert when == {
        (0, 0, "F"): (0, 2),
        (1, 0, "F"): (3, 5),
        (1, 0, "B"): (5, 9),
        (0, 1, "F"): (2, 3),
        (1, 1, "F"): (9, 10),
        (1, 1, "B"): (10, 12),
        (0, 0, "B"): (10, 14),
        (0, 1, "B"): (14, 16),
    }
    assert found.time == 16 and found.throughput == 3 / 16 and found.bubble == 1 - 18 / 32
    with_steps = simulate(row(2, 1), 2, backward=lambda each, stage: 2 * sum(s.length for s in each), transfer=1.0, last=4)
    assert with_steps.tasks == found.tasks and with_steps.time == 20 and with_steps.bubble == 1 - 18 / 40


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("count", [1, 3, 12])
def test_even_microbatches(stages, count):
    """(S - 1) / (n + S - 1), the formula of every textbook."""
    found = simulate(row(*[7] * count), stages)
    assert found.bubble == pytest.approx((stages - 1) / (count + stages - 1)) and found.time == 14 * (count + stages - 1)


@pytest.mark.parametrize(("devices", "chunks"), [(2, 2), (4, 2), (4, 3)])
def test_chunks_shrink_the_bubble(devices, chunks):
    """A chunk has its share of the layers: (S - 1) / (v n + S - 1)."""
    part = lambda each, stage: sum(s.length for s in each) / chunks  # noqa: E731
    found = simulate(row(*[6] * 8), devices, chunks=chunks, forward=part)
    assert found.bubble == pytest.approx((devices - 1) / (chunks * 8 + devices - 1))
    assert {t.action.stage for t in found.tasks if t.device == 1} == set(range(1, devices * chunks, devices))
    assert len(simulate(row(1, 1, 1), 2, chunks=2).microbatches) == 4


def test_depth():
    """The number of stages under 1F1B; twice that with several chunks. Everything first, as in GPipe, needs them all."""
    for stages in (1, 2, 4, 7):
        assert depth_of(one_f_one_b(stages, 30)) == stages
        assert {depth_of(interleaved(stages, 6 * stages, chunks)) for chunks in (2, 3)} == {2 * stages}
    forwards, backwards = (tuple((0, n, back) for n in range(5)) for back in (False, True))
    assert depth_of((forwards + backwards,)) == 5
    assert depth_of(one_f_one_b(4, 2)) == 2


def test_each_microbatch_goes_once_through_every_stage():
    for orders, stages in ((one_f_one_b(3, 7), 3), (interleaved(3, 9, 2), 6)):
        done = [action for order in orders for action in order]
        assert len(set(done)) == len(done) == 2 * stages * (7 if stages == 3 else 9)


def test_noops_take_what_they_are_said_to():
    free = simulate(row(4, 0, 4), 2)
    fixed = simulate(row(4, 0, 4), 2, forward=lambda each, stage: 4.0)
    assert fixed.time == simulate(row(4, 4, 4), 2).time == 32 and free.throughput == 8 / free.time
    # its turn keeps the next forward behind the backward before it: that is what it is for
    assert free.time == 32 > simulate(row(4, 4), 2).time
    assert simulate(row(4, 0, 0, 4), 2).time == 32 < simulate(row(4, 0, 0, 4), 2, forward=lambda each, stage: 4.0).time


def test_uneven_stages_and_nothing():
    late = simulate(row(1, 1, 1), 2, forward=lambda each, stage: 1.0 + 2 * stage)
    assert late.time == 1 + 3 * 6 + 1 and simulate([], 3).bubble == 0 == simulate([], 3).throughput


def test_together_waits_less():
    """The more adapters, the smaller the bubble; alone, each waits for its optimizer."""
    bubbles = [simulate(schedule(drawn(n, 8, 16), Spec(6144, 4, 128, 0)), 4).bubble for n in (1, 2, 3, 4)]
    assert bubbles == sorted(bubbles, reverse=True) and bubbles[0] > 0.4 and bubbles[-1] < 0.1


def test_segments():
    samples = (Sample(0, 0, 0, 5), Sample(0, 0, 1, 4), Sample(2, 1, 0, 8))
    assert segment_ends(samples, 4) == (9, 9, 17, 17) and segment_ends(samples, 3, multiple=8) == (16, 16, 24)
    assert segment_ends((), 2) == (0, 0)


def test_the_picture(tmp_path):
    pytest.importorskip("matplotlib", reason="pictures are matplotlib's; `make test` installs it")
    found = simulate([(Sample(0, 0, 0, 6), Sample(2, 0, 0, 3)), (), (Sample(2, 1, 0, 4),)], 2)
    boxes = bars(found)
    assert {key: len(each) for key, each in boxes.items()} == {(0, False): 2, (0, True): 2, (2, False): 4, (2, True): 4}
    assert boxes[0, False][0] == pytest.approx((0, -0.45, 9, 0.6)) and boxes[2, False][0] == pytest.approx((0, 0.15, 9, 0.3))
    figure = draw(found, tmp_path / "a.png", names=["one", "two"])
    (axes,) = figure.axes
    assert [text.get_text() for text in axes.get_legend().get_texts()] == ["one", "adapter 2"]
    assert axes.get_title() == f"bubble {found.bubble:.1%}" and len(axes.patches) == 12
    widths = {(round(bar.get_x(), 6), round(bar.get_width(), 6)) for bar in axes.patches}
    assert widths == {(left, width) for each in boxes.values() for left, _, width, _ in each}
    assert (tmp_path / "a.png").stat().st_size > 1000 and not draw(simulate([], 1), tmp_path / "b.svg").axes[0].patches


def test_no_picture_without_matplotlib(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ValueError, match=r'needs matplotlib\. Install it with pip install "fdora\[schedule\]"'):
        draw(simulate([], 1), tmp_path / "a.png")


def test_the_command(tmp_path, capsys):
    pytest.importorskip("matplotlib", reason="pictures are matplotlib's; `make test` installs it")
    from fdora.jobs.schedule import from_json

    lengths, out, picture = (tmp_path / name for name in ("lengths.json", "schedule.json", "schedule.png"))
    lengths.write_text('{"law": [[500, 300, 900], [640]], "code": [[1000], [100, 90]]}')
    assert main(f"{lengths} --capacity 1024 --stages 2 --seconds 0 --out {out} --picture {picture}".split()) == 0
    text = capsys.readouterr().out
    found = from_json(out.read_text())
    assert f"{len(found.microbatches)} microbatches" in text and f"fill {found.fill:.1%}" in text
    assert {*re.findall(r"law|code", text.splitlines()[0])} == {"law", "code"} and picture.exists()
    lengths.write_text("[[[5]], [[5]]]")
    main([str(lengths), "--capacity", "8"])
    assert capsys.readouterr().out.startswith(
        "groups: adapter 0 | adapter 1\n2 microbatches, 0 of them no-ops; none has fewer than 2\n"
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "`lengths` must be a JSON file, got JSONDecodeError"),
        ("[" * 100_000, "`lengths` must be a JSON file, got RecursionError"),
        ('{"a": [3]}', "must be lists of batches"),
        ('{"a": [[3]], "a": [[4]]}', "must be of adapters with a name each, got 2 named 'a'"),
        ("[[[9]]]", "at most 8 tokens"),
    ],
)
def test_mistakes_on_the_command_line(tmp_path, capsys, text, words):
    (tmp_path / "lengths.json").write_text(text)
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path / "lengths.json"), "--capacity", "8"])
    assert end.value.code == 2 and words in capsys.readouterr().err


@pytest.mark.parametrize("given", ["--out no/s.json", "--picture no/s.png", "--picture s.unknown"])
def test_a_place_that_cannot_be_written(tmp_path, monkeypatch, capsys, given):
    """The last of them is matplotlib's own error, a ValueError, where that is installed."""
    if "picture" in given:
        pytest.importorskip("matplotlib", reason="pictures are matplotlib's; `make test` installs it")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lengths.json").write_text("[[[3]]]")
    with pytest.raises(SystemExit) as end:
        main(["lengths.json", "--capacity", "8", *given.split()])
    arg = given.split()[0].removeprefix("--")
    assert end.value.code == 2 and f"fdora.jobs.schedule: `{arg}` must be a file that can be written" in capsys.readouterr().err
