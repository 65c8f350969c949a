"""Report.explain: the plans of each kind of layer of a PEFT model, and their sum."""

import re

import pytest
import torch

pytest.importorskip("peft", reason="needs PEFT; `make test` installs it")

from peft import LoraConfig, get_peft_model

from fdora import FdoraError
from fdora.functional import dora_linear, explain
from fdora.integrations.peft import report, use_fdora


def model(dtype=torch.bfloat16, **options):
    layers = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 48, bias=False), torch.nn.Embedding(10, 64)
    base = torch.nn.Sequential(*layers).to(dtype)
    return get_peft_model(base, LoraConfig(r=8, target_modules=["0", "1", "2", "3"], use_dora=True, **options))


def layer(N, K, bias, r=8, tokens=512, adapter=torch.float32, dtype=torch.bfloat16, **options):
    def bare(dtype, *shape):
        return torch.empty(shape, dtype=dtype, device="meta")

    x, trained = bare(dtype, tokens, K), [bare(adapter, *s).requires_grad_() for s in ((r, K), (N, r), (N,))]
    b = bare(dtype, N) if bias else None
    return explain(dora_linear, x.requires_grad_(), bare(dtype, N, K), *trained, s=1.0, bias=b, gpu="h200", **options)


def total(text):
    line = text.splitlines()[-1]
    return [float(n) for n in re.findall(r"[\d.]+", line)]


def test_each_kind_once_and_their_sum():
    pytest.importorskip("triton", reason="plans need Triton; `make test` installs it")
    adapted = use_fdora(model())
    found, adapter = report(adapted), adapted.base_model.model[0].lora_A["default"].weight.dtype
    text = found.explain(tokens=512, gpu="h200")
    assert re.findall(r"^(\d+) x (\d+x\d+), r = 8: (\S+)", text, re.M) == [
        ("2", "64x64", "base_model.model.0"),
        ("1", "48x64", "base_model.model.2"),
    ]
    assert "Left out: 1 embeddings" in text and text.count("dora_linear backward: ") == 2
    wide, narrow = layer(64, 64, True, adapter=adapter), layer(48, 64, False, adapter=adapter)
    assert str(wide) in text and str(narrow) in text
    flops, moved, seconds, new = (2 * getattr(wide, k) + getattr(narrow, k) for k in ("flops", "bytes", "seconds", "new_bytes"))
    outputs = 2 * 512 * 48  # a bias keeps the value before g instead of y
    want = [3, flops / 1e9, moved / 2**20, 1e3 * seconds, new / 2**20, outputs / 2**20]
    assert total(text) == pytest.approx(want, abs=6e-3) and flops > 0


def test_layers_that_peft_runs_are_left_out():
    """A half-precision A on a float32 base: no function of ours takes it."""
    pytest.importorskip("triton", reason="plans need Triton; `make test` installs it")
    m = use_fdora(model())
    m.base_model.model[2].lora_A["default"].half()
    text = report(m).explain(tokens=512, gpu="h200")
    assert "2 x 64x64" in text and "48x64" not in text and "Left out: 2 " in text


def test_no_sum_of_what_has_no_plan():
    text = report(use_fdora(model(torch.float64))).explain(tokens=512, gpu="h200")
    assert "Plain torch runs: it has no plan." in text and "all " not in text


def test_what_is_trained_and_what_is_dropped_counts():
    pytest.importorskip("triton", reason="plans need Triton; `make test` installs it")
    m = use_fdora(model(lora_dropout=0.1)).train()
    dropped = report(m).explain(tokens=512, gpu="h200")
    assert "drop_kernel" in dropped and "drop_kernel" not in report(m.eval()).explain(tokens=512, gpu="h200")
    frozen = report(m.requires_grad_(False)).explain(tokens=512, gpu="h200")
    assert "backward: " not in frozen and "keeps 0.00 MiB" in frozen


def test_on_a_cpu_there_is_no_plan():
    text = report(use_fdora(model())).explain()
    assert text.count("plain torch has no plan. Pass gpu='h200'") == 2 and "all " not in text
    assert "backend stock (use_fdora was not called" in report(model()).explain()


def test_mistakes():
    found = report(use_fdora(model()))
    with pytest.raises(FdoraError, match="`tokens` must be at least 1, got 0"):
        found.explain(tokens=0)
    with pytest.raises(FdoraError, match="`gpu` must be one of h200"):
        found.explain(gpu="v100")
