"""The public functions: stateless, no module hierarchy. Validate, choose a backend, call; no arithmetic of their own.

W is (N, K), A (r, K), B (N, r), m (N,); s is alpha / r; c = ||W + s B A|| per row and g = m / c:

    y = g * (x W^T + s (x A^T) B^T) + bias            (Liu et al., DoRA, 2024, arXiv:2402.09353)
"""

from fdora.functional.backend import select_backend as select_backend
from fdora.functional.compose import dora_compose as dora_compose
from fdora.functional.compose import dora_delta as dora_delta
from fdora.functional.conv import dora_conv1d as dora_conv1d
from fdora.functional.conv import dora_conv2d as dora_conv2d
from fdora.functional.conv import dora_conv3d as dora_conv3d
from fdora.functional.embedding import dora_embedding as dora_embedding
from fdora.functional.experts import dora_experts as dora_experts
from fdora.functional.experts_mlp import dora_experts_mlp as dora_experts_mlp
from fdora.functional.explain import Explanation as Explanation
from fdora.functional.explain import explain as explain
from fdora.functional.group import DoraLayer as DoraLayer
from fdora.functional.group import dora_linear_group as dora_linear_group
from fdora.functional.linear import dora_linear as dora_linear
from fdora.functional.merge import MergedWeight as MergedWeight
from fdora.functional.merge import dora_merge as dora_merge
from fdora.functional.merge import dora_merge_quantized as dora_merge_quantized
from fdora.functional.merge import dora_unmerge as dora_unmerge
from fdora.functional.mlp import dora_mlp as dora_mlp
from fdora.functional.multi import dora_linear_multi as dora_linear_multi
from fdora.functional.norm import dora_base_sqnorm as dora_base_sqnorm
from fdora.functional.norm import dora_norm as dora_norm
from fdora.functional.norm import dora_scale as dora_scale
from fdora.functional.norm_state import NormState as NormState
from fdora.functional.norm_state import ShardNormState as ShardNormState
from fdora.functional.norm_state import dora_norm_state as dora_norm_state
from fdora.functional.params import DoraParams as DoraParams
from fdora.functional.params import dora_init as dora_init
from fdora.functional.stack import dora_stack as dora_stack
from fdora.functional.stack import dora_unstack as dora_unstack
from fdora.functional.tree import NormTreeState as NormTreeState
from fdora.functional.tree import dora_init_tree as dora_init_tree
from fdora.functional.tree import dora_merge_tree as dora_merge_tree
from fdora.functional.tree import dora_norm_tree as dora_norm_tree
from fdora.functional.tree import dora_norm_tree_state as dora_norm_tree_state

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
