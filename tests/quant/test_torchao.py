"""from_torchao on stand-ins with torchao's names and attributes; on torchao itself in a process of its own."""

from pathlib import Path

import pytest
import torch

from fdora._check import FdoraError
from fdora.quant import from_torchao
from tests import device
from tests.process import run_cases
from tests.quant.make import randint


@pytest.mark.parametrize(("folder", "passed"), [("torchtune", 20), ("torchao", 24)])
def test_the_library(folder, passed):
    """0.14, which stands beside torchtune, and 0.18."""
    if folder == "torchao" and not hasattr(torch.nn.functional, "ScalingType"):
        why = "torchao 0.18 cannot be imported with a torch that has no torch.nn.functional.ScalingType (before 2.10)"
        pytest.skip(f"{why}; runs with torch 2.10 or newer, as in `make test`")
    quiet = {"TORCHAO_FORCE_SKIP_LOADING_SO_FILES": "1"}
    run_cases(Path(__file__).with_name("torchao_cases.py"), folder, passed, **quiet)


def stand_in(name, module="torchao.quantization", **attributes):
    kind = type(name, (), {"__module__": module})
    found = kind()
    vars(found).update(attributes)
    return found


def int8(**changes):
    base = {
        "qdata": (randint(6, 8).int() - 128).to(torch.int8),
        "scale": torch.rand(6, 1, device=device.NAME),
        "block_size": [1, 8],
    }
    base |= {"zero_point": None, "act_pre_scale": None, "dtype": torch.bfloat16}
    return stand_in("Int8Tensor", **base | changes)


@pytest.mark.parametrize(
    ("tensor", "says"),
    [
        (lambda: torch.ones(2, 3), "a NF4Tensor, Int8Tensor.*got a torch.Tensor"),
        (lambda: stand_in("Int4Tensor", qdata=1, scale=1), "got a torchao.quantization.Int4Tensor. Dequantise it, or use"),
        (lambda: stand_in("Int8Tensor", "torchaoish", **vars(int8())), "got a torchaoish.Int8Tensor"),
        (lambda: stand_in("Int8Tensor2", **vars(int8())), "got a torchao.quantization.Int8Tensor2"),
        (lambda: stand_in("Int8Tensor", qdata=torch.ones(2)), "got a torchao.quantization.Int8Tensor"),
        (lambda: int8(act_pre_scale=torch.ones(1)), "act_pre_scale"),
        (lambda: int8(qdata=torch.zeros(2, 6, 8, dtype=torch.int8)), r"\(N, K\)"),
        (
            lambda: stand_in(
                "NVFP4Tensor", **dict.fromkeys(("qdata", "scale", "per_tensor_scale", "block_size", "orig_dtype"))
            ),
            "swizzled",
        ),
        (
            lambda: stand_in(
                "MXTensor",
                is_swizzled_scales=False,
                elem_dtype=torch.float8_e4m3fn,
                block_size=32,
                qdata=1,
                scale=1,
                orig_dtype=1,
            ),
            "4-bit elements",
        ),
    ],
)
def test_errors(tensor, says):
    with pytest.raises(FdoraError, match=says):
        from_torchao(tensor())
