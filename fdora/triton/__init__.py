"""The Triton backend: kernels behind the file names and signatures of :mod:`fdora.eager`. So far the norm has one."""

from fdora.triton import norm as norm
