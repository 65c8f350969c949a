"""The Triton backend: facades that write plans (this folder), kernels (kernels/), and what runs a plan (runtime/)."""

import triton

if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 4):  # no tensor descriptors on the host
    raise ImportError(f"version {triton.__version__} is too old, fdora needs 3.4")

from fdora.triton import act as act
from fdora.triton import codes as codes
from fdora.triton import compose as compose
from fdora.triton import embedding as embedding
from fdora.triton import embedding_bwd as embedding_bwd
from fdora.triton import experts as experts
from fdora.triton import linear as linear
from fdora.triton import merge as merge
from fdora.triton import mlp as mlp
from fdora.triton import multi as multi
from fdora.triton import norm as norm
from fdora.triton import norm_bwd as norm_bwd
from fdora.triton import norm_kept as norm_kept
from fdora.triton import quant as quant
from fdora.triton import small_norm as small_norm
from fdora.triton import tree as tree
from fdora.triton.runtime import describe as describe
from fdora.triton.runtime import device as device
from fdora.triton.runtime import native as native
from fdora.triton.runtime import walk as walk
