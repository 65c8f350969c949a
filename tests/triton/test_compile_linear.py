"""The layer's kernels build for every GPU we name, in the shipped configs: shared memory under the limit, no spills."""

import os

import pytest

triton = pytest.importorskip("triton", reason="needs Triton; `make test` installs it")

from fdora.triton.configs import gemm_config, power_of_two, scale_config, small_config  # noqa: E402
from fdora.triton.table import GEMM  # noqa: E402
from tests.triton.test_compile import TARGETS, assert_fits, build  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing; runs without TRITON_INTERPRET"
)

OFF = dict(EPILOGUE="none", HAS_BIAS=False, STORE_INNER=False, DROP=False, HAS_X0=False)
# what forward asks for (the columns of W are contiguous), and backward
MODES = {
    True: {
        "scale": OFF | dict(EPILOGUE="scale"),
        "inner": OFF | dict(EPILOGUE="scale", HAS_BIAS=True, STORE_INNER=True),
        "add": OFF | dict(EPILOGUE="add", HAS_BIAS=True),
    },
    False: {
        "plain": OFF,
        "dropped": OFF | dict(DROP=True),
        "dropped twice": OFF | dict(DROP=True, HAS_X0=True),
        "onto": OFF | dict(EPILOGUE="onto"),
        "onto, dropped twice": OFF | dict(EPILOGUE="onto", DROP=True, HAS_X0=True),
    },
}
ADDING = ("add", "onto")
LARGE = 128 * 256  # a tile that fills registers and shared memory


def gemms(target):
    """(w_rows, mode, config), each shipped config at least once: all of them where they were measured (sm_90), elsewhere
    the large tiles, in each mode."""
    capability = target if isinstance(target, int) else 0
    shapes = {w_rows: GEMM[w_rows] if 90 <= capability < 120 else [(64, 64, 64, 64), (4096,) * 4] for w_rows in MODES}
    seen = {}
    for w_rows, modes in MODES.items():
        for number, (mode, flags) in enumerate(modes.items()):
            for shape in shapes[w_rows]:
                config = gemm_config(*shape, w_rows, flags["STORE_INNER"] or flags["EPILOGUE"] in ADDING, capability)
                large = config.persistent and config.BLOCK_M * config.BLOCK_N == LARGE if config.tma else shape[0] > 64
                if large or (number == 0 and target != 100):
                    seen[w_rows, mode, config._replace(GROUP=8)] = None
    return list(seen)


def check(kernel, target, tensors, sizes, constants, warps, stages, tmp_path, more=()):
    """``constants`` may name None arguments; every tensor is 16-byte aligned, every size divisible by 16."""
    types = tensors | {n: "i32" for n in sizes} | dict(more)
    signature = {n: "constexpr" if n in constants else types.get(n, "constexpr") for n in kernel.arg_names}
    constants = {n: constants.get(n) for n, kind in signature.items() if kind == "constexpr"}
    aligned = [n for n, kind in signature.items() if kind[0] == "*" or n in sizes]
    built = build(kernel, target, signature, constants, aligned, warps, stages)
    assert_fits(built, target, tmp_path)


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_gemm(target, tmp_path):
    from fdora.triton import gemm

    for w_rows, mode, config in gemms(target):
        flags = MODES[w_rows][mode]
        bm, bn, bk = config.BLOCK_M, config.BLOCK_N, config.BLOCK_K
        vectors = {n: "*fp32" for n in ("m", "c")} | {"bias": "*bf16", "seed": "*i64"}
        scalars = {"threshold": "i64", "keep_scale": "fp32"}
        constants = flags | dict(BLOCK_M=bm, BLOCK_N=bn, BLOCK_K=bk, GROUP=config.GROUP)
        absent = [] if flags["STORE_INNER"] else ["inner"]
        absent += [] if flags["EPILOGUE"] in ADDING else ["add"]
        absent += [] if flags["HAS_X0"] else ["x0"]
        constants |= dict.fromkeys(absent)
        if config.tma:
            width = bn // 2 if config.halves else bn
            right = [bn, bk] if w_rows else [bk, bn]
            blocks = {n: [bm, bk] for n in ("x", "x0", "h")} | {n: right for n in "wb"}
            blocks |= {n: [bm, width] for n in ("out", "inner", "add")}
            tensors = {n: f"tensordesc<bf16{list(shape)}>" for n, shape in blocks.items()}
            constants |= dict(W_ROWS=w_rows, HALVES=config.halves, FLATTEN=config.persistent and not flags["DROP"])
            kernel, sizes = gemm._gemm_tma_kernel, ("M", "N", "K", "R", "PROGRAMS")
        else:
            tensors = {n: "*bf16" for n in ("x", "x0", "w", "h", "b", "out", "inner", "add")}
            unit = ("stride_wk", "stride_br") if w_rows else ("stride_wn", "stride_bn")
            constants |= dict.fromkeys(("stride_xk", "stride_hr", *unit), 1) | {"BLOCK_R": config.BLOCK_K}
            kernel = gemm._gemm_pointer_kernel
            sizes = ["M", "N", "K", "R", *(n for n in kernel.arg_names if n.startswith("stride_") and n not in constants)]
        check(kernel, target, tensors | vectors, sizes, constants, config.num_warps, config.num_stages, tmp_path, scalars)


@pytest.mark.parametrize("which", ["fwd", "bwd"])
@pytest.mark.parametrize("name", ["silu", "gelu", "gelu_tanh"])
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_act(target, name, which, tmp_path):
    from fdora.triton import act

    kernel = getattr(act, f"_act_{which}_kernel")
    tensors = {n: "*bf16" for n in ("a", "da", "gate", "up", "dgate", "dup")}
    check(kernel, target, tensors, ["count"], dict(ACT=name, BLOCK=act.BLOCK), 4, 3, tmp_path)


@pytest.mark.parametrize(("r", "dtype"), [(16, "bf16"), (64, "bf16"), (384, "bf16"), (16, "fp32")])  # float32: any r
@pytest.mark.parametrize("tokens", [16, 4096])
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_scale(target, tokens, r, dtype, tmp_path):
    from fdora.triton import scale

    config = scale_config(tokens, 4096, r, dtype == "bf16", target if isinstance(target, int) else 0)
    half = {n: f"*{dtype}" for n in ("dy", "kept", "x", "w", "h", "b", "dz", "dz_less")}
    wide = {n: "*fp32" for n in ("m", "c", "partial_m", "partial_bias", "partial_B", "dm", "dc", "dbias", "dB")}
    flags = dict(
        NEED_DZ=True, NEED_LESS=False, NEED_M=True, NEED_C=True, NEED_BIAS=True, RANK=config.rank, KEPT_INNER=dtype == "fp32"
    )
    flags |= dict(SINGLE=tokens == 16, BLOCK_M=config.BLOCK_M, BLOCK_N=config.BLOCK_N, ROWS=config.ROWS)
    units = dict.fromkeys(("stride_xk", "stride_wk", "stride_hr", "stride_br"), 1)
    for kernel, extra in (
        (scale._scale_kernel, {}),
        (scale._finish_kernel, dict(BLOCK_N=scale.FINISH_N, BLOCK_T=scale.FINISH_T)),
    ):
        if kernel is scale._finish_kernel and tokens == 16:
            continue  # one strip: nothing to add up
        strides = [n for n in kernel.arg_names if n.startswith("stride_") and n not in units]
        sizes = ["M", "N", "K", "R", *strides]
        warps = config.num_warps if kernel is scale._scale_kernel else 4
        more = {"tiny": "fp32", "strips": "i32"}
        check(kernel, target, half | wide, sizes, flags | units | extra, warps, 3, tmp_path, more)


@pytest.mark.parametrize("tokens", [1, 64])
@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_small(target, tokens, tmp_path):
    from fdora.triton import small

    rows, pdl = power_of_two(tokens), isinstance(target, int) and target >= 90
    tensors = {n: "*bf16" for n in ("x", "w", "a", "h", "b", "out", "inner", "bias", "u", "dA")}
    tensors |= {n: "*fp32" for n in ("m", "c", "part")}
    for columns in (False, True):
        block_n, block_k, warps, stages = small_config(rows, 4096, 4096, columns, target if isinstance(target, int) else 0)
        units = dict.fromkeys(
            ("stride_xk", "stride_un", *(("stride_wn", "stride_bn") if columns else ("stride_wk", "stride_br"))), 1
        )
        constants = units | dict(
            PARTS=8,
            SCALE=not columns,
            HAS_BIAS=not columns,
            STORE_INNER=not columns,
            PDL=pdl,
            STORE_H=not columns,
            NEED_A=columns,
        )
        constants |= dict.fromkeys(("m", "c", "bias", "inner") if columns else ("u", "dA"))
        constants |= dict(BLOCK_M=rows, BLOCK_N=block_n, BLOCK_K=block_k, BLOCK_R=64)
        sizes = ["N", "K", "R", *(n for n in small._small_kernel.arg_names if n.startswith("stride_") and n not in units)]
        more = {"M": "i32", "s": "fp32"}
        check(small._small_kernel, target, tensors, sizes, constants, warps, stages, tmp_path, more)
    constants = dict(stride_xk=1, stride_ak=1, PDL=pdl, BLOCK_M=rows, BLOCK_R=16, BLOCK_K=512 if rows < 64 else 128)
    sizes = ["K", "R", "span", "stride_xm", "stride_ar"]
    check(small._down_kernel, target, tensors, sizes, constants, 4, 3, tmp_path, {"M": "i32"})
