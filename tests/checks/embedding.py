"""What dora_embedding promises."""

import itertools

import torch

from fdora.functional import dora_embedding, dora_norm
from tests import device, reference
from tests.close import assert_within, rel_l2
from tests.make import grads, tensors

S = 0.7


def table(V=11, d=6, r=2, axis=0, dtype=torch.float64, adapter=None, seed=0, spread=0.05):
    """W, A, B and m of an embedding: an adapter away from its start."""
    if axis == 1:  # rows of the table are the rows of a linear layer
        t = tensors(V, d, r, dtype=dtype, adapter=adapter, seed=seed, spread=spread)
        return t["W"], t["B"].T, t["A"].T, t["m"]
    t = tensors(d, V, r, dtype=dtype, adapter=adapter, seed=seed, spread=spread)
    return t["W"].T.contiguous(), t["A"], t["B"], t["m"]


def numbers(V=11, lead=(3, 4), seed=0):
    """Some come often, some never."""
    rand = torch.Generator().manual_seed(seed)
    return (torch.rand(lead, generator=rand) ** 2 * V).long().to(device.NAME)


def a_norm_at_its_floor_has_no_slope():
    c = torch.tensor([0.0, 1.0], dtype=torch.float64, device=device.NAME).requires_grad_()
    W, A, B, m = table(3, 2, 1)
    y = dora_embedding(numbers(3), W, A, B, m * 1e-12, s=S, norm=c)
    (dc,) = torch.autograd.grad(y.sum(), c)
    assert dc[0] == 0 and dc[1] != 0


def only_rows_that_were_read():
    """A NaN elsewhere in the table, in A or in the gradient of the padding row reaches nothing."""
    for axis in (0, 1):
        W, A, B, m = table(axis=axis)
        c = dora_norm(W.T, A, B, s=S) if axis == 0 else dora_norm(W, B.T, A.T, s=S)
        W[5], A[:, 5] = float("nan"), float("nan")
        leaves = {"A": A.requires_grad_(), "B": B.requires_grad_(), "m": m.requires_grad_()}
        ids = torch.tensor([[1, 3, 1], [3, 0, 7]], device=device.NAME)
        y = dora_embedding(ids, W, A, B, m, s=S, norm=c, norm_axis=axis, padding_idx=7)
        dy = torch.ones_like(y)
        dy[1, 2] = float("nan")
        d = grads(y, dy, **leaves)
        assert all(t.isfinite().all() for t in d.values())
        read = d["A"].any(0).nonzero().flatten().tolist()
        assert read == [0, 1, 3], read
        if axis == 1:
            assert d["m"].nonzero().flatten().tolist() == [0, 1, 3]
        assert W[0].isfinite().all() and W.grad is None


def sparse_gradients_are_the_dense_ones():
    """Bit for bit, of the rows that were read and no others, and an optimizer for such gradients takes them."""
    for axis, extra in itertools.product((0, 1), ({}, {"padding_idx": 0}, {"max_norm": 0.9})):
        W, A, B, m = table(40, 8, 3, axis, torch.float32)
        A, leaves = A.contiguous(), {}
        leaves = {"A": A.requires_grad_(), "B": B.requires_grad_(), "m": m.requires_grad_()}
        ids = numbers(20, (30,))
        dy = torch.randn(30, 8, device=device.NAME)
        dense, sparse = (
            grads(dora_embedding(ids, W, A, B, m, s=S, norm_axis=axis, sparse=how, **extra), dy, **leaves)
            for how in (False, True)
        )
        read = sorted(set(ids.tolist()) - {extra.get("padding_idx")})
        for n, want in dense.items():
            got = sparse[n]
            assert got.is_sparse == (n == "A" or (n == "m" and axis == 1)), (n, axis)
            if got.is_sparse:
                assert got.is_coalesced() and got.indices()[-1].unique().tolist() == read
                assert got._nnz() == len(read) * (3 if n == "A" else 1) and got.dtype == leaves[n].dtype
            assert torch.equal(got.to_dense() if got.is_sparse else got, want), (n, axis, extra)
    W, A, B, m = table(9, 4, 2)
    before = A.T.clone()
    rows = A.T.contiguous().requires_grad_()  # a leaf (V, r), as nn.Embedding has it
    dora_embedding(torch.tensor([3, 5, 3], device=device.NAME), W, rows.T, B, m, s=S, sparse=True).sum().backward()
    torch.optim.SparseAdam([rows]).step()
    assert (rows != before).any(1).nonzero().flatten().tolist() == [3, 5]
    c = dora_norm(W, B.T, A.T, s=S).requires_grad_()
    y = dora_embedding(numbers(9), W, A, B, c.detach(), s=S, norm=c, norm_axis=1, sparse=True)
    assert not torch.autograd.grad(y.sum(), c)[0].is_sparse
    nobody = dora_embedding(numbers(9, (0,)), W, A.requires_grad_(), B, m, s=S, sparse=True)
    assert torch.autograd.grad(nobody.sum(), A)[0]._nnz() == 0


def half_precision_is_within_budget():
    """One rounding of y; gradients in their parameter's dtype, straight from float32."""
    for axis, dtype, mixed in itertools.product((0, 1), (torch.bfloat16, torch.float16, torch.float32), (False, True)):
        V, d = 50, 64
        W, A, B, m = table(V, d, 8, axis, dtype, torch.float32 if mixed else None, spread=0.0015)
        ids = numbers(V, (33, 3))
        leaves = {"A": A.requires_grad_(), "B": B.requires_grad_(), "m": m.requires_grad_()}
        y, want = dora_embedding(ids, W, A, B, m, s=S, norm_axis=axis), reference.embedding(ids, W, A, B, m, S, axis)
        limit = {torch.bfloat16: 1.8e-3, torch.float16: 2.4e-4, torch.float32: 1e-6}[dtype]
        assert y.dtype == dtype and rel_l2(y, want) <= limit, (axis, dtype, rel_l2(y, want))
        dy = torch.randn_like(y)
        low = {n: t.detach().to(dtype).requires_grad_() for n, t in leaves.items()}
        dense = W + S * (low["B"] @ low["A"]).T
        c = dense.norm(dim=axis).detach()
        rough = (dense * (low["m"] / c).unsqueeze(axis))[ids]
        got, truth, naive = grads(y, dy, **leaves), grads(want, dy.double(), **leaves), grads(rough, dy, **low)
        for n, t in leaves.items():
            assert got[n].dtype == t.dtype
            assert_within(got[n], naive[n], truth[n], f"d{n} axis={axis} {dtype} mixed={mixed}")


CHECKS = [
    half_precision_is_within_budget,
    a_norm_at_its_floor_has_no_slope,
    only_rows_that_were_read,
    sparse_gradients_are_the_dense_ones,
]
