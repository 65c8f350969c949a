"""use_fdora(fuse=True) on vision transformers: LayerScale and the residual in the layer before them, gate and up in one weight."""

import copy
import pickle
import threading
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers import Dinov2Config, Dinov2Model, ViTConfig, ViTModel

from bench.vit_model import LINEARS, TINY, GluMlp, LayerScale, vit
from fdora.functional import opaque
from fdora.integrations._peft.blocks import Epilogue, Mlp, Tail, VitBlock, last_layers, where
from fdora.integrations._peft.patterns import block_of, chain, gated_of, scale_of
from fdora.integrations.peft import report, restore, use_fdora
from tests.integrations.models import perturb
from tests.process import run_cases

LAYERS = 2
SIZES = dict(
    hidden_size=32, num_hidden_layers=LAYERS, num_attention_heads=2, image_size=28, patch_size=14, intermediate_size=48
)
FAMILIES = {
    "dinov2_swiglu": lambda: Dinov2Model(Dinov2Config(**SIZES, layerscale_value=0.3, use_swiglu_ffn=True)),
    "dinov2": lambda: Dinov2Model(Dinov2Config(**SIZES, layerscale_value=0.3)),
    "vit": lambda: ViTModel(ViTConfig(**SIZES, hidden_dropout_prob=0.0)),
    "timm": lambda: vit(TINY, LAYERS, "cpu", torch.float64),
}
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "fc1", "fc2", "gate_proj", "up_proj", "down_proj", "qkv", "proj"]


def made(family="timm", dtype=torch.float64, **config):
    """Two layers with adapters that have moved."""
    torch.manual_seed(0)
    model = FAMILIES[family]().to(dtype)
    if isinstance(model, Dinov2Model) and not any(name.endswith("q_proj") for name, _ in model.named_modules()):
        pytest.skip("this transformers has other blocks, whose layers run apart; the one that `make test` installs has these")
    names = LINEARS if family == "timm" else ALL
    model = get_peft_model(model, LoraConfig(r=3, use_dora=True, target_modules=list(names), **config))
    return perturb(model).to(dtype)


def images(dtype=torch.float64):
    return torch.randn(2, 3, 28, 28, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(dtype)


def output(model, x):
    y = model(x)
    return y if isinstance(y, torch.Tensor) else y.last_hidden_state


def step(model, x=None):
    model.zero_grad()
    x = images(next(model.parameters()).dtype) if x is None else x
    y = output(model, x)
    (y * torch.arange(y.numel(), dtype=y.dtype).view(y.shape).sin()).sum().backward()
    return [y.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def close(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9 * b.abs().max().item())


@pytest.fixture
def taken(monkeypatch):
    """How often a layer took upon itself what follows."""
    calls, stock = [], Tail.taken
    monkeypatch.setattr(Tail, "taken", lambda self: calls.append(self) or stock(self))
    return calls


def blocks(model):
    return [m for m in model.modules() if isinstance(m, VitBlock)]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_model_stays_the_same(family, taken):
    model = made(family)
    stock, classes = step(model), [type(m) for m in model.modules()]
    use_fdora(model, fuse=True)
    assert len(blocks(model)) == LAYERS
    assert sum(isinstance(m, Mlp) for m in model.modules()) == (LAYERS if family in ("dinov2_swiglu", "timm") else 0)
    close(step(model), stock)
    assert len(taken) == 2 * LAYERS
    assert all((row.fused, row.composed, row.fallbacks) == (1, 0, {}) for row in report(model))
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert not blocks(twin)
        close(step(twin), stock)
    assert len(taken) == 2 * LAYERS
    restore(model)
    assert [type(m) for m in model.modules()] == classes
    assert all(torch.equal(a, b) for a, b in zip(step(model), stock, strict=True))


def test_layers_that_ran_alone_are_told_as_well(taken):
    """What a layer keeps of its last call is of the time before its block knew it."""
    model = use_fdora(made("dinov2"), fuse=False)
    alone = step(model)
    assert not taken
    close(step(use_fdora(model, fuse=True)), alone)
    assert len(taken) == 2 * LAYERS


@pytest.mark.parametrize("family", ["dinov2_swiglu", "timm"])
def test_under_a_compiler(family, taken):
    model = made(family)
    stock = step(model)
    use_fdora(model, fuse=True)
    torch._dynamo.reset()
    close(step(torch.compile(model, backend="aot_eager", fullgraph=True)), stock)
    assert not any(each.tail.waiting for m in model.modules() for each in getattr(m, "lora_variant", {}).values() if each.tail)


def test_with_checkpointing(taken):
    model = made("dinov2")
    stock = step(model)
    use_fdora(model, fuse=True)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    model.train()
    close(step(model), stock)
    assert len(taken) == 4 * LAYERS  # forward, and again in backward


def test_half_precision_rounds_once(taken):
    """Against float64: no further away than PEFT, which rounds y, gamma y and the sum."""
    exact, model = made(), made(dtype=torch.bfloat16)
    with torch.no_grad():
        for a, b in zip(exact.parameters(), model.parameters(), strict=True):
            a.copy_(b)
    x = images(torch.bfloat16)
    truth, stock = step(exact, x.double())[0], step(model, x)[0]
    ours = step(use_fdora(model, fuse=True), x)[0]
    assert len(taken) == 2 * LAYERS and ours.dtype == torch.bfloat16
    assert (ours - truth).norm() < (stock - truth).norm()


def first(model):
    return blocks(model)[0]


def hook_scale(block):
    block.ls1.register_forward_hook(lambda module, args, y: 2 * y)


def hook_linear(block):
    block.attn.proj.register_forward_hook(lambda module, args, y: 2 * y)


def hook_inner(block):
    block.attn.register_forward_hook(lambda module, args, y: 2 * y)


def hook_drop(block):
    block.drop_path1.register_forward_hook(lambda module, args, y: 2 * y)


def other_drop(block):
    block.attn.proj_drop = nn.Tanh()


def other_scale(block):
    class Twice(LayerScale):
        def forward(self, x):
            return 2 * x * self.gamma

    block.ls1.__class__ = Twice


def other_inner(block):
    block.attn.forward = lambda x: 2 * type(block.attn).forward(block.attn, x)


def off(block):
    block.attn.proj.enable_adapters(False)


CHANGES = [hook_scale, hook_linear, hook_inner, other_drop, other_scale, other_inner, off]


@pytest.mark.parametrize("change", [*CHANGES, hook_drop], ids=lambda f: f.__name__)
def test_what_else_happens_is_left_alone(change, taken):
    """Changes after use_fdora: the first half of one block goes on as it is written, but for what no change is about."""
    model = use_fdora(made(), fuse=True)
    change(first(model))
    x = images()
    with torch.no_grad():
        got = model(x)
        folds = len(taken)
        for block in blocks(model):
            block.__class__ = block.STOCK
        want = model(x)
    torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)
    assert folds == 2 * LAYERS - (change is not hook_drop)  # gamma is folded before a drop path


def test_dropout_after_the_layer_and_between(taken, monkeypatch):
    whole, stock = [], opaque.dora_mlp
    monkeypatch.setattr(opaque, "dora_mlp", lambda *args, **kwargs: whole.append(1) or stock(*args, **kwargs))
    model = use_fdora(made(), fuse=True).train()
    first(model).attn.proj_drop.p = first(model).mlp.drop1.p = 0.5
    step(model)
    assert len(taken) == 2 * LAYERS - 1  # the MLP runs layer by layer, and its last one folds
    assert len(whole) == LAYERS - 1
    model.eval()
    step(model)
    assert (len(taken), len(whole)) == (4 * LAYERS - 1, 2 * LAYERS - 1)


def test_what_waits_belongs_to_one_call():
    model = use_fdora(made(), fuse=True)
    block, x = first(model), torch.randn(2, 5, TINY.width, dtype=torch.float64)
    alone = block.attn.proj(x)
    handle = block.attn.qkv.register_forward_pre_hook(fails)
    with pytest.raises(RuntimeError, match="half-way"):
        block(x)
    handle.remove()
    assert torch.equal(block.attn.proj(x), alone)
    tail = block.attn.proj.lora_variant["default"].tail
    assert tail.stands(block.attn, block.attn.proj, block.ls1)
    assert not tail.stands(block.attn, copy.deepcopy(block.attn.proj), block.ls1)
    assert last_layers(block.mlp) == [block.mlp.fc2]
    gamma, N = block.ls1.gamma, TINY.width
    for ends, fits in (
        (Epilogue(gamma, x), True),
        (Epilogue(gamma.float(), x), False),
        (Epilogue(gamma, x.float()), False),
        (Epilogue(gamma[:1], x), False),
        (Epilogue(gamma, x[:, :1]), False),
        (Epilogue(None, x), True),
    ):
        tail.waiting[where()] = ends
        assert (tail.take(block.attn.proj, x, N) is ends) == fits
        assert tail.take(block.mlp.fc2, x, N) is None
    with torch.autocast("cpu", torch.bfloat16):
        assert tail.take(block.attn.proj, x, N) is None


def fails(module, args):
    raise RuntimeError("half-way")


def test_threads_do_not_hear_each_other():
    """Both are between the block's words and the layer's ears at the same time."""
    model = use_fdora(made(), fuse=True)
    block, both, found = first(model), threading.Barrier(2), {}
    passed = set()
    xs = [torch.randn(2, 5, TINY.width, dtype=torch.float64) for _ in range(2)]
    want = [block(x) for x in xs]

    def meet(*_):
        both.wait()
        passed.add(threading.get_ident())

    block.attn.qkv.register_forward_hook(meet)

    def one(i):
        try:
            found[i] = block(xs[i])
        finally:
            if threading.get_ident() not in passed:  # it will not come: the other must not wait for it
                both.abort()

    threads = [threading.Thread(target=one, args=(i,)) for i in range(2)]
    [t.start() for t in threads], [t.join() for t in threads]
    assert len(passed) == 2
    for i, y in enumerate(want):
        torch.testing.assert_close(found[i], y)


def test_merged_and_unloaded():
    model = made()
    want = step(model)[0]
    use_fdora(model, fuse=True)
    model.merge_adapter()
    torch.testing.assert_close(output(model, images()), want, rtol=1e-8, atol=1e-9)
    model.unmerge_adapter()
    plain = model.merge_and_unload()
    torch.testing.assert_close(output(plain, images()), want, rtol=1e-8, atol=1e-9)
    assert not any(isinstance(m, Mlp) for m in plain.modules())


class Forwards(nn.Module):
    def timm(self, x):
        x = self.qkv(x)
        x = self.proj(x)
        x = self.proj_drop(x)
        return x

    def pair(self, x):
        y, weights = self.attend(x)
        y = self.o_proj(y)
        return y, weights

    def nested(self, x):
        return self.drop(self.proj(x * 2))

    def scaled(self, x):
        x = self.proj(x)
        return 2 * x

    def kept(self, x):
        y = self.proj(x)
        z = self.drop(y)
        return z, y

    def twice(self, x):
        x = self.proj(x)
        x = self.proj(x)
        return x

    def early(self, x):
        if self.alone:
            return x
        x = self.proj(x)
        return x

    def listened(self, x):
        x = self.proj(x)
        self.seen.append(x)
        return x

    def later(self, x):
        f = lambda: x  # noqa: E731
        x = self.proj(x)
        return x, f


def test_the_end_of_a_forward_is_known_by_its_structure():
    ends = {name: chain(f) for name, f in vars(Forwards).items() if callable(f)}
    assert ends == {
        "timm": ("proj_drop", "proj", "qkv"),
        "pair": ("o_proj",),
        "nested": ("drop", "proj"),
        "scaled": (),
        "kept": ("drop",),
        "twice": (),
        "early": (),
        "listened": (),
        "later": (),
    }


def test_blocks_mlps_and_scales_are_known_by_all_of_their_code():
    class Block:
        def other_order(self, x):
            x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x))))
            x = x + self.drop_path2(self.ls2(self.mlp(self.norm1(x))))
            return x

        def other_default(self, x, attn_mask=0):
            x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), attn_mask=attn_mask)))
            x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
            return x

        def other_name(self, x, mask=None):
            x = x + self.drop_path1(self.ls1(self.attn(self.norm1(x), mask=mask)))
            x = x + self.drop_path2(self.ls2(self.mlp(self.norm2(x))))
            return x

    assert not any(block_of(f) for f in vars(Block).values() if callable(f))
    assert gated_of(GluMlp.forward).packed

    class Three(GluMlp):
        def forward(self, x):
            x = self.fc1(x)
            x1, x2 = x.chunk(3, dim=self.chunk_dim)
            x = x1 * self.act(x2) if self.gate_last else self.act(x1) * x2
            x = self.drop1(x)
            x = self.norm(x)
            x = self.fc2(x)
            x = self.drop2(x)
            return x

    assert gated_of(Three.forward) is None
    assert scale_of(LayerScale(4)) == "gamma" and scale_of(nn.Identity()) == "" and scale_of(nn.Linear(2, 2)) is None


def test_gate_last(taken):
    model = made()
    for m in model.modules():
        if isinstance(m, GluMlp):
            m.gate_last = True
    stock = step(model)
    close(step(use_fdora(model, fuse=True)), stock)
    for m in model.modules():
        if isinstance(m, GluMlp):
            m.chunk_dim = 2  # the same for these x; not for all, so layer by layer
    close(step(model), stock)


def test_timm():
    run_cases(Path(__file__).with_name("timm_cases.py"), "timm", 6, OMP_NUM_THREADS="1")
