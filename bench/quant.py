"""A linear on an NF4 base against its rivals, and the norm of codes against that of a dense weight.

    python -m bench.quant --device cuda --json FILE
    python -m bench.quant --device cuda --shapes 4096x4096 --M 1,512 --r 64 --rival-path FOLDER --json FILE

NF4 with nested scales as bitsandbytes packs it, bf16 x and adapters. GPU time by CUDA graph (wall time on a CPU), ways in
turns, medians; ``fwd`` under no_grad, ``both`` with gradients of x and the adapters. Every way is compared with float64
for the weight as it is decoded before it is timed. The ways of a layer:

    linear                      x W^T of a dense bf16 W
    linear4bit                  bitsandbytes' frozen layer
    qlora, qdora                PEFT's LoRA and DoRA around that layer
    unsloth_qlora, axolotl_qlora, axolotl_qdora   their Functions with a packed W (--rival-path; the last keeps its norm)
    fdora, fdora_inside         dora_linear on the same codes, with the norm given and computed in the call
    fdora_hqq, fdora_gptq, ...  the same on codes of HQQ in groups of 64, GPTQ and AWQ of 128; only where --ways has it

The rows of the norm: ``codes`` is dora_norm of the codes, ``dense`` that of a dense bf16 W, ``decode`` bitsandbytes'
dequantisation alone, ``dequantize`` ours, ``dequantize_norm`` that with the norm in the same pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from statistics import geometric_mean

import torch
from torch import Tensor, nn

from bench.checkouts import RIVAL_PATH
from bench.clock import Failures, free, medians_of
from bench.layer import TOLERANCE
from bench.packed import FORMATS
from bench.suite import Run, Some, Suite, shapes
from bench.table import columns
from bench.truth import norm_of
from bench.ways import BF16, FDORA, Inputs, S, Truths, Way, build, by_mode, checked, errors, trained, truths, warm
from fdora.functional import dora_norm
from fdora.quant import QuantWeight, from_bnb
from tests.memory import peak_bytes

SHAPES = shapes("4096x4096,4096x14336,14336x4096,8192x8192,8192x28672,28672x8192")  # K x N
WAYS = (
    *("linear", "linear4bit", "qlora", "qdora", "unsloth_qlora", "axolotl_qlora", "axolotl_qdora", "fdora"),
    "fdora_inside",
)
CODED = tuple(f"fdora_{of}{end}" for end in ("", "_inside") for of in FORMATS)
# Each way by its name beside a dense weight.
DENSE = {"linear": "frozen", "qlora": "peft_lora", "qdora": "peft_dora", "unsloth_qlora": "unsloth_lora"}
DENSE |= {"axolotl_qlora": "axolotl_lora", "axolotl_qdora": "axolotl_dora"}


class Quantised:
    """The inputs of a case, its W packed by bitsandbytes and as it is decoded."""

    def __init__(self, M: int, K: int, N: int, r: int, device: str):
        import bitsandbytes as bnb

        self.i = Inputs.random(M, K, N, r, BF16, device)
        self.weight = bnb.nn.Params4bit(self.i.W, requires_grad=False, compress_statistics=True, quant_type="nf4")
        self.weight = self.weight.to(device)
        self.qw, self.dense = from_bnb(self.weight), self.i.W
        self.i.W = self.qw.dequantize(BF16)
        self.i.norm = dora_norm(self.qw, self.i.A, self.i.B, s=S, backend="eager").detach()
        with torch.no_grad():
            self.i.m.copy_(self.i.norm * (1 + 0.0015 * torch.randn_like(self.i.norm)))
        self.each: dict[str, tuple[Inputs, Truths]] = {}

    def coded(self, name: str) -> tuple[Inputs, Truths]:
        """The same inputs with W as codes of another format, where a way names one; else of this one."""
        of = name.split("_")[1] if name in CODED else ""
        if of not in self.each:
            qw = FORMATS[of](self.dense) if of else self.qw
            norm = dora_norm(qw, self.i.A, self.i.B, s=S, backend="eager").detach() if of else self.i.norm
            i = replace(self.i, W=qw, norm=norm)
            self.each[of] = i, truths(i, qw.dequantize(torch.float32))
        return self.each[of]

    def layer(self) -> nn.Module:
        import bitsandbytes as bnb

        made = bnb.nn.Linear4bit(*self.i.W.shape[::-1], bias=False, compute_dtype=BF16, quant_type="nf4", device="meta")
        made.weight, made.quant_state = self.weight, self.weight.quant_state
        return made

    def way(self, name: str, rival_path: list[Path]) -> Way:
        if name == "linear4bit":
            return trained(self.layer(), self.i, {}, "frozen")
        if name == "axolotl_qdora" and self.i.A.shape[0] > 128:
            # It holds A's rows, padded to 512, by 2048 columns in registers: at r = 384 Triton had not ended after 4 minutes.
            raise NotImplementedError("its kernel of the norm does not compile in minutes above r = 128")
        if name.startswith("fdora"):
            return build(name, self.coded(name)[0])
        weights = {"linear": self.i.W, "qlora": self.layer(), "qdora": self.layer()}
        i = replace(self.i, W=weights.get(name, self.weight.data))
        return build(DENSE.get(name, name), i, rival_path, state=self.weight.quant_state)


def layer_rows(M: int, K: int, N: int, r: int, options) -> list[dict]:
    case = Quantised(M, K, N, r, options.device)
    ways, error, failed, peak, _ = checked(
        options.ways,
        lambda name: case.way(name, options.rival_path),
        lambda name, way: errors(way, case.coded(name)[1]),
        TOLERANCE,
        options.device,
        (*FDORA, *CODED),
        [name for name in options.ways if M * N <= 2**28 or name != "qdora"],
    )
    case.each.clear()
    free(options.device)
    rows = []
    for mode, fns in by_mode(ways, "both"):
        row = {"M": M, "K": K, "N": N, "r": r, "mode": mode, "ms": medians_of(fns, options.device, options.runs, failed)}
        rows.append(row | {"peak_mb": dict(peak), "error": dict(error), "failed": dict(failed)})
    return rows


def norm_row(K: int, N: int, r: int, roof: dict[str, float], options) -> dict:
    import bitsandbytes as bnb

    case, device = Quantised(1, K, N, r, options.device), options.device
    i, qw = case.i, case.qw
    A, B = i.A.detach(), i.B.detach()
    fns = {
        "codes": partial(dora_norm, qw, A, B, s=S),
        "dense": partial(dora_norm, i.W, A, B, s=S),
        "decode": partial(bnb.functional.dequantize_4bit, case.weight.data, case.weight.quant_state),
    }
    if device != "cpu":
        fns |= {"dequantize": decoding(qw, None), "dequantize_norm": decoding(qw, (A, B))}
    truth = norm_of(qw.dequantize(torch.float64), A, B, S)
    wrong = ((dora_norm(qw, A, B, s=S).double() - truth).abs() / truth).max().item()
    failed = Failures()
    ms = medians_of(fns, device, options.runs, failed)
    row = {"K": K, "N": N, "r": r, "ms": ms, "error": float(f"{wrong:.2e}")}
    row["peak_mb"] = round(peak_bytes(fns["codes"], device) / 2**20, 3)
    if roof:
        stored = sum(t.nbytes for t in qw.tensors if t is not None)
        row["roof_ms"] = {
            "bytes": round(stored / roof["bytes_per_ms"], 5),
            "product": round(2 * N * K * r / roof["flops_per_ms"], 5),
        }
    return row | {"failed": dict(failed)}


def decoding(qw: QuantWeight, adapter: tuple[Tensor, Tensor] | None) -> Callable[[], object]:
    """W dense in bf16 as the plan of a layer makes it, with its norm where there is an adapter."""
    from fdora.triton.codes import coded_of, packed
    from fdora.triton.dequantize import dequantized, dequantized_with_norm
    from fdora.triton.runtime.builder import Builder
    from fdora.triton.runtime.device import device_of
    from fdora.triton.runtime.walk import like, run

    tensors = (*(adapter or ()), *(t for t in qw.tensors if t is not None))
    plan = Builder("W of codes", device_of(qw.device))
    arrays = [like(t) for t in tensors]
    if adapter is None:
        dequantized(plan, packed(plan, arrays, coded_of(qw.spec)), BF16)
        done = plan.plan()
        return lambda: run(done, tensors)
    A, B = map(plan.matrix, arrays[:2])
    W, s = packed(plan, arrays[2:], coded_of(qw.spec)), plan.scalar("s")
    dequantized_with_norm(plan, W, A, B, s, plan.result("c", qw.shape[:1], torch.float32), BF16)
    done = plan.plan()
    return lambda: run(done, tensors, (S,))


def compile_case(ways: list[str], *case: int) -> None:
    made = Quantised(*case, "cuda")
    for name in ("fdora", "fdora_inside", *(way for way in ways if way in CODED)):
        warm(made.way(name, []))
    dora_norm(made.i.W, made.i.A.detach(), made.i.B.detach(), s=S)


PAIRS = (
    *(("fdora", other) for other in ("linear", "linear4bit", "qlora", "unsloth_qlora", "axolotl_qlora")),
    *((f"fdora_{of}", "fdora") for of in FORMATS),
    *((f"fdora_{of}_inside", "fdora_inside") for of in FORMATS),
    *(("qdora", "fdora"), ("qdora", "fdora_inside"), ("axolotl_qdora", "fdora"), ("fdora_inside", "qlora")),
)


def summarize(rows: list[dict]) -> dict:
    """Geometric means and the worst cases, of few tokens and of many."""
    found = {}
    for mode, (name, least, most) in product(("fwd", "both"), (("at least", 512, math.inf), ("fewer than", 0, 511))):
        mine = [row["ms"] for row in rows if row["mode"] == mode and least <= row["M"] <= most]
        each = {f"{a}/{b}": [ms[a] / ms[b] for ms in mine if a in ms and b in ms] for a, b in PAIRS}
        means = {pair: [round(geometric_mean(values), 3), round(max(values), 3)] for pair, values in each.items() if values}
        found |= {f"{mode}, {name} 512 tokens": means} if means else {}
    return {"mean_and_worst": found}


LAYER = "{M}, {K} x {N}, {r}, {mode}"


def markdown(result: dict) -> str:
    """Of the layers a mean and the worst case by tokens; of the norms every case."""
    spread, few = result["summary"]["mean_and_worst"], [row for row in result["rows"] if row["M"] in (1, 16, 4096)]
    pairs = dict.fromkeys(pair for values in spread.values() for pair in values)
    names = [way for way in (*WAYS, *CODED) if any(way in row["ms"] for row in few)]
    means = {"mean / worst": "{what}"} | {pair: f"{{{pair}[0]:.2f}} / {{{pair}[1]:.2f}}" for pair in pairs}
    times = {"M, K x N, r = 64, ms": LAYER} | {name: f"{{ms[{name}]:.3f}}" for name in names}
    norms = {"N x K, r": "{N} x {K}, {r}"}
    norms |= {f"{way}, us": f"{{us[{way}]:.1f}}" for way in dict.fromkeys(way for row in result["norms"] for way in row["ms"])}
    norms |= {"roof, us": "{roof:.1f}", "error": "{error:.0e}"}
    parts = [
        (means, [{"what": what} | values for what, values in spread.items()]),
        (times, [row for row in few if row["r"] == 64]),
        (norms, [in_us(row) for row in result["norms"]]),
    ]
    return "\n\n".join(columns(rows, said) for said, rows in parts if rows)


def in_us(row: dict) -> dict:
    roof = {"roof": 1e3 * max(row["roof_ms"].values())} if "roof_ms" in row else {}
    return row | {"us": {way: 1e3 * ms for way, ms in row["ms"].items()}} | roof


OPTIONS = {
    "--shapes": (SHAPES, "KxN, comma separated"),
    "--M": [1, 16, 512, 4096, 16384],
    "--r": [16, 64, 384],
    "--ways": (Some((*WAYS, *CODED), WAYS), "comma separated"),
    "--no-norms": (False, "layers alone"),
    **RIVAL_PATH,
}


def cases(options) -> list[tuple[int, ...]]:
    return [(M, K, N, r) for M, (K, N), r in product(options.M, options.shapes, options.r)]


def measure(run: Run) -> None:
    options = run.options
    run.set(norms=[], summary={})
    if not options.no_norms:
        for (K, N), r in product(options.shapes, options.r):
            run.add(norm_row(K, N, r, {} if options.device == "cpu" else run.facts, options), part="norms")
    for case in run.cases(cases(options)):
        run.add(*layer_rows(*case, options))
        free(options.device)
    run.set(summary=summarize(run.result["rows"]))
    print("\n" + markdown(run.result))
    for row in run.result["norms"]:
        run.failed |= row["failed"]
    run.end("fdora")


main = Suite(
    measure,
    OPTIONS,
    runs=7,
    seconds=math.inf,
    ahead=lambda options: (compile_case, [(options.ways, *case) for case in cases(options)]),
)
