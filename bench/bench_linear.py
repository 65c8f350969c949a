"""dora_linear, norm given or computed inside, against the products that it cannot do without."""

import pytest
import torch

from bench.layer import QUICK, TOLERANCE
from bench.ways import Inputs, build, errors, truths


@pytest.mark.parametrize("mode", ["fwd", "fwd_bwd"])
@pytest.mark.parametrize("norm", ["given", "inside"])
@pytest.mark.parametrize("adapter", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("case", range(len(QUICK)))
def test_linear(measure, device, backend, case, adapter, norm, mode):
    shape, M, r = QUICK[case] if device != "cpu" else ("48x32", 8 * (case + 1), 4)
    K, N = map(int, shape.split("x"))
    i = Inputs.random(M, K, N, r, adapter, device)
    way = build("fdora" if norm == "given" else "fdora_inside", i)
    assert max(errors(way, truths(i, i.W)).values()) <= TOLERANCE

    products, adapters = 2 * M * (N * K + r * K + r * N), i.A.nbytes + i.B.nbytes
    size = i.x.nbytes + i.W.nbytes + i.dy.nbytes + adapters
    if mode == "fwd_bwd":  # dh, dx, dA and dB; x, W and y read again, dy read, dx, dA and dB written
        products += 2 * M * (N * K + 2 * r * K + 2 * r * N)
        size += 2 * i.x.nbytes + i.W.nbytes + 2 * i.dy.nbytes + 2 * adapters
    if norm == "inside":
        products += 2 * N * K * r
    what = {"M": M, "K": K, "N": N, "r": r, "adapter": str(adapter).removeprefix("torch."), "norm": norm, "mode": mode}
    fn = way.forward if mode == "fwd" else way.both
    measure(fn, bytes=size, flops=products, op="linear", dtype=i.x.dtype, backend=backend, **what)
