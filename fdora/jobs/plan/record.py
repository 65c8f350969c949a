"""What one layer of a decoder does, and its head: forward and backward, recorded on tensors without data.

The modules are transformers' own, on the meta device; where a linear layer is adapted, they call fdora's functions. These say
which kernels they would start on an H200 (fdora/_recording.py), and a dispatch mode sees the operations of torch: the bytes of
each storage as long as it lives, and what each kernel reads and writes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import lru_cache, partial
from typing import Any, NamedTuple

import optree
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from fdora._recording import Recording, recording
from fdora._torch import TorchDispatchMode, storage_of
from fdora.functional import DoraLayer, dora_linear_group, dora_linear_multi, dora_mlp
from fdora.functional.act import gated_act
from fdora.functional.backend import RECORDED
from fdora.functional.explain import kernels_of
from fdora.functional.layer import parts
from fdora.jobs.plan.model import ATTENTION, MLP, WEIGHTS, Adapter, E, Model, Part, Setup, config_of
from fdora.quant import QuantWeight, quantize

aten = torch.ops.aten
empty = partial(torch.empty, dtype=torch.bfloat16, device="meta")


class Kernel(NamedTuple):
    """One that is started; ``kind`` says by whose rate it multiplies."""

    kind: str
    flops: float
    bytes: float


class Way(NamedTuple):
    """Forward or backward. ``most``: bytes at once, ``at`` this kernel; ``ops`` of torch and ``calls`` of fdora start them."""

    most: int
    at: str
    kernels: Sequence[Kernel] = ()
    ops: int = 0
    calls: int = 0


class Piece(NamedTuple):
    """A part of a network, whose input and output belong to others unless its backward reads them: then they are ``kept``."""

    kept: int
    forward: Way
    backward: Way
    layer: bool = True


class Edge(torch.autograd.Function):
    """Where a piece begins and ends: who holds its input or output, and the gradient of that, does not matter to it."""

    @staticmethod
    def forward(ctx: Any, t: Tensor, shape: Sequence[int]) -> Tensor:
        ctx.shape = t.shape
        return t.new_empty(shape)

    @staticmethod
    def backward(ctx: Any, *gradient: Any) -> Any:
        return gradient[0].new_empty(ctx.shape), None


class Attention(TorchFunctionMode):
    """The kernels that a GPU takes; on tensors without data torch multiplies, and keeps, all tokens by all tokens."""

    def __torch_function__(self, fn: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (attend if fn is F.scaled_dot_product_attention else fn)(*args, **(kwargs or {}))


def attend(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, **_: Any) -> Any:
    if attn_mask is None:
        return aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal)[0]
    added = attn_mask.to(q.dtype).expand(-1, q.shape[1], -1, -1)
    return aten._scaled_dot_product_efficient_attention(q, k, v, added, True)[0]


def tensors(tree: Any) -> list[Tensor]:
    return [t for t in optree.tree_leaves(tree) if isinstance(t, Tensor)]


class Counter(TorchDispatchMode):
    """``alive``: bytes of what operations made. ``way``: what was since it was set. ``row``: tokens of a sequence."""

    def __init__(self, row: int):
        super().__init__()
        self.row, self.alive, self.known, self.way = row, 0, dict[int, Any](), Way(0, "")

    def take(self) -> Way:
        found, self.way = self.way, Way(self.alive, "")
        return found

    def hold(self, tensors: Sequence[Tensor], more: int, at: str) -> bool:
        """Looks for the most there is, with so many bytes more; whether a tensor is new."""
        before = self.alive
        for t in tensors:
            storage = t.untyped_storage()
            key, size = storage_of(t), storage.nbytes()
            if key not in self.known:
                self.alive += size
                self.known[key] = weakref.ref(storage, partial(self.free, key, size))
        if self.alive + more > self.way.most:
            self.way = self.way._replace(most=self.alive + more, at=at)
        return self.alive > before

    def free(self, key: int, size: int, _: Any) -> None:
        self.alive -= size
        del self.known[key]

    def start(self, kernels: Sequence[Kernel], ops: int, calls: int) -> None:
        way = self.way
        self.way = Way(way.most, way.at, (*way.kernels, *kernels), way.ops + ops, way.calls + calls)

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = op(*args, **(kwargs or {}))
        if op.is_view:
            return out
        made, name = tensors(out), op.overloadpacket.__name__
        if (self.hold(made, 0, name) or op._schema.is_mutable) and op.namespace == "aten" and "empty" not in name:
            moved = sum(min(t.nbytes, t.untyped_storage().nbytes()) for t in (*made, *tensors((args, kwargs))))
            self.start([Kernel(*self.product(name, args), moved)], 1, 0)
        return out

    def product(self, name: str, args: Any) -> tuple[str, float]:
        """What an operation multiplies."""
        if name in ("mm", "addmm"):
            return "product", 2 * args[-2].numel() * args[-1].shape[1]
        if "attention" not in name:
            return "product", 0
        # a causal token sees half of its sequence; by a mask, of which nothing is left out, it is compared with all of it
        flops = (4 if "efficient" in name else 2) * args[0].numel() * self.row
        return ("attention_backward", 2.5 * flops) if "backward" in name else ("attention", flops)


class Noted(Recording):
    """fdora's kernels, for a counter."""

    counter: Counter
    describe: Callable[[Any], Any]

    def run(self, plan: Any) -> tuple[Tensor, ...]:
        made, said = super().run(plan), self.describe(plan)
        self.results.clear()  # they would stay alive
        self.counter.hold(made, said.workspace, said.name)
        self.counter.start([Kernel("product", row.flops, row.bytes) for row in said.steps], 0, "forward" in said.name)
        return made


def stored(W: Tensor, setup: Setup) -> Tensor | QuantWeight:
    """The weight as it lies in memory."""
    how = WEIGHTS[setup.weights]
    return quantize(W, **how) if how else W


def layer_of(module: nn.Linear, setup: Setup, adapted: bool) -> DoraLayer:
    """The frozen layer with its adapters."""
    W, (N, K), r = stored(module.weight, setup), module.weight.shape, setup.width
    if not adapted:
        return DoraLayer(W, bias=module.bias)
    bank = (len(setup.adapters),) if setup.has_banks else ()
    dtype = torch.float32 if setup.adapter_bytes == 4 else torch.bfloat16
    A, B, m = (empty(*bank, *shape, dtype=dtype, requires_grad=True) for shape in ((r, K), (N, r), (N,)))
    return DoraLayer(W, A, B, m, 1.0, module.bias, empty(*bank, N, dtype=torch.float32))


recorded: Any = {"backend": RECORDED}


def place(block: Any, model: Model, setup: Setup) -> None:
    """fdora's functions in the place of linear layers, called as ``use_fdora`` or ``fdora.jobs.train`` calls them."""
    modules: dict[str, Any] = {
        path.rpartition(".")[2]: each for path, each in block.named_modules() if isinstance(each, nn.Linear)
    }
    layers = {name: layer_of(each, setup, name in setup.targets) for name, each in modules.items()}

    def one(layer: DoraLayer, x: Tensor) -> Tensor:
        W, A, B, m, _, bias, norm = parts(layer)
        if A is None or A.dim() == 2:
            return dora_linear_group(x, [layer], **recorded)[0]
        how = {"s": [1.0] * len(A), "offsets": empty(len(A), dtype=torch.int32), "bias": bias, "norm": norm}
        how |= {"dropout_p": 0.1, "dropout_mode": "peft", "seed": 0} if setup.dropout else {}
        return dora_linear_multi(x, W, A, B, m, **how, **recorded)

    def together(x: Tensor) -> Tensor:
        q, *rest = dora_linear_group(x, [layers[name] for name in ATTENTION], **recorded)
        modules["k_proj"].forward = modules["v_proj"].forward = lambda _: rest.pop(0)
        return q

    for name, layer in layers.items():
        if layer.A is not None or setup.weights != "bf16":  # else it is torch's own
            modules[name].forward = partial(one, layer)
    if setup.fuse and setup.targets.issuperset(ATTENTION):
        modules["q_proj"].forward = together
    act: Any = "gelu_tanh" if "gemma" in model.kind else "silu"
    if setup.fuse and setup.targets.issuperset(MLP):
        gate, up, down = (layers[name] for name in MLP)
        block.mlp.forward = lambda x: dora_mlp(x, gate, up, down, act=act, **recorded)
    elif setup.has_banks or setup.packed:
        gate, up, down = (modules[name] for name in MLP)
        block.mlp.forward = lambda x: down(gated_act(gate(x), up(x), act, **recorded))


@lru_cache(4)
def network(model: Model) -> Any:
    """transformers' model with one layer."""
    from transformers import AutoModelForCausalLM

    given = {"model_type": model.kind, "hidden_size": model.hidden, "intermediate_size": model.inner, "num_hidden_layers": 1}
    given |= {"num_attention_heads": model.heads, "num_key_value_heads": model.kv_heads, "head_dim": model.head_dim}
    given |= {"attention_bias": model.attention_bias, "mlp_bias": model.mlp_bias, "vocab_size": model.vocab}
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config_of(given), dtype=torch.bfloat16).requires_grad_(False)


def record(run: Callable[[Tensor], Tensor], shape: Sequence[int], row: int, first: bool = False) -> Piece:
    """What the function does on such an input; ``first``: which hangs on no parameter."""
    counter, leaf, (device, describe) = Counter(row), empty((), requires_grad=not first), kernels_of("h200")
    with recording(device, kind=Noted) as noted, Attention(), counter:
        noted.counter, noted.describe = counter, describe
        y = run(Edge.apply(leaf, shape))
        kept, forward, end = counter.alive - y.nbytes, counter.take(), Edge.apply(y, ())
        del y
        counter.take()
        end.backward()
        return Piece(kept, forward, counter.take())


@lru_cache(4096)
def layer(model: Model, setup: Setup, tokens: int, masked: bool, first: bool) -> Piece:
    """One layer of the model, on sequences one after the other."""
    row = setup.row(tokens)
    mask = empty(1, 1, tokens, row, dtype=torch.bool) if masked else None
    angles = empty(1, tokens, model.head_dim), empty(1, tokens, model.head_dim)
    block = deepcopy(network(model).get_decoder().layers[0])
    place(block, model, setup)
    return record(partial(block, attention_mask=mask, position_embeddings=angles), (1, tokens, model.hidden), row, first)


@lru_cache(4096)
def head(model: Model, tokens: int, last: int) -> Piece:
    """The last norm, the head, and the loss of so many tokens."""
    net, labels = network(model), empty(last, dtype=torch.int64)

    def run(x: Tensor) -> Tensor:
        logits = net.lm_head(net.get_decoder().norm(x)[:, -last:])
        return F.cross_entropy(logits.float().flatten(0, 1), labels)

    return record(run, (1, tokens, model.hidden), 1)._replace(layer=False)


def pieces(model: Model, setup: Setup, tokens: int, part: Part) -> list[Piece]:
    """Layers of a stage, and what is behind them. A model's first gets an input that hangs on no parameter; a stage that is not
    the last keeps its output until its gradient comes."""
    # what a recording does not look at, for each to be made once
    plain: Any = {"checkpointing": False, "microbatches": 1, "optimizer": "adamw", "loss_tokens": None}
    same = setup._replace(adapters=(Adapter("", setup.width),) * len(setup.adapters), **plain)
    one, out = model._replace(layers=1, window=0, sliding=(), tied=False), E * tokens * model.hidden
    # transformers makes a mask where a window is as long as a sequence, too
    masked = part.held if setup.packed else model.sliding if setup.length >= model.window else ()
    found = [layer(one, same, tokens, n in masked, part.first and n == part.start) for n in part.held]
    if part.last:
        return [*found, head(one, tokens, max(1, setup.loss_of(tokens)))]
    return [*found, Piece(out, Way(out, "sent"), Way(out, "sent"), False)]


@lru_cache(64)
def sizes(model: Model, setup: Setup) -> tuple[int, int, int]:
    """Bytes of the linear layers of a block and of its other parameters, and of its adapters."""
    block = network(model).get_decoder().layers[0]
    linears = [each.weight for each in block.modules() if isinstance(each, nn.Linear)]
    rest = sum(p.nbytes for p in block.parameters()) - sum(W.nbytes for W in linears)
    adapters = sum(setup.adapter_elements(*model.linears[name]) for name in setup.targets) * setup.adapter_bytes
    return sum(stored(W, setup).nbytes for W in linears), rest, adapters
