"""A server's last pass, z <- g (z + h B^T - bias) + bias by the slot of each token: on kernels and in plain torch."""

import pytest
import torch

from fdora.functional.opaque import scale_slots
from tests import device
from tests.triton.marks import DTYPES, INTERPRETED

# of plain torch without h B^T, too: where a server adds that itself
BACKENDS = [("eager", False), ("eager", True), *([("triton", True)] if INTERPRETED or device.NAME != "cpu" else [])]
NO, YES = torch.tensor([False]), torch.tensor([True])


def call(M, N, dtype, bias=True, S=4, gap=0, r=20, parts=1):
    """z (M, N) with ``gap`` elements between rows, and slots of every kind: DoRA, LoRA and none."""
    gen = torch.Generator().manual_seed(M + N)
    z = torch.randn(M, N + gap, generator=gen).to(dtype).to(device.NAME)[:, :N]
    g = 1 + 0.05 * torch.randn(S, N, generator=gen)
    g[:, N // 2 :: 3] = 1
    slots = torch.randint(-1, S, (M,), generator=gen)
    holds = torch.tensor([1, 0, 1, 1], dtype=torch.int32)
    b = (200 * torch.randn(N, generator=gen)).to(dtype).to(device.NAME) if bias else None
    ends = torch.tensor([0, *(N // 16 * (i + 1) // (parts + 1) for i in range(parts - 1)), N // 16], dtype=torch.int32)
    h, B = torch.randn(parts, M, r, generator=gen), torch.randn(S, N, r, generator=gen).to(dtype)
    given = z, g.to(device.NAME), holds.to(device.NAME), b, slots.to(device.NAME)
    return given, [t.to(device.NAME) for t in (h, B, ends)]


def tables_of(slots, S=4):
    """As vLLM makes them: more room than tokens, and -1 behind the slots that have some."""
    ids, counts = slots.unique(return_counts=True)
    found = [torch.zeros(n, dtype=torch.int32, device=slots.device) for n in (len(slots) + 3, S + 1, S + 2, S + 1)]
    found[3].fill_(-1)
    found[0][: len(slots)] = slots.argsort(stable=True)
    found[1][: len(ids)], found[2][1 : 1 + len(ids)], found[3][: len(ids)] = counts, counts.cumsum(0), ids
    return found


def run(given, low, idle=NO, no_lora=None):
    scale_slots(*given, low=low, tables=tables_of(given[-1]) if low else [], idle=idle, no_lora=no_lora)


@pytest.fixture(params=BACKENDS, ids=str)
def adds(request):
    """Whether it adds h B^T."""
    import fdora

    name, low = request.param
    with fdora.backend(name):
        yield low


def lora_of(given, low):
    """h B^T in float64, h as B is rounded; zeros without a slot."""
    (*_, slots), (h, B, ends) = given, low
    rows = [h.to(B.dtype).double()[p] for p in range(len(h)) for _ in range(16 * int(ends[p]), 16 * int(ends[p + 1]))]
    return (torch.stack(rows, 1) * B.double()[slots.clamp(0)]).sum(2) * (slots >= 0)[:, None]


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != torch.float64], ids=str)
@pytest.mark.parametrize(
    ("M", "N", "gap", "r", "parts"),
    [(1, 16, 0, 16, 1), (6, 144, 3, 1, 3), (90, 304, 0, 48, 2), (7, 160, 2, 70, 2), (0, 16, 0, 4, 1)],
)
@pytest.mark.parametrize("bias", [False, True])
def test_tokens_of_dora_are_scaled_once_and_others_are_as_a_server_for_lora_has_them(adds, M, N, gap, r, parts, dtype, bias):
    if adds and dtype == torch.float32 and device.NAME != "cpu":
        pytest.skip("on a GPU products of float32 are of tf32 here; runs in the interpreter, the second half of `make test`")
    given, low = call(M, N, dtype, bias, gap=gap, r=r, parts=parts)
    z, g, holds, b, slots = given
    before, lora = z.clone(), lora_of(given, low) if adds else 0
    run(given, low if adds else [])
    dora = (slots >= 0) & (holds[slots.clamp(0)] != 0)
    gt, wide, shift = g.double()[slots.clamp(0)], before.double() + lora, 0 if b is None else b.double()
    scaled = dora[:, None] & (gt != 1)
    want = torch.where(scaled, gt * (wide - shift) + shift, wide)
    assert torch.equal(z[slots < 0], before[slots < 0]) and (adds or torch.equal(z[~scaled], before[~scaled]))
    terms = lora_of(given, [low[0].abs(), low[1].abs(), low[2]]) if adds else 0
    size = (gt * (wide - shift)).abs() + (0 if b is None else b.double().abs()) + before.double().abs() + terms
    error, eps = (z.double() - want).abs(), torch.finfo(dtype).eps
    once = torch.where(scaled, 0.0, 0.5 * eps * abs(lora) * 1.01)  # without DoRA h B^T is rounded before it is added
    assert (error <= 0.5 * eps * want.abs() * 1.01 + once + 2e-6 * size + 1e-6).all()
    assert M < 5 or ((z != before)[dora].any() and not dora.all())


def test_nothing_is_read_where_nobody_has_dora(adds):
    """Neither where no slot holds DoRA nor where no token has a slot: g of NaN would show."""
    (z, g, holds, b, slots), low = call(9, 48, torch.float32)
    low, lora = (low, 0 * low[0]) if adds else ([], None)
    low = [lora, *low[1:]] if adds else low
    before = z.clone()
    for table, idle, no_lora in ((0 * holds, YES, None), (holds, NO, YES), (0 * holds, NO, NO)):
        run((z, g * torch.nan, table, b, slots), low, idle, no_lora)
        assert torch.equal(z, before)


def test_an_overflow_of_others_stays_theirs(adds):
    given, low = call(9, 48, torch.float32)
    z, slots = given[0], given[-1]
    slots[:4], slots[4:] = 1, 0  # LoRA, DoRA
    z[2, 3], z[3, 5] = torch.inf, torch.nan
    before = z.clone()
    run(given, low if adds else [])
    assert torch.equal(z.isnan(), before.isnan()) and torch.equal(z.isinf(), before.isinf())


def test_is_an_op_that_a_compiler_sees(adds):
    given, low = call(6, 32, torch.float32)
    options = {"low": low if adds else [], "tables": tables_of(given[-1]), "idle": NO, "no_lora": None}
    torch.library.opcheck(scale_slots, given, options)

    def layer(x):
        y = x * 2
        scale_slots(y, *given[1:], **options)
        return y + 1

    found = torch.compile(layer, backend="aot_eager", fullgraph=True)(given[0])
    torch.testing.assert_close(found, layer(given[0]), rtol=0, atol=0)
    assert not torch.equal(found, given[0] * 2 + 1)


@pytest.mark.parametrize("rank", [8, 32, 64, 256])
def test_a_server_has_every_kernel_before_it_captures(rank):
    """Triton compiles for one, for multiples of 16 and for other numbers of tokens; a tile is a constant."""
    pytest.importorskip("triton", reason="needs Triton; `make test` installs it")
    from fdora.integrations._vllm.slots import LENGTHS
    from fdora.triton.compose import rows_of_slots

    def kernel(M):
        return rows_of_slots(M, rank), M == 1, M % 16 == 0

    assert {kernel(M) for M in range(1, 9000)} == {kernel(M) for M in LENGTHS}


@pytest.mark.skipif("device.NAME == 'cpu'", reason="needs a GPU; runs with --device cuda on a machine with one")
@pytest.mark.parametrize("bias", [False, True])
def test_a_graph_that_was_captured_without_adapters_serves_those_that_come(adds, bias):
    """As vLLM does it: kernels compiled when a layer is made, the capture while no slot holds DoRA, then adapters and other slots."""
    given, low = call(40, 1040, torch.bfloat16, bias)
    z, g, holds, b, slots = given
    idle, kept, holding, tables = torch.ones(1, dtype=torch.bool), z.clone(), holds.clone(), tables_of(slots)
    options = {"low": low if adds else [], "tables": tables, "idle": idle, "no_lora": NO}
    run(given, options["low"])
    holds.zero_()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scale_slots(*given, **options)
    for shift in range(3):
        slots.copy_((slots + shift) % 4)
        for table, fresh in zip(tables, tables_of(slots), strict=True):
            table.copy_(fresh)
        found = []
        for held in (holding, 0 * holding):
            holds.copy_(held)
            z.copy_(kept)
            graph.replay()
            want = kept.clone()
            run((want, g, holds, b, slots), options["low"])
            assert torch.equal(z, want)
            found.append(want)
        assert not torch.equal(*found) and adds != torch.equal(found[1], kept)
