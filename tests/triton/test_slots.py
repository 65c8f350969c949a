"""A server's last pass, z <- g (z - bias) + bias by the slot of each token: on kernels and in plain torch."""

import pytest
import torch

from fdora.functional.opaque import scale_slots
from tests import device
from tests.triton.marks import DTYPES, INTERPRETED

BACKENDS = ["eager", *(["triton"] if INTERPRETED or device.NAME != "cpu" else [])]
NO, YES = torch.tensor([False]), torch.tensor([True])


def call(M, N, dtype, bias=True, S=4, gap=0):
    """z (M, N) with ``gap`` elements between rows, and slots of every kind: DoRA, LoRA, none, and one that is no slot."""
    gen = torch.Generator().manual_seed(M + N)
    z = torch.randn(M, N + gap, generator=gen).to(dtype).to(device.NAME)[:, :N]
    g = 1 + 0.05 * torch.randn(S, N, generator=gen)
    g[:, N // 2 :: 3] = 1
    slots = torch.randint(-1, S + 1, (M,), generator=gen)
    holds = torch.tensor([1, 0, 1, 1], dtype=torch.int32)
    b = 200 * torch.randn(N, generator=gen)
    return z, g.to(device.NAME), slots.to(device.NAME), holds.to(device.NAME), b.to(dtype).to(device.NAME) if bias else None


@pytest.fixture(params=BACKENDS)
def backend(request):
    import fdora

    with fdora.backend(request.param):
        yield request.param


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("M", "N", "gap"), [(1, 16, 0), (5, 137, 3), (33, 1030, 0), (0, 8, 0)])
@pytest.mark.parametrize("bias", [False, True])
def test_tokens_of_dora_are_scaled_once_and_no_other_bit_changes(backend, M, N, gap, dtype, bias):
    z, g, slots, holds, b = call(M, N, dtype, bias, gap=gap)
    before = z.clone()
    scale_slots(z, g, slots, holds, b, NO, None)
    dora = torch.tensor([0 <= s < 4 and bool(holds[s]) for s in slots.tolist()], dtype=torch.bool, device=z.device)
    gt = g.double()[slots.clamp(0, 3)]
    wide, shift = before.double(), 0 if b is None else b.double()
    want = torch.where(dora[:, None] & (gt != 1), gt * (wide - shift) + shift, wide)
    changed = z != before
    assert not changed[~dora].any() and not changed[gt == 1].any()
    size = (gt * (wide - shift)).abs() + (0 if b is None else b.double().abs())
    error, eps = (z.double() - want).abs(), torch.finfo(dtype).eps
    assert (error <= 0.5 * eps * want.abs() + 3e-7 * size + 1e-7).all()
    assert M < 5 or (changed[dora].any() and not dora.all())


def test_nothing_is_read_where_nobody_has_dora(backend):
    """Neither where no slot holds DoRA nor where no token has a slot: g of NaN would show."""
    z, g, slots, holds, b = call(9, 40, torch.float32)
    before = z.clone()
    for table, idle, no_lora in ((holds, YES, None), (holds, NO, YES), (holds * 0, NO, NO)):
        scale_slots(z, g * torch.nan, slots, table, b, idle, no_lora)
        assert torch.equal(z, before)


def test_an_overflow_of_others_stays_theirs(backend):
    z, g, slots, holds, b = call(9, 40, torch.float32)
    slots[:] = 1  # LoRA
    z[2, 3], z[4, 5] = torch.inf, torch.nan
    before = z.clone()
    scale_slots(z, g, slots, holds, b, NO, None)
    assert torch.equal(z.isnan(), before.isnan()) and torch.equal(z.nan_to_num(), before.nan_to_num())


def test_is_an_op_that_a_compiler_sees():
    z, g, slots, holds, b = call(6, 24, torch.float32)
    torch.library.opcheck(scale_slots, (z, g, slots, holds, b, NO, None))

    def layer(x):
        y = x * 2
        scale_slots(y, g, slots, holds, b, NO, None)
        return y + 1

    found = torch.compile(layer, backend="aot_eager", fullgraph=True)(z)
    torch.testing.assert_close(found, layer(z), rtol=0, atol=0)
    assert not torch.equal(found, z * 2 + 1)


@pytest.mark.skipif("device.NAME == 'cpu'", reason="needs a GPU; runs with --device cuda on a machine with one")
@pytest.mark.parametrize("bias", [False, True])
def test_a_graph_that_was_captured_without_adapters_serves_those_that_come(bias):
    """As vLLM does it: kernels compiled when a layer is made, the capture while no slot holds DoRA, then adapters and other slots."""
    z, g, slots, holds, b = call(40, 1030, torch.bfloat16, bias)
    idle, kept, holding = torch.ones(1, dtype=torch.bool), z.clone(), holds.clone()
    scale_slots(z, g, slots, holds, b, NO, None)
    holds.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale_slots(z, g, slots, holds, b, idle, NO)
    for shift in range(3):
        slots.copy_((slots + shift) % 4)
        for table in (holding, 0 * holding):
            holds.copy_(table)
            z.copy_(kept)
            graph.replay()
            want = kept.clone()
            scale_slots(want, g, slots, holds, b, NO, None)
            assert torch.equal(z, want) and torch.equal(z, kept) == (not bool(table.any()))
