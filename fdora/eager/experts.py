"""What stands around the products of experts: rows to their experts and back, and the gated activation of one product.

    spread    out_i = gate_p x_t          p = order_i, t = p // k: the pairs of a token and one of its k experts, sorted
    combine   out_t = sum_j gate_tj rows_place(t, j)          the other way; place is where a pair stands when they are sorted

Each is the gradient of the other. The gradient of gate_tj is dy_t . rows_place(t, j). Sums over j are in their order, in
acc_dtype, rounded once.

The activation takes z (M, 2 F), gate and up of each token: side by side, f(gate) up as in act.py; for "gpt_oss" in turns,

    a = (u + 1) v S(1.702 v)      v = min(gate, 7), u = min(max(up, -7), 7)      S(z) = 1 / (1 + e^-z)

where what was cut off has no gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fdora.eager._matmul import acc_dtype, cast
from fdora.eager.act import ACTS as PLAIN_ACTS
from fdora.eager.act import act_bwd, act_fwd

ACTS = (*PLAIN_ACTS, "gpt_oss")
SHARPNESS, LIMIT = 1.702, 7.0


def spread(x: Tensor, order: Tensor, gates: Tensor | None, k: int) -> Tensor:
    """x (T, N), order (T k,), gates (T, k) -> (T k, N)."""
    rows = x[order // k]
    if gates is None:
        return rows
    acc = acc_dtype(x.dtype)
    return cast(rows.to(acc) * gates.reshape(-1)[order, None].to(acc), x.dtype)


def combine(rows: Tensor, place: Tensor, gates: Tensor | None) -> Tensor:
    """rows (T k, N), place (T, k), gates (T, k) -> (T, N)."""
    acc = acc_dtype(rows.dtype)
    out = torch.zeros(place.shape[0], rows.shape[1], dtype=acc, device=rows.device)
    for j in range(place.shape[1]):
        part = rows[place[:, j]].to(acc)
        out = out + (part if gates is None else part * gates[:, j, None].to(acc))
    return cast(out, rows.dtype)


def gates_bwd(dy: Tensor, rows: Tensor, place: Tensor, dtype: torch.dtype) -> Tensor:
    """dy (T, N), rows (T k, N), place (T, k) -> (T, k)."""
    acc = acc_dtype(rows.dtype)
    found = [(dy.to(acc) * rows[place[:, j]].to(acc)).sum(1) for j in range(place.shape[1])]
    return cast(torch.stack(found, 1), dtype)


def gated_fwd(z: Tensor, act: str) -> Tensor:
    """(M, 2 F) -> (M, F) in its dtype."""
    if act != "gpt_oss":
        gate, up = z.chunk(2, 1)
        return act_fwd(gate, up, act)  # type: ignore[arg-type]
    acc = acc_dtype(z.dtype)
    gate, up = z[:, ::2].to(acc).clamp(max=LIMIT), z[:, 1::2].to(acc).clamp(-LIMIT, LIMIT)
    return cast((up + 1) * gate * torch.sigmoid(SHARPNESS * gate), z.dtype)


def gated_bwd(da: Tensor, z: Tensor, act: str) -> Tensor:
    """(M, F), (M, 2 F) -> (M, 2 F)."""
    if act != "gpt_oss":
        gate, up = z.chunk(2, 1)
        return torch.cat(act_bwd(da, gate, up, act), 1)  # type: ignore[arg-type]
    acc = acc_dtype(z.dtype)
    gate, up, d = z[:, ::2].to(acc), z[:, 1::2].to(acc), da.to(acc)
    v, u = gate.clamp(max=LIMIT), up.clamp(-LIMIT, LIMIT)
    share = torch.sigmoid(SHARPNESS * v)
    dgate = torch.where(gate > LIMIT, 0, d * (u + 1) * (share + SHARPNESS * v * share * (1 - share)))
    dup = torch.where((up > LIMIT) | (up < -LIMIT), 0, d * v * share)
    return cast(torch.stack([dgate, dup], 2).flatten(1), z.dtype)
