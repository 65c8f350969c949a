"""QDoRA: trains an 8B model in NF4 by bitsandbytes on a card of 24 GB. The planner predicts about 10 GiB for 2048 tokens.

python examples/qdora.py; --tiny trains a small random model on a CPU, without a download
"""

import argparse
from pathlib import Path

import torch
from datasets import load_dataset
from peft import LoraConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from trl import SFTConfig, SFTTrainer

from fdora.integrations.peft import init_magnitude, report, use_fdora

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="Qwen/Qwen3-8B")
parser.add_argument("--out", type=Path, default="adapter")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--tiny", action="store_true")
options = parser.parse_args()
if options.tiny:
    import tiny

    name, data = tiny.checkpoint(options.out / "base")
else:
    name, data = options.model, load_dataset("trl-lib/Capybara", split="train")

stored = BitsAndBytesConfig(
    load_in_4bit=True,
    bnb_4bit_quant_type="nf4",
    bnb_4bit_use_double_quant=True,  # the scales in 8 bits, too
    bnb_4bit_compute_dtype=torch.bfloat16,
)
device = "cpu" if options.tiny else "cuda"
model = AutoModelForCausalLM.from_pretrained(name, quantization_config=stored, dtype=torch.bfloat16, device_map={"": device})

trainer = SFTTrainer(
    model=model,
    train_dataset=data,
    args=SFTConfig(
        output_dir=str(options.out),
        max_steps=options.steps,
        learning_rate=1e-2 if options.tiny else 2e-4,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=8,
        gradient_checkpointing=True,
        max_length=2048,
        use_cpu=options.tiny,
        bf16=True,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
    ),
    peft_config=LoraConfig(r=16, lora_alpha=32, use_dora=True, target_modules="all-linear"),
)
use_fdora(trainer.model)  # each layer is one call that reads the 4-bit codes
init_magnitude(trainer.model)  # m from the decoded weights in float32
trainer.train()

losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(report(trainer.model))
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
if not options.tiny:
    print(f"peak {torch.cuda.max_memory_allocated() / 2**30:.1f} GiB")
trainer.save_model()  # the adapter alone; to merge it, load the base model in bfloat16
