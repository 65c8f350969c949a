"""Tiny models of diffusers with random weights, and inputs for one of any size."""

import diffusers
import torch

from tests.integrations.models import perturb

LINEAR = ["to_q", "to_k", "to_v", "to_out.0"]
JOINT = [*LINEAR, "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"]  # of image and text
FEED_FORWARD = ["net.0.proj", "net.2"]
CONVOLUTIONS = ["conv_in", "conv_out", "conv1", "conv2", "conv_shortcut", "downsamplers.0.conv", "upsamplers.0.conv"]
UNET = dict(in_channels=4, out_channels=4, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4)
UNET |= dict(down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"))
UNET |= dict(cross_attention_dim=12, attention_head_dim=4)
SDXL = UNET | dict(use_linear_projection=True, transformer_layers_per_block=(1, 2), addition_embed_type="text_time")
SDXL |= dict(addition_time_embed_dim=4, projection_class_embeddings_input_dim=6 * 4 + 10)
FLUX = dict(patch_size=1, in_channels=4, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2)
FLUX |= dict(joint_attention_dim=12, axes_dims_rope=(4, 4, 8))
FLUX2 = FLUX | dict(timestep_guidance_channels=8, axes_dims_rope=(4, 4, 4, 4), guidance_embeds=False)
QWEN = dict(in_channels=16, out_channels=4, num_layers=2, attention_head_dim=16, num_attention_heads=2)
QWEN |= dict(joint_attention_dim=12, axes_dims_rope=(8, 4, 4))
# Class, config, and the layers that are adapted.
MODELS = {
    "unet": ("UNet2DConditionModel", UNET, LINEAR),
    "sdxl": ("UNet2DConditionModel", SDXL, [*LINEAR, *FEED_FORWARD, "proj_in", "proj_out", *CONVOLUTIONS]),
    "flux": ("FluxTransformer2DModel", FLUX | dict(pooled_projection_dim=10), [*JOINT, *FEED_FORWARD, "proj_mlp", "proj_out"]),
    "flux2": (
        "Flux2Transformer2DModel",
        FLUX2,
        [*JOINT, "linear_in", "linear_out", "to_qkv_mlp_proj", "single_transformer_blocks.0.attn.to_out"],
    ),
    "qwen": ("QwenImageTransformer2DModel", QWEN, [*JOINT, *FEED_FORWARD]),
}


def made(name, dtype=torch.float64, **config):
    """The same weights on every call, with an adapter that has moved."""
    from peft import LoraConfig

    kind, sizes, targets = MODELS[name]
    torch.manual_seed(0)
    model = getattr(diffusers, kind)(**sizes).requires_grad_(False)
    model.add_adapter(LoraConfig(**dict(r=3, lora_alpha=4, use_dora=True, target_modules=targets) | config))
    return perturb(model).to(dtype)


def inputs(model, side=4, text=3, batch=2):
    """Noise, a text and a time for each image of ``side`` times ``side``; of a transformer, so many tokens."""
    rand, like = torch.Generator().manual_seed(1), next(model.parameters())

    def normal(*shape):
        return torch.randn(batch, *shape, generator=rand).to(like)

    c, kind = model.config, type(model).__name__
    time = torch.linspace(0.2, 0.7, batch).to(like)
    if kind == "UNet2DConditionModel":
        more = {}
        if c.addition_embed_type:
            ids = torch.tensor([[256.0, 256, 0, 0, 256, 256]]).to(like).expand(batch, -1)
            pooled = c.projection_class_embeddings_input_dim - ids.shape[1] * c.addition_time_embed_dim
            more = {"added_cond_kwargs": {"text_embeds": normal(pooled), "time_ids": ids}}
        x = {"sample": normal(c.in_channels, side, side), "timestep": (1000 * time).long()}
        return x | {"encoder_hidden_states": normal(text, c.cross_attention_dim)} | more
    x = {"hidden_states": normal(side * side, c.in_channels), "timestep": time}
    x |= {"encoder_hidden_states": normal(text, c.joint_attention_dim)}
    if kind == "QwenImageTransformer2DModel":
        mask = torch.ones(batch, text, dtype=torch.bool, device=like.device)
        return x | {"img_shapes": [(1, side, side)] * batch, "encoder_hidden_states_mask": mask}
    axes = len(c.axes_dims_rope)
    places = torch.cartesian_prod(torch.arange(1), torch.arange(side), torch.arange(side)).to(like)
    x |= {"img_ids": torch.nn.functional.pad(places, (0, axes - 3)), "txt_ids": torch.zeros(text, axes).to(like)}
    return x | ({"pooled_projections": normal(c.pooled_projection_dim)} if "pooled_projection_dim" in c else {})


def step(model, x=None, **more):
    """The output, and the gradients of all adapters by name."""
    model.zero_grad()
    y = model(**(inputs(model) if x is None else x), **more).sample
    (y * torch.arange(y.numel(), device=y.device).view(y.shape).sin().to(y.dtype)).sum().backward()
    return {"y": y.detach().clone()} | {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
