"""The programs of examples/distributed, and what they print in one process."""

import re
import sys
import types
from pathlib import Path

from tests.distributed.lay import DEVICE

FOLDER = Path(__file__).parents[2] / "examples/distributed"
PROGRAMS = {path.stem: path.read_text() for path in sorted(FOLDER.glob("*.py"))}
ONE = f"""
import torch
from decoder import Decoder, loss_of
torch.manual_seed(0)
model = Decoder().to({DEVICE!r})
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
ids = torch.randint(0, 32, (4, 16), device={DEVICE!r})
for step in range(3):
    y = model(ids)
    print(step, loss_of(y, ids).item(), *(loss_of(*each).item() for each in zip(y.chunk(2), ids.chunk(2))))
    loss_of(y, ids).backward()
    optimizer.step()
    optimizer.zero_grad()
"""
END = "torch.distributed.destroy_process_group()\n"  # the group of the cases goes on


def inside(name):
    """What the program prints in this process, which is one of a group."""
    sys.modules.setdefault("decoder", types.ModuleType("decoder"))
    exec(PROGRAMS["decoder"], vars(sys.modules["decoder"]))
    lines = []
    code = ONE if name == "one" else PROGRAMS[name]
    assert name == "one" or code.endswith(END)
    exec(code.removesuffix(END), {"__name__": name, "print": lambda *words: lines.append(" ".join(map(str, words)))})
    return "\n".join(lines)


def check(out, one, count, share):
    """Losses of so many processes. ``share``: how many see the same half of the batch; 0 where all see the whole."""
    one = [[float(v) for v in line.split()[1:]] for line in one.splitlines()]
    got = {(int(s), int(r)): float(v) for s, r, v in re.findall(r"step (\d) of process (\d): loss (\d+\.\d{5})", out)}
    assert len(got) == 3 * count
    for (step, rank), loss in got.items():
        want = one[step][1 + rank // share if share else 0]
        assert abs(loss - want) < 2e-4 * want, (step, rank, loss, want)
    assert one[2][0] < one[0][0] - 0.1  # it learns
