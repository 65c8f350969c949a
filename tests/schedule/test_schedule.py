"""From lengths to microbatches: nothing lost, nothing twice, nothing too full, nothing too early."""

import random
from collections import Counter

import pytest
from hypothesis import given

from fdora.jobs.schedule import (
    Packing,
    Sample,
    Spec,
    from_json,
    insert_noops,
    interleaved,
    merge,
    pack,
    plan_groups,
    schedule,
    segment_ends,
    simulate,
    to_json,
    verify,
)
from tests.schedule.make import drawn, few, instances, judged


def samples_of(microbatches):
    return Counter(sample for each in microbatches for sample in each)


@few
@given(instances())
def test_every_schedule_is_right(case):
    lengths, spec = case
    found = schedule(lengths, spec)
    assert judged(found.microbatches, lengths, spec) == 0 and verify(found.microbatches, lengths, spec) == ()
    assert len(found.microbatches) >= found.bound and found.noops == sum(not each for each in found.microbatches)
    assert all(tuple(sorted(each)) == each for each in found.microbatches)
    assert from_json(to_json(found)) == found == schedule(lengths, spec)
    assert sorted(a for group in found.groups for a in group) == [a for a, batches in enumerate(lengths) if batches]


@few
@given(instances(exact=True))
def test_solved_exactly_it_is_right_too(case):
    pytest.importorskip("scipy", reason="the exact packing is scipy's; `make test` installs it")
    lengths, spec = case
    found = schedule(lengths, spec)
    assert judged(found.microbatches, lengths, spec) == 0
    greedy = schedule(lengths, spec._replace(seconds=0), groups=found.groups)
    for one, other in zip(found.packings, greedy.packings, strict=True):
        assert one.bound >= other.bound and one.adapters == other.adapters
        assert (one.microbatches, one.remainder) <= (other.microbatches, other.remainder)


@few
@given(instances())
def test_gaps_are_final(case):
    lengths, spec = case
    found = schedule(lengths, spec).microbatches
    rng = random.Random(len(found))
    mixed = [*found, (), ()]
    batch = lambda each: min(((s.batch, s.adapter) for s in each), default=(0, 0))  # noqa: E731
    mixed.sort(key=lambda each: (batch(each), rng.random()))
    try:
        once = insert_noops(mixed, spec)
    except ValueError:  # what was merged may need the order it had
        once = insert_noops(found, spec)
    assert judged(once, lengths, spec) == 0 and insert_noops(once, spec) == once
    assert insert_noops(found, spec) == found


@few
@given(instances())
def test_a_merge_conserves_tokens_and_adds_nothing(case):
    lengths, spec = case
    row = [
        (Sample(a, j, i, n),)
        for a, batches in enumerate(lengths)
        for j, batch in enumerate(batches)
        for i, n in enumerate(batch)
    ]
    row = insert_noops(row, spec)
    merged = merge(row, spec)
    assert judged(merged, lengths, spec) == 0 and samples_of(merged) == samples_of(row) and len(merged) <= len(row)
    assert sum(not each for each in merged) == sum(not each for each in row) and merge(merged, spec) == merged


def test_a_merge_takes_out_what_fits_elsewhere():
    a, b, c = Sample(0, 0, 0, 3), Sample(1, 0, 0, 3), Sample(0, 1, 0, 3)
    assert merge([(a,), (b,), (c,)], Spec(6, 1)) == ((a, b), (c,))
    assert merge([(a,), (b,), (c,)], Spec(6, 2)) == ((a,), (b,), (c,))  # b keeps the batches of adapter 0 apart
    assert merge([(a,), (), (b,), (c,)], Spec(6, 3)) == ((a,), (), (b,), (c,))
    d, e = Sample(1, 0, 0, 2), Sample(2, 0, 0, 3)
    assert merge([(a,), (d,), (e,)], Spec(8, 1, 1)) == ((a, d, e),)
    assert merge([(a,), (d,), (e,)], Spec(8, 1, 4)) == ((a, d), (e,))  # each counts as 4


def test_what_is_taken_out_makes_room_for_more():
    """Once c has gone to a, batch 0 of adapter 0 is through at a, and d need not stay behind c."""
    a, c, d = Sample(0, 0, 0, 3), Sample(0, 0, 1, 2), Sample(0, 1, 0, 1)
    e, f = Sample(1, 0, 0, 4), Sample(1, 1, 0, 5)  # which stay where they are
    assert merge([(a,), (e,), (c,), (f,), (d,)], Spec(5)) == ((a, c), (d, e), (f,))


def test_who_waits_lets_others_pass():
    a, b, c = Sample(0, 0, 0, 1), Sample(0, 1, 0, 1), Sample(1, 0, 0, 1)
    assert insert_noops([(a,), (b,), (c,)], Spec(1, 3)) == ((a,), (c,), (), (b,))
    assert insert_noops([(a,), (), (b,), ()], Spec(1, 1)) == ((a,), (b,))


def test_an_order_that_never_comes_right():
    a, b = Sample(0, 0, 0, 1), Sample(0, 1, 0, 1)
    for row in ([(a, b)], [(a, Sample(1, 1, 0, 1)), (b, Sample(1, 0, 0, 1))]):
        with pytest.raises(ValueError, match="waits for ever"):
            insert_noops(row, Spec(2, 2))


@pytest.mark.parametrize("multiple", [1, 16])
def test_adapters_in_another_order(multiple):
    lengths, spec = drawn(5, 3, 4, seed=3), Spec(6144, 4, multiple, 0)
    order = [3, 0, 4, 2, 1]
    here, there = schedule(lengths, spec), schedule([lengths[a] for a in order], spec)
    named = tuple(tuple(sorted(s._replace(adapter=order[s.adapter]) for s in each)) for each in there.microbatches)
    assert named == here.microbatches


def test_the_papers_setting():
    """Four adapters, batches of 16, 6144 tokens, four stages: full, and nobody waits."""
    for seed in range(3):
        found = schedule(drawn(4, 12, 16, seed=seed), Spec(6144, 4, 128, 0))
        assert found.noops == 0 and found.fill > 0.95 and len(found.microbatches) < 1.05 * found.bound


def test_each_adapter_by_itself_waits():
    found = schedule([[[4, 4], [4, 4], [8]]], Spec(8, 4, 1, 0))
    assert [len(each) for each in found.microbatches] == [2, 0, 0, 0, 2, 0, 0, 0, 1] and found.bound == 9 and found.noops == 6
    assert found.fill == 24 / 72 and found.tokens == 24


def test_groups_are_of_whom_they_profit():
    """Two that fill each other's microbatches, and nobody to wait for."""
    lengths = [[[6, 6]], [[2, 2]], [[6, 6]], [[2, 2]]]
    found = schedule(lengths, Spec(8, 1, 1, 0))
    assert len(found.microbatches) == 4 == found.bound
    assert schedule(lengths, Spec(8, 1, 1, 0), groups=[[3, 2], [1, 0]]).groups == ((2, 3), (0, 1))
    assert len(plan_groups(drawn(9, 2, 2), Spec(6144, 2, 1, 0))) >= 1


def test_no_way_to_group_is_better():
    """Where the trial covers all batches, the plan is the best of all; groups in the order of content, as it takes them."""
    rng, better = random.Random(0), 0
    for _ in range(30):
        lengths = sorted([[rng.randint(1, 12) for _ in range(4)] for _ in range(2)] for _ in range(3))
        spec = Spec(12, rng.randint(1, 3), 1, 0)
        ways = ([[0, 1, 2]], [[0, 1], [2]], [[0, 2], [1]], [[0], [1, 2]], [[0], [1], [2]])
        counts = [len(schedule(lengths, spec, groups=groups).microbatches) for groups in ways]
        assert len(schedule(lengths, spec).microbatches) == min(counts)
        better += min(counts) < counts[-1] and min(counts) < counts[0]
    assert better > 2


def test_rounds_are_spread_where_counts_differ():
    """Adapter 1 has two batches, adapter 0 eight: were both through at the start, the rest would wait."""
    lengths = [[[8, 8]] * 8, [[8, 8, 8]] * 2]
    found = schedule(lengths, Spec(8, 2, 1, 0), groups=[[0], [1]])
    at = [p for p, each in enumerate(found.microbatches) if any(s.adapter == 1 for s in each)]
    assert max(at) > len(found.microbatches) // 2
    both = schedule(lengths, Spec(8, 2, 1, 0), groups=[[0, 1]])
    assert [each.adapters for each in both.packings] == [(0,), (0,), (0,), (0, 1)] * 2


def test_every_fault_is_seen():
    lengths, spec = [[[3, 2], [4]], [[5], [5]]], Spec(8, 2, 1, 0)
    a, a2, b = (Sample(0, 0, 0, 3), Sample(0, 0, 1, 2)), (Sample(0, 1, 0, 4),), (Sample(1, 0, 0, 5),)
    b2 = (Sample(1, 1, 0, 5),)
    assert verify([a, b, a2, b2], lengths, spec) == ()
    assert "(1, 1, 0, 5) is missing" in verify([a, b, a2], lengths, spec)[0]
    twice = verify([a, b, a2, (*b2, Sample(0, 0, 1, 2))], lengths, spec)
    assert "(0, 0, 1, 2) is there once too often" in twice[0]  # what a comparison of sets would not see
    assert any("holds 10 tokens" in each for each in verify([a, (*b, *b2), a2], lengths, spec))
    assert any("holds batches [0, 1] of adapter 1" in each for each in verify([a, (*b, *b2), a2], lengths, spec))
    assert verify([a, a2, b, (), b2], lengths, spec) == ("batch 1 of adapter 0 begins 1 after batch 0 ends, less than 2",)
    assert "begins -2 after" in verify([a2, b, a, b2], lengths, spec)[0]
    assert "more than 7" in verify([a, b, a2, b2], lengths, Spec(7, 2, 4))[0]  # 5 counts as 8


def test_nothing_to_do():
    for lengths in ([], [[]], [[], []]):
        found = schedule(lengths, Spec(8))
        assert found.microbatches == () and found.bound == 0 and found.fill == 1 and from_json(to_json(found)) == found
    assert schedule([[], [[3]]], Spec(8)).microbatches == ((Sample(1, 0, 0, 3),),)


def test_a_bug_would_not_go_unseen(monkeypatch):
    from fdora.jobs.schedule import whole

    monkeypatch.setattr(whole, "line_up", lambda packings, spec: packings[0].microbatches)
    with pytest.raises(RuntimeError, match=r"a bug in fdora.jobs.schedule.*sample \(1, 0, 0, 3\) is missing"):
        schedule([[[3]], [[3]]], Spec(8, 1, 1, 0), groups=[[0], [1]])


def test_a_packing_says_whether_it_can_be_beaten():
    assert Packing(((), ()), 2, 0, "greedy", "").optimal and not Packing(((), ()), 1, 0, "greedy", "").optimal


ROW = [(Sample(0, 0, 0, 1),)]
MESSAGES = [
    (
        lambda: schedule([[[9]]], Spec(8)),
        "fdora.jobs.schedule: `lengths[0][0][0]` must be at most 8 tokens, what one microbatch holds, got 9. Truncate or split the sample, or raise the capacity.",
    ),
    (
        lambda: schedule([[[7]]], Spec(8, 1, 3)),
        "fdora.jobs.schedule: `lengths[0][0][0]` must be at most 6 tokens, what one microbatch holds, got 7. Truncate or split the sample, or raise the capacity.",
    ),
    (
        lambda: schedule([[[1], []]], Spec(8)),
        "fdora.jobs.schedule: `lengths[0][1]` must be a batch with samples, got none. Leave the batch out: it has no gradient.",
    ),
    (
        lambda: schedule([[[0]]], Spec(8)),
        "fdora.jobs.schedule: `lengths[0][0][0]` must be a positive int, got 0. It is the number of tokens of one sample.",
    ),
    (
        lambda: schedule([[[1]], [[2]]], Spec(8), groups=[[0]]),
        "fdora.jobs.schedule: `groups` must be each of the adapters [0, 1] once, got [[0]]. Leave it out to plan them.",
    ),
    (
        lambda: schedule([[[1]]], Spec(8, 0)),
        "fdora.jobs.schedule: `spec.depth` must be a positive int, got 0. It counts tokens, microbatches or processes.",
    ),
    (
        lambda: schedule([[[1]]], Spec(1 << 31)),
        f"fdora.jobs.schedule: `spec.capacity` must be below 2^31, got {1 << 31}. It counts tokens, microbatches or processes.",
    ),
    (
        lambda: schedule([[[1]]], Spec(8, 1, 9)),
        "fdora.jobs.schedule: `spec.multiple` must be at most the capacity, 8, got 9. Nothing would fit.",
    ),
    (
        lambda: schedule([[[1]]], Spec(8, seconds=-1)),
        "fdora.jobs.schedule: `spec.seconds` must be a finite number of seconds, 0 or more, got -1. 0 solves nothing exactly.",
    ),
    (
        lambda: schedule([[[1]]], {"capacity": 8}),
        "fdora.jobs.schedule: `spec` must be a Spec, got a dict. Write Spec(capacity=6144, depth=4).",
    ),
    (
        lambda: from_json("{}"),
        "fdora.jobs.schedule.from_json: `text` must be JSON of to_json, got KeyError: 'groups'. Write it again.",
    ),
    (
        lambda: from_json('{"spec": {"capacity": 9}, "groups": [], "packings": [], "microbatches": [["abcd"]]}'),
        "fdora.jobs.schedule.from_json: `text` must be JSON of to_json, got TypeError: abcd for four integers. Write it again.",
    ),
    (
        lambda: schedule([[3, 4]], Spec(8)),
        "fdora.jobs.schedule: `lengths[0][0]` must be a list, got a int. Write lengths[adapter][batch][sample], numbers of tokens.",
    ),
    (
        lambda: plan_groups({"law": [[3]]}, Spec(8)),
        "fdora.jobs.schedule.plan_groups: `lengths` must be a list, got a dict. Write lengths[adapter][batch][sample], numbers of tokens.",
    ),
    (
        lambda: segment_ends((), 2, multiple=0),
        "fdora.jobs.schedule.segment_ends: `multiple` must be a positive int, got 0. 1 adds nothing.",
    ),
    (
        lambda: pack([Sample(0, 0, 0, 1), Sample(0, 1, 0, 1)], Spec(10)),
        "fdora.jobs.schedule.pack: `samples` must be of one batch of each adapter, got batches 0 and 1 of adapter 0. An optimizer step lies between.",
    ),
    (
        lambda: pack([Sample(0, 0, 0, 1), Sample(0, 0, 0, 2)], Spec(10)),
        "fdora.jobs.schedule.pack: `samples` must be distinct, got one of them twice. Number them: (adapter, batch, number).",
    ),
    (
        lambda: pack([Sample(0, 0, 0, 99)], Spec(10)),
        "fdora.jobs.schedule.pack: `samples[0].length` must be at most 10 tokens, what one microbatch holds, got 99. Truncate or split the sample, or raise the capacity.",
    ),
    (
        lambda: simulate([], 0),
        "fdora.jobs.schedule.simulate: `stages` must be a positive int, got 0. One device is a pipeline of one stage.",
    ),
    (
        lambda: interleaved(2, 3, 2),
        "fdora.jobs.schedule.interleaved: `microbatches` must be a multiple of the 2 devices, got 3. Add no-ops at the end.",
    ),
    (
        lambda: interleaved(2, 4, 0),
        "fdora.jobs.schedule.interleaved: `chunks` must be a positive int, got 0. 1F1B has one chunk.",
    ),
    (
        lambda: simulate(ROW, 1, backward=lambda each, stage: -1),
        "fdora.jobs.schedule.simulate: `backward` must be a function that gives 0 or more, got -1. It is a time.",
    ),
    (lambda: simulate(ROW, 1, last=-1), "fdora.jobs.schedule.simulate: `last` must be 0 or more, got -1. It is a time."),
    (
        lambda: segment_ends((Sample(2, 0, 0, 1),), 2),
        "fdora.jobs.schedule.segment_ends: `adapters` must be more than 2, got 2. Count all adapters.",
    ),
]


@pytest.mark.parametrize(("call", "text"), MESSAGES, ids=[text.split("`")[1] + str(n) for n, (_, text) in enumerate(MESSAGES)])
def test_message(call, text):
    with pytest.raises(ValueError) as caught:
        call()
    assert str(caught.value) == text
