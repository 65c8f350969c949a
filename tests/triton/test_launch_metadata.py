"""Who listens to Triton's launches hears what the plan says of each; who does not, pays nothing."""

from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

from triton import knobs
from triton.compiler.compiler import ASTSource, CompiledKernel

from fdora.functional import explain
from fdora.triton import describe as explaining
from fdora.triton.runtime.cost import COSTS, launched
from fdora.triton.runtime.plan import Array, Plan, Tile
from tests.triton.drawn import NAMES, calls
from tests.triton.test_explain import OTHERS
from tests.triton.written import arrays, launches, shipped

HALF = {"dtypes": ["bf16", "fp16", "fp32"]}


def as_tensor(a):
    """What the walk hands over: a tensor, or Triton's descriptor of one."""
    if isinstance(a, Tile):
        return SimpleNamespace(base=as_tensor(a.array), block_shape=list(a.block))
    return torch.empty_strided(a.shape, a.stride, dtype=a.dtype, device="meta") if isinstance(a, Array) else a


@pytest.mark.parametrize("gpu", ["h200", "a100"])
@pytest.mark.parametrize("what", [*NAMES, *OTHERS])
def test_a_launch_says_what_its_step_says(what, gpu, monkeypatch):
    if gpu == "a100" and "8-bit" in what:
        pytest.skip("an A100 has no products of 8 bits; the same case for an H200 runs on every machine")
    monkeypatch.setattr(explaining, "describe", lambda plan, rates: plan)
    drawn = [OTHERS[what]()] if what in OTHERS else [*calls(what, 14, **HALF), *calls(what, 6, whole=True, largest=300, **HALF)]
    plans = [plan for fn, args, kwargs in drawn for plan in explain(fn, *args, gpu=gpu, **kwargs).plans]
    steps = [step for plan in plans if isinstance(plan, Plan) for step in launches(plan)]
    assert steps
    for step in steps:
        args = dict(zip(step.kernel.arg_names, [*map(as_tensor, step.args), *step.constexprs], strict=True))
        said = launched(step.grid, SimpleNamespace(name=step.kernel.__name__), args)
        assert said.pop("name") == step.kernel.__name__
        assert said == {k: v for k, v in step.cost._asdict().items() if v}
        assert "bytes" in said or any(0 in a.shape for a in arrays(step))


def test_by_hand():
    wide = {
        n: torch.empty(s, device="meta") for n, s in {"W": (10, 20), "A": (3, 20), "B": (10, 3), "partial": (1, 10)}.items()
    }
    said = launched((1,), SimpleNamespace(name="norm_kernel"), wide | dict(N=10, K=20, R=3))
    assert said == {"name": "norm_kernel", "flops32": 2 * 10 * 20 * 3, "bytes": 4 * (200 + 60 + 30 + 10)}


def test_every_kernel_tells():
    """But for those that walk a table of layers: no argument says what they move (fdora/triton/tree.py knows)."""
    theirs = {name: k for name, k in shipped().items() if "table" not in k.arg_names}
    assert theirs.keys() == COSTS.keys()
    for name, k in theirs.items():
        told = getattr(k, "launch_metadata", None) or k.kwargs["launch_metadata"]  # compiled, interpreted
        assert told is launched, name


def test_nobody_is_asked_who_is_not_heard(monkeypatch):
    """Triton keeps the question until a hook looks at the answer; then it hands over grid, metadata and arguments by name."""
    asked = []
    source = object.__new__(ASTSource)
    source.fn = SimpleNamespace(launch_metadata=lambda *a: asked.append(a) or {"flops16": 7}, arg_names=["x", "N"])
    built = SimpleNamespace(name="k", function=1, src=source, metadata="metadata", _init_handles=lambda: None)
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", None)
    assert CompiledKernel.launch_metadata(built, (2, 1, 1), 0, "tensor", 5) is None and not asked
    monkeypatch.setattr(knobs.runtime, "launch_enter_hook", lambda *_: None)
    lazy = CompiledKernel.launch_metadata(built, (2, 1, 1), 0, "tensor", 5)
    assert not asked
    assert lazy.get()["flops16"] == 7 and asked == [((2, 1, 1), "metadata", {"x": "tensor", "N": 5})]
