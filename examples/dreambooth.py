"""DreamBooth with DoRA: SDXL learns a subject from a few pictures, and the adapter is an ordinary file of diffusers.

python examples/dreambooth.py --images FOLDER; --tiny trains a small random model on a CPU, without a download
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, StableDiffusionXLPipeline
from diffusers.training_utils import cast_training_params
from diffusers.utils import load_image
from peft import LoraConfig, get_peft_model_state_dict

from fdora.integrations.peft import report, restore, use_fdora

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--model", default="stabilityai/stable-diffusion-xl-base-1.0")
parser.add_argument("--images", type=Path, default="images", help="a folder of pictures of the subject")
parser.add_argument("--prompt", default="a photo of sks dog")
parser.add_argument("--out", type=Path, default="adapter")
parser.add_argument("--steps", type=int, default=500)
parser.add_argument("--tiny", action="store_true")
options = parser.parse_args()
if options.tiny:
    import tiny

    name, options.images = tiny.painter(options.out)
else:
    name = options.model

device, dtype = ("cpu", torch.float32) if options.tiny else ("cuda", torch.bfloat16)
pipeline = StableDiffusionXLPipeline.from_pretrained(name, dtype=dtype).to(device)
unet, vae = pipeline.unet, pipeline.vae
side = unet.config.sample_size * pipeline.vae_scale_factor
with torch.no_grad():  # pictures and prompt stay the same: they are encoded once
    pictures = [load_image(str(path)) for path in sorted(options.images.iterdir())]
    pixels = pipeline.image_processor.preprocess(pictures, height=side, width=side).to(device, dtype)
    latents = torch.cat([vae.encode(each[None]).latent_dist.sample() for each in pixels]) * vae.config.scaling_factor
    text, _, pooled, _ = pipeline.encode_prompt(options.prompt, device=device, do_classifier_free_guidance=False)
sizes = torch.tensor([[side, side, 0, 0, side, side]], device=device, dtype=dtype)  # of the picture, its crop, the result

unet.requires_grad_(False)
unet.add_adapter(LoraConfig(r=16, lora_alpha=16, use_dora=True, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
cast_training_params(unet)  # adapters in float32
use_fdora(unet)  # the line
unet.enable_gradient_checkpointing()
unet.train()
adapter = [p for p in unet.parameters() if p.requires_grad]
optimizer = torch.optim.AdamW(adapter, lr=1e-2 if options.tiny else 1e-4)
scheduler = DDPMScheduler.from_config(pipeline.scheduler.config)
for step in range(options.steps):
    x = latents[torch.randint(len(latents), (4,))]
    noise, time = torch.randn_like(x), torch.randint(scheduler.config.num_train_timesteps, (len(x),), device=device)
    more = {"text_embeds": pooled.expand(len(x), -1), "time_ids": sizes.expand(len(x), -1)}
    with torch.autocast(device, dtype, enabled=not options.tiny):
        noisy = scheduler.add_noise(x, noise, time)
        found = unet(noisy, time, text.expand(len(x), -1, -1), added_cond_kwargs=more).sample
    loss = F.mse_loss(found.float(), noise.float())
    loss.backward()
    torch.nn.utils.clip_grad_norm_(adapter, 1.0)
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.3f}")

print(report(unet))  # what ran in each layer, and why
restore(unet)  # PEFT's own code again
about = unet.peft_config["default"].to_dict()
pipeline.save_lora_weights(options.out, unet_lora_layers=get_peft_model_state_dict(unet), unet_lora_adapter_metadata=about)
