"""An op of ours goes past torch's dispatcher where nobody but its launcher needs to see the call, and nowhere else."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests import device
from tests.triton.marks import HALF, INTERPRETED, needs_kernels  # noqa: F401

pytestmark = needs_kernels


@pytest.fixture
def no_grad():
    with torch.no_grad():
        yield


@pytest.fixture
def op(monkeypatch):
    """compose, and how often it went which way."""
    from fdora.triton import compose  # noqa: F401

    found = torch.ops.fdora.compose.default
    direct, ways = found._op, []
    dispatch, launcher = direct.dispatch, direct.launcher

    def dispatched(*args, **kwargs):
        ways.append("dispatcher")
        return dispatch(*args, **kwargs)

    def launched(*args):
        ways.append("launcher")
        return launcher(*args)

    monkeypatch.setattr(direct, "dispatch", dispatched)
    monkeypatch.setattr(direct, "launcher", launched)
    return found, ways


def args(cls=torch.Tensor):
    base, lora = (torch.randn(3, 8, device=device.NAME, dtype=HALF[0]).as_subclass(cls) for _ in range(2))
    return base, lora, torch.ones(8, device=device.NAME), None, 1.0, False


def test_without_a_graph(op):
    op, ways = op
    given = args()
    with torch.no_grad():
        direct = op(*given)
        assert ways == ["launcher"]
    assert torch.equal(direct, op(*given)) and ways == ["launcher", "dispatcher"]
    with torch.inference_mode():
        assert torch.equal(direct, op(*given)) and ways[2:] == ["launcher"]


def watching(base, asked):
    """A mode that notes what it sees."""

    def see(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))

    return type("Watching", (base,), {asked: see})


MODES = watching(TorchDispatchMode, "__torch_dispatch__"), watching(torch.overrides.TorchFunctionMode, "__torch_function__")


@pytest.mark.usefixtures("no_grad")
@pytest.mark.parametrize("mode", MODES)
def test_modes_see_it(op, mode):
    op, ways = op
    with mode() as mode:
        mode.seen = []
        op(*args())
    assert "fdora.compose.default" in mode.seen and ways[0] == "dispatcher"


@pytest.mark.usefixtures("no_grad")
def test_a_profiler_lists_it(op):
    op, ways = op
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        op(*args())
    assert ways == ["dispatcher"] and any("fdora::compose" in each.key for each in profile.key_averages())


@pytest.mark.usefixtures("no_grad")
def test_transforms_see_it(op):
    op, ways = op
    base, lora, g, bias, s, delta = args()
    many = torch.stack([base, 2 * base])
    got = torch.func.vmap(lambda base: op(base, lora, g, bias, s, delta))(many)
    assert ways[0] == "dispatcher"
    assert torch.equal(got[1], op(2 * base, lora, g, bias, s, delta))


@pytest.mark.usefixtures("no_grad")
def test_subclasses_see_it(op):
    op, ways = op

    class Mine(torch.Tensor):
        pass

    op(*args(Mine))
    assert set(ways) == {"dispatcher"}
    ways.clear()
    with torch._subclasses.FakeTensorMode() as mode:
        fake = [mode.from_tensor(t) if isinstance(t, torch.Tensor) else t for t in args()]
    assert op(*fake).shape == (3, 8) and ways[0] == "dispatcher"


@pytest.mark.usefixtures("no_grad")
def test_one_of_a_list_sees_it(monkeypatch):
    from fdora.triton import linear  # noqa: F401

    direct = torch.ops.fdora.linear.default._op
    ways = []
    monkeypatch.setattr(direct, "dispatch", lambda *a: ways.append("dispatcher"))
    monkeypatch.setattr(direct, "launcher", lambda *a: ways.append("launcher"))

    class Mine(torch.Tensor):
        pass

    x = torch.randn(3, 8)
    for operands in ([x, x, None], [x, x.as_subclass(Mine), None]):
        torch.ops.fdora.linear.default(x, operands, [1.0], ["nothing"])
    assert ways == ["launcher", "dispatcher"]


def test_it_is_the_op_that_it_was(op):
    import copy

    op, _ = op
    assert op._op == op._op.dispatch and hash(op) == hash(op._op.dispatch)
    assert copy.deepcopy(op) is op and {op: 1}[torch.ops.fdora.compose.default] == 1
    assert str(op) == "fdora.compose.default" and op.op.__name__ == op._op.__name__
    with pytest.raises(RuntimeError, match="compose"):
        op("no tensor")


def test_compiled_code_goes_past_it(op):
    from fdora.functional import dora_compose

    _, ways = op
    base, lora, g, *_ = args()

    def run(base, lora):
        return dora_compose(base, lora, g, s=1.0, backend="triton")

    fast = torch.compile(run, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        fast(base, lora)
        ways.clear()
        got = fast(base, lora)
        assert ways == ["launcher"]
        assert torch.equal(got, run(base, lora))
