"""How far norms and layers on a quantised weight are from those of the weight that its format decodes, in float64.

    python -m bench.quant_error [--device cuda] [--write docs/quantised.md]

One 1024 x 1024 weight of each kind, r = 16, 256 tokens. The norm: its worst row. The layer: Frobenius, of y with x in float32
and in bfloat16, where the dense layer of the same decoded weight stands beside it. Bytes are those stored. ``--write`` puts the
figures into the table of that page.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from bench.fp8_error import coded
from bench.packed import FORMATS
from bench.suite import Suite
from fdora.functional import dora_init, dora_linear, dora_norm
from fdora.quant import Affine, QuantWeight, TorchaoNf4, opaque, quantize
from tests import reference
from tests.close import rel_l2

N = K = 1024
R, M, S = 16, 256, 2.0


def scales(*shape, device):
    return (torch.rand(shape, device=device) * 2e-3 + 1e-3).half()


def packed(device):
    """Formats that nothing here packs: any codes will do, for only what is made of them is looked at."""
    codes, steps = torch.randint(256, (N * K // 2,), device=device).to(torch.uint8), N * K // 64
    nf4 = codes, torch.randint(-127, 128, (steps,), device=device).to(torch.int8)
    nf4 += torch.rand(steps // 256, device=device) * 1e3 + 1e3, torch.tensor(0.2, device=device)
    table16 = torch.linspace(-1, 1, 16, device=device)
    yield "torchao_nf4", QuantWeight("torchao_nf4", (*nf4, table16), (N, K), torch.float32, TorchaoNf4(64, 256))
    codes8 = torch.randint(-8, 8, (N, K), device=device).to(torch.int8)
    zero = torch.randint(-2, 3, (N, K // 32), device=device).to(torch.int8)
    affine = codes8, scales(N, K // 32, device=device).float(), zero
    yield "affine", QuantWeight("affine", affine, (N, K), torch.float32, Affine((1, 32)))
    half = torch.randn(N, K, device=device).half()
    yield "mxfp8", coded(torch.randn(N, K, device=device), "mxfp8").to(dtype=torch.float32)
    yield "opaque", opaque(torch.Tensor.float, (N, K), torch.float32, device, (half,))


def weights(device):
    W = torch.randn(N, K, device=device) * 0.02
    for kind, options in (
        ("nf4", {}),
        ("nf4", {"nested": True}),
        ("fp4", {}),
        ("mxfp4", {}),
        ("nvfp4", {}),
        ("int8", {}),
        ("fp8", {}),
        ("fp8", {"block": (128, 128)}),
    ):
        yield kind, quantize(W, kind, **options, dtype=torch.float32)
    yield from packed(device)
    yield from ((kind, make(W)) for kind, make in FORMATS.items())


def measured(W, device):
    """Errors of the norm, of the layer in float32 and bfloat16, and of the dense layer in bfloat16."""
    dense = W.dequantize(torch.float64)
    A, B, m = dora_init(W, R)
    B = B + torch.randn_like(B) * dense.std().float() / 4
    m = m * (1 + 0.05 * torch.randn_like(m))
    c = reference.norm(dense, A, B, S)
    errors = [((dora_norm(W, A, B, s=S).double() - c) / c).abs().max().item()]
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(M, K, device=device).to(dtype)
        truth = reference.dora(x, dense, A, B, m, S)
        errors.append(rel_l2(dora_linear(x, W.to(dtype=dtype), A, B, m, s=S), truth))
    errors.append(rel_l2(dora_linear(x, dense.bfloat16(), A, B, m, s=S), truth))
    return errors


def figures(device="cpu"):
    """Kind, bytes per weight, errors: the worst of the weights of a kind."""
    torch.manual_seed(0)
    found = {}
    for kind, W in weights(device):
        size, *errors = found.get(kind, (0.0,) * 5)
        found[kind] = (max(size, W.nbytes / (N * K)), *map(max, zip(errors, measured(W, device), strict=True)))
    return found


def written(page, found):
    """The page with the last three columns of its rows filled in: of several kinds in a row, the worst."""

    def filled(row):
        cells = row[0].split("|")
        kinds = re.findall(r"`(\w+)`", cells[1])
        if not kinds or not set(kinds) <= found.keys():
            return row[0]
        errors = [max(found[kind][i] for kind in kinds) for i in (1, 2, 3)]
        return "|".join([*cells[:-4], *(f" {e:.0e} " for e in errors), ""])

    return re.sub(r"^\| `.*\|$", filled, page, flags=re.M)


def measure(run):
    found = figures(run.options.device)
    head = ("bytes per weight", "norm", "layer, float32", "layer, bfloat16", "dense, bfloat16")
    for kind, values in found.items():
        run.add({"kind": kind} | {name: float(f"{value:.3g}") for name, value in zip(head, values, strict=True)})
    if page := run.options.write:
        page.write_text(written(page.read_text(), found))


OPTIONS = {
    "--write": dict(type=Path, metavar="PAGE", help="put the figures into the table of this page"),
}


main = Suite(measure, OPTIONS)
