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
    out = {}
    for path, p in adapters.items():
        for ours, theirs in HF.items():
            if path == ours == "output" or path.endswith("." + ours):
                head, tail = path[: -len(ours)], theirs
                out[f"model.{head}{tail}" if head else tail] = _moved(p, _heads(ours, heads, kv_heads), True)
                break
        else:
            out[path] = p
    return out


def llama_to_torchtune(
    adapters: Mapping[str, Adapter], *, heads: int | None = None, kv_heads: int | None = None
) -> dict[str, Adapter]:
    """The way back."""
    out = {}
    for path, p in adapters.items():
        for ours, theirs in HF.items():
            if path == theirs == "lm_head" or path.endswith("." + theirs):
                head = path[: -len(theirs)].removeprefix("model.")
                out[head + ours] = _moved(p, _heads(ours, heads, kv_heads), False)
                break
        else:
            out[path] = p
    return out


def _heads(name: str, heads: int | None, kv_heads: int | None) -> int | None:
    return {"attn.q_proj": heads, "attn.k_proj": heads if kv_heads is None else kv_heads}.get(name)


def _moved(p: Adapter, heads: int | None, pairs_to_halves: bool) -> Adapter:
    if heads is None:
        return p

    def rows(t: Tensor) -> Tensor:
        half = t.shape[0] // heads // 2
        split = (heads, half, 2) if pairs_to_halves else (heads, 2, half)
        return t.reshape(*split, -1).transpose(1, 2).reshape(t.shape)

    return p._replace(B=rows(p.B), m=None if p.m is None else rows(p.m))
