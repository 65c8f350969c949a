"""The Triton backend: kernels behind the file names and signatures of :mod:`fdora.eager`."""

from fdora.triton import compose as compose
from fdora.triton import linear as linear
from fdora.triton import merge as merge
from fdora.triton import norm as norm
