"""The eager backend: plain torch on any device and dtype, each forward beside its hand-written backward.

No op here uses ``alpha=`` or ``beta=``: Inductor drops them without a word. ``torch.add(u, a @ b, alpha=0.7)`` compiled
on a CPU computes u + a @ b (torch 2.13), and addmm before a pointwise op loses both on a GPU (pytorch issue 167313).
"""

from fdora.eager import act as act
from fdora.eager import compose as compose
from fdora.eager import conv as conv
from fdora.eager import embedding as embedding
from fdora.eager import experts as experts
from fdora.eager import fp8 as fp8
from fdora.eager import linear as linear
from fdora.eager import merge as merge
from fdora.eager import mlp as mlp
from fdora.eager import multi as multi
from fdora.eager import norm as norm
from fdora.eager import tree as tree
