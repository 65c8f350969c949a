"""One plan for a class of lengths: for each of them it is the plan that would have been written for it alone."""

import itertools
import random
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

from fdora.triton import linear
from fdora.triton.runtime import family, native, walk
from fdora.triton.runtime.plan import Launch
from fdora.triton.runtime.rows import FEW, FINE, Fixed, Rows, Tokens, class_of, rows
from tests.triton.recorder import compiled_of, fake_map
from tests.triton.written import BF16, HOPPER, alike, calls_of_many_rows, layer


def of_length(likes, count):
    return family._of_length(likes, family._axes(likes, likes[0], likes[0].shape[0]), count)


def forward_of(M, N, K, r):
    return [alike(M, K, dtype=BF16), *layer(N, K, r, BF16, BF16)], (0.0, "lora", ("output",), True)


def choices(plan):
    return [
        (s.kernel, s.constexprs, s.num_warps, s.num_stages, s.pdl) if isinstance(s, Launch) else type(s) for s in plan.steps
    ]


def calls(M):
    """Those whose makers have families, at M tokens."""
    for maker, likes, options in itertools.islice(calls_of_many_rows(M), 0, None, 3):
        x = likes[0]
        if getattr(maker, "has_families", False) and len(x.shape) == 2 and x.shape[0] == M:
            yield maker, tuple(likes), options


@pytest.mark.parametrize("M", [120, 300, 1501, 5001])
def test_a_member_is_the_plan_of_its_own_length(chosen_anew, M):
    """But for its workspace, which is that of the longest. Where the longest takes other kernels there is nothing to compare."""
    compared, served, drawn = 0, [], random.Random(M)
    least, most = class_of(M)
    for maker, likes, options in calls(M):
        for count in {least, drawn.randint(least, most), most}:
            some = of_length(likes, count)
            member, alone = family.plan_of(maker, some, HOPPER, options), maker(some, HOPPER, *options)
            assert member.inputs == alone.inputs == some and member.results == alone.results and member.copies == alone.copies
            served.append(member.family is not None)
            if served[-1] and choices(member) == choices(alone):
                compared += 1
                assert member.steps == alone.steps and member.cost == alone.cost
                pairs = zip(member.temporaries, alone.temporaries, strict=True)
                assert all(more >= size for (_, more), (_, size) in pairs)
    assert compared > 100 and sum(served) > 0.95 * len(served), (compared, sum(served), len(served))


@pytest.mark.parametrize("M", [120, 1501])
def test_a_draft_fills_in_what_a_program_of_the_member_would_have(chosen_anew, monkeypatch, M):
    monkeypatch.setattr(native, "tensor_map", fake_map)
    module, (least, most), filled = SimpleNamespace(Program=lambda *made: made), class_of(M), 0
    for maker, likes, options in calls(M):
        members = [family.plan_of(maker, of_length(likes, count), HOPPER, options) for count in (most, least + 1)]
        if any(plan.family is None for plan in members):
            continue
        kernels = [compiled_of(step, i) for i, step in enumerate(native.launches_of(members[0]))]
        draft = native.Draft(members[0].family.plan, kernels, module, 0)
        for plan in members:
            made, alone = draft.program(plan.count, plan.results), native.assemble(plan, kernels, module, 0)
            assert made == alone
            filled += made is not False
    assert filled > 50


def test_lengths_that_triton_would_compile_other_kernels_for_have_their_own(chosen_anew, monkeypatch):
    """A number that 16 divides is another to Triton than one that it does not, unless a kernel says otherwise."""
    monkeypatch.setattr(native, "_AVAILABLE", True)
    monkeypatch.setattr(native, "_fits", lambda *_: True)
    monkeypatch.setattr(native, "_dummy", int)
    made = []
    monkeypatch.setattr(native, "kernels_of", lambda plan: [compiled_of(s, 1) for s in native.launches_of(plan)])
    monkeypatch.setattr(native, "walker", lambda: SimpleNamespace(Program=lambda *parts: made.append(parts) or parts))
    monkeypatch.setattr(native, "tensor_map", fake_map)
    likes, options = forward_of(1024, 256, 512, 8)

    for step in native.launches_of(linear.plan_forward(likes, HOPPER, *options)):  # as if none of them said so
        monkeypatch.setattr(step.kernel, "do_not_specialize_on_alignment", (), raising=False)

    def plan(count):
        found = family.plan_of(linear.plan_forward, of_length(likes, count), HOPPER, options)
        native.program(found)
        return found

    first = plan(1024)
    draft = first.family.draft
    assert draft is not None and "steps" in vars(first)  # what it was compiled from
    again = plan(1008)
    assert again.family is first.family and "steps" not in vars(again)  # nothing but the Program was filled in
    other = plan(1001)
    assert other.family is first.family and "steps" in vars(other) and first.family.draft is draft and len(made) == 3


def test_a_call_takes_the_same_kernels_whichever_length_came_first(chosen_anew):
    """A run that is resumed must give the bits of one that was not."""
    likes, options = forward_of(1000, 4096, 4096, 64)

    def first(*counts):
        family._families.clear()
        return [choices(family.plan_of(linear.plan_forward, of_length(likes, count), HOPPER, options)) for count in counts][-1]

    assert first(897) == first(1024, 897) == first(950, 1000, 897)


def test_classes():
    assert class_of(FEW) is None and class_of(FEW + 1) == (65, 80)
    for tokens in (65, 100, 127, 128, 129, FINE, FINE + 1, 4095, 4096, 4097, 10**6):
        least, most = class_of(tokens)
        assert least <= tokens <= most and class_of(least) == class_of(most) == (least, most)
        assert (most - least) < tokens / (16 if tokens > FINE else 4) + 1
        assert class_of(most + 1)[0] == most + 1


def test_numbers_follow_from_tokens():
    """What adding, multiplying and dividing give at one length, at every other where all comparisons come out the same."""
    drawn, many = random.Random(0), 0
    for _ in range(3000):
        tokens = Tokens(drawn.randint(65, 128), 65, 128)
        M, steps, outcomes = rows(tokens), [], []
        value = M
        try:
            for _ in range(drawn.randint(1, 5)):
                k, how = drawn.randint(1, 40), drawn.choice(["+", "-", "*", "//", "cdiv", "%", "<", "=", "+M", "max"])
                steps.append((how, k))
                value = apply(value, how, k, M, outcomes)
        except Fixed:
            continue
        for count in range(tokens.least, tokens.most + 1):
            plain, seen = count, []
            for how, k in steps:
                plain = apply(plain, how, k, count, seen)
            assert (value.at(count) if isinstance(value, Rows) else value) == plain and seen == outcomes, (steps, count)
        many += isinstance(value, Rows) and tokens.least < tokens.most
    assert many > 500, many


def apply(value, how, k, M, outcomes):
    if how in "<=":
        outcomes.append(value < 3 * k if how == "<" else value == k)
        return value
    return {
        "+": lambda: k + value,
        "-": lambda: k - value,
        "*": lambda: value * k,
        "//": lambda: value // k,
        "cdiv": lambda: -(-value // k),
        "%": lambda: value % k,
        "+M": lambda: value + M,
        "max": lambda: max(value, 2 * k),
    }[how]()


@pytest.mark.parametrize(
    "how",
    ["16 & n", "n | 1", "1 | n", "n ^ 1", "1 << n", "n >> 1", "~n", "abs(n)", "2 ** n", "7 // n", "7 % n", "n.bit_length()"],
)
def test_no_other_arithmetic_gives_a_number_of_one_length(how):
    with pytest.raises(Fixed):
        eval(how, {"n": rows(Tokens(100, 65, 128))})


def test_a_new_length_is_filled_in(chosen_anew, monkeypatch):
    """A plan is written once for each class, not for each length."""
    written, make = [], linear.plan_forward
    monkeypatch.setattr(walk, "device_of", lambda device: HOPPER)

    def noted(*args):
        written.append(args)
        return make(*args)

    noted.has_families = True
    (x, *operands), options = forward_of(1000, 256, 512, 8)
    operands = [like and torch.empty(like.shape, dtype=like.dtype, device="meta") for like in operands]
    for count in range(897, 1025):
        walk.plan_for(noted, (torch.empty(count, *x.shape[1:], dtype=x.dtype, device="meta"), *operands), *options)
    assert len(written) == 1
