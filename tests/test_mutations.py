"""The tests see red: each small deliberate fault in the eager code must break a check of its op."""

import importlib
import inspect
import types

import pytest
import torch

from tests import device  # noqa: F401 (read by the condition below)
from tests.checks import compose, group, linear, merge, mlp, norm
from tests.eager import test_dropout

DROPOUT = [
    test_dropout.test_known_bits,
    test_dropout.test_rate_and_independence,
    test_dropout.test_a_part_has_the_mask_of_the_whole,
    test_dropout.test_drop_keeps_the_mean_and_dtype,
]

pytestmark = pytest.mark.skipif(
    "device.NAME != 'cpu'", reason="the eager code runs in full on a CPU only; runs with --device cpu"
)

# module, what stands there, the fault, the checks that must notice
FAULTS = [
    ("norm", "m.to(c.dtype) / c.clamp_min(eps())", "m / c.clamp_min(eps())", norm),
    ("norm", "/ c.clamp_min(eps())", "/ c", norm),
    ("norm", "/ c.clamp_min(eps())", "/ (c + eps())", norm),
    ("norm", "b = s * B[i:j].to(acc)\n        if", "b = B[i:j].to(acc)\n        if", norm),
    ("norm", "torch.addmm(W[i:j].to(acc), b, A.to(acc))", "(W[i:j] + (b.to(W.dtype) @ A.to(W.dtype))).to(acc)", norm),
    ("norm", "return torch.cat(c)", "return torch.cat(c[::-1])", norm),
    ("norm", "sum(sq[1:], sq[0]).sqrt()", "sq[0].sqrt()", norm),
    ("norm", "sum(sq[1:], sq[0]).sqrt()", "sum(sq[1:], sq[0])", norm),
    ("norm", "mul_(s * s)", "mul_(s)", norm),
    ("norm", "mul_(2 * s)", "mul_(s)", norm),
    ("norm", "sq < CANCELLED * base_sqnorm", "sq < 0 * base_sqnorm", norm),
    ("norm", "c = sq.clamp_min_(0).sqrt_()", "c = sq.nan_to_num_(0).clamp_min_(0).sqrt_()", norm),
    ("norm", "[torch.linalg.vector_norm(W[i:j].to(acc), dim=1).square()", "[torch.linalg.vector_norm(W[i:j], dim=1).to(acc).square()", norm),
    ("norm", "max_bytes).square()", "max_bytes)", norm),
    ("norm", "u = torch.where(c > 0, dc / c, 0)[:, None]", "u = (dc / c)[:, None]", norm),
    ("norm", "(U + s * (b @ (a @ a.T)))", "U", norm),
    ("norm", "+ s * ((ub.T @ b) @ a)", "", norm),
    ("norm", "dB = cast(s * u * (", "dB = cast(u * (", norm),
    ("norm", "dA = cast(s * (sum", "dA = cast((sum", norm),
    ("compose", "(g - 1) * wide_base + g * wide_lora", "(g - 1) * wide_base + wide_lora", compose),
    ("compose", "(g - 1) * wide_base", "g * wide_base", compose),
    ("compose", "(g - 1) * wide_base", "(g.to(base.dtype) - 1) * wide_base", compose),
    ("compose", "base.to(acc), s * lora.to(acc)\n", "base.to(acc), lora.to(acc)\n", compose),
    ("compose", "g * (wide_base + wide_lora)", "g.to(base.dtype) * (base + s * lora)", compose),
    ("compose", "out + bias.to(acc)", "out + g * bias.to(acc)", compose),
    ("compose", "wide * (g - 1 if delta else g)", "wide * g", compose),
    ("compose", "cast(wide * (s * g)", "cast(wide * g", compose),
    ("compose", "(wide * (base.to(acc) + s * lora.to(acc))).sum(0)", "(wide * base.to(acc)).sum(0)", compose),
    ("compose", "dbias = wide.sum(0)", "dbias = (wide * g).sum(0)", compose),
    ("linear", "out = v * g if", "out = v * g.to(t) if", linear),
    ("linear", "matmul(x, w) + lora", "(x @ w) + lora.to(t)", linear),
    ("linear", "v = matmul(x, w) + lora", "v = matmul(xd, w) + lora", linear),
    ("linear", "out + bias.to(acc)", "out + g * bias.to(acc)", linear),
    ("linear", "torch.addcmul(bias.to(acc), v, g)", "g * (v + bias.to(acc))", linear),
    ("linear", "cast(s * B.to(acc_dtype(dtype)), dtype)", "B.to(dtype)", linear),
    ("linear", "h = xd @ A.to(t).T", "h = x @ A.to(t).T", linear),
    ("linear", "matmul(x, w) + ((g - 1) * base", "matmul(xd, w) + ((g - 1) * base", linear),
    ("linear", "((g - 1) * base + g * lora)", "((g - 1) * base + lora)", linear),
    ("linear", "bias is None and not both_dropped", "not both_dropped", linear),
    ("linear", "and not both_dropped and _recoverable(g, t)", "and _recoverable(g, t)", linear),
    ("linear", "and _recoverable(g, t)", "", linear),
    ("linear", "g.abs() < info.tiny / info.eps", "g == 0", linear),
    ("linear", "dz = wide_dz.to(t)", "dz = wide.to(t)", linear),
    ("linear", "through_A = drop(matmul(dh, A.to(t)), seed, dropout.p)", "through_A = matmul(dh, A.to(t))", linear),
    ("linear", "through_A = drop(matmul", "through_A = drop(s * matmul", linear),
    ("linear", "part = matmul(dy, w) + drop(matmul", "part = matmul(dy, w) + (lambda v, *_: v)(matmul", linear),
    ("linear", "part = matmul(dy, w) + drop", "part = matmul(dz, w) + drop", linear),
    ("linear", "part = matmul(dz, w) + through_A", "part = matmul(dz, w)", linear),
    ("linear", "matmul(dh.T, drop(x, seed, dropout.p))", "matmul(dh.T, x)", linear),
    ("linear", "dA = cast(matmul", "dA = cast(s * matmul", linear),
    ("linear", "dB = cast(s * matmul", "dB = cast(matmul", linear),
    ("linear", "dB = cast(s * matmul(dz.T, h)", "dB = cast(s * (dz.T @ h)", linear),
    ("linear", "dA = cast(matmul(dh.T, drop(x, seed, dropout.p))", "dA = cast((dh.T @ drop(x, seed, dropout.p))", linear),
    ("linear", "dg = dg / g", "dg = dg", linear),
    ("linear", "wide_dm = dg / c.clamp_min(eps())", "wide_dm = dg", linear),
    ("linear", "-wide_dm * g", "wide_dm * g", linear),
    ("linear", "torch.where(c > eps(), -wide_dm * g, 0)", "-wide_dm * g / (c > eps())", linear),
    ("linear", "wide.sum(0) if needs.bias", "wide_dz.sum(0) if needs.bias", linear),
    ("linear", "return total.add_(part) if", "return total.sub_(part) if", group),
    ("linear", "return total.add_(part) if is_real(total) and is_real(part) else cast(total + part, dtype)", "return cast(part, dtype)", group),
    ("linear", "dx.addmm_(dy, w)", "dy @ w", group),
    ("linear", "None if bias is None else bias.to(x.dtype)", "None", group),
    ("linear", "dy.to(acc_dtype(dy.dtype)).sum(0)", "dy.sum()", group),
    ("linear", "torch.addcmul(bias.to(wide.dtype), wide, g)", "wide * g", mlp),
    ("linear", "wide * g if bias is None", "wide if bias is None", mlp),
    ("linear", "_plus(dx, dy @ w, dy.dtype)", "dy @ (2 * w)", mlp),
    ("linear", "for A in As]).T", "for A in As][::-1]).T", group),
    ("linear", "_linear_bwd(as_matrix(dy), flat, la, o.s,", "_linear_bwd(as_matrix(dy), flat, la, options[0].s,", group),
    ("mlp", "output(v, la.m, la.c, la.bias) if y is None", "v if y is None", mlp),
    ("mlp", "list(act_bwd(da, gate, up, act))", "list(act_bwd(da, gate, up, act))[::-1]", mlp),
    ("act", "cast(_f(gate.to(acc), act) * up.to(acc), gate.dtype)", "cast(_f(up.to(acc), act) * gate.to(acc), gate.dtype)", mlp),
    ("act", "cast(_f(gate.to(acc), act) * up.to(acc), gate.dtype)", "_f(gate, act) * up / 1.001", mlp),
    ("act", "_slope_times(da.to(acc) * up.to(acc), gate.to(acc), act)", "_slope_times(da.to(acc) * gate.to(acc), up.to(acc), act)", mlp),
    ("act", "cast(da.to(acc) * _f(gate.to(acc), act), t)", "cast(da.to(acc) * gate.to(acc), t)", mlp),
    ("act", '"tanh" if act == "gelu_tanh"', '"none" if act == "gelu_tanh"', mlp),
    ("merge", "(g[i:j] * torch.addmm", "(torch.addmm", merge),
    ("merge", "s * B[i:j].to(acc), A.to(acc))).to", "B[i:j].to(acc), A.to(acc))).to", merge),
    ("merge", "-s * B[i:j]", "s * B[i:j]", merge),
    ("merge", "torch.where(zero[i:j], 0, W[i:j].to(acc) / g[i:j])", "W[i:j].to(acc) / g[i:j]", merge),
    ("merge", "W[i:j].to(acc) / g[i:j]", "W[i:j].to(acc) * g[i:j]", merge),
    ("dropout", "x * (1 / (1 - p))", "x", DROPOUT),
    ("dropout", "int(p * 2**32)", "int((1 - p) * 2**32)", DROPOUT),
    ("dropout", "torch.where(keep_mask(x.shape[0], x.shape[1], seed, p), x * (1 / (1 - p)), 0)", "keep_mask(x.shape[0], x.shape[1], seed, p) * x * (1 / (1 - p))", DROPOUT),
    ("dropout", "((t + 1) & _MASK) ^ key", "((t // 2 + 1) & _MASK) ^ key", DROPOUT),
    ("dropout", "_mix((seed >> 32) & _MASK)", "0", DROPOUT),
    ("dropout", "t, k = t + t0, k + k0", "t, k = t + t0, k", DROPOUT),
    ("dropout", "t, k = t + t0, k + k0", "t, k = t, k + k0", DROPOUT),
]  # fmt: skip


def swap(monkeypatch, module, old, new):
    """Run the functions of ``module`` with the code of its source after one replacement, wherever they are referred to."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {module.__name__}"
    mutant = types.ModuleType(module.__name__)
    exec(compile(source.replace(old, new), module.__file__, "exec"), mutant.__dict__)
    for name, f in vars(mutant).items():
        if inspect.isfunction(f) and f.__module__ == module.__name__:
            monkeypatch.setattr(getattr(module, name), "__code__", f.__code__)


def caught_by(checks):
    for check in checks:
        torch.manual_seed(0)
        try:
            check()
        except Exception as error:  # an assertion, gradcheck's RuntimeError, or an op that no longer runs
            return f"{check.__name__}: {type(error).__name__}"
    return None


@pytest.mark.parametrize(("name", "old", "new", "checks"), FAULTS, ids=[f"{m}:{new[:40]}" for m, _, new, _ in FAULTS])
def test_fault_is_caught(monkeypatch, name, old, new, checks):
    swap(monkeypatch, importlib.import_module(f"fdora.eager.{name}"), old, new)
    assert caught_by(getattr(checks, "CHECKS", checks)), "no check noticed"


@pytest.mark.parametrize("checks", [norm, compose, linear, merge, group, mlp], ids=lambda m: m.__name__.rpartition(".")[2])
def test_the_sound_code_passes(checks):
    assert caught_by(checks.CHECKS) is None
