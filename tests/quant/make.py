"""One weight of every kind, of awkward sizes, with its float64 value from loops that share nothing with the package."""

import math

import torch

from fdora.quant import (
    from_awq,
    from_bnb,
    from_bnb_int8,
    from_fp8,
    from_gptq,
    from_hqq,
    from_int8,
    from_mxfp4,
    from_nvfp4,
    opaque,
)
from tests import device

NF4 = "-1 -0.6961928009986877 -0.5250730514526367 -0.39491748809814453 -0.28444138169288635 -0.18477343022823334 -0.09105003625154495 0 0.07958029955625534 0.16093020141124725 0.24611230194568634 0.33791524171829224 0.44070982933044434 0.5626170039176941 0.7229568362236023 1"
NF4 = [float(v) for v in NF4.split()]
FP4 = [0, 1 / 192, 2 / 3, 1, 1 / 3, 1 / 2, 1 / 6, 1 / 4]
FP4 += [-v for v in FP4]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


class State:
    """With the attributes of a QuantState of bitsandbytes."""

    def __init__(self, absmax, shape=None, blocksize=None, quant_type=None, dtype=None, offset=None, state2=None, code=None):
        self.absmax, self.shape, self.blocksize, self.quant_type = absmax, shape, blocksize, quant_type
        self.dtype, self.offset, self.state2, self.code = dtype, offset, state2, code


def randint(*shape, high=256, dtype=torch.uint8):
    return torch.randint(0, high, shape, device=device.NAME).to(dtype)


def matrix(N, K, value):
    """value(n, k) at (n, k), float64."""
    return torch.tensor([[float(value(n, k)) for k in range(K)] for n in range(N)], dtype=torch.float64, device=device.NAME)


def flat4(table, values, N, K, group, scale):
    """Of bitsandbytes: flat, high nibble first."""

    def value(n, k):
        e = n * K + k
        byte = values[e // 2]
        return table[byte >> 4 if e % 2 == 0 else byte & 15] * scale(e // group)

    return matrix(N, K, value)


def bnb_plain(kind, N, K, group=64, storage=torch.uint8):
    size = -(-N * K // 2)
    size += -size % storage.itemsize
    packed = randint(size, 1)
    absmax = torch.rand(-(-N * K // group), device=device.NAME) + 0.1
    state = State(absmax, torch.Size((N, K)), group, kind, torch.float32)
    table = {"nf4": NF4, "fp4": FP4}[kind]
    truth = flat4(table, packed.flatten().tolist(), N, K, group, absmax.tolist().__getitem__)
    weight = packed if storage == torch.uint8 else packed.view(-1).view(storage).unsqueeze(1)
    return from_bnb(weight, state), truth


def bnb_nested(kind, N, K, group=64):
    packed, groups = randint(-(-N * K // 2), 1), -(-N * K // group)
    codes, code256 = randint(groups), torch.linspace(-1, 1, 256, device=device.NAME)
    outer, offset = torch.rand(-(-groups // 256), device=device.NAME), torch.tensor(1.5, device=device.NAME)
    state = State(codes, torch.Size((N, K)), group, kind, torch.float32, offset, State(outer, blocksize=256, code=code256))

    def scale(b):
        return code256[codes[b].item()].item() * outer[b // 256].item() + offset.item()

    table = {"nf4": NF4, "fp4": FP4}[kind]
    return from_bnb(packed, state), flat4(table, packed.flatten().tolist(), N, K, group, scale)


def bnb_int8():
    codes, scb = (randint(33, 20).int() - 128).to(torch.int8), torch.rand(33, device=device.NAME)
    return from_bnb_int8(codes, scb, dtype=torch.float32), matrix(33, 20, lambda n, k: codes[n, k].item() * scb[n].item() / 127)


def rows4(codes, N, K, scale, group):
    """Low nibble first, one scale for a group of a row."""

    def value(n, k):
        byte = codes[n, k // 2].item()
        return E2M1[byte & 15 if k % 2 == 0 else byte >> 4] * scale(n, k // group)

    return matrix(N, K, value)


def mxfp4(N=7, K=96, three=False):
    codes, scales = randint(N, K // 2), randint(N, -(-K // 32), high=20) + 117
    scales[0, 0], scales[1, 0] = 0, 255
    truth = rows4(codes, N, K, lambda n, j: math.nan if scales[n, j] == 255 else 2.0 ** (scales[n, j].item() - 127), 32)
    return from_mxfp4(codes.view(N, -1, 16) if three else codes, scales, dtype=torch.float32), truth


def nvfp4(divide, N=7, K=40):
    codes = randint(N, K // 2)
    scales = (torch.rand(N, -(-K // 16), device=device.NAME) * 400).to(torch.float8_e4m3fn)
    whole = torch.tensor(0.37, device=device.NAME)
    g = whole.item()
    truth = rows4(codes, N, K, lambda n, j: scales[n, j].item() / g if divide else scales[n, j].item() * g, 16)
    return from_nvfp4(codes, scales, whole, divide, dtype=torch.float32), truth


def eight(make, dtype, block, N=133, K=150):
    codes = (randint(N, K).int() - 128).to(dtype) if dtype == torch.int8 else torch.randn(N, K, device=device.NAME).to(dtype)
    bn, bk = {None: (N, K), "row": (1, K)}.get(block) or block
    scales = torch.rand(-(-N // bn), -(-K // bk), device=device.NAME)
    truth = codes.double() * scales.double().repeat_interleave(bn, 0)[:N].repeat_interleave(bk, 1)[:, :K]
    return make(codes, scales, block, dtype=torch.float32), truth


def hqq(bits, axis, N=5, K=64, group=8, dtype=torch.float32, as_float=False):
    q = torch.randint(0, 2**bits, (N, K), device=device.NAME)
    groups = N * K // group
    size = (groups, 1) if axis == 1 else (1, groups)
    scale, zero = torch.rand(size, device=device.NAME).to(dtype), (torch.rand(size, device=device.NAME) * 8).to(dtype)
    grid = q.reshape(groups, group) if axis == 1 else q.reshape(group, groups)
    parts, step = 8 // bits, grid.shape[0] * bits // 8
    codes = sum(grid[p * step : (p + 1) * step] << 8 - bits * (p + 1) for p in range(parts)).to(torch.uint8)
    codes = codes.view(dtype) if as_float else codes
    meta = {"shape": torch.Size((N, K)), "axis": axis, "group_size": group, "packing": f"{bits}bit_u8", "nbits": bits}
    meta |= {"scale": scale, "zero": zero, "compute_dtype": dtype, "view_as_float": as_float, "unpack_view_dtype": torch.uint8}

    def value(n, k):
        e = n * K + k
        j = e // group if axis == 1 else e % groups
        return (q[n, k].item() - zero.flatten()[j].item()) * scale.flatten()[j].item()

    return from_hqq(codes, meta), matrix(N, K, value)


def word(values, bits):
    """32 bits, the first value lowest, as a signed int."""
    total = sum(v << bits * i for i, v in enumerate(values))
    return total - (1 << 32) if total >= 1 << 31 else total


def gptq(bits=4, version=1, act_order=True, N=24, K=32, group=8):
    groups, per = K // group, 32 // bits
    q = torch.randint(0, 2**bits, (K, N)).tolist()
    z = torch.randint(1, 2**bits, (groups, N)).tolist()
    scales = torch.rand(groups, N).half()
    g_idx = torch.randint(0, groups, (K,), dtype=torch.int32) if act_order else torch.arange(K, dtype=torch.int32) // group
    stored = [[v - (version == 1) for v in row] + [0] * (-N % per) for row in z]
    qweight = [[word([q[per * i + j][n] for j in range(per)], bits) for n in range(N)] for i in range(K // per)]
    qzeros = [[word(row[i : i + per], bits) for i in range(0, len(row), per)] for row in stored]
    truth = matrix(N, K, lambda n, k: scales[g_idx[k], n].item() * (q[k][n] - z[g_idx[k]][n]))
    tensors = [torch.tensor(t, dtype=torch.int32).to(device.NAME) for t in (qweight, qzeros)]
    last = g_idx.to(device.NAME) if act_order else None
    return from_gptq(*tensors, scales.to(device.NAME), last, bits=bits, version=version, dtype=torch.float32), truth


def awq(N=24, K=20, group=8):
    order, groups = (0, 2, 4, 6, 1, 3, 5, 7), -(-K // group)
    q, z = torch.randint(0, 16, (K, N)).tolist(), torch.randint(0, 16, (groups, N)).tolist()
    scales = torch.rand(groups, N).half()
    qweight, qzeros = (
        torch.tensor([[word([row[i + o] for o in order], 4) for i in range(0, N, 8)] for row in rows], dtype=torch.int32)
        for rows in (q, z)
    )
    truth = matrix(N, K, lambda n, k: scales[k // group, n].item() * (q[k][n] - z[k // group][n]))
    return from_awq(*(t.to(device.NAME) for t in (qweight, qzeros, scales)), group, dtype=torch.float32), truth


def any_function():
    half = torch.randn(9, 14, device=device.NAME)
    return opaque(twice, (9, 14), torch.float32, device.NAME, (half,)), 2 * half.double()


def twice(t):
    return 2 * t


CASES = {
    "nf4": lambda: bnb_plain("nf4", 5, 128),
    "nf4 across rows": lambda: bnb_plain("nf4", 7, 50),
    "nf4 odd": lambda: bnb_plain("nf4", 5, 33, group=32),
    "nf4 in one group": lambda: bnb_plain("nf4", 3, 10, group=4096),
    "nf4 as bf16": lambda: bnb_plain("nf4", 5, 33, storage=torch.bfloat16),
    "nf4 as float32": lambda: bnb_plain("nf4", 6, 64, storage=torch.float32),
    "nf4 nested": lambda: bnb_nested("nf4", 5, 128),
    "nf4 nested across rows": lambda: bnb_nested("nf4", 301, 70, group=32),
    "fp4": lambda: bnb_plain("fp4", 7, 50),
    "fp4 nested": lambda: bnb_nested("fp4", 5, 50),
    "bnb int8": bnb_int8,
    "mxfp4": mxfp4,
    "mxfp4 ragged": lambda: mxfp4(K=40),
    "mxfp4 of gpt-oss": lambda: mxfp4(three=True),
    "nvfp4": lambda: nvfp4(False, K=48),
    "nvfp4 divided": lambda: nvfp4(True),
    "fp8 tensor": lambda: eight(from_fp8, torch.float8_e4m3fn, None, 5, 6),
    "fp8 row": lambda: eight(from_fp8, torch.float8_e4m3fn, "row", 5, 6),
    "fp8 ragged block": lambda: eight(from_fp8, torch.float8_e4m3fn, (128, 128)),
    "fp8 small block": lambda: eight(from_fp8, torch.float8_e4m3fn, (2, 3), 7, 11),
    "int8 tensor": lambda: eight(from_int8, torch.int8, None, 5, 6),
    "int8 row": lambda: eight(from_int8, torch.int8, "row", 5, 6),
    "int8 block": lambda: eight(from_int8, torch.int8, (4, 4), 9, 6),
    **{f"hqq {b} bits axis {a}": lambda b=b, a=a: hqq(b, a) for b in (8, 4, 2, 1) for a in (0, 1)},
    "hqq across rows": lambda: hqq(4, 1, N=3, K=20, group=6),
    "hqq of float": lambda: hqq(4, 1, as_float=True),
    "gptq": gptq,
    "gptq version 2": lambda: gptq(version=2),
    "gptq in order": lambda: gptq(act_order=False),
    "gptq 8 bits": lambda: gptq(bits=8, N=9),
    "gptq 2 bits": lambda: gptq(bits=2, N=9),
    "gptq odd N": lambda: gptq(N=13),
    "awq": awq,
    "opaque": any_function,
}


# name -> what quantize is told beside the kind, which is its first word
QUANTISED = {
    "nf4": {},
    "nf4 nested": {"nested": True},
    "fp4": {},
    "int8": {},
    "fp8": {"block": (16, 32)},
    "fp8 row": {},
    "mxfp4": {},
    "nvfp4": {},
}
