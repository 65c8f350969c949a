"""The same model with its units in another order: the same function, and other sums in float32.

After some steps the errors of float32 models against float64 differ by far more than their gradients' do. Ten steps of two layers
at a rate of 0.2 put one process 1.2e-6 to 8.2e-6 off, in 24 orders of its units (root mean square 4.1e-6), and tensor parallelism in
four 1.1e-6 to 9.3e-6, in 20 (6.2e-6), though first gradients are 5e-7 to 7e-7 off in all of them. The loss is off in proportion: what
is left is one number, how far rounding has moved the model along the direction that these steps stretch most. A sum of very many
roundings, it is normal about 0. So twice one order's error is no bar: an equal exceeds it 3 times in 10, for the ratio is Cauchy's.
The ratio to the root mean square of n orders is Student's t with n degrees of freedom.
"""

from math import fsum

import torch

QUANTILES = {4: 4.604, 6: 3.707, 8: 3.355, 16: 2.921}  # |t| of n degrees of freedom is larger once in 100


def bar(errors):
    """What another order exceeds once in 100."""
    return QUANTILES[len(errors)] * (fsum(e * e for e in errors) / len(errors)) ** 0.5


@torch.no_grad()
def permuted(model, seed):
    """In place. The hidden units, and those between gate, up and down, of a Llama with adapters and an untied head."""
    draw = torch.Generator().manual_seed(seed)
    base = model.get_base_model()
    hidden = torch.randperm(base.config.hidden_size, generator=draw)
    for W in (base.model.embed_tokens.weight, base.lm_head.weight):
        W.copy_(W[:, hidden])
    base.model.norm.weight.copy_(base.model.norm.weight[hidden])
    for block in base.model.layers:
        inner = torch.randperm(base.config.intermediate_size, generator=draw)
        attention, mlp = block.self_attn, block.mlp
        for norm in (block.input_layernorm, block.post_attention_layernorm):
            norm.weight.copy_(norm.weight[hidden])
        for layer in (attention.q_proj, attention.k_proj, attention.v_proj, mlp.gate_proj, mlp.up_proj):
            columns(layer, hidden)
        for layer, order in ((attention.o_proj, hidden), (mlp.gate_proj, inner), (mlp.up_proj, inner), (mlp.down_proj, hidden)):
            rows(layer, order)
        columns(mlp.down_proj, inner)
    return model


def columns(layer, order):
    for t in (layer.base_layer.weight, layer.lora_A.default.weight):
        t.copy_(t[:, order])


def rows(layer, order):
    for t in (layer.base_layer.weight, layer.lora_B.default.weight, layer.lora_magnitude_vector.default.weight):
        t.copy_(t[order])
