"""A bank in the place of each adapted layer: of layers in general, and of those of a PEFT model, which then runs itself."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from itertools import chain
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from fdora._check import fail
from fdora.functional import DoraParams, dora_norm
from fdora.functional.act import gated_act
from fdora.functional.multi import multi_together
from fdora.jobs.causal.data import FN, Packed

Mode = Literal["peft", "lora"]


class Layer(NamedTuple):
    """A frozen linear layer with G adapters: all but their parameters."""

    W: Any  # a Tensor or a QuantWeight
    s: Tensor | Sequence[float]
    ranks: Sequence[int]
    bias: Tensor | None = None
    dora: Tensor | None = None
    """(G, 1) bool: which adapters have a magnitude, where not all are alike."""
    dropout: float | Tensor = 0.0
    """The probability with which an element of an adapter's input is dropped; (G,) float64 where they differ."""
    dropout_mode: Mode = "peft"
    """What that means where an adapter has a magnitude."""

    def is_twice(self, params: DoraParams) -> bool:
        """Whether dropout wants two products with W."""
        drops = isinstance(self.dropout, Tensor) or self.dropout > 0
        return drops and params.m is not None and self.dropout_mode == "peft"


def norms_of(layers: Mapping[str, Layer], params: Mapping[str, DoraParams]) -> dict[str, Tensor | None]:
    """What the layers want as their norm, once for each optimizer step."""
    return {name: norm_of(layers[name], own) for name, own in params.items()}


def norm_of(layer: Layer, params: DoraParams) -> Tensor | None:
    if params.m is None:
        return None
    c = dora_norm(layer.W, params.A, params.B, s=layer.s)
    return c if layer.dora is None else torch.where(layer.dora, c, 1.0)


def arguments(layer: Layer, params: DoraParams, norm: Tensor | None, seed: int | None = None) -> dict[str, Any]:
    """What :func:`dora_linear_multi` takes of the layer, beside x and offsets. A plain LoRA's m is 1 whatever stands in its
    row: it has no gradient.

    With a seed an adapter hears D(x), and PEFT's DoRA corrects ``D(x) W^T`` alone: ``dropout_mode``. One product with W is
    enough where all are plain LoRA, and for "lora".
    """
    A, B, m = params
    m = m if layer.dora is None else torch.where(layer.dora, m, 1.0)
    given = {"W": layer.W, "A": A, "B": B, "m": m, "s": layer.s, "ranks": layer.ranks, "bias": layer.bias, "norm": norm}
    if seed is not None:
        given |= {"dropout_p": layer.dropout, "dropout_mode": layer.dropout_mode, "seed": seed}
    return given


def layers_of(model: Any, names: Sequence[str], dropout_mode: Mode = "peft") -> tuple[dict[str, Layer], dict[str, Any]]:
    """The layers that have one of these adapters, and their banks, with a row for each name.

    An adapter that a layer lacks is a row of zeros, A and B: nothing is added, and no gradient moves it.
    """
    from peft import PeftModel, get_peft_model_state_dict

    from fdora.integrations.peft import read_banks

    if not isinstance(model, PeftModel):
        remedy = "Make it with get_peft_model and add_adapter."
        raise fail(FN, "model", "a PeftModel with the adapters of all jobs", f"a {type(model).__name__}", remedy)
    check_rest(model, names)
    banks, layers = read_banks(model, names), {}
    for name in names:
        found = len(get_peft_model_state_dict(model, adapter_name=name, save_embedding_layers=False))
        held = sum(2 + bank.dora[bank.adapters.index(name)] for bank in banks.values() if name in bank.adapters)
        if found < held:  # PEFT takes tensors of a part that is named as an adapter for that adapter's
            have, remedy = sorted(model.peft_config), "PEFT cannot save the others either: give it another name."
            raise fail(FN, "model", "one whose adapters are not named as parts of it", have, remedy)
        if found != held:
            remedy = "Embeddings, convolutions, biases and modules_to_save are trained one adapter after the other."
            raise fail(FN, "model", f"such that {name!r} adapts linear layers alone", f"{found - held} other tensors", remedy)
    for path, bank in banks.items():
        layer, W = model.get_submodule(path), bank.W
        base = layer.get_base_layer()
        if W is None:
            remedy = "Adapters of experts, routers and other layers than nn.Linear are trained one after the other."
            raise fail(FN, "model", f"with a weight below `{path}` that can be read", f"a {type(base).__name__}", remedy)
        rows = [names.index(name) for name in bank.adapters]
        params = DoraParams(*(None if t is None else spread(rows, len(names), t) for t in bank.params))
        drops = [getattr(layer.lora_dropout[name], "p", 0.0) for name in bank.adapters]
        if max(drops) >= 1:
            raise fail(
                FN, "model", "one whose lora_dropout is below 1", f"{max(drops)} at `{path}`", "Nothing would be learnt."
            )
        own = dict(zip(rows, zip(bank.s, bank.ranks, bank.dora, drops, strict=True), strict=True))
        s, ranks, dora, ratios = zip(*(own.get(row, (1.0, 1, False, drops[0])) for row in range(len(names))), strict=True)
        which = None if params.m is None or all(dora) else torch.tensor(dora, device=W.device)[:, None]
        scale, apart = (torch.tensor(each, dtype=torch.float64, device=W.device) for each in (s, ratios))
        dropout: float | Tensor = ratios[0] if len({*ratios}) == 1 else apart
        layers[path] = Layer(W, scale, ranks, base.bias, which, dropout, dropout_mode)
        banks[path] = bank._replace(params=params)
    return layers, banks


def spread(rows: Sequence[int], count: int, t: Tensor) -> Tensor:
    """The rows of t as these of ``count``; zeros elsewhere."""
    return t.new_zeros(count, *t.shape[1:]).index_copy(0, torch.tensor(rows, device=t.device), t)


def check_rest(model: Any, names: Sequence[str]) -> None:
    """Nothing beside the adapters learns or drops, base weights are those of the base, and no loss is of whole batches."""
    if getattr(model.get_base_model().config, "output_router_logits", False):
        remedy = "Set it to False: a balancing loss is of whole batches, which lie in several microbatches here."
        raise fail(FN, "model", "without a loss of its router", "config.output_router_logits=True", remedy)
    for path, p in model.named_parameters():
        if p.requires_grad and ".lora_" not in path:
            raise fail(FN, "model", "frozen but for its adapters", f"`{path}` with requires_grad=True", "Freeze it.")
    for path, module in model.named_modules():
        if getattr(module, "merged", False):
            raise fail(FN, "model", "without merged adapters", f"some in `{path}`", "Call model.unmerge_adapter().")
        p = (
            module.p
            if isinstance(module, nn.Dropout)
            else vars(module).get("attention_dropout") or vars(module).get("jitter_noise")
        )
        if p and ".lora_dropout." not in path:
            remedy = "Set it to 0: only the input of an adapter can be dropped."
            raise fail(FN, "model", "without dropout or jitter of its own", f"{p} at `{path}`", remedy)


Logits = Callable[..., Tensor]
"""``logits(params, norms, packed)``, at ``packed.at``. Of a model that is cut, with x (M, hidden) and a range of its blocks:
what these make of x, or of the tokens without it; (M, hidden) where the last is not among them."""


@contextmanager
def running(model: Any, layers: Mapping[str, Layer], blocks: Sequence[nn.Module] = ()) -> Iterator[Logits]:
    """The model's layers are these until the end: backward may run them again (activation checkpointing). What stood in their
    places comes back. ``blocks``: where the model is cut."""
    inner, now, ran = model.get_base_model(), list[Any](), set[str]()
    at = {model.get_submodule(path): (path, n) for n, path in enumerate(layers)}
    check_forward(inner)

    def given(x: Tensor, path: str, n: int) -> dict[str, Any]:
        params, norms, packed, _ = now
        check_tokens(x, packed, path)
        ran.add(path)
        seed = None if packed.seed is None else packed.seed * len(layers) + n
        return arguments(layers[path], params[path], norms[path], seed)

    def run(x: Tensor, modules: Sequence[nn.Module], act: Any = None) -> Sequence[Tensor]:
        return multi_together(x, [given(x, *at[each]) for each in modules], now[2].ends, act)

    def through(n: int, forward: Callable[..., Tensor], x: Tensor, *rest: Any, **more: Any) -> Tensor:
        return forward(x, *rest, **more) if n in now[3] else x

    def logits(
        params: Mapping[str, DoraParams],
        norms: Mapping[str, Any],
        packed: Packed,
        x: Tensor | None = None,
        part: range = range(len(blocks)),
    ) -> Tensor:
        now[:] = mine = params, norms, packed, part
        given_x = {"input_ids": packed.ids[None]} if x is None else {"inputs_embeds": x[None]}
        how = {"position_ids": packed.places[None], "use_cache": False, **given_x}
        if part.stop == len(blocks):
            found: Tensor = inner(**how, logits_to_keep=packed.at).logits[0]
        else:
            found = inner.get_decoder()(**how).last_hidden_state[0]
        check_ran(params, ran)
        if found.requires_grad:  # backward runs again what is of this microbatch, whichever went forward last
            found.register_hook(lambda _: now.__setitem__(slice(None), mine))
        return found

    placed = forwards_of(inner, at, run) | {block: partial(through, n, block.forward) for n, block in enumerate(blocks)}
    before = {module: module.__dict__.get("forward") for module in placed}
    learning = [p for p in model.parameters() if p.requires_grad]
    try:
        with model.disable_adapter():  # where an adapter that is not trained is active, the base alone runs
            for module, forward in placed.items():
                module.forward = forward
            yield logits
    finally:
        for module, own in before.items():
            module.__dict__.pop("forward", None)
            if own is not None:
                module.forward = own
        model.requires_grad_(False)
        for p in learning:
            p.requires_grad_(True)


def forwards_of(
    inner: nn.Module, adapted: Collection[nn.Module], run: Callable[..., Sequence[Tensor]]
) -> dict[nn.Module, Callable[..., Any]]:
    """Of the adapted layers, those that read one x together, and of the gated MLPs. ``run(x, modules)``: what these make of x;
    with an activation, f(first) second."""
    from fdora.integrations._peft.blocks import Shared, gated_mlps, projections

    def mlp(module: nn.Module, how: Any, act: Any, x: Tensor) -> Any:
        gate, up, down = (getattr(module, name) for name in how.layers())
        together = gate in adapted and up in adapted
        return down(run(x, (gate, up), act)[0] if together else gated_act(gate(x), up(x), act))

    placed: dict[nn.Module, Any] = {module: partial(mlp, module, *of) for module, of in gated_mlps(inner).items()}
    for modules in chain(map(projections, inner.modules()), ([module] for module in adapted)):
        members = [each for each in modules if each in adapted and each not in placed]
        shared = Shared(members, run)
        placed |= {module: partial(one_of, shared, module, place, run) for place, module in enumerate(members)}
    return placed


def one_of(shared: Any, module: nn.Module, place: int, run: Callable[..., Sequence[Tensor]], x: Tensor) -> Tensor:
    """What waits for the layer, or what it makes of x alone."""
    y: Tensor | None = shared.output(module, x, place, False)
    return run(x, [module])[0] if y is None else y


def check_forward(inner: Any) -> None:
    wanted = {"input_ids", "position_ids", "use_cache", "logits_to_keep"}
    if not wanted <= inspect.signature(inner.forward).parameters.keys():
        raise unknown(inner, f"lacks arguments among {sorted(wanted)}")


def check_tokens(x: Tensor, packed: Packed, path: str) -> None:
    if x.shape[-2] != len(packed.ids):  # offsets would be those of others
        have, remedy = f"{x.shape[-2]} of {len(packed.ids)} in `{path}`", "Adapt no head, no layers of single experts."
        raise fail(FN, "model", "one whose adapted layers get all tokens", have, remedy)


def check_ran(params: Mapping[str, DoraParams], ran: set[str]) -> None:
    asleep = next((path for path in params if path not in ran), None)
    if asleep:
        remedy = "Restore what runs its blocks in another way."
        raise fail(FN, "model", "one that calls each adapted layer", f"no call of `{asleep}`", remedy)


@torch.no_grad()
def check_apart(model: Any, see: Callable[[Packed], Tensor], device: torch.device, adapters: int) -> None:
    """Of three packed samples the second is turned round and the last token another: nothing else before them may
    feel it. All are the first adapter's. Experts round otherwise where others of the tokens are theirs: that is far below what
    it does to make one sample of the three.
    """
    ids = torch.arange(9, device=device)
    ends = torch.full((adapters,), 9, dtype=torch.int32, device=device)
    packed = Packed(ids, ids % 3, ids[[0, 1, 2, 6, 7]], ids, (), ends)
    others = packed._replace(ids=ids[[0, 1, 2, 5, 4, 3, 6, 7, 0]]), packed._replace(places=ids)
    here, there, joined = map(see, (packed, *others))
    if not bool(here.isfinite().all()):
        remedy = "Load it in bfloat16 or float32, or look for what is not finite in its weights and adapters."
        raise fail(FN, "model", "one whose outputs are finite", "some that are not", remedy)
    if not bool((here - there).abs().max() <= 0.01 * (here - joined).abs().max()):
        raise unknown(model.get_base_model(), "lets packed samples, or earlier tokens, see more than they may")


def unknown(model: Any, why: str) -> Exception:
    want = "a causal model of transformers such as Llama, Qwen3, Gemma 3 or Mistral, whose position_ids part packed samples"
    remedy = "Take a newer transformers or attn_implementation='sdpa', or train one adapter after the other."
    return fail(FN, "model", want, f"a {type(model).__name__}, which {why}", remedy)
