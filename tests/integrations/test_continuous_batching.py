"""transformers' generate_batch on PEFT models with DoRA, through fdora: prompts of different lengths in one batch, as each alone."""

import pytest
import torch

pytest.importorskip("peft", reason="needs PEFT; `make test` installs it")
pytest.importorskip("transformers.generation.continuous_batching", reason="needs transformers 5; `make test` installs it")
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig

from fdora.integrations.peft import report, use_fdora
from tests.integrations import tiny
from tests.integrations.models import perturb

HOW = GenerationConfig(max_new_tokens=5, do_sample=False, eos_token_id=259, pad_token_id=0)
PROMPTS = [[3, 4, 5], [7, 8, 9, 10, 11, 12], [20]]


def generated(model):
    sizes = ContinuousBatchingConfig(num_blocks=4, max_batch_tokens=32)
    done = model.generate_batch(PROMPTS, generation_config=HOW, continuous_batching_config=sizes)
    by_prompt = {tuple(each.prompt_ids): each.generated_tokens for each in done.values()}
    return [by_prompt[tuple(prompt)] for prompt in PROMPTS]


def alone(model):
    return [model.generate(input_ids=torch.tensor([p]), generation_config=HOW)[0, len(p) :].tolist() for p in PROMPTS]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Adapters "law" and "med" beside the model that they are of."""
    at = tmp_path_factory.mktemp("served")
    tiny.checkpoint(at / "model")
    for name, options in (("law", {}), ("med", {"r": 2, "target_modules": ["q_proj", "down_proj"]})):
        base = AutoModelForCausalLM.from_pretrained(at / "model")
        model = perturb(get_peft_model(base, LoraConfig(**(tiny.LORA | options), use_dora=True)), 0.3)
        model.save_pretrained(at / name)
    return at


def test_one_adapter_after_the_other(folder):
    base = AutoModelForCausalLM.from_pretrained(folder / "model")
    model = PeftModel.from_pretrained(base, folder / "law", adapter_name="law")
    model.load_adapter(folder / "med", adapter_name="med")
    stock = {}
    for name in ("law", "med"):
        model.set_adapter(name)
        stock[name] = alone(model)
    use_fdora(model).eval()
    for name in ("law", "med"):
        model.set_adapter(name)
        assert generated(model) == stock[name]
    assert stock["law"] != stock["med"]
    assert all(row.fused and not row.fallbacks for row in report(model))
