"""The Llama family between torchtune's names and Hugging Face's.

torchtune rotates neighbouring pairs in RoPE, Hugging Face two halves of a head: the rows of q_proj and k_proj lie in another
order. Whatever has an axis of rows must follow: W, B and *m* (torchtune's own export to PEFT moves B and leaves m behind).
Families without that (Qwen2, Gemma, Phi) have the names only: heads=None.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from fdora.convert.adapter import Adapter

HF = {
    "attn.q_proj": "self_attn.q_proj",
    "attn.k_proj": "self_attn.k_proj",
    "attn.v_proj": "self_attn.v_proj",
    "attn.output_proj": "self_attn.o_proj",
    "mlp.w1": "mlp.gate_proj",
    "mlp.w2": "mlp.down_proj",
    "mlp.w3": "mlp.up_proj",
    "output": "lm_head",
}


def llama_from_torchtune(
    adapters: Mapping[str, Adapter], *, heads: int | None = None, kv_heads: int | None = None
) -> dict[str, Adapter]:
    """torchtune's paths and rows to Hugging Face's; ``heads`` and ``kv_heads`` of a model whose q and k are permuted."""
    return _renamed(adapters, HF, heads, kv_heads, True)


def llama_to_torchtune(
    adapters: Mapping[str, Adapter], *, heads: int | None = None, kv_heads: int | None = None
) -> dict[str, Adapter]:
    """Undo :func:`llama_from_torchtune`."""
    return _renamed(adapters, {theirs: ours for ours, theirs in HF.items()}, heads, kv_heads, False)


def _renamed(
    adapters: Mapping[str, Adapter], names: Mapping[str, str], heads: int | None, kv_heads: int | None, to_hf: bool
) -> dict[str, Adapter]:
    """A layer that is none of ``names`` keeps its path."""
    permuted = {"q_proj": heads, "k_proj": heads if kv_heads is None else kv_heads}
    out = {}
    for path, p in adapters.items():
        for old, new in names.items():
            if (path == old and "." not in old) or path.endswith("." + old):
                head = path[: -len(old)]
                head = head and f"model.{head}" if to_hf else head.removeprefix("model.")
                out[head + new] = _moved(p, permuted.get(new.rpartition(".")[2]), to_hf)
                break
        else:
            out[path] = p
    return out


def _moved(p: Adapter, heads: int | None, pairs_to_halves: bool) -> Adapter:
    if heads is None:
        return p

    def rows(t: Tensor) -> Tensor:
        half = t.shape[0] // heads // 2
        split = (heads, half, 2) if pairs_to_halves else (heads, 2, half)
        return t.reshape(*split, -1).transpose(1, 2).reshape(t.shape)

    return p._replace(B=rows(p.B), m=None if p.m is None else rows(p.m))
