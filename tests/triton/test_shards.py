"""Norms by kernels where weights are DTensors between two forwards, or in them: one call for what FSDP2 gathers together, and
for all parts of tensor parallelism.

One process is enough: see test_compiled_shards.py.
"""

import copy

import pytest
import torch
from torch import nn

from fdora.integrations import _table, _tree
from fdora.integrations.peft import use_fdora
from tests import device
from tests.triton.changes import adapted
from tests.triton.marks import HALF, INTERPRETED, needs_kernels  # noqa: F401
from tests.triton.test_compiled_model import assert_close
from tests.triton.test_compiled_shards import change, step

pytestmark = [needs_kernels, pytest.mark.usefixtures("kernels_everywhere")]


class Block(nn.Sequential):
    pass


@pytest.fixture
def model():
    torch.manual_seed(0)
    blocks = [Block(nn.Linear(48, 32), nn.Linear(32, 64, bias=False), nn.Linear(64, 48)) for _ in range(2)]
    return adapted(nn.Sequential(*blocks), r"\d\.\d")


def fsdp(model, mesh, checkpointed=False):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
    from torch.distributed.fsdp import fully_shard

    if checkpointed:
        apply_activation_checkpointing(model, check_fn=lambda m: isinstance(m, Block))
    for block in [m for m in model.modules() if isinstance(m, Block)]:
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("first", [True, False])
def test_one_call_for_a_unit(model, mesh, norms, first, checkpointed):
    alone = use_fdora(copy.deepcopy(model))
    if first:
        use_fdora(model)
    fsdp(model, mesh, checkpointed)
    if not first:
        use_fdora(model)
    step(model)  # in the first forward layers ask before the hooks know of them
    for what in ("lora_A", "base_layer.weight", "lora_B", "nothing"):
        norms.launches.clear()
        got = step(model)
        assert [len(launch.changed) for launch in norms.of("model")] == [3, 3] * (1 + checkpointed)
        assert len(norms.of("model")) == len(norms.launches)  # and no layer asked by itself
        assert_close(got, step(alone))
        for each in (model, alone):
            change(each, what)


def test_norms_of_a_unit_are_reused(model, mesh, norms):
    """Where nothing changed the kernels copy what they have: poisoned norms come back."""
    fsdp(use_fdora(model), mesh)
    step(model)
    right = step(model)
    norms.of("model")[-1].c.mul_(2)
    assert not torch.allclose(step(model)[0], right[0], rtol=0.1)
    use_fdora(model)
    step(model)
    assert_close(step(model), right)


def test_a_change_inside_of_a_forward_is_seen(model, mesh):
    """Between the unit's first layer and its last one somebody writes A: the layer computes its own norm."""
    alone = use_fdora(copy.deepcopy(model))
    fsdp(use_fdora(model), mesh)
    step(model)
    for each in (model, alone):
        last = each.base_model.model[0][2]

        def write(module, args, last=last):
            with torch.no_grad():
                last.lora_A["default"].weight.mul_(1.5)

        each.base_model.model[0][1].register_forward_pre_hook(write)
    X = torch.linspace(-1, 1, 5 * 48, device=device.NAME).view(5, 48).to(HALF[0])
    with torch.no_grad():
        assert_close([model(X)], [alone(X)])


def test_parts_of_tensor_parallelism_are_one_table(model, mesh, monkeypatch):
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    alone = use_fdora(copy.deepcopy(model))
    use_fdora(model)
    for block in model.base_model.model:
        styles = {"0.base_layer": ColwiseParallel(), "0.lora_B.default": ColwiseParallel()}
        styles |= {"1.base_layer": RowwiseParallel(), "1.lora_A.default": RowwiseParallel()}
        parallelize_module(block, mesh, styles)
    step(model)
    served, has = [], _tree.Table.has

    def counted(self, *args):
        served.append(has(self, *args))
        return served[-1]

    monkeypatch.setattr(_tree.Table, "has", counted)
    for what in ("base_layer.weight", "lora_A", "nothing"):
        served.clear()
        got = step(model)
        assert served == [True] * 4  # of each block the two that lie in parts; _plain.operands finds that of the third
        assert_close(got, step(use_fdora(alone)))  # which computes all norms anew
        with torch.no_grad():
            for each in (model, alone):
                for name, p in each.named_parameters():
                    if what in name:
                        p.mul_(1.25)  # a DTensor as a whole: its part's version stays


def test_a_plan_of_rows_follows_its_tensors(mesh, monkeypatch):
    """The kernels read pointers from a table: of gathered A that lie elsewhere by now, and of another model of the same shapes."""
    from torch.distributed.tensor import Shard, distribute_tensor

    from fdora.functional import _sharded_tree, dora_norm, dora_norm_tree, dora_norm_tree_state

    held, gather = [], _sharded_tree.RowsPlan.gather

    def elsewhere(*args):
        held.append(gather(*args))
        return held[-1]

    def there(*args):
        return [old.copy_(new) for old, new in zip(held[0], gather(*args), strict=True)]

    monkeypatch.setattr(_sharded_tree.RowsPlan, "gather", elsewhere)

    def made(seed):
        draw = torch.Generator().manual_seed(seed)
        shapes = [((64, 48), (4, 48), (64, 4)), ((32, 160), (8, 160), (32, 8))]
        layers = [[torch.randn(shape, generator=draw).to(device.NAME, HALF[0]) for shape in three] for three in shapes]
        return layers, [[distribute_tensor(t, mesh, [Shard(0)]) for t in three] for three in layers]

    def check(plain, cut, state=None):
        weights, params = [W for W, *_ in cut], [(A, B) for _, A, B in cut]
        c = dora_norm_tree(weights, params, s=0.5, gather=True)
        state = dora_norm_tree(weights, params, s=0.5, gather=True, state=state or dora_norm_tree_state(weights))
        for (W, A, B), mine, kept in zip(plain, c, state.c, strict=True):
            assert torch.equal(mine, kept)
            assert_close([mine], [dora_norm(W, A, B, s=0.5)])
        return state

    models = [made(0), made(1)]
    for model in models:
        state = check(*model)
        for i in (0, 1):
            for tensors in model:
                tensors[i][1].mul_(2)
            state = check(*model, state)
    assert len({each[0].data_ptr() for each in held}) > 4
    monkeypatch.setattr(_sharded_tree.RowsPlan, "gather", there)
    for model in models:
        check(*model)


def test_no_compiler_looks_into_a_unit(model, mesh, monkeypatch):
    """Dynamo leaves a block alone that once ran under a dispatch mode, and traces each function that it calls by itself."""
    from types import SimpleNamespace

    from torch.utils._python_dispatch import TorchDispatchMode

    from fdora import _dispatch
    from fdora.integrations._peft import norms

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    if device.NAME == "cpu":  # plain torch: Dynamo would trace the interpreter of kernels as well
        monkeypatch.setattr(_dispatch, "_forced", "auto")
        monkeypatch.setattr(norms, "select_backend", lambda W: SimpleNamespace(name="triton"))
    traced, part_of = [], _table.Unit.part_of

    def part(*args):
        traced.append(bool(torch._C._dynamo.eval_frame.get_eval_frame_callback()))
        return part_of(*args)

    monkeypatch.setattr(_table.Unit, "part_of", part)
    model = use_fdora(model.float())
    alone = use_fdora(copy.deepcopy(model))
    for block in [m for m in model.modules() if isinstance(m, Block)]:
        block.compile(backend="eager")
    fsdp(model, mesh)
    X = torch.linspace(-1, 1, 5 * 48, device=device.NAME).view(5, 48)
    with Mode():
        model(X).sum().backward()
    for _ in range(2):
        assert_close([model(X).detach()], [alone(X).detach()])
    assert traced and not any(traced)
