"""What the norm may cost: bytes held, by the allocator's count; bytes moved and multiplications, against the dense way."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from fdora.functional import dora_base_sqnorm, dora_init, dora_merge, dora_norm
from tests import device
from tests.memory import Traffic, peak_bytes


def weights(N, K, r, dtype=torch.float32, adapter=torch.float32):
    shapes = {"W": (N, K), "A": (r, K), "B": (N, r)}
    made = {n: torch.randn(*shape, device=device.NAME) * shape[1] ** -0.5 for n, shape in shapes.items()}
    return made["W"].to(dtype), made["A"].to(adapter), made["B"].to(adapter)


def dense(W, A, B):
    return torch.linalg.vector_norm(W + 2.0 * (B @ A), dim=1)


def test_a_quarter_of_the_dense_memory():
    if device.NAME != "cpu":
        pytest.skip("the promise is about the CPU; runs with --device cpu")
    args = weights(4096, 4096, 384)
    base = dora_base_sqnorm(args[0])
    limit = peak_bytes(lambda: dense(*args), device.NAME) / 4
    assert limit > 16 << 20  # the measure sees the dense product
    for extra in ({}, {"base_sqnorm": base}, {"max_bytes": 2 << 20}):
        assert peak_bytes(lambda: dora_norm(*args, s=2.0, **extra), device.NAME) <= limit


@pytest.mark.parametrize("max_bytes", [150_000, 600_000, 5_000_000])
@pytest.mark.parametrize(
    "dtypes", [(torch.float32, torch.float32), (torch.bfloat16, torch.float32), (torch.float16,) * 2], ids=str
)
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("factored", [False, True])
def test_budget_is_honoured(max_bytes, dtypes, turned, factored):
    if device.NAME != "cpu":
        pytest.skip("cuBLAS keeps a workspace of its own; runs with --device cpu")
    W, A, B = weights(1000, 1536, 48, *dtypes)
    if turned:
        W, A, B = (t.T.contiguous().T for t in (W, A, B))
    if factored and turned and dtypes[0] == torch.float32:
        W, A, B = (torch.stack([t, t], -1)[..., 0] for t in (W, A, B))  # strides that no BLAS takes
    extra = {"base_sqnorm": dora_base_sqnorm(W)} if factored else {}
    peak = peak_bytes(lambda: dora_norm(W, A, B, s=2.0, max_bytes=max_bytes, **extra))
    assert peak <= max_bytes
    assert peak >= min(max_bytes, 600_000) / 8, "a budget that is not used is not a budget"


def test_repeated_rows_stay_inside_the_budget():
    W, A, B = weights(1000, 1536, 48)
    W = -2.0 * B @ A + 1e-3 * W  # every row cancels
    base = dora_base_sqnorm(W)
    truth = (W.double() + 2.0 * B.double() @ A.double()).norm(dim=1)
    for max_bytes in (300_000, 3_000_000):
        torch.testing.assert_close(
            dora_norm(W, A, B, s=2.0, base_sqnorm=base, max_bytes=max_bytes).double(), truth, rtol=1e-4, atol=0
        )
        if device.NAME == "cpu":
            assert peak_bytes(lambda: dora_norm(W, A, B, s=2.0, base_sqnorm=base, max_bytes=max_bytes)) <= max_bytes


def test_merge_and_init_make_no_dense_product():
    W, A, B = weights(2048, 2048, 64, torch.bfloat16)
    m = torch.ones(2048, device=device.NAME)
    bf16 = W.numel() * 2
    # the result as a list of row blocks and as one tensor, and one block at a time in float32
    assert peak_bytes(lambda: dora_merge(W, A, B, m, s=2.0), device.NAME) <= 2 * bf16 + (
        600 << 20 if device.NAME != "cpu" else 50 << 20
    )
    if device.NAME == "cpu":
        assert peak_bytes(lambda: dora_init(W, 64)) <= 30 << 20


def cost(fn):
    with Traffic() as traffic, FlopCounterMode(display=False) as counter:
        fn()
    return traffic.bytes, counter.get_total_flops()


def test_cheaper_than_dense():
    """In what decides the time: no more multiplications, less than two thirds of the bytes. bench.norm_forms times it."""
    if device.NAME != "cpu":
        pytest.skip("the claim is about the CPU; runs with --device cpu")
    args = weights(4096, 4096, 384)
    theirs = cost(lambda: dense(*args))
    assert theirs == (460 * 2**20 + 4 * 4096, 2 * 4096 * 4096 * 384)  # the measure counts what is there
    ours = cost(lambda: dora_norm(*args, s=2.0))
    assert ours[1] <= theirs[1] and ours[0] <= theirs[0] * 2 / 3, (ours, theirs)
    assert cost(lambda: dora_norm(*args, s=2.0, max_bytes=150_000))[0] > theirs[0]  # tiles too small would be seen
