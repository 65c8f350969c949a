"""fdora on the command line; `python -m fdora` is the same. `fdora COMMAND --help` says what a command takes.

    fdora doctor      what runs here and why; put it into a bug report
    fdora explain     what each kind of layer of a model would cost, from its shapes alone
    fdora plan        memory, time and layout of a training, or what a file of jobs will do
    fdora schedule    microbatches of many adapters, from lengths alone
    fdora train       many adapters of one model, from a file of jobs
    fdora tune        time the tiles on this GPU, and choose by that; never needed
    fdora convert     adapters combined, as LoRA, and in other formats

Exit status: 0; 1 where the answer is no (doctor found a problem, no plan fits); 2 for a mistake in arguments or files.
"""

from __future__ import annotations

import sys
from importlib import import_module

from fdora import __version__
from fdora._command import parser_of

COMMANDS = {
    "doctor": "fdora.doctor",
    "explain": "fdora.explain_model",
    "plan": "fdora.jobs.plan.__main__",
    "schedule": "fdora.jobs.schedule.__main__",
    "train": "fdora.jobs.causal.__main__",
    "tune": "fdora.tune",
    "convert": "fdora.convert.__main__",
}


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status of the command, which is imported when it is asked for."""
    first, *rest = (sys.argv[1:] if argv is None else argv) or [""]
    parser = parser_of("", __doc__)
    parser.add_argument("--version", action="version", version=__version__)
    parser.add_argument("command", choices=COMMANDS)
    if not first:
        parser.print_help()
        return 0
    command = parser.parse_args([first]).command
    if command == "plan" and any(each.endswith(".toml") for each in rest):  # a file of jobs is read by who trains them
        command, rest = "train", ["--plan", *rest]
    return import_module(COMMANDS[command]).main(rest)


if __name__ == "__main__":
    raise SystemExit(main())
