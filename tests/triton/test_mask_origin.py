"""The kernels draw the mask of a part as eager code does, whose mask is that of the whole (tests/eager/test_dropout.py)."""

import pytest
import torch

from fdora.functional import DoraLayer, dora_linear, dora_mlp
from tests import device  # noqa: F401  # the mark reads it
from tests.close import assert_within
from tests.make import grads, tensors, tracked
from tests.triton.marks import HALF, INTERPRETED, needs_kernels  # noqa: F401

pytestmark = needs_kernels
NAMES = ("x", "A", "B", "m")


@pytest.mark.parametrize("mode", ["lora", "peft"])
@pytest.mark.parametrize("dtype", [HALF[-1], torch.float32], ids=str)
@pytest.mark.parametrize("at", [(3, 5), (2**33 + 1, 2**31 + 7)], ids=str)
def test_as_the_eager_backend(dtype, mode, at):
    t = tensors(40, 72, 8, (70,), dtype)
    torch.manual_seed(1)
    dy = torch.randn(70, 40).to(t["x"])
    options = dict(s=t["s"], dropout_p=0.4, dropout_mode=mode, seed=9)

    def run(t, dy, backend, at=at):
        t = tracked(t, *NAMES)
        y = dora_linear(*(t[n] for n in "xWABm"), mask_origin=at, backend=backend, **options)
        return {"y": y.detach()} | grads(y, dy, **{n: t[n] for n in NAMES})

    wide = {n: v.double() if isinstance(v, torch.Tensor) else v for n, v in t.items()}
    got, naive, truth = run(t, dy, "triton"), run(t, dy, "eager"), run(wide, dy.double(), "eager")
    for n in got:
        slack = torch.finfo(dtype).eps * truth[n].abs().max()  # kernels round elsewhere; another mask is off by far more
        assert_within(got[n], truth[n] + (naive[n].double() - truth[n]).abs() + 2 * slack, truth[n], n)
    other = run(wide, dy.double(), "eager", None)
    assert (got["y"].double() - other["y"]).norm() > 3 * (got["y"].double() - truth["y"]).norm()


def test_an_mlp_has_an_origin_of_its_own_for_down():
    ts = [tensors(*sizes, 8, (20,), torch.float32, seed=i) for i, sizes in enumerate(((48, 40), (48, 40), (40, 48)))]
    layers = [DoraLayer(t["W"], t["A"], t["B"], t["m"], t["s"]) for t in ts]
    options = dict(dropout_p=0.4, seed=[1, 2, 3])
    got, want, other = (
        dora_mlp(ts[0]["x"], *layers, mask_origin=at, backend=b, **options)
        for b, at in (("triton", (5, 9)), ("eager", (5, 9)), ("eager", (5, 0)))
    )
    torch.testing.assert_close(got, want, rtol=2e-5, atol=2e-5)
    assert not torch.allclose(got, other, rtol=1e-3, atol=1e-3)
