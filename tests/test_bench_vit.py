"""bench.vit, bench.kernels and bench.profile in small, on the CPU: what they write, and that they see a wrong result."""

import json
import re
from pathlib import Path

import pytest
import torch

from bench import figures, profile, records, vit
from bench.vit_model import GIANT, TINY, Vit, fold_scale
from fdora.functional import dora_linear, explain
from fdora.integrations._peft import blocks
from tests.test_bench import run

SMALL = "--tiny --layers 2 --batch 2 --runs 1 --dtype bf16 --no-compile --modes inference --ways plain,plain_folded,peft_fdora_fused"


def test_vit_sees_a_wrong_fold(tmp_path, monkeypatch):
    stock = blocks.Tail.take

    def wrong(self, layer, x, N):
        found = stock(self, layer, x, N)
        return found and found._replace(gamma=found.gamma * 1.3)

    monkeypatch.setattr(blocks.Tail, "take", wrong)
    with pytest.raises(SystemExit, match="peft_fdora_fused"):
        run(vit, tmp_path, SMALL)


def test_the_whole_model_is_one_graph(tmp_path, monkeypatch):
    """Patch embedding, class token and positions in it, and a break is an error."""
    seen = []

    def compiled(fn, **how):
        assert how["fullgraph"]

        def run(model, images):
            seen.append(tuple(images.shape))
            return fn(model, images)

        return run

    monkeypatch.setattr(torch, "compile", compiled)
    run(vit, tmp_path, f"{SMALL} --whole --no-eager".replace("--no-compile ", ""))
    assert set(seen) == {(2, 3, TINY.pixels, TINY.pixels)}


def test_the_architecture():
    with torch.device("meta"):
        model = Vit(GIANT, 40)
    published = 1_136_480_768  # of Meta's checkpoint: positions for 518 x 518 pixels, and a token for masked patches
    assert sum(p.numel() for p in model.parameters()) == published - 1536 * (1370 - 257) - 1536
    block = model.blocks[0]
    assert (block.attn.qkv.weight.shape, block.mlp.fc1.weight.shape) == ((4608, 1536), (8192, 1536))
    small = vit.vit(TINY, 2, "cpu", torch.float64)
    images = torch.randn(2, 3, 28, 28, dtype=torch.float64)
    torch.testing.assert_close(fold_scale(small)(images), small(images))


def test_the_page_keeps_its_word(capsys, monkeypatch):
    """Its figures are those of the plan it prints, and its commands are ones that the parser takes where there is a GPU."""
    page = (Path(__file__).parents[1] / "docs" / "predict.md").read_text()
    x = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    W, A, B, m = (torch.empty(shape, dtype=x.dtype, device="meta") for shape in ((4096, 4096), (64, 4096), (4096, 64), (4096,)))
    said = explain(dora_linear, x, W, *(t.requires_grad_() for t in (A, B, m)), s=2.0, gpu="h200")
    commands = re.findall(r"python -m bench.profile (.*?--out \S+?)[`\n]", page)
    assert len(commands) == page.count("--out build/profile") > 1
    with monkeypatch.context() as there:
        there.setattr(torch.cuda, "is_available", lambda: True)
        for command in commands:
            profile.main.parse(command.split())
    forward, backward = said.plans[-2:]
    products = [step for plan in (forward, backward) for step in plan.steps if step.what == "gemm_tma_kernel"]
    assert [f"{step.flops / 1e9:.1f}" for step in products] == ["139.6"] * 2 and "139.6 GFLOP" in page
    (scale,) = (step for step in backward.steps if step.what == "scale_kernel")
    assert f"{scale.bytes / 2**20:.1f} MiB" in page
    small = [step for plan in (forward, backward) for step in plan.steps if step.what == "cuBLAS"]
    assert {f"{step.flops / 1e9:.1f} GFLOP" for step in small} == {"2.1 GFLOP"} and "2.1 GFLOP" in page


@pytest.mark.parametrize("what", ["layer --M 8 --K 32 --N 16", "vit --layers 1"])
def test_profile(what, tmp_path, capsys):
    profile.main([*what.split(), "--r", "4", "--out", str(tmp_path), "--commit", "abc"])
    result = records.load(tmp_path / "kernels.json")
    assert result["about"]["commit"] == "abc" and any("mm" in row["kernel"] for row in result["rows"])
    trace = (tmp_path / "trace.json").read_text()
    assert json.loads(trace)["traceEvents"] and ('"block 0"' in trace) == what.startswith("vit")
    assert (tmp_path / "kernels.md").read_text() in capsys.readouterr().out + "\n"


def test_kernels_are_drawn_by_kind():
    """Each bar is as long as the kernels of its way, and each kind is there."""
    pyplot = pytest.importorskip("matplotlib.pyplot", reason="draws a picture; `make test` installs it")
    axes = pyplot.figure().subplots()
    figures.kernels(axes, ("h200/vit", "inference"))
    ways = {tag: found for tag, found in records.result("h200/vit")["kernels"].items() if tag.startswith("inference")}
    ends = {}
    for bar in axes.patches:
        ends[bar.get_y()] = max(ends.get(bar.get_y(), 0.0), bar.get_x() + bar.get_width())
    assert [*ends.values()] == pytest.approx([sum(kernel["us"] for kernel in found) / 1e3 for found in ways.values()])
    kinds = {
        "products": "gemm_tma_kernel",
        "fdora's passes": "epilogue_kernel",
        "torch's": "void at::native::reduce_kernel<512>",
    }
    kinds |= {"attention": "void cudnn::fusion::compute_dot", "written by Inductor": "triton_poi_fused_flash_attention_2"}
    assert {kind: figures.kind_of(name) for kind, name in kinds.items()} == {kind: kind for kind in figures.KERNELS}
