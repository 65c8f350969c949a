"""The measure of peak memory: what an earlier call left behind hides nothing of this one's."""

import gc

import pytest
import torch
from torch.utils._pytree import tree_leaves

from tests import device, memory
from tests.memory import peak_bytes

SIZE = 1 << 22


def test_temporaries_count_and_inputs_do_not():
    def new():
        return torch.empty(SIZE, dtype=torch.uint8, device=device.NAME)

    x, slack = new(), SIZE // 2  # for the 1, which is a tensor, too, and for what an allocator rounds up
    assert SIZE <= peak_bytes(lambda: x + 1, device.NAME) <= SIZE + slack
    assert 2 * SIZE <= peak_bytes(lambda: (x + 1).add(1)[0].clone(), device.NAME) <= 2 * SIZE + slack
    assert SIZE <= peak_bytes(lambda: (x, x.add_(1), new()[:5]), device.NAME) <= SIZE + slack


class Block:
    """Memory of a GPU that is not there."""

    alive = peak = 0

    def __init__(self):
        Block.alive += SIZE
        Block.peak = max(Block.peak, Block.alive)

    def __del__(self):
        Block.alive -= SIZE


@pytest.fixture
def gpu(monkeypatch):
    """An allocator with torch.cuda's counters, for Blocks: the CPU's profiler does not see that old memory is freed."""
    gc.collect()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: Block.alive)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda: setattr(Block, "peak", Block.alive))
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda: Block.peak)
    monkeypatch.setattr(memory, "_storages", lambda result, _: {id(b): SIZE for b in tree_leaves(result)}, raising=False)


def test_a_cycle_that_the_call_before_left(gpu):
    calls = []

    def fn():
        calls.append([[] for _ in range(200 * len(calls))])  # wakes the collector, but in the first call
        holder = {"block": Block()}
        holder["self"] = holder
        return Block()

    thresholds = gc.get_threshold()
    gc.set_threshold(100, 1, 1)
    try:
        assert peak_bytes(fn, "cuda") == 2 * SIZE
        assert gc.isenabled()
    finally:
        gc.set_threshold(*thresholds)


def test_a_result_that_someone_lets_go_of_late(gpu):
    late = []

    def fn():
        late.clear()
        late.append(Block())
        return {"y": late[0]}

    assert peak_bytes(fn, "cuda") == SIZE


def test_a_peak_below_the_result_is_an_error(gpu):
    stock = [Block(), Block()]

    def fn():
        stock.pop()
        return Block()

    with pytest.raises(AssertionError, match=f"the result alone takes {SIZE}"):
        peak_bytes(fn, "cuda")


def test_the_collector_is_left_as_it_was(gpu):
    gc.disable()
    try:
        assert peak_bytes(Block, "cuda") == SIZE
        assert not gc.isenabled()
    finally:
        gc.enable()
