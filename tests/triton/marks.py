"""Where a test of kernels can run."""

import os

import pytest
import torch

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
# conditions are evaluated in the module that carries the mark, after --device was read
needs_kernels = pytest.mark.skipif(
    "device.NAME == 'cpu' and not INTERPRETED",
    reason="needs --device cuda or TRITON_INTERPRET=1; `make test` runs both ways it can",
)
needs_gpu = pytest.mark.skipif("device.NAME == 'cpu'", reason="needs a GPU; runs with --device cuda on a machine with one")
# The interpreter of Triton 3.6 multiplies bf16 wrongly; a GPU does not.
HALF = (torch.float16,) if INTERPRETED else (torch.bfloat16, torch.float16)
DTYPES = (*HALF, torch.float32)
