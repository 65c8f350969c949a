"""Who runs, and why: the argument, the context, the environment variable, then the rule."""

import os
import subprocess
import sys

import pytest
import torch

import fdora
from fdora._dispatch import choose
from fdora.functional import dora_norm, select_backend

BOTH = ("eager", "triton")


def test_the_ladder():
    assert choose("cuda", torch.bfloat16, "auto", BOTH).name == "triton"
    assert choose("cpu", torch.bfloat16, "auto", BOTH).name == "eager"
    assert choose("cuda", torch.float64, "auto", BOTH).name == "eager"
    assert choose("cuda", torch.bfloat16, "auto", ("eager",)) == ("eager", "this installation has no Triton kernels")
    assert choose("cuda", torch.float32, "triton", BOTH) == ("triton", "asked for by the backend= argument")


def test_public_call():
    x = torch.randn(2)
    assert select_backend(x).name == "eager" and select_backend(x).reason
    assert select_backend("cpu", torch.float32) == select_backend(x)


def test_context_nests_and_restores():
    with fdora.backend("eager"):
        assert select_backend("cuda", torch.float32).reason == "asked for by fdora.backend or FDORA_BACKEND"
        with fdora.backend("auto"):
            assert "asked" not in select_backend("cuda", torch.float32).reason
        with pytest.raises(ZeroDivisionError), fdora.backend("auto"):
            1 / 0
        assert "asked" in select_backend("cuda", torch.float32).reason
    assert "asked" not in select_backend("cuda", torch.float32).reason


def test_argument_beats_context():
    with fdora.backend("eager"):
        assert choose("cuda", torch.float32, "triton", BOTH).name == "triton"


def test_environment():
    code = "from fdora.functional import select_backend; import torch; print(select_backend(torch.ones(1)).reason)"
    run = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"FDORA_BACKEND": "eager"}, capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() == "asked for by fdora.backend or FDORA_BACKEND"


def test_compiled_code_follows_the_context():
    """The name is a guarded global: a function compiled under one backend is compiled again for the other."""
    seen = []

    def spy(graph, inputs):
        seen.append(graph)
        return graph.forward

    W, A, B = torch.randn(4, 3), torch.randn(2, 3), torch.randn(4, 2)
    f = torch.compile(lambda W: dora_norm(W, A, B, s=1.0), backend=spy, fullgraph=True)
    f(W)
    with fdora.backend("eager"):
        f(W)
    assert len(seen) == 2
