"""When the gradients of both factors come out of one launch."""

import pytest

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

from fdora.triton.linear import plan_backward
from tests.triton.test_compile import device as gpu
from tests.triton.written import BF16, alike, kernels, layer


@pytest.mark.parametrize(("tokens", "need_B", "launches"), [(512, True, 1), (512, False, 0), (8192, True, 0)])
def test_few_tokens_take_one_launch_for_both(tokens, need_B, launches):
    x, la = alike(tokens, 8192, dtype=BF16), layer(8192, 8192, 128, BF16, BF16)
    likes, needs = (x, alike(tokens, 128, dtype=BF16), x, x, *la), (True, need_B, True, False, False)
    assert kernels(plan_backward(likes, gpu(90), 0.0, "lora", (False,), True, needs))["factors_kernel"] == launches
