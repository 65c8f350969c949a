"""The public surface, frozen: adding, dropping or renaming anything is a decision, made here."""

import inspect

import pytest

import fdora
import fdora.functional as F

SIGNATURES = {
    "DoraLayer": "(W, A=None, B=None, m=None, s=None, bias=None, norm=None)",
    "DoraParams": "(A, B, m)",
    "Explanation": "(fn, backend, why, gpu, plans, kept, notes=())",
    "NormState": "(c, fingerprint)",
    "NormTreeState": "(c, buffers, fingerprint)",
    "dora_base_sqnorm": "(W, *, max_bytes=None, backend='auto')",
    "dora_compose": "(base, lora, g, *, s, bias=None, backend='auto')",
    "dora_delta": "(base, lora, g, *, s, backend='auto')",
    "dora_init": "(W, r, *, dtype=None, generator=None)",
    "dora_init_tree": "(weights, r, *, dtype=None, generator=None)",
    "dora_linear": "(x, W, A, B, m, *, s, bias=None, norm=None, dropout_p=0.0, dropout_mode='lora', seed=None, "
    "keep_inner=False, backend='auto')",
    "dora_linear_group": "(x, layers, *, dropout_p=0.0, dropout_mode='lora', seed=None, keep_inner=False, backend='auto')",
    "dora_merge": "(W, A, B, m, *, s, norm=None, backend='auto')",
    "dora_merge_tree": "(weights, params, *, s, norm=None, backend='auto')",
    "dora_mlp": "(x, gate, up, down, *, act='silu', dropout_p=0.0, dropout_mode='lora', seed=None, keep_inner=False, "
    "backend='auto')",
    "dora_norm": "(W, A, B, *, s, norm_axis=1, base_sqnorm=None, detach=True, max_bytes=None, state=None, squared=False, "
    "backend='auto')",
    "dora_norm_state": "(W)",
    "dora_norm_tree": "(weights, params, *, s, state=None, backend='auto')",
    "dora_norm_tree_state": "(weights)",
    "dora_scale": "(m, c)",
    "dora_unmerge": "(W, A, B, m, *, s, norm, backend='auto')",
    "explain": "(fn, /, *args, gpu=None, backward=True, **kwargs)",
    "select_backend": "(x, dtype=None, *, backend='auto')",
}
SECTIONS = ("Args:", "Returns:", "Raises:", "Memory:", "References:")


def test_names():
    assert sorted(F.__all__) == sorted(SIGNATURES)
    public = {n for n, v in vars(F).items() if not n.startswith("_") and not inspect.ismodule(v)}
    assert public == set(F.__all__)
    assert sorted(fdora.__all__) == ["FdoraError", "__version__", "backend"]


@pytest.mark.parametrize("name", SIGNATURES)
def test_signatures(name):
    signature = inspect.signature(getattr(F, name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    assert str(inspect.Signature(bare)) == SIGNATURES[name]


@pytest.mark.parametrize("name", [n for n in SIGNATURES if n.startswith("dora_")])
def test_docstrings_have_every_part_in_order(name):
    doc = inspect.getdoc(getattr(F, name))
    assert "``" in doc.splitlines()[0] or "``" in doc.split("\n\n")[1], "no formula at the top"
    at = [doc.find(section) for section in SECTIONS]
    assert -1 not in at and at == sorted(at), dict(zip(SECTIONS, at, strict=True))
    for parameter in inspect.signature(getattr(F, name)).parameters:
        assert f"{parameter}:" in doc or f"{parameter}," in doc or f", {parameter}" in doc, f"{parameter} is not described"


def test_names_of_conversion():
    import fdora.convert as convert

    public = {n for n, v in vars(convert).items() if not n.startswith("_") and not inspect.ismodule(v)}
    assert public == set(convert.__all__) == {
        "Adapter", "Weights", "adapter_scale", "combine", "from_kohya", "from_peft", "from_torchtune", "kohya_names",
        "llama_from_torchtune", "llama_to_torchtune", "merge", "read", "to_kohya", "to_lora", "to_peft", "to_torchtune", "write",
        "write_scales",
    }  # fmt: skip


def test_typed():
    from pathlib import Path

    assert (Path(fdora.__file__).parent / "py.typed").exists()
