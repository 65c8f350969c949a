"""A PEFT model that use_fdora runs, under torch.compile: eager's numbers, one op for all norms, few nodes, few graphs."""

from collections import Counter

import pytest
import torch

from tests import device
from tests.triton.changes import merged, new_weight, same_memory
from tests.triton.marks import HALF, INTERPRETED, needs_gpu, needs_kernels  # noqa: F401
from tests.triton.test_model_norms import inputs, layers
from tests.triton.test_model_norms import make as small_model

pytestmark = [needs_kernels, pytest.mark.usefixtures("kernels_everywhere")]

TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
LAYERS = 2


def made(family="llama", fuse=True, layers=LAYERS, **config):
    from peft import LoraConfig, get_peft_model
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    from fdora.integrations.peft import use_fdora

    torch.manual_seed(0)
    model, settings = {"llama": (LlamaForCausalLM, LlamaConfig), "qwen3": (Qwen3ForCausalLM, Qwen3Config)}[family]
    sizes = dict(hidden_size=64, intermediate_size=96, num_hidden_layers=layers, vocab_size=50, head_dim=16, use_cache=False)
    base = model(settings(**sizes, num_attention_heads=4, num_key_value_heads=2)).to(device.NAME, HALF[0])
    peft = get_peft_model(base, LoraConfig(r=4, use_dora=True, target_modules=TARGETS, **config))
    with torch.no_grad():
        for name, p in peft.named_parameters():
            if "lora_B" in name:
                p.normal_(std=0.1)
    return use_fdora(peft, fuse=fuse)


def ids(tokens=12):
    return (torch.arange(2 * tokens, device=device.NAME) % 50).view(2, tokens)


def step(run, model, x=None):
    """Logits and gradients."""
    model.zero_grad()
    x = ids() if x is None else x
    out = run(input_ids=x, labels=x)
    out.loss.backward()
    return [out.logits.detach().clone(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


def assert_close(got, want):
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-2, atol=1e-2 * b.abs().max().item())


def change(model, by=1.25):
    """Behind autograd's back."""
    for name, p in model.named_parameters():
        if "lora_A" in name:
            p.data.mul_(by)


def blocks(model):
    return model.base_model.model.model.layers


class Graphs:
    """A backend that runs what it is given and counts our ops in it: forward and backward, by turns."""

    def __init__(self):
        from torch._dynamo.backends.common import aot_autograd

        self.ops = []
        self.backend = aot_autograd(fw_compiler=self.keep)

    def keep(self, graph, inputs):
        from functorch.compile import make_boxed_func

        targets = [str(node.target) for node in graph.graph.nodes]
        self.ops.append(Counter(t.split(".")[1] for t in targets if t.startswith("fdora.")))
        return make_boxed_func(graph.forward)


@pytest.mark.parametrize(("family", "layers"), [("llama", LAYERS), ("qwen3", 1)])
def test_a_model_in_one_graph(family, layers, norms):
    """Three nodes for each block, one op for all norms; what changes in place is seen without a new graph."""
    model, graphs = made(family, layers=layers), Graphs()
    compiled = torch.compile(model, backend=graphs.backend, fullgraph=True)
    for _ in range(2):
        assert_close(step(compiled, model), step(model, model))
        change(model)
    assert graphs.ops == [
        {"model_norms": 1, "linear": 2 * layers, "mlp": layers},
        {"linear_backward": 2 * layers, "mlp_backward": layers},
    ]
    assert norms.counts() == {"model in place": 2, "model": 2}
    assert all(layer.lora_variant["default"].shared.waiting is None for layer in attentions(model))


def attentions(model):
    return [getattr(block.self_attn, name) for block in blocks(model) for name in TARGETS[:3]]


def compiled_whole(model, checkpointing):
    from torch.utils.checkpoint import checkpoint

    def run(x):
        return checkpoint(model, x, use_reentrant=False) if checkpointing else model(x)

    return torch.compile(run, backend="aot_eager", fullgraph=True)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_norms_of_a_graph_are_never_stale(checkpointing, norms):
    """Writes to W that move its version or tell every KeptNorm; another weight; another scaling; merges; a model that moves.
    Each layer keeps its own in a checkpoint's body."""
    from fdora.integrations.peft import use_fdora

    model, x = small_model(), inputs()
    compiled = compiled_whole(model, checkpointing)
    kind = "layer in place" if checkpointing else "model in place"
    for _ in range(3):  # the first run of a plan may bring another way to name tensors
        assert_close([compiled(x)], [model(x)])
    norms.poison(2, kind)
    assert not torch.allclose(compiled(x), model(x), rtol=0.1)
    norms.poison(0.5, kind)
    assert len({launch.kind for launch in norms.launches} & {"layer in place", "model in place"}) == 1
    layer = layers(model)[1]

    def written():
        layer.base_layer.weight.data.mul_(0.5)
        use_fdora(model)

    changes = [
        lambda: change(model),
        lambda: layer.base_layer.weight.mul_(2),
        lambda: layer.base_layer.load_state_dict({n: 2 * p for n, p in layer.base_layer.state_dict().items()}),
        lambda: new_weight(layer),
        lambda: same_memory(layer),
        lambda: merged(model, layer),
        written,
        lambda: layer.scaling.update(default=3.0),
        lambda: model.float().to(HALF[0]),
    ]
    before = None
    for make in (lambda: None, *changes):
        with torch.no_grad():
            make()
        # the graph of training; its forward alone decides whether a norm is computed anew, and keeps it for backward
        want = model(x)
        assert_close([compiled(x)], [want])
        assert make is changes[-1] or before is None or not torch.allclose(want, before, rtol=2e-2)
        before = want
    leaves = [p for p in model.parameters() if p.requires_grad]
    assert_close(*(torch.autograd.grad(run(x).float().square().sum(), leaves) for run in (compiled, model)))


@pytest.mark.parametrize("checkpointing", [False, True])
def test_two_forwards_before_their_backwards(checkpointing):
    """A checkpoint computes the norm again from what is kept, which the second forward was free to write."""
    model, x = small_model(), inputs()
    compiled = compiled_whole(model, checkpointing)
    leaves = [x, *(p for n, p in model.named_parameters() if "magnitude" in n)]

    def gradients(run, by):
        first = run(x).float().square().mean()
        change(model, by)
        second = run(2 * x).float().square().mean()
        change(model, 1 / by)
        return [d for y in ((second, first) if by == 1 else (first,)) for d in torch.autograd.grad(y, leaves)]

    for by in (1, 1) if checkpointing else (1, 1, 2):
        assert_close(gradients(compiled, by), gradients(model, by))
        change(model, 1.5)


@pytest.mark.parametrize("reentrant", [False, True])
def test_with_checkpointing(reentrant, norms):
    """Of the whole model, and of its blocks; the latter's recomputation runs the same graphs as their forward."""
    model = made(layers=1)
    model.train()
    model.enable_input_require_grads()
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    want = step(model, model)
    assert_close(step(torch.compile(model, backend="aot_eager"), model), want)
    if not reentrant:
        return  # the next test's
    compile_blocks(model)
    norms.launches.clear()
    assert_close(step(model, model), want)
    assert "layer in place" not in norms.counts()


def compile_blocks(model, backend="aot_eager", **how):
    for each in blocks(model):
        each.compile(backend=backend, fullgraph=True, **how)


def test_checkpoint_around_compiled_blocks(norms):
    """torch's own checkpoint around each: recomputation finds the tensors that forward kept, of the same shapes."""
    from torch.utils.checkpoint import checkpoint

    model = made(layers=1)
    want = step(model, model)
    compile_blocks(model)
    for each in blocks(model):
        inside = each._compiled_call_impl
        each._compiled_call_impl = lambda *a, inside=inside, **k: checkpoint(inside, *a, use_reentrant=False, **k)
    norms.launches.clear()
    assert_close(step(model, model), want)
    assert norms.counts() == {"model": 2}


def test_blocks_that_are_compiled_alone(norms):
    """They ask what the model's hook computed; two graphs serve all: the first block's input needs no gradient."""
    model, graphs = made(layers=3), Graphs()
    compile_blocks(model, graphs.backend)
    for _ in range(2):
        norms.launches.clear()
        got = step(model, model)
        assert norms.counts() == {"model": 1}
        assert_close(got, want_of(model))
        change(model)
    assert len(graphs.ops) == 4
    assert graphs.ops[0] == {"linear": 2, "mlp": 1}  # which ask for their norms


def want_of(model):
    compiled = [each._compiled_call_impl for each in blocks(model)]
    for each in blocks(model):
        each._compiled_call_impl = None
    want = step(model, model)
    for each, call in zip(blocks(model), compiled, strict=True):
        each._compiled_call_impl = call
    return want


def test_a_compiled_block_outside_of_a_forward_looks_after_itself(norms):
    model = made(layers=1)
    compile_blocks(model)
    step(model, model)
    block, x = blocks(model)[0], torch.randn(1, 4, 64, device=device.NAME, dtype=HALF[0])
    rope = model.base_model.model.model.rotary_emb(x, torch.arange(4, device=device.NAME)[None])
    for _ in range(2):
        change(model)
        norms.launches.clear()
        got = block(x, position_embeddings=rope)
        assert norms.counts() == {"layer in place": 7}
        compiled, block._compiled_call_impl = block._compiled_call_impl, None
        torch.testing.assert_close(got, block(x, position_embeddings=rope), rtol=1e-2, atol=1e-2)
        block._compiled_call_impl = compiled


def test_a_graph_break_between_q_and_v():
    """What the first graph left is for no other: k and v run by themselves, and nothing waits at the end."""
    model = made(layers=1)

    def broken(self, x):
        torch._dynamo.graph_break()
        return type(self).forward(self, x)

    for block in blocks(model):
        block.self_attn.k_proj.forward = broken.__get__(block.self_attn.k_proj)
    compiled = torch.compile(model, backend="aot_eager")
    for _ in range(2):
        assert_close(step(compiled, model), step(model, model))
        change(model)
    assert all(layer.lora_variant["default"].shared.waiting is None for layer in attentions(model))


@pytest.mark.parametrize(("fuse", "dynamic"), [(True, None), (False, True)])
def test_token_counts_that_change(fuse, dynamic):
    """One more graph at most for all lengths after the first."""
    model, graphs = made(fuse=fuse, layers=1), Graphs()
    compiled = torch.compile(model, backend=graphs.backend, fullgraph=True, dynamic=dynamic)
    for number, tokens in enumerate((12, 20, 33, 7)):
        x = ids(tokens)
        assert_close(step(compiled, model, x), step(model, model, x))
        if number == 1:
            seen = len(graphs.ops)
    assert len(graphs.ops) == seen <= (4 if dynamic is None else 2)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_inference_and_dropout(dropout):
    model = made(layers=1, lora_dropout=dropout)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            model.eval()
            torch.testing.assert_close(compiled(input_ids=ids()).logits, model(input_ids=ids()).logits, rtol=1e-2, atol=1e-2)
    model.train()
    if not dropout:
        return assert_close(step(compiled, model), step(model, model))

    def drawn(seed):
        torch.manual_seed(seed)
        return step(compiled, model)

    first, again, other = drawn(1), drawn(1), drawn(2)  # its masks are not those of eager code
    assert all(t.isfinite().all() for t in first)
    assert len(first) == len(again) and all(map(torch.equal, first, again)) and not torch.equal(first[0], other[0])


def train(run, model, steps=4):
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    losses = []
    for _ in range(steps):
        torch.compiler.cudagraph_mark_step_begin()
        loss = run(input_ids=ids(), labels=ids()).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def test_training_with_inductor():
    assert_trains_as_eager("default", whole=True)


@needs_gpu
@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("mode", ["reduce-overhead", "max-autotune"])
def test_training_in_cuda_graphs(mode, whole, caplog):
    """No graph is skipped, and each replay sees the adapters of its step."""
    assert_trains_as_eager(mode, whole)
    skips = torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    assert skips == 0 and "skipping cudagraphs" not in caplog.text


def assert_trains_as_eager(mode, whole):
    want = train(*[made(layers=1)] * 2)
    model = made(layers=1)
    if whole:
        got = train(torch.compile(model, mode=mode, fullgraph=True), model)
    else:
        for each in blocks(model):
            each.compile(mode=mode, fullgraph=True)
        got = train(model, model)
    assert want[-1] < want[0] - 0.1
    torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=2e-2, atol=2e-2)


@needs_gpu
def test_a_whole_step_in_one_cuda_graph(norms):
    """Compiled blocks take their norms from the hook that is captured with them, in each replay those of now."""
    model = made()
    compile_blocks(model)
    leaves = [p for p in model.parameters() if p.requires_grad]

    def grads():
        return torch.autograd.grad(model(input_ids=x, labels=x).loss, leaves)

    x = ids()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(3):
            grads()
    torch.cuda.current_stream().wait_stream(side)
    norms.launches.clear()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = grads()
    assert norms.counts() == {"model": 1}
    for _ in range(3):
        change(model)
        graph.replay()
        assert_close([t.clone() for t in got], grads())
