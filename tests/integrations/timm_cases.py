"""timm's own vision transformers with use_fdora(fuse=True). timm wants torchvision, of which no model here uses anything."""

import importlib.abc
import importlib.machinery
import sys
import types

import peft  # noqa: F401  # it asks whether torchvision is there, and must hear the truth
import pytest
import torch
import transformers  # noqa: F401

from tests.integrations import test_peft_vit as ours
from tests.integrations.test_peft_vit import close, made, step, taken  # noqa: F401


class Anything(type):
    def __getattr__(cls, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (), {})


class Empty(types.ModuleType):
    def __getattr__(self, name):
        return getattr(Anything("Empty", (), {}), name)


class Stub(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path, target=None):
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torchvision" else None

    def create_module(self, spec):
        return Empty(spec.name)

    def exec_module(self, module):
        pass


sys.meta_path.insert(0, Stub())
import timm  # noqa: E402
from timm.layers import SwiGLU  # noqa: E402

SMALL = dict(depth=ours.LAYERS, img_size=28, patch_size=14, embed_dim=48, num_heads=2, num_classes=0)
MODELS = {
    "giant": lambda: timm.create_model("vit_giant_patch14_dinov2", **SMALL, init_values=0.3),
    "base": lambda: timm.create_model("vit_base_patch16_224", **SMALL),
    "swiglu": lambda: timm.create_model("vit_base_patch16_224", **SMALL, mlp_layer=SwiGLU, act_layer=torch.nn.SiLU),
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("train", [False, True])
def test_timm(name, train, taken, monkeypatch):  # noqa: F811
    monkeypatch.setitem(ours.FAMILIES, "dinov2", MODELS[name])
    monkeypatch.setattr(ours, "ALL", ["qkv", "proj", "fc1", "fc2", "fc1_g", "fc1_x"])
    model = made("dinov2", exclude_modules=["patch_embed.proj"]).train(train)
    stock = step(model)
    ours.use_fdora(model, fuse=True)
    assert len(ours.blocks(model)) == ours.LAYERS
    close(step(model), stock)
    assert len(taken) == 2 * ours.LAYERS
    assert sum(isinstance(m, ours.Mlp) for m in model.modules()) == (0 if name == "base" else ours.LAYERS)
    ours.restore(model)
    assert all(torch.equal(a, b) for a, b in zip(step(model), stock, strict=True))
