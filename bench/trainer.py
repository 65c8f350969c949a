"""Training as people run it: transformers' Trainer on a whole causal model of 8B shape, one way after the other.

    python -m bench.trainer --device cuda --json FILE
    python -m bench.trainer --device cuda --layers 8 --steps 6
    python -m bench.trainer --device cuda --compiled
    python -m bench.trainer --device cuda --recipe metamath --model llama-3.2-3b --layers 28 --r 32 --dropout 0 --most 768

bench.model's models with random weights in bf16, float32 adapters under bf16 autocast, lora_dropout 0.05, every decoder layer
checkpointed, a fused AdamW, data loading in two processes (none on a CPU), a log line each step. A step is 16 micro-batches of
one sequence, unpadded, in one order for all ways. Lengths are bench.schedule's "mixed": log-normal by median and spread of the
example lengths that LoRAFusion's source gives for XSum, CNN/DailyMail and WikiSum together, 5 % below 351 tokens, half below
882, 95 % below 2216, cut at ``--most``. Tokens are random, of few kinds: what there is to learn is which.

``--recipe metamath``: as PEFT's method_comparison trains on MetaMathQA. A step is one batch of four sequences, padded, out of
twenty batches that are sorted by length; q_proj and v_proj alone are adapted (so with ``peft_fdora``: no block is whole),
nothing is checkpointed, and float32 adapters of a bf16 model run without autocast.

A step's wall time runs from the end of the step before until the GPU is done; the first, from the start of the training, has
compilation in it. ``ms`` is the median and ``seconds`` the sum over the steps behind the first two, with their shares of
LoRA's; ``peak_mb`` is the most beyond the frozen model, with adapters and optimizer; losses and norms of gradients are what the
Trainer logs. ``--compiled``: ``torch_compile=True``. ``--warmup``: fdora.warmup before the training. Every way draws masks of
its own, so what it logs is near the others' and not the same; with ``--dropout 0`` fdora fails where it is not PEFT's DoRA's.
"""

from __future__ import annotations

import copy
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise
from operator import itemgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence

from bench import model, schedule
from bench.clock import free, synchronize
from bench.decoder import MOST_APART, adapted_as, adapters, judge, left
from bench.rivals import adapted, paths
from bench.suite import One, Run, Suite, stack
from bench.ways import DTYPES, S
from fdora.integrations.peft import warmup

WAYS = ("peft_lora", "peft_dora", "peft_fdora_fused", "peft_fdora_fused_lora_dropout")


class Recipe(NamedTuple):
    lengths: str  # of bench.schedule
    rows: int  # of a micro-batch
    micro: int  # batches of a step
    sorted: int  # sequences at a time
    targets: tuple[str, ...]  # none: all linears
    light: bool  # checkpointing, and autocast


RECIPES = {
    "usual": Recipe("mixed", 1, 16, 1, (), True),
    "metamath": Recipe("metamath", 4, 1, 80, ("q_proj", "v_proj"), False),
}
BEGIN = 2  # steps that may compile
WORDS = 1000  # kinds of tokens
SHORTER = 64  # of --tiny
LOGGED = ("loss", "grad_norm")
FACTS = ("recipe", "model", "layers", "dtype", "adapter", "dropout", "compiled", "steps", "seed")


def samples(vocabulary: int, options) -> list[dict[str, Tensor]]:
    """What the Trainer gets for every micro-batch of every step, in an order of its own."""
    generator, recipe, found = torch.Generator().manual_seed(0), RECIPES[options.recipe], []
    ((*batches,),) = schedule.drawn([recipe.lengths], options.steps, recipe.micro * recipe.rows, options.most, seed=0)
    lengths = [length // SHORTER + 1 if options.tiny else length for batch in batches for length in batch]
    lengths = [each for i in range(0, len(lengths), recipe.sorted) for each in sorted(lengths[i : i + recipe.sorted])[::-1]]
    for i in range(0, len(lengths), recipe.rows):
        ids = [torch.randint(min(WORDS, vocabulary), (length,), generator=generator) for length in lengths[i : i + recipe.rows]]
        padded = {name: pad_sequence(ids, True, value) for name, value in (("input_ids", 0), ("labels", -100))}
        mask = {"attention_mask": (padded["labels"] >= 0).long()} if recipe.rows > 1 else {}
        found.append(padded | mask)
    return found


def trained(way: nn.Module, data: Sequence[dict[str, Tensor]], options) -> tuple[list[float], list[int], dict[str, list]]:
    """Of each step: seconds, tokens, and what is logged."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    ends, tokens, recipe = [], [], RECIPES[options.recipe]

    class Clock(TrainerCallback):
        def on_train_begin(self, *args, **kwargs):
            synchronize(options.device)
            ends.append(time.perf_counter())

        def on_step_begin(self, *args, **kwargs):
            tokens.append(0)

        def on_step_end(self, *args, **kwargs):
            synchronize(options.device)
            ends.append(time.perf_counter())

    class Counted(Trainer):
        def compute_loss(self, model, inputs, *args, **kwargs):
            tokens[-1] += inputs["input_ids"].numel()
            return super().compute_loss(model, inputs, *args, **kwargs)

    on_cpu = options.device == "cpu"
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            output_dir=folder,
            max_steps=options.steps,
            per_device_train_batch_size=1,
            gradient_accumulation_steps=recipe.micro,
            gradient_checkpointing=recipe.light,
            gradient_checkpointing_kwargs={"use_reentrant": False},
            learning_rate=1e-4,
            optim="adamw_torch_fused",
            bf16=recipe.light and (options.dtype, options.adapter) == ("bf16", "fp32"),
            torch_compile=options.compiled,
            dataloader_num_workers=0 if on_cpu else 2,
            use_cpu=on_cpu,
            logging_steps=1,
            disable_tqdm=True,
            report_to="none",
            save_strategy="no",
            seed=options.seed,
            data_seed=0,
        )
        trainer = Counted(way, arguments, train_dataset=data, data_collator=itemgetter(0), callbacks=[Clock()])
        trainer.train()
    steps = [line for line in trainer.state.log_history if "loss" in line]
    logged = {key: [round(line[key], 6) for line in steps] for key in LOGGED}
    return [end - begin for begin, end in pairwise(ends)], tokens, logged


def row(way: str, base: nn.Module, values: dict, data: list[dict[str, Tensor]], run: Run) -> dict:
    options, found, on_gpu = run.options, {"way": way}, run.options.device != "cpu"
    how, recipe = adapted_as(options), RECIPES[options.recipe]
    torch._dynamo.reset()
    free(options.device)
    before = torch.cuda.memory_allocated() if on_gpu else 0
    made = made_of(way, base, values, options)
    if options.warmup and "fdora" in way:
        with how["context"]() if recipe.light else nullcontext():
            done = warmup(made, {each["input_ids"].numel() for each in data})
        found |= {"warmup_s": round(done.seconds, 2), "kernels": done.kernels}
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    seconds, tokens, logged = trained(made, data, options)
    later = seconds[BEGIN:]
    found |= {"first_s": round(seconds[0], 3), "ms": round(1e3 * statistics.median(later), 3), "seconds": round(sum(later), 3)}
    found |= {"tokens": sum(tokens), "tokens_per_s": round(sum(tokens[BEGIN:]) / sum(later))}
    if on_gpu:
        found["peak_mb"] = round((torch.cuda.max_memory_allocated() - before) / 2**20, 2)
    if "fdora" in way and not options.compiled:  # compiled calls are not counted
        run.result["paths"][way] = paths(made)
    return found | logged


def seen(data: list[dict[str, Tensor]], options) -> None:
    """LoRA trains one layer on all of it, for no result: cuDNN's attention and cuBLAS plan for each new length, 100 ms on an
    H200 (bench.lengths), and the way that runs first would pay that for all."""
    few = copy.copy(options)
    few.compiled = False
    base = model.network(few, 1)
    values = adapters(base, few.r, DTYPES[few.adapter], RECIPES[few.recipe].targets)
    trained(made_of("peft_lora", base, values, few), data, few)


def made_of(way: str, base: nn.Module, values: dict, options) -> nn.Module:
    targets = RECIPES[options.recipe].targets or "all-linear"
    return adapted(way, base, values, targets, S, "CAUSAL_LM", adapted_as(options)["dropout"])[0]


def measure(run: Run) -> None:
    options, recipe = run.options, RECIPES[run.options.recipe]
    run.set(*FACTS, micro_batches=recipe.micro, seen=True, paths={}, failed=run.failed)
    torch.manual_seed(0)
    base = model.network(options, options.layers)
    values = adapters(base, options.r, DTYPES[options.adapter], recipe.targets)
    data = samples(base.config.vocab_size, options)
    seen(data, options)
    for way in options.ways:
        for each in run.failed.attempt([way], lambda way: row(way, base, values, data, run)).values():
            run.add(each | against(each, {row["way"]: row for row in run.result["rows"]}))


def against(mine: dict, known: dict[str, dict]) -> dict:
    """Shares of LoRA's time, and the largest relative distance of what is logged from PEFT's DoRA's."""
    lora, dora, found = known.get("peft_lora", mine), known.get("peft_dora"), {}
    for key in ("ms", "seconds"):
        found[f"{key}_ratio"] = round(mine[key] / lora[key], 3)
    if dora and "fdora" in mine["way"]:
        pairs = [pair for key in LOGGED for pair in zip(mine[key], dora[key], strict=True)]
        found["apart"] = max(abs(a / b - 1) for a, b in pairs)
    return found


def judged(run: Run) -> None:
    apart = {row["way"]: {"log": row["apart"]} for row in run.result["rows"] if "apart" in row and not run.options.dropout}
    judge(apart, MOST_APART[run.options.dtype], run.failed, left(run.result["paths"], run.options))


OPTIONS = {
    **{name: each for name, each in stack(36, WAYS, seq=None, more=["peft_fdora"]).items() if name != "--loss-tokens"},
    "--model": One(model.ARCHITECTURES, "qwen3-8b"),
    "--adapter": (One(DTYPES, "fp32"), "of A, B and m; of a bf16 model under autocast"),
    "--dropout": (0.05, "lora_dropout of every way"),
    "--recipe": One(RECIPES, "usual"),
    "--r": 64,
    "--steps": 12,
    "--most": 4000,
    "--compiled": (False, "torch_compile=True"),
    "--warmup": (False, "fdora.warmup before the first step"),
    "--seed": (0, "of what is dropped; the data and their order stay"),
    "--tiny": False,
}


def check(parser, options):
    if options.steps <= BEGIN:
        parser.error(f"--steps must be above {BEGIN}, which are left out")


main = Suite(measure, OPTIONS, check=check, judge=judged)
