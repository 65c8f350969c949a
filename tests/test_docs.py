"""README and docs/ keep their word: programs run and do what they say, commands and links exist, figures are the results."""

import inspect
import re
import shutil
import sys
from pathlib import Path

import pytest
import torch

import fdora.functional
from bench import records, report
from tests.process import python
from tests.snippets import PAGE, SNIPPETS, execute, programs, ran

ROOT = Path(__file__).parent.parent
PAGES = {
    path.relative_to(ROOT).as_posix(): path.read_text()
    for folder in ("", "docs/", "bench/", "demo/", "tests/", "fdora/", ".github/")
    for path in sorted(ROOT.glob(f"{folder}**/*.md" if folder else "*.md"))
}
README, RESULTS = PAGES["README.md"], PAGES["bench/RESULTS.md"]
USE_TRL, *PROGRAMS = (each for page in ("README.md", "docs/start.md", "docs/migrate.md") for each in programs(page))


def run(number):
    return ran(PROGRAMS[number - 1], f"program {number}")


def test_there_are_four():
    """README has the first."""
    assert [p.split(".")[0] for p in PROGRAMS] == ["# 1", "# 2", "# 3", "# 4"] and PROGRAMS[0] in README


def test_readmes_signatures():
    """Every function takes what README names, and what must be given is named."""
    from fdora.integrations.peft import use_fdora

    (block,) = re.findall(r"```text\n(dora_init.*?)```", README, re.S)
    lines = re.findall(r"^(\w+)\((.*?)\) +-> ", block, re.M)
    assert len(lines) == len(block.splitlines()) == 8
    for name, said in lines:
        found = inspect.signature(getattr(fdora.functional, name, use_fdora)).parameters
        names = [each.rstrip("=") for each in said.split(", ")]
        assert {n for n, p in found.items() if p.default is p.empty} <= set(names) <= set(found), name


def test_program_1_changes_nothing_at_the_start():
    out = run(1)
    assert torch.equal(out["y"], out["x"] @ out["W"].T)


def test_program_2_learns_and_keeps_its_norm(monkeypatch):
    states = []
    norm = fdora.functional.dora_norm
    monkeypatch.setattr(fdora.functional, "dora_norm", lambda *args, **how: states.append(norm(*args, **how)) or states[-1])
    out = run(2)
    assert out["losses"][-1] < 0.9 * out["losses"][0]
    first = [state.c for state in states[::2][:8]]  # of the first layer: two steps of four micro-batches
    assert all(torch.equal(c, first[0]) for c in first[:4]) and not torch.equal(first[4], first[0])
    layer, x = out["first"], torch.randn(3, 64)
    torch.testing.assert_close(layer(x), x @ out["merged"].T + layer.base.bias)


def test_program_3_gives_a_gradient_per_token_and_a_loss_per_adapter():
    out = run(3)
    whole = torch.func.grad(out["loss"])(out["params"], out["x"], out["t"])
    for k, p in whole.items():
        for d, ds in zip(p, out["per_sample"][k], strict=True):
            torch.testing.assert_close(ds.mean(0), d)
    assert out["losses"].shape == (2,) and out["losses"][0] == out["losses"][1]


PROGRAM_4 = """
import torch
from torchtune.modules.peft import DoRALinear

{program}

for bias in (False, True):
    torch.manual_seed(0)
    stock = DoRALinear(12, 20, rank=4, alpha=8.0, use_bias=bias)
    for p in stock.parameters():
        torch.nn.init.normal_(p, std=0.3)
    ours = FdoraLinear(12, 20, rank=4, alpha=8.0, use_bias=bias)
    ours.load_state_dict(stock.state_dict())
    for layer in (stock, ours):
        layer.weight.requires_grad_(False)
    x = torch.randn(5, 12)
    torch.testing.assert_close(ours(x), stock(x))
    assert not torch.equal(ours(x), torch.nn.functional.linear(x, stock.weight, stock.bias))
print("same")
"""


def beside_torchtune(code):
    """In a process of its own: PEFT refuses to share one with the torchao that torchtune needs."""
    folder = Path(sys.prefix) / "torchtune"
    if not folder.exists():
        pytest.skip(f"`make test` installs torchtune into {folder}; this environment was made otherwise")
    done = python("-c", code, PYTHONPATH=f"{folder}:{ROOT}")
    assert done.returncode == 0 and done.stdout.strip().endswith("same"), done.stderr


def test_program_4_is_torchtunes_layer():
    beside_torchtune(PROGRAM_4.format(program=PROGRAMS[3]))


# (section of docs/trainers.md, or docs/peft.md, language) -> the test that runs it
RUN_BY = {
    ("PEFT", "python"): "test_docs.py",
    ("TRL", "python"): "integrations/test_trl.py",
    ("Axolotl", "yaml"): "integrations/test_axolotl.py",
    ("ms-swift", "python"): "integrations/test_swift.py",
    ("ms-swift", "sh"): "integrations/test_swift.py",
    ("LLaMA-Factory", "sh"): "integrations/test_llamafactory.py",
    ("LLaMA-Factory", "yaml"): "integrations/test_llamafactory.py",
    ("Unsloth", "python"): "integrations/test_unsloth.py",
    ("torchtune", "python"): "test_docs.py",
}


# page -> how many programs a test runs of it: those of README, docs/start.md and docs/migrate.md above, of docs/conversion.md
# in tests/convert/test_docs.py, of docs/trainers.md and docs/peft.md as RUN_BY says
RUN = {"README.md": 2, "docs/start.md": 2, "docs/migrate.md": 1, "docs/peft.md": 1}
RUN["docs/conversion.md"] = PAGES["docs/conversion.md"].count("```python")
RUN["docs/predict.md"] = 3  # tests/test_explain_docs.py, tests/plan/test_docs.py
RUN["docs/serving.md"] = 3  # tests/functional/test_multi_docs.py
RUN["docs/training-many.md"] = 3  # that and tests/schedule/test_docs.py
RUN["docs/layers.md"] = 3  # tests/functional/test_layers_docs.py
RUN["docs/quantised.md"] = 2  # tests/quant/test_docs.py
RUN["CONTRIBUTING.md"] = 1  # tests/test_walk_docs.py
RUN["docs/trainers.md"] = sum(language == "python" for section, language in RUN_BY if section != "PEFT")


def test_every_program_is_on_a_page_whose_programs_are_run():
    found = {page: len(re.findall(r"```python\n(?!\s*```)", text)) for page, text in PAGES.items()}  # a form to fill in is none
    assert {page: count for page, count in found.items() if count} == RUN


def test_every_snippet_is_run_by_a_test():
    assert SNIPPETS.keys() == RUN_BY.keys() and len(SNIPPETS) == PAGE.count("```") // 2 + 1
    for (section, language), file in RUN_BY.items():
        code = (ROOT / "tests" / file).read_text()
        call = f'execute("{section}"' if language == "python" else f'snippet("{section}", "{language}")'
        assert call in code or f'snippet("{section}", "{language}")' in code, f"{file} does not run {section}'s {language}"


def test_the_peft_snippet(capsys):
    """It leaves PEFT's model; with adapters that have learnt something, fdora is PEFT."""
    from peft.tuners.lora.variants import DoraLinearVariant

    from fdora.integrations.peft import report, use_fdora

    space = execute("PEFT")
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 and all(re.search(r"8  eager +1 +0 +0 ", line) for line in lines[1:3])
    model = space["model"]
    variants = [v for m in model.modules() for v in getattr(m, "lora_variant", {}).values()]
    assert [type(v) for v in variants] == 2 * [DoraLinearVariant]
    assert all(row.backend == "stock" for row in report(model))
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.1)
    x, keys = torch.randn(5, 64), set(model.state_dict())
    stock = model(x)
    torch.testing.assert_close(use_fdora(model)(x), stock)
    assert set(model.state_dict()) == keys and sum(row.fused + row.composed for row in report(model)) == 2


TORCHTUNE = """
import torch, torchtune.models.llama3_2 as llamas
from torchtune.models.llama3_2 import lora_llama3_2
from torchtune.modules.peft import get_adapter_params, set_trainable_params

def small(attention, apply_lora_to_mlp, lora_rank, use_dora):
    return lora_llama3_2(attention, apply_lora_to_mlp, vocab_size=64, num_layers=2, num_heads=4, num_kv_heads=2, embed_dim=32, max_seq_len=64,
                         intermediate_dim=48, lora_rank=lora_rank, lora_alpha=8, use_dora=use_dora)

llamas.lora_llama3_2_1b = small
from tests.snippets import execute
space = execute("torchtune")
for p in space["model"].parameters():
    torch.nn.init.normal_(p, std=0.1)
set_trainable_params(space["model"], get_adapter_params(space["model"]))  # as its recipes do
ids = torch.arange(20)[None]
y = space["model"](ids)
rows = space["report"](space["model"])
assert len(rows) == 12 and all(row == {"fused": 1} for row in rows.values()), rows
torch.testing.assert_close(space["restore"](space["model"])(ids), y)
print("same")
"""


def test_the_torchtune_snippet():
    """On a model that is smaller than the one it names."""
    beside_torchtune(TORCHTUNE)


def test_commands_exist():
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(), re.M))
    everything = "\n".join(text for page, text in PAGES.items() if page != "CHANGELOG.md")
    commands = re.findall(r"^make (\w+)", everything, re.M) + re.findall(r"`make (\w+)", everything)
    assert {"demo", "test", "bench", "docs", "acceptance"} <= set(commands) <= targets
    for module in re.findall(r"python -m ((?:fdora|bench|demo|tests)[\w.]*)", everything):
        path = ROOT / module.replace(".", "/")
        assert path.with_suffix(".py").exists() or (path / "__main__.py").exists(), module


def test_the_api_is_generated():
    """Every public name, with its signature."""
    from docs import signatures

    assert signatures.written(PAGES["docs/api.md"]) == PAGES["docs/api.md"], "run: python docs/signatures.py"
    files = {path.stem for path in (ROOT / "fdora/integrations").glob("[!_]*.py")} - {"peft"}
    assert files == set(signatures.FRAMEWORKS)
    shown = re.findall(r"^- `dora_\w+\(.*\)`: ", PAGES["docs/api.md"], re.M)
    assert len(shown) == sum(name.startswith("dora_") for name in fdora.functional.__all__) > 20


def test_what_public_functions_return_and_commands_take_is_in_the_api():
    from fdora import explain_model as command
    from fdora.functional import select_backend
    from fdora.integrations._peft.report import Report

    text = PAGES["docs/api.md"]
    choice = select_backend(torch.ones(1))
    assert f"`{type(choice).__name__}({', '.join(choice._fields)})`" in text
    methods = [name for name in vars(Report) if not name.startswith("_")]
    assert methods and all(f"`report(model).{name}{signature(getattr(Report, name), 'self')}`" in text for name in methods)
    options = set(command.OPTIONS)
    (line,) = re.findall(r"^- `fdora explain`.*?(?=^- )", text, re.M | re.S)
    assert options and options == set(re.findall(r"`(--\w+)`", line))


# The site's pages, in the order of its menu.
FIFTEEN = (
    *("start", "peft", "trainers", "faq", "migrate", "serving", "training-many", "conversion", "predict"),
    *("api", "semantics", "layers", "quantised", "distributed", "benchmarks"),
)


def by_hand(text):
    """A page without what a command wrote."""
    return re.sub(r"<!-- generated.*?<!-- end -->|<!-- (\w+) -->.*?<!-- /\1 -->", "", text, flags=re.S)


def blocks(text):
    """Paragraphs and whole lists, as empty lines part them, and rows of tables; no code."""
    for block in re.split(r"\n\s*\n", re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)):
        yield from block.splitlines() if block.startswith("|") else [block]


def test_answers_name_runs_that_are_committed():
    lines = [line for line in report.ANSWERS.read_text().splitlines() if line[0] != "#"]
    assert all(line.count(" | ") == 2 and all(line.split(" | ")) for line in lines)
    named = {name for line in lines for name in re.findall(r"\b(?:cpu|h100|h200)/[\w.-]*\w", line)}
    assert len(named) > 20 and named <= set(records.names())


def test_the_pages_are_fifteen_and_short():
    """Words as `wc -w` counts them, code and tables among them; README, CONTRIBUTING and bench/ are apart."""
    pages = {page: by_hand(PAGES[f"docs/{page}.md"]) for page in FIFTEEN}
    assert {page for page in PAGES if page.startswith("docs/")} == {f"docs/{page}.md" for page in FIFTEEN}
    assert sum(len(text.split()) for text in pages.values()) <= 13_000
    long = [(page, block) for page, text in pages.items() for block in blocks(text) if len(block.split()) > 120]
    assert not long
    (menu,) = re.findall(r"^MENU = \{.*?^\}", (ROOT / "docs/conf.py").read_text(), re.S | re.M)
    assert set(re.findall(r'"docs/([\w-]+)"', menu)) == set(FIFTEEN)


def signature(function, without):
    found = inspect.signature(function).parameters.values()
    return f"({', '.join(f'{p.name}={p.default}' for p in found if p.name != without)})"


# links


def slug(heading):
    """The anchor that a code host and the site give a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def broken_links(root, page, text):
    """Relative links that lead nowhere: no such file below root, or no such heading."""
    unfenced = lambda text: re.sub(r"```.*?```", "", text, flags=re.S)  # noqa: E731
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", unfenced(text))):
        if re.match(r"\w+:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (root / page).parent / file if file else root / page
        found = target.resolve().is_relative_to(root.resolve()) and target.exists()
        headings = re.findall(r"^#+ +(.*)", unfenced(target.read_text() if file else text), re.M) if found and anchor else []
        if not found or (anchor and anchor not in map(slug, headings)):
            yield f"{page}: {link}"


@pytest.mark.parametrize("page", PAGES)
def test_links_lead_somewhere(page):
    assert list(broken_links(ROOT, page, PAGES[page])) == []


def test_a_broken_link_is_found(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/other.md").write_text("# The `one` heading\n```sh\n# not a heading\n```\n")
    good = "[a](docs/other.md) [b](docs/other.md#the-one-heading) [c](#here) [d](https://a.b/c) `[e](f)`\n```\n[g](h)\n```\n# Here\n"
    (tmp_path / "README.md").write_text(good)
    assert list(broken_links(tmp_path, "README.md", good)) == []
    bad = "[a](gone.md) [b](docs/other.md#gone) [c](#gone) [d](../outside) ![e](gone.svg) [f](docs/other.md#not-a-heading)"
    assert len(list(broken_links(tmp_path, "README.md", bad))) == 6


def test_every_page_is_linked():
    """From README or CONTRIBUTING.md: nobody has to look through folders."""
    linked = re.findall(r"\]\(([\w/.-]+\.md)", README + PAGES["CONTRIBUTING.md"])
    assert {page for page in PAGES if page.startswith("docs/")} <= set(linked)


# figures


def test_the_figures_are_the_committed_results():
    """Marks, pictures and bench/RESULTS.md are what bench.report writes from bench/results."""
    for page, path in report.WRITTEN.items():
        text = PAGES[str(path.relative_to(ROOT))]
        assert report.written(page, text) == text, "run: python -m bench.report --readme"
    assert report.picture() == report.PICTURE.read_text(), "run: python -m bench.report --readme"
    assert report.models_picture() == report.MODELS_PICTURE.read_text(), "run: python -m bench.report --readme"
    asked = PAGES["docs/benchmarks.md"]
    assert asked.count("| they show |") == 4
    assert len(re.findall(r"^\| .* x \| \d\.\d+ \| .* GiB \|$", asked, re.M)) == len(report.eight_steps()) >= 5
    assert report.document() == RESULTS, "run: python -m bench.report"
    marked = "".join(body for _, body in re.findall(r"<!-- (\w+) -->(.*?)<!-- /\1 -->", README, re.S))
    outside = re.sub(r"<!-- (\w+) -->.*?<!-- /\1 -->", "", README, flags=re.S)
    measured = r"^\| .*\d\.\d+ [|/]|\d+ [um]s\b|\d\.\d+ (times|GiB)|\d\.\d\d of\b|(?<!\d)\d\.\d{3}(?!\d)"
    assert re.search(measured, marked, re.M) and not re.search(measured, outside, re.M)  # no measured number stands outside


def test_the_figures_of_readme_share_a_commit():
    assert len({report.commit_of(records.result(run)) for run in report.cited()}) == 1


def test_the_headline_is_true():
    """README begins with "the speed of LoRA": within a tenth, eager and compiled, and both are in the picture."""
    assert README.split("\n")[2].startswith("**DoRA fine-tuning at the speed of LoRA.** <!-- headline -->")
    assert all(abs(report.over_lora(way) - 1) < 0.1 for way in ("fdora", "fdora, compiled"))
    ms = {row["way"]: row["ms"] for row in records.result(report.HEADLINE)["rows"]}
    assert max(ms["peft_fdora_fused"], ms["peft_fdora_fused_lora_dropout"]) < ms["peft_lora"] < ms["peft_dora"]
    for of in report.longer_rows().values():
        assert of["use_fdora_fused_lora_dropout"] < of["peft_lora"] < of["peft_dora"]
        assert of["use_fdora_fused"] < 1.15 * of["peft_lora"]


def test_the_picture_takes_the_newest_machine_that_has_every_bar(elsewhere):
    """And a file that lacks one is passed over; compiled rows may come from a file of their own."""
    rows = [
        {
            "layers": 2,
            "seq": 8,
            "r": 4,
            "adapter": "bf16",
            "mode": "step_8",
            "way": way,
            "compiled": compiled,
            "ms": 80.0,
            "peak_mb": 1024,
        }
        for _, _, way, compiled in report.STEP
    ]
    (slow,) = (x for x in rows if x["way"] == "peft_fdora_fused" and not x["compiled"])
    slow |= {"ms": 160.0, "peak_mb": 4096}

    def write(name, rows, commit=None):
        records.save(f"{elsewhere}/model.jsonl:{name}", {"about": {"commit": commit}, "rows": rows})

    with pytest.raises(SystemExit, match="every way of the picture"):
        report.step()
    write("h100/model_qwen3-8b", rows)
    assert report.step().about.endswith("r = 4, bf16, one H100")
    write("h200/model_qwen3-8b", rows[:-1], "abc")
    assert report.step().about.endswith("one H100")
    write("h200/model_llama-3.1-8b", [x for x in rows if not x["compiled"]], "def")
    write("h200/model_llama-3.1-8b_compiled", [x for x in rows if x["compiled"]], "fed")
    assert report.step().about == "2 layers of Llama-3.1-8B, 8 tokens, r = 4, bf16, one H200"
    write("h200/model_gemma-3-12b", rows[1:])  # without LoRA's
    assert list(report.eight_steps()) == ["qwen3-8b", "llama-3.1-8b"]
    assert "| Llama-3.1-8B, 2 layers | 0.50 x | 2.00 | -3.0 GiB |" in report.benchmarks_models()
    assert "; fdora 2.00 of LoRA's time and 4.00 of its memory; " in report.readme_picture()
    bars = re.findall(r'end">([^<]*)</text>\n<rect [^>]*width="([\d.]+)"', report.picture())
    times, memory = (dict(bars[k : k + len(bars) // 2]) for k in (0, len(bars) // 2))
    assert float(times["fdora"]) == pytest.approx(2 * float(times["fuse=False"]), abs=0.1)
    assert float(memory["fdora"]) == pytest.approx(2 * float(times["fdora"]), abs=0.1)


def test_tables_by_hand():
    """Which no command writes: gradients through the norm, products of 8 bits, a server's kernels."""
    result = lambda name: records.result(f"h200/{name}")  # noqa: E731
    full, ratios = result("full"), {}
    for x in full["rows"]:
        if x["norm"] == "given":
            ratios.setdefault((x["M"], x["r"]), []).append(f"{x['ratio']:.2f}")
    for M in (512, 4096):
        cells = [" to ".join(sorted(ratios[M, r])) for r in (16, 64, 384)]
        assert f"\n| {M} | {' | '.join(cells)} |\n" in PAGES["bench/NOTES.md"]
    ends = f"{max(ratios[4096, 16])} (4096 tokens, r = 16) to {max(ratios[512, 384])} (512 tokens, r = 384)"
    assert ends in " ".join(PAGES["docs/peft.md"].split())
    assert f"commit {full['about']['commit']})" in PAGES["bench/NOTES.md"]

    for M, name in ((128, "fp8_more"), (512, "fp8_more"), (4096, "fp8_64")):
        some = [x for x in result(name)["rows"] if x["M"] == M]
        cells = []
        for mode, way in (("fwd", "fp8"), ("fwd_bwd", "fp8_grad")):
            for scales in ("row", "128 x 128"):
                each = [x["ratio"][f"{way}/lora"] for x in some if (x["mode"], x["scales"]) == (mode, scales)]
                cells.append(f"{min(each):.2f} to {max(each):.2f}")
        assert f"\n| {M} | {' | '.join(cells)} |\n" in PAGES["docs/quantised.md"]

    served = [x for name in ("serve", "serve_wide") for x in result(name)["rows"]]
    said = " ".join(PAGES["docs/serving.md"].split())
    shares = {way: [x["ratio"][f"{way}/vllm_lora"] for x in served if "ratio" in x] for way in ("plugin", "idle")}
    plugin, idle = (f"{min(each):.2f} to {max(each):.2f}" for each in shares.values())
    assert f" take {plugin} of their time with vLLM's LoRA, above 1.04 in one of 96 cases; LoRA requests {idle}:" in said
    assert sum(share > 1.04 for share in shares["plugin"]) == 1 and len(shares["plugin"]) == 96
    assert f"r = 64, takes {served[0]['ms']['model']:.1f} ms." in said


@pytest.mark.parametrize("file, norm", [("layer_few", "given"), ("layer_ranks", "inside")])
def test_losses_are_counted(file, norm):
    """Against a count that shares no code: one layer against LoRA, forward and backward; the second is lost by 0.1 %."""
    rows = records.result(f"h100/{file}")["rows"]
    times = [x["ms"]["fdora"] / x["ms"]["peft_lora"] for x in rows if (x["mode"], x["norm"]) == ("fwd_bwd", norm)]
    lost = f"{sum(each > 1 for each in times)} of {len(times)} | {max(times):.2f}"
    assert f"| h100/{file} | fwd_bwd, norm {norm}, ms: fdora | PEFT LoRA | {lost} |" in report.losses()
    assert report.document().index("Where fdora loses") < 200


def test_a_mark_at_the_start_of_a_line_stands_alone():
    """A line that begins with a comment is no Markdown: nothing on it would be rendered. And lines are not endless."""
    marks = [line.strip() for line in README.splitlines() if line.lstrip().startswith("<!--")]
    assert marks and all(re.fullmatch(r"<!-- /?\w+ -->", mark) for mark in marks)
    assert max(map(len, re.sub(r"^\|.*", "", README, flags=re.M).splitlines())) <= 128


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """The committed results without models and convergence, where a test may put its own."""
    shutil.copytree(records.RESULTS, tmp_path / "results", ignore=shutil.ignore_patterns("model.*", "converge.*"))
    monkeypatch.setattr(records, "RESULTS", tmp_path / "results")
    return tmp_path / "results"


def test_lines_are_the_measurements():
    """A figure has a point for each row of a sweep, and no other."""
    from matplotlib import pyplot

    from bench import figures

    name = "h200/model_qwen3-8b_sweep_S"
    picture, axes = pyplot.subplots()
    figures.sweep(axes, (name, "ms"))
    lines = {(line.get_linestyle(), line.get_color()): line.get_xydata().tolist() for line in axes.lines}
    pyplot.close(picture)
    rows = records.result(name)["rows"]
    for row in rows:
        lines["--" if row["mode"] == "inference" else "-", figures.COLOURS[row["way"]]].remove([row["seq"], row["ms"]])
    assert rows and not any(lines.values())


def test_curves_are_means_over_the_seeds():
    from bench import figures

    seeds = [records.result(f"h200/converge_muon_s{seed}")["rows"][0]["loss"] for seed in range(3)]
    panels = {(label.split(",")[0], what): curves for label, what, _, curves in figures.loss_panels() if "H200" in label}
    assert panels["muon", "loss"]["peft"][1] == pytest.approx(sum(loss["peft"][1] for loss in seeds) / 3)
    apart = [abs(a - b) for loss in seeds for a, b in zip(loss["fdora"][:5], loss["peft"][:5], strict=True)]
    assert panels["muon", "difference"]["fdora - peft"][0] == pytest.approx(sum(apart) / 15)


def test_one_seed_in_two_files_is_an_error(elsewhere):
    there = elsewhere / "converge.jsonl"
    shutil.copy(ROOT / "bench/results/converge.jsonl", there)
    records.save(f"{there}:h200/converge_again", records.load(there, "h200/converge_s2"))
    with pytest.raises(SystemExit, match="measures a seed that another file"):
        report.document()


def test_the_suite_enters_the_page(tmp_path, monkeypatch):
    """Both backends, each in a line."""
    sizes = {"op": "linear", "M": 16, "K": 48, "N": 32, "r": 4, "norm": "given", "mode": "fwd", "dtype": "bfloat16"}
    rows = [
        sizes | {"adapter": adapter, "backend": backend, "ms": ms, "wall_ms": 2 * ms} | ({} if ms > 4 else {"of_roof": 0.5})
        for adapter, backend, ms in (("bfloat16", "triton", 1.5), ("bfloat16", "eager", 4.25), ("float32", "triton", 7.125))
    ]
    shutil.copytree(records.RESULTS, tmp_path / "results", ignore=shutil.ignore_patterns("suite*"))
    monkeypatch.setattr(records, "RESULTS", tmp_path / "results")
    assert "cold cache" not in report.document()
    result = {"about": {"commit": "abc"}, "rows": rows, "problem": "cut off"}
    records.save(f"{tmp_path}/results/suite.jsonl:h100/suite", result)
    page = report.document()
    for row in rows:
        assert f"\n| {' | '.join(map(str, row.values()))} |" in page, row
    assert re.search(r"^\| h100/suite \|.*\| abc, cut off \|$", page, re.M)


def test_a_mark_that_is_missing_is_an_error():
    with pytest.raises(SystemExit, match="readme marks"):
        report.written("readme", README.replace("<!-- /losses -->", ""))


def test_figures_are_drawn(tmp_path):
    from bench import figures

    figures.draw(tmp_path / "benchmarks")
    committed = report.FIGURE_FOLDER
    shown = re.findall(r"docs/benchmarks/(\w+\.png)\)", report.PAGE.read_text())
    assert (
        sorted(shown)
        == sorted(p.name for p in committed.iterdir())
        == sorted(p.name for p in (tmp_path / "benchmarks").iterdir())
    )
    assert all(1000 < path.stat().st_size < 300_000 for path in committed.iterdir())
