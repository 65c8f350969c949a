"""What commands have in common: where they run, how often, for how long, and where the result goes."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch


def command(
    doc: str, device: str | None = "cpu", runs: int | None = None, seconds: float | None = None, kernels: bool = False
) -> argparse.ArgumentParser:
    """A parser of --json, --commit, and those of --device, --runs and --seconds that have a default here. ``device="cuda"``:
    nothing else is allowed. ``kernels``: on a CPU Triton must interpret them. --help begins with the first paragraph of
    ``doc``."""
    parser = argparse.ArgumentParser(description=doc.split("\n\n")[0])
    if device is not None:
        parser.add_argument(
            "--device",
            default=device,
            type=interpreted if kernels else present,
            choices=("cuda",) if device == "cuda" else None,
        )
    if runs is not None:
        parser.add_argument("--runs", type=int, default=runs)
    if seconds is not None:
        parser.add_argument("--seconds", type=float, default=seconds, help="start nothing after this time")
    parser.add_argument("--json", type=Path, help="write the result to this file as well")
    parser.add_argument("--commit", help="what is measured, recorded in the file")
    return parser


def present(device: str) -> str:
    """Itself, where this machine has it; else the command ends with a sentence, not in the middle of a measurement."""
    if device.startswith("cuda") and not torch.cuda.is_available():
        raise argparse.ArgumentTypeError(f"{device} wants a GPU, and torch {torch.__version__} finds none here")
    return device


def interpreted(device: str) -> str:
    """The same for a command that starts kernels itself."""
    if device == "cpu" and os.environ.get("TRITON_INTERPRET") != "1":
        raise argparse.ArgumentTypeError("cpu wants TRITON_INTERPRET=1: only Triton's interpreter runs kernels there")
    return present(device)
