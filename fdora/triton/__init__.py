"""The Triton backend: kernels behind the file names and signatures of :mod:`fdora.eager`."""

import triton

if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 4):  # no tensor descriptors on the host
    raise ImportError(f"version {triton.__version__} is too old, fdora needs 3.4")

from fdora.triton import act as act
from fdora.triton import compose as compose
from fdora.triton import linear as linear
from fdora.triton import merge as merge
from fdora.triton import norm as norm
