"""use_fdora(fuse=True): q, k, v and the gated MLP of transformers' blocks in one call each."""

import copy
import functools
import inspect
import pickle

import pytest
import torch
from accelerate.hooks import ModelHook, add_hook_to_module, remove_hook_from_module
from peft import LoraConfig, get_peft_model
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaMLP
from transformers.utils.deprecation import deprecate_kwarg

from fdora import FdoraError
from fdora.integrations._peft import layer as layers
from fdora.integrations._peft.blocks import Mlp
from fdora.integrations._peft.patterns import MLP, act_of, gated_of, shares_x
from fdora.integrations.peft import restore, use_fdora
from tests.integrations.models import perturb
from tests.integrations.tiny import llama
from tests.memory import saved

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", *MLP]
IDS = torch.arange(24).view(2, 12) % 50


def made(targets=TARGETS, dropout=0.0, **sizes):
    """Two layers with adapters that have moved."""
    config = LoraConfig(r=4, use_dora=True, target_modules=targets, lora_dropout=dropout)
    return perturb(get_peft_model(llama(**sizes), config))


def step(model):
    model.zero_grad()
    out = model(input_ids=IDS, labels=IDS)
    out.loss.backward()
    return [out.logits.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def close(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=3e-6 * b.abs().max().item())


def kept(model):
    """Bytes that autograd keeps for backward, each piece of memory once."""
    _, found = saved(lambda: model(input_ids=IDS.repeat(8, 1)).logits)
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in found}.values())


def test_an_mlp_keeps_half():
    model = made()
    apart = kept(use_fdora(model, fuse=False))
    less = 2 * 2 * 192 * 96 * 4  # of each layer act(gate) and its product with up
    assert kept(use_fdora(model)) == kept(use_fdora(model, fuse=True)) <= apart - less
    parts = [*use_fdora(model, fuse=False).modules()]  # fuse=False takes it back
    assert not any(isinstance(m, Mlp) for m in parts)
    assert not any(v.shared for m in parts for v in getattr(m, "lora_variant", {}).values())


def test_what_is_not_served_runs_one_by_one():
    model = made()
    want = step(model)
    use_fdora(model, fuse=True)
    layer = model.base_model.model.model.layers[0]
    seen = []
    handle = layer.mlp.up_proj.register_forward_hook(lambda *_: seen.append("up"))
    handle_k = layer.self_attn.k_proj.register_forward_hook(lambda *_: seen.append("k"))
    close(step(model), want)
    assert seen == ["k", "up"]
    handle.remove(), handle_k.remove()
    with model.disable_adapter():
        base = model(input_ids=IDS).logits
    plain = made(targets=["q_proj"])
    with plain.disable_adapter():
        torch.testing.assert_close(base, plain(input_ids=IDS).logits)
    model.merge_adapter()
    torch.testing.assert_close(model(input_ids=IDS).logits, want[0], rtol=1e-4, atol=1e-5)
    model.unmerge_adapter()
    close(step(model), want)


def test_a_value_that_waits_belongs_to_one_x():
    """k and v called on another x, twice, or out of order, with gradients switched in between, and on x that has changed."""
    model = use_fdora(made(), fuse=True)
    q, k, v = (getattr(model.base_model.model.model.layers[0].self_attn, n) for n in ("q_proj", "k_proj", "v_proj"))
    x, other = torch.randn(3, 64), torch.randn(3, 64)
    want = {name: [layer(t).detach() for t in (other.clone(), x.clone())] for name, layer in (("k", k), ("v", v))}
    q(x)
    torch.testing.assert_close(k(other), want["k"][0])
    torch.testing.assert_close(v(x), want["v"][1])
    q(x)
    torch.testing.assert_close(k(x), want["k"][1])
    torch.testing.assert_close(k(x), want["k"][1])
    with torch.no_grad():
        q(x)
    assert k(x).requires_grad
    q(x), k(x), v(x)
    assert all(layer.lora_variant["default"].shared.waiting is None for layer in (q, k, v))
    changed = x.clone()
    with torch.no_grad():
        q(changed)
        torch.testing.assert_close(k(changed.mul_(2)), k(2 * x))
    replica = k._replicate_for_data_parallel()  # it shares the variant, and is none of the three
    replica._modules = dict(k._modules)
    torch.testing.assert_close(replica(x), want["k"][1])


class Cross(nn.Module):
    def __init__(self):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, x, memory):
        return self.q_proj(x) @ self.k_proj(memory).T @ self.v_proj(memory)


def mlps(model):
    return [m for m in model.modules() if isinstance(m, Mlp)]


class OtherMlp(LlamaMLP):
    """Forwards that hold the known line, or look like it."""

    def scaled(self, x):
        return 0.5 * self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    def swapped(self, x):
        return self.down_proj(self.act_fn(self.up_proj(x)) * self.gate_proj(x))

    @functools.wraps(LlamaMLP.forward)
    def wrapped(self, x):
        return 2 * FORWARD(self, x)

    async def later(self, x):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    def many(self, x, *more):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


FORWARD = LlamaMLP.forward


@pytest.mark.parametrize("name", ["scaled", "swapped", "wrapped"])
@pytest.mark.parametrize("when", ["before", "after", "instance"])
def test_another_forward_is_left_alone(name, when, monkeypatch):
    model, other = made(), vars(OtherMlp)[name]
    if when == "after":
        use_fdora(model, fuse=True)
    if when == "instance":
        for m in model.modules():
            if isinstance(m, LlamaMLP):
                m.forward = functools.partial(other, m)
    else:
        monkeypatch.setattr(LlamaMLP, "forward", other)
    with torch.no_grad():
        ours = model(input_ids=IDS).logits
    restore(model)
    want = step(model)
    close([ours], want[:1])
    if when != "after":
        use_fdora(model, fuse=True)  # q, k, v are there
        assert not mlps(model)
        close(step(model), want)


def test_a_forward_is_known_by_all_of_it():
    def documented(self, hidden_state):
        """Names of variables and a docstring do not matter."""
        return self.down_proj(self.act_fn(self.gate_proj(hidden_state)) * self.up_proj(hidden_state))

    def defaulted(self, x, scale=1):
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))

    assert gated_of(FORWARD) and gated_of(documented)
    assert not gated_of(defaulted)
    assert not any(gated_of(f) for f in vars(OtherMlp).values())
    assert not any(map(gated_of, (None, len, functools.partial(FORWARD), LlamaMLP)))


def test_an_mlp_takes_its_input_as_the_model_gives_it():
    mlp = use_fdora(made(), fuse=True).base_model.model.model.layers[0].mlp
    x = torch.randn(3, 64)
    assert torch.equal(mlp(x=x), FORWARD(mlp, x))
    with pytest.raises(TypeError):
        mlp(x, x)


class Attentions(nn.Module):
    """Each is safe, or says why it is not."""

    def safe(self, x):
        shape = x.shape
        q = self.q_norm(self.q_proj(x).view(shape))
        both = self.k_proj(x), self.v_proj(x)
        x = x + 1
        return q, both

    def in_place(self, x):
        q = self.q_proj(x)
        x.mul_(2)
        k, v = self.k_proj(x), self.v_proj(x)
        return q, k, v

    def maybe(self, x):
        q = self.q_proj(x)
        if self.own_kv:
            k, v = self.k_proj(x), self.v_proj(x)
        return q, k, v

    def ternary(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x) if self.own_kv else None, self.v_proj(x)
        return q, k, v

    def later(self, x):
        q, k, v = self.q_proj(x), lambda: self.k_proj(x), self.v_proj(x)
        return q, k(), v

    def walrus(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x := x + 1), self.v_proj(x)
        return q, k, v

    def weight(self, x):
        q, k, v, W = self.q_proj(x), self.k_proj(x), self.v_proj(x), self.q_proj.weight
        return q @ W, k, v

    def of_another(self, x):
        q, k, v = self.q_proj(x), self.other.k_proj(x), self.v_proj(x)
        return q, k, v

    def first_k(self, x):
        k, q, v = self.k_proj(x), self.q_proj(x), self.v_proj(x)
        return q, k, v

    def keyword(self, x):
        q, k, v = self.q_proj(x), self.k_proj(x, scale=2), self.v_proj(x)
        return q, k, v

    def expression(self, x):
        q, k, v = self.q_proj(x + 1), self.k_proj(x + 1), self.v_proj(x + 1)
        return q, k, v

    def loop(self, x):
        for _ in range(2):
            q, k, v = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return q, k, v


def test_an_attention_is_known_by_its_structure():
    forwards = {n: f for n, f in vars(Attentions).items() if inspect.isfunction(f)}
    assert [name for name, f in forwards.items() if shares_x(f)] == ["safe"]

    @functools.wraps(Attentions.safe)
    def wrapped(self, x):
        return Attentions.safe(self, x + 1)

    assert not shares_x(wrapped)
    # transformers' own decorator changes no x; what it calls is what is looked at, not what it says that it wraps
    renames = deprecate_kwarg("old", version="1000.0.0", new_name="new")
    assert shares_x(renames(Attentions.safe)) and shares_x(renames(renames(Attentions.safe)))
    assert not shares_x(renames(wrapped))
    assert not any(map(shares_x, (None, len, functools.partial(Attentions.safe))))


def test_a_source_that_is_not_the_code_is_not_believed(tmp_path):
    text = "class A:\n    def forward(self, x):\n        return self.q_proj(x), self.k_proj(x), self.v_proj(x)\n"
    text = text.replace("return", "y =")
    for name, written, known in (("same", text, True), ("other", text.replace("v_proj(x)", "v_proj(x), x.mul_(2)"), False)):
        file, space = tmp_path / f"{name}.py", {}
        exec(compile(written, str(file), "exec"), space)
        file.write_text(text)
        assert shares_x(space["A"].forward) == known
    exec("def forward(self, x):\n    y = self.q_proj(x), self.k_proj(x), self.v_proj(x)\n", space)
    assert not shares_x(space["forward"])  # without a source


ACTS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "gelu_10": None,
    "quick_gelu": None,
    "gelu_fast": None,
    "gelu_python": None,
    "relu": None,
    "mish": None,
}


@pytest.mark.parametrize("name", ACTS)
def test_activations_are_known_by_what_they_are(name):
    model = made(hidden_act=name).double()
    with torch.no_grad():
        for n, p in model.named_parameters():
            if "gate_proj" in n and "base_layer" in n:
                p.mul_(1000)  # far outside of what a few values would show
    want = step(model)
    use_fdora(model, fuse=True)
    assert len(mlps(model)) == (0 if ACTS[name] is None else 2)
    for a, b in zip(step(model), want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
    assert act_of(ACT2FN[name]) == ACTS[name]


def test_functions_and_modules_of_torch_are_known_too():
    F = nn.functional
    known = {"silu": (F.silu, nn.SiLU(), nn.SiLU(inplace=True)), "gelu": (F.gelu, nn.GELU()), "gelu_tanh": (nn.GELU("tanh"),)}
    for name, acts in known.items():
        assert [act_of(act) for act in acts] == [name] * len(acts)

    class Mine(nn.SiLU):
        def forward(self, x):
            return 2 * super().forward(x)

    for act in (None, F.relu, torch.sigmoid, lambda x: F.silu(x), Mine(), nn.ReLU(), functools.partial(F.gelu)):
        assert act_of(act) is None


def test_an_activation_is_looked_at_when_it_is_called(monkeypatch):
    model = use_fdora(made(), fuse=True)
    mlp, x = model.base_model.model.model.layers[0].mlp, torch.randn(3, 64)
    want = mlp(x)
    handle = mlp.act_fn.register_forward_hook(lambda module, args, out: 2 * out)
    torch.testing.assert_close(mlp(x), FORWARD(mlp, x))
    assert not torch.allclose(mlp(x), want)
    handle.remove()
    for act in (nn.GELU(), nn.ReLU(), ACT2FN["gelu_10"]):
        mlp.act_fn = act
        torch.testing.assert_close(mlp(x), FORWARD(mlp, x))
        assert not torch.allclose(mlp(x), want)
    mlp.act_fn = ACT2FN["silu"]
    monkeypatch.setattr(type(mlp.act_fn), "forward", lambda self, x: x)
    torch.testing.assert_close(mlp(x), FORWARD(mlp, x))


class Doubled(ModelHook):
    def post_forward(self, module, output):
        return 2 * output


@pytest.mark.parametrize("then", ["restore", "use_fdora", "fuse again", "remove", "copy"])
def test_hooks_of_accelerate_on_a_fused_mlp(then):
    """They keep the forward that they replace, and call it after the class has changed."""
    stock, model = made(), use_fdora(made(), fuse=True)
    plain = step(stock)
    add_hook_to_module(stock.base_model.model.model.layers[0].mlp, Doubled())
    want, layer = step(stock), model.base_model.model.model.layers[0]
    add_hook_to_module(layer.mlp, Doubled())
    close(step(model), want)
    if then == "restore":
        restore(model)
    if then == "use_fdora":
        use_fdora(model)
    if then == "fuse again":
        use_fdora(model, fuse=True)
    if then == "copy":
        model = copy.deepcopy(model)
    if then == "remove":
        remove_hook_from_module(layer.mlp)
    close(step(model), plain if then == "remove" else want)
    restore(model)
    close(step(model), plain if then == "remove" else want)


@pytest.mark.parametrize("how", ["merge_and_unload", "unload"])
def test_a_plain_model_has_nothing_of_ours(how):
    classes = [type(m) for m in getattr(made(), how)().modules()]
    model = use_fdora(made(), fuse=True)
    with torch.no_grad():
        want = model(input_ids=IDS).logits
    plain = getattr(model, how)()
    assert [type(m) for m in plain.modules()] == classes
    if how == "merge_and_unload":
        torch.testing.assert_close(plain(input_ids=IDS).logits, want, rtol=1e-4, atol=1e-5)
    assert b"fdora" not in pickle.dumps(plain)


def test_a_pickle_meets_another_forward(monkeypatch):
    """Read where somebody patched the class meanwhile."""
    model = use_fdora(made(), fuse=True)
    data, mlp = pickle.dumps(model), LlamaMLP
    monkeypatch.setattr(mlp, "forward", vars(OtherMlp)["scaled"])
    layers.subclass.cache_clear()
    again = pickle.loads(data)
    assert not mlps(again)
    close([again(input_ids=IDS).logits], [restore(model)(input_ids=IDS).logits])


def test_no_block_is_an_error():
    model = get_peft_model(nn.Sequential(nn.Linear(4, 4)), LoraConfig(r=2, use_dora=True, target_modules=["0"]))
    with pytest.raises(FdoraError, match="`fuse` must be None or False for a model without blocks it knows"):
        use_fdora(model, fuse=True)
    model = get_peft_model(Cross(), LoraConfig(r=2, use_dora=True, target_modules=["q_proj", "k_proj", "v_proj"]))
    with pytest.raises(FdoraError, match="`fuse` must be None or False"):
        use_fdora(model, fuse=True)
    assert sum(isinstance(m, Mlp) for m in use_fdora(made(targets=["q_proj", *MLP]), fuse=True).modules()) == 2
