"""The public functions: stateless, no module hierarchy. Validate, choose a backend, call; no arithmetic of their own.

W is (N, K), A (r, K), B (N, r), m (N,); s is alpha / r; c = ||W + s B A|| per row and g = m / c:

    y = g * (x W^T + s (x A^T) B^T) + bias            (Liu et al., DoRA, 2024, arXiv:2402.09353)
"""

from fdora.functional.backend import select_backend
from fdora.functional.compose import dora_compose, dora_delta
from fdora.functional.conv import dora_conv1d, dora_conv2d, dora_conv3d
from fdora.functional.embedding import dora_embedding
from fdora.functional.experts import dora_experts
from fdora.functional.experts_mlp import dora_experts_mlp
from fdora.functional.explain import Explanation, explain
from fdora.functional.group import dora_linear_group, dora_mlp
from fdora.functional.layer import DoraLayer
from fdora.functional.linear import dora_linear
from fdora.functional.merge import MergedWeight, dora_merge, dora_merge_quantized, dora_unmerge
from fdora.functional.multi import dora_linear_multi
from fdora.functional.norm import dora_base_sqnorm, dora_norm, dora_norm_state, dora_scale
from fdora.functional.norm_state import NormState, ShardNormState
from fdora.functional.params import DoraParams, dora_init, dora_stack, dora_unstack
from fdora.functional.tree import NormTreeState, dora_init_tree, dora_merge_tree, dora_norm_tree, dora_norm_tree_state

__all__ = [
    "DoraLayer",
    "DoraParams",
    "Explanation",
    "MergedWeight",
    "NormState",
    "NormTreeState",
    "ShardNormState",
    "dora_base_sqnorm",
    "dora_compose",
    "dora_conv1d",
    "dora_conv2d",
    "dora_conv3d",
    "dora_delta",
    "dora_embedding",
    "dora_experts",
    "dora_experts_mlp",
    "dora_init",
    "dora_init_tree",
    "dora_linear",
    "dora_linear_group",
    "dora_linear_multi",
    "dora_merge",
    "dora_merge_quantized",
    "dora_merge_tree",
    "dora_mlp",
    "dora_norm",
    "dora_norm_state",
    "dora_norm_tree",
    "dora_norm_tree_state",
    "dora_scale",
    "dora_stack",
    "dora_unmerge",
    "dora_unstack",
    "explain",
    "select_backend",
]
