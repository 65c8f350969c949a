"""The truth: naive float64 DoRA over the full (N, K) weight. Shares no code with fdora."""

import torch
from einops import einsum
from torch.nn.functional import linear


def norm(W, A, B, s):
    V = W.double() + s * einsum(B.double(), A.double(), "N r, r K -> N K")
    return einsum(V, V, "N K, N K -> N").sqrt()


def scale(m, c):
    return m.double() / torch.where(c.double() < 1e-12, 1e-12, c.double())


def dora(x, W, A, B, m, s, bias=None, c=None, dropped=None, mode="lora"):
    """y in float64; differentiable by autograd in every tensor. c is detached unless given; dropped is D(x)."""
    x, W, A, B = (t.double() for t in (x, W, A, B))
    g = scale(m, norm(W, A, B, s).detach() if c is None else c)
    xd = x if dropped is None else dropped(x)
    base = einsum(x, W, "... K, N K -> ... N")
    lora = s * einsum(xd, A, B, "... K, r K, N r -> ... N")
    y = base + (g - 1) * einsum(xd, W, "... K, N K -> ... N") + g * lora if mode == "peft" else g * (base + lora)
    return y if bias is None else y + bias.double()


def naive(x, W, A, B, m, s, bias=None):
    """What a framework would write in the dtype of x: the error that any implementation in that dtype may have."""
    A, B = A.to(x.dtype), B.to(x.dtype)
    c = torch.linalg.vector_norm(W + s * (B @ A), dim=1).detach()
    y = (m.to(x.dtype) / c) * (linear(x, W) + s * linear(linear(x, A), B))
    return y if bias is None else y + bias.to(x.dtype)


def rounded(x, columns):
    """x to 3 bits of fraction of the scale of its run of columns, as e4m3 codes have them."""
    parts = []
    for part in x.double().split(columns, -1):
        a = part.abs().amax(-1, keepdim=True).float() / 448
        a = torch.where(a > 0, a, 1.0)
        v = (part.float() * (1 / a)).double()
        step = torch.exp2(v.abs().clamp_min(2.0**-6).log2().floor() - 3)
        parts.append((v / step).round() * step * a.double())
    return torch.cat(parts, -1)


def embedding(ids, W, A, B, m, s, axis=0, c=None, padding_idx=None, max_norm=None):
    """Rows of the dense table ``W' = g (W + s (B A)^T)`` in float64. c is detached unless given, and of W as it stands."""
    W, A, B, m = (t.double() for t in (W, A, B, m))
    delta = s * einsum(B, A, "d r, r V -> V d")
    table = W
    if max_norm is not None:
        size = W.norm(dim=1, keepdim=True)
        table = torch.where(size > max_norm, W * (max_norm / (size + 1e-7)), W)
    if c is None:
        c = ((W if axis == 0 else table) + delta).norm(dim=axis).detach()
    table = (table + delta) * scale(m, c).unsqueeze(axis)
    y = table[ids.long()]
    return y if padding_idx is None else torch.where((ids == padding_idx)[..., None], y.detach(), y)


def kernel(W, A, B, s, groups=1, transposed=False):
    """W + s B A in float64, each output channel by itself. Where A sees all channels the result is a kernel without groups."""
    W, A, B = (t.double() for t in (W, A, B))
    B = B.flatten(1)
    if transposed:
        c, out = W.shape[0] // groups, W.shape[1]
        V = W.clone()
        for o in range(out * groups):
            at = o // out * c
            V[at : at + c, o % out] = W[at : at + c, o % out] + s * einsum(B[o], A, "r, c r ... -> c ...")
        return V
    if A.shape[1] == W.shape[1]:
        return W + s * einsum(B, A, "O r, r c ... -> O c ...")
    out, c, r = W.shape[0] // groups, W.shape[1], B.shape[1]
    V = W.new_zeros(W.shape[0], c * groups, *W.shape[2:])
    for o in range(W.shape[0]):
        j = o // out
        V[o] = s * einsum(B[o], A[j * r : (j + 1) * r], "r, r C ... -> C ...")
        V[o, j * c : (j + 1) * c] += W[o]
    return V


def conv(x, W, A, B, m, s, bias=None, c=None, groups=1, transposed=False, padding_mode="zeros", padding=0, **geometry):
    """y of one convolution by the adapted kernel, in float64; x has a batch axis."""
    V, n = kernel(W, A, B, s, groups, transposed), W.dim() - 2
    dense = not transposed and V.shape[1] != W.shape[1]
    if c is None:
        per_output = V.unflatten(0, (groups, -1)).transpose(1, 2).flatten(0, 1) if transposed else V
        c = per_output.flatten(1).norm(dim=1).detach()
    x, padding = x.double(), 0 if padding == "valid" else padding
    if padding_mode != "zeros":
        if padding == "same":  # what is odd goes behind, as nn.Conv has it
            whole = [geometry.get("dilation", 1) * (k - 1) for k in reversed(W.shape[2:])]
            sides = [side for w in whole for side in (w // 2, w - w // 2)]
        else:
            sides = (
                [side for side in reversed(padding) for _ in range(2)] if isinstance(padding, tuple) else [padding] * (2 * n)
            )
        x, padding = torch.nn.functional.pad(x, sides, padding_mode), 0
    f = getattr(torch.nn.functional, f"conv{'_transpose' if transposed else ''}{n}d")
    y = f(x, V, padding=padding, groups=1 if dense else groups, **geometry)
    along = (1, -1, *[1] * n)
    y = scale(m, c).view(along) * y
    return y if bias is None else y + bias.double().view(along)


def experts(x, W, A, B, m, s, ends, bias=None, c=None):
    """Token by token, in float64."""
    rows = []
    for t in range(x.shape[0]):
        e = sum(t >= end for end in ends)
        if e == len(ends):
            rows.append(x.new_zeros(W.shape[1], dtype=torch.float64))
            continue
        extra = [None if v is None else v[e] for v in (bias, c)]
        rows.append(dora(x[t], W[e], A[e], B[e], m[e], s, *extra))
    return torch.stack(rows) if rows else x.new_zeros(0, W.shape[1], dtype=torch.float64)
