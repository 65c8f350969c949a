"""bench.processes: two processes with gloo, how they end, and what one that fails says."""

import atexit
import os

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessRaisedException

from bench.processes import run_in_processes


def gather(rank, path):
    atexit.register(os._exit, 3)  # Python's own end: what gloo's threads may abort
    ranks = [None, None]
    dist.all_gather_object(ranks, rank)
    if rank == 0:
        path.write_text(f"{ranks} {torch.get_num_threads()}")


def fail(rank):
    if rank == 1:
        raise ValueError("rank 1 has no layers")
    dist.barrier()


def test_processes_are_one_group_and_leave_without_pythons_end(tmp_path):
    run_in_processes(2, "cpu", gather, tmp_path / "ranks")
    assert (tmp_path / "ranks").read_text() == "[0, 1] 1"


def test_the_first_error_is_raised():
    with pytest.raises(ProcessRaisedException, match="rank 1 has no layers"):
        run_in_processes(2, "cpu", fail)
