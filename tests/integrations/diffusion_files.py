"""What the tests of files share: the adapters of a diffusers model, its output, and its base without any."""

import diffusers
import torch

from fdora.convert import from_peft
from tests.integrations.diffusion import MODELS, inputs


def adapters_of(model, name="default"):
    """By path, from what PEFT would save."""
    from peft import get_peft_model_state_dict

    state = get_peft_model_state_dict(model, adapter_name=name)
    config = model.peft_config[name].to_dict()
    return from_peft({f"base_model.model.{key}": t.clone() for key, t in state.items()}, config)


@torch.no_grad()
def forward(model, x=None):
    return model(**(inputs(model) if x is None else x)).sample


def bare(name, like=None):
    """The base model, in float32; its weights are those of ``like``, which has an adapter."""
    kind, sizes, _ = MODELS[name]
    torch.manual_seed(0)
    model = getattr(diffusers, kind)(**sizes).requires_grad_(False)
    if like is not None:
        model.load_state_dict(
            {key.replace(".base_layer.", "."): t for key, t in like.state_dict().items() if "lora" not in key}
        )
    return model.eval()
