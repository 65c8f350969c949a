"""Convolutions: ``y = g (conv(x, W) + s conv1(conv(x, A), B)) + bias``, one g for each output channel.

The update of a kernel is a product, s B A, if the kernel of one output channel is a row: c channels (those of its group) times
the points of the kernel. Row o of W is the kernel of channel o, and

    W (O, c, k...), A (r, c, k...), B (O, r, 1...)                  c = C / groups
    W (C, O / groups, k...), A (c, r, k...), B (O, r, 1...)         transposed

A makes r channels of each group's input, B mixes those into the group's outputs: every group has the whole of A, as
W' = W + s B A says, so the norm is that of ``rows``. PEFT's layers with groups have A (r, C, k...) and B (O, r / groups, 1...)
instead: an output channel has r / groups of the ranks, and these see all C channels of x. The weight in use is then dense:
``rows`` is W with zeros in the channels of the other groups, and B with zeros in the ranks of the others.

A has the geometry of W (stride, padding and its mode, dilation), or s B A would belong elsewhere than W.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange, repeat
from torch import Tensor

from fdora._records import Conv

CONV: tuple[Any, ...] = (F.conv1d, F.conv2d, F.conv3d)
TRANSPOSED: tuple[Any, ...] = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)


def halves(x: Tensor, W: Tensor, A: Tensor, B: Tensor, how: Conv) -> tuple[Tensor, Tensor]:
    """base = conv(x, W) and lora = conv1(conv(x, A), B), in the dtype of x and the memory format that torch gives them."""
    x, how = padded(x, W, how)
    base = _convolve(x, W.to(x.dtype), how, how.groups)
    A, B = A.to(x.dtype), B.to(x.dtype)
    apart = how.groups > 1 and not sees_all(W, A, how)
    if apart:
        A = repeat(A, "c r ... -> (G c) r ..." if how.transposed else "r c ... -> (G r) c ...", G=how.groups)
    h = _convolve(x, A, how, how.groups if apart else 1)
    return base, laid(_of_any(CONV[len(how.stride) - 1], h, B, 0, groups=how.groups), h, B)


def rows(W: Tensor, A: Tensor, B: Tensor, how: Conv) -> tuple[Tensor, Tensor, Tensor]:
    """W (O, K), A (r, K), B (O, r) of which the row norm is the one to divide by. Views, where the memory allows it."""
    G = how.groups
    B = B.flatten(1)
    if how.transposed:
        return rearrange(W, "(G c) o ... -> (G o) (c ...)", G=G), rearrange(A, "c r ... -> r (c ...)"), B
    if sees_all(W, A, how):
        eye = torch.eye(G, device=W.device, dtype=W.dtype)
        W = rearrange(W, "(G o) c ... -> G o 1 (c ...)", G=G) * rearrange(eye, "G H -> G 1 H 1")
        B = rearrange(B, "(G o) r -> G o 1 r", G=G) * rearrange(eye.to(B.dtype), "G H -> G 1 H 1")
        return rearrange(W, "G o H k -> (G o) (H k)"), A.flatten(1), rearrange(B, "G o H r -> (G o) (H r)")
    last = not W.is_contiguous() and W.movedim(1, -1).is_contiguous()  # any order of K will do that A has as well
    form = "O c ... -> O (... c)" if last else "O c ... -> O (c ...)"
    return rearrange(W, form), rearrange(A, form), B


def sees_all(W: Tensor, A: Tensor, how: Conv) -> bool:
    """Whether A reads all channels of x, where W reads those of a group: PEFT's layout."""
    return how.groups > 1 and not how.transposed and A.shape[1] != W.shape[1]


def padded(x: Tensor, W: Tensor, how: Conv) -> tuple[Tensor, Conv]:
    """x with its border, where torch's convolutions cannot make that themselves."""
    if how.padding_mode == "zeros":
        return x, how
    if how.padding == "valid":
        sides = [0] * (2 * len(how.stride))
    elif isinstance(how.padding, str):
        whole = [d * (k - 1) for d, k in zip(how.dilation, W.shape[2:], strict=True)]
        sides = [n for w in reversed(whole) for n in (w // 2, w - w // 2)]
    else:
        sides = [n for n in reversed(how.padding) for _ in range(2)]
    none = (0,) * len(how.stride)
    left = Conv(how.stride, none, how.dilation, how.groups, how.padding_mode, how.transposed, how.output_padding)
    return F.pad(x, sides, how.padding_mode), left


def _convolve(x: Tensor, W: Tensor, how: Conv, groups: int) -> Tensor:
    n = len(how.stride) - 1
    if how.transposed:
        y = _of_any(TRANSPOSED[n], x, W, 1, None, how.stride, how.padding, how.output_padding, groups, how.dilation)
    else:
        y = _of_any(CONV[n], x, W, 0, None, how.stride, how.padding, how.dilation, groups)
    return laid(y, x, W)


def _of_any(conv: Any, x: Tensor, W: Tensor, out: int, *how: Any, **groups: int) -> Tensor:
    """A convolution whose W, with output channels in dimension ``out``, may have no channels, as a shard of it: torch refuses
    these, so a channel of zeros is in their place."""
    if 0 not in W.shape[:2]:
        return conv(x, W, *how, **groups)
    space = [0, 0] * (W.dim() - 2)
    wide = F.pad(W, [*space, 0, int(W.shape[1] == 0), 0, int(W.shape[0] == 0)])
    y = conv(F.pad(x, [*space, 0, int(W.shape[1 - out] == 0)]), wide, *how, **groups)
    return y.narrow(1 - W.dim(), 0, W.shape[out])


def laid(y: Tensor, x: Tensor, W: Tensor) -> Tensor:
    """y where it has data; without, in the memory format of torch's convolutions, of which torch says nothing on meta."""
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(y.dim())
    if not y.is_meta or last is None:
        return y
    asked = any([not t.is_contiguous() and t.is_contiguous(memory_format=last) for t in (x, W)])
    return y.contiguous(memory_format=last) if asked else y


def planes(t: Tensor) -> Tensor:
    """(L, N, space...) as what compose takes: (L space, N) where the channels lie last, (L, N, space) where not."""
    last = t.movedim(1, -1)
    return last.flatten(0, -2) if last.is_contiguous() else t.flatten(2)


def unplanes(y: Tensor, like: Tensor) -> Tensor:
    """Undo :func:`planes`."""
    if y.dim() == 3:
        return y.reshape(like.shape)
    L, N, *space = like.shape
    return y.reshape(L, *space, N).movedim(-1, 1)
