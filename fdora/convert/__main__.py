"""Combine adapters, make plain LoRA of them, or write them in another format.

MODEL is a safetensors file or a folder of them; an adapter is a folder (PEFT) or one file (kohya, ComfyUI, diffusers).
Adapters of torchtune depend on the model: use `fdora.convert` from Python.

    fdora convert combine MODEL OUT one=0.7 other=0.3 [--r 16] [--max-error 0.1]
    fdora convert lora    MODEL OUT ADAPTER --r 64 [--max-error 0.1]
    fdora convert scales  MODEL OUT.safetensors ADAPTER
    fdora convert keys    MODEL OUT ADAPTER --of peft --to kohya [--prefix lora_unet]
    fdora convert keys    MODEL OUT ADAPTER --of diffusers --to comfyui

one=0.7 is the adapter `one` with weight 0.7, unless a file or folder is called "one=0.7"; without a number the weight is 1.

Exit status: 0; 2 for a mistake in arguments or files, with one sentence on stderr; nothing is written then.
"""

from __future__ import annotations

import math
from argparse import ArgumentParser, ArgumentTypeError, Namespace
from contextlib import suppress
from pathlib import Path
from typing import Any

from fdora._check import FdoraError, fail
from fdora._command import mistakes, parser_of, progress
from fdora.convert.adapter import Adapter, for_comfyui
from fdora.convert.files import Weights, check_folder, read, write, write_scales
from fdora.convert.keys import kohya_names
from fdora.convert.lowrank import combine, to_lora

FORMATS = ("peft", "kohya", "diffusers")


def finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ArgumentTypeError(f"{text} is not a finite number")
    return value


OPTIONS: dict[str, dict[str, Any]] = {
    "--r": {"type": int, "help": "rank of the result"},
    "--max-error": {"type": finite, "help": "largest relative error of a weight's change to accept"},
    "--of": {"default": "peft", "choices": FORMATS, "help": "format of the adapters (default: %(default)s)"},
    "--to": {"default": "peft", "choices": (*FORMATS, "comfyui"), "help": "format of the result (default: %(default)s)"},
    "--prefix": {"default": "lora_unet", "help": "what names in kohya files begin with (default: %(default)s)"},
    "--component": {"default": "unet", "help": "what diffusers calls the model: unet or transformer (default: %(default)s)"},
    "--overwrite": {"action": "store_true", "help": "replace the adapter in an existing folder"},
}
COMMANDS = {
    "combine": ("weighted sum of adapters", [*OPTIONS]),
    "lora": ("the nearest plain LoRA", [*OPTIONS]),
    "scales": ("g of every layer, for a server", ("--of", "--prefix")),
    "keys": ("the same adapter in another format", ("--of", "--to", "--prefix", "--component", "--overwrite")),
}


def parser() -> ArgumentParser:
    top = parser_of("convert", __doc__)
    commands = top.add_subparsers(dest="command", required=True)
    for name, (said, options) in COMMANDS.items():
        command = commands.add_parser(name, help=said, description=said)
        command.add_argument("model", help="safetensors file of the base model, or a folder of them")
        command.add_argument("out", help="folder or file to write")
        if name == "combine":
            command.add_argument("adapters", nargs="+", help="folder, file, or either with =weight")
        else:
            command.add_argument("adapters", nargs=1, metavar="adapter", help="folder or file")
        for option in options:
            command.add_argument(option, **OPTIONS[option], required=(name, option) == ("lora", "--r"))
    return top


def weighted(given: str) -> tuple[str, float]:
    """An argument of combine: ``path=weight``, or a path alone."""
    path, _, tail = given.rpartition("=")
    try:
        weight = float(tail)
    except ValueError:
        return given, 1.0
    with suppress(OSError, ValueError):  # such a name is none: to read it says so
        if not path or Path(given).exists():
            return given, 1.0
    if not math.isfinite(weight):
        raise fail("convert", given, "an adapter with a finite weight", tail, "Give it a number, as in folder=0.5.")
    return path, weight


def save(a: Namespace, weights: Weights, adapters: dict[str, Adapter], names: dict[str, str] | None) -> None:
    if a.to == "comfyui":
        adapters = {layer: for_comfyui(weights[layer], p) for layer, p in adapters.items()}
    write(a.out, adapters, "kohya" if a.to == "comfyui" else a.to, names=names, prefix=a.component, overwrite=a.overwrite)


def convert(a: Namespace) -> None:
    sources = [weighted(given) for given in a.adapters] if a.command == "combine" else [(a.adapters[0], 1.0)]
    if getattr(a, "to", None) == "peft":
        check_folder(a.out, a.overwrite)  # before the work
    weights = Weights(a.model)
    names = kohya_names(weights, a.prefix) if {"kohya", "comfyui"} & {a.of, getattr(a, "to", None)} else None
    loaded = [(read(path, a.of, names=names), weight) for path, weight in sources]
    first = loaded[0][0]
    if a.command == "scales":
        return write_scales(a.out, weights, first)
    if a.command == "keys":
        return save(a, weights, first, names)
    out: dict[str, Adapter] = {}
    errors: dict[str, float] = {}
    for layer in progress(list(dict.fromkeys(layer for adapters, _ in loaded for layer in adapters)), "layers"):
        here, numbers = zip(*((adapters[layer], weight) for adapters, weight in loaded if layer in adapters), strict=True)
        try:
            if a.command == "combine":
                out[layer], errors[layer] = combine(weights[layer], here, numbers, r=a.r, max_error=a.max_error)
            else:
                out[layer], errors[layer] = to_lora(weights[layer], here[0], r=a.r, max_error=a.max_error)
        except FdoraError as error:
            raise FdoraError(f"{layer}: {error}") from error
    save(a, weights, out, names)
    worst = max(errors, key=errors.__getitem__)
    print(f"{len(out)} layers; largest error of a weight's change: {errors[worst]:.3g}, {worst}")


def main(argv: list[str] | None = None) -> int:
    top = parser()
    try:
        with mistakes(top):
            convert(top.parse_args(argv))
        return 0
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != "safetensors":
            raise
        top.exit(2, 'fdora.convert: files need safetensors. In a clone of fdora: pip install ".[convert]".\n')


if __name__ == "__main__":
    raise SystemExit(main())
