"""Fine-tunes a model with TRL: a script for LoRA becomes one for DoRA by ``use_dora=True``, and as fast as LoRA by one line.

python examples/sft_trl.py; --lora trains plain LoRA instead, --tiny a small random model on a CPU, without a download
"""

import argparse
from pathlib import Path

from datasets import load_dataset
from peft import LoraConfig
from trl import SFTConfig, SFTTrainer

from fdora.integrations.peft import report, restore, use_fdora

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="Qwen/Qwen3-0.6B")
parser.add_argument("--out", type=Path, default="adapter")
parser.add_argument("--steps", type=int, default=200)
parser.add_argument("--lora", action="store_true")
parser.add_argument("--tiny", action="store_true")
options = parser.parse_args()
if options.tiny:
    import tiny

    model, data = tiny.checkpoint(options.out / "base")
else:
    model, data = options.model, load_dataset("trl-lib/Capybara", split="train")

trainer = SFTTrainer(
    model=model,
    train_dataset=data,
    args=SFTConfig(
        output_dir=str(options.out),
        max_steps=options.steps,
        learning_rate=1e-2 if options.tiny else 2e-4,
        gradient_accumulation_steps=4,
        gradient_checkpointing=True,
        max_length=1024,
        use_cpu=options.tiny,
        bf16=not options.tiny,
        logging_steps=5,
        save_strategy="no",
        report_to=[],
    ),
    peft_config=LoraConfig(r=16, lora_alpha=32, use_dora=not options.lora, target_modules="all-linear"),
)
use_fdora(trainer.model)  # the line; layers of plain LoRA stay PEFT's
trainer.train()

losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print(report(trainer.model))  # what ran in each layer, and why
print(f"loss {losses[0]:.2f} -> {losses[-1]:.2f}")
restore(trainer.model)  # PEFT's own code again
trainer.save_model()  # an ordinary PEFT adapter
