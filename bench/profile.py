"""Where the time of a layer or a model goes: NVTX ranges, a table of kernels with their share of the roof, a chrome trace.

    python -m bench.profile layer --M 4096 --K 4096 --N 4096 --r 64 --device cuda --out FOLDER
    python -m bench.profile vit --layers 4 --way peft_fdora_fused --mode inference --device cuda --out FOLDER
    python -m bench.profile model --layers 2 --way peft_fdora --device cuda --out FOLDER

FOLDER gets ``trace.json`` (chrome://tracing, Perfetto), ``kernels.json`` and ``kernels.md``. A kernel of ours has the flops and
bytes that its plan counts (``explain`` shows the same), a matrix product of torch's those of its shapes; the share of the roof
is the larger of flops over the rate of a large bf16 product and bytes over that of a large copy, both measured here first, over
the kernel's time. Of other kernels nobody says what they move. Each plan and each block is a range with its name, in the trace
and as NVTX: ``nsys profile -t cuda,nvtx --capture-range=cudaProfilerApi python -m bench.profile ... --capture`` shows them, of
the call alone, which nothing else profiles then. Without a GPU rows are torch's operations.
"""

from __future__ import annotations

import warnings
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import nn

from bench import ways
from bench.kernels import kernels_of, short
from bench.suite import One, Run, Suite, shown


class Step(NamedTuple):
    """Of a plan: what runs, and what the plan says that it costs."""

    plan: str
    what: str
    flops: float
    bytes: float


class Ran(NamedTuple):
    """One kernel."""

    name: str
    us: float
    plan: str = ""
    flops: float = 0.0
    bytes: float = 0.0


@contextmanager
def named(name: str, device: str) -> Iterator[None]:
    """A range in torch's trace, and for NVIDIA's tools."""
    nvtx = torch.cuda.nvtx.range(name) if device != "cpu" else nullcontext()
    with torch.profiler.record_function(name), nvtx:
        yield


@contextmanager
def plans_named(device: str) -> Iterator[list[Step]]:
    """Each plan that runs inside is a range; its steps, in the order in which they are launched."""
    try:
        from fdora.triton.runtime import walk
        from fdora.triton.runtime.describe import describe
    except ImportError:  # no Triton: plain torch has no plans
        yield []
        return
    steps = []
    inside = False

    def ranged(original: Any, plan: Any, *rest: Any) -> Any:
        nonlocal inside
        if inside:  # the one calls the other
            return original(plan, *rest)
        inside = True
        try:
            steps.extend(Step(plan.name, row.what, row.flops, row.bytes) for row in describe(plan).steps)
            with named(plan.name, device):
                return original(plan, *rest)
        finally:
            inside = False

    with mock.patch.multiple(walk, _run=partial(ranged, walk._run), _walk=partial(ranged, walk._walk)):
        yield steps


@contextmanager
def blocks_named(blocks: dict[str, nn.Module], device: str) -> Iterator[None]:
    """The forward of each is a range. Hooks on the layers inside would keep them from what they do together."""
    open_ranges = []

    def before(module: nn.Module, args: Any, name: str) -> None:
        open_ranges.append(named(name, device))
        open_ranges[-1].__enter__()

    def after(module: nn.Module, args: Any, y: Any) -> None:
        open_ranges.pop().__exit__(None, None, None)

    handles = [m.register_forward_pre_hook(partial(before, name=name)) for name, m in blocks.items()]
    handles += [m.register_forward_hook(after, always_call=True) for m in blocks.values()]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def costed(kernels: Iterable[Ran], steps: Sequence[Step]) -> list[Ran]:
    """Kernels of ours with the cost of their step: the n-th of a name is the n-th step of that name."""
    left = defaultdict(deque)
    for step in steps:
        left[step.what].append(step)
    found = []
    for ran in kernels:
        step = left[ran.name].popleft() if left.get(ran.name) else None
        found.append(ran if step is None else ran._replace(plan=step.plan, flops=step.flops, bytes=step.bytes))
    return found


def product_cost(shapes: Sequence[Sequence[int]]) -> tuple[float, float]:
    """Flops and bytes of a (M, K) x (K, N) product in 16 bits, from the shapes of an operation's arguments."""
    matrices = [shape for shape in shapes if len(shape) == 2]
    if len(matrices) < 2:
        return 0.0, 0.0
    (M, K), (_, N) = matrices[-2:]
    return 2.0 * M * K * N, float(2 * (M * K + K * N + M * N))


PRODUCTS = ("aten::mm", "aten::addmm", "aten::linear", "aten::matmul")


def all_of(seen: Any, device: str) -> list[Ran]:
    """In order; a product of torch's with the cost of its shapes. Without a GPU operations, with their own time."""
    events, kernels = seen.events(), kernels_of(seen.events(), device)
    costs = defaultdict(deque)
    for event in events if device != "cpu" else ():
        if event.name in PRODUCTS and len(event.kernels) == 1:  # several: a split sum, of which no part is the whole
            kernel = event.kernels[0]
            costs[kernel.name, kernel.duration].append(product_cost(event.input_shapes))
    return [Ran(*each, "", *(costs[each].popleft() if costs.get(each) else ())) for each in kernels]


def grouped(kernels: Sequence[Ran], rates: dict[str, float]) -> list[dict[str, Any]]:
    """A row for each kernel of each plan, the longest first."""
    rows = defaultdict(list)
    for ran in kernels:
        rows[ran.plan, ran.name].append(ran)
    found = []
    for (plan, name), group in rows.items():
        us, flops, moved = (sum(getattr(ran, key) for ran in group) for key in ("us", "flops", "bytes"))
        floor = max(flops / rates["flops_per_ms"], moved / rates["bytes_per_ms"]) * 1e3 if rates else 0.0
        found.append({"plan": plan, "kernel": name, "calls": len(group), "us": us, "flops": flops, "bytes": moved})
        found[-1]["roof"] = floor / us if floor and us else None
    return sorted(found, key=lambda row: -row["us"])


def markdown(rows: Sequence[dict[str, Any]]) -> str:
    total = sum(row["us"] for row in rows)
    return shown([row | {"kernel": short(row["kernel"]), "share": row["us"] / total} for row in rows])


def profile(fn: Any, options, blocks: dict[str, nn.Module], rates: dict) -> list[dict[str, Any]]:
    """One call of it, after two that nobody looks at; the trace is written."""
    from torch.profiler import ProfilerActivity

    device, out, on_gpu = options.device, options.out, options.device != "cpu"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    for _ in range(2):
        fn()
    seen: Any = torch.profiler.profile(activities=activities, record_shapes=True)
    if options.capture:
        seen = torch.cuda.profiler.profile() if on_gpu else nullcontext()
    with blocks_named(blocks, device), plans_named(device) as steps, seen:
        fn()
        if on_gpu:
            torch.cuda.synchronize()
    out.mkdir(parents=True, exist_ok=True)
    if options.capture:
        return []
    seen.export_chrome_trace(str(out / "trace.json"))
    return grouped(costed(all_of(seen, device), steps), rates)


Call = tuple[Callable[[], Any], dict[str, nn.Module]]  # and the blocks that it runs through


def layer(options) -> Call:
    """dora_linear with its norm given, or computed inside (``--way inside``), or another way of bench.layer."""
    i = ways.Inputs.random(options.M, options.K, options.N, options.r, ways.BF16, options.device)
    way = ways.build("fdora_inside" if options.way == "inside" else options.way or "fdora", i)
    return way.forward if options.mode == "inference" else way.both, {}


def options_of(suite: Suite, options, *tiny: str) -> Any:
    """Of another suite, with the sizes that are given here; ``tiny`` without a GPU."""
    sizes = [f"--device={options.device}", f"--layers={options.layers}", f"--r={options.r}"]
    return suite.parse([*sizes, *(tiny if options.device == "cpu" else ())])


def vit_model(options) -> Call:
    from bench import vit

    o = options_of(vit.main, options, "--tiny", "--dtype=bf16")
    base = vit.vit(o.sizes, o.layers, o.device, o.dtype)
    run = vit.Compared(options.way or "peft_fdora_fused", base, vit.adapters(base, o.r, o.dtype, vit.LINEARS))
    batch = options.batch or (2 if options.device == "cpu" else vit.MODES[options.mode])
    blocks = {f"block {i}": block for i, block in enumerate(run.vit.blocks)}
    return run.of(options.mode, vit.pixels(batch, o)), blocks


def language_model(options) -> Call:
    from bench import model

    o = options_of(model.main, options, "--tiny", "--seq=32", "--loss-tokens=8")
    base = model.network(o, o.layers)
    values, inputs = model.adapters(base, o.r, ways.DTYPES[o.dtype]), model.inputs_for(base, o.seq)
    run = model.Trained(options.way or "peft_fdora", base, values, inputs, o.loss_tokens)
    blocks = {f"layer {i}": each for i, each in enumerate(run.model.get_base_model().get_decoder().layers)}
    return run.of(options.mode), blocks


WHAT = {"layer": layer, "vit": vit_model, "model": language_model}


OPTIONS = {
    "what": dict(choices=WHAT),
    **{f"--{name}": size for name, size in dict(M=4096, K=4096, N=4096, r=64, layers=2, batch=0).items()},
    "--mode": One(["inference", "gradient"], "gradient"),
    "--way": dict(help='one of bench.vit, bench.model, bench.layer; of a layer "inside" computes its norm too'),
    "--capture": (False, "for nsys: no table"),
    "--out": dict(type=Path, required=True, help="a folder"),
}


def measure(run: Run) -> None:
    options = run.options
    options.json = options.json or options.out / "kernels.json"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        fn, blocks = WHAT[options.what](options)
        rates = run.facts if options.device != "cpu" else {}
        run.set(rows=profile(fn, options, blocks, rates))
    (options.out / "kernels.md").write_text(markdown(run.result["rows"]) + "\n")


main = Suite(measure, OPTIONS, show=lambda result: markdown(result["rows"]))
