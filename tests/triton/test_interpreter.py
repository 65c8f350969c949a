"""What the interpreter of the tests does not repeat it has still looked at."""

import pytest
import torch

triton = pytest.importorskip("triton", reason="needs Triton; `make test` installs it")
import triton.language as tl  # noqa: E402
from triton.runtime import interpreter  # noqa: E402, F401 (read by the mark)

from tests import device  # noqa: E402, F401 (read by the mark)
from tests.triton.marks import INTERPRETED  # noqa: E402, F401 (read by the mark)

pytestmark = pytest.mark.skipif(
    "device.NAME != 'cpu' or not INTERPRETED or not hasattr(interpreter, '_LangPatchScope')",
    reason="runs with TRITON_INTERPRET=1, and a Triton whose interpreter is one that tests/triton/interpreter.py knows",
)


@triton.jit
def combined_kernel(x, out, by, OP: tl.constexpr, SHORT: tl.constexpr):
    n = tl.arange(0, 4)
    a, b = tl.load(x + n), by + (tl.arange(0, 2) if SHORT else n)
    tl.store(out + n, a + b if OP == "+" else a - b if OP == "-" else a * b)


def combined(x, by, op, short=False):
    x, out = torch.full((4,), x, dtype=torch.float16 if isinstance(x, float) else torch.int32), torch.empty(4)
    combined_kernel[(1,)](x, out, by, op, short)
    return x, out


@pytest.mark.parametrize(("op", "by"), [("+", 2**31 - 6), ("-", -(2**31) + 5), ("*", 2**29)])
def test_an_integer_that_overflows(op, by):
    assert combined(6, by // 8, op)[1][0] == float({"+": 6 + by // 8, "-": 6 - by // 8, "*": 6 * (by // 8)}[op])
    with pytest.raises(Exception, match="int32 overflow"):
        combined(6, by, op)


def test_shapes_and_types():
    with pytest.raises(Exception, match="incompatible dimensions"):
        combined(0, 1, "+", short=True)
    x, out = combined(0.1, 1, "*")
    assert torch.equal(out, (x * torch.arange(1, 5)).float())
