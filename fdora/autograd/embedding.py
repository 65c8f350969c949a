"""Autograd of the adapted embedding."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fdora._records import Needs
from fdora._torch import apply, no_graph
from fdora.autograd._ops import OPS, autocast_off, gradients_of


def embedding(*args: Any) -> Tensor:
    """y; the arguments of Embedding.forward."""
    return Embedding.forward(*args) if no_graph() else apply(Embedding, *args)


class Embedding(torch.autograd.Function):
    """Keeps its arguments, and nothing else."""

    generate_vmap_rule = True

    @staticmethod
    def forward(ids, W, A, B, m, c, how, backend):
        with autocast_off(W):
            return OPS[backend].embedding_fwd(ids, W, A, B, m, c, how)

    @staticmethod
    def setup_context(ctx: Any, inputs, output):
        *tensors, ctx.how, ctx.backend = inputs
        ctx.save_for_backward(*tensors)

    @staticmethod
    def backward(ctx: Any, dy):
        needs = ctx.needs_input_grad[2:6]
        grads = gradients_of("dora_embedding", needs, _backward, dy, *ctx.saved_tensors, ctx.how, needs, ctx.backend)
        #      ids   W     A B m c  how   backend
        return None, None, *grads, None, None


def _backward(dy, ids, W, A, B, m, c, how, needs, backend):
    given = (dy, ids, W, A, B, m, c, how, Needs(*needs, False))
    found = OPS[backend].embedding_bwd(*given)
    return OPS["eager"].embedding_bwd(*given) if found is None else found
