"""Cases that several processes run together: one start of a gloo group for all cases of a file, since importing torch takes seconds.

A file of cases ends with ``if __name__ == "__main__": run(globals())``; each function ``case_...()`` is one case, which every
process runs. ``results(module, world)`` starts the processes and gives what each case said: "ok" or the first error of any process;
``found(module, world)`` what each process found in each case.
"""

import datetime
import faulthandler
import json
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path

import torch

from tests import device

ROOT = Path(__file__).parents[2]
SECONDS = 60  # a collective that somebody does not join fails after these
GRACE = 5  # for the others, once one process has failed


def results(module, world):
    """{case: "ok" or an error}; the names of the cases that ran are its keys."""
    each = found(module, world).items()
    return {case: "\n".join(said for said in every if said not in (None, "ok")) or "ok" for case, every in each}


def found(module, world, timeout=300, packages=(), cases=()):
    """{case: [what each process found: "ok", a value, an error as text, or None]}. ``packages``: folders to import from first."""
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {
            "WORLD_SIZE": str(world),
            "FOLDER": folder,
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": os.pathsep.join(map(str, (*packages, ROOT, *filter(None, [os.environ.get("PYTHONPATH")])))),
            "DEVICE": device.NAME,
            "CASES": ";".join(cases) or os.environ.get("CASES", ""),
        }
        command = [sys.executable, "-m", module]
        started = []
        for rank in range(world):
            with open(f"{folder}/{rank}.log", "w") as log:
                started.append(subprocess.Popen(command, cwd=ROOT, env=env | {"RANK": str(rank)}, stdout=log, stderr=log))
        try:
            ended = wait(started, timeout)
        except BaseException:  # whoever ends this wants to know where they stand
            stacks(started)
            print(logs(folder, world), file=sys.stderr)
            raise
        finally:
            for process in started:
                process.kill()
                process.wait()
        said = [Path(f"{folder}/{rank}.json") for rank in range(world)]
        assert not ended and all(path.exists() for path in said), f"{ended}{logs(folder, world)}"
        each = [json.loads(path.read_text()) for path in said]
    return {case: [one.get(case) for one in each] for case in dict.fromkeys(case for one in each for case in one)}


def wait(started, timeout):
    """Until all have ended; or what is wrong: the first that failed (others may wait for it), or those that have not ended."""
    ended, end = queue.SimpleQueue(), time.monotonic() + timeout
    for process in started:
        threading.Thread(target=lambda process=process: ended.put(process.wait()), daemon=True).start()
    for _ in started:
        try:
            code = ended.get(timeout=max(0, end - time.monotonic()))
        except queue.Empty:
            break
        if code:
            end = min(end, time.monotonic() + GRACE)
    codes = {process: process.poll() for process in started}
    failed = [f"process {rank} ended with {code}. " for rank, code in enumerate(codes.values()) if code]
    running = [process for process, code in codes.items() if code is None]
    stacks(running)
    if running and not failed:
        return f"{len(running)} of {len(codes)} processes still ran after {timeout} s. "
    return "".join(failed)


def stacks(processes):
    """Those that still run write where their threads stand, and end of it."""
    for process in processes:
        process.send_signal(signal.SIGABRT)
    for process in processes:
        process.wait()


def logs(folder, world):
    """What each process said last: the case it is in, and where its threads stand."""
    each = [f"--- process {rank}:\n{Path(f'{folder}/{rank}.log').read_text()[-6000:]}" for rank in range(world)]
    return "\n".join(each)


def names(path):
    """Of the cases in a file, without importing it."""
    return [
        line.split("(")[0][len("def case_") :] for line in Path(path).read_text().splitlines() if line.startswith("def case_")
    ]


def run(space):
    """Every case of a file, in this process."""
    faulthandler.enable()  # stacks: SIGABRT
    rank, world, folder = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), os.environ["FOLDER"]
    torch.set_num_threads(1)
    limit = datetime.timedelta(seconds=SECONDS)
    start, cuda = torch.distributed.init_process_group, os.environ.get("DEVICE") == "cuda"
    if cuda:
        torch.cuda.set_device(rank)
    given = {"device_id": torch.device("cuda", rank)} if cuda else {}
    start("nccl" if cuda else "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world, timeout=limit, **given)
    said = {}
    wanted = list(filter(None, os.environ["CASES"].split(";"))) or [name[5:] for name in space if name.startswith("case_")]
    for name in [f"case_{name}" for name in wanted]:
        torch.manual_seed(0)
        print(name, flush=True)
        try:
            value = space[name]()
            said[name[5:]] = "ok" if value is None else value
        except BaseException:
            said[name[5:]] = f"rank {rank}: {traceback.format_exc()[-3000:]}"
        try:
            torch.distributed.barrier()
        except RuntimeError as error:  # another process failed inside the case
            said[name[5:]] = f"{said[name[5:]]} (then: {error})"
            break
    Path(f"{folder}/{rank}.json").write_text(json.dumps(said))
    print("all cases are through", flush=True)
    torch.distributed.destroy_process_group()
    os._exit(0)  # a thread that waits for a message nobody sends any more may make Python abort at its end, before 3.14
