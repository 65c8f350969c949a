"""Adapted convolutions of one, two and three axes, and transposed ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from torch import Tensor

from fdora._check import check_operands, check_rank, check_s, check_shapes, check_tensor, fail, is_sharded
from fdora._dispatch import Backend
from fdora._records import Conv
from fdora.autograd.conv import conv, conv_norm, rows
from fdora.functional.backend import select_backend
from fdora.functional.layer import DoraLayer, parts, tensors_of
from fdora.functional.linear import cast_x
from fdora.quant import QuantWeight

Numbers = int | Sequence[int]
MODES = ("zeros", "reflect", "replicate", "circular")
PaddingMode = Literal["zeros", "reflect", "replicate", "circular"]


def dora_conv1d(
    x: Tensor,
    W: Tensor,
    A: Tensor,
    B: Tensor,
    m: Tensor,
    *,
    s: float,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers | str = 0,
    dilation: Numbers = 1,
    groups: int = 1,
    padding_mode: PaddingMode = "zeros",
    transposed: bool = False,
    output_padding: Numbers = 0,
    backend: Backend = "auto",
) -> Tensor:
    """An adapted convolution along one axis: ``y = g * (conv(x, W) + s * conv(conv(x, A), B)) + bias``.

    As :func:`dora_conv2d`, with one axis of space.

    Args:
      x: (L, C, X) or (C, X).
      W: (O, C / groups, k); transposed (C, O / groups, k).
      A: (r, C / groups, k); transposed (C / groups, r, k).
      B: (O, r, 1).
      m: (O,).
      s, bias, norm, stride, padding, dilation, groups, padding_mode, transposed, output_padding, backend: as
        :func:`dora_conv2d`.

    Returns:
      (L, O, Y) or (O, Y), as :func:`dora_conv2d`.

    Raises:
      FdoraError: as :func:`dora_conv2d`.
      NotImplementedError: a second derivative is asked for.

    Memory: as :func:`dora_conv2d`. Derivation: ``fdora/eager/conv.py``.
    References: Liu et al., DoRA, 2024, arXiv:2402.09353, eq. 5.
    """
    how = stride, padding, dilation, groups, padding_mode, transposed, output_padding
    return _conv("dora_conv1d", 1, x, DoraLayer(W, A, B, m, s, bias, norm), how, backend)


def dora_conv2d(
    x: Tensor,
    W: Tensor,
    A: Tensor,
    B: Tensor,
    m: Tensor,
    *,
    s: float,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers | str = 0,
    dilation: Numbers = 1,
    groups: int = 1,
    padding_mode: PaddingMode = "zeros",
    transposed: bool = False,
    output_padding: Numbers = 0,
    backend: Backend = "auto",
) -> Tensor:
    """An adapted convolution along two axes: ``y = g * (conv(x, W) + s * conv(conv(x, A), B)) + bias``.

    ``g = m / ||W + s * B @ A||`` for each output channel, over its kernel as one row. Equal to one convolution with the kernel
    ``g * (W + s * B @ A)``, whatever the geometry: A has that of W. torch convolves, in the dtype of x; g, the sum and bias are
    float32, rounded once, in the memory format that the convolution gives (channels last stays so, nothing is copied). The
    tensors may be DTensors, and lie as docs/distributed.md has it.

    Args:
      x: (L, C, Y, X) or (C, Y, X), float16, bfloat16, float32 or float64.
      W: (O, C / groups, kY, kX) frozen kernel, in the dtype of x (any, under autocast); transposed (C, O / groups, kY, kX).
      A: (r, C / groups, kY, kX), float32 or the dtype of W; transposed (C / groups, r, kY, kX). With groups each group applies
        all of A to its own channels. Or (r, C, kY, kX), as PEFT has it: A reads all channels, and B is (O, r / groups, 1, 1).
      B: (O, r, 1, 1), float32 or the dtype of W.
      m: (O,), float32 or the dtype of W.
      s: LoRA scaling, usually alpha / r. Not differentiated.
      bias: (O,), added after g.
      norm: (O,) float32 (or float64); None computes it, detached. Not transposed, and with an A of C / groups channels, it is
        ``dora_norm(W.flatten(1), A.flatten(1), B.flatten(1), s=s)``.
      stride, dilation: a whole number, or one for each axis.
      padding: the same, or "same" or "valid".
      groups: as for F.conv2d.
      padding_mode: "zeros", "reflect", "replicate" or "circular", as nn.Conv2d has it.
      transposed: True is F.conv_transpose2d, with ``output_padding``; its padding is of zeros and a number.
      output_padding: as for F.conv_transpose2d.
      backend: "auto", "eager" or "triton", of the norm and of what follows the convolutions; :func:`select_backend` tells what
        "auto" picks.

    Returns:
      (L, O, Y, X) or (O, Y, X), dtype and device of x. Gradients reach x, A, B, m, bias and a given norm, each in its own
      dtype; those of x, A and B as torch's convolution computes them, in the dtype of x.

    Raises:
      FdoraError: shapes, dtypes or devices disagree, W requires grad or is quantised, s is not finite, or a number of the
        geometry is none that torch's convolution takes.
      NotImplementedError: a second derivative is asked for.

    Memory: keeps x, conv(x, A), and the two halves of y in the dtype of x. With PEFT's A and groups the norm is that of a
    kernel of all C channels, which is made for it. Derivation: ``fdora/eager/conv.py``.
    References: Liu et al., DoRA, 2024, arXiv:2402.09353, eq. 5.
    """
    how = stride, padding, dilation, groups, padding_mode, transposed, output_padding
    return _conv("dora_conv2d", 2, x, DoraLayer(W, A, B, m, s, bias, norm), how, backend)


def dora_conv3d(
    x: Tensor,
    W: Tensor,
    A: Tensor,
    B: Tensor,
    m: Tensor,
    *,
    s: float,
    bias: Tensor | None = None,
    norm: Tensor | None = None,
    stride: Numbers = 1,
    padding: Numbers | str = 0,
    dilation: Numbers = 1,
    groups: int = 1,
    padding_mode: PaddingMode = "zeros",
    transposed: bool = False,
    output_padding: Numbers = 0,
    backend: Backend = "auto",
) -> Tensor:
    """An adapted convolution along three axes: ``y = g * (conv(x, W) + s * conv(conv(x, A), B)) + bias``.

    As :func:`dora_conv2d`, with three axes of space.

    Args:
      x: (L, C, Z, Y, X) or (C, Z, Y, X).
      W: (O, C / groups, kZ, kY, kX); transposed (C, O / groups, kZ, kY, kX).
      A: (r, C / groups, kZ, kY, kX); transposed (C / groups, r, kZ, kY, kX).
      B: (O, r, 1, 1, 1).
      m: (O,).
      s, bias, norm, stride, padding, dilation, groups, padding_mode, transposed, output_padding, backend: as
        :func:`dora_conv2d`.

    Returns:
      (L, O, Z, Y, X) or (O, Z, Y, X), as :func:`dora_conv2d`.

    Raises:
      FdoraError: as :func:`dora_conv2d`.
      NotImplementedError: a second derivative is asked for.

    Memory: as :func:`dora_conv2d`. Derivation: ``fdora/eager/conv.py``.
    References: Liu et al., DoRA, 2024, arXiv:2402.09353, eq. 5.
    """
    how = stride, padding, dilation, groups, padding_mode, transposed, output_padding
    return _conv("dora_conv3d", 3, x, DoraLayer(W, A, B, m, s, bias, norm), how, backend)


CONV: tuple[Any, ...] = (dora_conv1d, dora_conv2d, dora_conv3d)


def _conv(fn: str, n: int, x: Tensor, layer: DoraLayer, asked: tuple[Any, ...], backend: Any) -> Tensor:
    W, A, B, m, s, bias, norm = parts(layer)
    if is_sharded(x, W, A, B, m, bias, norm):
        from fdora.functional import _sharded

        return _sharded.conv(CONV[n - 1], fn, n, x, layer, asked, backend)
    how = geometry(fn, n, asked)
    check_conv(fn, n, tensors_of(layer, x=x), how)
    check_s(fn, s)
    x = cast_x(fn, x, W)
    choice = select_backend(x, backend=backend)
    c = conv_norm(W, A, B, s, how, choice.name) if norm is None else norm
    y = conv(x if x.dim() == n + 2 else x[None], W, A, B, m, c, bias, s, how, choice.name)
    return y if x.dim() == n + 2 else y[0]


def kernel_rows(W: Tensor, A: Tensor, B: Tensor, groups: int) -> tuple[Tensor, Tensor, Tensor]:
    """W (O, K), A (r, K), B (O, r): their ``dora_norm`` is that of such a convolution. For integrations, which keep it."""
    n = W.dim() - 2
    return rows(W, A, B, Conv((1,) * n, (0,) * n, (1,) * n, groups, "zeros", False, (0,) * n))


def geometry(fn: str, n: int, asked: tuple[Any, ...]) -> Conv:
    """The same with a number for each axis."""
    stride, padding, dilation, groups, padding_mode, transposed, out = asked
    each = (("stride", stride, 1), ("padding", padding, 0), ("dilation", dilation, 1), ("output_padding", out, 0))
    found: dict[str, Any] = {}
    for arg, given, least in each:
        if arg == "padding" and isinstance(given, str) and not transposed:
            if given not in ("same", "valid"):
                raise fail(fn, arg, "'same', 'valid' or whole numbers", repr(given), "Pass what nn.Conv takes.")
            found[arg] = given
            continue
        numbers = (given,) * n if isinstance(given, int) else tuple(given) if isinstance(given, (tuple, list)) else (None,)
        if len(numbers) != n or not all(type(i) is int and i >= least for i in numbers):
            want = f"a whole number of at least {least}, or {n} of them"
            raise fail(fn, arg, want, repr(given), "Pass what nn.Conv takes.")
        found[arg] = numbers
    if found["padding"] == "same" and found["stride"] != (1,) * n:
        raise fail(
            fn, "padding", "a number where the stride is not 1", "'same'", "torch allows 'same' only with a stride of 1."
        )
    if type(groups) is not int or groups < 1:
        raise fail(fn, "groups", "a whole number of at least 1", repr(groups), "Pass what nn.Conv takes.")
    if padding_mode not in MODES or (transposed and padding_mode != "zeros"):
        want = "'zeros' with transposed=True" if transposed else f"one of {', '.join(MODES)}"
        raise fail(fn, "padding_mode", want, repr(padding_mode), "Pass what nn.Conv takes.")
    if not transposed and any(found["output_padding"]):
        raise fail(fn, "output_padding", "0 without transposed=True", repr(out), "Leave it out.")
    return Conv(groups=groups, padding_mode=padding_mode, transposed=transposed, **found)


def check_conv(fn: str, n: int, tensors: dict[str, Any], how: Conv) -> None:
    W, A, x = tensors["W"], tensors["A"], tensors["x"]
    if isinstance(W, QuantWeight):
        raise fail(fn, "W", "a tensor", "a QuantWeight", "Pass W.dequantize(): quantised kernels are not supported.")
    kernel, G, layout = " ".join(("kZ", "kY", "kX")[3 - n :]), how.groups, f"nn.Conv{n}d"
    if how.transposed:
        layout = f"nn.ConvTranspose{n}d"
        sizes = check_shapes(fn, {"W": f"C o {kernel}", "A": f"c r {kernel}"}, {"W": W, "A": A}, layout)
        C, O, c, fits = sizes["C"], sizes["o"] * G, sizes["c"], sizes["C"] == sizes["c"] * G
        both = fits
    else:
        sizes = check_shapes(fn, {"W": f"O c {kernel}", "A": f"r a {kernel}"}, {"W": W, "A": A}, layout)
        C, O, c, fits = sizes["c"] * G, sizes["O"], sizes["a"], sizes["a"] in (sizes["c"], sizes["c"] * G)
        both = c == sizes["c"]
    r = sizes["r"]
    if C % G or O % G:
        raise fail(fn, "groups", f"a divisor of the channels, {C} and {O}", G, "Pass what nn.Conv takes.")
    if not fits:
        want = f"of {C // G} channels (those of a group of `W`)"
        raise fail(fn, "A", want, f"{tuple(A.shape)}", f"Pass the A that belongs to this layer, in {layout} layout.")
    check_rank(fn, r)
    if not both and r % G:
        raise fail(fn, "A", f"of a rank that {G} groups divide, where it reads all channels", r, "Give it those of a group.")
    wanted = {"B": (O, r if both else r // G, *[1] * n), "m": (O,), "bias": (O,), "norm": (O,)}
    for arg, shape in wanted.items():
        t = tensors[arg]
        if t is None and arg in ("bias", "norm"):
            continue
        check_tensor(fn, arg, t)
        if tuple(t.shape) != shape:
            raise fail(fn, arg, f"{shape}", f"{tuple(t.shape)}", f"Pass the {arg} that belongs to this layer.")
    check_tensor(fn, "x", x)
    if x.dim() not in (n + 1, n + 2) or x.shape[-n - 1] != C:
        want = f"({C}, ...) or (L, {C}, ...) with {n} axes of space"
        raise fail(fn, "x", want, f"{tuple(x.shape)}", "Pass the x that belongs to this layer, channels first.")
    check_operands(fn, tensors)
