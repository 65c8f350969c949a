"""The fuzz command: a handful of cases of each function on the CPU, and that it finds faults of the kinds it is made for."""

import json
import re

import pytest
import torch

from fdora.eager import linear
from tests import cases, device, fuzz  # noqa: F401 (device is read by the condition below)

pytestmark = pytest.mark.skipif(
    "device.NAME != 'cpu'",
    reason="its faults stand in eager code on a CPU; runs with --device cpu. On a GPU: python -m tests.fuzz --device cuda",
)
FEW = "--largest 40 --only "


def failures(text, capsys):
    """What each line says, and the command that it gives."""
    with pytest.raises(SystemExit) as end:
        fuzz.main(text.split())
    assert end.value.code == 1
    return re.findall(r"^WRONG (.*?) \| (.*)$", capsys.readouterr().out, re.M)


def test_the_product_is_right(tmp_path, capsys):
    path, count = tmp_path / "fuzz.json", 2 * len(cases.ORDER)
    fuzz.main([*f"{FEW}1-{count} --seed 7 --json".split(), str(path)])
    result = json.loads(path.read_text())
    assert result["failures"] == [] and result["cases"] == count and result["about"]["seed"] == 7
    assert set(result["rounds"]) == set(cases.FUNCTIONS) and sum(result["rounds"].values()) == cases.ROUNDS * count
    assert all(0 < share <= 1 for share in result["share_of_budget"].values())
    assert f"{count} cases, {cases.ROUNDS * count} rounds in " in capsys.readouterr().out


def test_the_clock_ends_it():
    assert fuzz.main(["--seconds", "0"])["cases"] == 0


def wrong(stock, **memory):
    def fwd(x, la, o, *rest):
        return stock(x, la, o._replace(s=1.05 * o.s), *rest)

    return fwd


def stale(stock, **memory):
    """What a table does that is kept by shape and holds data."""

    def fwd(x, la, *rest):
        A = memory.setdefault(la.A.shape, la.A.detach().clone()).to(la.A.dtype)
        return stock(x, la._replace(A=A), *rest)

    return fwd


def restless(stock, **memory):
    def fwd(*args):
        y, *rest = stock(*args)
        return y * (1 + torch.rand(()) * torch.finfo(y.dtype).eps).to(y.dtype), *rest

    return fwd


def careless(stock, **memory):
    def fwd(x, *args):
        found = stock(x, *args)
        x.detach().data.zero_()
        return found

    return fwd


def reused(stock, **memory):
    """A result in memory that belongs to the next call of this shape."""

    def fwd(*args):
        y, *rest = stock(*args)
        kept = memory.setdefault((y.shape, y.dtype), torch.empty_like(y).data)
        return kept.data.copy_(y.detach()), *rest

    return fwd


def blind(stock, **memory):
    """Reads what lies behind the last column."""

    def fwd(x, *args):
        y, *rest = stock(x, *args)
        end = x.storage_offset() + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        return y + 0 * x.detach().as_strided((1,), (1,), end + 1), *rest

    return fwd


FAULTS = {
    wrong: r"y0\[.*times its budget|root mean square",
    stale: r"y0\[.*times its budget",
    restless: r"y0 differs from call to call",
    careless: r"(x was written to|differs from call to call)",
    reused: r"changed by a later call",
    blind: r"y0\[.* is nan",
}


@pytest.mark.parametrize("fault", FAULTS, ids=lambda f: f.__name__)
def test_finds_a_fault(monkeypatch, capsys, fault):
    monkeypatch.setattr(linear, "linear_fwd", fault(linear.linear_fwd))
    found = failures(FEW + "0-7 --functions linear --dtypes fp32,fp16 --seed 7", capsys)
    assert any(re.search(FAULTS[fault], what) for what, _ in found), found
    what, command = found[0]
    assert command.startswith("python -m tests.fuzz --device cpu ") or command.startswith("TRITON_INTERPRET=1 python")
    again = failures(command.partition("tests.fuzz ")[2], capsys)
    assert fault in (stale, restless) or again == [(what, command)]  # these two need the calls before, or luck


def test_says_what_a_call_raises(monkeypatch, capsys):
    def broken(*args):
        raise IndexError("out of luck")

    monkeypatch.setattr(linear, "linear_bwd", broken)
    found = failures(FEW + "0-3 --functions linear,norm", capsys)
    assert {what.partition(":")[2] for what, _ in found} == {" IndexError: out of luck"}
    assert all("--functions linear,norm" in command for _, command in found)


def test_a_gradient_that_does_not_come(monkeypatch, capsys):
    stock = linear.linear_bwd

    def without_dm(*args):
        dx, grads = stock(*args)
        return dx, grads._replace(m=None)

    monkeypatch.setattr(linear, "linear_bwd", without_dm)
    found = failures(FEW + "0-5 --functions linear", capsys)
    assert any("dm0 is missing" in what for what, _ in found), found


def test_an_unknown_name_is_refused():
    for text in ("--functions linears", "--dtypes fp8", "--only x"):
        with pytest.raises(SystemExit) as end:
            fuzz.parse(text.split())
        assert end.value.code == 2
