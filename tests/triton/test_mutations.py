"""The cases see red on kernels: each small deliberate fault in a kernel's source must break a case of tests/cases.py."""

import importlib
import importlib.util
from pathlib import Path

import pytest

import fdora.triton.kernels
from tests import device
from tests.cases import run_case, usual
from tests.test_mutations import swap as swap_functions
from tests.triton.marks import INTERPRETED  # noqa: F401 (read by the mark)

pytestmark = pytest.mark.skipif(
    "device.NAME != 'cpu' or not INTERPRETED", reason="its faults are read by the interpreter; runs with TRITON_INTERPRET=1"
)
KERNELS = Path(fdora.triton.kernels.__file__).parent

# the function whose cases must notice, what stands in one place of one file of kernels, the fault
FAULTS = [
    ("linear", "tl.where(keep, acc * keep_scale, 0.0)", "acc * keep_scale"),  # a product's share of dropped tokens
    ("linear", "out = dg / tl.where(c < EPS, EPS, c)", "out = dg"),
    ("linear", "vector(m, n, N).to(tl.float32), floored(cn)", "vector(m, n, N).to(tl.float32), cn"),
    ("linear", "v = tl.where(keep, v * scale, 0.0)", "v = tl.where(keep, v, 0.0)"),
    ("linear", "_mix((t + 1).to(tl.uint32) ^ key)", "_mix(t.to(tl.uint32) ^ key)"),
    ("mlp", "share + f * (1 - share)\n", "share\n"),
    ("mlp", "put(z * share_of(z, ACT) * u,", "put(u * share_of(u, ACT) * z,"),
    ("linear", "y += tl.load(residual + at, mask=mask)", "y += 0.0"),
    ("linear", "acc += _read(residual, row, col, at, mask, STORE).to(tl.float32)", "acc += 0.0"),
    ("norm", "tl.sqrt_rn(acc) if SQRT else acc", "tl.sqrt_rn(acc)"),
    ("norm", "+ n, squares, mask=rows.inside)", "+ n, squares, mask=rows.inside & (n < N - 1))"),
    ("norm", "after = tl.where(same, before, tl.sqrt_rn(acc))", "after = before"),  # a norm of before is believed
    (
        "compose",
        "if DELTA else gn * (u + v)\n    if bias is not None:\n        out += tl.load(bias + n,",
        "if DELTA else u + v\n    if bias is not None:\n        out += tl.load(bias + n,",
    ),
    ("compose", "sum_g += tl.sum(d * (u + s * v)", "sum_g += tl.sum(d * u"),
    ("conv", "sum_bias += tl.sum(d, ", "sum_bias = tl.sum(d, "),
    ("merge", "else g * (w + s * acc)", "else w + s * acc"),
    ("unmerge", "v = w - s * acc if UNDO", "v = w + s * acc if UNDO"),
    ("embedding", "return w.to(tl.float32) + acc\n", "return w.to(tl.float32) + 2 * acc\n"),
    ("embedding", "cv = tl.sqrt_rn(squares)", "cv = squares"),
    ("multi", "found = tl.load(at)", "found = tl.load(g + n)[None, :]"),  # everybody has the g of the first
    ("multi", 'if OTHER == "product":\n            acc += beside', 'if OTHER == "product":\n            acc += 0.0'),
    ("experts", "bias += tl.cast(first, tl.int64) * BIAS_SPAN", "bias += 0"),
    ("experts", "tl.load(gates + t * k + j, mask", "tl.load(gates + t * k, mask"),
    ("experts", "tl.load(gates + there, mask=t < M, other=0.0).to(tl.float32)", "tl.full((BLOCK_M,), 1.0, tl.float32)"),
    ("linear", "x, byte_scales(W, n, k,", "x, byte_scales(W, n * 0, k,"),  # of a W that is decoded for a product
    ("linear", "tl.where(c > EPS, -out * g, 0.0)", "tl.where(c > EPS, out * g, 0.0)"),
    ("merge", "acc = unscaled(acc, low, n, k, N, K)\n    g = g_tile", "g = g_tile"),  # beside a float32 factor
    ("conv", "gn = tl.load(g + m % N)[:, None]\n", "gn = tl.load(g + m * 0)[:, None]\n"),
    ("conv", "at = ((m // N).to(tl.int64) * strips + strip) * N", "at = ((m // N).to(tl.int64) * strips) * N"),
    ("multi", "bt = tl.where(inside[None, :], bt, 0.0).to(h", "bt = bt.to(h"),  # what lies beyond a rank
    ("experts", "(there // k, t)", "(there // (k + 1), t)"),
]
# the case that was red where many are not
FIRST = {"y += 0.0": 26, "at = ((m // N).to(tl.int64) * strips) * N": 16, "tl.load(gates + t * k, mask": 5}


def swap(monkeypatch, folder, old, new):
    """Run the kernels of the file that holds ``old`` as they read after one replacement, wherever they are referred to; or
    the functions of another file of fdora/triton, which must register no op."""
    root = KERNELS.parent
    (file,) = [file for file in root.rglob("*.py") if old in file.read_text()]
    if file.parent != KERNELS:
        name = ".".join(file.relative_to(root).with_suffix("").parts)
        return swap_functions(monkeypatch, importlib.import_module(f"fdora.triton.{name}"), old, new)
    source = file.read_text()
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {file.name}"
    (folder / file.name).write_text(source.replace(old, new))
    spec = importlib.util.spec_from_file_location(f"mutant_{file.stem}", folder / file.name)
    mutant = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(mutant)
    kernels = importlib.import_module(f"fdora.triton.kernels.{file.stem}")
    for name, kernel in vars(mutant).items():
        if hasattr(kernel, "rewriter") and kernel.fn.__module__ == mutant.__name__:
            for part in ("fn", "rewriter"):
                monkeypatch.setattr(getattr(kernels, name), part, getattr(kernel, part))


def caught_by(name, most=30, drawn=None, first=0):
    """The first case of this function that is red, and how. ``first``: the one that is looked at before all others."""
    drawn = drawn or usual(device.NAME, "triton")._replace(largest=40)
    for k in dict.fromkeys((first, *range(most))):
        try:
            run_case(name, f"fault {k}", drawn)
        except Exception as error:  # a wrong result, or a kernel that no longer runs
            return f"case {k}: {error}"
    return None


@pytest.mark.parametrize(("name", "old", "new"), FAULTS, ids=[f"{name}:{new[:40]}" for name, _, new in FAULTS])
def test_fault_is_caught(monkeypatch, tmp_path, name, old, new):
    swap(monkeypatch, tmp_path, old, new)
    assert caught_by(name, first=FIRST.get(new, 0)), "no case noticed"


def test_the_sound_kernels_pass(monkeypatch, tmp_path):
    """Written anew without a fault, too: what is red above is red for its fault."""
    for name in dict.fromkeys(name for name, *_ in FAULTS):
        assert caught_by(name, 2) is None
    swap(monkeypatch, tmp_path, FAULTS[0][1], FAULTS[0][1])
    assert caught_by("linear", 2) is None
