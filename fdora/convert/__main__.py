"""Conversions from the command line. MODEL is a safetensors file or a folder of them; an adapter is a folder (PEFT) or one file
(kohya). torchtune's names and rows depend on the model: see ``fdora.convert.llama``.

    python -m fdora.convert combine MODEL OUT one=0.7 other=0.3 [--r 16] [--max-error 0.1]
    python -m fdora.convert lora    MODEL OUT ADAPTER --r 64 [--max-error 0.1]
    python -m fdora.convert scales  MODEL OUT.safetensors ADAPTER
    python -m fdora.convert keys    MODEL OUT ADAPTER --of peft --to kohya [--prefix lora_unet]
"""

from __future__ import annotations

from argparse import ArgumentParser, RawDescriptionHelpFormatter

from fdora._check import FdoraError
from fdora.convert.files import Weights, read, write, write_scales
from fdora.convert.keys import kohya_names
from fdora.convert.lowrank import combine, to_lora


def main(argv: list[str] | None = None) -> None:
    parser = ArgumentParser("python -m fdora.convert", description=__doc__, formatter_class=RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=("combine", "lora", "scales", "keys"))
    parser.add_argument("model")
    parser.add_argument("out")
    parser.add_argument("adapters", nargs="+", help="folder, file, or folder=weight")
    parser.add_argument("--r", type=int)
    parser.add_argument("--max-error", type=float)
    parser.add_argument("--of", default="peft", choices=("peft", "kohya"))
    parser.add_argument("--to", default="peft", choices=("peft", "kohya"))
    parser.add_argument("--prefix", default="lora_unet")
    a = parser.parse_args(argv)
    if a.command == "lora" and a.r is None:
        parser.error("lora needs --r")
    if a.command != "combine" and len(a.adapters) > 1:
        parser.error(f"{a.command} takes one adapter")

    weights = Weights(a.model)
    names = kohya_names(weights, a.prefix) if "kohya" in (a.of, a.to) else None
    sources = [(path, float(w or 1)) for path, _, w in (given.partition("=") for given in a.adapters)]
    loaded = [(read(path, a.of, names=names), w) for path, w in sources]
    if a.command == "scales":
        return write_scales(a.out, weights, loaded[0][0])
    out, errors = {}, {}
    for layer in dict.fromkeys(layer for adapters, _ in loaded for layer in adapters):
        here = [(adapters[layer], w) for adapters, w in loaded if layer in adapters]
        if a.command == "keys":
            out[layer] = here[0][0]
            continue
        try:
            if a.command == "combine":
                out[layer], errors[layer] = combine(weights[layer], *zip(*here, strict=True), r=a.r, max_error=a.max_error)
            else:
                out[layer], errors[layer] = to_lora(weights[layer], here[0][0], r=a.r, max_error=a.max_error)
        except FdoraError as error:
            raise FdoraError(f"{layer}: {error}") from error
    write(a.out, out, a.to, names=names)
    if errors:
        worst = max(errors, key=errors.__getitem__)
        print(f"{len(out)} layers; largest error of a weight's change: {errors[worst]:.3g}, {worst}")


if __name__ == "__main__":
    main()
