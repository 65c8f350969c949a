"""Every op under torch.func, torch.compile, checkpointing and autocast equals the plain call."""

from typing import NamedTuple

import pytest
import torch
from torch.autograd import forward_ad
from torch.func import grad, jacrev, jvp, vmap
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

import fdora.functional as F
from tests import device, reference
from tests.close import assert_exact, rel_l2
from tests.make import tensors

S = 0.7
DTYPE = torch.float64  # of the inputs: tests/triton has no float64
LENGTHS = (5, 7, 12)  # of inputs of compiled code


class Op(NamedTuple):
    """A call in terms of named tensors; which of them are trained, and which have one row per token."""

    call: object
    trained: tuple
    per_token: tuple


def linear(x, W, A, B, m, bias, **extra):
    return F.dora_linear(x, W, A, B, m, s=S, bias=bias, **extra)


def own_norm(x, W, A, B, m, bias):
    return linear(x, W, A, B, m, bias, norm=F.dora_norm(W, A, B, s=S, detach=False))


def dropped(mode):
    return lambda x, W, A, B, m, bias, seed: linear(x, W, A, B, m, bias, dropout_p=0.4, dropout_mode=mode, seed=seed)


def grouped(x, W, A, B, m, bias):
    """Two layers with an adapter and one without."""
    two = F.DoraLayer(W, A, B, m, S, bias), F.DoraLayer(W.flip(0), -A, 0.5 * B, 2 * m, 2 * S)
    return torch.cat(F.dora_linear_group(x, [*two, F.DoraLayer(W + 1)]), -1)


def mlp(x, W, A, B, m, bias, **extra):
    gate, up = F.DoraLayer(W, A, B, m, S, bias), F.DoraLayer(W.flip(0), -A, 0.5 * B, 2 * m, 2 * S)
    return F.dora_mlp(x, gate, up, F.DoraLayer(W.T, B.T, A.T, m[:-1], S), **extra)


def mlp_dropped(x, W, A, B, m, bias, seed):
    return mlp(x, W, A, B, m, bias, dropout_p=0.4, dropout_mode="peft", seed=[seed, seed + 1, seed + 2])


def many(A, B, m):
    """Two adapters of that rank."""
    return torch.stack([A, -A]), torch.stack([B, 2 * B]), torch.stack([m, 0.5 * m])


def multi(x, W, A, B, m, bias, s=(S, 2 * S), **extra):
    """Of five tokens, two for each and one for the base layer."""
    tokens = x.numel() // x.shape[-1]
    ends = (torch.arange(1, 3, device=x.device) * (tokens + 1) // 3).to(torch.int32)
    return F.dora_linear_multi(x, W, *many(A, B, m), s=s, offsets=ends, bias=bias, **extra)


def multi_ids(x, W, A, B, m, whose):
    return F.dora_linear_multi(x, W, *many(A, B, m), s=[S, 2 * S], ids=whose)


def multi_offsets(x, W, A, B, m, ends):
    return F.dora_linear_multi(x, W, *many(A, B, m), s=[S, 2 * S], offsets=ends)


def embedded(axis):
    def call(ids, W, A, B, m):
        m = m if axis == 0 else torch.cat([m, m[:-1]])[: W.shape[1]]
        return F.dora_embedding(ids, W.T, A, B, m, s=S, norm_axis=axis, padding_idx=1)

    return call


def convolved(image, kernel, down, B, m, bias):
    return F.dora_conv2d(image, kernel, down, B[..., None, None], m, s=S, bias=bias).flatten(-3)


def grouped_conv(image, kernel, down, B, m):
    image = image.repeat_interleave(2, -3)  # groups of as many channels as the kernel has
    return F.dora_conv2d(image, kernel, down, B[..., None, None], m, s=S, groups=2).flatten(-3)


def of_experts(x, W, A, B, m, bias):
    ends = [x.shape[0] // 2, x.shape[0]]
    return F.dora_experts(x, torch.stack([W, 2 * W]), *many(A, B, m), s=S, offsets=ends, bias=torch.stack([bias, -bias]))


def mlps_of_experts(x, W, A, B, m):
    ends, both = [x.shape[0] // 2, x.shape[0]], torch.stack([W, 2 * W])
    up, down = F.DoraLayer(both, *many(A, B, m), S), F.DoraLayer(both[:, :5, :3], *many(A[:, :3], B[:5], m[:5]), S)
    return F.dora_experts_mlp(x, up, down, offsets=ends)


ADAPTER = ("A", "B", "m")
LAYER = ("x", *ADAPTER, "bias")
OPS = {
    "norm": Op(lambda W, A, B: F.dora_norm(W, A, B, s=S, detach=False), ("A", "B"), ()),
    "norm_given_base": Op(
        lambda W, A, B: F.dora_norm(W, A, B, s=S, base_sqnorm=F.dora_base_sqnorm(W), detach=False), ("A", "B"), ()
    ),
    "norm_detached": Op(lambda W, A, B: F.dora_norm(W, A, B, s=S), (), ()),
    "scale": Op(lambda m, c: F.dora_scale(m, c), ("m", "c"), ()),
    "compose": Op(
        lambda base, lora, g, bias: F.dora_compose(base, lora, g, s=S, bias=bias),
        ("base", "lora", "g", "bias"),
        ("base", "lora"),
    ),
    "delta": Op(lambda base, lora, g: F.dora_delta(base, lora, g, s=S), ("base", "lora", "g"), ("base", "lora")),
    "linear": Op(lambda x, W, A, B, m: linear(x, W, A, B, m, None), ("x", *ADAPTER), ("x",)),
    "linear_bias": Op(linear, LAYER, ("x",)),
    "linear_full": Op(lambda x, W, A, B, m, bias: linear(x, W, A, B, m, bias, detach=False), LAYER, ("x",)),
    "linear_own_norm": Op(own_norm, LAYER, ("x",)),
    "linear_ends": Op(
        lambda x, W, A, B, m, bias, g, base: linear(x, W, A, B, m, bias, gamma=g, residual=base),
        ("x", *ADAPTER, "bias", "g", "base"),
        ("x", "base"),
    ),
    "linear_dropout": Op(dropped("lora"), LAYER, ("x", "seed")),
    "linear_dropout_peft": Op(dropped("peft"), LAYER, ("x", "seed")),
    "group": Op(grouped, LAYER, ("x",)),
    "mlp": Op(mlp, LAYER, ("x",)),
    "mlp_dropout": Op(mlp_dropped, LAYER, ("x", "seed")),
    "multi": Op(lambda x, W, A, B, m, bias: multi(x, W, A, B, m, bias), LAYER, ("x",)),
    "multi_ids": Op(multi_ids, ("x", *ADAPTER), ("x", "whose")),
    "multi_offsets": Op(multi_offsets, ("x", *ADAPTER), ()),
    "multi_dropout": Op(
        lambda x, W, A, B, m, bias, seed, scales: multi(x, W, A, B, m, bias, scales, dropout_p=0.4, seed=seed),
        LAYER,
        ("x", "seed"),
    ),
    "experts": Op(of_experts, LAYER, ()),
    "experts_mlp": Op(mlps_of_experts, ("x", *ADAPTER), ()),
    "embedding": Op(embedded(0), ADAPTER, ("ids",)),
    "embedding_rows": Op(embedded(1), ADAPTER, ("ids",)),
    "conv": Op(convolved, ("image", "down", "B", "m", "bias"), ("image",)),
    "conv_grouped": Op(grouped_conv, ("image", "down", "B", "m"), ("image",)),
    "base_sqnorm": Op(lambda W: F.dora_base_sqnorm(W), (), ()),
    "unmerge": Op(lambda W, A, B, m, c: F.dora_unmerge(W, A, B, m, s=S, norm=c), (), ()),
    "merge": Op(lambda W, A, B, m: F.dora_merge(W, A, B, m, s=S), (), ()),
}
GRAD = [n for n, op in OPS.items() if op.trained]
TOKENS = [n for n, op in OPS.items() if op.per_token]


def inputs(op, M=5, dtype=None, seed=0):
    dtype = dtype or DTYPE
    t = tensors(6, 5, 2, (M,), dtype, seed=seed)
    c = reference.norm(t["W"], t["A"], t["B"], S).to(torch.promote_types(dtype, torch.float32))
    rand = torch.Generator().manual_seed(seed)
    base, lora = (torch.randn(M, 6, generator=rand).to(t["x"]) for _ in range(2))
    t |= {"c": c, "g": (t["m"] / c), "base": base, "lora": lora, "seed": torch.tensor(seed + 3, device=device.NAME)}
    t["ids"] = torch.randint(0, 5, (M,), generator=rand).to(device.NAME)
    shapes = {"image": (M, 2, 3, 4), "kernel": (6, 2, 2, 2), "down": (2, 2, 2, 2)}
    t |= {n: torch.randn(shape, generator=rand).to(t["x"]) for n, shape in shapes.items()}
    t |= {
        "whose": torch.randint(-1, 2, (M,), generator=rand).to(device.NAME),
        "scales": torch.randn(2, generator=rand).to(t["x"]),
    }
    t["ends"] = torch.randint(M + 1, (2,), generator=rand).sort().values.to(device.NAME, torch.int32)
    names = op.call.__code__.co_varnames[: op.call.__code__.co_argcount]
    return {n: t[n] for n in names}


def loss_of(op):
    def loss(trained, rest):
        y = op.call(**trained, **rest)
        weight = torch.arange(1, y.shape[-1] + 1, device=y.device, dtype=y.dtype)
        return (y * weight).square().sum()

    return loss


def split(op, t):
    trained = {n: t[n] for n in op.trained}
    return trained, {n: v for n, v in t.items() if n not in trained}


def plain_grad(op, t):
    trained, rest = split(op, t)
    trained = {n: v.detach().clone().requires_grad_() for n, v in trained.items()}
    return dict(zip(trained, torch.autograd.grad(loss_of(op)(trained, rest), list(trained.values())), strict=True))


@pytest.mark.parametrize("name", GRAD)
def test_func_grad(name):
    op = OPS[name]
    t = inputs(op)
    got, want = grad(loss_of(op))(*split(op, t)), plain_grad(op, t)
    for n in op.trained:
        assert want[n].abs().max() > 0, f"d{n} of the plain call is zero: the test would prove nothing"
        assert_exact(got[n], want[n], n)


@pytest.mark.parametrize("name", ["norm", "compose", "linear_bias", "linear_own_norm", "mlp", "multi", "embedding"])
def test_compiled_func_grad(name):
    """One tensor is made inside. To Dynamo the others, as they were given, require no gradient."""
    op = OPS[name]
    t, first = inputs(op), op.trained[0]

    def loss(trained, rest):
        return loss_of(op)(trained | {first: 2 * trained[first]}, rest)

    torch._dynamo.reset()
    got = torch.compile(grad(loss), fullgraph=True, backend="aot_eager")(*split(op, t))
    want = plain_grad(op, t | {first: 2 * t[first]})
    for n in op.trained:
        assert_exact(got[n], want[n] * (1 + (n == first)), n)


def mapped(op, t, shared, count):
    """Values of each, and a gradient of each, are those of as many calls."""
    dims = {n: None if n in shared else 0 for n in t}
    singles = [{n: v if n in shared else v[i] for n, v in t.items()} for i in range(count)]
    got = vmap(lambda t: op.call(**t), in_dims=(dims,))(t)
    for one, each in zip(got, singles, strict=True):
        assert_exact(one, op.call(**each))
    if op.trained:
        parts = split(op, t)
        d = vmap(grad(loss_of(op)), in_dims=tuple({n: dims[n] for n in part} for part in parts))(*parts)
        for i, each in enumerate(singles):
            for n, want in plain_grad(op, each).items():
                assert_exact(d[n][i], want, n)
    return got


@pytest.mark.parametrize("name", TOKENS)
def test_vmap_over_tokens(name):
    """And a gradient of each token."""
    op = OPS[name]
    t = inputs(op)
    if "seed" in t:
        t["seed"] = torch.arange(5, device=device.NAME)
    got = mapped(op, t, [n for n in t if n not in op.per_token], 5)
    if "seed" not in t and not name.startswith("multi"):  # where each token's place says whose it is
        assert_exact(got, op.call(**t))


@pytest.mark.parametrize("name", OPS)
def test_vmap_over_a_bank_of_adapters(name):
    """x and W are shared; everything an adapter brings has one more axis."""
    op = OPS[name]
    many = [inputs(op, seed=i) for i in range(3)]
    shared = [n for n in many[0] if n in ("x", "W", "bias", "seed", "base") and len(many[0]) > 1]
    mapped(op, {n: many[0][n] if n in shared else torch.stack([one[n] for one in many]) for n in many[0]}, shared, 3)


@pytest.mark.parametrize("name", [n for n in GRAD if "m" in OPS[n].trained and "dropout" not in n])
def test_a_gradient_around_vmap(name):
    """Of the magnitudes alone: an m that is mapped does not say that somebody outside asks for its gradient."""
    op = OPS[name]
    t = inputs(op)
    rest, each = {n: v for n, v in t.items() if n != "m"}, torch.stack([t["m"], 2 * t["m"], -t["m"]])

    def loss(each):
        return vmap(lambda m: op.call(**rest, m=m))(each).square().sum()

    leaf = each.clone().requires_grad_()
    (want,) = torch.autograd.grad(sum(op.call(**rest, m=m).square().sum() for m in leaf), leaf)
    assert want.abs().max() > 0
    assert_exact(grad(loss)(each), want)
    assert_exact(torch.autograd.grad(loss(leaf), leaf)[0], want)


def test_vmap_draws_only_when_told_how():
    op = OPS["linear"]
    t = inputs(op)

    def draw(x):
        return F.dora_linear(x, *(t[n] for n in "WABm"), s=S, dropout_p=0.5)

    x = t["x"][:1].expand(5, 5)
    with pytest.raises(RuntimeError, match="randomness"):
        vmap(draw)(x)
    different = vmap(draw, randomness="different")(x)
    assert not torch.equal(different[0], different[1])


@pytest.mark.parametrize("name", [n for n in GRAD if n not in ("scale", "linear_own_norm")])  # that is norm and linear
def test_second_derivatives_raise(name):
    """They are never zeros. Those of dora_scale, which is torch's own division, are right."""
    op = OPS[name]
    trained, rest = split(op, inputs(op))
    leaves, loss = {n: v.clone().requires_grad_() for n, v in trained.items()}, loss_of(op)
    kind = name.partition("_")[0]
    kind = {"conv": "compose", "experts": "linear"}.get(kind, kind)  # what they are made of
    first = torch.autograd.grad(loss(leaves, rest), list(leaves.values()), create_graph=True)
    for again in (
        lambda: sum(d.square().sum() for d in first).backward(),
        lambda: grad(lambda t: sum(d.square().sum() for d in grad(loss)(t, rest).values()))(trained),
        lambda: jacrev(jacrev(loss))(trained, rest),
    ):
        with pytest.raises(NotImplementedError, match=f"second derivatives of .*dora_.*{kind}"):
            again()


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", GRAD)
def test_checkpoint(name, reentrant):
    op = OPS[name]
    t = inputs(op)
    trained, rest = split(op, t)
    leaves = {n: v.clone().requires_grad_() for n, v in trained.items()}
    y = checkpoint(
        lambda *args: loss_of(op)(dict(zip(leaves, args, strict=True)), rest), *leaves.values(), use_reentrant=reentrant
    )
    y.backward()
    for n, leaf in leaves.items():
        assert_exact(leaf.grad, plain_grad(op, t)[n], n)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoint_redraws_the_same_mask_without_a_seed(reentrant):
    op = OPS["linear"]
    t = inputs(op, M=50)
    x = t["x"].requires_grad_()

    def f(x):
        return F.dora_linear(x, *(t[n] for n in "WABm"), s=S, dropout_p=0.5).sum()

    torch.manual_seed(1)
    (want,) = torch.autograd.grad(f(x), x)
    torch.manual_seed(1)
    y = checkpoint(f, x, use_reentrant=reentrant)
    torch.manual_seed(99)
    y.backward()
    assert torch.equal(x.grad, want)


def test_a_norm_is_float32_under_autocast():
    t = tensors(48, 64, 8, dtype=torch.float32)
    with torch.autocast(device.NAME, torch.bfloat16):
        c = F.dora_norm(t["W"], t["A"], t["B"], s=S)
    assert c.dtype == torch.float32 and rel_l2(c, reference.norm(t["W"], t["A"], t["B"], S)) <= 1e-6


def stated(W, A, B, m, c):
    """The norm of a state that matches, and of one that does not."""
    fresh = F.dora_norm(W, A, B, s=S, state=F.dora_norm_state(W))
    return torch.cat([fresh.c, F.dora_norm(W, A, B, s=S, state=fresh._replace(c=c)).c])


CONSTANT = {
    "norm": lambda W, A, B, m, c: F.dora_norm(W, A, B, s=S),
    "norm_axis": lambda W, A, B, m, c: F.dora_norm(W, A, B, s=S, norm_axis=0),
    "norm_given_base": lambda W, A, B, m, c: F.dora_norm(W, A, B, s=S, base_sqnorm=W.square().sum(1)),
    "squared": lambda W, A, B, m, c: F.dora_norm(W, A, B, s=S, squared=True),
    "state": stated,
    "base_sqnorm": lambda W, A, B, m, c: F.dora_base_sqnorm(W),
    "merge": lambda W, A, B, m, c: F.dora_merge(W, A, B, m, s=S),
    "merge_given_norm": lambda W, A, B, m, c: F.dora_merge(W, A, B, m, s=S, norm=c),
    "unmerge": lambda W, A, B, m, c: F.dora_unmerge(W, A, B, m, s=S, norm=c),
}


@pytest.mark.parametrize("name", CONSTANT)
def test_what_is_detached_has_no_tangent(name):
    """Forward mode, which no_grad does not stop: one jvp, a bank of them, and torch's own dual numbers."""
    f, many = CONSTANT[name], [inputs(OPS["unmerge"], seed=i) for i in range(3)]
    args = [[one[n] for n in ("W", "A", "B", "m", "c")] for one in many]
    tangents = [torch.ones_like(a) for a in args[0]]
    value, tangent = jvp(f, tuple(args[0]), tuple(tangents))
    assert_exact(value, f(*args[0]))
    assert not tangent.any()
    bank = [torch.stack(each) for each in zip(*args, strict=True)]
    value, tangent = vmap(lambda *args: jvp(f, args, tuple(tangents)))(*bank)
    for i in range(3):
        assert_exact(value[i], f(*args[i]))
    assert not tangent.any()
    with forward_ad.dual_level():
        out = f(*(forward_ad.make_dual(a, t) for a, t in zip(args[0], tangents, strict=True)))
        assert forward_ad.unpack_dual(out).tangent is None


def formula(A, B, m, x, W, c):
    """What the message about second derivatives recommends; c = None: the detached norm of fdora."""
    g = F.dora_scale(m, F.dora_norm(W, A, B, s=S)) if c is None else m / c
    return (g * (x @ W.T + S * (x @ A.T) @ B.T)).square().sum()


@pytest.mark.parametrize("derivative", [torch.func.jacfwd, torch.func.hessian], ids=["jacfwd", "hessian"])
def test_forward_mode_of_the_formula_with_a_detached_norm(derivative):
    t = inputs(OPS["linear"])
    x, W = t["x"], t["W"]
    adapter = tuple(t[n] for n in ADAPTER)

    def of(f):
        return derivative(f, argnums=(0, 1, 2))

    bank = [torch.stack([p, 2 * p]) for p in adapter]
    mapped = vmap(of(lambda *adapter: formula(*adapter, x, W, None)))(*bank)
    for i in range(2):
        one = [p[i] for p in bank]
        c = reference.norm(W, *one[:2], S)
        want = tree_leaves(of(lambda *adapter, c=c: formula(*adapter, x, W, c))(*one))
        got = tree_leaves(of(lambda *adapter: formula(*adapter, x, W, None))(*one))
        for single, many, truth in zip(got, tree_leaves(mapped), want, strict=True):
            assert_exact(single, truth)
            assert_exact(many[i], truth)


@pytest.mark.parametrize("name", ["group", "mlp"])
def test_compiled_without_a_graph(name):
    """Grad mode is off: Dynamo takes another road there. Where nothing requires grad: test_compile."""
    op, t = OPS[name], inputs(OPS[name])
    torch._dynamo.reset()
    with torch.no_grad():
        f = torch.compile(op.call, fullgraph=True, backend="aot_eager")
        assert_exact(f(**(t | {"x": t["x"].clone().requires_grad_()})), op.call(**t))


def test_autocast_leaves_float64_and_the_other_ops_alone():
    for name, op in OPS.items():
        t = inputs(op)
        with torch.autocast(device.NAME, torch.bfloat16):
            inside = op.call(**t)
        assert_exact(inside, op.call(**t), name)


# what inductor makes of all others are the ops of these, or torch's own: up to 20 s more each
INDUCTOR = ("norm", "compose", "linear", "linear_full", "linear_ends", "linear_dropout_peft", "merge")
# as others of their kind; convolutions: tests/functional/test_conv.py
UNCOMPILED = ("mlp_dropout", "experts", "experts_mlp", "embedding_rows", "conv", "conv_grouped")
UNCOMPILED += ("multi_dropout", "multi_ids", "multi_offsets")


@pytest.mark.parametrize("name", [n for n in OPS if n not in UNCOMPILED])
def test_compile(name):
    """fullgraph, forward and backward, any number of tokens with one compilation; those of ``INDUCTOR`` to code for the machine."""
    op = OPS[name]
    torch._dynamo.reset()
    through = "inductor" if name in INDUCTOR else "aot_eager"
    step = torch.compile(lambda trained, rest: loss_of(op)(trained, rest), fullgraph=True, dynamic=True, backend=through)
    # where a step goes through inductor, its forward does
    value = torch.compile(op.call, fullgraph=True, dynamic=True, backend="aot_eager" if op.trained else through)
    for M in LENGTHS if op.per_token else LENGTHS[:1]:
        t = inputs(op, M)
        if op.per_token:
            for n in set(op.per_token) - {"seed"}:
                torch._dynamo.mark_dynamic(t[n], 0)
        with torch._dynamo.config.patch(error_on_recompile=M != 5):
            assert_exact(value(**t), op.call(**t), f"M={M}")
            if op.trained:
                trained, rest = split(op, t)
                leaves = {n: v.detach().clone().requires_grad_() for n, v in trained.items()}
                for n in set(op.per_token) & set(leaves):
                    torch._dynamo.mark_dynamic(leaves[n], 0)
                loss = step(leaves, rest)
                assert_exact(loss.detach(), loss_of(op)(trained, rest), f"M={M} loss")
                d = torch.autograd.grad(loss, list(leaves.values()))
                for n, got in zip(leaves, d, strict=True):
                    assert_exact(got, plain_grad(op, t)[n], f"M={M} d{n}")


@pytest.mark.parametrize("name", ["linear", "linear_own_norm", "linear_dropout_peft", "norm", "compose", "group", "mlp"])
def test_two_in_one_dynamic_graph(name):
    """With gradients. Dynamo makes an input of each global float, and fails where two Functions read the same one."""
    op = OPS[name]
    torch._dynamo.reset()
    two = [inputs(op, seed=seed) for seed in (0, 1)]
    leaves = [{n: v.detach().clone().requires_grad_() for n, v in split(op, t)[0].items()} for t in two]
    rest = [split(op, t)[1] for t in two]

    def loss(leaves, rest):
        return sum(loss_of(op)(*each) for each in zip(leaves, rest, strict=True))

    value = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")(leaves, rest)
    flat = [(n, v) for each in leaves for n, v in each.items()]
    d = torch.autograd.grad(value, [v for _, v in flat])
    assert_exact(value, loss(leaves, rest))
    want = [plain_grad(op, t)[n] for t in two for n in op.trained]
    for (n, _), got, each in zip(flat, d, want, strict=True):
        assert_exact(got, each, n)


@pytest.mark.parametrize("name", OPS)
def test_make_fx_symbolic(name):
    """Traced with symbols for sizes; what was traced serves other sizes."""
    op = OPS[name]
    t = inputs(op)
    traced = make_fx(lambda t: op.call(**t), tracing_mode="symbolic")(t)
    for M in (5, 9) if op.per_token else (5,):
        t = inputs(op, M, seed=1)
        assert_exact(traced(t), op.call(**t), f"M={M}")


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_compiled_half_precision_is_at_the_rounding_floor(dtype):
    torch._dynamo.reset()
    t = tensors(256, 384, 16, (128,), dtype, torch.float32, spread=0.0015)
    t["m"] = t["m"].float()
    args = [t[n] for n in ("x", "W", "A", "B", "m")]
    y = torch.compile(lambda *a: F.dora_linear(*a, s=S), fullgraph=True)(*args)
    limit = {torch.bfloat16: 1.7e-3, torch.float16: 2.2e-4, torch.float32: 1e-6}[dtype]
    assert rel_l2(y, reference.dora(*args, S)) <= limit


def test_compiled_autocast():
    torch._dynamo.reset()
    t = tensors(48, 64, 8, (128,), torch.float32)

    def f(x):
        with torch.autocast(device.NAME, torch.bfloat16):
            return F.dora_linear(x, t["W"], t["A"], t["B"], t["m"], s=S)

    # Inductor's bfloat16 product adds in an order of its own where the CPU has one: judged as every sum of another order is.
    exact = reference.dora(*(t[n] for n in ("x", "W", "A", "B", "m")), S)
    compiled, eager = (rel_l2(g(t["x"]), exact) for g in (torch.compile(f, fullgraph=True), f))
    assert compiled <= 1.1 * eager  # the same product in another order: 1.000 here
