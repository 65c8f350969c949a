"""Memory of a training step of a PEFT model through fdora, part by part: what ``fdora.jobs.plan`` must predict.

    python -m bench.peaks --device cuda --json bench/results/h200/peaks.json --commit HASH

Models in the shape of Llama-3.1-8B, Qwen3-8B and Qwen2.5-7B with a few layers and random weights, all linears but the head
adapted, bfloat16; adapters in bfloat16, and in float32 under autocast. Ways: ``use_fdora`` (plain), ``use_fdora(fuse=True)``,
each also with gradient checkpointing of every layer. Loss of all tokens, as trainers have it, or of the last of each
sequence. The first step brings the optimizer's state (fused AdamW), kept norms, and the work spaces of libraries; in the
second the allocator's counters are read: ``before`` it, after forward (``kept``, beyond before), and the most in forward,
backward and the optimizer's step (beyond before); ``reserved`` is what its pool has grown to, ``used`` what the driver says is
taken of ``total``, by whomever. Then wall time, median of ``--runs`` steps. On a CPU a profiler sees what forward keeps and the
peak of a whole step.
"""

from __future__ import annotations

import math
import statistics
import warnings
from collections.abc import Iterable
from itertools import product
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.clock import Failures, free, once
from bench.decoder import adapters, context
from bench.model import ARCHITECTURES, Trained, network
from bench.suite import Run, Some, Suite
from bench.ways import DTYPES
from tests.memory import held_bytes, peak_bytes

MODELS = ("llama-3.1-8b", "qwen3-8b", "qwen2.5-7b")
WAYS = {"plain": "peft_fdora", "fuse": "peft_fdora_fused"}
CASES = "bf16:1x4096:0,bf16:1x4096:128,bf16:4x512:0,fp32:1x4096:128"
SIZES = (
    "model_type hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim vocab_size "
    "tie_word_embeddings attention_bias mlp_bias hidden_act"
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


class Step(Trained):
    """A model and one of its training steps."""

    def __init__(self, way: str, base: nn.Module, r: int, case: Case, checkpointing: bool, ids: Tensor):
        values, where = adapters(base, r, DTYPES[case.adapter]), context(ids.device.type, "bf16", case.adapter)
        super().__init__(WAYS[way], base, values, {"input_ids": ids}, case.loss_tokens, context=where)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # another name for it comes with transformers 6
            self.of("step_checkpointing" if checkpointing else "step")

    def loss(self) -> Tensor:
        """As trainers have it, where it is of all tokens."""
        ids = self.inputs["input_ids"]
        if self.target.shape != ids.shape:
            return super().loss()
        with self.context():
            return self.model(input_ids=ids, labels=ids, use_cache=False).loss

    def __call__(self) -> None:
        self.step(1)

    def resident(self) -> dict[str, int]:
        """Bytes by what they are for."""
        frozen = [p for p in self.model.parameters() if not p.requires_grad]
        states = [t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor) and t.dim()]
        return {"weights": size(frozen), "adapters": size(self.leaves.values()), "optimizer": size(states)}


def size(tensors: Iterable[Any]) -> int:
    """Each piece of memory once."""
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def by_counters(step: Step) -> dict[str, int]:
    """The second step of a GPU, by the allocator's counters."""
    found = {}
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


def attention_of(device: str, dtype: torch.dtype, config: Any) -> str:
    """Which of torch's attentions runs here."""
    head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    q = torch.randn(1, config.num_attention_heads, 64, head, device=device, dtype=dtype, requires_grad=True)
    kv = torch.randn(1, config.num_key_value_heads, 64, head, device=device, dtype=dtype)
    y = F.scaled_dot_product_attention(q, kv, kv, is_causal=True, enable_gqa=config.num_attention_heads != kv.shape[1])
    return type(y.grad_fn).__name__


def rows_of(model: str, options, failures: Failures) -> list[dict]:
    torch.manual_seed(0)
    base = network(SimpleNamespace(**vars(options), model=model, dtype="bf16"), options.layers)
    config = {name: value for name in SIZES.split() if (value := getattr(base.config, name, None)) is not None}
    first = {"model": model, "config": config, "attention": attention_of(options.device, torch.bfloat16, base.config)}
    rows = []
    for case, way, checkpointing in product(options.cases, options.ways, (False, True)):
        facts = {"way": way, "checkpointing": checkpointing, "r": options.r} | case._asdict()

        def measure(_: str) -> dict:
            ids = torch.randint(base.config.vocab_size, (case.sequences, case.length), device=options.device)
            step = Step(way, base, options.r, case, checkpointing, ids)
            step()
            found = by_profiler(step) if options.device == "cpu" else by_counters(step)
            ms = statistics.median([once(step, options.device) for _ in range(options.runs)] or [float("nan")])
            return step.resident() | {"bytes": found, "ms": round(ms, 3)}

        rows += [first | facts | got for got in failures.attempt([f"{model} {facts}"], measure).values()]
        free(options.device)
    return rows


OPTIONS = {
    "--models": Some(ARCHITECTURES, list(MODELS)),
    "--layers": 4,
    "--r": 64,
    "--cases": (CASES, "adapter's dtype : sequences x length : tokens of each loss, 0 for all"),
    "--ways": Some(WAYS),
    "--tiny": False,
}


def check(parser, options):
    options.cases = [Case.read(text) for text in options.cases.split(",")]


def measure_all(run: Run) -> None:
    import transformers

    run.facts["transformers"] = transformers.__version__
    run.set(failed=run.failed)
    for model in run.cases(run.options.models):
        run.add(*rows_of(model, run.options, run.failed))
        free(run.options.device)


main = Suite(measure_all, OPTIONS, runs=3, seconds=math.inf, check=check, judge=lambda run: run.end(""))
