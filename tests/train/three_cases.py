"""What three processes run as one pipeline: of two, each is a neighbour of the other both ways."""

from fdora.jobs.loop import Stage
from tests.distributed.world import run
from tests.train import make
from tests.train.pipeline_cases import agree


def three(base):
    """The second trains nothing."""
    one, flat, two, last = make.four(base)

    def ended(params, kept, x, data):
        return last.forward(params, None, two.forward(params, kept, x, data), data)

    return [one, flat, two._replace(forward=ended, names=("two", "head"))]


def six(base):
    one, flat, two, last = make.four(base)
    nothing = Stage(lambda params, kept, x, data: 1 * x, ())
    return [one, nothing, flat, nothing, two, last]


def case_one_f_one_b_of_three():
    agree(3, three)


def case_interleaved_on_three():
    agree(6, six)


if __name__ == "__main__":
    run(globals())
