"""explain() without kernels: it answers on any machine, refuses what the function would refuse, and runs nothing."""

import re
from functools import partial

import pytest
import torch

import fdora.functional as F
from fdora import FdoraError, _check, backend
from fdora.functional import explain
from fdora.functional.explain import CALLS
from fdora.predict import GPUS, gpu_of
from fdora.quant import quantize
from tests import device
from tests.process import python
from tests.test_errors import MESSAGES


def draw(*shape, **options):
    return torch.randn(shape, device=device.NAME, **options)


def layer(N=6, K=5, r=2, **options):
    return [draw(N, K, **options), *(draw(*s, **options).requires_grad_() for s in ((r, K), (N, r), (N,)))]


def test_the_eager_backend_has_no_plan():
    if device.NAME != "cpu":
        pytest.skip("says what tensors on a CPU are told; runs with --device cpu, as in `make test`")
    x, la = draw(4, 5), layer()
    for said in (
        explain(F.dora_linear, x, *la, s=2.0),
        explain(F.dora_norm, *la[:3], s=2.0),
        explain(F.dora_merge, *la, s=2.0),
        explain(F.dora_linear_group, x, [F.DoraLayer(*la, 2.0)]),
        explain(F.dora_compose, draw(4, 6), draw(4, 6), draw(6), s=2.0),
        explain(F.dora_mlp, x, F.DoraLayer(*la, 2.0), F.DoraLayer(*la, 2.0), F.DoraLayer(*layer(5, 6), 2.0)),
    ):
        assert said.backend == "eager" and "are on cpu" in said.why and said.plans == () and said.seconds is None
        assert "it has no plan" in str(said) and said.fn in str(said)


def test_float64_and_a_forced_backend_are_eager_on_any_gpu():
    x, la = draw(4, 5, dtype=torch.float64), layer(dtype=torch.float64)
    assert "float64 has no Triton kernel" in str(explain(F.dora_linear, x, *la, s=2.0, gpu="h200"))
    with backend("eager"):
        assert explain(F.dora_linear, draw(4, 5), *layer(), s=2.0, gpu="h200").backend == "eager"


def test_no_value_is_read():
    """Meta tensors have none; gradients do not reach anything."""
    x, *rest = (t.to("meta") for t in (draw(4, 5), *layer()))
    assert explain(F.dora_linear, x, *rest, s=2.0).backend == "eager"


def test_without_triton_it_says_so():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from fdora.functional import *\n"
        "t = [torch.empty(s, device='meta') for s in ((4, 5), (6, 5), (2, 5), (6, 2), (6,))]\n"
        "print(explain(dora_linear, *t, s=2.0, gpu='h200'))\n"
        "from fdora.explain_model import Kind, cost\n"
        "from fdora.predict import predict\n"
        "assert cost(512, Kind('q', 64, 32, 4, 1), 'h200', 'fdora') == predict(512, 64, 32, 4)\n"
    )
    done = python("-c", code)
    assert done.returncode == 0, done.stderr
    assert "backend eager (Triton " in done.stdout and "it has no plan" in done.stdout


MISTAKES = {
    "fdora.explain: `fn` must be one of dora_linear, dora_linear_group,": lambda: explain(F.dora_scale, draw(6), draw(6)),
    "got 'dora_linear'": lambda: explain("dora_linear"),
    "`gpu` must be one of h200, h100,": lambda: explain(F.dora_linear, draw(4, 5), *layer(), s=2.0, gpu="v100"),
    "fdora.dora_merge: `gamma` must be (N,)": lambda: explain(F.dora_merge, *layer(), s=2.0, gamma=draw(4)),
    "fdora.dora_norm_tree: `state` must be a NormTreeState, got a str": lambda: explain(
        F.dora_norm_tree, [layer()[0]], [layer()[1:]], s=2.0, state="no"
    ),
}
# Those of seeds, values, devices, and of what explain lets pass.
UNSEEN = re.compile("`seed`|`m` must not be 0|must be on cpu|`sparse`|`detach`")
OF = tuple(f"fdora.{fn.__name__}:" for fn in CALLS)
OF_FUNCTIONS = {text: call for call, text in reversed(MESSAGES) if text.startswith(OF) and not UNSEEN.search(text)}


@pytest.mark.parametrize("text", [*MISTAKES, *OF_FUNCTIONS])
def test_mistakes_are_those_of_the_function(text, monkeypatch):
    monkeypatch.setattr(_check, "_passed", set())  # whatever was asked before
    for fn in CALLS if text in OF_FUNCTIONS else ():
        monkeypatch.setattr(F, fn.__name__, partial(explain, fn))
    with pytest.raises(FdoraError) as error:
        (MISTAKES | OF_FUNCTIONS)[text]()
    assert text in str(error.value) if text in MISTAKES else text == str(error.value)


def test_a_merge_of_a_weight_that_requires_grad():
    """It computes no gradient, so such a W is none too many."""
    W, A, B, m = layer()
    for fn, norm in ((F.dora_merge, None), (F.dora_unmerge, F.dora_norm(W, A, B, s=2.0))):
        assert explain(fn, W.clone().requires_grad_(), A, B, m, s=2.0, norm=norm).fn == fn.__name__


def test_a_gpu_of_this_machine_must_be_there():
    if torch.cuda.is_available():
        pytest.skip("says what a machine without a GPU is told; runs on a machine without one")
    with pytest.raises(FdoraError, match="This machine has no GPU"):
        explain(F.dora_linear, draw(4, 5), *layer(), s=2.0, gpu="cuda")


def test_rates_are_of_the_very_gpu():
    assert gpu_of("NVIDIA H200") is GPUS["h200"] and gpu_of("NVIDIA H100 PCIe") is None
    for gpu in GPUS.values():
        assert gpu.fp32 <= gpu.tf32 < gpu.flops and gpu.num_sms > 100
        assert gpu.capability >= 80 or (gpu.capability == 0 and gpu.driver.startswith("AMD "))


def test_a_step_takes_what_is_slower():
    gpu = GPUS["a100"]
    assert gpu.seconds(312e12, 0, 0) == 1 == gpu.seconds(0, 0, 2.04e12) == gpu.seconds(312e12, 0, 1e12)
    assert gpu.seconds(0, 156e12, 0) == 1 == gpu.seconds(0, 19.5e12, 0, True)


def test_experts_of_codes_are_refused():
    W = quantize(draw(4 * 64, 64), "nf4")
    arguments = (draw(8, 64), W, draw(4, 4, 64), draw(4, 64, 4), draw(4, 64))
    offsets = torch.tensor([2, 4, 6, 8], dtype=torch.int32, device=device.NAME)
    with pytest.raises(
        FdoraError, match="explain: `W` must be experts of dora_experts that are a tensor, got codes of kind nf4"
    ):
        explain(F.dora_experts, *arguments, s=1.0, offsets=offsets)
