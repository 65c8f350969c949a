"""The whole layer in one call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from fdora._check import check_dtype, check_left_out, check_weights, fail, is_number, name, once
from fdora._dispatch import Backend
from fdora._recording import active
from fdora._records import Dropout, DropoutMode, NormOf, Operands, Options, SaveForDm, acc_dtype
from fdora._torch import functorch_active
from fdora.autograd.node import Call, layers
from fdora.autograd.norm import row_norm, with_gradient
from fdora.autograd.weight import forms_norm, norm_beside
from fdora.functional._epilogue import check_epilogue, folded, loses_inner
from fdora.functional._seed import check_origin, placed, seed_tensor
from fdora.functional.backend import select_backend
from fdora.functional.layer import DoraLayer, tensors_of
from fdora.quant import Codes8, QuantWeight


def dora_linear(
    x: Tensor,
    W: Tensor | QuantWeight,
    A: Tensor,
    B: Tensor,
    m: Tensor,
    *,
    s: float,
    bias: Tensor | None = None,
    gamma: Tensor | None = None,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    dropout_p: float = 0.0,
    dropout_mode: Literal["lora", "peft"] = "lora",
    seed: int | Tensor | None = None,
    mask_origin: tuple[int, int] | None = None,
    keep_inner: bool = False,
    detach: bool = True,
    compute: Literal["fp8", "mxfp8", "nvfp4"] | None = None,
    grad_compute: Literal["fp8", "mxfp8"] | None = None,
    backend: Backend = "auto",
) -> Tensor:
    """A DoRA layer: ``y = g * (x @ W.T + s * (x @ A.T) @ B.T) + bias`` with ``g = m / ||W + s * B @ A||`` per row.

    With gamma and residual, which LayerScale and the caller's sum are: ``gamma * (g * (...) + bias) + residual``.
    Products run in the dtype of x with float32 accumulation; g, bias and the sums are float32, rounded once. Under
    torch.autocast x is cast to the autocast dtype first, and y has that dtype. The tensors may be DTensors, and
    so is y then: ``docs/distributed.md`` says how they may lie.

    Args:
      x: (..., K), float16, bfloat16, float32 or float64.
      W: (N, K) frozen weight, in the dtype of x (any, under autocast); or a :class:`fdora.quant.QuantWeight` that stands for
        that dtype, which is dense in the dtype of x only while forward or backward reads it.
      A: (r, K), float32 or the dtype of W.
      B: (N, r), float32 or the dtype of W.
      m: (N,) magnitude, float32 or the dtype of W.
      s: LoRA scaling, usually alpha / r. Not differentiated.
      bias: (N,), added after g, as PEFT does.
      gamma: (N,), float16, bfloat16, float32 or float64, multiplies the whole layer: m and bias take it up, exactly.
      residual: (..., N) in the dtype of y, added last.
      norm: (N,) float32 (or float64), c of :func:`dora_norm` for these W, A, B and s; None computes it, detached. A norm
        that was computed with ``detach=False`` passes its gradient on.
      dropout_p: probability in [0, 1) that an element of x is dropped; pass 0 in evaluation.
      dropout_mode: "lora" drops the adapter's input only: ``g * (x W^T + s D(x) A^T B^T) + bias``. "peft" drops it for
        the correction of the base too: ``x W^T + (g - 1) D(x) W^T + g s D(x) A^T B^T + bias``.
      seed: int, or int64 tensor without axes, that alone decides the mask. None draws one from torch's generator.
        Under vmap, map over a tensor of seeds; one shared seed gives every mapped element the same mask.
      mask_origin: None, or (t0, k0): x is a part of a larger input, whose token t0 and column k0 are its first. The mask is
        the one of the larger input there, however that is cut.
      keep_inner: keep ``base + s * lora`` for the gradient of m even where the output would do. Needed when you change y
        in place before backward (autograd says so).
      detach: True treats c as a constant, as DoRA does to save memory. False lets gradients reach A and B through c as well, in
        low-rank form, of a computed norm or of the value of a given one.
      compute: None, or "fp8" for a half-precision x and a W of e4m3 codes (:func:`fdora.quant.from_fp8`): forward rounds x to
        e4m3, with a scale for each token (for 128 columns of one where W has scales of blocks), and multiplies the codes: about
        2.6 % of the base product are lost. The low-rank term reads x itself; backward is in the dtype of x, on the decoded W.
        On a GPU up to 32 tokens (64 where W has scales of blocks) are multiplied by the decoded W, which is faster, and so are
        shapes without a kernel. "mxfp8":
        W has e8m0 scales of 32 columns each, and x gets such; Blackwell's tensor cores multiply with them. "nvfp4": W is of
        that kind, and x gets e2m1 codes with an e4m3 scale for each 16, and a float32 one for a token, which loses about 10 %.
        Neither ever ran on a GPU.
      grad_compute: "fp8" does the same in backward, for the same x and W: dz = g dy is rounded to e4m3 for dx's product with
        W, which loses about as much. The gradients of A, B, m and bias read dz itself. A GPU that is neither sm_90 nor sm_100
        decodes W. "mxfp8" likewise on Blackwell: W's codes get scales of 32 rows; under dropout W is decoded.
      backend: "auto", "eager" or "triton"; :func:`select_backend` tells what "auto" picks.

    Returns:
      (..., N), dtype and device of x. Gradients reach x, A, B, m, bias, gamma, residual and a given norm, each in its own
      dtype, and only those that need one are computed.

    Raises:
      FdoraError: shapes, dtypes or devices disagree, W requires grad, s is not finite, dropout_p is outside [0, 1), mask_origin
        is no pair of positions, W is quantised with detach=False, gamma or residual meets dropout_mode "peft", residual meets
        compute or grad_compute, or these do not know such a W, x, dropout or GPU.
      NotImplementedError: a second derivative is asked for.

    Memory: keeps x, x @ A.T (M, r) and, for m, y itself; of a quantised W what is stored. With a bias, under dropout_mode
    "peft" and in float32 on a GPU it keeps one more (M, N) tensor in the dtype of x; the eager backend always on a GPU and in
    traced code, on a CPU not for a bias in float32 and float64: where y - bias has too few digits, backward forms the
    products again. With a residual, or a gamma in float16, that tensor takes the place of y.
    Derivation: ``fdora/eager/linear.py``, kernels: ``fdora/triton/linear.py``.
    References: Liu et al., DoRA, 2024, arXiv:2402.09353, eq. 5 and section 4.3 (c is detached).
    """
    fn, layer = "dora_linear", DoraLayer(W, A, B, m, s, bias, norm)
    if check_layer(fn, x, layer):
        from fdora.functional import _sharded

        check_dropout(fn, dropout_p, dropout_mode)
        check_left_out(fn, {"gamma": gamma is not None, "residual": residual is not None, "detach": not detach})
        options: dict[str, Any] = {"dropout_mode": dropout_mode, "keep_inner": keep_inner, "backend": backend}
        options |= {"compute": compute, "grad_compute": grad_compute}
        return _sharded.linear(dora_linear, x, layer, dropout_p, seed, mask_origin, **options)
    x = cast_x(fn, x, W)
    check_dropout(fn, dropout_p, dropout_mode)
    mode = dropout_mode if dropout_p else "lora"
    if gamma is not None or residual is not None:
        check_epilogue(fn, x, W, gamma, residual, mode, compute or grad_compute)
        keep_inner = keep_inner or loses_inner(x.dtype, gamma, residual)
        m, bias = folded(x.dtype, gamma, m, bias)

    if compute is not None or grad_compute is not None:
        check_computes((compute, grad_compute), x, {fn: W}, mode)
    choice = select_backend(x, backend=backend).name
    fp8, fp8_grad = on_gpu(fn, (compute, grad_compute), x, choice)
    full = not detach and residual is None
    if not full:
        c = norm_for(fn, x, layer, choice, detach, formed=not fp8)
    else:  # c goes in as a constant: the layer's own node takes its gradient on
        check_detach(fn, W)
        c = in_sums(row_norm(NormOf(W, A, B, s), choice) if norm is None else norm.detach(), x)
    mask_seed = placed(seed_tensor(fn, seed, x.device), check_origin(fn, mask_origin)) if dropout_p else None
    make = _call if torch.compiler.is_compiling() else _remembered_call
    through = full and (A.requires_grad or B.requires_grad)
    call = make(s, save_for_dm(m, c, keep_inner, through), dropout_p, mode, choice, full, fp8, fp8_grad, residual is not None)
    return layers(x, (Operands(W, A, B, m, c, bias, mask_seed),), call, residual)[0]


def _call(
    s: float, save: SaveForDm, p: float, mode: DropoutMode, backend: str, full: bool, fp8: bool, fp8_grad: bool, residual: bool
) -> Call:
    return Call((Options(s, save),), Dropout(p, mode), backend, None, full, fp8, fp8_grad, residual)


_remembered_call = lru_cache(1024)(_call)  # three records in the time of one look-up


def check_layer(fn: str, x: Tensor, layer: DoraLayer) -> bool:
    """Whether they are DTensors, whose parts are checked in their turn."""
    W, A, B, m, s, bias, norm = layer
    tensors = (x, W, A, B, m, bias, norm)
    return once(fn, tensors, (s,), lambda: check_weights(fn, tensors_of(layer, x=x), s), W=W)


def cast_x(fn: str, x: Tensor, W: Any) -> Tensor:
    """x as torch.autocast would hand it to a matrix product; without autocast it has the dtype of W already."""
    dtype = dtype_of_products(fn, x, W)
    return x if x.dtype == dtype else x.to(dtype)


def dtype_of_products(fn: str, x: Tensor, W: Any) -> torch.dtype:
    device = x.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        if x.dtype != W.dtype and not ((noted := active()) and noted.autocast):
            check_dtype(fn, "x", x, (W.dtype,), f"Cast it with x.to({W.dtype}), or run under torch.autocast.")
        return x.dtype
    return x.dtype if x.dtype == torch.float64 else torch.get_autocast_dtype(device)


def check_dropout(fn: str, p: float, mode: str) -> None:
    if mode not in ("lora", "peft"):
        raise fail(fn, "dropout_mode", "'lora' or 'peft'", repr(mode), "PEFT's lora_dropout is 'peft'.")
    if not is_number(p):
        have = f"a {type(p).__name__}"
        raise fail(fn, "dropout_p", "a Python number", have, "Pass the probability that an element is dropped.")
    if not 0 <= p < 1:
        raise fail(fn, "dropout_p", "in [0, 1)", p, "Pass the probability that an element is dropped.")


def dropout_of(p: float, mode: DropoutMode) -> Dropout:
    return Dropout(p, mode if p else "lora")


def norm_for(fn: str, x: Tensor, layer: DoraLayer, backend: str, detach: bool, formed: bool) -> Tensor | None:
    """c as a layer on x takes it; None where its plan forms it, if it may be ``formed`` there. Without ``detach`` it has
    gradients to A and B: of a given norm the value is taken."""
    W, A, B, _, s, _, c = layer
    assert A is not None and B is not None and s is not None
    if not detach:
        check_detach(fn, W)
        c = row_norm(NormOf(W, A, B, s), backend, False) if c is None else with_gradient(c, W, A, B, s, backend)  # type: ignore[arg-type]
    elif c is None:
        if formed and (forms_norm(W, backend) or norm_beside(x, W, A, B, backend)):
            return None
        c = row_norm(NormOf(W, A, B, s), backend)
    return in_sums(c, x)


def in_sums(c: Tensor, x: Any) -> Tensor:
    """In the dtype in which products of x are summed."""
    return c if c.dtype == torch.float32 and x.dtype != torch.float64 else c.to(acc_dtype(x.dtype))


def attached(fn: str, c: Tensor, W: Any, A: Tensor, B: Tensor, s: float, backend: str) -> Tensor:
    """A norm that was kept, with gradients to A and B: for integrations."""
    check_detach(fn, W)
    return with_gradient(c, W, A, B, s, backend)


def check_detach(fn: str, W: Any) -> None:
    """For detach=False."""
    if isinstance(W, QuantWeight):
        raise fail(fn, "detach", "True for a quantised W", "False", "Pass W.dequantize().")


def save_for_dm(m: Tensor | None, c: Tensor | None, pre_scale: bool, through: bool = False) -> SaveForDm:
    """For the gradients of m and c; see :mod:`fdora.eager.linear`. ``through``: that of c is wanted anyway. Within vmap an m
    does not say what a grad around it asks."""
    asked = m is not None and (m.requires_grad or through or (c is not None and c.requires_grad) or functorch_active())
    return saved_as(torch.is_grad_enabled() and asked, pre_scale)


def saved_as(anything: bool, pre_scale: bool) -> SaveForDm:
    if not anything:
        return "nothing"
    return "pre_scale" if pre_scale else "output"


HALF = (torch.float16, torch.bfloat16)
COMPUTES = ("compute", "grad_compute")
BLACKWELL = {"mxfp8": "fdora.quant.from_mxfp8(codes, scale)", "nvfp4": "fdora.quant.quantize(W, 'nvfp4')"}


def check_computes(asked: Sequence[Any], x: Tensor, weights: dict[str, Any], mode: str) -> None:
    """Products of 8-bit numbers: where each W has them. x is cast. ``weights``: by what errors call their layers."""
    for of, compute in zip(COMPUTES, asked, strict=True):
        for fn, W in weights.items() if compute is not None else ():
            _check_compute(fn, of, compute, x, W, mode)


def _check_compute(fn: str, of: str, compute: Any, x: Tensor, W: Any, mode: str) -> None:
    known = ("fp8", *BLACKWELL) if of == "compute" else ("fp8", "mxfp8")
    if compute not in known:
        want = f"{', '.join(map(repr, (None, *known[:-1])))} or {known[-1]!r}"
        raise fail(fn, of, want, repr(compute), "None multiplies in the dtype of x.")
    facts: Any = getattr(W, "facts", None)
    scaled = compute in BLACKWELL
    have = f"{compute!r} with {f'one of kind {W.kind}' if isinstance(W, QuantWeight) else 'a tensor'}"
    if scaled and getattr(W, "kind", "") != compute:
        remedy = f"Pass {BLACKWELL[compute]} for W."
        raise fail(fn, of, f"None for a W that is not {compute.upper()}", have, remedy)
    if not scaled and not (isinstance(facts, Codes8) and facts.code == "e4m3" and facts.unit == 1.0):
        raise fail(fn, of, "None for a W that is not of e4m3 codes", have, "Pass fdora.quant.quantize(W, 'fp8') for W.")
    if not scaled and facts.scale == "block" and facts.block[1] % 128:
        raise fail(fn, of, "None for scales of so few columns", f"'fp8' with {facts.block}", "Blocks of 128 are served.")
    if x.dtype not in HALF:
        raise fail(fn, of, "None for an x that is not half precision", f"{compute!r} with {name(x.dtype)}", "Cast x and W.")
    if mode == "peft":
        remedy = "It would round two inputs: drop the adapter's alone, with dropout_mode='lora'."
        raise fail(fn, of, "None for dropout_mode='peft'", repr(compute), remedy)


def least_of(asked: Sequence[Any]) -> tuple[int, int]:
    """The first GPUs that have such products."""
    return (10, 0) if any(compute in BLACKWELL for compute in asked) else (8, 9)


def on_gpu(fn: str, asked: Sequence[Any], x: Tensor, backend: str) -> tuple[bool, bool]:
    """Which of them are asked for, where the GPU of x has such products."""
    compute, grad = asked[0] is not None, asked[1] is not None
    if (compute or grad) and backend == "triton" and x.device.type == "cuda":
        least = least_of(asked)
        if torch.version.hip or torch.cuda.get_device_capability(x.device) < least:
            gpu, at = torch.cuda.get_device_name(x.device), int(not compute)
            remedy = f"It needs an NVIDIA GPU of sm_{least[0]}{least[1]} or newer."
            raise fail(fn, COMPUTES[at], "None on this GPU", f"{asked[at]!r} on {gpu}", remedy)
    return compute, grad
