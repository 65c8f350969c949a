"""LyCORIS's own modules on the files that fdora writes, and its files read by fdora: the same weights, both axes."""

import pytest
import torch
from lycoris import LycorisNetwork, create_lycoris, create_lycoris_from_weights
from torch import nn

from fdora.convert import from_kohya, kohya_names, merge, to_kohya
from tests.integrations.diffusion import MODELS, made
from tests.integrations.diffusion_files import adapters_of, bare, forward


@pytest.mark.parametrize("name", MODELS)
def test_lycoris_loads_what_fdora_wrote(name):
    """Linear layers and convolutions of a whole model give PEFT's output."""
    model = made(name, torch.float32)
    want, there = forward(model), adapters_of(model)
    base = bare(name, model)
    assert (forward(base) - want).norm() > 0.01 * want.norm()
    network, _ = create_lycoris_from_weights(1.0, "", base, to_kohya(there, kohya_names(there, "lycoris")))
    assert len(network.loras) == len(there) and all(module.wd for module in network.loras)
    network.apply_to()
    torch.testing.assert_close(forward(base), want, rtol=1e-4, atol=1e-5 * want.abs().max().item())


@pytest.mark.parametrize("rows", [True, False], ids=["rows", "columns"])
def test_fdora_reads_what_lycoris_trained(rows):
    """A network of LyCORIS that has moved; of convolutions over columns fdora keeps the file, and merges none."""
    model = bare("sdxl")
    LycorisNetwork.apply_preset({"target_module": ["Linear", "Conv2d"]})
    network = create_lycoris(model, 1.0, 3, 2.0, dora_wd=True, wd_on_output=rows, conv_dim=3, conv_alpha=2.0)
    network.apply_to()  # until then it holds no module
    with torch.no_grad():
        for key, p in network.named_parameters():
            p.mul_(1 + 0.05 * torch.randn_like(p)) if "dora_scale" in key else p.normal_(std=0.1)
    state = {key: t.detach() for key, t in network.state_dict().items()}
    layers = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    names = kohya_names(layers, "lycoris")
    there, merged = from_kohya(state, names), 0
    for module in network.loras:
        path = next(path for path, name in names.items() if name == module.lora_name)
        p, W = there[path], layers[path].weight
        assert p.norm_axis == int(rows)
        if rows or W.dim() == 2:
            want, _ = module.get_merged_weight()
            torch.testing.assert_close(merge(W, p), want.detach(), rtol=1e-4, atol=1e-5)
            assert (want - W).norm() > 0.01 * W.norm()
            merged += 1
    assert merged > (40 if rows else 20) and len(there) == len(network.loras)
    again = to_kohya(there, names)
    assert again.keys() == state.keys() and all(torch.equal(again[key], state[key]) for key in again)
