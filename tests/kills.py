"""A process that is killed before its n-th operation on files, or whose n-th operation fails, for every n."""

import os
import signal
import sys
from errno import ENOSPC
from itertools import count

import safetensors.torch

from fdora import FdoraError

OPERATIONS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.link", "os.chmod", "os.utime"}


def every_kill(act):
    """Yield n after a child was killed before the n-th operation of ``act()``; return once it comes to its end."""
    for n in count(1):
        status = _in_a_child(act, n, lambda: os.kill(os.getpid(), signal.SIGKILL))
        assert status in (0, -signal.SIGKILL), status
        yield n
        if status == 0:
            return


def every_failure(act):
    """Yield what the error of ``act()`` says of what was there, "unchanged" or "replaced", or None if there was no error, after
    the n-th operation of a child has found the disk full; return once there is no n-th."""

    def fault():
        raise OSError(ENOSPC, os.strerror(ENOSPC))

    for n in count(1):
        status = _in_a_child(act, n, fault)
        if status == 0:
            return
        yield {2: None, 3: "unchanged", 4: "replaced"}[status]


def _in_a_child(act, n, fault):
    """The status of a child whose n-th operation of ``act()`` meets the fault; 0 without a fault."""
    child = os.fork()
    if not child:
        code = 1
        try:
            left = _faulty(n, fault)
            act()
            code = 0 if left[0] > 0 else 2
        except FdoraError as error:
            code = 3 if "unchanged" in str(error) else 4
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _faulty(n, fault):
    left = [n]

    def operation():
        left[0] -= 1
        if not left[0]:
            fault()

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
    return left
