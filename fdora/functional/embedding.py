"""An adapted embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from fdora._check import check_dtype, check_weights, fail, is_int, is_number, once
from fdora._dispatch import Backend
from fdora._records import Lookup, NormOf
from fdora._torch import is_traced
from fdora.autograd.embedding import embedding
from fdora.autograd.norm import row_norm
from fdora.functional.backend import select_backend
from fdora.functional.layer import DoraLayer, parts, tensors_of
from fdora.functional.linear import in_sums
from fdora.quant import QuantWeight


def dora_embedding(
    ids: Tensor,
    W: Tensor,
    A: Tensor,
    B: Tensor,
    m: Tensor,
    *,
    s: float,
    norm: Tensor | None = None,
    norm_axis: int = 0,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    sparse: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """Rows of an adapted table: ``y = g * (W[ids] + s * A.T[ids] @ B.T)`` with ``g = m / ||W + s * (B @ A).T||`` per column.

    The product runs in the dtype of W with float32 accumulation; g and the sum are float32, rounded once. A head that shares
    W as its weight has an adapter of its own, ``dora_linear(x, W, A_head, B_head, m_head, s=s)``. With ``norm_axis=1`` the two
    can share the adapter as well: ``dora_linear(x, W, B.T, A.T, m, s=s)`` is then the same adapted table. The tensors may be
    DTensors, and lie as docs/distributed.md has it: a vocabulary that is cut gives a pending sum.

    Args:
      ids: (...) int64 or int32, row numbers in [0, V).
      W: (V, d) frozen table, float16, bfloat16, float32 or float64.
      A: (r, V), float32 or the dtype of W. As PEFT's lora_embedding_A.
      B: (d, r), float32 or the dtype of W.
      m: (d,) magnitude, float32 or the dtype of W; (V,) with ``norm_axis=1``.
      s: LoRA scaling, usually alpha / r. Not differentiated.
      norm: (d,) float32 (or float64), ``dora_norm(W.T, A, B, s=s)``; None computes it, detached, which reads all of W. With
        ``norm_axis=1`` (V,), ``dora_norm(W, B.T, A.T, s=s)``; None takes that of each row as it is read, which costs nothing.
      norm_axis: the axis of W that is summed away. 0: a norm and a magnitude for each column, as in PEFT. 1: for each row of
        the table, as in LyCORIS.
      padding_idx: tokens of this number add nothing to a gradient, as in F.embedding; their row is read like any other.
        (In PEFT they do reach B and m.)
      max_norm: a row of W that is longer counts as ``W[v] * max_norm / (||W[v]|| + 1e-7)``, as in F.embedding, but W stays as
        it is; in plain torch on every device. The norm of columns is that of W as it stands: to have both, call
        ``torch.embedding_renorm_`` on all rows first.
      sparse: True gives the gradients of A and, with ``norm_axis=1``, of m as coalesced sparse COO tensors of the rows that
        were read, without the padding row: torch.optim.SparseAdam, SGD and Adagrad take them, as they take those of
        nn.Embedding(sparse=True). Not under torch.func or torch.compile. The host waits to hear how many rows there are.
      backend: "auto", "eager" or "triton"; :func:`select_backend` tells what "auto" picks.

    Returns:
      (..., d), dtype and device of W. Gradients reach A, B, m and a given norm, each in its own dtype; those of A (and of m and
      the norm with ``norm_axis=1``) are zero where no token was, and the sums over the tokens of a row have one order.

    Raises:
      FdoraError: shapes, dtypes or devices disagree, W requires grad or is quantised, s is not finite, norm_axis is neither 0
        nor 1, padding_idx is no row of W, max_norm is not positive, or sparse meets torch.func or torch.compile.
      IndexError: a number is no row of W; a kernel, which cannot raise, and a vocabulary that is cut give a row of NaN for it.
      NotImplementedError: a second derivative is asked for.

    Memory: keeps its arguments, no activation; backward makes the rows again. Nothing of the size of W is ever made, but the
    gradient of A is (r, V), if it is not sparse; on a GPU its parts take r d / 32 bytes a token for a while.
    Derivation: ``fdora/eager/embedding.py``.
    References: Liu et al., DoRA, 2024, arXiv:2402.09353, eq. 5; Yeh et al., LyCORIS, 2023, arXiv:2309.14859 (norm_axis=1).
    """
    fn, layer = "dora_embedding", DoraLayer(W, A, B, m, s, None, norm)
    if check_embedding(fn, ids, layer, norm_axis, padding_idx, max_norm):
        from fdora.functional import _sharded

        if sparse:
            raise fail(fn, "sparse", "False with DTensors", sparse, "Sparse gradients do not work there.")
        how_read = {"norm_axis": norm_axis, "max_norm": max_norm, "backend": backend}
        return _sharded.embedding(dora_embedding, ids, layer, padding_idx, **how_read)
    choice = select_backend(W, backend=backend)
    if max_norm is not None and backend == "triton":
        raise fail(fn, "max_norm", "None with backend='triton'", max_norm, "Plain torch has it: backend='auto'.")
    c = norm
    if c is None and norm_axis == 0:
        c = row_norm(NormOf(W.T, A, B, s), choice.name)
    if padding_idx is not None and padding_idx < 0:
        padding_idx += W.shape[0]
    check_sparse(fn, sparse)
    how = Lookup(s, norm_axis == 1, padding_idx, max_norm, sparse)
    c = None if c is None else in_sums(c, W)
    return embedding(ids, W, A, B, m, c, how, choice.name if max_norm is None else "eager")


def check_sparse(fn: str, sparse: bool) -> None:
    if not isinstance(sparse, bool):
        raise fail(fn, "sparse", "a bool", f"a {type(sparse).__name__}", "Pass what nn.Embedding takes.")
    if sparse and is_traced():
        raise fail(fn, "sparse", "False under torch.func and torch.compile", "True", "Sparse gradients do not work there.")


def check_embedding(
    fn: str, ids: Tensor, layer: DoraLayer, norm_axis: int, padding_idx: int | None, max_norm: float | None
) -> bool:
    """Whether they are DTensors, whose parts are checked in their turn."""
    W, A, B, m, s, _, norm = parts(layer)
    if isinstance(W, QuantWeight):
        raise fail(fn, "W", "a tensor", "a QuantWeight", "Pass W.dequantize(): quantised tables are not supported.")
    if norm_axis not in (0, 1) or isinstance(norm_axis, bool):
        want = "0 (a norm for each column) or 1 (for each row of the table)"
        raise fail(fn, "norm_axis", want, norm_axis, "PEFT's is 0.")

    def check() -> None:
        axis, maker = ("d", "dora_norm(W.T, A, B, s=s)") if norm_axis == 0 else ("V", "dora_norm(W, B.T, A.T, s=s)")
        axes = {"ids": "...", "W": "V d", "A": "r V", "B": "d r", "m": axis, "norm": axis}
        check_weights(fn, tensors_of(layer, ids=ids), s, axes=axes, texts=("nn.Embedding", maker))
        check_dtype(fn, "ids", ids, (torch.int64, torch.int32), "Pass row numbers, for example ids.long().")

    sharded = once(fn, (ids, W, A, B, m, norm), (s, int(norm_axis)), check, W=W)
    if padding_idx is not None:
        whole = is_int(padding_idx)
        if not whole or not -W.shape[0] <= padding_idx < W.shape[0]:
            have = str(padding_idx) if whole else f"a {type(padding_idx).__name__}"
            raise fail(
                fn, "padding_idx", f"None or the number of one of {W.shape[0]} rows", have, "Pass what nn.Embedding takes."
            )
    if max_norm is not None:
        number = is_number(max_norm)
        if not number or not 0 < max_norm < float("inf"):
            have = str(max_norm) if number else f"a {type(max_norm).__name__}"
            raise fail(fn, "max_norm", "None or a positive Python number", have, "Pass what nn.Embedding takes.")
    return sharded
