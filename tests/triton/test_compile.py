"""Every shipped kernel builds for every GPU we name, without one: what a plan can ask for goes through the compiler's front end,
every pair of arguments once, and the largest of each kernel, in every shipped config, to the end: shared memory, no spills."""

import functools
import inspect
import math
import os
import re
import subprocess
from itertools import chain, product
from pathlib import Path

import pytest
import torch
from packaging.version import Version

triton = pytest.importorskip("triton", reason="needs Triton; `make test` installs it")
from triton._C.libtriton import ir  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource, make_backend  # noqa: E402

from bench.records import names  # noqa: E402
from fdora.predict import GPUS  # noqa: E402
from fdora.triton.gemm import Epilogue, Masked, Operand, gemm  # noqa: E402
from fdora.triton.runtime.device import Device  # noqa: E402
from fdora.triton.runtime.plan import Array, Scalar, Tile  # noqa: E402
from fdora.triton.runtime.private import HAS_PDL, OPTIONS  # noqa: E402
from fdora.triton.tiles.configs import GemmConfig  # noqa: E402
from fdora.triton.tiles.product import tiles  # noqa: E402
from tests.cover import covering  # noqa: E402
from tests.triton.recorder import NAMES  # noqa: E402
from tests.triton.written import (  # noqa: E402
    BF16,
    FP32,
    alike,
    arrays,
    by_tma,
    every_call,
    launches,
    plan_of,
    shipped,
    wants_float8,
)

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing; runs without TRITON_INTERPRET"
)

# 80: what sm_86 and sm_89 have, which get the same choices; an A100 has 166,912.
SHARED = {80: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
TARGETS = [*SHARED, "gfx942"]
LAST = (100, 120, "gfx942")  # there the largest of each kernel goes to the end, and on sm_100 whatever has descriptors


def on_targets(cases, largest):
    """Each case beside each target that it is built for, where ``largest(*case)`` alone is for the last ones."""
    return [(target, *case) for target, case in product(TARGETS, cases) if target not in LAST or largest(*case)]


def size(step):
    """Of a launch among those of its kernel: elements of its blocks, then arguments that are there and flags that are set."""
    blocks = [
        v for name, v in zip(step.kernel.arg_names[::-1], step.constexprs[::-1], strict=False) if name.startswith("BLOCK")
    ]
    return math.prod(filter(None, blocks)), sum(v is not None for v in step.args) + sum(v is True for v in step.constexprs)


def built_there(steps, target):
    """Those of these launches that this target builds to the end."""
    if target not in LAST:
        return steps
    largest = {step.kernel.__name__: step for step in sorted(steps, key=size)}.values()
    return [step for step in steps if step in largest or (target == 100 and by_tma(step))]


def test_the_support_table_says_what_is_compiled():
    """docs/start.md: an architecture for each target, what was measured is what ran, fp8 where Triton has it."""
    page = (Path(__file__).parents[2] / "docs/start.md").read_text()
    said = {arch: cells for arch, *cells in re.findall(r"^\| [^|]+ \| (sm_\d+|gfx\d+) \| ([^|]+) \| ([^|]+) \|$", page, re.M)}
    targets = {target if isinstance(target, str) else f"sm_{target}": target for target in TARGETS}
    assert said.keys() == {*targets, "sm_89"} and said.pop("sm_89") == ["as sm_80", "unknown"]
    ran = {
        f"sm_{gpu.capability}"
        for gpu in GPUS.values()
        if any(gpu.name.split()[0].lower() == name.split("/")[0] for name in names())
    }
    for arch, target in targets.items():
        without = "unknown" if isinstance(target, str) else "none"
        float8 = "compiled" if device(target).capability >= 89 else without
        assert said[arch] == (["measured", "measured"] if arch in ran else ["compiled", float8]), arch


def device(target):
    if isinstance(target, str):
        return Device(-1, 0, 304, False)
    return Device(-1, target, 132, HAS_PDL and target >= 90)


def source_of(step):
    """What Triton compiles for this launch: it makes constants of None and 1, and knows of 16 bytes and of factors of 16."""
    signature, constants, attrs = {}, {}, {}
    values = (*step.args, *step.constexprs)
    for i, (name, v) in enumerate(zip(step.kernel.arg_names, values, strict=True)):
        divisible = False
        if i >= len(step.args) or v is None or (type(v) is int and v == 1):
            signature[name], constants[i,] = "constexpr", v
        elif isinstance(v, Tile):
            signature[name] = f"tensordesc<{NAMES[v.array.dtype]}{list(v.block)}>"
        elif isinstance(v, Array):
            signature[name], divisible = "*" + NAMES[v.dtype], v.aligned
        elif isinstance(v, (Scalar, float)):
            signature[name] = "fp32"
        else:
            looked_at = name not in step.kernel.do_not_specialize_on_alignment
            signature[name], divisible = "i64" if v > 0x7FFFFFFF else "i32", looked_at and v % 16 == 0
        if divisible:
            attrs[i,] = [["tt.divisibility", 16]]
    return ASTSource(step.kernel, signature, constants, attrs)


def kind(step):
    """Two launches of one kind are one kernel."""
    source = source_of(step)
    return step.kernel.__name__, str((source.signature, source.constants, source.attrs, step.num_warps, step.num_stages))


def gpu_of(target):
    return GPUTarget("hip", target, 64) if isinstance(target, str) else GPUTarget("cuda", target, 32)


# Triton 3.6 spills up to 120 bytes where 3.9 spills none: codes of fp8 with a scale for each element, norms on sm_100.
OLDER = 0 if Version(triton.__version__) >= Version("3.9") else 120


def build(step, target):
    options = OPTIONS | {"num_warps": step.num_warps, "num_stages": step.num_stages}
    return triton.compile(source_of(step), target=gpu_of(target), options=options)


def front_end(step, target):
    """The kernel in Triton's first language: what its Python code asks for exists, and has types that fit."""
    source, gpu = source_of(step), gpu_of(target)
    backend = make_backend(gpu)
    options = backend.parse_options({"num_warps": step.num_warps, "num_stages": step.num_stages, **source.parse_options()})
    context = ir.context()
    ir.load_dialects(context)
    backend.load_dialects(context)
    arguments = {
        "target": gpu,
        "options": options,
        "codegen_fns": backend.get_codegen_implementation(options),
        "module_map": backend.get_module_map(),
        "context": context,
    }
    return source.make_ir(*(arguments[name] for name in inspect.signature(source.make_ir).parameters))


# What ptxas 12.8, 12.9 and 13.4 make of their loops was read: nothing is written early.
READ_IN_MACHINE_CODE = ("scale_kernel", "multi_scale_kernel")


def left_running(ttgir):
    """Products of sm_90 that read registers, and are not waited for before the next trip of their loop may write these."""
    read = re.findall(r"(%\w+) = ttng.warp_group_dot %.* : tensor<[^>]*dot_op", ttgir)
    waits = re.findall(r"warp_group_dot_wait (.*) \{pendings = [1-9]", ttgir)
    return [name for name in read if any(re.search(rf"{name}\b", wait) for wait in waits)]


def assert_fits(built, target, tmp_path, spill=0):
    """Shared memory under the limit, and on NVIDIA nothing spilled, or little. See private.NOT_AHEAD."""
    if isinstance(target, int):
        assert built.metadata.name in READ_IN_MACHINE_CODE or not left_running(built.asm["ttgir"])
        assert built.metadata.shared <= SHARED[target]
        assert stack_bytes(built.asm["cubin"], tmp_path) <= spill + OLDER
    else:
        assert built.metadata.shared <= 65_536 and built.asm["hsaco"]
        (scratch,) = map(int, re.findall(r"\.private_segment_fixed_size: *(\d+)", built.asm["amdgcn"]))
        assert scratch <= spill  # registers for scalars that spill go to those for vectors, not to memory


def stack_bytes(cubin, tmp_path):
    """Local memory of the kernel as the bundled cuobjdump reports it: anything but 0 is a spill."""
    file = tmp_path / "kernel.cubin"
    file.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    out = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True).stdout
    return sum(map(int, re.findall(r"\b(?:STACK|LOCAL):(\d+)", out)))


def assert_builds(plans, target, tmp_path, name="", spill=None):
    """Every launch of these plans, each kind once. ``spill``: the bytes of stack that a kernel may have, by its name; else none."""
    steps = {kind(step): step for plan in plans for step in launches(plan, name)}
    assert steps
    for step in built_there(list(steps.values()), target):
        built = build(step, target)
        assert_fits(built, target, tmp_path, (spill or {}).get(step.kernel.__name__, 0))
        if by_tma(step):
            assert "cp.async.bulk.tensor" in built.asm["ptx"]


# the front end: everything that any plan asks for, on a GPU with descriptors and on one without


def asked_on(d):
    """Every launch that a plan asks for on this device, and the type or constant of each argument."""
    for maker, likes, options in every_call():
        at = device(89) if d.capability < 89 and wants_float8(maker, options) else d
        for step in launches(maker(tuple(likes), at, *options)):
            source = source_of(step)
            yield step, at.capability, (*source.signature.items(), *source.constants.items())


@pytest.fixture(scope="module")
def asked():
    """kernel -> kind -> launch, and its facts. What the front end does not look at makes no kind: alignment, warps, stages."""
    found = {}
    for step, capability, facts in chain(asked_on(device(80)), asked_on(device(90))):
        found.setdefault(step.kernel.__name__, {})[str(facts)] = (step, capability), facts
    return found


# Those of whole models and calls have a program for each layer: test_compile_tree.py. The last one: test_fp8.py.
BLACKWELL = "mx_rows_kernel", "nv_rows_kernel"  # built in test_fp8.py
KERNELS = [name.removesuffix("_kernel") for name in shipped("tree", "kept") if name not in BLACKWELL]


def test_every_kernel_is_asked_for(asked):
    assert set(asked) == {f"{name}_kernel" for name in KERNELS}


@pytest.mark.parametrize("name", KERNELS)
def test_the_front_end_takes_whatever_a_plan_asks_for(asked, name):
    for step, target in covering(asked[f"{name}_kernel"].values()):
        front_end(step, target)


# all the way, in every shipped config, with as much in one kernel as a plan ever asks for

WORDS = 8  # bytes of stack: an address
# Tests of these follow, here or in the files beside: they want other launches than those of every_call, or look closer.
OWN = ("gemm_pointer", "gemm_tma", "multi_gemm_pointer", "multi_gemm_tma", "multi_epilogue", "multi_codes", "norm", "merge")
OWN += ("quant", "quant4_strips", "dequantize", "lost", "by_g", "turn", "small_codes", "codes_parts", "add_parts")
OWN += ("fp8_blocks", "fp8_gemm", "fp8_rows", "gates", "multi_h", "multi_table")
STACK = {"embedding": WORDS, "slots": WORDS, "finish": WORDS, "multi_expand": WORDS}  # bytes, where they are not 0
STACK |= {"small_norm": WORDS, "embedding_tile": 104, "norm_bwd_finish": 32, "scale": 2 * WORDS, "shrink": WORDS}


@functools.cache
def whole(target):
    """kernel -> kind -> launch where all rows begin at 16 bytes, and its facts."""
    found = {}
    for step, _, facts in asked_on(device(target)):
        if all(
            a.aligned and (a.shape in ((), (1,)) or a.shape[-1] % 8 == 0) for a in arrays(step) if a.dtype.is_floating_point
        ):
            found.setdefault(step.kernel.__name__, {})[kind(step)] = step, (*facts, (step.num_warps, step.num_stages))
    return found


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("name", [name for name in KERNELS if name not in OWN])
def test_what_a_plan_asks_for_builds(name, target, tmp_path):
    """Every pair of arguments once; what lies at whole sixteens is written 16 bytes at a time."""
    steps = [*covering(whole(target).get(f"{name}_kernel", {}).values())]
    assert steps or name in ("norm_products", "factors", "bank")  # which no plan asks for everywhere
    for step in built_there(steps, target):
        built = build(step, target)
        assert_fits(built, target, tmp_path, STACK.get(name, 0))
        assert name != "slots" or "st.global.v4.b32" in built.asm.get("ptx", "st.global.v4.b32")


# Bytes of stack of norm_kernel: the most that Triton 3.9 gives it on sm_80, 90, 100 and 120. Registers that a tile needs go
UNALIGNED = 464  # to loads of single elements, where no row begins at 16 bytes,
FILLED_UP = 64  # to masks, where a rank is no multiple of 16,
NOT_SPLIT = 152  # to float32 factors beside a guard, where there is no memory for terms of them in half precision.
# W, the adapter, rank, whether a norm of before guards it, whether descriptors may be used, and the most bytes
NORMS = [(BF16, BF16, 384, guarded, tma, None) for guarded, tma in ((False, True), (False, False), (True, True))]
NORMS += [(BF16, BF16, 8, True, True, None), (BF16, BF16, 64, False, True, None), (BF16, BF16, 64, False, False, None)]
NORMS += [(BF16, BF16, 96, True, True, None), (BF16, FP32, 384, True, False, None)]  # one slab that is filled up
NORMS += [(BF16, FP32, 8, False, True, None), (FP32, FP32, 8, True, True, None)]
NORMS += [(weight, FP32, 384, True, True, most) for weight in (BF16, FP32) for most in (None, 20_000)]  # split, and not


@pytest.mark.parametrize(
    ("target", "weight", "adapter", "r", "guarded", "tma", "max_bytes"),
    on_targets(NORMS, lambda weight, adapter, r, guarded, tma, max_bytes: r == 384 and guarded and tma),
)
def test_norm(target, weight, adapter, r, guarded, tma, max_bytes, tmp_path):
    """With the kernels around it: the fingerprint, the split factors, the sums and the choice."""
    from fdora.triton.norm import plan_guarded_norm, plan_norm

    N, K = 1024, 2048
    likes = [alike(N, K, dtype=weight, aligned=tma), alike(r, K, dtype=adapter), alike(N, r, dtype=adapter)]
    if guarded:
        likes += [alike(N, dtype=FP32), alike(256, dtype=torch.int64)]
    maker = plan_guarded_norm if guarded else plan_norm
    plans = [maker(tuple(likes), device(target), max_bytes, flag) for flag in (False, True)]
    if target in (90, 100) and weight == BF16 and tma and r > (128 if target == 90 else 64) and max_bytes is None:
        assert all(map(by_tma, launches(plans[0], "norm")))
    stack = 0 if tma else UNALIGNED
    if r % 16 and adapter == BF16:  # split factors are filled up in memory
        stack = max(stack, FILLED_UP)
    if guarded and max_bytes:
        stack = max(stack, NOT_SPLIT)
    assert_builds(plans, target, tmp_path, spill={"norm_kernel": stack})


@pytest.mark.parametrize("target", [80, 90, 100])
def test_norm_of_the_columns_of_a_table(target, tmp_path):
    """W^T of an embedding: rows are adjacent there, and a thread still loads 16 bytes of them at a time."""
    from fdora.triton.norm import plan_norm

    V, d, r = 4096, 1024, 16
    likes = [alike(d, V, dtype=BF16, stride=(1, d)), alike(r, V, dtype=FP32), alike(d, r, dtype=FP32)]
    plan = plan_norm(tuple(likes), device(target), None, False)
    assert_builds([plan], target, tmp_path, "norm")
    (step,) = launches(plan, "norm")
    assert "ld.global.v4.b32" in build(step, target).asm["ptx"]


MERGES = [(BF16, BF16, r, tma, 2048) for r, tma in ((8, True), (64, False), (384, True), (384, False))]
MERGES += [(BF16, FP32, 384, True, 2048), (BF16, FP32, 64, False, 2048), (FP32, FP32, 64, True, 2048)]
MERGES += [(weight, FP32, 384, True, 1 << 15) for weight in (BF16, FP32)]  # too wide for split factors


@pytest.mark.parametrize(
    ("target", "weight", "adapter", "r", "tma", "K"), on_targets(MERGES, lambda weight, adapter, r, tma, K: r == 384)
)
def test_merge(target, weight, adapter, r, tma, K, tmp_path):
    from fdora.triton.merge import plan_merge

    N = 1024
    likes = [alike(N, K, dtype=weight, aligned=tma), alike(r, K, dtype=adapter), alike(N, r, dtype=adapter)]
    likes += [alike(N, dtype=FP32)] * 2
    plans = [plan_merge(tuple(likes), device(target), undo) for undo in (False, True)]
    assert bool(launches(plans[0], "split")) == (adapter == FP32 and K == 2048)
    assert_builds(plans, target, tmp_path, "merge")


# what forward asks of a product (the columns of W are contiguous), and backward: the kind of epilogue and what is beside it
MODES = {
    True: {
        "scale": ("scale", ()),
        "pre_scale": ("scale", ("bias", "pre_scale")),
        "residual": ("residual", ("bias",)),
        "scale, residual, pre_scale": ("scale", ("bias", "beside", "pre_scale")),
    },
    False: {
        "plain": ("none", ()),
        "dropped": ("none", ("seed",)),
        "dropped twice": ("none", ("seed", "x_masked")),
        "dropped twice, a part": ("none", ("origin", "x_masked")),
        "accumulate": ("accumulate", ()),
        "accumulate, dropped twice": ("accumulate", ("seed", "x_masked")),
    },
}
# Of these the largest tile, which fills registers and shared memory: the other modes have what they have, and more.
ROUGH = ("dropped", "dropped twice", "pre_scale", "accumulate")


def gemms(target, trans, mode):
    """Every tile that a product of this kind may be given there."""
    capability, (epilogue, beside) = target if isinstance(target, int) else 0, MODES[trans][mode]
    extra = bool({"pre_scale", "beside"} & {*beside}) or epilogue in ("residual", "accumulate")
    extra |= capability >= 100 and bool({"seed", "origin"} & {*beside})
    found = [*tiles(trans, extra, 90 <= capability < 120, capability)]
    rough = mode in ROUGH or (mode == "residual" and capability != 100) or target in LAST[1:]
    return [max(found, key=lambda config: config.BLOCK_M * config.BLOCK_N)] if rough else found


def product_plan(trans: bool, mode: str, config: GemmConfig, target):
    epilogue, beside = MODES[trans][mode]
    M = N = K = 4096

    def write(plan):
        x, h = plan.matrix(alike(M, K, dtype=BF16)), plan.matrix(alike(M, 384, dtype=BF16))
        w, b = (plan.matrix(alike(*s, dtype=BF16)) for s in (((N, K), (N, 384)) if trans else ((K, N), (384, N))))
        m, c, bias = (plan.vector(alike(N, dtype=t)) for t in (FP32, FP32, BF16))
        residual = (
            plan.matrix(alike(M, N, dtype=BF16)) if epilogue in ("residual", "accumulate") or "beside" in beside else None
        )
        seeds = {"seed": (), "origin": (3,)}
        seed = next((plan.matrix(alike(*seeds[n], dtype=torch.int64)) for n in beside if n in seeds), None)
        x_masked = plan.matrix(alike(M, K, dtype=BF16)) if "x_masked" in beside else None
        pre = plan.result("pre_scale", (M, N), BF16) if "pre_scale" in beside else None
        scaled = (m, c) if epilogue in ("scale", "residual") else (None, None)
        end = Epilogue(epilogue, *scaled, bias if "bias" in beside else None, residual)
        out = plan.result("y", (M, N), BF16)
        gemm(plan, out, x, h, Operand(w, b, trans), end, Masked(seed, 0.5 if seed else 0.0, x_masked), pre, config)

    return plan_of(write, device=device(target))


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize(("trans", "mode"), [(trans, mode) for trans, modes in MODES.items() for mode in modes])
def test_gemm(target, trans, mode, tmp_path):
    plans = [product_plan(trans, mode, config, target) for config in gemms(target, trans, mode)]
    assert plans and all(by_tma(step) == (target in (90, 100)) for plan in plans for step in plan.steps)
    addresses = 3 * WORDS if mode.startswith("scale, residual") else 0  # of a tile read and two written, on sm_100
    assert_builds(plans, target, tmp_path, spill={"gemm_tma_kernel": addresses})
