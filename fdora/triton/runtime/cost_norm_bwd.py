"""As cost.py, for the gradients through the norm."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from fdora.triton.runtime.amount import Cost, moved, product


def _norm_terms(*, B, out, **_: Any) -> Cost:
    return moved(B, out)


def _norm_tokens(*, B, dz, out, NEED_A, **_: Any) -> Cost:
    return moved(B if NEED_A else None, dz, out)


def _norm_grams(*, dz, A, B, parts_A, parts_B, N, K, R, NEED_A, NEED_B, **_: Any) -> Cost:
    return product(R, R, NEED_A * N + NEED_B * K, A) + moved(dz, A if NEED_B else None, B if NEED_A else None, parts_A, parts_B)


def _norm_products(*, dz, w_left, gram_A, a, onto_A, dA, B, gram_B, onto_B, dB, N, K, R, **_: Any) -> Cost:
    both = product(R, K, N + R, a) + product(N, R, K + R, a)
    return both + moved(dz, w_left, w_left, gram_A, a, onto_A, dA, B, gram_B, onto_B, dB)


def _norm_grams_add(*, parts_A, parts_B, gram_A, gram_B, **_: Any) -> Cost:
    return moved(parts_A, parts_B, gram_A, gram_B)


def _norm_bwd_finish(*, parts, G, A, B, onto, out, N, K, R, OF_A, **_: Any) -> Cost:
    return product(R, K if OF_A else N, R, A) + moved(parts, G, A if OF_A else B, onto, out)


def _norm_pass(*, W, A, B, parts_A, parts_B, gram_A, gram_B, N, K, R, NEED_A, NEED_B, **_: Any) -> Cost:
    flops = product(N, K, R * (NEED_A + NEED_B), W) + product(R, R, NEED_A * N + NEED_B * K, A)
    return flops + moved(W, A, B, parts_A, parts_B, gram_A, gram_B)


def _norm_add(*, parts_A, parts_B, gram_A, gram_B, A, B, onto_A, onto_B, dA, dB, N, K, R, NEED_A, NEED_B, **_: Any) -> Cost:
    flops = product(R, NEED_A * K + NEED_B * N, R, A)
    return flops + moved(parts_A, parts_B, gram_A, gram_B, A, B, onto_A, onto_B, dA, dB)


NORM_BWD: dict[str, Callable[..., Cost]] = {
    "norm_add_kernel": _norm_add,
    "norm_bwd_finish_kernel": _norm_bwd_finish,
    "norm_grams_add_kernel": _norm_grams_add,
    "norm_grams_kernel": _norm_grams,
    "norm_pass_kernel": _norm_pass,
    "norm_products_kernel": _norm_products,
    "norm_terms_kernel": _norm_terms,
    "norm_tokens_kernel": _norm_tokens,
}
