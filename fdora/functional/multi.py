"""Many adapters on one W, in one call."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, Literal

import torch
from torch import Tensor

from fdora._check import (
    check_device,
    check_dtype,
    check_frozen,
    check_left_out,
    check_shapes,
    check_tensor,
    fail,
    is_sharded,
    once,
)
from fdora._dispatch import Backend
from fdora._records import Operands
from fdora.autograd._ops import OPS
from fdora.autograd.multi import Call, Tokens, bank_norm, fault, multi, several, tokens_by
from fdora.autograd.node import ACTS
from fdora.functional._seed import checked, seed_tensor
from fdora.functional.act import gated_act
from fdora.functional.backend import select_backend
from fdora.functional.bank import check_bank, check_kernels, check_one, check_ranks, check_sequence, scalings
from fdora.functional.layer import DoraLayer, tensors_of
from fdora.functional.linear import cast_x, check_computes, check_dropout, in_sums, on_gpu, save_for_dm
from fdora.quant import QuantWeight

APART = 0.5  # nothing reads it where each adapter has its ratio


def dora_linear_multi(
    x: Tensor,
    W: Tensor | QuantWeight,
    A: Tensor,
    B: Tensor,
    m: Tensor | None,
    *,
    s: Tensor | Sequence[float],
    offsets: Tensor | None = None,
    ids: Tensor | None = None,
    norm: Tensor | None = None,
    bias: Tensor | None = None,
    dropout_p: float | Tensor | Sequence[float] = 0.0,
    dropout_mode: Literal["lora", "peft"] = "lora",
    seed: int | Tensor | Sequence[int | Tensor] | None = None,
    ranks: Sequence[int] | None = None,
    compute: Literal["fp8", "mxfp8", "nvfp4"] | None = None,
    grad_compute: Literal["fp8", "mxfp8"] | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """Many DoRA adapters on one W: ``y_t = g_a * (x_t @ W.T + s_a * (x_t @ A_a.T) @ B_a.T) + bias``, a: the adapter of token t.

    Equivalent to one :func:`dora_linear` for the tokens of each adapter, values and gradients. Tokens of no adapter get
    ``x_t @ W.T + bias``. The parameters of G adapters are a bank: :class:`DoraParams` with one more axis, from
    :func:`dora_stack`. Nothing waits for a GPU to say how long a segment is. The tensors may be DTensors, and lie as
    docs/distributed.md has it.

        bank = dora_stack([first, second])  # of ranks 8 and 16
        y = dora_linear_multi(x, W, *bank, s=[2.0, 1.0], offsets=torch.tensor([100, 300], dtype=torch.int32), ranks=[8, 16])
        y = dora_linear_multi(x, W, *bank, s=[2.0, 1.0], ids=torch.tensor([1, -1, 0, 1]))  # one token each

    Args:
      x: (..., K), float16, bfloat16, float32 or float64; its leading axes, flattened, are the M tokens.
      W: (N, K) frozen weight, in the dtype of x (any, under autocast), or a :class:`fdora.quant.QuantWeight`, which is dense in
        the dtype of x while forward or backward runs.
      A: (G, r, K), float32 or the dtype of W; with kernels G is at most 65,535, and r beside ``ranks`` at most 32,767.
      B: (G, N, r), float32 or the dtype of W.
      m: (G, N) magnitudes, float32 or the dtype of W; None is plain LoRA for all, ``g = 1``. For plain LoRA beside DoRA give
        such adapters a row of ones, here and in ``norm``: g is then 1 exactly.
      s: G numbers, or a float32 or float64 tensor (G,), which costs a GPU no copies. Not differentiated.
      offsets: (G,) int32 on the device of x: where the tokens of each adapter end, as in ``torch.nn.functional.grouped_mm``.
        Segments may be empty. Tokens behind the last end belong to no adapter. On a GPU the values are not looked at; they
        must not decrease or pass M.
      ids: (M,) or the leading axes of x, int64 or int32, instead of offsets: the adapter of each token in any order, -1 for
        none. Above G - 1 they are refused on a CPU and count as none on a GPU.
      norm: (G, N) float32 (or float64), from :func:`dora_norm` of the bank; None computes it, detached. A norm that was
        computed with a graph passes its gradient on.
      bias: (N,), added after g.
      dropout_p: probability in [0, 1) that an element of an adapter's input is dropped: one for all, or G of them, or a
        float32 or float64 tensor (G,), at whose values a GPU does not look.
      dropout_mode: "lora" or "peft", as for :func:`dora_linear`.
      seed: one int or int64 tensor for all, or G of them. Masks count tokens from the start of their adapter's segment (with
        ids, among its tokens): they are those of a call of its own. None draws G seeds.
      ranks: each adapter's own rank. Rows of A and columns of B beyond it are not read, and their gradients are 0. None reads
        all of r: padding of zeros gives the same numbers.
      compute: None, "fp8", "mxfp8" or "nvfp4" as of :func:`dora_linear`: x is rounded once, for the product of all tokens.
      grad_compute: the same of backward, for dx.
      backend: "auto", "eager" or "triton"; :func:`select_backend` tells what "auto" picks.

    Returns:
      (..., N), dtype and device of x. Gradients reach x, A, B, m, bias and a given norm, as for :func:`dora_linear`; those of
      an adapter without tokens are 0. Plain calls on a CPU give each adapter the bits of a call of its own.

    Raises:
      FdoraError: as for :func:`dora_linear`; not exactly one of offsets and ids is given, or their values cannot be; there is
        not one s, seed or rank for each adapter.
      NotImplementedError: a second derivative is asked for.

    Memory: keeps x, x @ A.T (M, r) and, for m, y itself or one (M, N) tensor in the dtype of x, by the rules of
    :func:`dora_linear`. On a GPU eager code runs each low-rank product over all tokens. Derivation: ``fdora/eager/multi.py``.
    References: Liu et al., DoRA, 2024, arXiv:2402.09353, eq. 5 and section 4.3; Zhu et al., LoRAFusion, 2025, arXiv:2510.00206.
    """
    fn, layer = "dora_linear_multi", DoraLayer(W, A, B, m, s, bias, norm)  # type: ignore[arg-type]
    of_each = check_sequence(fn, ranks)
    if check_multi(fn, x, layer, offsets, ids, of_each):
        from fdora.functional import _sharded

        check_left_out(fn, {"compute": compute is not None, "grad_compute": grad_compute is not None})
        rest: dict[str, Any] = {"offsets": offsets, "ranks": ranks, "backend": backend}
        return _sharded.multi(dora_linear_multi, x, layer, ids, dropout_p, **rest)
    drop, computes = (dropout_p, dropout_mode, seed), (compute, grad_compute)
    return multi(*prepared(fn, x, layer, (offsets, ids), of_each, drop, computes, backend))


def prepared(
    fn: str,
    x: Tensor,
    layer: DoraLayer,
    where: tuple[Tensor | None, Tensor | None],
    of_each: tuple[int, ...] | None,
    drop: tuple[Any, Literal["lora", "peft"], Any],
    computes: tuple[Any, Any],
    backend: Backend,
) -> tuple[Tensor, Operands, Tokens, Call]:
    """What :func:`fdora.autograd.multi.multi` takes, of arguments whose shapes were checked."""
    (W, A, B, m, s, bias, norm), (offsets, ids), (dropout_p, dropout_mode, seed) = layer, where, drop
    assert A is not None and B is not None
    x = cast_x(fn, x, W)
    G = A.shape[0]
    p, apart = ratios(fn, dropout_p, G, x, dropout_mode)
    mode = dropout_mode if p and m is not None else "lora"  # without m both mean the same
    of_each = None if of_each and min(of_each) == A.shape[1] else of_each  # nothing lies beyond: no table of ranks, no copies
    wrong = fault(offsets, ids, prod(x.shape[:-1]), G)
    if wrong:
        arg, want = ("ids", f"from -1 to {G - 1}") if offsets is None else ("offsets", "ends, in order, of segments of x")
        raise fail(fn, arg, want, wrong, "They say whose each token is.")
    if computes != (None, None):
        check_computes(computes, x, {fn: W}, mode)
    name = select_backend(x, backend=backend).name
    fp8 = on_gpu(fn, computes, x, name)
    check_kernels(fn, A, name, of_each)
    scale = scalings(fn, s, G, x)
    c = None
    if m is not None:
        c = in_sums(bank_norm(W, A, B, scale, of_each, name) if norm is None else norm, x)
    seeds = seeds_of(fn, seed, G, x.device) if p else None
    if seeds is not None and apart is not None:
        seeds = torch.cat([seeds, apart.view(torch.int64)])
    tokens = Tokens(scale, offsets) if ids is None else tokens_by(ids, scale, x, A, p, name)
    saves = save_for_dm(m, c, False) != "nothing"
    call = Call(of_each, p, saves, name, fn, False, mode, *fp8)
    return x, Operands(W, A, B, m, c, bias, seeds), tokens, call


def multi_together(x: Tensor, layers: Sequence[dict[str, Any]], offsets: Tensor, act: Any = None) -> Sequence[Tensor]:
    """y of each of these calls of :func:`dora_linear_multi` on one x; with ``act``, of two, (f(gate) up,).

    With kernels, layers of one product with W each are one node: it adds the dx of one to that of the next where that is
    written, and beside ``act`` never writes the gradients of gate and up. Others are a node each, and :func:`gated_act`.
    Memory: keeps x, and of each layer what its own call keeps; not f(gate) up.
    """
    if not are_one(x, layers, act):
        if act is None:
            return [dora_linear_multi(x, offsets=offsets, **of) for of in layers]
        gate, up = multi_together(x, layers, offsets)
        return (gated_act(gate, up, act, backend=layers[0].get("backend", "auto")),)
    fn, ready = "dora_linear_multi", []
    for of in layers:
        layer = DoraLayer(of["W"], of["A"], of["B"], of["m"], of["s"], of.get("bias"), of.get("norm"))
        drop: Any = of.get("dropout_p", 0.0), of.get("dropout_mode", "lora"), of.get("seed")
        ranks = check_sequence(fn, of.get("ranks"))
        check_multi(fn, x, layer, offsets, None, ranks)
        ready.append(prepared(fn, x, layer, (offsets, None), ranks, drop, (None, None), of.get("backend", "auto")))
    xs, operands, tokens, calls = zip(*ready, strict=True)
    return several(xs[0], operands, tokens, calls, act or "")


def are_one(x: Tensor, layers: Sequence[dict[str, Any]], act: Any) -> bool:
    """Whether one node computes these layers."""
    first, *rest = layers
    kinds = [(of.get("backend", "auto"), of["m"] is None, of.get("bias") is None) for of in layers]
    if any(kind != kinds[0] for kind in kinds) or not all(is_plain_product(x, of) for of in layers):
        return False
    if act is not None and (kinds[0][1:] != (False, True) or act not in ACTS or rest[0]["W"].shape != first["W"].shape):
        return False
    return OPS[select_backend(x, backend=kinds[0][0]).name].multi_gated_bwd is not None


def is_plain_product(x: Tensor, of: dict[str, Any]) -> bool:
    """Whether such a layer is one half-precision product with a dense W here, forward and backward."""
    W, m, p = of["W"], of["m"], of.get("dropout_p", 0.0)
    twice = of.get("dropout_mode") == "peft" and m is not None and (isinstance(p, Tensor) or p != 0)
    eight = isinstance(W, QuantWeight) or not of.keys().isdisjoint(("compute", "grad_compute"))
    return not (eight or twice or is_sharded(x, W, of["A"], of["B"], m)) and W.dtype.itemsize == 2


def check_multi(
    fn: str, x: Tensor, layer: DoraLayer, offsets: Tensor | None, ids: Tensor | None, ranks: tuple[int, ...] | None
) -> bool:
    """Everything but values and s. Whether they are DTensors, whose parts are checked in their turn."""
    W, A, B, m, _, bias, norm = layer

    def check() -> None:
        tensors = tensors_of(layer, x=x)
        if m is None:
            del tensors["m"]
            if norm is not None:
                raise fail(fn, "norm", "None without m", "a Tensor", "Plain LoRA has no norm: g is 1.")
        check_ranks(fn, ranks, check_bank(fn, tensors), tensors["A"].shape[1])
        check_one(fn, offsets, ids, "adapter")
        check_tensor(fn, *(("ids", ids) if offsets is None else ("offsets", offsets)))
        check_device(fn, "W", {"W": W, "offsets": offsets, "ids": ids})
        if offsets is not None:
            check_shapes(fn, {"A": "G r K", "offsets": "G"}, {"A": A, "offsets": offsets})
            check_dtype(fn, "offsets", offsets, (torch.int32,))
        elif ids is not None:
            lead = tuple(x.shape[:-1])
            check_dtype(fn, "ids", ids, (torch.int64, torch.int32))
            flat = ids.dim() == 1 and ids.shape[0] == prod(lead)  # one by one: compilers compare symbols, not tuples of them
            if not flat and tuple(ids.shape) != lead:
                raise fail(fn, "ids", f"{lead}, one for each token", tuple(ids.shape), "-1 is the layer without an adapter.")

    sharded = once(f"{fn} {ranks}", (x, W, A, B, m, offsets, ids, norm, bias), (), check)
    if not sharded:
        check_frozen(fn, "W", W)
    return sharded


def ratios(fn: str, p: Any, adapters: int, x: Tensor, mode: str = "lora") -> tuple[float, Tensor | None]:
    """What all adapters have; or something above 0, and (G,) float64. Numbers reach a GPU by fills."""
    check_dropout(fn, 0.0 if isinstance(p, (list, tuple, Tensor)) else p, mode)
    if not isinstance(p, (list, tuple, Tensor)):
        return float(p), None
    have = tuple(p.shape) if isinstance(p, Tensor) else len(p)
    if have not in (adapters, (adapters,)):
        raise fail(fn, "dropout_p", f"one, or {adapters}, one for each adapter", have, "Adapters may share a ratio.")
    if isinstance(p, Tensor):
        check_dtype(fn, "dropout_p", p, (torch.float32, torch.float64))
        check_device(fn, "x", {"x": x, "dropout_p": p})
        return APART, p.double()
    for each in p:
        check_dropout(fn, each, mode)
    if len(set(p)) == 1:
        return float(p[0]), None
    return APART, torch.stack([torch.full((), each, dtype=torch.float64, device=x.device) for each in p])


def seeds_of(fn: str, seed: Any, adapters: int, device: torch.device) -> Tensor:
    """(G,) int64."""
    if seed is None:
        return torch.randint(2**62, (adapters,), device=device)
    if isinstance(seed, Tensor) and seed.dim() == 1:
        checked(fn, seed, device)
        if seed.shape[0] == adapters:
            return seed
        seed = seed.unbind()
    if isinstance(seed, (list, tuple)):
        if len(seed) != adapters:
            raise fail(fn, "seed", f"one, or {adapters}, one for each adapter", len(seed), "Adapters may share a seed.")
        return torch.stack([seed_tensor(fn, each, device) for each in seed])
    return seed_tensor(fn, seed, device).expand(adapters)
