"""Kernels, and nothing else: every function here is ``@triton.jit``."""
