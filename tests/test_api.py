"""The public surface, frozen: adding, dropping or renaming anything is a decision, made here."""

import importlib
import inspect
import re

import pytest

import fdora
import fdora.functional as F

CONV = (
    "(x, W, A, B, m, *, s, bias=None, norm=None, stride=1, padding=0, dilation=1, groups=1, padding_mode='zeros', "
    "transposed=False, output_padding=0, backend='auto')"
)
SIGNATURES = {
    "DoraLayer": "(W, A=None, B=None, m=None, s=None, bias=None, norm=None)",
    "DoraParams": "(A, B, m)",
    "Explanation": "(fn, backend, why, gpu, plans, kept, notes=())",
    "MergedWeight": "(W, error)",
    "NormState": "(c, fingerprint)",
    "NormTreeState": "(c, buffers, fingerprint)",
    "ShardNormState": "(c, fingerprint, part)",
    "dora_base_sqnorm": "(W, *, max_bytes=None, backend='auto')",
    "dora_compose": "(base, lora, g, *, s, bias=None, backend='auto')",
    "dora_conv1d": CONV,
    "dora_conv2d": CONV,
    "dora_conv3d": CONV,
    "dora_delta": "(base, lora, g, *, s, backend='auto')",
    "dora_embedding": "(ids, W, A, B, m, *, s, norm=None, norm_axis=0, padding_idx=None, max_norm=None, sparse=False, backend='auto')",
    "dora_experts": "(x, W, A, B, m, *, s, offsets=None, ids=None, gates=None, bias=None, norm=None, compute=None, "
    "grad_compute=None, backend='auto')",
    "dora_experts_mlp": "(x, gate_up, down, *, act='silu', offsets=None, ids=None, gates=None, compute=None, "
    "grad_compute=None, backend='auto')",
    "dora_init": "(W, r, *, dtype=None, generator=None)",
    "dora_init_tree": "(weights, r, *, dtype=None, generator=None)",
    "dora_linear": "(x, W, A, B, m, *, s, bias=None, gamma=None, residual=None, norm=None, dropout_p=0.0, "
    "dropout_mode='lora', seed=None, mask_origin=None, keep_inner=False, detach=True, compute=None, grad_compute=None, backend='auto')",
    "dora_linear_group": "(x, layers, *, dropout_p=0.0, dropout_mode='lora', seed=None, mask_origin=None, keep_inner=False, "
    "detach=True, compute=None, grad_compute=None, backend='auto')",
    "dora_linear_multi": "(x, W, A, B, m, *, s, offsets=None, ids=None, norm=None, bias=None, dropout_p=0.0, "
    "dropout_mode='lora', seed=None, ranks=None, compute=None, grad_compute=None, backend='auto')",
    "dora_merge": "(W, A, B, m, *, s, gamma=None, norm=None, backend='auto')",
    "dora_merge_quantized": "(W, A, B, m, *, s, norm=None, backend='auto')",
    "dora_merge_tree": "(weights, params, *, s, norm=None, backend='auto')",
    "dora_mlp": "(x, gate, up, down, *, act='silu', dropout_p=0.0, dropout_mode='lora', seed=None, mask_origin=None, "
    "keep_inner=False, detach=True, compute=None, grad_compute=None, backend='auto')",
    "dora_norm": "(W, A, B, *, s, norm_axis=1, base_sqnorm=None, detach=True, max_bytes=None, state=None, squared=False, "
    "group=None, backend='auto')",
    "dora_norm_state": "(W)",
    "dora_norm_tree": "(weights, params, *, s, state=None, gather=False, backend='auto')",
    "dora_norm_tree_state": "(weights)",
    "dora_scale": "(m, c)",
    "dora_stack": "(params)",
    "dora_unmerge": "(W, A, B, m, *, s, norm, backend='auto')",
    "dora_unstack": "(bank, ranks=None)",
    "explain": "(fn, /, *args, gpu=None, backward=True, **kwargs)",
    "select_backend": "(x, dtype=None, *, backend='auto')",
}
SECTIONS = ("Args:", "Returns:", "Raises:", "Memory:", "References:")


CONVERT = (
    *("Adapter", "Weights", "adapter_scale", "combine", "for_comfyui", "from_diffusers", "from_kohya", "from_peft"),
    *("from_torchtune", "kohya_names", "to_diffusers"),
    *("llama_from_torchtune", "llama_to_torchtune", "merge", "read", "to_kohya", "to_lora", "to_peft", "to_torchtune"),
    *("write", "write_scales"),
)
QUANT = {
    "Affine": "(block)",
    "Codes8": "(code, scale, block, unit, transposed=False)",
    "Gptq": "(bits, group, plus)",
    "Hqq": "(bits, axis, group, compute)",
    "Kind": "(name, dequantize, tensors, by_rows)",
    "Lut4": "(table, hi_first, group, scales, layout)",
    "Opaque": "(f)",
    "QuantSpec": "(kind, shape, dtype, facts, count)",
    "QuantWeight": "(kind, tensors, shape, dtype, facts)",
    "TorchaoNf4": "(group, outer)",
    "from_awq": "(qweight, qzeros, scales, group=None, *, dtype=None)",
    "cut": "(W, *, rows=None, columns=None)",
    "from_bnb": "(weight, quant_state=None)",
    "from_bnb_int8": "(weight, scb=None, *, dtype=torch.float16)",
    "from_mxfp8": "(weight, scale, *, dtype=torch.bfloat16)",
    "from_fp8": "(weight, scale, block=None, *, dtype=torch.bfloat16)",
    "from_gptq": "(qweight, qzeros, scales, g_idx=None, *, bits=4, version=1, dtype=None)",
    "from_hqq": "(W_q, meta=None)",
    "from_int8": "(codes, scale, block='row', *, dtype=torch.bfloat16)",
    "from_mxfp4": "(codes, scales, *, dtype=torch.bfloat16)",
    "from_nvfp4": "(codes, scales, global_scale=None, divide=False, *, dtype=torch.bfloat16)",
    "from_torchao": "(tensor)",
    "opaque": "(f, shape, dtype, device, tensors=())",
    "quantize": "(W, kind, *, group=None, nested=False, block='row', dtype=None)",
    "register_kind": "(name, *, dequantize, tensors=(), by_rows=True)",
    "with_transpose": "(W)",
}


SCHEDULE = {
    "Action": "(stage, microbatch, backward)",
    "Packed": "(adapters, microbatches, bound, remainder, method, why)",
    "Packing": "(microbatches, bound, remainder, method, why)",
    "Sample": "(adapter, batch, number, length)",
    "Schedule": "(spec, groups, microbatches, packings)",
    "Spec": "(capacity, depth=1, multiple=1, seconds=10.0, workers=1)",
    "Task": "(device, action, start, end)",
    "Timeline": "(devices, microbatches, tasks, last=0.0)",
    "depth_of": "(orders)",
    "draw": "(timeline, path, *, names=(), title='')",
    "from_json": "(text)",
    "insert_noops": "(microbatches, spec)",
    "interleaved": "(devices, microbatches, chunks)",
    "merge": "(microbatches, spec)",
    "one_f_one_b": "(stages, microbatches)",
    "optimizer_steps": "(microbatches)",
    "pack": "(samples, spec)",
    "plan_groups": "(lengths, spec)",
    "schedule": "(lengths, spec, *, groups=None)",
    "segment_ends": "(microbatch, adapters, *, multiple=1)",
    "simulate": "(schedule, stages, *, chunks=1, forward=tokens, backward=None, transfer=0.0, last=0.0)",
    "to_json": "(schedule)",
    "verify": "(microbatches, lengths, spec)",
}


PLAN = {
    "Adapter": "(name, r)",
    "Card": "(name, bytes, profile, measured)",
    "Layout": "(kind, gpus, fuse, checkpointing, tokens, memory, capacity, fits, seconds, tokens_per_second, bubble, stages)",
    "Memory": "(linears, embeddings, adapters, optimizer, gradients, norms, workspace, activations, temporary, at)",
    "Model": "(kind, layers, hidden, inner, heads, kv_heads, head_dim, vocab, tied, window, sliding, attention_bias, mlp_bias)",
    "Part": "(layers, first=True, last=True, start=0)",
    "Plan": "(model, setup, card, gpus, tokens, layouts)",
    "Profile": "(flops, bytes, start, attention, attention_backward, norm16, norm32, host, layer, gather=0.0, send=0.0)",
    "Time": "(forward, backward, host, update)",
    "capacity": "(model, setup, budget, part=None, in_flight=1)",
    "card": "(gpu, file=None)",
    "memory": "(model, setup, tokens, part=None, in_flight=1)",
    "plan": "(model, setup, *, gpu='h200', gpus=1, tokens=None)",
    "read_model": "(source, layers=None)",
    "times": "(model, setup, tokens, profile, part=None)",
}


TRAIN = {
    "Job": "(name, lr, clip=None, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0)",
    "Links": "(ranks, rank, down, up, sums)",
    "Model": "(forward, keep=None)",
    "Ran": "(state, losses, tasks)",
    "Stage": "(forward, names, keep=None)",
    "State": "(params, kept, grads, mean, square, steps, position)",
    "Wire": "(shape, dtype=torch.float32, device='cpu')",
    "Work": "(samples, weights, due)",
    "connect": "(ranks=None)",
    "gather_state": "(state, links)",
    "init_state": "(params, jobs, keep=None)",
    "load": "(folder, like, jobs, keep=None)",
    "run_pipeline": "(state, works, data, *, stages, wire, jobs, links, clock=None)",
    "read_notes": "(folder)",
    "save": "(folder, state, jobs, notes=None)",
    "select_state": "(state, names)",
    "replica_step": "(state, works, data, *, model, jobs, group=None, donate=False)",
    "train_step": "(state, work, data, *, model, jobs, donate=False)",
    "works_of": "(schedule)",
}


CAUSAL = {
    "Step": "(name, step, steps, loss, rate, evaluation=None)",
    "TrainJob": "(job, data, batch=8, epochs=1, steps=None, seed=None, evaluation=None, evaluate=0)",
    "Trained": "(losses, evaluations, diverged)",
    "train": "(model, jobs, *, capacity=None, folder=None, every=100, seed=0, on_step=None, join=None, stages=1, "
    "dropout_mode='peft', clock=None)",
}


# Module, its public names and signatures; a submodule and a function may share a name.
MODULES = {
    "functional": SIGNATURES,
    "quant": {"SAFE": None, "TABLES": None} | QUANT,
    "convert": dict.fromkeys(CONVERT),
    "jobs.schedule": SCHEDULE,
    "jobs.plan": {"Setup": None} | PLAN,
    "jobs.loop": TRAIN,
    "jobs.causal": CAUSAL,
}
DESCRIBED = {
    "functional": "dora_",
    "quant": "",
    "jobs.causal": "",
}  # whose functions, by how their names begin, have every part in their docstring
EVERY = [(module, name) for module, names in MODULES.items() for name in names]


def public(module):
    return importlib.import_module(f"fdora.{module}")


def test_names():
    for module, names in MODULES.items():
        there = {n for n, v in vars(public(module)).items() if not n.startswith("_") and not inspect.ismodule(v)}
        assert there == set(public(module).__all__) == set(names), module
    assert sorted(fdora.__all__) == ["FdoraError", "__version__", "backend"]
    assert all(getattr(fdora, name) is getattr(F, name) for name in F.__all__)
    with pytest.raises(AttributeError, match="module 'fdora' has no attribute 'dora_all'"):
        fdora.dora_all
    assert all(getattr(public("jobs"), name) is getattr(public("jobs.causal"), name) for name in ("train", "TrainJob"))
    with pytest.raises(AttributeError, match=r"module 'fdora\.jobs' has no attribute 'trains'"):
        public("jobs").trains


@pytest.mark.parametrize(("module", "name"), [(module, name) for module, name in EVERY if MODULES[module][name]])
def test_signatures(module, name):
    signature = inspect.signature(getattr(public(module), name))
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in signature.parameters.values()]
    # a default that is a function has an address in its repr
    text = re.sub(r"(\w+)=<function (\w+) at \w+>", r"\1=\2", str(inspect.Signature(bare)))
    assert text == MODULES[module][name]


@pytest.mark.parametrize(
    ("module", "name"), [(m, n) for m, n in EVERY if n.islower() and m in DESCRIBED and n.startswith(DESCRIBED[m])]
)
def test_docstrings_have_every_part_in_order(module, name):
    doc, signature = (of(getattr(public(module), name)) for of in (inspect.getdoc, inspect.signature))
    assert "``" in doc.splitlines()[0] or "``" in doc.split("\n\n")[1], "no formula at the top"
    at = [doc.find(section) for section in SECTIONS]
    assert -1 not in at and at == sorted(at), dict(zip(SECTIONS, at, strict=True))
    for parameter in signature.parameters:
        assert f"{parameter}:" in doc or f"{parameter}," in doc or f", {parameter}" in doc, f"{parameter} is not described"


@pytest.mark.parametrize(("old", "new"), [("schedule", "schedule"), ("plan", "plan"), ("train", "loop")])
def test_what_moved_says_where_it_is(old, new):
    for module in (f"fdora.{old}", f"fdora.{old}.records"):
        with pytest.raises(ImportError, match=rf"^fdora\.{old} is now fdora\.jobs\.{new}: import that"):
            importlib.import_module(module)


def test_typed():
    from pathlib import Path

    assert (Path(fdora.__file__).parent / "py.typed").exists()
