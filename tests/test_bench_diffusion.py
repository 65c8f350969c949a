"""bench.diffusion in small, on the CPU: the published sizes, what a step changes, and that it sees a wrong result."""

import pytest
import torch

pytest.importorskip("diffusers", reason="its models; `make test` installs it")
from bench import diffusion, records
from bench.suite import Run


def test_the_published_models():
    """Their parameters, as the checkpoints and PEFT's benchmark count them."""
    with torch.device("meta"):
        models = {name: diffusion.network(name, tiny=False) for name in ("klein", "sdxl")}
    counts = {name: sum(p.numel() for p in model.parameters()) for name, model in models.items()}
    assert counts == {"klein": 3_875_544_576, "sdxl": 2_567_463_684}
    with torch.device("meta"):
        kind = diffusion.MODELS["klein"]
        found = diffusion.adapters(models["klein"], 64, torch.float32, kind.targets)
    lora = sum(A.numel() + B.numel() for A, B, _ in found.values())
    assert lora == 76_677_120 and lora + sum(m.numel() for *_, m in found.values()) == 77_568_000


def test_it_sees_a_wrong_result(tmp_path, monkeypatch):
    """And which: dm of fdora, whose error is then many times PEFT's."""
    stock = diffusion.Trained.results

    def wrong(self):
        y, gradients = stock(self)
        mine = self.way == "peft_fdora"
        return y, [g * (1.5 if mine and name[0] == "m" else 1) for name, g in zip(self.leaves, gradients, strict=True)]

    monkeypatch.setattr(diffusion.Trained, "results", wrong)
    path = tmp_path / "result.json"
    small = "--tiny --models klein --r 4 --runs 1 --checkpointing no --ways peft_dora,peft_fdora"
    with pytest.raises(SystemExit, match=r"parts from PEFT's DoRA in \['dm of model klein"):
        diffusion.main([*small.split(), "--json", str(path)])
    ((where, ways),) = records.load(path)["errors"].items()
    assert ways["peft_fdora"]["dm"] > 0.4 > 0.1 > ways["peft_fdora"]["dA"] and "batch 1" in where


def test_a_step_is_one_of_adamw():
    options = diffusion.main.parse(["--tiny", "--models", "sdxl", "--r", "4", "--ways", "peft_fdora"])
    case = diffusion.Case("sdxl", "bf16", "fp32", 4, 2, "yes")
    base = diffusion.network("sdxl", tiny=True).to(torch.bfloat16)
    ways, values = diffusion.ways_of(Run(options, []), base, case)
    way = ways["peft_fdora"]
    way.feed(*diffusion.inputs(base, case, True), True)
    before = {name: p.detach().clone() for name, p in way.leaves.items()}
    way.step()
    moved = {name: (p - before[name]).abs().max().item() for name, p in way.leaves.items()}
    assert len(moved) == 3 * len(values) and all(0.5e-5 < most < 2e-5 for most in moved.values())
