"""Every message, word for word: function, argument, what was wanted, what came, what to do."""

import inspect
from itertools import product

import numpy as np
import pytest
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

import fdora
import fdora.functional as F
from fdora import FdoraError
from fdora._dispatch import choose
from fdora.functional.act import gated_act
from fdora.quant import QuantWeight, quantize
from tests.triton.drawn import NAMES, calls

N, K, r = 6, 5, 2
nan = float("nan")


def good(dtype=torch.float32):
    return {
        "x": torch.randn(3, K, dtype=dtype),
        "W": torch.randn(N, K, dtype=dtype),
        "A": torch.randn(r, K, dtype=dtype),
        "B": torch.randn(N, r, dtype=dtype),
        "m": torch.rand(N, dtype=dtype),
        "s": 2.0,
    }


def linear(**change):
    return F.dora_linear(**(good() | change))


def norm(**change):
    return F.dora_norm(**({n: good()[n] for n in ("W", "A", "B", "s")} | change))


def compose(**change):
    return F.dora_compose(**({"base": torch.randn(3, N), "lora": torch.randn(3, N), "g": torch.rand(N), "s": 2.0} | change))


def layer(**change):
    return F.DoraLayer(**({n: good()[n] for n in ("W", "A", "B", "m", "s")} | change))


def group(*layers, **extra):
    return F.dora_linear_group(good()["x"], layers, **extra)


def mlp(gate=None, up=None, down=None, **extra):
    back = layer(W=torch.randn(4, N), A=torch.randn(r, N), B=torch.randn(4, r), m=torch.rand(4))
    return F.dora_mlp(good()["x"], gate or layer(), up or layer(), back if down is None else down, **extra)


def embedding(**change):
    t = {"ids": torch.arange(3), "W": torch.randn(N, K), "A": torch.randn(r, N), "B": torch.randn(K, r), "m": torch.rand(K)}
    return F.dora_embedding(**(t | {"s": 2.0} | change))


def experts(**change):
    return F.dora_experts(**(good() | {n: torch.stack([good()[n]] * 2) for n in "WABm"} | change))


def multi(**change):
    bank = {n: torch.stack([good()[n]] * 2) for n in ("A", "B", "m")}
    return F.dora_linear_multi(**(good() | bank | {"s": [2.0, 2.0]} | change))


def conv(**change):
    t = {"x": torch.randn(1, 4, 5, 5), "W": torch.randn(6, 4, 3, 3), "A": torch.randn(2, 4, 3, 3), "B": torch.randn(6, 2, 1, 1)}
    return F.dora_conv2d(**(t | {"m": torch.rand(6), "s": 2.0} | change))


def nf4():
    return fdora.quant.quantize(torch.randn(64, 64), "nf4")


def wiped():
    t = good()
    t.pop("x")
    t["m"][3] = 0
    c = F.dora_norm(t["W"], t["A"], t["B"], s=2.0)
    return F.dora_unmerge(F.dora_merge(**t, norm=c), *(t[n] for n in "ABm"), s=2.0, norm=c)


MESSAGES = [
    # gamma and residual
    (lambda: linear(gamma=torch.rand(4)), "fdora.dora_linear: `gamma` must be (N,) with N=6 (from `W`), got (4,). Pass the gamma that belongs to this layer, in nn.Linear layout."),
    (lambda: linear(residual=torch.rand(N)), "fdora.dora_linear: `residual` must be (3, 6), as y is, got (6,). Expand it, or add it to y yourself."),
    (lambda: linear(residual=torch.rand(3, N).double()), "fdora.dora_linear: `residual` must be float32, as y is, got float64. Cast it, or add it to y yourself."),
    (lambda: linear(gamma=torch.rand(N), dropout_p=0.5, dropout_mode="peft"), "fdora.dora_linear: `gamma` must be None where dropout reaches the base product, got a Tensor with dropout_mode='peft'. Scale y and add to it yourself."),
    (lambda: linear(residual=1.0), "fdora.dora_linear: `residual` must be a torch.Tensor, got a float. Wrap it with torch.as_tensor."),
    # full DoRA
    (lambda: linear(W=quantize(torch.randn(N, K), "int8"), detach=False), "fdora.dora_linear: `detach` must be True for a quantised W, got False. Pass W.dequantize()."),
    (lambda: F.dora_linear_group(good()["x"], [layer(W=quantize(torch.randn(N, K), "int8"))], detach=False), "fdora.dora_linear_group: layers[0]: `detach` must be True for a quantised W, got False. Pass W.dequantize()."),
    # shapes
    (lambda: linear(A=torch.randn(K, r)), "fdora.dora_linear: `A` must be (r, K) with K=5 (from `W`), got (5, 2). Did you pass A transposed? Pass A.T."),
    (lambda: linear(m=torch.rand(N, 1)), "fdora.dora_linear: `m` must be (N,) with N=6 (from `W`), got (6, 1). Pass the m that belongs to this layer, in nn.Linear layout."),
    (lambda: linear(x=torch.tensor(1.0)), "fdora.dora_linear: `x` must be (..., K) with K=5 (from `W`), got (). Pass the x that belongs to this layer, in nn.Linear layout."),
    (lambda: linear(norm=torch.rand(4)), "fdora.dora_linear: `norm` must be (N,) with N=6 (from `W`), got (4,). It was computed for another weight: compute it again with dora_norm(W, A, B, s=s)."),
    (lambda: norm(base_sqnorm=torch.rand(4)), "fdora.dora_norm: `base_sqnorm` must be (N,) with N=6 (from `W`), got (4,). It was computed for another weight: compute it again with dora_base_sqnorm(W)."),
    (lambda: norm(W=torch.randn(N)), "fdora.dora_norm: `W` must be (N, K), got (6,). Pass the W that belongs to this layer, in nn.Linear layout."),
    (lambda: compose(lora=torch.randn(2, N)), "fdora.dora_compose: `lora` must be (3, 6) (the shape of `base`), got (2, 6). Compute both from the same x."),
    (lambda: linear(A=torch.randn(0, K), B=torch.randn(N, 0)), "fdora.dora_linear: `r` must be at least 1, got 0. A layer without an adapter is torch.nn.functional.linear."),
    (lambda: F.dora_init(torch.randn(N, K), 0), "fdora.dora_init: `r` must be at least 1, got 0. A layer without an adapter is torch.nn.functional.linear."),
    (lambda: F.dora_init(torch.randn(N, K), "8"), "fdora.dora_init: `r` must be an int of at least 1, got a str. Pass the rank of the adapter."),
    (lambda: F.dora_init(torch.randn(N, K), True), "fdora.dora_init: `r` must be an int of at least 1, got a bool. Pass the rank of the adapter."),
    (lambda: F.dora_init(torch.randn(N, K), 2, dtype=torch.int64), "fdora.dora_init: `dtype` must be None or a torch.dtype of float16, bfloat16, float32, float64, got int64. The default, None, trains well."),
    (lambda: F.dora_init(torch.randn(N, K), 2, dtype="bf16"), "fdora.dora_init: `dtype` must be None or a torch.dtype of float16, bfloat16, float32, float64, got a str. The default, None, trains well."),
    (lambda: F.dora_linear_group(None, [layer()]), "fdora.dora_linear_group: `x` must be a torch.Tensor, got None. It has no default."),
    (lambda: embedding(m=torch.rand(N)), "fdora.dora_embedding: `m` must be (d,) with d=5 (from `W`), got (6,). Pass the m that belongs to this layer, in nn.Embedding layout."),
    (lambda: embedding(norm=torch.rand(N)), "fdora.dora_embedding: `norm` must be (d,) with d=5 (from `W`), got (6,). It was computed for another weight: compute it again with dora_norm(W.T, A, B, s=s)."),
    (lambda: embedding(norm_axis=2), "fdora.dora_embedding: `norm_axis` must be 0 (a norm for each column) or 1 (for each row of the table), got 2. PEFT's is 0."),
    (lambda: embedding(ids=torch.rand(3)), "fdora.dora_embedding: `ids` must be int64 or int32, got float32. Pass row numbers, for example ids.long()."),
    (lambda: embedding(sparse=1), "fdora.dora_embedding: `sparse` must be a bool, got a int. Pass what nn.Embedding takes."),
    (lambda: torch.func.vmap(lambda B: embedding(B=B, sparse=True), randomness="same")(torch.randn(2, K, r)), "fdora.dora_embedding: `sparse` must be False under torch.func and torch.compile, got True. Sparse gradients do not work there."),
    (lambda: embedding(padding_idx=N), "fdora.dora_embedding: `padding_idx` must be None or the number of one of 6 rows, got 6. Pass what nn.Embedding takes."),
    (lambda: embedding(padding_idx=1.0), "fdora.dora_embedding: `padding_idx` must be None or the number of one of 6 rows, got a float. Pass what nn.Embedding takes."),
    (lambda: embedding(max_norm=0.0), "fdora.dora_embedding: `max_norm` must be None or a positive Python number, got 0.0. Pass what nn.Embedding takes."),
    (lambda: embedding(W=nf4()), "fdora.dora_embedding: `W` must be a tensor, got a QuantWeight. Pass W.dequantize(): quantised tables are not supported."),
    (lambda: conv(A=torch.randn(2, 3, 3, 3)), "fdora.dora_conv2d: `A` must be of 4 channels (those of a group of `W`), got (2, 3, 3, 3). Pass the A that belongs to this layer, in nn.Conv2d layout."),
    (lambda: conv(A=torch.randn(2, 4, 3)), "fdora.dora_conv2d: `A` must be (r, a, kY, kX) with kY=3 (from `W`), kX=3 (from `W`), got (2, 4, 3). Pass the A that belongs to this layer, in nn.Conv2d layout."),
    (lambda: conv(B=torch.randn(6, 2)), "fdora.dora_conv2d: `B` must be (6, 2, 1, 1), got (6, 2). Pass the B that belongs to this layer."),
    (lambda: conv(m=torch.rand(1, 6, 1, 1)), "fdora.dora_conv2d: `m` must be (6,), got (1, 6, 1, 1). Pass the m that belongs to this layer."),
    (lambda: conv(x=torch.randn(4, 5)), "fdora.dora_conv2d: `x` must be (4, ...) or (L, 4, ...) with 2 axes of space, got (4, 5). Pass the x that belongs to this layer, channels first."),
    (lambda: conv(groups=4), "fdora.dora_conv2d: `groups` must be a divisor of the channels, 16 and 6, got 4. Pass what nn.Conv takes."),
    (lambda: conv(groups=0), "fdora.dora_conv2d: `groups` must be a whole number of at least 1, got 0. Pass what nn.Conv takes."),
    (lambda: conv(stride=(1, 2, 3)), "fdora.dora_conv2d: `stride` must be a whole number of at least 1, or 2 of them, got (1, 2, 3). Pass what nn.Conv takes."),
    (lambda: conv(padding="full"), "fdora.dora_conv2d: `padding` must be 'same', 'valid' or whole numbers, got 'full'. Pass what nn.Conv takes."),
    (lambda: conv(padding="same", stride=2), "fdora.dora_conv2d: `padding` must be a number where the stride is not 1, got 'same'. torch allows 'same' only with a stride of 1."),
    (lambda: conv(padding_mode="mirror"), "fdora.dora_conv2d: `padding_mode` must be one of zeros, reflect, replicate, circular, got 'mirror'. Pass what nn.Conv takes."),
    (lambda: conv(padding_mode="circular", transposed=True), "fdora.dora_conv2d: `padding_mode` must be 'zeros' with transposed=True, got 'circular'. Pass what nn.Conv takes."),
    (lambda: conv(output_padding=1), "fdora.dora_conv2d: `output_padding` must be 0 without transposed=True, got 1. Leave it out."),
    (lambda: conv(x=torch.randn(1, 4, 5, 5).double()), "fdora.dora_conv2d: `x` must be float32, got float64. Cast it with x.to(torch.float32), or run under torch.autocast."),
    (lambda: conv(W=nf4()), "fdora.dora_conv2d: `W` must be a tensor, got a QuantWeight. Pass W.dequantize(): quantised kernels are not supported."),
    (lambda: conv(W=torch.randn(6, 2, 3, 3), A=torch.randn(3, 4, 3, 3), groups=2), "fdora.dora_conv2d: `A` must be of a rank that 2 groups divide, where it reads all channels, got 3. Give it those of a group."),
    # types and dtypes
    (lambda: linear(W=[[1.0]]), "fdora.dora_linear: `W` must be a torch.Tensor, got a list. Wrap it with torch.as_tensor."),
    (lambda: linear(W=torch.nn.Linear(K, N)), "fdora.dora_linear: `W` must be a torch.Tensor, got a Linear. Pass a tensor of it, as W.weight."),
    (lambda: linear(W=torch.ones(N, K, dtype=torch.int8)), "fdora.dora_linear: `W` must be float16 or bfloat16 or float32 or float64, got int8. Dequantise or cast it first."),
    (lambda: linear(x=torch.ones(3, K, dtype=torch.int64)), "fdora.dora_linear: `x` must be float16 or bfloat16 or float32 or float64, got int64. Cast it to the dtype of W."),
    (lambda: linear(x=torch.randn(3, K).bfloat16()), "fdora.dora_linear: `x` must be float32, got bfloat16. Cast it with x.to(torch.float32), or run under torch.autocast."),
    (lambda: F.dora_linear(**(good(torch.bfloat16) | {"B": torch.randn(N, r).half()})), "fdora.dora_linear: `B` must be float32 or bfloat16, got float16. Cast it, for example with B.to(torch.float32)."),
    (lambda: linear(norm=torch.rand(N).bfloat16()), "fdora.dora_linear: `norm` must be float32 or float64, got bfloat16. Keep it as dora_norm returns it."),
    (lambda: compose(g=torch.rand(N).bfloat16()), "fdora.dora_compose: `g` must be float32, got bfloat16. Keep it as dora_scale(m, c) returns it."),
    (lambda: compose(base=torch.ones(3, N, dtype=torch.int32)), "fdora.dora_compose: `base` must be float16 or bfloat16 or float32 or float64, got int32. Cast it to a floating dtype."),
    (lambda: F.dora_scale(torch.rand(N), torch.rand(N).half()), "fdora.dora_scale: `c` must be float32 or float64, got float16. Keep it as dora_norm returns it."),
    (lambda: F.dora_base_sqnorm(torch.ones(N, K, dtype=torch.uint8)), "fdora.dora_base_sqnorm: `W` must be float16 or bfloat16 or float32 or float64, got uint8. Dequantise it first."),
    # devices
    (lambda: linear(x=torch.empty(3, K, device="meta")), "fdora.dora_linear: `x` must be on cpu (the device of `W`), got meta. Move it with x.to('cpu')."),
    # frozen
    (lambda: linear(W=torch.randn(N, K).requires_grad_()), "fdora.dora_linear: `W` must be frozen, got requires_grad=True. Call W.requires_grad_(False) on the layer, or pass W.detach()."),
    (lambda: norm(base_sqnorm=torch.rand(N).requires_grad_()), "fdora.dora_norm: `base_sqnorm` must be frozen, got requires_grad=True. Call base_sqnorm.requires_grad_(False) on the layer, or pass base_sqnorm.detach()."),
    (lambda: torch.func.grad(lambda W: linear(W=W).sum())(torch.randn(N, K)), "fdora.dora_linear: `W` must be frozen, got requires_grad=True. Call W.requires_grad_(False) on the layer, or pass W.detach()."),
    # numbers
    (lambda: linear(s=nan), "fdora.dora_linear: `s` must be a finite Python number, got nan. Pass alpha / r, or alpha / sqrt(r) for rsLoRA."),
    (lambda: compose(s=torch.tensor(2.0)), "fdora.dora_compose: `s` must be a finite Python number, got a Tensor. Pass alpha / r as a float, for example s.item()."),
    (lambda: linear(s="2"), "fdora.dora_linear: `s` must be a finite Python number, got a str. Pass alpha / r."),
    (lambda: linear(dropout_p=1.0), "fdora.dora_linear: `dropout_p` must be in [0, 1), got 1.0. Pass the probability that an element is dropped."),
    (lambda: linear(dropout_p=nan), "fdora.dora_linear: `dropout_p` must be in [0, 1), got nan. Pass the probability that an element is dropped."),
    (lambda: linear(dropout_p="0.5"), "fdora.dora_linear: `dropout_p` must be a Python number, got a str. Pass the probability that an element is dropped."),
    (lambda: linear(dropout_p=True), "fdora.dora_linear: `dropout_p` must be a Python number, got a bool. Pass the probability that an element is dropped."),
    (lambda: linear(dropout_p=torch.tensor(0.5)), "fdora.dora_linear: `dropout_p` must be a Python number, got a Tensor. Pass the probability that an element is dropped."),
    (lambda: linear(dropout_p=0.1, dropout_mode="both"), "fdora.dora_linear: `dropout_mode` must be 'lora' or 'peft', got 'both'. PEFT's lora_dropout is 'peft'."),
    (lambda: linear(dropout_p=0.1, seed=7.9), "fdora.dora_linear: `seed` must be an int or an int64 tensor without axes, got a float. Pass a whole number: it alone decides the mask."),
    (lambda: linear(dropout_p=0.1, seed=True), "fdora.dora_linear: `seed` must be an int or an int64 tensor without axes, got a bool. Pass a whole number: it alone decides the mask."),
    (lambda: linear(dropout_p=0.1, seed="7"), "fdora.dora_linear: `seed` must be an int or an int64 tensor without axes, got a str. Pass a whole number: it alone decides the mask."),
    (lambda: group(layer(), dropout_p=0.1, seed=[7.9]), "fdora.dora_linear_group: `seed` must be an int or an int64 tensor without axes, got a float. Pass a whole number: it alone decides the mask."),
    (lambda: linear(dropout_p=0.1, seed=-1), "fdora.dora_linear: `seed` must be in [0, 2**63), got -1. Pass a non-negative int."),
    (lambda: linear(dropout_p=0.1, seed=torch.tensor(1.0)), "fdora.dora_linear: `seed` must be int64, got float32. Cast it, for example with seed.to(torch.int64)."),
    (lambda: linear(dropout_p=0.1, seed=torch.tensor(1, device="meta")), "fdora.dora_linear: `seed` must be on cpu (the device of `x`), got meta. Move it with seed.to('cpu')."),
    (lambda: linear(dropout_p=0.1, seed=torch.tensor([1])), "fdora.dora_linear: `seed` must be (), got (1,). Pass a tensor without axes, for example seed[0]."),
    (lambda: norm(max_bytes=100), "fdora.dora_norm: `max_bytes` must be at least 240 for these shapes, got 100. Raise it, or pass None."),
    (lambda: norm(state=F.dora_norm_state(torch.randn(N, K)), detach=False), "fdora.dora_norm: `state` must be None with detach=False, got a NormState. A norm that is reused has no gradient: detach it."),
    (lambda: norm(norm_axis=2), "fdora.dora_norm: `norm_axis` must be 1 (a norm for each output row) or 0 (for each input column), got 2. DoRA's is 1."),
    (lambda: norm(A=torch.randn(K, r), norm_axis=0), "fdora.dora_norm: `A` must be (r, K) with K=5 (from `W`), got (5, 2). Did you pass A transposed? Pass A.T."),
    (lambda: norm(squared=True, detach=False), "fdora.dora_norm: `squared` must be False with a state, a group or detach=False, got True with detach=False. Square the norm, or take the root, yourself."),
    (lambda: norm(squared=True, state=F.dora_norm_state(torch.randn(N, K))), "fdora.dora_norm: `squared` must be False with a state, a group or detach=False, got True with a state. Square the norm, or take the root, yourself."),
    (lambda: norm(state=torch.zeros(N)), "fdora.dora_norm: `state` must be a NormState, got a Tensor. Start with dora_norm_state(W)."),
    (lambda: norm(state=(1, 2)), "fdora.dora_norm: `state` must be a NormState, got a tuple. Start with dora_norm_state(W)."),
    (lambda: norm(state=F.dora_norm_state(torch.randn(N + 1, K))), f"fdora.dora_norm: `state.c` must be ({N},) float32 on cpu, got ({N + 1},) float32 on cpu. Start with dora_norm_state(W)."),
    (wiped, "fdora.dora_unmerge: `m` must not be 0 in a row that is to come back, got 0 in row 3. The merge wiped it out: restore it from a copy."),
    (lambda: F.dora_unmerge(*(good()[n] for n in "WABm"), s=2.0, norm=None), "fdora.dora_unmerge: `norm` must be that of the weight before the merge, got None. Keep dora_norm(W, A, B, s=s) when you merge."),
    # several layers
    (lambda: group(), "fdora.dora_linear_group: `layers` must be at least one DoraLayer, got none. Pass the layers that read x."),
    (lambda: F.dora_linear_group(good()["x"], (layer() for _ in range(2))), "fdora.dora_linear_group: `layers` must be a sequence of DoraLayers, got a generator. Write list(layers)."),
    (lambda: group(layer(), tuple(layer())), "fdora.dora_linear_group: layers[1]: `layer` must be a DoraLayer, got a tuple. Write DoraLayer(W, A, B, m, s=s)."),
    (lambda: group(layer(), layer(A=torch.randn(K, r))), "fdora.dora_linear_group: layers[1]: `A` must be (r, K) with K=5 (from `W`), got (5, 2). Did you pass A transposed? Pass A.T."),
    (lambda: group(layer(), F.DoraLayer(torch.randn(N, 7))), "fdora.dora_linear_group: layers[1]: `x` must be (..., K) with K=7 (from `W`), got (3, 5). Pass the x that belongs to this layer, in nn.Linear layout."),
    (lambda: group(layer(m=None)), "fdora.dora_linear_group: layers[0]: `m` must be a Tensor, as other parts of the adapter are given, got None. Give A, B, m and s, or none of them and no norm."),
    (lambda: group(F.DoraLayer(torch.randn(N, K), norm=torch.rand(N))), "fdora.dora_linear_group: layers[0]: `A` must be a Tensor, as other parts of the adapter are given, got None. Give A, B, m and s, or none of them and no norm."),
    (lambda: group(layer(s=None)), "fdora.dora_linear_group: layers[0]: `s` must be a finite Python number, got a NoneType. Pass alpha / r."),
    (lambda: group(layer(W=torch.randn(N, K).requires_grad_())), "fdora.dora_linear_group: layers[0]: `W` must be frozen, got requires_grad=True. Call W.requires_grad_(False) on the layer, or pass W.detach()."),
    (lambda: group(layer(), F.DoraLayer(torch.randn(N, K).double())), "fdora.dora_linear_group: layers[1]: `x` must be float64, got float32. Cast it with x.to(torch.float64), or run under torch.autocast."),
    (lambda: group(layer(), layer(), dropout_p=0.5, seed=3), "fdora.dora_linear_group: `seed` must be a list of 2 seeds, one for each layer, got a int. Layers that share a mask share a seed."),
    (lambda: group(layer(), dropout_p=0.5, seed=[1, 2]), "fdora.dora_linear_group: `seed` must be a list of 1 seeds, one for each layer, got 2. Layers that share a mask share a seed."),
    (lambda: mlp(up=layer(W=torch.randn(8, K), B=torch.randn(8, r), m=torch.rand(8))), "fdora.dora_mlp: `up.W` must be (F, K) with F=6 (from `gate.W`), K=5 (from `gate.W`), got (8, 5). Pass the up.W that belongs to this layer, in nn.Linear layout."),
    (lambda: mlp(down=layer()), "fdora.dora_mlp: `down.W` must be (N, F) with F=6 (from `gate.W`), got (6, 5). Did you pass down.W transposed? Pass down.W.T."),
    (lambda: mlp(down=layer().W), "fdora.dora_mlp: down: `layer` must be a DoraLayer, got a Tensor. Write DoraLayer(W, A, B, m, s=s)."),
    (lambda: gated_act(torch.ones(3, 4), torch.ones(2, 4)), "fdora.gated_act: `up` must be (3, 4), torch.float32 on cpu, as `gate` is, got (2, 4), torch.float32 on cpu. Compute both from the same x."),
    (lambda: gated_act(torch.ones(3, 4), torch.ones(3, 4), "relu"), "fdora.gated_act: `act` must be one of silu, gelu, gelu_tanh, got 'relu'. Compute other activations with torch."),
    (lambda: mlp(act="relu"), "fdora.dora_mlp: `act` must be one of silu, gelu, gelu_tanh, got 'relu'. Other activations need dora_linear for each layer."),
    # many adapters, experts
    (lambda: multi(offsets=torch.tensor([1, 3], dtype=torch.int32), ranks=2), "fdora.dora_linear_multi: `ranks` must be a sequence of ints, got a int. One for each adapter, at most the r of A."),
    (lambda: norm(max_bytes="1 GB"), "fdora.dora_norm: `max_bytes` must be at least 240 for these shapes, got 1 GB. Raise it, or pass None."),
    # trees
    (lambda: F.dora_init_tree(None, 4), "fdora.dora_init_tree: `weights` must be a nesting with (N, K) weights at its leaves, got None. Pass, for example, a dict of them."),
    (lambda: F.dora_norm_tree(None, None, s=1.0), "fdora.dora_norm_tree: `weights` must be a nesting with (N, K) weights at its leaves, got None. Pass, for example, a dict of them."),
    (lambda: F.dora_norm_tree_state(None), "fdora.dora_norm_tree_state: `weights` must be a nesting with (N, K) weights at its leaves, got None. Pass, for example, a dict of them."),
    # backends
    (lambda: linear(backend="cuda"), "fdora.backend: `backend` must be one of auto, eager, triton, got 'cuda'. Use 'auto' unless you compare backends."),
    (lambda: choose("cuda", torch.float32, "triton", "auto", ("eager",), "this or that"), "fdora.select_backend: `backend` must be one of eager here, got 'triton' (from the backend= argument). This or that. Ask for 'auto' there."),
    (lambda: choose("cpu", torch.float32, "auto", "triton", ("eager", "triton")), "fdora.select_backend: `backend` must be eager for tensors on cpu, got 'triton' (from fdora.backend or FDORA_BACKEND). Move them to a GPU, or ask for 'auto' there."),
    (lambda: choose("cuda", torch.float64, "triton", "auto", ("eager", "triton")), "fdora.select_backend: `backend` must be eager for torch.float64 tensors, got 'triton' (from the backend= argument). The kernels compute in float32: cast the tensors, or ask for 'auto' there."),
    (lambda: choose("cuda", torch.float64, "auto", "triton", ("eager", "triton")), "fdora.select_backend: `backend` must be eager for torch.float64 tensors, got 'triton' (from fdora.backend or FDORA_BACKEND). The kernels compute in float32: cast the tensors, or ask for 'auto' there."),
    (lambda: fdora.backend("fast").__enter__(), "fdora.backend: `name` must be one of auto, eager, triton, got 'fast'. Use 'auto' unless you compare backends."),
    (lambda: F.select_backend("cpu"), "fdora.select_backend: `dtype` must be a torch.dtype when `x` is a device, got None. Pass dtype=."),
]


@pytest.mark.parametrize(("call", "text"), MESSAGES, ids=[text.split(",")[0][6:60] for _, text in MESSAGES])
def test_message(call, text):
    with pytest.raises(FdoraError) as caught:
        call()
    assert str(caught.value) == text
    assert isinstance(caught.value, ValueError)


BROKEN = {
    "a list": torch.Tensor.tolist,
    "a module": lambda t: torch.nn.Linear(2, 2),
    "on meta": lambda t: t.to("meta"),
    "of int8": lambda t: t.to(torch.int8),
    "longer": lambda t: torch.cat([t, t[..., :1]], -1),
    "trained": torch.Tensor.requires_grad_,
}
NO_ERROR = {("experts", "offsets", "a list"), ("experts_mlp", "offsets", "a list")}
NO_ERROR |= {("embedding", "ids", "longer"), ("conv", "x", "longer"), ("merge", "W", "trained"), ("unmerge", "W", "trained")}


@pytest.mark.parametrize("name", NAMES)
def test_whatever_is_wrong_about_a_tensor_is_an_error_of_its_function(name):
    """Each tensor of each call, those of layers among them, and each number."""
    for fn, args, kwargs in calls(name, 6, dtypes=["fp32"], largest=12, layouts=("plain",)):
        names = inspect.signature(fn).parameters
        given, wrong = dict(zip(names, args, strict=False)) | kwargs, []
        for argument, value in given.items():
            leaves, spec = tree_flatten(value, is_leaf=lambda v: isinstance(v, QuantWeight))
            for (i, t), (what, broken) in product(enumerate(leaves), BROKEN.items()):
                may_be = (name, argument, what) in NO_ERROR or (what == "trained" and argument != "W")
                if isinstance(t, torch.Tensor) and t.dim() and t.numel() and not may_be:
                    wrong.append({argument: tree_unflatten([*leaves[:i], broken(t.detach()), *leaves[i + 1 :]], spec)})
        fn(**given)
        for change in [*wrong, *({n: v} for n, v in (("s", nan), ("dropout_p", 1.5)) if n in names)]:
            with pytest.raises(FdoraError, match=f"^fdora.{fn.__name__}: "):
                fn(**given | change)


def test_dtensor_is_refused_by_name():
    """Where no part of it would do."""

    class DTensor(torch.Tensor):
        pass

    A = torch.randn(r, K).as_subclass(DTensor)
    with pytest.raises(FdoraError, match=r"`A` must be a plain tensor, got a DTensor. Call .full_tensor\(\) on it"):
        F.dora_merge_quantized(quantize(torch.randn(N, 64), "nf4"), A, *(good()[n] for n in "Bm"), s=1.0)
    with pytest.raises(FdoraError, match=r"explain: `args` must be plain tensors, got a DTensor. Ask for one process"):
        F.explain(F.dora_linear, **(good() | {"A": A}))


def test_a_weight_that_requires_grad_is_fine_where_no_gradient_flows():
    W = torch.nn.Parameter(torch.randn(N, K))
    with torch.no_grad():
        linear(W=W), norm(W=W)
    F.dora_init(W, r)
    F.dora_merge(W, *(good()[n] for n in "ABm"), s=2.0)


def test_nothing_to_do_is_not_an_error():
    assert linear(x=torch.randn(0, K)).shape == (0, N)
    assert linear(x=torch.randn(2, 0, 3, K)).shape == (2, 0, 3, N)
    assert norm(W=torch.randn(0, K), B=torch.randn(0, r)).shape == (0,)
    assert linear(s=2).dtype == torch.float32  # a whole number is a number


def test_any_kind_of_whole_number_is_a_seed():
    x, want = torch.randn(3, K), good()
    masks = [linear(**want | {"x": x}, dropout_p=0.5, seed=seed) for seed in (7, np.int64(7), torch.tensor(7))]
    assert torch.equal(masks[0], masks[1]) and torch.equal(masks[0], masks[2])
