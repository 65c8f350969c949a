"""A process that is killed before its n-th operation on files, for every n."""

import os
import signal
import sys
from itertools import count

import safetensors.torch

OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.chmod", "os.utime"}


def every_kill(act):
    """Yield n after a child was killed before the n-th operation of ``act()``; return once it comes to its end."""
    for n in count(1):
        child = os.fork()
        if not child:
            code = 1
            try:
                _killed_before(n)
                act()
                code = 0
            finally:
                os._exit(code)
        status = os.waitpid(child, 0)[1]
        assert status in (0, signal.SIGKILL), status
        yield n
        if status == 0:
            return


def _killed_before(n):
    left = [n]

    def operation():
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    fsync, save_file = os.fsync, safetensors.torch.save_file

    def counted_fsync(at):
        operation()
        fsync(at)

    def half_and_whole(tensors, path, **more):
        operation()
        save_file(tensors, path, **more)
        os.truncate(path, os.path.getsize(path) // 2)
        operation()
        save_file(tensors, path, **more)

    os.fsync, safetensors.torch.save_file = counted_fsync, half_and_whole
    sys.addaudithook(lambda event, _: operation() if event in OPERATIONS else None)
