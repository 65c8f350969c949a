"""Memory of a training step of a PEFT model through fdora, part by part: what ``fdora.jobs.plan`` must predict.

    python -m bench.peaks --device cuda --json bench/results/h200/peaks.json --commit HASH
    python -m bench.peaks --device cuda --alive 12

Models in the shape of Llama-3.1-8B, Qwen3-8B and Qwen2.5-7B with a few layers and random weights, all linears but the head
adapted, bfloat16; adapters in bfloat16, and in float32 under autocast. Ways: ``use_fdora`` (plain), ``use_fdora(fuse=True)``,
each also with gradient checkpointing of every layer. Loss of all tokens, as trainers have it, or of the last of each
sequence. The first step brings the optimizer's state (fused AdamW), kept norms, and the work spaces of libraries; in the
second the allocator's counters are read: ``before`` it, after forward (``kept``, beyond before), and the most in forward,
backward and the optimizer's step (beyond before); ``reserved`` is what its pool has grown to, ``used`` what the driver says is
taken of ``total``, by whomever. Then wall time, median of ``--runs`` steps. ``--alive`` lists what is alive
at the peak, by the line that asked for it. On a CPU a profiler sees what forward keeps and the peak of a whole step.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections import Counter
from functools import partial
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.attempt import Failures
from bench.clock import free, once
from bench.decoder import DTYPES, adapters
from bench.model import ARCHITECTURES, network
from bench.rivals import adapted
from bench.suite import Run, Suite, words
from bench.table import line, table
from bench.ways import S
from tests.memory import held_bytes, peak_bytes

MODELS = ("llama-3.1-8b", "qwen3-8b", "qwen2.5-7b")
WAYS = {"plain": "peft_fdora", "fuse": "peft_fdora_fused"}
CASES = "bf16:1x4096:0,bf16:1x4096:128,bf16:4x512:0,fp32:1x4096:128"
SIZES = (
    "model_type",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "tie_word_embeddings",
    "attention_bias",
    "mlp_bias",
    "hidden_act",
)


class Case(NamedTuple):
    """What a step is given."""

    adapter: str
    sequences: int
    length: int
    loss_tokens: int  # of each sequence

    @classmethod
    def read(cls, text: str) -> Case:
        adapter, shape, last = text.split(":")
        sequences, length = map(int, shape.split("x"))
        return cls(adapter, sequences, length, min(int(last) or length, length))


class Step:
    """A model and one of its training steps."""

    def __init__(self, way: str, base: nn.Module, r: int, case: Case, checkpointing: bool, ids: Tensor):
        self.model, leaves = adapted(WAYS[way], base, adapters(base, r, DTYPES[case.adapter]), "all-linear", S, "CAUSAL_LM")
        self.leaves = list(leaves.values())
        if checkpointing:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # another name for it comes with transformers 6
                self.model.gradient_checkpointing_enable({"use_reentrant": False})
        self.optimizer = torch.optim.AdamW(self.leaves, lr=1e-5, fused=True)
        self.ids, self.loss_tokens = ids, case.loss_tokens
        self.autocast = partial(torch.autocast, ids.device.type, torch.bfloat16, enabled=case.adapter == "fp32")

    def loss(self) -> Tensor:
        with self.autocast():
            if self.loss_tokens == self.ids.shape[1]:
                return self.model(input_ids=self.ids, labels=self.ids, use_cache=False).loss
            logits = self.model(input_ids=self.ids, logits_to_keep=self.loss_tokens, use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1).float(), self.ids[:, -self.loss_tokens :].flatten())

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def __call__(self) -> None:
        self.loss().backward()
        self.update()

    def resident(self) -> dict[str, int]:
        """Bytes by what they are for."""
        frozen = [p for p in self.model.parameters() if not p.requires_grad]
        states = [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor) and t.dim()]
        return {"weights": size(frozen), "adapters": size(self.leaves), "optimizer": size(states)}


def size(tensors: list[Any]) -> int:
    """Each piece of memory once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def by_counters(step: Step) -> dict[str, int]:
    """The second step of a GPU, by the allocator's counters."""
    found: dict[str, int] = {}
    torch.cuda.synchronize()
    before = found["before"] = torch.cuda.memory_allocated()

    def phase(name: str) -> None:
        torch.cuda.synchronize()
        found[name] = torch.cuda.max_memory_allocated() - before
        torch.cuda.reset_peak_memory_stats()

    torch.cuda.reset_peak_memory_stats()
    loss = step.loss()
    found["kept"] = torch.cuda.memory_allocated() - before
    phase("forward")
    loss.backward()
    found["gradients"] = torch.cuda.memory_allocated() - before
    phase("backward")
    step.update()
    phase("update")
    found["after"] = torch.cuda.memory_allocated() - before
    free_, total = torch.cuda.mem_get_info()
    found |= {"reserved": torch.cuda.memory_reserved(), "used": total - free_, "total": total}
    return found | {"peak": max(found[name] for name in ("forward", "backward", "update"))}


def by_profiler(step: Step) -> dict[str, int]:
    """On a CPU."""
    return {"kept": held_bytes(step.loss), "peak": peak_bytes(step)}


def alive(step: Step, most: int) -> list[tuple[float, int, str]]:
    """MiB, pieces and line of what is alive at the peak of a step beyond what was before, the largest first."""
    torch.cuda.memory._record_memory_history(max_entries=400_000, stacks="python")
    step()
    torch.cuda.synchronize()
    trace = torch.cuda.memory._snapshot()["device_traces"][torch.cuda.current_device()]
    torch.cuda.memory._record_memory_history(enabled=None)
    now: dict[int, tuple[int, str]] = {}
    total = peak = 0
    at_peak: list[tuple[int, str]] = []
    for each in trace:
        if each["action"] == "alloc":
            now[each["addr"]] = each["size"], where(each["frames"])
            total += each["size"]
            if total > peak:
                peak, at_peak = total, list(now.values())
        elif each["action"] == "free_completed" and each["addr"] in now:
            total -= now.pop(each["addr"])[0]
    bytes, pieces = Counter[str](), Counter[str]()
    for amount, text in at_peak:
        bytes[text] += amount
        pieces[text] += 1
    return [(amount / 2**20, pieces[text], text) for text, amount in bytes.most_common(most)]


def where(frames: list[dict]) -> str:
    """The three innermost lines of a model's or of our code."""
    own = [f for f in frames if any(part in f["filename"] for part in ("transformers", "fdora", "bench", "peft"))]
    return " < ".join(f"{Path(f['filename']).name}:{f['line']} {f['name']}" for f in own[:3]) or "autograd"


def attention_of(device: str, dtype: torch.dtype, config: Any) -> str:
    """Which of torch's attentions runs here."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    q = torch.randn(1, config.num_attention_heads, 64, head, device=device, dtype=dtype, requires_grad=True)
    kv = torch.randn(1, config.num_key_value_heads, 64, head, device=device, dtype=dtype)
    y = F.scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=config.num_attention_heads != kv.shape[1])
    return type(y.grad_fn).__name__


def rows_of(model: str, options, failures: Failures) -> list[dict]:
    torch.manual_seed(0)
    facts = SimpleNamespace(model=model, tiny=options.tiny, sweep=None, device=options.device, dtype="bf16")
    base = network(facts, options.layers)
    config = {name: value for name in SIZES if (value := getattr(base.config, name, None)) is not None}
    first = {"model": model, "config": config, "attention": attention_of(options.device, torch.bfloat16, base.config)}
    rows = []
    for case, way, checkpointing in product(options.cases, options.ways, (False, True)):
        facts = {"way": way, "checkpointing": checkpointing, "r": options.r} | case._asdict()

        def measure(_: str, case=case, way=way, checkpointing=checkpointing) -> dict:
            ids = torch.randint(base.config.vocab_size, (case.sequences, case.length), device=options.device)
            step = Step(way, base, options.r, case, checkpointing, ids)
            step()
            found = by_profiler(step) if options.device == "cpu" else by_counters(step)
            ms = statistics.median([once(step, options.device) for _ in range(options.runs)] or [float("nan")])
            for amount, pieces, text in alive(step, options.alive) if options.alive and options.device != "cpu" else ():
                print(f"    {amount:9.1f} MiB in {pieces:4} {text}", flush=True)
            return step.resident() | {"bytes": found, "ms": round(ms, 3)}

        for got in failures.attempt([f"{model} {facts}"], measure).values():
            rows.append(first | facts | got)
            mib = [f"{got['bytes'][name] / 2**20:.1f}" for name in ("kept", "peak")]
            print(line([model, *facts.values(), *mib, f"{got['ms']:.1f}"]), flush=True)
        free(options.device)
    return rows


def arguments(parser):
    parser.add_argument("--models", type=words(ARCHITECTURES, "models"), default=list(MODELS))
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--r", type=int, default=64)
    parser.add_argument("--cases", default=CASES, help="adapter's dtype : sequences x length : tokens of each loss, 0 for all")
    parser.add_argument("--ways", type=words(WAYS, "ways"), default=list(WAYS))
    parser.add_argument("--alive", type=int, default=0, metavar="LINES", help="list what is alive at the peak")
    parser.add_argument("--tiny", action="store_true", help="small widths, for a smoke test")


def check(parser, options):
    options.cases = [Case.read(text) for text in options.cases.split(",")]


def measure_all(run: Run) -> None:
    import transformers

    run.facts["transformers"] = transformers.__version__
    run.set(failed=run.failed)
    print(table(["model", "way", "checkpointing", "r", *Case._fields, "kept MiB", "peak MiB", "ms"], []))
    for model in run.cases(run.options.models):
        for row in rows_of(model, run.options, run.failed):
            run.add(row)
        free(run.options.device)


main = Suite(__doc__, measure_all, arguments, runs=3, seconds=math.inf, check=check, judge=lambda run: run.end(""))
parse = main.parse


if __name__ == "__main__":
    main()
