"""A slice of tests/cases.py on the kernels: outputs and gradients against float64, bits from call to call, any strides and sizes."""

import pytest

from tests import device
from tests.cases import run_case, usual
from tests.triton.marks import INTERPRETED, needs_kernels  # noqa: F401 (read by the mark)
from tests.triton.written import by_tma, launches

pytestmark = needs_kernels
COUNTS = {
    "linear": 18,
    "group": 10,
    "mlp": 8,
    "norm": 12,
    "multi": 8,
    "experts": 9,
    "experts_mlp": 5,
    "merge": 8,
    "unmerge": 4,
    "compose": 8,
}
COUNTS |= {"delta": 4, "embedding": 8, "conv": 3, "base_sqnorm": 3, "norm_tree": 8}


@pytest.mark.parametrize("name", COUNTS)
def test_a_slice(name):
    drawn = usual(device.NAME, "triton")
    for k in range(COUNTS[name]):
        # few tokens and many, tiles that are filled and ragged ones; now and then a long axis, which takes more than one
        size = drawn._replace(largest=300 if k % 6 == 5 else drawn.largest)
        run_case(name, f"{name} {k}", size)


@pytest.mark.skipif("device.NAME != 'cpu'", reason="a GPU chooses TMA by itself; runs on a CPU with TRITON_INTERPRET=1")
@pytest.mark.parametrize("name", ["linear", "group"])
def test_tiles_by_tma(name, as_hopper, monkeypatch):
    """The kernels of Hopper, interpreted, where all is fused: several tiles a program, the last ones ragged."""
    from fdora.triton import product
    from fdora.triton.tiles.product import Way, fused_config

    monkeypatch.setattr(product, "product_way", lambda *shape: Way("fused", fused_config(*shape), 0.0))
    plans, drawn, steps = as_hopper(), usual(device.NAME, "triton")._replace(dtypes=["fp16"], largest=300, whole=8), []
    for k in range(8):
        run_case(name, f"{name} {k}", drawn)
        steps += [step for plan in plans.values() for step in launches(plan, "gemm") if by_tma(step)]
    assert len(steps) > 8 and (name != "group" or any("accumulate" in step.constexprs for step in steps))
