"""Plans that a test writes itself, and what stands in those that the facades write."""

import importlib
import pkgutil
from collections import Counter
from functools import cache
from itertools import product

import pytest
import torch

from fdora.functional import DoraLayer, dora_linear, dora_linear_group, dora_mlp, explain
from fdora.quant import Codes8, Lut4, QuantWeight
from fdora.triton import kernels as folder
from fdora.triton.codes import Coded, written
from fdora.triton.runtime import walk
from fdora.triton.runtime.builder import Builder
from fdora.triton.runtime.device import Device, device_of
from fdora.triton.runtime.layout import contiguous
from fdora.triton.runtime.plan import Array, Fill, Launch, Like, Product, Tile
from fdora.triton.runtime.walk import like, run

HOPPER = Device(-1, 90, 2, False)  # its plans, interpreted


def plan_of(write, *likes, device=HOPPER, name="a test"):
    """``write(builder, *likes)``, as a plan."""
    builder = Builder(name, device)
    write(builder, *likes)
    return builder.plan()


def results_of(write, *tensors, scalars=()):
    """The same, run on these tensors."""
    first = next(t for t in tensors if t is not None)
    plan = plan_of(write, *map(like, tensors), device=device_of(first.device))
    return run(plan, tensors, scalars)


def alike(*shape, dtype=torch.float16, stride=None, aligned=True):
    return Like(shape, contiguous(shape) if stride is None else stride, dtype, aligned)


def shipped(*without):
    """Every kernel of fdora/triton/kernels by its name, but those of these files."""
    files = [each.name for each in pkgutil.iter_modules(folder.__path__) if each.name not in without]
    found = [(name, f) for file in files for name, f in vars(importlib.import_module(f"{folder.__name__}.{file}")).items()]
    return {name: f for name, f in found if name.endswith("_kernel")}


def launches(plan, name=""):
    """The launches of kernels whose name begins like this."""
    return [s for s in plan.steps if isinstance(s, Launch) and s.kernel.fn.__name__.startswith(name)]


def kernels(plan):
    """How often it launches each kernel, by name; products as "product"."""
    return Counter(
        "product" if isinstance(s, Product) else s.kernel.fn.__name__
        for s in plan.steps
        if hasattr(s, "cost") and not isinstance(s, Fill)
    )


def arguments(step):
    """What a launch passes, by name."""
    return dict(zip(step.kernel.arg_names, (*step.args, *step.constexprs), strict=True))


def by_tma(step):
    return any(isinstance(a, Tile) for a in step.args)


def arrays(step):
    """Every Array of a step."""
    if isinstance(step, Launch):
        return [a.array if isinstance(a, Tile) else a for a in step.args if isinstance(a, (Array, Tile))]
    return [step.out, step.a, step.b] if isinstance(step, Product) else [step.out]


def copied(plan, name, t):
    """A result with the values of a matrix."""
    from fdora.triton import copy

    out = plan.result(name, t.shape, t.dtype)
    copy.copied(plan, t, out)
    return out


# every kind of call that makes a plan, as (maker, likes, options)


def layer(N, K, r, dtype, adapter, bias=False, seed=False, frozen=False):
    """The likes of the seven operands of a layer."""
    W, vector = alike(N, K, dtype=dtype), alike(N, dtype=torch.float32)
    own = [None] * 4 if frozen else [alike(r, K, dtype=adapter), alike(N, r, dtype=adapter), alike(N, dtype=adapter), vector]
    drop = alike(dtype=torch.int64) if seed else None
    return [W, *own, alike(N, dtype=dtype) if bias else None, drop]


def calls_of_linear(M, N, K, r, dtype, adapter=None):
    """One layer: every way forward, and backward for each set of gradients and each thing that forward may have kept."""
    from fdora.triton.linear import plan_backward, plan_forward

    adapter = adapter or dtype
    x, dy, h = alike(M, K, dtype=dtype), alike(M, N, dtype=dtype), alike(M, r, dtype=dtype)
    for bias, (mode, seed) in product((False, True), (("lora", False), ("lora", True), ("peft", True))):
        la = layer(N, K, r, dtype, adapter, bias, seed)
        p = 0.1 if seed else 0.0
        for save in ("nothing", "output", "pre_scale"):
            yield plan_forward, [x, *la], (p, mode, (save,), True)
            if mode == "lora":
                yield plan_forward, [x, *la, dy], (p, mode, (save,), True, (), (), True)
        for pre_scale, need_x, *needs in product((dtype == torch.float32 or bias, True), *((False, True),) * 6):
            if any((need_x, *needs)) and bias >= needs[4]:
                kept = dy if needs[2] or needs[3] else None
                yield plan_backward, [x, h, dy, kept, *la], (p, mode, (pre_scale,), need_x, tuple(needs))


def calls_without_norm(M, N, K, r, dtype):
    """One layer that nobody gave its norm: every way forward."""
    from fdora.triton.linear import plan_forward

    x, y = alike(M, K, dtype=dtype), alike(M, N, dtype=dtype)
    for bias, seed, save in product((False, True), (False, True), ("nothing", "pre_scale")):
        la = layer(N, K, r, dtype, dtype, bias, seed)
        la[4] = None
        yield plan_forward, [x, *la], (0.1 if seed else 0.0, "lora", (save,), True)
        if not seed:
            yield plan_forward, [x, *la, y], (0.0, "lora", (save,), True, (), (), True)


def asked(fn, *args, **options):
    """What a call of this public function asks plans with, forward and backward, on an H200."""
    found, of_call = [], walk.plan_of

    def noted(maker, likes, device, given):
        found.append((maker, likes, given))
        return of_call(maker, likes, device, given)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(walk, "plan_of", noted)
        explain(fn, *args, gpu="h200", **options)
    return found


def meta(*shape, dtype, grad=False):
    return torch.empty(shape, dtype=dtype, device="meta", requires_grad=grad)


def member(N, K, r, dtype, adapter=None, form=None, bias=False, frozen=False, norm=True, s=2.0):
    """A layer without data, of codes where there is a form of them."""
    adapter, bias = adapter or dtype, meta(N, dtype=dtype, grad=True) if bias else None
    W = meta(N, K, dtype=dtype) if form is None else without_data(form, N, K, dtype)
    if frozen:
        return DoraLayer(W, bias=bias)
    A, B, m = (meta(*shape, dtype=adapter, grad=True) for shape in ((r, K), (N, r), (N,)))
    return DoraLayer(W, A, B, m, s, bias, meta(N, dtype=FP32, grad=True) if norm else None)


def without_data(form, N, K, dtype):
    likes = likes_of_codes(Coded((N, K), form))
    tensors = [torch.empty(like.shape, dtype=like.dtype, device="meta") for like in likes]
    kind = "fp8" if isinstance(form, Codes8) else "nf4"
    if kind == "fp8" and form.scale == "block":
        tensors[1] = tensors[1].view(-1, -(-K // form.block[1]))
    return QuantWeight(kind, tuple(tensors), (N, K), dtype, form)


PEFT = {"dropout_p": 0.1, "dropout_mode": "peft"}


def calls_of_groups(M, N, K, r, dtype):
    """Layers on one x, a frozen one among them, and gated MLPs; with one s, and with two."""
    for drop, frozen, need_x in product(({}, PEFT | {"seed": [1, 2, 3]}), (False, True), (False, True)):
        x, down = meta(M, K, dtype=dtype, grad=need_x), member(K, N, r, dtype)
        first, second = member(N, K, r, dtype, frozen=frozen), member(N, K, r, dtype, bias=True)
        third = member(N, K, r, dtype, s=2.0 if need_x else 1.0)
        yield from asked(dora_linear_group, x, [first, second, third], **drop)
        for act in ("silu", "gelu", "gelu_tanh"):
            yield from asked(dora_mlp, x, first, second, down, act=act, **drop)
        yield from asked(dora_mlp, x, third, third, down, **drop)


def calls_of_weights(N, K, r, dtype, adapter=None):
    """Norms, merges and compose."""
    from fdora.triton import compose, merge, norm

    adapter = adapter or dtype
    W, A, B = alike(N, K, dtype=dtype), alike(r, K, dtype=adapter), alike(N, r, dtype=adapter)
    n, words = alike(N, dtype=torch.float32), alike(256, dtype=torch.int64)
    for flag in (False, True):
        yield norm.plan_norm, [W, A, B], (None, flag)
        yield norm.plan_guarded_norm, [W, A, B, n, words], (None, flag)
        yield merge.plan_merge, [W, A, B, n, n], (flag,)
        base, lora = alike(300, N, dtype=dtype), alike(300, N, dtype=adapter)
        for bias in (None, n):
            yield compose.plan_compose, [base, lora, n, bias], (flag,)
        for needs in product((False, True), repeat=4):
            if any(needs):
                yield compose.plan_compose_backward, [base, base, lora, n], (flag, needs)


def calls_of_planes(L, N, P, dtype, lora=None):
    """Compose where the channels of a convolution lie before its points."""
    from fdora.triton import compose

    base, low, n = alike(L, N, P, dtype=dtype), alike(L, N, P, dtype=lora or dtype), alike(N, dtype=torch.float32)
    for bias in (None, n):
        yield compose.plan_compose, [base, low, n, bias], (False,)
    for needs in product((False, True), repeat=4):
        if any(needs):
            yield compose.plan_compose_backward, [base, base, low, n], (False, needs)


def calls_of_norm_gradients(N, K, r, A, B):
    """Of a bfloat16 W, with adapters of these dtypes; alone and joined to the factors' own."""
    from fdora.triton.norm_bwd import plan_norm_bwd

    n = alike(N, dtype=torch.float32)
    for needs in ((True, True), (True, False), (False, True)):
        factors = [alike(r, K, dtype=A), alike(N, r, dtype=B)]
        for joined in (False, True):
            onto = [like if joined and need else None for like, need in zip(factors, needs, strict=True)]
            yield plan_norm_bwd, [n, alike(N, K, dtype=torch.bfloat16), *factors, n, *onto], (needs,)


def calls_of_embeddings(T, V, d, r, dtype, adapter=None):
    """With a norm of each column, and of each row of the table, given or not; and the gradients by columns."""
    from fdora.triton.embedding import plan_embedding
    from fdora.triton.embedding_bwd import WHOLE, plan_backward

    adapter = adapter or dtype
    W, A, B = alike(V, d, dtype=dtype), alike(r, V, dtype=adapter), alike(d, r, dtype=adapter)
    for ids in (torch.int64, torch.int32):
        for per_row, given in ((False, True), (True, True), (True, False)):
            own, c = alike(V if per_row else d, dtype=adapter), alike(V if per_row else d, dtype=torch.float32)
            yield plan_embedding, [alike(2, T // 2, dtype=ids), W, A, B, own, c if given else None], (per_row,)
    if r > WHOLE:
        return
    dy, n, number = alike(T, d, dtype=dtype), alike(d, dtype=torch.float32), alike(T, dtype=torch.int64)
    for needs in ((True, True, True, True), (True, False, False, False), (False, False, True, False)):
        sorted_ids = [number, number] if needs[0] else [None, None]
        for sparse in (False, True):
            yield plan_backward, [dy, number, W, A, B, n, n, *sorted_ids], (3, sparse, needs)


BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def likes_of_codes(coded):
    """The tensors of a weight of codes."""
    (N, K), form = coded
    if hasattr(form, "bits"):
        groups, words = -(-K // form.group), torch.int32
        if form.code.startswith("hqq"):
            of_groups = alike(N * groups, dtype=getattr(torch, form.code.partition(".")[2]))
            return [alike(N // form.per, K, dtype=torch.uint8), of_groups, of_groups]
        codes = alike(K, N // 8, dtype=words) if form.code == "awq" else alike(K // form.per, N, dtype=words)
        rest = [alike(groups, -(-N // form.per), dtype=words), alike(groups, N, dtype=FP16)]
        return [codes, *rest, *[alike(K, dtype=words)] * form.indexed]
    if not hasattr(form, "table"):
        one = {"tensor": 1, "row": N}
        n = one[form.scale] if form.scale in one else -(-N // form.block[0]) * -(-K // form.block[1])
        return [alike(N, K, dtype=torch.int8 if form.code == "int8" else torch.float8_e4m3fn), alike(n, dtype=FP32)]
    n, u8 = -(-N * K // form.group) if form.layout == "flat" else N * -(-K // form.group), torch.uint8
    rest = {
        "fp32": [alike(n, dtype=FP32)],
        "nested": [alike(n, dtype=u8), alike(256, dtype=FP32), alike(-(-n // 256), dtype=FP32), alike(dtype=FP32)],
        "e8m0": [alike(n, dtype=u8)],
        "e4m3*global": [alike(n, dtype=torch.float8_e4m3fn), alike(dtype=FP32)],
        "e4m3/global": [alike(n, dtype=torch.float8_e4m3fn), alike(dtype=FP32)],
    }
    return [alike(-(-N * K // 2), dtype=u8), *rest[form.scales]]


def likes_of_norm(coded, r, dtype=BF16):
    """A and B, then the tensors of a weight of codes."""
    N, K = coded.shape
    return [alike(r, K, dtype=dtype), alike(N, r, dtype=dtype), *likes_of_codes(coded)]


def with_state(likes, N):
    """The same with the norm and the fingerprint of before."""
    return [*likes[:2], alike(N, dtype=FP32), alike(256, dtype=torch.int64), *likes[2:]]


def forms_of_codes():
    """Every way in which codes and scales lie."""
    from fdora.quant.bnb import UNIT

    scales = ("fp32", "nested", "e8m0", "e4m3*global", "e4m3/global")
    forms = [Lut4(t, t != "e2m1", 32, s, "row" if s == "e8m0" else "flat") for t in ("nf4", "fp4", "e2m1") for s in scales]
    modes = (("tensor", (0, 0)), ("row", (0, 0)), ("block", (128, 128)))
    return forms + [Codes8(c, *mode, u) for c, u in (("int8", 1.0), ("int8", UNIT), ("e4m3", 1.0)) for mode in modes]


def ints_of_codes():
    """Packed integers; of rows that are whole words and groups."""
    from fdora.triton.codes import Ints

    ways = [(code, 4) for code in ("gptq", "awq", "hqq torch.bfloat16")]
    return [Ints(code, bits, 64) for code, bits in (*ways, ("gptq+1", 8), ("hqq torch.float16", 8))] + [
        Ints("gptq+1", 4, 64, True)
    ]


def plan_dense_norm(likes, device, coded, dense):
    """The norm, and W, as a plan of a layer has them among its temporaries."""
    from fdora.triton.codes import packed
    from fdora.triton.norm import norm

    plan = Builder("norm and dense W", device)
    A, B = map(plan.matrix, likes[:2])
    W, s = packed(plan, likes[2:], coded), plan.scalar("s")
    c, out = plan.result("c", coded.shape[:1], FP32), plan.result("W", coded.shape, dense)
    norm(plan, W, A, B, s, c, dense=out)
    return plan.plan()


def plan_dense(likes, device, coded, dense):
    """W, as a plan of a layer has it among its temporaries, and copied out of it."""
    from fdora.triton.codes import packed
    from fdora.triton.dequantize import dequantized

    plan = Builder("dense W", device)
    W = packed(plan, likes, coded)
    copied(plan, "W", dequantized(plan, W, dense))
    return plan.plan()


def plan_dense_by_g(likes, device, coded, dense, M=512, r=16):
    """As backward decodes: some columns of W times g; and what it asks of rows without a magnitude, of one adapter and of three."""
    from fdora.triton.codes import packed
    from fdora.triton.dequantize import G, decode, redo_lost

    plan, (N, K) = Builder("g W", device), coded.shape
    dy, x, h, B = (plan.matrix(alike(*shape, dtype=dense)) for shape in ((M, N), (M, K), (M, r), (N, r)))
    g, of_three = (G(*(plan.flat(alike(*shape, dtype=FP32)) for _ in range(2))) for shape in ((N,), (3, N)))
    stack, ends = plan.stack(alike(3, N, r, dtype=dense)), plan.vector(alike(3, dtype=torch.int32))
    W, half = packed(plan, likes, coded), K // 2
    redo_lost(plan, W, dy, x, h, B, g, plan.result("dm", (N,), FP32), plan.result("dc", (N,), FP32))
    grads = (plan.result(name, (3, N), FP32) for name in ("dm_three", "dc_three"))
    redo_lost(plan, W, dy, x, h, stack, of_three, *grads, ends)
    decode(plan, W, plan.result("W", (N, half), dense), g, half)
    return plan.plan()


def calls_of_codes(N, K, r, dtype):
    """Norms of weights of 4 and 8 bits, with and without the dense W, that alone, and norms with a state."""
    from fdora.triton.quant import plan_guarded_quant_norm, plan_quant_norm

    for form in forms_of_codes() + (ints_of_codes() if N % 8 == K % 64 == 0 else []):
        coded = Coded((N, K), form)
        for squared in (False, True):
            yield plan_quant_norm, likes_of_norm(coded, r, dtype), (*written([coded]), squared)
        for dense in (BF16, FP32):
            yield plan_dense_norm, likes_of_norm(coded, r, dtype), (coded, dense)
            yield plan_dense, likes_of_codes(coded), (coded, dense)
        yield plan_guarded_quant_norm, with_state(likes_of_norm(coded, r, dtype), N), tuple(written([coded]))


def calls_of_coded_layers(M, N, K, r, dtype):
    """Layers whose W is codes: one, a group with a dense and a frozen one, a gated MLP."""
    four, eight = Lut4("nf4", True, 32, "nested", "flat"), Codes8("e4m3", "block", (128, 128), 1.0)
    for form, drop, norm, need_x in product((four, eight), ({}, PEFT | {"seed": 1}), (False, True), (False, True)):
        x, la = meta(M, K, dtype=dtype, grad=need_x), member(N, K, r, dtype, form=form, norm=norm)
        yield from asked(dora_linear, x, *la[:4], s=2.0, norm=la.norm, keep_inner=norm, **drop)
    coded, frozen = member(N, K, r, dtype, form=four), member(N, K, r, dtype, form=eight, frozen=True)
    yield from asked(dora_linear_group, x, [coded, member(N, K, r, dtype), frozen])
    other, down = member(N, K, r, dtype, form=eight), member(K, N, r, dtype, form=four)
    yield from asked(dora_mlp, x, coded, other, down)


def in_eight_bits(N, K, mode):
    """The likes of e4m3 codes and of their scales, and the facts of the weight."""
    W = Coded((N, K), of_e4m3(mode))
    return likes_of_codes(W), [*map(tuple, written([W]))]


def of_e4m3(mode):
    return Codes8("e4m3", mode, (128, 128) if mode == "block" else (0, 0), 1.0)


def calls_of_fp8(M, N, K, r, dtype):
    """Products of 8-bit codes, with scales of every kind."""
    x = meta(M, K, dtype=dtype, grad=True)
    for mode, (bias, drop) in product(("tensor", "row", "block"), ((False, {}), (True, {"dropout_p": 0.1, "seed": 1}))):
        la = member(N, K, r, dtype, FP32, of_e4m3(mode), bias)
        how = {"norm": la.norm, "bias": la.bias, "compute": "fp8", "grad_compute": "fp8"}
        yield from asked(dora_linear, x, *la[:4], s=2.0, **how, **drop)


def calls_of_fp8_banks(M, N, K, ranks, dtype, experts=False):
    """The same of many adapters: with few ranks in all, and with many; with dropout; sorted, or in any order. Or of experts,
    whose products are grouped."""
    from fdora.triton import multi

    x, dy = alike(M, K, dtype=dtype), alike(M, N, dtype=dtype)
    for r, mode, also in product(ranks, ("row", "block", "tensor")[: 2 + experts], (False, True)):
        codes, facts = in_eight_bits(4 * N if experts else N, K, mode)
        seed, grouped = also and not experts, (True,) if experts else ()
        tensors, p = (
            [None, *bank(M, N, K, r, 4, dtype, FP32, also, seed, seed, experts=experts)[1:], *codes],
            0.1 if seed else 0.0,
        )
        yield multi.plan_forward, [x, *tensors], ((), p, "lora", True, *facts, *grouped)
        saved = [dy, x, alike(M, r, dtype=dtype), dy, None]
        yield multi.plan_backward, [*saved, *tensors], (also, False, (), p, "lora", (*(True,) * 5, also), *facts, *grouped)


def wants_float8(maker, options):
    """Triton has none below sm_89."""
    from fdora.triton import linear, multi

    return (maker is linear.plan_forward and len(options) > 7 and options[7]) or (maker is multi.plan_forward and options[4:])


def bank(M, N, K, r, G, dtype, adapter, bias=False, order=False, seed=False, m=True, experts=False, ids=False):
    """The likes of a bank's tensors; of experts each with a W and a bias of its own."""
    vectors, own = alike(G, N, dtype=FP32), (G,) if experts else ()
    return [
        *(alike(*own, N, K, dtype=dtype), alike(G, r, K, dtype=adapter), alike(G, N, r, dtype=adapter)),
        *((alike(G, N, dtype=adapter), vectors) if m else (None, None)),
        *(alike(*own, N, dtype=dtype) if bias else None, alike(G, dtype=FP32), None if ids else alike(G, dtype=torch.int32)),
        *(alike(M, dtype=torch.int64) if given else None for given in (order, ids)),
        alike(G * (1 + (seed == "apart")), dtype=torch.int64) if seed else None,  # apart: with a ratio each
    ]


def calls_of_multi(M, N, K, r, G, dtype, adapter=None):
    """Many adapters: sorted and not, with what there may be beside them, and each set of gradients that makes other kernels."""
    from fdora.triton import multi
    from fdora.triton.multi_norm import plan_bank_norm
    from fdora.triton.multi_rows import plan_route

    adapter = adapter or dtype
    x, dy, h = alike(M, K, dtype=dtype), alike(M, N, dtype=dtype), alike(M, r, dtype=dtype)
    ranks = tuple(1 + (r - 1) * (g + 1) // G for g in range(G))
    full = (True,) * 5
    for bias, order, seed, m, of, mode in (
        (False, False, False, True, (), "lora"),
        (True, True, False, True, ranks, "lora"),
        (False, True, True, True, (), "lora"),
        (True, False, "apart", True, ranks, "peft"),
        (True, False, False, False, ranks, "lora"),
    ):
        tensors, p = bank(M, N, K, r, G, dtype, adapter, bias, order, seed, m), 0.1 if seed else 0.0
        for save in (False, m):
            yield multi.plan_forward, [x, *tensors], (of, p, mode, save)
            if multi.any_order(M, dtype, tensors[1], p):
                yield multi.plan_forward, [x, *bank(M, N, K, r, G, dtype, adapter, bias, m=m, ids=True)], (of, p, mode, save)
        for needs in (full, (True, False, False, False, False), (False, True, True, True, False), (False,) * 3 + (True, True)):
            wanted = (*needs[:3], *(need and m for need in needs[3:]), bias)
            if any(wanted):
                for pre_scale in (dtype == FP32 or bias, True):
                    kept = dy if wanted[3] or wanted[4] else None
                    other = x if mode == "lora" and order == pre_scale else None  # dx of another layer
                    yield multi.plan_backward, [dy, x, h, kept, other, *tensors], (pre_scale, False, of, p, mode, wanted)
        if m and not bias and p == 0 and dtype != FP32:
            yield multi.plan_gated, [dy, dy, dy, x, h, h, *tensors, *tensors], ("silu", (True,) * 4)
        yield plan_route, [alike(M, dtype=torch.int64)], (G,)
        yield plan_bank_norm, [tensors[0], tensors[1], tensors[2], tensors[6]], (of, None)


def calls_of_experts(M, N, K, r, E, dtype, adapter=None):
    """A W for each segment, in both layouts that models have."""
    from fdora.triton import multi
    from fdora.triton.multi_norm import plan_bank_norm

    x, dy, h = alike(M, K, dtype=dtype), alike(M, N, dtype=dtype), alike(M, r, dtype=dtype)
    for bias, by_columns in ((False, False), (True, True)):
        tensors = bank(M, N, K, r, E, dtype, adapter or dtype, bias, experts=True)
        if by_columns:
            tensors[0] = tensors[0]._replace(stride=(N * K, 1, N))
        yield multi.plan_forward, [x, *tensors], ((), 0.0, "lora", True)
        for pre_scale in {dtype == FP32 or bias, True}:
            yield multi.plan_backward, [dy, x, h, dy, None, *tensors], (pre_scale, False, (), 0.0, "lora", (*(True,) * 5, bias))
        yield plan_bank_norm, [tensors[0], tensors[1], tensors[2], tensors[6]], ((), None)
    yield from calls_around_experts(M, N, dtype)


def calls_around_experts(M, N, dtype):
    """k = 2."""
    from fdora.triton import experts
    from fdora.triton.act import plan_act, plan_act_backward

    order, place = alike(M, dtype=torch.int64), alike(M // 2, 2, dtype=torch.int64)
    x, rows = alike(M // 2, N, dtype=dtype), alike(M, N, dtype=dtype)
    for gates in (None, alike(M // 2, 2, dtype=dtype), alike(M // 2, 2, dtype=FP32)):
        yield experts.plan_spread, [x, order, gates], (2,)
        yield experts.plan_combine, [rows, place, gates], ()
    yield experts.plan_gates, [x, rows, place], (dtype,)
    for act in ("silu", "gelu", "gelu_tanh", "gpt_oss"):
        if act != "gpt_oss":
            yield plan_act, [rows, rows], (act,)
            yield plan_act_backward, [rows, rows, rows], (act,)
        yield experts.plan_gated, [alike(M, 2 * N, dtype=dtype)], (act,)
        yield experts.plan_gated_bwd, [rows, alike(M, 2 * N, dtype=dtype)], (act,)


def calls_of_slots(M, N, dtype):
    from fdora.triton.compose import plan_slots

    i32 = {"dtype": torch.int32}
    given = [alike(8, N, dtype=FP32), alike(8, **i32)]
    tables = [alike(8192, **i32), alike(9, **i32), alike(10, **i32), alike(9, **i32)]
    for (P, r), bias in product(((1, 16), (2, 64), (3, 20)), (None, alike(N, dtype=dtype))):
        low = [alike(P, M, r, dtype=FP32), alike(8, N, r, dtype=dtype), alike(P + 1, **i32)]
        yield plan_slots, [alike(M, N, dtype=dtype), *given, bias, *tables, *low], ()


# Few tokens and many, small ranks and large, every mix of dtypes; sizes that are multiples of 16 and, once, that are not.
EVERY = [
    *(
        (calls_of_linear, M, 4096, 4096, r, BF16)
        for M, r in ((1, 384), (8, 16), (64, 384), (4096, 16), (4096, 64), (4096, 384))
    ),
    (calls_of_linear, 64, 4096, 4096, 64, BF16, FP32),
    (calls_of_linear, 130, 137, 70, 20, FP16, FP32),
    (calls_without_norm, 8, 4096, 4096, 16, BF16),
    *((calls_without_norm, M, N, 4096, 64, BF16) for M, N in ((16, 16384), (16, 20480), (64, 1024))),
    (calls_without_norm, 64, 512, 512, 128, BF16),
    (calls_without_norm, 5, 137, 70, 20, FP16),
    *((calls_of_linear, M, 512, 1024, 16, FP32) for M in (16, 4096)),
    *((calls_of_multi, M, 4096, 4096, r, G, BF16) for M, r, G in ((8, 16, 8), (64, 64, 64), (512, 16, 4), (8192, 16, 32))),
    (calls_of_multi, 8192, 4096, 4096, 256, 4, BF16),
    *((calls_of_multi, M, 137, 70, 20, 3, dtype, FP32) for M, dtype in ((8, FP16), (130, FP16), (130, FP32))),
    *((calls_of_experts, M, 1536, 2048, r, 128, BF16) for M, r in ((64, 16), (16384, 64))),
    *((calls_of_experts, 130, 137, 70, 20, 3, dtype, FP32) for dtype in (FP16, FP32)),
    *((calls_of_groups, M, 1024, 512, 16, dtype) for M, dtype in ((8, BF16), (512, BF16), (512, FP32))),
    (calls_of_groups, 70, 137, 70, 5, FP16),
    *((calls_of_slots, *each) for each in ((1, 4096, BF16), (8192, 4096, BF16), (5, 137, FP32))),
    *(
        (calls_of_weights, 1024, 2048, r, *dtypes)
        for r, dtypes in product((8, 64, 384), ((BF16, BF16), (BF16, FP32), (FP32, FP32), (FP32, BF16)))
    ),
    (calls_of_weights, 137, 70, 20, FP16, FP32),
    *((calls_of_planes, 8, 64, P, BF16, FP32) for P in (49, 3136)),
    (calls_of_planes, 3, 37, 1001, FP16),
    (calls_of_embeddings, 4096, 1024, 4096, 16, BF16, FP32),
    (calls_of_embeddings, 64, 1024, 4096, 64, BF16),
    (calls_of_embeddings, 4096, 1024, 4096, 384, FP32),
    (calls_of_embeddings, 70, 137, 75, 5, FP16, FP32),
    *((calls_of_norm_gradients, 1024, 2048, r, A, A) for r, A in ((16, BF16), (384, BF16), (384, FP32))),
    (calls_of_norm_gradients, 1024, 2048, 64, FP32, BF16),
    (calls_of_norm_gradients, 1024, 2048, 5, BF16, FP32),
    (calls_of_norm_gradients, 4096, 4096, 384, BF16, BF16),  # both products at once
    *((calls_of_codes, *sizes, dtype) for dtype in (BF16, FP32) for sizes in ((1024, 2048, 64), (137, 75, 20))),
    *((calls_of_coded_layers, M, 1024, 512, 16, dtype) for M, dtype in ((16, BF16), (512, BF16), (512, FP32))),
    (calls_of_coded_layers, 70, 137, 75, 5, FP16),
    *((calls_of_fp8, M, 1024, 2048, 16, BF16) for M in (8, 4096)),
    (calls_of_fp8, 130, 137, 75, 5, FP16),
    (calls_of_fp8_banks, 4096, 1024, 2048, (16, 384), BF16),
    (calls_of_fp8_banks, 130, 137, 75, (5,), FP16),
    (calls_of_fp8_banks, 4096, 1024, 2048, (16,), BF16, True),
    (calls_of_fp8_banks, 130, 137, 75, (5,), FP16, True),
]


@cache
def every_call():
    return [each for calls, *sizes in EVERY for each in calls(*sizes)]


def calls_of_many_rows(M):
    """M rows of tokens, of a table, of a weight or of an image, with little in each."""
    from fdora.triton.dequantize import plan_dequantize
    from fdora.triton.quant import plan_stack_norms

    for r, dtype in ((8, BF16), (8, FP32), (100, BF16)):
        yield from calls_of_linear(M, 64, 64, r, dtype)
        yield from calls_without_norm(M, 64, 64, r, dtype)
        yield from calls_of_multi(M, 64, 64, r, 4, dtype)
        yield from calls_of_experts(M, 64, 64, r, 4, dtype)
        yield from calls_of_weights(M, 64, r, dtype)
        yield from calls_of_slots(M, 64, dtype)
        yield from calls_of_norm_gradients(M, 64, r, dtype, dtype)
        for T, V in ((M, 512), (512, M)):
            yield from calls_of_embeddings(T, V, 64, r, dtype)
    yield from calls_of_groups(M, 64, 64, 8, BF16)
    yield from calls_of_coded_layers(M, 64, 64, 8, BF16)
    yield from calls_of_fp8(M, 64, 64, 8, BF16)
    yield from calls_of_fp8_banks(M, 64, 64, (8, 100), BF16)
    yield from calls_of_fp8_banks(M, 128, 64, (8,), BF16, True)
    yield from calls_of_codes(M, 64, 8, BF16)
    for form in forms_of_codes():
        coded = Coded((M, 64), form)
        yield plan_dequantize, likes_of_codes(coded), (*written([coded]), BF16)
        yield plan_stack_norms, [alike(2, 8, 64), alike(2, M // 2, 8), *likes_of_codes(coded)], tuple(written([coded]))
    for L, P in ((M, 16), (1, 14 * M)):  # 20 million: 646 points along each axis of a volume
        yield from calls_of_planes(L, 4, P, BF16)
