"""The same fine-tuning through PEFT and through fdora, step by step, and both beside a float32 run.

    python -m bench.converge --device cuda --json FILE
    python -m bench.converge --device cuda --seeds 0 --optimizers muon --json FILE
    python -m bench.converge --ways peft,fdora,float32,full      # beside them full DoRA, with gradients through the norm
    python -m bench.converge --ways fdora,full --json FILE       # these two alone: does full DoRA train better?
    python -m bench.converge --ways fdora,fp8,fp8_grad --optimizers adamw --json FILE      # what 8 bits do to training
    python -m bench.converge --ways peft,fdora --dropout 0.05 --masks 0,1,2 --seeds 0    # dropout's curves from mask to mask

A small causal language model of bytes learns the standard library's source (top-level modules), in float32. DoRA then adapts
all its linears to another text, the language reference that pydoc carries, of which every tenth topic is held out. With
``--size large`` a wider one learns all of the library under autocast, in byte pairs of its own, and adapts to a third of
torch's source, of which every tenth file is held out; ``--base`` keeps it for other commands. A seed draws the adapters and
the order of the data. Three ways from the same start: PEFT's DoRA and ``use_fdora`` on the bf16 base, and PEFT's DoRA in
float32 on the same weights. float32 adapters run under bf16 autocast; ``--adapter bf16`` without. AdamW, or Muon for A and B
with AdamW for m (torch 2.9 has it). On a GPU steps are replays of a CUDA graph, unless something is dropped. Reported: mean
and worst difference of the loss of a step, the mean relative difference of its gradient's norm, and the held-out loss at the
end. Seeds and optimizers may be measured in several commands: bench.report puts their files together. With ``--dropout``
every way draws masks of its own, once for each of ``--masks``: what two curves differ by is then compared with what PEFT's
own differ by from mask to mask. It fails where fdora ends farther from float32 than twice PEFT's distance and 0.01.
"""

from __future__ import annotations

import copy
import math
import sysconfig
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from itertools import combinations, product
from pathlib import Path
from statistics import mean

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench import decoder
from bench.clock import Failures
from bench.decoder import LINEARS
from bench.records import grouped
from bench.rivals import paths, wrapped
from bench.suite import One, Run, Some, Suite, tables
from bench.table import line
from bench.ways import DTYPES, S

WAYS = ("peft", "fdora", "float32")
FULL = "full"
HOW = {  # fdora with
    "fdora": {},
    FULL: {"detach": False},
    "fp8": {"compute": "fp8"},
    "fp8_grad": {"compute": "fp8", "grad_compute": "fp8"},
}
ALL = tuple(dict.fromkeys((*WAYS, *HOW, "lora")))
END = 200  # steps whose mean loss is noted
PAIRS = (("fdora", "peft"), ("peft", "float32"), ("fdora", "float32"))
SIZES = decoder.SIZES["converge"]
WARM = 3  # steps before one is captured
PRETRAIN_LR, LR = 1e-3, 1e-3
TARGET = 7.1e-4  # of the mean difference of a step's loss between fdora and PEFT
EVERY = 20  # steps between the losses that the JSON keeps
SLACK = 0.01


def corpora(options) -> list[Tensor]:
    """Tokens of the source to learn, of the reference to adapt to, and of the held-out part of that."""
    from pydoc_data.topics import topics

    def read(root: Path, pattern: str) -> list[str]:
        paths = ((path, path.relative_to(root).parts) for path in sorted(root.glob(pattern)))
        return [
            p.read_bytes().decode(errors="replace") for p, parts in paths if not {"site-packages", "test", "tests"} & {*parts}
        ]

    large = options.size == "large"
    source = read(Path(sysconfig.get_paths()["stdlib"]), "**/*.py" if large else "*.py")
    texts = read(Path(torch.__file__).parent, "**/*.py")[::3] if large else [topics[name] for name in sorted(topics)]
    if options.tiny:
        source, texts = source[:20], texts[:20]
    held_out = [paragraph for text in texts[::10] for paragraph in text.split("\n\n")]
    del texts[::10]
    known = {paragraph for text in texts for paragraph in text.split("\n\n")}  # topics repeat one another
    new = [paragraph for paragraph in held_out if paragraph not in known]
    found = ["\n".join(source), "\n\n".join(texts), "\n\n".join(new)]
    if not large:
        return [torch.frombuffer(bytearray(text.encode(errors="replace")), dtype=torch.uint8) for text in found]
    from tokenizers import ByteLevelBPETokenizer

    pieces = ByteLevelBPETokenizer()
    pieces.train_from_iterator(source, vocab_size=SIZES["large"]["vocab_size"], show_progress=False)
    encoded = (pieces.encode_batch(text.splitlines(keepends=True)) for text in found)
    return [torch.tensor([token for part in parts for token in part.ids], dtype=torch.int16) for parts in encoded]


def batches(text: Tensor, steps: int, options, seed: int) -> list[Tensor]:
    """``steps`` batches of windows, one token longer than the model reads."""
    starts = torch.randint(
        len(text) - options.seq - 1, (steps, options.batch, 1), generator=torch.Generator().manual_seed(seed)
    )
    return list(text[starts + torch.arange(options.seq + 1)].to(options.device).long())


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())


def train(
    model: nn.Module, data: list[Tensor], optimizers: list[torch.optim.Optimizer], context, failed: Failures | None
) -> Tensor:
    """The loss of every step, and the norm of its gradient. The rate of learning falls to a tenth along a line: a share of what
    optimizers do, whose own rate a graph would keep. ``failed``: where steps are replayed, who cannot be."""
    parameters = [p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]]
    batch, found = data[0].clone(), []
    share = torch.ones((), device=batch.device)

    def step() -> Tensor:
        with context:
            loss = loss_of(model, batch)
        for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = gradient
        with torch.no_grad():
            norm, before = nn.utils.get_total_norm([p.grad for p in parameters]), [p.clone() for p in parameters]
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            moved = torch._foreach_sub(parameters, before)
            torch._foreach_mul_(moved, share)
            torch._foreach_copy_(parameters, torch._foreach_add(before, moved))
            return torch.stack([loss, norm])

    one = step
    if failed is not None:
        one = failed.attempt(["graph"], lambda _: replayed(step, parameters, optimizers)).get("graph", step)
    for i, each in enumerate(data):
        batch.copy_(each)
        share.fill_(1 - 0.9 * i / len(data))
        found.append(one().clone())
    return torch.stack(found, 1).double().cpu()


def replayed(step: Callable[[], Tensor], parameters: list[Tensor], optimizers: list) -> Callable[[], Tensor]:
    """It as a CUDA graph; parameters and optimizers are left as they were."""
    start, graph = [p.detach().clone() for p in parameters], torch.cuda.CUDAGraph()
    try:
        for _ in range(WARM):
            step()
        with torch.cuda.graph(graph):
            found = step()
    finally:
        with torch.no_grad():
            torch._foreach_copy_(parameters, start)
        for state in (state for optimizer in optimizers for state in optimizer.state.values()):
            torch._foreach_zero_(list(state.values()))

    def again() -> Tensor:
        graph.replay()
        return found

    return again


@torch.no_grad()
def held_out(model: nn.Module, data: list[Tensor], context) -> float:
    model.eval()
    with context:
        return round(torch.stack([loss_of(model, batch) for batch in data]).double().mean().item(), 6)


def pretrained(options, failed: Failures | None) -> tuple[nn.Module, Tensor, list[Tensor]]:
    """The base model in bf16, the losses of its training, and the tokens: those of ``--base`` where this has them."""
    import transformers

    torch.manual_seed(0)
    sizes = SIZES[options.size] | (SIZES["tiny"] if options.tiny else {})
    config = transformers.LlamaConfig(
        **{"vocab_size": 256} | sizes, num_hidden_layers=options.layers, tie_word_embeddings=False, use_cache=False
    )
    model = transformers.AutoModelForCausalLM.from_config(config).to(options.device).train()
    if options.base and options.base.exists():
        weights, losses, texts = torch.load(options.base)
        model.load_state_dict(weights)
    else:
        texts, context = corpora(options), in_bf16(options) if options.size == "large" else nullcontext()
        data = batches(texts[0], options.pretrain, options, -1)
        lr = PRETRAIN_LR * min(1, 512 / config.hidden_size)
        losses, _ = train(model, data, [adamw([*model.parameters()], options, lr)], context, failed)
        if options.base:
            options.base.parent.mkdir(parents=True, exist_ok=True)
            torch.save((model.state_dict(), losses, texts), options.base)
    return model.requires_grad_(False).to(torch.bfloat16), losses, texts


def in_bf16(options) -> torch.autocast:
    return torch.autocast(options.device, torch.bfloat16)


def adamw(parameters: Iterable[Tensor], options, lr: float = LR, **how: float) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=lr, fused=True, capturable=options.device != "cpu", **how)


def adapted(way: str, base: nn.Module, options, seed: int) -> nn.Module:
    """PEFT's DoRA on the bf16 base, or on the same weights in float32; adapters of one seed are the same everywhere."""
    from fdora.integrations.peft import use_fdora

    def build(model: nn.Module) -> nn.Module:
        torch.manual_seed(seed)
        return wrapped(model, options.r, S, LINEARS, way != "lora", options.dropout).train()

    exact = build(copy.deepcopy(base).float())
    if way == "float32":
        return exact
    model, start = build(copy.deepcopy(base)), dict(exact.named_parameters())
    for name, p in model.named_parameters():
        if p.requires_grad:
            p.data = start[name].data.to(DTYPES[options.adapter])
    return use_fdora(model, fuse=False, **HOW[way]) if way in HOW else model


def optimizers_of(kind: str, model: nn.Module, options) -> list[torch.optim.Optimizer]:
    trained = [p for p in model.parameters() if p.requires_grad]
    matrices = [p for p in trained if p.ndim == 2] if kind == "muon" else []
    vectors = [p for p in trained if not any(p is each for each in matrices)]
    found = [adamw(vectors, options, weight_decay=0.01)] if vectors else []
    if matrices:
        found.append(torch.optim.Muon(matrices, lr=LR, weight_decay=0.01, adjust_lr_fn="match_rms_adamw"))
    return found


def case(base: nn.Module, seed: int, kind: str, mask: int, texts: list[Tensor], options, failed: Failures | None) -> dict:
    data, last = batches(texts[1], options.steps, options, seed), batches(texts[2], options.eval, options, 0)
    row = {"seed": seed, "optimizer": kind} | ({"mask": mask} if options.dropout else {})
    row |= {"held_out_before": {}, "held_out": {}, "loss": {}, "end": {}, "gradient_norm": {}}
    losses, sizes = {}, {}
    pairs = [(a, b) for a, b in (*PAIRS, *((way, "fdora") for way in HOW if way != "fdora")) if {a, b} <= set(options.ways)]
    for way in options.ways:
        model = adapted(way, base, options, seed)
        mixed = way != "float32" and options.adapter == "fp32"
        context = in_bf16(options) if mixed else nullcontext()
        row["held_out_before"][way] = held_out(model, last, context)
        torch.manual_seed(mask)
        losses[way], sizes[way] = train(model.train(), data, optimizers_of(kind, model, options), context, failed)
        row["held_out"][way] = held_out(model, last, context)
        for metric, values in (("loss", losses[way]), ("gradient_norm", sizes[way])):
            row[metric][way] = [round(each, 6) for each in values[::EVERY].tolist()]
        row["end"][way] = round(losses[way][-END:].mean().item(), 6)
        if way == "fdora":
            row["paths"] = paths(model)
    row["difference"] = {}
    for a, b in pairs:
        apart = (losses[a] - losses[b]).abs()
        norms = (sizes[a] / sizes[b] - 1).abs().mean().item()
        row["difference"][f"{a}, {b}"] = {"mean": apart.mean().item(), "worst": apart.max().item(), "norm": norms}
    return row


def masked(rows: list[dict]) -> list[str]:
    """What curves of other masks differ by in the mean of the kept steps: PEFT's among themselves, and fdora's from PEFT's."""
    said = []
    for (seed, optimizer), same in grouped(rows, "seed", "optimizer").items():
        losses = [row["loss"] for row in same]
        pairs = list(combinations(losses, 2))
        if pairs and {"peft", "fdora"} <= set(losses[0]):
            own = mean(far(a["peft"], b["peft"]) for a, b in pairs)
            other = mean(far(each[0]["fdora"], each[1]["peft"]) for pair in pairs for each in (pair, pair[::-1]))
            said.append(f"{optimizer}, seed {seed}: PEFT from mask to mask {own:.2e}, fdora from PEFT {other:.2e}.")
    return said


def far(a: list[float], b: list[float]) -> float:
    return mean(abs(u - v) for u, v in zip(a, b, strict=True))


def worse(row: dict) -> bool:
    """Whether fdora ended farther from float32 than twice PEFT's distance, and some; if all three ran."""
    if not set(WAYS) <= set(row["held_out"]):
        return False
    mine, theirs = (abs(row["held_out"][way] - row["held_out"]["float32"]) for way in ("fdora", "peft"))
    return not mine <= 2 * theirs + SLACK


OPTIONS = {
    "--steps": 2000,
    "--pretrain": (2000, "steps"),
    "--eval": (16, "held-out batches"),
    "--layers": 2,
    "--r": 16,
    "--batch": 16,
    "--seq": 256,
    "--seeds": [0, 1, 2],
    "--optimizers": Some(("adamw", "muon"), ["adamw", "muon"]),
    "--adapter": One(DTYPES, "fp32"),
    "--dropout": 0.0,
    "--masks": ([0], "seeds of dropout's masks"),
    "--size": One(("usual", "large"), "usual"),
    "--base": (Path, "the pretrained model, made where it is not"),
    "--tiny": False,
    "--ways": (Some(ALL, WAYS), f"some of {', '.join(ALL)}"),
}


def measure(run: Run) -> None:
    options = run.options
    failed = None if options.dropout or options.device == "cpu" else run.failed
    base, losses, texts = pretrained(options, failed)
    sizes = {key: getattr(options, key) for key in ("adapter", "steps", "pretrain", "layers", "r", "batch", "seq")}
    sizes |= {"dropout": options.dropout} if options.dropout else {}
    run.set(settings=sizes | SIZES["tiny" if options.tiny else options.size] | {"lr": LR})
    run.set(tokens=dict(zip(("source", "reference", "held_out"), map(len, texts), strict=True)), failed=run.failed)
    run.set(pretraining_loss=[round(each, 4) for each in losses[:: max(1, len(losses) // 20)].tolist()])
    print(line(["pretraining, loss", *run.result["pretraining_loss"]]), flush=True)
    if "muon" in options.optimizers and not hasattr(torch.optim, "Muon"):
        print(f"muon is skipped: torch {torch.__version__} has no torch.optim.Muon, torch 2.9 has")
        options.optimizers.remove("muon")
        run.result["skipped"] += [[seed, "muon"] for seed in options.seeds]
    for seed, kind, mask in run.cases(product(options.seeds, options.optimizers, options.masks)):
        run.add(case(base, seed, kind, mask, texts, options, failed))


def judged(run: Run) -> None:
    rows = run.result["rows"]
    if far := [(row["seed"], row["optimizer"], row["held_out"]) for row in rows if worse(row)]:
        raise SystemExit(f"fdora ends farther from float32 than PEFT: {far}")
    ran = {f"seed {row['seed']}, mask {row.get('mask', 0)}": row["paths"] for row in rows if "paths" in row}
    if other := decoder.left(ran, run.options, ("fused", "composed") if run.options.dropout else ("fused",)):
        raise SystemExit(f"fdora did not run every layer: {other}")


main = Suite(
    measure,
    OPTIONS,
    seconds=math.inf,
    quick={"seeds": [0], "steps": 200, "pretrain": 200},
    show=lambda found: "\n\n".join([tables(found), *masked(found["rows"])]),
    judge=judged,
)
