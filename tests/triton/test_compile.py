"""Every shipped kernel builds for every GPU we name, without one: shared memory under the limit, no spills on NVIDIA."""

import os
import re
import subprocess
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="needs Triton; `make test` installs it")
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from fdora.triton._split import split_rank  # noqa: E402
from fdora.triton.configs import merge_config, norm_config  # noqa: E402

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing; runs without TRITON_INTERPRET"
)

SHARED = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}
TARGETS = [*SHARED, "gfx942"]
RANKS = (8, 64, 384)


def build(kernel, target, signature, constants, aligned, num_warps, num_stages):
    gpu = GPUTarget("hip", target, 64) if isinstance(target, str) else GPUTarget("cuda", target, 32)
    names = kernel.arg_names
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n in aligned}
    source = ASTSource(kernel, signature, {(names.index(n),): v for n, v in constants.items()}, attrs)
    return triton.compile(source, target=gpu, options={"num_warps": num_warps, "num_stages": num_stages})


def assert_fits(built, target, tmp_path):
    """Shared memory under the limit, and on NVIDIA nothing spilled."""
    if isinstance(target, int):
        assert built.metadata.shared <= SHARED[target]
        assert stack_bytes(built.asm["cubin"], tmp_path) == 0
    else:
        assert built.metadata.shared <= 65_536 and built.asm["hsaco"]


def stack_bytes(cubin, tmp_path):
    """Local memory of the kernel as the bundled cuobjdump reports it: anything but 0 is a spill."""
    file = tmp_path / "kernel.cubin"
    file.write_bytes(cubin)
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    out = subprocess.run([tool, "--dump-resource-usage", file], capture_output=True, text=True, check=True).stdout
    return sum(map(int, re.findall(r"\b(?:STACK|LOCAL):(\d+)", out)))


# W, A and B, and whether A and B stand for float32 ones, as fdora.triton._split makes them
MIXES = [
    ("bf16", "bf16", False),
    ("bf16", "fp32", False),
    ("bf16", "fp16", True),
    ("fp32", "fp16", True),
    ("fp32", "fp32", False),
]


# every config in every mix of dtypes; the guard, around the tile, with plain and with split factors
NORMS = [*((*MIXES[0], r, False) for r in RANKS), *((*mix, RANKS[-1], False) for mix in MIXES[1:])]
NORMS += [(*MIXES[3], RANKS[0], False), *((*MIXES[i], RANKS[-1], True) for i in (0, 2))]


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize(("weight", "adapter", "scaled", "r", "guarded"), NORMS)
def test_norm(target, r, weight, adapter, scaled, guarded, tmp_path):
    from fdora.triton.norm import GROUP, WORDS, _norm_kernel

    capability = target if isinstance(target, int) else 0
    r = split_rank(r) if scaled else r
    config = norm_config(r, adapter != "fp32", capability, half_weight=weight != "fp32")
    block_n, block_k, block_r, precision, warps, stages, _ = config
    pointers = {"W": f"*{weight}", "A": f"*{adapter}", "B": f"*{adapter}", "partial": "*fp32"}
    pointers |= {"seen": "*i64", "now": "*i64"} if guarded else {}
    pointers |= {"scale_n": "*fp32", "scale_k": "*fp32"} if scaled else {}
    sizes = {n: "i32" for n in ("N", "K", "R", "stride_wn", "stride_ar", "stride_bn")}
    constants = {n: None for n in ("seen", "now", "scale_n", "scale_k") if n not in pointers}
    constants |= {"stride_wk": 1, "stride_ak": 1, "stride_br": 1, "GUARDED": guarded, "WORDS": WORDS, "TMA": False}
    constants |= {"BLOCK_N": block_n, "BLOCK_K": block_k, "BLOCK_R": block_r, "GROUP": GROUP, "EVEN": True}
    constants |= {"PRECISION": precision, "SCALED": scaled, "PDL": guarded and capability >= 90}
    signature = {n: (pointers | sizes | {"s": "fp32"}).get(n, "constexpr") for n in _norm_kernel.arg_names}
    built = build(_norm_kernel, target, signature, constants, [*pointers, *sizes], warps, stages)
    assert_fits(built, target, tmp_path)


@pytest.mark.parametrize("target", [90, 100], ids=str)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("guarded", [False, True])
def test_norm_from_descriptors(target, guarded, scaled, tmp_path):
    from fdora.triton.norm import GROUP, WORDS, _norm_kernel

    block_n, block_k, block_r, precision, warps, stages, tma = norm_config(384, True, target, aligned=True)
    assert tma
    pointers = {"partial": "*fp32"} | ({"seen": "*i64", "now": "*i64"} if guarded else {})
    pointers |= {"scale_n": "*fp32", "scale_k": "*fp32"} if scaled else {}
    half = "fp16" if scaled else "bf16"
    blocks = {"W": [block_n, block_k], "A": [block_r, block_k], "B": [block_n, block_r]}
    descriptors = {n: f"tensordesc<{'bf16' if n == 'W' else half}{block}>" for n, block in blocks.items()}
    sizes = {n: "i32" for n in ("N", "K", "R")}
    constants = {n: None for n in _norm_kernel.arg_names if n.startswith("stride")}
    constants |= {"GUARDED": guarded, "WORDS": WORDS, "TMA": True, "SCALED": scaled, "PDL": guarded}
    constants |= {n: None for n in ("seen", "now", "scale_n", "scale_k") if n not in pointers}
    constants |= {"BLOCK_N": block_n, "BLOCK_K": block_k, "BLOCK_R": block_r, "GROUP": GROUP, "EVEN": True}
    constants |= {"PRECISION": precision}
    signature = {n: (descriptors | pointers | sizes | {"s": "fp32"}).get(n, "constexpr") for n in _norm_kernel.arg_names}
    built = build(_norm_kernel, target, signature, constants, [*pointers, *sizes], warps, stages)
    assert built.metadata.shared <= SHARED[target]
    assert stack_bytes(built.asm["cubin"], tmp_path) == 0
    assert "cp.async.bulk.tensor" in built.asm["ptx"]


# above 64 runs the config of 64
MERGES = [*((*mix, 64, False) for mix in MIXES), (*MIXES[0], 8, False), *((*MIXES[i], 64, True) for i in (0, 3))]


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize(("weight", "adapter", "scaled", "r", "undo"), MERGES)
def test_merge(target, r, weight, adapter, scaled, undo, tmp_path):
    from fdora.triton.merge import GROUP, _merge_kernel

    capability = target if isinstance(target, int) else 0
    block_n, block_k, block_r, precision, warps, stages, _ = merge_config(
        split_rank(r) if scaled else r, adapter != "fp32", capability, half_weight=weight != "fp32"
    )
    pointers = {"W": f"*{weight}", "A": f"*{adapter}", "B": f"*{adapter}", "m": "*fp32", "c": "*fp32", "out": f"*{weight}"}
    sizes = {n: "i32" for n in ("N", "K", "R", "stride_wn", "stride_ar", "stride_bn")}
    constants = {"stride_wk": 1, "stride_ak": 1, "stride_br": 1, "UNDO": undo, "SCALED": scaled}
    pointers |= {"scale_n": "*fp32", "scale_k": "*fp32"} if scaled else {}
    constants |= {n: None for n in ("scale_n", "scale_k") if n not in pointers}
    constants |= {"BLOCK_N": block_n, "BLOCK_K": block_k, "BLOCK_R": block_r, "GROUP": GROUP, "EVEN": True}
    constants |= {"PRECISION": precision, "TMA": False}
    signature = {n: (pointers | sizes | {"s": "fp32"}).get(n, "constexpr") for n in _merge_kernel.arg_names}
    built = build(_merge_kernel, target, signature, constants, [*pointers, *sizes], warps, stages)
    assert_fits(built, target, tmp_path)


@pytest.mark.parametrize("target", [90, 100], ids=str)
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize(("r", "undo"), [(8, False), (64, False), (64, True), (384, False), (384, True)])
def test_merge_from_descriptors(target, r, scaled, undo, tmp_path):
    from fdora.triton.merge import GROUP, _merge_kernel

    block_n, block_k, block_r, precision, warps, stages, tma = merge_config(
        r, True, target, aligned=True, plain=not (scaled or undo)
    )
    assert tma
    half = "fp16" if scaled else "bf16"
    blocks = {"W": [block_n, block_k], "A": [block_r, block_k], "B": [block_n, block_r], "out": [block_n, block_k]}
    descriptors = {n: f"tensordesc<{half if n in 'AB' else 'bf16'}{block}>" for n, block in blocks.items()}
    pointers = {"m": "*fp32", "c": "*fp32"} | ({"scale_n": "*fp32", "scale_k": "*fp32"} if scaled else {})
    sizes = {n: "i32" for n in ("N", "K", "R")}
    constants = {n: None for n in _merge_kernel.arg_names if n.startswith("stride")}
    constants |= {n: None for n in ("scale_n", "scale_k") if n not in pointers}
    constants |= {"BLOCK_N": block_n, "BLOCK_K": block_k, "BLOCK_R": block_r, "GROUP": GROUP, "EVEN": True}
    constants |= {"PRECISION": precision, "TMA": True, "SCALED": scaled, "UNDO": undo}
    signature = {n: (descriptors | pointers | sizes | {"s": "fp32"}).get(n, "constexpr") for n in _merge_kernel.arg_names}
    built = build(_merge_kernel, target, signature, constants, [*pointers, *sizes], warps, stages)
    assert_fits(built, target, tmp_path)


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("lora", ["bf16", "fp32"])
@pytest.mark.parametrize("which", ["fwd", "bwd"])
def test_compose(target, lora, which, tmp_path):
    from fdora.triton import compose

    tensors = {"base": "*bf16", "lora": f"*{lora}", "dbase": "*bf16", "dlora": f"*{lora}", "dy": "*bf16", "y": "*bf16"}
    tensors |= {n: "*fp32" for n in ("g", "bias", "partial_g", "partial_bias")}
    sizes = {n: "i32" for n in ("M", "N", "stride_base", "stride_lora", "stride_y", "stride_dy")}
    kernel = getattr(compose, f"_compose_{which}_kernel")
    constants = {"DELTA": False, "HAS_BIAS": True, "BLOCK_M": compose.BLOCK_M, "BLOCK_N": compose.BLOCK_N}
    if which == "bwd":
        constants = {"DELTA": False, "BLOCK_M": compose.BWD_M, "BLOCK_N": compose.BWD_N, "ROWS": compose.ROWS}
        constants |= {f"NEED_{n}": True for n in ("BASE", "LORA", "G", "BIAS")}
    signature = {n: (tensors | sizes | {"s": "fp32"}).get(n, "constexpr") for n in kernel.arg_names}
    aligned = [n for n in kernel.arg_names if n in tensors or n in sizes]
    built = build(kernel, target, signature, constants, aligned, 4, 3)
    if isinstance(target, int):
        assert built.metadata.shared <= SHARED[target]
        assert stack_bytes(built.asm["cubin"], tmp_path) == 0


@pytest.mark.parametrize("target", TARGETS, ids=str)
def test_fingerprint(target, tmp_path):
    from fdora.triton import _fingerprint
    from fdora.triton.norm import SUM_N, SUM_T, WORDS, _choose_kernel

    pointers = {"A": "*i64", "B": "*i64", "out": "*i64"}
    sizes = {n: "i32" for n in ("count_a", "count_b", "cols_a", "cols_b", "stride_ar", "stride_bn")}
    constants = {
        "stride_ak": 1,
        "stride_br": 1,
        "PACKED_A": True,
        "PACKED_B": True,
        "BLOCK": _fingerprint.BLOCK,
        "KIND": 1,
        "WORDS": 256,
        "PDL": target in (90, 100, 120),
    }
    kernel = _fingerprint._fingerprint_kernel
    signature = {n: (pointers | sizes | {"s": "fp32"}).get(n, "constexpr") for n in kernel.arg_names}
    built = [build(kernel, target, signature, constants, [*pointers, *sizes], 16, 3)]
    pointers = {"partial": "*fp32", "c": "*fp32", "out": "*fp32", "seen": "*i64", "now": "*i64"}
    signature = {n: (pointers | {"N": "i32", "strips": "i32"}).get(n, "constexpr") for n in _choose_kernel.arg_names}
    constants = {"KEEP": True, "WORDS": WORDS, "BLOCK_N": SUM_N, "BLOCK_T": SUM_T, "PDL": target in (90, 100, 120)}
    built.append(build(_choose_kernel, target, signature, constants, [*pointers, "N"], 4, 3))
    for kernel in built:
        assert not isinstance(target, int) or stack_bytes(kernel.asm["cubin"], tmp_path) == 0


@pytest.mark.parametrize("target", TARGETS, ids=str)
@pytest.mark.parametrize("which", ["A", "B"])
@pytest.mark.parametrize("guarded", [False, True])
def test_split(target, which, guarded, tmp_path):
    from fdora.triton import _split

    pointers = {"x": "*fp32", "out": "*fp16", "scale": "*fp32"} | ({"seen": "*i64", "now": "*i64"} if guarded else {})
    sizes = {n: "i32" for n in ("P", "R", "R3", *(f"stride_{t}{'r' if which == 'A' else 'p'}" for t in "xo"))}
    kernel = _split._split_kernel
    constants = {f"stride_{t}{'p' if which == 'A' else 'r'}": 1 for t in "xo"} | {"LO_FIRST": which == "A"}
    constants |= {"GUARDED": guarded, "WORDS": _split.WORDS, "BLOCK_P": _split.BLOCK_P, "BLOCK_R": _split.BLOCK_R}
    constants |= {n: None for n in ("seen", "now") if n not in pointers}
    signature = {n: (pointers | sizes).get(n, "constexpr") for n in kernel.arg_names}
    built = build(kernel, target, signature, constants, [*pointers, *sizes], 4, 3)
    assert not isinstance(target, int) or stack_bytes(built.asm["cubin"], tmp_path) == 0
