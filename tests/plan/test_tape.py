"""The walk over a tape, by hand."""

from fdora.jobs.plan.tape import Op, Segment, Work, walk

SIZES = {"x": 10, "a": 100, "b": 1000, "own": 7, "loss": 1}
FIRST = Op("first", ("x",), ("a",), ("x", "own"), forward=30, backward=50, gradients=3)
SECOND = Op("second", ("a",), ("b",), ("a", "b"), backward=500)
LAST = Op("last", ("b",), ("loss",))


def test_forward_keeps_what_backward_reads_and_frees_the_rest():
    found = walk([Segment((FIRST, SECOND, LAST))], SIZES, ["x"])
    assert found.kept == 100 + 1000 + 7  # x belongs to the caller; the loss is read by nobody
    assert found.forward == 100 + 1000 + 7 + 1


def test_backward_by_hand():
    """Of last: d b. Of second: a, b, own, d b, d a and 500. Of first: a is gone with second's backward."""
    found = walk([Segment((FIRST, SECOND, LAST))], SIZES, ["x"])
    assert found.backward == 100 + 1000 + 7 + 1000 + 100 + 500 and found.at == "backward of second"
    assert found.gradients == 3
    again = walk([Segment((FIRST, SECOND, LAST))], SIZES, ["x"], gradients=3)
    assert again.gradients == 0 and again.backward == found.backward


def test_a_frozen_beginning_keeps_nothing():
    frozen = FIRST._replace(gradients=0)
    found = walk([Segment((frozen, SECOND._replace(gradients=5), LAST))], SIZES, ["x"])
    assert found.kept == 100 + 1000  # second has parameters: it keeps its input; first, nothing
    assert found.backward == 100 + 1000 + 1000 + 500 + 5  # no d a


def test_checkpointing_keeps_the_inputs_and_runs_forward_again():
    wide = Op("wide", ("a",), ("w",), ("w",), gradients=2)
    narrow = Op("narrow", ("w",), ("b",), ("w",))
    sizes = SIZES | {"w": 5000}
    segments = [Segment((FIRST,)), Segment((wide, narrow), True), Segment((LAST,))]
    found = walk(segments, sizes, ["x"])
    assert found.kept == 100 + 7  # a for the segment, own; w is not there
    assert found.backward == 100 + 7 + 5000 + 1000 + 5000 + 2 - 2  # narrow: w again, d b, d w
    open = walk([segment._replace(checkpointed=False) for segment in segments], sizes, ["x"])
    assert open.kept == 7 + 5000  # nobody but wide reads a, and wide keeps its output


def test_the_gradient_of_a_sum_is_one_piece_until_one_side_adds_to_it():
    add = Op("add", ("a", "b"), ("c",), same=True)
    sizes = SIZES | {"a": 100, "b": 100, "c": 100}
    branch = Op("branch", ("a",), ("b",), (), gradients=1)
    start = Op("start", (), ("a",), gradients=1)
    found = walk([Segment((start, branch, add, Op("last", ("c",), ("loss",))))], sizes, [])
    assert found.kept == 0
    # d c is d a and d b at once; branch reads it as d b, and makes another that is added to it as d a
    assert found.backward == 100 + 100 + 1 and (found.forward, found.at) == (300, "forward of add")
    apart = walk([Segment((start, branch, add._replace(same=False), Op("last", ("c",), ("loss",))))], sizes, [])
    assert apart.backward == 100 + 100 + 100 + 1


def test_work_adds_up():
    both = FIRST.work + Work(calls=1)
    assert both == Work((), (), 1)
