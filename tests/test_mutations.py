"""The tests see red: each small deliberate fault in the eager code must break a check of its op."""

import importlib
import inspect
import types
from functools import partial
from itertools import product

import pytest
import torch

from tests import device  # noqa: F401 (read by the condition below)
from tests.cases import run_case, usual
from tests.checks import conv, embedding, experts, linear, merge, mlp, multi, norm
from tests.eager import test_dropout
from tests.functional import test_fp8

DROPOUT = [
    test_dropout.test_known_bits,
    test_dropout.test_rate_and_independence,
    test_dropout.test_a_part_has_the_mask_of_the_whole,
    test_dropout.test_drop_keeps_the_mean_and_dtype,
]

EIGHT = [partial(test_fp8.slice_of_cases, name) for name in ("linear", "multi", "experts")]
compose, group = ("compose", "delta"), ("group",)  # cases alone notice what is wrong there
CASES = {
    experts: ("experts", "experts_mlp"),
    merge: ("merge", "unmerge"),
    norm: ("norm", "scale", "base_sqnorm"),
}  # else the function of that name

pytestmark = pytest.mark.skipif(
    "device.NAME != 'cpu'", reason="the eager code runs in full on a CPU only; runs with --device cpu"
)

# module, what stands there, the fault, the checks that must notice
FAULTS = [
    ("norm", "m.to(c.dtype) / c.clamp_min(eps())", "m / c.clamp_min(eps())", norm),
    ("norm", "/ c.clamp_min(eps())", "/ c", norm),
    ("norm", "/ c.clamp_min(eps())", "/ (c + eps())", norm),
    ("norm", "[each * b[i:j].to(acc)", "[b[i:j].to(acc)", norm),
    ("norm", "torch.addmm(w, b, a[:, k:l].to(acc))", "(W[i:j, k:l] + (b.to(W.dtype) @ a[:, k:l].to(W.dtype))).to(acc)", norm),
    ("norm", "[s], rows, cols)])", "[s], rows, cols)][::-1])", norm),
    ("norm", "sum([v.square() for v in parts[1:]], parts[0].square()).sqrt()", "parts[0]", norm),
    ("norm", "parts[0].square()).sqrt()", "parts[0].square())", norm),
    ("norm", "mul_(s * s)", "mul_(s)", norm),
    ("norm", "mul_(2 * s)", "mul_(s)", norm),
    ("norm", "sq < CANCELLED * base_sqnorm", "sq < 0 * base_sqnorm", norm),
    ("norm", "c = sq.clamp_min_(0).sqrt_()", "c = sq.nan_to_num_(0).clamp_min_(0).sqrt_()", norm),
    ("norm", "[torch.linalg.vector_norm(W[i:j].to(acc), dim=1).square()", "[torch.linalg.vector_norm(W[i:j], dim=1).to(acc).square()", norm),
    ("norm", "norm_fwd(of).square()", "norm_fwd(of)", norm),
    ("norm", "u = torch.where(c > 0, dc / c, 0)[:, None]", "u = (dc / c)[:, None]", norm),
    ("norm", " + s * (b @ (a @ a.T))", "", norm),
    ("norm", "+ s * ((ub.T @ b) @ a)", "", norm),
    ("norm", "dB = _added(s * u * (", "dB = _added(u * (", norm),
    ("norm", "dA = _added(s * (_times", "dA = _added((_times", norm),
    ("norm", "_times(ub.T, W, 2)", "_times(ub.T, W, 1)", norm),
    ("norm", "1 if A.dtype == W.dtype else 2", "1", norm),
    ("norm", "found[0] + found[1]) * unit", "found[0] + found[1])", norm),
    ("compose", "(g - 1) * wide_base + g * wide_lora", "(g - 1) * wide_base + wide_lora", compose),
    ("compose", "(g - 1) * wide_base", "g * wide_base", compose),
    ("compose", "(g - 1) * wide_base", "(g.to(base.dtype) - 1) * wide_base", compose),
    ("compose", "base.to(acc), s * lora.to(acc)\n", "base.to(acc), lora.to(acc)\n", compose),
    ("compose", "g * (wide_base + wide_lora)", "g.to(base.dtype) * (base + s * lora)", compose),
    ("compose", "out + bias.to(acc)", "out + g * bias.to(acc)", compose),
    ("compose", "times_g(wide, g - 1 if delta else g", "times_g(wide, g", compose),
    ("compose", "times_g(wide, s * g", "times_g(wide, g", compose),
    ("compose", "(wide * (base.to(acc) + s * lora.to(acc))).sum(0)", "(wide * base.to(acc)).sum(0)", compose),
    ("compose", "dbias = wide.sum(0)", "dbias = (wide * g).sum(0)", compose),
    ("linear", "out = v * g if", "out = v * g.to(t) if", linear),
    ("linear", "matmul(x, w) + lora", "(x @ w) + lora.to(t)", linear),
    ("linear", "v = matmul(x, w) + lora", "v = matmul(xd, w) + lora", linear),
    ("linear", "out + bias.to(acc)", "out + g * bias.to(acc)", linear),
    ("linear", "out if residual is None else out + residual.to(acc)", "out", linear),
    ("linear", "torch.addcmul(bias.to(acc), v, g)", "g * (v + bias.to(acc))", linear),
    ("linear", "cast(s * B.to(acc_dtype(dtype)), dtype)", "B.to(dtype)", linear),
    ("linear", "h = xd @ A.to(t).T", "h = x @ A.to(t).T", linear),
    ("linear", "matmul(x, w) + ((g - 1) * base", "matmul(xd, w) + ((g - 1) * base", linear),
    ("linear", "((g - 1) * base + g * lora)", "((g - 1) * base + lora)", linear),
    ("linear", "and not both_dropped and readable", "and readable", linear),
    ("linear", "of_v = dy * (y if bias is None else y - bias.to(y.dtype))", "of_v = dy * y", linear),
    ("linear", "~((dy * y).abs().sum(0) <= drowned() * of_v.abs().sum(0))", "~((dy * y).abs().sum(0) <= 1e30 * of_v.abs().sum(0))", linear),
    ("linear", "~((dy * y).abs().sum(0) <= drowned()", "((dy * y).abs().sum(0) > drowned()", linear),
    ("linear", "matmul(x, W[n].to(t).T) + matmul(h, scaled(B[n], s, t).T)", "matmul(x, W[n].to(t).T)", linear),
    ("linear", "g.abs() < info.tiny / info.eps", "g == 0", linear),
    ("linear", "torch.finfo(x.dtype)", "torch.finfo(torch.float32)", linear),
    ("linear", "dz = times_g(wide, g, t)", "dz = wide.to(t)", linear),
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
    ("linear", "of_v.sum(0) / g, g.abs()", "of_v.sum(0), g.abs()", linear),
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
    ("linear", "linear_bwd(as_matrix(dy), flat, la, o.s,", "linear_bwd(as_matrix(dy), flat, la, options[0].s,", group),
    ("mlp", "output(v, la.m, la.c, la.bias) if y is None", "v if y is None", mlp),
    ("mlp", "list(act_bwd(da, gate, up, act))", "list(act_bwd(da, gate, up, act))[::-1]", mlp),
    ("act", "cast(_f(gate.to(acc), act) * up.to(acc), gate.dtype)", "cast(_f(up.to(acc), act) * gate.to(acc), gate.dtype)", mlp),
    ("act", "cast(_f(gate.to(acc), act) * up.to(acc), gate.dtype)", "_f(gate, act) * up / 1.001", mlp),
    ("act", "_slope_times(da.to(acc) * up.to(acc), gate.to(acc), act)", "_slope_times(da.to(acc) * gate.to(acc), up.to(acc), act)", mlp),
    ("act", "cast(da.to(acc) * _f(gate.to(acc), act), t)", "cast(da.to(acc) * gate.to(acc), t)", mlp),
    ("act", '"tanh" if act == "gelu_tanh"', '"none" if act == "gelu_tanh"', mlp),
    ("multi", "(bank.m[g], bank.c[g])", "(bank.m[0], bank.c[g])", multi),
    ("multi", "(ones, ones) if bank.m is None or", "(2 * ones, ones) if bank.m is None or", multi),
    ("multi", "None if bank.seed is None else bank.seed[g]", "None if bank.seed is None else bank.seed[0]", multi),
    ("multi", "or last == 0:", "or False:", multi),
    ("multi", "y = frozen_fwd(xs, bank.W, bank.bias)", "y = frozen_fwd(xs, bank.W, None)", multi),
    ("multi", "zip(bank.offsets.tolist(), bank.s.tolist(),", "zip(bank.offsets.tolist(), bank.s.flip(0).tolist(),", multi),
    ("multi", "found[each.g] = grads[:5]", "found[-1 - each.g] = grads[:5]", multi),
    ("multi", "if d is None else _filled(d, shape)", "if d is None else _filled(d, shape).flip(0)", multi),
    ("multi", "dy.to(acc_dtype(dy.dtype)).sum(0)", "dy[1:].to(acc_dtype(dy.dtype)).sum(0)", multi),
    ("multi", "unsort(y, bank.order), h, kept", "y, h, kept", multi),
    ("multi", "else unsort(dx, bank.order)", "else dx", multi),
    ("multi", "None if not kept else each.of(kept[0], bank.order) if len(kept) == 1 else", "None if not kept else", multi),
    ("norm", "[each * b[i:j].to(acc)", "[s[0] * b[i:j].to(acc)", multi),
    ("norm", "sum([v.square() for v in parts[1:]], parts[0].square()).sqrt()", "parts[0]", multi),
    ("multi", "rows, cols), 1)", "rows, cols)[::-1], 1)", multi),
    ("multi", "t[order.argsort()]", "t[order]", multi.MASKED),
    ("multi", "(key[None] <= torch", "(key[None] < torch", multi),
    ("multi", "torch.where((ids < 0) | (ids >= adapters), adapters, ids.long())", "ids.long()", multi),
    ("multi", "(t[:, None] >= offsets)", "(t[:, None] > offsets)", multi.MASKED),
    ("multi", "xd @ A.to(t).T", "x @ A.to(t).T", multi.MASKED),
    ("multi", "scaled(B, bank.s[g], x.dtype).T", "scaled(B, bank.s[0], x.dtype).T", multi.MASKED),
    ("multi", "torch.where((who == g)[:, None], F.pad", "torch.where((who == who)[:, None], F.pad", multi.MASKED),
    ("multi", "out + bank.bias.to(acc), t)", "out, t)", multi.MASKED),
    ("multi", "first, low = dy, low", "first, low = dz, low", multi.MASKED),
    ("multi", "xd if peft else x", "x", multi.MASKED),
    ("multi", "dz = dy if g_t is None else times_g(wide, g_t, t)", "dz = dy", multi.MASKED),
    ("multi", "dh = torch.where(own, dz @ b, 0)", "dh = dz @ b", multi.MASKED),
    ("multi", "low = torch.where(own, matmul(dh, A.to(t)), low)", "low = low + matmul(dh, A.to(t))", multi.MASKED),
    ("multi", "matmul(dh.T, torch.where(own, xd, 0))", "matmul(dh.T, xd)", multi.MASKED),
    ("multi", "matmul(dh.T, torch.where(own, xd, 0))", "matmul(dh.T, torch.where(own, x, 0))", multi.MASKED),
    ("multi", "torch.where(own, dz, 0).T", "dz.T", multi.MASKED),
    ("multi", "torch.where(own, h[:, : B.shape[1]], 0)", "h[:, : B.shape[1]]", multi.MASKED),
    ("multi", "torch.where(own, products, 0).sum(0)", "products.sum(0)", multi.MASKED),
    ("multi", "+ _drop(low, bank, who)", "+ low", multi.MASKED),
    ("multi", "torch.ones_like(g[:1])", "g[:1]", multi.MASKED),
    ("multi", "- starts[who]", "", multi.MASKED),
    ("multi", "torch.cat([seed, seed[:1]])[who]", "seed[0]", multi.MASKED),
    ("multi", "F.pad(dA, (0, 0, 0, r - dA.shape[0]))", "F.pad(dA, (0, 0, r - dA.shape[0], 0))", multi.MASKED),
    ("multi", "(0, r - dB.shape[1])", "(r - dB.shape[1], 0)", multi.MASKED),
    ("merge", "g[i:j] * torch.addmm", "torch.addmm", merge),
    ("merge", "torch.addmm(W[i:j].to(acc), s * B[i:j]", "torch.addmm(W[i:j].to(acc), B[i:j]", merge),
    ("merge", "-s * B[i:j]", "s * B[i:j]", merge),
    ("merge", "torch.where(zero[i:j], 0, W[i:j].to(acc) / g[i:j])", "W[i:j].to(acc) / g[i:j]", merge),
    ("merge", "W[i:j].to(acc) / g[i:j]", "W[i:j].to(acc) * g[i:j]", merge),
    ("experts", "cast(rows.to(acc) * gates.reshape(-1)[order, None].to(acc), x.dtype)", "rows", experts),
    ("experts", "part * gates[:, j, None].to(acc)", "part * gates[:, :1].to(acc)", experts),
    ("experts", "dy.to(acc) * rows[place[:, j]].to(acc)", "dy.to(acc) * rows[place[:, 0]].to(acc)", experts),
    ("experts", "(up + 1) * gate", "up * gate", experts),
    ("experts", "torch.where(gate > LIMIT, 0, d", "torch.where(gate > 1e9, 0, d", experts),
    ("experts", "torch.cat(act_bwd(da, gate, up, act), 1)", "torch.cat(act_bwd(da, gate, up, act)[::-1], 1)", experts),
    ("embedding", "cast(u * _scale(flat, u, m, c, how)[0], W.dtype)", "cast(u, W.dtype) * _scale(flat, u, m, c, how)[0].to(W.dtype)", embedding),
    ("embedding", "if how.padding_idx is not None", "if how.padding_idx", embedding),
    ("embedding", "torch.where((flat == how.padding_idx)[:, None], 0, wide)", "wide * (flat != how.padding_idx)[:, None]", embedding),
    ("embedding", "dz = times_g(wide, g, t)", "dz = cast(wide, t)", embedding),
    ("embedding", "_by_row(matmul(dz, scaled(B, how.s, t)), flat", "_by_row(matmul(dz, B.to(t)), flat", embedding),
    ("embedding", "dB = cast(how.s * matmul", "dB = cast(matmul", embedding),
    ("embedding", "each.sum(1) / floored[:, 0]", "each.sum(1)", embedding),
    ("embedding", "dm = each.sum(0) / floored", "dm = each.sum(0) / g", embedding),
    ("embedding", "torch.where(c > eps(), -total * scale(m, c), 0)", "-total * scale(m, c)", embedding),
    ("embedding", "-total * scale(m, c)", "total * scale(m, c)", embedding),
    ("embedding", "sums_by_number(columns, flat, how.padding_idx)", "sums_by_number(columns, flat, None)", embedding),
    ("embedding", "rows.repeat(r)]", "rows.repeat_interleave(r)]", embedding),
    ("embedding", "cast(sums.T, dtype).reshape", "cast(sums, dtype).reshape", embedding),
    ("embedding", "dm.to(m.dtype).coalesce()", "dm.to(m.dtype).to_dense()", embedding),
    ("embedding", "(size + TINY)", "size", embedding),
    ("embedding", "torch.where(size > how.max_norm, how.max_norm / (size + TINY), 1)", "how.max_norm / (size + TINY)", embedding),
    ("embedding", "base + matmul(_columns(flat, A).to(t), scaled(B, how.s, t).T)", "(base.to(t) + _columns(flat, A).to(t) @ scaled(B, how.s, t).T).to(base)", embedding),
    ("embedding", "size = torch.linalg.vector_norm(u, dim=1, keepdim=True)\n    else", "size = torch.linalg.vector_norm(u, dim=1, keepdim=True).detach() + 1e-3\n    else", embedding),
    ("conv", "h = _convolve(x, A, how, how", "h = _convolve(x, A, how._replace(dilation=(1,) * len(how.stride)), how", conv),
    ("conv", "h, B, 0, groups=how.groups)", "h, B.roll(1, 0) if how.groups > 1 else B, 0, groups=how.groups)", conv),
    ("conv", '"c r ... -> (G c) r ..."', '"c r ... -> (c G) r ..."', conv),
    ("conv", '"r c ... -> (G r) c ..."', '"r c ... -> (r G) c ..."', conv),
    ("conv", '"(G c) o ... -> (G o) (c ...)"', '"(G c) o ... -> (o G) (c ...)"', conv),
    ("conv", 'rearrange(eye, "G H -> G 1 H 1")', 'rearrange(torch.ones_like(eye), "G H -> G 1 H 1")', conv),
    ("conv", '"G H -> G 1 H 1")\n        return', '"G H -> G 1 H 1").flip(2)\n        return', conv),
    ("conv", "return rearrange(W, form), rearrange(A, form), B", 'return rearrange(W, form), rearrange(A, "O c ... -> O (c ...)"), B', conv),
    ("conv", "(w // 2, w - w // 2)", "(w - w // 2, w // 2)", conv),
    ("conv", "for n in reversed(how.padding)", "for n in how.padding", conv),
    ("conv", "return F.pad(x, sides, how.padding_mode)", "return F.pad(x, sides)", conv),
    ("conv", "last.flatten(0, -2) if last.is_contiguous() else t.flatten(2)", "last.flatten(0, -2)", conv),
    ("compose", "g, bias = g[:, None], None if bias is None else bias[:, None]", "g = g[:, None]", conv),
    ("compose", "(None if d is None else d.sum(1) for d in (dg, dbias))", "(None if d is None else d[:, 0] for d in (dg, dbias))", conv),
    ("fp8", "q = rounded(x, facts_of(W))", "q = x.float()", EIGHT),
    ("fp8", "(1 / each)[:, :, None]", "(0.95 / each)[:, :, None]", EIGHT),
    ("fp8", 'columns = BLOCK if facts.scale == "block" else', "columns =", EIGHT),
    ("fp8", "each = each.where(largest > 0, 1.0)", "each = each.where(largest > 1, 1.0)", EIGHT),
    ("fp8", "rounded(dz if a is None else dz.float() * a, facts)", "rounded(dz, facts)", EIGHT),
    ("fp8", "rounded(dz if a is None else dz.float() * a, facts)", "(dz if a is None else dz.float() * a).float()", EIGHT),
    ("linear", "base = base_of(flat, la.W) if fp8 else None", "base = None", EIGHT),
    ("multi", "base = base_of(xs, bank.W) if fp8 else None", "base = None", EIGHT),
    ("multi", "through = cast(through_base(rest, bank.W), x.dtype) if fp8", "through = cast(rest @ bank.W.dequantize(rest.dtype), x.dtype) if fp8", EIGHT),
    ("dropout", "x * (1 / (1 - p))", "x", DROPOUT),
    ("dropout", "int(p * 2**32)", "int((1 - p) * 2**32)", DROPOUT),
    ("dropout", "torch.where(kept, x * (1 / (1 - p)), 0)", "kept * x * (1 / (1 - p))", DROPOUT),
    ("dropout", "((t + 1) & _MASK) ^ key", "((t // 2 + 1) & _MASK) ^ key", DROPOUT),
    ("dropout", "_mix((seed >> 32) & _MASK)", "0", DROPOUT),
    ("dropout", "t, k = t + t0, k + k0", "t, k = t + t0, k", DROPOUT),
    ("dropout", "t, k = t + t0, k + k0", "t, k = t, k + k0", DROPOUT),
]


def swap(monkeypatch, module, old, new):
    """Run the functions of ``module`` with the code of its source after one replacement, wherever they are referred to."""
    source = inspect.getsource(module)
    assert source.count(old) == 1, f"{old!r} stands {source.count(old)} times in {module.__name__}"
    mutant = types.ModuleType(module.__name__)
    exec(compile(source.replace(old, new), module.__file__, "exec"), mutant.__dict__)
    for name, f in vars(mutant).items():
        if inspect.isfunction(f) and f.__module__ == (now := getattr(module, name)).__module__:  # else a test's, of other globals
            monkeypatch.setattr(now, "__code__", f.__code__)


def checks_of(module):
    """Its checks, and a slice of tests/cases.py for the same function; or those of the functions named."""
    if isinstance(module, list):
        return module
    alone = isinstance(module, tuple)
    names = module if alone else CASES.get(module, (module.__name__.rpartition(".")[2],))

    def slice_of_cases():
        drawn = usual()._replace(largest=40)
        for name, k in product(names, range(48)):
            run_case(name, f"{k}", drawn)

    return [slice_of_cases] if alone else [*module.CHECKS, slice_of_cases]


def caught_by(checks):
    for check in checks:
        torch.manual_seed(0)
        try:
            check()
        except Exception as error:  # an assertion, gradcheck's RuntimeError, or an op that no longer runs
            return f"{getattr(check, '__name__', check)}: {type(error).__name__}"
    return None


@pytest.mark.parametrize(("name", "old", "new", "checks"), FAULTS, ids=[f"{m}:{new[:40]}" for m, _, new, _ in FAULTS])
def test_fault_is_caught(monkeypatch, name, old, new, checks):
    swap(monkeypatch, importlib.import_module(f"fdora.eager.{name}"), old, new)
    assert caught_by(checks_of(checks)), "no check noticed"


@pytest.mark.parametrize(
    "checks", [norm, compose, linear, merge, group, mlp, multi, experts, embedding, conv], ids=lambda m: m[0] if isinstance(m, tuple) else m.__name__.rpartition(".")[2]
)
def test_the_sound_code_passes(checks):
    assert caught_by(checks_of(checks)) is None
