"""torch's FlopCounterMode sees our ops, and counts what their plans multiply."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode, flop_registry

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

import fdora.functional as F
import fdora.functional.opaque
import fdora.triton  # noqa: F401
from tests import device
from tests.triton.marks import INTERPRETED, needs_kernels  # noqa: F401

H = torch.float16
K, r = 48, 4


def draw(*shape, grad=True, dtype=H):
    return (torch.randn(shape, device=device.NAME) * 0.1).to(dtype).requires_grad_(grad)


def layer(N, K=K, r=r):
    return F.DoraLayer(draw(N, K, grad=False), draw(r, K), draw(N, r), draw(N), 2.0)


def counted(fn, *args, **kwargs):
    """Flops of forward, of backward."""
    with FlopCounterMode(display=False) as counter:
        ys = fn(*args, backend="triton", **kwargs)
        forward = counter.get_total_flops()
        ys = [y for y in (ys if isinstance(ys, tuple) else (ys,)) if y.requires_grad]
        if ys:
            torch.autograd.backward(ys, [torch.randn_like(y) for y in ys])
    return forward, counter.get_total_flops() - forward


def norm(N, K):
    return 2 * N * K * r


def forward(M, N, K):
    return 2 * M * (N * K + r * K + N * r)


def backward(M, N, K):
    """dh, dB, dA and dx with its low-rank term."""
    return 2 * M * (N * r + N * r + r * K) + 2 * M * K * (N + r)


@needs_kernels
def test_only_what_is_asked_for_is_counted():
    la, M, N = layer(40), 80, 40
    W, A, B, m = (t.detach() for t in la[:4])
    assert counted(F.dora_linear, draw(M, K), W, A, B, m, s=2.0)[1] == 2 * M * N * r + 2 * M * K * (N + r)
    x = draw(M, K, grad=False)
    assert counted(F.dora_linear, x, W, A, B, m.requires_grad_(), s=2.0)[1] == 0  # a pass over dy and y
    assert counted(F.dora_linear, x, W, A, B.requires_grad_(), m.detach(), s=2.0)[1] == 2 * M * N * r


@needs_kernels
@pytest.mark.parametrize("M", [5, 80])
def test_an_mlp(M):
    inner, N = 32, 24
    got = counted(F.dora_mlp, draw(M, K), layer(inner), layer(inner), layer(N, inner))
    shapes = (inner, K), (inner, K), (N, inner)
    assert got == (sum(norm(*s) + forward(M, *s) for s in shapes), sum(backward(M, *s) for s in shapes))


@needs_kernels
def test_norms_and_merges():
    W, A, B, m = (t.detach() for t in layer(40)[:4])
    assert counted(F.dora_norm, W, A, B, s=2.0) == (norm(40, K), 0)
    assert counted(F.dora_norm, W, A, B, s=2.0, state=F.dora_norm_state(W)) == (norm(40, K), 0)
    assert counted(F.dora_merge, W, A, B, m, s=2.0) == (2 * norm(40, K), 0)
    slabs = 32  # float32 factors are float16 ones of three times the rank, filled up
    assert counted(F.dora_norm, W, A.float(), B.float(), s=2.0)[0] == 2 * 40 * K * slabs


def test_fake_tensors_are_counted_without_a_gpu():
    with FakeTensorMode(), FlopCounterMode(display=False) as counter:
        W, A, B = (torch.empty(s, dtype=torch.bfloat16, device="cuda") for s in ((40, K), (r, K), (40, r)))
        torch.ops.fdora.row_norm(W, A, B, 2.0, None, False)
    assert counter.get_total_flops() == norm(40, K)


def test_every_op_has_a_formula():
    ours = {
        name.partition("::")[2].partition(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("fdora::")
    }
    assert len(ours) >= 10 and {str(op) for op in flop_registry if str(op).startswith("fdora.")} == {
        f"fdora.{name}"
        for name in ours - {"segment_sum", "scale_slots", "linears"}  # two have no product, the last is made of ops
    }


@needs_kernels
def test_norms_of_a_tree_and_of_a_bank():
    W, A, B = (t.detach() for t in layer(40)[:3])
    tree = {"a": W, "b": [W, W]}
    with FlopCounterMode(display=False) as counter:
        F.dora_norm_tree(tree, {"a": (A, B), "b": [(A, B)] * 2}, s=2.0, backend="triton")
    assert counter.get_total_flops() == 3 * norm(40, K)
    # multiplied out: W A^T in the place of B A, which is as much, A A^T, and b A A^T of each row
    each = norm(40, K) + 2 * r * r * K + 2 * 40 * r * r
    assert counted(F.dora_norm, W, torch.stack([A, A]), torch.stack([B, B]), s=[1.0, 2.0])[0] == 2 * each
