"""DoRA without PEFT: a layer that keeps its norm, put in the place of a model's linear layers, and a training loop.

python examples/own_layer.py; --tiny trains a small random model on a CPU, without a download
"""

import argparse
from pathlib import Path

import torch
from datasets import load_dataset
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from fdora.functional import dora_init, dora_linear, dora_merge, dora_norm, dora_norm_state


class DoraLinear(torch.nn.Module):
    """A frozen linear layer with an adapter in float32."""

    def __init__(self, base, r=16, alpha=32):
        super().__init__()
        self.base, self.s = base, alpha / r
        self.A, self.B, self.m = map(torch.nn.Parameter, dora_init(base.weight, r))
        self.state = dora_norm_state(base.weight)

    def forward(self, x):
        W, b = self.base.weight, self.base.bias
        # Reads W where A or B have changed since the last call: once for an optimizer step.
        self.state = dora_norm(W, self.A.detach(), self.B.detach(), s=self.s, state=self.state)
        return dora_linear(x, W, self.A, self.B, self.m, s=self.s, bias=b, norm=self.state.c)


parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
parser.add_argument("--out", type=Path, default="adapter")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--tiny", action="store_true")
options = parser.parse_args()
if options.tiny:
    import tiny

    name, data = tiny.checkpoint(options.out / "base")
else:
    name, data = (
        options.model,
        load_dataset("Salesforce/wikitext", "wikitext-2-raw-v1", split="train").filter(lambda x: x["text"]),
    )

device = "cpu" if options.tiny else "cuda"
model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32 if options.tiny else torch.bfloat16).to(device)
model.requires_grad_(False)
tokenizer = AutoTokenizer.from_pretrained(name)
layers = {path: DoraLinear(layer) for path, layer in model.model.layers.named_modules() if isinstance(layer, torch.nn.Linear)}
for path, layer in layers.items():
    model.model.layers.set_submodule(path, layer)

adapter = {key: p for key, p in model.named_parameters() if p.requires_grad}
optimizer = torch.optim.AdamW(adapter.values(), lr=1e-2 if options.tiny else 2e-4)
texts = data.shuffle(seed=0)["text"]
for step in range(options.steps):
    total = 0.0
    for part in range(4):  # micro-batches: one norm for all of them
        text = [texts[(32 * step + 8 * part + n) % len(texts)] for n in range(8)]
        batch = tokenizer(text, return_tensors="pt", padding=True, truncation=True, max_length=512).to(device)
        labels = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)
        loss = model(**batch, labels=labels).loss / 4
        loss.backward()
        total += loss.item()
    torch.nn.utils.clip_grad_norm_(adapter.values(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {total:.3f}")

options.out.mkdir(exist_ok=True)
save_file({key: p.detach() for key, p in adapter.items()}, options.out / "adapter.safetensors")
for path, layer in layers.items():  # merged: an ordinary model again
    layer.base.weight.data = dora_merge(layer.base.weight, layer.A, layer.B, layer.m, s=layer.s).detach()
    model.model.layers.set_submodule(path, layer.base)
model.save_pretrained(options.out / "merged")
