"""fdora on the command line.

python -m fdora doctor                                        what runs here and why; put it into a bug report
python -m fdora explain --model config.json [--r 16]          what each kind of layer would cost, from its shapes alone
python -m fdora explain --model ADAPTER_FOLDER [--gpu a100]
"""

from __future__ import annotations

from fdora._command import mistakes, parser_of
from fdora.explain_model import GPUS, explain


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 for a problem that doctor found, 2 for a mistake in the command line or its files."""
    parser = parser_of("fdora", __doc__)
    commands = parser.add_subparsers(dest="command")
    commands.add_parser("doctor", help="what is installed, what runs and why, and a check against float64")
    explaining = commands.add_parser("explain", help="predicted time and memory of a model's layers")
    explaining.add_argument("--model", required=True, help="config.json of transformers, or the folder of a PEFT adapter")
    explaining.add_argument("--tokens", type=int, default=4096, help="of all sequences of a batch (default: %(default)s)")
    explaining.add_argument("--r", type=int, help="rank, for a config.json (default: 16); an adapter has its own")
    explaining.add_argument("--gpu", choices=GPUS, default="h200", help="whose published rates to use (default: %(default)s)")
    a = parser.parse_args(argv)
    with mistakes(parser):
        if a.command == "doctor":
            from fdora.doctor import main as doctor  # here, because it needs the functions and the help does not

            return doctor()
        if a.command == "explain":
            print(explain(a.model, tokens=a.tokens, r=a.r, gpu=a.gpu))
            return 0
    parser.print_help()
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
